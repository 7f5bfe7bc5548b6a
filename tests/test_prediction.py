"""The statistics of predictions, on hand-made records whose figures are counted by hand, and the command that prints them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hand_made import MIB, make_record, measured_step, simulated_step, write_run

from vramlab.cli import main
from vramlab.prediction import Comparison, comparisons, judge
from vramlab.record import Outcome, Truth


def cell(step: float | None, predicted: float | None, *, model="m", moved=0, peak=1000, predicted_peak=1000, drift=0.0) -> Comparison:
    return Comparison(model=model, method="x", budget=None, batch_size=1, peak_bytes=peak, predicted_peak_bytes=predicted_peak,
                      step_seconds=step, predicted_step_seconds=predicted, moved_bytes=moved, drift=drift)


def test_step_times_with_and_without_transfers_are_judged_apart():
    found = judge([cell(1, 1.05), cell(1, 0.9), cell(1, 1.2), cell(1, 1.16, moved=7), cell(None, 3)])
    assert (found.timed, found.timed_with_transfers) == (3, 1)
    assert found.median_time_error == pytest.approx(0.1) and found.median_time_error_with_transfers == pytest.approx(0.16)
    assert found.faults == ("step times with transfers are off by 16.0% in the median; at most 15% is allowed",)


@pytest.mark.parametrize("error, moved, is_fault", [(0.099, 0, False), (-0.101, 0, True), (0.149, 1, False), (-0.151, 1, True)])
def test_the_limits(error, moved, is_fault):
    assert bool(judge([cell(1, 1 + error, moved=moved)]).faults) is is_fault


def test_a_check_that_saw_no_step_time_fails():
    for cells in ([], [cell(None, 1.0)]):
        assert judge(cells).faults == ("no cell has a simulated and a measured step time",)
    assert judge([]).unsafe_share is judge([]).kendall_tau is None


def test_unsafe_predictions():
    """Below the measured peak; a mebibyte or half a percent is tolerated but unsafe still."""
    found = judge([cell(1, 1, peak=100 * MIB, predicted_peak=p) for p in (100 * MIB, 101 * MIB, 100 * MIB - 1, 98 * MIB)])
    assert (found.cells, found.unsafe_share, found.unsafe_beyond_tolerance, found.worst_unsafe_bytes) == (4, 0.5, 1, 2 * MIB)
    assert found.worst_error_bytes == 2 * MIB and len(found.outside_tolerance) == 1
    large = cell(1, 1, peak=1000 * MIB, predicted_peak=995 * MIB)
    assert large.is_within_tolerance and not replace(large, predicted_peak_bytes=995 * MIB - 1).is_within_tolerance


def test_kendalls_tau_by_hand():
    """Measured 1 < 2 < 3 < 4, simulated 1, 3, 2, 2: of six pairs one is tied and two are reversed, the second with each of the last two."""
    cells = [cell(step, predicted) for step, predicted in ((1, 1), (2, 3), (3, 2), (4, 2))]
    found = judge(cells)
    assert (found.pairs, found.kendall_tau) == (5, (3 - 2) / 5)
    apart = judge([*cells, cell(9, 0.1, model="other")])
    assert (apart.pairs, apart.kendall_tau) == (found.pairs, found.kendall_tau)


def test_ratios_to_eager_are_ranked_where_there_are_any():
    """The machine was twice as fast when the second cell ran: its seconds say less, its ratio to the eager beside it says more."""
    slow_hour, fast_hour = cell(2.0, 1.0), cell(1.5, 1.2)
    assert judge([slow_hour, fast_hour]).kendall_tau == -1
    in_turns = [replace(slow_hour, time_ratio=1.0), replace(fast_hour, time_ratio=1.5)]
    assert judge(in_turns).kendall_tau == 1
    assert judge([in_turns[0], fast_hour]).pairs == 0, "a ratio and seconds are not comparable"


def test_pairs_inside_the_drift_say_nothing():
    found = judge([cell(1.0, 2.0, drift=0.05), cell(1.04, 1.0), cell(2.0, 3.0)])
    assert (found.pairs, found.pairs_beyond_drift) == (3, 2)
    assert found.kendall_tau == pytest.approx(1 / 3) and found.kendall_tau_beyond_drift == 1.0


def test_only_right_measured_steps_with_a_schedule_are_compared():
    good = measured_step("delta", 500, budget="60%", ratio=1.4)
    bad = [simulated_step("delta", 500), make_record(config={"kind": "train"}, kind="train"), replace(good, truth=Truth.WRONG),
           replace(good, outcome=Outcome.OOM), replace(good, predicted={})]
    (found,) = comparisons([good, *bad])
    assert (found.model, found.method, found.budget) == (good.config["model"], "delta", "60%")
    assert found.step_seconds == pytest.approx(1.4) and found.predicted_step_seconds == 1.4 and found.error_bytes == 0
    assert found.drift == pytest.approx(0.01)
    drifts = [{"median": 1.0, "low": low, "high": low and 1.01, "n": 5} for low in (None, 0.99)]
    few = [replace(good, measured=good.measured | {"drift": drift}) for drift in drifts]
    assert [c.drift for c in comparisons(few)] == [None, None], "five pairs do not say how far eager is off itself"


def test_where_the_drift_is_not_known_no_pair_is_beyond_it():
    found = judge([cell(1.0, 2.0, drift=None), cell(5.0, 1.0)])
    assert (found.pairs, found.pairs_beyond_drift) == (1, 0)
    assert judge([cell(1.0, 2.0), cell(5.0, 1.0)]).pairs_beyond_drift == 1


@pytest.mark.parametrize("ratio, code", [(1.05, 0), (1.5, 1)])
def test_the_command(tmp_path, capsys, ratio, code):
    step = measured_step("delta", 500, budget="60%", ratio=1.4)
    step = replace(step, predicted={**step.predicted, "step_seconds": 1.4 * ratio, "peak_bytes": 400 * MIB})
    write_run(tmp_path / "results" / "hand-made" / "run", [step])
    words = ["check", "prediction", "hand-made", "--output-dir", str(tmp_path / "results")]
    assert main(words) == code
    said = capsys.readouterr().out
    assert "measured one: 100.0% of 1 (the most by 104,857,600 bytes)" in said and ("FAIL" in said) is bool(code)
    assert main([*words, "--json"]) == code
    body = json.loads(capsys.readouterr().out)
    assert body["unsafe_share"] == 1.0 and len(body["faults"]) == code and body["comparisons"][0]["time_error"] == pytest.approx(ratio - 1)


def test_runs_and_models_exclude_each_other(capsys):
    assert main(["check", "prediction"]) == 2
    assert main(["check", "prediction", "x", "--models", "resnet18"]) == 2
    assert "not both" in capsys.readouterr().err
    assert main(["check", "prediction", "--models", "resnet18", "--device", "sim:v100-32gb"]) == 2
