"""DELTA (Tang et al.): a filter picks what to release, a director picks swap or recompute, prefetch hides the way back.

    an op does not fit ─► filter: argmax bytes x staleness ─► director: T_swap > T_rec ? recompute : swap ─► until it fits
    before each op     ─► prefetch: of the last `prefetch_window` swapped storages, those that fit until they are used

Where this departs from the paper and from its released code stands in card.yaml under `deviations`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vramlab.device import DeviceProfile
from vramlab.layers import check_needs
from vramlab.planner import Budget
from vramlab.rollout import Action, Release, Rollout, RolloutPlanner
from vramlab.schedule import Schedule
from vramlab.tape import Tape

from .director import Director
from .filter import Filter
from .prefetch import Prefetcher

UID = "8e9d05407935abca"
NEEDS = ("timings",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """As card.yaml declares them."""

    action: str = "director"
    units_bug: bool = False
    own_cost_only: bool = False
    small_tensor_switch: bool = True
    prefetch_window: int = 5


class Delta:
    """The policy: one object plays one step."""

    def __init__(self, options: Options) -> None:
        self.filter = Filter(options.small_tensor_switch)
        self.director = Director(action=options.action, units_bug=options.units_bug, own_cost_only=options.own_cost_only)
        self.prefetcher = Prefetcher(options.prefetch_window)

    def release(self, candidates: np.ndarray, rollout: Rollout) -> Release | None:
        """The first of the filter's ranking for which the director has an action."""
        for storage in map(int, self.filter.rank(candidates, rollout)):
            action = self.director.choose(storage, rollout)
            if action is Action.SWAP:
                self.prefetcher.note_swap(storage, rollout.next_op)
            if action is not None:
                return Release(storage, action)
        return None

    def prefetch(self, rollout: Rollout) -> list[int]:
        """What the prefetcher finds due."""
        return self.prefetcher.due(rollout)


@dataclass(frozen=True, slots=True)
class DeltaPlanner:
    """Plays `Delta` on the simulated clock."""

    options: Options

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """PlanInfeasible where the budget cannot be reached, Unsupported where the tape has no op times."""
        check_needs(tape, NEEDS, "delta")
        return RolloutPlanner(lambda *step: Delta(self.options), method=UID, name="delta").plan(tape, device, budget)


def build(**options: object) -> DeltaPlanner:
    """The planner for these options."""
    return DeltaPlanner(Options(**options))
