"""Execute a checked schedule with torch, on the CPU or on CUDA, obeying its order literally.

A static schedule compiles to straight-line Python: one local variable a tensor, dropped at `Free`. There is no autograd graph
and nothing else holds a reference, so the bytes that are live are the bytes that the schedule says are live.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import numpy as np
import torch

from vramlab.algorithms import by_algorithm, has_algorithms
from vramlab.capture import Captured, input_name
from vramlab.check import CheckedSchedule
from vramlab.errors import CaptureError, Disturbed, Unsupported
from vramlab.link import Link, make_link
from vramlab.ops import callable_of, decode_arg, dtype_name, dtype_of, inplace_twin, resolve
from vramlab.schedule import Compute, Free, FreeHost, Offload, Prefetch, Recompute, Wait
from vramlab.tape import STATE_ROLES, Op, Role, Tape, Tensor

ACCUMULATE = "vramlab.accumulate_grad"
OPTIMIZER = "vramlab.optimizer_step"


@dataclass(frozen=True, kw_only=True)
class Executed:
    """What one run of a schedule did."""

    loss: torch.Tensor
    computes: int
    recomputes: int
    offloads: int
    prefetches: int
    start_seconds: np.ndarray | None = None  # per instruction, only of a timed run
    end_seconds: np.ndarray | None = None


class Executor:
    """Runs one checked schedule on one module, as often as it is called.

    `verify` compares every output of every op with the tape (dtype, shape, strides, bytes, aliasing) and raises CaptureError at
    the first difference: a fake kernel and its real one may disagree. `timed` keeps when each instruction ran.
    """

    def __init__(self, captured: Captured, checked: CheckedSchedule, model: torch.nn.Module, *, link: Link | None = None) -> None:
        tape = captured.tape
        self.tape, self.binding, self.checked, self.model = tape, captured.binding, checked, model
        self.device = next((p.device for p in model.parameters()), torch.device(tape.device_type))
        if self.device.type != tape.device_type:
            raise Unsupported(f"the tape was captured on {tape.device_type}, the module lives on {self.device.type}")
        moving = sorted({i.storage for i in checked.schedule.instructions if isinstance(i, Offload | Prefetch)})
        self.link = (link or make_link(self.device)) if moving else None
        self.arena = self.link.arena(_host_layout(checked)) if moving else None
        self.first_tensor_of = {t.storage: t.id for t in reversed(tape.tensors)}
        self._state = _StateReader(captured, model)
        self._code: dict[tuple[bool, bool], Callable] = {}
        self.counts = {kind: checked.schedule.count(kind) for kind in (Compute, Recompute, Offload, Prefetch)}

    def __call__(self, *batch: Any, verify: bool = False, timed: bool = False) -> Executed:
        """One step: forward, backward, gradients into `.grad`. Returns the detached loss and what ran."""
        key = (verify, timed)
        if key not in self._code:
            self._code[key] = _compile(self, verify=verify, timed=timed)
        clock = _Clock(len(self.checked.schedule.instructions)) if timed else None
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            loss, gradients = self._code[key](self._state.read(batch), clock)
        self._state.write_gradients(gradients, batch)
        return Executed(
            loss=loss.detach(),  # it may be a parameter itself
            computes=self.counts[Compute],
            recomputes=self.counts[Recompute],
            offloads=self.counts[Offload],
            prefetches=self.counts[Prefetch],
            start_seconds=clock and clock.start,
            end_seconds=clock and clock.end,
        )


class _Clock:
    def __init__(self, n: int) -> None:
        self.start, self.end = np.zeros(n), np.zeros(n)


class _StateReader:
    """Finds the state of a tape in a module: by name, at every step, so that a replaced parameter is seen."""

    def __init__(self, captured: Captured, model: torch.nn.Module) -> None:
        self.binding = captured.binding
        owners = {n: m for n, m in model.named_modules(remove_duplicate=False)}
        self._slots: list[tuple[int, dict, str]] = []
        for name, tensor in captured.binding.parameters.items():
            owner, _, key = name.rpartition(".")
            self._slots.append((tensor, owners[owner]._parameters, key))
        for name, tensor in captured.binding.buffers.items():
            owner, _, key = name.rpartition(".")
            self._slots.append((tensor, owners[owner]._buffers, key))
        self._parameters = {n: (owners[n.rpartition(".")[0]]._parameters, n.rpartition(".")[2]) for n in captured.binding.parameters}
        self._inputs = {input_name(i): i for i in range(len(captured.binding.inputs))}

    def read(self, batch: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Tensor id -> tensor, for all that is there at the start."""
        found = {tensor: slots[key] for tensor, slots, key in self._slots}
        found |= {tensor: value for tensor, value in zip(self.binding.inputs, batch) if tensor is not None}
        found |= self.binding.constants
        for name, tensor in self.binding.gradients.items():
            grad = self._leaf(name, batch).grad
            if grad is not None:
                found[tensor] = grad
        return found

    def write_gradients(self, gradients: dict[str, torch.Tensor], batch: Sequence[Any]) -> None:
        """Hand each finished gradient to its parameter."""
        for name, grad in gradients.items():
            self._leaf(name, batch).grad = grad

    def _leaf(self, name: str, batch: Sequence[Any]) -> torch.Tensor:
        if name in self._inputs:
            return batch[self._inputs[name]]
        slots, key = self._parameters[name]
        return slots[key]


# --- compilation ---------------------------------------------------------------------------------------------------------
def _compile(executor: Executor, *, verify: bool, timed: bool) -> Callable:
    """The schedule as one Python function of (state, clock)."""
    writer = _Writer(executor, verify)
    for index, instruction in enumerate(executor.checked.schedule.instructions):
        if timed:
            writer.line(f"clock.start[{index}] = now()")
        writer.instruction(instruction)
        if timed:
            writer.line(f"clock.end[{index}] = now()")
    return writer.finish()


class _Writer:
    """Writes the source. `defined` knows which views of a storage are in local variables right now."""

    def __init__(self, executor: Executor, verify: bool) -> None:
        self.tape, self.executor, self.verify = executor.tape, executor, verify
        self.names: dict[str, Any] = {"now": _now_on(executor.device), "link": executor.link, "arena": executor.arena}
        self.lines: list[str] = []
        self.defined: dict[int, list[int]] = {}
        self.stay: dict[int, int] = {}
        self.on_host: set[int] = set()
        self.recomputed = {i.op for i in executor.checked.schedule.instructions if isinstance(i, Recompute)}
        self.generators = _Generators(executor.device)
        self.names["rng"] = self.generators
        for tensor in self._bound_tensors():
            self.line(f"t{tensor} = state[{tensor}]")
            self.defined.setdefault(self.tape.tensors[tensor].storage, []).append(tensor)

    def line(self, text: str) -> None:
        self.lines.append("    " + text)

    def constant(self, value: Any, name: str) -> str:
        self.names[name] = value
        return name

    def _bound_tensors(self) -> list[int]:
        b = self.executor.binding
        bound = [*b.parameters.values(), *b.buffers.values(), *(t for t in b.inputs if t is not None), *b.constants]
        bound += [t for t in b.gradients.values() if self.tape.storages[self.tape.tensors[t].storage].at_start]
        return list(dict.fromkeys(bound))

    def finish(self) -> Callable:
        named = ", ".join(f"{name!r}: {self.use(t)}" for name, t in self.executor.binding.gradients.items())
        loss = self.use(self.tape.loss)
        if any(self.tape.ops[op].is_random for op in self.recomputed):
            self.line("rng.check()")
        source = "\n".join(["def step(state, clock):", *self.lines, f"    return {loss}, {{{named}}}"])
        exec(compile(source, f"<schedule {self.executor.checked.schedule.digest[:12]}>", "exec"), self.names)
        return self.names["step"]

    # --- tensors ---
    def use(self, tensor: int) -> str:
        """The local variable of a tensor, deriving the view first where it is not there yet."""
        storage = self.tape.tensors[tensor].storage
        there = self.defined[storage]
        if tensor not in there:
            self.line(f"t{tensor} = {self.view_of(there[0], tensor)}")
            there.append(tensor)
        return f"t{tensor}"

    def view_of(self, base: int, tensor: int) -> str:
        have, want = self.tape.tensors[base], self.tape.tensors[tensor]
        make = self.constant(_view_maker(have, want), f"view{base}_{tensor}")
        return f"{make}(t{base})"

    def forget(self, storage: int) -> None:
        for tensor in self.defined.pop(storage):
            self.line(f"t{tensor} = None")

    # --- instructions ---
    def instruction(self, instruction: Any) -> None:
        storage = getattr(instruction, "storage", None)
        if storage is not None and self.tape.storages[storage].role in STATE_ROLES - {Role.GRADIENT}:
            raise Unsupported(f"the executor does not move state ('{self.tape.storages[storage].name}')")
        match instruction:
            case Compute() | Recompute():
                self.run(self.tape.ops[instruction.op], instruction)
            case Free():
                self.forget(storage)
            case Offload():
                self.on_host.add(storage)
                self.stay[storage] = self.stay.get(storage, -1) + 1
                self.line(f"link.offload(arena, {storage}, {self.stay[storage]}, t{self.defined[storage][0]})")
            case Prefetch():
                tensor = self.executor.first_tensor_of[storage]
                allocate = self.constant(_allocator(self.tape, tensor, self.executor.device), f"new{tensor}")
                self.line(f"t{tensor} = {allocate}()")
                self.line(f"link.prefetch(arena, {storage}, {self.stay[storage]}, t{tensor})")
                self.defined[storage] = [tensor]
            case Wait():
                self.line(f"link.wait({storage})")
            case FreeHost():
                self.on_host.discard(storage)  # its region of the arena is free for the next, as laid out beforehand

    def run(self, op: Op, instruction: Compute | Recompute) -> None:
        again = isinstance(instruction, Recompute)
        if op.target == OPTIMIZER:
            return  # the owner of the step runs it, after the schedule
        self.on_host -= set(op.mutates)  # a write makes the host's copy stale
        keeps_rng = op.is_random and op.id in self.recomputed
        if keeps_rng and not again:
            self.line(f"rng.keep({op.id})")
        if again and op.is_random:
            self.line(f"rng.back({op.id})")
        if instruction.variant is not None and not has_algorithms(op):
            raise Unsupported(f"the executor knows no algorithms of {self.tape.op_name(op.id)}")
        if op.target == ACCUMULATE:
            self.accumulate(op, instruction)
        elif op.takeover is not None:
            self.run_in_place(op, instruction)
        else:
            self.call(op, again, instruction.variant)
        if keeps_rng and not again:
            self.line(f"rng.drawn({op.id})")
        if again and op.is_random:
            self.line(f"rng.forth({op.id})")

    def call(self, op: Op, again: bool, variant: str | None) -> None:
        arguments = self.arguments(op, throwaway=again and op.throwaway_state)
        fresh = _fresh_tensor(op)
        if fresh is not None:
            allocate = self.constant(_allocator(self.tape, fresh, self.executor.device), f"new{fresh}")
            self.line(f"f{fresh} = {allocate}()")
        targets = [self.target(t, op) for t in op.outputs]
        called = by_algorithm(callable_of(op.target), variant)
        f = self.constant(called, f"op{op.id}" if variant is None else f"op{op.id}_{len(self.names)}")
        returned = self.returned(op)
        self.assign(op, targets[:returned], f"{f}({arguments})")
        for t, target in zip(op.outputs[returned:], targets[returned:]):
            self.line(f"{target} = f{t}")
        if fresh is not None:
            self.line(f"f{fresh} = None")
        self.born(op)

    def assign(self, op: Op, targets: list[str], call: str) -> None:
        """`a, _, b = call`: unpacked at once, so that no tuple outlives the line."""
        returns = resolve(op.target)._schema.returns
        is_many = len(returns) > 1 or (len(returns) == 1 and returns[0].type.kind() == "ListType")
        left = ", ".join(targets or ["_"]) + ("," if is_many else "")
        self.line(f"{left} = {call}")
        if not targets or "_" in targets:
            self.line("_ = None")

    def returned(self, op: Op) -> int:
        """How many of the op's outputs it returns (the rest it only writes)."""
        return len(op.outputs) - (1 if _fresh_tensor(op) is not None and not _returns_fresh(op) else 0)

    def target(self, tensor: int | None, op: Op) -> str:
        """Where an output goes: its variable, or nowhere when it is a duplicate, state, or no tensor."""
        if (
            tensor is None
            or self.is_there(self.tape.tensors[tensor].storage)
            or self.tape.tensors[tensor].storage not in self.tape.creates[op.id]
        ):
            return "_"
        return f"t{tensor}"

    def is_there(self, storage: int) -> bool:
        """On the device or on the host: what an op makes of it once more is a duplicate."""
        return storage in self.defined or storage in self.on_host

    def born(self, op: Op) -> None:
        """Outputs are in their variables from here on."""
        new: dict[int, list[int]] = {}
        for t in op.outputs:
            if t is None:
                continue
            storage = self.tape.tensors[t].storage
            if storage in self.tape.creates[op.id] and not self.is_there(storage):
                new.setdefault(storage, []).append(t)
        self.defined.update(new)
        if self.verify:
            reads = [f"t{self.defined[s][0]}" for s in self.tape.reads[op.id] if s in self.defined]
            for t in (t for ts in new.values() for t in ts):
                check = self.constant(_Verifier(self.tape, op, t), f"verify{op.id}_{t}")
                self.line(f"{check}(t{t}, [{', '.join(reads)}])")

    def arguments(self, op: Op, *, throwaway: bool = False, rename: dict[int, str] | None = None) -> str:
        """The call's arguments as source; tensors are variables, everything else a constant of the function."""
        rename = dict(rename or {})
        if throwaway:
            rename |= {t: self.throwaway(op, t) for t in op.inputs if self.tape.tensors[t].storage in op.mutates}
        written = [self.argument(a, f"a{op.id}_{i}", rename) for i, a in enumerate(op.args)]
        written += [f"{k}={self.argument(v, f'a{op.id}_{k}', rename)}" for k, v in op.kwargs.items()]
        return ", ".join(written)

    def throwaway(self, op: Op, tensor: int) -> str:
        """In place of state that a recompute must not write: nothing where the operator can do without, a copy elsewhere."""
        place = op.args.index({"tensor": tensor})
        is_optional = resolve(op.target)._schema.arguments[place].type.kind() == "OptionalType"
        return "None" if is_optional else f"{self.use(tensor)}.clone()"

    def argument(self, value: Any, name: str, rename: dict[int, str]) -> str:
        if isinstance(value, dict) and "tensor" in value:
            return rename.get(value["tensor"]) or self.use(value["tensor"])
        if isinstance(value, dict) and "fresh" in value:
            return f"f{value['fresh']}"
        if isinstance(value, list) and _has_tensor(value):
            return "[" + ", ".join(self.argument(v, f"{name}_{i}", rename) for i, v in enumerate(value)) + "]"
        return self.constant(decode_arg(value, int, self.executor.device), name)

    # --- ops with an in-place twin ---
    def run_in_place(self, op: Op, instruction: Compute | Recompute) -> None:
        out, source = op.takeover
        result = next(t for t in op.outputs if t is not None and self.tape.tensors[t].storage == out)
        written = self.written_tensor(op, source, result)
        f = self.constant(callable_of(op.target) if op.is_eager_inplace else _twin(op, written), f"op{op.id}")
        targets = ["_" if t == result else self.target(t, op) for t in op.outputs]
        targets = targets[: len(resolve(op.target)._schema.returns)]
        if out in self.defined:  # a recompute for the sake of another output: what it writes is a duplicate
            copy = self.constant(_storage_copier(self.tape, written), f"copy{op.id}")
            self.line(f"duplicate = {copy}({self.use(written)})")
            self.assign(op, targets, f"{f}({self.in_place_arguments(op, written, 'duplicate')})")
            self.line("duplicate = None")
        elif instruction.reuse is not None:
            self.assign(op, targets, f"{f}({self.in_place_arguments(op, written)})")
            self.line(f"t{result} = {self.use(written)}")
            self.forget(source)
        elif (functional := _functional_twin(self.tape, op, written, result)) is not None:
            g = self.constant(functional, f"twin{op.id}")
            self.line(f"t{result} = {g}({self.arguments(op)})")
        else:
            copy = self.constant(_storage_copier(self.tape, written), f"copy{op.id}")
            self.line(f"t{result} = {copy}({self.use(written)})")
            self.assign(op, targets, f"{f}({self.in_place_arguments(op, written, f't{result}')})")
        self.born(op)
        if self.verify:
            check = self.constant(_Verifier(self.tape, op, result), f"verify{op.id}_{result}")
            self.line(f"{check}(t{result}, [])")

    def born_one(self, tensor: int) -> None:
        self.defined[self.tape.tensors[tensor].storage] = [tensor]

    def written_tensor(self, op: Op, source: int, result: int) -> int:
        """The input that the op writes: the view of `source` that the result is a view of `out` by."""
        want = self.tape.tensors[result]
        for t in op.inputs:
            have = self.tape.tensors[t]
            if have.storage == source and (have.shape, have.strides, have.offset, have.dtype) == (
                want.shape,
                want.strides,
                want.offset,
                want.dtype,
            ):
                return t
        raise CaptureError("an in-place op whose written argument is not found", op=op.target, module=op.layer)

    def in_place_arguments(self, op: Op, written: int, instead: str | None = None) -> str:
        """Arguments of the in-place twin: what is written comes first (a sum is the same either way round)."""
        if op.target == "aten.add.Tensor" and op.args[0] != {"tensor": written}:
            swapped = [op.args[1], op.args[0], *op.args[2:]]
            return ", ".join(self.argument(a, f"a{op.id}_{i}", {written: instead} if instead else {}) for i, a in enumerate(swapped))
        if instead is None:
            return self.arguments(op)
        first = [instead if a == {"tensor": written} else self.argument(a, f"a{op.id}_{i}", {}) for i, a in enumerate(op.args)]
        return ", ".join(first + [f"{k}={self.argument(v, f'a{op.id}_{k}', {})}" for k, v in op.kwargs.items()])

    def accumulate(self, op: Op, instruction: Compute | Recompute) -> None:
        temp = op.inputs[0]
        if op.mutates:
            self.line(f"{self.use(op.inputs[1])}.add_({self.use(temp)})")
            return
        grad = op.outputs[0]
        if instruction.reuse is not None:
            self.line(f"t{grad} = {self.use(temp)}")
            self.forget(self.tape.tensors[temp].storage)
        else:
            allocate = self.constant(_allocator(self.tape, grad, self.executor.device), f"new{grad}")
            self.line(f"t{grad} = {allocate}()")
            self.line(f"t{grad}.copy_({self.use(temp)})")
        self.born_one(grad)


# --- pieces that the compiled function calls ------------------------------------------------------------------------------
def _has_tensor(value: Any) -> bool:
    if isinstance(value, list):
        return any(_has_tensor(v) for v in value)
    return isinstance(value, dict) and ("tensor" in value or "fresh" in value)


def _fresh_tensor(op: Op) -> int | None:
    for a in [*op.args, *op.kwargs.values()]:
        if isinstance(a, dict) and "fresh" in a:
            return a["fresh"]
    return None


def _returns_fresh(op: Op) -> bool:
    return len(resolve(op.target)._schema.returns) == len(op.outputs)


def _twin(op: Op, written: int) -> Callable[..., Any]:
    """What writes over the argument `written`; a sum over its first, see `in_place_arguments`."""
    return inplace_twin(op.target, 0 if op.target == "aten.add.Tensor" else op.args.index({"tensor": written}))


def _functional_twin(tape: Tape, op: Op, written: int, result: int) -> Callable | None:
    """The out-of-place operator of the same name, where it surely gives the same layout: equal dtypes and shapes, dense, whole storage."""
    want = tape.tensors[result]
    if not op.is_eager_inplace:
        return resolve(op.target)
    if not op.target.split(".")[1].endswith("_"):
        return None
    is_whole = tape.storages[want.storage].nbytes == _nbytes(want)
    alike = all(
        (tape.tensors[t].dtype, tape.tensors[t].shape, tape.tensors[t].strides) == (want.dtype, want.shape, want.strides) for t in op.inputs
    )
    if not (is_whole and alike) or op.is_random or len(op.outputs) > 1:
        return None
    namespace, name, overload = op.target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name.rstrip("_"), None)
    return getattr(packet, overload, None) if packet is not None and overload in packet.overloads() else None


def _nbytes(tensor: Tensor) -> int:
    n = 1
    for d in tensor.shape:
        n *= d
    return n * dtype_of(tensor.dtype).itemsize


def _view_maker(have: Tensor, want: Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """`want` from a tensor that shows `have` of the same storage, wherever that storage starts for this caller."""
    shape, strides, shift = want.shape, want.strides, want.offset - have.offset
    if have.dtype == want.dtype:
        return lambda base: torch.as_strided(base, shape, strides, base.storage_offset() + shift)
    dtype, ratio = dtype_of(want.dtype), dtype_of(have.dtype).itemsize / dtype_of(want.dtype).itemsize

    def other_dtype(base: torch.Tensor) -> torch.Tensor:
        start = int((base.storage_offset() - have.offset) * ratio) + want.offset
        return torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), start, shape, strides)

    return other_dtype


def _allocator(tape: Tape, tensor: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """Allocates the whole storage of a tensor, unwritten, and gives the tensor."""
    t = tape.tensors[tensor]
    nbytes, dtype = tape.storages[t.storage].nbytes, dtype_of(t.dtype)
    if nbytes == _nbytes(t) and t.offset == 0:
        return lambda: torch.empty_strided(t.shape, t.strides, dtype=dtype, device=device)

    def part() -> torch.Tensor:
        whole = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return torch.empty(0, dtype=dtype, device=device).set_(whole.untyped_storage(), t.offset, t.shape, t.strides)

    return part


def _storage_copier(tape: Tape, tensor: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Copies the whole storage behind a view and gives the same view of the copy."""
    t = tape.tensors[tensor]

    def copy(view: torch.Tensor) -> torch.Tensor:
        storage = view.untyped_storage()
        old = torch.empty(0, dtype=torch.uint8, device=view.device).set_(storage, 0, (storage.nbytes(),), (1,))
        new = torch.empty(storage.nbytes(), dtype=torch.uint8, device=view.device)
        new.copy_(old)
        return torch.empty(0, dtype=view.dtype, device=view.device).set_(new.untyped_storage(), t.offset, t.shape, t.strides)

    return copy


class _Generators:
    """State of the generators before the first run of a random op; given back for a recompute.

    They are the process's: where another thread draws between, the op draws other numbers the second time, which would be a wrong gradient
    that nothing shows. So both runs have to leave the generator of the device in one state.
    """

    def __init__(self, device: torch.device) -> None:
        self._all = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            self._all.append(torch.cuda.default_generators[device.index or 0])
        self._kept: dict[int, list[np.ndarray]] = {}
        self._after: dict[int, torch.Generator] = {}
        self._runs: list[tuple[torch.Generator, torch.Generator]] = []
        self._now: list[np.ndarray] = []

    def _read(self) -> list[np.ndarray]:
        return [g.get_state().numpy().copy() for g in self._all]  # outside torch's allocator

    def _write(self, states: list[np.ndarray]) -> None:
        for g, state in zip(self._all, states):
            g.set_state(torch.from_numpy(state))

    def keep(self, op: int) -> None:
        self._kept[op] = self._read()

    def back(self, op: int) -> None:
        self._now = self._read()
        self._write(self._kept[op])

    def drawn(self, op: int) -> None:
        self._after[op] = self._all[-1].clone_state()  # outside torch's allocator, too: an op's outputs may fill the budget

    def forth(self, op: int) -> None:
        self._runs.append((self._after[op], self._all[-1].clone_state()))
        self._write(self._now)

    def check(self) -> None:
        """Once all has run, when there is room for a state. Disturbed where two runs of an op left the generator in two states."""
        runs, self._runs = self._runs, []
        if not all(torch.equal(first.get_state(), again.get_state()) for first, again in runs):
            raise Disturbed("another thread drew random numbers from PyTorch's default generator while this step ran, so that what it "
                            "recomputed is not what it computed: do not use its gradients, and begin again from saved state. Let other "
                            "threads draw from a torch.Generator of their own")


class _Verifier:
    """Does a real output look as the tape says, and own its bytes?"""

    def __init__(self, tape: Tape, op: Op, tensor: int) -> None:
        t = tape.tensors[tensor]
        self.op, self.want, self.nbytes = op, (t.dtype, t.shape, t.strides, t.offset), tape.storages[t.storage].nbytes

    def __call__(self, real: torch.Tensor | None, reads: list[torch.Tensor]) -> None:
        if real is None:
            raise CaptureError("its real result is nothing, captured was a tensor", op=self.op.target, module=self.op.layer)
        got = (dtype_name(real.dtype), tuple(real.shape), tuple(real.stride()), real.storage_offset())
        if got != self.want:
            raise CaptureError(
                f"its real result is {got}, captured was {self.want} (dtype, shape, strides, offset)",
                op=self.op.target,
                module=self.op.layer,
            )
        if real.untyped_storage().nbytes() != self.nbytes:
            raise CaptureError(
                f"its real result owns {real.untyped_storage().nbytes()} bytes, captured was {self.nbytes}",
                op=self.op.target,
                module=self.op.layer,
            )
        if any(r.untyped_storage()._cdata == real.untyped_storage()._cdata for r in reads):
            raise CaptureError("its real result shares the storage of an input", op=self.op.target, module=self.op.layer)


def _now_on(device: torch.device) -> Callable[[], float]:
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


# --- the host arena -------------------------------------------------------------------------------------------------------
def _host_layout(checked: CheckedSchedule) -> dict[int, list[tuple[int, int]]]:
    """Per storage: (offset, bytes) of each of its stays on the host, in order. First fit over the stays' instants."""
    tape = checked.tape
    open_since: dict[int, int] = {}
    stays: list[tuple[int, int, int]] = []  # (start, end, storage)
    for i, instruction in enumerate(checked.schedule.instructions):
        if isinstance(instruction, Offload):
            open_since[instruction.storage] = i
            continue
        ended = [instruction.storage] if isinstance(instruction, FreeHost) else []
        if isinstance(instruction, Compute):  # a write makes the host's copy stale: it is gone, and the next one is another stay
            ended = [s for s in tape.ops[instruction.op].mutates if s in open_since]
        stays += [(open_since.pop(s), i, s) for s in ended]
    last = len(checked.schedule.instructions)
    stays += [(start, last, s) for s, start in open_since.items()]
    layout: dict[int, list[tuple[int, int]]] = {}
    placed: list[tuple[int, int, int, int]] = []  # (start, end, offset, bytes)
    for start, end, storage in sorted(stays):
        need = -(-tape.storages[storage].nbytes // 64) * 64
        offset = 0
        for low, size in sorted((o, n) for s, e, o, n in placed if s <= end and start <= e):
            if offset + need <= low:
                break
            offset = max(offset, low + size)
        placed.append((start, end, offset, need))
        layout.setdefault(storage, []).append((offset, tape.storages[storage].nbytes))
    return layout
