"""Plain PyTorch: the loss, its backward, nothing else. What every method is held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
UID = "83723f9080ed9857"


Step = Callable[..., "torch.Tensor"]


def build(model: torch.nn.Module, loss_fn: Step, optimizer: torch.optim.Optimizer | None) -> Step:
    """`step(*batch)` adds the gradients of `loss_fn(model, *batch)` into `.grad` and returns the detached loss.

    The optimizer is the caller's to step: eager manages no memory of its own.
    """

    def step(*batch: Any) -> torch.Tensor:
        loss = loss_fn(model, *batch)
        loss.backward()
        return loss.detach()

    return step
