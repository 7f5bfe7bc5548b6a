"""What PyTorch's caching allocator would take from the driver for a schedule: a model of its blocks and segments, by its documentation.

    a request is rounded up to 512 bytes
    up to 1 MiB    small pool, segments of 2 MiB
    below 10 MiB   large pool, segments of 20 MiB
    above          large pool, a segment of its own, rounded up to 2 MiB
    the smallest free block that holds it is taken; its rest stays a block (small pool: from 512 bytes, large pool: above 1 MiB)
    freed blocks join their free neighbours; segments are never given back

One stream, no memory limit; a library's own allocations and the context are not in it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from vramlab.check import CheckedSchedule
from vramlab.schedule import Compute, Free, Prefetch, Recompute

ROUND, SMALL, SMALL_SEGMENT, MEDIUM, LARGE_SEGMENT, LARGE_ROUND = 512, 2**20, 2 * 2**20, 10 * 2**20, 20 * 2**20, 2 * 2**20


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment. `before` and `after` are its neighbours there."""

    address: int
    nbytes: int
    is_small: bool
    is_free: bool = True
    before: Block | None = None
    after: Block | None = None


@dataclass(slots=True)
class CachingAllocator:
    """Blocks of one device."""

    reserved_bytes: int = 0
    allocated_bytes: int = 0
    _blocks: dict[int, Block] = field(default_factory=dict)  # address -> block
    _free: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})  # small? -> (bytes, address)

    def allocate(self, nbytes: int) -> Block | None:
        """A block of at least so many bytes; None for none."""
        if nbytes <= 0:
            return None
        size = -(-nbytes // ROUND) * ROUND
        is_small, free = size <= SMALL, self._free[size <= SMALL]
        at = bisect_left(free, (size, 0))
        block = self._blocks[free.pop(at)[1]] if at < len(free) else self._segment(size, is_small)
        rest = block.nbytes - size
        if rest >= ROUND if is_small else rest > SMALL:
            self._split(block, size)
        block.is_free = False
        self.allocated_bytes += block.nbytes
        return block

    def free(self, block: Block | None) -> None:
        """Give a block back."""
        if block is None:
            return
        self.allocated_bytes -= block.nbytes
        block.is_free = True
        if block.after is not None and block.after.is_free:
            self._join(block, block.after)
        if block.before is not None and block.before.is_free:
            block = self._join(block.before, block)
        insort(self._free[block.is_small], (block.nbytes, block.address))

    def _segment(self, size: int, is_small: bool) -> Block:
        nbytes = SMALL_SEGMENT if is_small else LARGE_SEGMENT if size < MEDIUM else -(-size // LARGE_ROUND) * LARGE_ROUND
        block = Block(self.reserved_bytes, nbytes, is_small)
        self._blocks[block.address] = block
        self.reserved_bytes += nbytes
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.nbytes - size, block.is_small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.nbytes = rest, size
        self._blocks[rest.address] = rest
        insort(self._free[rest.is_small], (rest.nbytes, rest.address))

    def _join(self, first: Block, second: Block) -> Block:
        """Two neighbours as one; whichever was on the list of free blocks is taken off it."""
        free = self._free[first.is_small]
        for block in (first, second):
            at = bisect_left(free, (block.nbytes, block.address))
            if at < len(free) and free[at] == (block.nbytes, block.address):
                free.pop(at)
        first.nbytes, first.after = first.nbytes + second.nbytes, second.after
        if second.after is not None:
            second.after.before = first
        del self._blocks[second.address]
        return first


def reserved_bytes(checked: CheckedSchedule, steps: int = 2) -> int:
    """What the allocator has reserved after so many steps: from the second on a step finds the blocks of the one before."""
    tape, allocator = checked.tape, CachingAllocator()
    held = {s.id: allocator.allocate(s.nbytes) for s in tape.storages if s.at_start}
    for _ in range(steps):
        for instruction in checked.schedule.instructions:
            match instruction:
                case Compute() | Recompute():
                    _run(instruction, checked, held, allocator)
                case Free(storage):
                    allocator.free(held.pop(storage))
                case Prefetch(storage):
                    held[storage] = allocator.allocate(tape.storages[storage].nbytes)
        for s in tape.storages:  # what stays is there at the next step's start, or made anew by it
            if s.at_end and not s.at_start:
                allocator.free(held.pop(s.id))
            elif s.at_start and s.id not in held:
                held[s.id] = allocator.allocate(s.nbytes)
    return allocator.reserved_bytes


def _run(run: Compute | Recompute, checked: CheckedSchedule, held: dict[int, Block | None], allocator: CachingAllocator) -> None:
    """What the op makes, then its inside; what takes over a region takes its block."""
    tape, op = checked.tape, checked.tape.ops[run.op]
    if run.reuse is not None:
        held[op.takeover[0]] = held.pop(run.reuse)
    made, again = tape.creates[run.op], []
    for s in made:
        if s in held and not (run.reuse is not None and s == op.takeover[0]):
            again.append(allocator.allocate(tape.storages[s].nbytes))  # a recompute's duplicate
        elif s not in held:
            held[s] = allocator.allocate(tape.storages[s].nbytes)
    again.append(allocator.allocate(op.variant(run.variant).workspace_bytes))
    for block in again:
        allocator.free(block)
