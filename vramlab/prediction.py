"""Predicted against executed: how far the simulator's peaks and step times are from what a run measured. Reads records only.

A prediction is unsafe where the step held more than it said: the budget would have been broken. Step times are judged apart for cells that
move bytes over the link and for those that do not, because the link is another source of error.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from vramlab.record import Outcome, RunRecord, Truth
from vramlab.statistics import FEWEST_SAMPLES, is_too_few

TOLERANCE_SHARE, TOLERANCE_BYTES = 0.005, 2**20  # of a predicted peak; the larger counts
LARGEST_TIME_ERROR, LARGEST_TIME_ERROR_WITH_TRANSFERS = 0.10, 0.15  # medians over cells


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One cell that ran: what was predicted for it (simulated) and what was measured. None where it was not."""

    model: str
    method: str
    budget: str | None
    batch_size: int
    peak_bytes: int | None
    predicted_peak_bytes: int | None
    step_seconds: float | None  # median
    predicted_step_seconds: float | None
    moved_bytes: int  # predicted, both directions
    time_ratio: float | None = None  # median of step time over eager's, the two in turns
    drift: float | None = 0.0  # how far eager was off itself, of that ratio; None: of too few pairs to say

    @property
    def ranked_by(self) -> float | None:
        """What ranks step times: the ratio to eager beside it, which the machine's drift from cell to cell does not reach; else seconds."""
        return self.time_ratio or self.step_seconds

    @property
    def error_bytes(self) -> int | None:
        """Predicted less measured peak; below zero it is unsafe."""
        return None if None in (self.peak_bytes, self.predicted_peak_bytes) else self.predicted_peak_bytes - self.peak_bytes

    @property
    def time_error(self) -> float | None:
        """Predicted over measured step time, less 1."""
        return self.predicted_step_seconds / self.step_seconds - 1 if self.step_seconds and self.predicted_step_seconds else None

    @property
    def is_within_tolerance(self) -> bool | None:
        """Of the predicted peak."""
        if self.error_bytes is None:
            return None
        return abs(self.error_bytes) <= max(TOLERANCE_SHARE * self.peak_bytes, TOLERANCE_BYTES)

    @property
    def place(self) -> tuple[str, int]:
        """Step times are ranked among cells of one model and batch only."""
        return self.model, self.batch_size


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the comparisons of some runs come to. None where no cell can say."""

    cells: int  # with a predicted and a measured peak
    unsafe_share: float | None
    unsafe_beyond_tolerance: int
    worst_unsafe_bytes: int  # the most that a step held beyond its prediction
    worst_error_bytes: int | None
    outside_tolerance: tuple[str, ...]
    timed: int
    median_time_error: float | None  # absolute, of cells that move nothing
    timed_with_transfers: int
    median_time_error_with_transfers: float | None
    kendall_tau: float | None  # between simulated step times and measured ratios to eager, over pairs of cells of one model and batch
    pairs: int
    kendall_tau_beyond_drift: float | None  # over the pairs whose measured times are known to differ by more than eager's from itself
    pairs_beyond_drift: int

    @property
    def faults(self) -> tuple[str, ...]:
        """Why the simulator is not to be trusted on this machine; a check that saw no step time is one."""
        return tuple(self._faults())

    def _faults(self) -> Iterator[str]:
        if not self.timed and not self.timed_with_transfers:
            yield "no cell has a simulated and a measured step time"
        for error, limit, words in ((self.median_time_error, LARGEST_TIME_ERROR, "without transfers"),
                                    (self.median_time_error_with_transfers, LARGEST_TIME_ERROR_WITH_TRANSFERS, "with transfers")):
            if error is not None and not error <= limit:
                yield f"step times {words} are off by {error:.1%} in the median; at most {limit:.0%} is allowed"


def comparisons(records: Iterable[RunRecord]) -> list[Comparison]:
    """Of the training steps that ran here, were right, and had a schedule to simulate."""
    return [_comparison(r) for r in records if r.kind == "step" and not r.config["target"].startswith("sim:") and r.predicted
            and r.outcome is Outcome.OK and r.truth not in (Truth.WRONG, Truth.NOT_RUN)]


def _comparison(record: RunRecord) -> Comparison:
    measured, predicted, config = record.measured, record.predicted, record.config
    seconds = measured.get("step_seconds")
    return Comparison(
        model=config["model"], method=config["method"], budget=config["budget"], batch_size=config["batch_size"],
        peak_bytes=measured.get("peak_bytes"), predicted_peak_bytes=predicted.get("peak_bytes"),
        step_seconds=statistics.median(seconds) if seconds else None, predicted_step_seconds=predicted.get("step_seconds"),
        moved_bytes=predicted.get("moved_bytes") or 0, time_ratio=(measured.get("ratio") or {}).get("median"),
        drift=_drift(measured.get("drift") or {}),
    )


def _drift(block: Mapping[str, Any]) -> float | None:
    """How far the interval of eager against itself reaches from 1; 0 where nothing was timed, None where it was of too few pairs."""
    if block and is_too_few(block.get("n", FEWEST_SAMPLES)):
        return None
    return max((abs(block[end] - 1) for end in ("low", "high") if block.get(end) is not None), default=0.0)


def judge(cells: Sequence[Comparison]) -> Prediction:
    """The figures over all cells."""
    sized = [c for c in cells if c.error_bytes is not None]
    unsafe = [c for c in sized if c.error_bytes < 0]
    alone, moving = ([c for c in cells if c.time_error is not None and bool(c.moved_bytes) is moves] for moves in (False, True))
    everything, beyond = kendall_tau(cells)
    return Prediction(
        cells=len(sized), unsafe_share=len(unsafe) / len(sized) if sized else None,
        unsafe_beyond_tolerance=sum(not c.is_within_tolerance for c in unsafe),
        worst_unsafe_bytes=-min((c.error_bytes for c in unsafe), default=0),
        worst_error_bytes=max((abs(c.error_bytes) for c in sized), default=None),
        outside_tolerance=tuple(f"{c.model} {c.method} {c.budget}" for c in sized if not c.is_within_tolerance),
        timed=len(alone), median_time_error=_median_error(alone),
        timed_with_transfers=len(moving), median_time_error_with_transfers=_median_error(moving),
        kendall_tau=_mean(everything), pairs=len(everything), kendall_tau_beyond_drift=_mean(beyond), pairs_beyond_drift=len(beyond),
    )


def _median_error(cells: Sequence[Comparison]) -> float | None:
    return statistics.median(abs(c.time_error) for c in cells) if cells else None


def kendall_tau(cells: Sequence[Comparison]) -> tuple[list[int], list[int]]:
    """Signs of all pairs of one model and batch whose simulated times differ, 1 where the measured ones stand in the same order; and of
    those that differ by more than the drift. The mean of the signs is tau.
    """
    everything, beyond_drift = [], []
    for one, other in combinations([c for c in cells if c.time_error is not None], 2):
        if one.place != other.place or one.predicted_step_seconds == other.predicted_step_seconds:
            continue
        if (one.time_ratio is None) != (other.time_ratio is None):
            continue
        gap = one.ranked_by / other.ranked_by
        sign = 1 if (gap > 1) == (one.predicted_step_seconds > other.predicted_step_seconds) else -1
        everything.append(sign)
        if None not in (one.drift, other.drift) and abs(gap - 1) > max(one.drift, other.drift):
            beyond_drift.append(sign)
    return everything, beyond_drift


def _mean(signs: Sequence[int]) -> float | None:
    return sum(signs) / len(signs) if signs else None


def to_json(prediction: Prediction, cells: Sequence[Comparison]) -> dict[str, Any]:
    """Figures, faults and cells."""
    rows = [asdict(c) | {"error_bytes": c.error_bytes, "time_error": c.time_error} for c in cells]
    return asdict(prediction) | {"faults": list(prediction.faults), "comparisons": rows}
