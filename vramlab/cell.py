"""One cell of a workflow: `python -m vramlab.cell <folder>` reads spec.json there and writes record.json.

This process only conducts: it never imports torch. Planning, the peak, the truth gate and the timing each run in a process of their own, so
that none of them sees what another allocated, and the death of one of them is an outcome, not the end of the cell.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Mapping

from vramlab import __version__
from vramlab.device import PERTURBATIONS
from vramlab.environment import probe
from vramlab.isolate import Call, CallResult, Settings, alternate, prepare_forks, run_isolated
from vramlab.largest import MeasuredSearch
from vramlab.prediction import TOLERANCE_BYTES, TOLERANCE_SHARE
from vramlab.record import Outcome, RunRecord, Truth, hash_config, write_atomically
from vramlab.run_folder import baseline_id
from vramlab.statistics import Interval, distinguishable, drift, paired_ratio, why_no_interval
from vramlab.telemetry import Sampler

FILES = ("schedule.json.gz", "tape.json.gz", "telemetry.csv.gz")
_OF_A_SEARCHED_PLAN = ("budget_bytes", "library_bytes", "tape_digest", "schedule_digest", "bytes_by_role", "changes_semantics",
                       "micro_batches")


class _Ended(Exception):
    """The cell has its outcome; nothing more is to be measured."""


@dataclass
class _Draft:
    """The record in the making."""

    spec: Mapping[str, Any]
    folder: Path
    sampler: Sampler
    outcome: Outcome = Outcome.OK
    reason: str = ""
    message: str = ""
    truth: Truth = Truth.NOT_RUN
    truth_detail: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # of the plan
    measured: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    sensitivity: dict[str, Any] = field(default_factory=dict)  # of a simulated cell: what each perturbation gives

    @property
    def config(self) -> Mapping[str, Any]:
        return self.spec["config"]

    @property
    def is_simulated(self) -> bool:
        return self.config["target"].startswith("sim:")

    @property
    def is_eager(self) -> bool:
        return self.config["method"] == "eager"

    @property
    def settings(self) -> Settings:
        """How its processes start. Where CUDA is used, each starts anew."""
        return Settings(is_forked=self.is_simulated or self.config["target"] == "cpu", on_start=self.sampler.watch)

    def ask(self, what: str, *args: Any, seconds: float | None = None) -> Any:
        """The value of vramlab.measure.<what> in a fresh process; any other end of it ends the cell with that outcome."""
        return self.settle(self._run(what, *args, seconds=seconds), what)

    def ask_of(self, what: str, spec: Mapping[str, Any], *args: Any) -> CallResult:
        """What becomes of vramlab.measure.<what> for another spec, within the time that planning may take."""
        return self._run(what, *args, seconds=self.config["measure"]["plan_timeout_seconds"], spec=spec)

    def ask_together(self, *whats: str) -> dict[str, CallResult]:
        """Several questions about the plan, each in a process of its own; at the same time on a CPU, where a peak is what one process
        allocates. On a GPU they share memory and run one after the other. The caller settles the results."""
        workers = len(whats) if self.config["target"] == "cpu" else 1
        with ThreadPoolExecutor(workers) as pool:
            return dict(zip(whats, pool.map(lambda what: self._run(what, str(self.folder)), whats)))

    def _run(self, what: str, *args: Any, seconds: float | None = None, spec: Mapping[str, Any] | None = None) -> CallResult:
        print(f"{what.replace('_', ' ')} ...", flush=True)
        limit = seconds or self.config["measure"]["timeout_seconds"]
        call = Call(function=f"vramlab.measure.{what}", args=(dict(spec or self.spec), *args))
        return run_isolated(call, timeout_seconds=limit, settings=self.settings)

    def settle(self, result: CallResult, what: str) -> Any:
        """The value of a result that is ok; otherwise the end of the cell."""
        if result.outcome is Outcome.OK:
            return result.value
        if result.traceback:
            print(result.traceback, flush=True)
        is_planning = what == "make_plan" and result.outcome is Outcome.TIMEOUT
        self.end(Outcome.PLAN_TIMEOUT if is_planning else result.outcome, result.reason, f"{what.replace('_', ' ')}: {result.message}")

    def end(self, outcome: Outcome, reason: str, message: str) -> None:
        self.outcome, self.reason, self.message = outcome, reason, message
        raise _Ended


def run_cell(spec: Mapping[str, Any], folder: Path) -> RunRecord:
    """Everything that the cell asks for, as a record. Only the machine's own failures pass through."""
    sampler = Sampler(folder / "telemetry.csv.gz", target=spec["config"]["target"])
    draft = _Draft(spec, folder, sampler)
    started, clock = datetime.now(UTC), time.monotonic()
    if draft.settings.is_forked:
        prepare_forks()
    sampler.start()
    try:
        _KINDS[draft.config["kind"]](draft)
    except _Ended:
        pass
    finally:
        telemetry = sampler.stop()
    return _record(draft, started, time.monotonic() - clock, telemetry)


# --- the kinds of cells ---------------------------------------------------------------------------------------------------
def _run_step(draft: _Draft) -> None:
    baseline = None if draft.is_simulated else _baseline(draft)
    _plan(draft, baseline["peak_bytes"] if baseline else None, baseline["peaks"].get("library_bytes", 0) if baseline else 0)
    if draft.is_simulated:
        draft.missing["measured"] = "a simulated target: nothing runs there"
        _perturb(draft, "plan_perturbed")
        return
    measure = draft.config["measure"]
    answers = {} if draft.is_eager else draft.ask_together(*(["measure_peak_of"] if measure["peak"] else []), "gate")
    if measure["peak"]:
        draft.measured.update(baseline["peaks"] if draft.is_eager else draft.settle(answers["measure_peak_of"], "measure_peak_of"))
        _judge_peak(draft)
    if not draft.is_eager:
        _judge_truth(draft, draft.settle(answers["gate"], "gate"))
    else:
        draft.truth, draft.truth_detail = Truth.EXACT, {"steps": 0, "note": "eager is the reference itself"}
    if measure["time"]:
        _time(draft, baseline)


def _run_train(draft: _Draft) -> None:
    _plan(draft, None)
    draft.training = draft.ask("train", str(draft.folder))
    same = draft.training["first_difference"] is None and draft.training["state_equal_at_end"]
    as_eager = Truth.SEMANTICS_CHANGED if draft.facts.get("changes_semantics") else Truth.EXACT
    draft.truth = as_eager if same else Truth.WRONG
    draft.truth_detail = {"steps": len(draft.training["steps"]), "batch_size": draft.config["batch_size"]}
    if "micro_batches" in draft.facts:
        draft.truth_detail["micro_batches"] = draft.facts["micro_batches"]
    if not same:
        draft.end(Outcome.WRONG, "truth", f"training differs from eager at step {draft.training['first_difference']}")


def _run_max_batch(draft: _Draft) -> None:
    if not draft.is_simulated:
        return _search_measured(draft)
    draft.missing["measured"] = "a simulated target: nothing runs there"
    draft.search = draft.ask("largest_by_simulation", str(draft.folder))
    draft.message = draft.search.get("why_whole", "")
    _perturb(draft, "search_perturbed", draft.search)
    if draft.search["largest"] is None:
        draft.end(Outcome.PLAN_INFEASIBLE, "budget", f"not even {draft.search['over']} {draft.search['low']} fits")


def _search_measured(draft: _Draft) -> None:
    """Trials that run, then the truth gate over what is largest."""
    search = MeasuredSearch(draft.ask_of, draft.spec, draft.folder)
    draft.search = search.run()
    largest, over = draft.search["largest"], draft.search["over"]
    for name, known in (("search.at_peak", draft.search["at_peak"]), ("search.simulated_largest", draft.search["simulated_largest"])):
        if not known:
            draft.missing[name] = draft.search["why_no_guess"] or search.plan_facts.get("unpredicted") or "nothing fits"
    if largest is None:
        lowest = search.trial_of(min(t["value"] for t in draft.search["trials"]))
        draft.end(Outcome(lowest["outcome"]), lowest["reason"], f"not even {over} {lowest['value']} fits: {lowest['message']}")
    draft.facts = {key: value for key, value in search.plan_facts.items() if key in _OF_A_SEARCHED_PLAN}
    draft.measured["peak_bytes"] = search.trial_of(largest)["peak_bytes"]
    if draft.is_eager:
        draft.truth, draft.truth_detail = Truth.EXACT, {"steps": 0, "note": "eager is the reference itself"}
        return
    print("gate ...", flush=True)
    answer = draft.ask_of("gate", search.spec_at(largest), str(draft.folder))
    if answer.outcome is Outcome.OK:
        _judge_truth(draft, answer.value)
    else:
        draft.missing["truth"] = f"{answer.outcome}: {answer.message}"


_KINDS = {"step": _run_step, "train": _run_train, "max_batch": _run_max_batch}


# --- their parts ----------------------------------------------------------------------------------------------------------
def _plan(draft: _Draft, eager_peak_bytes: int | None, library_bytes: int = 0) -> None:
    draft.facts = draft.ask("make_plan", str(draft.folder), eager_peak_bytes, library_bytes,
                            seconds=draft.config["measure"]["plan_timeout_seconds"])
    draft.message = draft.facts.get("why_whole", "")
    if "unpredicted" in draft.facts:
        for block in ("predicted", "measured.prediction_error_bytes"):
            draft.missing[block] = draft.facts["unpredicted"]
    if "infeasible" in draft.facts:
        if draft.is_simulated:
            _perturb(draft, "plan_perturbed")
        draft.end(Outcome.PLAN_INFEASIBLE, "budget", draft.facts["infeasible"]["message"])


def _perturb(draft: _Draft, how: str, *args: Any) -> None:
    """The cell once more on devices that are 20 % off, where the workflow asks for it. Its failure leaves the cell's own numbers as they
    are, and says why it has none."""
    measure = draft.config["measure"]
    if not measure["sensitivity"]:
        return
    print(f"{how.replace('_', ' ')} ...", flush=True)
    result = run_isolated(Call(function=f"vramlab.measure.{how}", args=(dict(draft.spec), *args)),
                          timeout_seconds=len(PERTURBATIONS) * measure["plan_timeout_seconds"], settings=draft.settings)
    if result.outcome is Outcome.OK:
        draft.sensitivity = result.value
    else:
        draft.missing["sensitivity"] = f"{result.outcome}: {result.message}"


def _judge_peak(draft: _Draft) -> None:
    """Budget and prediction against the meter. What libraries keep between steps is in the meter's peak and in the budget, in no plan."""
    peak, budget, library = draft.measured["peak_bytes"], draft.facts["budget_bytes"], draft.measured["library_bytes"]
    highest = max(peak, draft.measured["cold_peak_bytes"])
    draft.measured["over_budget_bytes"] = None if budget is None else max(0, highest - budget)
    predicted = draft.facts.get("predicted")
    draft.measured["prediction_error_bytes"] = None if predicted is None else predicted["peak_bytes"] + library - peak
    if predicted is not None:  # whether what is said to be live at the peak is all that the meter saw
        accounted = sum(predicted["at_peak"]["by_role"].values()) + predicted["at_peak"]["inside_op_bytes"] + library
        draft.measured["is_peak_accounted_for"] = abs(accounted - peak) <= max(TOLERANCE_SHARE * peak, TOLERANCE_BYTES)
    if draft.measured["over_budget_bytes"]:
        draft.end(Outcome.WRONG, "over_budget", f"the step held {highest:,} bytes, the budget is {budget:,}")


def _judge_truth(draft: _Draft, answer: Mapping[str, Any]) -> None:
    draft.truth, draft.truth_detail = Truth(answer["truth"]), answer["detail"]
    if draft.truth is Truth.NOT_RUN:
        draft.missing["truth"] = answer["detail"]["reason"]
    if draft.truth is Truth.WRONG:
        names = ", ".join(d["name"] for d in answer["detail"]["differing"][:5])
        draft.end(Outcome.WRONG, "truth", f"differs from eager at step {answer['detail']['first_step_that_differs']}: {names}")


def _time(draft: _Draft, baseline: Mapping[str, Any]) -> None:
    """Method and eager step in turns; eager against eager beside it."""
    noise = _drift(draft, baseline)
    draft.measured["drift"] = noise["interval"]
    if draft.is_eager:
        first, second = noise["first_seconds"], noise["second_seconds"]
    else:
        first, second = _alternate(draft, str(draft.folder), None)
    ratio = paired_ratio(first, second)
    draft.measured.update(
        step_seconds=list(first), baseline_step_seconds=list(second), ratio=ratio.to_json(), warmup_steps=draft.config["measure"]["warmup"]
    )
    _tell_apart(draft, ratio, drift(noise["first_seconds"], noise["second_seconds"]))


def _tell_apart(draft: _Draft, ratio: Interval, noise: Interval) -> None:
    """Whether the ratio differs from 1; of too few pairs that is null, as are the ends of the interval, with the reason."""
    draft.measured["is_distinguishable"] = distinguishable(ratio, noise)
    for name, interval in (("ratio", ratio), ("drift", noise)):
        if not interval.has_ends:
            names = (f"{name}.low", f"{name}.high", "is_distinguishable")
            draft.missing.update({f"measured.{each}": why_no_interval(interval.n) for each in names})


def _alternate(draft: _Draft, first: str | None, second: str | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    print("timing in turns ...", flush=True)
    measure = draft.config["measure"]
    calls = [Call(function="vramlab.measure.timed_step", args=(dict(draft.spec), where)) for where in (first, second)]
    turns = alternate(
        *calls, warmup=measure["warmup"], steps=measure["steps"], timeout_seconds=measure["timeout_seconds"], settings=draft.settings
    )
    if turns.failure is not None:
        draft.settle(turns.failure, "timing")
    return turns.first_seconds, turns.second_seconds


# --- eager's own figures, once a run --------------------------------------------------------------------------------------
def _baseline(draft: _Draft) -> dict[str, Any]:
    """Eager's peak in a warm step with the optimizer, measured; kept in the run's folder for all cells that compare with it."""
    path = _baseline_path(draft)
    if not path.is_file():
        peaks = draft.ask("measure_peak_of", None)
        write_atomically(path, json.dumps({"peaks": peaks, "peak_bytes": peaks["peak_bytes"]}, sort_keys=True) + "\n")
    return json.loads(path.read_text())


def _drift(draft: _Draft, baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Eager against eager."""
    if "drift" not in baseline:
        first, second = _alternate(draft, None, None)
        noise = {"first_seconds": list(first), "second_seconds": list(second), "interval": drift(first, second).to_json()}
        write_atomically(_baseline_path(draft), json.dumps({**baseline, "drift": noise}, sort_keys=True) + "\n")
        return noise
    return baseline["drift"]


def _baseline_path(draft: _Draft) -> Path:
    return Path(draft.spec["run_dir"]) / "baselines" / f"{baseline_id(draft.config)}.json"


# --- the record -----------------------------------------------------------------------------------------------------------
def _record(draft: _Draft, started: datetime, seconds: float, telemetry: Mapping[str, Any]) -> RunRecord:
    facts = draft.facts
    predicted = dict(facts.get("predicted", {}))
    predicted |= {key: facts[key] for key in ("swap_vs_recompute", "infeasible") if key in facts} | facts.get("prepared", {})
    if draft.sensitivity:
        (predicted if draft.config["kind"] == "step" else draft.search)["sensitivity"] = draft.sensitivity
    measured = draft.measured | {k: facts[k] for k in ("capture_seconds", "seed_seconds", "plan_seconds") if k in facts}
    _name_missing(draft, measured)
    return RunRecord(
        cell_id=hash_config(draft.config),
        kind=draft.config["kind"],
        workflow=draft.spec["workflow"],
        config=draft.config,
        outcome=draft.outcome,
        reason=draft.reason,
        message=draft.message,
        truth=draft.truth,
        truth_detail=draft.truth_detail,
        budget_bytes=facts.get("budget_bytes"),
        eager_peak_bytes=facts.get("eager_peak_bytes"),
        eager_peak_is_simulated=facts.get("eager_peak_is_simulated"),
        predicted=predicted,
        measured=measured,
        search=draft.search,
        training=draft.training,
        missing=draft.missing,
        environment=probe(),
        provenance={
            "started": started.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "ended": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "seconds": seconds,
            "vramlab": __version__,
            "written_by": "cell",
            "method_source_sha256": draft.config["sources"]["method"],
            "tape_digest": facts.get("tape_digest"),
            "schedule_digest": facts.get("schedule_digest"),
            "bytes_by_role": facts.get("bytes_by_role"),
            "basic_layers": facts.get("basic_layers"),
            "ops": facts.get("ops"),
            "lower_bound_bytes": facts.get("lower_bound_bytes"),  # no schedule of the whole batch is below
            "telemetry": dict(telemetry),
        },
        files={name: _sha256(draft.folder / name) for name in FILES if (draft.folder / name).is_file()},
    )


def _name_missing(draft: _Draft, measured: dict[str, Any]) -> None:
    """Numbers that a reader looks for and that this machine or this cell cannot give are null, with the reason."""
    if draft.is_simulated or draft.config["kind"] != "step":
        return
    on_cpu = draft.config["target"] == "cpu"
    for name in ("allocated_peak_bytes", "active_peak_bytes", "reserved_peak_bytes", "nvml_peak_bytes", "outside_torch_bytes",
                 "allocation_retries"):
        if measured.get(name) is None:
            measured[name] = None
            draft.missing[f"measured.{name}"] = "no NVIDIA GPU: the step ran on the CPU" if on_cpu else "not sampled"
    for name in ("peak_bytes", "cold_peak_bytes", "step_seconds", "ratio", "drift"):
        if measured.get(name) is None:
            measured[name] = None
            asked = draft.config["measure"]["peak" if "peak" in name else "time"]
            draft.missing[f"measured.{name}"] = draft.message or ("the cell ended before" if asked else "the workflow does not ask for it")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """`python -m vramlab.cell FOLDER`."""
    folder = Path(sys.argv[1])
    spec = json.loads((folder / "spec.json").read_text())
    record = run_cell(spec, folder)
    record.save(folder / "record.json")
    print(f"{record.outcome}{': ' + record.message if record.message else ''}", flush=True)


if __name__ == "__main__":
    main()
