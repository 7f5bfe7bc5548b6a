"""A step as gaps, and what can be chosen in each: plain arrays, made from a tape.

A *gap* is a storage together with two ops that use it one after the other. In it the storage is kept, swapped (copied to the host as soon
as the first op has run, and back) or dropped (computed again before the second op, with all that is missing for it).

    BETWEEN  ops that are no neighbours
    BRIEF    neighbours: it can be at the host while something runs again before the second, or because the first writes over it
    AFTER    the last op that uses it, and the last one before which what is computed from it may be computed again: it is of no use but
             for that, so that by itself it is dropped
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from vramlab.player import StepFacts
from vramlab.tape import Op, Phase, Tape

NONE = -1
KEEP, SWAP, DROP = range(3)
BETWEEN, BRIEF, AFTER = range(3)
MOST_AHEAD = 7  # ops that what is dropped may be computed again ahead of its use
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
    gap_may_drop: np.ndarray  # bool [gaps]: whatever else has to be computed again for it
    gap_could_drop: np.ndarray  # bool [gaps]: as long as enough of what it is computed from is there
    until: np.ndarray  # int32 [ops]: the last op before which it may run again, on what it reads; -1: none
    gap_kind: np.ndarray  # int8 [gaps]
    gap_from: np.ndarray  # int32 [gaps]: the first op at which it matters what is chosen for the gap
    first_over: np.ndarray  # int32 [ops + 2]: the gaps of kind AFTER that end with op i
    over: np.ndarray  # int32
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
    lead: np.ndarray  # int8 [gaps]: a copy back starts as late as the link permits (0), that much again earlier (1), as memory permits (2);
    #                   what was dropped is computed again so many ops ahead of its use
    leaner: np.ndarray  # int8 [ops]: so many of the fastest variants are passed over; -1: it takes the fastest, or the choices do not fit


def variants_of(op: Op) -> list[tuple[str | None, float, int]]:
    """Name, seconds and workspace of those that no other beats, the fastest first; the library's own is None."""
    offered = sorted([(op.seconds, op.workspace_bytes, ""), *((v.seconds, v.workspace_bytes, v.name) for v in op.variants)])
    found: list[tuple[str | None, float, int]] = []
    for seconds, workspace_bytes, name in offered:
        if not found or workspace_bytes < found[-1][2]:
            found.append((name or None, seconds, workspace_bytes))
    return found


class Gap(NamedTuple):
    """One gap, before it becomes a row of `Step`."""

    storage: int
    begin: int
    end: int
    may_drop: bool
    could_drop: bool
    kind: int


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
    gaps: list[Gap] = []
    after: dict[tuple[int, int], tuple[int, int]] = {}  # (storage, op that used it) -> gap and next need
    uses = _uses(tape, facts, is_state)
    until = _until(tape)
    could_return = [-1 if p is None else until[p] for p in tape.producer]
    returns = [_returns_before(uses[s.id], could_return[s.id]) for s in tape.storages]
    taken_over = {(op.id, op.takeover[1]) for op in tape.ops if op.takeover}
    of_use, again = _of_use_until(tape, until, returns), {op for before in returns for op in before}
    for s in tape.storages:
        for a, b in zip(uses[s.id], [*uses[s.id][1:], ops + 1]):
            gap, end = NONE, of_use[s.id] if b > ops else b
            kind = AFTER if b > ops else BETWEEN if a + 1 < b else BRIEF
            is_brief = kind == BRIEF and (b in again or (a, s.id) in taken_over)
            if s.nbytes and end > a and (kind == BETWEEN or (kind == AFTER and a + 1 < end) or is_brief):
                gap = len(gaps)
                may, could = (kind == AFTER or until >= b for until in (int(facts.can_return_until[s.id]), could_return[s.id]))
                gaps.append(Gap(s.id, a, end, may, could, kind))
            after[s.id, a] = gap, b
    need, read, made, write = _Lists(3), _Lists(1), _Lists(4), _Lists(1)
    early = _early(gaps, tape, facts, taken_over)
    for op in tape.ops:
        need.add((s, *after[s, op.id]) for s in facts.needs[op.id] if not is_state[s])
        read.add((s,) for s in tape.reads[op.id] if not is_state[s])
        made.add((s, *after[s, op.id], early.get(s, NONE)) for s in tape.creates[op.id])
        write.add((s,) for s in op.mutates if not is_state[s])
    need.add((s.id, NONE, ops + 1) for s in tape.storages if s.at_end and not s.at_start)
    made.add((s.id, *after[s.id, -1], NONE) for s in tape.storages if s.at_start and not s.at_end)
    first_need, need_s, need_gap, need_next = need.arrays()
    first_made, made_s, made_gap, made_next, made_early = made.arrays()
    over = _Lists(1)
    for op in range(ops + 1):
        over.add((g,) for g, gap in enumerate(gaps) if gap.kind == AFTER and gap.end == op)
    storage, begin, end, may_drop, could_drop, kind = zip(*gaps) if gaps else ((),) * 6
    taken = [(NONE, NONE) if op.takeover is None or is_state[op.takeover[1]] or op.takeover[1] in op.mutates else op.takeover
             for op in tape.ops]
    every = [variant for found in variants for variant in found]
    early_storages = {gap: s for s, gap in early.items()}
    first = [tape.producer[early_storages[g]] if g in early_storages else gap.begin for g, gap in enumerate(gaps)]
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
        gap_may_drop=np.array(may_drop, np.bool_), gap_could_drop=np.array(could_drop, np.bool_), gap_kind=np.array(kind, np.int8),
        until=np.array(until, np.int32), first_over=over.arrays()[0], over=over.arrays()[1],
        is_kept=np.array([s.at_end and not s.at_start for s in tape.storages], np.bool_),
        gap_from=np.array(first, np.int32), seconds_left=np.array([*accumulate(reversed(fastest), initial=0.0)][::-1], np.float64),
        spacing=spacing, rows=len(row_gap), row_gap=row_gap, row_next=row_next)


def _uses(tape: Tape, facts: StepFacts, is_state: list[bool]) -> list[list[int]]:
    """Per storage: the op that creates it (-1 for the start), and those that need it; empty of state, and of what never is."""
    is_there = [s.at_start or tape.producer[s.id] is not None for s in tape.storages]
    return [[int(facts.there_from[s.id]), *facts.needed_at[s.id]] if is_there[s.id] and not is_state[s.id] else [] for s in tape.storages]


def _returns_before(uses: list[int], until: int) -> list[int]:
    """The ops before which a storage, used by these and droppable until one, may be computed again."""
    return [b for a, b in zip(uses, uses[1:]) if a + 1 < b <= until]


def _until(tape: Tape) -> list[int]:
    """Per op: the last op before whose first run it may run again on what it reads; -1 for never. A later write to that ends it."""
    writers: list[list[int]] = [[] for _ in tape.storages]
    for op in tape.ops:
        for s in op.mutates:
            writers[s].append(op.id)
    found = []
    for op in tape.ops:
        ends = [writers[s][version] for s, version in tape.read_versions[op.id] if version < len(writers[s])]
        ends += [writers[s][0] for s in tape.creates[op.id] if writers[s]]
        may_run_again = op.phase is not Phase.OPTIMIZER and (op.throwaway_state or not op.mutates)
        found.append(min(ends, default=len(tape.ops)) if may_run_again else -1)
    return found


def _of_use_until(tape: Tape, until: list[int], returns: list[list[int]]) -> list[int]:
    """Per storage: the last op before which something that is computed from it, and is no smaller, may be computed again; -1: none."""
    follows: list[dict[int, int]] = [{} for _ in tape.storages]  # bytes -> the last op before which so much may be computed from it
    for op in reversed(tape.ops):
        found: dict[int, int] = {}
        nbytes = sum(tape.storages[s].nbytes for s in tape.creates[op.id] if returns[s])
        for s in tape.creates[op.id]:
            for size, end in [*follows[s].items(), *((nbytes, end) for end in returns[s][-1:])]:
                found[size] = max(found.get(size, -1), min(end, until[op.id]))
        for s in tape.reads[op.id]:
            if tape.producer[s] is not None:
                for size, end in found.items():
                    if size >= tape.storages[s].nbytes:
                        follows[s][size] = max(follows[s].get(size, -1), end)
    return [max(found.values(), default=-1) for found in follows]


def _early(gaps: list[Gap], tape: Tape, facts: StepFacts, taken_over: set[tuple[int, int]]) -> dict[int, int]:
    """Per storage: its first gap, where only reads by ops one after the other lie between its creation and that."""
    found: dict[int, int] = {}
    written = {s for op in tape.ops for s in op.mutates}
    for gap, (s, begin, *_, kind) in enumerate(gaps):
        made_by = tape.producer[s]
        if s in found or s in written or made_by is None or begin == made_by or (kind == BRIEF and (begin, s) not in taken_over):
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
