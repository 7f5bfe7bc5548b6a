"""Convolution algorithms that PyTorch lets one choose on the device at hand, by the names of variants.

    cpu     onednn (its JIT kernels), im2col (PyTorch's own: patches as a matrix, then a product)
    cuda    cudnn (its heuristic), cudnn-benchmark (its search), cudnn-deterministic, native (without cuDNN). Untested: no such device was
            at hand

They are switches of the process, set around one call. Another algorithm gives other bits; so a schedule that names variants is compared
with eager under the same ones (`SameVariants`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vramlab.counted import count_of
from vramlab.errors import Unsupported
from vramlab.schedule import Compute, Schedule
from vramlab.split import is_data_half
from vramlab.tape import Op, Tape

ON = {"cpu": ("onednn", "im2col"), "cuda": ("cudnn", "cudnn-benchmark", "cudnn-deterministic", "native")}
Named = str | None | tuple[str | None, str | None]  # of a convolution in one op, or of (weight gradient, data gradient) in two
CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")


def has_algorithms(op: Op) -> bool:
    """Is it an operator whose algorithm can be chosen?"""
    return op.target in CONVOLUTIONS


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Convolutions inside run by this algorithm. Unsupported when PyTorch has no switch of that name."""
    if name in ON["cpu"]:
        before = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(name == "onednn")
        try:
            yield
        finally:
            torch._C._set_mkldnn_enabled(before)
        return
    if name not in ON["cuda"]:
        raise Unsupported(f"PyTorch cannot be told to convolve by '{name}'; on the CPU it knows {', '.join(ON['cpu'])}, "
                          f"on CUDA {', '.join(ON['cuda'])}")
    cudnn = torch.backends.cudnn
    before = cudnn.enabled, cudnn.benchmark, cudnn.deterministic
    cudnn.enabled, cudnn.benchmark = name != "native", name == "cudnn-benchmark"
    cudnn.deterministic = before[2] or name == "cudnn-deterministic"
    try:
        yield
    finally:
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = before


def by_algorithm(call: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    """The call, run by this algorithm; by the library's own choice where there is no name."""
    if name is None:
        return call
    with using(name):
        pass  # refuses a name that PyTorch does not know before anything runs

    def run(*args: Any, **kwargs: Any) -> Any:
        with using(name):
            return call(*args, **kwargs)

    return run


def named_variants(tape: Tape, schedule: Schedule) -> list[Named]:
    """Per convolution of eager, in its order: the variant that its first run names, of a backward in two ops those of both. Empty when the
    schedule names none."""
    named = {i.op: i.variant for i in schedule.instructions if isinstance(i, Compute) and i.variant is not None}
    found: list[Named] = []
    for op in tape.ops if named else ():
        if is_data_half(op):
            found.append((found.pop(), named.get(op.id)))
        elif has_algorithms(op):
            found.append(named.get(op.id))
    return found


def names_of(variants: Sequence[Named]) -> Iterator[str]:
    """Every name in there, halves one by one."""
    for named in variants:
        yield from filter(None, named if isinstance(named, tuple) else (named,))


class SameVariants(TorchDispatchMode):
    """Eager's convolutions, in the order in which they run, by the variants of a tape's convolutions in its order: the same order."""

    def __init__(self, variants: Sequence[Named]) -> None:
        super().__init__()
        self.variants, self.next, self.ran = variants, 0, Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func) not in CONVOLUTIONS:
            return func(*args, **kwargs)
        if self.next == len(self.variants):
            raise Unsupported("eager runs more convolutions than the plan; they cannot be told which algorithms the plan uses")
        name, self.next = self.variants[self.next], self.next + 1
        self.ran[name] += 1
        if isinstance(name, tuple) and len(set(name)) > 1:
            return _in_halves(func, args, name)
        return by_algorithm(func, name[0] if isinstance(name, tuple) else name)(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None and self.next < len(self.variants):
            raise Unsupported(f"eager ran {count_of(self.next, 'convolution')}, the plan has {len(self.variants)}")


def _in_halves(func: Any, args: Sequence[Any], names: tuple[str | None, str | None]) -> tuple[Any, Any, Any]:
    """A convolution's backward whose gradients of W and bias, and of x, come by two algorithms."""
    *rest, (wants_dx, wants_dw, wants_db) = args
    _, dw, db = by_algorithm(func, names[0])(*rest, [False, wants_dw, wants_db])
    dx, _, _ = by_algorithm(func, names[1])(*rest, [wants_dx, False, False])
    return dx, dw, db


def under_variants(eager: Callable[..., Any], variants: Sequence[Named]) -> Callable[..., Any]:
    """An eager step under the variants of a plan; as it is when the plan names none."""
    if not variants:
        return eager

    def run(*args: Any) -> Any:
        with SameVariants(variants):
            return eager(*args)

    return run
