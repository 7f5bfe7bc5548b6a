"""The checker against somebody who changes one thing and signs it again: each forgery is refused, by the rule that is meant to.

The genuine bundle's numbers come from the engine; what they must be is not asked of the rules. Its control: unchanged, it is accepted.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from forging import Members, forge, members_of, put, record_of_method, with_json, write
from genuine import ROOT, WORKFLOW, genuine_bundle, genuine_run

from vramlab.crowd import Severity, check, pack_run
from vramlab.crowd.canonical import to_canonical
from vramlab.crowd.findings import Report
from vramlab.crowd.layout import Limits
from vramlab.crowd.manifest import signed
from vramlab.crowd.rules import RULES
from vramlab.crowd.rules.asking import Round
from vramlab.crowd.signing import make_key
from vramlab.statistics import Interval, distinguishable, paired_ratio

KEY = make_key()


@pytest.fixture(scope="module")
def genuine(tmp_path_factory) -> Path:
    return genuine_bundle(tmp_path_factory.mktemp("genuine"), seed=5, key=KEY)


@pytest.fixture(scope="module")
def members(genuine) -> Members:
    return members_of(genuine)


def errors(report: Report) -> set[str]:
    return {f.rule for f in report.errors}


def setting(path: str, value: Any) -> Callable[[Any], None]:
    """A change that sets a dotted field; a function gets the old value."""
    steps = tuple(int(step) if step.isdigit() else step for step in path.split("."))

    def change(body: Any) -> None:
        old = body
        for step in steps:
            old = old.get(step) if isinstance(old, dict) else old[step]
        put(body, steps, value(old) if callable(value) else value)
    return change


def without(block: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key not in keys}


def test_a_genuine_bundle_is_accepted_and_every_rule_was_asked(genuine):
    report = check(genuine)
    assert report.is_accepted and {f.rule for f in report.findings} <= {"not-derived"} and report.bundle == genuine.name
    assert set(report.examined) == {r.name for number, rules in RULES.items() for r in rules if number is not Round.REPLANNING}
    looked = {name for name, count in report.examined.items() if count}
    assert {"files", "signature", "schema", "simulated", "schedule-legal", "roofline", "step-times", "baseline", "peak", "verdicts",
            "telemetry-summary", "memory-order", "clock"} <= looked


def test_every_rule_has_a_name_of_its_own_and_says_what_it_asks():
    rules = [r for group in RULES.values() for r in group]
    assert len({r.name for r in rules}) == len(rules) and all(r.asks and r.severity in Severity for r in rules)


def test_the_page_about_bundles_lists_every_rule_as_it_is():
    page = (Path(__file__).resolve().parents[1] / "docs" / "bundles.md").read_text()
    listed = [line for line in page.splitlines() if line.startswith("| `")]
    assert listed == [f"| `{r.name}` | {r.severity} | {r.asks} |" for group in RULES.values() for r in group]


def test_a_forger_who_changes_nothing_is_accepted(members, tmp_path):
    """The control of all forgeries: the same way of making a bundle, with nothing wrong in it."""
    other = make_key()
    folder = forge(members, tmp_path, other)
    assert check(folder).is_accepted
    assert json.loads((folder / "manifest.json").read_text())["signature"]["public_key"] == other.public_key


# --- one field of a record ------------------------------------------------------------------------------------------------
FORGERIES: dict[str, tuple[str, str, Any, str]] = {  # what -> (method, field, value, rule)
    "a smaller peak": ("checkpoint", "measured.peak_bytes", lambda n: n - 1, "peak"),
    "eager's larger peak": ("eager", "measured.peak_bytes", lambda n: n + 1000, "peak"),
    "another prediction error": ("checkpoint", "measured.prediction_error_bytes", 1, "peak"),
    "a budget that was broken": ("checkpoint", "measured.over_budget_bytes", 1, "peak"),
    "bytes that are not accounted for": ("checkpoint", "measured.is_peak_accounted_for", False, "peak"),
    "a better ratio": ("checkpoint", "measured.ratio.median", lambda r: 0.9 * r, "step-times"),
    "a narrower interval": ("checkpoint", "measured.ratio.high", lambda r: r - 1e-3, "step-times"),
    "more pairs": ("checkpoint", "measured.ratio.n", 11, "step-times"),
    "one sample": ("checkpoint", "measured.step_seconds.3", lambda s: s / 2, "step-times"),
    "one of eager's samples": ("checkpoint", "measured.baseline_step_seconds.0", lambda s: 2 * s, "step-times"),
    "no samples": ("checkpoint", "measured.step_seconds", None, "step-times"),
    "fewer samples": ("checkpoint", "measured.step_seconds", lambda s: s[:-1], "step-times"),
    "a sample below zero": ("checkpoint", "measured.step_seconds.0", -1.0, "schema"),
    "less drift": ("checkpoint", "measured.drift.low", 1.0, "baseline"),
    "a difference that cannot be told": ("checkpoint", "measured.is_distinguishable", lambda b: not b, "step-times"),
    "another warm-up": ("checkpoint", "measured.warmup_steps", 5, "step-times"),
    "recomputes that did not run": ("checkpoint", "measured.recomputes", 0, "simulated"),
    "recomputes that the gate did not run": ("checkpoint", "truth_detail.recomputes", 0, "simulated"),
    "no offloads, which there were none of": ("checkpoint", "measured", lambda m: without(m, "offloads"), "simulated"),
    "other recomputes beside no offloads": ("checkpoint", "measured", lambda m: without(m, "offloads") | {"recomputes": 0}, "simulated"),
    "none of what ran": ("checkpoint", "measured", lambda m: without(m, "recomputes", "offloads", "prefetches"), "simulated"),
    "no offloads of the gate": ("checkpoint", "truth_detail.offloads", None, "simulated"),
    "steps of eager against itself": ("eager", "truth_detail.steps", 3, "truth"),
    "eager was never compared": ("eager", "truth_detail.steps", None, "truth"),
    "eager's peak": ("checkpoint", "eager_peak_bytes", lambda n: 2 * n, "baseline"),
    "a larger budget": ("checkpoint", "budget_bytes", lambda n: n + 1, "budget"),
    "no budget": ("checkpoint", "budget_bytes", None, "budget"),
    "simulated, not measured": ("checkpoint", "eager_peak_is_simulated", True, "baseline"),
    "a smaller predicted peak": ("checkpoint", "predicted.peak_bytes", lambda n: n - 1, "simulated"),
    "a faster prediction": ("checkpoint", "predicted.step_seconds", lambda s: 0.999 * s, "simulated"),
    "another device": ("checkpoint", "predicted.device.h2d_bytes_per_second", lambda r: 2 * r, "against-eager"),
    "a device that nothing runs on": ("checkpoint", "predicted.device.memory_bytes_per_second", 0.0, "known-device"),
    "no device": ("checkpoint", "predicted.device", None, "known-device"),
    "what is live at the peak": ("checkpoint", "predicted.at_peak.by_role.activation", 0, "simulated"),
    "eager's simulated time": ("checkpoint", "predicted.eager_step_seconds", lambda s: 2 * s, "against-eager"),
    "recomputing is never cheaper": ("checkpoint", "predicted.swap_vs_recompute.share", 0.9, "against-eager"),
    "wrong, but ok": ("checkpoint", "truth", "wrong", "outcome"),
    "something differs": ("checkpoint", "truth_detail.first_step_that_differs", 2, "truth"),
    "a gate that found otherwise": ("checkpoint", "truth_detail.truth", "wrong", "truth"),
    "a gate of one step": ("checkpoint", "truth_detail.steps", 1, "truth"),
    "a gate at another batch": ("checkpoint", "truth_detail.batch_size", 1, "truth"),
    "no gate": ("checkpoint", "truth_detail", {}, "truth"),
    "within noise": ("checkpoint", "truth", "within_noise", "truth"),
    "another meaning": ("checkpoint", "truth", "semantics_changed", "truth"),
    "out of memory with step times": ("checkpoint", "outcome", "oom", "outcome"),
    "crashed with step times": ("checkpoint", "outcome", "crashed", "outcome"),
    "refused with a peak": ("checkpoint", "outcome", "plan_infeasible", "outcome"),
    "ok with a reason": ("checkpoint", "reason", "gpu_memory", "outcome"),
    "another batch": ("checkpoint", "config.batch_size", 64, "config-hash"),
    "another method": ("checkpoint", "config.method", "delta", "config-hash"),
    "another seed": ("checkpoint", "config.training.seed", 7, "config-hash"),
    "another cell_id": ("checkpoint", "cell_id", "0" * 16, "config-hash"),
    "another kind": ("checkpoint", "kind", "train", "one-run"),
    "another workflow": ("checkpoint", "workflow.name", "other", "one-run"),
    "another source": ("checkpoint", "provenance.method_source_sha256", "0" * 64, "one-run"),
    "another tape": ("checkpoint", "provenance.tape_digest", "0" * 64, "tape"),
    "another schedule": ("checkpoint", "provenance.schedule_digest", "0" * 64, "schedule-legal"),
    "other roles": ("checkpoint", "provenance.bytes_by_role.activation", 1, "tape"),
    "a file's hash": ("checkpoint", "files.schedule.json.gz", "0" * 64, "record-files"),
    "no reason for a null": ("checkpoint", "missing", {}, "missing-reason"),
    "a reason for a number": ("checkpoint", "missing.measured.peak_bytes", "lost", "missing-reason"),
    "a number that was never measured": ("checkpoint", "measured.allocated_peak_bytes", 5, "missing-reason"),
    "it ended before it started": ("checkpoint", "provenance.ended", "2026-01-02T03:04:04Z", "clock"),
    "it ended in the future": ("checkpoint", "provenance.ended", "2126-01-02T03:04:35Z", "clock"),
    "the thirtieth of February": ("checkpoint", "provenance.started", "2026-02-30T03:04:05Z", "clock"),
    "it started before its run": ("checkpoint", "provenance.started", "2026-01-02T03:03:50Z", "clock"),
    "it ran while eager did": ("checkpoint", "provenance.started", "2026-01-02T03:04:30Z", "turns"),
    "it ran for as long as eager, at the same time": ("checkpoint", "provenance", lambda p: p | {
        "started": "2026-01-02T03:04:05Z", "ended": "2026-01-02T03:04:35Z"}, "turns"),
    "it took longer": ("checkpoint", "provenance.seconds", 300.0, "clock"),
    "a peak beyond the machine": ("checkpoint", "environment.cpu.memory_bytes", 100, "memory-order"),
    "more stays than there is": ("checkpoint", "measured.persistent_bytes", 10**9, "memory-order"),
    "a bound that the peak is below": ("checkpoint", "provenance.lower_bound_bytes", 10**9, "tape"),
    "fewer samples of telemetry": ("checkpoint", "provenance.telemetry.rows", 5, "telemetry-summary"),
    "telemetry of another cell": ("checkpoint", "provenance.telemetry.achieved_period_seconds", 0.2, "telemetry-summary"),
    "no machine": ("checkpoint", "environment.system", {}, "schema"),
    "another machine": ("checkpoint", "environment.system.host_hash", "f" * 16, "manifest-describes"),
    "no torch": ("checkpoint", "environment.software.packages", {}, "comparable"),
    "no processor": ("checkpoint", "environment.cpu.model", None, "comparable"),
    "a text for a number": ("checkpoint", "measured.peak_bytes", "5", "schema"),
    "a truth value for a number": ("checkpoint", "measured.peak_bytes", True, "schema"),
    "more than a double holds": ("checkpoint", "measured.peak_bytes", 2**53, "schema"),
    "an unknown outcome": ("checkpoint", "outcome", "splendid", "schema"),
    "a field at the top": ("checkpoint", "verdict", "reproduced", "schema"),
    "a target that is none": ("checkpoint", "config.target", "tpu", "schema"),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_forged_field_is_refused_by_its_rule(members, tmp_path, what):
    method, field, value, rule = FORGERIES[what]
    if field.startswith("files."):
        def change(body: Any) -> None:
            body["files"][field.removeprefix("files.")] = value
    elif field.startswith("missing.measured"):
        def change(body: Any) -> None:
            body["missing"][field.removeprefix("missing.")] = value
    else:
        change = setting(field, value)
    report = check(forge(with_json(members, record_of_method(members, method), change), tmp_path, KEY))
    assert rule in errors(report), report.findings


SIMULATED: dict[str, tuple[str, Any, str]] = {
    "a measured peak": ("measured.peak_bytes", 5, "simulated-stays-simulated"),
    "a truth": ("truth", "exact", "simulated-stays-simulated"),
    "a measured peak of eager": ("eager_peak_is_simulated", False, "simulated-stays-simulated"),
    "a peak of eager that is neither": ("eager_peak_is_simulated", None, "simulated-stays-simulated"),
    "a smaller peak of eager": ("eager_peak_bytes", lambda n: n - 1, "against-eager"),
    "a prediction": ("predicted.step_seconds", lambda s: 0.99 * s, "simulated"),
    "a profile's name": ("predicted.profile", "h200", "simulated"),
    "a faster link": ("predicted.device.h2d_bytes_per_second", 1e12, "simulated"),
}


@pytest.mark.parametrize("what", SIMULATED)
def test_a_forged_field_of_a_simulated_cell_is_refused_by_its_rule(members, tmp_path, what):
    field, value, rule = SIMULATED[what]
    report = check(forge(with_json(members, record_of_method(members, "checkpoint", "sim"), setting(field, value)), tmp_path, KEY))
    assert rule in errors(report), report.findings


# --- other files ----------------------------------------------------------------------------------------------------------
OTHERS: dict[str, tuple[str, str, Any, str]] = {
    "a better verdict": ("claims.json", "0.verdict", "reproduced", "verdicts"),
    "a better number": ("claims.json", "0.obtained", "80 %", "verdicts"),
    "measured, not simulated": ("claims.json", "0.is_simulated", True, "verdicts"),
    "other evidence": ("claims.json", "0.evidence", [], "verdicts"),
    "another tolerance of a verdict": ("claims.json", "0.tolerance", 0.9, "verdicts"),
    "a more generous claim": ("run.json", "workflow.claims.0.tolerance", 5.0, "verdicts"),
    "another claim": ("run.json", "workflow.claims", [], "verdicts"),
    "another workflow file": ("run.json", "workflow.sha256", "0" * 64, "one-run"),
    "another run": ("run.json", "run_id", "other", "manifest-describes"),
    "another plan": ("run.json", "cells.0.config.batch_size", 1, "config-hash"),
    "no date": ("run.json", "started", "2026-13-01T00:00:00Z", "clock"),
    "it started after its cells": ("run.json", "started", "2026-01-02T03:04:41Z", "clock"),
    "a schema of another version": ("run.json", "schema", 2, "schema"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_forged_field_of_the_run_is_refused_by_its_rule(members, tmp_path, what):
    name, field, value, rule = OTHERS[what]
    report = check(forge(with_json(members, name, setting(field, value)), tmp_path, KEY))
    assert rule in errors(report), report.findings


def warnings(report: Report) -> list[tuple[str, str, str]]:
    assert report.is_accepted, report.findings
    return [(f.rule, f.where.partition(":")[2], f.message) for f in report.findings if f.severity is Severity.WARNING]


def test_one_host_with_two_processors_is_told(members, tmp_path):
    """A warning, as cells of two machines are. The control: all records and the run changed alike are one machine's."""
    change = setting("environment.cpu.model", "Another Processor")
    one = with_json(members, record_of_method(members, "checkpoint", "sim"), change)
    assert warnings(check(forge(one, tmp_path / "one", KEY))) == [
        ("one-processor", "environment.cpu.model", "'Another Processor'; the same machine has 'Test Processor 9000' elsewhere")]
    apart = one
    for name in (n for n in members if n == "run.json" or n.endswith("record.json")):
        apart = with_json(apart, name, change)
    assert "one-processor" not in {rule for rule, *_ in warnings(check(forge(apart, tmp_path / "all", KEY)))}


def test_a_known_workflow_that_judges_by_its_own_measure_is_told(tmp_path, monkeypatch):
    """The oracle is the workflow's file. The control: the claims as they stand there are no finding, whatever their notes say."""
    body = yaml.safe_load((ROOT / "workflows" / "resnet50-delta.yaml").read_text())
    theirs = [{"method": None, "baseline": None, "budget": None, "batch_size": None, "baseline_batch_size": None, "devices": None,
               "value": None, "tolerance": None, "note": "ours", **claim} for claim in body["claims"]]
    assert len(theirs) == 5 and theirs[0]["id"] == "delta-mem-save" and theirs[0]["experiment"] == "memory"

    def told(claims: list[dict], name: str = "resnet50-delta") -> list[tuple[str, str]]:
        monkeypatch.setattr("genuine.WORKFLOW", WORKFLOW | {"name": name})
        monkeypatch.setattr("genuine.CLAIMS", claims)
        bundle = genuine_bundle(tmp_path / f"{len(list(tmp_path.iterdir()))}", seed=5, key=KEY)
        found = warnings(check(bundle))
        assert {rule for rule, *_ in found} <= {"own-claims"}
        return [(where, message) for _, where, message in found]

    assert told(theirs) == []
    generous = [theirs[0] | {"tolerance": 5.0, "value": [1, 70]}, *theirs[1:]]
    assert told(generous) == [
        ("workflow.claims.0.value", "delta-mem-save on memory: [1, 70]; resnet50-delta here has None"),
        ("workflow.claims.0.tolerance", "delta-mem-save on memory: 5.0; resnet50-delta here has 0.1")]
    assert told(generous, name="mine") == [], "under a name of its own it is a workflow of its own"
    elsewhere = [*theirs[:4], theirs[4] | {"experiment": "memory"}]
    assert told(elsewhere) == [
        ("workflow.claims.4", "delta-swap-not-first on memory is judged; resnet50-delta here does not"),
        ("workflow.claims", "delta-swap-not-first on simulated-memory is left out; resnet50-delta here has it")]
    assert told([], name="../workflows/resnet50-delta") == [], "a name is no path"


@pytest.mark.parametrize(("field", "value"), [
    ("peak_bytes", 1), ("peaks.peak_bytes", 1), ("drift.first_seconds.0", 9.0), ("drift.interval.low", 0.5), ("drift", None)])
def test_a_forged_baseline_is_refused(members, tmp_path, field, value):
    (name,) = [n for n in members if n.startswith("baselines/")]
    assert "baseline" in errors(check(forge(with_json(members, name, setting(field, value)), tmp_path, KEY)))


@pytest.mark.parametrize(("field", "value", "rule"), [
    ("workflow", "other", "manifest-describes"), ("run_id", None, "manifest-describes"), ("is_complete", False, "manifest-describes"),
    ("cells", 3, "manifest-describes"), ("planned_cells", 5, "manifest-describes"), ("machines", ["f" * 16], "manifest-describes"),
    ("format", 1, "manifest"), ("supersedes", "../x", "manifest"), ("scrubbed", {"x": ["y"]}, "manifest-describes"),
    ("more", 1, "manifest"),
])
def test_a_manifest_that_says_something_else_is_refused(members, tmp_path, field, value, rule):
    assert rule in errors(check(forge(members, tmp_path, KEY, **{field: value})))


def repacked(members: Members, name: str, change: Callable[[Any], Any]) -> Members:
    """A packed file with its JSON changed, and the record's hash of it made true."""
    body = json.loads(gzip.decompress(members[name]))
    new = change(body)
    return renamed(members, name, gzip.compress(json.dumps(body if new is None else new).encode(), mtime=0))


def renamed(members: Members, name: str, data: bytes) -> Members:
    """Another file in the place of a tape or a schedule; every record that names it names the new one."""
    import hashlib

    sha256 = hashlib.sha256(data).hexdigest()
    old = hashlib.sha256(members[name]).hexdigest()
    place = f"tapes/{sha256}.json.gz" if name.startswith("tapes/") else name
    found = {n: d for n, d in members.items() if n != name} | {place: data}
    return {n: d.replace(old.encode(), sha256.encode()) if n.endswith("record.json") else d for n, d in found.items()}


def packed_file(members: Members, record: str, file: str) -> str:
    files = json.loads(members[record])["files"]
    return f"tapes/{files[file]}.json.gz" if file.startswith("tape") else f"{record.rpartition('/')[0]}/{file}"


def drop_first(opcode: str) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        body["instructions"].remove(next(row for row in body["instructions"] if row[0] == opcode))
    return change


SCHEDULES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an op that does not run": (drop_first("compute"), "schedule-legal"),
    "a storage that is never freed": (drop_first("free"), "schedule-legal"),
    "an op twice": (lambda b: b["instructions"].insert(0, b["instructions"][0]), "schedule-legal"),
    "an op that is none": (lambda b: b["instructions"].append(["compute", 10**6]), "schedule-legal"),
    "an op below zero": (lambda b: b["instructions"].append(["compute", -1]), "schedule-legal"),
    "a storage that is none": (lambda b: b["instructions"].append(["free", 2**40]), "schedule-legal"),
    "more than 64 bits": (lambda b: b["instructions"].append(["free", 2**70]), "json-integer"),
    "half an op": (lambda b: b["instructions"].append(["compute", 1.5]), "schedule"),
    "an unknown instruction": (lambda b: b["instructions"].append(["explode", 1]), "schedule"),
    "an instruction that is none": (lambda b: b["instructions"].append("compute"), "schedule"),
    "code": (lambda b: b["instructions"].append(["__import__('os')", 1]), "schedule"),
    "another tape": (lambda b: b.update(tape_digest="0" * 64), "schedule-legal"),
    "another format": (lambda b: b.update(format=9), "schedule"),
    "no schedule": (lambda b: [], "schedule"),
}


@pytest.mark.parametrize("what", SCHEDULES)
def test_a_forged_schedule_is_refused(members, tmp_path, what):
    change, rule = SCHEDULES[what]
    name = packed_file(members, record_of_method(members, "checkpoint"), "schedule.json.gz")
    assert rule in errors(check(forge(repacked(members, name, change), tmp_path, KEY)))


def first_op(**fields: Any) -> Callable[[Any], None]:
    return lambda body: body["ops"][0].update(fields)


TAPES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "smaller storages": (lambda b: b["storages"][1].__setitem__(0, 1), "tape"),
    "a storage below zero": (lambda b: b["storages"][1].__setitem__(0, -5), "tape"),
    "half a byte": (lambda b: b["storages"][1].__setitem__(0, 0.5), "tape"),
    "a storage larger than all devices": (lambda b: b["storages"][1].__setitem__(0, 2**62), "tape"),
    "a faster op": (first_op(seconds=1e-9), "roofline"),
    "an op of no time at all": (first_op(seconds=-1.0), "tape"),
    "an op with other arithmetic": (first_op(flops=1), "tape"),
    "a tensor that is none": (first_op(inputs=[10**6]), "tape"),
    "a storage that is none": (first_op(mutates=[10**6]), "tape"),
    "another batch": (lambda b: b.update(batch_size=1), "tape"),
    "no ops": (lambda b: b.update(ops=[]), "tape"),
    "no tape": (lambda b: {}, "tape"),
    "an op with a field of its own": (first_op(exec="rm"), "tape"),
}


@pytest.mark.parametrize("what", TAPES)
def test_a_forged_tape_is_refused(members, tmp_path, what):
    change, rule = TAPES[what]
    name = packed_file(members, record_of_method(members, "checkpoint", "sim"), "tape.json.gz")
    assert rule in errors(check(forge(repacked(members, name, change), tmp_path, KEY)))


@pytest.mark.parametrize("claim", [
    {"split_convolutions": {}}, {"split_convolutions": {"split_ops": 0, "unsplit_ops": [], "is_checked": True}},
    {"split_convolutions": {"split_ops": 3, "unsplit_ops": [], "is_checked": True}}, {"inplace_gradients": {}},
    {"inplace_gradients": {"ops": 0}}, {"inplace_gradients": {"ops": 2}}])
def test_a_tape_that_is_not_prepared_hides_nothing_by_being_called_so(members, tmp_path, claim):
    """Less can be derived of a prepared tape; eager's own is none."""
    name = record_of_method(members, "checkpoint")

    def change(body: Any) -> None:
        body["predicted"] |= claim | {"eager_step_seconds": 1e9}
    told = [f.message for f in check(forge(with_json(members, name, change), tmp_path, KEY)).errors if f.rule == "tape"]
    assert told, "the rule `tape` refuses it"


def test_a_step_faster_than_any_device_is_refused(members, tmp_path):
    name = record_of_method(members, "checkpoint")

    def change(body: Any) -> None:
        body["measured"]["step_seconds"] = [1e-15 * s for s in body["measured"]["step_seconds"]]
        ratio = paired_ratio(body["measured"]["step_seconds"], body["measured"]["baseline_step_seconds"])
        drift = Interval(**body["measured"]["drift"])
        body["measured"] |= {"ratio": ratio.to_json(), "is_distinguishable": distinguishable(ratio, drift)}
    assert "speed" in errors(check(forge(with_json(members, name, change), tmp_path, KEY)))


def test_eager_is_eagers_own_order(members, tmp_path):
    """A schedule that frees late is legal, and makes eager's peak, against which savings count, larger."""
    name = packed_file(members, record_of_method(members, "eager", "sim"), "schedule.json.gz")

    def late(body: Any) -> None:
        at = next(i for i, row in enumerate(body["instructions"]) if row[0] == "free")
        body["instructions"].insert(at + 2, body["instructions"].pop(at))
    assert "schedule-legal" in errors(check(forge(repacked(members, name, late), tmp_path, KEY)))


def test_telemetry_that_was_copied_or_cut_or_is_none_is_told(members, tmp_path):
    ours, theirs = (packed_file(members, record_of_method(members, m), "telemetry.csv.gz") for m in ("checkpoint", "eager"))
    copied = renamed(members, ours, members[theirs])
    assert "copied-telemetry" in errors(check(forge(copied, tmp_path / "a", KEY)))
    packed_anew = gzip.compress(gzip.decompress(members[theirs]), 1, mtime=1)
    assert packed_anew != members[theirs]
    assert "copied-telemetry" in errors(check(forge(renamed(members, ours, packed_anew), tmp_path / "anew", KEY)))
    assert "telemetry" in errors(check(forge(renamed(members, ours, gzip.compress(b"a,b\n1,2\n")), tmp_path / "b", KEY)))
    backwards = gzip.decompress(members[ours]).replace(b"\n29.800,", b"\n1.000,")
    assert "telemetry" in errors(check(forge(renamed(members, ours, gzip.compress(backwards)), tmp_path / "c", KEY)))
    infinite = gzip.decompress(members[ours]).replace(b"98.500", b"1e999", 1)
    assert "telemetry" in errors(check(forge(renamed(members, ours, gzip.compress(infinite)), tmp_path / "d", KEY)))


@pytest.mark.parametrize(("kind", "rule"), [("tapes", "zip-bomb"), ("schedule", "zip-bomb"), ("telemetry", "zip-bomb")])
def test_a_bomb_inside_a_packed_file_is_refused(members, tmp_path, kind, rule):
    name = next(n for n in members if kind in n)
    report = check(forge(renamed(members, name, gzip.compress(bytes(2**27), compresslevel=9)), tmp_path, KEY), Limits())
    assert rule in errors(report)


def test_packed_files_are_bounded_together_and_samples_in_number(members, tmp_path):
    """Both cost time and memory to look at: many small bombs, and a bootstrap of ten thousand draws of each sample."""
    folder = forge(members, tmp_path, KEY)
    assert check(folder).is_accepted and errors(check(folder, Limits(all_unpacked_bytes=20_000))) == {"zip-bomb"}
    many = with_json(members, record_of_method(members, "checkpoint"), setting("measured.step_seconds", [1.0] * 100_000))
    assert errors(check(forge(many, tmp_path / "many", KEY))) == {"schema", "timed-steps"}


def test_timed_steps_are_bounded_over_all_cells(genuine):
    """Two measured cells have ten pairs each, and a baseline ten of each side: sixty. One fewer allowed refuses."""
    assert check(genuine, Limits(timed_steps=60)).is_accepted
    assert errors(check(genuine, Limits(timed_steps=59))) == {"timed-steps"}


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": NaN}', "[" * 5000, "[]", "nothing", "",
                                  '{"a": "\\ud800"}', '{"a": "\\u0000"}'])
@pytest.mark.parametrize("file", ["run.json", "claims.json", "record.json", "baseline"])
def test_json_that_is_none_of_ours_is_refused(members, tmp_path, text, file):
    name = record_of_method(members, "checkpoint") if file == "record.json" else next(n for n in members if file in n)
    if (file, text) == ("claims.json", "[]"):  # of a run without claims
        assert "verdicts" in errors(check(forge(members | {name: text.encode()}, tmp_path, KEY)))
        return
    found = errors(check(forge(members | {name: text.encode()}, tmp_path, KEY)))
    assert found & {"schema", "json-duplicate-key", "json-not-finite", "json-depth", "json-syntax", "json-text"}
    assert "rule-failed" not in found


# --- the wrapping ---------------------------------------------------------------------------------------------------------
def test_one_byte_of_any_file_refuses(genuine, tmp_path):
    for number, name in enumerate(members_of(genuine)):
        folder = tmp_path / str(number) / genuine.name
        shutil.copytree(genuine, folder)
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)
        assert errors(check(folder)), name


def test_a_swapped_key_and_a_forged_signature_are_refused(members, genuine, tmp_path):
    manifest, other = json.loads(members["manifest.json"]), make_key()
    for number, block in enumerate((
            manifest["signature"] | {"public_key": other.public_key, "key_id": other.key_id},
            manifest["signature"] | {"signature": "0" * 128}, manifest["signature"] | {"key_id": "0" * 16},
            signed({k: v for k, v in manifest.items() if k != "signature"} | {"workflow": "other"}, KEY)["signature"],
            signed({k: v for k, v in manifest.items() if k != "signature"}, other)["signature"] | {"public_key": KEY.public_key})):
        folder = write(members | {"manifest.json": to_canonical(manifest | {"signature": block})}, tmp_path / str(number) / genuine.name)
        assert errors(check(folder)) == {"signature"}


def test_a_manifest_that_is_not_canonical_is_refused(members, genuine, tmp_path):
    loose = json.dumps(json.loads(members["manifest.json"]), indent=1).encode()
    assert errors(check(write(members | {"manifest.json": loose}, tmp_path / genuine.name))) == {"manifest"}


def test_a_bundle_under_another_name_is_refused(members, genuine, tmp_path):
    """Replayed: the same signed content in a folder of another name, or with another name in its manifest."""
    assert errors(check(write(members, tmp_path / ("0" * 32)))) == {"bundle-name"}
    manifest = json.loads(members["manifest.json"]) | {"bundle": "0" * 32}
    renamed = write(members | {"manifest.json": to_canonical(manifest)}, tmp_path / "b" / ("0" * 32))
    assert errors(check(renamed)) == {"bundle-name", "signature"}
    again = to_canonical(signed({k: v for k, v in manifest.items() if k != "signature"}, KEY))
    assert errors(check(write(members | {"manifest.json": again}, tmp_path / "c" / ("0" * 32)))) == {"bundle-name"}


def test_a_file_more_or_less_is_refused(members, genuine, tmp_path):
    extra = members | {f"tapes/{'0' * 64}.json.gz": gzip.compress(b"{}")}
    assert errors(check(write(extra, tmp_path / "a" / genuine.name))) == {"files"}
    assert errors(check(forge(extra, tmp_path / "b", KEY))) & {"tape", "record-files"}
    for name in (n for n in members if n != "manifest.json"):
        fewer = {n: d for n, d in members.items() if n != name}
        assert errors(check(write(fewer, tmp_path / name / genuine.name))) == {"files"}, name
        report = check(forge(fewer, tmp_path / name / "forged", KEY))
        assert not report.is_accepted and "rule-failed" not in errors(report), (name, report.findings)


def damage(folder: Path, how: str) -> None:
    victim = folder / "run.json"
    if how == "symlink":
        victim.rename(folder.parent / "elsewhere.json")
        victim.symlink_to(folder.parent / "elsewhere.json")
    elif how == "symlinked folder":
        (folder / "tapes").rename(folder.parent / "tapes")
        (folder / "tapes").symlink_to(folder.parent / "tapes")
    elif how == "hard link":
        os.link(victim, folder.parent / "second-name")
    elif how == "pipe":
        victim.unlink()
        os.mkfifo(victim)
    elif how == "socket":
        victim.unlink()
        here = os.getcwd()
        os.chdir(folder)  # a socket's path is short
        try:
            socket.socket(socket.AF_UNIX).bind("run.json")
        finally:
            os.chdir(here)
    elif how == "hidden file":
        (folder / ".git").write_text("")
    elif how == "other folder":
        (folder / "cells" / "x").mkdir()
    elif how == "large file":
        with open(folder / "run.json", "ab") as f:
            f.truncate(2**25)


@pytest.mark.parametrize(("how", "rule"), [
    ("symlink", "symlink"), ("symlinked folder", "symlink"), ("hard link", "hard-link"), ("pipe", "device"), ("socket", "device"),
    ("hidden file", "layout"), ("other folder", "layout"), ("large file", "file-size")])
def test_what_is_no_plain_file_in_a_folder_is_refused_unread(genuine, tmp_path, how, rule):
    folder = tmp_path / genuine.name
    shutil.copytree(genuine, folder)
    damage(folder, how)
    assert errors(check(folder)) == {rule}


def test_what_cannot_be_read_at_all_is_a_finding(tmp_path):
    assert errors(check(tmp_path)) == {"manifest-missing"} or errors(check(tmp_path)) >= {"manifest-missing"}
    assert not check(tmp_path / "nowhere").is_accepted


def test_a_rule_that_fails_refuses(genuine, monkeypatch):
    """A mistake of ours is never taken for an answer."""
    from vramlab.crowd.rules import asking

    def broken(e):
        raise KeyError("oh")
        yield

    rules = {number: list(group) for number, group in RULES.items()}
    rules[asking.Round.DERIVATION].append(asking.Rule(name="broken", severity=Severity.NOTE, asks="nothing", ask=broken))
    monkeypatch.setattr(asking, "RULES", rules)
    report = check(genuine)
    assert errors(report) == {"rule-failed"} and report.errors[0].where == "broken" and "KeyError" in report.errors[0].message


def test_a_report_says_all_of_it_in_json(members, tmp_path):
    smaller = with_json(members, record_of_method(members, "checkpoint"), setting("measured.peak_bytes", 1))
    body = check(forge(smaller, tmp_path, KEY)).to_json()
    assert json.loads(json.dumps(body)) == body and not body["is_accepted"] and sum(body["counts"].values()) == len(body["findings"]) > 0
    assert {"rule", "severity", "where", "message"} == set(body["findings"][0])


# --- what is told, and not refused ----------------------------------------------------------------------------------------
def warned(report: Report) -> set[str]:
    assert report.is_accepted, report.findings
    return {f.rule for f in report.findings if f.severity is Severity.WARNING}


def test_what_is_odd_but_possible_is_a_warning(members, tmp_path):
    record = record_of_method(members, "checkpoint")
    unknown = with_json(members, record, setting("measured.colour", "blue"))
    assert warned(check(forge(unknown, tmp_path / "a", KEY))) == {"unknown-field"}
    without = {n: d for n, d in with_json(members, record, lambda b: b["files"].pop("telemetry.csv.gz") and None).items()
               if n != packed_file(members, record, "telemetry.csv.gz")}
    assert warned(check(forge(without, tmp_path / "b", KEY))) == {"telemetry-quality"}


def test_cells_that_have_not_run_are_no_fault(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    run = genuine_run(tmp_path / "run")
    name = next(p for p in sorted((run / "cells").iterdir()) if json.loads((p / "record.json").read_text())["config"]["target"] != "cpu")
    shutil.rmtree(name)
    packed = pack_run(run)
    packed.write(tmp_path, check)
    assert check(packed.place(tmp_path)).is_accepted
    assert json.loads(packed.contents["manifest.json"])["is_complete"] is False


def test_two_machines_are_two_names_in_the_manifest(tmp_path):
    bundles = [genuine_bundle(tmp_path, seed=seed, key=KEY) for seed in (1, 2)]
    machines = [json.loads((b / "manifest.json").read_text())["machines"] for b in bundles]
    assert machines == [["0000000000000001"], ["0000000000000002"]] and bundles[0] != bundles[1]
