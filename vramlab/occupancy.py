"""Where each storage is, op by op: the first pass over the choices of a step, in compiled loops.

Ops run first in tape order, with what has to run again; what is swapped is away from its first op on; each op takes its fastest variant
that fits. Memory depends on order alone, so this pass says whether the choices fit at all. It writes a log, and saves where it stands
every so many ops: choices that differ only from some op on are walked from the last saved row before it.

What is brought back early because something else is computed from it stays until its own turn, or leaves again, as `stays` says. So it is
of what is kept after its last use for the sake of that. What was dropped may be computed again some ops ahead of its turn.
Import this module when it is needed: numba is slow to load.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vramlab.gaps import AFTER, DROP, KEEP, NONE, SWAP, Step
from vramlab.kernels import bare, inlined

AWAY, HERE, OUT, LEAVING, BOTH, COMING = range(6)  # absent, resident, on the host, and in the later passes only: offloading, ...
FITS, DEVICE_FULL, HOST_FULL, IMPOSSIBLE, SLOW = range(5)  # what came of it; IMPOSSIBLE: too many runs, or one that may not be
RUN, GO, EARLY, FETCH, BORROW, QUIT = range(6)  # events: a run; leaves for the host; is copied there; comes back; likewise, early; is gone
LONGEST = 6  # runs an op of the tape, at most


class Log(NamedTuple):
    """What the first pass writes."""

    event: np.ndarray  # int8 [events]
    operand: np.ndarray  # int32 [events]: run, gap, storage or copy back
    run_op: np.ndarray  # int32 [runs]; NONE: the end of the step
    run_first: np.ndarray  # bool [runs]
    run_reuse: np.ndarray  # int32 [runs]
    run_lends: np.ndarray  # bool [runs]: what it writes over has a copy on the host by then
    run_variant: np.ndarray  # int32 [runs]: where it stands in the step's variants
    op_variant: np.ndarray  # int32 [ops]: that of the first run, which each later one takes too, as other algorithms give other bits
    run_made: np.ndarray  # int64 [runs]: bytes that stay, less what is taken over
    run_inside: np.ndarray  # int64 [runs]
    run_high: np.ndarray  # int64 [runs]: device bytes at the highest instant
    run_begin: np.ndarray  # float64 [runs]: without any stall
    back_storage: np.ndarray  # int32 [backs]: copies back in the order in which they are needed
    back_run: np.ndarray  # int32 [backs]: the run that needs it
    back_from: np.ndarray  # int32 [backs]: the earliest run that it may start before
    back_gap: np.ndarray  # int32 [backs]
    again: np.ndarray  # float64 [ops + 1]: seconds of what ran again before op i
    again_gap: np.ndarray  # int32 [ops + 1]: the gap that ended with that, or NONE
    row_side: np.ndarray  # int8 [rows]: which of the two states that there is room for


class Work(NamedTuple):
    """Room for the passes, and what came of them."""

    log: Log  # of the choices that were decoded last
    kept: Log  # of the choices that a search stands at; alike up to row SAME
    where: np.ndarray  # int8 [storages]
    gap: np.ndarray  # int32 [storages]: the one that it is in, or NONE
    next: np.ndarray  # int32 [storages]: the op that needs it next
    wanted: np.ndarray  # int32 [storages]: by runs that are about to come
    brought: np.ndarray  # bool [storages]: back before its own turn, or kept after its last use
    out_run: np.ndarray  # int32 [storages]: the run before which it may come back at the earliest
    ahead: np.ndarray  # int32 [ops + 1]: the first gap whose storage is computed again before this op, ahead of its use; or NONE
    ahead_next: np.ndarray  # int32 [gaps]: the next one of the same op, or NONE
    mark: np.ndarray  # int64 [ops + 1]: of which search for what has to run again
    stack: np.ndarray  # int32 [ops + 1]
    row_where: np.ndarray  # int8 [2 rows, storages]: states that were saved: of row r in side i that at 2 r + i
    row_brought: np.ndarray  # bool [2 rows, storages]
    row_out_run: np.ndarray  # int32 [2 rows, storages]
    row_count: np.ndarray  # int64 [2 rows, COUNTS]
    back_next: np.ndarray  # int32 [backs]: the next one that starts before the same run, or NONE
    high: np.ndarray  # int64 [runs]: run_high, with what is on its way back
    due: np.ndarray  # int32 [runs]: the first copy back that starts before the run, or NONE
    queue: np.ndarray  # int32 [backs]: copies back that are due
    issued: np.ndarray  # bool [backs]
    copy_end: np.ndarray  # float64 [storages]
    leaving: np.ndarray  # int32 [events]: gaps of what waits to leave, in order; NONE where it stays after all
    slot: np.ndarray  # int32 [storages]: its place there, or NONE
    count: np.ndarray  # int64: by the names below
    clock: np.ndarray  # float64: by the names below
    stall: np.ndarray  # float64 [gaps]: seconds that the step stood still for copies of a gap
    code: np.ndarray  # int8 [instructions]: the schedule
    argument: np.ndarray  # int32 [instructions]
    reuse: np.ndarray  # int32 [instructions]
    variant: np.ndarray  # int32 [instructions]: where it stands in the step's variants


EVENTS, RUNS, BACKS, WRITTEN, STAMP, BLOCKED, SHORT, LIVE, HOST, FIRST, LAST, SAME, EFFORT, AGAIN, COUNTS = range(15)
# BLOCKED: the op that did not fit, or the gap for which the host has no room; AGAIN: was it what runs again before that op;
# EFFORT: ops walked and runs timed, ever
NOW, D2H_FREE, H2D_FREE, STALLED, CLOCKS = range(5)


def work_for(step: Step) -> Work:
    """Room for a step."""
    storages, ops, gaps = len(step.nbytes), step.ops, len(step.gap_storage)
    uses = len(step.need) + len(step.made) + len(step.read)
    runs, events, backs = LONGEST * ops + 2, LONGEST * uses + 64, LONGEST * gaps + 64
    return Work(
        log=_log(step, runs, events, backs), kept=_log(step, runs, events, backs),
        where=np.zeros(storages, np.int8), gap=_ints(storages), next=_ints(storages), wanted=_ints(storages),
        brought=np.zeros(storages, np.bool_), out_run=_ints(storages), ahead=_ints(ops + 1),
        ahead_next=_ints(gaps), mark=np.zeros(ops + 1, np.int64), stack=_ints(ops + 1),
        row_where=np.zeros((2 * step.rows, storages), np.int8), row_brought=np.zeros((2 * step.rows, storages), np.bool_),
        row_out_run=np.zeros((2 * step.rows, storages), np.int32), row_count=np.zeros((2 * step.rows, COUNTS), np.int64),
        back_next=_ints(backs), high=np.zeros(runs, np.int64), due=_ints(runs), queue=_ints(backs), issued=np.zeros(backs, np.bool_),
        copy_end=np.zeros(storages), leaving=_ints(events), slot=_ints(storages), count=np.zeros(COUNTS, np.int64), clock=np.zeros(CLOCKS),
        stall=np.zeros(gaps), code=np.zeros(3 * events, np.int8), argument=_ints(3 * events), reuse=_ints(3 * events),
        variant=_ints(3 * events))


def _log(step: Step, runs: int, events: int, backs: int) -> Log:
    ops = step.ops
    return Log(
        event=np.zeros(events, np.int8), operand=_ints(events), run_op=_ints(runs), run_first=np.zeros(runs, np.bool_),
        run_reuse=_ints(runs), run_lends=np.zeros(runs, np.bool_), run_variant=_ints(runs), op_variant=_ints(ops),
        run_made=np.zeros(runs, np.int64), run_inside=np.zeros(runs, np.int64), run_high=np.zeros(runs, np.int64),
        run_begin=np.zeros(runs), back_storage=_ints(backs), back_run=_ints(backs), back_from=_ints(backs), back_gap=_ints(backs),
        again=np.zeros(ops + 1), again_gap=_ints(ops + 1), row_side=np.zeros(step.rows, np.int8))


def _ints(count: int) -> np.ndarray:
    return np.zeros(count, np.int32)


# --- the pass -----------------------------------------------------------------------------------------------------------
@inlined
def _note(w, kind, operand):
    at = w.count[EVENTS]
    w.count[EVENTS] = at + 1
    if at < len(w.log.event):
        w.log.event[at], w.log.operand[at] = kind, operand


@inlined
def _leave(step, action, w, s):
    """It leaves until its gap ends, or for good."""
    g = w.gap[s]
    if g != NONE and action[g] == SWAP:
        _note(w, GO, g)
        w.where[s] = OUT
        w.out_run[s] = w.count[RUNS]
        w.count[LIVE] -= step.nbytes[s]
    else:
        _discard(step, w, s)


@inlined
def _discard(step, w, s):
    """It is nowhere any more."""
    _note(w, QUIT, s)
    if w.where[s] == HERE:
        w.count[LIVE] -= step.nbytes[s]
    w.where[s] = AWAY


@inlined
def _fetch(step, w, s, is_borrowed):
    """A copy back."""
    back = w.count[BACKS]
    w.count[BACKS] = back + 1
    if back < len(w.log.back_run):
        w.log.back_storage[back], w.log.back_run[back] = s, w.count[RUNS]
        w.log.back_gap[back], w.log.back_from[back] = w.gap[s], w.out_run[s]
    _note(w, BORROW if is_borrowed else FETCH, back)
    w.where[s], w.brought[s] = HERE, is_borrowed
    w.count[LIVE] += step.nbytes[s]


@inlined
def _run(step, w, op, is_first, reuse, lends, leaner, budget, at):
    """One run: the first by its fastest variant that fits, each later one by the same. False where it does not fit."""
    made, inside, live, r = 0, 0, w.count[LIVE], w.count[RUNS]
    for k in range(step.first_made[op], step.first_made[op + 1]):
        s = step.made[k]
        if w.where[s] == AWAY:
            made += step.nbytes[s]
            w.where[s], w.brought[s] = HERE, not is_first
        else:
            inside += step.nbytes[s]
    if reuse != NONE:
        made -= step.nbytes[reuse]
        w.where[reuse] = OUT if lends else AWAY
        w.out_run[reuse] = r + 1
    last = step.first_variant[op + 1] - 1
    choice = min(step.first_variant[op] + max(leaner, 0), last) if is_first else w.log.op_variant[op]
    while is_first and leaner >= 0 and choice < last and live + made + inside + step.variant_bytes[choice] > budget:
        choice += 1
    inside += step.variant_bytes[choice]
    w.count[SHORT] = live + made + inside - budget
    if w.count[SHORT] > 0 or r + 2 >= len(w.log.run_op):
        w.count[BLOCKED], w.count[AGAIN] = at, not is_first
        return False
    w.log.run_op[r], w.log.run_first[r], w.log.run_reuse[r], w.log.run_lends[r], w.log.run_variant[r] = op, is_first, reuse, lends, choice
    if is_first:
        w.log.op_variant[op] = choice
    w.log.run_made[r], w.log.run_inside[r], w.log.run_high[r] = made, inside, live + made + inside
    w.log.run_begin[r + 1] = w.log.run_begin[r] + step.variant_seconds[choice]
    w.count[RUNS], w.count[LIVE] = r + 1, live + made
    _note(w, RUN, r)
    return True


@inlined
def _push(step, w, s, found):
    """The op that makes a missing storage goes on the stack, once; NONE where none does: it was there at the start. How many are there."""
    op = step.producer[s]
    at = step.ops if op == NONE else op
    if w.mark[at] == w.count[STAMP]:
        return found
    w.mark[at], w.stack[found] = w.count[STAMP], op
    return found + 1


@bare
def _missing_ops(step, w, at):
    """Fill the stack with the ops that are to run again before op `at`, in tape order; how many, -1 where one of them may not."""
    w.count[STAMP] += 1
    stamp, found, looked = w.count[STAMP], 0, 0
    for k in range(step.first_need[at], step.first_need[at + 1]):
        s = step.need[k]
        if w.where[s] == AWAY:
            found = _push(step, w, s, found)
    g = w.ahead[at]
    while g != NONE:
        if w.where[step.gap_storage[g]] == AWAY:
            found = _push(step, w, step.gap_storage[g], found)
        g = w.ahead_next[g]
    while looked < found:
        op = w.stack[looked]
        looked += 1
        if op == NONE or step.until[op] < at:
            return -1
        for k in range(step.first_read[op], step.first_read[op + 1]):
            if w.where[step.read[k]] == AWAY:
                found = _push(step, w, step.read[k], found)
    low, high = step.ops, -1
    for k in range(found):
        low, high = min(low, w.stack[k]), max(high, w.stack[k])
    found = 0
    for op in range(low, high + 1):
        if w.mark[op] == stamp:
            w.stack[found] = op
            found += 1
    return found


@inlined
def _is_over(step, w, s, at):
    """Is it of no use any more from op `at` on?"""
    g = w.gap[s]
    return w.next[s] > step.ops and (g == NONE or step.gap_end[g] < at)


@inlined
def _settle(step, choices, w, s, at):
    """Nothing that is about to run reads it: it stays until its turn, or leaves again."""
    g = w.gap[s]
    if _is_over(step, w, s, at):
        _discard(step, w, s)
    elif g != NONE and not choices.stays[g] and (choices.action[g] != KEEP or step.gap_kind[g] == AFTER):
        _leave(step, choices.action, w, s)
    w.brought[s] = g != NONE and step.gap_kind[g] == AFTER


@inlined
def _is_last(step, choices, w, s, at):
    """Does it leave for good, or until it is computed again, once the run that is about to come has read it?"""
    g = w.gap[s]
    leaves = _is_over(step, w, s, at) or (g != NONE and choices.action[g] == DROP and not choices.stays[g])
    return leaves and w.where[s] == HERE and w.brought[s] and w.wanted[s] == 1


@bare
def _run_again(step, choices, w, at, budget):
    """All that has to run again before op `at`."""
    found = _missing_ops(step, w, at)
    if found < 0:
        w.count[SHORT] = 0
        return False
    for j in range(found):
        for k in range(step.first_read[w.stack[j]], step.first_read[w.stack[j] + 1]):
            w.wanted[step.read[k]] += 1
    for j in range(found):
        op = w.stack[j]
        reads, past_reads = step.first_read[op], step.first_read[op + 1]
        for k in range(reads, past_reads):
            if w.where[step.read[k]] == OUT:
                _fetch(step, w, step.read[k], w.next[step.read[k]] != at)
        out, taken = step.takeover[op, 0], step.takeover[op, 1]
        is_free = taken != NONE and w.where[out] == AWAY and _is_last(step, choices, w, taken, at)
        if not _run(step, w, op, False, taken if is_free else NONE, False, choices.leaner[op], budget, at):
            return False
        for k in range(reads, past_reads):
            s = step.read[k]
            w.wanted[s] -= 1
            if w.wanted[s] == 0 and w.brought[s] and w.where[s] == HERE:
                _settle(step, choices, w, s, at)
        for k in range(step.first_made[op], step.first_made[op + 1]):
            s = step.made[k]
            if w.wanted[s] == 0 and w.brought[s] and w.where[s] == HERE:
                _settle(step, choices, w, s, at)
    return True


@inlined
def _want_ahead(step, w, at, by):
    """Count what is to be computed again ahead of its use as wanted, or no more. Is any of it missing?"""
    is_missing, g = False, w.ahead[at]
    while g != NONE:
        s = step.gap_storage[g]
        w.wanted[s] += by
        is_missing = is_missing or w.where[s] == AWAY
        if by < 0:
            w.brought[s] = False
        g = w.ahead_next[g]
    return is_missing


@inlined
def _culprit(step, w, at):
    """The gap that ends with what runs again before op `at`."""
    culprit, g = NONE, w.ahead[at]
    while g != NONE:
        culprit, g = max(culprit, g), w.ahead_next[g]
    for k in range(step.first_need[at], step.first_need[at + 1]):
        if w.where[step.need[k]] == AWAY:
            culprit = w.gap[step.need[k]]
    return culprit


@inlined
def _bring(step, choices, w, at, budget):
    """Make readable what op `at` needs, and what is computed again ahead of its use."""
    began = w.log.run_begin[w.count[RUNS]]
    w.log.again_gap[at] = NONE
    is_missing = _want_ahead(step, w, at, 1)
    for k in range(step.first_need[at], step.first_need[at + 1]):
        w.wanted[step.need[k]] += 1
        is_missing = is_missing or w.where[step.need[k]] == AWAY
    if is_missing:
        culprit = _culprit(step, w, at)
        if not _run_again(step, choices, w, at, budget):
            return False
        w.log.again_gap[at], w.log.again[at] = culprit, w.log.run_begin[w.count[RUNS]] - began
    _want_ahead(step, w, at, -1)
    for k in range(step.first_need[at], step.first_need[at + 1]):
        s = step.need[k]
        w.brought[s] = False
        if w.where[s] == OUT:
            _fetch(step, w, s, False)
    for k in range(step.first_over[at], step.first_over[at + 1]):
        s = step.gap_storage[step.over[k]]
        if w.where[s] != AWAY:
            _discard(step, w, s)
    return True


@inlined
def _plan_ahead(step, choices, w, g, at):
    """What is dropped in a gap may have to be computed again ahead of its use, at op `at` or later."""
    if choices.action[g] == DROP and choices.lead[g] > 0 and step.gap_kind[g] != AFTER:
        before = max(step.gap_end[g] - choices.lead[g], step.gap_begin[g] + 2)
        if at <= before < step.gap_end[g]:
            w.ahead_next[g], w.ahead[before] = w.ahead[before], g


@inlined
def _after_use(step, choices, w, s, gap, following):
    """Its use by a first run is over."""
    w.gap[s], w.next[s] = gap, following
    if gap != NONE:
        _plan_ahead(step, choices, w, gap, step.gap_begin[gap] + 1)
        w.brought[s] = step.gap_kind[gap] == AFTER
    if w.where[s] == HERE and ((gap == NONE and following > step.ops) or (gap != NONE and choices.action[gap] != KEEP)):
        _leave(step, choices.action, w, s)


@inlined
def _fits(step, w, op, budget):
    """Does the first run of an op, by its leanest variant, without writing over anything?"""
    nbytes = w.count[LIVE] + step.variant_bytes[step.first_variant[op + 1] - 1]
    for k in range(step.first_made[op], step.first_made[op + 1]):
        nbytes += step.nbytes[step.made[k]]
    return nbytes <= budget


@inlined
def _taken(step, choices, w, op, action):
    """What the first run of an op writes over: an input that is needed no more, or leaves by this action; NONE where there is none."""
    out, taken = step.takeover[op, 0], step.takeover[op, 1]
    if taken == NONE or w.where[out] != AWAY or w.wanted[taken] != 1:
        return NONE
    for k in range(step.first_need[op], step.first_need[op + 1]):
        if step.need[k] == taken:
            gap = step.need_gap[k]
            is_last = choices.action[gap] == action if gap != NONE else step.need_next[k] > step.ops
            return taken if is_last else NONE
    return NONE


@bare
def _begin(step, choices, w, budget):
    """What is there at the start. False where that does not fit."""
    w.where[:], w.gap[:], w.next[:], w.brought[:], w.ahead[:] = AWAY, NONE, step.ops + 1, False, NONE
    w.count[EVENTS], w.count[RUNS], w.count[BACKS], w.count[LIVE], w.log.run_begin[0] = 0, 0, 0, step.state_bytes, 0.0
    begin, end = step.first_made[step.ops], step.first_made[step.ops + 1]
    for k in range(begin, end):
        w.where[step.made[k]] = HERE
        w.count[LIVE] += step.nbytes[step.made[k]]
    if w.count[LIVE] > budget:
        w.count[BLOCKED], w.count[SHORT] = 0, w.count[LIVE] - budget
        return False
    for k in range(begin, end):
        _after_use(step, choices, w, step.made[k], step.made_gap[k], step.made_next[k])
    return True


@bare
def _keep_row(w, row):
    """Save where the walk stands, beside the state that is kept."""
    side = 1 - w.kept.row_side[row]
    at, w.log.row_side[row] = 2 * row + side, side
    for s in range(len(w.where)):
        w.row_where[at, s], w.row_brought[at, s], w.row_out_run[at, s] = w.where[s], w.brought[s], w.out_run[s]
    for k in range(COUNTS):
        w.row_count[at, k] = w.count[k]


@bare
def _start_at(step, choices, w, row):
    """The walk stands where it was saved."""
    at = 2 * row + w.log.row_side[row]
    w.ahead[:] = NONE
    for s in range(len(w.where)):
        w.where[s], w.brought[s], w.out_run[s] = w.row_where[at, s], w.row_brought[at, s], w.row_out_run[at, s]
        w.gap[s], w.next[s] = step.row_gap[row, s], step.row_next[row, s]
        if w.gap[s] != NONE:
            _plan_ahead(step, choices, w, w.gap[s], row * step.spacing)
    w.count[EVENTS], w.count[RUNS] = w.row_count[at, EVENTS], w.row_count[at, RUNS]
    w.count[BACKS], w.count[LIVE] = w.row_count[at, BACKS], w.row_count[at, LIVE]


@inlined
def _copy(source, target, low, high):
    """One entry at a time: assigning slices would count references."""
    for k in range(max(low, 0), high):
        target[k] = source[k]


@bare
def copy_log(step, w, source, target, low, high):
    """What a walk has written between two of its rows, and the rows after the lower one."""
    first, last = 2 * low + source.row_side[low], 2 * high + source.row_side[high]
    begin, end = w.row_count[first, EVENTS] if low else 0, w.row_count[last, EVENTS]
    _copy(source.event, target.event, begin, end)
    _copy(source.operand, target.operand, begin, end)
    begin, end = w.row_count[first, RUNS] if low else 0, w.row_count[last, RUNS] + 1
    _copy(source.run_op, target.run_op, begin, end)
    _copy(source.run_first, target.run_first, begin, end)
    _copy(source.run_reuse, target.run_reuse, begin, end)
    _copy(source.run_lends, target.run_lends, begin, end)
    _copy(source.run_variant, target.run_variant, begin, end)
    _copy(source.run_made, target.run_made, begin, end)
    _copy(source.run_inside, target.run_inside, begin, end)
    _copy(source.run_high, target.run_high, begin, end)
    _copy(source.run_begin, target.run_begin, begin, end)
    begin, end = w.row_count[first, BACKS] if low else 0, w.row_count[last, BACKS]
    _copy(source.back_storage, target.back_storage, begin, end)
    _copy(source.back_run, target.back_run, begin, end)
    _copy(source.back_from, target.back_from, begin, end)
    _copy(source.back_gap, target.back_gap, begin, end)
    begin, end = low * step.spacing, min(high * step.spacing, step.ops)
    _copy(source.op_variant, target.op_variant, begin, end)
    _copy(source.again, target.again, begin, end + 1)
    _copy(source.again_gap, target.again_gap, begin, end + 1)
    _copy(source.row_side, target.row_side, low + 1, high + 1)


@bare
def occupy(step, choices, w, budget, row, limit):
    """The first pass, from a saved row on; 0 is the start. What came of it: FITS, DEVICE_FULL, IMPOSSIBLE, or SLOW: not within `limit`."""
    w.wanted[:] = 0
    w.count[BLOCKED], w.count[SHORT], w.count[AGAIN] = NONE, 0, False
    if row > 0:
        _start_at(step, choices, w, row)
    elif not _begin(step, choices, w, budget):
        return DEVICE_FULL
    for op in range(row * step.spacing, step.ops):
        w.count[EFFORT] += 1
        if op % step.spacing == 0 and op > row * step.spacing:
            _keep_row(w, op // step.spacing)
        if not _bring(step, choices, w, op, budget) or not _first_run(step, choices, w, op, budget):
            return DEVICE_FULL if w.count[SHORT] > 0 else IMPOSSIBLE
        if w.log.run_begin[w.count[RUNS]] + step.seconds_left[op + 1] > limit:
            return SLOW
    if row < step.rows - 1:
        if not _bring(step, choices, w, step.ops, budget):
            return DEVICE_FULL if w.count[SHORT] > 0 else IMPOSSIBLE
        _keep_row(w, step.rows - 1)
    return _end(step, w, budget)


@bare
def _end(step, w, budget):
    """What must hold at the end."""
    r = w.count[RUNS]
    w.count[BLOCKED], w.count[SHORT], w.count[AGAIN] = step.ops, w.count[LIVE] - budget, False
    w.log.run_op[r], w.log.run_high[r], w.log.run_made[r], w.log.run_inside[r] = NONE, w.count[LIVE], 0, 0
    if w.count[SHORT] > 0:
        return DEVICE_FULL
    return FITS if w.count[EVENTS] <= len(w.log.event) and w.count[BACKS] <= len(w.log.back_run) else IMPOSSIBLE


@inlined
def _first_run(step, choices, w, op, budget):
    """An op runs for the first time, and what it was the last to use leaves. False where it does not fit."""
    taken = _taken(step, choices, w, op, DROP)
    lends = taken == NONE and not _fits(step, w, op, budget)
    if lends:  # what is swapped from here on may be written over, once it is copied: the step stands still for that
        taken = _taken(step, choices, w, op, SWAP)
    if not _run(step, w, op, True, taken, lends and taken != NONE, choices.leaner[op], budget, op):
        return False
    for k in range(step.first_need[op], step.first_need[op + 1]):
        s = step.need[k]
        w.wanted[s] -= 1
        _after_use(step, choices, w, s, step.need_gap[k], step.need_next[k])
    for k in range(step.first_made[op], step.first_made[op + 1]):
        if step.made_early[k] != NONE and choices.action[step.made_early[k]] == SWAP:
            _note(w, EARLY, step.made_early[k])
        _after_use(step, choices, w, step.made[k], step.made_gap[k], step.made_next[k])
    return True
