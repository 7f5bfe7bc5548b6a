"""How the command line speaks: its own name, times, tables."""

from __future__ import annotations

import json
import os
import shlex
import sys
import unicodedata
from typing import Any, Iterable, Sequence


ASSUMED_DEVICE = "sim:v100-32gb"


def device_or_assumed(device: str | None) -> tuple[str, str]:
    """The device, and what to say where none was given: `no --device was given: sim:v100-32gb is assumed`."""
    return (device, "") if device else (ASSUMED_DEVICE, f"no --device was given: {ASSUMED_DEVICE} is assumed")


def command(*words: str) -> str:
    """A command as the user would type it: `./run workflow x` after `./run`, else `vramlab run workflow x`."""
    program = os.environ.get("VRAMLAB_PROG")
    if program and words[:2] == ("run", "workflow"):
        words = words[1:]
    return shlex.join([program or "vramlab", *words])


def duration(seconds: float | None) -> str:
    """`12 s`, `3 min`, `1 h 20 min`; `-` when there is none."""
    if seconds is None:
        return "-"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def listed(option: str, text: str) -> list[str]:
    """`a,b` as its words, each once; a note on stderr for what stands there twice."""
    words = [word for word in map(str.strip, text.split(",")) if word]
    for word in dict.fromkeys(word for word in words if words.count(word) > 1):
        print(f"note: {option}: {word} stands here {words.count(word)} times; it counts once", file=sys.stderr)
    return list(dict.fromkeys(words))


def harmless(text: object) -> str:
    """What strangers wrote, for a terminal: what could move its cursor, colour it or turn the writing round is told as `\\x1b`."""
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else c.encode("unicode_escape").decode() for c in str(text))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Iterable[str] = ()) -> str:
    """A table of text; nothing is cut, so that a narrow terminal wraps and a file has everything."""
    cells = [list(columns)] + [["" if value is None else str(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    to_right = set(right)

    def line(row: Sequence[str]) -> str:
        parts = [text.rjust(width) if name in to_right else text.ljust(width) for text, width, name in zip(row, widths, columns)]
        return "  ".join(parts).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * width for width in widths), *map(line, cells[1:])])


def print_json(body: Any) -> None:
    """One JSON document on stdout."""
    json.dump(body, sys.stdout, indent=1, sort_keys=True, allow_nan=False)
    print()
