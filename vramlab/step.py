"""`vramlab.train_step`: a user's own module, forward and backward under a memory budget, as a drop-in for `loss.backward()`."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Iterator, Sequence

import torch

from vramlab.capture import LossFn
from vramlab.collection import Library, find_collections
from vramlab.costs import measure_profile
from vramlab.errors import Unsupported, VramlabError
from vramlab.execute import Executor
from vramlab.gate import deterministic
from vramlab.link import make_link
from vramlab.prepare import Plan, capture_with_costs, free_bytes, plan
from vramlab.record import Truth
from vramlab.schedule import Schedule
from vramlab.tape import Tape
from vramlab.trace import Metrics, Trace

KEPT_PLANS = 16


class WrongResult(VramlabError):
    """A planned step did not compute what eager PyTorch computes. `differing` names what differs."""

    def __init__(self, differing: Sequence[str]) -> None:
        self.differing = tuple(differing)
        super().__init__(f"this step differs from eager PyTorch in {', '.join(self.differing[:5])}"
                         + (f" and {len(self.differing) - 5} more" if len(self.differing) > 5 else ""))


def train_step(model: torch.nn.Module, loss_fn: LossFn, example: Sequence[Any] | torch.Tensor, *, method: str = "delta",
               budget: str | int | None = "auto", device: torch.device | str | None = None,
               optimizer: torch.optim.Optimizer | None = None, verify: bool = True, collections: Sequence[str] = (), **options: Any) -> TrainStep:
    """A callable that does what `loss_fn(model, *batch).backward()` does, within `budget` bytes of device memory.

    `loss_fn(model, *batch)` returns the scalar loss. `example` is a batch (or its only tensor): the step for its shapes is captured and planned
    here; another shape or mode is captured and planned at its first call. `budget`: "6GiB", "6GB", a number of bytes, "60%" (of the simulated eager
    peak), "auto" (free memory less a margin) or None. It bounds everything that the step holds: parameters, gradients, buffers, inputs, activations,
    the inside of ops, and the state and workspace of `optimizer` when it is given. `verify`: the first call of each shape also runs eager, where that fits
    in the machine, and raises WrongResult on any difference; that one call needs eager's memory. `options` go to the method.
    Raises CaptureError, PlanInfeasible, Unsupported, WorkflowError (unknown method or option).
    """
    return TrainStep(model, loss_fn, _as_batch(example), method=method, budget=budget, device=device, optimizer=optimizer, verify=verify,
                     collections=collections, options=options)


@dataclass
class _Planned:
    plan: Plan
    executor: Executor
    truth: Truth
    truth_reason: str


class TrainStep:
    """See `train_step`. `tape`, `schedule`, `predicted` and `truth` are those of the batch that was used last."""

    def __init__(self, model, loss_fn, batch, *, method, budget, device, optimizer, verify, collections, options) -> None:
        self._model, self._loss_fn, self._budget, self._optimizer, self._verify = model, loss_fn, budget, optimizer, verify
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if device is not None and torch.device(device).type != self._device.type:
            raise Unsupported(f"the parameters are on {self._device}, not on {device}; move the model first")
        found = Library(find_collections(collections)).method(method)
        if found.card.kind == "native":
            raise Unsupported(f"method '{method}' is native: it plans no schedule that train_step could run")
        self.method = found.name
        self._planner = found.build(**options)
        self._profile = measure_profile(self._device)
        self._link = make_link(self._device, self._profile)
        self._plans: OrderedDict[tuple, _Planned] = OrderedDict()
        self._last = self._find(batch)

    def __call__(self, *batch: Any) -> torch.Tensor:
        """Forward and backward: adds into `.grad`, updates buffers, advances the generator; returns the detached loss."""
        planned = self._last = self._find(batch)
        if planned.truth is Truth.NOT_RUN and not planned.truth_reason:
            return self._first_call(planned, batch)
        return planned.executor(*batch).loss

    @property
    def tape(self) -> Tape:
        """The captured step."""
        return self._last.plan.captured.tape

    @property
    def schedule(self) -> Schedule:
        """What runs."""
        return self._last.plan.checked.schedule

    @property
    def predicted(self) -> Metrics:
        """Simulated: peak bytes, step seconds, traffic."""
        return self._last.plan.predicted

    @property
    def budget_bytes(self) -> int:
        """The resolved budget; 2**62 where there is none."""
        return self._last.plan.checked.budget.device_bytes

    @property
    def truth(self) -> Truth:
        """exact or within_noise once the first call was verified; not_run before, or where eager does not fit."""
        return self._last.truth

    def measure(self, *batch: Any) -> Trace:
        """Run one step with a clock at every instruction; gradients, buffers and generator are put back afterwards."""
        from vramlab.timeline import executed_trace

        planned = self._find(batch)
        with _restored(self._model, batch, self._device):
            executed = planned.executor(*batch, timed=True)
        return executed_trace(planned.plan.checked, executed, str(self._device))

    # --- planning ---
    def _find(self, batch: Sequence[Any]) -> _Planned:
        key = step_key(self._model, batch, self._device)
        if key not in self._plans:
            self._plans[key] = self._plan(batch)
            while len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]

    def _plan(self, batch: Sequence[Any]) -> _Planned:
        captured = capture_with_costs(self._model, self._loss_fn, batch, with_gradient=frozenset(_with_gradient(self._model, batch)), optimizer=self._optimizer)
        planned = plan(captured, self._planner, self._profile, self._budget)
        executor = Executor(captured, planned.checked, self._model, link=self._link)
        return _Planned(planned, executor, Truth.NOT_RUN, "" if self._verify else "verify=False")

    def _first_call(self, planned: _Planned, batch: Sequence[Any]) -> torch.Tensor:
        """Run eager, put everything back, run the plan with every op verified, compare bit for bit."""
        if planned.plan.eager_peak_bytes > free_bytes(self._device.type) + _state_bytes(planned.plan.captured.tape):
            planned.truth_reason = "eager does not fit in this machine's memory"
            return planned.executor(*batch).loss
        with _deterministic_where_possible(self._device):
            with _restored(self._model, batch, self._device):
                self._loss_fn(self._model, *batch).backward()
                expected = _values(self._model, batch, self._device)
            loss = planned.executor(*batch, verify=True).loss
            differing = _differing(expected, _values(self._model, batch, self._device))
        if differing:
            raise WrongResult(differing)
        planned.truth, planned.truth_reason = Truth.EXACT, "gradients, buffers and generator equal eager's bit for bit"
        return loss


def step_key(model: torch.nn.Module, batch: Sequence[Any], device: torch.device) -> tuple:
    """All that a capture is valid for: shapes, dtypes, strides and devices of the batch, modes, what requires or has a gradient, autocast, hooks, scalars."""
    inputs = tuple((tuple(b.shape), b.dtype, b.stride(), b.device, b.requires_grad, b.grad is not None) if isinstance(b, torch.Tensor) else b for b in batch)
    modules = tuple((id(m), m.training, len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) + len(m._backward_pre_hooks),
                     tuple((k, v) for k, v in vars(m).items() if isinstance(v, bool | int | float | str))) for m in model.modules())
    parameters = tuple((id(p), tuple(p.shape), p.dtype, p.stride(), p.requires_grad, None if p.grad is None else p.grad.stride(),
                        bool(p._backward_hooks)) for p in model.parameters())
    buffers = tuple((tuple(b.shape), b.dtype) for b in model.buffers())
    autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return inputs, modules, parameters, buffers, autocast, torch.get_default_dtype()


def _as_batch(example: Sequence[Any] | torch.Tensor) -> tuple:
    return (example,) if isinstance(example, torch.Tensor) else tuple(example)


def _with_gradient(model: torch.nn.Module, batch: Sequence[Any]) -> Iterator[str]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            yield name
    for i, value in enumerate(batch):
        if isinstance(value, torch.Tensor) and value.grad is not None:
            yield f"input.{i}"


def _state_bytes(tape: Tape) -> int:
    return sum(s.nbytes for s in tape.storages if s.at_start)


def _leaves(model: torch.nn.Module, batch: Sequence[Any]) -> dict[str, torch.Tensor]:
    leaves = dict(model.named_parameters())
    return leaves | {f"input.{i}": b for i, b in enumerate(batch) if isinstance(b, torch.Tensor) and b.requires_grad}


def _values(model: torch.nn.Module, batch: Sequence[Any], device: torch.device) -> dict[str, torch.Tensor | None]:
    """Copies of all that a step may change: gradients, parameters' and buffers' values, generator states."""
    values = {f"{n}.grad": None if t.grad is None else t.grad.clone() for n, t in _leaves(model, batch).items()}
    values |= {n: b.clone() for n, b in model.named_buffers()}
    values["generator"] = torch.get_rng_state()
    if device.type == "cuda":
        values["generator of the GPU"] = torch.cuda.get_rng_state(device)
    return values


def _differing(expected: dict[str, torch.Tensor | None], found: dict[str, torch.Tensor | None]) -> list[str]:
    from vramlab.gate import difference

    return [name for name, value in expected.items() if difference(name, value, found[name]) is not None]


@contextlib.contextmanager
def _restored(model: torch.nn.Module, batch: Sequence[Any], device: torch.device) -> Iterator[None]:
    """Gradients, buffers and generators as they were, afterwards."""
    gradients = {n: (t, t.grad) for n, t in _leaves(model, batch).items()}
    kept = {n: g.clone() for n, (_, g) in gradients.items() if g is not None}
    buffers = [(b, b.clone()) for b in model.buffers()]
    generators = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
            for name, (tensor, grad) in gradients.items():
                if grad is not None:
                    grad.copy_(kept[name])
                tensor.grad = grad
        torch.set_rng_state(generators[0])
        if generators[1] is not None:
            torch.cuda.set_rng_state(generators[1], device)


def _deterministic_where_possible(device: torch.device) -> contextlib.AbstractContextManager:
    """On the CPU kernels are deterministic as they are; on CUDA they are asked to be."""
    return deterministic() if device.type == "cuda" else contextlib.nullcontext()
