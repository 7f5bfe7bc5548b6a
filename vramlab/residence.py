"""Where each storage is between two of its uses, chosen gap by gap, and the schedule that follows, in compiled loops.

A *gap* is a storage together with two ops, neither neighbours, that use it one after the other. In it the storage is kept, swapped (copied
to the host as soon as the first op has run, and back) or dropped (computed again before the second op, with all that is missing for it).
Ops run first in tape order. Everything else follows from these choices in three passes over the step:

    structure   runs in order, with what has to run again; what is swapped is away from its first op on; each run takes its fastest
                variant that fits. Says whether the choices fit at all: memory depends on order alone
    copies back from the last to the first, each as late as the link lets it end in time, as far as memory allows
    time        copies to the host start at once; what was copied leaves only when room is needed, what is already over first;
                a copy back that does not fit yet waits for the next run; then the clock is the simulator's

What is brought back early because something else is computed from it stays until its own turn, or leaves again, as `stays` says.
Import this module when it is needed: numba is slow to load.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from vramlab.device import DeviceProfile
from vramlab.edits import costs_of
from vramlab.kernels import (
    COMPUTE, FREE, FREE_HOST, NONE, OFFLOAD, PREFETCH, RECOMPUTE, WAIT, bare,
)  # numba's cache on disk does not notice when these change: touch this file then
from vramlab.planner import Budget
from vramlab.player import StepFacts
from vramlab.schedule import Compute, Free, FreeHost, Instruction, Offload, Prefetch, Recompute, Schedule, Wait
from vramlab.tape import Op, Tape

KEEP, SWAP, DROP = range(3)
AWAY, HERE, OUT, LEAVING, BOTH, COMING = range(6)  # absent, resident, on the host, and in the third pass only: offloading, ...
FITS, DEVICE_FULL, HOST_FULL, TOO_LONG = range(4)  # what came of it
RUN, GO, EARLY, FETCH, BORROW, QUIT = range(6)  # events: a run; leaves for the host; is copied there; comes back; likewise, early; is gone
LONGEST = 6  # runs an op of the tape, at most


class Step(NamedTuple):
    """A tape as the passes read it. State that stays is left out of all lists. Op `ops` stands for the end of the step."""

    ops: int
    state_bytes: int
    nbytes: np.ndarray  # int64 [storages]
    producer: np.ndarray  # int32 [storages]
    first_need: np.ndarray  # int32 [ops + 2]: what op i reads or overwrites
    need: np.ndarray  # int32
    need_gap: np.ndarray  # int32: the gap of that storage that begins with op i, or NONE
    need_next: np.ndarray  # int32: the op that needs it next; ops: the end; ops + 1: none
    first_read: np.ndarray  # int32 [ops + 1]: what a further run reads
    read: np.ndarray  # int32
    first_made: np.ndarray  # int32 [ops + 2]: what op i creates; at `ops`: what is there at the start
    made: np.ndarray  # int32
    made_gap: np.ndarray  # int32
    made_next: np.ndarray  # int32
    made_early: np.ndarray  # int32: the first gap that its storage has, where only ops one after the other use it before; or NONE
    first_write: np.ndarray  # int32 [ops + 1]
    write: np.ndarray  # int32
    takeover: np.ndarray  # int32 [ops, 2]
    first_variant: np.ndarray  # int32 [ops + 1]: none beats another; the fastest first
    variant_seconds: np.ndarray  # float64
    variant_bytes: np.ndarray  # int64
    gap_storage: np.ndarray  # int32 [gaps]: ascending
    gap_begin: np.ndarray  # int32 [gaps]: the first op, -1 for the start
    gap_end: np.ndarray  # int32 [gaps]
    gap_may_drop: np.ndarray  # bool [gaps]
    is_kept: np.ndarray  # bool [storages]: at the end


class Choices(NamedTuple):
    """What is chosen."""

    action: np.ndarray  # int8 [gaps]
    stays: np.ndarray  # bool [gaps]: what comes back early in a gap that is swapped or dropped stays
    lead: np.ndarray  # int8 [gaps]: a copy back starts as late as the link permits (0), that much again earlier (1), as memory permits (2)
    leaner: np.ndarray  # int8 [ops]: so many of the fastest variants are passed over


class Work(NamedTuple):
    """Room for the passes, and what came of them."""

    where: np.ndarray  # int8 [storages]
    gap: np.ndarray  # int32 [storages]: the one that it is in, or NONE
    next: np.ndarray  # int32 [storages]: the op that needs it next
    wanted: np.ndarray  # int32 [storages]: by runs that are about to come
    brought: np.ndarray  # bool [storages]: back before its own turn
    out_run: np.ndarray  # int32 [storages]: the run before which it may come back at the earliest
    mark: np.ndarray  # int64 [ops]: of which search for what has to run again
    stack: np.ndarray  # int32 [ops + 1]
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
    back_next: np.ndarray  # int32 [backs]: the next one that starts before the same run, or NONE
    due: np.ndarray  # int32 [runs]: the first copy back that starts before the run, or NONE
    queue: np.ndarray  # int32 [backs]: copies back that are due
    issued: np.ndarray  # bool [backs]
    copy_end: np.ndarray  # float64 [storages]
    leaving: np.ndarray  # int32 [events]: gaps of what waits to leave, in order; NONE where it stays after all
    slot: np.ndarray  # int32 [storages]: its place there, or NONE
    count: np.ndarray  # int64: by the names below
    clock: np.ndarray  # float64: by the names below
    stall: np.ndarray  # float64 [gaps]: seconds that the step stood still for copies of a gap
    again: np.ndarray  # float64 [gaps]: seconds of what ran again to end a gap
    code: np.ndarray  # int8 [instructions]: the schedule
    argument: np.ndarray  # int32 [instructions]
    reuse: np.ndarray  # int32 [instructions]
    variant: np.ndarray  # int32 [instructions]: where it stands in the step's variants


EVENTS, RUNS, BACKS, WRITTEN, STAMP, BLOCKED, SHORT, LIVE, HOST, FIRST, LAST, COUNTS = range(12)  # BLOCKED: the op that did not fit
NOW, D2H_FREE, H2D_FREE, STALLED, CLOCKS = range(5)


# --- structure ------------------------------------------------------------------------------------------------------------
@bare
def _note(w, kind, operand):
    at = w.count[EVENTS]
    w.count[EVENTS] = at + 1
    if at < len(w.event):
        w.event[at], w.operand[at] = kind, operand


@bare
def _leave(step, action, w, s):
    """It leaves until its gap ends, or for good."""
    g = w.gap[s]
    if g != NONE and action[g] == SWAP:
        _note(w, GO, g)
        w.where[s] = OUT
        w.out_run[s] = w.count[RUNS]
    else:
        _note(w, QUIT, s)
        w.where[s] = AWAY
    w.count[LIVE] -= step.nbytes[s]


@bare
def _fetch(step, w, s, is_borrowed):
    """A copy back."""
    back = w.count[BACKS]
    w.count[BACKS] = back + 1
    if back < len(w.back_run):
        w.back_storage[back], w.back_run[back], w.back_gap[back], w.back_from[back] = s, w.count[RUNS], w.gap[s], w.out_run[s]
    _note(w, BORROW if is_borrowed else FETCH, back)
    w.where[s], w.brought[s] = HERE, is_borrowed
    w.count[LIVE] += step.nbytes[s]


@bare
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
    choice = min(step.first_variant[op] + leaner, last) if is_first else w.op_variant[op]
    while is_first and choice < last and live + made + inside + step.variant_bytes[choice] > budget:
        choice += 1
    inside += step.variant_bytes[choice]
    w.count[SHORT] = live + made + inside - budget
    if w.count[SHORT] > 0 or r + 2 >= len(w.run_op):
        w.count[BLOCKED] = at
        return False
    w.run_op[r], w.run_first[r], w.run_reuse[r], w.run_lends[r], w.run_variant[r] = op, is_first, reuse, lends, choice
    if is_first:
        w.op_variant[op] = choice
    w.run_made[r], w.run_inside[r], w.run_high[r] = made, inside, live + made + inside
    w.run_begin[r + 1] = w.run_begin[r] + step.variant_seconds[choice]
    w.count[RUNS], w.count[LIVE] = r + 1, live + made
    _note(w, RUN, r)
    return True


@bare
def _missing_ops(step, w, at):
    """Fill the stack with the ops that have to run again before op `at`, in tape order; how many."""
    w.count[STAMP] += 1
    stamp, found, looked = w.count[STAMP], 0, 0
    for k in range(step.first_need[at], step.first_need[at + 1]):
        s = step.need[k]
        if w.where[s] == AWAY and w.mark[step.producer[s]] != stamp:
            w.mark[step.producer[s]] = stamp
            w.stack[found] = step.producer[s]
            found += 1
    while looked < found:
        op = w.stack[looked]
        looked += 1
        for k in range(step.first_read[op], step.first_read[op + 1]):
            s = step.read[k]
            if w.where[s] == AWAY and w.mark[step.producer[s]] != stamp:
                w.mark[step.producer[s]] = stamp
                w.stack[found] = step.producer[s]
                found += 1
    low, high = step.ops, -1
    for k in range(found):
        low, high = min(low, w.stack[k]), max(high, w.stack[k])
    found = 0
    for op in range(low, high + 1):
        if w.mark[op] == stamp:
            w.stack[found] = op
            found += 1
    return found


@bare
def _settle(step, choices, w, s):
    """Nothing that is about to run reads it: it stays until its turn, or leaves again."""
    g = w.gap[s]
    w.brought[s] = False
    if w.next[s] > step.ops or (g != NONE and choices.action[g] != KEEP and not choices.stays[g]):
        _leave(step, choices.action, w, s)


@bare
def _is_last(step, choices, w, s):
    """Does it leave for good, or until it is computed again, once the run that is about to come has read it?"""
    g = w.gap[s]
    leaves = w.next[s] > step.ops or (g != NONE and choices.action[g] == DROP and not choices.stays[g])
    return leaves and w.where[s] == HERE and w.brought[s] and w.wanted[s] == 1


@bare
def _run_again(step, choices, w, at, budget):
    """All that has to run again before op `at`."""
    found = _missing_ops(step, w, at)
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
        is_free = taken != NONE and w.where[out] == AWAY and _is_last(step, choices, w, taken)
        if not _run(step, w, op, False, taken if is_free else NONE, False, choices.leaner[op], budget, at):
            return False
        for k in range(reads, past_reads):
            s = step.read[k]
            w.wanted[s] -= 1
            if w.wanted[s] == 0 and w.brought[s] and w.where[s] == HERE:
                _settle(step, choices, w, s)
        for k in range(step.first_made[op], step.first_made[op + 1]):
            s = step.made[k]
            if w.wanted[s] == 0 and w.brought[s] and w.where[s] == HERE:
                _settle(step, choices, w, s)
    return True


@bare
def _bring(step, choices, w, at, budget):
    """Make readable what op `at` needs."""
    is_missing, began = False, w.run_begin[w.count[RUNS]]
    for k in range(step.first_need[at], step.first_need[at + 1]):
        w.wanted[step.need[k]] += 1
        is_missing = is_missing or w.where[step.need[k]] == AWAY
    if is_missing:
        culprit = NONE
        for k in range(step.first_need[at], step.first_need[at + 1]):
            if w.where[step.need[k]] == AWAY:
                culprit = w.gap[step.need[k]]
        if not _run_again(step, choices, w, at, budget):
            return False
        if culprit != NONE:
            w.again[culprit] += w.run_begin[w.count[RUNS]] - began
    for k in range(step.first_need[at], step.first_need[at + 1]):
        s = step.need[k]
        w.brought[s] = False
        if w.where[s] == OUT:
            _fetch(step, w, s, False)
    return True


@bare
def _after_use(step, action, w, s, gap, following):
    """Its use by a first run is over."""
    w.gap[s], w.next[s] = gap, following
    if w.where[s] == HERE and (following > step.ops or (gap != NONE and action[gap] != KEEP)):
        _leave(step, action, w, s)


@bare
def _reset(step, w):
    w.where[:], w.gap[:], w.next[:], w.wanted[:], w.brought[:] = AWAY, NONE, step.ops + 1, 0, False
    w.again[:], w.stall[:], w.run_begin[0] = 0.0, 0.0, 0.0
    stamp = w.count[STAMP]
    w.count[:] = 0
    w.count[STAMP], w.count[BLOCKED], w.count[LIVE] = stamp, NONE, step.state_bytes


@bare
def _structure(step, choices, w, budget):
    """The first pass. False where the choices do not fit."""
    _reset(step, w)
    begin, end = step.first_made[step.ops], step.first_made[step.ops + 1]
    for k in range(begin, end):
        w.where[step.made[k]] = HERE
        w.count[LIVE] += step.nbytes[step.made[k]]
    if w.count[LIVE] > budget:
        w.count[BLOCKED], w.count[SHORT] = 0, w.count[LIVE] - budget
        return False
    for k in range(begin, end):
        _after_use(step, choices.action, w, step.made[k], step.made_gap[k], step.made_next[k])
    for op in range(step.ops):
        if not _bring(step, choices, w, op, budget):
            return False
        taken = _taken(step, choices, w, op, DROP)
        lends = taken == NONE and not _fits(step, w, op, budget)
        if lends:  # what is swapped from here on may be written over, once it is copied: the step stands still for that
            taken = _taken(step, choices, w, op, SWAP)
        if not _run(step, w, op, True, taken, lends and taken != NONE, choices.leaner[op], budget, op):
            return False
        for k in range(step.first_need[op], step.first_need[op + 1]):
            s = step.need[k]
            w.wanted[s] -= 1
            _after_use(step, choices.action, w, s, step.need_gap[k], step.need_next[k])
        for k in range(step.first_made[op], step.first_made[op + 1]):
            if step.made_early[k] != NONE and choices.action[step.made_early[k]] == SWAP:
                _note(w, EARLY, step.made_early[k])
            _after_use(step, choices.action, w, step.made[k], step.made_gap[k], step.made_next[k])
    if not _bring(step, choices, w, step.ops, budget):
        return False
    r = w.count[RUNS]
    w.count[BLOCKED], w.count[SHORT] = step.ops, w.count[LIVE] - budget
    w.run_op[r], w.run_high[r], w.run_made[r], w.run_inside[r] = NONE, w.count[LIVE], 0, 0
    return w.count[SHORT] <= 0 and w.count[EVENTS] <= len(w.event) and w.count[BACKS] <= len(w.back_run)


@bare
def _fits(step, w, op, budget):
    """Does the first run of an op, by its leanest variant, without writing over anything?"""
    nbytes = w.count[LIVE] + step.variant_bytes[step.first_variant[op + 1] - 1]
    for k in range(step.first_made[op], step.first_made[op + 1]):
        nbytes += step.nbytes[step.made[k]]
    return nbytes <= budget


@bare
def _taken(step, choices, w, op, action):
    """What the first run of an op writes over: an input that is needed no more, or leaves by this action; NONE where there is none."""
    out, taken = step.takeover[op, 0], step.takeover[op, 1]
    if taken == NONE or w.where[out] != AWAY or w.wanted[taken] != 1:
        return NONE
    for k in range(step.first_need[op], step.first_need[op + 1]):
        if step.need[k] == taken:
            gap = step.need_gap[k]
            is_last = step.need_next[k] > step.ops or (gap != NONE and choices.action[gap] == action)
            return taken if is_last else NONE
    return NONE


# --- copies back ----------------------------------------------------------------------------------------------------------
@bare
def _place_backs(choices, h2d_seconds, nbytes, w, budget):
    """The second pass: before which run each copy back starts."""
    due, high, begin, back_next = w.due, w.run_high, w.run_begin, w.back_next
    due[:w.count[RUNS] + 1] = NONE
    following = np.inf  # when the copy after it starts
    for b in range(w.count[BACKS] - 1, -1, -1):
        s, r, lead = w.back_storage[b], w.back_run[b], choices.lead[w.back_gap[b]]
        latest = min(begin[r], following) - h2d_seconds[s]
        wish = latest - lead * h2d_seconds[s] if lead < 2 else -np.inf
        while r > w.back_from[b] and begin[r] > wish and high[r - 1] + nbytes[s] <= budget:
            r -= 1
            high[r] += nbytes[s]
        following = max(latest, begin[r])
        back_next[b], due[r] = due[r], b


# --- time -----------------------------------------------------------------------------------------------------------------
@bare
def _write(w, code, argument):
    at = w.count[WRITTEN]
    w.count[WRITTEN] = at + 1
    if at < len(w.code):
        w.code[at], w.argument[at], w.reuse[at], w.variant[at] = code, argument, NONE, NONE


@bare
def _wait(w, s, gap):
    """The step stands still until the copy of s has ended."""
    _write(w, WAIT, s)
    end = max(w.clock[NOW], w.copy_end[s])
    w.clock[STALLED] += end - w.clock[NOW]
    if gap != NONE:
        w.stall[gap] += end - w.clock[NOW]
    w.clock[NOW] = end
    w.where[s] = BOTH


@bare
def _drop_copy(step, w, s):
    _write(w, FREE_HOST, s)
    w.where[s] = HERE
    w.count[HOST] -= step.nbytes[s]


@bare
def _stay(w, s):
    """It does not wait to leave any more."""
    if w.slot[s] != NONE:
        w.leaving[w.slot[s]] = NONE
        w.slot[s] = NONE


@bare
def _room(step, w, nbytes, budget, may_wait):
    """Let leave what waits for it until `nbytes` fit: what has been copied first, then, if the step may stand still, in order."""
    while w.count[LIVE] + nbytes > budget:
        chosen = NONE
        while w.count[FIRST] < w.count[LAST] and w.leaving[w.count[FIRST]] == NONE:
            w.count[FIRST] += 1
        for k in range(w.count[FIRST], w.count[LAST]):
            if w.leaving[k] != NONE:
                s = step.gap_storage[w.leaving[k]]
                if w.where[s] == BOTH or w.copy_end[s] <= w.clock[NOW]:
                    chosen = k
                    break
                if chosen == NONE and may_wait:
                    chosen = k
        if chosen == NONE:
            return False
        gap = w.leaving[chosen]
        s = step.gap_storage[gap]
        if w.where[s] == LEAVING:
            _wait(w, s, gap)
        _write(w, FREE, s)
        _stay(w, s)
        w.where[s] = OUT
        w.count[LIVE] -= step.nbytes[s]
    return True


@bare
def _start_back(step, costs, w, back, may_wait):
    """Start a copy back; False where there is no room for it yet. What has not left yet stays instead."""
    s = w.back_storage[back]
    if w.where[s] == LEAVING or w.where[s] == BOTH:
        _stay(w, s)
        w.issued[back] = True
        return True
    if not _room(step, w, step.nbytes[s], costs.device_budget, may_wait):
        return False
    _write(w, PREFETCH, s)
    end = max(w.clock[NOW], w.clock[H2D_FREE], w.copy_end[s]) + costs.h2d_seconds[s]
    w.clock[H2D_FREE] = w.copy_end[s] = end
    if not costs.is_full_duplex:
        w.clock[D2H_FREE] = max(w.clock[D2H_FREE], end)
    w.where[s], w.issued[back] = COMING, True
    w.count[LIVE] += step.nbytes[s]
    return True


@bare
def _copy_is_of_use(step, choices, gap):
    """Is the next gap in which it leaves, after this one, another swap?"""
    s, g = step.gap_storage[gap], gap + 1
    while g < len(step.gap_storage) and step.gap_storage[g] == s:
        if choices.action[g] != KEEP:
            return choices.action[g] == SWAP
        g += 1
    return False


@bare
def _end_back(step, choices, costs, w, back, is_borrowed):
    """It is needed now."""
    s, gap = w.back_storage[back], w.back_gap[back]
    if not w.issued[back] and not _start_back(step, costs, w, back, True):
        return False
    if w.where[s] == COMING:
        _wait(w, s, gap)
    if w.where[s] == BOTH and not is_borrowed and not _copy_is_of_use(step, choices, gap):
        _drop_copy(step, w, s)
    return True


@bare
def _go(step, costs, w, gap):
    """It is swapped: copied at once, where there is no copy yet. False where the host has no room."""
    s = step.gap_storage[gap]
    w.slot[s] = w.count[LAST]
    w.leaving[w.count[LAST]] = gap
    w.count[LAST] += 1
    return _copy_out(step, costs, w, s)


@bare
def _copy_out(step, costs, w, s):
    """The copy to the host starts, where there is none yet. False where the host has no room."""
    if w.where[s] == HERE:
        _write(w, OFFLOAD, s)
        end = max(w.clock[NOW], w.clock[D2H_FREE]) + costs.d2h_seconds[s]
        w.clock[D2H_FREE] = w.copy_end[s] = end
        if not costs.is_full_duplex:
            w.clock[H2D_FREE] = max(w.clock[H2D_FREE], end)
        w.where[s] = LEAVING
        w.count[HOST] += step.nbytes[s]
    return w.count[HOST] <= costs.host_budget


@bare
def _quit(step, w, s):
    """It leaves, its host copy too."""
    _settle_copy(step, w, s)
    _write(w, FREE, s)
    w.where[s] = AWAY
    w.count[LIVE] -= step.nbytes[s]


@bare
def _settle_copy(step, w, s):
    """No copy of it is under way, nor at the host."""
    if w.where[s] == LEAVING:
        _wait(w, s, NONE)
    if w.where[s] == BOTH:
        _drop_copy(step, w, s)


@bare
def _timed_run(step, costs, w, r):
    op, reuse, is_first = w.run_op[r], w.run_reuse[r], w.run_first[r]
    if is_first:
        for k in range(step.first_write[op], step.first_write[op + 1]):
            _settle_copy(step, w, step.write[k])
    if reuse != NONE and w.run_lends[r]:
        if not _copy_out(step, costs, w, reuse):
            return False
        if w.where[reuse] == LEAVING:
            _wait(w, reuse, NONE)
    elif reuse != NONE:
        _settle_copy(step, w, reuse)
    if not _room(step, w, w.run_made[r] + w.run_inside[r], costs.device_budget, True):
        return False
    at = w.count[WRITTEN]
    _write(w, COMPUTE if is_first else RECOMPUTE, op)
    if at < len(w.code):
        w.reuse[at], w.variant[at] = reuse, w.run_variant[r]
    w.clock[NOW] += step.variant_seconds[w.run_variant[r]]
    w.count[LIVE] += w.run_made[r]
    if reuse != NONE:
        w.where[reuse] = OUT if w.run_lends[r] else AWAY
    for k in range(step.first_made[op], step.first_made[op + 1]):
        if w.where[step.made[k]] == AWAY:
            w.where[step.made[k]] = HERE
    return True


@bare
def _time(step, choices, costs, w):
    """The third pass. What came of it: FITS, HOST_FULL, or TOO_LONG."""
    w.where[:], w.slot[:], w.copy_end[:], w.clock[:], w.issued[:w.count[BACKS]] = AWAY, NONE, 0.0, 0.0, False
    w.count[WRITTEN], w.count[HOST], w.count[FIRST], w.count[LAST], w.count[LIVE] = 0, 0, 0, 0, step.state_bytes
    for k in range(step.first_made[step.ops], step.first_made[step.ops + 1]):
        w.where[step.made[k]] = HERE
        w.count[LIVE] += step.nbytes[step.made[k]]
    next_run, first, last = 0, 0, 0
    for e in range(w.count[EVENTS] + 1):
        kind = w.event[e] if e < w.count[EVENTS] else RUN
        operand = w.operand[e] if e < w.count[EVENTS] else w.count[RUNS]
        if kind == QUIT:
            _quit(step, w, operand)
            continue
        if kind == GO or kind == EARLY:
            if not (_go(step, costs, w, operand) if kind == GO else _copy_out(step, costs, w, step.gap_storage[operand])):
                w.count[BLOCKED] = operand
                return HOST_FULL
            continue
        run = operand if kind == RUN else w.back_run[operand]
        while next_run <= run:
            back = w.due[next_run]
            next_run += 1
            while back != NONE:
                w.queue[last] = back
                last += 1
                back = w.back_next[back]
        while first < last and (w.issued[w.queue[first]] or _start_back(step, costs, w, w.queue[first], False)):
            first += 1
        if kind != RUN:
            if not _end_back(step, choices, costs, w, operand, kind == BORROW):
                return TOO_LONG
        elif run < w.count[RUNS] and not _timed_run(step, costs, w, run):
            return TOO_LONG
    for s in range(len(w.where)):
        if step.is_kept[s]:
            _settle_copy(step, w, s)
    return FITS if w.count[WRITTEN] <= len(w.code) else TOO_LONG


@bare
def decode(step, choices, costs, w):
    """The three passes. What came of it; the step's seconds are `w.clock[NOW]`, the schedule its four columns."""
    if not _structure(step, choices, w, costs.device_budget):
        return DEVICE_FULL if w.count[SHORT] > 0 else TOO_LONG
    _place_backs(choices, costs.h2d_seconds, step.nbytes, w, costs.device_budget)
    return _time(step, choices, costs, w)


# --- from a tape and back -------------------------------------------------------------------------------------------------
class Residence:
    """The choices that a step has on a device within a budget, and what follows from them."""

    def __init__(self, tape: Tape, device: DeviceProfile, budget: Budget) -> None:
        self.tape = tape
        self._variants = [_variants(op) for op in tape.ops]
        self.step = _flatten(tape, self._variants)
        self.costs = costs_of(tape.storages, device, budget)
        self.work = _work(self.step)
        self._names = [name for found in self._variants for name, _, _ in found]

    @property
    def gaps(self) -> int:
        """How many."""
        return len(self.step.gap_storage)

    def choices(self) -> Choices:
        """Everything is kept, and each op takes its fastest variant that fits."""
        return Choices(np.zeros(self.gaps, np.int8), np.ones(self.gaps, np.bool_), np.zeros(self.gaps, np.int8),
                       np.zeros(self.step.ops, np.int8))

    def decode(self, choices: Choices) -> tuple[int, float]:
        """What came of the choices, and seconds of the step where they fit. `work` then has the rest."""
        status = decode(self.step, choices, self.costs, self.work)
        return int(status), float(self.work.clock[NOW]) if status == FITS else float("inf")

    def schedule(self, method: str) -> Schedule:
        """What was decoded last, which fitted."""
        w = self.work
        columns = (column[:w.count[WRITTEN]].tolist() for column in (w.code, w.argument, w.reuse, w.variant))
        return Schedule(tuple(self._instruction(*row) for row in zip(*columns)), self.tape.digest, method)

    def _instruction(self, code: int, argument: int, reuse: int, variant: int) -> Instruction:
        if code in (COMPUTE, RECOMPUTE):
            kind = Compute if code == COMPUTE else Recompute
            return kind(argument, None if reuse == NONE else reuse, self._names[variant])
        return {FREE: Free, OFFLOAD: Offload, PREFETCH: Prefetch, WAIT: Wait, FREE_HOST: FreeHost}[code](argument)

    def choices_of(self, schedule: Schedule) -> Choices:
        """What a schedule of the tape has chosen, as far as gaps can say: in each, how its storage left and came back last."""
        choices, returns = self.choices(), _returns(self.tape, schedule)
        for g, (s, begin, end) in enumerate(zip(self.step.gap_storage.tolist(), self.step.gap_begin.tolist(), self.step.gap_end.tolist())):
            here = [(at, kind) for at, kind in returns.get(s, ()) if begin < at <= end]
            if not here:
                continue
            at, kind = here[-1]
            choices.action[g] = SWAP if kind == SWAP or not self.step.gap_may_drop[g] else DROP
            choices.stays[g] = at < end or len(here) == 1
        return choices


def _returns(tape: Tape, schedule: Schedule) -> dict[int, list[tuple[int, int]]]:
    """Per storage: before the first run of which op, and how, it came back to the device."""
    found: dict[int, list[tuple[int, int]]] = {}
    absent: set[int] = set()
    at = 0
    for i in schedule.instructions:
        if isinstance(i, Compute):
            at = i.op + 1
        elif isinstance(i, Recompute):
            for s in absent.intersection(tape.creates[i.op]):
                found.setdefault(s, []).append((at, DROP))
                absent.discard(s)
        elif isinstance(i, Prefetch):
            found.setdefault(i.storage, []).append((at, SWAP))
            absent.discard(i.storage)
        if isinstance(i, Free):
            absent.add(i.storage)
        elif isinstance(i, Compute | Recompute) and i.reuse is not None:
            absent.add(i.reuse)
    return found


def _variants(op: Op) -> list[tuple[str | None, float, int]]:
    """Name, seconds and workspace of those that no other beats, the fastest first; the library's own is None."""
    offered = sorted([(op.seconds, op.workspace_bytes, ""), *((v.seconds, v.workspace_bytes, v.name) for v in op.variants)])
    found: list[tuple[str | None, float, int]] = []
    for seconds, workspace_bytes, name in offered:
        if not found or workspace_bytes < found[-1][2]:
            found.append((name or None, seconds, workspace_bytes))
    return found


class _Lists:
    """Lists of equal length, one an op, end to end."""

    def __init__(self, width: int) -> None:
        self.first, self.columns = [0], [[] for _ in range(width)]

    def add(self, rows: Iterable[tuple[int, ...]]) -> None:
        for row in rows:
            for column, value in zip(self.columns, row):
                column.append(value)
        self.first.append(len(self.columns[0]))

    def arrays(self) -> list[np.ndarray]:
        return [np.array(column, np.int32) for column in (self.first, *self.columns)]


def _flatten(tape: Tape, variants: list[list[tuple[str | None, float, int]]]) -> Step:
    facts, ops = StepFacts.of(tape), len(tape.ops)
    is_state = [s.at_start and s.at_end for s in tape.storages]
    gaps: list[tuple[int, int, int, bool]] = []
    after: dict[tuple[int, int], tuple[int, int]] = {}  # (storage, op that used it) -> gap and next need
    for s in tape.storages:
        begins = -1 if tape.producer[s.id] is None else tape.producer[s.id]
        is_there = s.at_start or tape.producer[s.id] is not None
        uses = [begins, *facts.needed_at[s.id]] if is_there and not is_state[s.id] else []
        for a, b in zip(uses, [*uses[1:], ops + 1]):
            gap = NONE
            if a + 1 < b <= ops and s.nbytes:
                gap = len(gaps)
                gaps.append((s.id, a, b, bool(facts.can_return_until[s.id] >= b)))
            after[s.id, a] = gap, b
    need, read, made, write = _Lists(3), _Lists(1), _Lists(4), _Lists(1)
    early = _early(gaps, tape, facts)
    for op in tape.ops:
        need.add((s, *after[s, op.id]) for s in facts.needs[op.id] if not is_state[s])
        read.add((s,) for s in tape.reads[op.id] if not is_state[s])
        made.add((s, *after[s, op.id], early.get(s, NONE)) for s in tape.creates[op.id])
        write.add((s,) for s in op.mutates if not is_state[s])
    need.add((s.id, NONE, ops + 1) for s in tape.storages if s.at_end and not s.at_start)
    made.add((s.id, *after[s.id, -1], NONE) for s in tape.storages if s.at_start and not s.at_end)
    first_need, need_s, need_gap, need_next = need.arrays()
    first_made, made_s, made_gap, made_next, made_early = made.arrays()
    storage, begin, end, may_drop = zip(*gaps) if gaps else ((), (), (), ())
    taken = [(NONE, NONE) if op.takeover is None or is_state[op.takeover[1]] or op.takeover[1] in op.mutates else op.takeover
             for op in tape.ops]
    every = [variant for found in variants for variant in found]
    return Step(
        ops=ops, state_bytes=sum(s.nbytes for s in tape.storages if is_state[s.id]),
        nbytes=np.array([s.nbytes for s in tape.storages], np.int64),
        producer=np.array([NONE if p is None else p for p in tape.producer], np.int32),
        first_need=first_need, need=need_s, need_gap=need_gap, need_next=need_next,
        first_read=read.arrays()[0], read=read.arrays()[1], first_made=first_made, made=made_s, made_gap=made_gap,
        made_next=made_next, made_early=made_early,
        first_write=write.arrays()[0], write=write.arrays()[1], takeover=np.array(taken, np.int32).reshape(-1, 2),
        first_variant=np.cumsum([0, *map(len, variants)]).astype(np.int32),
        variant_seconds=np.array([seconds for _, seconds, _ in every], np.float64),
        variant_bytes=np.array([nbytes for _, _, nbytes in every], np.int64),
        gap_storage=np.array(storage, np.int32), gap_begin=np.array(begin, np.int32), gap_end=np.array(end, np.int32),
        gap_may_drop=np.array(may_drop, np.bool_), is_kept=np.array([s.at_end and not s.at_start for s in tape.storages], np.bool_))


def _early(gaps: list[tuple[int, int, int, bool]], tape: Tape, facts: StepFacts) -> dict[int, int]:
    """Per storage: its first gap, where only reads by ops one after the other lie between its creation and that."""
    found: dict[int, int] = {}
    written = {s for op in tape.ops for s in op.mutates}
    for gap, (s, begin, _, _) in enumerate(gaps):
        made_by = tape.producer[s]
        if s in found or s in written or made_by is None or begin == made_by:
            continue
        if facts.needed_at[s].index(begin) == begin - made_by - 1:
            found[s] = gap
    return found


def _work(step: Step) -> Work:
    storages, ops, gaps = len(step.nbytes), step.ops, len(step.gap_storage)
    uses = len(step.need) + len(step.made) + len(step.read)
    runs, events, backs = LONGEST * ops + 2, LONGEST * uses + 64, LONGEST * gaps + 64

    def ints(count: int) -> np.ndarray:
        return np.zeros(count, np.int32)

    return Work(
        where=np.zeros(storages, np.int8), gap=ints(storages), next=ints(storages), wanted=ints(storages),
        brought=np.zeros(storages, np.bool_), out_run=ints(storages), mark=np.zeros(ops, np.int64), stack=ints(ops + 1),
        event=np.zeros(events, np.int8), operand=ints(events), run_op=ints(runs), run_first=np.zeros(runs, np.bool_),
        run_reuse=ints(runs), run_lends=np.zeros(runs, np.bool_),
        run_variant=ints(runs), op_variant=ints(ops),
        run_made=np.zeros(runs, np.int64), run_inside=np.zeros(runs, np.int64), run_high=np.zeros(runs, np.int64),
        run_begin=np.zeros(runs), back_storage=ints(backs), back_run=ints(backs), back_from=ints(backs), back_gap=ints(backs),
        back_next=ints(backs), due=ints(runs), queue=ints(backs), issued=np.zeros(backs, np.bool_), copy_end=np.zeros(storages),
        leaving=ints(events), slot=ints(storages), count=np.zeros(COUNTS, np.int64), clock=np.zeros(CLOCKS), stall=np.zeros(gaps),
        again=np.zeros(gaps), code=np.zeros(3 * events, np.int8), argument=ints(3 * events), reuse=ints(3 * events),
        variant=ints(3 * events))
