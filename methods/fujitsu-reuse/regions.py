"""Where gradients go: into the region of the map that they are the gradient of, as soon as nobody reads that map any more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from vramlab.layers import layers_of
from vramlab.liveness import eager_reuse, used_storages
from vramlab.schedule import Compute, Free, Instruction
from vramlab.tape import Phase, Tape


def place(tape: Tape, order: Sequence[int], *, stays: bool) -> tuple[Instruction, ...]:
    """The ops in this order, with the frees that make regions pass from maps to gradients.

    `stays`: a region lasts to the end of the step, holding a map or the gradient that took it over; else it is freed when it is dead.
    """
    return tuple(_Placement(tape, order, stays).instructions())


class _Placement:
    """Walks the order once. `dead`: maps whose region stands there unread."""

    def __init__(self, tape: Tape, order: Sequence[int], stays: bool) -> None:
        self.tape, self.order, self.stays = tape, order, stays
        self.last = {s: op for op in order for s in used_storages(tape, op)}
        self.map_of = {layer.dx: layer.x for layer in layers_of(tape) if layer.dx is not None}
        self.dead: dict[int, None] = {}
        self.in_region = {s for op in tape.ops if op.phase is Phase.FORWARD for s in tape.creates[op.id]}  # maps, then what replaced them
        self.dying = defaultdict(list)
        for s, op in self.last.items():
            self.dying[op].append(s)

    def instructions(self) -> Iterator[Instruction]:
        yield from (Free(s.id) for s in self.tape.storages if s.at_start and not s.at_end and s.id not in self.last)
        for op in self.order:
            for dx in self.tape.creates[op]:
                yield from self._make_way(dx)
            reuse = self._reuse(op)
            yield Compute(op, reuse)
            if reuse in self.in_region:
                self.in_region.add(self.tape.ops[op].takeover[0])
            for s in sorted(self.dying[op]):
                if s != reuse and not self.tape.storages[s].at_end:
                    yield from self._end(s)
        yield from map(Free, self.dead)

    def _make_way(self, dx: int) -> Iterator[Instruction]:
        """The gradient is about to be allocated: its map's region is for it, if the map is dead."""
        x = self.map_of.get(dx)
        if x in self.dead and self.tape.storages[x].nbytes == self.tape.storages[dx].nbytes:
            del self.dead[x]
            self.in_region.add(dx)
            yield Free(x)

    def _reuse(self, op: int) -> int | None:
        """In the forward phase what eager writes in place; in the backward every element-wise op over what it reads last."""
        takeover, dies_here = self.tape.ops[op].takeover, False
        if takeover is not None:
            dies_here = self.last[takeover[1]] == op
        if self.tape.ops[op].phase is Phase.BACKWARD and takeover is not None:
            return takeover[1] if dies_here and not self.tape.storages[takeover[1]].at_end else None
        return eager_reuse(self.tape, self.tape.ops[op], dies_here)

    def _end(self, s: int) -> Iterator[Instruction]:
        """Its last reader has run."""
        if self.stays and s in self.in_region:
            self.dead[s] = None
        else:
            yield Free(s)
