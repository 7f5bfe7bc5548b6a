"""One planned step held against plain eager PyTorch, on the caller's own state, batch and generator: one step is taken in the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vramlab.capture import Captured, LossFn
from vramlab.errors import WrongResult
from vramlab.micro_step import parts_of
from vramlab.prepare import free_bytes
from vramlab.record import Truth
from vramlab.snapshot import Snapshot, leaves_of, state_of
from vramlab.tape import Role, Tape

NOISE_FACTOR = 10  # one sample of eager's distance from itself says the size of its noise to within this

Step = Callable[[], torch.Tensor]  # takes one step and returns the loss


def step_against_eager(
    step: Step, eager: Step, captured: Captured, model: torch.nn.Module, batch: Sequence[Any], device: torch.device
) -> tuple[torch.Tensor, Truth]:
    """Run eager, put everything back, run the step, compare bit for bit. The step's loss, and `exact` or `within_noise`.

    Values that differ are held against a second run of eager: where eager differs from itself as much, that is noise of its kernels.
    Otherwise WrongResult, and all is as it was before. Nothing of eager's runs stays alive. Needs eager's memory, and on the host copies
    of the state.
    """
    places = state_of(captured, model, batch), leaves_of(captured, model, batch), device
    before = Snapshot(*places)
    try:
        with _steady_kernels():
            expected = Snapshot(*places, _detached(eager))
            before.restore()
            loss = step()
            distances = expected.distances(loss)
            if distances:
                found = Snapshot(*places)
                before.restore()
                _refuse_beyond_noise(distances, expected.distances(_detached(eager)))
                found.restore()
    except BaseException:
        before.restore()
        raise
    return loss, Truth.WITHIN_NOISE if distances else Truth.EXACT


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far eager over micro-batches is from eager over the whole batch, after one step from the same state and generator."""

    loss: float  # absolute
    gradient: float  # norm of the difference of all gradients, over that of the whole batch's
    whole_loss: float
    gradient_of_passes: float  # the sum of the norms of the passes' weighted gradients, over that of the whole batch's

    def is_rounding(self, relative: float) -> bool:
        """No more than this share of the loss and of the gradients of the passes, which may cancel in their sum."""
        return self.loss <= relative * abs(self.whole_loss) and self.gradient <= relative * max(1.0, self.gradient_of_passes)


def distance_to_whole_batch(
    captured: Captured, model: torch.nn.Module, loss_fn: LossFn, batch: Sequence[Any], sizes: Sequence[int], device: torch.device
) -> Distance:
    """Both take a step from where things are, and everything is put back. Needs eager's memory for the whole batch."""
    leaves = leaves_of(captured, model, batch)
    before = Snapshot(state_of(captured, model, batch), leaves, device)
    try:
        with _steady_kernels():
            ((whole_loss, whole),) = _gradients(model, loss_fn, batch, (sum(sizes),), leaves)
            before.restore()
            passes = list(_gradients(model, loss_fn, batch, sizes, leaves))
    finally:
        before.restore()
    loss, gradient = sum(loss for loss, _ in passes), sum(gradient for _, gradient in passes)
    norm = float(whole.norm()) or 1.0
    return Distance(loss=abs(loss - whole_loss), gradient=float((gradient - whole).norm()) / norm, whole_loss=whole_loss,
                    gradient_of_passes=sum(float(gradient.norm()) for _, gradient in passes) / norm)


def _gradients(model: torch.nn.Module, loss_fn: LossFn, batch: Sequence[Any], sizes: Sequence[int],
               leaves: Mapping[str, torch.Tensor]) -> Iterator[tuple[float, torch.Tensor]]:
    """Per pass: its weighted loss, and its gradients as one vector on the host, in double precision."""
    for part, size in parts_of(batch, sizes):
        for leaf in leaves.values():
            leaf.grad = None

        def step(part: tuple[Any, ...] = part, share: float = size / sum(sizes)) -> torch.Tensor:
            loss = loss_fn(model, *part) * share
            loss.backward()
            return loss

        loss = _detached(step).item()
        found = [torch.zeros(leaf.shape) if leaf.grad is None else leaf.grad.detach() for leaf in leaves.values()]
        yield loss, torch.cat([gradient.to("cpu", torch.float64).flatten() for gradient in found])


def eager_fits(tape: Tape, eager_peak_bytes: int, device: torch.device) -> bool:
    """Is there memory for eager's step and the copies that comparing needs: what the step starts with, and what it makes of it?"""
    kept = [s for s in tape.storages if s.role is not Role.OPTIMIZER_STATE]
    copies = sum(s.nbytes * (s.at_start + s.at_end) for s in kept)
    beyond_state = eager_peak_bytes - sum(s.nbytes for s in tape.storages if s.at_start)
    if device.type == "cpu":
        return beyond_state + copies <= free_bytes("cpu")
    return beyond_state <= free_bytes(device.type) and copies <= free_bytes("cpu")


def _detached(eager: Step) -> torch.Tensor:
    """Run eager and keep its loss only."""
    loss = eager().detach()
    torch.clear_autocast_cache()  # inside a region of the caller's it would keep casts of the weights
    return loss


def _refuse_beyond_noise(distances: Mapping[str, float], noise: Mapping[str, float]) -> None:
    wrong = [name for name, distance in distances.items() if not distance <= NOISE_FACTOR * noise.get(name, 0.0)]
    if wrong:
        raise WrongResult(tuple(wrong))


@contextlib.contextmanager
def _steady_kernels() -> Iterator[None]:
    """cuDNN's deterministic kernels, without a search for fast ones. Which operators run stays as it is."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
