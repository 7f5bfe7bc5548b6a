"""A step over micro-batches as one tape: one pass after the other, gradients accumulate, the optimizer runs once.

Each pass is a tape of its own size, captured with its loss weighted by its share of the batch. Composed, they are again a tape:

    state             parameters, buffers and optimizer state stand once; each pass writes its version of them
    gradients         the first pass makes them, each further one adds to them
    inputs            the whole batch is resident; a pass reads its part of it
    loss              the sum of the weighted losses
    optimizer         after the last pass

So check, simulation, planners and executor treat it as any step, and a copy may even run across two passes. The reference that it is held
against is eager over the same micro-batches. Where a step's ops see the batch as a whole (BatchNorm) or draw random numbers, its
results are others than those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

from vramlab.errors import Unsupported
from vramlab.tape import STATE_ROLES, Op, Phase, Role, Storage, Tape, Tensor

ACCUMULATE = "vramlab.accumulate_grad"


def equal_passes(batch_size: int, size: int) -> tuple[int, ...]:
    """Sizes of the passes over a batch, `size` samples each and the rest last. ValueError outside 1 <= size <= batch_size."""
    if not 1 <= size <= batch_size:
        raise ValueError(f"a micro-batch has from 1 to {batch_size} samples, not {size}")
    whole, rest = divmod(batch_size, size)
    return (size,) * whole + ((rest,) if rest else ())


def scaled_passes(sizes: Sequence[int], batch_size: int) -> tuple[int, ...]:
    """As many passes over a smaller batch, in about the same proportions. ValueError when there are fewer samples than passes."""
    if batch_size < len(sizes):
        raise ValueError(f"{len(sizes)} passes need at least as many samples, and the batch has {batch_size}")
    marks = [round(done * batch_size / sum(sizes)) for done in accumulate(sizes, initial=0)]
    for i in range(1, len(marks)):
        marks[i] = min(max(marks[i], marks[i - 1] + 1), batch_size - (len(sizes) - i))
    return tuple(b - a for a, b in zip(marks, marks[1:]))


def changes_semantics(tape: Tape) -> bool:
    """Are results over micro-batches others than over the whole batch, beyond rounding: does an op draw, or use the batch's statistics?"""
    return any(op.is_random or _uses_batch_statistics(op) for op in tape.ops)


def _uses_batch_statistics(op: Op) -> bool:
    """In evaluation a batch normalisation has a `False` among its arguments, its only flag."""
    return "batch_norm" in op.target and op.phase is Phase.FORWARD and not any(arg is False for arg in op.args)


@dataclass(frozen=True)
class Composed:
    """The tape of all passes, and where each pass's tensors went."""

    tape: Tape
    tensor_of: tuple[Mapping[int, int], ...]  # per pass: tensor of the pass -> tensor of the whole
    whole_inputs: Mapping[int, int]  # tensor of the first pass that is one sample range of an input -> tensor of the whole input


def compose(passes: Sequence[Tape], sliced: Collection[int]) -> Composed:
    """One tape from the tapes of the passes, in order. `sliced`: their tensors that show the pass's part of an input of the whole batch.

    Other inputs are the same in every pass. Unsupported where the passes do not have the same state.
    """
    writer = _Composer(passes, sliced)
    for number in range(len(passes)):
        writer.add(number)
    return writer.finish()


class _Composer:
    def __init__(self, passes: Sequence[Tape], sliced: Collection[int]) -> None:
        self.passes, self.sliced = passes, sliced
        self.sizes = tuple(tape.batch_size for tape in passes)
        self.starts = tuple(accumulate(self.sizes, initial=0))
        self.storages: list[Storage] = []
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.state: dict[tuple[Role, str], int] = {}
        self.ids: dict[tuple, int] = {}  # of tensors, by all else that they are
        self.gradients: dict[int, int] = {}  # storage -> the tensor that the first pass made of it
        self.tensor_of: list[dict[int, int]] = []
        self.whole_inputs: dict[int, int] = {}
        self.loss = -1

    def add(self, number: int) -> None:
        """Append a pass."""
        tape = self.passes[number]
        places = [self._storage(tape, s) for s in tape.storages]
        shifts = self._shifts(tape, number)
        names = {t.id: self._tensor(t, places[t.storage], shifts.get(t.storage, 0)) for t in tape.tensors}
        self.tensor_of.append(names)
        is_last = number == len(self.passes) - 1
        body = [op for op in tape.ops if op.phase is not Phase.OPTIMIZER]
        for op in body:
            self._op(op, names, places, adds=number > 0)
        self._add_loss(names[tape.loss], is_last)
        for op in tape.ops[len(body):] if is_last else ():
            self._op(op, names, places, adds=False)

    def finish(self) -> Composed:
        """The whole."""
        ends = {s for (role, _), s in self.state.items() if self.storages[s].at_end} | {self.tensors[self.loss].storage}
        storages = tuple(replace(s, at_end=s.id in ends) for s in self.storages)
        tape = Tape(ops=tuple(self.ops), tensors=tuple(self.tensors), storages=storages, loss=self.loss,
                    device_type=self.passes[0].device_type, batch_size=sum(self.sizes), micro_batches=self.sizes)
        return Composed(tape, tuple(self.tensor_of), self.whole_inputs)

    # --- storages and tensors ------------------------------------------------------------------------------------------
    def _storage(self, tape: Tape, s: Storage) -> int:
        """Where a pass's storage is in the whole: state stands once, temporaries are new."""
        if s.role not in STATE_ROLES:
            return self._new_storage(s)
        if (s.role, s.name) not in self.state:
            if len(self.tensor_of) and s.role is not Role.OPTIMIZER_STATE:
                raise Unsupported(f"the passes over the micro-batches differ in their state: {s.name} is not in all of them")
            bound = next((t for t in tape.tensors if t.id in self.sliced and t.storage == s.id), None)
            self.state[s.role, s.name] = self._new_storage(s if bound is None else replace(s, nbytes=self._whole_bytes(s, bound)))
            if bound is not None:
                whole = replace(bound, shape=(sum(self.sizes), *bound.shape[1:]))
                self.whole_inputs[bound.id] = self._tensor(whole, self.state[s.role, s.name], 0)
        return self.state[s.role, s.name]

    def _whole_bytes(self, s: Storage, part: Tensor) -> int:
        """Bytes from the first sample to the last of the whole batch, in the part's strides."""
        span = 1 + sum((n - 1) * stride for n, stride in zip(part.shape, part.strides)) if prod(part.shape) else 0
        more = (sum(self.sizes) - part.shape[0]) * part.strides[0]
        return s.nbytes + (s.nbytes // span * more if span else 0)

    def _shifts(self, tape: Tape, number: int) -> dict[int, int]:
        """Per storage of a sliced input: elements from the start of the whole to the start of this pass's part."""
        bound = [tape.tensors[t] for t in self.sliced]
        for t in bound:
            if any(other.storage == t.storage and other.dtype != t.dtype for other in tape.tensors):
                raise Unsupported("an input is read as another type, so that no part of it can be named")
        return {t.storage: self.starts[number] * t.strides[0] for t in bound}

    def _new_storage(self, s: Storage) -> int:
        index = len(self.storages)
        name = s.name if s.role in STATE_ROLES else f"%{index}"
        self.storages.append(replace(s, id=index, name=name))
        return index

    def _tensor(self, t: Tensor, storage: int, shift: int) -> int:
        moved = replace(t, id=len(self.tensors), storage=storage, offset=t.offset + shift)
        key = (storage, t.dtype, t.shape, t.strides, moved.offset)
        if key not in self.ids:
            self.ids[key] = moved.id
            self.tensors.append(moved)
        return self.ids[key]

    # --- ops -----------------------------------------------------------------------------------------------------------
    def _op(self, op: Op, names: Mapping[int, int], places: Sequence[int], *, adds: bool) -> None:
        fields: dict[str, Any] = {
            "id": len(self.ops), "args": _renamed(op.args, names), "kwargs": _renamed(op.kwargs, names),
            "inputs": tuple(names[t] for t in op.inputs), "outputs": tuple(None if t is None else names[t] for t in op.outputs),
            "mutates": tuple(places[s] for s in op.mutates), "takeover": op.takeover and (places[op.takeover[0]], places[op.takeover[1]]),
        }
        if op.target == ACCUMULATE and not op.mutates:
            (gradient,), storage = fields["outputs"], self.tensors[fields["outputs"][0]].storage
            if adds:
                fields |= self._addition(fields, storage)
            else:
                self.gradients[storage] = gradient
        self.ops.append(replace(op, **fields))

    def _addition(self, fields: Mapping[str, Any], storage: int) -> dict[str, Any]:
        """A gradient that is there is added to."""
        gradient = self.gradients[storage]
        return {"args": [*fields["args"], {"tensor": gradient}], "inputs": (*fields["inputs"], gradient), "outputs": (),
                "mutates": (storage,), "takeover": None, "is_eager_inplace": False}

    def _add_loss(self, loss: int, is_last: bool) -> None:
        if self.loss < 0:
            self.loss = loss
            return
        like = self.tensors[loss]
        total = self._tensor(like, self._new_storage(self.storages[like.storage]), 0)
        self.ops.append(Op(id=len(self.ops), target="aten.add.Tensor", args=[{"tensor": self.loss}, {"tensor": loss}], kwargs={},
                           inputs=(self.loss, loss), outputs=(total,), phase=Phase.FORWARD, layer="", flops=1))
        self.loss = total


def _renamed(value: Any, names: Mapping[int, int]) -> Any:
    if isinstance(value, list):
        return [_renamed(v, names) for v in value]
    if isinstance(value, Mapping):
        if "tensor" in value or "fresh" in value:
            return {tag: names[tensor] for tag, tensor in value.items()}
        return {key: _renamed(v, names) for key, v in value.items()}
    return value
