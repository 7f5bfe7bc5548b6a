"""What tests of isolated calls, of the meter and of searches run in other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from vramlab.errors import PlanInfeasible


def add(a: int, b: int = 0) -> int:
    return a + b


def who() -> tuple[int, int]:
    return os.getpid(), os.getpgid(0)


def variable(name: str) -> str | None:
    return os.environ.get(name)


def speak(text: str) -> None:
    print(text, flush=True)
    print(text, file=sys.stderr, flush=True)


def fail() -> None:
    raise ValueError("seven is not eight")


def refuse_plan() -> None:
    raise PlanInfeasible(method="m", budget_bytes=10, smallest_bytes=20, op="#3")


def lambda_result():
    return lambda: None


def die(signal_number: int) -> None:
    os.kill(os.getpid(), signal_number)


def die_with_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def leave(code: int) -> None:
    os._exit(code)


def allocate(nbytes: int) -> int:
    return len(bytearray(nbytes))


def allocate_tensor(nbytes: int) -> int:
    import torch

    return torch.ones(nbytes, dtype=torch.uint8).numel()


def sleep_with_child(pid_file: str) -> None:
    """Starts a grandchild of the same group, writes both pids, then hangs."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(pid_file).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(60)


def parent_that_waits(pid_file: str) -> None:
    """An isolated call that isolates a hanging call."""
    from vramlab.isolate import Call, run_isolated

    run_isolated(Call(function="isolated_work.sleep_with_child", args=(pid_file,)))


def parent_that_waits_for_a_fork(pid_file: str) -> None:
    from vramlab.isolate import Call, Settings, run_isolated

    run_isolated(Call(function="isolated_work.sleep_with_child", args=(pid_file,)), settings=Settings(is_forked=True))


def state_of_torch() -> tuple[bool, int]:
    """(whether torch was imported already, threads of its kernels)."""
    had_torch = "torch" in sys.modules
    import torch

    return had_torch, torch.get_num_threads()


def stepper(seconds: float, log: str = "", name: str = ""):
    """A step that sleeps, and notes who is at work."""

    def step():
        if log:
            with open(log, "a") as file:
                file.write(name)
        time.sleep(seconds)
        return 7

    return step


def stepper_that_dies(after: int):
    steps = iter(range(after))

    def step():
        if next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGSEGV)

    return step


def gpu_stepper():
    """A step whose kernels take at least 10 ms at 2 GHz and that does not wait for them."""
    import torch

    torch.cuda.init()
    return lambda: torch.cuda._sleep(20_000_000)


def free_of_an_older_block() -> tuple[int, int]:
    """(events, peak) that the meter sees when a block is freed that is older than it."""
    import torch

    from vramlab.meter import measure_peak

    older = [torch.empty(1000)]

    def run():
        older.clear()
        return []

    reading = measure_peak(run)
    return reading.events, reading.peak_bytes


def bytes_that_an_outer_profiler_sees() -> int:
    """Allocated by a tensor that is made after a profiler inside it has ended."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    settings = {"activities": [ProfilerActivity.CPU], "profile_memory": True}
    with profile(**settings) as outer:
        with profile(**settings):
            pass
        kept = torch.empty(1000)
    del kept
    results = outer.profiler.kineto_results
    return 0 if results is None else sum(max(0, event.nbytes()) for event in results.events() if event.name() == "[memory]")


def eager_peak(config: dict, collections: list[str]) -> int:
    """The most bytes that any of three whole eager steps of a cell holds, by the allocator's meter."""
    from vramlab.collection import Library
    from vramlab.meter import AllocatorMeter
    from vramlab.workload import build

    with AllocatorMeter() as meter:
        step = build(Library(collections).model(config["model"]), config)
        optimizer = step.make_optimizer()
        for _ in range(3):
            optimizer.zero_grad()
            step.loss_fn(step.model, *step.batch).backward()
            optimizer.step()
    return meter.reading.peak_bytes
