"""One cell in one fresh process: started, watched, ended with all that it started, and its death put into words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Sequence

from vramlab.claiming import MARKER, end_processes
from vramlab.forks import ForkServer
from vramlab.record import Outcome

PACKAGE_ROOT = Path(__file__).resolve().parent.parent
_TICK_SECONDS = 1.0
_FULL = ("No space left on device", "Disk quota exceeded")
# The child asks the kernel to be killed with its parent, then becomes the command: after kill -9 of the runner nothing runs on.
_LEASH = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "if os.getppid() != int(sys.argv[1]): os._exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)


@dataclass(frozen=True)
class Ending:
    """How a cell's process ended."""

    returncode: int  # -N: died of signal N
    seconds: float
    is_timeout: bool = False
    memory_kills: int | None = 0  # of the kernel's out-of-memory killer on this machine meanwhile; None: it keeps no count


def run_child(command: Sequence[str], *, log: Path, token: str, timeout_seconds: float, on_tick: Callable[[float], None],
              forks: ForkServer | None = None) -> Ending:
    """Run to the end or to the timeout. Whatever happens, nothing that it started is left running.

    stdout and stderr go to `log`. `on_tick` gets the seconds so far about once a second. `forks` is lent to it. An exception (Ctrl-C)
    passes through.
    """
    lent, inherited = forks.lend() if forks is not None else ({}, [])
    kills_before, started = count_memory_kills(), time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(_leashed(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True, env=child_environment({MARKER: token, **lent}), pass_fds=inherited)
    try:
        is_timeout = not _wait(process, started, timeout_seconds, on_tick)
    finally:
        _end_group(process)
        if forks is not None:
            forks.end_forks(token)
        end_processes(token)
    kills_after = count_memory_kills()
    kills = None if kills_before is None or kills_after is None else kills_after - kills_before
    return Ending(process.returncode, time.monotonic() - started, is_timeout, kills)


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """This process's environment, with the package to be found and GPUs numbered as their drivers and tools number them."""
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]))
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **extra}


def _leashed(command: Sequence[str]) -> list[str]:
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-c", _LEASH, str(os.getpid()), *command]


def _wait(process: subprocess.Popen, started: float, timeout_seconds: float, on_tick: Callable[[float], None]) -> bool:
    """True when the process ended by itself within the time."""
    while True:
        elapsed = time.monotonic() - started
        if elapsed >= timeout_seconds:
            return False
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(_TICK_SECONDS, timeout_seconds - elapsed))
            return True
        on_tick(time.monotonic() - started)


def _end_group(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def count_memory_kills() -> int | None:
    """How many processes this machine's kernel has killed for memory since it started; None where it keeps no count."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def explain(ending: Ending, log: Path, timeout_seconds: float) -> tuple[Outcome, str, str]:
    """Outcome, reason and one sentence for a process that left no record."""
    if ending.is_timeout:
        return Outcome.TIMEOUT, "wall_clock", f"the cell was ended after {timeout_seconds:g} s (measure.timeout_seconds){_last_words(log)}"
    if ending.returncode >= 0 and any(words in last_line(log) for words in _FULL):
        return Outcome.CRASHED, "disk_full", f"the disk was full{_last_words(log)}"
    if ending.returncode >= 0:
        return Outcome.CRASHED, "exit", f"the cell's process ended with exit code {ending.returncode} and left no record{_last_words(log)}"
    name = _signal_name(-ending.returncode)
    if name == "SIGKILL" and ending.memory_kills is None:
        doubt = "most likely for memory: this kernel keeps no count of such kills"
        return Outcome.OOM, "host_memory", f"the cell's process died of SIGKILL, {doubt}{_last_words(log)}"
    if name == "SIGKILL" and ending.memory_kills:
        return Outcome.OOM, "host_memory", f"the kernel killed the cell's process for memory{_last_words(log)}"
    return Outcome.CRASHED, name, f"the cell's process died of {name}{_last_words(log)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_line(log: Path, limit: int = 200) -> str:
    """The last line that is not empty, cut to `limit` characters; "" when there is none."""
    try:
        with open(log, "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 4096))
            tail = f.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return lines[-1][:limit] if lines else ""


def _last_words(log: Path) -> str:
    said = last_line(log)
    return f"; its last line: {said}" if said else ""
