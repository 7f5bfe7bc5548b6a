"""Is a loss a mean over the samples of its batch? Asked of data, before a plan over micro-batches runs.

A few samples, and the two halves of them, go through the forward. What couples samples by intent is taken out first, so that it hides
nothing: batch normalisation uses in the halves the statistics that it used in the whole, and draws are replaced by their expectations.
Then the loss of the whole must be that of the halves, each weighted by its share, to rounding. A sum is not, nor a mean over what a mask
lets through, nor that of a model that runs along the dimension that was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vramlab.against_eager import Distance
from vramlab.batch_mean import Divisor, data_divisors
from vramlab.capture import Captured, LossFn, draws
from vramlab.errors import Unsupported
from vramlab.micro_step import parts_of, samples
from vramlab.ops import dtype_of
from vramlab.snapshot import Snapshot, leaves_of, state_of
from vramlab.tape import Tape

MOST_SAMPLES = 2  # in each of the two halves: batch normalisation wants more than one
_NO_MEAN = "the loss is no mean over the batch, so that it cannot be taken over micro-batches"
_REMEDY = "use a loss that is one, or leave the batch whole (of modnn: sub_batches=False)"


def rounding_of(tape: Tape) -> float:
    """The relative distance that counts as rounding: the square root of the spacing of the coarsest floating-point type."""
    floats = [dtype for dtype in map(dtype_of, {t.dtype for t in tape.tensors}) if dtype.is_floating_point]
    return math.sqrt(max(torch.finfo(dtype).eps for dtype in floats))


def divisors_of_passes(model: torch.nn.Module, loss_fn: LossFn, batch: Sequence[Any], sizes: Sequence[int],
                       whole: Captured) -> tuple[tuple[int, Divisor], ...]:
    """What inputs decide of the loss, with their places in the batch. Unsupported where the loss may not be taken over passes of these
    sizes: by the tape of the step over the whole batch, by this batch's values, or by the losses of a few of its samples.
    """
    divisors = tuple((whole.binding.inputs.index(divisor.input), divisor) for divisor in data_divisors(whole.tape))
    refuse_uneven(divisors, batch, sizes)
    refuse_unless_mean(model, loss_fn, batch, sizes, whole)
    return divisors


def refuse_unless_mean(model: torch.nn.Module, loss_fn: LossFn, batch: Sequence[Any], sizes: Sequence[int], captured: Captured) -> None:
    """Unsupported where the loss is no mean over samples. Runs forwards of a few of them; state and generators are as before."""
    first = min(MOST_SAMPLES, sizes[0])
    counts = first, min(first, sum(sizes) - first)
    before = Snapshot(state_of(captured, model, batch, written_only=True), leaves_of(captured, model, batch),
                      torch.device(captured.tape.device_type))
    known: list[tuple[torch.Tensor, torch.Tensor]] = []

    def loss_of(start: int, stop: int) -> float:
        with _SamplesApart(known):
            return loss_fn(model, *samples(batch, sum(sizes), start, stop)).item()

    try:
        whole = loss_of(0, sum(counts))
        halves = loss_of(0, counts[0]), loss_of(counts[0], sum(counts))
    except (RuntimeError, ValueError, IndexError) as wrong:
        raise Unsupported(f"the batch cannot be cut into micro-batches: with {sum(counts)} samples the step fails ({wrong})") from wrong
    finally:
        before.restore()
    weighted = [loss * count / sum(counts) for loss, count in zip(halves, counts)]
    if not abs(whole - sum(weighted)) <= rounding_of(captured.tape) * max(abs(whole), sum(map(abs, weighted))):
        raise Unsupported(f"{_NO_MEAN}: over {sum(counts)} samples it is {whole:.6g}, and over {counts[0]} and {counts[1]} of them, each "
                          f"weighted by its share, {sum(weighted):.6g}; {_REMEDY}")


def refuse_beyond_rounding(distance: Distance, tape: Tape) -> None:
    """Unsupported where a step in which no sample should know of another one is not that of the whole batch."""
    if not distance.is_rounding(rounding_of(tape)):
        raise Unsupported(f"over micro-batches the step is another one than over the whole batch, beyond rounding: the loss is off by "
                          f"{distance.loss:.3g}, the gradient by {distance.gradient:.3g} of its norm; {_REMEDY}")


def refuse_uneven(divisors: Sequence[tuple[int, Divisor]], batch: Sequence[Any], sizes: Sequence[int]) -> None:
    """Unsupported where a divisor that an input decides is not in each pass its share. `divisors`: with the place of their input.

    Reads the input's values: on a GPU it waits for them.
    """
    for place, divisor in divisors:
        found = [_value(divisor, part[place]) / size for part, size in parts_of(batch, sizes)]
        if any(not math.isclose(one, found[0], rel_tol=1e-6) for one in found):
            what = {"unlike": f"elements other than {divisor.value}", "like": f"elements {divisor.value}", "sum": "total"}[divisor.counts]
            raise Unsupported(f"{_NO_MEAN}: it divides by the {what} of input {place}, and a sample of the {len(found)} passes has "
                              f"{min(found):.4g} to {max(found):.4g} of them; {_REMEDY}")


def _value(divisor: Divisor, values: torch.Tensor) -> float:
    if divisor.counts == "sum":
        return float(values.sum())
    return float(((values == divisor.value) == (divisor.counts == "like")).sum())


# --- samples that know nothing of each other --------------------------------------------------------------------------------
_HALF, _ZERO = 0.5, 0.0
_EXPECTED: dict[str, Callable[..., Any]] = {
    "aten.bernoulli_.float": lambda x, p=0.5, **_: x.fill_(p),
    "aten.bernoulli.default": lambda x, **_: x.clone(),
    "aten.bernoulli.p": lambda x, p=0.5, **_: torch.full_like(x, p),
    "aten.native_dropout.default": lambda x, _p, _train=True: (x.clone(), torch.ones_like(x, dtype=torch.bool)),
    "aten.uniform_.default": lambda x, low=0.0, high=1.0, **_: x.fill_((low + high) / 2),
    "aten.normal_.default": lambda x, mean=0.0, _std=1.0, **_: x.fill_(mean),
    "aten.rand_like.default": lambda x, **_: torch.full_like(x, _HALF),
    "aten.randn_like.default": lambda x, **_: torch.full_like(x, _ZERO),
    "aten.rand.default": lambda shape, **options: torch.full(shape, _HALF, **options),
    "aten.randn.default": lambda shape, **options: torch.full(shape, _ZERO, **options),
}
_BATCH_NORMS = frozenset({"aten.native_batch_norm.default", "aten.cudnn_batch_norm.default", "aten.miopen_batch_norm.default",
                          "aten._native_batch_norm_legit.default"})


class _SamplesApart(TorchDispatchMode):
    """`statistics`: of the batch normalisations, in order; filled by the first run, used by later ones."""

    def __init__(self, statistics: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.statistics, self.is_first, self.next = statistics, not statistics, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target, kwargs = str(func), kwargs or {}
        if target in _BATCH_NORMS and args[5]:
            return self._normalise(*args[:3], args[7])[:len(func._schema.returns)]
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        if target in _EXPECTED:
            return _EXPECTED[target](*args, **kwargs)
        arguments = [a.name for a in func._schema.arguments]
        if "dropout_p" not in arguments:
            raise Unsupported(f"whether the loss is a mean over the batch cannot be told: {target} draws random numbers; {_REMEDY}")
        place = arguments.index("dropout_p")
        if place < len(args):
            return func(*args[:place], 0.0, *args[place + 1:], **kwargs)
        return func(*args, **kwargs | {"dropout_p": 0.0})

    def _normalise(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> tuple:
        """Instance normalisation is one over a batch of one that has a channel for each channel of each sample."""
        wide, form = x.float(), (1, -1, *(1,) * (x.dim() - 2))
        if self.is_first or self.statistics[self.next][0].numel() != x.shape[1]:
            found = torch.var_mean(wide, [d for d in range(x.dim()) if d != 1], correction=0)
        else:
            found = self.statistics[self.next]
        if self.is_first:
            self.statistics.append(found)
        self.next += 1
        scale = torch.rsqrt(found[0] + eps)
        y = (wide - found[1].view(form)) * scale.view(form)
        y = y if weight is None else y * weight.view(form)
        y = y if bias is None else y + bias.view(form)
        return y.to(x.dtype), found[1], scale, x.new_empty(0, dtype=torch.uint8)
