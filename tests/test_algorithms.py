"""Convolution algorithms that really run: other bits, other workspaces, and eager held to the same ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vramlab import train_step
from vramlab.algorithms import ON, SameVariants, by_algorithm, has_algorithms, named_variants, under_variants, using
from vramlab.capture import Captured, capture
from vramlab.check import check_schedule
from vramlab.costs import measure_variants
from vramlab.errors import Unsupported, WrongResult
from vramlab.execute import Executor
from vramlab.gate import Side, run_gate
from vramlab.liveness import replay_schedule
from vramlab.record import Truth
from vramlab.schedule import Compute, Schedule
from vramlab.tape import Tape, Variant

CONVOLUTION = torch.ops.aten.convolution.default


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, stride=2, padding=1),
                         nn.ReLU(), nn.Flatten(), nn.Linear(8 * 8 * 8, 5))


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])


def captured_with_variants(model: nn.Module) -> Captured:
    captured = capture(model, loss_fn, make_batch())
    found = [[Variant(name, 1.0, 0) for name in ON["cpu"]] if has_algorithms(op) else [] for op in captured.tape.ops]
    return replace(captured, tape=captured.tape.with_variants(found))


def by(tape: Tape, *names: str | None) -> Schedule:
    """Eager's order, the convolutions by these variants, in turn."""
    schedule, numbers = replay_schedule(tape), iter(range(10**6))

    def named(i):
        is_one = isinstance(i, Compute) and has_algorithms(tape.ops[i.op])
        return replace(i, variant=names[next(numbers) % len(names)]) if is_one else i

    return replace(schedule, instructions=tuple(named(i) for i in schedule.instructions))


def gate(names: tuple[str | None, ...], eager_names: tuple[str | None, ...]) -> Truth:
    """The schedule by `names` against eager by `eager_names`, three steps, bit for bit."""
    batch = make_batch()

    def side(is_tested: bool) -> Side:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        captured = captured_with_variants(model)

        def eager(*inputs: torch.Tensor) -> torch.Tensor:
            loss = loss_fn(model, *inputs)
            loss.backward()
            return loss.detach()

        executor = Executor(captured, check_schedule(captured.tape, by(captured.tape, *names)), model)
        like = under_variants(eager, named_variants(captured.tape, by(captured.tape, *eager_names)))

        def step(_index: int) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = executor(*batch, verify=True).loss if is_tested else like(*batch)
            optimizer.step()
            return loss

        return Side(model=model, step=step, optimizer=optimizer)

    return run_gate(lambda: side(False), lambda: side(True)).truth


@pytest.mark.parametrize("names", [("onednn",), ("im2col",), ("im2col", "onednn"), (None, "im2col")],
                         ids=["onednn", "im2col", "mixed", "some"])
def test_a_plan_equals_eager_under_the_same_variants(names):
    assert gate(names, names) is Truth.EXACT


@pytest.mark.parametrize("eager_names", [("onednn",), (None,), ("onednn", "im2col")], ids=["onednn", "the library's own", "swapped"])
def test_a_plan_does_not_equal_eager_under_others(eager_names):
    """Negative control: the gate sees another algorithm."""
    assert gate(("im2col", "onednn") if len(eager_names) > 1 else ("im2col",), eager_names) is Truth.WRONG


def test_the_algorithms_give_other_bits_and_the_switch_goes_back():
    x, w = torch.randn(4, 16, 32, 32), torch.randn(16, 16, 3, 3)
    arguments = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    before = torch._C._get_mkldnn_enabled()
    one, other, plain = (by_algorithm(CONVOLUTION, name)(*arguments) for name in ("onednn", "im2col", None))
    assert torch.equal(one, plain) and not torch.equal(one, other) and torch.allclose(one, other, atol=1e-3)
    assert torch._C._get_mkldnn_enabled() == before
    with pytest.raises(ZeroDivisionError), using("im2col"):
        raise ZeroDivisionError
    assert torch._C._get_mkldnn_enabled() == before


def test_an_unknown_algorithm_is_refused_before_anything_runs():
    with pytest.raises(Unsupported, match="cannot be told to convolve by 'fft'; on the CPU it knows onednn, im2col"):
        by_algorithm(CONVOLUTION, "fft")


def test_only_convolutions_run_by_a_variant():
    model = make_model()
    captured = captured_with_variants(model)
    tape = captured.tape.with_variants([[Variant("im2col", 1.0, 0)]] * len(captured.tape.ops))
    at = next(op.id for op in tape.ops if "relu" in op.target)
    schedule = replace(replay_schedule(tape), instructions=tuple(
        replace(i, variant="im2col") if isinstance(i, Compute) and i.op == at else i for i in replay_schedule(tape).instructions))
    executor = Executor(replace(captured, tape=tape), check_schedule(tape, schedule), model)
    with pytest.raises(Unsupported, match="knows no algorithms of #.*relu"):
        executor(*make_batch())


@pytest.mark.parametrize("count, message", [(3, "more convolutions"), (5, "ran 4 convolutions, the plan has 5")])
def test_another_number_of_convolutions_is_refused(count, message):
    with pytest.raises(Unsupported, match=message), SameVariants(["im2col"] * count):
        loss_fn(make_model(), *make_batch()).backward()


def test_measured_variants(tmp_path):
    tape = measure_variants(capture(make_model(), loss_fn, make_batch()).tape, "cpu", cache_dir=tmp_path)
    for op in tape.ops:
        assert [v.name for v in op.variants] == (list(ON["cpu"]) if has_algorithms(op) else [])
        assert all(v.seconds > 0 for v in op.variants)
    onednn, im2col = next(op.variants for op in tape.ops if op.variants)
    columns = 3 * 9 * 16 * 16 * 4  # of one image: channels, taps, places, bytes of a float
    assert im2col.workspace_bytes >= columns and im2col.workspace_bytes != onednn.workspace_bytes
    again = measure_variants(capture(make_model(), loss_fn, make_batch()).tape, "cpu", cache_dir=tmp_path)
    assert [op.variants for op in again.ops] == [op.variants for op in tape.ops], "from the cache"


@pytest.mark.parametrize("options", [{"policy": "all", "algorithms": "m"}, {"policy": "conv", "algorithms": "p"}])
def test_vdnn_runs_by_measured_algorithms(options):
    """`verify` holds the first call against eager under the plan's variants; a second call must work as well."""
    model, (x, y) = make_model(), make_batch()
    step = train_step(model, loss_fn, example=(x, y), method="vdnn", **options)
    step(x, y)
    assert step.truth is Truth.EXACT
    step(x, y)


def test_train_step_refuses_another_algorithm(monkeypatch):
    """Negative control of the first call: eager left to the library's choice."""
    monkeypatch.setattr("vramlab.step.under_variants", lambda eager, variants: eager)
    monkeypatch.setattr("vramlab.step.measure_variants", lambda tape, device: tape.with_variants(
        [[Variant("im2col", 0.0, 0)] if has_algorithms(op) else [] for op in tape.ops]))
    model, (x, y) = make_model(), make_batch()
    with pytest.raises(WrongResult):
        train_step(model, loss_fn, example=(x, y), method="vdnn", policy="none")(x, y)
