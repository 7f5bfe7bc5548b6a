"""Isolated calls: answers, errors, deaths, limits, time-outs; and workers that take turns."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from vramlab.isolate import Call, Settings, alternate, run_isolated
from vramlab.record import Outcome


BOTH = pytest.mark.parametrize("settings", [Settings(), Settings(is_forked=True)], ids=["anew", "forked"])


def call(name: str, *args, **kwargs) -> Call:
    return Call(function=f"isolated_work.{name}", args=args, kwargs=kwargs)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def wait_until(condition, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


@BOTH
def test_a_result_comes_back(settings):
    result = run_isolated(call("add", 2, b=3), settings=settings)
    assert (result.outcome, result.value) == (Outcome.OK, 5)
    assert 0 < result.seconds < 60


@BOTH
def test_a_fresh_process_in_a_group_of_its_own(settings):
    (pid, group), (other, _) = (run_isolated(call("who"), settings=settings).value for _ in range(2))
    assert len({os.getpid(), pid, other}) == 3
    assert group == pid


def test_a_fork_finds_torch_imported_and_untouched():
    had_torch, threads = run_isolated(call("state_of_torch"), settings=Settings(is_forked=True)).value
    assert had_torch
    assert run_isolated(call("state_of_torch")).value == (False, threads)


def test_a_fork_has_its_servers_environment_and_output():
    with pytest.raises(ValueError, match="has the environment and the output of its caller"):
        Settings(is_forked=True, environment={"A": "1"})


def test_environment_reaches_the_call():
    assert run_isolated(call("variable", "VRAMLAB_TEST"), settings=Settings(environment={"VRAMLAB_TEST": "yes"})).value == "yes"
    assert "VRAMLAB_TEST" not in os.environ


def test_a_fork_has_the_environment_of_its_call(monkeypatch):
    run_isolated(call("who"), settings=Settings(is_forked=True))  # the server is there
    monkeypatch.setenv("VRAMLAB_TEST", "later")
    assert run_isolated(call("variable", "VRAMLAB_TEST"), settings=Settings(is_forked=True)).value == "later"


def test_output_goes_to_a_file(tmp_path):
    with (tmp_path / "out").open("wb") as file:
        assert run_isolated(call("speak", "hello"), settings=Settings(output=file)).outcome is Outcome.OK
    assert (tmp_path / "out").read_text() == "hello\nhello\n"


@BOTH
def test_an_exception_is_data(settings):
    result = run_isolated(call("fail"), settings=settings)
    assert (result.outcome, result.error_type, result.message) == (Outcome.CRASHED, "ValueError", "seven is not eight")
    assert "isolated_work.py" in result.traceback


@BOTH
def test_an_unknown_function_is_data(settings):
    assert run_isolated(call("no_such_thing"), settings=settings).error_type == "AttributeError"
    assert run_isolated(Call(function="no_such_module.f"), settings=settings).error_type == "ModuleNotFoundError"


@BOTH
def test_a_refused_plan_keeps_its_outcome(settings):
    result = run_isolated(call("refuse_plan"), settings=settings)
    assert result.outcome is Outcome.PLAN_INFEASIBLE and "20 bytes" in result.message


@BOTH
def test_a_result_that_cannot_be_sent_is_data(settings):
    assert run_isolated(call("lambda_result"), settings=settings).reason == "unpicklable"


@BOTH
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM])
def test_a_signal_is_data(number, settings):
    result = run_isolated(call("die", int(number)), settings=settings)
    assert (result.outcome, result.reason, result.returncode) == (Outcome.CRASHED, number.name, -number)


@BOTH
def test_an_exit_code_is_data(settings):
    result = run_isolated(call("leave", 3), settings=settings)
    assert (result.outcome, result.reason, result.returncode) == (Outcome.CRASHED, "exit", 3)


def test_a_memory_limit_makes_allocations_fail():
    limit = Settings(memory_limit_bytes=300 * 2**20)
    assert run_isolated(call("allocate", 100 * 2**20), settings=limit).outcome is Outcome.OK
    result = run_isolated(call("allocate", 400 * 2**20), settings=limit)
    assert (result.outcome, result.reason) == (Outcome.OOM, "host_memory")


def test_a_tensor_beyond_the_limit_is_oom():
    result = run_isolated(call("allocate_tensor", 40 * 2**30), settings=Settings(memory_limit_bytes=20 * 2**30))
    assert (result.outcome, result.reason) == (Outcome.OOM, "host_memory")


@BOTH
def test_a_timeout_kills_the_whole_group(tmp_path, settings):
    pids = tmp_path / "pids"
    run_isolated(call("who"), settings=settings)  # so that a server of forks is there already
    result = run_isolated(call("sleep_with_child", str(pids)), timeout_seconds=2.0, settings=settings)
    assert result.outcome is Outcome.TIMEOUT and 2.0 <= result.seconds < 10
    assert wait_until(lambda: not any(is_alive(int(p)) for p in pids.read_text().split()))


@pytest.mark.parametrize("inner", ["parent_that_waits", "parent_that_waits_for_a_fork"])
def test_nobody_outlives_a_killed_parent(tmp_path, inner):
    """The outer call is killed with SIGKILL at its time-out; its own isolated call sits in another group and must go by itself."""
    pids = tmp_path / "pids"
    result = run_isolated(call(inner, str(pids)), timeout_seconds=12.0)
    assert result.outcome is Outcome.TIMEOUT
    assert len(pids.read_text().split()) >= 2
    assert wait_until(lambda: not any(is_alive(int(p)) for p in pids.read_text().split()))


def test_workers_take_turns_and_report_their_own_seconds(tmp_path):
    log = tmp_path / "log"
    result = alternate(call("stepper", 0.03, str(log), "a"), call("stepper", 0.01, str(log), "b"), warmup=2, steps=4)
    assert log.read_text() == "ab" * 6
    assert result.failed == "" and result.failure is None
    assert len(result.first_seconds) == len(result.second_seconds) == 4
    assert all(0.03 <= s < 0.2 for s in result.first_seconds) and all(0.01 <= s < 0.2 for s in result.second_seconds)


def test_the_same_worker_twice_is_the_control():
    step = call("stepper", 0.02)
    result = alternate(step, step, warmup=1, steps=5)
    ratios = [a / b for a, b in zip(result.first_seconds, result.second_seconds)]
    assert 0.5 < sorted(ratios)[2] < 2.0


@BOTH
def test_a_worker_that_dies_is_data(settings):
    result = alternate(call("stepper", 0.0), call("stepper_that_dies", 3), warmup=1, steps=5, settings=settings)
    assert (result.failed, result.failure.outcome, result.failure.reason) == ("second", Outcome.CRASHED, "SIGSEGV")
    assert (len(result.first_seconds), len(result.second_seconds)) == (3, 2)


@BOTH
def test_a_worker_that_cannot_be_built_is_data(settings):
    result = alternate(call("fail"), call("stepper", 0.0), settings=settings)
    assert (result.failed, result.failure.error_type, result.first_seconds) == ("first", "ValueError", ())


def test_a_slow_step_times_out():
    result = alternate(call("stepper", 0.0), call("stepper", 30.0), timeout_seconds=2.0)
    assert (result.failed, result.failure.outcome) == ("second", Outcome.TIMEOUT)


@pytest.mark.gpu
def test_a_gpu_step_is_timed_to_its_end():
    """The sleep runs on the device; without a synchronisation the step would seem to take microseconds."""
    result = alternate(call("gpu_stepper"), call("gpu_stepper"), warmup=1, steps=3)
    assert min(result.first_seconds + result.second_seconds) > 0.005
