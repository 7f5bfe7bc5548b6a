"""Which tensors are evicted, and how: swap first, as long as it is hidden; then, one by one, whichever costs less.

    1. by FT, largest first: swap, while the copies are hidden
    2. by MSPS = memory saved / recompute time, largest first: swap if what is exposed of it costs less than to recompute, else recompute;
       each tensor to be recomputed is no source of others any more, which makes those dearer (the paper's Algorithm 2)

Both end as soon as the step fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vramlab.player import StepFacts
from vramlab.tape import Phase, Tape

from .accesses import Candidate
from .lanes import Lanes


@dataclass(slots=True)
class Lineage:
    """How a tensor is computed again: from which sources, in what time, and what its absence adds to others."""

    sources: set[int]  # candidates that are taken to be there
    seconds: float  # infinite where it cannot be computed again
    extra_seconds: float = 0.0


@dataclass
class Choice:
    """What was decided. `lanes` keeps the swaps."""

    swaps: list[Candidate] = field(default_factory=list)
    recomputes: list[Candidate] = field(default_factory=list)
    lanes: Lanes = field(default_factory=Lanes)


def choose(tape: Tape, candidates: list[Candidate], over: np.ndarray) -> Choice:
    """Until no op is over the budget, or nothing is left to choose."""
    return _Chooser(tape, candidates, over).choose()


class _Chooser:
    def __init__(self, tape: Tape, candidates: list[Candidate], over: np.ndarray) -> None:
        self.tape, self.candidates, self.over = tape, candidates, over.copy()
        self.facts = StepFacts.of(tape)
        self.choice = Choice()
        seconds = np.array([op.seconds for op in tape.ops])
        self.ends = np.cumsum(seconds)
        self.begins = self.ends - seconds

    def choose(self) -> Choice:
        rest = self._hidden_swaps(sorted(self.candidates, key=lambda c: (-c.free_seconds, c.storage)))
        if (self.over > 0).any():
            self._cheaper_of_both(rest)
        return self.choice

    def _hidden_swaps(self, by_free_time: list[Candidate]) -> list[Candidate]:
        """Step 1; returns what is left."""
        rest = []
        for c in by_free_time:
            if c.free_seconds >= 0 and self._helps_away(c) and self.choice.lanes.overhead(c) == 0:
                self._swap(c, *self._away(c))
            else:
                rest.append(c)
        return rest

    def _cheaper_of_both(self, rest: list[Candidate]) -> None:
        """Step 2."""
        self.lineages = {c.storage: self._lineage(c) for c in rest}
        left = {c.storage: c for c in rest}
        while left and (self.over > 0).any():
            c = left.pop(max(left, key=lambda s: (self._msps(left[s]), -s)))
            if not self._helps(c):
                continue
            lineage = self.lineages[c.storage]
            if self.choice.lanes.overhead(c) <= lineage.seconds + lineage.extra_seconds and self._helps_away(c):
                self._swap(c, *self._away(c))
            elif lineage.seconds < np.inf:
                self._recompute(c, left)
            else:
                self._swap(c, c.evicted + 1, c.back)

    def _helps(self, c: Candidate) -> bool:
        """Is there an op between its accesses that is over the budget?"""
        return bool((self.over[c.evicted + 1:c.back] > 0).any())

    def _helps_away(self, c: Candidate) -> bool:
        """Is there one by which its copy to the host has ended, and that of its way back has not begun?"""
        first, last = self._away(c)
        return bool((self.over[first:last] > 0).any())

    def _away(self, c: Candidate) -> tuple[int, int]:
        """From the first op that starts after SwapOutEnd to before the first that ends after SwapInStart, by the swaps chosen so far."""
        out_end, in_start = self.choice.lanes.away(c)
        return int(np.searchsorted(self.begins, out_end)), int(np.searchsorted(self.ends, in_start, side="right"))

    def _swap(self, c: Candidate, first: int, last: int) -> None:
        self.choice.lanes.add(c)
        self.choice.swaps.append(c)
        self.over[first:last] -= c.nbytes

    def _msps(self, c: Candidate) -> float:
        lineage = self.lineages[c.storage]
        seconds = lineage.seconds + lineage.extra_seconds
        return c.nbytes / seconds if seconds > 0 else np.inf

    def _lineage(self, c: Candidate) -> Lineage:
        """As if all candidates were there; what is dead by the back access is computed again with it."""
        tape, facts = self.tape, self.facts
        made_by = tape.producer[c.storage]
        if tape.ops[made_by].phase is not Phase.FORWARD or facts.recomputable_until[made_by] < c.back:
            return Lineage(set(), np.inf)
        known = {other.storage for other in self.candidates}
        sources, ops, stack = set(), set(), [made_by]
        while stack:
            op = stack.pop()
            if op in ops:
                continue
            ops.add(op)
            for s in tape.reads[op]:
                if s in known:
                    sources.add(s)
                elif tape.producer[s] is not None and facts.last_use[s] < c.back:
                    stack.append(tape.producer[s])
        return Lineage(sources, sum(tape.ops[op].seconds for op in ops))

    def _recompute(self, c: Candidate, left: dict[int, Candidate]) -> None:
        """Algorithm 2: who takes this tensor as a source takes its sources instead."""
        lineage = self.lineages[c.storage]
        readers = 1
        for other in self.choice.recomputes:
            sources = self.lineages[other.storage].sources
            if c.storage in sources:
                sources.discard(c.storage)
                sources |= lineage.sources
                readers += 1
        self.choice.recomputes.append(c)
        self.over[c.evicted + 1:c.back] -= c.nbytes
        for s in left:
            other = self.lineages[s]
            if c.storage in other.sources:
                other.sources.discard(c.storage)
                other.sources |= lineage.sources
                other.seconds += lineage.seconds
                other.extra_seconds = other.seconds * sum(s in self.lineages[r.storage].sources for r in self.choice.recomputes)
            if s in lineage.sources:
                other.extra_seconds = readers * other.seconds
