"""Shared storages of DenseNets: the paper's formula for what a block keeps, and plans run against eager and the allocator's meter."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from contract import DEVICE
from fresh import in_fresh_process
from steps import cross_entropy, differences
from tapes import TOYS
from torch import nn
from torchvision.models import DenseNet

from vramlab.capture import capture
from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.costs import measure_costs
from vramlab.execute import Executor
from vramlab.liveness import replay_schedule
from vramlab.meter import measure_step_peak
from vramlab.planner import UNLIMITED, Budget
from vramlab.schedule import Compute, Free, Recompute
from vramlab.tape import Phase, Tape

METHOD = Library([built_in_collection()]).method("densenet-shared")
GROWTH, FIRST, BATCH_SIZE = 4, 8, 4
BATCH = (torch.randn(BATCH_SIZE, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.arange(BATCH_SIZE) % 5)


def densenet(*blocks: int, drop_rate: float = 0.0) -> nn.Module:
    """Dense blocks of so many layers; the first stage's maps have 8 x 8 pixels."""
    return DenseNet(GROWTH, blocks, FIRST, bn_size=2, num_classes=5, drop_rate=drop_rate)


@cache
def tape_of(*blocks: int) -> Tape:
    return capture(densenet(*blocks), cross_entropy, BATCH).tape


def plan(tape: Tape) -> CheckedSchedule:
    return check_schedule(tape, METHOD.build().plan(tape, DEVICE, Budget(device_bytes=UNLIMITED)))


def kept_bytes(checked: CheckedSchedule) -> int:
    """Bytes of maps, tensors of four dimensions, that stand between forward and backward phase."""
    tape, live = checked.tape, set()
    maps = {t.storage for t in tape.tensors if len(t.shape) == 4}
    for i in checked.schedule.instructions:
        if isinstance(i, Compute):
            if tape.ops[i.op].phase is Phase.BACKWARD:
                break
            live = (live | set(tape.creates[i.op])) - {i.reuse}
        elif isinstance(i, Free):
            live.discard(i.storage)
    return sum(tape.storages[s].nbytes for s in live & maps)


# --- A11 ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layers", [2, 6, 12])
def test_what_is_saved_is_the_papers_formula(layers):
    """Naive: concatenation and BatchNorm (its ReLU in place) of k0 + (j - 1) k channels in each layer j. Shared: none of them, but the
    features that are read once more, k0 + (m - 1) k channels, which PyTorch drops once they are concatenated."""
    tape, plane = tape_of(layers), BATCH_SIZE * 8 * 8 * 4
    concatenated = layers * FIRST + GROWTH * layers * (layers - 1) // 2
    features = FIRST + (layers - 1) * GROWTH
    naive = kept_bytes(check_schedule(tape, replay_schedule(tape)))
    assert naive - kept_bytes(plan(tape)) == plane * (2 * concatenated - features)


def test_what_a_block_keeps_is_linear_in_its_depth():
    kept = [kept_bytes(plan(tape_of(layers))) for layers in (4, 8, 12, 16)]
    steps = [b - a for a, b in zip(kept, kept[1:])]
    assert len(set(steps)) == 1
    naive = [kept_bytes(check_schedule(tape_of(m), replay_schedule(tape_of(m)))) for m in (4, 8, 12, 16)]
    assert len({b - a for a, b in zip(naive, naive[1:])}) == 3, "without the method it is not"


def test_each_map_is_made_again_once_right_before_its_layers_backward():
    """Three ops a layer, transition included, and one layer's maps at a time."""
    tape = tape_of(3, 2)
    instructions = plan(tape).schedule.instructions
    again = [i.op for i in instructions if isinstance(i, Recompute)]
    assert len(again) == len(set(again)) == 3 * (3 + 2 + 1)
    for at, i in enumerate(instructions):
        if isinstance(i, Recompute) and "cat" in tape.ops[i.op].target:
            runs = [j for j in instructions[at:] if isinstance(j, Compute | Recompute)][:4]
            names = [tape.ops[j.op].target.split(".")[1] for j in runs]
            assert names == ["cat", "native_batch_norm", "relu_", "convolution_backward"], names


# --- on the machine ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("drop_rate", [0.0, 0.2])
def test_gradients_and_running_statistics_are_eagers(drop_rate):
    """Three optimizer steps, the whole state_dict among what is compared: statistics that were updated twice would show."""
    counts = []

    def make_step(model):
        captured = capture(model, cross_entropy, BATCH)
        executor = Executor(captured, plan(captured.tape), model)
        counts.append(executor.counts[Recompute])
        return lambda *inputs: executor(*inputs, verify=True).loss

    assert differences(lambda: densenet(3, 2, drop_rate=drop_rate), cross_entropy, BATCH, make_step) == []
    assert counts == [3 * 6]


def test_statistics_updated_twice_would_be_seen():
    """The negative control of the test above: the recompute of a BatchNorm without its throw-away copies."""
    def make_step(model):
        captured = capture(model, cross_entropy, BATCH)
        checked = plan(captured.tape)
        careless = replace(captured.tape, ops=tuple(replace(op, throwaway_state=False) for op in captured.tape.ops))
        executor = Executor(captured, checked, model)
        executor.tape = careless
        return lambda *inputs: executor(*inputs).loss

    found = differences(lambda: densenet(3, 2), cross_entropy, BATCH, make_step)
    assert any("running_mean" in name for name in found)


@in_fresh_process
@pytest.mark.slow
def test_the_meter_agrees_with_the_predicted_peak():
    def build():
        model, inputs = densenet(12), tuple(b.clone() for b in BATCH)
        executor = Executor(replace(capture(model, cross_entropy, inputs), tape=tape), checked, model)

        def step():
            for p in model.parameters():
                p.grad = None
            executor(*inputs)

        return step, lambda: [*model.parameters(), *model.buffers(), *inputs, *(p.grad for p in model.parameters() if p.grad is not None)]

    tape = measure_costs(tape_of(12), "cpu")
    checked = plan(tape)
    measured = measure_step_peak(build).peak_bytes
    assert abs(checked.peak_bytes - measured) <= max(0.005 * measured, 1024), (checked.peak_bytes, measured)
    assert checked.peak_bytes < 0.7 * check_schedule(tape, replay_schedule(tape)).peak_bytes


# --- where there is nothing to share ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("toy", TOYS)
def test_other_networks_are_replayed(toy):
    tape = TOYS[toy]()
    checked, replay = plan(tape), check_schedule(tape, replay_schedule(tape))
    assert checked.peak_bytes <= replay.peak_bytes and not checked.schedule.count(Recompute)


def test_a_frozen_network_is_not_held_to_the_end():
    """Where no layer's backward needs its maps, nothing is made again and everything is freed."""
    model = densenet(3, 2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("classifier"))
    checked = plan(capture(model, cross_entropy, BATCH).tape)
    assert not checked.schedule.count(Recompute)
