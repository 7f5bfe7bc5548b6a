"""Measured searches: how trials are judged, with scripted ones; and real ones against a scan that measures every batch size."""

from __future__ import annotations

import json

import pytest
from test_cell import make_spec, run

from vramlab.cell import run_cell
from vramlab.finder import values_of
from vramlab.isolate import Call, CallResult, outcome_of, run_isolated
from vramlab.largest import KEPT, MeasuredSearch
from vramlab.record import Outcome, RunRecord, Truth
from vramlab.report.words import counts, is_simulated

UNIT, STATE = 1000, 5000  # bytes of a sample and of all else in the scripted workload
SEARCH = [{"name": "b", "kind": "max_batch", "search": {"low": 1, "high": 500}}]


class Scripted:
    """Stands in for the processes of a trial: fits up to `limit` samples, guessed to be `guess`. `ends` says how other values end:
    value -> (part, outcome, reason)."""

    def __init__(self, limit: int, guess: int | None, ends: dict[int, tuple[str, Outcome, str]] | None = None) -> None:
        self.limit, self.guess, self.ends, self.calls = limit, guess, ends or {}, []

    @property
    def budget(self) -> str:
        return f"{STATE + UNIT * self.limit}B"

    def __call__(self, what, spec, *args) -> CallResult:
        value = spec["config"].get("batch_size")
        self.calls.append((what, value))
        part, outcome, reason = self.ends.get(value, ("", Outcome.OK, ""))
        if what == part and outcome is not Outcome.OK:
            return CallResult(outcome=outcome, reason=reason, message="scripted")
        return getattr(self, what)(value)

    def guess_largest(self, value) -> CallResult:
        if self.guess is None:
            return CallResult(outcome=Outcome.UNSUPPORTED, reason="needs", message="no guess")
        return CallResult(outcome=Outcome.OK, value={"largest": self.guess, "memory_bytes": 10**9})

    def plan_trial(self, value) -> CallResult:
        if self.ends.get(value, ("", "", ""))[2] == "infeasible":
            return CallResult(outcome=Outcome.OK, value={"infeasible": {"message": "too small", "smallest_bytes": 7}})
        return CallResult(outcome=Outcome.OK, value={"first_runs_seconds": 1.0, "seconds_cap": 1.4, "predicted": {
            "peak_bytes": STATE + UNIT * value, "at_peak": {"by_role": {"activation": value}, "inside_op_bytes": 0, "phase": "backward"}}})

    def run_trial(self, value) -> CallResult:
        untrained = "step 1: loss nan" if self.ends.get(value, ("", "", ""))[2] == "nan" else ""
        return CallResult(outcome=Outcome.OK, value={"peak_bytes": STATE + UNIT * value, "persistent_bytes": STATE, "untrained": untrained})

    def time_trial(self, value) -> CallResult:
        return CallResult(outcome=Outcome.OK, value=[9.0, 5.0] + 5 * [1.0 + value / 100])


def search(tmp_path, script: Scripted, method: str = "eager", **settings):
    folder = tmp_path / "cell"
    folder.mkdir(exist_ok=True)
    spec = make_spec(tmp_path, methods=[method], budgets=[script.budget], experiments=SEARCH, **settings)
    return MeasuredSearch(script, spec, folder)


@pytest.mark.parametrize("guess", [37, 20, 400, None])
def test_a_known_limit_is_found_from_any_guess_and_its_edge_is_tried_twice(tmp_path, guess):
    block = search(tmp_path, Scripted(37, guess)).run()
    assert (block["largest"], block["is_simulated"], block["simulated_largest"], block["steps"]) == (37, False, guess, 3)
    tries = {(t["value"], t["attempt"]): t for t in block["trials"]}
    for attempt in (1, 2):
        assert tries[37, attempt]["fits"] and not tries[38, attempt]["fits"]
    assert (tries[38, 1]["outcome"], tries[38, 1]["reason"]) == ("oom", "byte_budget")
    assert "1,000 more than the cap" in tries[38, 1]["message"]
    assert tries[37, 1]["samples_per_second"] == pytest.approx(37 / 1.37) and block["memory_bytes"] == STATE + 37 * UNIT
    assert block["at_peak"]["by_role"] == {"activation": 37} and block["simulated_peak_bytes"] == STATE + 37 * UNIT


def test_within_the_slowdown_cap_a_smaller_batch_is_largest(tmp_path):
    """A step takes 1 + b / 100 s and may take 1.4; the fastest is the largest that was tried and fits."""
    block = search(tmp_path, Scripted(90, 90)).run()
    assert (block["largest"], block["largest_within_slowdown"], block["fastest"]["value"]) == (90, 40, 90)
    assert all(t["within_slowdown"] == (t["value"] <= 40) for t in block["trials"] if t["fits"])


@pytest.mark.parametrize(("part", "outcome", "reason", "expected"), [
    ("plan_trial", Outcome.TIMEOUT, "timeout", ("plan_timeout", "timeout")),
    ("plan_trial", Outcome.CRASHED, "SIGSEGV", ("crashed", "SIGSEGV")),
    ("run_trial", Outcome.OOM, "gpu_memory", ("oom", "gpu_memory")), ("run_trial", Outcome.TIMEOUT, "timeout", ("timeout", "timeout")),
    ("run_trial", Outcome.UNSUPPORTED, "shape_limit", ("unsupported", "shape_limit")),
    ("time_trial", Outcome.OOM, "host_memory", ("oom", "host_memory")), ("", Outcome.OK, "infeasible", ("plan_infeasible", "budget")),
    ("", Outcome.OK, "nan", ("wrong", "no_training")),
])
def test_however_a_trial_ends_its_class_is_kept_and_it_is_a_hole_below_the_largest(tmp_path, part, outcome, reason, expected):
    block = search(tmp_path, Scripted(37, 35, {35: (part, outcome, reason), 38: (part, outcome, reason)})).run()
    tries = [t for t in block["trials"] if t["value"] == 35]
    assert block["largest"] in (34, 37) and {(t["outcome"], t["reason"]) for t in tries} == {expected}
    assert block["holes"] == ([35] if block["largest"] == 37 else [])


def test_a_method_that_was_given_the_cap_as_its_budget_and_exceeds_it_is_wrong(tmp_path):
    block = search(tmp_path, Scripted(37, 37), "delta").run()
    assert block["largest"] == 37 and {t["reason"] for t in block["trials"] if not t["fits"]} == {"over_budget"}


def test_nothing_fits(tmp_path):
    block = search(tmp_path, Scripted(0, 3)).run()
    assert block["largest"] is block["largest_within_slowdown"] is block["fastest"] is None and block["at_peak"] == {}
    assert [t["value"] for t in block["trials"]][-1] == 1


def test_the_cap_is_the_budget_of_methods_that_take_one_and_held_against_the_meter_for_all(tmp_path):
    script = Scripted(37, 37)
    assert search(tmp_path, script, "delta").spec_at(5)["config"]["budget"] == script.budget
    assert search(tmp_path, script).spec_at(5)["config"]["budget"] is None
    assert search(tmp_path, script).cap_bytes == search(tmp_path, script, "delta").cap_bytes == STATE + 37 * UNIT


def test_an_option_of_the_model_is_searched_likewise(tmp_path):
    spec = make_spec(tmp_path, methods=["eager"], budgets=["1MiB"],
                     experiments=[{"name": "i", "kind": "max_batch", "search": {"over": "image_size", "low": 9, "high": 64, "step": 4}}])
    (tmp_path / "cell").mkdir()
    made = MeasuredSearch(Scripted(1, 1), spec, tmp_path / "cell").spec_at(20)["config"]
    assert (made["model_options"]["image_size"], made["batch_size"], made["kind"]) == (20, 16, "step")
    assert values_of(spec["config"]["search"])[0] == 12


class Killed(Exception):
    pass


class KilledAt(Scripted):
    """Its process is killed at the `at`-th call."""

    def __init__(self, at: int, **told) -> None:
        super().__init__(**told)
        self.at = at

    def __call__(self, what, spec, *args):
        if len(self.calls) == self.at:
            raise Killed
        return super().__call__(what, spec, *args)


@pytest.mark.parametrize("at", [1, 2, 7, 14])
def test_a_killed_search_goes_on_from_its_trials(tmp_path, at):
    with pytest.raises(Killed):
        search(tmp_path, KilledAt(at, limit=37, guess=37)).run()
    again = Scripted(37, 37)
    block = search(tmp_path, again).run()
    assert block["largest"] == 37
    kept = json.loads((tmp_path / "cell" / KEPT).read_text())["trials"]
    planned = [value for what, value in again.calls if what == "plan_trial"]
    assert len(kept) == len(block["trials"]) and (at < 7 or len(planned) < len(kept))  # three calls a trial; the answer is planned anew


def test_trials_of_another_cell_or_that_crashed_are_not_kept(tmp_path):
    search(tmp_path, Scripted(37, 37)).run()
    path = tmp_path / "cell" / KEPT
    body = json.loads(path.read_text())
    again = Scripted(37, 37)
    search(tmp_path, again).run()
    assert [what for what, _ in again.calls] == ["guess_largest", "plan_trial"]
    for change in ({"key": "another"}, {"trials": [t | {"outcome": "crashed"} for t in body["trials"]]}):
        path.write_text(json.dumps(body | change))
        again = Scripted(37, 37)
        search(tmp_path, again).run()
        assert len(again.calls) > 10
    path.write_text("{")
    assert search(tmp_path, Scripted(37, 37)).run()["largest"] == 37


@pytest.mark.parametrize(("error", "expected"), [
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), (Outcome.OOM, "gpu_memory")),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), (Outcome.OOM, "gpu_memory")),
    (RuntimeError("CUDA error: invalid configuration argument"), (Outcome.UNSUPPORTED, "shape_limit")),
    (RuntimeError("Expected canUse32BitIndexMath(input) to be true"), (Outcome.UNSUPPORTED, "shape_limit")),
    (OSError(28, "No space left on device"), (Outcome.CRASHED, "disk_full")), (RuntimeError("else"), (Outcome.CRASHED, "RuntimeError")),
])
def test_what_an_exception_says_of_a_trial(error, expected):
    assert outcome_of(error) == expected


# ------------------------------------------------------------------------------------------------ the cell's record


class Gated(Scripted):
    """With an answer of the truth gate."""

    answer = CallResult(outcome=Outcome.OK, value={"truth": "exact", "detail": {"steps": 3}})

    def gate(self, value) -> CallResult:
        return self.answer


def recorded(tmp_path, monkeypatch, script: Scripted, method: str) -> RunRecord:
    monkeypatch.setattr("vramlab.cell._Draft.ask_of", lambda draft, *args: script(*args))
    folder = tmp_path / "cell"
    folder.mkdir()
    record = run_cell(make_spec(tmp_path, methods=[method], budgets=[script.budget], experiments=SEARCH), folder)
    record.save(folder / "record.json")
    return RunRecord.load(folder / "record.json")


@pytest.mark.parametrize("method", ["eager", "delta"])
def test_a_measured_search_is_gated_at_its_largest_and_its_record_says_what_was_measured(tmp_path, monkeypatch, method):
    script = Gated(37, 37)
    record = recorded(tmp_path, monkeypatch, script, method)
    assert (record.outcome, record.truth, record.search["largest"]) == (Outcome.OK, Truth.EXACT, 37), record.message
    assert record.measured["peak_bytes"] == STATE + 37 * UNIT and not is_simulated(record) and counts(record)
    assert ("gate", 37) in script.calls or method == "eager"
    assert record.predicted == {} and "search.at_peak" not in record.missing


def test_a_search_that_the_gate_cannot_reach_does_not_count_and_one_that_is_wrong_is(tmp_path, monkeypatch):
    script = Gated(37, 37)
    script.answer = CallResult(outcome=Outcome.OOM, reason="gpu_memory", message="eager does not fit")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    record = recorded(tmp_path / "a", monkeypatch, script, "delta")
    assert record.truth is Truth.NOT_RUN and record.missing["truth"] == "oom: eager does not fit" and not counts(record)
    script.answer = CallResult(outcome=Outcome.OK, value={"truth": "wrong", "detail": {"differing": [], "first_step_that_differs": 1}})
    record = recorded(tmp_path / "b", monkeypatch, script, "delta")
    assert (record.outcome, record.truth) == (Outcome.WRONG, Truth.WRONG)


@pytest.mark.parametrize(("method", "outcome", "reason"), [("eager", Outcome.OOM, "byte_budget"), ("delta", Outcome.WRONG, "over_budget")])
def test_where_nothing_fits_the_cell_ends_as_its_lowest_trial(tmp_path, monkeypatch, method, outcome, reason):
    record = recorded(tmp_path, monkeypatch, Gated(0, None), method)
    assert (record.outcome, record.reason) == (outcome, reason) and "not even batch 1 fits" in record.message
    assert record.missing["search.simulated_largest"] == "no guess" and len(record.search["trials"]) >= 1


# ------------------------------------------------------------------------------------------------ real trials
TINY = {"model": {"name": "resnet8-digits", "image_size": 16, "width": 8}, "targets": ["cpu"],
        "measure": {"timeout_seconds": 600, "plan_timeout_seconds": 120, "gate_batch_size": 4}}


def scanned(tmp_path, cap: int, batches: range, **settings) -> int:
    """The largest batch whose eager steps stay within the cap: each is built and metered alone, by code that knows no search."""
    fitting = []
    for batch in batches:
        spec = make_spec(tmp_path, methods=["eager"], **{**TINY, **settings, "batch_sizes": [batch]})
        found = run_isolated(Call(function="isolated_work.eager_peak", args=(spec["config"], spec["collections"])), timeout_seconds=120)
        assert found.outcome is Outcome.OK, found.message
        fitting += [batch] if found.value <= cap else []
    return max(fitting)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_largest_batch_is_that_of_a_scan_over_every_batch(tmp_path, optimizer):
    cap, values = 2 * 2**20, range(18, 26)
    record = run(tmp_path, methods=["eager"], budgets=[f"{cap}B"], training={"optimizer": optimizer},
                 experiments=[{"name": "b", "kind": "max_batch", "search": {"low": 18, "high": 25}}], **TINY)
    assert (record.outcome, record.truth) == (Outcome.OK, Truth.EXACT), record.message
    assert record.search["largest"] == scanned(tmp_path, cap, values, training={"optimizer": optimizer})
    assert not record.search["hit_upper_end"] and record.search["is_simulated"] is False
