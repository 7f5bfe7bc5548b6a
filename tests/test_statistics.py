"""Medians and intervals against hand-made samples, exact order statistics and simulated coverage."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import numpy as np
import pytest

from vramlab.statistics import (
    CONFIDENCE, FEWEST_SAMPLES, Interval, distinguishable, drift, median, median_interval, paired_ratio, why_no_interval,
)


def interval(low: float, high: float) -> Interval:
    return Interval(median=(low + high) / 2, low=low, high=high, n=20)


def test_median_of_odd_and_even_counts():
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [1.0, float("inf")], [[1.0]]])
def test_bad_samples_are_refused(samples):
    with pytest.raises(ValueError):
        median(samples)


def test_constant_samples_have_no_width():
    assert median_interval([2.0] * 9) == Interval(median=2.0, low=2.0, high=2.0, n=9)


def test_so_few_samples_give_no_interval_of_95_percent():
    """Of n samples all fall on one side of the median in 2 of the 2^n equally likely ways: counted out."""
    def missed(n: int) -> float:
        ways = [sum(sides) for sides in product((0, 1), repeat=n)]
        return sum(side in (0, n) for side in ways) / len(ways)

    assert missed(FEWEST_SAMPLES) <= 1 - CONFIDENCE < missed(FEWEST_SAMPLES - 1)


def test_interval_against_every_possible_resample():
    """Six samples have 6**6 resamples: their exact quantiles are the oracle."""
    samples = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    medians = np.sort(np.median(np.array(list(product(samples, repeat=6))), axis=1))
    found = median_interval(samples, resamples=200_000)
    assert found.low == medians[round(0.025 * (6**6 - 1))] and found.high == medians[round(0.975 * (6**6 - 1))]


def test_the_seed_decides():
    samples = np.random.default_rng(1).normal(size=20)
    assert median_interval(samples, seed=3) == median_interval(samples, seed=3)
    assert median_interval(samples, seed=3, resamples=100) != median_interval(samples, seed=4, resamples=100)


def test_ratio_pairs_rounds():
    """A machine that gets slower from round to round changes no ratio."""
    baseline = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert paired_ratio([1.5 * b for b in baseline], baseline) == Interval(median=1.5, low=1.5, high=1.5, n=6)


@pytest.mark.parametrize("pairs", [1, 2, 5, 6])
def test_fewer_than_six_pairs_have_no_interval_and_tell_nothing_apart(pairs):
    """A step ten times as slow: six pairs tell it, five do not."""
    ratio, noise = paired_ratio([10.0] * pairs, [1.0] * pairs), drift([1.0] * pairs, [1.0] * pairs)
    assert (ratio.median, noise.median, ratio.n) == (10.0, 1.0, pairs)
    ends = None if pairs < 6 else 10.0
    assert (ratio.low, ratio.high, ratio.has_ends) == (ends, ends, pairs == 6)
    assert ratio.to_json() == {"median": 10.0, "low": ends, "high": ends, "n": pairs}
    assert distinguishable(ratio, noise) is (True if pairs == 6 else None)
    whole = Interval(median=10.0, low=9.0, high=11.0, n=20)
    assert distinguishable(whole, noise) is (True if pairs == 6 else None), "a drift of few pairs hides how large it is"
    assert distinguishable(Interval(median=10.0, low=9.0, high=11.0, n=pairs), whole) is (False if pairs == 6 else None)


def test_an_interval_in_words():
    assert str(Interval(median=1.0125, low=0.971, high=1.0361, n=20)) == "1.012 [0.971, 1.036]"
    assert str(paired_ratio([3.0] * 5, [2.0] * 5)) == "1.500 [too few pairs: 5, and an interval of 95 % needs 6]"


def test_why_there_is_no_interval():
    assert why_no_interval(3) == "too few pairs: 3, and an interval of 95 % needs 6"


def test_ratio_refuses_what_is_no_pair():
    with pytest.raises(ValueError, match="no pairs"):
        paired_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="more than zero"):
        paired_ratio([1.0, 0.0], [1.0, 1.0])


def test_drift_is_symmetric():
    first, second = [1.0, 1.1, 1.2, 1.0, 1.3, 1.1], [1.0, 1.0, 1.0, 1.1, 1.0, 1.0]
    forward, backward = drift(first, second), drift(second, first)
    assert forward.low == pytest.approx(backward.low, rel=0.02) and forward.high == pytest.approx(backward.high, rel=0.02)
    assert forward.low <= 1 / forward.high * 1.0000001 and forward.contains(1.0)


@pytest.mark.parametrize(("ratio", "control", "expected"), [
    (interval(0.99, 1.02), interval(0.999, 1.001), False),  # reaches 1
    (interval(1.01, 1.03), interval(0.95, 1.05), False),  # inside the drift
    (interval(1.01, 1.06), interval(0.95, 1.05), True),  # leaves the drift
    (interval(1.10, 1.20), interval(0.99, 1.01), True),
    (interval(0.80, 0.90), interval(0.99, 1.01), True),
])
def test_distinguishable(ratio, control, expected):
    assert distinguishable(ratio, control) is expected


def test_coverage_is_95_percent():
    """600 experiments of 20 skewed samples whose median is known: the interval holds it about as often as it says."""
    generator = np.random.default_rng(7)
    trials = 600
    hits = sum(median_interval(np.exp(generator.normal(0.0, 0.2, size=20)), resamples=1000).contains(1.0) for _ in range(trials))
    assert 0.92 <= hits / trials <= 0.98


def test_equal_steps_are_rarely_told_apart():
    generator = np.random.default_rng(8)

    def step(seconds: float = 1.0) -> np.ndarray:
        return seconds * np.exp(generator.normal(0.0, 0.05, size=20))

    def is_told_apart(seconds: float) -> bool:
        return distinguishable(paired_ratio(step(seconds), step(), resamples=500), drift(step(), step(), resamples=500))

    assert sum(is_told_apart(1.0) for _ in range(200)) <= 14
    assert sum(is_told_apart(1.3) for _ in range(50)) == 50


def test_needs_no_torch():
    code = "import sys, vramlab.statistics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
