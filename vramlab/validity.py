"""What a capture is valid for, read anew at every call of a training step, in well under a millisecond.

Batch: shapes, dtypes, strides, devices, what requires or has a gradient. Modules: which, their modes, scalar attributes, hooks.
Parameters and buffers: forms, ties, what is frozen, what has a gradient. Python: what the code of the step reads by name. Settings of
torch: those that choose operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch

from vramlab.python_state import PLAIN, Scope, comparable

_hooks = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_global_hooks = [
    getattr(torch.nn.modules.module, f"_global_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre")
]
_BOOKKEEPING = frozenset(
    """_parameters _buffers _modules _forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _forward_hooks_with_kwargs
    _forward_hooks_always_called _forward_pre_hooks_with_kwargs _non_persistent_buffers_set _state_dict_hooks _state_dict_pre_hooks
    _load_state_dict_pre_hooks _load_state_dict_post_hooks _flat_weights _flat_weight_refs""".split()
)


class Stale(Exception):
    """A module or an attribute has come, gone, or changed its kind since the `Validity` was made."""


class Validity:
    """Knows where to look. `key` is equal for two calls only where one capture is right for both."""

    def __init__(self, model: torch.nn.Module, loss_fn: Callable, device: torch.device) -> None:
        self.model, self.device = model, device
        self.modules = list(_modules(model))
        self._scope = Scope(model, loss_fn)
        self._attributes = [_Attributes(vars(module)) for module in [*self.modules, *self._scope.modules]]

    def key(self, batch: Sequence[Any]) -> tuple:
        """Hashable. Raises Stale when a new `Validity` must be made first."""
        if list(_modules(self.model)) != self.modules:
            raise Stale
        key = (
            _batch_form(batch),
            [attributes.read() for attributes in self._attributes],
            _state_form(self.modules),
            [(comparable(t), t.requires_grad) for m in self._scope.modules for t in _tensors(m)],
            self._scope.values(),
            _settings(self.device),
        )
        try:
            return _Key(tuple(map(tuple, key)))
        except TypeError:  # a tuple that held numbers holds something unhashable now
            raise Stale from None


class _Attributes:
    """The attributes of one module. Plain ones are read at once; their types, and how many attributes there are, must stay."""

    __slots__ = ("entries", "size", "read_plain", "types", "others")

    def __init__(self, entries: dict[str, Any]) -> None:
        names = [name for name in entries if name not in _BOOKKEEPING]
        plain = [name for name in names if _is_plain(entries[name])]
        self.entries, self.size = entries, len(entries)
        self.read_plain = itemgetter("training", "training", *plain)  # at least two names, so that a tuple comes back
        self.types = tuple(map(type, self.read_plain(entries)))
        self.others = [name for name in names if name not in plain]

    def read(self) -> tuple:
        entries = self.entries
        try:
            plain = self.read_plain(entries)
            others = [comparable(entries[name]) for name in self.others]
        except KeyError:
            raise Stale from None
        if len(entries) != self.size or tuple(map(type, plain)) != self.types:
            raise Stale
        return self.types, plain, tuple(others), any(_hooks(entries))


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or type(value) is tuple and all(map(_is_plain, value))


class _Key(tuple):
    """A tuple that computes its hash once."""

    def __init__(self, _values: tuple) -> None:
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


def _modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Every module once. (`nn.Module.modules` takes three times as long.)"""
    seen, waiting = {model}, [model]
    while waiting:
        module = waiting.pop()
        yield module
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from (t for t in module._parameters.values() if t is not None)
    yield from (t for t in module._buffers.values() if t is not None)


def _batch_form(batch: Sequence[Any]) -> tuple:
    """Forms of the inputs, and which of them show the same memory."""
    memory = [v.untyped_storage()._cdata for v in batch if isinstance(v, torch.Tensor)]
    forms = [_form(v) if isinstance(v, torch.Tensor) else comparable(v) for v in batch]
    return *forms, *map(memory.index, memory)


def _state_form(modules: Sequence[torch.nn.Module]) -> list:
    """Forms of all parameters and buffers by place, and which places hold the same tensor."""
    parameters = [p for m in modules for p in m._parameters.values()]
    buffers = [b for m in modules for b in m._buffers.values()]
    places: dict[int, int] = {}
    ties = [places.setdefault(id(t), i) for i, t in enumerate([*parameters, *buffers])]
    forms = [p if p is None else _form(p) for p in parameters]
    return forms + [b if b is None else (b.shape, b.dtype, b.stride(), b.device) for b in buffers] + ties


def _form(tensor: torch.Tensor) -> tuple:
    """Of a parameter or an input."""
    needs = tensor.requires_grad
    grad = tensor.grad if needs and tensor.is_leaf else None
    hooks = tensor._backward_hooks or tensor._post_accumulate_grad_hooks
    return (
        tensor.shape,
        tensor.dtype,
        tensor.stride(),
        tensor.device,
        needs,
        needs and tensor.is_leaf,
        grad if grad is None else grad.stride(),
        bool(hooks),
    )


def _settings(device: torch.device) -> tuple:
    """What of torch's global state decides which operators run."""
    kind, backends = device.type, torch.backends
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        backends.mkldnn.enabled,
        backends.cudnn.enabled,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        any(_global_hooks),
    )
