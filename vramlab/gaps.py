"""A step as gaps, and what can be chosen in each: plain arrays, made from a tape.

A *gap* is a storage together with two ops, neither neighbours, that use it one after the other. In it the storage is kept, swapped (copied
to the host as soon as the first op has run, and back) or dropped (computed again before the second op, with all that is missing for it).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from vramlab.player import StepFacts
from vramlab.tape import Op, Tape

NONE = -1
KEEP, SWAP, DROP = range(3)
SPACING, MOST_ROWS = 32, 128  # ops between two saved states, at least; and how many of these, about


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
    gap_from: np.ndarray  # int32 [gaps]: the first op at which it matters what is chosen for the gap
    is_kept: np.ndarray  # bool [storages]: at the end
    seconds_left: np.ndarray  # float64 [ops + 1]: of the ops from this one on, each by its fastest variant
    spacing: int  # a walk of the step saves its state before op 0, `spacing`, ..., and at the end: its rows
    rows: int
    row_gap: np.ndarray  # int32 [rows, storages]: the gap that each storage is in then, or NONE
    row_next: np.ndarray  # int32 [rows, storages]: the op that needs it next


class Choices(NamedTuple):
    """What is chosen."""

    action: np.ndarray  # int8 [gaps]
    stays: np.ndarray  # bool [gaps]: what comes back early in a gap that is swapped or dropped stays
    lead: np.ndarray  # int8 [gaps]: a copy back starts as late as the link permits (0), that much again earlier (1), as memory permits (2)
    leaner: np.ndarray  # int8 [ops]: so many of the fastest variants are passed over; -1: it takes the fastest, or the choices do not fit


def variants_of(op: Op) -> list[tuple[str | None, float, int]]:
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


def flatten(tape: Tape, variants: list[list[tuple[str | None, float, int]]]) -> Step:
    """The tape as the passes read it; `variants` as `variants_of` has them."""
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
    early_storages = {gap: s for s, gap in early.items()}
    first = [tape.producer[early_storages[g]] if g in early_storages else a for g, (_, a, _, _) in enumerate(gaps)]
    spacing = max(SPACING, ops // MOST_ROWS)
    row_gap, row_next = _rows(spacing, len(tape.storages), (first_need, need_s, need_gap, need_next),
                              (first_made, made_s, made_gap, made_next))
    fastest = [found[0][1] for found in variants]
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
        gap_may_drop=np.array(may_drop, np.bool_), is_kept=np.array([s.at_end and not s.at_start for s in tape.storages], np.bool_),
        gap_from=np.array(first, np.int32), seconds_left=np.array([*accumulate(reversed(fastest), initial=0.0)][::-1], np.float64),
        spacing=spacing, rows=len(row_gap), row_gap=row_gap, row_next=row_next)


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


def _rows(spacing: int, storages: int, needs: tuple[np.ndarray, ...],
          makes: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Of each saved state the part that no choice changes."""
    ops = len(needs[0]) - 2
    gap, following = np.full(storages, NONE, np.int32), np.full(storages, ops + 1, np.int32)
    rows = []
    for op in (ops, *range(ops)):  # what is there at the start stands behind the last op
        if op < ops and op % spacing == 0:
            rows.append((gap.copy(), following.copy()))
        for first, s, in_gap, then in (makes,) if op == ops else (needs, makes):
            gap[s[first[op]:first[op + 1]]] = in_gap[first[op]:first[op + 1]]
            following[s[first[op]:first[op + 1]]] = then[first[op]:first[op + 1]]
    rows.append((gap, following))
    return np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
