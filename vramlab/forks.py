"""A server that has imported modules, and forks of it: processes that need not import them again.

    parent                          server                         fork
    ForkServer.fork(pipe)  ---->    fork()              ---->      leaves its server's group, says its pid, serves the pipe
    Fork.wait()            <----    the exit code

A socket pair leads to the server and nothing on the disk does, so that a parent killed at any moment leaves no file; nothing of the
parent's main module is run again. A parent may lend its end to a child, which asks for forks as it does: a fork has the standard output of
who asked for it, and ends with its owner, whom the request names. Server and forks run what was registered for their end and leave without
the interpreter's teardown, which takes seconds with torch imported. The server ends when its parent's end of the pair closes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import NoReturn

_ASKED = struct.Struct("=c32s")  # a request: its kind and the owner of forks
_FORK, _END = b"f", b"e"
_SAID = struct.Struct("=cq")  # what is said on the pipe of a fork: its pid by the fork, then its exit code by the server
_PID, _CODE = b"p", b"c"
_OUTPUTS = (1, 2)  # standard output and error
_ENDING_SECONDS = 5.0  # how long a server whose parent closed the pair may take to go


LENT = "VRAMLAB_FORKS"  # in the environment of a child: the descriptor by which its parent lends it a server of forks


class ServerLost(Exception):
    """The server died before there was a fork."""


class ForkServer:
    """The parent's end. The server starts with the first fork, and anew when it was lost; threads may share it.

    `command` starts it: the descriptor of its end of the pair is appended, and it must come to `serve_forks`.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command, self._starting, self._owner = tuple(command), threading.Lock(), 0
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None
        self._is_lent = False

    @classmethod
    def lent(cls, command: Sequence[str]) -> ForkServer:
        """The server that the parent process lends, and one of its own where it lends none or that one is lost."""
        server, fd = cls(command), os.environ.pop(LENT, "")
        with contextlib.suppress(ValueError, OSError):
            server._control = socket.socket(fileno=int(fd))
            server._control.set_inheritable(False)
            server._owner, server._is_lent = os.getpid(), True
        return server

    def lend(self) -> tuple[dict[str, str], list[int]]:
        """(what a child needs in its environment, descriptors that it is to inherit) to ask this server for forks."""
        if not self._is_there:
            return {}, []
        return {LENT: str(self._control.fileno())}, [self._control.fileno()]

    @property
    def pid(self) -> int | None:
        """Of the server that this process started, None while there is none."""
        return self._process.pid if self._process is not None and self._owner == os.getpid() else None

    @property
    def _is_there(self) -> bool:
        """In a process that forked with its server, neither is that process's."""
        return (self._process is not None or self._is_lent) and self._owner == os.getpid()

    def fork(self, pipe: Connection, environment: Mapping[str, str], owner: str = "") -> Fork:
        """A fork that serves `pipe`. `environment` is the server's if it has yet to start. ServerLost when it dies at that, twice."""
        with self._starting:
            try:
                return self._forked(pipe, environment, owner)
            except ServerLost:
                self._close()
            return self._forked(pipe, environment, owner)

    def end_forks(self, owner: str) -> None:
        """Kill what of an owner's forks still runs, with their groups."""
        with self._starting, contextlib.suppress(ServerLost):  # which ends its forks as it goes
            if self._is_there:
                os.close(self._ask(_END, owner, [], wait=True))

    def _ask(self, kind: bytes, owner: str, fds: Sequence[int], wait: bool = False) -> int:
        """The descriptor on which the server answers a request."""
        said, tell = os.pipe()
        try:
            socket.send_fds(self._control, [_ASKED.pack(kind, owner.encode())], [tell, *fds])
        except OSError as error:
            os.close(said)
            raise ServerLost("the server of forks is gone") from error
        finally:
            os.close(tell)
        if wait:
            os.read(said, _SAID.size)
        return said

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the server where there is none, so that it imports while its parent does other things."""
        with self._starting:
            if not self._is_there:
                self._start(environment)

    def close(self) -> None:
        """End the server and what of its forks still runs; a server that is lent goes on."""
        with self._starting:
            self._close()

    def _forked(self, pipe: Connection, environment: Mapping[str, str], owner: str) -> Fork:
        if not self._is_there:
            self._start(environment)
        return Fork(self._ask(_FORK, owner, [pipe.fileno(), *_OUTPUTS]))

    def _start(self, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen([*self._command, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                                             stdin=subprocess.DEVNULL, env=dict(environment))
        self._owner = os.getpid()

    def _close(self) -> None:
        if self._is_there:
            self._control.close()
        if self.pid is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDING_SECONDS)
            self._process.kill()
            self._process.wait()
        self._process, self._is_lent = None, False


class Fork:
    """A forked process by the pipe on which it and its server speak of it, with what its caller needs of a Popen."""

    LOST = 255  # its exit code where its server died before it did

    def __init__(self, said: int) -> None:
        self._said, self._code = said, None
        kind, self.pid = self._read()
        if kind != _PID:
            os.close(said)
            raise ServerLost("the fork died before it was one")

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal. subprocess.TimeoutExpired when it still runs."""
        if self._code is None:
            poll = select.poll()  # `select.select` refuses descriptors over 1023
            poll.register(self._said, select.POLLIN)
            if not poll.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("a forked process", timeout)
            kind, code = self._read()
            self._code = code if kind == _CODE else self.LOST
            os.close(self._said)
        return self._code

    def kill(self) -> None:
        """Kill it, unless it is known to have ended."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _read(self) -> tuple[bytes, int]:
        body = os.read(self._said, _SAID.size)  # so few bytes are written whole or not at all
        return _SAID.unpack(body) if body else (b"", 0)


# --- the server's side ---------------------------------------------------------------------------------------------------
def serve_forks(control_fd: int, modules: Sequence[str], serve: Callable[[Connection], None]) -> NoReturn:
    """Import `modules`, then fork on request until all is over; each fork runs `serve` with its pipe and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is its parent's to judge
    for name in modules:
        with contextlib.suppress(Exception):  # a fork that needs it meets the same error and has somebody to tell
            import_module(name)
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # with a handler, each death writes to the pipe that wakes the loop
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    running: dict[int, _Running] = {}
    with socket.socket(fileno=control_fd) as control:
        while True:
            readable, _, _ = select.select([control, wake_read], [], [])
            if wake_read in readable:
                os.read(wake_read, 4096)
                _report_deaths(running)
            if control in readable:
                request, fds, _, _ = socket.recv_fds(control, _ASKED.size, 2 + len(_OUTPUTS))
                if not request:
                    for owner in {one.owner for one in running.values()}:
                        _end_forks(running, owner)
                    _leave(0)
                kind, owner = _ASKED.unpack(request)
                tell, *theirs = fds
                if kind == _END:
                    _end_forks(running, owner)
                    os.close(tell)
                    continue
                pid = os.fork()
                if not pid:
                    control.close()
                    _end_with(serve, _become_fork(tell, theirs, [wake_read, wake_write, *(one.tell for one in running.values())]))
                for end in theirs:
                    os.close(end)
                running[pid] = _Running(tell, owner)


@dataclass(frozen=True)
class _Running:
    """A fork, as its server knows it."""

    tell: int  # where its caller hears of it
    owner: bytes


def _report_deaths(running: dict[int, _Running]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        _report_death(running, pid, status)


def _report_death(running: dict[int, _Running], pid: int, status: int) -> None:
    if (one := running.pop(pid, None)) is not None:
        with contextlib.suppress(BrokenPipeError):  # the caller went
            os.write(one.tell, _SAID.pack(_CODE, os.waitstatus_to_exitcode(status)))
        os.close(one.tell)


def _end_forks(running: dict[int, _Running], owner: bytes) -> None:
    """Kill an owner's with their groups, and report their deaths."""
    for pid in [pid for pid, one in running.items() if one.owner == owner]:
        for kill in (os.killpg, os.kill):  # one that has just begun leads no group yet
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        _report_death(running, *os.waitpid(pid, 0))


def _become_fork(tell: int, theirs: Sequence[int], others: Sequence[int]) -> Connection:
    """In the fork: a group of its own, signals as in any process, nothing of the server's open, randomness of its own."""
    os.setsid()
    pipe, *outputs = theirs
    for given, own in zip(outputs, _OUTPUTS):
        os.dup2(given, own)
        os.close(given)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for end in others:
        os.close(end)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python's own generator does so by itself, torch's is the same in every new process
    with contextlib.suppress(BrokenPipeError):
        os.write(tell, _SAID.pack(_PID, os.getpid()))
    os.close(tell)
    return Connection(pipe)


def _end_with(serve: Callable[[Connection], None], pipe: Connection) -> NoReturn:
    code = 1
    try:
        with pipe:
            serve(pipe)
        code = 0
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _leave(code: int) -> NoReturn:
    """End without the interpreter's teardown."""
    atexit._run_exitfuncs()  # of what a fork ran: a temporary folder, say
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # None, closed or a broken pipe: nobody is left to tell
            stream.flush()
    os._exit(code)
