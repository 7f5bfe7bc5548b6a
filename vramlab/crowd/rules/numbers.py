"""Third round, third part: what follows from raw samples, and outcomes and truths that follow from what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vramlab.counted import count_of
from vramlab.crowd.rules.agreeing import disagreements
from vramlab.crowd.rules.asking import Examination, Fault, Round, rule
from vramlab.prediction import TOLERANCE_BYTES, TOLERANCE_SHARE
from vramlab.record import Outcome, RunRecord, Truth
from vramlab.runs import SCHEDULE_FILE
from vramlab.statistics import Interval, distinguishable, drift, paired_ratio

_COUNTED = ("peak_bytes", "cold_peak_bytes", "persistent_bytes", "library_bytes", "allocated_peak_bytes", "active_peak_bytes",
            "reserved_peak_bytes", "allocation_retries", "meter")


def measured_steps(e: Examination) -> Iterator[tuple[str, RunRecord]]:
    """Records of training steps on hardware."""
    for name, record in e.contents.records.items():
        if record.kind == "step" and not record.config["target"].startswith("sim:"):
            yield name, record


@rule(Round.DERIVATION, "step-times", "ratio and interval follow from the raw samples, of which there are as many as were asked for")
def _step_times(e: Examination) -> Iterator[Fault]:
    for name, record in measured_steps(e):
        m, where = record.measured, f"{name}:measured"
        ours, theirs = m.get("step_seconds"), m.get("baseline_step_seconds")
        if not ours or not theirs:
            for key in ("ratio", "is_distinguishable", "step_seconds", "baseline_step_seconds"):
                if m.get(key) is not None:
                    yield f"{where}.{key}", "is claimed without the raw samples of both sides"
            continue
        e.count()
        asked = record.config["measure"]
        if not len(ours) == len(theirs) == asked["steps"]:
            told = f"{len(ours)} and {count_of(len(theirs), 'sample')}; {count_of(asked['steps'], 'pair')} asked for"
            yield f"{where}.step_seconds", told
            continue
        ratio = paired_ratio(ours, theirs)
        yield from disagreements(f"{where}.ratio", m.get("ratio"), ratio.to_json())
        yield from disagreements(f"{where}.warmup_steps", m.get("warmup_steps"), asked["warmup"])
        if m.get("drift") is None:
            yield f"{where}.drift", "a ratio without how far eager is off itself"
            continue
        told = distinguishable(ratio, Interval(**m["drift"]))
        yield from disagreements(f"{where}.is_distinguishable", m.get("is_distinguishable"), told)


@rule(Round.DERIVATION, "baseline", "eager's own peak and drift are those of the bundle's baselines, whose drift follows from its samples")
def _baseline(e: Examination) -> Iterator[Fault]:
    for name, record in measured_steps(e):
        m, where = record.measured, f"{name}:measured"
        if record.eager_peak_bytes is None and m.get("drift") is None and m.get("step_seconds") is None:
            continue  # it ended before anything was compared with eager
        e.count()
        if record.eager_peak_bytes is not None and record.eager_peak_is_simulated is not False:
            yield f"{name}:eager_peak_is_simulated", "a step that runs is compared with eager's measured peak"
        baseline = e.contents.baseline(record.config)
        if baseline is None:
            yield where, "eager's raw samples are missing: there is no baseline for this cell"
            continue
        yield from disagreements(f"{name}:eager_peak_bytes", record.eager_peak_bytes, baseline["peak_bytes"])
        yield from disagreements(f"{name}: its baseline's peak_bytes", baseline["peak_bytes"], baseline["peaks"]["peak_bytes"])
        if m.get("peak_bytes") is not None:
            yield from disagreements(f"{where}.meter", m.get("meter"), baseline["peaks"].get("meter"))
        if record.config["method"] == "eager" and m.get("peak_bytes") is not None:
            for key in _COUNTED:
                yield from disagreements(f"{where}.{key}", m.get(key), baseline["peaks"].get(key))
        yield from _drift(where, record, baseline.get("drift"))


def _drift(where: str, record: RunRecord, noise: Mapping[str, Any] | None) -> Iterator[Fault]:
    if noise is None:
        if record.measured.get("drift") is not None:
            yield f"{where}.drift", "eager's raw samples are missing"
        return
    first, second = noise["first_seconds"], noise["second_seconds"]
    if len(first) != len(second):
        yield where, f"eager against eager has {len(first)} and {count_of(len(second), 'sample')}"
        return
    derived = drift(first, second).to_json()
    yield from disagreements(f"{where}: its baseline's drift", noise["interval"], derived)
    if record.measured.get("drift") is not None:
        yield from disagreements(f"{where}.drift", record.measured["drift"], derived)
    if record.config["method"] == "eager" and record.measured.get("step_seconds") is not None:
        yield from disagreements(f"{where}.step_seconds", record.measured["step_seconds"], first)
        yield from disagreements(f"{where}.baseline_step_seconds", record.measured.get("baseline_step_seconds"), second)


@rule(Round.DERIVATION, "peak", "what a peak is over its budget and off its prediction follows from both")
def _peak(e: Examination) -> Iterator[Fault]:
    for name, record in measured_steps(e):
        m, where = record.measured, f"{name}:measured"
        if m.get("peak_bytes") is None:
            for key in ("over_budget_bytes", "prediction_error_bytes", "is_peak_accounted_for"):
                if m.get(key) is not None:
                    yield f"{where}.{key}", "is claimed without a peak"
            continue
        e.count()
        if m.get("cold_peak_bytes") is None or m.get("library_bytes") is None:
            yield where, "a peak without the cold one or without what libraries keep"
            continue
        for key, value in _of_peak(record).items():
            yield from disagreements(f"{where}.{key}", m.get(key), value)


def _of_peak(record: RunRecord) -> dict[str, Any]:
    """As a cell says it (vramlab.cell)."""
    m, budget, predicted = record.measured, record.budget_bytes, record.predicted.get("peak_bytes")
    peak, library = m["peak_bytes"], m["library_bytes"]
    found: dict[str, Any] = {"over_budget_bytes": None if budget is None else max(0, max(peak, m["cold_peak_bytes"]) - budget),
                             "prediction_error_bytes": None if predicted is None else predicted + library - peak}
    if predicted is not None and record.predicted.get("at_peak"):
        at_peak = record.predicted["at_peak"]
        accounted = sum(at_peak["by_role"].values()) + at_peak["inside_op_bytes"] + library
        found["is_peak_accounted_for"] = abs(accounted - peak) <= max(TOLERANCE_SHARE * peak, TOLERANCE_BYTES)
    return found


@rule(Round.DERIVATION, "outcome", "an outcome agrees with what the cell has: only what is ok has step times, a refusal has no peak")
def _outcome(e: Examination) -> Iterator[Fault]:
    for name, record in e.contents.records.items():
        e.count()
        m, outcome, where = record.measured, record.outcome, f"{name}:outcome"
        over = m.get("over_budget_bytes") or 0
        if outcome is Outcome.OK:
            if record.truth is Truth.WRONG or over or record.predicted.get("infeasible") or record.reason:
                yield where, "ok is claimed of a cell that is wrong, over its budget or refused"
            if record.kind == "step" and not (record.predicted or m.get("peak_bytes") is not None or m.get("ratio")):
                yield where, "ok is claimed of a cell without a number"
        elif m.get("step_seconds") is not None:
            yield f"{name}:measured.step_seconds", f"a cell that ended as {outcome} has no step times"
        if outcome is Outcome.WRONG and record.truth is not Truth.WRONG and not over and record.kind != "max_batch":
            yield where, "wrong is claimed of a cell that is neither over its budget nor unlike eager"
        if outcome is Outcome.PLAN_INFEASIBLE and record.kind == "step":
            yield from _refusal(name, record)


def _refusal(name: str, record: RunRecord) -> Iterator[Fault]:
    refusal = record.predicted.get("infeasible")
    if refusal is None:
        yield f"{name}:predicted.infeasible", "is missing: why is there no plan?"
    elif refusal["smallest_bytes"] is not None and record.budget_bytes is not None and refusal["smallest_bytes"] <= record.budget_bytes:
        yield f"{name}:predicted.infeasible.smallest_bytes", f"{refusal['smallest_bytes']:,} are within the budget that was refused"
    if record.measured.get("peak_bytes") is not None or SCHEDULE_FILE in record.files:
        yield f"{name}:measured.peak_bytes", "a cell without a plan has no peak and no schedule"


@rule(Round.DERIVATION, "truth", "a truth is what the gate's findings say, over as many steps as were asked for")
def _truth(e: Examination) -> Iterator[Fault]:
    for name, record in measured_steps(e):
        e.count()
        detail, truth, where = record.truth_detail, record.truth, f"{name}:truth"
        if record.config["method"] == "eager":
            if truth not in (Truth.EXACT, Truth.NOT_RUN):
                yield where, "eager is the reference itself"
            if detail:
                yield from disagreements(f"{name}:truth_detail.steps", detail.get("steps"), 0)
            continue
        if not detail:
            if truth is not Truth.NOT_RUN:
                yield where, f"{truth} is claimed without a gate"
            continue
        yield from _gate(name, record)


def _gate(name: str, record: RunRecord) -> Iterator[Fault]:
    detail, where = record.truth_detail, f"{name}:truth_detail"
    found, differing = detail.get("truth"), detail.get("differing")
    follows = {"exact": (Truth.EXACT, Truth.SEMANTICS_CHANGED), "within_noise": (Truth.WITHIN_NOISE,), "wrong": (Truth.WRONG,)}
    if record.truth not in follows.get(found, ()):
        yield f"{name}:truth", f"{record.truth} is claimed; the gate found {found}"
    if record.truth is Truth.SEMANTICS_CHANGED and not detail.get("micro_batches"):
        yield f"{name}:truth", "another meaning is claimed of a step that is not cut"
    if found == "within_noise" and (SCHEDULE_FILE in record.files or not detail.get("noise")):
        yield f"{where}.truth", "only a native method may be within noise, and shows the noise"
    is_same = differing == [] and detail.get("first_step_that_differs") is None
    if (found == "exact") != is_same:
        yield f"{where}.differing", f"{'something' if not is_same else 'nothing'} differs, and the gate found {found}"
    asked, steps = record.config["measure"], detail.get("steps")
    if found == "exact" and steps != asked["gate_steps"] or not steps:
        yield f"{where}.steps", f"{count_of(steps or 0, 'step')} compared; {asked['gate_steps']} asked for"
    size = asked["gate_batch_size"] or record.config["batch_size"]
    yield from disagreements(f"{where}.batch_size", detail.get("batch_size"), size)


@rule(Round.DERIVATION, "training", "where training first differs from eager's follows from both series, and so does its truth")
def _training(e: Examination) -> Iterator[Fault]:
    for name, record in e.contents.records.items():
        t = record.training
        if not t:
            continue
        e.count()
        where, series = f"{name}:training", [t.get(key) for key in ("loss", "grad_norm", "eager_loss", "eager_grad_norm")]
        steps = list(range(1, record.config["training"]["steps"] + 1))
        yield from disagreements(f"{where}.steps", t.get("steps"), steps)
        if any(s is None or len(s) != len(steps) for s in series):
            yield where, f"the series are not of {count_of(len(steps), 'step')} each"
            continue
        loss, norm, eager_loss, eager_norm = series
        same = [(a, b) == (c, d) for a, b, c, d in zip(loss, norm, eager_loss, eager_norm)]
        first = next((i for i, is_same in zip(steps, same) if not is_same), None)
        yield from disagreements(f"{where}.equal_steps", t.get("equal_steps"), sum(same))
        yield from disagreements(f"{where}.first_difference", t.get("first_difference"), first)
        is_true = first is None and t.get("state_equal_at_end") is True
        if (record.truth in (Truth.EXACT, Truth.SEMANTICS_CHANGED)) != is_true:
            yield f"{name}:truth", f"{record.truth} is claimed; the series say {'equal' if is_true else 'unequal'}"
        if is_true and t.get("accuracy") != t.get("eager_accuracy"):
            yield f"{where}.accuracy", "equal weights have equal accuracy"
        if (record.outcome is Outcome.OK) != is_true and record.outcome in (Outcome.OK, Outcome.WRONG):
            yield f"{name}:outcome", f"{record.outcome} is claimed; the series say {'equal' if is_true else 'unequal'}"


@rule(Round.DERIVATION, "missing-reason", "a measured number that is missing has a reason")
def _missing(e: Examination) -> Iterator[Fault]:
    for name, record in e.contents.records.items():
        for key, value in record.measured.items():
            e.count()
            stated = record.missing.get(f"measured.{key}", record.missing.get("measured"))
            if value is None and not stated and key not in ("over_budget_bytes", "prediction_error_bytes"):
                yield f"{name}:measured.{key}", "is null, and `missing` does not say why"
            if value is not None and f"measured.{key}" in record.missing:
                yield f"{name}:missing.measured.{key}", "a number that is there has no reason to be missing"
