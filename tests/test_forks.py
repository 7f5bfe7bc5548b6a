"""The server of forks killed, stopped and shared; forks killed; callers killed: nobody hangs, nothing is left, each death is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import psutil
import pytest

from vramlab.forks import Fork, ForkServer, ServerLost
from vramlab.isolate import Call, Settings, run_isolated
from vramlab.record import Outcome

# A fork answers what it is asked until the pipe closes; asked for a number, it ends with it.
SERVER = """
import os, signal, sys
from vramlab.forks import serve_forks

def serve(pipe):
    while True:
        question = pipe.recv()
        if isinstance(question, int):
            sys.exit(question)
        pipe.send(eval(question))

serve_forks(int(sys.argv[1]), ["numpy", "no_such_module"], serve)
"""


EMPTY_SERVER = [sys.executable, "-c", "from vramlab import isolate; isolate._PRELOADED = (); isolate.main()", "--forks"]


@pytest.fixture
def server() -> Iterator[ForkServer]:
    forks = ForkServer([sys.executable, "-c", SERVER])
    yield forks
    forks.close()


@pytest.fixture
def server_of_isolate() -> Iterator[ForkServer]:
    """One whose forks answer isolated calls; it has imported nothing."""
    forks = ForkServer(EMPTY_SERVER)
    forks.start(os.environ)
    yield forks
    forks.close()


def forked(server: ForkServer, owner: str = "") -> tuple[Fork, Connection]:
    ours, theirs = Pipe()
    with theirs:
        return server.fork(theirs, os.environ, owner), ours


def answer(server: ForkServer, question: str):
    fork, pipe = forked(server)
    with pipe:
        pipe.send(question)
        value = pipe.recv()
        pipe.send(0)
        assert fork.wait(10) == 0
    return value


def killed(server: ForkServer) -> None:
    os.kill(server.pid, signal.SIGKILL)


def test_a_fork_leads_a_group_and_holds_nothing_of_its_server(server):
    first, held = forked(server)
    pid, group, fds = answer(server, "(os.getpid(), os.getpgid(0), len(os.listdir('/proc/self/fd')))")
    assert pid == group != first.pid
    assert fds == 3 + 1 + 1  # the standard ones, its pipe, and the folder that is being read
    held.close()
    assert first.wait(10) == 1  # EOFError, as in any process


def test_a_fork_has_signals_and_randomness_of_its_own(server):
    assert answer(server, "signal.getsignal(signal.SIGINT) is signal.default_int_handler")
    draws = [answer(server, "__import__('numpy').random.random()") for _ in range(2)]
    assert draws[0] != draws[1]
    assert len({answer(server, "__import__('random').random()") for _ in range(2)}) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_the_death_of_a_fork_is_told(server, number):
    fork, _ = forked(server)
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(0.05)
    os.kill(fork.pid, number)
    assert fork.wait(10) == -number == fork.wait()


def test_an_exit_code_is_told(server):
    fork, pipe = forked(server)
    pipe.send(7)
    assert fork.wait(10) == 7


def test_what_was_registered_for_its_end_runs_in_a_fork(server, tmp_path):
    fork, pipe = forked(server)
    pipe.send(f"__import__('atexit').register(os.mkdir, {str(tmp_path / 'left')!r}) and None")
    assert pipe.recv() is None and not (tmp_path / "left").exists()
    pipe.send(0)
    assert fork.wait(10) == 0 and (tmp_path / "left").exists()


def test_an_error_in_a_fork_is_its_exit_code(server):
    fork, pipe = forked(server)
    pipe.send("no_such_name")
    assert fork.wait(10) == 1


def test_a_fork_leaves_without_the_interpreters_teardown(server):
    """Which takes seconds with torch imported: an object that would hold it up is never finalized."""
    fork, pipe = forked(server)
    pipe.send("setattr(sys, 'held', type('Held', (), {'__del__': lambda self: __import__('time').sleep(60)})())")
    assert pipe.recv() is None
    pipe.send(0)
    assert fork.wait(10) == 0


LENT_TO = """
import os, sys
from vramlab.isolate import Call, Settings, _FORKS, run_isolated
result = run_isolated(Call(function="os.getppid"), settings=Settings(is_forked=True))
run_isolated(Call(function="isolated_work.speak", args=("said in a fork",)), settings=Settings(is_forked=True))
print(result.value, _FORKS.pid, os.environ.get("VRAMLAB_FORKS"))
"""


def test_a_child_asks_the_server_that_it_is_lent(server_of_isolate, monkeypatch):
    """Its forks are the lent server's children, they speak where it speaks, and its own children are lent nothing."""
    variables, descriptors = server_of_isolate.lend()
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", LENT_TO], pass_fds=descriptors, capture_output=True, text=True, timeout=60,
                          env={**os.environ, **variables, "PYTHONPATH": f"{root}:{root / 'tests'}"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["said in a fork", f"{server_of_isolate.pid} None None"]
    assert done.stderr.splitlines() == ["said in a fork"]


def test_a_lent_server_that_is_gone_is_replaced(server_of_isolate):
    variables, descriptors = server_of_isolate.lend()
    gone = server_of_isolate.pid
    killed(server_of_isolate)
    root = Path(__file__).resolve().parents[1]
    script = f"import vramlab.isolate as isolate; isolate._FORKS._command = {tuple(EMPTY_SERVER)!r}\n{LENT_TO}"
    done = subprocess.run([sys.executable, "-c", script], pass_fds=descriptors, capture_output=True, text=True, timeout=60,
                          env={**os.environ, **variables, "PYTHONPATH": f"{root}:{root / 'tests'}"})
    assert done.returncode == 0, done.stderr
    server, own, _ = done.stdout.splitlines()[-1].split()
    assert server == own != str(gone)


def test_forks_end_with_their_owner(server):
    """Killed with their groups, those of another owner left alone; and all of them when the server's parent goes."""
    (mine, my_pipe), (other, other_pipe) = forked(server, "mine"), forked(server, "other's")
    my_pipe.send("__import__('subprocess').Popen(['sleep', '60']).pid")
    grandchild = psutil.Process(my_pipe.recv())
    server.end_forks("mine")
    assert mine.wait(10) == -signal.SIGKILL and not other_pipe.poll(0.1)
    assert grandchild.wait(10) is None or not grandchild.is_running()
    other_pipe.send("1")
    assert other_pipe.recv() == 1
    server.end_forks("nobody's")
    server.close()
    assert other.wait(10) == -signal.SIGKILL


def test_a_killed_server_is_started_anew(server):
    answer(server, "1")
    before = server.pid
    killed(server)
    assert answer(server, "2") == 2
    assert server.pid != before


def test_a_server_killed_while_a_fork_is_asked_for(server):
    answer(server, "1")
    os.kill(server.pid, signal.SIGSTOP)
    threading.Timer(0.3, killed, [server]).start()
    assert answer(server, "2") == 2


def test_a_fork_outlives_its_server_and_its_end_is_unknown(server):
    fork, pipe = forked(server)
    killed(server)
    assert fork.wait(10) == Fork.LOST
    pipe.send("3")
    assert pipe.recv() == 3
    pipe.close()


def test_a_server_that_cannot_start_is_lost():
    with pytest.raises(ServerLost):
        forked(ForkServer(["false"]))


def test_without_a_server_a_worker_starts_anew(monkeypatch):
    monkeypatch.setattr("vramlab.isolate._FORKS", ForkServer(["false"]))
    result = run_isolated(Call(function="isolated_work.state_of_torch"), settings=Settings(is_forked=True))
    assert result.value[0] is False


def test_threads_share_a_server_and_leave_no_descriptor(server):
    answer(server, "0")
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda i: answer(server, str(i)), range(12))) == list(range(12))
    assert len(os.listdir("/proc/self/fd")) == before
    assert psutil.Process(server.pid).children() == []


def test_a_closed_server_is_reaped(server):
    answer(server, "1")
    pid = server.pid
    server.close()
    assert server.pid is None and not psutil.pid_exists(pid)


def test_a_fork_of_the_caller_does_not_use_its_server(server):
    answer(server, "1")
    child = os.fork()
    if not child:
        os._exit(0 if server.pid is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


CALLER = """
import os, signal, sys
import vramlab.isolate as isolate
server = "from vramlab import isolate; isolate._PRELOADED = (); isolate.main()"
isolate._FORKS = isolate.ForkServer([sys.executable, "-c", server, "--forks"])
print(isolate.run_isolated(isolate.Call(function="os.getpid"), settings=isolate.Settings(is_forked=True)).value, isolate._FORKS.pid)
sys.stdout.flush()
if len(sys.argv) > 1:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("arguments", [[], ["killed"]], ids=["ends", "killed"])
def test_a_script_without_a_guard_leaves_nothing_behind(tmp_path, arguments):
    """Its main module is not run again in a fork, its temporary folder may have any length, and nothing is left in it."""
    temporary = tmp_path / ("long" * 40)
    temporary.mkdir()
    script = tmp_path / "script.py"
    script.write_text(CALLER)
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, str(script), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
                          env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(root)})
    assert done.returncode == (-signal.SIGKILL if arguments else 0), done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1  # two, had a fork run the script too
    _, left = psutil.wait_procs([psutil.Process(pid) for pid in map(int, lines[0].split()) if psutil.pid_exists(pid)], timeout=10)
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []
    assert list(temporary.iterdir()) == []


def test_a_fork_whose_server_is_gone_too_is_lost():
    result = run_isolated(Call(function="isolated_work.die_with_parent"), settings=Settings(is_forked=True))
    assert (result.outcome, result.reason, result.returncode) == (Outcome.CRASHED, "server_lost", None)
