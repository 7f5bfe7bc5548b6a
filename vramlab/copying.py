"""When copies run, and the clock: the second and the third pass over the choices of a step, in compiled loops.

    place_backs  from the last to the first: each copy back as late as the link lets it end in time, as far as memory allows
    clock_step   copies to the host start at once; what was copied leaves only when room is needed, what is already over first;
                 a copy back that does not fit yet waits for the next run; then the clock is the simulator's

Import this module when it is needed: numba is slow to load.
"""

from __future__ import annotations

import numpy as np

from vramlab.gaps import KEEP, NONE, SWAP
from vramlab.kernels import COMPUTE, FREE, FREE_HOST, OFFLOAD, PREFETCH, RECOMPUTE, WAIT, bare, inlined
from vramlab.occupancy import (
    AWAY, BACKS, BLOCKED, BORROW, BOTH, COMING, D2H_FREE, EARLY, EFFORT, EVENTS, FIRST, FITS, GO, H2D_FREE, HERE, HOST, HOST_FULL, LAST,
    LEAVING, LIVE, NOW, OUT, QUIT, RUN, RUNS, SLOW, STALLED, IMPOSSIBLE, WRITTEN,
)


# --- copies back ----------------------------------------------------------------------------------------------------------
@bare
def place_backs(choices, h2d_seconds, nbytes, w, budget):
    """The second pass: before which run each copy back starts."""
    due, high, begin, back_next = w.due, w.high, w.log.run_begin, w.back_next
    for r in range(w.count[RUNS] + 1):
        due[r], high[r] = NONE, w.log.run_high[r]
    following = np.inf  # when the copy after it starts
    for b in range(w.count[BACKS] - 1, -1, -1):
        s, r, lead = w.log.back_storage[b], w.log.back_run[b], choices.lead[w.log.back_gap[b]]
        latest = min(begin[r], following) - h2d_seconds[s]
        wish = latest - lead * h2d_seconds[s] if lead < 2 else -np.inf
        while r > w.log.back_from[b] and begin[r] > wish and high[r - 1] + nbytes[s] <= budget:
            r -= 1
            high[r] += nbytes[s]
        following = max(latest, begin[r])
        back_next[b], due[r] = due[r], b


# --- the clock --------------------------------------------------------------------------------------------------------------
@inlined
def _write(w, code, argument):
    at = w.count[WRITTEN]
    w.count[WRITTEN] = at + 1
    if at < len(w.code):
        w.code[at], w.argument[at], w.reuse[at], w.variant[at] = code, argument, NONE, NONE


@inlined
def _wait(w, s, gap):
    """The step stands still until the copy of s has ended."""
    _write(w, WAIT, s)
    end = max(w.clock[NOW], w.copy_end[s])
    w.clock[STALLED] += end - w.clock[NOW]
    if gap != NONE:
        w.stall[gap] += end - w.clock[NOW]
    w.clock[NOW] = end
    w.where[s] = BOTH


@inlined
def _drop_copy(step, w, s):
    _write(w, FREE_HOST, s)
    w.where[s] = HERE
    w.count[HOST] -= step.nbytes[s]


@inlined
def _stay(w, s):
    """It does not wait to leave any more."""
    if w.slot[s] != NONE:
        w.leaving[w.slot[s]] = NONE
        w.slot[s] = NONE


@inlined
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


@inlined
def _start_back(step, costs, w, back, may_wait):
    """Start a copy back; False where there is no room for it yet. What has not left yet stays instead."""
    s = w.log.back_storage[back]
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


@inlined
def _copy_is_of_use(step, choices, gap):
    """Is the next gap in which it leaves, after this one, another swap?"""
    s, g = step.gap_storage[gap], gap + 1
    while g < len(step.gap_storage) and step.gap_storage[g] == s:
        if choices.action[g] != KEEP:
            return choices.action[g] == SWAP
        g += 1
    return False


@inlined
def _end_back(step, choices, costs, w, back, is_borrowed):
    """It is needed now."""
    s, gap = w.log.back_storage[back], w.log.back_gap[back]
    if not w.issued[back] and not _start_back(step, costs, w, back, True):
        return False
    if w.where[s] == COMING:
        _wait(w, s, gap)
    if w.where[s] == BOTH and not is_borrowed and not _copy_is_of_use(step, choices, gap):
        _drop_copy(step, w, s)
    return True


@inlined
def _go(step, costs, w, gap):
    """It is swapped: copied at once, where there is no copy yet. False where the host has no room."""
    s = step.gap_storage[gap]
    w.slot[s] = w.count[LAST]
    w.leaving[w.count[LAST]] = gap
    w.count[LAST] += 1
    return _copy_out(step, costs, w, s)


@inlined
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


@inlined
def _quit(step, w, s):
    """It leaves, its host copy too, if it has not left before."""
    _stay(w, s)
    if w.where[s] == OUT:
        _drop_copy(step, w, s)
    else:
        _settle_copy(step, w, s)
        _write(w, FREE, s)
        w.count[LIVE] -= step.nbytes[s]
    w.where[s] = AWAY


@inlined
def _settle_copy(step, w, s):
    """No copy of it is under way, nor at the host."""
    if w.where[s] == LEAVING:
        _wait(w, s, NONE)
    if w.where[s] == BOTH:
        _drop_copy(step, w, s)


@inlined
def _timed_run(step, costs, w, r):
    op, reuse, is_first = w.log.run_op[r], w.log.run_reuse[r], w.log.run_first[r]
    if is_first:
        for k in range(step.first_write[op], step.first_write[op + 1]):
            _settle_copy(step, w, step.write[k])
    if reuse != NONE and w.log.run_lends[r]:
        if not _copy_out(step, costs, w, reuse):
            return False
        if w.where[reuse] == LEAVING:
            _wait(w, reuse, NONE)
    elif reuse != NONE:
        _settle_copy(step, w, reuse)
    if not _room(step, w, w.log.run_made[r] + w.log.run_inside[r], costs.device_budget, True):
        return False
    at = w.count[WRITTEN]
    _write(w, COMPUTE if is_first else RECOMPUTE, op)
    if at < len(w.code):
        w.reuse[at], w.variant[at] = reuse, w.log.run_variant[r]
    w.clock[NOW] += step.variant_seconds[w.log.run_variant[r]]
    w.count[LIVE] += w.log.run_made[r]
    if reuse != NONE:
        w.where[reuse] = OUT if w.log.run_lends[r] else AWAY
    for k in range(step.first_made[op], step.first_made[op + 1]):
        if w.where[step.made[k]] == AWAY:
            w.where[step.made[k]] = HERE
    return True


@bare
def clock_step(step, choices, costs, w, limit):
    """The third pass. What came of it: FITS, HOST_FULL, IMPOSSIBLE, or SLOW: it takes more than `limit` seconds, as is seen on the way."""
    whole = w.log.run_begin[w.count[RUNS]]
    w.where[:], w.slot[:], w.copy_end[:], w.clock[:], w.stall[:], w.issued[:w.count[BACKS]] = AWAY, NONE, 0.0, 0.0, 0.0, False
    w.count[WRITTEN], w.count[HOST], w.count[FIRST], w.count[LAST], w.count[LIVE] = 0, 0, 0, 0, step.state_bytes
    for k in range(step.first_made[step.ops], step.first_made[step.ops + 1]):
        w.where[step.made[k]] = HERE
        w.count[LIVE] += step.nbytes[step.made[k]]
    next_run, first, last = 0, 0, 0
    for e in range(w.count[EVENTS] + 1):
        kind = w.log.event[e] if e < w.count[EVENTS] else RUN
        operand = w.log.operand[e] if e < w.count[EVENTS] else w.count[RUNS]
        if kind == QUIT:
            _quit(step, w, operand)
            continue
        if kind == GO or kind == EARLY:
            if not (_go(step, costs, w, operand) if kind == GO else _copy_out(step, costs, w, step.gap_storage[operand])):
                w.count[BLOCKED] = operand
                return HOST_FULL
            continue
        run = operand if kind == RUN else w.log.back_run[operand]
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
                return IMPOSSIBLE
        elif run < w.count[RUNS]:
            w.count[EFFORT] += 1
            if not _timed_run(step, costs, w, run):
                return IMPOSSIBLE
            if w.clock[NOW] + (whole - w.log.run_begin[run + 1]) > limit:
                return SLOW
    for s in range(len(w.where)):
        if step.is_kept[s]:
            _settle_copy(step, w, s)
    return FITS if w.count[WRITTEN] <= len(w.code) else IMPOSSIBLE
