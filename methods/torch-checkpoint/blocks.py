"""Which modules are checkpointed, and how their forwards are wrapped for the time of one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import isqrt
from typing import TYPE_CHECKING, Any

from vramlab.errors import Unsupported

if TYPE_CHECKING:
    import torch

LEAST_CHILDREN = 4  # of a Sequential that is worth cutting into segments

Forward = Callable[..., Any]


@contextmanager
def checkpointed(model: torch.nn.Module, block: str, contexts: Callable[[], Any]) -> Iterator[None]:
    """Within it, the forward of each block, or of each segment of a plain Sequential, runs under checkpoint."""
    with ExitStack() as stack:
        for module, forward in forwards(model, block, contexts).items():
            stack.enter_context(_replaced(module, forward))
        yield


@contextmanager
def _replaced(module: torch.nn.Module, forward: Forward) -> Iterator[None]:
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # the class's own shows again


def forwards(model: torch.nn.Module, block: str, contexts: Callable[[], Any]) -> dict[torch.nn.Module, Forward]:
    """Module -> the forward that it gets. Raises Unsupported where there is none to checkpoint."""
    from torch.nn import Sequential

    kinds = Counter(type(m) for m in model.modules() if m is not model and not type(m).__module__.startswith("torch.nn."))
    wanted = {kind for kind, n in kinds.items() if (n >= 2 if block == "auto" else kind.__name__ == block)}
    found = {m: _whole(m, contexts) for m in _outermost(model, wanted)}
    if not found and block == "auto":
        chains = [m for m in model.modules() if type(m) is Sequential and len(m) >= LEAST_CHILDREN]
        found = {m: _in_segments(m, contexts) for m in chains}
    if not found:
        names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "no classes of its own"
        raise Unsupported(f"torch-checkpoint finds no module to checkpoint (block: {block}); the model has {names}")
    return found


def _outermost(module: torch.nn.Module, wanted: set[type]) -> Iterator[torch.nn.Module]:
    for child in module.children():
        if type(child) in wanted:
            yield child
        else:
            yield from _outermost(child, wanted)


def _whole(module: torch.nn.Module, contexts: Callable[[], Any]) -> Forward:
    own = module.forward
    return lambda *args, **kwargs: _checkpoint(own, contexts, *args, **kwargs)


def _in_segments(chain: torch.nn.Sequential, contexts: Callable[[], Any]) -> Forward:
    """sqrt(n) segments of about equal length; the last keeps what it makes, for its backward comes first."""
    children = list(chain)
    length = -(-len(children) // isqrt(len(children)))
    segments = [children[i:i + length] for i in range(0, len(children), length)]

    def forward(x: Any) -> Any:
        for segment in segments[:-1]:
            x = _checkpoint(_run, contexts, segment, x)
        return _run(segments[-1], x)

    return forward


def _run(segment: list[torch.nn.Module], x: Any) -> Any:
    for module in segment:
        x = module(x)
    return x


def _checkpoint(function: Forward, contexts: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
