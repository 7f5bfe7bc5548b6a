"""What a training step may change: kept before it runs, put back afterwards, compared with what another run made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from vramlab.capture import Captured, input_name
from vramlab.tape import Phase

Named = dict[str, torch.Tensor]


def state_of(captured: Captured, model: torch.nn.Module, batch: Sequence[Any], *, written_only: bool = False) -> Named:
    """Parameters, buffers, inputs and the tensors that the step's code closes over. `written_only`: what forward and backward overwrite."""
    tape, binding = captured.tape, captured.binding
    found = [(name, binding.parameters[name], value) for name, value in model.named_parameters()]
    found += [(name, binding.buffers[name], value) for name, value in model.named_buffers()]
    found += [(input_name(i), tensor, value) for i, (tensor, value) in enumerate(zip(binding.inputs, batch)) if tensor is not None]
    found += [(tape.storages[tape.tensors[tensor].storage].name, tensor, value) for tensor, value in binding.constants.items()]
    written = {storage for op in tape.ops if op.phase is not Phase.OPTIMIZER for storage in op.mutates}
    return {name: value for name, tensor, value in found if not written_only or tape.tensors[tensor].storage in written}


def leaves_of(captured: Captured, model: torch.nn.Module, batch: Sequence[Any]) -> Named:
    """The parameters and inputs whose `.grad` a backward may set."""
    return {name: value for name, value in state_of(captured, model, batch).items() if value.requires_grad}


class Snapshot:
    """Copies, on the host, of tensors, of the gradients of leaves, of the generators' states, and of a loss."""

    def __init__(self, tensors: Named, leaves: Named, device: torch.device, loss: torch.Tensor | None = None) -> None:
        self._tensors, self._leaves, self._device = tensors, leaves, device
        self._values = {name: _on_host(value) for name, value in self._now(loss).items()}
        self._strides = {name: _strides(leaf) for name, leaf in leaves.items()}

    def restore(self) -> None:
        """Put everything back. Only what has changed is written, where it lies."""
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                _write(tensor, self._values[name])
            for name, leaf in self._leaves.items():
                value = self._values[f"{name}.grad"]
                if value is None or leaf.grad is None:
                    leaf.grad = None if value is None else value.to(self._device, copy=True)
                else:
                    _write(leaf.grad, value)
        torch.set_rng_state(self._values["the generator"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._values["the GPU's generator"], self._device)

    def distances(self, loss: torch.Tensor | None = None) -> dict[str, float]:
        """What is not bit for bit as it was, and the largest absolute difference: infinite for another form, strides or generator state."""
        values = {name: distance for name, now in self._now(loss).items() if (distance := _distance(self._values[name], now)) is not None}
        return values | {f"{name}.grad": math.inf for name, leaf in self._leaves.items() if _strides(leaf) != self._strides[name]}

    def _now(self, loss: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
        now = {"the loss": loss} | self._tensors | {f"{name}.grad": leaf.grad for name, leaf in self._leaves.items()}
        now["the generator"] = torch.get_rng_state()
        return now | ({"the GPU's generator": torch.cuda.get_rng_state(self._device)} if self._device.type == "cuda" else {})


def _on_host(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", copy=True)


def _strides(leaf: torch.Tensor) -> tuple[int, ...] | None:
    return None if leaf.grad is None else leaf.grad.stride()


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if not _is_same(value, tensor):
        tensor.detach().copy_(value)


def _is_same(then: torch.Tensor, now: torch.Tensor) -> bool:
    return (then.dtype, then.shape) == (now.dtype, now.shape) and torch.equal(_bits(then), _bits(now))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().to("cpu").contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # one expanded element is contiguous with stride 0


def _distance(then: torch.Tensor | None, now: torch.Tensor | None) -> float | None:
    """None where every bit is equal."""
    if then is None or now is None:
        return None if then is now else math.inf
    if _is_same(then, now):
        return None
    if then.shape != now.shape or then.dtype != now.dtype or not then.is_floating_point():
        return math.inf
    distance = (then.double() - now.detach().to("cpu").double()).abs().max().item()
    return math.inf if math.isnan(distance) else distance
