"""A sampler in a process of its own that writes `telemetry.csv.gz` while a cell runs, and the reader of that file.

    with Sampler(folder / "telemetry.csv.gz", target="cuda:0") as sampler:
        ...                                  # the work
    sampler.summary                          # rows, achieved period, missed samples, what is missing and why

The same columns stand in every file. On a machine without a GPU the GPU columns are empty and the header says why. The
sampler watches and never interferes: whatever goes wrong in it becomes `summary["failure"]`, and the run goes on.

The file: a header line `# {json}`, a line of column names, one line a sample, and a trailer line `# {json}`. The trailer is
absent when the sampler was killed; all samples up to the last two seconds are still there.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gzip
import io
import json
import os
import select
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

import psutil

from vramlab.nvml import GPU_COLUMNS, Nvml

FORMAT_VERSION = 1
HOST_COLUMNS = ("rss_bytes", "cpu_percent", "read_bytes", "written_bytes")
COLUMNS = ("t_seconds", *GPU_COLUMNS, *HOST_COLUMNS)
PERIOD_SECONDS = 0.1
FLUSH_SECONDS = 2.0
TREE_SECONDS = 1.0  # how often the list of child processes is read anew: reading it costs more than a sample
STOP_SECONDS = 5.0
FOREIGN_BYTES = 2**29  # an idle GPU with a display or a daemon on it stays below
SHORTEST_ENERGY_SECONDS, LARGEST_ENERGY_GAP = 3.0, 0.15
PACKAGE_PARENT = Path(__file__).resolve().parent.parent


class Sampler:
    """Samples process `pid` with its children, and the GPU that `target` names, every `period_seconds`, from `start` to `stop`.

    `target` is `cpu`, `sim:...` (both: no GPU), `cuda:N` as this process numbers its GPUs, or a GPU's UUID.
    """

    def __init__(self, path: Path, *, target: str = "cpu", pid: int | None = None, period_seconds: float = PERIOD_SECONDS) -> None:
        self.path, self.pid, self.target = Path(path), pid or os.getpid(), target
        self.period_seconds = period_seconds
        self.summary: dict[str, Any] = {"failure": "the sampler has not run"}
        self._child: subprocess.Popen | None = None

    def start(self) -> Sampler:
        """Start the sampling process. Never raises; `summary["failure"]` tells."""
        command = [sys.executable, "-m", "vramlab.telemetry", str(self.path), "--pid", str(self.pid),
                   "--target", self.target, "--period-seconds", repr(self.period_seconds)]
        search = os.pathsep.join(filter(None, [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH")]))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                           env={**os.environ, "PYTHONPATH": search})
        except OSError as error:
            self.summary = {"failure": f"the sampler could not start: {error}"}
        return self

    def watch(self, pid: int) -> None:
        """Sample this process with its children too: one that is no descendant. Never raises."""
        if self._child is not None:
            with contextlib.suppress(OSError):
                self._child.stdin.write(b"%d\n" % pid)
                self._child.stdin.flush()

    def stop(self) -> dict[str, Any]:
        """End the sampling process and return the summary. Never raises."""
        if self._child is None:
            return self.summary
        child, self._child = self._child, None
        try:
            _, errors = child.communicate(timeout=STOP_SECONDS)  # closes its input, which is the signal to end
        except subprocess.TimeoutExpired:
            child.kill()
            _, errors = child.communicate()
        self.summary = self._summarise(errors.decode(errors="replace"))
        return self.summary

    def _summarise(self, errors: str) -> dict[str, Any]:
        try:
            telemetry = read_telemetry(self.path)
        except (OSError, ValueError) as error:
            last = errors.strip().splitlines()[-1:] or [str(error)]
            return {"failure": f"the sampler left no readable file: {last[0]}"}
        return telemetry.summary()

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """A telemetry file as read: one list a column, None where a sample has no value."""

    header: Mapping[str, Any]  # format, started (UTC), period_seconds, gpu, missing
    trailer: Mapping[str, Any]  # rows, missed, achieved_period_seconds, missing; empty when the sampler was killed
    columns: Mapping[str, list[float | None]]

    @property
    def rows(self) -> int:
        """How many samples there are."""
        return len(self.columns["t_seconds"])

    def summary(self) -> dict[str, Any]:
        """What a record keeps: JSON-able."""
        return {
            "failure": None if self.trailer else "the sampler ended before the run did; the samples up to then are kept",
            "rows": self.rows,
            "period_seconds": self.header["period_seconds"],
            "achieved_period_seconds": self.trailer.get("achieved_period_seconds"),
            "missed": self.trailer.get("missed"),
            "missing": {**self.header["missing"], **self.trailer.get("missing", {})},
            "constant": self.constant_columns(),
            "flags": self.flags(),
        }

    def flags(self) -> list[str]:
        """What speaks against these numbers, one sentence each."""
        used = self.columns["gpu_memory_used_bytes"]
        found = list(self._energy_flags())
        if used and used[0] is not None and used[0] >= FOREIGN_BYTES:
            found.append(f"{int(used[0]):,} bytes of the GPU were in use before the cell began: others work on it")
        if "MIG" in ((self.header["gpu"] or {}).get("power_covers") or ""):
            found.append("power and energy are those of the whole board, which MIG slices share")
        return found

    def _energy_flags(self) -> Iterator[str]:
        points = [p for p in zip(*(self.columns[name] for name in ("t_seconds", "energy_joules", "power_watts"))) if None not in p]
        if len(points) < 2:
            return
        seconds, counted = points[-1][0] - points[0][0], points[-1][1] - points[0][1]
        if seconds < SHORTEST_ENERGY_SECONDS:
            yield f"the energy counter moves about every 0.1 s: {seconds:.1f} s are too short for it"
            return
        integral = sum((b[0] - a[0]) * (a[2] + b[2]) / 2 for a, b in pairwise(points))
        if abs(counted - integral) > LARGEST_ENERGY_GAP * integral:
            yield f"the energy counter says {counted:,.0f} J and the power's integral {integral:,.0f} J"

    def constant_columns(self) -> list[str]:
        """Sensors that repeat one value over ten samples or more: a driver at fault does that."""
        sensors = ("power_watts", "energy_joules", "gpu_memory_used_bytes", "rss_bytes")
        return [name for name in sensors
                if len(values := [v for v in self.columns[name] if v is not None]) >= 10 and len(set(values)) == 1]


def read_telemetry(path: Path) -> Telemetry:
    """Read a file, also one that was cut off. ValueError when it has no header or another format."""
    return parse_telemetry(_decompress(Path(path).read_bytes()), Path(path).name)


def parse_telemetry(data: bytes, name: str = "it") -> Telemetry:
    """The content of a file, whole or up to its last whole line. ValueError when it has no header or another format."""
    lines = data.decode().splitlines()
    if len(lines) < 2 or not lines[0].startswith("# {"):
        raise ValueError(f"{name} has no telemetry header")
    header = json.loads(lines[0][2:])
    if header.get("format") != FORMAT_VERSION:
        raise ValueError(f"telemetry format {header.get('format')!r}, this vramlab reads {FORMAT_VERSION}")
    trailer = json.loads(lines[-1][2:]) if lines[-1].startswith("# {") and lines[-1].endswith("}") else {}
    names = lines[1].split(",")
    rows = [row for row in csv.reader(line for line in lines[2:] if not line.startswith("#")) if len(row) == len(names)]
    columns = {name: [float(row[i]) if row[i] else None for row in rows] for i, name in enumerate(names)}
    return Telemetry(header=header, trailer=trailer, columns=columns)


def _decompress(data: bytes) -> bytes:
    """What can be had of a gzip stream that may end in the middle; whole lines only when it does."""
    stream = zlib.decompressobj(wbits=31)
    try:
        text = stream.decompress(data)
    except zlib.error as error:
        raise ValueError(f"not a gzip file: {error}") from error
    return text if stream.eof else text[:text.rfind(b"\n") + 1]


class ProcessTree:
    """Memory, processor time and I/O of a process and its children, this sampler left out.

    Resident memory is summed over the processes: a page that several share, a library's code or what a fork has from its server, counts in
    each. Counting it once means reading every page's entry, milliseconds a process, under the lock by which that process allocates.
    """

    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = psutil.Process(pid), clock
        self._watched: list[psutil.Process] = []
        self._members: dict[int, psutil.Process] = {}
        self._cpu_seconds: dict[int, float] = {}
        self._io: dict[int, tuple[int, int]] = {}
        self._listed_at = self._sampled_at = -float("inf")

    def watch(self, pid: int) -> None:
        """From the next sample on, this process with its children too, where it still is."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._watched.append(psutil.Process(pid))
            self._listed_at = -float("inf")

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that the last sample saw."""
        return tuple(self._members)

    def sample(self, missing: dict[str, str]) -> dict[str, float | None]:
        """One value for each of HOST_COLUMNS. `cpu_percent` is 100 for one core and None in the first sample."""
        now = self._clock()
        if now - self._listed_at >= TREE_SECONDS:
            self._list(now)
        rss, used_seconds = 0, 0.0
        for pid, process in list(self._members.items()):
            try:
                rss += process.memory_info().rss
                used_seconds += self._spent(pid, process)
                self._read_io(pid, process, missing)
            except psutil.NoSuchProcess:
                del self._members[pid]
        elapsed, self._sampled_at = now - self._sampled_at, now
        is_first = elapsed == float("inf")
        io = [sum(counts[i] for counts in self._io.values()) if self._io else None for i in (0, 1)]
        return {"rss_bytes": rss, "cpu_percent": None if is_first or elapsed <= 0 else 100 * used_seconds / elapsed,
                "read_bytes": io[0], "written_bytes": io[1]}

    def _list(self, now: float) -> None:
        self._listed_at = now
        self._watched = [process for process in self._watched if process.is_running()]
        found: list[psutil.Process] = []
        for root in (self._root, *self._watched):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [root, *root.children(recursive=True)]
        self._members = {p.pid: self._members.get(p.pid, p) for p in found if p.pid != os.getpid() or p == self._root}

    def _spent(self, pid: int, process: psutil.Process) -> float:
        times = process.cpu_times()
        total = times.user + times.system
        before = self._cpu_seconds.get(pid, total)
        self._cpu_seconds[pid] = total
        return total - before

    def _read_io(self, pid: int, process: psutil.Process, missing: dict[str, str]) -> None:
        try:
            counters = process.io_counters()
            self._io[pid] = (counters.read_bytes, counters.write_bytes)
        except (AttributeError, psutil.AccessDenied) as error:
            missing.setdefault("read_bytes", f"the system does not tell a process's I/O: {type(error).__name__}")


def run_sampler(path: Path, *, pid: int, target: str, period_seconds: float,
                is_over: Callable[[float, Callable[[int], None]], bool], library: Any = None) -> None:
    """Sample until `is_over(seconds, watch)` says so; it waits at most that long, is the sampler's only clock tick, and calls `watch` with
    each further process that is to be sampled."""
    missing: dict[str, str] = {}
    nvml, gpu = _open_gpu(target, missing, library)
    tree = ProcessTree(pid)
    header = {"format": FORMAT_VERSION, "started": datetime.now(UTC).isoformat(timespec="milliseconds"),
              "period_seconds": period_seconds, "gpu": nvml.describe_handle(gpu) if gpu is not None else None, "missing": dict(missing)}
    with nvml, open(path, "wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed:
        text = io.TextIOWrapper(packed, encoding="utf-8", newline="\n", write_through=True)
        text.write(f"# {json.dumps(header, sort_keys=True)}\n{','.join(COLUMNS)}\n")
        ticks = _Ticks(period_seconds)
        while True:
            host = tree.sample(missing)
            board = nvml.sample(gpu, tree.pids, missing) if gpu is not None else {}
            text.write(_format_row({"t_seconds": ticks.elapsed(), **board, **host}))
            if ticks.is_flush_due():
                packed.flush()
                raw.flush()
            if is_over(ticks.seconds_to_next(), tree.watch):
                break
        text.write(f"# {json.dumps({**ticks.report(), 'missing': missing}, sort_keys=True)}\n")
        text.detach()


def _open_gpu(target: str, missing: dict[str, str], library: Any) -> tuple[Nvml, Any]:
    if target == "cpu" or target.startswith("sim:"):
        nvml, gpu, reason = Nvml(None), None, "the cell ran on no GPU"
    elif (nvml := Nvml.open(library)).failure:
        gpu, reason = None, nvml.failure
    elif target.startswith("cuda:"):
        gpu, reason = nvml.find_cuda(int(target.removeprefix("cuda:")), os.environ)
    else:
        gpu, reason = nvml.find(target)
    if gpu is None:
        missing.update(dict.fromkeys(GPU_COLUMNS, reason))
    return nvml, gpu


class _Ticks:
    """Deadlines at multiples of the period since the start; a deadline that passed unused is a missed sample."""

    def __init__(self, period_seconds: float) -> None:
        self.period, self.began = period_seconds, time.monotonic()
        self.taken = self.missed = 0
        self._next, self._flushed, self._last = 0, self.began, self.began

    def elapsed(self) -> float:
        """Seconds since the start; counts one sample."""
        self._last = time.monotonic()
        self.taken += 1
        return self._last - self.began

    def seconds_to_next(self) -> float:
        """How long to wait. Deadlines that are over are skipped and counted."""
        passed = (time.monotonic() - self.began) / self.period
        due = max(self._next + 1, int(passed) + 1)
        self.missed += due - self._next - 1
        self._next = due
        return max(0.0, self.began + due * self.period - time.monotonic())

    def is_flush_due(self) -> bool:
        """True every FLUSH_SECONDS."""
        if self._last - self._flushed < FLUSH_SECONDS:
            return False
        self._flushed = self._last
        return True

    def report(self) -> dict[str, Any]:
        """Rows, missed samples and the period that was reached."""
        seconds = self._last - self.began
        return {"rows": self.taken, "missed": self.missed, "seconds": round(seconds, 3),
                "achieved_period_seconds": round(seconds / (self.taken - 1), 6) if self.taken > 1 else None}


def _format_row(values: Mapping[str, float | int | None]) -> str:
    cells = []
    for name in COLUMNS:
        value = values.get(name)
        cells.append("" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}")
    return ",".join(cells) + "\n"


def main() -> None:
    """The sampling process: a line of its standard input is a further pid to sample, and it ends when that closes, which also happens when
    the run is killed."""
    parser = argparse.ArgumentParser(description="Sample a process and a GPU into telemetry.csv.gz until standard input closes.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--period-seconds", type=float, default=PERIOD_SECONDS)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the end of input is the signal here

    begun = b""

    def is_over(seconds: float, watch: Callable[[int], None]) -> bool:
        nonlocal begun
        readable, _, _ = select.select([sys.stdin], [], [], seconds)
        said = os.read(sys.stdin.fileno(), 4096) if readable else b""
        *lines, begun = (begun + said).split(b"\n")
        for line in lines:
            watch(int(line))
        return bool(readable) and not said

    run_sampler(options.path, pid=options.pid, target=options.target, period_seconds=options.period_seconds, is_over=is_over)


if __name__ == "__main__":
    main()
