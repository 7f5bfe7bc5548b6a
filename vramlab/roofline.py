"""Seconds of a tape's ops from a device profile alone: arithmetic or memory traffic, whichever takes longer. No torch."""

from __future__ import annotations

from math import prod

from vramlab.device import DeviceProfile
from vramlab.flops import with_flops
from vramlab.tape import Op, Tape

ACCUMULATE_GRAD = "vramlab.accumulate_grad"
_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16, "int64": 8, "int32": 4,
               "int16": 2, "int8": 1, "uint8": 1, "bool": 1}


def roofline_costs(tape: Tape, profile: DeviceProfile) -> Tape:
    """The tape with `seconds` from a device profile, and with `flops`: arithmetic, or the bytes read and written. Workspaces stay."""
    tape = with_flops(tape)
    return tape.with_costs([_seconds(tape, op, profile) for op in tape.ops])


def is_renaming(op: Op) -> bool:
    """A gradient that takes over a tensor as it is: no kernel runs."""
    return op.target == ACCUMULATE_GRAD and op.takeover is not None


def _seconds(tape: Tape, op: Op, profile: DeviceProfile) -> float:
    if is_renaming(op) or not (tape.creates[op.id] or op.mutates):
        return 0.0  # a view, or a gradient that takes over a tensor: no kernel runs
    written = sum(tape.storages[s].nbytes for s in (*tape.creates[op.id], *op.mutates))
    return profile.op_seconds(op.flops, sum(_read_bytes(tape, t) for t in op.inputs) + written)


def _read_bytes(tape: Tape, tensor: int) -> int:
    """What is shown, at most what is there: an expanded tensor shows the same bytes many times."""
    t = tape.tensors[tensor]
    return min(prod(t.shape) * _ITEM_BYTES[t.dtype], tape.storages[t.storage].nbytes)
