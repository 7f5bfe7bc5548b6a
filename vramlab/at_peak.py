"""What the device holds at the peak of a checked schedule: by role and by layer, with the inside of the op that runs. Simulated.

    peak = live storages (each has a role and a layer) + inside of the op (workspace, and duplicates that a recompute makes)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vramlab.check import CheckedSchedule
from vramlab.layers import feature_extraction, layers_of
from vramlab.live_bytes import Residents
from vramlab.tape import Role, Storage, Tape

MOST_LAYERS = 20  # that a record names; the others are one sum
INPUTS = "inputs of the step"


@dataclass(frozen=True, kw_only=True)
class AtPeak:
    """The bytes of the peak, said twice: by role and by layer. Each sum, with the inside of the op, is the peak."""

    phase: str  # of the op that runs; of the last one that ran where the peak stands at a copy
    op: int | None  # None where nothing runs
    inside_op_bytes: int
    by_role: Mapping[str, int]
    by_layer: Mapping[str, int]  # dotted module path ("" is the root), largest first

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(self.by_role.values()) + self.inside_op_bytes

    def to_json(self, most_layers: int = MOST_LAYERS) -> dict[str, Any]:
        """All fields; of the layers the largest, and `other_layers_bytes`."""
        layers = list(self.by_layer.items())
        return asdict(self) | {"by_layer": dict(layers[:most_layers]), "other_layers_bytes": sum(n for _, n in layers[most_layers:]),
                               "layers": len(layers)}


def live_at_peak(checked: CheckedSchedule) -> AtPeak:
    """Account for every byte of the peak."""
    tape = checked.tape
    held, op, ran = _held_at_peak(checked)
    by_layer = Counter[str]()
    for storage in held:
        by_layer[layer_of(tape, storage)] += storage.nbytes
    roles = {str(role): sum(s.nbytes for s in held if s.role is role) for role in Role}
    last = ran if op is None else op
    return AtPeak(phase=str(tape.ops[last or 0].phase) if tape.ops else "", op=op,
                  inside_op_bytes=checked.peak_bytes - sum(s.nbytes for s in held), by_role=roles, by_layer=dict(by_layer.most_common()))


def feature_bytes_at_peak(checked: CheckedSchedule) -> int:
    """What of the peak belongs to the feature extraction: its layers' maps, gradients and parameters, the step's inputs, and the inside
    of the op where it is theirs. What an op of the backward makes is of the layer that it differentiates."""
    tape, features = checked.tape, feature_extraction(layers_of(checked.tape))
    theirs = {s for layer in features for s in (layer.x, layer.dx, *layer.auxiliary, *layer.W, *layer.dW, *layer.inputs)}
    backward = {op for layer in features for op in layer.backward_ops}
    ops = backward | {op for layer in features for op in layer.forward_ops}
    held, op, _ = _held_at_peak(checked)
    found = [s for s in held if s.id in theirs or tape.producer[s.id] in backward]
    inside = checked.peak_bytes - sum(s.nbytes for s in held) if op in ops else 0
    return sum(s.nbytes for s in found) + inside


def _held_at_peak(checked: CheckedSchedule) -> tuple[list[Storage], int | None, int | None]:
    """Live storages by id, the op that runs, and the last that ran before it."""
    tape, at, instructions = checked.tape, checked.peak_instruction, checked.schedule.instructions
    residents, ran = Residents(tape), None
    for instruction in instructions[:at]:
        residents.apply(instruction)
        ran = getattr(instruction, "op", ran)
    op = getattr(instructions[at], "op", None) if instructions else None
    before = sum(tape.storages[s].nbytes for s in residents.device)
    if before < checked.peak_bytes:  # the peak stands inside this instruction, not before it
        residents.apply(instructions[at])
    return [tape.storages[s] for s in sorted(residents.device)], op, ran


def layer_of(tape: Tape, storage: Storage) -> str:
    """The module that a storage belongs to: the owner of a parameter, its gradient and optimizer state; else the layer that makes it."""
    producer = tape.producer[storage.id]
    if storage.role in (Role.ACTIVATION, Role.TEMPORARY):
        return "" if producer is None else tape.ops[producer].layer
    if storage.role is Role.INPUT:
        return INPUTS
    name = storage.name.removesuffix(".grad") if storage.role is Role.GRADIENT else storage.name
    if storage.role is Role.OPTIMIZER_STATE:
        name = name.rpartition(".")[0]  # of "block.weight.exp_avg"
    return name.rpartition(".")[0]
