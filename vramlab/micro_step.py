"""Steps over micro-batches with torch: captured as one tape, and plain eager PyTorch over the same micro-batches, their reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from vramlab.capture import Binding, Captured, LossFn, capture
from vramlab.errors import Unsupported
from vramlab.micro_batches import compose


def capture_passes(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batch: Sequence[Any],
    sizes: Sequence[int],
    *,
    with_gradient: frozenset[str] = frozenset(),
    optimizer: torch.optim.Optimizer | None = None,
    with_data: bool = False,
) -> Captured:
    """Capture the step that `eager_over_micro_batches` takes (and `optimizer.step()`). One size is captured once.

    A tensor whose first dimension is the batch is cut along it; everything else of the batch is given to each pass as it is. Raises
    CaptureError as `capture` does, and Unsupported where the batch cannot be cut.
    """
    batch_size = sum(sizes)
    refuse_batch(batch, batch_size)
    captures: dict[int, Captured] = {}
    for part, size in parts_of(batch, sizes):
        if size not in captures:
            weighted = _weighted(loss_fn, size / batch_size)
            captures[size] = capture(model, weighted, part, with_gradient=with_gradient, optimizer=optimizer, with_data=with_data)
    passes = [captures[size] for size in sizes]
    bound = passes[0].binding
    if any(captured.binding.inputs != bound.inputs for captured in passes):
        raise Unsupported("the passes over the micro-batches read their inputs in different ways")
    sliced = [t for t, value in zip(bound.inputs, batch) if t is not None and _is_cut(value, batch_size)]
    whole = compose([captured.tape for captured in passes], sliced)
    first, last = whole.tensor_of[0], whole.tensor_of[-1]
    return Captured(whole.tape, Binding(
        parameters={name: first[t] for name, t in bound.parameters.items()},
        buffers={name: first[t] for name, t in bound.buffers.items()},
        inputs=tuple(None if t is None else whole.whole_inputs.get(t, first[t]) for t in bound.inputs),
        constants={first[t]: value for t, value in bound.constants.items()},
        gradients={name: first[t] for name, t in bound.gradients.items()},
        optimizer_state=tuple(last[t] for t in passes[-1].binding.optimizer_state),
    ))


def eager_over_micro_batches(model: torch.nn.Module, loss_fn: LossFn, batch: Sequence[Any], sizes: Sequence[int]) -> torch.Tensor:
    """Forward and backward of each micro-batch, its loss weighted by its share of the batch; returns the sum of the weighted losses."""
    total = None
    for part, size in parts_of(batch, sizes):
        loss = loss_fn(model, *part) * (size / sum(sizes))
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    return total


def _weighted(loss_fn: LossFn, share: float) -> LossFn:
    def weighted(model: torch.nn.Module, *batch: Any) -> torch.Tensor:
        return loss_fn(model, *batch) * share

    return weighted


def parts_of(batch: Sequence[Any], sizes: Sequence[int]) -> Iterator[tuple[tuple[Any, ...], int]]:
    """The batch of each pass, and its size."""
    for start, size in zip(accumulate(sizes, initial=0), sizes):
        yield samples(batch, sum(sizes), start, start + size), size


def samples(batch: Sequence[Any], batch_size: int, start: int, stop: int) -> tuple[Any, ...]:
    """The batch of some consecutive samples: views. What is not cut is whole in each."""
    return tuple(value[start:stop] if _is_cut(value, batch_size) else value for value in batch)


def _is_cut(value: Any, batch_size: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == batch_size


def refuse_batch(batch: Sequence[Any], batch_size: int) -> None:
    """Unsupported where a batch cannot be cut into micro-batches."""
    first = next((value for value in batch if isinstance(value, torch.Tensor)), None)
    if first is None or not _is_cut(first, batch_size):
        raise Unsupported(f"the first tensor of the batch does not have {batch_size} samples, so that it cannot be cut into micro-batches")
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in batch):
        raise Unsupported("an input requires a gradient; a batch of such inputs is not cut into micro-batches")
