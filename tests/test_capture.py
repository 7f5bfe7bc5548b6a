"""Capture against eager: what is replayed is what eager computes, and what cannot be is refused by name."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.steps import Net, cross_entropy, differences, mean_square, replay, training_steps
from vramlab.capture import capture
from vramlab.errors import CaptureError
from vramlab.tape import Phase, Role, Tape

STEPS = training_steps()
WITH_DATA = {"embedding-bag"}  # its fake kernel gives fewer bytes than its real one


@pytest.mark.parametrize("name", STEPS)
def test_replay_equals_eager_bit_for_bit(name):
    make, loss_fn, batch = STEPS[name]

    def make_step(model):
        executor = replay(model, loss_fn, batch, with_data=name in WITH_DATA)
        executor(*batch, verify=True)
        restore(model)
        return lambda *b: executor(*b).loss

    def restore(model):
        torch.manual_seed(0)
        model.load_state_dict(make().state_dict())
        for p in model.parameters():
            p.grad = None

    assert differences(make, loss_fn, batch, make_step) == []


@pytest.mark.parametrize("name", ["conv-bn-dropout", "write-through-view", "transformer-dropout", "embedding-bag"])
def test_capture_with_data_gives_the_same_step(name):
    make, loss_fn, batch = STEPS[name]

    def make_step(model):
        executor = replay(model, loss_fn, batch, with_data=True)
        return lambda *b: executor(*b).loss

    assert differences(make, loss_fn, batch, make_step) == []


def test_capture_with_data_changes_no_state():
    make, loss_fn, batch = STEPS["conv-bn-dropout"]
    model = make()
    before, random_before = {n: v.clone() for n, v in model.state_dict().items()}, torch.get_rng_state()
    capture(model, loss_fn, batch, with_data=True)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_before)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", STEPS)
def test_tape_is_plain_data_and_its_digest_is_stable(name):
    make, loss_fn, batch = STEPS[name]
    first, second = (capture(make(), loss_fn, batch).tape for _ in range(2))
    assert first.digest == second.digest
    assert Tape.from_json(first.to_json()) == first


# --- what a tape says, against facts known beforehand --------------------------------------------------------------------
def test_bytes_roles_and_layers_of_a_step_done_by_hand():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    tape = capture(model, mean_square, (torch.randn(4, 6),)).tape
    assert tape.bytes_of(Role.PARAMETER) == 4 * (6 * 8 + 8 + 8 * 3 + 3) == tape.bytes_of(Role.GRADIENT)
    assert tape.bytes_of(Role.INPUT) == 4 * 4 * 6
    linear = next(op for op in tape.ops if op.target == "aten.addmm.default")
    assert (linear.layer, linear.phase) == ("0", Phase.FORWARD)
    assert tape.storages[tape.creates[linear.id][0]].nbytes == 4 * 4 * 8
    relu_backward = next(op for op in tape.ops if op.target == "aten.threshold_backward.default")
    assert (relu_backward.layer, relu_backward.phase) == ("1", Phase.BACKWARD)


def test_each_gradient_is_accumulated_right_after_it_is_complete():
    tape = capture(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)), cross_entropy, (torch.randn(2, 1, 4, 4), torch.tensor([0, 1]))
    ).tape
    for i, op in enumerate(tape.ops):
        if op.target == "vramlab.accumulate_grad":
            before = next(o for o in reversed(tape.ops[:i]) if o.target != "vramlab.accumulate_grad")
            assert tape.reads[op.id][0] in tape.creates[before.id]


def test_single_assignment_of_temporaries():
    for name, (make, loss_fn, batch) in STEPS.items():
        tape = capture(make(), loss_fn, batch).tape
        made = [s for created in tape.creates for s in created]
        assert len(made) == len(set(made)), name


def test_gradients_that_exist_are_added_to():
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    executor = replay(model, mean_square, (x,))
    executor(x)
    once = model.weight.grad.clone()
    model2 = nn.Linear(3, 2)
    model2.load_state_dict(model.state_dict())
    for p in model2.parameters():
        p.grad = torch.zeros_like(p)
    names = frozenset(n for n, _ in model2.named_parameters())
    adding = replay(model2, mean_square, (x,), with_gradient=names)
    for _ in range(2):
        adding(x)
    assert torch.equal(model2.weight.grad, once + once)


def test_optimizer_state_counts_for_sgd_and_adam():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    numbers = 3 * 2 + 2
    for make, expected in (
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4 * numbers),
        (lambda p: torch.optim.Adam(p), 2 * 4 * numbers + 2 * 4),
    ):
        tape = capture(model, mean_square, (x,), optimizer=make(model.parameters())).tape
        assert tape.bytes_of(Role.OPTIMIZER_STATE) == expected
        assert tape.ops[-1].target == "vramlab.optimizer_step"


def test_optimizer_state_of_a_tied_weight_counts_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(7, 3), nn.Linear(3, 7)
            self.head.weight = self.words.weight

        def forward(self, x):
            return self.head(self.words(x))

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tape = capture(model, lambda m, x: m(x).square().mean(), (torch.arange(7),), optimizer=optimizer).tape
    model(torch.arange(7)).square().mean().backward()
    optimizer.step()
    held = sum(state["momentum_buffer"].nbytes for state in optimizer.state.values())
    assert tape.bytes_of(Role.OPTIMIZER_STATE) == held == 4 * (7 * 3 + 7)
    written = {tape.storages[s].name for s in tape.ops[-1].mutates}
    assert {"words.weight", "head.bias"} <= written


# --- refusals ------------------------------------------------------------------------------------------------------------
class _Counter(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class _Keeper(nn.Linear):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last


def _coin(self, x):
    return self.a(x) if random.random() < 2 else x


def _seeds(self, x):
    torch.manual_seed(1)
    return self.a(x) * torch.rand(3)


def _seeds_the_generator(self, x):
    torch.default_generator.manual_seed(1)
    return self.a(x) * torch.rand(3)


def _checkpointed_dropout(self, x):
    return self.a(checkpoint(lambda v: nn.functional.dropout(v.sin()), self.a(x), use_reentrant=False))


def _hooked():
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_forward_hook(lambda *a: None)
    return model


def _gradient_hooked():
    model = nn.Linear(3, 3)
    model.weight.register_hook(lambda g: g)
    return model


def _runs_backward(self, x):
    out = self.a(x)
    out.sum().backward(retain_graph=True)
    return out


def _writes_out(self, x):
    out = self.a(x)
    return torch.add(out.detach(), 1, out=torch.empty(2, 3)) * out


def _reads_gradient():
    model = Net(lambda self, x: self.a(x) * self.a.bias.grad, a=nn.Linear(3, 3))
    model.a.bias.grad = torch.ones(3)
    return model


X = torch.ones(2, 3)
REFUSED = {
    "value read in Python": (
        lambda: Net(lambda self, x: self.a(x) * x.sum().item(), a=nn.Linear(3, 3)),
        "_local_scalar_dense",
        "",
        "depends on data",
    ),
    "branch on a value": (
        lambda: Net(lambda self, x: self.a(x) if x.mean() > 0 else x, a=nn.Linear(3, 3)),
        "_local_scalar_dense",
        "",
        "depends on data",
    ),
    "shape from data": (lambda: Net(lambda self, x: self.a(x)[x[:, 0] > 0], a=nn.Linear(3, 3)), "aten.index.Tensor", "", "depends on data"),
    "BatchNorm without momentum": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None)),
        "_local_scalar_dense",
        "1",
        "depends on data",
    ),
    "counter in a module": (lambda: nn.Sequential(_Counter(3, 3)), "", "0", "attribute 'calls'"),
    "activation kept in a module": (lambda: nn.Sequential(_Keeper(3, 3)), "", "0", "attribute 'last'"),
    "Python's random": (lambda: Net(_coin, a=nn.Linear(3, 3)), "", "", "Python's random"),
    "seed": (lambda: Net(_seeds, a=nn.Linear(3, 3)), "", "", "seeds the random"),
    "seed of the generator": (lambda: Net(_seeds_the_generator, a=nn.Linear(3, 3)), "", "", "seeds the random"),
    "checkpointed dropout": (lambda: Net(_checkpointed_dropout, a=nn.Linear(3, 3)), "", "", "activation checkpointing"),
    "compiled module": (lambda: torch.compile(nn.Linear(3, 3), backend="eager"), "", "", "OptimizedModule"),
    "data parallel": (lambda: nn.Sequential(nn.DataParallel(nn.Linear(3, 3))), "", "0", "DataParallel"),
    "forward hook": (_hooked, "", "0", "hook"),
    "gradient hook": (_gradient_hooked, "", "", "gradient hook"),
    "nothing to train": (lambda: nn.Linear(3, 3).requires_grad_(False), "", "", "no parameter that requires a gradient"),
    "no data": (lambda: nn.Linear(3, 3, device="meta"), "", "", "meta device"),
    "backward of its own": (lambda: Net(_runs_backward, a=nn.Linear(3, 3)), "", "", "leave backward()"),
    "out= of a temporary": (lambda: Net(_writes_out, a=nn.Linear(3, 3)), "aten.add.out", "", "out="),
    "gradient read": (_reads_gradient, "", "", ".grad"),
    "resized storage": (
        lambda: Net(lambda self, x: self.a(x.clone().resize_(1, 3)), a=nn.Linear(3, 3)),
        "resize_",
        "",
        "size of a storage",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused_by_name(name):
    make, op, module, reason = REFUSED[name]
    with pytest.raises(CaptureError) as refused:
        capture(make(), mean_square, (X,))
    assert op in refused.value.op and refused.value.module == module and reason in str(refused.value)


@pytest.mark.parametrize("with_data", [False, True])
def test_capture_leaves_generators_and_what_the_code_closes_over_alone(with_data):
    total, model = torch.zeros(3), nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))

    def counting(model, x):
        total.add_(x.sum(0))
        return (model(x) * total).mean()

    before = torch.get_rng_state()
    capture(model, counting, (X,), with_data=with_data)
    assert torch.equal(total, torch.zeros(3)) and torch.equal(torch.get_rng_state(), before)
    executor = replay(model, counting, (X,), with_data=with_data)
    executor(X)
    executor(X)
    assert torch.equal(total, 2 * X.sum(0))


def test_a_refusal_logs_nothing(caplog):
    with pytest.raises(CaptureError, match="reduction dim"):
        capture(nn.Linear(4, 3), mean_square, (X,))
    assert caplog.text == ""


def test_a_loss_that_is_no_scalar_is_refused():
    with pytest.raises(CaptureError, match=r"shape \(2, 3\)"):
        capture(nn.Linear(3, 3), lambda m, x: m(x), (X,))


def test_a_failure_of_the_model_itself_names_the_module():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
    with pytest.raises(CaptureError) as refused:
        capture(model, mean_square, (X,))
    assert refused.value.module == "1"
