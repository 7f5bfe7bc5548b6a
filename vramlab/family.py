"""One training step at any batch size: two captures give the line that every number lies on, a third proves it.

A network that treats the samples of a batch alike has the same ops at every size, and each size, stride, offset, count of operations
and numeric argument is affine in the batch:

    family = TapeFamily.of(capture at 2, capture at 3)
    family.prove(capture at 5)       # NotAffine says where the step departs from the line; then capture each size instead
    tape = family.at(64)             # equal to a capture at 64, as far as the proof reaches

Op times and variants are no such numbers, so the tapes of a family have none: cost them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from vramlab.errors import VramlabError
from vramlab.tape import Op, Storage, Tape, Tensor

# What may differ between two sizes; everything else must be equal.
_NUMBERS: dict[type, tuple[str, ...]] = {
    Storage: ("nbytes",),
    Tensor: ("shape", "strides", "offset"),
    Op: ("args", "kwargs", "flops", "workspace_bytes"),
}
_DERIVED = ("reads", "creates", "producer", "readers", "read_versions")  # of a tape: they follow from what all sizes share


class NotAffine(VramlabError):
    """Two tapes are no two sizes of one family. `where` names the first op, tensor or storage that departs from it."""

    def __init__(self, where: str, reason: str) -> None:
        self.where, self.reason = where, reason
        super().__init__(f"the step is not affine in its batch size: {where}: {reason}")

    def __reduce__(self):
        return (type(self), (self.where, self.reason))


@dataclass(frozen=True, slots=True)
class Line:
    """A number: `at_zero + slope * batch_size`."""

    at_zero: int
    slope: int


@dataclass(frozen=True)
class TapeFamily:
    """A step at every batch size. `base` is the tape at the smaller size that it was made from, without op times."""

    base: Tape
    moving: tuple[tuple[str, int, dict[str, Any]], ...]  # (part of the tape, index there, field -> form of its value)

    @classmethod
    def of(cls, first: Tape, second: Tape) -> TapeFamily:
        """The family through two tapes of different batch sizes. Raises NotAffine where the two have different ops.

        At size 1 some operators lay out their results in another way; take larger ones.
        """
        low, high = sorted((_without_times(first), _without_times(second)), key=lambda tape: tape.batch_size)
        if low.batch_size == high.batch_size:
            raise ValueError(f"both tapes have batch size {low.batch_size}")
        return cls(low, tuple(_differences(low, high)))

    def at(self, batch_size: int) -> Tape:
        """The tape at this size, op times zero. ValueError below 1."""
        if batch_size < 1:
            raise ValueError(f"a batch has at least one sample, not {batch_size}")
        parts: dict[str, list[Any]] = {name: list(getattr(self.base, name)) for name in ("storages", "tensors", "ops")}
        for part, index, forms in self.moving:
            parts[part][index] = replace(parts[part][index], **{name: _value(form, batch_size) for name, form in forms.items()})
        tape = replace(self.base, batch_size=batch_size, **{name: tuple(items) for name, items in parts.items()})
        for name in _DERIVED:
            tape.__dict__[name] = getattr(self.base, name)
        return tape

    def prove(self, capture: Tape) -> None:
        """Hold the family against a true capture at a further size; NotAffine names the first difference."""
        found, wanted = _without_times(capture), self.at(capture.batch_size)
        _compare_heads(wanted, found)
        for part, index, one, other in _pairs(wanted, found):
            if one != other:
                names = [f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)]
                raise NotAffine(_name(found, part, index), f"{', '.join(names)} at batch {capture.batch_size} is not what the sizes "
                                f"before foretell: {getattr(other, names[0])!r} instead of {getattr(one, names[0])!r}")


def tapes_by_size(capture: Callable[[int], Tape], proof_size: int) -> Callable[[int], Tape]:
    """The tape at any batch size: from a family of captures at 2 and 3, where one at `proof_size` proves it, else from a capture each.

    Op times are not in it. A single sample is captured in any case: some operators lay out their results in another way there.
    """
    captured = cache(lambda size: _without_times(capture(size)))
    if proof_size <= 3:
        return captured
    try:
        family = TapeFamily.of(captured(2), captured(3))
        family.prove(captured(proof_size))
    except NotAffine:
        return captured
    return lambda size: captured(1) if size == 1 else family.at(size)


def _without_times(tape: Tape) -> Tape:
    return replace(tape, ops=tuple(replace(op, seconds=0.0, variants=()) if op.seconds or op.variants else op for op in tape.ops))


def _compare_heads(first: Tape, second: Tape) -> None:
    for name in ("ops", "tensors", "storages"):
        counts = len(getattr(first, name)), len(getattr(second, name))
        if counts[0] != counts[1]:
            differing = (i for i, (a, b) in enumerate(zip(first.ops, second.ops)) if a.target != b.target)
            op = next(differing, min(len(first.ops), len(second.ops)) - 1)
            raise NotAffine(second.op_name(op), f"{counts[0]} {name} at batch {first.batch_size}, {counts[1]} at {second.batch_size}")
    if (first.loss, first.device_type) != (second.loss, second.device_type):
        raise NotAffine("the loss", "another tensor, or another kind of device")


def _pairs(first: Tape, second: Tape) -> Iterator[tuple[str, int, Any, Any]]:
    for part in ("ops", "tensors", "storages"):
        for index, (one, other) in enumerate(zip(getattr(first, part), getattr(second, part))):
            yield part, index, one, other


def _differences(low: Tape, high: Tape) -> Iterator[tuple[str, int, dict[str, Any]]]:
    _compare_heads(low, high)
    for part, index, one, other in _pairs(low, high):
        if one == other:
            continue
        forms: dict[str, Any] = {}
        for field in fields(one):
            values = getattr(one, field.name), getattr(other, field.name)
            if values[0] == values[1]:
                continue
            form = _form(*values, low.batch_size, high.batch_size) if field.name in _NUMBERS[type(one)] else None
            if form is None:
                raise NotAffine(_name(high, part, index), f"{field.name} is {values[0]!r} at batch {low.batch_size} and {values[1]!r} at "
                                f"{high.batch_size}")
            forms[field.name] = form
        yield part, index, forms


def _name(tape: Tape, part: str, index: int) -> str:
    if part == "ops":
        return tape.op_name(index)
    return tape.storage_name(index if part == "storages" else tape.tensors[index].storage)


def _form(low: Any, high: Any, small: int, large: int) -> Any:
    """A value with lines in place of the numbers that move; None where the two are no two points of lines."""
    if type(low) is type(high) and low == high:
        return low
    if isinstance(low, list | tuple) and type(low) is type(high) and len(low) == len(high):
        parts = [_form(a, b, small, large) for a, b in zip(low, high)]
        is_whole = all(part is not None or a is b is None for part, a, b in zip(parts, low, high))
        return type(low)(parts) if is_whole else None
    if isinstance(low, dict) and isinstance(high, dict) and list(low) == list(high) and "tensor" not in low and "fresh" not in low:
        forms = {key: _form(low[key], high[key], small, large) for key in low}
        return forms if all(form is not None or low[key] is None for key, form in forms.items()) else None
    if type(low) is int and type(high) is int:
        slope, rest = divmod(high - low, large - small)
        return None if rest else Line(low - slope * small, slope)
    return None


def _value(form: Any, batch_size: int) -> Any:
    if isinstance(form, Line):
        return form.at_zero + form.slope * batch_size
    if isinstance(form, list | tuple):
        return type(form)(_value(part, batch_size) for part in form)
    if isinstance(form, dict):
        return {key: _value(part, batch_size) for key, part in form.items()}
    return form
