"""Floating-point operations of an op, from shapes alone. No torch.

A multiply-add counts as two. Convolutions, matrix products, attention and recurrent layers have formulas; any other op counts one
per element that it makes: their time is their memory traffic anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from vramlab.tape import Op, Tape, Tensor

Shape = Sequence[int]


def with_flops(tape: Tape) -> Tape:
    """The same tape with `Op.flops` filled in."""
    return replace(tape, ops=tuple(replace(op, flops=op_flops(op, tape.tensors)) for op in tape.ops))


def op_flops(op: Op, tensors: Sequence[Tensor]) -> int:
    """FLOP of one run of `op`; `tensors` is indexed by tensor id."""
    formula = _formula(op.target)
    if formula is not None:
        return formula(_Shapes(op, tensors))
    if op.takeover is not None and op.target == "vramlab.accumulate_grad":
        return 0  # the gradient takes the tensor as it is
    written = [t for t in op.outputs if t is not None] or [t for t in op.inputs if tensors[t].storage in op.mutates]
    return sum(prod(tensors[t].shape) for t in written)


class _Shapes:
    """An op's arguments by position: shapes where they are tensors, values elsewhere."""

    def __init__(self, op: Op, tensors: Sequence[Tensor]) -> None:
        self._op, self._tensors = op, tensors

    def __getitem__(self, position: int) -> Any:
        return self._shape(self._op.args[position])

    def _shape(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._shape(v) for v in value]
        if not isinstance(value, dict):
            return value
        return self._tensors[value["tensor"]].shape if "tensor" in value else value.get("form", {}).get("shape", value)

    @property
    def out(self) -> Shape:
        return self._tensors[self._op.outputs[0]].shape


def _matrix_product(a: Shape, b: Shape) -> int:
    """(..., m, k) x (..., k, n), or with a vector as the second."""
    return 2 * prod(a) * (b[-1] if len(b) > 1 else 1)


def _convolution(args: _Shapes) -> int:
    x, weight, is_transposed = args[0], args[1], args[6]
    return _filter_flops(x if is_transposed else args.out, weight)


def _convolution_backward(args: _Shapes) -> int:
    """The gradients of the input and of the weight cost what the forward costs, each; the bias costs next to nothing."""
    grad_output, x, weight, is_transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    return (bool(wanted[0]) + bool(wanted[1])) * _filter_flops(x if is_transposed else grad_output, weight)


def _filter_flops(map_shape: Shape, weight: Shape) -> int:
    """All filters at each position of a map: the output, or the input of a transposed one. The weight's shape knows the groups."""
    batch, _channels, *space = map_shape
    return 2 * batch * prod(space) * prod(weight)


def _attention(args: _Shapes) -> int:
    """Scores, then their product with the values. A causal mask saves nothing here."""
    query, key, value = args[0], args[1], args[2]
    return _score_flops(query, key, query[-1]) + _score_flops(query, key, value[-1])


def _attention_backward(args: _Shapes) -> int:
    """Scores again, then two products each for the gradients of (scores, values) and of (queries, keys)."""
    query, key, value = args[1], args[2], args[3]
    return 3 * _score_flops(query, key, query[-1]) + 2 * _score_flops(query, key, value[-1])


def _score_flops(query: Shape, key: Shape, depth: int) -> int:
    """(batch, heads, queries, keys) inner products of this depth."""
    batch, heads, queries, _ = query
    return 2 * batch * heads * queries * key[-2] * depth


def _recurrent(args: _Shapes) -> int:
    """(time, batch, features) through the input's and the state's weights of one layer."""
    time, batch, _ = args[0]
    return 2 * time * batch * (prod(args[1]) + prod(args[2]))


_FORMULAS: dict[str, Callable[[_Shapes], int]] = {
    "mm": lambda args: _matrix_product(args[0], args[1]),
    "mv": lambda args: _matrix_product(args[0], args[1]),
    "dot": lambda args: _matrix_product(args[0], args[1]),
    "bmm": lambda args: _matrix_product(args[0], args[1]),
    "addmm": lambda args: _matrix_product(args[1], args[2]),
    "addmv": lambda args: _matrix_product(args[1], args[2]),
    "baddbmm": lambda args: _matrix_product(args[1], args[2]),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": lambda args: 2 * _recurrent(args),
}


def _formula(target: str) -> Callable[[_Shapes], int] | None:
    """The formula of an operator; its in-place form has the same."""
    name = target.split(".")[1]
    if name.startswith("_scaled_dot_product_") and "attention" in name:
        return _attention_backward if name.endswith("_backward") else _attention
    return _FORMULAS.get(name.rstrip("_"))
