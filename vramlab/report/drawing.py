"""How figures are drawn: one small SVG a panel, coloured by the page's own style sheet, the same bytes each time.

matplotlib draws with stand-in colours; `to_svg` puts CSS variables in their place, so that one SVG serves light and dark
pages and print. Text stays text: selectable, read aloud, escaped. Ids get a prefix, so that many SVGs share a page.
"""

from __future__ import annotations

import html
import io
import re
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Iterator, Sequence

import matplotlib
import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, RULE, PAPER = "#0a0001", "#0a0002", "#0a0003", "#0a0004"
SERIES = tuple(f"#0b000{i}" for i in range(1, 9))
VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", RULE: "var(--rule)", PAPER: "var(--paper)",
             **{colour: f"var(--series-{i})" for i, colour in enumerate(SERIES, 1)}}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
SIZE_INCHES = (4.4, 3.3)
# Room for text: viewers have fonts of their own, some of them wider than the one that matplotlib lays out with.
AXIS_INCHES, CHARACTERS_AN_INCH = 0.6, 12  # what an axis' own labels take; of a title
KEY_INCHES, LEGEND_CHARACTERS_AN_INCH = 0.45, 15
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "vramlab", "text.parse_math": False, "font.family": "sans-serif", "font.size": 9.0,
    "axes.edgecolor": MUTED, "axes.labelcolor": INK, "axes.titlecolor": INK, "axes.titlesize": 9.5, "axes.facecolor": "none",
    "figure.facecolor": "none", "savefig.facecolor": "none", "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK,
    "ytick.labelcolor": INK, "text.color": INK, "axes.grid": True, "grid.color": RULE, "grid.linewidth": 0.6, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "lines.linewidth": 1.4, "path.simplify": False,
}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One drawing: its SVG, what it shows, in words, and what it was drawn from, with stand-ins for its colours."""

    svg: str
    title: str
    figure: Figure = field(repr=False, compare=False)


@contextmanager
def panel_axes(title: str) -> Iterator[tuple[Figure, Axes]]:
    """A figure with one axes in the house style."""
    with facets([title], SIZE_INCHES, columns=1) as figure:
        yield figure, figure.axes[0]


@contextmanager
def facets(titles: Sequence[str], size_inches: tuple[float, float], columns: int) -> Iterator[Figure]:
    """A figure with an axes for each title, in rows of so many columns."""
    with matplotlib.rc_context(), seaborn.axes_style("ticks"):
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=size_inches, layout="constrained")
        for index, title in enumerate(titles, 1):
            axes = figure.add_subplot(-(-len(titles) // columns), columns, index)
            axes.set_title(_in_lines(plain_label(title, 120), size_inches[0] / columns), loc="left")
        yield figure


def _in_lines(title: str, width_inches: float) -> str:
    """A title in lines that fit above their axes."""
    return textwrap.fill(title, int(CHARACTERS_AN_INCH * (width_inches - AXIS_INCHES)))


def finish(figure: Figure, *, name: str, title: str, description: str, columns: int = 2) -> Panel:
    """The panel of a finished drawing: one legend below, in so many columns, then SVG. `name` is unique on the page."""
    handles = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels())}
    if handles:
        width = int(LEGEND_CHARACTERS_AN_INCH * (figure.get_figwidth() / columns - KEY_INCHES))
        labels = [textwrap.fill(label, width) for label in handles]
        figure.legend(handles.values(), labels, loc="outside lower left", ncols=columns, fontsize=8.0, handlelength=1.6, columnspacing=1.2)
    return Panel(svg=to_svg(figure, name=name, title=title, description=description), title=title, figure=figure)


def to_svg(figure: Figure, *, name: str, title: str, description: str) -> str:
    """Inline SVG. Title and description are what a screen reader says."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    body = text[text.index("<svg"):]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', body)
    body = re.sub(r'href="#([^"]*)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"url\(#([^)]*)\)", rf"url(#{name}-\1)", body)
    for stand_in, variable in VARIABLES.items():
        body = body.replace(stand_in, variable)
    view = re.search(r'viewBox="[^"]*"', body)[0]
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {view} role="img" '
            f'aria-labelledby="{name}-title {name}-desc"><title id="{name}-title">{html.escape(title)}</title>'
            f'<desc id="{name}-desc">{html.escape(description)}</desc>')
    return re.sub(r"<svg[^>]*>", lambda match: head, body, count=1)


def plain_label(text: str, limit: int = 40) -> str:
    """Text as it may stand in a drawing: no control characters, not too long, and never hidden for a leading underscore."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    clean = clean if len(clean) <= limit else clean[: limit - 1] + "\u2026"
    return f"\u200a{clean}" if clean.startswith("_") else clean
