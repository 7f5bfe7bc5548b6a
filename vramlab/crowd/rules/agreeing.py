"""When a claimed number is the derived one: whole numbers and words exactly, others to nine digits."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose
from typing import Any, Mapping

from vramlab.crowd.rules.asking import Fault

RELATIVE, ABSOLUTE = 1e-9, 1e-12  # what sums of doubles may differ by from machine to machine
_ABSENT = object()


def agree(claimed: Any, derived: Any) -> bool:
    """Whether two values of JSON say the same."""
    return next(disagreements("", claimed, derived), None) is None


def disagreements(where: str, claimed: Any, derived: Any) -> Iterator[Fault]:
    """One fault for each leaf of `derived` that is claimed to be something else, and for what is claimed beside it in an object."""
    if isinstance(derived, Mapping) and isinstance(claimed, Mapping):
        for key in dict.fromkeys([*derived, *claimed]):
            yield from disagreements(f"{where}.{key}", claimed.get(key, _ABSENT), derived.get(key, _ABSENT))
    elif isinstance(derived, list | tuple) and isinstance(claimed, list | tuple) and len(derived) == len(claimed):
        for index, (a, b) in enumerate(zip(claimed, derived)):
            yield from disagreements(f"{where}.{index}", a, b)
    elif not _is_same(claimed, derived):
        yield where, f"{_shown(claimed)} is claimed; it comes to {_shown(derived)}"


def _is_same(claimed: Any, derived: Any) -> bool:
    if isinstance(claimed, float) or isinstance(derived, float):
        is_number = [isinstance(x, int | float) and not isinstance(x, bool) for x in (claimed, derived)]
        return all(is_number) and isclose(claimed, derived, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return type(claimed) is type(derived) and claimed == derived


def _shown(value: Any) -> str:
    text = "nothing" if value is _ABSENT or value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
