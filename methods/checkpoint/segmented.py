"""A step in segments: the forward keeps what crosses the cuts, the backward recomputes a segment when it gets there.

    forward     segment 1 │ segment 2 │ ... │ last segment      between the bars: dropped after the last forward use
    backward                                 last segment       kept as it is: its backward comes at once
                            segment 2  ◄─ recomputed whole, from what crosses the cut before it

In a nested segmentation the forward keeps only some cuts; on its way to a segment a recompute keeps those that are due below it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

from vramlab.device import DeviceProfile
from vramlab.layers import Cut
from vramlab.player import ABSENT, Player
from vramlab.schedule import Schedule
from vramlab.tape import Phase, Tape


class SegmentedStep:
    """Writes the schedule for one choice of cuts. `parts`: nested, this many parts a level; `keep`: storages that no segment drops."""

    def __init__(self, tape: Tape, device: DeviceProfile, cuts: Sequence[Cut], parts: int | None = None,
                 keep: Collection[int] = frozenset()) -> None:
        self.tape, self.cuts, self.parts = tape, cuts, parts
        self.player = Player(tape, device)
        self.facts = self.player.facts
        by_forward = sources_kept(len(cuts), len(cuts), parts)
        self.segment_of = self._dropped(by_forward, keep)  # dropped storage -> its segment
        self.dropped = defaultdict(list)
        for s, segment in self.segment_of.items():
            self.dropped[segment].append(s)
        self.held: Counter[int] = Counter()  # by segments that are yet to be recomputed
        self.sources: dict[int, tuple[int, ...]] = {}  # segment -> what is held for it
        self._hold(by_forward)
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

    def _dropped(self, sources: Iterable[int], keep: Collection[int]) -> dict[int, int]:
        """What the segments before the last drop: maps that the backward reads, that the forward does not keep and that come back."""
        kept = {s for segment in sources for s in self.cuts[segment - 1].storages}.union(keep)
        bounds = [cut.op for cut in self.cuts]
        dropped = {}
        for op in self.tape.ops:
            segment = bisect_left(bounds, op.id)
            if op.phase is Phase.FORWARD and segment < len(bounds):
                for s in self.tape.creates[op.id]:
                    if s not in kept and self._comes_back(s):
                        dropped[s] = segment
        return dropped

    def _hold(self, segments: Iterable[int]) -> None:
        """From now on keep what these segments will be recomputed from, those apart that nothing will ask for."""
        for segment in segments:
            if segment not in self.sources and any(self.player.is_live(s) for s in self.dropped.get(segment, ())):
                self.sources[segment] = self.cuts[segment - 1].storages
                self.held.update(self.sources[segment])

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

    def _release(self, segments: Iterable[int]) -> None:
        for segment in segments:
            for s in self.sources.pop(segment, ()):
                self.held[s] -= 1
                self._free_dead([s])

    def _recompute(self, segment: int) -> None:
        """Every map of the segment that the step still needs; what only the recompute reads is freed as soon as it was read."""
        if self.parts is not None:
            self._release([other for other in self.sources if other > segment])  # their maps came with the segment after them
            self._hold(sources_kept(segment, len(self.cuts), self.parts))
        made = [s for s in self.dropped[segment] if self.tape.producer[s] < self.player.next_op and self.player.is_live(s)]
        due = [s for other in self.sources if other <= segment for s in self.sources[other]]
        ops = self.player.ops_to_recompute([*made, *due])
        reads = Counter(s for op in ops for s in self.tape.reads[op])
        passing = {s for op in ops for s in self.tape.creates[op] if self._is_dropped(s)}.difference(made, due)  # of segments on the way
        for op in ops:
            self.player.recompute(op, self._reuse(op, reads, passing))
            reads.subtract(self.tape.reads[op])
            self._free_dead(self.facts.uses[op], reads, passing)
        self._release([segment])

    def _reuse(self, op: int, reads: Counter | None = None, passing: Collection[int] = ()) -> int | None:
        """The input that the op's output takes over: one that is free, or would be freed, right after the op."""
        out, taken = self.tape.ops[op].takeover or (None, None)
        if taken is None or self.held[taken] or not self.player.is_settled[taken] or self.player.residency[out] is not ABSENT:
            return None
        if reads is not None:
            return taken if reads[taken] == 1 and (taken in passing or not self.player.is_live(taken)) else None
        return taken if op in (self.facts.last_use[taken], self.forward_end.get(taken)) else None

    def _free_dead(self, storages: Sequence[int], reads: Counter | None = None, passing: Collection[int] = ()) -> None:
        for s in storages:
            is_done = s in passing or not self.player.is_live(s)
            if self.player.is_settled[s] and is_done and not self.held[s] and not (reads and reads[s]):
                self.player.free(s)


def sources_kept(segment: int, last: int, parts: int | None) -> list[int]:
    """The segments whose source is kept while `segment` of 0 to `last` has its backward: all up to it, or in halves of halves.

    Nested, a range of segments is cut into `parts`; each part that begins at or before `segment` keeps its source, and the part
    that holds `segment` is cut again: k log_{k+1}(n) sources of n segments, with k = parts - 1.
    """
    if parts is None:
        return list(range(1, segment + 1))
    kept, low, high = [], 0, last + 1
    while high - low > 1 and parts > 1:
        starts = sorted({low + (high - low) * part // parts for part in range(1, parts)} - {low})
        kept += [start for start in starts if start <= segment]
        low, high = max([low, *(x for x in starts if x <= segment)]), min([high, *(x for x in starts if x > segment)])
    return kept
