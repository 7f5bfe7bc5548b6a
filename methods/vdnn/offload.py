"""What is moved, and when its copy to the host starts: the policy's part of the plan, known before any algorithm is chosen."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from vramlab.layers import Layer, feature_extraction, layers_of
from vramlab.tape import Phase, Role, Tape

IN_PLACE = frozenset({"activation"})  # nothing to offload there
SMALL = frozenset({"activation", "softmax", "loss"})  # vDNN++ starts no prefetch in their backward
WITH_MAPS_OF_ITS_OWN = frozenset({"pooling", "dropout"})  # the indices of a pooling, the mask of a dropout


@dataclass(frozen=True)
class Moves:
    """The layers of a step and what a policy moves for each."""

    layers: tuple[Layer, ...]
    storages: tuple[tuple[int, ...], ...]  # per layer
    starts_at: dict[int, tuple[int, ...]]  # forward op -> storages whose copy to the host starts with it


def moves_of(tape: Tape, policy: str) -> Moves:
    """`all`: the input maps of every layer of the feature extraction; `conv`: of convolutions only; `none`: nothing.

    A map leaves with the last layer that reads it forward, and only if the backward reads it again.
    """
    layers = layers_of(tape)
    of_layer: dict[int, list[int]] = defaultdict(list)
    starts: dict[int, list[int]] = defaultdict(list)
    for storage, (layer, op) in _leaving(tape, layers, policy).items():
        of_layer[layer].append(storage)
        starts[op].append(storage)
    return Moves(layers, tuple(tuple(of_layer[layer.id]) for layer in layers), {op: tuple(found) for op, found in starts.items()})


def _leaving(tape: Tape, layers: tuple[Layer, ...], policy: str) -> dict[int, tuple[int, int]]:
    """Storage -> (layer that it is the input of, forward op with which its copy starts)."""
    found: dict[int, tuple[int, int]] = {}
    for layer in feature_extraction(layers):  # the classifier behind it keeps its maps
        if policy == "none" or layer.kind in IN_PLACE or (policy == "conv" and layer.kind != "convolution"):
            continue
        for s in layer.inputs:
            last = _last_forward_reader(tape, s)
            if last is not None and _returns(tape, s):
                found[s] = layer.id, last
        for s in layer.auxiliary if policy == "all" and layer.kind in WITH_MAPS_OF_ITS_OWN else ():
            if _returns(tape, s) and _last_forward_reader(tape, s) is None:
                found[s] = layer.id, _next_forward_op(tape, layer.forward_ops[-1])
    return dict(sorted(found.items()))


def _returns(tape: Tape, s: int) -> bool:
    storage = tape.storages[s]
    is_map = storage.role is Role.ACTIVATION and not storage.at_start and not storage.at_end and storage.nbytes > 0
    return is_map and any(tape.ops[op].phase is Phase.BACKWARD for op in tape.readers[s])


def _last_forward_reader(tape: Tape, s: int) -> int | None:
    return max((op for op in tape.readers[s] if tape.ops[op].phase is Phase.FORWARD), default=None)


def _next_forward_op(tape: Tape, op: int) -> int:
    is_forward = op + 1 < len(tape.ops) and tape.ops[op + 1].phase is Phase.FORWARD
    return op + 1 if is_forward else op
