"""Bars that lie, one a cell: stacks of simulated parts, hollow and hatched, and whole bars, filled where measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from vramlab.report import drawing
from vramlab.report.drawing import INK, PAPER, SERIES, Panel, panel_axes, plain_label

HATCHES = ("", "////", "\\\\\\\\", "xxxx", "||||", "----", "++++", "//")  # of straight lines: dots make an SVG of a megabyte
BAR_INCHES, FRAME_INCHES, WIDTH_INCHES = 0.27, 1.5, 6.2
LABEL_CHARACTERS, CHARACTER_INCHES = 32, 0.085  # of a row's label, and of the text behind a bar
MAX_BARS = 24


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One cell: its simulated parts by name, (middle, low, high) of the whole where that was measured, and what stands behind it."""

    label: str
    parts: Mapping[str, float]
    measured: tuple[float, float, float] | None = None
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One cell: a length, and what stands at its end."""

    label: str
    length: float
    text: str
    colour: str
    is_simulated: bool


def stack_panel(stacks: Sequence[Stack], *, name: str, title: str, heading: str, xlabel: str, measured: str) -> Panel:
    """Stacks in the order given, the first one on top; `measured` says what a filled mark and its line are. All parts share one order;
    one that is zero in all stacks is left out."""
    parts = [(look, part) for look, part in enumerate(stacks[0].parts) if any(stack.parts.get(part) for stack in stacks)]
    beside = _beside([stack.label for stack in stacks])
    with panel_axes(heading, _size(len(stacks)), beside) as (figure, axes):
        rows, ends = range(len(stacks)), [0.0] * len(stacks)
        for look, part in parts:
            lengths = [stack.parts.get(part, 0.0) for stack in stacks]
            axes.barh(rows, lengths, left=ends, height=0.66, facecolor=PAPER, edgecolor=SERIES[look % len(SERIES)], linewidth=1.0,
                      hatch=HATCHES[look % len(HATCHES)], label=part)
            ends = [end + length for end, length in zip(ends, lengths)]
        found = [(row, stack.measured) for row, stack in enumerate(stacks) if stack.measured]
        if found:
            middles = [m for _, (m, _, _) in found]
            spread = [[m - low for _, (m, low, _) in found], [high - m for _, (m, _, high) in found]]
            axes.errorbar(middles, [row for row, _ in found], xerr=spread, linestyle="none", marker="D", markersize=5, color=INK,
                          elinewidth=1.2, capsize=3, label=measured, zorder=4)
        ends = [max(end, stack.measured[2]) if stack.measured else end for end, stack in zip(ends, stacks)]
        for row, (end, stack) in enumerate(zip(ends, stacks)):
            _write_behind(axes, end, row, stack.text)
        right = _right([(end, stack.text) for end, stack in zip(ends, stacks)], beside)
        _frame(axes, [stack.label for stack in stacks], right, f"{xlabel}; parts are simulated")
        return drawing.finish(figure, name=name, title=title, description="; ".join(_told(stack, xlabel) for stack in stacks), columns=3)


def bar_panel(bars: Sequence[Bar], *, name: str, title: str, heading: str, xlabel: str, line: tuple[float, str] | None = None) -> Panel:
    """Bars in the order given, the first one on top, each with its text behind its end. `line` is (where, what it is) of what they are
    compared with."""
    beside = _beside([bar.label for bar in bars])
    with panel_axes(heading, _size(len(bars)), beside) as (figure, axes):
        for row, bar in enumerate(bars):
            face = PAPER if bar.is_simulated else bar.colour
            axes.barh([row], [bar.length], height=0.62, facecolor=face, edgecolor=bar.colour, linewidth=1.4)
            _write_behind(axes, bar.length, row, bar.text)
        if line:
            axes.axvline(line[0], color=drawing.MUTED, linestyle=":", linewidth=1.2, label=line[1])
        right = max([_right([(bar.length, bar.text) for bar in bars], beside), 1.05 * line[0] if line else 0])
        _frame(axes, [bar.label for bar in bars], right, xlabel)
        described = "; ".join(f"{bar.label}{' simulated' if bar.is_simulated else ''}: {bar.text}" for bar in bars)
        return drawing.finish(figure, name=name, title=title, description=described)


def _beside(labels: Sequence[str]) -> float:
    """Inches that the longest row label takes."""
    return 0.3 + CHARACTER_INCHES * min(LABEL_CHARACTERS, max(map(len, labels)))


def _right(ends: Sequence[tuple[float, str]], beside: float) -> float:
    """Where the axis ends, so that each text has its room behind its end."""
    width = WIDTH_INCHES - beside
    return max(end * width / max(0.3 * width, width - 0.15 - CHARACTER_INCHES * len(text)) for end, text in ends) or 1.0


def _size(rows: int) -> tuple[float, float]:
    return WIDTH_INCHES, FRAME_INCHES + BAR_INCHES * rows


def _write_behind(axes: Axes, end: float, row: int, text: str) -> None:
    axes.annotate(text, (end, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.0)


def _frame(axes: Axes, labels: Sequence[str], right: float, xlabel: str) -> None:
    axes.set_yticks(range(len(labels)), [plain_label(label, LABEL_CHARACTERS) for label in labels])
    axes.set(xlim=(0, right), ylim=(len(labels) - 0.5, -0.5), xlabel=xlabel)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def _told(stack: Stack, unit: str) -> str:
    parts = ", ".join(f"{part} {value:.4g}" for part, value in stack.parts.items())
    return f"{stack.label}: simulated {parts}" + (f", measured {stack.measured[0]:.4g}" if stack.measured else "") + f" ({unit})"
