"""benchmarks/assumptions.py: what each edit of a step changes, and by how much, against sums by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from vramlab.capture import capture
from vramlab.costs import roofline_costs
from vramlab.device import load_profile
from vramlab.tape import Phase, Tape
from vramlab.workload import cross_entropy

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import assumptions  # noqa: E402

BOARD = load_profile("titan-v")
BATCH = torch.zeros(8, 3, 64, 64), torch.zeros(8, dtype=torch.long)


@pytest.fixture(scope="module")
def tape() -> Tape:
    """Convolution of 40 filters, BatchNorm, ReLU, pooling, classifier."""
    head = nn.Flatten(), nn.Linear(40960, 10)
    model = nn.Sequential(nn.Conv2d(3, 40, 3, padding=1), nn.BatchNorm2d(40), nn.ReLU(), nn.MaxPool2d(2), *head)
    return capture(model.train(), cross_entropy, BATCH).tape


def the_op(tape: Tape, target: str):
    (found,) = [op for op in tape.ops if op.target == f"aten.{target}.default"]
    return found


def ratios(tape: Tape, costs) -> dict[str, float]:
    """New over plain seconds by operator, where they differ."""
    pairs = zip(roofline_costs(tape, BOARD).ops, costs(tape, BOARD).ops, strict=True)
    return {a.target.split(".")[1]: b.seconds / a.seconds for a, b in pairs if a.seconds != b.seconds}


def test_a_normalization_goes_past_more_often(tape):
    assert ratios(tape, assumptions.passes_of_normalization()) == pytest.approx(
        {"native_batch_norm": 3 / 2, "native_batch_norm_backward": 5 / 3})


def test_the_host_takes_its_time_for_every_kernel_and_for_no_view(tape):
    plain, slow = roofline_costs(tape, BOARD), assumptions.host_time(1e-4)(tape, BOARD)
    more = [b.seconds - a.seconds for a, b in zip(plain.ops, slow.ops)]
    assert more == pytest.approx([1e-4 if op.seconds else 0 for op in plain.ops])
    assert 0 in more and max(more) > 0


def test_an_operator_in_place_copies_first():
    """Reading and writing as many bytes as it does itself, where memory is what it waits for; one that is not in place copies nothing."""
    convolutions = nn.Conv2d(3, 40, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(40, 4, 3), nn.ReLU()
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(15376, 10))
    tape = capture(model.train(), cross_entropy, (BATCH[0].repeat(8, 1, 1, 1), BATCH[1].repeat(8))).tape
    found = ratios(tape, assumptions.copied_in_place())
    assert found == pytest.approx({"relu_": 2})


def test_40_filters_are_two_tiles_of_32(tape):
    """A convolution by arithmetic alone, on a board whose memory is no limit: 64 filters are computed for 40."""
    endless = replace(BOARD, memory_bytes_per_second=1e18, launch_seconds=0.0)
    plain, tiled = the_op(roofline_costs(tape, endless), "convolution"), the_op(assumptions.whole_tiles(32)(tape, endless), "convolution")
    assert tiled.seconds / plain.seconds == pytest.approx(64 / 40)
    assert the_op(assumptions.whole_tiles(40)(tape, endless), "convolution").seconds == plain.seconds


def test_a_backward_reads_what_its_layer_made_and_read(tape):
    norm, relu = the_op(tape, "native_batch_norm"), the_op(tape, "relu")
    kinds = frozenset({"normalization"})
    made = the_op(assumptions.backward_reads(tape, kinds), "native_batch_norm_backward")
    assert set(made.inputs) - set(the_op(tape, "native_batch_norm_backward").inputs) == {norm.outputs[0]}
    both = assumptions.backward_reads(tape, frozenset({"activation"}), made=False, read=True)
    assert set(the_op(both, "threshold_backward").inputs) - set(the_op(tape, "threshold_backward").inputs) == {norm.outputs[0]}
    assert relu.outputs[0] in the_op(tape, "threshold_backward").inputs
    forward = [op for op in tape.ops if op.phase is Phase.FORWARD]
    assert forward == [op for op in both.ops if op.phase is Phase.FORWARD]


def test_the_public_network_ends_a_block_in_a_relu_of_its_own():
    """A sum is followed by a convolution, and by the next sum."""
    model = assumptions.SublinearResNet((1, 2, 1, 1))
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 1 + 3 * 5 + 4  # a projection in each stage's first block
    tape = assumptions.tape_of_module(model, 1, 64)
    sums = [op for op in tape.ops if op.target == "aten.add.Tensor" and op.phase is Phase.FORWARD]
    readers = [{tape.ops[r].target for r in tape.readers[tape.tensors[op.outputs[0]].storage] if tape.ops[r].phase is Phase.FORWARD}
               for op in sums]
    assert len(sums) == 5 and not any("relu" in target for found in readers for target in found)
