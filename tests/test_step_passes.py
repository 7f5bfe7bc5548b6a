"""`train_step` with a method that cuts the batch: as eager over the same micro-batches, and no loss that may not be cut gets through."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vramlab
from tests.fresh import in_fresh_process
from tests.pairs import bits, conv_net, cross_entropy, images, least_budget, momentum
from tests.steps import Net
from vramlab.batch_mean import data_divisors
from vramlab.capture import capture
from vramlab.errors import Unsupported
from vramlab.liveness import lower_bound_bytes
from vramlab.meter import measure_step_peak
from vramlab.micro_loss import refuse_unless_mean
from vramlab.micro_step import capture_passes, eager_over_micro_batches
from vramlab.record import Truth

passes_bound_bytes = importlib.import_module("methods.modnn.sub_batch").passes_bound_bytes


def plain() -> nn.Sequential:
    """No sample knows of another one."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                         nn.Linear(392, 5))


def cut_step(make, loss_fn, batch, **options):
    """A step at the least budget at which the method cuts the batch, and its model's twin."""
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    options |= {"method": "modnn", "algorithms": False}  # eager in these tests uses the library's own choice
    least = least_budget(lambda: model, loss_fn, batch, **options).smallest_bytes
    return vramlab.train_step(model, loss_fn, batch, budget=least, **options), model, twin


@pytest.mark.parametrize("make, truth", [(plain, Truth.EXACT), pytest.param(conv_net, Truth.SEMANTICS_CHANGED, marks=pytest.mark.slow)],
                         ids=["plain", "normalised"])
@pytest.mark.slow
def test_trains_as_eager_over_the_same_micro_batches_with_clipping_and_a_smaller_last_batch(make, truth):
    step, model, twin = cut_step(make, cross_entropy, images(6))
    assert len(step.micro_batches) > 1 and step.predicted.peak_bytes <= step.budget_bytes
    optimizers = [momentum(m.parameters()) for m in (model, twin)]
    for batch in (images(6, seed=1), images(6, seed=2), images(4, seed=3)):
        generator = torch.get_rng_state()
        loss = step(*batch)
        expected_generator = torch.get_rng_state()
        torch.set_rng_state(generator)
        sizes = step.micro_batches
        eager = eager_over_micro_batches(twin, cross_entropy, batch, sizes) if sizes else cross_entropy(twin, *batch)
        if not sizes:
            eager.backward()
        assert bits(loss) == bits(eager) and torch.equal(torch.get_rng_state(), expected_generator)
        assert all(bits(p.grad) == bits(q.grad) for p, q in zip(model.parameters(), twin.parameters()))
        assert all(bits(a) == bits(b) for a, b in zip(model.buffers(), twin.buffers()))
        for m, optimizer in zip((model, twin), optimizers):
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    step(*images(6))
    assert step.truth is truth
    assert (step.distance.gradient > 1e-3) == (truth is Truth.SEMANTICS_CHANGED)


# --- losses that may not be cut ----------------------------------------------------------------------------------------------
def masked_mean(model, x, y):
    kept = y != 4
    return (F.cross_entropy(model(x), y, reduction="none") * kept).sum() / kept.sum()


WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
LABELS = torch.tensor([0, 4, 1, 2, 3, 4])
REFUSED = {
    "sum": (lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"), "over 4 samples it is|over 2 samples it is"),
    "root": (lambda m, x, y: F.cross_entropy(m(x), y).sqrt(), "sqrt"),
    "class weights": (lambda m, x, y: F.cross_entropy(m(x), y, weight=WEIGHTS), "class weights"),
    "ignored class": (lambda m, x, y: F.cross_entropy(m(x), y, ignore_index=4), "other than 4"),
    "masked": (masked_mean, "other than 4"),
    "computed targets": (lambda m, x, y: F.cross_entropy(m(x), y + 0), "targets that are not ignored"),
    "between samples": (lambda m, x, y: (m(x) @ m(x).T).pow(2).mean(), "is no mean over the batch"),
}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_is_no_mean_is_refused_whether_verified_or_not(name, verify):
    loss_fn, said = REFUSED[name]
    with pytest.raises(Unsupported, match=said):
        cut_step(plain, loss_fn, (images(6)[0], LABELS), verify=verify)


def test_batch_normalisation_and_dropout_hide_no_sum():
    with pytest.raises(Unsupported, match="no mean over the batch"):
        cut_step(conv_net, lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"), images(6))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, lambda c: nn.InstanceNorm2d(c, affine=True)], ids=["batch", "instance"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_normalisation_makes_no_mean_another_loss_at_any_size_of_a_pass(norm, size):
    """Each sample's loss is known when the others are taken away: the mean is one, the sum is none."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Conv2d(3, 4, 3), norm(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)), images(6)
    model(batch[0])
    sizes = (size,) * (6 // size)
    captured = capture(model, cross_entropy, batch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refuse_unless_mean(model, cross_entropy, batch, sizes, captured)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(Unsupported, match="no mean over the batch"):
        refuse_unless_mean(model, lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"), batch, sizes, captured)


def test_a_later_batch_whose_mask_is_uneven_is_refused_before_it_runs():
    step, model, _ = cut_step(plain, lambda m, x, y: F.cross_entropy(m(x), y), images(6))
    step(*images(6))
    model.zero_grad()
    x, y = images(6)
    y[0] = -100
    with pytest.raises(Unsupported, match="other than -100"):
        step(x, y)
    assert all(p.grad is None for p in model.parameters())
    y[:] = torch.tensor([-100, 1, 2, -100, 3, 4])[:6] if step.micro_batches == (3, 3) else 1
    step(x, y)


def test_a_batch_that_is_not_along_the_first_dimension_is_refused():
    def run(self, x):
        return self.out(self.rnn(x)[0][-1])

    def make():
        return Net(run, rnn=nn.GRU(6, 8), out=nn.Linear(8, 3))

    with pytest.raises(Unsupported, match="micro-batches"):
        cut_step(make, lambda m, x: m(x).pow(2).mean(), (torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(1)),))


def test_inputs_of_no_common_batch_stay_whole():
    x, y = images(6)
    batch, loss_fn = (y.repeat_interleave(2), x), lambda m, y, x: F.cross_entropy(m(x), y[::2])
    step, model, twin = cut_step(plain, loss_fn, batch)
    loss_fn(twin, *batch).backward()
    step(*batch)
    assert step.micro_batches == () and step.truth is Truth.EXACT
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(model.parameters(), twin.parameters()))


def test_label_smoothing_and_scaled_means_are_means():
    for loss_fn in (lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1) * 8.0,
                    lambda m, x, y: F.cross_entropy(m(x), y) + 0.01 * sum(p.square().sum() for p in m.parameters())):
        step, _, _ = cut_step(plain, loss_fn, images(6))
        step(*images(6))
        assert step.truth is Truth.EXACT and step.distance.gradient < 1e-5


def test_divisors_that_inputs_decide():
    tape = capture(plain(), lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1), images(6)).tape
    assert {(d.counts, d.value) for d in data_divisors(tape)} == {("unlike", -100)}
    assert data_divisors(capture(plain(), lambda m, x, y: m(x).pow(2).mean(), images(6)).tape) == ()


# --- memory -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [plain, conv_net, lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 400), nn.Linear(400, 5))],
                         ids=["plain", "normalised", "one large weight"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_bound_of_passes_is_that_of_their_tape(make, size):
    model, (x, y) = make(), images(6)
    one = capture(model, cross_entropy, (x[:size], y[:size])).tape
    passes = capture_passes(model, cross_entropy, (x, y), (size,) * (6 // size)).tape
    waiting = sum(t.numel() * t.element_size() for t in (x[size:], y[size:]))
    found = passes_bound_bytes(one) + waiting
    assert found - 64 <= lower_bound_bytes(passes) <= found + 64  # weights of losses


@pytest.mark.parametrize("make", [plain, conv_net])
@in_fresh_process
def test_the_allocator_stays_within_the_lower_bound(make):
    batch = images(6)
    least = least_budget(make, cross_entropy, batch, method="modnn").smallest_bytes

    def build():
        model, inputs = make(), images(6)
        step = vramlab.train_step(model, cross_entropy, inputs, method="modnn", budget=least, verify=False)
        assert len(step.micro_batches) > 1

        def run():
            for p in model.parameters():
                p.grad = None
            step(*inputs)

        return run, lambda: [*model.parameters(), *model.buffers(), *inputs, *(p.grad for p in model.parameters() if p.grad is not None)]

    build()  # measures the operators: the meter does not nest
    peaks = measure_step_peak(build, steps=2)
    assert peaks.peak_bytes <= least
