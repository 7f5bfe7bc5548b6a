"""Gradients written over each other: eager's bits on small networks, what dies and what does not, with splits and variants beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fresh import in_fresh_process
from steps import cross_entropy, differences
from torch import nn

from vramlab import train_step
from vramlab.algorithms import named_variants, under_variants
from vramlab.capture import Captured, capture
from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.costs import measure_costs
from vramlab.device import DeviceProfile
from vramlab.errors import ScheduleError
from vramlab.execute import Executor
from vramlab.gate import Side, run_gate
from vramlab.in_place import NEED, OVER_GRADIENT, inplace_like, inplace_ops, with_inplace_gradients
from vramlab.liveness import gradient_reuse, replay_schedule
from vramlab.meter import measure_step_peak
from vramlab.ops import inplace_twin, resolve
from vramlab.planner import UNLIMITED, Budget
from vramlab.prepared import prepare_like, prepare_tape
from vramlab.record import Truth
from vramlab.schedule import Compute, Free
from vramlab.split import NEED as SPLIT
from vramlab.split import split_like
from vramlab.tape import Tape, Variant

CPU = torch.device("cpu")
BATCH = (torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(4) % 5)
DEVICE = DeviceProfile(name="toy", memory_bytes=10**9, flops_per_second=1e9, flops_efficiency=1, memory_bytes_per_second=1e9,
                       h2d_bytes_per_second=1e9, d2h_bytes_per_second=1e9, copy_latency_seconds=0)
LIBRARY = Library([built_in_collection()])
USERS = ("vdnn", "vdnn-baseline", "superneurons", "modnn")


def vgg() -> nn.Module:
    """Convolutions with ReLUs in place and not, pooling, dropout, a classifier."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(True), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(8, 16, 3, padding=1), nn.Hardtanh(), nn.Flatten(), nn.Linear(16 * 64, 32), nn.ReLU(True), nn.Dropout(),
                         nn.Linear(32, 5))


class Block(nn.Module):
    """A residual block: the gradient of its sum goes two ways, so that it is needed after the ReLU's backward of neither."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 8, 3, padding=1),
                                  nn.BatchNorm2d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + x)


def resnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(True), Block(), Block(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                         nn.Linear(32, 5))


class Shared(nn.Module):
    """sigmoid(h) * h: the gradient of h is summed, and what comes into the sigmoid's backward is also read by the product's."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.activation = nn.Linear(3 * 256, 16), nn.Linear(16, 5), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x.flatten(1))
        return self.last(self.activation(h) * h)


def in_place(captured: Captured, *more: str) -> Captured:
    return Captured(prepare_tape(captured.tape, [NEED, *more], CPU).tape, captured.binding)


def overwriting(tape: Tape) -> CheckedSchedule:
    return check_schedule(tape, replay_schedule(tape, reuse_of=gradient_reuse))


def reused(checked: CheckedSchedule) -> list[str]:
    """Targets of the ops of OVER_GRADIENT that take over a region."""
    ran = [checked.tape.ops[i.op].target for i in checked.schedule.instructions if isinstance(i, Compute) and i.reuse is not None]
    return [target for target in ran if target in OVER_GRADIENT]


@pytest.mark.parametrize("make_model, expected", [(vgg, 4), (resnet, 5)])
@pytest.mark.parametrize("more", [(), (SPLIT,)])
def test_eagers_bits(make_model, expected, more):
    counts = []

    def make_step(model):
        captured = in_place(capture(model, cross_entropy, BATCH), *more)
        checked = overwriting(captured.tape)
        counts.append(len(reused(checked)))
        executor = Executor(captured, checked, model)
        return lambda *inputs: executor(*inputs, verify=True).loss

    assert differences(make_model, cross_entropy, BATCH, make_step) == []
    assert counts[0] >= expected


@pytest.mark.parametrize("make", [nn.Sigmoid, nn.Tanh, nn.GELU, nn.SiLU, nn.Hardsigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardtanh])
def test_each_operator_gives_eagers_bits(make):
    counts = []

    def make_step(model):
        captured = in_place(capture(model, cross_entropy, BATCH))
        checked = overwriting(captured.tape)
        counts.append(reused(checked))
        executor = Executor(captured, checked, model)
        return lambda *inputs: executor(*inputs, verify=True).loss

    assert differences(lambda: Shared(make()), cross_entropy, BATCH, make_step) == []
    assert any("backward" in target for target in counts[0]), counts


def test_every_operator_has_a_form_that_writes_over_its_first_argument():
    for target in OVER_GRADIENT:
        resolve(target)
        inplace_twin(target, 0)


def test_what_is_needed_later_is_not_written_over():
    """dy of the product sigmoid(h) * h is read twice: of its two products only the last may take its region, and the checker holds it."""
    tape = in_place(capture(Shared(nn.Sigmoid()), cross_entropy, BATCH)).tape
    marked = [op for op in inplace_ops(tape) if op.target == "aten.mul.Tensor"]
    gradient = marked[0].takeover[1]
    assert len(marked) == 2 and {op.takeover[1] for op in marked} == {gradient} and tape.readers[gradient] == tuple(op.id for op in marked)
    checked = overwriting(tape)
    taking = {i.op for i in checked.schedule.instructions if isinstance(i, Compute) and i.reuse == gradient}
    assert taking == {marked[1].id}
    early = tuple(replace(i, reuse=gradient if i.op == marked[0].id else None) if isinstance(i, Compute) and i.op in {m.id for m in marked}
                  else i for i in checked.schedule.instructions)
    with pytest.raises(ScheduleError) as refusal:
        check_schedule(tape, replace(checked.schedule, instructions=early))
    assert refusal.value.rule == "input-not-readable"


@pytest.mark.parametrize("method", USERS)
def test_no_method_writes_over_what_is_needed(method):
    """Every plan on a residual network with shared gradients is legal, and takes regions over only at their last reader."""
    tape = measure_costs(in_place(capture(resnet(), cross_entropy, BATCH)).tape, "cpu")
    checked = check_schedule(tape, LIBRARY.method(method).build().plan(tape, DEVICE, Budget(device_bytes=UNLIMITED)))
    taken = [(i.op, i.reuse) for i in checked.schedule.instructions if isinstance(i, Compute) and i.reuse is not None]
    assert all(max(tape.readers[storage]) == op for op, storage in taken) and len(reused(checked)) >= 5


def test_a_wrong_overwrite_gives_other_bits(monkeypatch):
    """Negative control of the comparison with eager: the first product writes over the gradient that the second reads."""
    def over_all_the_same(tape, op, written, result):
        twin = inplace_twin(op.target, 0)
        return (lambda *args: twin(*args).clone()) if op.target == "aten.mul.Tensor" else resolve(op.target)

    monkeypatch.setattr("vramlab.execute._functional_twin", over_all_the_same)

    def make_step(model):
        captured = in_place(capture(model, cross_entropy, BATCH))
        executor = Executor(captured, overwriting(captured.tape), model)
        return lambda *inputs: executor(*inputs).loss

    assert differences(lambda: Shared(nn.Sigmoid()), cross_entropy, BATCH, make_step) != []


def test_eager_and_replay_stay_as_they_are():
    tape = capture(vgg(), cross_entropy, BATCH).tape
    marked = with_inplace_gradients(tape)
    assert replay_schedule(marked).instructions == replay_schedule(tape).instructions
    assert "inplace_gradients" not in {need for name in ("eager", "replay") for need in LIBRARY.method(name).card.needs}
    assert (marked.tensors, marked.storages) == (tape.tensors, tape.storages) and len(inplace_ops(marked)) > 3 > len(inplace_ops(tape))


@in_fresh_process
def test_the_meter_agrees_and_the_peak_falls():
    """A deep chain of wide ReLUs behind a linear layer: its peak is where a ReLU's gradient is made."""
    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(768, 4096), *[nn.Sigmoid() for _ in range(3)], nn.Linear(4096, 5))

    batch = (torch.randn(512, 3, 16, 16), torch.arange(512) % 5)
    plain = capture(make(), cross_entropy, batch)
    marked = in_place(plain)
    tape = measure_costs(marked.tape, "cpu")
    checked = overwriting(tape)
    assert checked.peak_bytes < check_schedule(tape, replay_schedule(tape)).peak_bytes

    def build():
        model, inputs = make(), tuple(b.clone() for b in batch)
        captured = Captured(tape, capture(model, cross_entropy, inputs).binding)
        executor = Executor(captured, checked, model)

        def step():
            for p in model.parameters():
                p.grad = None
            executor(*inputs)

        return step, lambda: [*model.parameters(), *inputs, *(p.grad for p in model.parameters() if p.grad is not None)]

    measured = measure_step_peak(build).peak_bytes
    assert abs(checked.peak_bytes - measured) <= max(0.005 * measured, 2**20), (checked.peak_bytes, measured)


def test_prepared_says_what_was_done_and_a_new_capture_is_prepared_alike():
    tape = capture(vgg(), cross_entropy, BATCH).tape
    both, over, split = (prepare_tape(tape, needs, CPU) for needs in ([NEED, SPLIT], [NEED], [SPLIT]))
    assert over.to_json() == {"inplace_gradients": {"ops": len(inplace_ops(over.tape))}} and over.inplace_ops >= 4
    assert set(both.to_json()) == {"inplace_gradients", "split_convolutions"} and set(split.to_json()) == {"split_convolutions"}
    for planned in (tape, both.tape, over.tape, split.tape):
        assert prepare_like(tape, planned).digest == planned.digest
    assert split_like(tape, over.tape) is tape, "a ReLU that writes over its gradient is no sign of a split"
    assert inplace_like(tape, split.tape) is tape


def test_state_and_maps_are_never_taken():
    for make_model in (vgg, resnet):
        tape = with_inplace_gradients(capture(make_model(), cross_entropy, BATCH).tape)
        for op in inplace_ops(tape):
            assert tape.storages[op.takeover[1]].role == "temporary" and tape.ops[tape.producer[op.takeover[1]]].phase == "backward"


@pytest.mark.parametrize("method", USERS)
def test_as_a_training_step(method):
    torch.manual_seed(0)
    model = resnet()
    step = train_step(model, cross_entropy, BATCH, method=method, budget=None)
    step(*BATCH)
    assert step.truth is Truth.EXACT and len(inplace_ops(step.tape)) >= 5


# ---------------------------------------------------------------- variants of split convolutions

def gate(names: tuple[str, str], eager_names: tuple[str, str]) -> Truth:
    """A split plan whose (weight, data) gradients come by `names`, against eager by `eager_names`."""
    def by(tape: Tape, pair: tuple[str, str]):
        schedule = replay_schedule(tape, reuse_of=gradient_reuse)
        is_data = {op.id: "form" in op.args[1] for op in tape.ops if op.target == "aten.convolution_backward.default"}
        return replace(schedule, instructions=tuple(
            replace(i, variant=pair[is_data[i.op]]) if isinstance(i, Compute) and i.op in is_data else i for i in schedule.instructions))

    def side(is_tested: bool) -> Side:
        torch.manual_seed(0)
        model = vgg()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        captured = in_place(capture(model, cross_entropy, BATCH), SPLIT)
        found = [[Variant(n, 1.0, 0) for n in ("onednn", "im2col")] if "convolution" in op.target else [] for op in captured.tape.ops]
        captured = Captured(captured.tape.with_variants(found), captured.binding)

        def eager(*inputs):
            loss = cross_entropy(model, *inputs)
            loss.backward()
            return loss.detach()

        executor = Executor(captured, check_schedule(captured.tape, by(captured.tape, names)), model)
        like = under_variants(eager, named_variants(captured.tape, by(captured.tape, eager_names)))

        def step(_index: int):
            optimizer.zero_grad(set_to_none=True)
            loss = executor(*BATCH, verify=True).loss if is_tested else like(*BATCH)
            optimizer.step()
            return loss

        return Side(model=model, step=step, optimizer=optimizer)

    return run_gate(lambda: side(False), lambda: side(True)).truth


@pytest.mark.parametrize("names", [("onednn", "onednn"), ("im2col", "onednn"), ("onednn", "im2col")])
def test_variants_of_split_convolutions_equal_eager_under_the_same(names):
    assert gate(names, names) is Truth.EXACT


def test_variants_of_split_convolutions_differ_under_others():
    assert gate(("im2col", "onednn"), ("onednn", "im2col")) is Truth.WRONG


def test_frees_are_what_the_takeover_leaves():
    tape = with_inplace_gradients(capture(vgg(), cross_entropy, BATCH).tape)
    plain, over = replay_schedule(tape), replay_schedule(tape, reuse_of=gradient_reuse)
    taken = {i.reuse for i in over.instructions if isinstance(i, Compute)} - {i.reuse for i in plain.instructions if isinstance(i, Compute)}
    assert taken and set(plain.instructions) - set(over.instructions) >= {Free(s) for s in taken}
