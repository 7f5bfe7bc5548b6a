"""PyTorch's own methods against plain eager, bit for bit over three optimizer steps; and that they do save what they should."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from steps import differences
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vramlab.collection import Library, built_in_collection
from vramlab.errors import Unsupported

LIBRARY = Library([built_in_collection()])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), Block(), Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())), nn.Linear(6, 3))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


IMAGES = (torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(5) % 3)
ROWS = (torch.rand(5, 6, generator=torch.Generator().manual_seed(1)), torch.arange(5) % 3)
EXACT = [("torch-checkpoint", {}), ("torch-checkpoint", {"policy": "selective"}), ("torch-checkpoint", {"block": "Block"})]


def native(method: str, options: dict, model: nn.Module):
    return LIBRARY.method(method).load().build(model, loss_of, None, **options)


@pytest.mark.parametrize("method, options", EXACT, ids=[f"{m}-{o}" for m, o in EXACT])
def test_the_step_is_eagers(method, options):
    assert differences(blocks, loss_of, IMAGES, lambda model: native(method, options, model)) == []


def test_a_plain_sequential_is_cut_into_segments():
    assert differences(chain, loss_of, ROWS, lambda model: native("torch-checkpoint", {}, model)) == []
    assert runs_of(chain, ROWS, "torch-checkpoint", {})["aten.addmm.default"] > runs_of(chain, ROWS, "eager", {})["aten.addmm.default"]


def test_statistics_that_advance_twice_are_found():
    found = differences(blocks, loss_of, IMAGES, lambda model: native("torch-checkpoint", {"once_only_statistics": False}, model))
    assert any("running_mean" in str(name) or "num_batches" in str(name) for name in found)


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.runs[str(function)] += 1
        return function(*args, **(kwargs or {}))


def runs_of(make, batch, method: str, options: dict) -> Counter:
    step = native(method, options, make())
    with Counted() as counted:
        step(*batch)
    return counted.runs


def test_blocks_run_again_and_selection_spares_the_convolutions():
    plain, block, selective = (runs_of(blocks, IMAGES, *asked)["aten.convolution.default"] for asked in
                               (("eager", {}), ("torch-checkpoint", {}), ("torch-checkpoint", {"policy": "selective"})))
    assert (plain, block, selective) == (4, 7, 4)


def test_offload_is_refused_on_a_cpu():
    with pytest.raises(Unsupported, match="needs a GPU"):
        native("torch-offload", {}, blocks())


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"least_bytes": 500}])
def test_the_offloaded_step_is_eagers(options):
    batch = tuple(t.cuda() for t in IMAGES)
    assert differences(lambda: blocks().cuda(), loss_of, batch, lambda model: native("torch-offload", options, model)) == []


def test_a_model_without_blocks_is_refused():
    with pytest.raises(Unsupported, match="no module to checkpoint.*Nothing"):
        native("torch-checkpoint", {"block": "Nothing"}, blocks())(*IMAGES)


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_the_compiled_step_on_eagers_kernels_is_eagers(share):
    model, reference = chain(), chain()
    step = native("torch-compile-budget", {"activation_memory_budget": share}, model)
    for _ in range(2):
        loss = step(*ROWS)
        expected = loss_of(reference, *ROWS)
        expected.backward()
        assert torch.equal(loss, expected)
    for a, b in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)
