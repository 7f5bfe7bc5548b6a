"""A bundle whose steps were timed in too few pairs for an interval is as honest as any, and may claim no more than it has."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hand_made import make_config, measured_step
from pydantic import ValidationError

from vramlab.crowd.forms import IntervalForm
from vramlab.crowd.rules.numbers import _step_times

OURS, THEIRS = [3.0, 3.1, 2.9, 3.0, 3.2, 3.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
QUIET = {"median": 1.0, "low": 1.0, "high": 1.0, "n": 6}


def faults(pairs: int, ratio: dict, told: bool | None) -> list[str]:
    """The places that the rule finds fault with, of a step three times as slow as eager's."""
    record = measured_step("delta", 600, budget="60%")
    measured = {"step_seconds": OURS[:pairs], "baseline_step_seconds": THEIRS[:pairs], "ratio": ratio, "drift": QUIET | {"n": pairs},
                "warmup_steps": 1, "is_distinguishable": told}
    config = record.config | {"measure": make_config()["measure"] | {"steps": pairs, "warmup": 1}}
    records = {"r": replace(record, measured=measured, config=config)}
    examined = SimpleNamespace(contents=SimpleNamespace(records=records), count=lambda: None)
    return [place for place, _ in _step_times(examined)]


def test_three_pairs_have_a_median_and_nothing_else():
    none = {"median": 3.0, "low": None, "high": None, "n": 3}
    assert faults(3, none, None) == []
    assert faults(3, none, True) == faults(3, none, False) == ["r:measured.is_distinguishable"]
    assert faults(3, none | {"low": 2.9, "high": 3.1}, None) == ["r:measured.ratio.low", "r:measured.ratio.high"]


def test_six_pairs_have_an_interval_and_must_state_it():
    """The samples by hand: 2.9 and 3.2 are the ends of all, so the interval's lie within."""
    missing = {"median": 3.0, "low": None, "high": None, "n": 6}
    assert faults(6, missing, True) == ["r:measured.ratio.low", "r:measured.ratio.high"]
    assert "r:measured.is_distinguishable" in faults(6, missing, None)


def test_the_form_lets_ends_be_missing_and_nothing_else():
    IntervalForm(median=3.0, low=None, high=None, n=3)
    with pytest.raises(ValidationError):
        IntervalForm(median=None, low=2.0, high=3.0, n=3)
