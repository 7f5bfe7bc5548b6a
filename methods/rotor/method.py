"""rotor (Beaumont et al.): the optimal persistent schedule of a heterogeneous chain, by dynamic programming over a discretised memory.

    tape ─► chain of stages (articulation points) ─► Opt(1, L, m) for every m ─► sequence of F_none, F_ck, F_all, B ─► schedule

The table holds the answer for every number of slots. Each level at which the chain becomes faster is one sequence; the fastest whose exact
peak is within the budget is taken. Where this departs from the paper stands in card.yaml under `deviations`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from vramlab.check import check_schedule
from vramlab.device import DeviceProfile
from vramlab.layers import check_needs
from vramlab.planner import Budget
from vramlab.rollout import infeasible
from vramlab.schedule import Schedule
from vramlab.stages import MOST_STAGES, chain_facts, highest_that_fits, stages_of
from vramlab.tape import Tape

UID = "09317d0c856444f2"
NEEDS = ("timings", "backward")
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
        check = cache(lambda slots: check_schedule(tape, write(slots)))
        level, looked_at = highest_that_fits(levels, lambda m: check(m).peak_bytes <= budget.device_bytes, len(tape.ops), LOWEST)
        if level is None:
            raise infeasible(min(map(check, looked_at), key=lambda checked: checked.peak_bytes), budget, "rotor")
        return check_schedule(tape, check(level).schedule, budget).schedule

    def table(self, tape: Tape, device: DeviceProfile) -> tuple[list[int], Callable[[int], Schedule]]:
        """The levels, from slow to fast, and how the schedule of one is written."""
        from .recurrence import Recurrence  # numba is slow to load
        from .sequence import sequence, written

        stages = stages_of(tape, MOST_STAGES)
        facts = chain_facts(tape, device, stages)
        slot_bytes = -(-facts.most_bytes // self.slots)
        recurrence = Recurrence(facts, self.slots + 2 * facts.count, slot_bytes)

        def write(slots: int) -> Schedule:
            steps = sequence(recurrence, facts.x_bytes, facts.saved_bytes, slot_bytes, slots)
            return written(tape, device, stages, steps, UID)

        return recurrence.levels(), write


def build(slots: int = 500) -> Rotor:
    """The planner for these options."""
    return Rotor(slots=slots)
