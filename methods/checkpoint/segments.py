"""Where the forward phase is cut: every k-th candidate, Algorithm 3 of the paper for maps of unequal size, or everywhere, nested."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vramlab.layers import Cut, articulation_points, cuts_of, layers_of
from vramlab.tape import Phase, Tape

# Appendix A: six points from B0 / sqrt(2) to sqrt(2) * B0.
GRID_POINTS = 6
# At most this many strides through one set of candidates are tried.
MOST_STRIDES = 24
# Under a budget B grows by at least this factor from one trial of Algorithm 3 to the next, once the first trials are through.
B_GROWTH = 1.1
FIRST_TRIALS = 64
# Parts a level of a nested segmentation that are tried under a budget.
PARTS = (2, 3, 4, 6, 8, 12, 16)
# Kinds of layers whose maps are costly to compute again; the paper names convolutions against BatchNorm, activation and pooling.
EXPENSIVE = frozenset({"convolution", "linear", "attention"})


@dataclass(frozen=True, slots=True)
class Segmentation:
    """A choice of cuts; `parts`: nested, each range of segments is cut into so many parts, and these again."""

    cuts: tuple[Cut, ...]
    parts: int | None = None


def candidates_of(tape: Tape) -> tuple[Cut, ...]:
    """Articulation points; where a network has too few of them for sqrt(n) segments, every cut, with all that crosses it kept."""
    points = articulation_points(tape)
    return points if len(points) >= math.isqrt(len(layers_of(tape))) else cuts_of(tape)


def every(stride: int, candidates: Sequence[Cut]) -> tuple[Cut, ...]:
    """Every `stride`-th candidate, the last of the chain apart: after it nothing is left to drop."""
    return tuple(candidates[stride - 1:len(candidates) - 1:stride])


def sqrt_cuts(candidates: Sequence[Cut]) -> tuple[Cut, ...]:
    """Every floor(sqrt|C|)-th candidate."""
    return every(max(1, math.isqrt(len(candidates))), candidates)


def split_into(segments: int, candidates: Sequence[Cut]) -> tuple[Cut, ...]:
    """At most `segments` segments with equally many candidates."""
    return every(max(1, math.ceil(len(candidates) / segments)), candidates) if segments > 1 else ()


def algorithm_3(tape: Tape, candidates: Sequence[Cut], segment_bytes: float) -> tuple[tuple[Cut, ...], int, int]:
    """Keep a candidate when more than `segment_bytes` of maps were made since the last: (cuts, x, y).

    x is the bytes of the kept maps, y those of the largest segment.
    """
    at = {cut.op: cut for cut in candidates}
    chosen: list[Cut] = []
    since, kept, largest = 0, 0, 0
    for op in tape.ops:
        if op.phase is not Phase.FORWARD:
            continue
        since += sum(tape.storages[s].nbytes for s in tape.creates[op.id])
        if op.id in at and since > segment_bytes:
            chosen.append(at[op.id])
            kept, largest, since = kept + at[op.id].nbytes, max(largest, since), 0
    return tuple(chosen), kept, max(largest, since)


def variants(tape: Tape) -> Iterator[tuple[Cut, ...]]:
    """All that the search under a budget tries: no segments, strides through both sets of candidates, Algorithm 3 on its grid."""
    seen = set()
    for candidates in (articulation_points(tape), cuts_of(tape)):
        for cuts in ((), *_strides(candidates), *grid(tape, candidates)):
            key = tuple(cut.op for cut in cuts)
            if key not in seen:
                seen.add(key)
                yield cuts


def nested(tape: Tape, parts: int) -> Segmentation:
    """g(n) = k + g(n / (k + 1)): k = parts - 1 cuts a level, down to the single candidate."""
    candidates = candidates_of(tape)
    return Segmentation(tuple(candidates[:-1]) if parts > 1 else (), parts)


def growing(tape: Tape, candidates: Sequence[Cut]) -> Iterator[tuple[Cut, ...]]:
    """Algorithm 3 for B from 0 upwards, each distinct plan once; where there are very many, B grows in steps.

    A plan stays the same until B reaches the least of its segments that a cut closes.
    """
    segment_bytes, trials = 0.0, 0
    while True:
        cuts, _, _ = algorithm_3(tape, candidates, segment_bytes)
        yield cuts
        if not cuts:
            return
        trials += 1
        least = min(closed_segments(tape, cuts))
        segment_bytes = least if trials < FIRST_TRIALS else max(least, segment_bytes * B_GROWTH)


def closed_segments(tape: Tape, cuts: Sequence[Cut]) -> list[int]:
    """Per cut: the bytes of all maps that are made between the cut before it and itself."""
    found, since, ends = [], 0, {cut.op for cut in cuts}
    for op in tape.ops:
        if op.phase is Phase.FORWARD:
            since += sum(tape.storages[s].nbytes for s in tape.creates[op.id])
            if op.id in ends:
                found.append(since)
                since = 0
    return found


def expensive_maps(tape: Tape) -> frozenset[int]:
    """The cheap-op rule: what convolutions and matrix products make is kept, all else may be dropped."""
    return frozenset(s for layer in layers_of(tape) if layer.kind in EXPENSIVE for s in (layer.x, *layer.auxiliary))


def _strides(candidates: Sequence[Cut]) -> Iterator[tuple[Cut, ...]]:
    count = len(candidates)
    few = min(count, MOST_STRIDES)
    for stride in sorted({max(1, round(count ** (i / max(1, few - 1)))) for i in range(few)}):
        yield every(stride, candidates)


def grid(tape: Tape, candidates: Sequence[Cut]) -> Iterator[tuple[Cut, ...]]:
    """Algorithm 3 at six B from B0 / sqrt(2) to sqrt(2) B0, B0 = sqrt(x y) of its run with B = 0."""
    _, kept, largest = algorithm_3(tape, candidates, 0)
    centre = math.sqrt(kept * largest)
    for i in range(GRID_POINTS):
        yield algorithm_3(tape, candidates, centre * 2 ** (i / (GRID_POINTS - 1) - 0.5))[0]
