"""The PCIe lanes: one copy at a time each way, so that what is swapped delays what is swapped beside it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from .accesses import Candidate


class Lanes:
    """The swaps chosen so far. Out in the order of evicted accesses, as early as can be; in by back accesses, as late as can be."""

    def __init__(self) -> None:
        self.outs: list[Candidate] = []
        self.ins: list[Candidate] = []
        self.exposed_seconds = 0.0

    def add(self, swap: Candidate) -> None:
        """Choose it."""
        self.outs, self.ins = self._with(swap)
        self.exposed_seconds = _exposed(self.outs, self.ins)

    def overhead(self, swap: Candidate) -> float:
        """Seconds of copies that would not be hidden any more, its own and those that it delays; 0 while all of them are."""
        return max(0.0, _exposed(*self._with(swap)) - self.exposed_seconds)

    def away(self, swap: Candidate) -> tuple[float, float]:
        """SwapOutEnd and SwapInStart if it were chosen too."""
        outs, ins = self._with(swap)
        return _out_ends(outs)[swap.storage], _in_starts(ins)[swap.storage]

    def swap_out_ends(self) -> dict[int, float]:
        """Storage -> SwapOutEnd."""
        return _out_ends(self.outs)

    def swap_in_starts(self) -> dict[int, float]:
        """Storage -> SwapInStart."""
        return _in_starts(self.ins)

    def _with(self, swap: Candidate) -> tuple[list[Candidate], list[Candidate]]:
        outs, ins = list(self.outs), list(self.ins)
        insort(outs, swap, key=lambda c: (c.evicted, c.storage))
        insort(ins, swap, key=lambda c: (c.back, c.storage))
        return outs, ins


def _out_ends(outs: Sequence[Candidate]) -> dict[int, float]:
    ends, free = {}, 0.0
    for c in outs:
        ends[c.storage] = free = max(free, c.leaves_seconds) + c.swap_out_seconds
    return ends


def _in_starts(ins: Sequence[Candidate]) -> dict[int, float]:
    starts, free = {}, float("inf")
    for c in reversed(ins):
        starts[c.storage] = free = min(free, c.needed_seconds) - c.swap_in_seconds
    return starts


def _exposed(outs: Sequence[Candidate], ins: Sequence[Candidate]) -> float:
    """How much later than SwapInStart the swaps out end, all together."""
    ends = _out_ends(outs)
    return sum(max(0.0, ends[s] - start) for s, start in _in_starts(ins).items())
