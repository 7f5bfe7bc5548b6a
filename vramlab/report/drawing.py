"""How figures are drawn: one small SVG and one PDF a panel, the same bytes each time.

matplotlib draws in the colours of the light page, which are those of the PDF; `to_svg` puts CSS variables in their place, so that
one SVG serves light and dark pages and print. Text stays text: selectable, read aloud, escaped. Ids get a prefix, so that many SVGs
share a page. PDFs embed their fonts as TrueType, as venues ask.
"""

from __future__ import annotations

import html
import io
import re
import textwrap
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Iterator, Sequence

import matplotlib
import seaborn
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.text import Text

# The light colours of reports/styles/report.css, in which every one of them stands for its variable.
INK, MUTED, RULE, PAPER = "#16181d", "#5b6270", "#dfe2e8", "#ffffff"
SERIES = ("#0072b2", "#ad4300", "#00805e", "#52076e", "#8f9a00", "#2f939c", "#555b66", "#603136")
VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", RULE: "var(--rule)", PAPER: "var(--paper)",
             **{colour: f"var(--series-{i})" for i, colour in enumerate(SERIES, 1)}}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
SIZE_INCHES = (4.4, 3.3)
# Room for text: viewers have fonts of their own, some of them wider than the one that matplotlib lays out with.
AXIS_INCHES, CHARACTERS_AN_INCH = 0.6, 12  # what an axis' own labels take; of a title
KEY_INCHES, LEGEND_CHARACTERS_AN_INCH = 0.45, 15
LEGEND_INCHES, LINE_INCHES, ROW_INCHES = 1.3, 0.15, 0.07  # what a drawing's own height has room for; forty methods take more
STYLE = {
    "axes.prop_cycle": cycler(color=[INK]), "patch.facecolor": MUTED, "patch.edgecolor": INK, "hatch.color": INK,
    "svg.fonttype": "none", "svg.hashsalt": "vramlab", "pdf.fonttype": 42, "hatch.linewidth": 0.5,
    "text.parse_math": False, "font.family": "sans-serif", "font.size": 9.0,
    "axes.edgecolor": MUTED, "axes.labelcolor": INK, "axes.titlecolor": INK, "axes.titlesize": 9.5, "axes.facecolor": "none",
    "figure.facecolor": "none", "savefig.facecolor": "none", "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK,
    "ytick.labelcolor": INK, "text.color": INK, "axes.grid": True, "grid.color": RULE, "grid.linewidth": 0.6, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "lines.linewidth": 1.4, "path.simplify": False,
}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One drawing: its SVG for the page, its PDF for a paper, what it shows, in words, and what both were drawn from."""

    name: str  # unique on the page; the PDF's file is called so
    title: str
    svg: str
    pdf: bytes
    figure: Figure = field(repr=False, compare=False)


@contextmanager
def panel_axes(title: str, size_inches: tuple[float, float] = SIZE_INCHES,
               axis_inches: float = AXIS_INCHES) -> Iterator[tuple[Figure, Axes]]:
    """A figure with one axes in the house style; `axis_inches` is what the labels beside it take of the width."""
    with facets([title], size_inches, columns=1, axis_inches=axis_inches) as figure:
        yield figure, figure.axes[0]


@contextmanager
def facets(titles: Sequence[str], size_inches: tuple[float, float], columns: int, axis_inches: float = AXIS_INCHES) -> Iterator[Figure]:
    """A figure with an axes for each title, in rows of so many columns."""
    with matplotlib.rc_context(), seaborn.axes_style("ticks"):
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=size_inches, layout="constrained")
        for index, title in enumerate(titles, 1):
            axes = figure.add_subplot(-(-len(titles) // columns), columns, index)
            axes.set_title(_in_lines(plain_label(title, 120), size_inches[0] / columns - axis_inches), loc="left")
        yield figure


def _in_lines(title: str, width_inches: float) -> str:
    """A title in lines that fit above their axes."""
    return textwrap.fill(title, int(CHARACTERS_AN_INCH * width_inches))


def finish(figure: Figure, *, name: str, title: str, description: str, columns: int = 2) -> Panel:
    """The panel of a finished drawing: one legend below, in so many columns, then SVG. `name` is unique on the page."""
    handles = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels())}
    if handles:
        width = int(LEGEND_CHARACTERS_AN_INCH * (figure.get_figwidth() / columns - KEY_INCHES))
        labels = [textwrap.fill(label, width) for label in handles]
        figure.set_figheight(figure.get_figheight() + max(0.0, _legend_inches(labels, columns) - LEGEND_INCHES))
        figure.legend(handles.values(), labels, loc="outside lower left", ncols=columns, fontsize=8.0, handlelength=1.6, columnspacing=1.2)
    svg = to_svg(figure, name=name, title=title, description=description)
    figure.set_layout_engine("none")  # what the layout found for the SVG stays: PDF and page are alike
    return Panel(name=name, title=title, svg=svg, pdf=_to_pdf(figure, title), figure=figure)


def _legend_inches(labels: Sequence[str], columns: int) -> float:
    """How high a legend is: its columns are filled one after the other."""
    rows = -(-len(labels) // columns)
    return max(sum(ROW_INCHES + LINE_INCHES * (1 + label.count("\n")) for label in labels[i:i + rows]) for i in range(0, len(labels), rows))


def to_svg(figure: Figure, *, name: str, title: str, description: str) -> str:
    """Inline SVG. Title and description are what a screen reader says."""
    buffer = io.StringIO()
    with _fonts_of_the_reader():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    body = text[text.index("<svg"):]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<[^<>]*>", lambda tag: _on_the_page(tag[0], name), body)  # tags alone: names are text, whatever they look like
    view = re.search(r'viewBox="[^"]*"', body)[0]
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {view} role="img" '
            f'aria-labelledby="{name}-title {name}-desc"><title id="{name}-title">{html.escape(title)}</title>'
            f'<desc id="{name}-desc">{html.escape(description)}</desc>')
    return re.sub(r"<svg[^>]*>", lambda match: head, body, count=1)


def _on_the_page(tag: str, name: str) -> str:
    """A tag with ids of its own, the page's colours and short numbers. KeyError where a colour is not of the palette."""
    for pattern, ours in ((r'\bid="([^"]*)"', rf'id="{name}-\1"'), (r'href="#([^"]*)"', rf'href="#{name}-\1"'),
                          (r"url\(#([^)]*)\)", rf"url(#{name}-\1)")):
        tag = re.sub(pattern, ours, tag)
    tag = re.sub(r'="[^"]*"', lambda value: re.sub(r"#[0-9a-f]{6}\b", lambda colour: VARIABLES[colour[0]], value[0]), tag)
    return re.sub(r'(?<= )(?:d|x|y|transform)="[^"]*"', _shortened, tag)


def _shortened(attribute: re.Match[str]) -> str:
    """Coordinates to the hundredth of a point, 4 um: a quarter of an SVG is digits that nobody sees."""
    return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{round(float(number[0]), 2) + 0:g}", attribute[0])


@contextmanager
def _fonts_of_the_reader() -> Iterator[None]:
    """Characters that matplotlib's font does not have are no fault of an SVG: whoever reads it has fonts of their own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _to_pdf(figure: Figure, title: str) -> bytes:
    for text in figure.findobj(Text):
        text.set_text(printable(text.get_text()))
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):  # whose words come anew with each drawing
        words = [label.get_text() for label in axis.get_ticklabels()]
        if any(printable(word) != word for word in words):
            axis.set_ticks(axis.get_ticklocs(), [printable(word) for word in words])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="pdf", metadata={"Title": title, "CreationDate": None, "Creator": None, "Producer": None})
    return buffer.getvalue()


def printable(text: str, family: str = "DejaVu Sans") -> str:
    """What an embedded font can show; any other character as its code point, control characters as spaces."""
    known = _characters_of(family)
    return "".join(c if ord(c) in known else f"U+{ord(c):04X}" if c.isprintable() else "\n" if c == "\n" else " " for c in text)


@cache
def _characters_of(family: str) -> frozenset[int]:
    return frozenset(get_font(findfont(family)).get_charmap())


def plain_label(text: str, limit: int = 40) -> str:
    """Text as it may stand in a drawing: no control characters, not too long, and never hidden for a leading underscore."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    clean = clean if len(clean) <= limit else clean[: limit - 1] + "\u2026"
    return f"\u200a{clean}" if clean.startswith("_") else clean
