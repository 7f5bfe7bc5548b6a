"""Sublinear memory (Chen, Xu, Zhang, Guestrin): keep some maps of the forward phase, recompute the segments between them.

    plan: sqrt         every floor(sqrt|C|)-th candidate of the split set C, or the number of segments that `segments` says
    plan: budget       Algorithm 3: the least B whose plan fits the budget; without a budget the paper's search over B for the least memory
    plan: recursive    m(v) > 1: each segment is cut again when its backward begins, log(n) maps are kept
    plan: auto         without a budget sqrt; with one, of many segmentations, Algorithm 3's among them, the fastest that fits
    drop_cheap         inside a segment the maps of convolutions and matrix products stay, only the cheap ones are dropped

Where this departs from the paper stands in card.yaml under `deviations`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.device import DeviceProfile
from vramlab.errors import Unsupported
from vramlab.layers import check_needs
from vramlab.planner import UNLIMITED, Budget
from vramlab.rollout import infeasible
from vramlab.schedule import Schedule
from vramlab.simulate import simulate
from vramlab.tape import Tape

from .segmented import SegmentedStep
from .segments import PARTS, Segmentation, candidates_of, expensive_maps, grid, growing, nested, split_into, sqrt_cuts, variants

UID = "98cf5ad1d5402dc4"
NEEDS = ("backward",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The planner. Options as card.yaml declares them."""

    plan_by: str = "auto"
    segments: int | None = None
    drop_cheap: bool = False

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """PlanInfeasible where no segmentation that is tried fits."""
        check_needs(tape, NEEDS, "checkpoint")
        keep = expensive_maps(tape) if self.drop_cheap else frozenset()
        tried = (check_schedule(tape, SegmentedStep(tape, device, one.cuts, one.parts, keep).schedule(UID))
                 for one in self._segmentations(tape, budget))
        if self.plan_by == "budget":
            best = _least_memory(tried) if budget.device_bytes >= UNLIMITED else _first_that_fits(tried, budget)
        else:
            best = _fastest_that_fits(list(tried), device, budget)
        return check_schedule(tape, best.schedule, budget).schedule

    def _segmentations(self, tape: Tape, budget: Budget) -> Iterable[Segmentation]:
        is_free = budget.device_bytes >= UNLIMITED
        if self.plan_by == "recursive":
            parts = [self.segments] if self.segments is not None else PARTS[:1] if is_free else PARTS
            return [nested(tape, count) for count in parts]
        candidates = candidates_of(tape)
        if self.plan_by == "budget":
            return map(Segmentation, grid(tape, candidates) if is_free else growing(tape, candidates))
        if self.segments is not None:
            return [Segmentation(split_into(self.segments, candidates))]
        return [Segmentation(sqrt_cuts(candidates))] if is_free or self.plan_by == "sqrt" else map(Segmentation, variants(tape))


def _fastest_that_fits(tried: list[CheckedSchedule], device: DeviceProfile, budget: Budget) -> CheckedSchedule:
    fitting = [checked for checked in tried if checked.peak_bytes <= budget.device_bytes]
    if not fitting:
        raise infeasible(_least_memory(tried), budget, "checkpoint")
    return min(fitting, key=lambda checked: _cost(checked, device))


def _first_that_fits(tried: Iterable[CheckedSchedule], budget: Budget) -> CheckedSchedule:
    """Of plans in the order of B. PlanInfeasible when all were tried."""
    smallest = None
    for checked in tried:
        if checked.peak_bytes <= budget.device_bytes:
            return checked
        smallest = checked if smallest is None else _least_memory([smallest, checked])
    raise infeasible(smallest, budget, "checkpoint")


def _least_memory(tried: Iterable[CheckedSchedule]) -> CheckedSchedule:
    return min(tried, key=lambda checked: checked.peak_bytes)


def _cost(checked: CheckedSchedule, device: DeviceProfile) -> tuple[float, int, int]:
    """Fastest first; of equals the one that recomputes least, then the one that holds least."""
    metrics = simulate(checked, device).metrics
    return metrics.step_seconds, metrics.recomputes, metrics.peak_bytes


def build(plan: str = "auto", segments: int | None = None, drop_cheap: bool = False) -> Checkpoint:
    """The planner for these options. Unsupported where they contradict each other."""
    if plan == "budget" and segments is not None:
        raise Unsupported(f"method 'checkpoint': segments={segments} with plan=budget; Algorithm 3 finds the number of segments itself")
    return Checkpoint(plan_by=plan, segments=segments, drop_cheap=drop_cheap)
