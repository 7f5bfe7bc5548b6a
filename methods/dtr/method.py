"""DTR (Kirisame et al., ICLR 2021): dynamic tensor rematerialization. When an op does not fit, evict what a heuristic finds cheapest.

    an op does not fit ─► candidates: on the device, not needed by a running op, can be computed again
                       ─► a sample of sqrt(n) of them, and none below 1 % of the mean size, where the options say so
                       ─► evict argmin h, until it fits
    an input is absent ─► compute it again, and first whatever it needs

Nothing is ever swapped. Where this departs from the paper and its prototype stands in card.yaml under `deviations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from random import Random

import numpy as np

from vramlab.device import DeviceProfile
from vramlab.layers import check_needs
from vramlab.planner import Budget
from vramlab.rollout import Action, Release, Rollout, RolloutPlanner
from vramlab.schedule import Schedule
from vramlab.tape import Tape

from .heuristics import Heuristic, heuristic

UID = "09cefc5a4e089c59"
NEEDS = ("timings",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """As card.yaml declares them."""

    heuristic: str = "dtr"
    sampling: bool = False
    small_tensor_filter: bool = True
    seed: int = 0
    recomputes_per_op: int = 6
    nested_recomputes: int = 60


class Dtr:
    """The policy: one object plays one step."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.random = Random(options.seed)
        self._heuristic: Heuristic | None = None

    def release(self, candidates: np.ndarray, rollout: Rollout) -> Release | None:
        """Evict the one of least score."""
        candidates = self._considered(candidates[rollout.recomputable(candidates)], rollout)
        if not len(candidates):
            return None
        if self._heuristic is None:
            self._heuristic = heuristic(self.options.heuristic, rollout, self.random)
        return Release(self._heuristic.choose(candidates, rollout), Action.RECOMPUTE)

    def prefetch(self, rollout: Rollout) -> list[int]:
        """Nothing is on the host."""
        return []

    def _considered(self, candidates: np.ndarray, rollout: Rollout) -> np.ndarray:
        if self.options.small_tensor_filter and len(candidates):
            made_from = rollout.facts.there_from
            mean_bytes = rollout.nbytes[(made_from >= 0) & (made_from < rollout.next_op)].mean()
            big = candidates[rollout.nbytes[candidates] >= 0.01 * mean_bytes]
            candidates = big if len(big) else candidates
        if self.options.sampling and len(candidates) > 1:
            candidates = np.array(sorted(self.random.sample(candidates.tolist(), isqrt(len(candidates)))), np.int64)
        return candidates


@dataclass(frozen=True, slots=True)
class DtrPlanner:
    """Plays `Dtr` on the simulated clock."""

    options: Options

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """PlanInfeasible where the budget cannot be reached, Unsupported where the tape has no op times."""
        check_needs(tape, NEEDS, "dtr")
        planner = RolloutPlanner(lambda *step: Dtr(self.options), method=UID, name="dtr",
                                 recomputes_per_op=self.options.recomputes_per_op, nested_recomputes=self.options.nested_recomputes)
        return planner.plan(tape, device, budget)


def build(**options: object) -> DtrPlanner:
    """The planner for these options."""
    return DtrPlanner(Options(**options))
