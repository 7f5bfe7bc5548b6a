"""How far predictions are from what was measured: peaks, step times, and the share of cells that held more than was said."""

from __future__ import annotations

from statistics import median
from typing import Sequence

from vramlab.counted import count_of
from vramlab.prediction import comparisons
from vramlab.report import drawing
from vramlab.report.drawing import MUTED, Panel, panel_axes
from vramlab.report.figures.kinds import FigureSet, Looks
from vramlab.report.figures.marks import Mark, draw_marks, marks_in_words
from vramlab.report.words import GIB, MIB, bytes_in_words, significant
from vramlab.runs import Run

MOST_MARKS = 600
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
    drawn = f"{MOST_MARKS} marks of more are drawn: those furthest off, and of the others as many as fit. The numbers above are of all."
    is_thinned = any(len(_pairs(run, name)) > MOST_MARKS for name, _, _ in QUANTITIES)
    return FigureSet(panels=tuple(panels), note=drawn if is_thinned else simulated_only, statement=" ".join(told))


def _pairs(run: Run, name: str) -> list[tuple[str, float, float]]:
    """[(method, measured, predicted)] of the cells that ran and were right."""
    found = []
    for record in run.records:
        for one in comparisons([record]):
            both = (one.peak_bytes, one.predicted_peak_bytes) if name == "peak" else (one.step_seconds, one.predicted_step_seconds)
            if None not in both:
                found.append((run.label(record), *both))
    return found


def _thinned(pairs: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """All, or MOST_MARKS of them in their order: the half that is furthest off, and of the rest each n-th."""
    if len(pairs) <= MOST_MARKS:
        return list(pairs)
    by_error = sorted(range(len(pairs)), key=lambda i: -abs(pairs[i][2] / pairs[i][1] - 1) if pairs[i][1] else 0)
    half = MOST_MARKS // 2
    rest = by_error[half:]
    kept = by_error[:half] + [rest[i * len(rest) // half] for i in range(half)]
    return [pairs[i] for i in sorted(kept)]


def _panel(looks: Looks, name: str, what: str, pairs: Sequence[tuple[str, float, float]]) -> Panel:
    largest = max(max(measured, predicted) for _, measured, predicted in pairs)
    unit, size = ("s", 1.0) if name == "seconds" else ("GiB", GIB) if largest >= 4 * GIB else ("MiB", MIB)
    shown = _thinned(pairs)
    marks = [Mark(method=method, x=measured / size, y=predicted / size, is_simulated=False) for method, measured, predicted in shown]
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
    if not breaks_budgets:
        return f"{told}."
    most = max(measured - predicted for _, measured, predicted in pairs)
    by = f", by {bytes_in_words(most)} or less" if any(low) else ""
    unsafe = f"unsafe rate {100 * sum(low) / len(low):.0f} %: the share that would have broken a budget of just the predicted peak"
    return f"{told}; {sum(low):,} of {len(low):,} held more than was predicted{by} ({unsafe})."


def _percent(value: float) -> str:
    if 0 < abs(value) < 0.005:
        return "about 0 %"
    return f"{'+' if value > 0 else '-' if value < 0 else ''}{_absolute(abs(value))}"


def _absolute(value: float) -> str:
    """Two digits, none behind the hundredth of a per cent."""
    return f"{significant(value, 2) if value >= 0.1 or value == 0 else f'{value:.2f}' if value >= 0.005 else 'less than 0.01'} %"
