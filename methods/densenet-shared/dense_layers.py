"""Dense layers on a tape: concatenation ─► normalization, activation ─► convolution, each map read by the next op only."""

from __future__ import annotations

from vramlab.layers import Layer, layers_of
from vramlab.tape import Tape

_CHEAP = frozenset({"normalization", "activation"})


def dense_layers(tape: Tape) -> tuple[tuple[int, ...], ...]:
    """Per dense layer the maps from its concatenation to the input of its convolution, in the order in which they are made."""
    layers = layers_of(tape)
    found = (_maps_from(layer, layers) for layer in layers if layer.kind == "concat")
    return tuple(maps for maps in found if maps and not any(tape.storages[s].at_end for s in maps))


def _maps_from(concat: Layer, layers: tuple[Layer, ...]) -> tuple[int, ...]:
    """Empty where the chain does not end in a convolution, or is none."""
    maps, here = [concat.x], concat
    while len(here.consumers) == 1:
        here = layers[here.consumers[0]]
        if here.kind == "convolution":
            return tuple(maps) if len(maps) > 1 else ()
        if here.kind not in _CHEAP:
            break
        maps.append(here.x)
    return ()
