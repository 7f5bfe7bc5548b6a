"""What is done in a process of its own for a cell: plan, peak, truth gate, single steps for timing, training, searching.

Every function takes the cell's spec (`config`, `collections`) and its folder, where plan.json, tape.json.gz and schedule.json.gz pass
from one process to the next. All of them build the workload anew from the config: equal seeds give equal bits.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from collections import Counter
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from vramlab.algorithms import Named, named_variants, names_of, under_variants
from vramlab.at_peak import live_at_peak
from vramlab.bounds import step_seconds_bound
from vramlab.capture import Captured, capture
from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library, Method, Model, Tiling
from vramlab.costs import measure_costs, measure_profile, measure_variants, roofline_costs
from vramlab.counted import count_of
from vramlab.data import Batch
from vramlab.device import PERTURBATIONS, DeviceProfile, load_profile, perturbed_profile
from vramlab.errors import CaptureError, PlanInfeasible, Unsupported
from vramlab.execute import Executor
from vramlab.family import tapes_by_size
from vramlab.finder import BATCH, Found, described, find_largest, largest_within, trial, values_of
from vramlab.gate import Side, deterministic, distance_between, run_gate
from vramlab.layers import basic_layers
from vramlab.link import make_link
from vramlab.liveness import lower_bound_bytes, replay_schedule
from vramlab.meter import measure_step_peak
from vramlab.micro_batches import changes_semantics, scaled_passes
from vramlab.micro_loss import divisors_of_passes
from vramlab.micro_step import capture_passes, eager_over_micro_batches
from vramlab.own_module import OwnModule, is_own
from vramlab.planner import UNLIMITED, Budget, Planner, SubBatchPlanner, ask, needs_of, parse_bytes, parse_percent, passes_of
from vramlab.parallel import share_of, simulate_parallel
from vramlab.predicted import least_step_seconds, predicted_of, swap_against_recompute
from vramlab.prepare import cached_capture, resolve_budget, simulated_eager_peak
from vramlab.prepared import Prepared, prepare_like, prepare_tape, prepared_for
from vramlab.record import Outcome, Truth, write_atomically
from vramlab.schedule import Offload, Prefetch, Recompute, Schedule
from vramlab.seeds import Seeds, seeds_for
from vramlab.simulate import simulate
from vramlab.tape import Phase, Role, Tape
from vramlab.this_machine import THIS
from vramlab.tile import TapeTiling
from vramlab.variants import with_variants
from vramlab.workload import TrainingStep, accuracy, build, evaluation_batches, example_batch, train_batches

_logger = logging.getLogger("vramlab")
Spec = Mapping[str, Any]
Watch = Callable[[torch.nn.Module, torch.Tensor], None]
_CAPTURES = 3  # of shallow networks, for a tiled tape: two give the rule, one proves it
_built: dict[str, TrainingStep] = {}
PROOF_SIZE = 16  # the third capture, by which a search trusts the tapes of sizes that it does not capture


# --- parts of a cell ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Cell:
    config: Mapping[str, Any]
    model: Model
    method: Method
    library: Library

    @classmethod
    def of(cls, spec: Spec) -> _Cell:
        config, library = spec["config"], Library(spec["collections"])
        if is_own(config["model"]):
            return _OwnCell(config, None, library.method(config["method"]), library, OwnModule(config["model"]))
        return cls(config, library.model(config["model"]), library.method(config["method"]), library)

    def seeds(self, tape: Tape, profile: DeviceProfile, budget: Budget) -> Seeds:
        """Schedules of other methods that the card asks for."""
        return seeds_for(self.library, self.method, tape, profile, budget)

    @property
    def is_native(self) -> bool:
        return self.method.card.kind == "native"

    @property
    def has_schedule(self) -> bool:
        """Does it run a schedule, or eager's own order? Other native methods do as PyTorch does, which no schedule says."""
        return not self.is_native or self.config["method"] == "eager"

    @property
    def is_simulated(self) -> bool:
        return self.config["target"].startswith("sim:")

    @property
    def wants_variants(self) -> bool:
        """Does the method choose convolution algorithms?"""
        return "variants" in self.needs and self.config["options"].get("algorithms") != "library"

    @property
    def needs(self) -> Sequence[str]:
        """What its tapes are prepared for: the card's needs, or those that a saved schedule states."""
        return self.method.card.needs if self.is_native else needs_of(self.planner(), self.method.card.needs)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.is_simulated else self.config["target"])

    def profile(self) -> DeviceProfile:
        if not self.is_simulated:
            return measure_profile(self.device)
        stated = self.config.get("profile")  # of this machine, measured
        profile = load_profile(self.config["target"].removeprefix("sim:")) if stated is None else DeviceProfile(**stated)
        return perturbed_profile(profile, self.config["perturbation"]) if "perturbation" in self.config else profile

    def planner(self, **options: Any) -> Planner:
        """`options` go before the cell's own."""
        if not self.has_schedule:
            raise Unsupported(f"{self.config['method']} is a native method without a schedule: there is nothing to simulate")
        return _Replay() if self.is_native else self.method.build(**{**self.config["options"], **options})

    def workload(self, batch_size: int | None = None) -> TrainingStep:
        """Of a simulated cell, which nothing runs, the last one that was built serves again: perturbed devices ask for the same."""
        config = self.config if batch_size is None else {**self.config, "batch_size": batch_size}
        if not self.is_simulated:
            return build(self.model, config)
        key = repr([config[k] for k in ("model", "model_options", "training", "data", "batch_size")] + [config["sources"]["model"]])
        if key not in _built:
            _built.clear()
            _built[key] = build(self.model, config)
        return _built[key]

    def prepared(self, tape: Tape) -> Prepared | None:
        """What the method's needs make of a tape, None when that is nothing."""
        return prepare_tape(tape, self.needs, None if self.is_simulated else self.device)

    def captured(self, step: TrainingStep, batch_size: int) -> Captured:
        """The tape without costs, from the cache where it is there."""
        kept = {k: self.config[k] for k in ("model", "model_options", "training", "data")}
        training = {k: v for k, v in kept["training"].items() if k not in ("steps", "eval_every", "seed")}
        key = kept | {
            "training": training,
            "batch_size": batch_size,
            "model_source": self.config["sources"]["model"],
            "device": str(self.device),
        }
        return cached_capture(key, lambda: capture(step.model, step.loss_fn, step.batch, optimizer=step.make_optimizer()))

    def tiled(self, batch_size: int) -> Tape | None:
        """The tape without costs of a simulated cell whose card says that its blocks repeat: three shallow captures, the third of which
        proves the rule. None where the step is captured as it is. Raises NotRepetitive where the card is wrong."""
        for option in self.tiles:
            if steps := self.steps_to_tile(option):
                return self.tiling(option, batch_size).at(steps)
        return None

    @property
    def tiles(self) -> Mapping[str, Tiling]:
        """Options of the model by which its blocks repeat."""
        return self.model.card.tiles

    def steps_to_tile(self, option: str) -> int:
        """How many steps of an option's blocks lie between the shallowest capture and this cell; 0 where it is captured as it is."""
        where = self.tiles.get(option)
        if where is None or not self.is_simulated:
            return 0
        steps, rest = divmod(self.config["model_options"][option] - where.start, where.step)
        return 0 if rest or steps < _CAPTURES else steps

    def tiling(self, option: str, batch_size: int) -> TapeTiling:
        """The steps at every value of an option by which blocks repeat."""
        where = self.tiles[option]
        values = [where.start + i * where.step for i in range(_CAPTURES)]
        shallow = [replace(self, config={**self.config, "model_options": {**self.config["model_options"], option: v}}) for v in values]
        first, second, third = (c.captured(c.workload(batch_size), batch_size).tape for c in shallow)
        tiling = TapeTiling.of(first, second)
        tiling.prove(2, third)
        return tiling

    def with_value(self, value: int) -> _Cell:
        """The cell at this value of what it searches."""
        over = self.config["search"]["over"]
        changed = {"batch_size": value} if over == BATCH else {"model_options": {**self.config["model_options"], over: value}}
        return replace(self, config={**self.config, **changed})

    def batch_size_at(self, value: int) -> int:
        """Of `with_value(value)`."""
        return value if self.config["search"]["over"] == BATCH else self.config["batch_size"]

    def captured_at(self, step: TrainingStep, batch_size: int) -> Captured:
        """The tape of a batch of another size."""
        return self.captured(replace(step, batch=self.batch(batch_size)), batch_size)

    def needs_step(self, planner: Planner) -> bool:
        """Is the eager step asked for, beside its tapes?"""
        return True

    def batch(self, batch_size: int) -> Batch:
        """An example of so many samples."""
        return example_batch(self.model, {**self.config, "batch_size": batch_size})

    def passes(self, planner: Planner, step: TrainingStep, budget: Budget, whole: Tape, profile: DeviceProfile,
               at: Callable[[int], Tape] | None = None) -> tuple[int, ...]:
        """Sizes of the passes that the planner wants, empty where it leaves the batch whole.

        `whole`: the batch's tape with costs. `at`: the tapes of other sizes, if known.
        """
        if not isinstance(planner, SubBatchPlanner):
            return ()
        at = at or tapes_by_size(lambda n: self.captured_at(step, n).tape, whole.batch_size)

        def measured(n: int) -> Tape:
            return whole if n == whole.batch_size else _with_costs(self, self.captured_at(step, n).tape, profile, step)

        return passes_of(planner, at, whole.batch_size, budget, None if self.is_simulated else measured)


@dataclass(frozen=True)
class _OwnCell(_Cell):
    """A simulated cell of a user's own module, which has no card. Tapes lie in `config["tapes"]`, a folder that the asker throws away."""

    own: OwnModule

    @property
    def tiles(self) -> Mapping[str, Tiling]:
        """None: nothing says that blocks repeat."""
        return {}

    def needs_step(self, planner: Planner) -> bool:
        """Only who cuts the batch needs more than tapes; building a user's model takes as long as it takes."""
        return isinstance(planner, SubBatchPlanner)

    def workload(self, batch_size: int | None = None) -> TrainingStep:
        """The step; its batch is of the cell's size."""
        return replace(self.own.step(2), batch=self.batch(batch_size or self.config["batch_size"]))

    def captured(self, step: TrainingStep | None, batch_size: int) -> Captured:
        """The tape without costs, from the folder where it is there."""
        key = {"own": self.own.name, "batch_size": batch_size}
        return cached_capture(key, lambda: self.own.captured(batch_size), Path(self.config["tapes"]))

    def captured_at(self, step: TrainingStep | None, batch_size: int) -> Captured:
        """The tape of a batch of another size; no step is needed for it."""
        return self.captured(step, batch_size)

    def batch(self, batch_size: int) -> Batch:
        """An example of so many samples."""
        return self.own.batch(batch_size)


def _why_whole(planner: Planner, step: TrainingStep | None) -> str:
    """Why a planner that may cut the batch was not asked to; "" where it was, or never does."""
    if step is not None or not isinstance(planner, SubBatchPlanner):
        return ""
    return ("the batch stays whole: this deep network's tape is tiled from those of shallower ones, and only a captured step is cut into "
            "micro-batches")


class _Replay:
    """Eager's own order and liveness: how eager is simulated."""

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        schedule = replay_schedule(tape, "replay")
        checked = check_schedule(tape, schedule)
        if checked.peak_bytes > budget.device_bytes:
            op = getattr(schedule.instructions[checked.peak_instruction], "op", 0)
            raise PlanInfeasible(method="eager", budget_bytes=budget.device_bytes, smallest_bytes=checked.peak_bytes, op=tape.op_name(op))
        return schedule


# --- plan -----------------------------------------------------------------------------------------------------------------
def make_plan(spec: Spec, folder: str, eager_peak_bytes: int | None, library_bytes: int = 0) -> dict[str, Any]:
    """Capture, cost, plan, check, simulate. Writes tape and schedule; returns what the record keeps of it, all of it simulated.

    `library_bytes` of the budget belong to libraries' workspaces that outlive a step (cuBLAS on CUDA), and are not planned with.

    A native method other than eager has no schedule: it is captured only, and `unpredicted` says why nothing is predicted.
    """
    cell = _Cell.of(spec)
    with _aloud():
        if not cell.has_schedule and not cell.is_simulated:
            return _unplanned(cell, eager_peak_bytes)
        return _facts_of(cell, _whole(cell), Path(folder), eager_peak_bytes, library_bytes)


@contextmanager
def _aloud() -> Iterator[None]:
    """What the logger "vramlab" says at level INFO becomes lines of the cell's log, of which a terminal shows the last."""
    handler, level = logging.StreamHandler(sys.stdout), _logger.level
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        _logger.removeHandler(handler)
        _logger.setLevel(level)


@dataclass(frozen=True)
class _Whole:
    """The step of a cell: its tape without costs. What is tiled has no `step`, as a deep network is never built whole."""

    bare: Tape
    step: TrainingStep | None
    seconds: float  # that it took


def _whole(cell: _Cell) -> _Whole:
    cell.planner()  # a method that cannot plan says so before anything is captured
    started = time.perf_counter()
    _logger.info("capturing %s at batch %d ...", cell.config["model"], cell.config["batch_size"])
    bare = cell.tiled(cell.config["batch_size"])
    step = cell.workload() if bare is None else None
    bare = bare or cell.captured(step, cell.config["batch_size"]).tape
    return _Whole(bare, step, time.perf_counter() - started)


def _facts_of(cell: _Cell, whole: _Whole, out: Path | None, eager_peak_bytes: int | None, library_bytes: int = 0) -> dict[str, Any]:
    """What `make_plan` returns; nothing is written where `out` is None."""
    planner, profile, bare, step = cell.planner(), cell.profile(), whole.bare, whole.step
    if not cell.is_simulated:
        _logger.info("measuring %s ...", count_of(len(bare.ops), "op"))
    plain = _with_costs(cell, bare, profile, step)
    eager = simulated_eager_peak(plain)
    prepared = cell.prepared(bare)
    tape = plain if prepared is None else _with_costs(cell, prepared.tape, profile, step)
    base = eager if eager_peak_bytes is None else eager_peak_bytes
    budget = resolve_budget(cell.config["budget"], base, tape)
    is_limited = budget.device_bytes < UNLIMITED
    facts = {
        "capture_seconds": whole.seconds,
        "budget_bytes": budget.device_bytes if is_limited else None,
        "library_bytes": library_bytes,
        "eager_peak_bytes": base,
        "eager_peak_is_simulated": eager_peak_bytes is None,
        "tape_digest": tape.digest,
        "simulated_eager_peak_bytes": eager,
        "swap_vs_recompute": swap_against_recompute(tape, profile),
        "bytes_by_role": {str(r): tape.bytes_of(r) for r in Role},
        "basic_layers": basic_layers(tape),
        "ops": len(tape.ops),
        "lower_bound_bytes": lower_bound_bytes(tape) + library_bytes,
    }
    if prepared is not None:
        facts["prepared"] = prepared.to_json()
    if why_whole := _why_whole(planner, step):
        facts["why_whole"] = why_whole
    if is_limited:
        budget = replace(budget, device_bytes=budget.device_bytes - library_bytes)
    seeds, devices = cell.seeds(tape, profile, budget), cell.config.get("devices", 1)
    if cell.method.card.seeds:
        facts["seed_seconds"] = seeds.seconds
    _logger.info("planning %s with %s ...", count_of(len(tape.ops), "op"), cell.config["method"])
    started = time.perf_counter()
    try:
        checked = one = _planned(cell, planner, step, tape, profile, budget, seeds=tuple(seeds.schedules.values()))
        if devices > 1:
            checked = _planned_share(cell, planner, step, profile, budget, devices)
    except PlanInfeasible as refusal:
        _save(out, tape)
        smallest = None if refusal.smallest_bytes is None else refusal.smallest_bytes + library_bytes
        told = refusal.told(budget_bytes=facts["budget_bytes"] if is_limited else refusal.budget_bytes, smallest_bytes=smallest,
                            eager_peak_bytes=base if parse_percent(cell.config["budget"]) is not None else None)
        return facts | {
            "plan_seconds": time.perf_counter() - started,
            "infeasible": {"smallest_bytes": smallest, "op": refusal.op, "message": "; ".join(filter(None, [str(told), why_whole]))},
        }
    facts["plan_seconds"] = time.perf_counter() - started
    tape, schedule = checked.tape, checked.schedule
    _save(out, tape, schedule)
    if tape.micro_batches:
        facts |= {"micro_batches": list(tape.micro_batches), "changes_semantics": changes_semantics(tape)}
    facts |= {"tape_digest": tape.digest, "bytes_by_role": {str(r): tape.bytes_of(r) for r in Role}}
    over_devices = _over_devices(one, checked, profile, devices) if "devices" in cell.config else {}
    against = {"eager_step_seconds": sum(op.seconds for op in plain.ops)}  # the library's algorithms, the whole batch at once
    if out is not None and not tape.micro_batches and devices == 1:
        against["least_step_seconds"] = least_step_seconds(checked, profile, budget.device_bytes if is_limited else None)
    if proof := getattr(planner, "proof", None):  # of a planner that knows how far from the best its plan may be
        against["proof"] = proof
    return facts | {"schedule_digest": schedule.digest, "predicted": predicted_of(checked, profile) | against | over_devices}


def _save(out: Path | None, tape: Tape, schedule: Schedule | None = None) -> None:
    if out is not None:
        tape.save(out / "tape.json.gz")
    if out is not None and schedule is not None:
        schedule.save(out / "schedule.json.gz")


def _unplanned(cell: _Cell, eager_peak_bytes: int | None) -> dict[str, Any]:
    started = time.perf_counter()
    tape = cell.captured(cell.workload(), cell.config["batch_size"]).tape
    base = simulated_eager_peak(tape) if eager_peak_bytes is None else eager_peak_bytes
    budget = resolve_budget(cell.config["budget"], base, tape)
    return {
        "capture_seconds": time.perf_counter() - started,
        "budget_bytes": None if budget.device_bytes >= UNLIMITED else budget.device_bytes,
        "eager_peak_bytes": base,
        "eager_peak_is_simulated": eager_peak_bytes is None,
        "tape_digest": tape.digest,
        "bytes_by_role": {str(r): tape.bytes_of(r) for r in Role},
        "unpredicted": f"{cell.config['method']} has no schedule: PyTorch decides while the step runs, and nothing predicts it",
    }


def _planned(cell: _Cell, planner: Planner, step: TrainingStep | None, tape: Tape, profile: DeviceProfile, budget: Budget,
             at: Callable[[int], Tape] | None = None, seeds: Sequence[Schedule] = ()) -> CheckedSchedule:
    """The method's checked schedule for a tape with costs, or for the tape of the passes that it takes over the batch instead.

    What is tiled (`step` None) stays whole. Unsupported where the step runs here and its loss may not be taken over those passes.
    """
    sizes = cell.passes(planner, step, budget, tape, profile, at) if step else ()
    if sizes:
        if not cell.is_simulated:  # whose batch has no values to ask
            divisors_of_passes(step.model, step.loss_fn, step.batch, sizes, cell.captured(step, sum(sizes)))
        captured = capture_passes(step.model, step.loss_fn, step.batch, sizes, optimizer=step.make_optimizer())
        prepared = cell.prepared(captured.tape)
        tape = _with_costs(cell, captured.tape if prepared is None else prepared.tape, profile, step)
    needs = prepared_for([need for need in cell.needs if need != "variants" or cell.wants_variants])
    schedule = ask(planner, tape, profile, budget, cell.config["method"], seeds)
    return check_schedule(tape, replace(schedule, micro_batches=tape.micro_batches, needs=needs), budget)


def _planned_share(cell: _Cell, planner: Planner, step: TrainingStep | None, profile: DeviceProfile, budget: Budget,
                   devices: int) -> CheckedSchedule:
    """The plan of one of several devices: its share of the batch within the same budget."""
    share = share_of(cell.config["batch_size"], devices)
    part = step and replace(step, batch=cell.batch(share))
    bare = cell.captured(part, share).tape if part else cell.tiled(share)
    prepared = cell.prepared(bare)
    tape = _with_costs(cell, bare if prepared is None else prepared.tape, profile, part)
    return _planned(cell, planner, part, tape, profile, budget)


def _over_devices(one: CheckedSchedule, share: CheckedSchedule, profile: DeviceProfile, devices: int) -> dict[str, Any]:
    """Simulated: the step of all devices with the exchange of gradients, beside one device that trains on the whole batch."""
    alone, many = simulate_parallel(one, profile, 1).step_seconds, simulate_parallel(share, profile, devices)
    return {"devices": devices, "parallel": many.to_json(), "one_device_step_seconds": alone,
            "speedup_over_one_device": alone / many.step_seconds}


def _with_costs(cell: _Cell, tape: Tape, profile: DeviceProfile, step: TrainingStep | None) -> Tape:
    if cell.is_simulated:
        tape = roofline_costs(tape, profile)
        return with_variants(tape, profile) if cell.wants_variants else tape
    tape = measure_costs(tape, cell.device, optimizer=step.make_optimizer())
    return measure_variants(tape, cell.device) if cell.wants_variants else tape


def plan_perturbed(spec: Spec) -> dict[str, dict[str, Any]]:
    """What a simulated step comes to where the device's link or FLOP/s are 20 % off, by the perturbation's name: planned and simulated
    again. A budget that is then out of reach is told as `infeasible`, with the method's message."""
    found, whole = {}, _whole(_Cell.of(spec))
    for name in PERTURBATIONS:
        facts = _facts_of(_Cell.of(_under(spec, name)), whole, None, None)
        print(f"{name}: planned", flush=True)
        refusal = facts.get("infeasible")
        found[name] = ({"infeasible": refusal["message"], "smallest_bytes": refusal["smallest_bytes"]} if refusal
                       else facts["predicted"] | {"swap_vs_recompute": facts["swap_vs_recompute"]})
    return found


def search_perturbed(spec: Spec, found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a search finds where the device's link or FLOP/s are 20 % off. Only where the plain answer or the next above it does not stand
    is the whole range searched again."""
    answers, largest, search = {}, found["largest"], spec["config"]["search"]
    for name in PERTURBATIONS:
        again = _under(spec, name)
        if largest is not None:
            near = {**search, "low": largest, "high": min(largest + search["step"], search["high"])}
            again = {**again, "config": {**again["config"], "search": near}}
        answer = largest_by_simulation(again, "")["largest"]
        if answer != largest:
            answer = largest_by_simulation(_under(spec, name), "")["largest"]
        answers[name] = {"infeasible": "nothing fits"} if answer is None else {"largest": answer}
    return answers


def _under(spec: Spec, perturbation: str) -> Spec:
    return {**spec, "config": {**spec["config"], "perturbation": perturbation}}


# --- steps that run -------------------------------------------------------------------------------------------------------
def _runner(cell: _Cell, step: TrainingStep, optimizer, folder: Path | None, batch_size: int | None = None,
            sizes: tuple[int, ...] = (), like: Path | None = None) -> Callable[..., torch.Tensor]:
    """`run(*batch) -> loss`: eager when `folder` is None, else the cell's method with the schedule that is planned there.

    `sizes`: of the passes that eager takes over the batch; a plan knows its own. `like`: where a plan is whose convolution algorithms
    eager shall use; by default it uses the library's own choice.
    """
    if folder is None:
        return under_variants(_eager(step, sizes), [] if like is None else _variants_in(like))
    if cell.is_native:
        return cell.method.load().build(step.model, step.loss_fn, optimizer, **cell.config["options"])
    captured, checked = _load_plan(cell, step, folder, optimizer, batch_size)
    executor = Executor(captured, checked, step.model, link=make_link(cell.device, cell.profile()))
    first = [True]

    def run(*batch: torch.Tensor) -> torch.Tensor:
        verify, first[0] = first[0], False
        return executor(*batch, verify=verify).loss

    run.executor = executor
    return run


def _passes_planned(cell: _Cell, folder: Path, batch_size: int | None) -> tuple[int, ...]:
    """Sizes of the planned passes, in proportion at another batch size. CaptureError where that has too few samples."""
    if cell.is_native:
        return ()
    sizes = Schedule.load(folder / "schedule.json.gz").micro_batches
    if batch_size is None or not sizes:
        return sizes
    try:
        return scaled_passes(sizes, batch_size)
    except ValueError as wrong:
        raise CaptureError(f"the plan does not apply to a batch of {batch_size}: {wrong}") from None


def _eager(step: TrainingStep, sizes: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    if sizes:
        return lambda *batch: eager_over_micro_batches(step.model, step.loss_fn, batch, sizes)

    def run(*batch: torch.Tensor) -> torch.Tensor:
        loss = step.loss_fn(step.model, *batch)
        loss.backward()
        return loss.detach()

    return run


def _variants_in(folder: Path) -> list[Named]:
    if not (folder / "schedule.json.gz").is_file():
        return []  # a native method
    return named_variants(Tape.load(folder / "tape.json.gz"), Schedule.load(folder / "schedule.json.gz"))


def _load_plan(cell: _Cell, step: TrainingStep, folder: Path, optimizer, batch_size: int | None) -> tuple[Captured, CheckedSchedule]:
    """The planned schedule on this workload's tape; at another batch size the same instructions on that tape."""
    planned, schedule = Tape.load(folder / "tape.json.gz"), Schedule.load(folder / "schedule.json.gz")
    sizes = _passes_planned(cell, folder, batch_size)
    if sizes:
        captured = capture_passes(step.model, step.loss_fn, step.batch, sizes, optimizer=optimizer)
    else:
        captured = cell.captured(step, batch_size or cell.config["batch_size"])
    captured = Captured(prepare_like(captured.tape, planned), captured.binding)
    same = [(o.target, o.phase) for o in captured.tape.ops] == [(o.target, o.phase) for o in planned.ops]
    if not same or len(captured.tape.storages) != len(planned.storages):
        raise CaptureError("another batch size or another process gives another sequence of operators; the plan does not apply to it")
    if batch_size is not None:
        tape = captured.tape.with_variants([op.variants for op in planned.ops])  # by name: another batch, other costs
        return Captured(tape, captured.binding), check_schedule(tape, replace(schedule, tape_digest=tape.digest, micro_batches=sizes))
    if (captured.tape.storages, captured.tape.tensors) != (planned.storages, planned.tensors):
        raise CaptureError("this process gives another tape than the one that was planned on")
    return Captured(planned, captured.binding), check_schedule(planned, schedule)


def _step_of(step: TrainingStep, optimizer, run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A whole training step over a batch: gradients dropped, forward and backward, optimizer."""

    def one(*batch: torch.Tensor) -> torch.Tensor:
        _zero(step.model)
        loss = run(*batch)
        if optimizer is not None:
            optimizer.step()
        return loss

    return one


def _zero(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _live(step: TrainingStep, optimizer) -> Iterator[torch.Tensor]:
    yield from step.model.parameters()
    yield from step.model.buffers()
    yield from (p.grad for p in step.model.parameters() if p.grad is not None)
    yield from (b for b in step.batch if isinstance(b, torch.Tensor))
    if optimizer is not None:
        yield from (v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))


def measure_peak_of(spec: Spec, folder: str | None, steps: int = 2, watch: Watch | None = None) -> dict[str, Any]:
    """Peaks of a cold step and of later, warm ones by the allocator's meter, all built inside its region. `folder` None: eager.

    `watch(model, loss)` is called after each step.
    """
    cell = _Cell.of(spec)
    counts: dict[str, Any] = {}
    if folder is not None and not cell.is_native:
        measure_profile(cell.device)  # measured before the meter starts, where it is not known yet

    def make() -> tuple[Callable[[], Any], Callable[[], list[torch.Tensor]]]:
        step = cell.workload()
        optimizer = step.make_optimizer()
        run = _runner(cell, step, optimizer, None if folder is None else Path(folder))
        one = _step_of(step, optimizer, run)
        executor = getattr(run, "executor", None)
        if executor is not None:
            counts.update(
                recomputes=executor.counts[Recompute],
                offloads=executor.counts[Offload],
                prefetches=executor.counts[Prefetch],
                pinned_host_bytes=executor.arena.nbytes if executor.arena else 0,
            )

        def whole() -> None:
            loss = one(*step.batch)
            if watch is not None:
                watch(step.model, loss)

        return whole, lambda: list(_live(step, optimizer))

    peaks = measure_step_peak(make, steps=steps, device=cell.device)
    found = {
        "meter": peaks.meter,
        "peak_bytes": peaks.peak_bytes,
        "cold_peak_bytes": peaks.cold_peak_bytes,
        "persistent_bytes": peaks.persistent_bytes,
        "library_bytes": peaks.unnamed_bytes,
        "allocated_peak_bytes": peaks.allocated_peak_bytes,
        "active_peak_bytes": peaks.active_peak_bytes,
        "reserved_peak_bytes": peaks.reserved_peak_bytes,
        "allocation_retries": peaks.allocation_retries,
    }
    return {k: v for k, v in found.items() if v is not None} | counts


def gate(spec: Spec, folder: str) -> dict[str, Any]:
    """Three optimizer steps of the plan against eager, bit for bit, at `gate_batch_size` where that is set.

    A plan over micro-batches is held against eager over the same micro-batches, and its distance to the whole batch is measured. A native
    method may be `within_noise`: PyTorch's own may run other kernels than eager.
    """
    cell = _Cell.of(spec)
    measure = cell.config["measure"]
    size = measure["gate_batch_size"]
    config = cell.config if size is None else {**cell.config, "batch_size": size}
    batches = list(train_batches(cell.model, config, measure["gate_steps"]))
    sizes = _passes_planned(cell, Path(folder), size)
    executors: list[Executor] = []

    planned_sizes = sizes

    def side(planned: Path | None, sizes: tuple[int, ...] = sizes) -> Side:
        step = cell.workload(size)
        optimizer = step.make_optimizer()
        run = _runner(cell, step, optimizer, planned, size, sizes, like=Path(folder) if sizes == planned_sizes else None)
        executors.extend(e for e in [getattr(run, "executor", None)] if e is not None)
        one = _step_of(step, optimizer, run)
        return Side(
            model=step.model, step=lambda i: one(*batches[i]), optimizer=optimizer, inputs=[b for b in batches[0] if b.is_floating_point()]
        )

    def in_float64() -> Side:
        step = cell.workload(size)
        step.model.double()
        optimizer = step.make_optimizer()
        one = _step_of(step, optimizer, _eager(step, ()))
        wide = [tuple(b.double() if b.is_floating_point() else b for b in batch) for batch in batches]
        return Side(model=step.model, step=lambda i: one(*wide[i]), optimizer=optimizer)

    result = run_gate(lambda: side(None), lambda: side(Path(folder)), steps=measure["gate_steps"], seed=cell.config["training"]["seed"],
                      in_float64=in_float64 if cell.is_native else None)
    counts = executors[0].counts if executors else {}
    truth, over_passes = result.truth, {}
    if sizes:
        distance = distance_between(lambda: side(None, ()), lambda: side(None), seed=cell.config["training"]["seed"])
        over_passes = {"micro_batches": list(sizes), "distance_to_whole_batch": distance}
        if truth is Truth.EXACT and changes_semantics(executors[0].tape):
            truth = Truth.SEMANTICS_CHANGED
    return {
        "truth": str(truth),
        "detail": result.to_json()
        | over_passes
        | {
            "batch_size": config["batch_size"],
            "recomputes": counts.get(Recompute, 0),
            "offloads": counts.get(Offload, 0),
            "prefetches": counts.get(Prefetch, 0),
            "variants": dict(sorted(Counter(names_of(_variants_in(Path(folder)))).items())),  # eager's too
        },
    }


def timed_step(spec: Spec, folder: str | None) -> Callable[[], Any]:
    """A step without arguments, for a worker that alternates with another. `folder` None: eager."""
    cell = _Cell.of(spec)
    step = cell.workload()
    optimizer = step.make_optimizer()
    one = _step_of(step, optimizer, _runner(cell, step, optimizer, None if folder is None else Path(folder)))
    return lambda: one(*step.batch)


# --- training -------------------------------------------------------------------------------------------------------------
def train(spec: Spec, folder: str) -> dict[str, Any]:
    """Many steps on real data, the planned step beside eager on the same batches: loss, gradient norm and accuracy of both."""
    cell = _Cell.of(spec)
    training = cell.config["training"]
    sizes = _passes_planned(cell, Path(folder), None)
    sides = [_TrainingSide(cell, side, sizes, like=Path(folder)) for side in (None, Path(folder))]
    steps = list(range(1, training["steps"] + 1))
    with deterministic():
        for i, batch in zip(steps, train_batches(cell.model, cell.config, training["steps"])):
            for side in sides:
                side.advance(i, batch)
            if i % training["eval_every"] == 0 or i == training["steps"]:
                for side in sides:
                    side.evaluate(i)
            if i % max(1, training["steps"] // 10) == 0:
                print(f"step {i} of {training['steps']}: loss {sides[1].loss[-1]:.4f}, eager {sides[0].loss[-1]:.4f}", flush=True)
    eager, tested = sides
    same = [a == b for a, b in zip(zip(eager.loss, eager.grad_norm), zip(tested.loss, tested.grad_norm))]
    first = next((i for i, equal in zip(steps, same) if not equal), None)
    state_equal = all(torch.equal(a, b) for a, b in zip(eager.step.model.state_dict().values(), tested.step.model.state_dict().values()))
    return {
        "steps": steps,
        "loss": tested.loss,
        "grad_norm": tested.grad_norm,
        "accuracy": tested.accuracy,
        "eager_loss": eager.loss,
        "eager_grad_norm": eager.grad_norm,
        "eager_accuracy": eager.accuracy,
        "equal_steps": sum(same),
        "first_difference": first,
        "state_equal_at_end": state_equal,
    }


class _TrainingSide:
    """One of two models that see the same batches."""

    def __init__(self, cell: _Cell, folder: Path | None, sizes: tuple[int, ...], like: Path) -> None:
        self.cell, self.step = cell, cell.workload()
        self.optimizer = self.step.make_optimizer()
        self.run = _step_of(self.step, self.optimizer, _runner(cell, self.step, self.optimizer, folder, sizes=sizes, like=like))
        self.loss: list[float] = []
        self.grad_norm: list[float] = []
        self.accuracy: list[list[float]] = []

    def advance(self, i: int, batch: tuple) -> None:
        torch.manual_seed(self.cell.config["training"]["seed"] + i)  # both sides draw the same dropout masks
        loss = self.run(*batch)
        self.loss.append(float(loss))
        squares = [p.grad.double().square().sum() for p in self.step.model.parameters() if p.grad is not None]
        self.grad_norm.append(float(torch.stack(squares).sum().sqrt()))

    def evaluate(self, i: int) -> None:
        value = accuracy(self.step.model, evaluation_batches(self.cell.model, self.cell.config))
        if value is not None:
            self.accuracy.append([i, value])


# --- largest value --------------------------------------------------------------------------------------------------------
def largest_by_simulation(spec: Spec, folder: str) -> dict[str, Any]:
    """The largest batch, depth or other option of the model whose plan fits the memory; nothing runs. See vramlab/finder.py."""
    search = _SimulatedSearch(_Cell.of(spec))
    found = search.find()
    if found.largest is not None and not search.is_true_at(found.largest):  # the family of tapes ends below: every size is captured
        search = _SimulatedSearch(_Cell.of(spec), by_family=False)
        found = search.find()
    return search.to_json(found)


class _SimulatedSearch:
    """The trials of one cell. A tape comes from a family of captures over the batch, or is tiled where the option adds equal blocks."""

    def __init__(self, cell: _Cell, by_family: bool = True, proof_size: int = PROOF_SIZE,
                 keep: Callable[[list[dict[str, Any]]], None] | None = None) -> None:
        self._keep = keep  # gets all trials after each
        self.cell, self.over, self.profile, self.planner = cell, cell.config["search"]["over"], cell.profile(), cell.planner()
        self.budget = Budget(device_bytes=searched_bytes(cell.config["budget"], self.profile.memory_bytes), wants_smallest=False)
        self.trials: dict[int, dict[str, Any]] = {}
        self.at_limit: tuple[int, dict[str, Any]] = (0, {})  # the largest value that fits by now, and what is live at its peak
        self.why_whole = ""
        self._steps: dict[str, TrainingStep] = {}
        self._tilings = cache(cell.tiling)
        self.at = tapes_by_size(self.captured, proof_size) if by_family and self.over == BATCH else self.captured

    def find(self, first: int | None = None) -> Found:
        """By trials, from the first on."""
        return find_largest(self.fits, values_of(self.cell.config["search"]), first=first)

    def fits(self, value: int) -> bool:
        """One trial: is there a plan within the memory?"""
        if value not in self.trials:
            self.trials[value] = self._trial(value)
            print(f"{self.over} {value}: {'fits' if self.trials[value]['fits'] else 'does not fit'}", flush=True)
            if self._keep:
                self._keep(list(self.trials.values()))
        return self.trials[value]["fits"]

    def know(self, value: int, facts: Mapping[str, Any]) -> None:
        """A trial that was made elsewhere, as `make_plan` tells it."""
        refusal, predicted = facts.get("infeasible"), facts.get("predicted", {})
        self.trials[value] = (trial(value, Outcome.PLAN_INFEASIBLE, "budget", peak_bytes=refusal["smallest_bytes"]) if refusal
                              else trial(value, Outcome.OK, "", peak_bytes=predicted["peak_bytes"], samples=self.cell.batch_size_at(value),
                                         step_seconds=predicted["step_seconds"], compute_seconds=predicted["compute_seconds"]))
        if self._keep:
            self._keep(list(self.trials.values()))

    def is_true_at(self, value: int) -> bool:
        """Is the trial's tape that of a capture?"""
        return self.at == self.captured or self.at(value) == _bare(self.captured(value))

    def to_json(self, found: Found) -> dict[str, Any]:
        """The block `search` of the record."""
        fast = largest_within(self.fits, lambda v: self.trials[v]["within_slowdown"], found, values_of(self.cell.config["search"]))
        block = described(self.cell.config["search"], found, fast, self.trials.values(), memory_bytes=self.budget.device_bytes,
                          at_peak=self.at_limit[1], is_simulated=True)
        return block | ({"why_whole": self.why_whole} if self.why_whole else {})

    def captured(self, value: int) -> Tape:
        """The tape without costs at this value, of captures."""
        cell, batch_size = self.cell.with_value(value), self.cell.batch_size_at(value)
        if steps := cell.steps_to_tile(self.over):
            return self._tilings(self.over, batch_size).at(steps)
        return cell.tiled(batch_size) or cell.captured_at(self.step(cell), batch_size).tape

    def step(self, cell: _Cell) -> TrainingStep | None:
        """What is captured, None where tapes are tiled. Batches of all sizes share one model."""
        if any(map(cell.steps_to_tile, cell.tiles)) or not cell.needs_step(self.planner):
            return None
        key = repr(cell.config["model_options"])
        if key not in self._steps:
            self._steps = {key: cell.workload(cell.config["batch_size"])}
        return self._steps[key]

    def _trial(self, value: int) -> dict[str, Any]:
        cell, batch_size = self.cell.with_value(value), self.cell.batch_size_at(value)
        step = self.step(cell)
        step = step and replace(step, batch=cell.batch(batch_size))
        self.why_whole = self.why_whole or _why_whole(self.planner, step)
        at = self.at if self.over == BATCH else None
        try:
            tape = self.at(value)
            prepared = cell.prepared(tape)
            tape = _with_costs(cell, tape if prepared is None else prepared.tape, self.profile, step)
            checked = _planned(cell, self.planner, step, tape, self.profile, self.budget, at)
        except PlanInfeasible as refusal:
            return trial(value, Outcome.PLAN_INFEASIBLE, "budget", peak_bytes=refusal.smallest_bytes)
        metrics = simulate(checked, self.profile).metrics
        if value > self.at_limit[0]:
            self.at_limit = value, live_at_peak(checked).to_json()
        return trial(value, Outcome.OK, "", peak_bytes=metrics.peak_bytes, samples=batch_size, step_seconds=metrics.step_seconds,
                     compute_seconds=metrics.compute_seconds, seconds_cap=seconds_cap(checked.tape, cell.config["search"]["slowdown"]))


def survey(spec: Spec) -> dict[str, Any]:
    """What `vramlab.advice` asks before it asks methods: the captures, which are kept for them, and the step's own figures, simulated.

    `is_affine`: two captures give the step at every batch size, as a third at this one has proved; else each size takes a capture.
    """
    cell = _Cell.of(spec)
    with redirect_stdout(io.StringIO()):  # of a user's own module, too
        search = _search_for_advice(replace(cell, config={**cell.config, "budget": "auto"}))  # a share is of a peak not known yet
        tape = search.at(cell.config["batch_size"])
    plain = _with_costs(cell, tape, search.profile, None)
    eager = simulated_eager_peak(plain)
    asked = cell.config["budget"]
    budget = search.profile.memory_bytes if asked in (None, "auto") else resolve_budget(asked, eager, plain).device_bytes
    return {"ops": len(plain.ops), "memory_bytes": search.profile.memory_bytes, "budget_bytes": budget, "eager_peak_bytes": eager,
            "eager_step_seconds": sum(op.seconds for op in plain.ops), "least_peak_bytes": lower_bound_bytes(plain),
            "least_step_seconds": step_seconds_bound(plain, search.profile, budget) if budget >= lower_bound_bytes(plain) else None,
            "is_affine": search.at != search.captured}


def advise(spec: Spec, folder: str) -> None:
    """A method's plan for a simulated step, then its largest batch: plan.json, and trials.json anew after each trial, so that who waits no
    longer has what is known by then; found.json at the end."""
    cell, out = _Cell.of(spec), Path(folder)

    def keep(name: str, body: Any) -> None:
        write_atomically(out / name, json.dumps(body, allow_nan=False) + "\n")

    batch_size = cell.config["batch_size"]
    with redirect_stdout(io.StringIO()):
        search = _search_for_advice(cell, partial(keep, "trials.json"))
        step = search.step(cell)
        whole = _Whole(search.at(batch_size), step and replace(step, batch=cell.batch(batch_size)), 0.0)
        facts = _facts_of(cell, whole, out, None)
        keep("plan.json", facts)
        search.know(batch_size, facts)
        search.planner = cell.planner(**cell.method.card.fitting)  # nobody reads how fast the other batches are
        found = search.find(first=batch_size)
    keep("found.json", {"largest": found.largest, "hit_upper_end": found.hit_upper_end})


def _search_for_advice(cell: _Cell, keep: Callable[[list[dict[str, Any]]], None] | None = None) -> _SimulatedSearch:
    """The family of tapes is proved at the batch that is asked about."""
    return _SimulatedSearch(cell, proof_size=cell.config["batch_size"] if cell.config["batch_size"] > 3 else PROOF_SIZE, keep=keep)


def searched_bytes(budget: str | None, memory_bytes: int) -> int:
    """What a search may fill: a size, or all of the memory."""
    return memory_bytes if budget in (None, "auto") else parse_bytes(budget)


def seconds_cap(tape: Tape, slowdown: float | None) -> float:
    """The longest step that still counts as fast: its ops' first runs and one more forward phase, or so many times the first runs."""
    first_runs = sum(op.seconds for op in tape.ops)
    return first_runs + sum(op.seconds for op in tape.ops if op.phase is Phase.FORWARD) if slowdown is None else slowdown * first_runs


def _bare(tape: Tape) -> Tape:
    """Without op times."""
    return tape.with_costs([0.0] * len(tape.ops))


# --- trials of a search that run ------------------------------------------------------------------------------------------
def guess_largest(spec: Spec) -> dict[str, Any]:
    """What the simulator finds for a search that will be measured, and the memory: times by this machine's rates, workspaces unknown.

    A native method has no schedule: its guess is eager's.
    """
    cell = _Cell.of(spec)
    profile = cell.profile()
    profile = replace(profile, memory_bytes=searched_bytes(cell.config["budget"], profile.memory_bytes))
    config = {**cell.config, "target": f"sim:{THIS}", "profile": profile.to_json()}
    if not cell.has_schedule:
        config |= {"method": "eager", "options": {}}
    return {"largest": largest_by_simulation({**spec, "config": config}, "")["largest"], "memory_bytes": profile.memory_bytes}


def library_bytes(spec: Spec) -> int:
    """What libraries keep between eager steps: workspaces of cuBLAS on CUDA, nothing on a CPU."""
    return measure_peak_of(spec, None)["library_bytes"]


def plan_trial(spec: Spec, folder: str, library_bytes: int) -> dict[str, Any]:
    """`make_plan`, with the seconds of the ops' first runs and the longest step that still counts as fast; of eager for a native method."""
    facts = make_plan(spec, folder, None, library_bytes)
    if "infeasible" in facts:
        return facts
    cell = _Cell.of(spec)
    if not cell.has_schedule:
        step = cell.workload()
        captured = cell.captured(step, cell.config["batch_size"]).tape
        measure_costs(captured, cell.device, optimizer=step.make_optimizer()).save(Path(folder) / "tape.json.gz")
    tape = Tape.load(Path(folder) / "tape.json.gz")
    cap = seconds_cap(tape, cell.config["search"]["slowdown"])
    return facts | {"first_runs_seconds": sum(op.seconds for op in tape.ops), "seconds_cap": cap}


def run_trial(spec: Spec, folder: str, steps: int) -> dict[str, Any]:
    """Whole training steps under the meter: the most that any of them held, and in `untrained` why they do not count as training: a loss
    that is not finite, a parameter without the gradient that the tape gives it; "" where they do."""
    tape = Tape.load(Path(folder) / "tape.json.gz")
    trained = {s.name.removesuffix(".grad") for s in tape.storages if s.role is Role.GRADIENT}
    losses: list[float] = []
    untrained = [""]

    def watch(model: torch.nn.Module, loss: torch.Tensor) -> None:
        losses.append(float(loss))
        bare = [name for name, parameter in model.named_parameters() if name in trained and parameter.grad is None]
        if not np.isfinite(losses[-1]) or bare:
            untrained[0] = f"step {len(losses)}: loss {losses[-1]}, {count_of(len(bare), 'parameter')} without a gradient"

    found = measure_peak_of(spec, folder, steps, watch)
    return {
        "peak_bytes": max(found["peak_bytes"], found["cold_peak_bytes"]), "warm_peak_bytes": found["peak_bytes"],
        "persistent_bytes": found["persistent_bytes"], "library_bytes": found["library_bytes"],
        "allocation_retries": found.get("allocation_retries"),
        "reserved_peak_bytes": found.get("reserved_peak_bytes"), "loss": losses[-1] if np.isfinite(losses[-1]) else None,
        "untrained": untrained[0],
    }


def time_trial(spec: Spec, folder: str, steps: int) -> list[float]:
    """Seconds of each of some steps, the first ones cold; nothing meters them."""
    step, device = timed_step(spec, folder), _Cell.of(spec).device
    synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    seconds = []
    for _ in range(steps):
        synchronize()
        started = time.perf_counter()
        step()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds
