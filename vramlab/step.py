"""`vramlab.train_step`: a user's own module, forward and backward under a memory budget, as a drop-in for `loss.backward()`."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from threading import RLock
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from vramlab.against_eager import Distance, distance_to_whole_batch, eager_fits, step_against_eager
from vramlab.algorithms import named_variants, under_variants
from vramlab.batch_mean import Divisor
from vramlab.capture import Captured, LossFn, capture, input_name, refuse_module
from vramlab.collection import Library, find_collections
from vramlab.costs import measure_costs, measure_profile, measure_variants
from vramlab.errors import CaptureError, PlanInfeasible, Unsupported, WorkflowError, sized
from vramlab.execute import Executor
from vramlab.family import tapes_by_size
from vramlab.liveness import lower_bound_bytes
from vramlab.micro_batches import changes_semantics
from vramlab.micro_loss import divisors_of_passes, refuse_beyond_rounding, refuse_uneven
from vramlab.micro_step import eager_over_micro_batches, refuse_batch, samples
from vramlab.planner import UNLIMITED, SubBatchPlanner, needs_of, parse_bytes, parse_percent, passes_of
from vramlab.prepare import Plan, capture_with_costs, plan, resolve_budget, simulated_eager_peak
from vramlab.prepared import prepare_tape
from vramlab.record import Truth
from vramlab.schedule import Schedule
from vramlab.seeds import seeds_for
from vramlab.snapshot import Snapshot, leaves_of, state_of
from vramlab.tape import Role, Tape
from vramlab.timeline import executed_trace
from vramlab.trace import Metrics, Trace
from vramlab.validity import Stale, Validity
from vramlab.yaml_nodes import near

KEPT_PLANS = 16
# Of each device: a call swaps the model's state and puts the device's generator back, which is the whole process's. Others wait for it.
_one_at_a_time: defaultdict[torch.device, RLock] = defaultdict(RLock)
_logger = logging.getLogger("vramlab")  # says what takes long; silent until a program turns it on


def train_step(
    model: torch.nn.Module,
    loss_fn: LossFn,
    example: Any,
    *,
    method: str = "delta",
    budget: str | int | None = "auto",
    device: torch.device | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    verify: bool = True,
    collections: Sequence[str] = (),
    **options: Any,
) -> TrainStep:
    """A callable that does what `loss_fn(model, *batch).backward()` does, within `budget` bytes of device memory.

    `loss_fn(model, *batch)` returns the scalar loss. `example` is a batch, a tuple or list of tensors, of lists, tuples and dicts that nest
    them, and of plain values; or its only element. The step for it is captured and planned here; another shape, mode or value is captured
    and planned at its first call. So what changes from step to step should be a tensor of the batch, not a Python number.

    `budget`: "6GiB", "6GB", a number of bytes, "60%" (of the simulated eager peak on the example), "auto" (free memory less a margin) or
    None. It is resolved once and bounds everything that the step holds: parameters, gradients, buffers, inputs, activations, the inside of
    ops, and the state and workspace of `optimizer` when it is given. `device`: where the parameters are; another is refused. `options` go
    to the method; `collections` are directories with more methods.

    Capturing, measuring each op and verifying take from seconds to minutes; the logger "vramlab" says at level INFO what is done.

    `verify`: the first call of each plan also runs eager, where that fits in the machine, and raises WrongResult on any difference; that
    one call needs eager's memory and copies of the state.

    A method that cuts the batch (modnn) runs forward and backward of each micro-batch, its loss weighted by its share of the batch, and
    returns the weighted sum. That is the step over the whole batch only where the loss is a mean over samples, which is asked when the step
    is planned, whatever `verify` is: any other loss, and a batch that has no first dimension to be cut along, is Unsupported. So is, at
    each call, a batch whose mask or `ignore_index` leaves the passes uneven shares. Eager is then eager over the same micro-batches; beside
    it the distance to eager over the whole batch is taken, where that fits.

    Steps on one device wait for each other, whatever thread calls them. A thread that draws random numbers from PyTorch's default generator
    while a step recomputes a dropout makes that call raise Disturbed; its gradients and buffers are then of no use.

    Raises CaptureError, PlanInfeasible, Unsupported, WorkflowError (unknown method or option) and ValueError (a budget that is none).
    """
    batch = tuple(example) if isinstance(example, tuple | list) else (example,)
    return TrainStep(model, loss_fn, batch, method, budget, device, optimizer, verify, collections, options)


@dataclass
class _Planned:
    """A plan, what runs it, and how it stands to eager."""

    plan: Plan
    executor: Executor
    truth: Truth = Truth.NOT_RUN
    truth_reason: str = ""
    divisors: tuple[tuple[int, Divisor], ...] = ()  # of a loss over micro-batches, with the place of the input that decides each
    whole: Captured | None = None  # the step that the micro-batches stand for
    distance: Distance | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.plan.captured.tape.micro_batches


@dataclass(frozen=True)
class _Example:
    """The batch that the budget was resolved for."""

    batch_size: int
    budget: str | int | None  # as it was asked
    eager_peak_bytes: int  # simulated

    def told(self, refusal: PlanInfeasible, another: Tape | None) -> PlanInfeasible:
        """A refusal with the share that was asked; of another step than the example's with both batch sizes and the least peak."""
        is_share = isinstance(self.budget, str) and parse_percent(self.budget) is not None
        share = f", {self.budget.strip()} of its eager peak" if is_share else ""
        return refusal.told(eager_peak_bytes=self.eager_peak_bytes if is_share else None,
                            note=self._of_another(another, share) if another else "")

    def _of_another(self, tape: Tape, share: str) -> str:
        differs = (f"a batch of {tape.batch_size}, not of the example's {self.batch_size}" if tape.batch_size != self.batch_size
                   else f"another shape, mode or value than the example's, of a batch of {self.batch_size} too")
        return (f"This step is of {differs}; the budget stays what it was for the example{share}. With the state on the device no schedule "
                f"of the whole batch is below {sized(lower_bound_bytes(tape))}")


class TrainStep:
    """See `train_step`. `tape`, `schedule`, `predicted` and `truth` are those of the batch that was used last."""

    def __init__(self, model, loss_fn, example, method, budget, device, optimizer, verify, collections, options) -> None:
        refuse_module(model)
        _check_arguments(method, optimizer, device, budget)
        self._model, self._loss_fn, self._budget, self._optimizer, self._verify = model, loss_fn, budget, optimizer, verify
        self._device = _device_of(model)
        if device is not None and torch.empty(0, device=device).device != self._device:
            raise Unsupported(f"the parameters are on {self._device}, not on {device}; move the model first")
        library = Library(find_collections(collections))
        found = library.method(method)
        if found.card.kind == "native":
            raise Unsupported(f"method '{found.name}' is native: it has no schedule that train_step could run")
        self.method = found.name
        _refuse_misspelt(options, found.card.options)
        self._planner, self._seeds_of = found.build(**options), partial(seeds_for, library, found)
        self._needs = needs_of(self._planner, found.card.needs)
        self._profile = measure_profile(self._device)
        self._validity = Validity(model, loss_fn, self._device)
        self._plans: OrderedDict[tuple, _Planned] = OrderedDict()
        self._example: _Example | None = None
        with _one_at_a_time[self._device]:
            self._last = self._find(*tree_flatten(example))

    def __call__(self, *batch: Any) -> torch.Tensor:
        """Forward and backward: adds into `.grad`, updates buffers, advances the generator; returns the detached loss."""
        inputs, structure = tree_flatten(batch)
        with _one_at_a_time[self._device]:
            planned = self._last = self._find(inputs, structure)
            refuse_uneven(planned.divisors, inputs, planned.sizes)
            if planned.truth is Truth.NOT_RUN and not planned.truth_reason:
                return self._first_call(planned, inputs, structure)
            return planned.executor(*inputs).loss

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
    def budget_bytes(self) -> int | None:
        """The resolved budget, None where there is none."""
        nbytes = self._last.plan.budget.device_bytes
        return None if nbytes >= UNLIMITED else nbytes

    @property
    def truth(self) -> Truth:
        """exact once the first call was verified; within_noise where eager differs from itself as much; not_run: see `truth_reason`.

        semantics_changed: as eager over the same micro-batches, which is another step than over the whole batch: see `distance`.
        """
        return self._last.truth

    @property
    def truth_reason(self) -> str:
        """Why `truth` is not_run, "" otherwise."""
        return self._last.truth_reason or ("not called yet" if self._last.truth is Truth.NOT_RUN else "")

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Sizes of the passes over the batch, empty where it is whole."""
        return self._last.sizes

    @property
    def distance(self) -> Distance | None:
        """Of a verified step over micro-batches from eager over the whole batch, on the first call's batch; None where not measured."""
        return self._last.distance

    def measure(self, *batch: Any) -> Trace:
        """Run one step with a clock at every instruction, then put gradients, state and generators back (from copies on the host)."""
        with _one_at_a_time[self._device]:
            return self._measured(*tree_flatten(batch))

    def _measured(self, inputs: list[Any], structure: TreeSpec) -> Trace:
        planned = self._find(inputs, structure)
        captured = planned.plan.captured
        written = state_of(captured, self._model, inputs, written_only=True)
        before = Snapshot(written, leaves_of(captured, self._model, inputs), self._device)
        try:
            executed = planned.executor(*inputs, timed=True)
        finally:
            before.restore()
        return executed_trace(planned.plan.checked, executed, str(self._device))

    # --- which plan ---------------------------------------------------------------------------------------------------------
    def _find(self, inputs: list[Any], structure: TreeSpec) -> _Planned:
        """The plan that is valid for this call, made now where there is none."""
        key = self._key(inputs, structure)
        if key not in self._plans:
            self._look_anew()
            key = self._key(inputs, structure)
        if key not in self._plans:
            self._plans[key] = self._plan(inputs, structure)
            while len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]

    def _key(self, inputs: list[Any], structure: TreeSpec) -> tuple:
        updated = tuple(len(group["params"]) for group in self._optimizer.param_groups) if self._optimizer else ()
        try:
            return self._validity.key(inputs), structure, updated
        except Stale:
            self._look_anew()
            return self._validity.key(inputs), structure, updated

    def _look_anew(self) -> None:
        """Code may name other values now, and modules may be others: plans for modules that are gone would keep them alive."""
        modules = self._validity.modules
        self._validity = Validity(self._model, self._loss_fn, self._device)
        if self._validity.modules != modules:
            self._plans.clear()

    def _plan(self, inputs: list[Any], structure: TreeSpec) -> _Planned:
        if _device_of(self._model) != self._device:
            raise Unsupported(f"the parameters were on {self._device} and are on {_device_of(self._model)} now; make a new train_step")
        loss_fn = over_inputs(self._loss_fn, structure)
        with_gradient = frozenset(_with_gradient(self._model, inputs))
        _logger.info("capturing the step and measuring its ops on %s ...", self._device)
        started = time.perf_counter()
        captured = capture_with_costs(self._model, loss_fn, inputs, with_gradient=with_gradient, optimizer=self._optimizer)
        _logger.info("%d ops, measured in %.0f s; planning with %s ...", len(captured.tape.ops), time.perf_counter() - started, self.method)
        is_example, eager = self._example is None, simulated_eager_peak(captured.tape)
        if is_example:
            self._example = _Example(captured.tape.batch_size, self._budget, eager)
            self._budget = self._resolve(self._budget, captured.tape) if isinstance(self._budget, str) else self._budget
        whole = self._as_needed(captured)
        try:
            return self._planned(whole, loss_fn, inputs, with_gradient, eager)
        except PlanInfeasible as refusal:
            raise self._example.told(refusal, None if is_example else whole.tape) from None

    def _planned(self, whole: Captured, loss_fn: LossFn, inputs: list[Any], with_gradient: frozenset[str], eager: int) -> _Planned:
        captured, divisors = self._over_passes(whole, loss_fn, inputs, with_gradient), ()
        if captured is not whole:
            divisors = divisors_of_passes(self._model, loss_fn, inputs, captured.tape.micro_batches, whole)
            eager = simulated_eager_peak(captured.tape)
        planned = plan(captured, self._planner, self._profile, self._budget, eager_peak_bytes=eager, name=self.method, needs=self._needs,
                       seeds_of=self._seeds_of)
        _logger.info("planned in %.0f s: peak %s of eager's %s, simulated", planned.plan_seconds, _mebibytes(planned.predicted.peak_bytes),
                     _mebibytes(eager))
        return _Planned(planned, Executor(captured, planned.checked, self._model), truth_reason="" if self._verify else "verify=False",
                        divisors=divisors, whole=None if captured is whole else whole)

    def _as_needed(self, captured: Captured) -> Captured:
        """Prepared for the method, with costs."""
        tape = captured.tape
        prepared = prepare_tape(tape, self._needs, self._device)
        if prepared is not None:
            tape = measure_costs(prepared.tape, self._device, optimizer=self._optimizer)
        if "variants" in self._needs:
            tape = measure_variants(tape, self._device)
        return captured if tape is captured.tape else Captured(tape, captured.binding)

    def _over_passes(self, whole: Captured, loss_fn: LossFn, inputs: list[Any], with_gradient: frozenset[str]) -> Captured:
        """The step over the passes that the method wants, `whole` where it leaves the batch whole."""
        batch_size, options = whole.tape.batch_size, {"with_gradient": with_gradient, "optimizer": self._optimizer}
        if not isinstance(self._planner, SubBatchPlanner):
            return whole

        def first(size: int) -> list[Any]:
            refuse_batch(inputs, batch_size)
            return list(samples(inputs, batch_size, 0, size))

        def measured(size: int) -> Tape:
            if size == batch_size:
                return whole.tape
            return self._as_needed(capture_with_costs(self._model, loss_fn, first(size), **options)).tape

        by_size: list[Callable[[int], Tape]] = []  # made when a size is asked for: it takes captures

        def at(size: int) -> Tape:
            if not by_size:
                by_size.append(tapes_by_size(lambda n: capture(self._model, loss_fn, first(n), **options).tape, batch_size))
            return by_size[0](size)

        try:
            sizes = passes_of(self._planner, at, batch_size, resolve_budget(self._budget, 0, whole.tape), measured)
            if not sizes:
                return whole
            return self._as_needed(capture_with_costs(self._model, loss_fn, inputs, sizes=sizes, **options))
        except CaptureError as wrong:
            raise Unsupported(f"the batch cannot be cut into micro-batches: the step over a part of it is another one ({wrong})") from wrong

    def _resolve(self, budget: str, tape: Tape) -> int:
        nbytes = resolve_budget(budget, simulated_eager_peak(tape), tape).device_bytes
        if budget != "auto" or self._optimizer is None or self._optimizer.state:
            return nbytes
        return nbytes - tape.bytes_of(Role.OPTIMIZER_STATE)  # not there yet: its memory is still among the free

    def _first_call(self, planned: _Planned, inputs: list[Any], structure: TreeSpec) -> torch.Tensor:
        """Verified against eager, where that fits."""
        captured, sizes = planned.plan.captured, planned.sizes
        if not eager_fits(captured.tape, planned.plan.eager_peak_bytes, self._device):
            planned.truth_reason = "eager does not fit in this machine's memory"
            return planned.executor(*inputs).loss

        loss_fn = over_inputs(self._loss_fn, structure)
        if sizes:
            self._measure_distance(planned, loss_fn, inputs)

        def step() -> torch.Tensor:
            return planned.executor(*inputs, verify=True).loss

        def eager() -> torch.Tensor:
            if sizes:
                return eager_over_micro_batches(self._model, loss_fn, inputs, sizes)
            loss = self._loss_fn(self._model, *tree_unflatten(inputs, structure))
            loss.backward()
            return loss

        _logger.info("first call: verified against eager PyTorch ...")
        started = time.perf_counter()
        like_the_plan = under_variants(eager, named_variants(captured.tape, planned.plan.checked.schedule))
        loss, truth = step_against_eager(step, like_the_plan, captured, self._model, inputs, self._device)
        planned.truth = Truth.SEMANTICS_CHANGED if sizes and changes_semantics(captured.tape) else truth
        _logger.info("%s, in %.0f s", str(planned.truth).replace("_", " "), time.perf_counter() - started)
        return loss

    def _measure_distance(self, planned: _Planned, loss_fn: LossFn, inputs: list[Any]) -> None:
        """From the whole batch, where eager fits there. Unsupported where it is no rounding and nothing in the step explains it."""
        whole = planned.whole
        if not eager_fits(whole.tape, simulated_eager_peak(whole.tape), self._device):
            return
        planned.distance = distance_to_whole_batch(whole, self._model, loss_fn, inputs, planned.sizes, self._device)
        if not changes_semantics(whole.tape):
            refuse_beyond_rounding(planned.distance, whole.tape)


# --- batches ------------------------------------------------------------------------------------------------------------------
def over_inputs(loss_fn: LossFn, structure: TreeSpec) -> LossFn:
    """The same loss over the flat inputs of a batch that nests them."""
    if all(part.is_leaf() for part in structure.children()):
        return loss_fn

    def over_flat_inputs(model: torch.nn.Module, *inputs: Any) -> torch.Tensor:
        return loss_fn(model, *tree_unflatten(inputs, structure))

    return over_flat_inputs


def _with_gradient(model: torch.nn.Module, inputs: Sequence[Any]) -> Iterator[str]:
    """Names of the leaves whose `.grad` is there already."""
    named = list(model.named_parameters(remove_duplicate=False))
    named += [(input_name(i), value) for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    yield from (name for name, value in named if value.is_leaf and value.grad is not None)


def _refuse_misspelt(options: Mapping[str, Any], declared: Iterable[str]) -> None:
    """WorkflowError for what is no option of the method and meant an argument of train_step."""
    own = [name for name, parameter in signature(train_step).parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    for name in options:
        if name == "options":
            raise WorkflowError("train_step takes the options of a method as arguments of its own: action='swap-only', not options={...}")
        if name not in declared and (meant := near(name, [*own, *declared])) in own:
            raise WorkflowError(f"train_step has no argument {name!r}; did you mean {meant!r}?")


def _check_arguments(method: Any, optimizer: Any, device: Any, budget: Any) -> None:
    """TypeError and ValueError that say what is allowed, before anything is captured."""
    if not isinstance(method, str):
        raise TypeError(f"method is a method's name such as 'delta', not {method!r}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a torch.optim.Optimizer or None, not {optimizer!r}")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, str | int)):
        raise TypeError(f"budget is a size such as '6GiB', a share such as '60%', 'auto', a number of bytes or None, not {budget!r}")
    if isinstance(budget, str) and budget.strip().isdigit():
        number = budget.strip()
        raise ValueError(f"budget {budget!r} has no unit; write '{number}%', '{number}MiB' or the number {number} for bytes")
    if budget not in (None, "auto") and parse_percent(budget) is None:  # told now, not once the step has been captured and measured
        try:
            parse_bytes(budget)
        except ValueError as error:
            raise ValueError(f"{error}, a share of eager's peak such as '60%', or 'auto'") from error
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:  # unknown, or not on this machine
        raise ValueError(f"{device!r} is no device of this machine; write 'cpu', 'cuda' or 'cuda:0', or leave it out") from error


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
