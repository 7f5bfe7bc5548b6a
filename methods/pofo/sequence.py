"""The sequence that the filled tables stand for."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from .recurrence import INPUT, INSIDE, KEEP_ALL, Again, First


class Operation(StrEnum):
    """What is done with a stage."""

    F_NONE = "F_none"  # run it, drop what is inside and its input
    F_CK = "F_ck"  # run it, drop what is inside, keep its input
    F_ALL = "F_all"  # run it, keep what its backward needs
    LAST_F_ALL = "last F_all"  # the same right before its backward: nothing behind it runs any more
    B = "B"
    DROP = "drop"  # the map that it hands on, whose uses are over
    X_OUT = "x out"  # the map that it hands on leaves for the host
    X_BACK = "x back"
    INSIDE_OUT = "inside out"  # what it keeps beside that map leaves
    INSIDE_BACK = "inside back"


Step = tuple[Operation, int]
Range = tuple[int, int, int]  # stages s to t within m slots


def sequence(again: Again, first: First, slots: int) -> Iterator[Step]:
    """Operations on stages (by index), in order. `slots`: with a finite time."""
    last = again.facts.count - 1
    pending: list[Range | Step] = [(0, last, slots)]
    while pending:
        what = pending.pop()
        if len(what) == 2:
            yield what
        elif what[1] == last:
            pending += reversed(_first_run(again, first, *what))
        else:
            pending += reversed(_further_run(again, *what))


def _further_run(again: Again, s: int, t: int, m: int) -> list[Range | Step]:
    j = int(again.choice[s, t, m])
    if j == KEEP_ALL:
        rest = [(s + 1, t, m - int(again.saved[s]))] if s < t else []
        return [(Operation.F_ALL if s < t else Operation.LAST_F_ALL, s), *rest, (Operation.B, s)]
    passing = [(Operation.F_NONE, i) for i in range(s + 1, j)]
    return [(Operation.F_CK, s), *passing, (j, t, m - int(again.x[j - 1])), (Operation.DROP, j - 1), (s, j - 1, m)]


def _first_run(again: Again, first: First, s: int, t: int, m: int) -> list[Range | Step]:
    j, leaves = int(first.choice[s, m]), int(first.away[s, m])
    out = [(Operation.X_OUT, s - 1)] * bool(leaves & INPUT) + [(Operation.INSIDE_OUT, s)] * bool(leaves & INSIDE)
    back = [(Operation.INSIDE_BACK, s)] * bool(leaves & INSIDE) + [(Operation.X_BACK, s - 1)] * bool(leaves & INPUT)
    freed = (int(again.x_away[s - 1]) if leaves & INPUT else 0) + (int(again.inside[s]) if leaves & INSIDE else 0)
    if j == KEEP_ALL:
        rest = [(s + 1, t, min(m - int(again.saved[s]) + freed, again.slots))] if s < t else []
        return [(Operation.F_ALL if s < t else Operation.LAST_F_ALL, s), *out, *rest, *back, (Operation.B, s)]
    passing = [(Operation.F_NONE, i) for i in range(s + 1, j)]
    rest = (j, t, min(m - int(again.x[j - 1]) + freed, again.slots))
    return [(Operation.F_CK, s), *out, *passing, rest, (Operation.DROP, j - 1), *back, (s, j - 1, m)]
