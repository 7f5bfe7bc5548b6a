"""DTR's heuristics: which of the candidates costs least to lose. Each is a cost over a size and a staleness; the least is evicted.

    h_DTR    (c0 + sum of c0 over e*) / (m s)     h_local  c0 / (m s)     h_MSPS  (c0 + sum of c0 over what it needs) / m
    h_eq     h_DTR with e* by union-find          h_LRU    1 / s          h_size  1 / m        h_e*  |e*|        h_rand

e* of a storage: the evicted ops that have to run again before it can be computed, and those that cannot run again without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from random import Random

import numpy as np

from vramlab.rollout import Rollout

from .evicted import Evicted
from .groups import Groups

# A storage that was used this very moment counts as one tick old.
TICK_SECONDS = 1e-9


def staleness_seconds(candidates: np.ndarray, rollout: Rollout) -> np.ndarray:
    """s: time since the last access, above zero."""
    return np.maximum(rollout.clock_seconds - rollout.last_access_seconds[candidates], TICK_SECONDS)


class Heuristic(ABC):
    """Chooses a victim. One object for one step."""

    @abstractmethod
    def choose(self, candidates: np.ndarray, rollout: Rollout) -> int:
        """The candidate of least score, the lower id of equals. `candidates`: storage ids, ascending, at least one."""


class ByAge(Heuristic):
    """h_LRU."""

    def choose(self, candidates: np.ndarray, rollout: Rollout) -> int:
        return int(candidates[np.argmin(1 / staleness_seconds(candidates, rollout))])


class BySize(Heuristic):
    """h_size: the biggest."""

    def choose(self, candidates: np.ndarray, rollout: Rollout) -> int:
        return int(candidates[np.argmax(rollout.nbytes[candidates])])


class ByChance(Heuristic):
    """h_rand."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def choose(self, candidates: np.ndarray, rollout: Rollout) -> int:
        return int(self.random.choice(candidates.tolist()))


class ByCost(Heuristic):
    """A cost over a size and a staleness. The cost without any neighbour is a lower bound, so that few costs have to be found."""

    has_size = has_staleness = True

    def __init__(self, rollout: Rollout) -> None:
        self.own = np.array([op.seconds for op in rollout.tape.ops])  # per op: what counts without any neighbour, c0

    def choose(self, candidates: np.ndarray, rollout: Rollout) -> int:
        self.look(rollout)
        weight = self._weight(candidates, rollout)
        return self.least(candidates, weight, self.own[rollout.facts.there_from[candidates]] / weight)

    def _weight(self, candidates: np.ndarray, rollout: Rollout) -> np.ndarray:
        size = rollout.nbytes[candidates].astype(np.float64) if self.has_size else np.ones(len(candidates))
        return size * staleness_seconds(candidates, rollout) if self.has_staleness else size

    def look(self, rollout: Rollout) -> None:
        """Note what was evicted and recomputed since the last choice."""

    @abstractmethod
    def least(self, candidates: np.ndarray, weight: np.ndarray, bound: np.ndarray) -> int:
        """The candidate of least cost / weight; `bound` is that quotient without any neighbour."""


class Local(ByCost):
    """h_local: the producing op's own time."""

    def least(self, candidates: np.ndarray, weight: np.ndarray, bound: np.ndarray) -> int:
        return int(candidates[np.argmin(bound)])


class Regional(ByCost):
    """Costs over regions of evicted ops: what each of them adds to what the storage's own producer counts."""

    is_both_ways = True  # ops that wait for the storage count too, not only those that it waits for

    def __init__(self, rollout: Rollout) -> None:
        super().__init__(rollout)
        from . import regions

        self.regions, self.links, self.evicted = regions, regions.links_of(rollout.tape), Evicted(rollout)
        self.adds = self.own

    def look(self, rollout: Rollout) -> None:
        self.evicted.update(rollout)

    def least(self, candidates: np.ndarray, weight: np.ndarray, bound: np.ndarray) -> int:
        return int(self.regions.least(candidates, np.lexsort((candidates, bound)), bound, weight, *self._around()))

    def cost(self, storage: int) -> float:
        """What it costs to lose this storage."""
        return float(self.regions.cost(storage, np.inf, *self._around()))

    def _around(self) -> tuple:
        return self.own, self.adds, self.is_both_ways, self.links, self.evicted.is_absent, self.evicted.absent_outputs


class Exact(Regional):
    """h_DTR."""


class Msps(Regional):
    """h_MSPS: what has to run to have it again, per byte."""

    has_staleness = is_both_ways = False


class Count(Regional):
    """h_e*: how many evicted neighbours, whatever they cost."""

    has_size = has_staleness = False

    def __init__(self, rollout: Rollout) -> None:
        super().__init__(rollout)
        self.own, self.adds = np.zeros_like(self.own), np.ones_like(self.own)


class Equivalence(ByCost):
    """h_eq: the neighbourhood is the groups that its evicted neighbours belong to, spurious members included."""

    def __init__(self, rollout: Rollout) -> None:
        super().__init__(rollout)
        self.groups = Groups(rollout)

    def look(self, rollout: Rollout) -> None:
        self.groups.update(rollout)

    def least(self, candidates: np.ndarray, weight: np.ndarray, bound: np.ndarray) -> int:
        best = (float("inf"), -1)
        for k in np.lexsort((candidates, bound)).tolist():
            s = int(candidates[k])
            if best <= (bound[k], s):
                break
            best = min(best, (self.groups.cost(s) / weight[k], s))
        return best[1]


NAMES = ("dtr", "eq", "local", "lru", "size", "msps", "rand", "e-star")


def heuristic(name: str, rollout: Rollout, random: Random) -> Heuristic:
    """The heuristic of this name, fresh for one step."""
    if name == "rand":
        return ByChance(random)
    if name in ("lru", "size"):
        return ByAge() if name == "lru" else BySize()
    return {"dtr": Exact, "eq": Equivalence, "local": Local, "msps": Msps, "e-star": Count}[name](rollout)
