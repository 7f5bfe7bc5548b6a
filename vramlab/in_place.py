"""A tape whose element-wise gradients may be written over the gradient that they are made of. No torch.

    threshold_backward(dy, y) ─► dx        becomes        the same op, with leave to write dx over dy

PyTorch allocates dx; cuDNN lets both be one region, as frameworks that run an activation in place forward do backward. Only ops of
which torch has a form that writes into a given tensor are marked (OVER_GRADIENT), where both gradients look alike. Whether dy dies is a
question to the schedule: the checker refuses to read what was written over. Ops, tensors and storages stay as they are.
"""

from __future__ import annotations

from dataclasses import replace

from vramlab.tape import Op, Phase, Role, Tape

NEED = "inplace_gradients"  # in a method's card: it is given such a tape
# The first argument is what may be written over; element-wise, so that equal bits come out. `native_dropout_backward` and
# `hardswish_backward` are not among them: torch has only forms of them that allocate and copy.
OVER_GRADIENT = frozenset(
    f"aten.{name}_backward.default" for name in
    ("threshold", "hardtanh", "leaky_relu", "elu", "silu", "gelu", "sigmoid", "tanh", "hardsigmoid", "softplus")
) | {"aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar"}


def with_inplace_gradients(tape: Tape) -> Tape:
    """The tape with leave to write over gradients; what an op may write over already stays."""
    return replace(tape, ops=tuple(_marked(op, tape) for op in tape.ops))


def inplace_ops(tape: Tape) -> tuple[Op, ...]:
    """The ops that have this leave."""
    return tuple(op for op in tape.ops if _gradient_of(op, tape) is not None and op.takeover == _regions(op, tape))


def inplace_like(tape: Tape, planned: Tape) -> Tape:
    """This tape with such leave where `planned` has it: the same step captured anew, perhaps at another batch size."""
    return with_inplace_gradients(tape) if inplace_ops(planned) else tape


def _marked(op: Op, tape: Tape) -> Op:
    if op.takeover is not None or _gradient_of(op, tape) is None:
        return op
    return replace(op, takeover=_regions(op, tape))


def _regions(op: Op, tape: Tape) -> tuple[int, int]:
    """(storage of dx, storage of dy)."""
    return tape.tensors[op.outputs[0]].storage, tape.tensors[op.args[0]["tensor"]].storage


def _gradient_of(op: Op, tape: Tape) -> int | None:
    """The tensor dy, where the op is such a one, dx looks like it, and nothing else that the op reads lies in its storage."""
    if op.target not in OVER_GRADIENT or op.phase is not Phase.BACKWARD or len(op.outputs) != 1 or "tensor" not in op.args[0]:
        return None
    dx, dy = tape.tensors[op.outputs[0]], tape.tensors[op.args[0]["tensor"]]
    if (dx.dtype, dx.shape, dx.strides, dx.offset) != (dy.dtype, dy.shape, dy.strides, dy.offset):
        return None
    others = [a for a in op.args[1:] if isinstance(a, dict) and "tensor" in a]
    if any(tape.tensors[a["tensor"]].storage == dy.storage for a in others):
        return None
    into, over = tape.storages[dx.storage], tape.storages[dy.storage]
    maker = tape.producer[dy.storage]
    is_gradient = over.role is Role.TEMPORARY and not over.at_end and maker is not None and tape.ops[maker].phase is Phase.BACKWARD
    return dy.id if is_gradient and into.nbytes == over.nbytes else None
