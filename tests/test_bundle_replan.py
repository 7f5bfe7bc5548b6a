"""Methods plan again on a bundle's tapes: whose schedule is passed off as another's is told, and what says nothing says why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from crowd_made import served
from forging import forge, members_of, record_of_method
from genuine import ROOT, genuine_bundle
from hand_made import MIB, measured_step
from tapes import TapeBuilder

from vramlab.check import check_schedule
from vramlab.cli import main
from vramlab.collection import Library
from vramlab.crowd import archive, check
from vramlab.crowd.replanner import _hangs_on
from vramlab.crowd.rules import RULES, replanned
from vramlab.crowd.signing import make_key
from vramlab.liveness import replay_schedule
from vramlab.record import hash_config
from vramlab.run_folder import baseline_id
from vramlab.tape import Tape

KEY, SECONDS = make_key(), 120.0
EAGER = "a native method plans nothing"


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Path:
    return genuine_bundle(tmp_path_factory.mktemp("honest"), key=KEY, planned_by="checkpoint", seed=1)


@pytest.fixture(scope="module")
def passed_off(tmp_path_factory) -> Path:
    """DELTA's schedules, called checkpoint's."""
    return genuine_bundle(tmp_path_factory.mktemp("passed-off"), key=KEY, planned_by="delta", seed=2)


def said(report) -> dict[str, list[str]]:
    """Rule of the fifth round -> what it found."""
    return {r.name: [f.message for f in report.findings if f.rule == r.name] for r in list(RULES.values())[-1]}


def test_what_its_method_planned_is_planned_again(honest):
    report = check(honest, replan_seconds=SECONDS)
    assert report.is_accepted and said(report) == {"replanned": [], "not-replanned": [EAGER, EAGER]}
    assert report.examined["replanned"] == 2, "a measured and a simulated cell"
    assert not {"replanned", "not-replanned"} & set(check(honest).examined), "only where it is wanted"


def test_the_schedule_of_another_method_is_refused(passed_off, capsys):
    """All that follows from the schedule agrees: only who plans again sees it."""
    assert check(passed_off).is_accepted
    report = check(passed_off, replan_seconds=SECONDS)
    assert {f.rule for f in report.errors} == {"replanned"} and len(report.errors) == 2
    assert all("its method plans another one" in f.message for f in report.errors)
    assert main(["check", "bundle", str(passed_off)]) == 0
    capsys.readouterr()
    assert main(["check", "bundle", str(passed_off), "--replan"]) == 4 and "[replanned]" in capsys.readouterr().out


def of_config(bundle: Path, to: Path, **changes) -> Path:
    """The bundle with another config of checkpoint's measured cell, whose cell_id follows."""
    members = members_of(bundle)
    name = record_of_method(members, "checkpoint")
    old = name.split("/")[1]
    record = json.loads(members[name])
    config = record["config"] | changes
    new = hash_config(config)
    body = record | {"config": config, "cell_id": new}
    body["provenance"] = body["provenance"] | {"method_source_sha256": config["sources"]["method"], "vramlab": config["sources"]["harness"]}
    run = json.loads(members["run.json"])
    run["cells"] = [c | {"cell_id": new, "config": config} if c["cell_id"] == old else c for c in run["cells"]]
    kept = {n.replace(old, new): d for n, d in members.items()}
    kept[f"baselines/{baseline_id(config)}.json"] = members[f"baselines/{baseline_id(record['config'])}.json"]
    claims = members["claims.json"].replace(old.encode(), new.encode())
    return forge(kept | {name.replace(old, new): json.dumps(body).encode(), "run.json": json.dumps(run).encode(), "claims.json": claims},
                 to, KEY)


@pytest.mark.parametrize(("changes", "why"), [
    ({"sources": {"method": "9" * 64, "model": "b" * 64, "harness": "0.1.0"}}, "its method's source is 999999999999"),
    ({"sources": {"method": None, "model": "b" * 64, "harness": "0.0.9"}}, "planned by vramlab 0.0.9"),
    ({"method": "nobodys"}, "this vramlab has no method 'nobodys'"),
])
def test_what_was_not_planned_again_says_why(passed_off, tmp_path, changes, why):
    if "sources" in changes and changes["sources"]["method"] is None:
        changes["sources"]["method"] = Library([ROOT]).method("checkpoint").sha256
    report = check(of_config(passed_off, tmp_path, **changes), replan_seconds=SECONDS)
    assert any(why in message for message in said(report)["not-replanned"]), report.findings
    assert len(said(report)["replanned"]) == 1, "the other cell is held against its method still"


def test_a_cell_that_takes_too_long_and_a_process_that_dies_are_told(honest, monkeypatch):
    monkeypatch.setattr(replanned._Worker, "_line", lambda self, seconds: b"ready" if seconds > SECONDS - 1 else None)
    slow = said(check(honest, replan_seconds=0.5))
    assert slow == {"replanned": [], "not-replanned": ["it took more than 0.5 s"] * 4}
    monkeypatch.setattr(replanned._Worker, "_line", lambda self, seconds: b"ready" if seconds > SECONDS - 1 else b"")
    assert said(check(honest, replan_seconds=0.5))["not-replanned"] == ["the process that planned it died"] * 4
    monkeypatch.setattr(replanned, "MOST_CELLS_LONG", -1)
    assert "the bundle took" in said(check(honest, replan_seconds=0.5))["not-replanned"][0]


def test_methods_that_hang_on_the_machine_are_named():
    """Of a network's sums, a solver's choice, and of who begins with theirs, a difference proves nothing."""
    library = Library([ROOT])
    planners = [method for method in map(library.method, library.method_paths) if method.card.kind == "planner"]
    assert {method.name for method in planners if _hangs_on(method, library)} == {"dqn", "optimal", "hybrid"}


@pytest.mark.slow
def test_a_server_that_plans_again_acknowledges_first_and_flags_what_differs(honest, passed_off, tmp_path):
    with served(tmp_path, examine=check, replan_seconds=SECONDS) as server:
        states = {}
        for account, bundle in (("ada", honest), ("bob", passed_off)):
            key = server.keys[account]
            mine = forge(members_of(bundle), tmp_path / account, key)
            answer = server.post(account, archive.pack(mine))
            assert answer.status_code == 201 and answer.json()["state"] in ("received", "checked", "flagged"), answer.text
            states[account] = mine.name
        server.web.app.state.intake.check_received()
        found = {account: server.get(f"bundles/{name}") for account, name in states.items()}
        assert (found["ada"]["state"], found["bob"]["state"]) == ("checked", "flagged")
        assert {f["rule"] for f in found["bob"]["findings"] if f["severity"] == "error"} == {"replanned"}


# ------------------------------------------------------------------------------------------------- what a schedule must hold
def large_step() -> Tape:
    """Maps of 64 MiB, two of them live at a time, and 16 MiB inside each op."""
    builder = TapeBuilder()
    x = builder.state("x", 64 * MIB)
    for _ in range(3):
        y = builder.temporary(64 * MIB)
        builder.call("aten.relu.default", [x], [y], workspace_bytes=16 * MIB)
        x = y
    loss = builder.temporary(4, at_end=True)
    builder.call("aten.mean.default", [x], [loss])
    return builder.build(loss)


def peak_faults(target: str, peak_bytes: int, method: str = "delta") -> list[str]:
    tape = large_step()
    schedule = replay_schedule(tape)
    record = measured_step(method, 1, config={"target": target}, files={"tape.json.gz": "0" * 64, "schedule.json.gz": "1" * 64})
    record = replace(record, measured={**record.measured, "peak_bytes": peak_bytes, "library_bytes": 0}, budget_bytes=None)
    contents = SimpleNamespace(records={"r0": record}, tape=lambda sha256: tape, schedule=lambda cell_id: schedule)
    (asked,) = [r for group in RULES.values() for r in group if r.name == "schedule-peak"]
    return [where for where, _ in asked.ask(SimpleNamespace(contents=contents, count=lambda n=1: None, once=lambda key, make: make()))]


def test_a_peak_below_what_the_schedule_holds_is_refused():
    """On a CPU all that is simulated; on a GPU what lies between the ops, since the inside of an op may be less than it was alone."""
    between = 3 * 64 * MIB  # the input stays, and an op has what it reads and what it makes
    whole, told = between + 16 * MIB, ["r0:measured.peak_bytes"]
    assert check_schedule(large_step(), replay_schedule(large_step())).peak_bytes == whole
    tolerance = int(0.005 * whole)
    for peak in (whole + 9 * MIB, whole, whole - tolerance):
        assert peak_faults("cpu", peak) == peak_faults("cuda:0", peak) == []
    assert peak_faults("cpu", whole - tolerance - 1) == peak_faults("cpu", int(0.9 * whole)) == told
    assert peak_faults("cuda:0", 2 * 64 * MIB) == told
    assert peak_faults("cpu", 0, method="eager") == [], "plain PyTorch runs no schedule"
