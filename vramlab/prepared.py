"""The tape that a method asked for by its `needs`: convolution backwards split where that changes no bit, gradients that may be written
over each other, or both.

Whether a split changes bits is a question to the kernels at hand, not to mathematics: each distinct op is run whole and in halves, in
deterministic mode, in a process of its own, and the answer is kept on disk for the device, the torch version and the thread count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vramlab import in_place, split
from vramlab.costs import signature
from vramlab.gate import deterministic, difference
from vramlab.isolate import Call, run_isolated
from vramlab.ops import callable_of, decode_arg, dtype_of
from vramlab.record import Outcome
from vramlab.store import device_store
from vramlab.tape import Op, Tape, Tensor

CHECK_SECONDS = 600.0
_SEED = 0


@dataclass(frozen=True)
class Splits:
    """What became of a tape's convolution backwards."""

    split_ops: int  # in two halves
    unsplit_ops: tuple[str, ...]  # those that stay whole, because their halves give other bits
    is_checked: bool  # False: nothing ran, as on a simulated target, where all are split


@dataclass(frozen=True)
class Prepared:
    """A tape for a method, and what was done for it; None is what the method did not ask for."""

    tape: Tape
    splits: Splits | None = None
    inplace_ops: int | None = None  # ops that may write over a gradient

    def to_json(self) -> dict[str, Any]:
        """For a record: need -> what was done."""
        found = {} if self.splits is None else {split.NEED: asdict(self.splits) | {"unsplit_ops": list(self.splits.unsplit_ops)}}
        return found if self.inplace_ops is None else found | {in_place.NEED: {"ops": self.inplace_ops}}


def prepare_tape(tape: Tape, needs: Collection[str], device: torch.device | None, *, cache_dir: Path | None = None) -> Prepared | None:
    """What `needs` asks to be done to a tape before costs, None when that is nothing. `device` None: simulated, nothing is checked."""
    if not {split.NEED, in_place.NEED} & set(needs):
        return None
    prepared = _split(tape, device, cache_dir) if split.NEED in needs else Prepared(tape)
    if in_place.NEED not in needs:
        return prepared
    over = in_place.with_inplace_gradients(prepared.tape)
    return replace(prepared, tape=over, inplace_ops=len(in_place.inplace_ops(over)))


def prepared_for(needs: Collection[str]) -> tuple[str, ...]:
    """Those of a method's needs that make its tape another one than eager's, in a fixed order."""
    return tuple(need for need in ("variants", split.NEED, in_place.NEED) if need in needs)


def prepare_like(tape: Tape, planned: Tape) -> Tape:
    """This tape prepared as `planned` is: the same step captured anew, perhaps at another batch size. As it is when nothing was done."""
    return in_place.inplace_like(split.split_like(tape, planned), planned)


def _split(tape: Tape, device: torch.device | None, cache_dir: Path | None) -> Prepared:
    ops = split.splittable_ops(tape)
    exact = {op.id for op in ops} if device is None else _exact(tape, ops, device, cache_dir)
    whole = [op for op in ops if op.id not in exact]
    splits = Splits(len(ops) - len(whole), tuple(tape.op_name(op.id) for op in whole), device is not None)
    return Prepared(split.split_convolutions(tape, {op.id for op in whole}), splits)


def _exact(tape: Tape, ops: Sequence[Op], device: torch.device, cache_dir: Path | None) -> set[int]:
    """The ops whose halves give the bits of the whole."""
    names = {op.id: signature(tape, op) for op in ops}
    store = device_store("splits", device, cache_dir)
    known = store.read()
    missing = {name: question_of(tape, op) for op in ops if (name := names[op.id]) not in known}
    found = ask(missing, device)
    store.add(found)
    known |= found
    return {op for op, name in names.items() if known[name]}


@dataclass(frozen=True)
class Question:
    """One op, its halves and the tensors that they name."""

    whole: Op
    halves: tuple[Op, Op]
    tensors: Mapping[int, Tensor]


def question_of(tape: Tape, op: Op) -> Question:
    """Does this op split without another bit?"""
    return Question(op, split.halves_of(op, tape), {t: tape.tensors[t] for t in op.inputs})


def ask(questions: Mapping[str, Question], device: torch.device) -> dict[str, bool]:
    """Per name: are the bits equal? In a process of its own; where that dies, each question gets one, and a second death is a no."""
    if not questions:
        return {}
    answer = run_isolated(Call(function="vramlab.prepared.are_exact", args=(dict(questions), str(device))), timeout_seconds=CHECK_SECONDS)
    if answer.outcome is Outcome.OK:
        return answer.value
    if len(questions) == 1:
        return dict.fromkeys(questions, False)
    return {name: ask({name: question}, device)[name] for name, question in questions.items()}


def are_exact(questions: Mapping[str, Question], device: str) -> dict[str, bool]:
    """Run each op whole and in halves on the same random inputs."""
    with torch.no_grad(), deterministic():
        return {name: _is_exact(question, torch.device(device)) for name, question in questions.items()}


def _is_exact(question: Question, device: torch.device) -> bool:
    generator = torch.Generator(device).manual_seed(_SEED)
    inputs = {t: _random(question.tensors[t], generator, device) for t in question.whole.inputs}
    whole = _run(question.whole, inputs, device)
    try:
        weight, data = (_run(half, inputs, device) for half in question.halves)
    except RuntimeError:  # a kernel that does read x, or that has no form with this mask
        return False
    halves = (data[0], weight[1], weight[2])
    return all(difference("", a, b) is None for a, b in zip(whole, halves, strict=True))


def _run(op: Op, inputs: Mapping[int, torch.Tensor], device: torch.device) -> Sequence[torch.Tensor | None]:
    return callable_of(op.target)(*(decode_arg(a, inputs.__getitem__, device) for a in op.args))


def _random(form: Tensor, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    span = 0 if 0 in form.shape else 1 + sum((n - 1) * s for n, s in zip(form.shape, form.strides))
    flat = torch.randn(span, generator=generator, device=device).to(dtype_of(form.dtype))
    return flat.as_strided(form.shape, form.strides)
