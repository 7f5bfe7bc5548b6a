"""Is the loss of a step a mean over its batch? That alone may be weighted by shares when the batch is cut.

What the tape shows is read here, without data: the loss is followed back over its single numbers to the ops that reduce the batch. Sums,
differences and products with numbers that no input decides keep a mean a mean. A divisor that an input decides (`ignore_index`, a mask)
does so only while every pass divides by its share; where that input can be counted before a step, it is; elsewhere the loss is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from vramlab.errors import Unsupported
from vramlab.tape import Op, Role, Tape

_LINEAR = frozenset(f"aten.{name}" for name in (
    "add.Tensor", "add_.Tensor", "add.Scalar", "sub.Tensor", "sub_.Tensor", "rsub.Scalar", "neg.default", "neg_.default", "mul.Scalar",
    "mul_.Scalar", "div.Scalar", "div_.Scalar", "mean.default", "sum.default", "sum.dim_IntList", "mean.dim", "clone.default",
    "_to_copy.default", "copy_.default", "stack.default", "cat.default"))
_PRODUCTS = frozenset({"aten.mul.Tensor", "aten.mul_.Tensor"})
_QUOTIENTS = frozenset({"aten.div.Tensor", "aten.div_.Tensor"})
_JOINS = frozenset({"aten.stack.default", "aten.cat.default"})
_NLL = frozenset({"aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default"})
_MEAN = 1  # of torch's enumeration of reductions


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisor:
    """A number by which the loss is divided and that an input decides."""

    input: int  # the input's tensor in the tape
    counts: str  # "unlike": its elements other than `value`; "like": those equal to it; "sum": it is the sum of the elements
    value: float = 0.0


def data_divisors(tape: Tape) -> tuple[Divisor, ...]:
    """What divides the loss of a step over its whole batch and is decided by an input. Unsupported where a loss can be told to be no mean
    over the batch, or where its divisor cannot be told before the step.
    """
    return tuple(dict.fromkeys(_Reader(tape).divisors()))


class _Reader:
    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.from_data = {s.id for s in tape.storages if s.role is Role.INPUT}
        for op in tape.ops:
            if self.from_data & {*tape.reads[op.id]}:
                self.from_data |= {*tape.creates[op.id], *op.mutates}

    def divisors(self) -> list[Divisor]:
        found: list[Divisor] = []
        waiting, seen = [self.tape.loss], set()
        while waiting:
            tensor = waiting.pop()
            op = self._maker(tensor)
            if tensor in seen or op is None:
                continue
            seen.add(tensor)
            waiting += self._follow(op, tensor, found)
        return found

    def _follow(self, op: Op, tensor: int, found: list[Divisor]) -> list[int]:
        """The single numbers that this one is made from."""
        data = [t for t in op.inputs if self.tape.tensors[t].storage in self.from_data]
        if op.target in _NLL:
            found += self._of_classes(op)
            return []
        if self._size(tensor) > 1 and op.target not in _JOINS:
            return []
        if any(self._size(t) > 1 for t in data) and op.target not in _JOINS:
            return [t for t in data if (maker := self._maker(t)) and maker.target in _JOINS]  # a reduction of numbers, or of the batch
        if op.target in _QUOTIENTS and len(op.inputs) > 1 and self._is_data(op.args[1]):
            found.append(self._divisor(op))
            return [t for t in data if {"tensor": t} == op.args[0]]
        if op.target in _LINEAR or op.target in _QUOTIENTS or (op.target in _PRODUCTS and len(data) == 1 and op.args[0] != op.args[1]):
            return data
        raise self._refusal(op, "is applied to numbers that depend on the whole batch")

    def _of_classes(self, op: Op) -> list[Divisor]:
        target, weight, reduction, ignored = op.args[1:5]
        if reduction != _MEAN:
            return []
        if weight is not None:
            raise self._refusal(op, "divides by the sum of the class weights of a pass, which is not its share of the batch")
        if (source := self._input_behind(target["tensor"])) is None:
            raise self._refusal(op, "divides by the number of targets that are not ignored, and the step computes those targets; "
                                    "pass them as an input of their own")
        return [Divisor(input=source, counts="unlike", value=ignored)]

    def _divisor(self, op: Op) -> Divisor:
        found = self._count(op.args[1]["tensor"])
        if found is None:
            raise self._refusal(op, "divides by a number that depends on the whole batch")
        return found

    def _count(self, tensor: int) -> Divisor | None:
        total = self._maker(tensor)
        if total is None or total.target != "aten.sum.default":
            return None
        mask, is_negated = total.inputs[0], False
        while (op := self._maker(mask)) and op.target in ("aten._to_copy.default", "aten.bitwise_not.default", "aten.logical_not.default"):
            is_negated ^= op.target != "aten._to_copy.default"
            mask = op.inputs[0]
        if op is None:
            source = self._input_behind(mask)
            return None if source is None or is_negated else Divisor(input=source, counts="sum")
        if op.target not in ("aten.eq.Scalar", "aten.ne.Scalar") or (source := self._input_behind(op.inputs[0])) is None:
            return None
        return Divisor(input=source, counts="unlike" if (op.target == "aten.ne.Scalar") ^ is_negated else "like", value=op.args[1])

    def _input_behind(self, tensor: int) -> int | None:
        """The input that a tensor shows the whole of, in whatever form."""
        storage = self.tape.tensors[tensor].storage
        if self.tape.storages[storage].role is not Role.INPUT:
            return None
        whole = next(t for t in self.tape.tensors if t.storage == storage)  # declared before any view of it
        return whole.id if self._size(whole.id) == self._size(tensor) else None

    def _maker(self, tensor: int) -> Op | None:
        storage = self.tape.tensors[tensor].storage
        producer = self.tape.producer[storage]
        return self.tape.ops[producer] if producer is not None and storage in self.from_data else None

    def _is_data(self, argument: object) -> bool:
        return isinstance(argument, dict) and self.tape.tensors[argument["tensor"]].storage in self.from_data

    def _size(self, tensor: int) -> int:
        return prod(self.tape.tensors[tensor].shape)

    def _refusal(self, op: Op, why: str) -> Unsupported:
        return Unsupported(f"the loss is no mean over the batch, so that it cannot be taken over micro-batches: {self.tape.op_name(op.id)} "
                           f"{why}")
