"""Capture: one training step of any PyTorch module -> a Tape.

The step runs once under `FakeTensorMode` (shapes and strides, no data) while a dispatch mode records every operator call in
the order in which eager makes it. Recording below autograd keeps eager's in-place and random operators exactly as they are,
which a functionalised graph does not; aliases are read off the fake storages, never off operator names.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils import stateless
from torch.utils._python_dispatch import TorchDispatchMode

from vramlab.errors import CaptureError
from vramlab.ops import dtype_name, encode_arg
from vramlab.python_state import PLAIN, Change, Guard, Scope, seeding_noticed
from vramlab.tape import STATE_ROLES, Op, Phase, Role, Storage, Tape, Tensor

LossFn = Callable[..., torch.Tensor]

# Operators that write arguments which their schema does not declare: name -> positions of those arguments, and the position of
# the flag that switches the write on. (BatchNorm's running statistics: recomputing such an op must not write them twice.)
_HIDDEN_WRITES = {
    "aten.native_batch_norm.default": ((3, 4), 5),
    "aten.cudnn_batch_norm.default": ((3, 4), 5),
    "aten.miopen_batch_norm.default": ((3, 4), 5),
}
_BATCH_NORMS = frozenset(_HIDDEN_WRITES) | {"aten._native_batch_norm_legit.default", "aten._batch_norm_with_update.default"}
# They allocate without writing: the storage is born at its first use.
_ALLOCATORS = frozenset(
    f"aten.{name}"
    for name in (
        "empty.memory_format",
        "empty_like.default",
        "empty_strided.default",
        "new_empty.default",
        "new_empty_strided.default",
        "empty_permuted.default",
    )
)
# They overwrite all of their first argument without reading it.
_FILLERS = frozenset(
    {"bernoulli_", "uniform_", "normal_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_", "fill_", "zero_", "copy_"}
)
_REFUSED = {
    "set_": "it changes which storage a tensor shows",
    "resize_": "it changes the size of a storage",
    "_local_scalar_dense": "a value of a tensor is read in Python, so the step depends on data",
    "nonzero": "the shape of its result depends on data",
    "masked_select": "the shape of its result depends on data",
    "unique2": "the shape of its result depends on data",
    "_unique2": "the shape of its result depends on data",
}
# Fake kernels of these give no workspace; one real call on zeros gives the true shapes.
_RUN_FOR_REAL = frozenset({"aten.mkldnn_rnn_layer.default", "aten.mkldnn_rnn_layer_backward.default"})
_NO_RECORD = frozenset(
    {
        "prim.device.default",
        "prim.layout.default",
        "aten.is_same_size.default",
        "aten.sym_size.default",
        "aten.sym_stride.default",
        "aten.sym_numel.default",
        "aten.sym_storage_offset.default",
    }
)
_FOREIGN_LEAF = (
    "a tensor that requires a gradient is neither a parameter of the module nor an input. Make it one, or call requires_grad_(False) on "
    "it; a parameter must be reached through the module that loss_fn is given"
)
_WRAPPERS = (
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "OptimizedModule",
    "ScriptModule",
    "RecursiveScriptModule",
)


def input_name(place: int) -> str:
    """How an element of the batch is named beside parameters and buffers: a space stands in no attribute."""
    return f"input {place}"


@dataclass(frozen=True)
class Binding:
    """Which torch objects the state of a tape stands for. Tensor ids of the tape throughout."""

    parameters: Mapping[str, int]  # name -> the tensor that the parameter is
    buffers: Mapping[str, int]
    inputs: tuple[int | None, ...]  # per element of the flat batch, None for what is no tensor
    constants: Mapping[int, torch.Tensor]  # tensors that the code closes over, by tensor id
    gradients: Mapping[str, int]  # name of the parameter, or `input_name` -> tensor of its gradient, only where there is one
    optimizer_state: tuple[int, ...]


@dataclass(frozen=True)
class Captured:
    """A tape and what binds it to a module."""

    tape: Tape
    binding: Binding


@dataclass
class _Draft:
    """What is recorded of one operator call, before liveness is known."""

    target: str
    args: Any
    kwargs: dict[str, Any]
    inputs: list[int]
    outputs: list[int | None]
    phase: Phase
    layer: str
    mutates: list[int] = field(default_factory=list)
    takeover: tuple[int, int] | None = None
    is_eager_inplace: bool = False
    is_random: bool = False
    throwaway_state: bool = False


@dataclass
class _DraftStorage:
    nbytes: int
    role: Role
    name: str
    at_start: bool
    at_end: bool


class _Recorder(TorchDispatchMode):
    """Writes down each operator call. One tape storage for each version of a temporary; state keeps its storage."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.fake_mode = fake_mode
        self.drafts: list[_Draft] = []
        self.storages: list[_DraftStorage] = []
        self.tensors: list[tuple] = []
        self.constants: dict[int, torch.Tensor] = {}
        self.phase = Phase.FORWARD
        self.layer = ""
        self.failed_at = ("", "")  # operator and module of the call that raised
        self._current: dict[int, int] = {}  # address of a fake storage -> its tape storage as of now
        self._unborn: dict[int, tuple] = {}  # address -> (allocator call), not yet written
        self._alive: list[Any] = []  # keeps the addresses from being used again
        self._tensor_ids: dict[tuple, int] = {}
        self._layer_of_node: dict[int, str] = {}

    # --- stand-ins for state ---
    def shapes_only(self) -> contextlib.AbstractContextManager:
        """The mode under which the step runs."""
        return self.fake_mode

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the step sees in place of a parameter or buffer; the same for the same tensor."""
        return self.fake_mode.from_tensor(tensor)

    def input_stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the step sees in place of an input: its own bytes, from their start."""
        with self.fake_mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad
            )

    # --- names of things -----------------------------------------------------------------------------------------------
    def add_state(self, fake: torch.Tensor, role: Role, name: str, nbytes: int | None = None) -> int:
        """Declare a state tensor; returns its tensor id. Tensors that share a storage share its tape storage."""
        self._adopt(fake, role, name, at_start=True, nbytes=nbytes)
        return self.tensor_id(fake)

    def _adopt(self, fake: torch.Tensor, role: Role, name: str, *, at_start: bool, nbytes: int | None = None) -> int:
        address = _address(fake)
        if address not in self._current:
            self._alive.append(fake)
            self.storages.append(
                _DraftStorage(
                    fake.untyped_storage().nbytes() if nbytes is None else nbytes,
                    role,
                    name or f"%{len(self.storages)}",
                    at_start,
                    at_start,
                )
            )
            self._current[address] = len(self.storages) - 1
        return self._current[address]

    def tensor_id(self, fake: torch.Tensor) -> int:
        """The id of this view of its storage's present version."""
        if _address(fake) not in self._current:
            raise CaptureError("a tensor is read that the step neither made nor was given, such as a parameter's .grad", module=self.layer)
        return self._view_id(self._current[_address(fake)], fake)

    def _view_id(self, storage: int, fake: torch.Tensor) -> int:
        key = (storage, dtype_name(fake.dtype), tuple(fake.shape), tuple(fake.stride()), int(fake.storage_offset()))
        if key not in self._tensor_ids:
            self._tensor_ids[key] = len(self.tensors)
            self.tensors.append(key)
        return self._tensor_ids[key]

    # --- recording -----------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = str(func)
        if target in _NO_RECORD:
            return func(*args, **kwargs)
        name = target.split(".")[1]
        if name in _REFUSED:
            raise CaptureError(_REFUSED[name], op=target, module=self.layer)
        args, kwargs = _map_tensors(self._to_fake, args), {k: _map_tensors(self._to_fake, v) for k, v in kwargs.items()}
        try:
            out = self._run(func, target, args, kwargs)
        except Exception:
            self.failed_at = (target, self.layer)
            raise
        self._record(func, target, args, kwargs, out)
        return out

    def _run(self, func, target: str, args, kwargs):
        if target not in _RUN_FOR_REAL:
            return func(*args, **kwargs)
        with torch.utils._python_dispatch._disable_current_modes():
            real = func(*_map_tensors(_zeros_like_fake, args), **{k: _map_tensors(_zeros_like_fake, v) for k, v in kwargs.items()})
            return _map_tensors(lambda t: t if t is None else self.fake_mode.from_tensor(t), real)

    def _to_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that the code closes over is state: it is read at every step from the object that it is."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.requires_grad:
            raise CaptureError(_FOREIGN_LEAF, module=self.layer)
        fake = self.fake_mode.from_tensor(tensor)
        if _address(fake) not in self._current:
            known = self.add_state(fake, Role.BUFFER, f"constant.{len(self.constants)}")
            self.constants[known] = tensor
        return fake

    def _record(self, func, target: str, args, kwargs, out) -> None:
        self._layer_from_node()
        flat_out = _made(func, args, kwargs, out)
        tensors_in = [t for t in _flatten((args, kwargs)) if isinstance(t, torch.Tensor)]
        self._refuse_exotic(target, tensors_in + [t for t in flat_out if isinstance(t, torch.Tensor)])
        written = [] if torch.Tag.inplace_view in func.tags else _written_tensors(func, target, args, kwargs)  # such ops write no bytes
        if target in _ALLOCATORS and _address(out) not in self._current:
            self._alive.append(out)
            self._unborn[_address(out)] = (func, args, kwargs, out, self.phase, self.layer)
            return
        is_fill = len(written) == 1 and self._is_fill(target, written[0])
        for t in tensors_in:
            if not (is_fill and t is written[0]):
                self._give_birth(t)
        creates = [
            t for t in flat_out if isinstance(t, torch.Tensor) and _address(t) not in self._current and _address(t) not in self._unborn
        ]
        if not creates and not written:
            return  # a view, or something that returns no tensor: no bytes, no instruction
        self._append(func, target, args, kwargs, flat_out, tensors_in, written, is_fill)

    def _is_fill(self, target: str, tensor: torch.Tensor) -> bool:
        """Does this call overwrite the whole of a storage that nobody has written yet?"""
        covers = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        return target.split(".")[1] in _FILLERS and _address(tensor) in self._unborn and covers

    def _give_birth(self, tensor: torch.Tensor) -> None:
        """An allocation that is read, or written in part, before it is filled becomes an op of its own."""
        call = self._unborn.pop(_address(tensor), None)
        if call is None:
            return
        func, args, kwargs, out, phase, layer = call
        now = self.phase, self.layer
        self.phase, self.layer = phase, layer
        tensors_in = [t for t in _flatten((args, kwargs)) if isinstance(t, torch.Tensor)]
        for t in tensors_in:
            self._give_birth(t)
        self._append(func, str(func), args, kwargs, [out], tensors_in, [], False)
        self.phase, self.layer = now

    def _append(self, func, target, args, kwargs, flat_out, tensors_in, written, is_fill) -> None:
        draft = _Draft(target, None, {}, [], [], self.phase, self.layer)
        fresh = written[0] if is_fill else None
        reads = [t for t in tensors_in if t is not fresh]
        old = {id(t): self.tensor_id(t) for t in reads}
        draft.inputs = list(dict.fromkeys(old.values()))
        self._write(draft, target, [t for t in written if t is not fresh])
        if fresh is not None:
            self._unborn.pop(_address(fresh))
            self._adopt(fresh, Role.TEMPORARY, "", at_start=False)
        for t in flat_out:
            if isinstance(t, torch.Tensor):
                self._give_birth_of_output(t)
        draft.outputs = [self.tensor_id(t) if isinstance(t, torch.Tensor) else None for t in flat_out]
        for t in written:  # a temporary that is written but not returned is an output all the same
            is_state = self.storages[self._current[_address(t)]].role in STATE_ROLES
            if not is_state and self.tensor_id(t) not in draft.outputs:
                draft.outputs.append(self.tensor_id(t))
        try:
            draft.args, draft.kwargs = _encode(args, kwargs, old, fresh, self.tensor_id)
        except TypeError as wrong:
            raise CaptureError(f"{wrong} has no form in a tape", op=target, module=self.layer) from None
        draft.is_random = draws(func, args, kwargs)
        draft.throwaway_state = bool(draft.mutates) and target in _BATCH_NORMS
        self.drafts.append(draft)

    def _give_birth_of_output(self, tensor: torch.Tensor) -> None:
        if _address(tensor) in self._unborn:
            self._give_birth(tensor)
        self._adopt(tensor, Role.TEMPORARY, "", at_start=False)

    def _write(self, draft: _Draft, target: str, written: Sequence[torch.Tensor]) -> None:
        """State is overwritten in place; a temporary gets a new storage that may take over the old one's region."""
        for t in written:
            address = _address(t)
            storage = self._current[address]
            if self.storages[storage].role in STATE_ROLES:
                if storage not in draft.mutates:
                    draft.mutates.append(storage)
                continue
            if target.endswith("out"):
                raise CaptureError("it writes into a tensor given as out=; use what it returns instead", op=target, module=self.layer)
            if draft.takeover is not None:
                if draft.takeover[1] == storage:
                    continue
                raise CaptureError("it writes two temporaries in place", op=target, module=self.layer)
            new = len(self.storages)
            self.storages.append(_DraftStorage(self.storages[storage].nbytes, Role.TEMPORARY, f"%{new}", False, False))
            self._current[address] = new
            draft.takeover, draft.is_eager_inplace = (new, storage), True

    def _refuse_exotic(self, target: str, tensors: Sequence[torch.Tensor]) -> None:
        for t in tensors:
            if t.layout is not torch.strided or t.is_quantized or t.is_neg() or t.is_conj():
                raise CaptureError(
                    "only dense tensors are captured (no sparse, quantised or lazily conjugated ones)", op=target, module=self.layer
                )

    # --- which module ---------------------------------------------------------------------------------------------------
    def _layer_from_node(self) -> None:
        """Forward: note which module each autograd node belongs to. Backward: look it up."""
        if self.phase is Phase.FORWARD:
            self._layer_of_node.setdefault(torch.autograd._get_sequence_nr() - 1, self.layer)
            return
        node = torch._C._current_autograd_node()
        if node is not None:
            self.layer = self._layer_of_node.get(node._sequence_nr(), self.layer)


class _DataRecorder(_Recorder):
    """Records a step that really runs, on copies of the state."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__(fake_mode)
        self._copies: dict[int, torch.Tensor] = {}

    def shapes_only(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = self.input_stand_in(tensor)
        return self._copies[id(tensor)]

    def input_stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return copy.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)

    def _run(self, func, target, args, kwargs):
        return func(*args, **kwargs)

    def _to_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._copies:
            return self._copies[id(tensor)]
        if _address(tensor) not in self._current and _address(tensor) not in self._unborn:
            if tensor.requires_grad:
                raise CaptureError(_FOREIGN_LEAF, module=self.layer)
            self.constants[self.add_state(self.stand_in(tensor), Role.BUFFER, f"constant.{len(self.constants)}")] = tensor
            return self._copies[id(tensor)]
        return tensor


def capture(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batch: Sequence[Any],
    *,
    with_gradient: frozenset[str] = frozenset(),
    optimizer: torch.optim.Optimizer | None = None,
    with_data: bool = False,
) -> Captured:
    """Capture the step `loss_fn(model, *batch).backward()` (and `optimizer.step()`).

    `batch` is a flat sequence; its first tensor's first dimension is the batch size. `with_gradient` names the
    parameters whose `.grad` is there at the start and is added to; every other `.grad` is None at the start. No state changes and, but
    for `with_data`, nothing is computed: that runs the step on copies of the state, for the rare operator whose fake kernel gives other
    shapes than its real one, and needs the memory of all its tensors at once. Raises CaptureError where a replay could differ from eager.
    """
    refuse_module(model)
    guard = Guard(Scope(model, loss_fn))
    device = _device_of(model, batch)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = _DataRecorder(fake_mode) if with_data else _Recorder(fake_mode)
    state = _declare_state(recorder, model)
    fake_batch, inputs = _declare_batch(recorder, batch)
    try:
        loss, gradients = _run_step(recorder, model, loss_fn, state, fake_batch)
    finally:
        changes = guard.undo()
    _refuse_changes(changes)
    return _finish(recorder, model, state, fake_batch, inputs, loss, gradients, batch, device, with_gradient, optimizer)


# --- declaring state ----------------------------------------------------------------------------------------------------
@dataclass
class _State:
    fakes: dict[str, torch.Tensor]
    parameters: dict[str, int]
    buffers: dict[str, int]


def _declare_state(recorder: _Recorder, model: torch.nn.Module) -> _State:
    fakes, ids = {}, {Role.PARAMETER: {}, Role.BUFFER: {}}
    named = [(n, p, Role.PARAMETER) for n, p in model.named_parameters(remove_duplicate=False)]
    named += [(n, b, Role.BUFFER) for n, b in model.named_buffers(remove_duplicate=False)]
    for name, tensor, role in named:
        fakes[name] = recorder.stand_in(tensor)
        ids[role][name] = recorder.add_state(fakes[name], role, name)
    return _State(fakes, ids[Role.PARAMETER], ids[Role.BUFFER])


def _declare_batch(recorder: _Recorder, batch: Sequence[Any]) -> tuple[list[Any], list[int | None]]:
    """Inputs are what the views show, not the data set that they may be a slice of."""
    fakes, ids = [], []
    for i, value in enumerate(batch):
        if not isinstance(value, torch.Tensor):
            if type(value) not in PLAIN:
                raise CaptureError(f"input {i} is a {type(value).__name__}, whose contents a replay would not see change; pass tensors")
            fakes.append(value)
            ids.append(None)
            continue
        _refuse_input(i, value, batch)
        fake = recorder.input_stand_in(value)
        fakes.append(fake)
        ids.append(recorder.add_state(fake, Role.INPUT, input_name(i)))
    return fakes, ids


def _run_step(recorder, model, loss_fn, state: _State, fake_batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Forward and backward under the recorder; returns the loss and each gradient by name."""
    targets = _gradient_targets(state, fake_batch)
    addresses = {n: _address(t) for n, t in state.fakes.items()}
    grads = {name: (t.grad, t.grad is not None and t.grad._version) for name, t in targets.items()}
    try:
        with _fake_kernels_quiet(), _generators_kept(recorder), recorder.shapes_only(), recorder, _module_paths(recorder, model):
            with stateless._reparametrize_module(model, state.fakes, tie_weights=True):  # in the backward too: it may run modules again
                loss = loss_fn(model, *fake_batch)
                _refuse_loss(loss, targets)
                _refuse_own_backward(targets, grads)
                recorder.phase = Phase.BACKWARD
                with torch.autograd.set_multithreading_enabled(False):  # on CUDA it would run in a thread without what is set up here
                    found = torch.autograd.grad(loss, list(targets.values()), allow_unused=True)
    except CaptureError:
        raise
    except Exception as wrong:
        raise _explain(wrong, recorder) from wrong
    finally:
        torch.clear_autocast_cache()  # inside a region of the caller's it would keep stand-ins of the weights
    for name, fake in state.fakes.items():
        if _address(fake) != addresses[name]:
            raise CaptureError(f"'{name}' is given another storage in the forward; write into it (`copy_`) instead of assigning")
    return loss, {n: g for n, g in zip(targets, found) if g is not None}


@contextlib.contextmanager
def _fake_kernels_quiet() -> Iterator[None]:
    """A failure is told once, by CaptureError; torch would log its traceback besides."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _generators_kept(recorder: _Recorder) -> Iterator[None]:
    """Puts the generators back, and refuses a step that sets one: a replay draws on, where eager would draw the same again."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices), seeding_noticed() as setters:
        before = torch.get_rng_state()
        yield
        has_drawn = isinstance(recorder, _DataRecorder)
        if "manual_seed" in setters or (not has_drawn and not torch.equal(before, torch.get_rng_state())):
            raise CaptureError("the step seeds the random generator; seed it outside of the step")
        if setters and any(draft.is_random for draft in recorder.drafts):
            raise CaptureError(
                "the step draws random numbers and sets the state of their generator, as activation checkpointing does to draw the same "
                "again; leave that to the method (or pass preserve_rng_state=False where nothing in it is random)"
            )


def _gradient_targets(state: _State, fake_batch) -> dict[str, torch.Tensor]:
    """The leaves that eager's backward would give a `.grad`, tied weights once, under their first name."""
    named = [(n, state.fakes[n]) for n in state.parameters]
    named += [(input_name(i), t) for i, t in enumerate(fake_batch) if isinstance(t, torch.Tensor)]
    first_name = {id(t): n for n, t in reversed(named) if t.requires_grad}
    by_name = dict(named)
    return {n: by_name[n] for n in reversed(first_name.values())}


@contextlib.contextmanager
def _module_paths(recorder: _Recorder, model: torch.nn.Module) -> Iterator[None]:
    """Keep `recorder.layer` at the dotted path of the module whose forward runs."""
    paths = {id(m): name for name, m in model.named_modules()}
    stack: list[str] = []

    def enter(module, _args):
        stack.append(recorder.layer)
        recorder.layer = paths.get(id(module), recorder.layer)

    def leave(module, _args, _out):
        recorder.layer = stack.pop() if stack else ""

    handles = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# --- from drafts to a tape ----------------------------------------------------------------------------------------------
def _finish(recorder, model, state, fake_batch, inputs, loss, gradients, batch, device, with_gradient, optimizer) -> Captured:
    loss_id = recorder.tensor_id(loss)
    recorder.storages[recorder.tensors[loss_id][0]].at_end = True
    real = dict(model.named_parameters(remove_duplicate=False)) | {
        input_name(i): b for i, b in enumerate(batch) if isinstance(b, torch.Tensor)
    }
    bound = _accumulate_gradients(recorder, gradients, real, with_gradient, loss_id)
    optimizer_state = _append_optimizer(recorder, state, bound, real, optimizer) if optimizer is not None else ()
    _mark_accumulations(recorder)
    tape = _freeze(recorder, loss_id, device, batch)
    binding = Binding(
        parameters=state.parameters,
        buffers=state.buffers,
        inputs=tuple(inputs),
        constants=dict(recorder.constants),
        gradients=bound,
        optimizer_state=optimizer_state,
    )
    _refuse_shared_writes(tape, binding, real | dict(model.named_buffers(remove_duplicate=False)), batch)
    return Captured(tape, binding)


def _accumulate_gradients(recorder: _Recorder, gradients, real, with_gradient: frozenset[str], loss_id: int) -> dict[str, int]:
    """One `vramlab.accumulate_grad` right after the op that completes each gradient, as autograd's AccumulateGrad does.

    `.grad` None: eager takes the tensor when its layout is the parameter's and nobody else holds it, else copies it.
    """
    writers = {storage: i for i, d in enumerate(recorder.drafts) for storage in _storages_written(recorder, d)}
    last_read = {recorder.tensors[t][0]: i for i, d in enumerate(recorder.drafts) for t in d.inputs}
    holders: dict[int, int] = {}
    for fake in gradients.values():
        s = recorder.tensors[recorder.tensor_id(fake)][0]
        holders[s] = holders.get(s, 0) + 1
    after: dict[int, list[_Draft]] = {}
    bound: dict[str, int] = {}
    for name, fake in gradients.items():
        temp = recorder.tensor_id(fake)
        source, place = recorder.tensors[temp][0], writers.get(recorder.tensors[temp][0], -1)
        layer = name.rpartition(".")[0]
        draft = _Draft("vramlab.accumulate_grad", [{"tensor": temp}], {}, [temp], [], Phase.BACKWARD, layer)
        is_ours_alone = (
            recorder.storages[source].role is Role.TEMPORARY
            and holders[source] == 1
            and last_read.get(source, -1) <= place
            and source != recorder.tensors[loss_id][0]
        )
        if name in with_gradient:
            grad = _new_gradient(recorder, name, fake, tuple(real[name].grad.stride()), at_start=True)
            draft.inputs.append(grad)
            draft.args.append({"tensor": grad})
            draft.mutates.append(recorder.tensors[grad][0])
        elif is_ours_alone and _obeys_layout(fake, real[name]):
            grad = _new_gradient(recorder, name, fake, tuple(fake.stride()), at_start=False, like=source)
            draft.takeover, draft.is_eager_inplace = (recorder.tensors[grad][0], source), True
            draft.outputs.append(grad)
        else:
            grad = _new_gradient(recorder, name, fake, _grad_strides(real[name]), at_start=False)
            draft.outputs.append(grad)
        bound[name] = grad
        after.setdefault(place, []).append(draft)
    ordered = list(after.get(-1, []))
    for i, draft in enumerate(recorder.drafts):
        ordered += [draft, *after.get(i, [])]
    recorder.drafts = ordered
    return bound


def _new_gradient(recorder: _Recorder, name: str, fake, strides, *, at_start: bool, like: int | None = None) -> int:
    """A gradient storage and its tensor. `like`: the temporary that it may take over, bytes and offset included."""
    if like is not None:
        nbytes, offset = recorder.storages[like].nbytes, int(fake.storage_offset())
    else:
        nbytes, offset = _span(fake.shape, strides) * fake.element_size(), 0
    recorder.storages.append(_DraftStorage(nbytes, Role.GRADIENT, f"{name}.grad", at_start, True))
    recorder.tensors.append((len(recorder.storages) - 1, dtype_name(fake.dtype), tuple(fake.shape), tuple(strides), offset))
    return len(recorder.tensors) - 1


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a view."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides))


def _obeys_layout(grad: torch.Tensor, variable: torch.Tensor) -> bool:
    """Autograd's layout contract: the variable's strides if it is dense, else contiguous; dimensions of size 1 do not count."""
    if _dense(variable.shape, variable.stride()):
        return all(n == 1 or a == b for n, a, b in zip(grad.shape, grad.stride(), variable.stride()))
    return grad.is_contiguous()


def _grad_strides(variable: torch.Tensor) -> tuple[int, ...]:
    if _dense(variable.shape, variable.stride()):
        return tuple(variable.stride())
    return tuple(torch.empty(variable.shape, device="meta").stride())


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Non-overlapping and dense: sorted by stride, each stride is the product of the smaller dimensions."""
    expected = 1
    for stride, size in sorted((st, n) for st, n in zip(strides, shape) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _append_optimizer(recorder: _Recorder, state: _State, gradients: Mapping[str, int], real, optimizer) -> tuple[int, ...]:
    """One opaque op: PyTorch's own optimizer, over the parameters that it was given."""
    names = {id(p): n for n, p in reversed(real.items())}  # of a tied weight the first, as its gradient has it
    held = [names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names]
    tensors = []
    for name, key, shape, dtype in optimizer_state_shapes(optimizer, names, set(gradients)):
        strides = tuple(torch.empty(shape, device="meta").stride())
        size = _span(shape, strides) * torch.empty(0, dtype=dtype).element_size()
        recorder.storages.append(_DraftStorage(size, Role.OPTIMIZER_STATE, f"{name}.{key}", True, True))
        recorder.tensors.append((len(recorder.storages) - 1, dtype_name(dtype), tuple(shape), strides, 0))
        tensors.append(len(recorder.tensors) - 1)
    updated = [state.parameters[n] for n in held if n in gradients]
    reads = [gradients[n] for n in held if n in gradients] + updated + tensors
    writes = list(dict.fromkeys(recorder.tensors[t][0] for t in updated + tensors))
    recorder.drafts.append(
        _Draft("vramlab.optimizer_step", [type(optimizer).__name__], {}, list(dict.fromkeys(reads)), [], Phase.OPTIMIZER, "", writes)
    )
    return tuple(tensors)


def optimizer_state_shapes(
    optimizer, names: Mapping[int, str], with_gradient: set[str]
) -> list[tuple[str, str, tuple[int, ...], torch.dtype]]:
    """(parameter, key, shape, dtype) of every state tensor that this optimizer holds after a step.

    Found by one step of the same optimizer class over stand-ins of at most two elements a dimension: a state tensor as large
    as its stand-in is as large as the parameter, any other (a step counter) keeps its shape.
    """
    found = []
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if names.get(id(p)) in with_gradient]
        stand_ins = [torch.nn.Parameter(torch.zeros([min(n, 2) for n in p.shape], dtype=p.dtype)) for p in parameters]
        if not stand_ins:
            continue
        options = {k: v for k, v in group.items() if k != "params"}
        copy = type(optimizer)([{**options, "params": stand_ins}], **({"lr": group["lr"]} if "lr" in group else {}))
        for s in stand_ins:
            s.grad = torch.ones_like(s)
        try:
            copy.step()
        except TypeError as error:  # LBFGS calls for the loss again and again: that is no step after one backward pass
            raise CaptureError(f"the optimizer {type(optimizer).__name__} takes no plain step(): {error}") from error
        for p, s in zip(parameters, stand_ins):
            for key, value in sorted(copy.state[s].items()):
                if isinstance(value, torch.Tensor):
                    shape = tuple(p.shape) if value.shape == s.shape else tuple(value.shape)
                    found.append((names[id(p)], key, shape, value.dtype))
    return found


def _mark_accumulations(recorder: _Recorder) -> None:
    """Autograd sums two gradients of one tensor in place of the older one; under a tensor subclass it does not, so say it here."""
    last_read = {recorder.tensors[t][0]: i for i, d in enumerate(recorder.drafts) for t in d.inputs}
    for i, draft in enumerate(recorder.drafts):
        if (
            draft.phase is not Phase.BACKWARD
            or draft.target != "aten.add.Tensor"
            or draft.takeover
            or len(draft.inputs) != 2
            or draft.kwargs
        ):
            continue
        result = recorder.tensors[draft.outputs[0]]
        for t in draft.inputs:
            operand = recorder.tensors[t]
            storage = recorder.storages[operand[0]]
            if (
                storage.role is Role.TEMPORARY
                and last_read[operand[0]] == i
                and operand[1:] == result[1:]
                and not storage.at_end
                and storage.nbytes == recorder.storages[result[0]].nbytes
                and _dense(operand[2], operand[3])
            ):
                draft.takeover = (result[0], operand[0])
                break


def _storages_written(recorder: _Recorder, draft: _Draft) -> set[int]:
    read = {recorder.tensors[t][0] for t in draft.inputs}
    return {recorder.tensors[t][0] for t in draft.outputs if t is not None} - read


def _freeze(recorder: _Recorder, loss: int, device: torch.device, batch: Sequence[Any]) -> Tape:
    """Drafts -> Tape; storages that the backward reads become activations."""
    saved = set()
    made_forward = {s for d in recorder.drafts if d.phase is Phase.FORWARD for s in _storages_written(recorder, d)}
    for d in recorder.drafts:
        if d.phase is Phase.BACKWARD:
            saved |= {recorder.tensors[t][0] for t in d.inputs} & made_forward
    storages = tuple(
        Storage(
            id=i,
            nbytes=s.nbytes,
            role=Role.ACTIVATION if i in saved and s.role is Role.TEMPORARY else s.role,
            name=s.name,
            at_start=s.at_start,
            at_end=s.at_end,
        )
        for i, s in enumerate(recorder.storages)
    )
    tensors = tuple(
        Tensor(id=i, storage=s, dtype=d, shape=shape, strides=strides, offset=o)
        for i, (s, d, shape, strides, o) in enumerate(recorder.tensors)
    )
    ops = tuple(
        Op(
            id=i,
            target=d.target,
            args=d.args,
            kwargs=d.kwargs,
            inputs=tuple(d.inputs),
            outputs=tuple(d.outputs),
            phase=d.phase,
            layer=d.layer,
            mutates=tuple(d.mutates),
            takeover=d.takeover,
            is_eager_inplace=d.is_eager_inplace,
            is_random=d.is_random,
            throwaway_state=d.throwaway_state,
        )
        for i, d in enumerate(recorder.drafts)
    )
    first = next((b for b in batch if isinstance(b, torch.Tensor) and b.dim() > 0), None)
    return Tape(
        ops=ops,
        tensors=tensors,
        storages=storages,
        loss=loss,
        device_type=device.type,
        batch_size=1 if first is None else int(first.shape[0]),
    )


# --- what is refused ----------------------------------------------------------------------------------------------------
def refuse_module(model: torch.nn.Module) -> None:
    """Raise CaptureError where a module can be told from outside not to be captured faithfully."""
    if any(getattr(torch.nn.modules.module, f"_global_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre")):
        raise CaptureError("a hook on all modules may have Python side effects that a replay would miss")
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if torch.nn.parameter.is_lazy(parameter):
            raise CaptureError(f"'{name}' has no shape yet; run the module once first", module=name.rpartition(".")[0])
        if parameter.is_meta:
            raise CaptureError(f"'{name}' is on the meta device and has no data; give it some first", module=name.rpartition(".")[0])
    for name, module in model.named_modules():
        kinds = {c.__name__ for c in type(module).__mro__}
        for wrapper in _WRAPPERS:
            if wrapper in kinds:
                raise CaptureError(f"{wrapper} runs code that is no part of the step's operators; pass the plain module", module=name)
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            if getattr(module, kind, None):
                raise CaptureError(f"a module hook ({kind.strip('_')}) may have Python side effects that a replay would miss", module=name)
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(f"parameter '{name}' has a gradient hook, which a replay would not call")
        if parameter.layout is not torch.strided:
            raise CaptureError(f"parameter '{name}' is no dense tensor")


def _refuse_input(place: int, value: torch.Tensor, batch: Sequence[Any]) -> None:
    if value.layout is not torch.strided:
        raise CaptureError(f"input {place} is no dense tensor")
    if not value.requires_grad:
        return
    if not value.is_leaf:
        raise CaptureError(f"input {place} is the result of other operations, which a replay would not run backward; pass it detached")
    if value._backward_hooks or value._post_accumulate_grad_hooks:
        raise CaptureError(f"input {place} has a gradient hook, which a replay would not call")
    if sum(value is other for other in batch) > 1:
        raise CaptureError(f"input {place} requires a gradient and is given twice; pass it once")


def _refuse_shared_writes(tape: Tape, binding: Binding, state: Mapping[str, torch.Tensor], batch: Sequence[Any]) -> None:
    """Inputs are captured as if each had memory of its own; where one is written, it must."""
    written = {storage for op in tape.ops if op.phase is not Phase.OPTIMIZER for storage in op.mutates}
    inputs = {input_name(i): (t, batch[i]) for i, t in enumerate(binding.inputs) if t is not None}
    others = {f"'{n}'": (t, state[n]) for n, t in [*binding.parameters.items(), *binding.buffers.items()]}
    constants = {f"tensor {t}, which the code closes over,": (t, c) for t, c in binding.constants.items()}
    everything = inputs | others | constants
    for name, (tensor, value) in inputs.items():
        for other, (other_tensor, other_value) in everything.items():
            is_written = {tape.tensors[tensor].storage, tape.tensors[other_tensor].storage} & written
            if other != name and is_written and _address(value) == _address(other_value):
                raise CaptureError(f"{name} and {other} share memory that the step writes; pass a clone")


def _refuse_loss(loss: Any, targets: Mapping[str, Any]) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise CaptureError(f"loss_fn must return a scalar tensor, it returned {what}")
    if not loss.requires_grad:
        raise CaptureError("the loss depends on no parameter that requires a gradient")


def _refuse_own_backward(targets: Mapping[str, torch.Tensor], before: Mapping[str, tuple]) -> None:
    """A backward inside of the step fills `.grad`, which a replay would not repeat."""
    for name, target in targets.items():
        grad, version = before[name]
        if target.grad is not grad or (grad is not None and grad._version != version):
            raise CaptureError(f"the step sets the .grad of '{name}' itself; leave backward() to train_step, or use torch.autograd.grad")


def _explain(wrong: Exception, recorder: _Recorder) -> CaptureError:
    """The operator, the module and the reason of a failure under fake tensors."""
    op, layer = recorder.failed_at
    kind = type(wrong).__name__
    reasons = {
        "DataDependentOutputException": "a value of a tensor is read in Python, so the step depends on data",
        "DynamicOutputShapeException": "the shape of its result depends on data",
        "UnsupportedOperatorException": "the operator has no shape rule (fake kernel)",
    }
    return CaptureError(reasons.get(kind, f"{kind}: {str(wrong).splitlines()[0] if str(wrong) else 'no message'}"), op=op, module=layer)


def _refuse_changes(changes: Sequence[Change]) -> None:
    """A replay runs no Python: what the step changed there is put back already, and the step refused."""
    if changes:
        raise CaptureError(
            f"the step changes {changes[0].label}: a Python side effect, which a replay would not repeat. It has been put back. "
            f"If it is made at its first use only, run loss_fn(model, *batch) once before",
            module=changes[0].module,
        )


# --- small tools --------------------------------------------------------------------------------------------------------
def _device_of(model: torch.nn.Module, batch: Sequence[Any]) -> torch.device:
    devices = {
        t.device
        for t in [*model.parameters(), *model.buffers(), *(b for b in batch if isinstance(b, torch.Tensor))]
        if t.dim() or t.device.type != "cpu"
    }
    if len(devices) > 1:
        raise CaptureError(f"the step lives on several devices: {', '.join(sorted(map(str, devices)))}")
    return next(iter(devices), torch.device("cpu"))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for v in value:
            yield from _flatten(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from _flatten(v)
    else:
        yield value


def _map_tensors(f: Callable[[torch.Tensor], Any], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f(value)
    if isinstance(value, list | tuple):
        return type(value)([_map_tensors(f, v) for v in value]) if type(value) in (list, tuple) else value
    return value


def _zeros_like_fake(fake: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device).zero_()


def _encode(args, kwargs, old: Mapping[int, int], fresh, tensor_id) -> tuple[Any, dict[str, Any]]:
    """Arguments as JSON. What is read is named by its version before the op; `fresh` is memory for the op to fill."""

    def name(t: torch.Tensor) -> int:
        return old[id(t)]

    def encode(value):
        if fresh is not None and value is fresh:
            return {"fresh": tensor_id(fresh)}
        if isinstance(value, list | tuple):
            return [encode(v) for v in value]
        return encode_arg(value, name)

    return [encode(a) for a in args], {k: encode(v) for k, v in kwargs.items()}


def _made(func, args, kwargs, out) -> list[Any]:
    """What a call returns, flat. A backward's `output_mask` says which gradients are wanted: real kernels make no others, fake ones do."""
    made = list(_flatten(out))
    for i, a in enumerate(func._schema.arguments):
        if a.name == "output_mask":
            mask = args[i] if i < len(args) else kwargs[a.name]
            return [t if wanted else None for t, wanted in zip(made, mask, strict=True)]
    return made


def _written_tensors(func, target: str, args, kwargs) -> list[torch.Tensor]:
    """The arguments that a call writes: those that its schema declares, and the hidden ones."""
    written = []
    for i, a in enumerate(func._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(a.name)
            written += [t for t in _flatten(value) if isinstance(t, torch.Tensor)]
    places, flag = _HIDDEN_WRITES.get(target, ((), None))
    if flag is not None and args[flag]:
        written += [args[i] for i in places if isinstance(args[i], torch.Tensor)]
    return written


def draws(func, args, kwargs) -> bool:
    """Draws from the generator. The tag over-approximates: attention without dropout carries it too."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for i, a in enumerate(func._schema.arguments):
        if a.name in ("dropout_p", "p") and a.type.kind() == "FloatType":
            value = args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
            if value == 0.0 and "dropout" in (a.name + str(func)):
                return False
    return True
