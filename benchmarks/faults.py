"""What becomes of a sweep when its cells and its runners die: each death's record, 200 kills at random instants, real cells killed.

    python benchmarks/faults.py [--kills 200] [--real-kills 8] [--seconds 900]

    deaths      a cell that segfaults, hangs, is killed for memory by the kernel, fills a disk, loses its runner: the outcome and reason of
                its record, and that the next cell ran. Memory needs a control group of its own, the disk a file system that may be mounted
    soak        two runners on one results folder, killed and started again; nothing finished is lost, nothing is half written, no cell
                runs twice (tests/soak.py says how it is held)
    real        `run workflow smoke`, killed at random instants and started again until it is done
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator

from common import ROOT, keep

sys.path[:0] = [str(ROOT / "tests")]
from shelves import small_workflow, write_fake_cell, write_method, write_model, write_workflow  # noqa: E402
from soak import Soak  # noqa: E402

from vramlab.run_folder import find_runs, is_done  # noqa: E402

DISK_BYTES = 8 * 2**20
MEMORY_BYTES = 600 * 2**20
CONTROL_GROUPS = Path("/sys/fs/cgroup")
EXPECTED = {"segfault": ("crashed", "SIGSEGV"), "hangs": ("timeout", "wall_clock"), "fills": ("crashed", "disk_full"),
            "eats": ("oom", "host_memory"), "orphaned": ("interrupted", "not_ended")}
FILLS = """
if what == "fills":
    with open(folder / "tape.json.gz", "wb") as f:
        while True:
            f.write(os.urandom(2**20))
            f.flush()
if what == "eats":
    held = []
    while True:
        held.append(bytearray(2**24))
if what == "orphaned":
    time.sleep(600)
"""


def main() -> None:
    options = _options()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for what in EXPECTED:
            rows.append(death(Path(folder) / what, what))
            print(json.dumps(rows[-1]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        soaked = Soak(Path(folder), seed=options.seed).run(options.kills, options.seconds)
        print(json.dumps(soaked), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        real = kill_real_cells(Path(folder), options.real_kills, random.Random(options.seed))
    known = [row for row in rows if row["missing"] is None]
    summary = {
        "deaths": len(known), "deaths_as_expected": sum(row["is_as_expected"] for row in known),
        "deaths_not_at_hand": {row["what"]: row["missing"] for row in rows if row["missing"]}, "soak": soaked, "real": real,
    }
    keep("faults", rows, summary)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--real-kills", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=900, help="at most, for the kills at random instants")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


# --- deaths ---------------------------------------------------------------------------------------------------------------
def death(root: Path, what: str) -> dict[str, Any]:
    """A run of a cell that dies so, and of one after it."""
    root.mkdir()
    for name in (what, "good"):
        write_method(root, name)
    write_model(root)
    cell = write_fake_cell(root)
    cell.write_text(cell.read_text().replace('if what == "segfault":', FILLS + 'if what == "segfault":', 1))
    workflow = write_workflow(root, small_workflow(f"[{what}, good]", measure={"timeout_seconds": 20}))
    found = {"what": what, "expected": EXPECTED[what], "missing": None, "is_as_expected": None}
    results = root / "results"
    results.mkdir()
    try:
        with _place(what, results) as prefix:
            command = [*prefix, sys.executable, str(ROOT / "tests" / "run_small.py"), *map(str, (root, workflow, results))]
            _run(command, root, is_killed=what == "orphaned")
            (run,) = find_runs(results)
            records = {record.config["method"]: record for record in run.records().values()}
    except OSError as error:
        return found | {"missing": f"{error}"}
    dead, alive = records[what], records.get("good")
    obtained = str(dead.outcome), dead.reason
    goes_on = alive is not None and alive.outcome == "ok" or what == "orphaned"  # its runner is gone with it
    return found | {"obtained": obtained, "message": dead.message, "is_as_expected": obtained == EXPECTED[what] and goes_on}


def _run(command: list[str], root: Path, is_killed: bool) -> None:
    starts = root / "starts"
    starts.touch()
    process = subprocess.Popen(command, env={**os.environ, "STARTS": str(starts), "PYTHONPATH": str(ROOT)}, start_new_session=True,
                               stdout=subprocess.DEVNULL)
    while is_killed and process.poll() is None and not starts.read_text():
        time.sleep(0.05)
    if is_killed:
        process.kill()
    process.wait(120)


@contextlib.contextmanager
def _place(what: str, results: Path) -> Iterator[list[str]]:
    """Where the run takes place, as a prefix of its command. OSError where this machine has no such place."""
    if what == "fills":
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(results)], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"no file system may be mounted: {done.stderr.strip()}")
        try:
            yield []
        finally:
            subprocess.run(["umount", "-l", str(results)], check=True)
    elif what == "eats":
        is_old = (CONTROL_GROUPS / "memory").is_dir()  # version 1: a tree for each resource
        group = CONTROL_GROUPS / ("memory" if is_old else "") / f"vramlab-faults-{os.getpid()}"
        group.mkdir()
        try:
            (group / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(str(MEMORY_BYTES))
            yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
        finally:
            group.rmdir()
    else:
        yield []


# --- real cells -----------------------------------------------------------------------------------------------------------
def kill_real_cells(folder: Path, kills: int, chance: random.Random) -> dict[str, Any]:
    """The smoke workflow, its runner killed `kills` times at random instants, then left to end."""
    command = [sys.executable, "-m", "vramlab", "run", "workflow", "smoke", "--output-dir", str(folder)]
    finished: dict[Path, bytes] = {}
    lost, done, started = [], 0, time.monotonic()
    while done < kills:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            process.wait(chance.uniform(3, 25))
            break  # it came to its end first
        except subprocess.TimeoutExpired:
            process.send_signal(chance.choice((signal.SIGKILL, signal.SIGTERM)))
            process.wait(60)
            done += 1
        lost += [str(path) for path, body in finished.items() if path.read_bytes() != body]
        finished |= _finished(folder)
    code = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode
    lost += [str(path) for path, body in finished.items() if path.read_bytes() != body]
    (run,) = find_runs(folder)
    return {"kills": done, "finished_before_a_kill": len(finished), "lost": lost, "exit_code": code,
            "outcomes": sorted(str(record.outcome) for record in run.records().values()), "seconds": time.monotonic() - started}


def _finished(folder: Path) -> dict[Path, bytes]:
    paths = {}
    for run in find_runs(folder):
        for cell_id, record in run.records().items():
            if is_done(record):
                path = run.cell_folder(cell_id) / "record.json"
                paths[path] = path.read_bytes()
    return paths


if __name__ == "__main__":
    main()
