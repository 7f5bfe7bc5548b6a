"""PyTorch's own activation checkpointing, per block or selective, as a user would switch it on.

    forward of a block ─► torch.utils.checkpoint ─► backward runs the block again, then frees its insides
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .blocks import checkpointed
from .selection import context_fn

if TYPE_CHECKING:
    import torch
UID = "53a975d409c003bd"

Step = Callable[..., "torch.Tensor"]


def build(model: torch.nn.Module, loss_fn: Step, optimizer: torch.optim.Optimizer | None, policy: str = "block", block: str = "auto",
          once_only_statistics: bool = True) -> Step:
    """`step(*batch)` adds the gradients of `loss_fn(model, *batch)` into `.grad` and returns the detached loss.

    The model's forwards are replaced while a step runs and are its own again afterwards. Raises Unsupported where there is nothing to
    checkpoint.
    """
    contexts = context_fn(model, policy, once_only_statistics)

    def step(*batch: Any) -> torch.Tensor:
        with checkpointed(model, block, contexts):
            loss = loss_fn(model, *batch)
            loss.backward()
        return loss.detach()

    return step
