"""What the two runs of a checkpointed block do differently: which results are kept, and whether BatchNorm counts again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Operators whose results selective checkpointing keeps: those that take long to run again.
KEPT = ("convolution", "mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention")

Contexts = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]


def context_fn(model: torch.nn.Module, policy: str, once_only_statistics: bool) -> Contexts:
    """What `torch.utils.checkpoint` asks for at each block: the contexts of its first and of its second run."""

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        first, second = _selective() if policy == "selective" else (nullcontext(), nullcontext())
        return first, _both(_still_statistics(model), second) if once_only_statistics else second

    return contexts


def _selective() -> tuple[AbstractContextManager, AbstractContextManager]:
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    kept = {getattr(torch.ops.aten, name).default for name in KEPT if hasattr(torch.ops.aten, name)}

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@contextmanager
def _both(*contexts: AbstractContextManager) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def _still_statistics(model: torch.nn.Module) -> Iterator[None]:
    """BatchNorm runs as before, for checkpoint wants the same tensors saved; with momentum 0 its running statistics stay what they are."""
    from torch.nn.modules.batchnorm import _BatchNorm

    counting = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.num_batches_tracked is not None]
    before = [(m, m.momentum, m.num_batches_tracked.clone()) for m in counting]
    for module in counting:
        module.momentum = 0.0
    try:
        yield
    finally:
        for module, momentum, count in before:
            module.momentum = momentum
            module.num_batches_tracked.copy_(count)
