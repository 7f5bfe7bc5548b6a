"""From the JSON of an `Op` to a call of its operator, and back."""

from __future__ import annotations

from typing import Any, Callable, Mapping

import torch

_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_LAYOUTS = {str(v): v for v in (torch.strided, torch.sparse_coo, torch.sparse_csr)}
_FORMATS = {str(v): v for v in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Inverse of `dtype_name`. KeyError on an unknown name."""
    return _DTYPES[name]


def resolve(target: str) -> Callable[..., Any]:
    """`"aten.add.Tensor"` -> `torch.ops.aten.add.Tensor`. AttributeError when this torch has no such operator."""
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


# Kernels that look at the grad mode: eager runs them with it on, below autograd, and they keep more then.
_READS_GRAD_MODE = frozenset({"aten.mkldnn_rnn_layer.default"})


def inplace_twin(target: str, written: int) -> Callable[..., Any]:
    """The operator writing over its positional argument `written`: `aten.add_.Tensor` of `aten.add.Tensor`; of a backward its out= form.

    AttributeError when this torch has none.
    """
    namespace, name, overload = target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    if "grad_input" not in packet.overloads():
        return callable_of(f"{namespace}.{name}_.{overload}")

    def over(*args: Any, **kwargs: Any) -> torch.Tensor:
        return packet.grad_input(*args, **kwargs, grad_input=args[written])

    return over


def callable_of(target: str) -> Callable[..., Any]:
    """The operator as eager's backward-to-be runs it, to be called without autograd."""
    f = resolve(target)
    if target not in _READS_GRAD_MODE:
        return f

    def with_grad_mode(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            return f(*args, **kwargs)

    return with_grad_mode


def encode_arg(value: Any, tensor_id: Callable[[torch.Tensor], int]) -> Any:
    """An operator argument as a JSON tree; `tensor_id` names each tensor met. TypeError on what JSON cannot carry."""
    if isinstance(value, torch.Tensor):
        return {"tensor": tensor_id(value)}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else {"float": repr(value)}
    if isinstance(value, list | tuple):
        return [encode_arg(v, tensor_id) for v in value]
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for tag, kind in (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format)):
        if isinstance(value, kind):
            return {tag: dtype_name(value) if tag == "dtype" else str(value)}
    if isinstance(value, torch.device):
        return {"device": value.type}
    raise TypeError(f"an operator argument of type {type(value).__name__}")


def decode_arg(value: Any, lookup: Callable[[int], Any], device: torch.device) -> Any:
    """Inverse of `encode_arg`: `lookup` gives the object for a tensor id; devices become `device`, the CPU stays.

    `{"form": {"dtype", "shape", "strides"}}` stands for a tensor of which only the form is read.
    """
    if isinstance(value, list):
        return [decode_arg(v, lookup, device) for v in value]
    if not isinstance(value, Mapping):
        return value
    ((tag, body),) = value.items()
    if tag == "tensor":
        return lookup(body)
    if tag == "form":
        return _without_bytes(body, device)
    if tag == "float":
        return float(body)
    if tag == "complex":
        return complex(*body)
    if tag == "dtype":
        return dtype_of(body)
    if tag == "layout":
        return _LAYOUTS[body]
    if tag == "memory_format":
        return _FORMATS[body]
    return torch.device("cpu") if body == "cpu" else device


def _without_bytes(form: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """A tensor of this form whose storage is empty: torch refuses to read it. For an instant it has its bytes."""
    tensor = torch.empty_strided(form["shape"], form["strides"], dtype=dtype_of(form["dtype"]), device=device)
    tensor.untyped_storage().resize_(0)
    return tensor
