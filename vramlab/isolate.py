"""Functions in processes of their own, whose death is data; and two long-lived workers that take turns.

A worker is `python -m vramlab.isolate` in a process group of its own, or a fork of a server that has done nothing but import torch, which
saves the seconds of the import. It speaks pickles over one pipe, so that stdout and stderr stay free, and it ends when that pipe closes:
nobody outlives a killed parent. Memory, signals and crashes never reach the caller.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any

from vramlab.claiming import MARKER
from vramlab.errors import CaptureError, EnvironmentUnable, PlanInfeasible, ScheduleError, Unsupported
from vramlab.forks import Fork, ForkServer, ServerLost, serve_forks
from vramlab.record import Outcome

_PRELOADED = ("torch", "vramlab.preloaded")  # what the server of forks imports, and nothing else happens in it
_FORKS = ForkServer.lent([sys.executable, "-m", "vramlab.isolate", "--forks"])
atexit.register(_FORKS.close)
_CLOSING_SECONDS = 5.0  # how long a worker whose pipe closed may take to go
_GPU_MEMORY = ("CUDA out of memory", "CUDA error: out of memory", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED")
_SHAPE_LIMITS = ("32-bit index", "32bit index", "canUse32BitIndexMath", "invalid configuration argument",
                 "Storage size calculation overflowed")
_REFUSALS = (
    (PlanInfeasible, Outcome.PLAN_INFEASIBLE, "budget"),
    (Unsupported, Outcome.UNSUPPORTED, "needs"),
    (CaptureError, Outcome.UNSUPPORTED, "capture"),
    (EnvironmentUnable, Outcome.UNSUPPORTED, "environment"),
    (ScheduleError, Outcome.WRONG, "illegal_schedule"),
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function by its dotted name ("package.module.function") with picklable arguments."""

    function: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a worker process is started."""

    memory_limit_bytes: int | None = None  # private writable memory of the process; allocations beyond it fail
    environment: Mapping[str, str] = field(default_factory=dict)  # on top of this process's
    output: IO | int | None = None  # where its stdout and stderr go, None to inherit
    is_forked: bool = False  # from a server with torch imported: not for CUDA, which a fork must not find touched
    on_start: Callable[[int], None] | None = None  # told the pid of each process

    def __post_init__(self) -> None:
        if self.is_forked and (self.environment or self.output is not None):
            raise ValueError("a forked worker has the environment and the output of its caller")


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """What became of an isolated call. `value` only when the outcome is ok."""

    outcome: Outcome
    value: Any = None
    reason: str = ""  # host_memory, gpu_memory, killed, ...
    message: str = ""  # one sentence for a person
    error_type: str = ""  # name of the exception class
    traceback: str = ""
    returncode: int | None = None  # of a process that died before it answered; negative: the signal
    seconds: float = 0.0  # from the start of the process to its answer


@dataclass(frozen=True, kw_only=True)
class Alternation:
    """Seconds of single steps of two workers that took turns. Entry i of both belongs to one round."""

    first_seconds: tuple[float, ...]
    second_seconds: tuple[float, ...]
    failed: str = ""  # "first" or "second", "" when both went through
    failure: CallResult | None = None


# --- the parent's side ---------------------------------------------------------------------------------------------------
def run_isolated(call: Call, *, timeout_seconds: float | None = None, settings: Settings = Settings()) -> CallResult:
    """Run `call` in a fresh process and wait for it. Never raises on account of what happens inside."""
    started = time.monotonic()
    with _worker(settings) as worker:
        result = worker.ask(call, timeout_seconds)
    return replace(result, seconds=time.monotonic() - started)


def prepare_forks(environment: Mapping[str, str] | None = None) -> ForkServer:
    """The server of forks, started where there is none, so that it has imported what it needs when the first fork is asked for."""
    _FORKS.start(_child_environment(Settings()) | dict(environment or {}))
    return _FORKS


def alternate(first: Call, second: Call, *, warmup: int = 3, steps: int = 20, timeout_seconds: float | None = None,
              settings: Settings = Settings(), settle_seconds: float = 0.01) -> Alternation:
    """Time single steps of two workers in turns: first, second, first, second, ...

    Each call runs once in a process of its own and returns a `step()` without arguments; the worker times each step from start to end,
    `torch.cuda.synchronize` included where its step uses CUDA. `warmup` rounds are thrown away. The same call twice is the A/A control.
    `timeout_seconds` bounds the building and each step. Between turns both rest `settle_seconds`: OpenMP threads spin for milliseconds
    after their last parallel region and would run into the other's turn.
    """
    seconds: dict[str, list[float]] = {"first": [], "second": []}
    lost: dict[str, Any] = {}
    with _worker(settings) as one, _worker(settings) as other:
        workers = {"first": one, "second": other}
        for worker, call in zip(workers.values(), (first, second)):
            worker.send(_Build(call))  # both build at the same time
        for name, worker in workers.items():
            answer = worker.receive(timeout_seconds)
            if answer.outcome is not Outcome.OK and not lost:
                lost = {"failed": name, "failure": answer}
        for name, worker in [] if lost else [*workers.items()] * (warmup + steps):
            answer = worker.ask(_Step(), timeout_seconds)
            if answer.outcome is not Outcome.OK:
                lost = {"failed": name, "failure": answer}
                break
            seconds[name].append(answer.value)
            time.sleep(settle_seconds)
    return Alternation(first_seconds=tuple(seconds["first"][warmup:]), second_seconds=tuple(seconds["second"][warmup:]), **lost)


def outcome_of(error: BaseException) -> tuple[Outcome, str]:
    """(outcome, reason) of an exception: allocation failures of host and GPU are OOM, vramlab's own refusals are what they say, and a shape
    that no kernel takes or a disk that is full has its own reason."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or any(words in text for words in _GPU_MEMORY):
        return Outcome.OOM, "gpu_memory"
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "Cannot allocate memory" in text:
        return Outcome.OOM, "host_memory"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Outcome.CRASHED, "disk_full"
    if isinstance(error, RuntimeError) and any(words in text for words in _SHAPE_LIMITS):
        return Outcome.UNSUPPORTED, "shape_limit"
    for kind, outcome, reason in _REFUSALS:
        if isinstance(error, kind):
            return outcome, reason
    return Outcome.CRASHED, type(error).__name__


@contextlib.contextmanager
def _worker(settings: Settings) -> Iterator[_Worker]:
    worker = _Worker(settings)
    try:
        yield worker
    finally:
        worker.end()


class _Worker:
    """One child process and the pipe to it."""

    def __init__(self, settings: Settings) -> None:
        self._oom_kills = _oom_kills()
        self._pipe, theirs = Pipe(duplex=True)
        with theirs:
            self._process = _start(theirs, settings)
        if settings.on_start is not None:
            settings.on_start(self._process.pid)
        # A child that is killed at once breaks the pipe; `ask` reports it.
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send((sys.path, _child_environment(settings), settings.memory_limit_bytes))

    def ask(self, request: Any, timeout_seconds: float | None) -> CallResult:
        """Send a request, wait for its result. A worker that dies or is late is a result too."""
        self.send(request)
        return self.receive(timeout_seconds)

    def send(self, request: Any) -> None:
        """Hand over a request; `receive` reports a worker that is gone."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send(request)

    def receive(self, timeout_seconds: float | None) -> CallResult:
        """Wait for the result of what was sent."""
        try:
            if self._pipe.poll(timeout_seconds):
                return self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return self._autopsy()
        self._kill()
        return CallResult(outcome=Outcome.TIMEOUT, reason="timeout", message=f"no answer within {timeout_seconds:g} s")

    def end(self) -> None:
        """Close the pipe, on which the child goes by itself; kill its group if it does not."""
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSING_SECONDS)
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the group too: it may outlive its leader
        self._process.wait()

    def _autopsy(self) -> CallResult:
        """What the death of the process says."""
        code = self._process.wait()
        if code in (-signal.SIGKILL, Fork.LOST) and _oom_kills() > self._oom_kills:
            return CallResult(outcome=Outcome.OOM, reason="host_memory", returncode=code, message="the kernel killed it for memory")
        if isinstance(self._process, Fork) and code == Fork.LOST:
            return CallResult(outcome=Outcome.CRASHED, reason="server_lost", message="the process and the server that forked it are gone")
        if code >= 0:
            return CallResult(outcome=Outcome.CRASHED, reason="exit", returncode=code, message=f"the process ended with exit code {code}")
        name = signal.Signals(-code).name
        return CallResult(outcome=Outcome.CRASHED, reason=name, returncode=code, message=f"the process died of {name}")


def _start(pipe: Connection, settings: Settings) -> Fork | subprocess.Popen:
    if settings.is_forked:
        with contextlib.suppress(ServerLost):  # killed for memory, say: without it the process takes longer to start, no more
            return _FORKS.fork(pipe, _child_environment(settings), owner=os.environ.get(MARKER, ""))
    return _popen(pipe, settings)


def _popen(pipe: Connection, settings: Settings) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "vramlab.isolate", str(pipe.fileno())], pass_fds=[pipe.fileno()], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=settings.output, stderr=settings.output, env=_child_environment(settings),
    )


def _child_environment(settings: Settings) -> dict[str, str]:
    """The package must be found before the child has been told its path."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    # Threads that spin at each barrier, as they do by default, make a step ten times slower as soon as anything else runs on the machine.
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": path, **settings.environment}


def _oom_kills() -> int:
    """How many processes the kernel has killed for memory: in this control group and on the machine. 0 where it does not say."""
    total = 0
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError):
            counts = dict(line.split() for line in Path(path).read_text().splitlines())
            total += int(counts.get("oom_kill", 0))
    return total


# --- the child's side ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Build:
    call: Call


@dataclass(frozen=True)
class _Step:
    pass


def _serve(pipe: Connection) -> None:
    """Answer requests until the pipe closes: one `Call`, or a `_Build` and its `_Step`s."""
    with contextlib.suppress(EOFError):
        _answer_requests(pipe)


def _answer_requests(pipe: Connection) -> None:
    os.set_inheritable(pipe.fileno(), False)  # a grandchild that held it would hide this process's death
    sys.path[:], environment, memory_limit_bytes = pipe.recv()
    os.environ.update(environment)  # of the caller as it is now; a fork's own is its server's
    if memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_bytes, memory_limit_bytes))
    step = None
    while True:
        request = pipe.recv()
        if isinstance(request, Call):
            _leave_when_closed(pipe, request)
            return
        result = _attempt(_timed, step) if isinstance(request, _Step) else _attempt(_invoke, request.call)
        if isinstance(request, _Build):
            step, result = result.value, replace(result, value=None)
        _answer(pipe, result)


def _leave_when_closed(pipe: Connection, call: Call) -> None:
    """Run a single call while a thread watches the pipe: a parent that is gone wants no answer."""
    done = threading.Event()

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()
        if not done.is_set():
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    result = _attempt(_invoke, call)
    done.set()
    _answer(pipe, result)


def _invoke(call: Call) -> Any:
    module, _, name = call.function.rpartition(".")
    return getattr(import_module(module), name)(*call.args, **call.kwargs)


def _attempt(function: Callable[..., Any], *args: Any) -> CallResult:
    """Only here is everything caught: an isolated call answers, whatever happens in it."""
    try:
        return CallResult(outcome=Outcome.OK, value=function(*args))
    except BaseException as error:
        outcome, reason = outcome_of(error)
        return CallResult(outcome=outcome, reason=reason, message=str(error) or type(error).__name__, error_type=type(error).__name__,
                       traceback=traceback.format_exc())


def _answer(pipe: Connection, result: CallResult) -> None:
    try:
        body = pickle.dumps(result)
    except Exception as error:  # what a class raises while it is pickled is its own choice
        body = pickle.dumps(CallResult(outcome=Outcome.CRASHED, reason="unpicklable", message=f"the result cannot be sent: {error}",
                                    error_type=type(error).__name__))
    pipe.send_bytes(body)


def _timed(step: Callable[[], Any]) -> float:
    """Seconds of one step, from start to end of its work."""
    synchronize = _synchronizer()
    synchronize()
    started = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - started


def _synchronizer() -> Callable[[], None]:
    """`torch.cuda.synchronize` once the step has brought CUDA up, nothing otherwise."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.synchronize
    return lambda: None


def main() -> None:
    """`python -m vramlab.isolate FD`: serve the pipe on this file descriptor. `--forks FD`: fork processes that do."""
    from vramlab import isolate  # the classes that the parent pickles by name, not those of `__main__`

    what, fd = sys.argv[-2], int(sys.argv[-1])
    if what == "--forks":
        serve_forks(fd, _PRELOADED, isolate._serve)
    else:
        with Connection(fd) as pipe:
            isolate._serve(pipe)


if __name__ == "__main__":
    main()
