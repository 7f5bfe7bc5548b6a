"""Expected results beside the workflows: they name the cells that the workflows have, and every number has its kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vramlab.collection import Library, built_in_collection
from vramlab.record import Verdict
from vramlab.workflow import Host, expand, load_workflow

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "workflows").glob("*.expected.json"))
KEYS = ("experiment", "kind", "model", "batch_size", "method", "budget", "target")


def test_every_quick_workflow_has_expected_results():
    assert {f.name for f in FILES} >= {"smoke.expected.json", "resnet50-delta.expected.json"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_expected_cells_are_the_workflows_cells(path):
    body = json.loads(path.read_text())
    plan = expand(load_workflow(f"{body['workflow']}.yaml", Library([built_in_collection()])), Host())
    planned = {tuple(cell.config[key] for key in KEYS) for cell in plan.cells}
    assert {tuple(cell.get(key) for key in KEYS) for cell in body["cells"]} == planned


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_expected_verdicts_are_those_of_the_workflows_claims(path):
    body = json.loads(path.read_text())
    if "claims" not in body:
        return  # written before verdicts were kept
    workflow = load_workflow(f"{body['workflow']}.yaml", Library([built_in_collection()]))
    assert [(c["id"], c["rule"]) for c in body["claims"]] == [(c.id, c.rule) for c in workflow.claims]
    assert all(c["verdict"].split(",")[0] in set(map(str, Verdict)) for c in body["claims"])


def is_cut(cell: dict) -> bool:
    """Is it a step over several micro-batches, of the whole batch?"""
    sizes = cell.get("micro_batches", [])
    return len(sizes) > 1 and sum(sizes) == cell["batch_size"]


def test_only_a_batch_in_pieces_may_change_semantics():
    assert is_cut({"batch_size": 64, "micro_batches": [32, 32]})
    for sizes in ([], [64], [32, 16]):
        assert not is_cut({"batch_size": 64, "method": "modnn", "micro_batches": sizes})


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_measured_numbers_belong_to_cells_that_passed_the_gate(path):
    for cell in json.loads(path.read_text())["cells"]:
        if "measured_peak_bytes" in cell:
            assert cell["outcome"] == "ok" and not cell["target"].startswith("sim:")
            assert cell["truth"] == "exact" or cell["truth"] == "semantics_changed" and is_cut(cell)
        assert cell["outcome"] in ("ok", "plan_infeasible")
