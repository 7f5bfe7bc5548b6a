"""A saved schedule as a method: it comes back as it was, and what is none is refused in one sentence."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import replace

import pytest
from contract import DEVICE
from tapes import chain, skip

from vramlab.collection import Library, built_in_collection
from vramlab.errors import PlanInfeasible, Unsupported, WorkflowError
from vramlab.liveness import lower_bound_bytes
from vramlab.measure import make_plan
from vramlab.planner import UNLIMITED, Budget
from vramlab.schedule import Recompute, Schedule
from vramlab.workflow import Host, expand, load_workflow, single_cell

LIBRARY = Library([built_in_collection()])
METHOD = LIBRARY.method("schedule-file")


def plan(path, tape, device_bytes=UNLIMITED) -> Schedule:
    return METHOD.build(path=str(path)).plan(tape, DEVICE, Budget(device_bytes=device_bytes))


@pytest.fixture
def saved(tmp_path):
    """DELTA's plan for a chain at a low budget, on disk."""
    tape = chain(8)
    budget = Budget(device_bytes=lower_bound_bytes(tape) + 2000)
    schedule = LIBRARY.method("delta").build(action="recompute-only").plan(tape, DEVICE, budget)
    schedule.save(tmp_path / "schedule.json.gz")
    return tmp_path / "schedule.json.gz", schedule


def test_the_same_instructions_come_back_under_the_methods_own_uid(saved):
    path, schedule = saved
    again = plan(path, chain(8))
    assert again.instructions == schedule.instructions and again.count(Recompute) > 0
    assert (again.method, again.tape_digest) == (METHOD.card.uid, chain(8).digest)


def test_a_schedule_of_another_tape_is_refused_by_name(saved):
    with pytest.raises(Unsupported) as refusal:
        plan(saved[0], skip())
    assert chain(8).digest[:12] in str(refusal.value) and skip().digest[:12] in str(refusal.value)


def test_a_budget_below_its_peak_is_refused(saved):
    with pytest.raises(PlanInfeasible):
        plan(saved[0], chain(8), 1000)


WHOLE = json.dumps(Schedule((), "0" * 64).to_json()).encode()


@pytest.mark.parametrize("content, why", [
    (None, "No such file"), (b"", "JSON"), (b"not gzip", "gzip"), (gzip.compress(WHOLE)[:-12], "cut short"), (gzip.compress(b"{"), "JSON"),
    (gzip.compress(b"[1]"), "no schedule"), (gzip.compress(b'{"format": 1}'), "no schedule"),
    (gzip.compress(b'{"format": 99}'), "format 99"),
    (gzip.compress(WHOLE.replace(b"[]", b'[["fly", 3]]', 2)), ""),
], ids=["no file", "empty", "not gzip", "cut short", "no JSON", "a list", "no tape", "another format", "no instruction"])
def test_what_is_no_schedule_is_refused_in_one_sentence(tmp_path, content, why):
    path = tmp_path / "x.json.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Unsupported, match="cannot be read as a schedule") as refusal:
        plan(path, chain(8))
    assert why in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_path_must_be_given(tmp_path):
    with pytest.raises(WorkflowError, match="needs the option 'path'"):
        METHOD.build()
    body = "schema: 1\nname: w\ntitle: t\nmodel: resnet18\nbatch_sizes: [1]\nmethods: [schedule-file]\n"
    (tmp_path / "w.yaml").write_text(body)
    with pytest.raises(WorkflowError, match=r"w.yaml:6:11: method 'schedule-file' needs the option 'path'"):
        load_workflow(str(tmp_path / "w.yaml"), LIBRARY)
    (tmp_path / "w.yaml").write_text(body.replace("[schedule-file]", "[{name: schedule-file, options: {path: x.json.gz}}]"))
    load_workflow(str(tmp_path / "w.yaml"), LIBRARY)


def test_another_content_is_another_cell(tmp_path):
    """A cell is known by what the file holds, not only by its path; a baseline is not."""
    path, workflow = tmp_path / "x.json.gz", tmp_path / "w.yaml"
    methods = f"[eager, {{name: schedule-file, options: {{path: {path}}}}}]"
    workflow.write_text(f"schema: 1\nname: w\ntitle: t\nmodel: resnet18\nbatch_sizes: [1]\nmethods: {methods}\n")

    def cells() -> list:
        return expand(load_workflow(str(workflow), LIBRARY), Host("cpu")).cells

    path.write_bytes(b"one")
    (eager, first), (_, same) = cells(), cells()
    path.write_bytes(b"two")
    _, edited = cells()
    path.unlink()
    _, absent = cells()
    assert first.cell_id == same.cell_id and len({first.cell_id, edited.cell_id, absent.cell_id}) == 3
    assert edited.config["sources"]["files"] == {"path": hashlib.sha256(b"two").hexdigest()}
    assert absent.config["sources"]["files"] == {"path": None}
    assert "files" not in eager.config["sources"]


@pytest.mark.parametrize(("method", "budget", "needs"), [
    ({"name": "modnn"}, "30%", ("variants", "inplace_gradients")), ({"name": "fujitsu-reuse"}, None, ("split_convolutions",)),
    ({"name": "vdnn-baseline", "options": {"algorithms": "library"}}, None, ("inplace_gradients",)), ({"name": "delta"}, "80%", ()),
], ids=["passes and algorithms", "split", "in place", "plain"])
def test_a_saved_schedule_runs_on_the_step_that_it_was_made_for_however_that_was_prepared(tmp_path, method, budget, needs):
    """Passes over the batch, convolution algorithms, split convolutions and gradients in place are part of the step; the figures agree."""
    def facts(methods, folder, **more) -> dict:
        settings = {"model": "resnet8-digits", "batch_sizes": [8], "methods": [methods],
                    "targets": ["sim:v100-32gb"], **more}
        (cell,) = single_cell(LIBRARY, settings, (), Host()).cells
        folder.mkdir()
        spec = {"config": cell.config, "workflow": {"name": "test"}, "collections": [str(r) for r in LIBRARY.roots]}
        return make_plan(spec, str(folder), None)

    first = facts(method, tmp_path / "first", **({"budgets": [budget]} if budget else {}))
    path = tmp_path / "first" / "schedule.json.gz"
    saved = Schedule.load(path)
    assert saved.needs == needs and bool(saved.micro_batches) == (method["name"] == "modnn")
    again = facts({"name": "schedule-file", "options": {"path": str(path)}}, tmp_path / "again")
    assert again["tape_digest"] == first["tape_digest"] == saved.tape_digest and again["predicted"] == first["predicted"]
    if needs:
        replace(saved, needs=()).save(path)  # a file that does not say so is one for another step
        with pytest.raises(Unsupported, match="was made for the tape"):
            facts({"name": "schedule-file", "options": {"path": str(path)}}, tmp_path / "unsaid")
