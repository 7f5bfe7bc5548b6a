"""Region reuse: against its formula on a chain, against the table of what may be overwritten, and run against eager."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from contract import DEVICE
from fresh import in_fresh_process
from steps import cross_entropy, differences
from tapes import MAP, SCALAR, WEIGHT, StepBuilder
from torch import nn

from vramlab.capture import Captured, capture
from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.costs import measure_costs
from vramlab.execute import Executor
from vramlab.layers import layers_of
from vramlab.liveness import replay_schedule
from vramlab.meter import measure_step_peak
from vramlab.planner import UNLIMITED, Budget
from vramlab.prepared import prepare_tape
from vramlab.record import Truth
from vramlab.schedule import Compute, Free
from vramlab.split import NEED, split_convolutions
from vramlab.step import train_step
from vramlab.tape import Phase, Role, Tape

LIBRARY = Library([built_in_collection()])
REGIONS = ("network-wide", "live")


def plan(tape: Tape, method: str = "fujitsu-reuse", **options: str) -> CheckedSchedule:
    return check_schedule(tape, LIBRARY.method(method).build(**options).plan(tape, DEVICE, Budget(device_bytes=UNLIMITED)))


def split_chain(layers: int, relu: bool = False) -> Tape:
    """Convolutions in a row, their backward already in halves, the weight gradient first or, as in a linear layer, second."""
    step = StepBuilder()
    x = step.input
    for i in range(layers):
        x = _convolution_in_halves(step, x, weight_first=i % 2 == 0)
        if relu:
            x = step.relu(x, inplace=True)
    return step.finish(x)


def _convolution_in_halves(step: StepBuilder, x: int, weight_first: bool) -> int:
    layer = f"conv{len(step.pullbacks)}"
    w, y = step.parameter(f"{layer}.weight"), step.temporary(MAP, Role.ACTIVATION)
    step.call("aten.convolution.default", [x, w], [y], layer=layer)

    def pullback(gradients: dict[int, int]) -> None:
        dw, dx = step.temporary(WEIGHT), step.temporary(MAP)
        halves = [([gradients[y], x], dw)] + ([([gradients[y], w], dx)] if x != step.input else [])
        for inputs, output in halves if weight_first else halves[::-1]:
            step.backward("aten.convolution_backward.default", inputs, [output], layer)
        step.add_gradient(gradients, w, dw)
        if x != step.input:
            step.add_gradient(gradients, x, dx)

    step.pullbacks.append(pullback)
    return y


@pytest.mark.parametrize("layers", [2, 5, 20])
def test_gradient_maps_have_no_regions_of_their_own(layers):
    """B_net = 2 N u becomes N u: state, N maps, all weight gradients, the loss, and nothing else."""
    tape = split_chain(layers)
    state = MAP + 2 * layers * WEIGHT + SCALAR
    assert plan(tape).peak_bytes == state + layers * MAP
    assert plan(tape, "network-wide").peak_bytes == state + 2 * layers * MAP


def test_an_activation_costs_one_scratch_region():
    """The data gradient waits in scratch for the in-place ReLU's backward: N maps for N pairs, and one more for the gradient in scratch,
    one for a ReLU's backward of which the toy's form knows no takeover."""
    tape = split_chain(4, relu=True)
    state = MAP + 8 * WEIGHT + SCALAR
    assert plan(tape).peak_bytes <= state + 4 * MAP + 2 * MAP


@pytest.mark.parametrize("regions", REGIONS)
def test_the_weight_gradient_comes_before_the_data_gradient(regions):
    """A12, on a tape where every other layer has them the other way round."""
    tape = split_chain(6)
    order = [i.op for i in plan(tape, regions=regions).schedule.instructions if isinstance(i, Compute)]
    assert order != sorted(order) and sorted(order) == list(range(len(tape.ops)))
    for layer in layers_of(tape):
        gradients = [op for op in order if op in layer.backward_ops and "convolution_backward" in tape.ops[op].target]
        assert [bool(set(layer.inputs) & set(tape.reads[op])) for op in gradients] == [True, False][:len(gradients)]


# --- on a real network ----------------------------------------------------------------------------------------------------
def vgg() -> nn.Module:
    """Two stages of VGG with in-place ReLUs, BatchNorm in one, dropout in the classifier."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(True), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2),
                         nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(True), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(True),
                         nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 64, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, 5))


BATCH = (torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 5)


def split_capture(model: nn.Module, batch: tuple = BATCH) -> Captured:
    captured = capture(model, cross_entropy, batch)
    return Captured(prepare_tape(captured.tape, [NEED], torch.device("cpu")).tape, captured.binding)


@pytest.mark.parametrize("regions", REGIONS)
def test_gradients_are_eagers(regions):
    def make_step(model):
        captured = split_capture(model)
        executor = Executor(captured, plan(captured.tape, regions=regions), model)
        return lambda *inputs: executor(*inputs, verify=True).loss

    assert differences(vgg, cross_entropy, BATCH, make_step) == []


def test_maps_are_overwritten_only_where_the_table_allows():
    """Section by section of the table: after pooling and BatchNorm the convolution's data gradient takes the map's region; after a ReLU it
    does not, and the ReLU's own backward does."""
    tape = split_convolutions(capture(vgg(), cross_entropy, BATCH).tape)
    checked = plan(tape)
    made_way, taken, at = set(), set(), {}
    for k, i in enumerate(checked.schedule.instructions):
        if isinstance(i, Compute):
            at[i.op] = k
            before = checked.schedule.instructions[k - 1]
            backward = tape.ops[i.op].phase is Phase.BACKWARD
            if backward and isinstance(before, Free) and tape.ops[tape.producer[before.storage]].phase is Phase.FORWARD:
                made_way.add((_producer(tape, before.storage), tape.ops[i.op].layer))
            if backward and i.reuse is not None and "accumulate" not in tape.ops[i.op].target:
                taken.add((_producer(tape, i.reuse), tape.ops[i.op].layer))
    assert ("max_pool2d_with_indices", "5") in made_way  # by the data gradient of the convolution behind it
    assert taken == {("relu_", layer) for layer in ("1", "3", "7", "9", "13")}
    assert not [pair for pair in made_way if pair[0] == "relu_"]


def _producer(tape: Tape, storage: int) -> str:
    return tape.ops[tape.producer[storage]].target.split(".")[1]


@pytest.mark.parametrize("regions", REGIONS)
@in_fresh_process
def test_less_than_network_wide_and_the_meter_agrees(regions):
    def build():
        model, inputs = vgg(), tuple(b.clone() for b in BATCH)
        executor = Executor(replace(split_capture(model, inputs), tape=tape), checked, model)

        def step():
            for p in model.parameters():
                p.grad = None
            executor(*inputs)

        return step, lambda: [*model.parameters(), *model.buffers(), *inputs, *(p.grad for p in model.parameters() if p.grad is not None)]

    plain = capture(vgg(), cross_entropy, BATCH).tape
    tape = measure_costs(split_capture(vgg()).tape, "cpu")
    checked = plan(tape, regions=regions)
    assert checked.peak_bytes < 0.85 * plan(measure_costs(plain, "cpu"), "network-wide").peak_bytes
    if regions == "live":
        assert checked.peak_bytes <= check_schedule(tape, replay_schedule(tape)).peak_bytes
    measured = measure_step_peak(build).peak_bytes
    assert abs(checked.peak_bytes - measured) <= max(0.005 * measured, 1024), (checked.peak_bytes, measured)


def test_as_a_training_step():
    """Through `vramlab.train_step`, whose first call is verified against eager."""
    torch.manual_seed(0)
    model = vgg()
    step = train_step(model, cross_entropy, BATCH, method="fujitsu-reuse", budget=None, regions="live")
    step(*BATCH)
    assert step.truth is Truth.EXACT
    assert any("form" in str(op.args) for op in step.tape.ops)
