"""The native step against PyTorch's own two lines, bit for bit."""

from __future__ import annotations

import copy

import torch
from torch import nn

from vramlab.collection import Library, built_in_collection

EAGER = Library([built_in_collection()]).method("eager")


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def make() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(5, 6), torch.arange(5) % 3


def test_step_is_loss_and_backward():
    model, x, y = make()
    reference = copy.deepcopy(model)
    step = EAGER.load().build(model, loss_of, None)
    for _ in range(2):  # the second call adds to the gradients of the first
        expected = loss_of(reference, x, y)
        expected.backward()
        loss = step(x, y)
        assert not loss.requires_grad and torch.equal(loss, expected.detach())
    for a, b in zip(model.parameters(), reference.parameters()):
        assert torch.equal(a.grad, b.grad)
    for a, b in zip(model.buffers(), reference.buffers()):
        assert torch.equal(a, b)


def test_step_leaves_the_optimizer_to_the_caller():
    model, x, y = make()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    EAGER.load().build(model, loss_of, optimizer)(x, y)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items() if "weight" in k or "bias" in k)
