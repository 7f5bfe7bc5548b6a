"""What has been evicted, as a graph: who has to be computed again for whom. Kept up to date from one eviction to the next.

An op is *evicted* while an output of it is absent that was computed and can be computed again. Two evicted ops are neighbours
when one reads an absent output of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from vramlab.rollout import Rollout


class Evicted:
    """The evicted storages at the last `update`, and the regions around a storage that is still there."""

    def __init__(self, rollout: Rollout) -> None:
        tape = rollout.tape
        self.reads, self.creates, self.producer, self.readers = tape.reads, tape.creates, tape.producer, tape.readers
        self.seconds = [op.seconds for op in tape.ops]
        until = [-1 if made_by is None else rollout.facts.recomputable_until[made_by] for made_by in tape.producer]
        self._until = np.array(until, np.int64)  # per storage: the last op before which it can be computed again
        self._is_absent = np.zeros(len(tape.storages), np.bool_)
        self.absent: set[int] = set()
        self._absent_outputs = [0] * len(tape.ops)

    def update(self, rollout: Rollout) -> tuple[list[int], list[int]]:
        """Look anew. Returns the storages that are evicted now and were not, and those that were and are not."""
        made_from = rollout.facts.there_from
        is_absent = (made_from >= 0) & (made_from < rollout.next_op) & ~rollout.is_on_device & (self._until >= rollout.next_op)
        changed = np.flatnonzero(is_absent != self._is_absent)
        left = [int(s) for s in changed if is_absent[s]]
        back = [int(s) for s in changed if not is_absent[s]]
        self._is_absent = is_absent
        self.add(left)
        self.remove(back)
        return left, back

    def add(self, storages: Iterable[int]) -> None:
        """These have been evicted."""
        for s in storages:
            self.absent.add(s)
            self._absent_outputs[self.producer[s]] += 1

    def remove(self, storages: Iterable[int]) -> None:
        """These are there again, or gone for good."""
        for s in storages:
            self.absent.discard(s)
            self._absent_outputs[self.producer[s]] -= 1

    def is_evicted(self, op: int) -> bool:
        """Is an output of it absent?"""
        return self._absent_outputs[op] > 0

    def parents(self, op: int) -> list[int]:
        """The evicted ops whose absent outputs it reads."""
        return [self.producer[s] for s in self.reads[op] if s in self.absent]

    def children_by(self, storage: int) -> list[int]:
        """The evicted ops that read this storage."""
        return [r for r in self.readers[storage] if self._absent_outputs[r]]

    def children(self, op: int) -> list[int]:
        """The evicted ops that read an absent output of this op."""
        return [r for s in self.creates[op] if s in self.absent for r in self.children_by(s)]

    def backward_region(self, storage: int) -> Iterator[int]:
        """The ops that have to run again before this storage's producer can, were it evicted; each once."""
        return self._closure(self.parents(self.producer[storage]), self.parents)

    def forward_region(self, storage: int) -> Iterator[int]:
        """The evicted ops that cannot run again without this storage; each once. None of them is in its backward region."""
        return self._closure(self.children_by(storage), self.children)

    @staticmethod
    def _closure(first: list[int], further: Callable[[int], list[int]]) -> Iterator[int]:
        seen, stack = set(first), list(dict.fromkeys(first))
        while stack:
            op = stack.pop()
            yield op
            new = [n for n in further(op) if n not in seen]
            seen.update(new)
            stack += dict.fromkeys(new)
