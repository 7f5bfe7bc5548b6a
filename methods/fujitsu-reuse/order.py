"""The order of computation: eager's, but inside each layer's backward the weight gradient comes before the data gradient."""

from __future__ import annotations

from vramlab.layers import Layer, layers_of
from vramlab.tape import Tape


def weight_gradients_first(tape: Tape) -> tuple[int, ...]:
    """All ops. In each layer, what still reads the layer's input moves up before the op that makes the gradient of that input."""
    order = [op.id for op in tape.ops]
    for layer in layers_of(tape):
        for data in layer.backward_ops:
            for weight in _readers_after(tape, layer, data):
                at = order.index(data)
                order.remove(weight)
                order.insert(at, weight)
    return tuple(order)


def _readers_after(tape: Tape, layer: Layer, data: int) -> list[int]:
    """Ops of the layer's backward after `data` that read its input and need nothing that was made since `data` began.

    `data` is a data gradient: it does not read that input itself. Nor does it write state, and neither op draws random numbers.
    """
    inputs = set(layer.inputs)
    if inputs & set(tape.reads[data]) or tape.ops[data].mutates or not tape.creates[data]:
        return []
    found = []
    for op in layer.backward_ops:
        if op > data and inputs & set(tape.reads[op]) and _may_move(tape, op, data):
            found.append(op)
    return found


def _may_move(tape: Tape, op: int, before: int) -> bool:
    """Everything that it reads is there before op `before`, and it overwrites nothing."""
    made = [tape.producer[s] for s in tape.reads[op]]
    is_plain = not tape.ops[op].mutates and not tape.ops[op].is_random and not tape.read_versions[op]
    return is_plain and all(p is None or p < before for p in made)
