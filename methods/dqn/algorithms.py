"""Convolution algorithms: which a play takes for granted, and which a finished play has room for.

Before a play, memory has a price, in seconds a byte, and each op gets the algorithm whose seconds and workspace cost least together. The
agent then plays the step with those costs, and so makes room for the workspaces as it does for anything else.

After a play it is settled what leaves the device and when it comes back. Another algorithm changes two things of a run: its seconds, and
the bytes inside it while it lasts. What is resident before and after stays as it was, so that ops do not compete any more: an algorithm
fits where its workspace fits at the op's own instants. And no instruction ends later because a run is shorter, for the clock is made of
sums and maxima. So the fastest that fits, op by op, is the fastest of all assignments to this schedule.

All runs of an op take the same, since another algorithm gives other bits and a recompute has to repeat those of the first run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.planner import Budget
from vramlab.schedule import Compute, Instruction, Recompute, Schedule
from vramlab.tape import Op, Tape, Variant

Algorithms: TypeAlias = tuple[str | None, ...]  # per op the name of a variant, None for the library's own choice


def of_library(tape: Tape) -> Algorithms:
    """The library's own choice everywhere."""
    return (None,) * len(tape.ops)


def at_price(tape: Tape, price: float) -> Algorithms:
    """The cheapest of each op where a byte of workspace costs `price` seconds; the leaner one of equals."""
    def cost(variant: Variant) -> tuple[float, int]:
        return variant.seconds + price * variant.workspace_bytes, variant.workspace_bytes

    return tuple(min(_choices(op), key=cost).name or None for op in tape.ops)


def played_by(tape: Tape, algorithms: Algorithms) -> Tape:
    """The step as if these were the library's own choices."""
    chosen = [op.variant(name) for op, name in zip(tape.ops, algorithms)]
    return tape.with_costs([v.seconds for v in chosen], [v.workspace_bytes for v in chosen])


def named(schedule: Schedule, tape: Tape, algorithms: Algorithms) -> Schedule:
    """The schedule as one of `tape`, each run by these algorithms."""
    def run(instruction: Instruction) -> Instruction:
        is_run = isinstance(instruction, Compute | Recompute)
        return replace(instruction, variant=algorithms[instruction.op]) if is_run else instruction

    return replace(schedule, tape_digest=tape.digest, instructions=tuple(map(run, schedule.instructions)))


def with_fastest(checked: CheckedSchedule, budget: Budget) -> CheckedSchedule:
    """The same schedule by the fastest fitting algorithm of each op, the library's own choice among them; the leaner one of equals."""
    tape = checked.tape
    chosen = list(of_library(tape))
    for op, space in _space_bytes(checked, budget).items():
        fitting = [v for v in _choices(tape.ops[op]) if v.workspace_bytes <= space]
        chosen[op] = min(fitting, key=lambda v: (v.seconds, v.workspace_bytes)).name or None
    return check_schedule(tape, named(checked.schedule, tape, tuple(chosen)), budget)


def least_seconds(tape: Tape) -> float:
    """No step is faster than this: every op once, by its fastest algorithm."""
    return sum(min(v.seconds for v in _choices(op)) for op in tape.ops)


def _choices(op: Op) -> Sequence[Variant]:
    return op.variant(None), *op.variants


def _space_bytes(checked: CheckedSchedule, budget: Budget) -> dict[int, int]:
    """Per op with variants: the bytes that are free for its workspace, at the fullest of its runs.

    What is inside an op beyond what it creates is its workspace alone, as long as it takes over no input's region; convolutions do not.
    """
    space: dict[int, int] = {}
    for instruction, nbytes in zip(checked.schedule.instructions, checked.inner_peak_bytes.tolist()):
        if isinstance(instruction, Compute | Recompute) and (op := checked.tape.ops[instruction.op]).variants:
            beside = nbytes - op.variant(instruction.variant).workspace_bytes
            space[op.id] = min(space.get(op.id, budget.device_bytes), budget.device_bytes - beside)
    return space
