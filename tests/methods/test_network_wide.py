"""The network-wide baseline against its formula: sum(|x| + |dx|) + sum(|W| + |dW| + optimizer state) + workspace."""

from __future__ import annotations

import pytest
from contract import DEVICE
from tapes import MAP, SCALAR, TOYS, WEIGHT, chain, inplace

from vramlab.check import check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.planner import UNLIMITED, Budget

LIBRARY = Library([built_in_collection()])


def peak(method: str, tape) -> int:
    planner = LIBRARY.method(method).build()
    return check_schedule(tape, planner.plan(tape, DEVICE, Budget(device_bytes=UNLIMITED))).peak_bytes


@pytest.mark.parametrize("layers", [2, 5, 20])
def test_formula_on_an_equal_chain(layers):
    maps, weights = 2 * layers * MAP, 2 * layers * WEIGHT
    assert peak("network-wide", chain(layers)) == MAP + maps + weights + SCALAR  # the step's input and its loss beside it


def test_formula_with_optimizer_state_and_workspace():
    """The optimizer's workspace stands on top of all that is held, its momentum is there all along."""
    layers = 4
    held = MAP + 2 * layers * MAP + 2 * layers * WEIGHT + SCALAR
    assert peak("network-wide", chain(layers, optimizer=True)) == held + layers * WEIGHT + WEIGHT
    assert peak("network-wide", chain(layers, workspace_bytes=500)) == held + 500


def test_an_inplace_activation_shares_map_and_gradient():
    """Three pairs of convolution and in-place relu hold three maps and three gradients. During the last backward op of a relu the
    gradient that comes in, which is not held, stands beside them, and one weight gradient is yet to come."""
    pairs = 3
    state = MAP + pairs * WEIGHT
    held = state + 2 * pairs * MAP + (pairs - 1) * WEIGHT + SCALAR
    assert peak("network-wide", inplace()) == held + MAP


@pytest.mark.parametrize("toy", TOYS)
def test_baselines_are_ordered(toy):
    tape = TOYS[toy]()
    assert peak("network-wide", tape) >= peak("vdnn-baseline", tape) >= peak("replay", tape)


def test_nothing_is_recomputed_or_moved_and_everything_is_freed_at_the_end():
    tape = chain(3)
    checked = check_schedule(tape, LIBRARY.method("network-wide").build().plan(tape, DEVICE, Budget(device_bytes=UNLIMITED)))
    kept = sum(s.nbytes for s in tape.storages if s.at_end)
    assert checked.live_bytes[-1] == kept
    assert checked.live_bytes[-1 - 2 * 3] == kept + 2 * 3 * MAP  # before the six frees of maps and gradients
