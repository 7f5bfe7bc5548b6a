"""PyTorch's own offloading: saved tensors live on the host between forward and backward.

    autograd saves x ─► copy to the host ─► ... ─► backward asks for x ─► copy to the device
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vramlab.errors import Unsupported

if TYPE_CHECKING:
    import torch
UID = "1273a7bdf35a9a94"

Step = Callable[..., "torch.Tensor"]


def build(model: torch.nn.Module, loss_fn: Step, optimizer: torch.optim.Optimizer | None, least_bytes: int = 0) -> Step:
    """`step(*batch)` adds the gradients of `loss_fn(model, *batch)` into `.grad` and returns the detached loss.

    Raises Unsupported where the model is not on a GPU. Not yet run on one.
    """
    if not any(p.is_cuda for p in model.parameters()):
        raise Unsupported("torch-offload needs a GPU: on a CPU the saved tensors are on the host already")
    hooks = _hooks(least_bytes)

    def step(*batch: Any) -> torch.Tensor:
        with hooks():
            loss = loss_fn(model, *batch)
        loss.backward()
        return loss.detach()

    return step


def _hooks(least_bytes: int) -> Callable[[], Any]:
    from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

    if least_bytes == 0:
        return lambda: save_on_cpu(pin_memory=True)
    plain = save_on_cpu(pin_memory=True)
    return lambda: saved_tensors_hooks(
        lambda x: plain.pack_hook(x) if x.nbytes >= least_bytes else x,
        lambda kept: plain.unpack_hook(kept) if isinstance(kept, tuple) else kept,
    )
