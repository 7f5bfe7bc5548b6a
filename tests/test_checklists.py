"""Checklist answers against hand-made evidence: answered where it is there, to the run's disadvantage where it says so, and
open where it is missing."""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hand_made import CLAIMS, MIB, full_grid, make_record, measured_step, simulated_step, write_run, write_telemetry

from vramlab.record import Outcome
from vramlab.report.checklists import answer_all, load_checklists
from vramlab.report.claims import judge, load_claims
from vramlab.report.evidence import Evidence
from vramlab.report.facts import DIGITS_TEST_SHARE
from vramlab.report.figures import load_telemetry
from vramlab.report.rules import DRAFTS, RULES
from vramlab.runs import load_run

ROOT = Path(__file__).parent.parent
CHECKLISTS = load_checklists(sorted((ROOT / "reports" / "checklists").glob("*.yaml")))
NEGATIVE = {"No", "present", "not met", "evidence missing", "partly"}
NEEDS_MORE_THAN_A_RUN = {
    ("acm-badges", "BV-1"), ("acm-badges", "BV-2"), ("acm-badges", "BV-3"), ("ctuning-ae", "AE-16"),
    ("pineau-v2", "C2"), ("pineau-v2", "C3"),
    ("fair", "F4"), ("fair", "A1"), ("fair", "A1.1"), ("fair", "A1.2"), ("fair", "A2"),
}


def evidence_of(folder: Path, root: Path = ROOT) -> Evidence:
    run = load_run(folder)
    claims = judge(run.workflow["claims"], run, load_claims([ROOT / "reports" / "claims.yaml"]))
    telemetry, missing = load_telemetry(run)
    return Evidence(run=run, claims=claims, telemetry=telemetry, telemetry_missing=missing, root=root)


def answers(evidence: Evidence) -> dict[tuple[str, str], object]:
    return {(found.checklist.id, a.item.id): a for found in answer_all(CHECKLISTS, evidence) for a in found.answers}


def with_files(folder: Path) -> Path:
    """Records that state the hashes of their files, as a cell writes them."""
    run = load_run(folder)
    for record in run.records:
        cell = folder / "cells" / record.cell_id
        write_telemetry(cell / "telemetry.csv.gz", [(0.1 * i, (500 + i) * MIB) for i in range(20)])
        files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in cell.iterdir() if p.name != "record.json"}
        replace(record, files=files).save(cell / "record.json")
    return folder


@pytest.fixture
def whole_root(tmp_path) -> Path:
    """A checkout with the files that items ask for."""
    root = tmp_path / "checkout"
    (root / "workflows").mkdir(parents=True)
    for name, text in {"run": "", "requirements.lock": "", "workflows/smoke.yaml": "", "LICENSE": "Apache License\nVersion 2.0, ...",
                       "artifact_appendix.md": "./run workflow hand-made.yaml"}.items():
        (root / name).write_text(text)
    return root


def test_the_data_holds_every_item_of_six_checklists():
    assert {c.id: len(c.items) for c in CHECKLISTS} == {"ctuning-ae": 36, "acm-badges": 12, "neurips": 16, "pineau-v2": 21, "sigplan": 22,
                                                        "fair": 15}
    assert all(c.url.startswith("https://") for c in CHECKLISTS)


def test_every_auto_item_has_a_rule_and_no_rule_is_left_over():
    auto = {(c.id, item.id) for c in CHECKLISTS for item in c.items if item.fill == "auto"}
    prefill = {(c.id, item.id) for c in CHECKLISTS for item in c.items if item.fill == "prefill"}
    assert set(RULES) == auto and set(DRAFTS) <= prefill


def test_a_whole_run_answers_every_auto_item_that_a_run_can_answer(tmp_path, whole_root):
    found = answers(evidence_of(with_files(write_run(tmp_path / "run", full_grid(), claims=CLAIMS)), whole_root))
    still_open = {key for key, a in found.items() if a.item.fill == "auto" and a.basis == "open"}
    assert still_open == NEEDS_MORE_THAN_A_RUN
    answered = [a for a in found.values() if a.basis == "auto"]
    assert all(a.evidence and a.justification for a in answered)
    assert all(a.justification for a in found.values())


def test_evidence_links_lead_somewhere(tmp_path, whole_root):
    folder = with_files(write_run(tmp_path / "run", full_grid(), claims=CLAIMS))
    template = (ROOT / "reports" / "templates" / "report.html.j2").read_text()
    parts = set(re.findall(r'id="([a-z]+)"', template))
    for answer in answers(evidence_of(folder, whole_root)).values():
        for link in answer.evidence:
            assert link[1:] in parts if link.startswith("#") else (folder / link).is_file(), (answer.item.id, link)


@pytest.mark.parametrize("records", [[], [make_record(environment={}, provenance={}, workflow={}, config={"training": {}, "sources": {}})]])
def test_nothing_is_answered_yes_on_missing_evidence(tmp_path, records):
    """An empty run answers nothing; one crashed record without environment and times answers next to nothing."""
    bare = [replace(r, outcome=Outcome.CRASHED) for r in records]
    folder = write_run(tmp_path / "run", bare, workflow={"name": "bare", "claims": []}, environment={})
    found = {key: a for key, a in answers(evidence_of(folder, tmp_path)).items() if a.item.fill == "auto" and a.basis != "open"}
    if not records:
        assert found == {}
    told = {key for key, a in found.items() if a.value not in NEGATIVE}
    assert told <= {("ctuning-ae", item) for item in ("AE-5", "AE-13", "AE-15", "AE-S9", "AE-S14")} | {
        ("pineau-v2", "R2"), ("sigplan", "S3.3"), ("fair", "R1")}


def one(tmp_path, records, key, **plan):
    return answers(evidence_of(write_run(tmp_path / "run", records, **{"claims": CLAIMS} | plan)))[key]


def test_files_that_are_packed_are_told_beside_no_binary(tmp_path):
    folder, key = write_run(tmp_path / "run", [measured_step("eager", 1000)]), ("ctuning-ae", "AE-5")
    for path in folder.rglob("*.gz"):
        path.unlink()
    told = answers(evidence_of(folder))[key]
    assert told.value == "not applicable" and "it is JSON, CSV and text; vramlab is" in told.justification
    for name in ("tape.json.gz", "schedule.json.gz", "telemetry.csv.gz"):
        (folder / "cells" / name).write_bytes(b"")
    assert "it is JSON, CSV and text, 3 files of it packed with gzip;" in answers(evidence_of(folder))[key].justification
    (folder / "kernel.so").write_bytes(b"")
    told = answers(evidence_of(folder))[key]
    assert (told.value, told.justification) == ("filled", "kernel.so")


def spoil(record, **measured):
    return replace(record, measured={**record.measured, **measured})


EAGER, DELTA = measured_step("eager", 1000), measured_step("delta", 600, budget="60%")


@pytest.mark.parametrize(("key", "good", "records", "bad"), [
    (("neurips", "N7"), "Yes", [EAGER, spoil(DELTA, drift=None)], "No"),
    (("neurips", "N7"), "Yes", [EAGER, spoil(DELTA, ratio={**DELTA.measured["ratio"], "n": 5})], "No"),
    (("pineau-v2", "R4"), "Yes", [EAGER, spoil(DELTA, ratio=None)], "No"),
    (("sigplan", "S2.1"), "avoided", [replace(DELTA, eager_peak_bytes=None)], "present"),
    (("sigplan", "S4.1"), "avoided", [spoil(DELTA, ratio={**DELTA.measured["ratio"], "n": 3})], "present"),
    (("sigplan", "S4.3"), "avoided", [spoil(DELTA, step_seconds=[])], "present"),
    (("sigplan", "S5.2"), "avoided", [spoil(DELTA, rss_peak_bytes=None)], "present"),
    (("sigplan", "S2.2"), "avoided", [EAGER, measured_step("delta", 600, budget="60%", config={"measure": {"steps": 1}})], "present"),
    (("fair", "R1"), "met", [spoil(DELTA, reserved_peak_bytes=None)], "partly"),
    (("acm-badges", "BF-4"), "evidence present", [EAGER, replace(DELTA, outcome=Outcome.CRASHED)], "evidence missing"),
])
def test_evidence_against_is_told(tmp_path, key, good, records, bad):
    assert one(tmp_path / "good", [EAGER, DELTA], key).value == good
    answer = one(tmp_path / "bad", records, key)
    assert (answer.value, answer.basis) == (bad, "auto") and answer.evidence


def test_a_checkout_that_differs_from_its_commit_cannot_be_repeated(tmp_path):
    dirty = {**DELTA.environment, "git": {"commit": "f" * 40, "dirty": True, "changes_sha256": "0" * 64}}
    for key, good, bad in ((("neurips", "N4"), "Yes", "No"), (("sigplan", "S6.1"), "avoided", "present")):
        assert one(tmp_path / key[0] / "clean", [EAGER, DELTA], key).value == good
        answer = one(tmp_path / key[0] / "dirty", [EAGER, replace(DELTA, environment=dirty)], key)
        assert answer.value == bad and "differed from its commit" in answer.justification


def test_a_record_that_the_runner_wrote_stands_on_the_runs_environment(tmp_path):
    crashed = replace(DELTA, outcome=Outcome.CRASHED, environment={})
    assert one(tmp_path / "a", [EAGER, crashed], ("neurips", "N4")).value == "Yes"
    assert one(tmp_path / "b", [EAGER, crashed], ("neurips", "N4"), environment={}).basis == "open"


def test_another_machine_within_a_comparison_is_unfair(tmp_path):
    moved = replace(DELTA, environment={**DELTA.environment, "cpu": {**DELTA.environment["cpu"], "model": "Another"}})
    answer = one(tmp_path, [EAGER, moved], ("sigplan", "S2.2"))
    assert (answer.value, answer.justification) == ("present", "differ within a comparison: machine: 2 different ones")


def test_the_appendix_answers_for_a_workflow_whose_claims_it_lists(tmp_path, whole_root):
    for name, claims, basis in (("with", CLAIMS, "auto"), ("without", [], "open")):
        found = answers(evidence_of(with_files(write_run(tmp_path / name, full_grid(), claims=claims)), whole_root))
        assert found["pineau-v2", "C5"].basis == basis
        assert ("artifact_appendix.md" in found["ctuning-ae", "AE-13"].justification) == (basis == "auto")


def test_a_parameter_at_one_value_is_a_fault(tmp_path):
    swept = [measured_step("delta", 600, budget=b, config={"batch_size": n}) for b in ("60%", "80%") for n in (8, 16)]
    assert one(tmp_path / "a", swept, ("sigplan", "S6.3")).value == "avoided"
    answer = one(tmp_path / "b", [EAGER, DELTA], ("sigplan", "S6.3"))
    assert answer.value == "present" and "batch size" in answer.justification


def test_a_file_that_changed_after_its_record_is_evidence_missing(tmp_path):
    folder = with_files(write_run(tmp_path / "run", [EAGER, DELTA], claims=CLAIMS))
    assert answers(evidence_of(folder))[("acm-badges", "BF-3")].value == "evidence present"
    (folder / "cells" / DELTA.cell_id / "schedule.json.gz").write_bytes(b"changed")
    found = answers(evidence_of(folder))
    assert found[("acm-badges", "BF-3")].value == "evidence missing" and found[("fair", "F3")].value == "not met"
    assert DELTA.cell_id in found[("acm-badges", "BF-3")].justification


def test_a_simulated_run_answers_nothing_about_timing(tmp_path):
    found = answers(evidence_of(write_run(tmp_path / "run", [simulated_step("delta", 600, budget="60%")], claims=CLAIMS)))
    for key in (("neurips", "N7"), ("sigplan", "S4.1"), ("sigplan", "S4.3"), ("sigplan", "S5.2"), ("pineau-v2", "R4")):
        assert found[key].basis == "open", key


def test_a_person_and_a_draft_are_never_counted_as_answered(tmp_path):
    for found in answer_all(CHECKLISTS, evidence_of(write_run(tmp_path / "run", full_grid(), claims=CLAIMS))):
        for answer in found.answers:
            assert (answer.basis == "auto") <= (answer.item.fill == "auto")
            assert answer.item.fill != "person" or (answer.basis, answer.value) == ("open", "unanswered")
        assert sum(found.counts.values()) == len(found.answers)


def test_the_users_own_data_is_left_to_its_author(tmp_path):
    answer = one(tmp_path, [measured_step("delta", 1, config={"data": "imagefolder:/data/pets"})], ("pineau-v2", "D1"))
    assert answer.basis == "open" and "author" in answer.justification


def test_what_is_said_of_digits_is_what_the_loader_does():
    tree = ast.parse((ROOT / "vramlab" / "data.py").read_text())
    plain = [n for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)]
    constants = {target.id: node.value.value for node in plain for target in node.targets}
    assert constants["TEST_SHARE"] == DIGITS_TEST_SHARE
    from sklearn.datasets import load_digits

    assert load_digits().images.shape == (1797, 8, 8)


def test_a_checklist_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("id: x\ntitle: t\nversion: 1\nurl: u\nanswers: [a]\nitems:\n- {id: A, title: t, ask: q, fill: magic}\n")
    with pytest.raises(ValueError, match="x.yaml.*fill must be one of"):
        load_checklists([path])


def test_every_size_of_a_model_is_named(tmp_path):
    sizes = [measured_step("delta", 1, config={"model_options": {"image_size": n}}) for n in (64, 224)]
    answer = one(tmp_path, sizes, ("ctuning-ae", "AE-6"))
    assert "resnet50 (image_size=64)" in answer.justification and "resnet50 (image_size=224)" in answer.justification


def test_without_a_budget_nothing_is_missing_for_not_being_over_it(tmp_path):
    assert one(tmp_path / "a", [spoil(EAGER, over_budget_bytes=None)], ("fair", "R1")).value == "met"
    assert one(tmp_path / "b", [spoil(DELTA, over_budget_bytes=None)], ("fair", "R1")).value == "partly"
