"""Everything of vramlab that needs CUDA, checked on the GPU at hand in at most eight minutes; one JSON and one table.

    python benchmarks/gpu_check.py [--device cuda:0|cpu] [--quick] [--only truth,overlap] [--out benchmarks/evidence/gpu_check.json]

    capture        capture on the device, costs of every op, the device's profile, eager's peak and its prediction
    truth          every planning method on three models under two budgets: bits of three optimizer steps, hard budget, predicted peak
    replay         our executor without a method against eager, in turns in one process, eager against eager beside it
    prediction     step times, simulated against executed
    overlap        copies hidden under compute, and the same copies in the open
    streams        negative controls: an order of streams that is left out must be found by the truth gate
    telemetry      NVML's fields, NVML against torch, the sampler
    peers          PyTorch's own checkpointing, offloading and compiler
    largest-batch  eager and DELTA on ResNet-50 under 12 GiB, emulated by a ballast

It needs torch, torchvision, numpy, numba, PyYAML and, for NVML, nvidia-ml-py. Each section runs in a process of its own until its deadline:
a crash, a sticky CUDA error or a hang ends that section, keeps its rows, and the script goes on. This process never touches the GPU. Exit
code 0 only if nothing failed. `--quick` takes small models; on a CPU it is always on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
if importlib.util.find_spec("psutil") is None:
    sys.path.append(str(HERE / "stand_ins"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HERE / "stand_ins")]))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is there: it asks for it once

import gpu_sections as sections  # noqa: E402
from gpu_sections import Context  # noqa: E402
from gpu_steps import planners  # noqa: E402

from vramlab import costs  # noqa: E402

FORK = multiprocessing.get_context("fork")  # a child starts with torch imported; CUDA begins in it alone
TOTAL_SECONDS = 465.0
PACKAGES = ("torch", "torchvision", "numpy", "numba", "nvidia-ml-py", "PyYAML", "psutil")


@dataclass(frozen=True, kw_only=True)
class Section:
    """One question, or one about each model, which are then asked at the same time."""

    name: str
    ask: Callable[..., None]
    seconds: float
    is_per_model: bool = False
    starts_others: bool = False  # it asks in processes of its own


SECTIONS = (
    Section(name="capture", ask=sections.capture, seconds=90),
    Section(name="truth", ask=sections.truth, seconds=160, is_per_model=True),
    Section(name="replay", ask=sections.replay, seconds=40),
    Section(name="prediction", ask=sections.prediction, seconds=45),
    Section(name="overlap", ask=sections.overlap, seconds=30),
    Section(name="streams", ask=sections.stream_controls, seconds=30),
    Section(name="telemetry", ask=sections.telemetry, seconds=25),
    Section(name="peers", ask=sections.peers, seconds=90),
    Section(name="largest-batch", ask=sections.largest_batch, seconds=110, starts_others=True),
)


@dataclass
class Result:
    """What became of a section."""

    name: str
    limit_seconds: float
    outcome: str = "ok"  # ok, failed, crashed, deadline, skipped
    message: str = ""
    traceback: str = ""
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Did it come to its end, with no row that does not hold?"""
        return self.outcome == "ok" and bool(self.rows) and all(row["ok"] is not False for row in self.rows)


# --- children -------------------------------------------------------------------------------------------------------------
class Child:
    """A section in a process of its own."""

    def __init__(self, name: str, ask: Callable[..., None], context: Context, told: dict[str, Any], *, leads_group: bool = True) -> None:
        self.result = Result(name, context.seconds)
        self.started, self.leads_group = time.monotonic(), leads_group
        self.pipe, theirs = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=_serve, args=(theirs, ask, context, told, leads_group))
        self.process.start()
        theirs.close()

    @property
    def seconds_left(self) -> float:
        """Until its deadline."""
        return max(0.0, self.started + self.result.limit_seconds - time.monotonic())

    def receive(self) -> dict[str, Any] | None:
        """The row that it sent, None when it has ended; the result then says how."""
        try:
            kind, body = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            self._end("crashed", f"the process ended with exit code {self.process.exitcode}")
            return None
        if kind == "row":
            self.result.rows.append(body)
            return body
        self._end("failed" if body else "ok", body.strip().splitlines()[-1] if body else "", body)
        return None

    def kill(self, outcome: str = "deadline", message: str = "") -> None:
        """End it with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if self.leads_group else os.kill)(self.process.pid, signal.SIGKILL)
        self._end(outcome, message or f"ended at its deadline of {self.result.limit_seconds:.0f} s")

    def _end(self, outcome: str, message: str, trace: str = "") -> None:
        self.process.join()
        self.result.outcome, self.result.message, self.result.traceback = outcome, message, trace
        self.result.seconds = time.monotonic() - self.started


def _serve(pipe: Connection, ask: Callable[..., None], context: Context, told: dict[str, Any], leads_group: bool) -> None:
    """In the child: run the section, send its rows, then how it ended."""
    if leads_group:
        os.setpgid(0, 0)

    def report(name: str, ok: bool | None, text: str, **data: Any) -> None:
        pipe.send(("row", {"name": name, "ok": ok, "text": text, "data": data}))

    try:
        ask(context, report, **told)
        pipe.send(("end", ""))
    except BaseException:  # whatever it was, the parent is told
        pipe.send(("end", traceback.format_exc()))


def run_together(children: Sequence[Child]) -> list[Result]:
    """Wait for all, each until its deadline; rows are printed as they come."""
    running = list(children)
    while running:
        for pipe in wait([c.pipe for c in running], timeout=min(c.seconds_left for c in running)):
            child = next(c for c in running if c.pipe is pipe)
            row = child.receive()
            if row is None:
                running.remove(child)
            else:
                print(f"  {_mark(row['ok'])} {child.result.name}: {row['name']}: {row['text']}", flush=True)
        for child in [c for c in running if c.seconds_left == 0]:
            child.kill()
            running.remove(child)
    return [c.result for c in children]


def _told_by_others(context: Context) -> dict[str, Any]:
    """How a section asks in processes of its own."""

    def ask(section: str, **told: Any) -> dict[str, Any]:
        child = Child(section, getattr(sections, section), replace(context, seconds=context.seconds / 2), told, leads_group=False)
        while wait([child.pipe], timeout=child.seconds_left):
            if child.receive() is None:
                break
        else:
            child.kill()
        if child.result.rows:
            return child.result.rows[-1]["data"]
        return {"fits": False, "outcome": child.result.outcome, "message": child.result.message, "traceback": child.result.traceback}

    @contextlib.contextmanager
    def hold(section: str) -> Iterator[dict[str, Any]]:
        child = Child(section, getattr(sections, section), context, {}, leads_group=False)
        try:
            row = child.receive() if wait([child.pipe], timeout=context.seconds / 2) else None
            if row is None:
                raise RuntimeError(f"{section}: {child.result.message or 'no answer'} {child.result.traceback}")
            yield row["data"]
        finally:
            child.kill("ok")

    return {"ask": ask, "hold": hold}


# --- the run --------------------------------------------------------------------------------------------------------------
def run_section(section: Section, context: Context, until: float, patience: float = 1.0) -> list[Result]:
    """Its results, one a model where it asks about each. `patience`: a factor on its deadline."""
    left = until - time.monotonic()
    names = list(context.workloads) if section.is_per_model else [""]
    labels = [f"{section.name} {name}".strip() for name in names]
    if left < 5:
        return [Result(label, 0.0, "skipped", "no time was left") for label in labels]
    own = replace(context, seconds=min(section.seconds * patience, left))
    print(f"{section.name} (at most {own.seconds:.0f} s)", flush=True)
    children = []
    for name, label in zip(names, labels):
        told = _told_by_others(own) if section.starts_others else {}
        children.append(Child(label, section.ask, replace(own, workload_name=name), told))
    return run_together(children)


def probe(context: Context, report: Callable[..., None]) -> None:
    """What torch sees, asked in a process of its own."""
    import torch

    if not torch.cuda.is_available():
        report("gpu", None, "torch sees no GPU", gpu=None)
        return
    card = torch.cuda.get_device_properties(0)
    report("gpu", True, card.name, gpu=card.name, memory_bytes=card.total_memory, capability=f"{card.major}.{card.minor}",
           cudnn=torch.backends.cudnn.version(), count=torch.cuda.device_count())


def machine(gpu: dict[str, Any], commit: str | None) -> dict[str, Any]:
    """Commit, GPU, versions; what is not to be had is None, and `missing` says why."""
    import torch

    git = subprocess.run(["git", "-C", str(HERE), "rev-parse", "HEAD"], capture_output=True, text=True) if _has_git() else None
    found = commit or (git.stdout.strip() if git is not None and git.returncode == 0 else None)
    missing = {} if found else {"commit": "not a git checkout, and --commit was not given"}
    return {"commit": found, **gpu, "python": platform.python_version(), "cores": os.cpu_count(), "torch": torch.__version__,
            "cuda": torch.version.cuda, "packages": {name: _version(name) for name in PACKAGES}, "missing": missing}


def _has_git() -> bool:
    from shutil import which

    return which("git") is not None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main() -> int:
    """0 only if nothing failed."""
    options = _options()
    started, clock = datetime.now(UTC), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # all costs are measured anew, and nobody's cache learns of it
        first = Context(device_name="cpu", is_small=True, folder=Path(folder), methods=tuple(options.methods))
        (found,) = run_together([Child("machine", probe, first, {})])
        gpu = found.rows[-1]["data"] if found.rows else {"gpu": None}
        device = options.device or ("cuda:0" if gpu["gpu"] else "cpu")
        if device == "cpu":
            costs.CACHE_BYTES["cpu"] = 2**21  # its small models are measured quickly, not well
        context = replace(first, device_name=device, is_small=options.quick or device == "cpu")
        until = clock + options.seconds * options.patience
        chosen = [s for s in SECTIONS if options.only is None or s.name in options.only.split(",")]
        results = [r for section in chosen for r in run_section(section, context, until, options.patience)]
    body = {"benchmark": "gpu_check", "machine": machine(gpu, options.commit), "device": device, "methods": context.methods,
            "is_small": context.is_small, "started": started.isoformat(timespec="seconds"), "seconds": time.monotonic() - clock,
            "passed": all(r.is_good for r in results), "sections": [vars(r) for r in results]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(body, indent=1, sort_keys=True, default=str) + "\n")
    print(table(body, results))
    return 0 if body["passed"] else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="cuda:0 where there is a GPU, else cpu")
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--only", help="sections, separated by commas")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=planners(), help="whose truth is asked; all that plan")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for the whole")
    parser.add_argument("--patience", type=float, default=1.0, help="a factor on all deadlines, for a slow or busy machine")
    parser.add_argument("--commit", help="where this is no git checkout")
    parser.add_argument("--out", type=Path, default=HERE / "evidence" / "gpu_check.json")
    return parser.parse_args()


def table(body: dict[str, Any], results: Sequence[Result]) -> str:
    """What a person reads."""
    where = body["machine"]
    machine_line = f"{where['gpu'] or 'a CPU'} ({body['device']}), torch {where['torch']}, commit {where['commit']}"
    lines = ["", f"gpu_check on {machine_line}, {body['seconds']:.0f} s", ""]
    words = {"hold": True, "do not": False, "noted": None}
    for result in results:
        counts = {word: sum(row["ok"] is value for row in result.rows) for word, value in words.items()}
        said = ", ".join(f"{n} {word}" for word, n in counts.items() if n) or "no rows"
        end = "" if result.outcome == "ok" else f"; {result.outcome}: {result.message}"
        lines.append(f"{_mark(result.is_good):5} {result.name:22} {result.seconds:5.0f} s  {said}{end}")
        lines += [f"            {_mark(row['ok'])} {row['name']}: {row['text']}" for row in result.rows if row["ok"] is not True]
    return "\n".join([*lines, "", "nothing failed" if body["passed"] else "something failed"])


def _mark(ok: bool | None) -> str:
    return {True: "ok", False: "FAIL", None: "note"}[ok]


if __name__ == "__main__":
    sys.exit(main())
