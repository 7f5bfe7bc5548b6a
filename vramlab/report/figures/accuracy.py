"""How far predictions are from what was measured: peaks, step times, and the share of cells that held more than was said."""

from __future__ import annotations

from statistics import median
from typing import Sequence

from vramlab.prediction import comparisons
from vramlab.report import drawing
from vramlab.report.drawing import MUTED, Panel, panel_axes
from vramlab.report.figures.kinds import FigureSet, Looks
from vramlab.report.figures.marks import Mark, draw_marks, marks_in_words
from vramlab.report.words import GIB, MIB, count_of, significant
from vramlab.runs import Run

QUANTITIES = (  # name, what it is, whether more than predicted breaks a budget
    ("peak", "peak", True), ("seconds", "step time", False),
)


def accuracy_figures(run: Run, looks: Looks) -> FigureSet:
    """Predicted against measured, one mark a cell, with the line on which both are equal; the errors in words."""
    panels, told = [], []
    for name, what, breaks_budgets in QUANTITIES:
        pairs = _pairs(run, name)
        if pairs:
            panels.append(_panel(looks, name, what, pairs))
            told.append(_errors_in_words(what, pairs, breaks_budgets))
    simulated_only = "" if told else "Nothing to compare: no cell has both a prediction and a measurement."
    return FigureSet(panels=tuple(panels), note=simulated_only, statement=" ".join(told))


def _pairs(run: Run, name: str) -> list[tuple[str, float, float]]:
    """[(method, measured, predicted)] of the cells that ran and were right."""
    found = []
    for record in run.records:
        for one in comparisons([record]):
            both = (one.peak_bytes, one.predicted_peak_bytes) if name == "peak" else (one.step_seconds, one.predicted_step_seconds)
            if None not in both:
                found.append((run.label(record), *both))
    return found


def _panel(looks: Looks, name: str, what: str, pairs: Sequence[tuple[str, float, float]]) -> Panel:
    largest = max(max(measured, predicted) for _, measured, predicted in pairs)
    unit, size = ("s", 1.0) if name == "seconds" else ("GiB", GIB) if largest >= 4 * GIB else ("MiB", MIB)
    marks = [Mark(method=method, x=measured / size, y=predicted / size, is_simulated=False) for method, measured, predicted in pairs]
    top = 1.08 * largest / size
    with panel_axes(f"Predicted {what} against measured") as (figure, axes):
        axes.plot([0, top], [0, top], color=MUTED, linestyle="--", linewidth=1.0, label="predicted = measured")
        draw_marks(axes, looks, marks, are_joined=False)
        axes.set(xlim=(0, top), ylim=(0, top), xlabel=f"measured {what} ({unit})", ylabel=f"simulated {what} ({unit})")
        return drawing.finish(figure, name=f"accuracy-{name}", title=f"Prediction of the {what}, simulated against measured",
                              description=marks_in_words(marks, f"{unit} measured", f"{unit} simulated"))


def _errors_in_words(what: str, pairs: Sequence[tuple[str, float, float]], breaks_budgets: bool) -> str:
    errors = [100 * (predicted / measured - 1) for _, measured, predicted in pairs]
    low = [predicted < measured for _, measured, predicted in pairs]
    told = (f"{what[0].upper()}{what[1:]}, {count_of(len(pairs), 'cell')}: predicted less measured is {_percent(min(errors))} to "
            f"{_percent(max(errors))} of the measured, {_percent(median(errors))} in the median; without sign "
            f"{_absolute(median(map(abs, errors)))} in the median, {_absolute(max(map(abs, errors)))} at the most")
    unsafe = f"; {sum(low)} of {len(low)} held more than was predicted (unsafe rate {100 * sum(low) / len(low):.0f} %)"
    return f"{told}{unsafe if breaks_budgets else ''}."


def _percent(value: float) -> str:
    return f"{'+' if value > 0 else ''}{significant(value, 2)} %"


def _absolute(value: float) -> str:
    return f"{significant(value, 2)} %"
