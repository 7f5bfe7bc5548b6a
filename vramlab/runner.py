"""Runs a plan: each cell in a fresh process, claimed, watched and recorded; the same plan again takes up where this one stopped.

    for each cell that has no finished record
        claim it (another runner may hold it: then the next one, and wait at the end)
        run `python -m vramlab.cell <folder>`; it writes record.json
        no record? its death becomes one: crashed, oom or timeout
    Ctrl-C, kill -9, a power cut: only the running cell is lost
"""

from __future__ import annotations

import errno
import json
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Iterator, Protocol, Sequence

from vramlab import __version__
from vramlab.child import Ending, explain, last_line, run_child
from vramlab.claiming import HEARTBEAT_SECONDS, Claim, holder_of, locked, owner_of, try_claim
from vramlab.environment import probe
from vramlab.errors import EnvironmentUnable
from vramlab.forks import ForkServer
from vramlab.isolate import prepare_forks
from vramlab.machine_lock import lock_path, open_for_all
from vramlab.record import Outcome, RunRecord, write_atomically
from vramlab.run_folder import RunFolder, is_done, now, read_record
from vramlab.workflow import Cell, Plan

CELL_COMMAND = (sys.executable, "-m", "vramlab.cell")
_POLL_SECONDS = 0.5
_OF_THE_RUNNER = ("spec.json", "claim.json", "stdout.log")
_KEPT_LOG_BYTES = 2**16
_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})


class Display(Protocol):
    """Who is told what happens."""

    def begin(self, plan: Plan, run: RunFolder, done: int) -> None:
        """The run starts; `done` cells have their record already."""

    def cell_begins(self, cell: Cell, number: int) -> None:
        """A cell's process starts; it is the `number`-th of the plan, from 1."""

    def tick(self, cell: Cell, seconds: float, status: str) -> None:
        """About once a second; `status` is the last line that the cell printed."""

    def cell_ends(self, cell: Cell, record: RunRecord, seconds: float) -> None:
        """A cell has its record; `seconds` is 0 when another runner made it."""

    def waits(self, why: str) -> None:
        """Nothing can be done for now."""

    def end(self) -> None:
        """The run is over or interrupted."""


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    run: RunFolder
    records: dict[str, RunRecord]
    is_interrupted: bool
    exit_code: int  # 0 every cell reached an expected outcome, 1 a cell failed, 130 interrupted


class Runner:
    """One pass over a plan. `command` gets the cell's folder appended; tests put their own there."""

    def __init__(self, plan: Plan, results: Path, display: Display, command: Sequence[str] = CELL_COMMAND,
                 machine_lock: Path | None = None) -> None:
        self.plan = plan
        self.run_folder = RunFolder(results / plan.workflow.name / plan.run_id)
        self.display = display
        self.command = tuple(command)
        self.machine_lock = machine_lock or lock_path()
        self._forks: ForkServer | None = None  # lent to each cell: what they have in common is imported once a run

    def run(self) -> Result:
        """Run what is not done. EnvironmentUnable when nothing can run here or the disk is full."""
        if not self.plan.cells:
            reasons = "; ".join(sorted({out.reason for out in self.plan.left_out}))
            raise EnvironmentUnable(f"nothing of workflow {self.plan.workflow.name!r} can run here: {reasons}")
        try:
            self._write_plan()
            is_interrupted = self._is_interrupted()
        except OSError as error:
            if error.errno in _UNWRITABLE:
                folder = self.run_folder.folder
                raise EnvironmentUnable(f"{folder} cannot be written: {error.strerror}; once it can, the same command goes on") from error
            raise
        records = self.run_folder.records()
        return Result(self.run_folder, records, is_interrupted, self._exit_code(records, is_interrupted))

    def _is_interrupted(self) -> bool:
        """Run all cells; True when somebody stopped it."""
        self.display.begin(self.plan, self.run_folder, len(self._done()))
        try:
            with _interruptible():
                self._run_cells()
        except KeyboardInterrupt:
            return True
        finally:
            self.display.end()
        return False

    def _exit_code(self, records: dict[str, RunRecord], is_interrupted: bool) -> int:
        if is_interrupted:
            return 130
        all_expected = all(self.plan.is_expected(record.kind, record.outcome) for record in records.values())
        return 0 if all_expected and len(records) == len(self.plan.cells) else 1

    def _done(self) -> set[str]:
        return {cell.cell_id for cell in self.plan.cells if is_done(self.run_folder.record(cell.cell_id))}

    def _write_plan(self) -> None:
        for cell in self.plan.cells:
            self.run_folder.cell_folder(cell.cell_id).mkdir(parents=True, exist_ok=True)
        with locked(self._mutex):
            self.run_folder.write_plan(plan_to_json(self.plan) | {"environment": probe()})

    @cached_property
    def _mutex(self) -> Path:
        return self.run_folder.folder / ".lock"

    # -------------------------------------------------------------------------------------------- the loop

    def _run_cells(self) -> None:
        pending = {cell.cell_id: (number, cell) for number, cell in enumerate(self.plan.cells, start=1)}
        for cell_id in self._done():
            del pending[cell_id]
        if pending and self.command == CELL_COMMAND:
            self._forks = prepare_forks({"PYTHONUNBUFFERED": "1"})
        while pending:
            held = [cell for number, cell in list(pending.values()) if not self._take(number, cell, pending)]
            if held:
                self.display.waits(f"{owner_of(self._claim_path(held[0])) or 'another runner'} runs {held[0].title}")
                time.sleep(_POLL_SECONDS)

    def _take(self, number: int, cell: Cell, pending: dict[str, Any]) -> bool:
        """Run a cell, or find it done by another runner. False while another holds it."""
        claim = try_claim(self._claim_path(cell), self._mutex)
        if claim is None:
            return False
        try:
            record = self.run_folder.record(cell.cell_id)
            if is_done(record) and cell.cell_id in pending:  # another runner was quicker
                self.display.cell_ends(cell, record, 0.0)
            else:
                self._run_cell(number, cell, claim)
        finally:
            claim.release()
        del pending[cell.cell_id]
        return True

    def _claim_path(self, cell: Cell) -> Path:
        return self.run_folder.cell_folder(cell.cell_id) / "claim.json"

    def _run_cell(self, number: int, cell: Cell, claim: Claim) -> None:
        if cell.config["target"].startswith("sim:"):
            return self._run_process(number, cell, claim)
        self.machine_lock.parent.mkdir(parents=True, exist_ok=True)

        def wait() -> None:
            claim.beat()
            who = holder_of(self.machine_lock)
            other = f"another vramlab{f' ({who})' if who else ''}"
            self.display.waits(f"{other} measures on this machine; two at once would disturb each other")

        with locked(self.machine_lock, on_wait=wait, what=f"run {self.run_folder.name}", opener=open_for_all):
            return self._run_process(number, cell, claim)

    def _run_process(self, number: int, cell: Cell, claim: Claim) -> None:
        folder = self.run_folder.cell_folder(cell.cell_id)
        log, timeout_seconds = folder / "stdout.log", cell.config["measure"]["timeout_seconds"]
        write_atomically(folder / "spec.json", json.dumps(self._spec(cell), indent=1, sort_keys=True) + "\n")
        started = now()
        self._begun(cell, started).save(folder / "record.json")
        beats = _Every(HEARTBEAT_SECONDS, claim.beat)

        def tick(seconds: float) -> None:
            beats()
            self.display.tick(cell, seconds, last_line(log))

        self.display.cell_begins(cell, number)
        ending = run_child([*self.command, str(folder.resolve())], log=log, token=claim.token,
                           timeout_seconds=timeout_seconds, on_tick=tick, forks=self._forks)
        record = read_record(folder, cell.cell_id)
        if record is None or record.outcome is Outcome.INTERRUPTED:
            record = self._obituary(cell, ending, log, started, is_cut=record is None)
            _save_where_full(record, folder)
        self.display.cell_ends(cell, record, ending.seconds)

    def _spec(self, cell: Cell) -> dict[str, Any]:
        return {
            "config": cell.config,
            "workflow": workflow_to_json(self.plan),
            "collections": [str(root) for root in self.plan.workflow.library.roots],
            "run_dir": str(self.run_folder.folder.resolve()),
        }

    def _begun(self, cell: Cell, started: str) -> RunRecord:
        """What stands in a cell's place until it ends: all that is left of it when this process is killed."""
        message = f"it began at {started} and has not ended: it still runs, or the run was stopped; the same command runs it again"
        return self._own_record(cell, Outcome.INTERRUPTED, "not_ended", message, started)

    def _obituary(self, cell: Cell, ending: Ending, log: Path, started: str, is_cut: bool) -> RunRecord:
        """The record of a cell whose process left none, or, where it `is_cut`, one that is not whole."""
        outcome, reason, message = explain(ending, log, cell.config["measure"]["timeout_seconds"])
        if is_cut and ending.returncode == 0:
            message = "the cell left a record that is not whole"
        return self._own_record(cell, outcome, reason, message, started, seconds=ending.seconds, exit_code=ending.returncode)

    def _own_record(self, cell: Cell, outcome: Outcome, reason: str, message: str, started: str, **provenance: Any) -> RunRecord:
        return RunRecord(
            cell_id=cell.cell_id, kind=cell.config["kind"], workflow=workflow_to_json(self.plan), config=cell.config,
            outcome=outcome, reason=reason, message=message, missing={"measured": message, "predicted": message},
            provenance={"started": started, "ended": now(), "written_by": "runner", "vramlab": __version__,
                        "method_source_sha256": cell.config["sources"]["method"], **provenance},
        )


def _save_where_full(record: RunRecord, folder: Path) -> None:
    """Save a cell's record; on a full disk what the cell wrote goes first, its log down to the end of it."""
    path = folder / "record.json"
    try:
        return record.save(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
    for left in folder.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        elif left.name not in _OF_THE_RUNNER:
            left.unlink()
    log = folder / "stdout.log"
    if log.stat().st_size > _KEPT_LOG_BYTES:
        log.write_bytes(log.read_bytes()[-_KEPT_LOG_BYTES:])
    record.save(path)


class _Every:
    """Calls a function, but not more often than once in so many seconds."""

    def __init__(self, seconds: float, function: Any) -> None:
        self._seconds, self._function, self._last = seconds, function, time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._last >= self._seconds:
            self._last = time.monotonic()
            self._function()


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP act like Ctrl-C inside: a scheduler that ends us loses only the running cell, too."""
    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup means it
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def workflow_to_json(plan: Plan) -> dict[str, Any]:
    """What a record says of its workflow."""
    workflow = plan.workflow
    return {"name": workflow.name, "title": plan.title, "label": plan.label, "path": workflow.path, "sha256": workflow.sha256}


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """run.json without its dates and environment: the resolved workflow and the plan of cells."""
    return {
        "workflow": workflow_to_json(plan) | {
            "description": plan.description,
            "claims": [claim.model_dump() for claim in plan.workflow.claims],
            "untestable": [given_up.model_dump() for given_up in plan.workflow.untestable],
            "expected": plan.expected.model_dump(),
        },
        "run_id": plan.run_id,
        "overrides": [override.text for override in plan.workflow.overrides],
        "auto": plan.host.auto,
        "platform": plan.host.platform,
        "cells": [{"cell_id": cell.cell_id, "label": cell.label, "title": cell.title, "config": cell.config} for cell in plan.cells],
        "left_out": [asdict(out) for out in plan.left_out],
    }
