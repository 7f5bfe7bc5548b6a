"""A model and its twin: plain eager PyTorch takes one, `vramlab.train_step` the other; after every call all bits are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

import vramlab
from vramlab.algorithms import named_variants, under_variants
from vramlab.errors import PlanInfeasible

CLASSES = 5


def conv_net() -> nn.Sequential:
    """Convolutions whose activations outweigh the parameters, BatchNorm, dropout, in-place ops."""
    layers: list[nn.Module] = []
    for i, (inner, outer) in enumerate([(3, 8), (8, 8), (8, 8), (8, 16), (16, 16)]):
        layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace=i % 2 == 0)]
        layers += [nn.Dropout2d(0.2)] if i == 2 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, CLASSES))


def transformer() -> nn.Module:
    """Two encoder layers with dropout."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def mean_square(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    return (model(*inputs).float() ** 2).mean()


def images(n: int = 12, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, y): n images of 16 x 16 and their classes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 16, 16, generator=generator), torch.randint(CLASSES, (n,), generator=generator)


def sequences(n: int = 6, seed: int = 1) -> tuple[torch.Tensor]:
    """(x,): n sequences of 24 vectors."""
    return (torch.randn(n, 24, 32, generator=torch.Generator().manual_seed(seed)),)


def step_of(make: Callable[[], nn.Module], loss_fn: Callable, batch: tuple, *, make_optimizer: Callable | None = None, **options: Any):
    """A `train_step` on a new module."""
    model = make()
    optimizer = make_optimizer(model.parameters()) if make_optimizer else None
    return vramlab.train_step(model, loss_fn, batch, optimizer=optimizer, **options)


def least_budget(make: Callable[[], nn.Module], loss_fn: Callable, batch: tuple, **options: Any) -> PlanInfeasible:
    """What a method says of a budget of one byte."""
    try:
        step_of(make, loss_fn, batch, budget=1, **options)
    except PlanInfeasible as refused:
        return refused
    raise AssertionError("one byte is enough")


def budget_between(share: float, make: Callable[[], nn.Module], loss_fn: Callable, batch: tuple, **options: Any) -> int:
    """Bytes: `share` of the way from the least that the method can reach to what eager holds."""
    least = least_budget(make, loss_fn, batch, **options).smallest_bytes
    most = step_of(make, loss_fn, batch, method="replay", budget=None, make_optimizer=options.get("make_optimizer")).predicted.peak_bytes
    return least + int(share * (most - least))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def twin(batch: Any) -> Any:
    """The same batch in memory of its own."""
    return tree_map(lambda v: v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v, batch)


def bits(value: torch.Tensor | None) -> Any:
    """All that must be equal of a tensor."""
    if value is None:
        return None
    dense = value.detach().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # one expanded element is contiguous with stride 0
    return value.dtype, tuple(value.shape), value.stride(), flat.view(torch.uint8).numpy().tobytes()


class Pair:
    """`call` runs both sides on equal batches with equal generators and asserts that all bits are equal; `both` does something to each.

    `loss_fn` is one function for both sides, or (eager's, the tested one's) where it holds state. `options` go to `train_step`.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        loss_fn: Callable | tuple[Callable, Callable],
        batch: tuple,
        make_optimizer: Callable[[Any], torch.optim.Optimizer] = momentum,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.eager = make()
        self.tested = copy.deepcopy(self.eager)
        self.losses = loss_fn if isinstance(loss_fn, tuple) else (loss_fn, loss_fn)
        self.optimizers = [make_optimizer(model.parameters()) for model in (self.eager, self.tested)]
        self.step = vramlab.train_step(self.tested, self.losses[1], batch, **options)

    def both(self, change: Callable[[nn.Module], Any]) -> None:
        """Change both models alike."""
        for model in (self.eager, self.tested):
            change(model)

    def update(self, **zero_grad: Any) -> None:
        """The optimizer's step and `zero_grad` on both sides."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(**zero_grad)

    def call(self, *batch: Any) -> torch.Tensor:
        """Forward and backward on both sides; the tested side's loss."""
        return self.call_with(twin(batch), twin(batch))

    def _eager_under_the_plans_algorithms(self, batch: tuple) -> torch.Tensor:
        """Plain eager where the plan names no convolution algorithm; another algorithm has other bits."""
        def eager() -> torch.Tensor:
            loss = self.losses[0](self.eager, *batch)
            loss.backward()
            return loss

        return under_variants(eager, named_variants(self.step.tape, self.step.schedule))()

    def call_with(self, eager_batch: tuple, tested_batch: tuple) -> torch.Tensor:
        """`call` with batches that the caller keeps."""
        start = torch.get_rng_state()
        loss = self._eager_under_the_plans_algorithms(eager_batch)
        end = torch.get_rng_state()
        torch.set_rng_state(start)
        tested = self.step(*tested_batch)
        expected = self._values(self.eager, loss, eager_batch) | {"generator": bits(end)}
        found = self._values(self.tested, tested, tested_batch) | {"generator": bits(torch.get_rng_state())}
        assert [name for name in expected if expected[name] != found[name]] == []
        assert not tested.requires_grad
        return tested

    @staticmethod
    def _values(model: nn.Module, loss: torch.Tensor, batch: tuple) -> Mapping[str, Any]:
        inputs = [value for value in tree_flatten(batch)[0] if isinstance(value, torch.Tensor)]
        values = {"loss": loss} | {f"{n}.grad": p.grad for n, p in model.named_parameters()}
        values |= dict(model.named_buffers()) | dict(model.named_parameters())
        values |= {f"input {i}": x for i, x in enumerate(inputs)}
        values |= {f"input {i}.grad": x.grad for i, x in enumerate(inputs) if x.is_leaf}
        return {name: bits(value) for name, value in values.items()}
