"""What has been evicted, and who is next to whom. Kept up to date from one eviction to the next.

An op is *evicted* while an output of it is absent that was computed and can be computed again. Two evicted ops are neighbours
when one reads an absent output of the other.
"""

from __future__ import annotations

import numpy as np

from vramlab.rollout import Rollout


class Evicted:
    """The evicted storages at the last `update`, and the evicted neighbours of an op or a storage."""

    def __init__(self, rollout: Rollout) -> None:
        tape = rollout.tape
        self.reads, self.producer, self.readers = tape.reads, tape.producer, tape.readers
        self.is_absent = np.zeros(len(tape.storages), np.bool_)
        self.absent_outputs = np.zeros(len(tape.ops), np.int32)

    def update(self, rollout: Rollout) -> tuple[list[int], list[int]]:
        """Look anew. Returns the storages that are evicted now and were not, and those that were and are not."""
        made_from = rollout.facts.there_from
        can_return = rollout.facts.can_return_until >= rollout.next_op
        is_absent = (made_from >= 0) & (made_from < rollout.next_op) & ~rollout.is_on_device & can_return
        changed = np.flatnonzero(is_absent != self.is_absent)
        left = changed[is_absent[changed]].tolist()
        back = changed[~is_absent[changed]].tolist()
        self.is_absent = is_absent
        for s in left:
            self.absent_outputs[self.producer[s]] += 1
        for s in back:
            self.absent_outputs[self.producer[s]] -= 1
        return left, back

    def is_evicted(self, op: int) -> bool:
        """Is an output of it absent?"""
        return bool(self.absent_outputs[op])

    def parents(self, op: int) -> list[int]:
        """The evicted ops whose absent outputs it reads."""
        return [self.producer[s] for s in self.reads[op] if self.is_absent[s]]

    def children_by(self, storage: int) -> list[int]:
        """The evicted ops that read this storage."""
        return [r for r in self.readers[storage] if self.absent_outputs[r]]
