"""moDNN (Chen, Chen, Han, Hu): tunes a step to a given memory budget by three means, none of which computes anything twice.

    sub-batch size       the largest for which any 15 % of consecutive tasks fit together     sub_batch.py
    transfers            farthest next use leaves, prefetch where it fits until its use       scheduling.py
    convolutions         the fastest algorithm that the memory left over allows               here

The engine asks `micro_batches` first; the plan is then made on the tape of all passes. Any budget down to the lower bound is met. What
the papers leave open, and how it is filled, stands in card.yaml under `deviations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.device import DeviceProfile
from vramlab.errors import PlanInfeasible
from vramlab.layers import check_needs
from vramlab.liveness import floor_bytes, lower_bound_bytes
from vramlab.micro_batches import equal_passes
from vramlab.planner import Budget
from vramlab.schedule import Compute, Schedule
from vramlab.simulate import simulate
from vramlab.tape import Op, Role, Tape

from .scheduling import DoesNotFit, Scheduler
from .sub_batch import least_size, passes_bound_bytes, sub_batch_size

UID = "a4f1c3dcec912695"
NEEDS = ("timings", "backward", "variants", "inplace_gradients")
Algorithms = tuple[str | None, ...]  # one an op, None for the library's own choice


@dataclass(frozen=True, slots=True, kw_only=True)
class MoDNN:
    """The planner. `window`: the share of consecutive tasks that must fit together, w."""

    sub_batches: bool = True
    window: float = 0.15
    algorithms: bool = True

    def micro_batches(self, at: Callable[[int], Tape], batch_size: int, budget: Budget) -> tuple[int, ...]:
        """Sizes of the passes. `at` gives the tape of one pass. PlanInfeasible when neither the whole batch nor the smallest pass fits."""
        if not self.sub_batches:
            return (batch_size,)
        of_size = at if self.algorithms else lambda size: _without_algorithms(at(size))
        size = sub_batch_size(of_size, batch_size, budget.device_bytes, self.window)
        if size is None:
            whole, few = of_size(batch_size), of_size(least_size(of_size, batch_size))
            waiting = few.bytes_of(Role.INPUT) // few.batch_size * (batch_size - few.batch_size)
            bounds = (lower_bound_bytes(whole), whole), (passes_bound_bytes(few) + waiting, few)
            smallest, leanest = min(bounds, key=lambda bound: bound[0])
            raise _refusal(leanest, budget, smallest, _binding_op(leanest))
        return equal_passes(batch_size, size)

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """PlanInfeasible below the tape's lower bound, and where the host has no room for the copies."""
        check_needs(tape, NEEDS, "modnn")
        smallest = lower_bound_bytes(tape) if self.algorithms else lower_bound_bytes(_without_algorithms(tape))
        if budget.device_bytes < smallest:
            raise _refusal(tape, budget, smallest, _binding_op(tape))
        try:
            plans = list(self._plans(tape, device, budget))
        except DoesNotFit as stuck:
            raise _refusal(tape, budget, None, stuck.op) from None
        return min(plans, key=lambda checked: simulate(checked, device).metrics.step_seconds).schedule

    def _plans(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Iterator[CheckedSchedule]:
        """By the fastest algorithms, and by the fastest that fit in what the leanest leave free."""
        floors = floor_bytes(tape)
        fastest = tuple(_fastest(op, budget.device_bytes - floor) if self.algorithms else None for op, floor in zip(tape.ops, floors))
        yield _scheduled(tape, device, budget, fastest)
        leanest = tuple(_leanest(op) if self.algorithms else None for op in tape.ops)
        if leanest == fastest:
            return
        lean = _scheduled(tape, device, budget, leanest)
        free = {i.op: budget.device_bytes - int(inner) for i, inner in zip(lean.schedule.instructions, lean.inner_peak_bytes)
                if isinstance(i, Compute)}
        yield _scheduled(tape, device, budget, tuple(_fastest(op, free[op.id] + op.least_workspace_bytes) for op in tape.ops))


def _scheduled(tape: Tape, device: DeviceProfile, budget: Budget, algorithms: Algorithms) -> CheckedSchedule:
    scheduler = Scheduler(tape, device, budget, algorithms)
    scheduler.run()
    return check_schedule(tape, scheduler.schedule(UID), budget)


def _fastest(op: Op, space_bytes: int) -> str | None:
    """The fastest algorithm with a workspace of at most so many bytes; the library's own choice where it is as fast."""
    fitting = [v for v in (op.variant(None), *op.variants) if v.workspace_bytes <= max(space_bytes, op.least_workspace_bytes)]
    return min(fitting, key=lambda v: v.seconds).name or None


def _leanest(op: Op) -> str | None:
    return min((op.variant(None), *op.variants), key=lambda v: (v.workspace_bytes, v.seconds)).name or None


def _without_algorithms(tape: Tape) -> Tape:
    return tape.with_variants([()] * len(tape.ops))


def _binding_op(tape: Tape) -> int:
    needed = [floor + op.least_workspace_bytes for op, floor in zip(tape.ops, floor_bytes(tape))]
    return needed.index(max(needed))


def _refusal(tape: Tape, budget: Budget, smallest_bytes: int | None, op: int) -> PlanInfeasible:
    return PlanInfeasible(method="modnn", budget_bytes=budget.device_bytes, smallest_bytes=smallest_bytes, op=tape.op_name(op))


def build(**options: bool | float) -> MoDNN:
    """The planner for these options."""
    return MoDNN(**options)
