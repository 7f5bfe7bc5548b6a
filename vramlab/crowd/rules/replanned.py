"""Fifth round, asked only where somebody wants it: is each schedule the one that its method plans? Planned again, a process at a time."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import vramlab
from vramlab.crowd.findings import Severity
from vramlab.crowd.rules.asking import Examination, Fault, Round, rule
from vramlab.crowd.rules.schedules import planned
from vramlab.runs import TAPE_FILE

START_SECONDS = 120.0  # until a process is ready
MOST_CELLS_LONG = 20  # a bundle may take as long as so many cells that reach their limit


@rule(Round.REPLANNING, "replanned", "with --replan: every schedule, and every refusal, is what its method plans again on the same tape")
def _replanned(e: Examination) -> Iterator[Fault]:
    for name, answer in _answers(e).items():
        e.count(answer["is_same"] is not None)
        if answer["is_same"] is False:
            yield name, answer["why"]


@rule(Round.REPLANNING, "not-replanned", "with --replan: what was not planned again, cell by cell, and why", Severity.NOTE)
def _not_replanned(e: Examination) -> Iterator[Fault]:
    for name, answer in _answers(e).items():
        e.count()
        if answer["is_same"] is not False and answer["why"]:
            yield name, answer["why"]
    for name, record in e.contents.records.items():
        if TAPE_FILE not in record.files:
            yield name, "there is no tape of it in the bundle"


def _answers(e: Examination) -> Mapping[str, dict]:
    """Name of the record's file -> what came of planning it again."""
    cells = {found.record.cell_id: found.name for found in planned(e)}
    asked = e.once("replanned", lambda: dict(_Worker(e.contents.folder, e.replan_seconds).answers(cells)))
    return {cells[cell_id]: answer for cell_id, answer in asked.items()}


class _Worker:
    """A process that plans (vramlab.crowd.replanner); a new one after each that had to be ended."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._process: subprocess.Popen | None = None

    def answers(self, cell_ids: Mapping[str, str]) -> Iterator[tuple[str, dict]]:
        """One for each cell, within the limits: `{"is_same": true | false | null, "why"}`."""
        until = time.monotonic() + MOST_CELLS_LONG * self._seconds
        try:
            for cell_id in cell_ids:
                if time.monotonic() > until:
                    yield cell_id, _not(f"the bundle took {MOST_CELLS_LONG * self._seconds:g} s by then")
                else:
                    yield cell_id, self._ask(cell_id)
        finally:
            self._end()

    def _ask(self, cell_id: str) -> dict:
        if self._process is None and not self._start():
            return _not("no process that plans could be started")
        self._process.stdin.write(f"{cell_id}\n".encode())
        self._process.stdin.flush()
        line = self._line(self._seconds)
        if line:
            return json.loads(line)
        is_over = line is None
        self._end()
        return _not(f"it took more than {self._seconds:g} s" if is_over else "the process that planned it died")

    def _start(self) -> bool:
        path = os.pathsep.join(filter(None, [str(Path(vramlab.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        words = [sys.executable, "-P", "-m", "vramlab.crowd.replanner", str(self._folder.resolve())]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                         env={**os.environ, "PYTHONPATH": path})
        is_ready = bool(self._line(START_SECONDS))
        if not is_ready:
            self._end()
        return is_ready

    def _line(self, seconds: float) -> bytes | None:
        """One line; empty where the process has ended, None where none came in time."""
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        return self._process.stdout.readline() if ready else None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _not(why: str) -> dict:
    return {"is_same": None, "why": why}
