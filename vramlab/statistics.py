"""Statistics of paired step times: median, bootstrap interval, drift. No torch.

A ratio is measured step over baseline step, round by round, because steps that follow each other share the machine's mood. Its median
comes with the 95 % bootstrap interval; the same baseline against itself gives the drift, below which no difference can be told. Fewer than
six samples have a median and no interval, and tell nothing apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000
# So many samples at least: the whole span of n samples misses the median of what they are drawn from, all of them on one side of it, with
# probability 2^(1-n), which is 6.3 % for five and 3.1 % for six. Of fewer, no interval holds it with 95 %.
FEWEST_SAMPLES = 6


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median and its confidence interval over `n` samples; no ends where they are too few for one."""

    median: float
    low: float | None
    high: float | None
    n: int

    @property
    def has_ends(self) -> bool:
        """Were there samples enough for an interval?"""
        return None not in (self.low, self.high)

    def __str__(self) -> str:
        """`1.012 [0.971, 1.036]`, `1.012 [too few pairs: 5, and an interval of 95 % needs 6]`."""
        ends = f"{self.low:.3f}, {self.high:.3f}" if self.has_ends else why_no_interval(self.n)
        return f"{self.median:.3f} [{ends}]"

    def to_json(self) -> dict[str, Any]:
        """`{"median", "low", "high", "n"}`."""
        return {"median": self.median, "low": self.low, "high": self.high, "n": self.n}

    def contains(self, value: float) -> bool:
        """Is `value` within low..high? Both ends must be there."""
        return self.low <= value <= self.high

    def lies_within(self, other: Interval) -> bool:
        """Are both ends within the other interval? All four must be there."""
        return other.low <= self.low and self.high <= other.high


def is_too_few(n: int) -> bool:
    """Are so many samples too few for an interval?"""
    return n < FEWEST_SAMPLES


def why_no_interval(n: int) -> str:
    """`too few pairs: 3, and an interval of 95 % needs 6`."""
    return f"too few pairs: {n}, and an interval of {100 * CONFIDENCE:g} % needs {FEWEST_SAMPLES}"


def median(samples: Sequence[float]) -> float:
    """The middle sample, or the mean of the two middle ones. ValueError when there is none or one is not finite."""
    return float(np.median(_checked(samples)))


def median_interval(samples: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Median and its 95 % percentile-bootstrap interval; the same seed gives the same interval. Too few samples have none."""
    values = _checked(samples)
    if is_too_few(len(values)):
        return Interval(median=float(np.median(values)), low=None, high=None, n=len(values))
    draws = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    medians = np.median(values[draws], axis=1)
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(median=float(np.median(values)), low=float(low), high=float(high), n=len(values))


def paired_ratio(measured: Sequence[float], baseline: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Median of measured[i] / baseline[i] with its 95 % interval. Both in seconds, above zero, of one length."""
    top, bottom = _checked(measured), _checked(baseline)
    if len(top) != len(bottom):
        raise ValueError(f"{len(top)} measured steps and {len(bottom)} baseline steps are no pairs")
    if top.min() <= 0 or bottom.min() <= 0:
        raise ValueError("a step takes more than zero seconds")
    return median_interval(top / bottom, seed=seed, resamples=resamples)


def drift(first: Sequence[float], second: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The A/A control: the paired ratio of one step against itself, widened to be the same whichever side was called first."""
    forward = paired_ratio(first, second, seed=seed, resamples=resamples)
    if not forward.has_ends:
        return forward
    return Interval(median=forward.median, low=min(forward.low, 1 / forward.high), high=max(forward.high, 1 / forward.low), n=forward.n)


def distinguishable(ratio: Interval, drift: Interval) -> bool | None:
    """Does the ratio differ from 1? Not when its interval reaches 1.00, nor when it lies inside the A/A drift. None of too few pairs."""
    if any(is_too_few(interval.n) or not interval.has_ends for interval in (ratio, drift)):
        return None
    return not ratio.contains(1.0) and not ratio.lies_within(drift)


DISTINGUISHABLE_IN_WORDS = {True: "distinguishable", False: "not distinguishable", None: "too few pairs to tell"}


def _checked(samples: Sequence[float]) -> np.ndarray:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError("no samples")
    if not np.isfinite(values).all():
        raise ValueError("a sample is not finite")
    return values
