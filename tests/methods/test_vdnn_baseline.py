"""vDNN's baseline against its formula: sum(|x|) + 2 max(|dx|) + sum(|W| + |dW|) + max(workspace)."""

from __future__ import annotations

import pytest
from contract import DEVICE
from tapes import MAP, SCALAR, WEIGHT, chain, inplace

from vramlab.check import check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.planner import UNLIMITED, Budget
from vramlab.schedule import Free
from vramlab.simulate import simulate
from vramlab.tape import Variant

PLANNER = Library([built_in_collection()]).method("vdnn-baseline").build()


def peak(tape) -> int:
    return check_schedule(tape, PLANNER.plan(tape, DEVICE, Budget(device_bytes=UNLIMITED))).peak_bytes


@pytest.mark.parametrize("layers", [2, 5, 20])
@pytest.mark.parametrize("workspace", [0, 500])
def test_formula_on_an_equal_chain(layers, workspace):
    """The peak stands in the second layer's backward, the last one with two gradient maps: the first layer's dW is yet to come."""
    formula = MAP + (layers + 2) * MAP + 2 * layers * WEIGHT + SCALAR + workspace
    assert peak(chain(layers, workspace_bytes=workspace)) == formula - WEIGHT


def test_an_inplace_activation_shares_its_map():
    """Three pairs hold three maps; in the backward of the first relu two gradient maps, one weight gradient is yet to come."""
    assert peak(inplace()) == MAP + 3 * WEIGHT + 3 * MAP + 2 * MAP + 2 * WEIGHT + SCALAR


def test_maps_are_freed_at_the_end_of_the_step_only():
    tape = chain(4)
    instructions = PLANNER.plan(tape, DEVICE, Budget(device_bytes=UNLIMITED)).instructions
    maps = {s for op in tape.ops[:4] for s in tape.creates[op.id]}
    assert {i.storage for i in instructions[-4:]} == maps
    assert not any(isinstance(i, Free) and i.storage in maps for i in instructions[:-4])


@pytest.mark.parametrize("algorithms, winograd, workspace, seconds", [
    ("library", False, 500, 1.0), ("p", False, 800, 0.5), ("p", True, 900, 0.25), ("m", False, 0, 3.0)])
def test_the_formula_with_named_algorithms(algorithms, winograd, workspace, seconds):
    tape = chain(5, workspace_bytes=500)
    known = [Variant("lean", 3.0, 0), Variant("fft", 0.5, 800), Variant("winograd", 0.25, 900)]
    tape = tape.with_variants([known if "convolution" in op.target else [] for op in tape.ops])
    planner = Library([built_in_collection()]).method("vdnn-baseline").build(algorithms=algorithms, winograd=winograd)
    checked = check_schedule(tape, planner.plan(tape, DEVICE, Budget(device_bytes=UNLIMITED)))
    assert checked.peak_bytes == MAP + 7 * MAP + 10 * WEIGHT + SCALAR + workspace - WEIGHT
    assert simulate(checked, DEVICE).end_seconds[0] == seconds
