"""What it costs to lose a storage, over the evicted ops around it: compiled. Import this module when it is needed: numba is slow to load.

The region of a storage is found by two searches over evicted ops, in the same order each time, so that sums come out the same:

    backward    ops that have to run before its producer can: from an op to the evicted ops that made the absent storages that it reads
    forward     ops that cannot run without it: from an op to the evicted ops that read an absent output of it
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from vramlab.kernels import compiled
from vramlab.tape import Tape


class Links(NamedTuple):
    """Who reads and makes what, int32: row i of `items` under `first` is `items[first[i]:first[i + 1]]`; and memory to search in."""

    first_read: np.ndarray  # per op: storages
    reads: np.ndarray
    first_created: np.ndarray  # per op: storages
    creates: np.ndarray
    first_reader: np.ndarray  # per storage: ops
    readers: np.ndarray
    producer: np.ndarray  # per storage: an op, -1 for none
    seen_in: np.ndarray  # int64 [ops]: the last search that saw the op
    stack: np.ndarray  # [ops]
    searches: np.ndarray  # int64 [1]: how many there were


def links_of(tape: Tape) -> Links:
    """The links of a tape."""
    count, producer = len(tape.ops), np.array([-1 if p is None else p for p in tape.producer], np.int32)
    memory = np.zeros(count, np.int64), np.zeros(count, np.int32), np.zeros(1, np.int64)
    return Links(*_rows(tape.reads), *_rows(tape.creates), *_rows(tape.readers), producer, *memory)


def _rows(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([0, *accumulate(map(len, rows))], np.int32), np.array([item for row in rows for item in row], np.int32)


@compiled
def least(candidates, order, bound, weight, own, adds, is_both_ways, links, is_absent, absent_outputs):
    """The candidate of least cost / weight, the lower id of equals. `order`: by `bound`, below which no quotient is, then by id."""
    score, best = np.inf, -1
    for k in order:
        s = candidates[k]
        if score < bound[k] or score == bound[k] and best <= s:
            break
        found = cost(s, score * weight[k], own, adds, is_both_ways, links, is_absent, absent_outputs) / weight[k]
        if found < score or found == score and s < best:
            score, best = found, s
    return best


@compiled
def cost(storage, limit, own, adds, is_both_ways, links, is_absent, absent_outputs):
    """`own` of the producer and `adds` of each op in the region; any number above the limit where it is above that."""
    total = own[links.producer[storage]]
    held = _see_parents(links.producer[storage], 0, _new_search(links), links, is_absent)
    while held > 0:
        held -= 1
        op = links.stack[held]
        total += adds[op]
        if total > limit:
            return total
        held = _see_parents(op, held, links.searches[0], links, is_absent)
    if is_both_ways:
        held = _see_readers(storage, 0, _new_search(links), links, absent_outputs)
        while held > 0:
            held -= 1
            op = links.stack[held]
            total += adds[op]
            if total > limit:
                return total
            for k in range(links.first_created[op], links.first_created[op + 1]):
                if is_absent[links.creates[k]]:
                    held = _see_readers(links.creates[k], held, links.searches[0], links, absent_outputs)
    return total


@compiled
def _new_search(links):
    links.searches[0] += 1
    return links.searches[0]


@compiled
def _see(op, held, search, links):
    """Put the op on the stack of `held` ops, once a search. How many it holds then."""
    if links.seen_in[op] == search:
        return held
    links.seen_in[op] = search
    links.stack[held] = op
    return held + 1


@compiled
def _see_parents(op, held, search, links, is_absent):
    """The evicted ops whose absent outputs the op reads."""
    for k in range(links.first_read[op], links.first_read[op + 1]):
        if is_absent[links.reads[k]]:
            held = _see(links.producer[links.reads[k]], held, search, links)
    return held


@compiled
def _see_readers(storage, held, search, links, absent_outputs):
    """The evicted ops that read the storage."""
    for k in range(links.first_reader[storage], links.first_reader[storage + 1]):
        if absent_outputs[links.readers[k]] > 0:
            held = _see(links.readers[k], held, search, links)
    return held
