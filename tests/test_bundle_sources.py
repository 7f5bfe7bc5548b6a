"""What a checker knows of methods by the hash of their source, and of cells by each other: forgeries that no single record shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forging import Members, forge, members_of, record_of_method, with_json
from genuine import genuine_bundle

from vramlab.collection import Library, built_in_collection
from vramlab.crowd import check
from vramlab.crowd.rules.sources import known_methods
from vramlab.crowd.signing import make_key
from vramlab.record import hash_config
from vramlab.statistics import Interval, distinguishable, paired_ratio

KEY = make_key()
PREDICTED = ("recomputes", "offloads", "prefetches", "prediction_error_bytes", "is_peak_accounted_for")
OF_A_TAPE = ("tape_digest", "schedule_digest", "lower_bound_bytes", "ops", "bytes_by_role", "basic_layers")


@pytest.fixture(scope="module")
def members(tmp_path_factory) -> Members:
    """Two budgets of checkpoint, whose source is that of this vramlab; no claims, which a changed cell would change too."""
    bundle = genuine_bundle(tmp_path_factory.mktemp("honest"), key=KEY, planned_by="checkpoint", budgets=("80%", "90%"), seed=4)
    return with_json(members_of(bundle), "run.json", lambda body: body["workflow"].update(claims=[])) | {"claims.json": b"[]"}


def found(members: Members, folder: Path) -> set[tuple[str, str]]:
    """(rule, severity) of what the check finds in a bundle that is signed anew."""
    return {(f.rule, str(f.severity)) for f in check(forge(members, folder, KEY)).findings if f.rule != "not-derived"}


def measured_cell(members: Members, budget: str = "80%") -> str:
    """The record of checkpoint at a budget, on the CPU."""
    for name, data in members.items():
        if name.endswith("record.json"):
            config = json.loads(data)["config"]
            if (config["method"], config["target"], config["budget"]) == ("checkpoint", "cpu", budget):
                return name
    raise AssertionError(budget)


def configured(members: Members, change: Callable[[dict], Any]) -> Members:
    """Every trace of a cell's config changed, as an engine would have written it."""
    name = measured_cell(members)
    record = json.loads(members[name])
    old = record["cell_id"]
    change(record["config"])
    new = hash_config(record["config"])
    record |= {"cell_id": new}
    record["provenance"]["method_source_sha256"] = record["config"]["sources"]["method"]
    moved = {path.replace(f"cells/{old}/", f"cells/{new}/"): data for path, data in members.items()}
    moved[f"cells/{new}/record.json"] = json.dumps(record).encode()

    def plan(body: dict) -> None:
        cell = next(cell for cell in body["cells"] if cell["cell_id"] == old)
        cell |= {"cell_id": new, "config": record["config"]}
    return with_json(moved, "run.json", plan)


@pytest.mark.parametrize(("change", "rules"), [
    (lambda c: None, set()),
    (lambda c: c["options"].update(magic=True), {("known-source", "error")}),  # with it no method plans again
    (lambda c: c["options"].update(segments="many"), {("known-source", "error")}),
    (lambda c: c.update(method="dtr"), {("known-source", "error")}),
    (lambda c: c.update(method="a-copy-of-mine"), set()),
    (lambda c: c.update(method="dtr", sources=c["sources"] | {"method": "d" * 64}), set()),  # a version that is not here
], ids=["nothing", "an option", "a value", "a name", "a user's copy", "another version"])
def test_a_known_source_has_its_name_and_takes_its_options(members, tmp_path, change, rules):
    assert found(configured(members, change), tmp_path) == rules


def test_a_known_model_has_its_name(members, tmp_path):
    source = Library([built_in_collection()]).model("resnet8-digits").sha256
    forged = found(configured(members, lambda c: c["sources"].update(model=source)), tmp_path)
    assert forged == {("known-source", "error"), ("baseline", "error")}, "eager's baseline is of another source"


def test_a_planner_without_its_schedule_holds_nothing_and_is_refused(members, tmp_path):
    """Everything that a schedule binds is left out, and the peak is whatever one likes."""
    name = measured_cell(members)

    def bare(record: dict) -> None:
        record["predicted"] = {}
        record["files"] = {key: value for key, value in record["files"].items() if key == "telemetry.csv.gz"}
        for block, keys in (("provenance", OF_A_TAPE), ("measured", PREDICTED), ("truth_detail", PREDICTED)):
            record[block] = {key: value for key, value in record[block].items() if key not in keys}
        record["measured"] |= {"peak_bytes": 300, "cold_peak_bytes": 300}

    members = {path: data for path, data in members.items() if path != name.replace("record.json", "schedule.json.gz")}
    assert found(with_json(members, name, bare), tmp_path) == {("planned", "error")}


def test_every_method_but_the_native_ones_plans():
    natives = {method.name for method in known_methods().values() if method.card.kind == "native"}
    assert "checkpoint" not in natives and {"eager", "torch-checkpoint"} <= natives


@pytest.mark.parametrize("order", [list, sorted])
def test_step_times_of_another_cell_are_refused_in_any_order(members, tmp_path, order):
    theirs = json.loads(members[measured_cell(members, "90%")])["measured"]

    def copy(record: dict) -> None:
        m = record["measured"]
        m |= {key: order(theirs[key]) for key in ("step_seconds", "baseline_step_seconds")}
        ratio = paired_ratio(m["step_seconds"], m["baseline_step_seconds"])
        m |= {"ratio": ratio.to_json(), "is_distinguishable": distinguishable(ratio, Interval(**m["drift"]))}
    assert found(with_json(members, measured_cell(members), copy), tmp_path) == {("copied-steps", "error")}


def faster(record: dict) -> None:
    m = record["measured"]
    m["step_seconds"] = [seconds / 4 for seconds in m["step_seconds"]]
    ratio = paired_ratio(m["step_seconds"], m["baseline_step_seconds"])
    m |= {"ratio": ratio.to_json(), "is_distinguishable": distinguishable(ratio, Interval(**m["drift"]))}


def of_a_board(record: dict) -> None:
    record["measured"]["nvml_peak_bytes"] = 5
    del record["missing"]["measured.nvml_peak_bytes"]


@pytest.mark.parametrize(("change", "rules"), [
    (lambda r: r["measured"].update(plan_seconds=1e4), {("time-fits", "error")}),
    (lambda r: r["measured"].update(capture_seconds=1e4), {("time-fits", "error")}),
    (of_a_board, {("memory-order", "error")}),
    (faster, {("faster-than-eager", "warning")}),
], ids=["planning", "capture", "a board", "faster than eager"])
def test_what_no_cell_can_have_measured_is_told(members, tmp_path, change, rules):
    assert found(with_json(members, measured_cell(members), change), tmp_path) == rules


def test_an_automatic_budget_is_within_the_machine(members, tmp_path):
    automatic = configured(members, lambda c: c.update(budget="auto"))
    assert found(automatic, tmp_path) == set()
    name = record_of_method({k: v for k, v in automatic.items() if b'"budget": "auto"' in v and k.endswith("record.json")}, "checkpoint")
    assert found(with_json(automatic, name, lambda r: r.update(budget_bytes=2**50)), tmp_path) == {("memory-order", "error")}


def test_a_run_does_not_start_in_the_future(members, tmp_path):
    assert found(with_json(members, "run.json", lambda r: r.update(started="2126-01-01T00:00:00Z")), tmp_path) == {("clock", "error")}
