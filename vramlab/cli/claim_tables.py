"""`list claims` as text: a line a paper and the claims that a run has settled; with --all every claim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import shorten
from typing import Any

from vramlab.cli.words import command, table
from vramlab.record import Verdict
from vramlab.report.standing import UNTESTED, tally

WIDEST = 40  # characters of a column on a terminal; a file, a pipe and --json have everything
_COLUMNS = ("id", "model", "metric", "value", "obtained", "state", "evidence")
Rows = Sequence[Mapping[str, Any]]


def claim_lines(rows: Rows, *, shows_all: bool, is_terminal: bool) -> Iterator[str]:
    """The tables and what they come to, of rows of `standing.Standing.to_json`."""
    settled = [row for row in rows if row["basis"]]
    if shows_all:
        yield _claims(rows, is_terminal)
    else:
        yield _papers(rows)
        yield ""
        yield _claims(settled, is_terminal) if settled else "no claim has a verdict yet: `list workflows` names the workflow of each paper"
    yield ""
    yield tally(rows)
    if not shows_all:
        yield f"{command('list', 'claims', '--all')} shows all {len(rows)}, and why those without a verdict have none"


def _papers(rows: Rows) -> str:
    """A line a paper: how many of its claims stand how. Those that are only recalled are apart and in no other column."""
    verdicts = [str(verdict) for verdict in Verdict]
    columns = ("paper", "claims", *verdicts, UNTESTED, "recalled only")
    lines = []
    for system in dict.fromkeys(row["system"] for row in rows):
        own = [row for row in rows if row["system"] == system]
        counted = [row for row in own if row["counts"]]
        cells = [_count([row for row in counted if row["verdict"] == verdict]) for verdict in verdicts]
        untested = sum(row["verdict"] is None for row in counted)
        lines.append((system, len(own), *cells, untested or "", len(own) - len(counted) or ""))
    return table(columns, lines, right=columns[1:])


def _count(rows: Rows) -> str:
    """`3`, `3 (2 simulated)`; nothing for none."""
    simulated = sum(row["basis"] == "simulated" for row in rows)
    return f"{len(rows)} ({simulated} simulated)" if simulated else str(len(rows) or "")


def _claims(rows: Rows, is_terminal: bool) -> str:
    """A line a claim; of several records the first. On a terminal words beyond a column's width are cut, paths and states never."""
    def told(row: Mapping[str, Any]) -> list[str]:
        words = {name: str(row[name] or "") for name in _COLUMNS} | {"evidence": _evidence(row)}
        whole = ("id", "state", *(["evidence"] if row["basis"] else [])) if is_terminal else _COLUMNS
        return [text if name in whole else shorten(text, WIDEST, placeholder=" ...") for name, text in words.items()]

    return table(_COLUMNS, map(told, rows))


def _evidence(row: Mapping[str, Any]) -> str:
    first, others = "".join(row["evidence"][:1]), len(row["evidence"]) - 1
    return f"{first} and {others} more" if others > 0 else first
