"""Replay: peaks counted by hand."""

from __future__ import annotations

import pytest
from contract import DEVICE, plain_peak
from tapes import MAP, SCALAR, TOYS, WEIGHT, chain

from vramlab.check import check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.errors import PlanInfeasible
from vramlab.planner import UNLIMITED, Budget

REPLAY = Library([built_in_collection()]).method("replay").build()


def peak(tape, device_bytes: int = UNLIMITED) -> int:
    return check_schedule(tape, REPLAY.plan(tape, DEVICE, Budget(device_bytes=device_bytes))).peak_bytes


@pytest.mark.parametrize("layers", [2, 5, 20])
def test_peak_on_an_equal_chain(layers):
    """In the backward of the last layer: N - 1 maps (the last one is read by the loss only), two gradient maps, one weight gradient."""
    state = MAP + layers * WEIGHT
    assert peak(chain(layers)) == state + (layers - 1 + 2) * MAP + WEIGHT + SCALAR


@pytest.mark.parametrize("toy", TOYS)
def test_peak_is_that_of_plain_liveness(toy):
    assert peak(TOYS[toy]()) == plain_peak(TOYS[toy]())


def test_a_budget_below_the_peak_is_refused():
    tape = chain(5)
    assert peak(tape, peak(tape)) == peak(tape)
    with pytest.raises(PlanInfeasible) as refusal:
        peak(tape, peak(tape) - 1)
    assert refusal.value.smallest_bytes == peak(tape)
    assert refusal.value.op == "#8 aten.convolution_backward.default (conv4)"
