"""Local search over what is kept, swapped and dropped: simulated annealing whose every try is decoded, checked for memory and timed.

A try changes a few gaps, or an op's variant. It is decoded from the first op on at which that matters, and given up as soon as it is seen
to be too slow. Where the step no longer fits, further gaps that are open at the op that does not fit leave, the cheapest of some that are
drawn. What made the step slower is taken back, but for a little at first. Effort is counted in ops that are walked and runs that are timed,
and numbers are drawn from one seed, so the same question has the same answer.

It stands here, and not with the method that uses it, because only what the engine compiles is kept on disk.
"""

from __future__ import annotations

import math

import numpy as np

from vramlab.gaps import AFTER, BETWEEN, BRIEF, DROP, KEEP, MOST_AHEAD, SWAP
from vramlab.kernels import bare  # and decode: as in residence.py, touch this file when one of them changes
from vramlab.occupancy import AGAIN, AWAY, BLOCKED, DEVICE_FULL, EFFORT, FITS, HERE, HOST_FULL, NOW, SAME, SHORT
from vramlab.residence import begin_try, decode, decode_from, keep, row_of

MOST_CHANGES = 256  # gaps that one try may change, those of its repairs included
DRAWN = 10  # gaps among which a repair chooses
HOTTEST = 0.004, 1e-5  # of the step's seconds: what a try may be worse by, at the beginning and at the end of a round
PRICES = 0.02, 1.5  # of a second of the link, in seconds of the device, between which a repair draws
UNHIDDEN = 1.0  # at least, of a copy for which the step stands still
OF_POOL = 0.95  # of the draws of a gap
AHEAD = 0.1  # of the draws by which something is dropped: it is computed again ahead of its use
INSISTS = 0.7  # of the draws of a variant
OP_CHANGES = 2**20  # added to an op in the list of changes: its variant


@bare
def _drawn(pool, gaps):
    """A gap; nearly always of the pool, that of large storages."""
    return pool[np.random.randint(len(pool))] if np.random.random() < OF_POOL else np.random.randint(gaps)


@bare
def _open_at(step, w, op, pool):
    """A gap whose storage is on the device at the op that did not fit, and not used there; drawn, -1 where no draw found one."""
    for _ in range(80):
        g = _drawn(pool, len(step.gap_storage))
        s = step.gap_storage[g]
        if step.gap_begin[g] < op < step.gap_end[g] and w.where[s] == HERE and w.gap[s] == g and w.wanted[s] == 0:
            return g
    return -1


@bare
def _waits_there(step, choices, w, op):
    """The gap of the largest storage that is kept for op, while what runs again before that does not fit; -1 where there is none."""
    best, most = -1, 0
    for k in range(step.first_need[op], step.first_need[op + 1]):
        s, g = step.need[k], w.gap[step.need[k]]
        if w.where[s] == HERE and w.wanted[s] == 1 and g >= 0 and choices.action[g] == KEEP and step.nbytes[s] > most:
            best, most = g, step.nbytes[s]
    return best


@bare
def _candidate(step, choices, w, op, pool, k):
    """The k-th gap that may leave so that the op that did not fit may; or -1."""
    if k == 0:
        return _written_over(step, choices, op)
    if k == 1 and w.count[AGAIN]:
        return _waits_there(step, choices, w, op)
    return _open_at(step, w, op, pool)


@bare
def _written_over(step, choices, op):
    """The gap that begins at this op with what its output could write over, -1 where it does or cannot."""
    if op >= step.ops or step.takeover[op, 1] < 0:
        return -1
    for k in range(step.first_need[op], step.first_need[op + 1]):
        g = step.need_gap[k]
        if step.need[k] == step.takeover[op, 1] and g >= 0 and choices.action[g] == KEEP:
            return g
    return -1


@bare
def _again(step, w, s):
    """Seconds of its producer, and of those of what that reads and is away."""
    op = step.producer[s]
    if op < 0:
        return np.inf
    seconds = step.variant_seconds[step.first_variant[op]]
    for k in range(step.first_read[op], step.first_read[op + 1]):
        if w.where[step.read[k]] == AWAY:
            if step.producer[step.read[k]] < 0:
                return np.inf
            seconds += step.variant_seconds[step.first_variant[step.producer[step.read[k]]]]
    return seconds


@bare
def _repair(step, choices, costs, w, changed, old, changes, price, pool):
    """One more gap leaves, so that the op that did not fit may. How many changes there are then, -1 where nothing can leave."""
    op, short = w.count[BLOCKED], max(w.count[SHORT], 1)
    best, best_action, best_cost = -1, KEEP, np.inf
    for k in range(DRAWN):
        g = _candidate(step, choices, w, op, pool, k)
        if g < 0:
            continue
        s = step.gap_storage[g]
        again = _again(step, w, s)
        is_hidden = op < step.gap_end[g] and step.gap_kind[g] != BRIEF  # others' copies have next to nothing to hide behind
        cost, action = (price if is_hidden else max(price, UNHIDDEN)) * (costs.d2h_seconds[s] + costs.h2d_seconds[s]), SWAP
        if choices.action[g] != KEEP:  # it came back early
            cost, action = min(cost, again), choices.action[g]
        elif op < step.gap_end[g] and step.gap_may_drop[g] and (again < cost or costs.host_budget < step.nbytes[s]):
            cost, action = again, DROP
        cost /= min(step.nbytes[s], 2 * short)
        if cost < best_cost:
            best, best_action, best_cost = g, action, cost
    if best < 0 or changes >= MOST_CHANGES:
        return -1
    return _change(choices, best, best_action, choices.action[best] == KEEP, changed, old, changes)


@bare
def _copied_instead(step, choices, w):
    """What was to be computed again for the op that did not fit is copied: the gap of the first such storage, -1 where there is none."""
    op = w.count[BLOCKED]
    for k in range(step.first_need[op], step.first_need[op + 1]):
        g = w.gap[step.need[k]]
        if w.count[AGAIN] and g >= 0 and choices.action[g] == DROP:
            choices.action[g] = SWAP
            return g
    return -1


@bare
def _change(choices, g, action, stays, changed, old, changes):
    """Change a gap and note how it was."""
    changed[changes] = g
    old[changes, 0], old[changes, 1], old[changes, 2] = choices.action[g], choices.stays[g], choices.lead[g]
    if action == DROP:
        choices.lead[g] = 0
    choices.action[g], choices.stays[g] = action, stays
    return changes + 1


@bare
def _take_back(choices, changed, old, changes):
    for k in range(changes - 1, -1, -1):
        g = changed[k]
        if g >= OP_CHANGES:
            choices.leaner[g - OP_CHANGES] = old[k, 0]
        else:
            choices.action[g], choices.stays[g], choices.lead[g] = old[k, 0], old[k, 1] != 0, old[k, 2]


@bare
def _other(step, choices, g):
    """Another action for a gap."""
    a = np.random.randint(3)
    if a == choices.action[g]:
        a = (a + 1) % 3
    if a == DROP and not step.gap_could_drop[g]:
        a = KEEP if choices.action[g] == SWAP else SWAP
    return a


@bare
def _holds_more(step, choices, changed, changes):
    """Is something kept or copied after its last use? Most often that is of no use and takes no time, and memory would fill with it."""
    for k in range(changes):
        g = changed[k]
        if g < OP_CHANGES and step.gap_kind[g] == AFTER and choices.action[g] != DROP:
            return True
    return False


@bare
def _costly(choices, cost, pool):
    """A gap that leaves, of a few that are drawn the one that costs most."""
    best = -1
    for _ in range(6):
        g = _drawn(pool, len(cost))
        if choices.action[g] != KEEP and (best < 0 or cost[g] > cost[best]):
            best = g
    return best if best >= 0 else _drawn(pool, len(cost))


@bare
def _propose(step, choices, w, cost, changed, old, pool, tunable):
    """Change something. How many changes."""
    gaps, draw = len(step.gap_storage), np.random.random()
    if draw < 0.30:  # what costs much goes another way
        g = _costly(choices, cost, pool)
        return _change(choices, g, _other(step, choices, g), True, changed, old, 0)
    if draw < 0.50:
        g = _drawn(pool, gaps)
        changes = _change(choices, g, _other(step, choices, g), choices.stays[g], changed, old, 0)
        if choices.action[g] == DROP and np.random.random() < AHEAD:
            choices.lead[g] = 1 + np.random.randint(MOST_AHEAD)
        return changes
    if draw < 0.60:  # two at once
        g, h = _drawn(pool, gaps), _costly(choices, cost, pool)
        changes = _change(choices, g, _other(step, choices, g), True, changed, old, 0)
        return _change(choices, h, KEEP, True, changed, old, changes)
    if draw < 0.70:
        g = _costly(choices, cost, pool)
        return _change(choices, g, choices.action[g], not choices.stays[g], changed, old, 0)
    if draw < 0.78:
        g = _costly(choices, cost, pool)
        changes = _change(choices, g, choices.action[g], choices.stays[g], changed, old, 0)
        choices.lead[g] = np.random.randint(MOST_AHEAD + 1 if choices.action[g] == DROP else 3)
        return changes
    if draw < 0.88 and len(tunable) > 0:
        return _tune(step, choices, w, changed, old, tunable)
    return _segment(step, choices, changed, old)


@bare
def _tune(step, choices, w, changed, old, tunable):
    """Another variant: of a few ops that are drawn, the one that loses most by its variant insists on its fastest; or any, on any."""
    op = tunable[np.random.randint(len(tunable))]
    leaner = np.random.randint(-1, step.first_variant[op + 1] - step.first_variant[op])
    if np.random.random() < INSISTS:
        worst = 0.0
        for _ in range(6):
            drawn = tunable[np.random.randint(len(tunable))]
            loss = step.variant_seconds[w.kept.op_variant[drawn]] - step.variant_seconds[step.first_variant[drawn]]
            if loss > worst:
                op, leaner, worst = drawn, -1, loss
    changed[0], old[0, 0] = OP_CHANGES + op, choices.leaner[op]
    choices.leaner[op] = leaner
    return 1


@bare
def _segment(step, choices, changed, old):
    """Gaps that begin close to each other all go one way."""
    gaps = len(step.gap_storage)
    first, action, changes = np.random.randint(gaps), np.random.randint(3), 0
    stays, length = np.random.random() < 0.8, 2 + np.random.randint(14)
    for g in range(first, min(gaps, first + length)):
        if step.gap_kind[g] != BETWEEN or (action == DROP and not step.gap_could_drop[g]):
            continue
        if step.gap_end[g] - step.gap_begin[g] < (step.gap_end[first] - step.gap_begin[first]) // 2:
            continue
        changes = _change(choices, g, action, stays, changed, old, changes)
    return changes


@bare
def _first_row(step, choices, changed, old, begin, end):
    """The saved row from which on these changes matter."""
    row = step.rows - 1
    for k in range(begin, end):
        g = changed[k]
        if g >= OP_CHANGES:
            row = min(row, row_of(step, g - OP_CHANGES))
        elif old[k, 0] != choices.action[g] or (old[k, 1] != 0) != choices.stays[g]:
            row = min(row, row_of(step, step.gap_from[g]))
        elif choices.action[g] == DROP and old[k, 2] != choices.lead[g]:
            row = min(row, row_of(step, step.gap_end[g] - max(old[k, 2], choices.lead[g])))
    return row


@bare
def fit(step, choices, costs, w, pool, changed, old, seed, price, effort):
    """Let gaps leave until the step fits, or so much effort is spent. Whether it fits."""
    np.random.seed(seed)
    until, row = w.count[EFFORT] + effort, 0
    while w.count[EFFORT] < until:
        status = decode(step, choices, costs, w, row, np.inf)
        if status == FITS:
            return True
        if status == HOST_FULL:
            g = w.count[BLOCKED]
            choices.action[g] = DROP if step.gap_may_drop[g] else KEEP
            row = row_of(step, step.gap_from[g])
        elif status != DEVICE_FULL or len(step.gap_storage) == 0:
            return False
        else:
            g = changed[0] if _repair(step, choices, costs, w, changed, old, 0, price, pool) >= 0 else _copied_instead(step, choices, w)
            if g < 0:
                return False
            row = row_of(step, step.gap_from[g])
    return False


@bare
def anneal(step, choices, best, costs, w, pool, tunable, changed, old, cost, seed, effort, heat, goal):
    """One round from `choices`, which fit; `best` becomes the fastest that it meets. Seconds of that."""
    np.random.seed(seed)
    now = least = _stand(step, choices, costs, w)
    _note_costs(w, cost)
    _copy(choices, best)
    begun = w.count[EFFORT]
    while w.count[EFFORT] - begun < effort and least > goal:
        worse = now * heat * HOTTEST[0] * (HOTTEST[1] / HOTTEST[0]) ** ((w.count[EFFORT] - begun) / effort)
        limit = now - worse * math.log(1.0 - np.random.random())
        changes = _propose(step, choices, w, cost, changed, old, pool, tunable)
        if _holds_more(step, choices, changed, changes):
            limit = now * (1 - 1e-9)
        price = PRICES[0] * (PRICES[1] / PRICES[0]) ** np.random.random()
        row = _first_row(step, choices, changed, old, 0, changes)
        begin_try(step, w, row)
        status, repairs = decode_from(step, choices, costs, w, row, limit), 0
        while status == DEVICE_FULL and repairs < 12:
            more = _repair(step, choices, costs, w, changed, old, changes, price, pool)
            if more < 0:
                break
            row = min(_first_row(step, choices, changed, old, changes, more), row_of(step, min(w.count[BLOCKED], step.ops - 1)))
            changes, repairs = more, repairs + 1
            status = decode_from(step, choices, costs, w, row, limit)
        if status == FITS and w.clock[NOW] <= limit:
            keep(step, w)
            now = w.clock[NOW]
            _note_costs(w, cost)
            if now < least * (1 - 1e-12):
                least = now
                _copy(choices, best)
        else:
            _take_back(choices, changed, old, changes)
    return least


@bare
def _stand(step, choices, costs, w):
    """Decode choices that fit, and keep them. Their seconds."""
    decode(step, choices, costs, w, 0, np.inf)
    w.count[SAME] = 0
    keep(step, w)
    return w.clock[NOW]


@bare
def sweep(step, choices, costs, w, pool, effort):
    """Each gap of the pool, one after the other, goes another way if that is faster, until none is. Seconds."""
    least, improved, until = _stand(step, choices, costs, w), True, w.count[EFFORT] + effort
    while improved and w.count[EFFORT] < until:
        improved = False
        for g in pool:
            for action in (KEEP, SWAP, DROP):
                before, row = choices.action[g], row_of(step, step.gap_from[g])
                if action == before or (action == DROP and not step.gap_could_drop[g]) or w.count[EFFORT] >= until:
                    continue
                choices.action[g] = action
                begin_try(step, w, row)
                if decode_from(step, choices, costs, w, row, least) == FITS and w.clock[NOW] < least * (1 - 1e-9):
                    least, improved = w.clock[NOW], True
                    keep(step, w)
                else:
                    choices.action[g] = before
    return least


@bare
def _copy(source, target):
    for g in range(len(source.action)):
        target.action[g], target.stays[g], target.lead[g] = source.action[g], source.stays[g], source.lead[g]
    for op in range(len(source.leaner)):
        target.leaner[op] = source.leaner[op]


@bare
def _note_costs(w, cost):
    for g in range(len(cost)):
        cost[g] = w.stall[g]
    for op in range(len(w.log.again)):
        if w.log.again_gap[op] >= 0:
            cost[w.log.again_gap[op]] += w.log.again[op]
