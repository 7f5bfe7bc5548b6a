"""What each op of a tape costs: measured on the device at hand, or a roofline of one that is not.

Measuring runs every distinct op once in isolation, on fresh inputs of the same types, shapes and strides, and keeps the result on disk. An
op that eager runs in place, or may, is measured in place.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from vramlab.algorithms import ON, has_algorithms, using
from vramlab.calibration import measure_profile
from vramlab.errors import Unsupported, VramlabError
from vramlab.flops import with_flops
from vramlab.meter import AllocatorMeter
from vramlab.ops import callable_of, decode_arg, dtype_name, dtype_of, inplace_twin

from vramlab.roofline import ACCUMULATE_GRAD, is_renaming, roofline_costs
from vramlab.store import device_store
from vramlab.tape import Op, Role, Tape, Tensor, Variant

__all__ = ["Cost", "CostError", "OpMismatch", "measure_costs", "measure_profile", "measure_variants", "roofline_costs", "signature"]

OPTIMIZER_STEP = "vramlab.optimizer_step"
MEASURED_AS = 4  # raised when what is measured changes: older entries of a cache are then not found
LEAST_RUNS, MOST_RUNS, LEAST_SECONDS = 3, 10, 0.02
# Bytes that go through the caches before each run: in a step, other tensors have passed since an op's inputs were made.
CACHE_BYTES = {"cpu": 48 * 2**20, "cuda": 128 * 2**20}


class CostError(VramlabError):
    """An op cannot be run by itself, so that its cost is not known."""


class OpMismatch(VramlabError):
    """An op makes something else than the tape says: its fake kernel and its real one disagree."""


@dataclass(frozen=True)
class Cost:
    """Of one run of one op."""

    seconds: float
    workspace_bytes: int  # peak inside the op, beyond what it reads and creates


def measure_costs(tape: Tape, device: torch.device | str, *, optimizer: torch.optim.Optimizer | None = None,
                  cache_dir: Path | None = None) -> Tape:
    """The tape with measured `seconds` and `workspace_bytes`, and with `flops`.

    Only what the cache on disk does not know is measured. `optimizer` is needed when the tape has an optimizer step; it is not touched.
    Raises CostError naming the op that cannot run by itself, OpMismatch naming the one whose real result has not the type, shape, strides
    or bytes that the tape says, Unsupported when the tape belongs to another kind of device.
    """
    device = torch.device(device)
    if device.type != tape.device_type:
        raise Unsupported(f"the tape was captured on {tape.device_type}; its operators have no cost on {device.type}")
    signatures = [signature(tape, op, optimizer) for op in tape.ops]
    store = device_store("costs", device, cache_dir)
    known = {name: Cost(*entry) for name, entry in store.read().items()}
    missing = {name: op for name, op in zip(signatures, tape.ops) if name not in known}
    measured = dict(zip(missing, _measure(tape, list(missing.values()), device, optimizer)))
    store.add({name: [cost.seconds, cost.workspace_bytes] for name, cost in measured.items()})
    costs = [(known | measured)[name] for name in signatures]
    spaces = [max(c.workspace_bytes, _generator_bytes(tape, op, device)) for c, op in zip(costs, tape.ops)]
    return with_flops(tape).with_costs([c.seconds for c in costs], spaces)


def measure_variants(tape: Tape, device: torch.device | str, *, cache_dir: Path | None = None) -> Tape:
    """The tape with the convolution algorithms that PyTorch knows on this device, each measured as an op is.

    One that refuses an op, or gives its result another form, is none of that op's variants.
    """
    device = torch.device(device)
    names = {op.id: signature(tape, op) for op in tape.ops if has_algorithms(op)}
    store = device_store("variants", device, cache_dir)
    known = store.read()
    missing = {names[op.id]: op for op in tape.ops if op.id in names and names[op.id] not in known}
    measured: dict[str, dict[str, list]] = {name: {} for name in missing}
    for algorithm in ON[device.type] if missing else ():
        with using(algorithm):
            for name, cost in _costs_that_can_be(tape, missing, device).items():
                measured[name][algorithm] = [cost.seconds, cost.workspace_bytes]
    store.add(measured)
    found = known | measured
    return tape.with_variants([[Variant(algorithm, *cost) for algorithm, cost in found[names[op.id]].items()] if op.id in names else []
                               for op in tape.ops])


def _costs_that_can_be(tape: Tape, ops: Mapping[str, Op], device: torch.device) -> dict[str, Cost]:
    """Of those ops that run by themselves and make what the tape says."""
    try:
        return dict(zip(ops, _measure(tape, list(ops.values()), device, None)))
    except (CostError, OpMismatch):
        if len(ops) == 1:
            return {}
        return {n: cost for name, op in ops.items() for n, cost in _costs_that_can_be(tape, {name: op}, device).items()}


def _generator_bytes(tape: Tape, op: Op, device: torch.device) -> int:
    """On the CPU the generator is read through torch's allocator, before a random op that is recomputed later makes what it makes."""
    if not op.is_random or device.type != "cpu":
        return 0
    return max(0, torch.get_rng_state().nbytes - _new_bytes(tape, op))


# --- what makes two ops the same ------------------------------------------------------------------------------------------
def signature(tape: Tape, op: Op, optimizer: torch.optim.Optimizer | None = None) -> str:
    """SHA-256 over all that the cost of an op depends on, on one device: operator, arguments, forms of its tensors."""
    order: dict[int, int] = {}

    def form(value: Any) -> Any:
        if isinstance(value, list):
            return [form(v) for v in value]
        if not isinstance(value, Mapping) or not {"tensor", "fresh"} & set(value):
            return value
        (tag, tensor), = value.items()
        t = tape.tensors[tensor]
        return [tag, order.setdefault(tensor, len(order)), t.dtype, t.shape, t.strides]

    made = [form({"tensor": t}) for t in op.outputs if t is not None]
    kwargs = {k: form(v) for k, v in op.kwargs.items()}
    body = [MEASURED_AS, op.target, op.takeover is not None, form(op.args), kwargs, made, _new_bytes(tape, op)]
    if op.target == OPTIMIZER_STEP:
        body += [_optimizer_form(_required(optimizer)), [form({"tensor": t}) for t in op.inputs]]
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _new_bytes(tape: Tape, op: Op) -> int:
    """Bytes by which one run raises what is live."""
    return sum(tape.storages[s].nbytes for s in _new_storages(tape, op))


def _new_storages(tape: Tape, op: Op) -> set[int]:
    """What an op creates where it takes over what it may."""
    return set(tape.creates[op.id]) - ({op.takeover[0]} if op.takeover is not None else set())


def _optimizer_form(optimizer: torch.optim.Optimizer) -> list[str]:
    kind = type(optimizer)
    groups = [sorted({**group, "params": len(group["params"])}.items()) for group in optimizer.param_groups]
    return [f"{kind.__module__}.{kind.__qualname__}", repr(groups)]


def _required(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    if optimizer is None:
        raise ValueError("the tape has an optimizer step: pass the optimizer")
    return optimizer


# --- measuring ------------------------------------------------------------------------------------------------------------
def _measure(tape: Tape, ops: Sequence[Op], device: torch.device, optimizer: torch.optim.Optimizer | None) -> list[Cost]:
    if not ops:
        return []
    workspaces = _cuda_workspaces if device.type == "cuda" else _cpu_workspaces
    generators = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with torch.no_grad(), torch.autocast(device.type, enabled=False), generators, _no_collection():
        bench = _Bench(tape, device, optimizer)
        seconds = [0.0 if is_renaming(op) else bench.seconds(op) for op in ops]
        return [Cost(*cost) for cost in zip(seconds, workspaces(bench, ops))]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector would free blocks that are older than the meter, and take its time where time is measured."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


Run = Callable[[], Any]


class _Bench:
    """Makes ops runnable by themselves."""

    def __init__(self, tape: Tape, device: torch.device, optimizer: torch.optim.Optimizer | None) -> None:
        self.tape, self.device, self.optimizer = tape, device, optimizer
        self._values = torch.rand(2**20, device=device) / 2 + 0.5  # of order one: no denormals, no overflow, no zero divisors, no NaN

    def seconds(self, op: Op) -> float:
        """Least seconds of the op on fresh inputs. Its first run warms up, and shows what it makes."""
        try:
            run = self.runnable(op)
            self._compare(op, run())
            return _least_seconds(run, self.device)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as wrong:
            raise CostError(f"{self.tape.op_name(op.id)} does not run by itself: {wrong}") from wrong

    def _compare(self, op: Op, result: Any) -> None:
        """Refuse a result that does not look as the tape says."""
        for real, tensor in zip(tree_leaves(result), op.outputs):
            if tensor is None:
                continue
            form = self.tape.tensors[tensor]
            if not isinstance(real, torch.Tensor):
                raise OpMismatch(f"{self.tape.op_name(op.id)} makes {real!r}, the tape says a tensor")
            found, said = (dtype_name(real.dtype), tuple(real.shape), real.stride()), (form.dtype, form.shape, form.strides)
            if found != said:
                raise OpMismatch(f"{self.tape.op_name(op.id)} makes {found}, the tape says {said} (type, shape, strides)")
            nbytes = self.tape.storages[form.storage].nbytes
            if form.storage in _new_storages(self.tape, op) and real.untyped_storage().nbytes() != nbytes:
                raise OpMismatch(f"{self.tape.op_name(op.id)} makes {real.untyped_storage().nbytes()} bytes, the tape says {nbytes}")

    def runnable(self, op: Op) -> Run:
        """A function without arguments that runs the op once and returns what it makes."""
        if is_renaming(op):
            return lambda: None
        if op.target == OPTIMIZER_STEP:
            return self._optimizer_step(op)
        inputs = {t: self._input(op, t) for t in op.inputs}
        if op.target == ACCUMULATE_GRAD:
            return self._accumulation(op, inputs)
        call, positional = _in_place_form(self.tape, op)
        args, kwargs = self._arguments(positional, inputs), {k: self._arguments(v, inputs) for k, v in op.kwargs.items()}
        fresh = [i for i, a in enumerate(positional) if isinstance(a, Mapping) and "fresh" in a]
        if not fresh:
            return lambda: call(*args, **kwargs)
        (place,), form = fresh, self.tape.tensors[positional[fresh[0]]["fresh"]]
        return lambda: call(*args[:place], self._empty(form), *args[place + 1:], **kwargs)

    def _arguments(self, value: Any, inputs: Mapping[int, torch.Tensor]) -> Any:
        if isinstance(value, list):
            return [self._arguments(v, inputs) for v in value]
        if isinstance(value, Mapping) and "fresh" in value:
            return None  # allocated at each run
        return decode_arg(value, inputs.__getitem__, self.device)

    def _accumulation(self, op: Op, inputs: Mapping[int, torch.Tensor]) -> Run:
        temporary = inputs[op.inputs[0]]
        if op.mutates:
            gradient = inputs[op.inputs[1]]
            return lambda: gradient.add_(temporary)
        form = self.tape.tensors[op.outputs[0]]
        return lambda: self._empty(form).copy_(temporary)

    def _optimizer_step(self, op: Op) -> Run:
        """The same kind of optimizer, with the same options, over stand-ins of the parameters that have a gradient."""
        gradients = (self.tape.tensors[t] for t in op.inputs if self.tape.storages[self.tape.tensors[t].storage].role is Role.GRADIENT)
        wanted = Counter(t.shape for t in gradients)
        groups = [{**group, "params": self._stand_ins(group["params"], wanted)} for group in _required(self.optimizer).param_groups]
        groups = [group for group in groups if group["params"]]
        step = type(self.optimizer)(groups, **{k: groups[0][k] for k in ("lr",) if k in groups[0]}).step
        step()  # makes the optimizer's state, which a warm step finds there
        return step

    def _stand_ins(self, parameters: Sequence[torch.Tensor], wanted: Counter) -> list[torch.nn.Parameter]:
        found = []
        for parameter in parameters:
            if wanted[tuple(parameter.shape)] > 0:
                wanted[tuple(parameter.shape)] -= 1
                found.append(self._parameter(parameter))
        return found

    def _parameter(self, like: torch.Tensor) -> torch.nn.Parameter:
        stand_in = torch.nn.Parameter(torch.empty_like(like, device=self.device).fill_(0.5))
        stand_in.grad = torch.empty_like(stand_in).fill_(0.5)
        return stand_in

    def _empty(self, form: Tensor) -> torch.Tensor:
        return torch.empty_strided(form.shape, form.strides, dtype=dtype_of(form.dtype), device=self.device)

    def _input(self, op: Op, tensor: int) -> torch.Tensor:
        """A fresh tensor of this form; integers are valid indices, spread evenly, or zero."""
        form = self.tape.tensors[tensor]
        if _is_on_host(op, tensor):
            return torch.zeros(form.shape, dtype=dtype_of(form.dtype))
        span = 0 if 0 in form.shape else 1 + sum((n - 1) * s for n, s in zip(form.shape, form.strides))
        flat = torch.empty(span, dtype=dtype_of(form.dtype), device=self.device)
        if flat.dtype == torch.bool:
            self._fill(flat, self._values > 0.75)
        elif flat.dtype.is_floating_point or flat.dtype.is_complex:
            self._fill(flat, self._values)
        else:
            bound, period = _index_range(self.tape, op, tensor)
            flat.copy_(torch.arange(span, device=self.device) % period * bound // period)
        return flat.as_strided(form.shape, form.strides)

    @staticmethod
    def _fill(flat: torch.Tensor, values: torch.Tensor) -> None:
        for part in flat.split(len(values)):
            part.copy_(values[:len(part)])


def _in_place_form(tape: Tape, op: Op) -> tuple[Callable[..., Any], list[Any]]:
    """(operator, positional arguments) as the executor runs it: over its input where that may be."""
    if op.takeover is None or op.target.split(".")[1].endswith("_"):
        return callable_of(op.target), op.args
    args = list(op.args)
    written = next(i for i, a in enumerate(args) if isinstance(a, Mapping) and "tensor" in a
                   and tape.tensors[a["tensor"]].storage == op.takeover[1])
    if op.target == "aten.add.Tensor":
        args[0], args[written], written = args[written], args[0], 0  # a sum may overwrite either operand
    return inplace_twin(op.target, written), args


# Integer arguments that are indices: operator -> (position, bound from shapes and values, trailing dimensions over which they run).
_INDICES: dict[str, tuple[int, Callable[[list[Any]], int], int | None]] = {
    "embedding": (1, lambda args: args[0][0], None),
    "embedding_dense_backward": (1, lambda args: args[2], None),
    "nll_loss_forward": (1, lambda args: args[0][-1], None),
    "nll_loss_backward": (2, lambda args: args[1][-1], None),
    "nll_loss2d_forward": (1, lambda args: args[0][1], None),
    "nll_loss2d_backward": (2, lambda args: args[1][1], None),
    "index_select": (2, lambda args: args[0][args[1]], None),
    "gather": (2, lambda args: args[0][args[1]], None),
    "max_pool2d_with_indices_backward": (7, lambda args: prod(args[1][-2:]), 2),
    "max_pool3d_with_indices_backward": (7, lambda args: prod(args[1][-3:]), 3),
}


# Arguments that stand on the host: operator -> positions. A kernel that reads its seeds there would read a GPU's address.
_ON_HOST: dict[str, tuple[int, ...]] = {
    "_scaled_dot_product_efficient_attention_backward": (7, 8),
    "_efficient_attention_backward": (12, 13),
}


def _is_on_host(op: Op, tensor: int) -> bool:
    return any(op.args[i] == {"tensor": tensor} for i in _ON_HOST.get(op.target.split(".")[1], ()) if i < len(op.args))


def _index_range(tape: Tape, op: Op, tensor: int) -> tuple[int, int]:
    """(bound, period): indices rise from 0 to the bound over `period` elements, again and again. All zero where nothing is known."""
    position, bound, dimensions = _INDICES.get(op.target.split(".")[1], (None, None, None))
    if position is None or op.args[position] != {"tensor": tensor}:
        return 0, 1
    shapes = [tape.tensors[a["tensor"]].shape if isinstance(a, Mapping) and "tensor" in a else a for a in op.args]
    shape = tape.tensors[tensor].shape
    return bound(shapes), max(1, prod(shape[-dimensions:] if dimensions else shape))


def _least_seconds(run: Run, device: torch.device) -> float:
    """The least of at least 3 runs with cold caches, and of as many as fill 20 ms up to 10: what else a machine does only adds. Freeing is
    part of it."""
    clock = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    samples: list[float] = []
    while len(samples) < LEAST_RUNS or (sum(samples) < LEAST_SECONDS and len(samples) < MOST_RUNS):
        samples.append(clock(run, device))
    return min(samples)


def _cpu_seconds(run: Run, device: torch.device) -> float:
    _passer_by(device).add_(1)
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@cache
def _passer_by(device: torch.device) -> torch.Tensor:
    """What evicts everything else from the caches when it is touched."""
    return torch.zeros(CACHE_BYTES[device.type] // 4, dtype=torch.int32, device=device)


def _cuda_seconds(run: Run, device: torch.device) -> float:
    """Device time between two events: the launch is not in it, as it is hidden behind the kernels before."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    _passer_by(device).add_(1)
    torch.cuda.synchronize(device)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def _cpu_workspaces(bench: _Bench, ops: Sequence[Op]) -> list[int]:
    """All ops under one meter, each in a span of its own. They have run before: what libraries keep for good is there already."""
    with AllocatorMeter() as meter:
        for index, op in enumerate(ops):
            run = bench.runnable(op)
            with meter.span(str(index)):
                run()
            del run
    return [_beyond(meter.span_bytes(str(index)), bench.tape, op) for index, op in enumerate(ops)]


def _cuda_workspaces(bench: _Bench, ops: Sequence[Op]) -> list[int]:
    """Requested bytes, as the caching allocator keeps their watermark."""
    found = []
    for op in ops:
        run = bench.runnable(op)
        torch.cuda.reset_peak_memory_stats(bench.device)
        before = torch.cuda.memory_stats(bench.device)["requested_bytes.all.current"]
        run()
        peak = torch.cuda.memory_stats(bench.device)["requested_bytes.all.peak"]
        found.append(_beyond((before, peak), bench.tape, op))
    return found


def _beyond(span: Sequence[int], tape: Tape, op: Op) -> int:
    before, peak = span[:2]
    return max(0, peak - before - _new_bytes(tape, op))
