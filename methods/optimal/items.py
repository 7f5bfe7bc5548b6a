"""What the program schedules: single ops, or runs of neighbouring ops that are run, and run again, as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vramlab.liveness import last_use, used_storages
from vramlab.schedule import Compute, Free, Instruction, Recompute
from vramlab.tape import Phase, Tape


@dataclass(frozen=True, kw_only=True)
class Run:
    """Ops in tape order. What they create and nobody else reads is *inside*: freed, or written over, where the run reads it last."""

    tape: Tape
    ops: tuple[int, ...]
    makes: frozenset[int]  # what others read, or the step ends with; of a single op all that it creates, which may take over an input

    @cached_property
    def reads(self) -> frozenset[int]:
        """What has to be on the device when the run begins: read or overwritten, and not created by it."""
        touched = {s for op in self.ops for s in (*self.tape.reads[op], *self.tape.ops[op].mutates)}
        return frozenset(touched - self._created)

    @property
    def seconds(self) -> float:
        """Of all its ops, by the library's own choice of algorithms."""
        return sum(self.tape.ops[op].seconds for op in self.ops)

    @cached_property
    def inner_bytes(self) -> int:
        """The most that it holds beside what it reads and makes."""
        held, most = 0, 0
        for op in self.ops:
            fresh = [s for s in self.tape.creates[op] if s not in self.makes]
            held += sum(self.tape.storages[s].nbytes for s in fresh) - self._taken_bytes(op)
            most = max(most, held + self.tape.ops[op].workspace_bytes)
            held -= sum(self.tape.storages[s].nbytes for s in self._dying(op))
        return most

    def instructions(self, *, is_first: bool, reuse: int | None = None) -> list[Instruction]:
        """The run, with the frees inside it; `reuse`: what a run of one op writes over."""
        written: list[Instruction] = []
        for op in self.ops:
            taken = reuse if reuse is not None else self._taken(op)
            written.append((Compute if is_first else Recompute)(op, taken))
            written += [Free(s) for s in self._dying(op)]
        return written

    @cached_property
    def _created(self) -> frozenset[int]:
        return frozenset(s for op in self.ops for s in self.tape.creates[op])

    @cached_property
    def _last(self) -> dict[int, int]:
        return {s: op for op in self.ops for s in used_storages(self.tape, op) if s in self._created and s not in self.makes}

    def _taken(self, op: int) -> int | None:
        """The inside storage that dies at this op and that its output may take over."""
        takeover = self.tape.ops[op].takeover
        if takeover is None or self._last.get(takeover[1]) != op or takeover[1] in self.tape.ops[op].mutates:
            return None
        return takeover[1]

    def _taken_bytes(self, op: int) -> int:
        taken = self._taken(op)
        return 0 if taken is None else self.tape.storages[taken].nbytes

    def _dying(self, op: int) -> list[int]:
        return [s for s in used_storages(self.tape, op) if self._last.get(s) == op and s != self._taken(op)]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One thing that the program runs."""

    first: Run
    again: Run | None  # what brings back all that it makes; None where that is impossible
    until: int  # the first op before which it may still run again: what it reads is overwritten there

    @property
    def makes(self) -> frozenset[int]:
        """What others read, or the step ends with."""
        return self.first.makes

    @property
    def takeover(self) -> tuple[int, int] | None:
        """Output and input: of a single op that may write over what it reads."""
        if len(self.first.ops) > 1:
            return None
        op = self.first.tape.ops[self.first.ops[0]]
        return op.takeover if op.takeover and op.takeover[0] in self.makes and op.takeover[1] not in op.mutates else None


def single_items(tape: Tape) -> list[Item]:
    """One item an op."""
    return [_item(tape, (op.id,)) for op in tape.ops]


def coarse_items(tape: Tape, most: int) -> list[Item]:
    """At most so many items: of all neighbours, those are joined first that need the least together."""
    items = single_items(tape)
    joined = [_item(tape, a.first.ops + b.first.ops) for a, b in zip(items, items[1:])]
    while len(items) > most:
        at = min(range(len(joined)), key=lambda i: (footprint_bytes(joined[i]), i))
        items[at:at + 2] = [joined[at]]
        near = [(i, i + 1) for i in (at - 1, at) if 0 <= i and i + 1 < len(items)]
        joined[max(at - 1, 0):at + 2] = [_item(tape, items[a].first.ops + items[b].first.ops) for a, b in near]
    return items


def footprint_bytes(item: Item) -> int:
    """What its first run holds, what others keep apart."""
    storages = item.first.tape.storages
    return sum(storages[s].nbytes for s in item.first.reads | item.makes) + item.first.inner_bytes


def _item(tape: Tape, ops: tuple[int, ...]) -> Item:
    last, here = last_use(tape), set(ops)
    makes = frozenset(s for op in ops for s in tape.creates[op] if len(ops) == 1 or tape.storages[s].at_end or last[s] not in here)
    again = _needed(tape, ops, makes)
    until = min((_until(tape, op) for op in again), default=len(tape.ops))
    possible = makes and all(_may_run_again(tape, op) for op in again) and until > ops[-1]
    return Item(first=Run(tape=tape, ops=ops, makes=makes), until=until,
                again=Run(tape=tape, ops=again, makes=makes) if possible else None)


def _needed(tape: Tape, ops: Sequence[int], makes: frozenset[int]) -> tuple[int, ...]:
    """The ops that what is made depends on."""
    wanted, found = set(makes), []
    for op in reversed(ops):
        if wanted & set(tape.creates[op]):
            found.append(op)
            wanted |= set(tape.reads[op])
    return tuple(reversed(found))


def _may_run_again(tape: Tape, op: int) -> bool:
    o = tape.ops[op]
    return o.phase is not Phase.OPTIMIZER and (o.throwaway_state or not o.mutates)


def _until(tape: Tape, op: int) -> int:
    """The first op that overwrites what this one read as it was, or what it makes."""
    bound = {s for s, _ in tape.read_versions[op]} | set(tape.creates[op])
    return next((later.id for later in tape.ops[op + 1:] if bound & set(later.mutates)), len(tape.ops))
