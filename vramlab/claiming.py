"""Who runs which cell: a claim file, made by an atomic create, beside the cell; and locks that the kernel drops when their holder dies.

A claim names its owner by host, process id and start time. The claim of a dead owner is taken over: at once where the
owner would be visible from here, else after its heartbeat (the file's modification time) has been still for two minutes.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator

import psutil

MARKER = "VRAMLAB_CELL"  # environment variable with a claim's token: every process of a cell inherits it
HEARTBEAT_SECONDS = 10.0
STILL_SECONDS = 120.0
_START_TOLERANCE_SECONDS = 5.0  # the boot time that start times hang on moves with the clock


@dataclass(frozen=True)
class Claim:
    """A cell that is ours until `release`."""

    path: Path
    token: str

    def beat(self) -> None:
        """Show other machines that the owner lives."""
        with suppress(FileNotFoundError):
            os.utime(self.path)

    def release(self) -> None:
        """Give the cell back. Nothing happens when somebody has taken it over."""
        if _read(self.path).get("token") == self.token:
            self.path.unlink(missing_ok=True)


def try_claim(path: Path, mutex: Path) -> Claim | None:
    """The claim at `path`, or None while another process that lives holds it.

    `mutex` is a file that all claimants of a run share: two of them never judge one claim at the same time. What a dead
    owner left running is killed first.
    """
    with locked(mutex):
        if path.exists():
            body = _read(path)
            if _is_owner_alive(body, path, mutex):
                return None
            end_processes(body.get("token", ""))
            path.unlink(missing_ok=True)
        token = uuid.uuid4().hex
        with open(path, "x", encoding="ascii") as f:
            json.dump({"token": token, **_identity(os.getpid())}, f)
        return Claim(path, token)


def owner_of(path: Path) -> str:
    """`process 4711 on node7`, for messages; "" when there is no claim."""
    body = _read(path)
    return f"process {body['pid']} on {body['host']}" if {"pid", "host"} <= set(body) else ""


def _read(path: Path) -> dict[str, Any]:
    """The claim's body; empty when there is none, it is not ours to read or its owner died while writing it."""
    try:
        body = json.loads(path.read_text(encoding="ascii"))
    except (FileNotFoundError, PermissionError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def _identity(pid: int) -> dict[str, Any]:
    return {"pid": pid, "started": psutil.Process(pid).create_time(), "host": platform.node(), "pid_space": _pid_space()}


def _pid_space() -> str:
    """Processes of two claimants see each other when this is equal: one boot, one process-id namespace."""
    parts = []
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts) or platform.node()


def _is_owner_alive(body: dict[str, Any], path: Path, mutex: Path) -> bool:
    if not {"pid", "started", "pid_space", "token"} <= set(body):
        return False  # cut short: whoever wrote it died, since writing happens under the mutex
    if body["pid_space"] != _pid_space():
        os.utime(mutex)  # the file system's own clock, which two machines share
        return mutex.stat().st_mtime - path.stat().st_mtime < STILL_SECONDS
    try:
        started = psutil.Process(body["pid"]).create_time()
    except psutil.NoSuchProcess:
        return False
    return abs(started - body["started"]) < _START_TOLERANCE_SECONDS and _state(body["pid"]) != psutil.STATUS_ZOMBIE


def _state(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def end_processes(token: str) -> int:
    """Kill every process that carries the token in its environment, wherever it has gone to; their number."""
    ended = 0
    while token:
        found = [process for process in psutil.process_iter() if _carries(process, token)]
        if not found:
            break
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=10)
        ended += len(found)
    return ended


def _carries(process: psutil.Process, token: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARKER) == token
    except (psutil.Error, OSError):  # gone, or another user's
        return False


def holder_of(path: Path) -> str:
    """`process 4711 on node7, run results/x/ab12`: who holds the lock at `path`, as far as it said; "" when it said nothing."""
    body = _read(path)
    who = owner_of(path)
    return ", ".join(filter(None, [who, body.get("what", "")])) if who else ""


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] | None = None, what: str = "",
           opener: Callable[[str, int], int] | None = None) -> Iterator[None]:
    """Hold an advisory lock on `path`; the kernel drops it when the holder dies. `on_wait` is called each second of waiting.

    `what` the lock is held for is written into the file, for `holder_of`, until it is given back. `opener`: as for `open`.
    """
    with open(path, "a", encoding="ascii", opener=opener) as f:
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if on_wait:
                    on_wait()
                time.sleep(1.0 if on_wait else 0.02)
        if not what:
            yield
            return
        os.truncate(f.fileno(), 0)  # of a holder that died
        f.write(json.dumps({**_identity(os.getpid()), "what": what}))
        f.flush()
        try:
            yield
        finally:
            os.truncate(f.fileno(), 0)
