"""DTR's heuristics: which of the candidates costs least to lose. Each is a cost over a size and a staleness; the least is evicted.

    h_DTR    (c0 + sum of c0 over e*) / (m s)     h_local  c0 / (m s)     h_MSPS  (c0 + sum of c0 over what it needs) / m
    h_eq     h_DTR with e* by union-find          h_LRU    1 / s          h_size  1 / m        h_e*  |e*|        h_rand

e* of a storage: the evicted ops that have to run again before it can be computed, and those that cannot run again without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import chain
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

    def choose(self, candidates: np.ndarray, rollout: Rollout) -> int:
        self.look(rollout)
        weight = self._weight(candidates, rollout)
        bound = self.least_costs(candidates, rollout) / weight
        best = (float("inf"), -1)
        for k in np.lexsort((candidates, bound)):
            s = int(candidates[k])
            if best <= (bound[k], s):
                break
            best = min(best, (self.cost(s, best[0] * weight[k]) / weight[k], s))
        return best[1]

    def _weight(self, candidates: np.ndarray, rollout: Rollout) -> np.ndarray:
        size = rollout.nbytes[candidates].astype(np.float64) if self.has_size else np.ones(len(candidates))
        return size * staleness_seconds(candidates, rollout) if self.has_staleness else size

    def look(self, rollout: Rollout) -> None:
        """Note what was evicted and recomputed since the last choice."""

    def least_costs(self, candidates: np.ndarray, rollout: Rollout) -> np.ndarray:
        """Lower bounds of the costs: c0."""
        return np.array([rollout.tape.ops[rollout.tape.producer[s]].seconds for s in candidates.tolist()])

    @abstractmethod
    def cost(self, storage: int, limit: float) -> float:
        """What it costs to lose this storage; any number above the limit where it is above that."""


class Local(ByCost):
    """h_local: the producing op's own time."""

    def __init__(self, rollout: Rollout) -> None:
        self.ops, self.producer = rollout.tape.ops, rollout.tape.producer

    def cost(self, storage: int, limit: float) -> float:
        return self.ops[self.producer[storage]].seconds


class Regional(ByCost):
    """Costs over regions of evicted ops."""

    def __init__(self, rollout: Rollout) -> None:
        self.evicted = Evicted(rollout)

    def look(self, rollout: Rollout) -> None:
        self.evicted.update(rollout)

    def cost(self, storage: int, limit: float) -> float:
        cost = self.own(storage)
        for op in self.region(storage):
            cost += self.of(op)
            if cost > limit:
                break
        return cost

    def own(self, storage: int) -> float:
        """What counts without any neighbour: c0."""
        return self.evicted.seconds[self.evicted.producer[storage]]

    def of(self, op: int) -> float:
        """What a neighbour adds."""
        return self.evicted.seconds[op]

    def region(self, storage: int) -> Iterable[int]:
        """The neighbours that count."""
        return chain(self.evicted.backward_region(storage), self.evicted.forward_region(storage))


class Exact(Regional):
    """h_DTR."""


class Msps(Regional):
    """h_MSPS: what has to run to have it again, per byte."""

    has_staleness = False

    def region(self, storage: int) -> Iterable[int]:
        return self.evicted.backward_region(storage)


class Count(Regional):
    """h_e*: how many evicted neighbours, whatever they cost."""

    has_size = has_staleness = False

    def least_costs(self, candidates: np.ndarray, rollout: Rollout) -> np.ndarray:
        return np.zeros(len(candidates))

    def own(self, storage: int) -> float:
        return 0.0

    def of(self, op: int) -> float:
        return 1.0


class Equivalence(ByCost):
    """h_eq: the neighbourhood is the groups that its evicted neighbours belong to, spurious members included."""

    def __init__(self, rollout: Rollout) -> None:
        self.groups = Groups(rollout)

    def look(self, rollout: Rollout) -> None:
        self.groups.update(rollout)

    def cost(self, storage: int, limit: float) -> float:
        return self.groups.cost(storage)


NAMES = ("dtr", "eq", "local", "lru", "size", "msps", "rand", "e-star")


def heuristic(name: str, rollout: Rollout, random: Random) -> Heuristic:
    """The heuristic of this name, fresh for one step."""
    if name == "rand":
        return ByChance(random)
    if name in ("lru", "size"):
        return ByAge() if name == "lru" else BySize()
    return {"dtr": Exact, "eq": Equivalence, "local": Local, "msps": Msps, "e-star": Count}[name](rollout)
