"""rotor (Beaumont et al.): the optimal persistent schedule of a heterogeneous chain, by dynamic programming over a discretised memory.

    tape ─► chain of stages (articulation points) ─► Opt(1, L, m) for every m ─► sequence of F_none, F_ck, F_all, B ─► schedule

The table holds the answer for every number of slots. Each level at which the chain becomes faster is one sequence; the fastest whose exact
peak is within the budget is taken. Where this departs from the paper stands in card.yaml under `deviations`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.device import DeviceProfile
from vramlab.layers import check_needs
from vramlab.planner import Budget
from vramlab.rollout import infeasible
from vramlab.schedule import Schedule
from vramlab.stages import ChainFacts, chain_facts, stages_of
from vramlab.tape import Tape

UID = "09317d0c856444f2"
NEEDS = ("timings", "backward")
# Neighbouring stages of longer chains are merged.
MOST_STAGES = 128
# Levels are all written and checked where that comes to at most this many runs of ops; else they are bisected.
MOST_RUNS = 20_000
# Of bisected levels, so many from the lowest are looked at before the budget is refused.
LOWEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotor:
    """The planner. Options as card.yaml declares them."""

    slots: int = 500

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """PlanInfeasible where no persistent schedule that the table knows fits."""
        check_needs(tape, NEEDS, "rotor")
        levels, write = self.table(tape, device)
        checked = _fastest_that_fits(levels, cache(lambda m: check_schedule(tape, write(m))), budget, len(tape.ops))
        return check_schedule(tape, checked.schedule, budget).schedule

    def table(self, tape: Tape, device: DeviceProfile) -> tuple[list[int], Callable[[int], Schedule]]:
        """The levels, from slow to fast, and how the schedule of one is written."""
        from .recurrence import Recurrence  # numba is slow to load
        from .sequence import sequence, written

        stages = stages_of(tape, MOST_STAGES)
        facts = chain_facts(tape, device, stages)
        slot_bytes = -(-most_bytes(facts) // self.slots)
        recurrence = Recurrence(facts, self.slots + 2 * facts.count, slot_bytes)

        def write(slots: int) -> Schedule:
            steps = sequence(recurrence, facts.x_bytes, facts.saved_bytes, slot_bytes, slots)
            return written(tape, device, stages, steps, UID)

        return recurrence.levels(), write


def most_bytes(facts: ChainFacts) -> int:
    """What the chain holds at most when everything is kept."""
    before = np.cumsum(facts.saved_bytes) - facts.saved_bytes
    return int(max((before + facts.keep_rise_bytes).max(), (before + facts.gradient_bytes + facts.backward_bytes).max(), 1))


def _fastest_that_fits(levels: Sequence[int], check: Callable[[int], CheckedSchedule], budget: Budget, ops: int) -> CheckedSchedule:
    def fits(level: int) -> bool:
        return check(level).peak_bytes <= budget.device_bytes

    if fits(levels[-1]):
        return check(levels[-1])
    lowest = levels
    if len(levels) * ops > MOST_RUNS:
        found = _bisected(levels, fits)
        if found is not None:
            return check(found)
        lowest = levels[:LOWEST]
    for level in reversed(lowest):
        if fits(level):
            return check(level)
    raise infeasible(min(map(check, lowest), key=lambda checked: checked.peak_bytes), budget, "rotor")


def _bisected(levels: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The highest level that fits, as if peaks rose with the levels; None where the bisection meets none."""
    low, high = -1, len(levels) - 1  # levels[low] fits, or is none; levels[high] does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(levels[middle]) else (low, middle)
    return None if low < 0 else levels[low]


def build(slots: int = 500) -> Rotor:
    """The planner for these options."""
    return Rotor(slots=slots)
