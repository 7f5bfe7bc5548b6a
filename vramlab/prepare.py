"""From a module and a method to something that runs: capture, costs, plan, check, prediction."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Sequence

import torch

import vramlab.capture
from vramlab.capture import Binding, Captured, LossFn, capture
from vramlab.check import CheckedSchedule, check_schedule
from vramlab.costs import OpMismatch, measure_costs
from vramlab.device import DeviceProfile
from vramlab.environment import cache_dir
from vramlab.liveness import replay_schedule
from vramlab.micro_step import capture_passes
from vramlab.planner import Budget, Planner, ask, parse_bytes, parse_percent
from vramlab.prepared import prepared_for
from vramlab.record import write_atomically
from vramlab.simulate import simulate
from vramlab.tape import Tape
from vramlab.trace import Metrics

if TYPE_CHECKING:  # seeds reads cards, for which a bare GPU machine has no packages
    from vramlab.seeds import Seeds


@dataclass(frozen=True)
class Plan:
    """A checked schedule and what it is predicted to do. All numbers of `predicted` are simulated."""

    captured: Captured
    checked: CheckedSchedule
    predicted: Metrics
    eager_peak_bytes: int  # the peak of eager's own order and liveness, simulated unless it was given
    plan_seconds: float
    budget: Budget
    seed_seconds: float = 0.0  # that other planners took for the schedules that this one began with


def capture_with_costs(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batch: Sequence[Any],
    *,
    sizes: Sequence[int] = (),
    with_gradient: frozenset[str] = frozenset(),
    optimizer: torch.optim.Optimizer | None = None,
) -> Captured:
    """Capture, and measure each distinct op on the device at hand; where a fake kernel lied about a result, capture with data.

    `sizes`: of the passes that the step takes over the batch, none where it takes the batch whole.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def captured(**options: Any) -> Captured:
        options |= {"with_gradient": with_gradient, "optimizer": optimizer}
        found = capture_passes(model, loss_fn, batch, sizes, **options) if sizes else capture(model, loss_fn, batch, **options)
        return Captured(measure_costs(found.tape, device, optimizer=optimizer), found.binding)

    try:
        return captured()
    except OpMismatch:
        return captured(with_data=True)


def plan(
    captured: Captured, planner: Planner, profile: DeviceProfile, budget: str | int | None, *, eager_peak_bytes: int | None = None,
    name: str = "", needs: Sequence[str] = (), seeds_of: Callable[[Tape, DeviceProfile, Budget], Seeds] | None = None,
) -> Plan:
    """Let a method plan, check the plan against the budget and predict it. Raises PlanInfeasible, Unsupported, ScheduleError.

    `needs`: what the tape was prepared for. `seeds_of` gives the schedules that the method begins with. A percentage is of
    `eager_peak_bytes`, or of the simulated eager peak on the same tape where that is None.
    """
    tape = captured.tape
    eager = simulated_eager_peak(tape) if eager_peak_bytes is None else eager_peak_bytes
    limit = resolve_budget(budget, eager, tape)
    seeds = seeds_of(tape, profile, limit) if seeds_of else None
    started = time.perf_counter()
    begun_with = tuple(seeds.schedules.values()) if seeds else ()
    schedule = ask(planner, tape, profile, limit, name or type(planner).__name__, begun_with)
    schedule = replace(schedule, micro_batches=tape.micro_batches, needs=prepared_for(needs))
    seconds = time.perf_counter() - started
    checked = check_schedule(tape, schedule, limit)
    return Plan(captured, checked, simulate(checked, profile).metrics, eager, seconds, limit, seeds.seconds if seeds else 0.0)


def simulated_eager_peak(tape: Tape) -> int:
    """Bytes: the peak of eager's own order and liveness on this tape."""
    return check_schedule(tape, replay_schedule(tape)).peak_bytes


def resolve_budget(budget: str | int | None, eager_peak_bytes: int, tape: Tape) -> Budget:
    """`"6GiB"`, `"60%"`, `"auto"`, bytes, or None for no limit. ValueError says what is allowed."""
    if budget is None:
        return Budget(device_bytes=2**62)
    if budget == "auto":
        return Budget(device_bytes=free_bytes(tape.device_type) + sum(s.nbytes for s in tape.storages if s.at_start))
    share = parse_percent(budget)
    return Budget(device_bytes=parse_bytes(budget) if share is None else int(share * eager_peak_bytes))


AUTO_MARGIN = 0.1  # of the free memory, left alone by `auto`: fragmentation and what lies outside torch grow during a run


def free_bytes(device_type: str) -> int:
    """Memory that `auto` counts as free now, less the margin. The step's own state, already resident, is not in it."""
    if device_type == "cuda":
        free, _total = torch.cuda.mem_get_info()
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int((free + unused) * (1 - AUTO_MARGIN))
    import psutil

    return int(psutil.virtual_memory().available * (1 - AUTO_MARGIN))


# --- cache of captures, by content ---------------------------------------------------------------------------------------
def cached_capture(key: dict[str, Any], make: Callable[[], Captured], folder: Path | None = None) -> Captured:
    """The capture that `key` names, made at most once per machine. `key` must hold all that the capture depends on.

    A capture that closes over tensors is not kept: their values are no part of the key.
    """
    folder = folder or cache_dir() / "tapes"
    source = Path(vramlab.capture.__file__).read_bytes()
    text = json.dumps(key, sort_keys=True) + torch.__version__ + hashlib.sha256(source).hexdigest()
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    tape_path, binding_path = folder / f"{name}.tape.json.gz", folder / f"{name}.binding.json"
    if binding_path.is_file():
        body = json.loads(binding_path.read_text())
        return Captured(
            Tape.load(tape_path),
            Binding(**{**body, "inputs": tuple(body["inputs"]), "optimizer_state": tuple(body["optimizer_state"]), "constants": {}}),
        )
    captured = make()
    if not captured.binding.constants:
        folder.mkdir(parents=True, exist_ok=True)
        captured.tape.save(tape_path)
        write_atomically(binding_path, json.dumps(asdict(captured.binding)))  # last: its presence says that both are whole
    return captured
