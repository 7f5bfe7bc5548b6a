"""Training steps for gpu_check.py, and methods on them: without cards, which need packages that a bare GPU machine may lack."""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import importlib.util
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import nn
from torchvision import models

from vramlab.algorithms import named_variants, under_variants
from vramlab.capture import Captured, capture
from vramlab.check import CheckedSchedule, check_schedule
from vramlab.costs import OpMismatch, measure_costs, measure_profile, measure_variants
from vramlab.device import DeviceProfile
from vramlab.execute import Executor
from vramlab.family import tapes_by_size
from vramlab.gate import GateResult, Side, distance_between, run_gate
from vramlab.link import Link, make_link
from vramlab.liveness import replay_schedule
from vramlab.meter import measure_step_peak
from vramlab.micro_batches import changes_semantics
from vramlab.micro_step import capture_passes, eager_over_micro_batches
from vramlab.planner import Budget, ask, passes_of
from vramlab.prepared import prepare_tape
from vramlab.record import Truth

ROOT = Path(__file__).resolve().parents[1]
PROOF_SIZE = 16  # of the capture that proves the tapes of other sizes
WARMUP = 3  # steps before any that is timed
Run = Callable[..., torch.Tensor]


# --- workloads ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with its batch: enough to build the same step again and again."""

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], tuple[torch.Tensor, ...]]  # of so many samples, on the CPU
    loss_fn: Callable[..., torch.Tensor]
    batch_size: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """A workload on a device."""

    workload: Workload
    model: nn.Module
    batch: tuple[torch.Tensor, ...]
    optimizer: torch.optim.Optimizer

    def eager(self, *batch: torch.Tensor) -> torch.Tensor:
        """Plain PyTorch."""
        loss = self.workload.loss_fn(self.model, *batch)
        loss.backward()
        return loss.detach()

    def whole(self, run: Run) -> Run:
        """A whole training step over a batch: gradients dropped, `run`, the optimizer."""

        def one(*batch: torch.Tensor) -> torch.Tensor:
            for parameter in self.model.parameters():
                parameter.grad = None
            loss = run(*batch)
            self.optimizer.step()
            return loss

        return one

    def live(self) -> Iterator[torch.Tensor]:
        """Every tensor that is alive between two steps."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from (p.grad for p in self.model.parameters() if p.grad is not None)
        yield from self.batch
        yield from (v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))


def build(workload: Workload, device: torch.device, batch_size: int | None = None, seed: int = 0) -> Step:
    """The step from a seed: equal seeds give equal bits. The default generators stay as they are."""
    size = batch_size or workload.batch_size
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = workload.make_model().train().to(device)
        batch = tuple(t.to(device) for t in workload.make_batch(size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Step(workload=workload, model=model, batch=batch, optimizer=optimizer)


def workloads(is_small: bool) -> dict[str, Workload]:
    """A residual network, a densely connected one and a transformer with dropout; small ones of the same kinds for a CPU."""
    if is_small:
        return {w.name: w for w in (
            images("resnet", _small_resnet, 8, 32),
            images("densenet", lambda: models.DenseNet(8, (2,), 16, num_classes=10), 8, 32),
            tokens("transformer", 4, 32, vocabulary=50, layers=1, hidden=32, heads=2),
        )}
    return {w.name: w for w in (
        images("resnet50", models.resnet50, 32, 160),
        images("densenet121", models.densenet121, 16, 160),
        tokens("transformer", 32, 128, vocabulary=2000, layers=6, hidden=384, heads=6),
    )}


def _small_resnet() -> nn.Module:
    blocks = [models.resnet.BasicBlock(16, 16) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def images(name: str, make_model: Callable[[], nn.Module], batch_size: int, side: int) -> Workload:
    """Classification of random images."""

    def make_batch(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, 3, side, side), torch.randint(0, 10, (size,))

    return Workload(name=name, make_model=make_model, make_batch=make_batch, loss_fn=_classify, batch_size=batch_size)


def tokens(name: str, batch_size: int, length: int, *, vocabulary: int, **options: Any) -> Workload:
    """The repository's BERT with dropout, on random tokens."""

    def make_model() -> nn.Module:
        make = load_module(ROOT / "models", "bert").build
        return make(vocabulary=vocabulary, sequence_length=length, dropout=0.1, attention="sdpa", **options)

    def make_batch(size: int) -> tuple[torch.Tensor, ...]:
        words, labels = torch.randint(0, vocabulary, (2, size, length))
        return words.clone(), torch.zeros(size, length, dtype=torch.long), labels.clone()

    return Workload(name=name, make_model=make_model, make_batch=make_batch, loss_fn=_predict_tokens, batch_size=batch_size)


def _classify(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), labels)


def _predict_tokens(model: nn.Module, words: torch.Tensor, segments: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(words, segments).flatten(0, 1), labels.flatten())


# --- methods --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Method:
    """A method's folder, loaded by path: `build()` has the defaults of the card."""

    name: str
    card: dict[str, Any]
    build: Callable[..., Any]


@cache
def method(name: str) -> Method:
    """The method of that folder."""
    folder = ROOT / "methods" / name
    return Method(name, yaml.safe_load((folder / "card.yaml").read_text(encoding="utf-8")), load_module(folder, "method").build)


def planners() -> list[str]:
    """Methods that plan without being told anything: `schedule-file` needs a path, `optimal` the number of groups."""
    cards = {p.parent.name: yaml.safe_load(p.read_text(encoding="utf-8")) for p in sorted((ROOT / "methods").glob("*/card.yaml"))}
    return [name for name, card in cards.items()
            if card["kind"] == "planner" and not any(option.get("required") for option in (card.get("options") or {}).values())]


def load_module(folder: Path, stem: str) -> ModuleType:
    """folder/stem.py, the folder being a package so that its files find each other."""
    package = f"gpu_check_{folder.name.replace('-', '_')}"
    if package not in sys.modules:
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{package}.{stem}")


# --- capture and plan -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Costed:
    """A step's tape with costs. `mismatch`: what a fake kernel said otherwise than the real one, so that the capture ran with data."""

    captured: Captured
    mismatch: str
    capture_seconds: float
    costs_seconds: float


def costed(step: Step, device: torch.device) -> Costed:
    """Capture, and measure each distinct op."""
    mismatch = ""
    for with_data in (False, True):
        started = time.perf_counter()
        captured = capture(step.model, step.workload.loss_fn, step.batch, optimizer=step.optimizer, with_data=with_data)
        captured_at = time.perf_counter()
        try:
            tape = measure_costs(captured.tape, device, optimizer=step.optimizer)
        except OpMismatch as wrong:
            if with_data:
                raise
            mismatch = str(wrong)
            continue
        return Costed(Captured(tape, captured.binding), mismatch, captured_at - started, time.perf_counter() - captured_at)
    raise AssertionError("unreachable")


def kept_costed(step: Step, device: torch.device, folder: Path) -> Costed:
    """As `costed`, from the file that an earlier section left."""
    path = folder / f"{step.workload.name}-{len(step.batch[0])}.pickle"
    if path.is_file():
        return pickle.loads(path.read_bytes())
    found = costed(step, device)
    path.write_bytes(pickle.dumps(found))
    return found


def costed_at_any_size(step: Step, device: torch.device, folder: Path) -> Costed:
    """As `costed`; where a capture needs data, and so the memory of all tensors at once, from captures of small batches."""
    kept = [pickle.loads(path.read_bytes()) for path in folder.glob(f"{step.workload.name}-*.pickle")]
    if not any(found.mismatch for found in kept):
        return costed(step, device)
    started, small = time.perf_counter(), build(step.workload, device, 2)

    def at(size: int) -> Captured:
        batch = tuple(t.to(device) for t in step.workload.make_batch(size))
        return capture(small.model, step.workload.loss_fn, batch, optimizer=small.optimizer, with_data=True)

    tape = tapes_by_size(lambda size: at(size).tape, PROOF_SIZE)(len(step.batch[0]))
    captured_at = time.perf_counter()
    captured = Captured(measure_costs(tape, device, optimizer=step.optimizer), at(2).binding)
    return Costed(captured, kept[0].mismatch, captured_at - started, time.perf_counter() - captured_at)


@dataclass(frozen=True)
class Planned:
    """A checked schedule and what it was planned with."""

    captured: Captured
    checked: CheckedSchedule
    profile: DeviceProfile
    plan_seconds: float

    @property
    def variants(self) -> list[str | None]:
        """Algorithms of the convolutions, which eager is then held to as well."""
        return named_variants(self.checked.tape, self.checked.schedule)


def plan(step: Step, whole: Costed, name: str, device: torch.device, budget_bytes: int, options: dict[str, Any] | None = None) -> Planned:
    """What a method plans for the step. PlanInfeasible where the budget is out of its reach."""
    chosen, profile = method(name), measure_profile(device)
    planner, limit = chosen.build(**(options or {})), Budget(device_bytes=budget_bytes)
    with_data = {"with_data": bool(whole.mismatch)}
    optimizer, loss_fn = step.optimizer, step.workload.loss_fn

    def at(size: int) -> Any:
        part = tuple(t.to(device) for t in step.workload.make_batch(size))
        return capture(step.model, loss_fn, part, optimizer=optimizer, **with_data).tape

    started = time.perf_counter()
    batch_size, captured = len(step.batch[0]), whole.captured
    sizes = passes_of(planner, tapes_by_size(at, batch_size), batch_size, limit)
    if sizes:
        captured = capture_passes(step.model, loss_fn, step.batch, sizes, optimizer=optimizer, **with_data)
    prepared = prepare_tape(captured.tape, chosen.card["needs"], device)
    tape = captured.tape if prepared is None else prepared.tape
    if sizes or prepared is not None:
        tape = measure_costs(tape, device, optimizer=optimizer)
    if "variants" in chosen.card["needs"]:
        tape = measure_variants(tape, device)
    schedule = replace(ask(planner, tape, profile, limit, name), micro_batches=tape.micro_batches)
    checked = check_schedule(tape, schedule, limit)
    return Planned(Captured(tape, captured.binding), checked, profile, time.perf_counter() - started)


def replayed(whole: Costed, device: torch.device) -> Planned:
    """Eager's own order and liveness."""
    tape = whole.captured.tape
    return Planned(whole.captured, check_schedule(tape, replay_schedule(tape, "replay")), measure_profile(device), 0.0)


def saved(planned: Planned) -> dict[str, str]:
    """Options of `schedule-file` that play the plan back."""
    path = Path(tempfile.mkdtemp()) / "schedule.json.gz"
    planned.checked.schedule.save(path)
    return {"path": str(path)}


# --- running --------------------------------------------------------------------------------------------------------------
def runner(step: Step, planned: Planned, device: torch.device, link: Link | None = None) -> Run:
    """`run(*batch) -> loss` by the schedule; every result of its first step is held against the tape."""
    executor = Executor(planned.captured, planned.checked, step.model, link=link or make_link(device, planned.profile))
    first = [True]

    def run(*batch: torch.Tensor) -> torch.Tensor:
        verify, first[0] = first[0], False
        return executor(*batch, verify=verify).loss

    return run


@dataclass(frozen=True)
class Peaks:
    """Of a whole training step, on CUDA without what stood before the step was built (workspaces of libraries, other steps). Bytes."""

    warm: int
    cold: int
    raw: dict[str, int | None]  # as the meter says them
    before: int

    @property
    def highest(self) -> int:
        """Of all steps."""
        return max(self.warm, self.cold)


def peaks(workload: Workload, device: torch.device, make_run: Callable[[Step], Run] | None = None) -> Peaks:
    """Requested bytes on CUDA, allocated ones on a CPU; a step of its own is built inside. `make_run` None: eager."""
    settle(device)
    before = 0 if device.type == "cpu" else torch.cuda.memory_stats(device)["requested_bytes.all.current"]

    def make() -> tuple[Callable[[], Any], Callable[[], list[torch.Tensor]]]:
        step = build(workload, device)
        one = step.whole(step.eager if make_run is None else make_run(step))
        return lambda: one(*step.batch), lambda: list(step.live())

    found = measure_step_peak(make, steps=2, device=device)
    names = ("peak_bytes", "cold_peak_bytes", "persistent_bytes", "unnamed_bytes", "allocated_peak_bytes", "active_peak_bytes",
             "reserved_peak_bytes", "allocation_retries")
    settle(device)
    return Peaks(found.peak_bytes - before, found.cold_peak_bytes - before, {n: getattr(found, n) for n in names}, before)


def warm_libraries(workload: Workload, device: torch.device) -> int:
    """Two eager steps, so that what the libraries keep for good is there. Requested bytes that then stay: theirs."""
    step = build(workload, device)
    one = step.whole(step.eager)
    for _ in range(2):
        one(*step.batch)
    del step, one
    settle(device)
    return 0 if device.type == "cpu" else torch.cuda.memory_stats(device)["requested_bytes.all.current"]


def gate(workload: Workload, device: torch.device, make_run: Callable[[Step], Run], planned: Planned | None = None,
         steps: int = 3) -> tuple[Truth, GateResult]:
    """Three optimizer steps against eager, bit for bit; against eager over the same micro-batches where the plan cuts the batch."""
    sizes = () if planned is None else planned.checked.tape.micro_batches
    variants = [] if planned is None else planned.variants

    def eager(step: Step) -> Run:
        if not sizes:
            return under_variants(step.eager, variants)
        return under_variants(lambda *batch: eager_over_micro_batches(step.model, workload.loss_fn, batch, sizes), variants)

    result = run_gate(lambda: _side(workload, device, eager), lambda: _side(workload, device, make_run), steps=steps)
    settle(device)
    if result.truth is Truth.EXACT and sizes and changes_semantics(planned.checked.tape):
        return Truth.SEMANTICS_CHANGED, result
    return result.truth, result


def distance(workload: Workload, device: torch.device, make_run: Callable[[Step], Run]) -> dict[str, float]:
    """How far one step is from eager's."""
    found = distance_between(lambda: _side(workload, device, lambda step: step.eager), lambda: _side(workload, device, make_run))
    settle(device)
    return found


def _side(workload: Workload, device: torch.device, make_run: Callable[[Step], Run]) -> Side:
    step = build(workload, device)
    one = step.whole(make_run(step))
    return Side(model=step.model, step=lambda i: one(*step.batch), optimizer=step.optimizer,
                inputs=[t for t in step.batch if t.is_floating_point()])


def alternated(steps: Sequence[Callable[[], Any]], rounds: int, device: torch.device) -> list[list[float]]:
    """Seconds of each step, all in turns in this process, the device idle before and after each."""
    seconds: list[list[float]] = [[] for _ in steps]
    for turn in range(WARMUP + rounds):
        for one, kept in zip(steps, seconds):
            synchronize(device)
            started = time.perf_counter()
            one()
            synchronize(device)
            if turn >= WARMUP:
                kept.append(time.perf_counter() - started)
    return seconds


def step_seconds(workload: Workload, device: torch.device, make_run: Callable[[Step], Run] | None = None, rounds: int = 10) -> float:
    """Median seconds of a whole step."""
    step = build(workload, device)
    one = step.whole(step.eager if make_run is None else make_run(step))
    (seconds,) = alternated([lambda: one(*step.batch)], rounds, device)
    return statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    """Wait for all that the device still does."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def settle(device: torch.device) -> None:
    """Let go of all that nobody holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
