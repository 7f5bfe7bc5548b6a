"""Where the forward phase is cut: every k-th candidate, or Algorithm 3 of the paper for maps of unequal size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from vramlab.layers import Cut, articulation_points, cuts_of, layers_of
from vramlab.tape import Phase, Tape

# Appendix A: six points from B0 / sqrt(2) to sqrt(2) * B0.
GRID_POINTS = 6
# At most this many strides through one set of candidates are tried.
MOST_STRIDES = 24


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
        for cuts in ((), *_strides(candidates), *_grid(tape, candidates)):
            key = tuple(cut.op for cut in cuts)
            if key not in seen:
                seen.add(key)
                yield cuts


def _strides(candidates: Sequence[Cut]) -> Iterator[tuple[Cut, ...]]:
    count = len(candidates)
    few = min(count, MOST_STRIDES)
    for stride in sorted({max(1, round(count ** (i / max(1, few - 1)))) for i in range(few)}):
        yield every(stride, candidates)


def _grid(tape: Tape, candidates: Sequence[Cut]) -> Iterator[tuple[Cut, ...]]:
    _, kept, largest = algorithm_3(tape, candidates, 0)
    centre = math.sqrt(kept * largest)
    for i in range(GRID_POINTS):
        yield algorithm_3(tape, candidates, centre * 2 ** (i / (GRID_POINTS - 1) - 0.5))[0]
