"""JSON from strangers: read strictly, written canonically.

Strict: UTF-8, no key twice, no NaN or Infinity (also not as 1e999), no integer beyond 64 bits, no lone surrogate and no NUL in a text,
bounded in bytes and depth. Canonical: RFC 8785, so that equal bodies have equal bytes, which is what is signed and hashed.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from vramlab.errors import BundleRefused

LARGEST_JSON_BYTES = 2**24
DEEPEST_JSON = 64
LARGEST_INTEGER = 2**63 - 1  # slices of a tape end there


class _Refused(ValueError):
    def __init__(self, rule: str, detail: str) -> None:
        self.rule = rule
        super().__init__(detail)


def read_strict(data: bytes, where: str = "", *, most_bytes: int = LARGEST_JSON_BYTES, deepest: int = DEEPEST_JSON) -> Any:
    """The value of a JSON document. BundleRefused names the rule that it breaks: json-size, json-depth, json-duplicate-key,
    json-not-finite, json-integer, json-text or json-syntax. `where` is told in it.
    """
    try:
        if len(data) > most_bytes:
            raise _Refused("json-size", f"{len(data):,} bytes of JSON; at most {most_bytes:,} are read")
        body = json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_not_finite, parse_float=_float, parse_int=_int)
        _walk(body, deepest)
    except _Refused as refusal:
        raise BundleRefused(refusal.rule, where, str(refusal)) from None
    except RecursionError:
        raise BundleRefused("json-depth", where, f"nested far deeper than {deepest} levels") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError among them
        raise BundleRefused("json-syntax", where, f"no JSON: {error}") from None
    return body


def to_canonical(body: Any) -> bytes:
    """RFC 8785. ValueError on what it cannot say: NaN, Infinity, integers of 2^53 and more, keys that are no text."""
    import rfc8785

    try:
        return rfc8785.dumps(body)
    except rfc8785.CanonicalizationError as error:
        raise ValueError(f"no canonical JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _Refused("json-duplicate-key", f"key {twice[:80]!r} stands twice in one object")
    return body


def _not_finite(text: str) -> NoReturn:
    raise _Refused("json-not-finite", f"{text} is no JSON number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused("json-not-finite", f"{text[:40]} is beyond a double")
    return value


def _int(text: str) -> int:
    if len(text) > 20 or not -LARGEST_INTEGER - 1 <= int(text) <= LARGEST_INTEGER:
        raise _Refused("json-integer", f"{text[:40]} is beyond 64 bits")
    return int(text)


def _walk(body: Any, deepest: int) -> None:
    """Depth and texts of a parsed document, without recursion."""
    level, depth = [body], 0
    while level:
        if depth > deepest:
            raise _Refused("json-depth", f"nested deeper than {deepest} levels")
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                for key in value:
                    _check_text(key)
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, str):
                _check_text(value)
        level, depth = below, depth + 1


def _check_text(text: str) -> None:
    if "\0" in text:
        raise _Refused("json-text", "a text holds a NUL character")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _Refused("json-text", "a text holds half of a surrogate pair") from None
