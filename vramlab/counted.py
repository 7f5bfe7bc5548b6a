"""Counted nouns, the same everywhere: `1 cell`, `3 cells`, `12,000 decisions`."""

from __future__ import annotations


def count_of(number: float, noun: str, plural: str = "") -> str:
    """`1 cell`, `3 cells`, `0 cells`, `2.5 minutes`; `plural` for a noun that takes more than an s."""
    return f"{f'{number:,}'.removesuffix('.0')} {noun if number == 1 else plural or f'{noun}s'}"


def all_of(number: int, noun: str) -> str:
    """`all 3 cells`, and `1 cell` where that is all."""
    return count_of(number, noun) if number == 1 else f"all {count_of(number, noun)}"
