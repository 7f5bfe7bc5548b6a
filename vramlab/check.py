"""The legality of schedules, said once. Simulator and executor take only what `check_schedule` returns.

A storage is in one of six residencies; each use of it by an instruction is legal in some of them and leads to another.
"On device" are resident, offloading, resident_and_host and prefetching; a host copy exists in offloading, resident_and_host,
on_host and prefetching; each copy counts the storage's bytes. At the start, storages with `at_start` are resident.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from vramlab.errors import ScheduleError
from vramlab.planner import UNLIMITED, Budget
from vramlab.schedule import Schedule
from vramlab.tape import Tape

if TYPE_CHECKING:
    from vramlab.kernels import Fault

# Which residency each use leads to; a dot refuses. `Compute` reads its inputs, writes what its op mutates and creates the rest;
# `Recompute` reads, writes nothing and recreates: what is there already stays, and its duplicate counts as workspace.
# Both take over the region that `reuse` names. At the end a storage is kept (`at_end`) or dropped.
TABLE = """
            absent    resident    offloading         resident_and_host  on_host      prefetching
read        .         resident    offloading         resident_and_host  .            .
write       .         resident    .                  resident           .            .
create      resident  .           .                  .                  .            .
recreate    resident  resident    offloading         resident_and_host  on_host      prefetching
take_over   .         absent      .                  on_host            .            .
free        .         absent      .                  on_host            .            .
offload     .         offloading  .                  .                  .            .
prefetch    .         .           .                  .                  prefetching  .
wait        .         .           resident_and_host  .                  .            resident_and_host
free_host   .         .           .                  resident           absent       .
keep        .         resident    .                  .                  .            .
drop        absent    .           .                  .                  .            .
"""

# The rule that a refusal by the table names: in general, and while the storage is in flight.
RULES_OF_TABLE = {
    "read": ("input-not-readable", "input-not-readable"),
    "write": ("write-not-resident", "write-in-flight"),
    "create": ("output-not-absent", "output-not-absent"),
    "take_over": ("reuse-not-resident", "reuse-in-flight"),
    "free": ("free-not-resident", "free-in-flight"),
    "offload": ("offload-not-resident", "offload-in-flight"),
    "prefetch": ("prefetch-not-on-host", "prefetch-in-flight"),
    "wait": ("wait-without-copy", "wait-without-copy"),
    "free_host": ("free-host-without-copy", "free-host-in-flight"),
    "keep": ("end-state", "end-state"),
    "drop": ("end-state", "end-state"),
}

# The rules beside the table, by the name of their reason in the compiled loop. {found} and {needed} are its numbers,
# {name} is the variant that the instruction names and {allowed} those of its op.
RULES = {
    "UNKNOWN_OP": ("unknown-op", "the tape has no op {found}"),
    "UNKNOWN_STORAGE": ("unknown-storage", "the tape has no storage {found}"),
    "COMPUTED_TWICE": ("computed-twice", "each op is computed once; a further run is a Recompute"),
    "NOT_YET_COMPUTED": ("recompute-before-compute", "the first run of an op is a Compute"),
    "NOT_COMPUTED": ("op-not-computed", "the schedule ends and this op has not run"),
    "RANDOM_ORDER": ("random-order", "it is random op {found} of the tape and would draw as number {needed}"),
    "STALE_READ": ("stale-version", "the op reads the storage after {needed} writes, and it has seen {found}"),
    "STALE_WRITE": ("write-order", "the op is write number {needed} to the storage, and {found} have been done"),
    "STALE_RECOMPUTE": ("stale-version", "the recompute would bring back what {found} later writes have replaced"),
    "REUSE_NOT_ALLOWED": ("reuse-not-allowed", "the op cannot take over this storage's region"),
    "REUSE_OUTPUT_NOT_ABSENT": ("output-not-absent", "only an absent output takes over a region"),
    "VARIANT_NOT_ALLOWED": ("variant-not-allowed", "the op has no variant {name!r}; it has {allowed}"),
    "OPTIMIZER_AGAIN": ("recompute-optimizer", "the optimizer runs once"),
    "MUTATOR_AGAIN": ("recompute-mutator", "the op overwrites state, which happens once"),
    "NOTHING_ABSENT": ("nothing-to-recompute", "none of the op's outputs is absent"),
    "DEVICE_BUDGET": ("device-budget", "{found:,} bytes on the device exceed the budget of {needed:,}"),
    "HOST_BUDGET": ("host-budget", "{found:,} bytes of host copies exceed the budget of {needed:,}"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckedSchedule:
    """A legal schedule and the memory it takes: int64 arrays with one entry an instruction, read-only."""

    tape: Tape
    schedule: Schedule
    live_bytes: np.ndarray  # on the device, after the instruction
    inner_peak_bytes: np.ndarray  # on the device, at the highest instant of the instruction
    host_bytes: np.ndarray  # host copies, after the instruction
    peak_bytes: int
    peak_host_bytes: int
    peak_instruction: int  # index of the first instruction during which the peak stands


def check_schedule(tape: Tape, schedule: Schedule, budget: Budget | None = None) -> CheckedSchedule:
    """Prove that a schedule is legal on a tape and within a budget. ScheduleError names the first instruction that is not."""
    from vramlab import kernels  # numba takes half a second to load

    if schedule.tape_digest != tape.digest:
        detail = f"the schedule was made for tape {schedule.tape_digest[:12]}, this is {tape.digest[:12]}"
        raise ScheduleError("tape-mismatch", index=0, detail=detail)
    if schedule.micro_batches not in ((), tape.micro_batches):
        detail = f"the schedule names micro-batches {list(schedule.micro_batches)}, the tape takes {list(tape.micro_batches) or 'one pass'}"
        raise ScheduleError("micro-batches-mismatch", index=0, detail=detail)
    limit = budget or Budget(device_bytes=UNLIMITED)
    live, inner, host = (np.zeros(len(schedule.instructions), np.int64) for _ in range(3))
    flat = kernels.flatten_tape(tape), kernels.flatten_schedule(schedule)
    budgets = min(limit.device_bytes, UNLIMITED), min(limit.host_bytes, UNLIMITED)
    fault = kernels.Fault(*kernels.walk(table(), *flat, *budgets, live, inner, host).tolist())
    if fault.reason != kernels.LEGAL:
        raise _refusal(tape, schedule, fault)
    for array in (live, inner, host):
        array.flags.writeable = False
    start_bytes = sum(s.nbytes for s in tape.storages if s.at_start)
    return CheckedSchedule(tape=tape, schedule=schedule, live_bytes=live, inner_peak_bytes=inner, host_bytes=host,
                           peak_bytes=int(inner.max(initial=start_bytes)), peak_host_bytes=int(host.max(initial=0)),
                           peak_instruction=int(inner.argmax()) if len(inner) else 0)


def transitions() -> dict[str, dict[str, str | None]]:
    """`TABLE` as a dict: use -> residency -> the residency it leads to, None where it is refused."""
    header, *rows = TABLE.split("\n")[1:-1]
    columns = header.split()
    return {use: dict(zip(columns, [None if cell == "." else cell for cell in cells], strict=True))
            for use, *cells in (row.split() for row in rows)}


@cache
def table() -> np.ndarray:
    """`TABLE` as the compiled loops take it: int64 [uses, residencies], the residency that a use leads to, REFUSED where it is illegal."""
    from vramlab import kernels

    number = {name: i for i, name in enumerate(kernels.RESIDENCIES)} | {None: kernels.REFUSED}
    rows = transitions()
    return np.array([[number[rows[use][residency]] for residency in kernels.RESIDENCIES] for use in kernels.USES], np.int64)


def _refusal(tape: Tape, schedule: Schedule, fault: Fault) -> ScheduleError:
    from vramlab import kernels

    if fault.reason == kernels.BY_TABLE:
        rule, detail = _refusal_by_table(kernels.USES[fault.use], kernels.RESIDENCIES[fault.found])
    else:
        name = next(n for n in RULES if getattr(kernels, n) == fault.reason)
        rule, text = RULES[name]
        more = _variants(tape, schedule, fault) if fault.reason == kernels.VARIANT_NOT_ALLOWED else {}
        detail = text.format(found=fault.found, needed=fault.needed, **more)
    is_op, is_storage = fault.op != kernels.NONE, 0 <= fault.storage < len(tape.storages)
    return ScheduleError(rule, index=int(fault.index), detail=detail, op=tape.op_name(fault.op) if is_op else "",
                         storage=tape.storage_name(fault.storage) if is_storage else "")


def _variants(tape: Tape, schedule: Schedule, fault: Fault) -> dict[str, str | None]:
    """The variant that the refused instruction names, and those that its op has."""
    allowed = ", ".join(v.name for v in tape.ops[fault.op].variants) or "none"
    return {"name": schedule.instructions[fault.index].variant, "allowed": allowed}


def _refusal_by_table(use: str, residency: str) -> tuple[str, str]:
    allowed = [r for r, then in transitions()[use].items() if then]
    rule = RULES_OF_TABLE[use][residency in ("offloading", "prefetching")]
    return rule, f"the storage is {residency}; {use} needs it {' or '.join(allowed)}"
