"""The runner with a stand-in for the cell: real processes that crash, hang, are killed, are started twice."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hand_made import measured_step, write_run
from shelves import small_workflow, write_fake_cell, write_method, write_model, write_workflow
from soak import Soak

from vramlab import child
from vramlab.child import Ending, count_memory_kills, explain, last_line, run_child
from vramlab.claiming import MARKER, end_processes, holder_of, locked, try_claim
from vramlab.collection import Library
from vramlab.errors import EnvironmentUnable, WorkflowError
from vramlab.record import Outcome, RunRecord, write_atomically
from vramlab.run_folder import RunFolder, find_runs, is_done, now, resolve_run
from vramlab.runner import Runner
from vramlab.workflow import Host, expand, load_workflow

HERE = Path(__file__).resolve().parent
METHODS = ("eager", "good", "segfault", "killed", "raises", "silent", "half", "foreign", "hangs", "infeasible", "wrong", "slow", "flaky",
           "fills")


class Recorder:
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple] = []

    def begin(self, plan, run, done):
        self.told.append(("begin", done))

    def cell_begins(self, cell, number):
        self.told.append(("begins", number, cell.config["method"]))

    def tick(self, cell, seconds, status):
        self.told.append(("tick", cell.config["method"], status))

    def cell_ends(self, cell, record, seconds):
        self.told.append(("ends", cell.config["method"], str(record.outcome)))

    def waits(self, why):
        self.told.append(("waits", why))

    def end(self):
        self.told.append(("end",))


class Lab:
    """A collection, the stand-in cell and a results folder."""

    def __init__(self, root: Path, monkeypatch) -> None:
        self.root, self.results, self.starts_file = root, root / "results", root / "starts"
        for name in METHODS:
            write_method(root, name)
        write_model(root)
        write_fake_cell(root)
        self.starts_file.touch()
        monkeypatch.setenv("STARTS", str(self.starts_file))

    def write(self, methods: str, **more) -> Path:
        return write_workflow(self.root, small_workflow(methods, **more))

    def plan(self, methods: str, **more):
        return expand(load_workflow(str(self.write(methods, **more)), Library([self.root])), Host("cpu"))

    def runner(self, plan, display=None) -> Runner:
        return Runner(plan, self.results, display or Recorder(), command=(sys.executable, str(self.root / "fake_cell.py")),
                      machine_lock=self.root / "machine.lock")

    def run(self, methods: str, **more):
        return self.runner(self.plan(methods, **more)).run()

    def start(self, methods: str, **more) -> subprocess.Popen:
        """The same in a process of its own."""
        command = [sys.executable, str(HERE / "run_small.py"), str(self.root), str(self.write(methods, **more)), str(self.results)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)

    def starts(self) -> list[str]:
        """The method of every cell process that was ever started."""
        return [line.split()[0] for line in self.starts_file.read_text().splitlines()]

    def pids(self) -> list[int]:
        return [int(line.split()[2]) for line in self.starts_file.read_text().splitlines()]

    def only_run(self) -> RunFolder:
        (run,) = find_runs(self.results)
        return run

    def outcomes(self) -> dict[str, str]:
        return {record.config["method"]: str(record.outcome) for record in self.only_run().records().values()}


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


def wait_for(condition, seconds: float = 20.0):
    """The first true value of `condition`, polled."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# ------------------------------------------------------------------------------------------------ one run


def test_every_cell_runs_once_eager_first_and_leaves_its_files(lab):
    display = Recorder()
    result = lab.runner(lab.plan("[good, eager]"), display).run()
    assert result.exit_code == 0 and not result.is_interrupted and lab.starts() == ["eager", "good"]
    assert [event for event in display.told if event[0] != "tick"] == [
        ("begin", 0), ("begins", 1, "eager"), ("ends", "eager", "ok"), ("begins", 2, "good"), ("ends", "good", "ok"), ("end",)]
    for cell_id, record in result.records.items():
        folder = result.run.cell_folder(cell_id)
        assert sorted(path.name for path in folder.iterdir()) == ["record.json", "spec.json", "stdout.log"]
        spec = json.loads((folder / "spec.json").read_text())
        assert spec["config"] == record.config and spec["collections"] == [str(lab.root)] and spec["run_dir"] == str(result.run.folder)
        assert spec["workflow"]["name"] == "small" and (folder / "stdout.log").read_text() == f"starting {record.config['method']}\n"


def test_run_json_is_the_resolved_workflow(lab):
    plan = lab.plan("[eager]", claims=[{"id": "c", "rule": "training_equal"}], description="why")
    body = json.loads((lab.runner(plan).run().run.folder / "run.json").read_text())
    assert body["schema"] == 1 and body["workflow"]["title"] == "A small run" and body["workflow"]["description"] == "why"
    assert body["workflow"]["claims"][0]["experiment"] == "main" and body["cells"][0]["config"] == plan.cells[0].config
    assert body["cells"][0]["cell_id"] == plan.cells[0].cell_id and body["environment"]["cpu"]["usable_cores"] >= 1


def test_the_same_command_keeps_what_is_done(lab):
    first = lab.run("[eager, good, infeasible, wrong]")
    started = first.run.plan["started"]
    times = {path: path.stat().st_mtime_ns for path in first.run.folder.glob("cells/*/record.json")}
    second = lab.run("[eager, good, infeasible, wrong]")
    assert lab.starts() == ["eager", "good", "infeasible", "wrong"] and second.run.folder == first.run.folder
    assert {path: path.stat().st_mtime_ns for path in times} == times and second.run.plan["started"] == started


def test_crashes_and_timeouts_run_again(lab):
    assert lab.run("[flaky, good]").exit_code == 1 and lab.outcomes() == {"flaky": "crashed", "good": "ok"}
    assert lab.run("[flaky, good]").exit_code == 0 and lab.outcomes() == {"flaky": "ok", "good": "ok"}
    assert lab.starts() == ["flaky", "good", "flaky"]


def test_a_new_cell_is_a_new_run(lab):
    lab.run("[eager]")
    lab.run("[eager, good]")
    assert len(find_runs(lab.results)) == 2


@pytest.mark.parametrize(("method", "outcome", "reason", "message"), [
    ("segfault", Outcome.CRASHED, "SIGSEGV", "died of SIGSEGV; its last line: starting segfault"),
    ("killed", Outcome.CRASHED, "SIGKILL", "died of SIGKILL"),
    ("raises", Outcome.CRASHED, "exit", "exit code 1 and left no record; its last line: RuntimeError: no luck today"),
    ("silent", Outcome.CRASHED, "exit", "exit code 0 and left no record"),
    ("half", Outcome.CRASHED, "exit", "left a record that is not whole"),
    ("foreign", Outcome.CRASHED, "exit", "left a record that is not whole"),
    ("hangs", Outcome.TIMEOUT, "wall_clock", "ended after 2 s (measure.timeout_seconds)"),
])
def test_a_death_is_a_record_and_the_run_goes_on(lab, method, outcome, reason, message):
    result = lab.run(f"[{method}, good]", measure={"timeout_seconds": 2})
    dead, alive = result.records.values()
    assert (dead.outcome, dead.reason) == (outcome, reason) and message in dead.message
    assert dead.provenance["written_by"] == "runner" and dead.missing["measured"] == dead.message
    assert alive.outcome is Outcome.OK and result.exit_code == 1
    assert RunRecord.load(result.run.cell_folder(dead.cell_id) / "record.json") == dead


def test_the_kernels_memory_killer_is_known_by_its_count(tmp_path, monkeypatch):
    log = tmp_path / "stdout.log"
    assert explain(Ending(-9, 1.0, memory_kills=1), log, 60)[:2] == (Outcome.OOM, "host_memory")
    assert explain(Ending(-9, 1.0, memory_kills=None), log, 60)[:2] == (Outcome.OOM, "host_memory")
    assert explain(Ending(-9, 1.0, memory_kills=0), log, 60)[:2] == (Outcome.CRASHED, "SIGKILL")
    assert explain(Ending(-11, 1.0, memory_kills=1), log, 60)[:2] == (Outcome.CRASHED, "SIGSEGV")
    counts = iter([3, 4])
    monkeypatch.setattr(child, "count_memory_kills", lambda: next(counts))
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    ending = run_child(command, log=log, token="t", timeout_seconds=20, on_tick=lambda seconds: None)
    assert (ending.returncode, ending.memory_kills) == (-9, 1)


@pytest.mark.skipif(not Path("/proc/vmstat").exists(), reason="no /proc/vmstat")
def test_the_count_is_the_kernels():
    counted = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    assert count_memory_kills() == (int(counted[1]) if counted else None)


def test_a_timeout_ends_grandchildren_that_left_the_group(lab):
    result = lab.run("[hangs]", measure={"timeout_seconds": 3})
    (record,) = result.records.values()
    log = (result.run.cell_folder(record.cell_id) / "stdout.log").read_text()
    grandchild = int(re.search(r"grandchild (\d+)", log)[1])
    assert not is_running(grandchild) and not any(is_running(pid) for pid in lab.pids())
    assert 3 <= record.provenance["seconds"] < 10


def test_the_last_line_of_a_running_cell_is_shown(lab):
    display = Recorder()
    lab.runner(lab.plan("[slow]"), display).run()
    assert ("tick", "slow", "starting slow") in display.told


@pytest.mark.parametrize(("methods", "more", "expected"), [
    ("[good, infeasible]", {}, 0), ("[wrong]", {}, 1), ("[segfault]", {}, 1),
    ("[wrong]", {"expected": {"outcomes": ["wrong"]}}, 0), ("[good]", {"expected": {"outcomes": ["wrong"]}}, 1),
])
def test_exit_codes(lab, methods, more, expected):
    assert lab.run(methods, **more).exit_code == expected


def test_an_oom_is_expected_only_where_the_batch_is_searched(lab):
    plan = lab.plan("[eager]")
    assert plan.is_expected("max_batch", Outcome.OOM) and not plan.is_expected("step", Outcome.OOM)


def test_nothing_to_run_here_is_the_environments_fault(lab):
    with pytest.raises(EnvironmentUnable, match="nothing of workflow 'small' can run here: this machine has no NVIDIA GPU"):
        lab.run("[good]", targets=["cuda:0"])
    assert not lab.results.exists()


def test_a_full_disk_is_the_environments_fault_and_the_same_command_goes_on(lab, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("vramlab.runner.write_atomically", full)
        with pytest.raises(EnvironmentUnable, match="cannot be written: No space left on device; once it can, the same command goes on"):
            lab.run("[good]")
    assert not list(lab.results.glob("*/*/cells/*/claim.json")) and lab.run("[good]").exit_code == 0


def test_a_cell_that_fills_the_disk_has_a_record_and_the_run_goes_on(lab, monkeypatch):
    """The disk: full while the cell's own file lies on it."""
    def write(path, text):
        if (path.parent / "big").exists():
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_atomically(path, text)

    monkeypatch.setattr("vramlab.record.write_atomically", write)
    result = lab.run("[fills, good]")
    full, alive = result.records.values()
    assert (full.outcome, full.reason) == (Outcome.CRASHED, "disk_full") and "No space left on device" in full.message
    assert alive.outcome is Outcome.OK and result.exit_code == 1
    folder = result.run.cell_folder(full.cell_id)
    assert sorted(path.name for path in folder.iterdir()) == ["record.json", "spec.json", "stdout.log"]
    assert (folder / "stdout.log").stat().st_size == 2**16 and "No space left" in last_line(folder / "stdout.log")


def test_a_file_that_cannot_be_written_leaves_no_part_of_it(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "record.json", "text")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ files cut short


@pytest.mark.parametrize("rest", ["", "{", '{"schema_version": 1}', "[]", "null", '{"schema_version": 99}'])
def test_a_record_that_is_not_whole_is_run_again(lab, rest):
    first = lab.run("[good, eager]")
    cell_id = next(cell_id for cell_id, record in first.records.items() if record.config["method"] == "good")
    (first.run.cell_folder(cell_id) / "record.json").write_text(rest)
    assert lab.run("[good, eager]").exit_code == 0 and lab.starts() == ["eager", "good", "good"]


def test_a_run_json_that_is_not_whole_is_written_anew(lab):
    first = lab.run("[good]")
    whole = json.loads((first.run.folder / "run.json").read_text())
    (first.run.folder / "run.json").write_text('{"schema": 1, "work')
    again = lab.run("[good]")
    assert json.loads((again.run.folder / "run.json").read_text())["cells"] == whole["cells"] and lab.starts() == ["good"]


@pytest.mark.parametrize(("text", "cells", "started"), [
    (None, 2, "2026-01-01T00:00:00Z"),  # whole: its own first start
    ("{", 2, "2026-01-02T03:04:05Z"), ('{"schema": 99}', 2, "2026-01-02T03:04:05Z"), ("", 1, "2026-01-02T03:09:00Z"), ("{", 0, None),
])
def test_a_run_json_that_is_written_anew_begins_before_the_cells_that_are_kept(tmp_path, text, cells, started):
    """The checker of bundles refuses a run that starts after one of its cells."""
    late = measured_step("eager", 900)
    late = replace(late, provenance=late.provenance | {"started": "2026-01-02T03:09:00Z"})
    run = RunFolder(write_run(tmp_path / "w" / "r", [late, measured_step("delta", 500)][:cells]))
    if text is not None:
        (run.folder / "run.json").write_text(text)
    before = now()
    run.write_plan({"cells": [], "overrides": []})
    found = RunFolder(run.folder).plan["started"]
    assert found == started if started else before <= found <= now()


def test_foreign_files_do_no_harm(lab):
    first = lab.run("[good]")
    (first.run.folder / "cells" / "notes.txt").write_text("mine")
    (first.run.folder / "cells" / "copy").mkdir()
    (lab.results / "small" / "archive.zip").write_text("mine")
    assert lab.run("[good]").exit_code == 0 and len(find_runs(lab.results)) == 1


# ------------------------------------------------------------------------------------------------ interrupted and killed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_loses_only_the_running_cell_and_the_same_command_goes_on(lab, number, monkeypatch):
    monkeypatch.setenv("SLOW", "60")
    process = lab.start("[good, slow]")
    wait_for(lambda: "slow" in lab.starts())
    process.send_signal(number)
    assert process.wait(20) == 130
    assert lab.outcomes() == {"good": "ok", "slow": "interrupted"} and not any(is_running(pid) for pid in lab.pids())
    assert not list(lab.only_run().folder.glob("cells/*/claim.json"))
    monkeypatch.setenv("SLOW", "0")
    assert lab.start("[good, slow]").wait(20) == 0
    assert lab.starts() == ["good", "slow", "slow"] and lab.outcomes() == {"good": "ok", "slow": "ok"}


def test_kill_9_of_the_runner_loses_only_the_running_cell_and_leaves_nothing_running(lab, monkeypatch):
    monkeypatch.setenv("SLOW", "60")
    process = lab.start("[good, slow]")
    wait_for(lambda: "slow" in lab.starts())
    process.kill()
    process.wait()
    wait_for(lambda: not any(is_running(pid) for pid in lab.pids()))
    stopped = next(r for r in lab.only_run().records().values() if r.config["method"] == "slow")
    assert stopped.reason == "not_ended" and "the same command runs it again" in stopped.message and not is_done(stopped)
    assert lab.outcomes() == {"good": "ok", "slow": "interrupted"} and len(list(lab.only_run().folder.glob("cells/*/claim.json"))) == 1
    monkeypatch.setenv("SLOW", "0")
    assert lab.start("[good, slow]").wait(20) == 0
    assert lab.starts() == ["good", "slow", "slow"] and lab.outcomes() == {"good": "ok", "slow": "ok"}


def test_two_runners_at_once_share_the_cells_and_never_measure_together(lab, monkeypatch):
    monkeypatch.setenv("SLOW", "0.7")
    methods = "[slow, {name: slow, options: {threshold: 2}}, {name: slow, options: {threshold: 3}}, {name: slow, options: {threshold: 4}}]"
    both = [lab.start(methods) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert len(lab.starts()) == 4 and list(lab.outcomes()) == ["slow"] and len(lab.only_run().records()) == 4
    assert any("by another runner" in text or "waiting: " in text for text in said), said
    spans = sorted(record.measured["span"] for record in lab.only_run().records().values())
    assert all(earlier[1] <= later[0] for earlier, later in zip(spans, spans[1:])), spans


def test_a_runner_waits_for_a_cell_that_another_holds_and_takes_it_when_the_other_dies(lab, monkeypatch):
    monkeypatch.setenv("SLOW", "60")
    first = lab.start("[slow]")
    wait_for(lambda: "slow" in lab.starts())
    monkeypatch.setenv("SLOW", "0")
    second = lab.start("[slow]")
    assert "0 done" in second.stdout.readline() and f"waiting: process {first.pid} on" in second.stdout.readline()
    assert second.poll() is None and lab.starts() == ["slow"]
    first.kill()
    first.wait()
    assert second.wait(20) == 0 and lab.starts() == ["slow", "slow"]


def test_who_holds_the_machine_is_said_as_long_as_it_is_held(tmp_path, monkeypatch):
    lock, saw = tmp_path / "machine.lock", []

    def gives_up():
        saw.append(holder_of(lock))
        raise TimeoutError

    with locked(lock, what="run /results/x/ab12"):
        with pytest.raises(TimeoutError), locked(lock, on_wait=gives_up):
            pass
    assert saw == [f"process {os.getpid()} on {platform.node()}, run /results/x/ab12"] and holder_of(lock) == ""
    lock.write_text('{"pid": 1, "host": "of-a-holder-that-died-and-much-longer-than-what-comes-after-it", "what": "' + "x" * 500 + '"}')
    with locked(lock, what="y"):
        assert holder_of(lock).endswith(", y")


def test_the_watch_over_kills_sees_each_of_the_faults_that_it_is_there_for(tmp_path):
    """Negative control: a record cut short, a finished one that changed, cells that ran twice or again."""
    watch, path = Soak(tmp_path, seed=0), tmp_path / "record.json"
    path.write_text('{"cell_id": "0')
    assert watch._whole(path) is None and watch.violations[0].startswith(f"{path} is not whole")
    record = RunRecord(cell_id="0", kind="step", workflow={}, config={}, outcome=Outcome.OK)
    for message in ("", "another"):
        replace(record, message=message).save(path)
        watch._whole(path)
    assert watch.violations[1:] == [f"the record of a finished cell changed: {path}"]
    (tmp_path / "twice").write_text("run/a\n")
    (tmp_path / "again").write_text("run/b\n")
    told = watch._told(seconds=0.0)["violations"]
    assert {"run/a ran in two processes at once", "run/b ran again after it had finished"} <= set(told)


@pytest.mark.slow
def test_kills_at_random_instants_lose_nothing(tmp_path):
    found = Soak(tmp_path, seed=3).run(kills=25, seconds=240)
    assert found["kills"] == 25 and found["violations"] == [] and found["finished_cells"] > 0, found


# ------------------------------------------------------------------------------------------------ claims


def test_a_claim_is_held_by_one_and_released(tmp_path):
    path, mutex = tmp_path / "claim.json", tmp_path / ".lock"
    claim = try_claim(path, mutex)
    assert claim is not None and try_claim(path, mutex) is None
    claim.release()
    assert not path.exists() and try_claim(path, mutex) is not None


def rewritten(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("dead", [
    {"pid": 2**22 + 1}, {"started": 1.0},  # no such process; another process with that id
])
def test_the_claim_of_a_dead_owner_is_taken_over_at_once(tmp_path, dead):
    path, mutex = tmp_path / "claim.json", tmp_path / ".lock"
    first = try_claim(path, mutex)
    rewritten(path, **dead)
    second = try_claim(path, mutex)
    assert second is not None and second.token != first.token
    first.release()
    assert path.exists()  # it is not the first one's any more


@pytest.mark.parametrize("text", ["", "{", '{"pid": 1}', "[]"])
def test_a_claim_cut_short_is_nobodys(tmp_path, text):
    path = tmp_path / "claim.json"
    path.write_text(text)
    assert try_claim(path, tmp_path / ".lock") is not None


def test_a_claim_from_elsewhere_lives_by_its_heartbeat(tmp_path):
    path, mutex = tmp_path / "claim.json", tmp_path / ".lock"
    claim = try_claim(path, mutex)
    rewritten(path, pid_space="another machine", pid=2**22 + 1)
    assert try_claim(path, mutex) is None
    os.utime(path, (time.time() - 200, time.time() - 200))
    claim.beat()
    assert try_claim(path, mutex) is None
    os.utime(path, (time.time() - 200, time.time() - 200))
    assert try_claim(path, mutex) is not None


def test_taking_over_ends_what_the_dead_owner_left_running(tmp_path):
    path, mutex = tmp_path / "claim.json", tmp_path / ".lock"
    claim = try_claim(path, mutex)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    orphan = subprocess.Popen(sleep, env=os.environ | {MARKER: claim.token}, start_new_session=True)
    bystander = subprocess.Popen(sleep, env=os.environ | {MARKER: "another"})
    try:
        rewritten(path, pid=2**22 + 1)
        assert try_claim(path, mutex) is not None
        assert not is_running(orphan.pid) and bystander.poll() is None
        assert end_processes("") == 0 and bystander.poll() is None
    finally:
        for process in (orphan, bystander):
            process.kill()
            process.wait()


def test_a_write_that_the_system_refuses_names_its_file_and_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError) as refused:
            write_atomically(tmp_path / "report.html", "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (refused.value.errno, refused.value.filename) == (errno.EFBIG, str(tmp_path / "report.html")) and not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ runs by name


def test_runs_are_found_by_folder_name_start_of_id_and_workflow(lab):
    lab.run("[eager]")
    run = lab.only_run()
    for text in (str(run.folder), run.name, run.name[:-4], run.folder.name, run.folder.name[:4], "small"):
        assert resolve_run(text, lab.results).folder == run.folder
    with pytest.raises(WorkflowError, match=r"no run 'smal' in .*; did you mean 'small'\?"):
        resolve_run("smal", lab.results)
    lab.run("[eager, good]")
    with pytest.raises(WorkflowError, match="start of several runs"):
        resolve_run("", lab.results)


def test_what_counts_as_done(lab):
    records = lab.run("[good, infeasible, wrong, segfault]").records.values()
    done = {record.config["method"]: is_done(record) for record in records}
    assert done == {"good": True, "infeasible": True, "wrong": True, "segfault": False}
    assert not is_done(None)


def test_the_last_line(tmp_path):
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_bytes(b"x" * 10_000 + b"\nlast \xff one\n\n  \n")
    assert last_line(log) == "last \ufffd one" and last_line(log, 4) == "last"
