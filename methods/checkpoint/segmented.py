"""A step in segments: the forward keeps what crosses the cuts, the backward recomputes a segment when it gets there.

    forward     segment 1 │ segment 2 │ ... │ last segment      between the bars: dropped after the last forward use
    backward                                 last segment       kept as it is: its backward comes at once
                            segment 2  ◄─ recomputed whole, from what crosses the cut before it
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence

from vramlab.device import DeviceProfile
from vramlab.layers import Cut
from vramlab.player import ABSENT, Player
from vramlab.schedule import Schedule
from vramlab.tape import Phase, Tape


class SegmentedStep:
    """Writes the schedule for one choice of cuts."""

    def __init__(self, tape: Tape, device: DeviceProfile, cuts: Sequence[Cut]) -> None:
        self.tape, self.player = tape, Player(tape, device)
        self.facts = self.player.facts
        self.segment_of = self._dropped(cuts)  # dropped storage -> its segment
        self.dropped = defaultdict(list)
        for s, segment in self.segment_of.items():
            self.dropped[segment].append(s)
        self.sources = {i + 1: cut.storages for i, cut in enumerate(cuts) if i + 1 in self.dropped}
        self.held = Counter(s for storages in self.sources.values() for s in storages)  # by segments that are yet to be recomputed
        self.forward_end = self._last_forward_use()

    def schedule(self, method: str) -> Schedule:
        """The whole step."""
        self._free_dead([s.id for s in self.tape.storages if s.at_start])
        for op in range(len(self.tape.ops)):
            for segment in sorted({self.segment_of[s] for s in self.facts.needs[op] if self._is_dropped(s)}, reverse=True):
                self._recompute(segment)
            self.player.compute(op, self._reuse(op))
            self._free_dead(self.facts.uses[op])
            for s in self.facts.uses[op]:
                if self.forward_end.get(s) == op and self.player.is_settled[s]:
                    self.player.free(s)
        self.held.clear()  # by segments that nothing needed again
        self._free_dead(range(len(self.tape.storages)))
        return self.player.schedule(method)

    def _dropped(self, cuts: Sequence[Cut]) -> dict[int, int]:
        """What the segments before the last drop: maps that the backward reads, that cross no cut and can be computed again."""
        kept = {s for cut in cuts for s in cut.storages}
        bounds = [cut.op for cut in cuts]
        dropped = {}
        for op in self.tape.ops:
            segment = bisect_left(bounds, op.id)
            if op.phase is Phase.FORWARD and segment < len(bounds):
                for s in self.tape.creates[op.id]:
                    if s not in kept and self._comes_back(s):
                        dropped[s] = segment
        return dropped

    def _comes_back(self, storage: int) -> bool:
        """Is it needed after the forward phase, no later than it can be recomputed, and not kept by the step?"""
        needed = [op for op in self.facts.needed_at[storage] if op == self.facts.end or self.tape.ops[op].phase is not Phase.FORWARD]
        return bool(needed) and needed[-1] <= min(self.facts.recomputable_until[self.tape.producer[storage]], self.facts.end - 1)

    def _last_forward_use(self) -> dict[int, int]:
        """Per dropped storage: the op after which the forward phase is done with it."""
        def is_forward(op: int) -> bool:
            return op < self.facts.end and self.tape.ops[op].phase is Phase.FORWARD

        return {s: max([self.tape.producer[s], *filter(is_forward, self.facts.needed_at[s])]) for s in self.segment_of}

    def _is_dropped(self, storage: int) -> bool:
        return storage in self.segment_of and self.player.residency[storage] is ABSENT

    def _recompute(self, segment: int) -> None:
        """Every map of the segment that the step still needs; what only the recompute reads is freed as soon as it was read."""
        made = [s for s in self.dropped[segment] if self.tape.producer[s] < self.player.next_op]
        ops = self.player.ops_to_recompute([s for s in made if self.player.is_live(s)])
        reads = Counter(s for op in ops for s in self.tape.reads[op])
        for op in ops:
            self.player.recompute(op, self._reuse(op, reads))
            reads.subtract(self.tape.reads[op])
            self._free_dead(self.facts.uses[op], reads)
        for s in self.sources.pop(segment, ()):
            self.held[s] -= 1
            self._free_dead([s])

    def _reuse(self, op: int, reads: Counter | None = None) -> int | None:
        """The input that the op's output takes over: one that is free, or would be freed, right after the op."""
        out, taken = self.tape.ops[op].takeover or (None, None)
        if taken is None or self.held[taken] or not self.player.is_settled[taken] or self.player.residency[out] is not ABSENT:
            return None
        if reads is not None:
            return taken if reads[taken] == 1 and not self.player.is_live(taken) else None
        return taken if op in (self.facts.last_use[taken], self.forward_end.get(taken)) else None

    def _free_dead(self, storages: Sequence[int], reads: Counter | None = None) -> None:
        for s in storages:
            if self.player.is_settled[s] and not self.player.is_live(s) and not self.held[s] and not (reads and reads[s]):
                self.player.free(s)
