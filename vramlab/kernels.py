"""Tape and schedule as flat arrays, and the compiled loops of checker and simulator over them.

What is legal stands in check.py as a table; here is only the loop that obeys it. Arrays, numbers and loops stand in one file
because numba's cache on disk does not notice a change of another file. Import this module when it is needed: numba is slow to load.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable
from functools import cache
from itertools import accumulate
from operator import index
from typing import Any, NamedTuple

import numba
import numpy as np

from vramlab.errors import ScheduleError
from vramlab.schedule import Compute, Free, FreeHost, Instruction, Offload, Prefetch, Recompute, Schedule, Wait
from vramlab.tape import Phase, Tape

COMPUTE, RECOMPUTE, FREE, OFFLOAD, PREFETCH, WAIT, FREE_HOST = range(7)
CODES = {Compute: COMPUTE, Recompute: RECOMPUTE, Free: FREE, Offload: OFFLOAD, Prefetch: PREFETCH, Wait: WAIT, FreeHost: FREE_HOST}

ABSENT, RESIDENT, OFFLOADING, RESIDENT_AND_HOST, ON_HOST, PREFETCHING = range(6)
RESIDENCIES = ("absent", "resident", "offloading", "resident_and_host", "on_host", "prefetching")
ON_DEVICE = (0, 1, 1, 1, 0, 1)  # copies that count, by residency
AT_HOST = (0, 0, 1, 1, 1, 1)

# What an instruction does to one storage: the rows of the checker's table. Those of `Free` and on stand in the order of CODES.
READ, WRITE, TAKE_OVER, CREATE, RECREATE, KEEP, DROP, USE_OF_FREE = range(8)
USES = ("read", "write", "take_over", "create", "recreate", "keep", "drop", "free", "offload", "prefetch", "wait", "free_host")
REFUSED = -1  # in the table: this use is illegal in this residency

ANY_VERSION = -1
NONE = -1
ON_THE_DEVICE, AT_THE_HOST, RANDOMS = range(3)  # what State.held counts
NOW, D2H_FREE, H2D_FREE, STALL, CLOCK = range(5)  # what a clock has: the compute stream's instant, those of free engines, seconds of stall

# Why a walk stopped, where the table alone does not say it.
(LEGAL, BY_TABLE, UNKNOWN_OP, UNKNOWN_STORAGE, COMPUTED_TWICE, NOT_YET_COMPUTED, NOT_COMPUTED, RANDOM_ORDER, STALE_READ, STALE_WRITE,
 STALE_RECOMPUTE, REUSE_NOT_ALLOWED, REUSE_OUTPUT_NOT_ABSENT, VARIANT_NOT_ALLOWED, OPTIMIZER_AGAIN, MUTATOR_AGAIN, NOTHING_ABSENT,
 DEVICE_BUDGET, HOST_BUDGET) = range(19)


class FlatTape(NamedTuple):
    """A tape without its names. Per storage [storages], per op [ops], per use of a storage by an op [uses]."""

    nbytes: np.ndarray  # int64 [storages]
    at_start: np.ndarray  # bool [storages]
    at_end: np.ndarray  # bool [storages]
    first_use: np.ndarray  # int32 [ops + 1]: op i has the uses first_use[i] to first_use[i + 1]: reads, writes, creations
    use: np.ndarray  # int8 [uses]: READ, WRITE or CREATE
    used: np.ndarray  # int32 [uses]: the storage
    version: np.ndarray  # int32 [uses]: writes that the storage must have seen, ANY_VERSION when it does not matter
    takeover: np.ndarray  # int32 [ops, 2]: output and input storage, or NONE
    random_rank: np.ndarray  # int32 [ops]: position among the random ops, or NONE
    again: np.ndarray  # int8 [ops]: why a recompute is illegal, LEGAL when it is not
    workspace_bytes: np.ndarray  # int64 [ops]
    seconds: np.ndarray  # float64 [ops]
    first_variant: np.ndarray  # int32 [ops + 1]: op i has the variants first_variant[i] to first_variant[i + 1]
    variant: np.ndarray  # int64 [variants]: the number of its name
    variant_workspace_bytes: np.ndarray  # int64 [variants]
    variant_seconds: np.ndarray  # float64 [variants]


class FlatSchedule(NamedTuple):
    """A schedule as four columns."""

    code: np.ndarray  # int8
    operand: np.ndarray  # int64: op or storage
    reuse: np.ndarray  # int64: storage or NONE
    variant: np.ndarray  # int64: the number of its name, or NONE


class State(NamedTuple):
    """Where a walk stands."""

    residency: np.ndarray  # int64 [storages]
    version: np.ndarray  # int64 [storages]: writes seen
    is_computed: np.ndarray  # bool [ops]
    held: np.ndarray  # int64 [3]: bytes on the device, bytes of host copies, random ops run
    fault: np.ndarray  # int64 [7]: the fields of a Fault, in their order


class Fault(NamedTuple):
    """Where a walk stopped and why. `found` and `needed` are versions, bytes, residencies or ranks, as the reason has it."""

    reason: int
    index: int
    op: int
    storage: int
    use: int
    found: int
    needed: int


@cache
def variant_number(name: str) -> int:
    """62 bits of the name's SHA-256: the same in every process, with no tape at hand."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 2


def flatten_tape(tape: Tape) -> FlatTape:
    """The tape as arrays; made once for a tape."""
    if "_flat" not in tape.__dict__:
        tape.__dict__["_flat"] = _flatten_tape(tape)
    return tape.__dict__["_flat"]


def _flatten_tape(tape: Tape) -> FlatTape:
    uses = _uses(tape)
    flat = [use for of_op in uses for use in of_op]
    variants = [variant for op in tape.ops for variant in op.variants]
    random_ops = [op.id for op in tape.ops if op.is_random]
    rank = {op: i for i, op in enumerate(random_ops)}
    return FlatTape(
        nbytes=np.array([s.nbytes for s in tape.storages], np.int64),
        at_start=np.array([s.at_start for s in tape.storages], np.bool_),
        at_end=np.array([s.at_end for s in tape.storages], np.bool_),
        first_use=np.array([0, *accumulate(len(u) for u in uses)], np.int32),
        use=np.array([u[0] for u in flat], np.int8),
        used=np.array([u[1] for u in flat], np.int32),
        version=np.array([u[2] for u in flat], np.int32),
        takeover=np.array([op.takeover or (NONE, NONE) for op in tape.ops], np.int32).reshape(-1, 2),
        random_rank=np.array([rank.get(op.id, NONE) for op in tape.ops], np.int32),
        again=np.array([_again(op) for op in tape.ops], np.int8),
        workspace_bytes=np.array([op.workspace_bytes for op in tape.ops], np.int64),
        seconds=np.array([op.seconds for op in tape.ops], np.float64),
        first_variant=np.array([0, *accumulate(len(op.variants) for op in tape.ops)], np.int32),
        variant=np.array([variant_number(v.name) for v in variants], np.int64),
        variant_workspace_bytes=np.array([v.workspace_bytes for v in variants], np.int64),
        variant_seconds=np.array([v.seconds for v in variants], np.float64),
    )


def _uses(tape: Tape) -> list[list[tuple[int, int, int]]]:
    """Per op: (use, storage, version)."""
    writes = [0] * len(tape.storages)
    found = []
    for op, read, bound, made in zip(tape.ops, tape.reads, tape.read_versions, tape.creates):
        versions = dict(bound)
        uses = [(READ, s, versions.get(s, ANY_VERSION)) for s in read]
        uses += [(WRITE, s, writes[s]) for s in op.mutates]
        uses += [(CREATE, s, ANY_VERSION) for s in made]
        for s in op.mutates:
            writes[s] += 1
        found.append(uses)
    return found


def _again(op) -> int:
    if op.phase == Phase.OPTIMIZER:
        return OPTIMIZER_AGAIN
    return MUTATOR_AGAIN if op.mutates and not op.throwaway_state else LEGAL


def flatten_schedule(schedule: Schedule) -> FlatSchedule:
    """The schedule as arrays; made once for a schedule. ScheduleError on what is no instruction."""
    if "_flat" not in schedule.__dict__:
        schedule.__dict__["_flat"] = _flatten_schedule(schedule.instructions)
    return schedule.__dict__["_flat"]


def _flatten_schedule(instructions: tuple[Instruction, ...]) -> FlatSchedule:
    try:
        codes = [CODES[type(i)] for i in instructions]
    except KeyError:
        index = next(k for k, i in enumerate(instructions) if type(i) not in CODES)
        raise ScheduleError("not-an-instruction", index=index, detail=f"{instructions[index]!r} is none of the seven") from None
    code = np.array(codes, np.int8)
    runs = np.flatnonzero(code <= RECOMPUTE)
    reuse, variant = np.full(len(codes), NONE, np.int64), np.full(len(codes), NONE, np.int64)
    ops = [instructions[k] for k in runs.tolist()]
    reuse[runs] = _integers([NONE if i.reuse is None else i.reuse for i in ops], runs)
    variant[runs] = [NONE if i.variant is None else variant_number(i.variant) for i in ops]
    operands = [i.op if c <= RECOMPUTE else i.storage for c, i in zip(codes, instructions)]
    return FlatSchedule(code, _integers(operands, range(len(codes))), reuse, variant)


def _integers(values: list[Any], indices: Iterable[int]) -> np.ndarray:
    try:
        return np.array(array("q", values), np.int64)
    except (TypeError, OverflowError):
        at, value = next((k, v) for k, v in zip(indices, values) if not _is_int64(v))
        raise ScheduleError("not-an-instruction", index=int(at), detail=f"{value!r} is no number of an op or a storage") from None


def _is_int64(value: Any) -> bool:
    try:
        return -(2**63) <= index(value) < 2**63
    except TypeError:
        return False


def compiled(function: Callable) -> Callable:
    """Compile on the first call; keep the machine code on disk where numba finds a folder that it may write.

    What a collection's module defines is compiled in each process: such modules are loaded by path under names that hold their digest, and
    numba's files on disk would look for a name that no longer is.
    """
    return _compiled(function)


def bare(function: Callable) -> Callable:
    """As `compiled`, of a function that makes no array, nor keeps one: references are not counted.

    Counting would be most of its time where it hands tuples of many arrays to small functions.
    """
    return _compiled(function, _nrt=False)


def inlined(function: Callable) -> Callable:
    """As `bare`, and compiled into each caller: handing over tuples of many arrays would be most of its time."""
    return _compiled(function, _nrt=False, forceinline=True)


def _compiled(function: Callable, **options: bool) -> Callable:
    if not function.__module__.startswith("vramlab."):
        return numba.njit(**options)(function)
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written: each process compiles anew
        return numba.njit(**options)(function)


@compiled
def _refuse(state, reason, storage, use, found, needed):
    """Note why the walk stops; the walk itself adds the instruction and the op."""
    fault = state.fault
    fault[0], fault[3], fault[4], fault[5], fault[6] = reason, storage, use, found, needed
    return False


@compiled
def _apply(table, use, s, nbytes, state):
    """One use of one storage, by the table."""
    now = state.residency[s]
    then = table[use, now]
    if then == REFUSED:
        return _refuse(state, BY_TABLE, s, use, now, 0)
    state.held[ON_THE_DEVICE] += nbytes[s] * (ON_DEVICE[then] - ON_DEVICE[now])
    state.held[AT_THE_HOST] += nbytes[s] * (AT_HOST[then] - AT_HOST[now])
    state.residency[s] = then
    return True


@compiled
def _index_of_variant(tape, op, variant):
    """Where the op's variant of this number stands, NONE when it has no such."""
    for k in range(tape.first_variant[op], tape.first_variant[op + 1]):
        if tape.variant[k] == variant:
            return k
    return NONE


@compiled
def _may_run(tape, op, is_first, reuse, variant, state):
    """What must hold before an op runs, its inputs and outputs apart."""
    if variant != NONE and _index_of_variant(tape, op, variant) == NONE:
        return _refuse(state, VARIANT_NOT_ALLOWED, NONE, NONE, 0, 0)
    if is_first and state.is_computed[op]:
        return _refuse(state, COMPUTED_TWICE, NONE, NONE, 0, 0)
    if not is_first and not state.is_computed[op]:
        return _refuse(state, NOT_YET_COMPUTED, NONE, NONE, 0, 0)
    if not is_first and tape.again[op] != LEGAL:
        return _refuse(state, tape.again[op], NONE, NONE, 0, 0)
    rank = tape.random_rank[op]
    if is_first and rank != NONE and rank != state.held[RANDOMS]:
        return _refuse(state, RANDOM_ORDER, NONE, NONE, rank, state.held[RANDOMS])
    out, taken = tape.takeover[op, 0], tape.takeover[op, 1]
    if reuse != NONE and (out == NONE or reuse != taken):
        return _refuse(state, REUSE_NOT_ALLOWED, reuse, NONE, 0, 0)
    if reuse != NONE and state.residency[out] != ABSENT:
        return _refuse(state, REUSE_OUTPUT_NOT_ABSENT, out, NONE, 0, 0)
    return True


@compiled
def _compute(table, tape, op, state):
    """The first run of an op."""
    for k in range(tape.first_use[op], tape.first_use[op + 1]):
        use, s, needed = tape.use[k], tape.used[k], tape.version[k]
        if not _apply(table, use, s, tape.nbytes, state):
            return False
        if needed != ANY_VERSION and state.version[s] != needed:
            return _refuse(state, STALE_WRITE if use == WRITE else STALE_READ, s, use, state.version[s], needed)
        if use == WRITE:
            state.version[s] += 1
    state.is_computed[op] = True
    if tape.random_rank[op] != NONE:
        state.held[RANDOMS] += 1
    return True


@compiled
def _recompute(table, tape, op, state):
    """A further run of an op: state is left alone. Returns the bytes of duplicates, REFUSED when it is refused."""
    duplicates, missing = 0, 0
    for k in range(tape.first_use[op], tape.first_use[op + 1]):
        use, s, needed = tape.use[k], tape.used[k], tape.version[k]
        if use == WRITE:
            continue
        if use == CREATE:
            use = RECREATE
            if state.residency[s] != ABSENT:
                duplicates += tape.nbytes[s]
            else:
                missing, needed = missing + 1, 0
        if not _apply(table, use, s, tape.nbytes, state):
            return REFUSED
        if needed != ANY_VERSION and state.version[s] != needed:
            _refuse(state, STALE_READ if use == READ else STALE_RECOMPUTE, s, use, state.version[s], needed)
            return REFUSED
    if missing == 0:
        _refuse(state, NOTHING_ABSENT, NONE, NONE, 0, 0)
        return REFUSED
    return duplicates


@compiled
def _run(table, tape, op, is_first, reuse, variant, state):
    """One run of an op. Returns the bytes inside it beyond what it creates, REFUSED when it is refused."""
    if not _may_run(tape, op, is_first, reuse, variant, state):
        return REFUSED
    duplicates = 0
    if not is_first:
        duplicates = _recompute(table, tape, op, state)
    elif not _compute(table, tape, op, state):
        return REFUSED
    if duplicates == REFUSED or (reuse != NONE and not _apply(table, TAKE_OVER, reuse, tape.nbytes, state)):
        return REFUSED
    if variant == NONE:
        return duplicates + tape.workspace_bytes[op]
    return duplicates + tape.variant_workspace_bytes[_index_of_variant(tape, op, variant)]


@compiled
def _end(table, tape, state):
    """What must hold after the last instruction."""
    for op in range(len(state.is_computed)):
        if not state.is_computed[op]:
            state.fault[2] = op
            return _refuse(state, NOT_COMPUTED, NONE, NONE, 0, 0)
    for s in range(len(state.residency)):
        if not _apply(table, KEEP if tape.at_end[s] else DROP, s, tape.nbytes, state):
            return False
    return True


@compiled
def _start(tape):
    """What a walk begins with."""
    residency = np.where(tape.at_start, RESIDENT, ABSENT)
    held = np.array([tape.nbytes[tape.at_start].sum(), 0, 0])
    fault = np.full(7, NONE)
    fault[0] = LEGAL
    return State(residency, np.zeros(len(residency), np.int64), np.zeros(len(tape.seconds), np.bool_), held, fault)


@compiled
def _step(table, tape, code, operand, reuse, variant, state):
    """Obey one instruction. Returns the bytes inside the op that it runs, 0 for others; whether it was legal stands in `state.fault`."""
    is_run = code == COMPUTE or code == RECOMPUTE
    if not 0 <= operand < (len(state.is_computed) if is_run else len(state.residency)):
        _refuse(state, UNKNOWN_OP if is_run else UNKNOWN_STORAGE, NONE, NONE, operand, 0)
        return 0
    if not is_run:
        _apply(table, code - FREE + USE_OF_FREE, operand, tape.nbytes, state)
        return 0
    state.fault[2] = operand
    return _run(table, tape, operand, code == COMPUTE, reuse, variant, state)


@compiled
def _within(inner_peak_bytes, host_bytes, device_budget, host_budget, state):
    """Do these bytes fit?"""
    if inner_peak_bytes > device_budget:
        return _refuse(state, DEVICE_BUDGET, NONE, NONE, inner_peak_bytes, device_budget)
    if host_bytes > host_budget:
        return _refuse(state, HOST_BUDGET, NONE, NONE, host_bytes, host_budget)
    return True


@compiled
def walk(table, tape, schedule, device_budget, host_budget, live_bytes, inner_peak_bytes, host_bytes):
    """Run a schedule over a tape by the table, filling the three arrays. Returns the fields of a `Fault`."""
    state = _start(tape)
    held, fault = state.held, state.fault
    for i in range(len(schedule.code)):
        before = held[ON_THE_DEVICE]
        fault[1], fault[2] = i, NONE
        inside = _step(table, tape, schedule.code[i], schedule.operand[i], schedule.reuse[i], schedule.variant[i], state)
        if fault[0] != LEGAL:
            return fault
        live_bytes[i], host_bytes[i] = held[ON_THE_DEVICE], held[AT_THE_HOST]
        inner_peak_bytes[i] = max(before, held[ON_THE_DEVICE] + inside)
        if not _within(inner_peak_bytes[i], host_bytes[i], device_budget, host_budget, state):
            return fault
    fault[1], fault[2] = len(schedule.code), NONE
    _end(table, tape, state)
    return fault


@compiled
def fill_variant_seconds(tape, schedule, seconds):
    """Write the seconds of the runs that name a variant."""
    for i in range(len(schedule.code)):
        if schedule.variant[i] != NONE:
            seconds[i] = tape.variant_seconds[_index_of_variant(tape, schedule.operand[i], schedule.variant[i])]


@compiled
def _tick(code, operand, seconds, is_full_duplex, clock, copy_end):
    """One instruction takes its time. Returns its start and end; `clock` [5] has the instants by the names above, `copy_end` [storages]."""
    start, now = clock[NOW], clock[NOW]
    end = now + seconds
    if code == COMPUTE or code == RECOMPUTE:
        clock[NOW] = end
    elif code == OFFLOAD:
        start = max(now, clock[D2H_FREE])
        end = start + seconds
        clock[D2H_FREE] = copy_end[operand] = end
    elif code == PREFETCH:  # copy_end is still that of the storage's last D2H copy, or of a copy long done
        start = max(now, clock[H2D_FREE], copy_end[operand])
        end = start + seconds
        clock[H2D_FREE] = copy_end[operand] = end
    elif code == WAIT:
        end = max(now, copy_end[operand])
        clock[STALL] += end - now
        clock[NOW] = end
    if not is_full_duplex:
        clock[D2H_FREE] = clock[H2D_FREE] = max(clock[D2H_FREE], clock[H2D_FREE])
    return start, end


@compiled
def run_clock(schedule, duration, storages, is_full_duplex, start_seconds, end_seconds):
    """Fill the start and end of each instruction; `duration` [instructions] is that of its op or copy. Returns step and stall seconds."""
    clock, copy_end = np.zeros(CLOCK), np.zeros(storages)
    for i in range(len(schedule.code)):
        start_seconds[i], end_seconds[i] = _tick(schedule.code[i], schedule.operand[i], duration[i], is_full_duplex, clock, copy_end)
    return clock[NOW], clock[STALL]


# --- edits ----------------------------------------------------------------------------------------------------------------
class Costs(NamedTuple):
    """What copies take on a device, and what may be held."""

    d2h_seconds: np.ndarray  # float64 [storages]
    h2d_seconds: np.ndarray  # float64 [storages]
    is_full_duplex: bool
    device_budget: int
    host_budget: int


class Saved(NamedTuple):
    """Where the walk of a legal schedule stands: row k before instruction k * every, and what is still to come from there."""

    every: int
    residency: np.ndarray  # int64 [rows, storages]
    version: np.ndarray  # int64 [rows, storages]
    is_computed: np.ndarray  # bool [rows, ops]
    held: np.ndarray  # int64 [rows, 3]
    clock: np.ndarray  # float64 [rows, CLOCK]
    copy_end: np.ndarray  # float64 [rows, storages]
    peaks_before: np.ndarray  # int64 [rows, 2]: most bytes on the device, at the host
    peaks_after: np.ndarray  # int64 [rows, 2]
    duration: np.ndarray  # float64 [instructions]


class Scratch(NamedTuple):
    """The walk of an edited schedule."""

    state: State
    clock: np.ndarray  # float64 [CLOCK]
    copy_end: np.ndarray  # float64 [storages]
    peaks: np.ndarray  # int64 [2]


@compiled
def seconds_of(tape, costs, code, operand, variant):
    """Of an instruction that is legal."""
    if code == COMPUTE or code == RECOMPUTE:
        return tape.seconds[operand] if variant == NONE else tape.variant_seconds[_index_of_variant(tape, operand, variant)]
    if code == OFFLOAD:
        return costs.d2h_seconds[operand]
    return costs.h2d_seconds[operand] if code == PREFETCH else 0.0


@compiled
def _obey(table, tape, costs, code, operand, reuse, variant, at, scratch):
    """One instruction in bytes and in seconds; False where it is illegal."""
    state = scratch.state
    before = state.held[ON_THE_DEVICE]
    state.fault[1], state.fault[2] = at, NONE
    inside = _step(table, tape, code, operand, reuse, variant, state)
    if state.fault[0] != LEGAL:
        return False
    inner, host = max(before, state.held[ON_THE_DEVICE] + inside), state.held[AT_THE_HOST]
    scratch.peaks[0], scratch.peaks[1] = max(scratch.peaks[0], inner), max(scratch.peaks[1], host)
    if not _within(inner, host, costs.device_budget, costs.host_budget, state):
        return False
    _tick(code, operand, seconds_of(tape, costs, code, operand, variant), costs.is_full_duplex, scratch.clock, scratch.copy_end)
    return True


@compiled
def save(table, tape, costs, schedule, saved):
    """Walk a legal schedule and fill the rows."""
    scratch = Scratch(_start(tape), np.zeros(CLOCK), np.zeros(len(tape.nbytes)), np.array([tape.nbytes[tape.at_start].sum(), 0]))
    since = np.zeros_like(saved.peaks_after)  # most bytes from this row to the next
    saved.peaks_before[0] = scratch.peaks
    _keep_row(saved, 0, scratch)
    for i in range(len(schedule.code)):
        row = i // saved.every
        if i % saved.every == 0:
            _keep_row(saved, row, scratch)
            scratch.peaks[:] = 0
        if not _obey(table, tape, costs, schedule.code[i], schedule.operand[i], schedule.reuse[i], schedule.variant[i], i, scratch):
            return False
        since[row] = scratch.peaks
        saved.duration[i] = seconds_of(tape, costs, schedule.code[i], schedule.operand[i], schedule.variant[i])
    highest = np.zeros(2, np.int64)
    for row in range(len(since) - 1, -1, -1):
        highest = np.maximum(highest, since[row])
        saved.peaks_after[row] = highest
    for row in range(1, len(since)):
        saved.peaks_before[row] = np.maximum(saved.peaks_before[row - 1], since[row - 1])
    return True


@compiled
def _keep_row(saved, row, scratch):
    state = scratch.state
    saved.residency[row], saved.version[row], saved.is_computed[row] = state.residency, state.version, state.is_computed
    saved.held[row], saved.clock[row], saved.copy_end[row] = state.held, scratch.clock, scratch.copy_end


@compiled
def _start_at(saved, row, scratch):
    state = scratch.state
    state.residency[:], state.version[:], state.is_computed[:] = saved.residency[row], saved.version[row], saved.is_computed[row]
    state.held[:], scratch.clock[:], scratch.copy_end[:] = saved.held[row], saved.clock[row], saved.copy_end[row]
    scratch.peaks[:], state.fault[:] = saved.peaks_before[row], NONE
    state.fault[0] = LEGAL


@compiled
def _stands_there(saved, row, state):
    """Does the walk stand, in bytes, where the saved one stood?"""
    for k in range(3):
        if state.held[k] != saved.held[row, k]:
            return False
    for s in range(len(state.residency)):
        if state.residency[s] != saved.residency[row, s] or state.version[s] != saved.version[row, s]:
            return False
    for op in range(len(state.is_computed)):
        if state.is_computed[op] != saved.is_computed[row, op]:
            return False
    return True


@compiled
def walk_edited(table, tape, costs, schedule, saved, begin, end, piece, scratch):
    """Walk the schedule with `piece` in place of its instructions from `begin` to before `end`; `scratch` then says what came of it.

    It restarts from the last row before `begin`. Once it stands, in bytes, where the saved walk stood, only time is left to be counted.
    """
    size, shift = len(schedule.code), len(piece.code) - (end - begin)
    row = min(begin // saved.every, len(saved.held) - 1)
    _start_at(saved, row, scratch)
    for i in range(row * saved.every, begin):
        _obey(table, tape, costs, schedule.code[i], schedule.operand[i], schedule.reuse[i], schedule.variant[i], i, scratch)
    for i in range(len(piece.code)):
        if not _obey(table, tape, costs, piece.code[i], piece.operand[i], piece.reuse[i], piece.variant[i], begin + i, scratch):
            return False
    for i in range(end, size):
        if i % saved.every == 0 and _stands_there(saved, i // saved.every, scratch.state):
            scratch.peaks[:] = np.maximum(scratch.peaks, saved.peaks_after[i // saved.every])
            return _only_time(schedule, saved, i, costs.is_full_duplex, scratch.clock, scratch.copy_end)
        if not _obey(table, tape, costs, schedule.code[i], schedule.operand[i], schedule.reuse[i], schedule.variant[i], i + shift, scratch):
            return False
    scratch.state.fault[1], scratch.state.fault[2] = size + shift, NONE
    return _end(table, tape, scratch.state)


@compiled
def _only_time(schedule, saved, begin, is_full_duplex, clock, copy_end):
    """The rest of the schedule as it was, on another clock. Scalars and bare arrays: this loop is most of what an edit takes."""
    code, operand, duration = schedule.code, schedule.operand, saved.duration
    now, d2h_free, h2d_free, stall = clock[NOW], clock[D2H_FREE], clock[H2D_FREE], clock[STALL]
    for i in range(begin, len(code)):
        kind = code[i]
        if kind <= RECOMPUTE:
            now += duration[i]
        elif kind == OFFLOAD:
            d2h_free = max(now, d2h_free) + duration[i]
            copy_end[operand[i]] = d2h_free
        elif kind == PREFETCH:
            h2d_free = max(now, h2d_free, copy_end[operand[i]]) + duration[i]
            copy_end[operand[i]] = h2d_free
        elif kind == WAIT:
            end = max(now, copy_end[operand[i]])
            stall += end - now
            now = end
        if not is_full_duplex:
            d2h_free = h2d_free = max(d2h_free, h2d_free)
    clock[NOW], clock[D2H_FREE], clock[H2D_FREE], clock[STALL] = now, d2h_free, h2d_free, stall
    return True


@compiled
def walk_moves(table, tape, costs, schedule, saved, moves, seconds, peaks, scratch):
    """Of each move (from, to) of one instruction, evaluated on its own: step seconds, inf where it is illegal, and the two peaks."""
    for k in range(len(moves)):
        source, target = moves[k]
        begin, end = min(source, target), max(source, target) + 1
        first = source == begin
        piece = FlatSchedule(_rolled(schedule.code[begin:end], first), _rolled(schedule.operand[begin:end], first),
                             _rolled(schedule.reuse[begin:end], first), _rolled(schedule.variant[begin:end], first))
        is_legal = walk_edited(table, tape, costs, schedule, saved, begin, end, piece, scratch)
        seconds[k] = scratch.clock[NOW] if is_legal else np.inf
        peaks[k] = scratch.peaks


@compiled
def _rolled(column, first):
    """Its first entry becomes the last, or its last the first."""
    new = np.empty_like(column)
    if first:
        new[:-1] = column[1:]
        new[-1] = column[0]
    else:
        new[1:] = column[:-1]
        new[0] = column[-1]
    return new
