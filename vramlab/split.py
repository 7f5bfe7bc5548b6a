"""A tape with the backward of convolutions in two ops: weight gradient first, then data gradient. No torch.

    convolution_backward(dy, x, W) ─► dx, dW, db        becomes        convolution_backward(dy, x, W)  ─► dW, db
                                                                       convolution_backward(dy, |x|, W) ─► dx

|x| stands for the form of x alone: the data gradient needs x's shape and strides and none of its bytes. So x can be freed between the two,
and dx be written into its region. Likewise the backward of a ReLU, which is element-wise, may write over the map whose signs it reads.
Storages and tensors stay as they are; what costs were known of a split op is forgotten, for its halves have other ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from vramlab.tape import STATE_ROLES, Op, Tape

NEED = "split_convolutions"  # in a method's card: it is given such a tape
CONVOLUTION_BACKWARD = "aten.convolution_backward.default"
RELU_BACKWARD = "aten.threshold_backward.default"
_X, _WANTED = 1, 10  # positions among the arguments of a convolution's backward


def splittable_ops(tape: Tape) -> tuple[Op, ...]:
    """The convolution backwards that give a data gradient and a weight gradient in one op."""
    return tuple(op for op in tape.ops if _is_splittable(op))


def halves_of(op: Op, tape: Tape) -> tuple[Op, Op]:
    """The op as (weight and bias gradient, data gradient), both with its id. The second reads the form of x only."""
    wants_dx, wants_dw, wants_db = op.args[_WANTED]
    dx, dw, db = op.outputs
    x = tape.tensors[op.args[_X]["tensor"]]
    form = {"form": {"dtype": x.dtype, "shape": list(x.shape), "strides": list(x.strides)}}
    weight = replace(op, args=_with(op.args, {_WANTED: [False, wants_dw, wants_db]}), outputs=(None, dw, db), seconds=0.0, flops=0)
    reads = tuple(t for t in op.inputs if t != x.id or _count(op.args, x.id) > 1)
    data = replace(op, args=_with(op.args, {_X: form, _WANTED: [wants_dx, False, False]}), inputs=reads, outputs=(dx, None, None),
                   seconds=0.0, flops=0)
    return weight, data


def split_convolutions(tape: Tape, whole: Collection[int] = ()) -> Tape:
    """The tape with every splittable op in two, but for the ops in `whole`, and with ReLU backwards that may write over their map."""
    found: list[Op] = []
    for op in tape.ops:
        if _is_splittable(op) and op.id not in whole:
            found += halves_of(op, tape)
        else:
            found.append(_overwriting(op, tape))
    return replace(tape, ops=tuple(replace(op, id=i) for i, op in enumerate(found)))


def split_like(tape: Tape, planned: Tape) -> Tape:
    """This tape split where `planned` is: the same step captured anew, perhaps at another batch size. As it is when `planned` is whole."""
    if not _is_split(planned):
        return tape
    whole = {op.id for op, is_whole in _whole_in(tape, planned) if is_whole}
    return split_convolutions(tape, whole)


def _whole_in(tape: Tape, planned: Tape) -> Iterator[tuple[Op, bool]]:
    """The splittable ops of `tape`, and whether `planned` has each in one piece."""
    at = 0
    for op in tape.ops:
        if _is_splittable(op):
            is_whole = at < len(planned.ops) and _is_splittable(planned.ops[at])
            yield op, is_whole
            at += 1 if is_whole else 2
        else:
            at += 1


def _is_split(tape: Tape) -> bool:
    return any(is_data_half(op) or _is_over_map(op, tape) for op in tape.ops)


def _is_over_map(op: Op, tape: Tape) -> bool:
    return op.target == RELU_BACKWARD and op.takeover is not None and op.takeover[1] == tape.tensors[op.args[1]["tensor"]].storage


def _is_splittable(op: Op) -> bool:
    if op.target != CONVOLUTION_BACKWARD or len(op.args) <= _WANTED:
        return False
    return bool(op.args[_WANTED][0]) and any(op.args[_WANTED][1:]) and not is_data_half(op)


def is_data_half(op: Op) -> bool:
    """Is it the second half of a convolution's backward, right behind the first? It reads the form of x only."""
    return op.target == CONVOLUTION_BACKWARD and "form" in op.args[_X]


def _overwriting(op: Op, tape: Tape) -> Op:
    """The backward of a ReLU (gradient, map, 0) with leave to write over the map, where both look alike."""
    if op.target != RELU_BACKWARD or op.takeover is not None:
        return op
    dx, y = tape.tensors[op.outputs[0]], tape.tensors[op.args[1]["tensor"]]
    alike = (dx.dtype, dx.shape, dx.strides, dx.offset) == (y.dtype, y.shape, y.strides, y.offset)
    into, over = tape.storages[dx.storage], tape.storages[y.storage]
    if not alike or into.nbytes != over.nbytes or over.role in STATE_ROLES or op.args[0] == op.args[1]:
        return op
    return replace(op, takeover=(into.id, over.id))


def _with(args: list[Any], changed: dict[int, Any]) -> list[Any]:
    return [changed.get(i, a) for i, a in enumerate(args)]


def _count(args: list[Any], tensor: int) -> int:
    return sum(a == {"tensor": tensor} for a in args)
