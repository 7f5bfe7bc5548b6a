"""The measured iteration: when each tensor is accessed, where memory is short, and which tensors could be away in between.

    evicted access            SwapOutEnd          SwapInStart             back access
    ─────┤ ── swap out ──────────┤ ····· FT ··········├ ───── swap in ───────├─────
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from vramlab.device import DeviceProfile
from vramlab.player import StepFacts
from vramlab.tape import Tape


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A tensor (here: a storage) with the two accesses between which it may be away: the pair of largest free time. Seconds of the
    iteration as it was measured, with nothing evicted."""

    storage: int
    nbytes: int
    evicted: int  # the op of its evicted access
    back: int  # the op of its back access
    leaves_seconds: float  # the end of the evicted access
    needed_seconds: float  # the start of the back access
    swap_out_seconds: float
    swap_in_seconds: float

    @property
    def free_seconds(self) -> float:
        """FT = SwapInStart - SwapOutEnd; below zero where the copies do not fit in between."""
        return (self.needed_seconds - self.swap_in_seconds) - (self.leaves_seconds + self.swap_out_seconds)


def over_budget(tape: Tape, device_bytes: int) -> np.ndarray:
    """Per op: bytes above the budget while nothing is evicted. int64, below zero where there is room."""
    return StepFacts.of(tape).inner_bytes - device_bytes


def candidates_of(tape: Tape, device: DeviceProfile, over: np.ndarray) -> list[Candidate]:
    """Tensors that are accessed more than once and idle at an op of the memory peak, where `over` is above zero."""
    facts = StepFacts.of(tape)
    ends = np.cumsum([op.seconds for op in tape.ops])
    begins = ends - np.array([op.seconds for op in tape.ops])
    short = np.concatenate([[0], np.cumsum(over > 0)])  # how many ops before this one are of the peak
    found = []
    for s in tape.storages:
        made_by = tape.producer[s.id]
        if made_by is None or not s.nbytes:
            continue
        accesses = sorted({made_by, *(op for op in facts.needed_at[s.id] if op < facts.end)})
        pairs = [Candidate(storage=s.id, nbytes=s.nbytes, evicted=a, back=b, leaves_seconds=float(ends[a]), needed_seconds=float(begins[b]),
                           swap_out_seconds=device.copy_seconds(s.nbytes, to_host=True),
                           swap_in_seconds=device.copy_seconds(s.nbytes, to_host=False))
                 for a, b in pairwise(accesses) if short[b] > short[a + 1]]
        if pairs:
            found.append(max(pairs, key=lambda pair: pair.free_seconds))
    return found
