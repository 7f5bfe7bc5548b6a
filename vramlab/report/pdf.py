"""report.pdf: the figures and tables of a run for a paper, drawn by matplotlib alone: no browser, no LaTeX.

The answer in words, then each figure on a page of its own size, so that \\includegraphics[page=2]{report} puts it into a paper as it is,
then the tables on landscape pages. Fonts are embedded as TrueType, as venues ask; no date stands in the file.
"""

from __future__ import annotations

import io
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Sequence

import matplotlib
from matplotlib.artist import Artist
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text

from vramlab.collection import Library, built_in_collection
from vramlab.record import write_atomically
from vramlab.report.drawing import STYLE, VARIABLES, Panel, printable
from vramlab.report.evidence import Evidence
from vramlab.report.figures import make_figures, telemetry_figures
from vramlab.report.page import TABLES, evidence_of
from vramlab.report.summary import summarise
from vramlab.report.tables import Table, Value
from vramlab.runs import load_run, report_folder

PDF_FILE = "report.pdf"
PAGE_INCHES, MARGIN_INCHES = (11.69, 8.27), 0.5  # A4, landscape
LARGEST_POINTS, SMALLEST_POINTS, TITLE_POINTS = 7.5, 4.5, 11.0
WIDTH, LEADING = 0.602, 1.4  # of the font's size: a character of DejaVu Sans Mono; from line to line
GAP = "  "
LIMITS = (60, 40, 28, 20)  # characters of one entry, tried until a table's rows fit the page
_PRINT = {**STYLE, "pdf.fonttype": 42, "pdf.compression": 6}
_COLOURS = ("color", "facecolor", "edgecolor", "hatchcolor", "markerfacecolor", "markeredgecolor")


def write_pdf(run_dir: Path, library: Library) -> Path:
    """Write report.pdf where report.html is. The same records give the same bytes. WorkflowError when run.json cannot be read."""
    run = load_run(Path(run_dir))
    path = report_folder(run.folder) / PDF_FILE
    write_atomically(path, to_pdf(evidence_of(run, library)))
    return path


def to_pdf(evidence: Evidence) -> bytes:
    """The bytes of report.pdf."""
    run, buffer = evidence.run, io.BytesIO()
    title = str(run.workflow.get("title") or run.workflow.get("name"))
    metadata = {"Title": _plain(title), "Creator": "vramlab", "Producer": None, "CreationDate": None}
    with matplotlib.rc_context(), PdfPages(buffer, metadata=metadata) as pages:
        matplotlib.rcParams.update(_PRINT)
        for page in _text_pages(title, _answer(evidence)):
            pages.savefig(page)
        for panel in _panels(evidence):
            pages.savefig(for_print(panel.figure))
        for table in (made for made in (make(run) for make in TABLES) if made.rows):
            for page in _table_pages(table):
                pages.savefig(page)
    return buffer.getvalue()


# --- figures --------------------------------------------------------------------------------------------------------------
def _panels(evidence: Evidence) -> Iterator[Panel]:
    for found in make_figures(evidence.run).values():
        yield from found.panels
    yield from telemetry_figures(evidence.telemetry).panels


def for_print(figure: Figure) -> Figure:
    """The figure in the colours of a printed page instead of those of the light one, and without characters that its font does not have."""
    for text in figure.findobj(Text):
        text.set_text(printable(text.get_text()))
    figure.draw_without_rendering()  # ticks come into being when they are drawn first
    colours = _print_colours()
    for artist in figure.findobj(Artist):
        for name in _COLOURS:
            get, put = (getattr(artist, f"{verb}_{name}", None) for verb in ("get", "set"))
            if get and put and (new := _printed(get(), colours)) is not None:
                put(new)
    return figure


@cache
def _print_colours() -> Mapping[str, str]:
    """Light colour -> printed one, as the report's own style sheet has it for print."""
    style = (built_in_collection() / "reports" / "styles" / "report.css").read_text(encoding="utf-8")
    found = dict(re.findall(r"(--[a-z0-9-]+):\s*(#[0-9a-f]{6})", style[style.index("@media print"):]))
    return {colour: found[variable[len("var("):-1]] for colour, variable in VARIABLES.items()}


def _printed(value: Any, colours: Mapping[str, str]) -> Any:
    """The colour, or the list of colours, for print; None where there is nothing to change."""
    if isinstance(value, str) and value in ("none", "auto", "inherit"):
        return None
    is_list = not isinstance(value, str) and len(value) > 0 and not isinstance(value[0], int | float) and hasattr(value[0], "__len__")
    old = [to_rgba(one) for one in value] if is_list else [to_rgba(value)] if len(value) else []
    new = [to_rgba(colours[to_hex(one)], one[3]) if to_hex(one) in colours else one for one in old]
    return None if new == old else new if is_list else new[0]


# --- text and tables ------------------------------------------------------------------------------------------------------
def _answer(evidence: Evidence) -> list[str]:
    """The first screen of the report, in words."""
    found = summarise(evidence.run, evidence.claims)
    claims = [f"{c.id}: {c.verdict_in_words}. Claimed: {c.claim.in_words if c.claim else 'unknown'}; obtained: {c.finding.obtained} "
              f"({c.hardware}). {c.finding.explanation}." for c in sorted(evidence.claims, key=lambda c: not c.counts)]
    invalid = [f"Not counted: {i.what}: {i.why}" for i in found.invalid]
    return [found.asked, found.ran, " ".join(found.hardware), found.answer, *claims, *invalid]


def _text_pages(title: str, paragraphs: Sequence[str]) -> Iterator[Figure]:
    lines = [line for text in paragraphs for line in [*textwrap.wrap(_plain(text), _characters(LARGEST_POINTS)), ""]]
    yield from _pages(title, [], lines, LARGEST_POINTS)


def _table_pages(table: Table) -> Iterator[Figure]:
    groups, kept = table.on_paper
    limit = next((limit for limit in LIMITS if _points(_widths(table, limit)) >= SMALLEST_POINTS), LIMITS[-1])
    widths, words = _widths(table, limit), [table.rows[0].values[i].is_word for i in kept]
    points = min(LARGEST_POINTS, _points(widths))
    rule = "\u2500" * _length(widths)
    names = [name for _, inside in groups for name in inside]
    head = [line for line in (_group_line(groups, widths), _row(names, words, widths), rule) if line.strip()]
    rows = [_row([_entry(row.values[i], limit) for i in kept], words, widths) for row in table.rows]
    notes = [line for number, note in enumerate(table.notes, 1)
             for line in textwrap.wrap(f"[{number}] {_plain(note)}", _characters(points), subsequent_indent="    ")]
    title = f"{table.title}: {table.shared_in_words}" if table.shared_in_words else table.title
    yield from _pages(title, head, [*rows, rule, *notes], points)


def _entry(value: Value, limit: int) -> str:
    text = _plain(value.text)
    return (text if len(text) <= limit else f"{text[:limit - 1]}\u2026") + (f" [{value.note}]" if value.note else "")


def _widths(table: Table, limit: int) -> list[int]:
    """Characters of each column, at least those of its heading; a group is at least as wide as its own."""
    groups, kept = table.on_paper
    names = [name for _, inside in groups for name in inside]
    widths = [max(len(name), *(len(_entry(row.values[i], limit)) for row in table.rows)) for name, i in zip(names, kept)]
    first = 0
    for heading, inside in groups:
        widths[first] += max(0, len(heading) - _length(widths[first:first + len(inside)]))
        first += len(inside)
    return widths


def _length(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _row(entries: Iterable[str], words: Iterable[bool], widths: Iterable[int]) -> str:
    return GAP.join(text.ljust(width) if is_word else text.rjust(width) for text, is_word, width in zip(entries, words, widths))


def _group_line(groups: Sequence[tuple[str, list[str]]], widths: Sequence[int]) -> str:
    first, parts = 0, []
    for heading, inside in groups:
        parts.append(heading.ljust(_length(widths[first:first + len(inside)])))
        first += len(inside)
    return GAP.join(parts)


def _usable_points() -> tuple[float, float]:
    return tuple(72 * (size - 2 * MARGIN_INCHES) for size in PAGE_INCHES)


def _points(widths: Sequence[int]) -> float:
    """The size at which lines of these columns are as wide as the page."""
    return _usable_points()[0] / (WIDTH * _length(widths))


def _characters(points: float) -> int:
    return int(_usable_points()[0] / (WIDTH * points))


def _pages(title: str, head: Sequence[str], lines: Sequence[str], points: float) -> Iterator[Figure]:
    """Pages of lines, each with the title and the head above."""
    room = _usable_points()[1] - 2.2 * TITLE_POINTS
    count = max(1, int(room / (LEADING * points)) - len(head))
    chunks = [lines[i:i + count] for i in range(0, len(lines), count)] or [[]]
    for number, chunk in enumerate(chunks, 1):
        figure = Figure(figsize=PAGE_INCHES, facecolor="white")
        part = f"  ({number} of {len(chunks)})" if len(chunks) > 1 else ""
        top = PAGE_INCHES[1] - MARGIN_INCHES
        _write(figure, _plain(title)[:_characters(TITLE_POINTS) - len(part)] + part, top, TITLE_POINTS, weight="bold")
        for index, line in enumerate([*head, *chunk]):
            is_head = index < len(head)
            _write(figure, line, top - (2.2 * TITLE_POINTS + LEADING * points * index) / 72, points, weight="bold" if is_head else "normal")
        yield figure


def _write(figure: Figure, line: str, y_inches: float, points: float, weight: str) -> None:
    figure.text(MARGIN_INCHES / PAGE_INCHES[0], y_inches / PAGE_INCHES[1], line, family="DejaVu Sans Mono", size=points, weight=weight,
                color="black", va="top", parse_math=False)


def _plain(text: str) -> str:
    return printable(text, "DejaVu Sans Mono")
