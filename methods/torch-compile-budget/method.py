"""PyTorch's compiler, whose partitioner recomputes within an activation memory budget.

    forward + loss ─► torch.compile(backend) ─► min-cut and knapsack partition ─► forward graph, backward graph
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vramlab.errors import Unsupported

if TYPE_CHECKING:
    import torch
UID = "36bbdde8b7bc421f"

Step = Callable[..., "torch.Tensor"]


def build(model: torch.nn.Module, loss_fn: Step, optimizer: torch.optim.Optimizer | None, activation_memory_budget: float = 0.5,
          backend: str = "aot_eager") -> Step:
    """`step(*batch)` adds the gradients of `loss_fn(model, *batch)` into `.grad` and returns the detached loss.

    The first call compiles. Raises Unsupported where the backend cannot compile here.
    """
    import torch
    import torch._functorch.config as functorch

    _refuse_without_compiler(model, backend)
    compiled = torch.compile(loss_fn, backend=backend, dynamic=False)

    def step(*batch: Any) -> torch.Tensor:
        with functorch.patch(activation_memory_budget=activation_memory_budget):
            loss = compiled(model, *batch)
            loss.backward()
        return loss.detach()

    return step


def _refuse_without_compiler(model: torch.nn.Module, backend: str) -> None:
    if backend != "inductor":
        return
    if any(p.is_cuda for p in model.parameters()):
        from torch.utils._triton import has_triton

        if not has_triton():
            raise Unsupported("torch-compile-budget: inductor needs Triton on a GPU, and there is none")
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise Unsupported("torch-compile-budget: inductor needs a C++ compiler, and there is none (apt install g++)") from None
