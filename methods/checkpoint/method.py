"""Sublinear memory (Chen, Xu, Zhang, Guestrin): keep sqrt(n) maps of the forward phase, recompute the segments between them.

    no budget     every floor(sqrt|C|)-th candidate of the split set C, or the number of segments that `segments` says
    a budget      of many segmentations, Algorithm 3's among them, the fastest that fits

Where this departs from the paper stands in card.yaml under `deviations`.
"""

from __future__ import annotations

from dataclasses import dataclass

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.device import DeviceProfile
from vramlab.layers import Cut, check_needs
from vramlab.planner import UNLIMITED, Budget
from vramlab.rollout import infeasible
from vramlab.schedule import Schedule
from vramlab.simulate import simulate
from vramlab.tape import Tape

from .segmented import SegmentedStep
from .segments import candidates_of, split_into, sqrt_cuts, variants

UID = "98cf5ad1d5402dc4"
NEEDS = ("backward",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The planner. `segments`: how many, None for sqrt(n) without a budget and for the search with one."""

    segments: int | None = None

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """PlanInfeasible where no segmentation that is tried fits."""
        check_needs(tape, NEEDS, "checkpoint")
        tried = [self._write(tape, device, cuts) for cuts in self._segmentations(tape, budget)]
        fitting = [checked for checked in tried if checked.peak_bytes <= budget.device_bytes]
        if not fitting:
            raise infeasible(min(tried, key=lambda checked: checked.peak_bytes), budget, "checkpoint")
        best = min(fitting, key=lambda checked: _cost(checked, device))
        return check_schedule(tape, best.schedule, budget).schedule

    def _segmentations(self, tape: Tape, budget: Budget) -> list[tuple[Cut, ...]]:
        if self.segments is not None:
            return [split_into(self.segments, candidates_of(tape))]
        return [sqrt_cuts(candidates_of(tape))] if budget.device_bytes >= UNLIMITED else list(variants(tape))

    def _write(self, tape: Tape, device: DeviceProfile, cuts: tuple[Cut, ...]) -> CheckedSchedule:
        return check_schedule(tape, SegmentedStep(tape, device, cuts).schedule(UID))


def _cost(checked: CheckedSchedule, device: DeviceProfile) -> tuple[float, int, int]:
    """Fastest first; of equals the one that recomputes least, then the one that holds least."""
    metrics = simulate(checked, device).metrics
    return metrics.step_seconds, metrics.recomputes, metrics.peak_bytes


def build(**options: int | None) -> Checkpoint:
    """The planner for these options."""
    return Checkpoint(**options)
