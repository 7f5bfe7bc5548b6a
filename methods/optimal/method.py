"""The proven optimum of a stated class of schedules, by a mixed-integer program on HiGHS.

The class: first runs in tape order. Before each of them, earlier ops may run again, in tape order, each at most `recomputes` times in the
step and only while nothing that it makes is on the device or the host. Each storage that is not state makes at most one round trip to the
host. In the gap between two runs first copies to the host start, then room is made (waits for those copies, frees), then copies back
start, then what the next run reads is waited for. State stays; every op runs by the library's own algorithm. Within that class every
choice is open, and time is that of the simulator: one compute stream, one engine a direction.

A tape of more than `groups` ops is made coarse first: neighbours are joined until so many items are left. An item runs, and runs again,
as one; what it makes for the same later items goes to the host and comes back together. The optimum is then that of the coarse class.
Where host memory is scarce, all round trips of the step together have to fit into it.

Without `time_limit_seconds` the search ends with a proof. With it, it may end with the best schedule found by then, its bound and its gap:
`solve` returns them, and `proof` tells those of the last plan, which a record keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.device import DeviceProfile
from vramlab.errors import PlanInfeasible, ScheduleError, Unsupported
from vramlab.layers import check_needs
from vramlab.liveness import replay_schedule
from vramlab.planner import Budget
from vramlab.program import INFEASIBLE, OPTIMAL
from vramlab.rollout import infeasible
from vramlab.schedule import Schedule
from vramlab.simulate import simulate
from vramlab.tape import Tape

from .items import Item, coarse_items, single_items
from .mixed import Mixed
from .writing import written

UID = "2a2f7f4ec1a602f3"
NEEDS = ("timings",)
HALF = 0.5  # of a byte: what rounds off the solver's tolerance
TOLERANCE = 4e-6  # relative: what the solver may be off by in its optimum


@dataclass(frozen=True, kw_only=True)
class Solution:
    """What the solver found within its time."""

    checked: CheckedSchedule
    seconds: float  # of the simulated step
    bound_seconds: float  # no schedule of the class is below
    items: int  # that the tape was cut into; as many as it has ops where it was not made coarse

    @property
    def gap(self) -> float:
        """(seconds - bound) / seconds; 0 of a step that takes no time."""
        return (self.seconds - self.bound_seconds) / self.seconds if self.seconds else 0.0

    @property
    def is_proved(self) -> bool:
        """Is the schedule the fastest of its class?"""
        return self.gap <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        """What a record keeps of it."""
        return {"step_seconds": self.seconds, "bound_seconds": self.bound_seconds, "gap": self.gap, "is_proved": self.is_proved,
                "items": self.items}


@dataclass(kw_only=True)
class Optimal:
    """The planner. Options as card.yaml declares them."""

    groups: int
    recomputes: int = 1
    time_limit_seconds: float | None = None
    proof: dict[str, Any] | None = field(default=None, init=False, compare=False)  # of the last plan

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """The best schedule of the class. PlanInfeasible below its least peak; Unsupported where the time limit comes before any answer."""
        self.proof = None
        solution = self.solve(tape, device, budget)
        self.proof = solution.to_json()
        return solution.checked.schedule

    def solve(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Solution:
        """As `plan`, with the bound that was proved."""
        check_needs(tape, NEEDS, "optimal")
        plain = check_schedule(tape, replay_schedule(tape, UID))
        if plain.peak_bytes <= budget.device_bytes:
            seconds = simulate(plain, device).metrics.step_seconds
            return Solution(checked=plain, seconds=seconds, bound_seconds=seconds, items=len(tape.ops))
        if not device.is_full_duplex:
            raise Unsupported("optimal: the program has one copy engine a direction, and this device has one for both")
        items = single_items(tape) if len(tape.ops) <= self.groups else coarse_items(tape, self.groups)
        solution = self._solve(tape, items, device, budget)
        if solution is None:
            raise self._refusal(tape, items, device, budget, plain)
        return solution

    def _solve(self, tape: Tape, items: Sequence[Item], device: DeviceProfile, budget: Budget) -> Solution | None:
        """None where the class has no schedule within the budget."""
        still = Mixed(tape, items, device, self.recomputes)
        answer = still.fewest_reruns(budget.device_bytes, self.time_limit_seconds)
        found = [] if answer.values is None else [self._checked(still, answer.values, tape, budget)]
        known = min((simulate(checked, device).metrics.step_seconds for checked in found), default=None)
        mixed = Mixed(tape, items, device, self.recomputes)
        answer = mixed.fastest(budget.device_bytes, budget.host_bytes, self.time_limit_seconds, known)
        if answer.status == INFEASIBLE and not found:
            return None
        if answer.status == INFEASIBLE:
            raise AssertionError("the program excludes a schedule of its class that is there")
        if answer.values is not None:
            found.append(self._checked(mixed, answer.values, tape, budget))
            self._compare(simulate(found[-1], device).metrics.step_seconds, answer.objective * mixed.scale)
        if not found:
            raise Unsupported(f"optimal: {self.time_limit_seconds} s gave neither a schedule nor a proof that there is none")
        best = min(found, key=lambda checked: simulate(checked, device).metrics.step_seconds)
        seconds = simulate(best, device).metrics.step_seconds
        bound = answer.bound * mixed.scale if math.isfinite(answer.bound) else 0.0
        least = sum(item.first.seconds for item in items)
        return Solution(checked=best, seconds=seconds, bound_seconds=min(max(bound, least), seconds), items=len(items))

    @staticmethod
    def _compare(simulated: float, counted: float) -> None:
        if simulated > counted * (1 + TOLERANCE):
            raise AssertionError(f"the program counts {counted} s, and the simulator {simulated} s, for one schedule")

    def _checked(self, mixed: Mixed, values: np.ndarray, tape: Tape, budget: Budget | None) -> CheckedSchedule:
        schedule = Schedule(written(mixed, mixed.decision(values)), tape.digest, UID)
        try:
            return check_schedule(tape, schedule, budget)
        except ScheduleError as error:
            if error.rule != "device-budget":
                raise
            raise Unsupported("optimal: the solver's tolerance, a millionth of the budget, decides here; ask for a little more") from error

    def _refusal(self, tape: Tape, items: Sequence[Item], device: DeviceProfile, budget: Budget, plain: CheckedSchedule) -> PlanInfeasible:
        """With the least peak of the class, where it was proved."""
        mixed = Mixed(tape, items, device, self.recomputes)
        answer = mixed.least_peak(self.time_limit_seconds) if budget.wants_smallest else None
        if answer is None or answer.status != OPTIMAL:
            op = getattr(plain.schedule.instructions[plain.peak_instruction], "op", 0)
            return PlanInfeasible(method="optimal", budget_bytes=budget.device_bytes, smallest_bytes=None, op=tape.op_name(op))
        leanest = self._checked(mixed, answer.values, tape, None)
        counted = math.ceil(answer.objective * mixed.unit_of_peak - HALF)  # a coarse run is counted with all that it reads: above its peak
        if plain.peak_bytes <= counted:
            return infeasible(plain, budget, "optimal")
        return infeasible(leanest, budget, "optimal", counted)


def build(groups: int, recomputes: int = 1, time_limit_seconds: float | None = None) -> Optimal:
    """The planner with these options."""
    return Optimal(groups=groups, recomputes=recomputes, time_limit_seconds=time_limit_seconds)
