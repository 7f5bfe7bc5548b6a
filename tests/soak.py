"""Two runners on one results folder, killed and started again at random instants; what must hold all the while.

- A record of a finished cell stays, byte for byte. Whoever reads a record or run.json reads a whole one.
- No cell runs in two processes at once, and none runs again once it has finished.
- In the end every cell has its record and nothing is left running.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Iterator

import psutil
from shelves import small_workflow, write_method, write_model, write_workflow

from vramlab.claiming import MARKER
from vramlab.record import RunRecord
from vramlab.run_folder import UNFINISHED

HERE = Path(__file__).resolve().parent
PACKAGE_ROOT = HERE.parent
CELLS = 10
TARGETS = ("cpu", "sim:v100-32gb")  # measuring cells run one at a time on a machine, simulated ones at the same time
KINDS = ("runner", "runner and its cell", "cell", "both runners", "terminate")

# It holds a lock while it runs, and says so where another holds it or the cell had finished before. Its record is large, so that a half of
# it would be seen.
CELL = r"""
import fcntl, json, os, random, sys, time
from pathlib import Path
from vramlab.record import Outcome, RunRecord

folder = Path(sys.argv[1])
spec = json.loads((folder / "spec.json").read_text())
root = Path(os.environ["SOAK"])
key = f"{folder.parent.parent.name}/{folder.name}"

def note(name):
    with open(root / name, "a") as f:
        f.write(key + "\n")

only = open(folder / "only.lock", "a")
try:
    fcntl.flock(only, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    note("twice")
if (root / "finished").exists() and key in (root / "finished").read_text().split():
    note("again")
time.sleep(random.uniform(0.05, 0.4))
RunRecord(cell_id=folder.name, kind="step", workflow=spec["workflow"], config=spec["config"], outcome=Outcome.OK,
          measured={"pad": "x" * 300_000}).save(folder / "record.json")
note("finished")
"""


class Soak:
    """The collection, the runners and the reader below `root`."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.random = root, random.Random(seed)
        self.violations: list[str] = []
        self.kills: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.reads = self.rounds = 0
        self._finished: dict[Path, bytes] = {}
        self._is_over = threading.Event()
        write_method(root, "soak")
        write_model(root)
        (root / "fake_cell.py").write_text(CELL)

    def run(self, kills: int, seconds: float) -> dict[str, Any]:
        """So many kills, or as many as fit into the time; then one undisturbed run to the end."""
        end, reader = time.monotonic() + seconds, threading.Thread(target=self._read_all_the_while, daemon=True)
        self._next_round()
        runners = [self._start(), self._start()]
        reader.start()
        try:
            while sum(self.kills.values()) < kills and time.monotonic() < end:
                time.sleep(self.random.uniform(0.02, 1.2))
                self._kill(runners)
                runners = [r if r.poll() is None else self._start() for r in self._after_the_round(runners)]
            for runner in runners:
                runner.kill()
                runner.wait()
            self._finish()
            self.violations += [f"{process} was left running" for process in self._left()]
        finally:
            self._is_over.set()
            reader.join()
            for process in self._left():
                process.kill()
        return self._told(seconds=seconds - (end - time.monotonic()))

    # --- runners and kills ------------------------------------------------------------------------------------------------
    def _next_round(self) -> None:
        """Another workflow, whose cells nobody has run."""
        self.rounds += 1
        methods = [{"name": "soak", "options": {"threshold": i / CELLS}, "label": f"soak-{i}"} for i in range(CELLS)]
        target = TARGETS[self.rounds % len(TARGETS)]
        self._workflow = write_workflow(self.root, small_workflow(json.dumps(methods), batch_sizes=[self.rounds], targets=[target]))

    def _start(self) -> subprocess.Popen:
        command = [sys.executable, str(HERE / "run_small.py"), str(self.root), str(self._workflow), str(self.root / "results")]
        path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]))
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                start_new_session=True, env={**os.environ, "SOAK": str(self.root), "PYTHONPATH": path})

    def _kill(self, runners: list[subprocess.Popen]) -> None:
        """One blow; it counts where it met somebody that lived."""
        kind = self.random.choice(KINDS)
        living = [r for r in runners if r.poll() is None]
        victim = self.random.choice(living) if living else None
        if victim is None:
            return
        cells = psutil.Process(victim.pid).children(recursive=True) if kind in ("cell", "runner and its cell") else []
        if kind == "cell" and not cells:
            return
        for cell in cells:
            with suppress(psutil.NoSuchProcess):
                cell.kill()
        if kind == "terminate":
            victim.send_signal(signal.SIGTERM)
        for runner in living if kind == "both runners" else [victim] if kind != "cell" else []:
            if kind != "terminate":
                runner.kill()
            runner.wait()
        self.kills[kind] += 1

    def _after_the_round(self, runners: list[subprocess.Popen]) -> list[subprocess.Popen]:
        """The same runners; where every cell has finished, the next round's."""
        if len(self._records()) < CELLS or any(r is None or r.outcome in UNFINISHED for _, r in self._records()):
            return runners
        for runner in runners:
            runner.wait(60)
        self._next_round()
        return runners

    def _finish(self) -> None:
        for _ in range(3):  # a cell that was killed last is run again by the next
            if self._start().wait(120) == 0:
                return
        self.violations.append("the last run did not come to its end")

    # --- what must hold ---------------------------------------------------------------------------------------------------
    def _records(self) -> list[tuple[Path, RunRecord | None]]:
        """Records of the round."""
        found = []
        for path in (self.root / "results").glob("*/*/cells/*/record.json"):
            record = self._whole(path)
            if record is None or record.config["batch_size"] == self.rounds:
                found.append((path, record))
        return found

    def _whole(self, path: Path) -> RunRecord | None:
        try:
            body = path.read_bytes()
        except FileNotFoundError:
            return None
        self.reads += 1
        try:
            record = RunRecord.from_json(json.loads(body))
        except ValueError as error:
            self.violations.append(f"{path} is not whole: {error}")
            return None
        if path in self._finished and body != self._finished[path]:
            self.violations.append(f"the record of a finished cell changed: {path}")
        if record.outcome not in UNFINISHED:
            self._finished.setdefault(path, body)
        return record

    def _read_all_the_while(self) -> None:
        while not self._is_over.is_set():
            for path in [*(self.root / "results").glob("*/*/cells/*/record.json")]:
                self._whole(path)
            for path in (self.root / "results").glob("*/*/run.json"):
                try:
                    json.loads(path.read_text())
                except ValueError as error:
                    self.violations.append(f"{path} is not whole: {error}")
            for path in [p for p in list(self._finished) if not p.exists()]:
                self.violations.append(f"the record of a finished cell is gone: {path}")
            self._is_over.wait(0.01)

    def _left(self) -> Iterator[psutil.Process]:
        """Cells that nobody waits for."""
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if MARKER in (environment := process.environ()) and environment.get("SOAK") == str(self.root):
                    yield process

    def _told(self, seconds: float) -> dict[str, Any]:
        for name, why in (("twice", "ran in two processes at once"), ("again", "ran again after it had finished")):
            if (self.root / name).exists():
                self.violations += [f"{key} {why}" for key in (self.root / name).read_text().split()]
        return {"kills": sum(self.kills.values()), "by_kind": self.kills, "rounds": self.rounds, "finished_cells": len(self._finished),
                "reads": self.reads, "violations": sorted(set(self.violations)), "seconds": seconds}
