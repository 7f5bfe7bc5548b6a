"""Records as marks: filled where measured, hollow where simulated, crosses where infeasible; and the axis of ratios."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import seaborn
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from vramlab.counted import count_of
from vramlab.record import Outcome, RunRecord
from vramlab.report.drawing import MUTED, PAPER, plain_label
from vramlab.report.figures.kinds import Looks

MOST_TOLD = 120  # marks that a text alternative names one by one
MOST_LANES = 8
LANE_HEIGHT = 0.045  # of the axes' height, for one method at the foot
REGION = "cannot reach"
RATIO_TICKS = (  # for spans from low to high of at most so many times
    (1.6, (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5)),
    (4.0, (0.5, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0)),
    (float("inf"), (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)),
)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One record as a mark. x and y are what the axes say."""

    method: str
    x: float
    y: float
    is_simulated: bool
    low: float | None = None
    high: float | None = None


def draw_marks(axes: Axes, looks: Looks, marks: Sequence[Mark], *, are_joined: bool = True) -> None:
    """One look a method: hollow marks and a broken line where simulated, filled ones with their 95 % interval where measured. Where both
    are drawn the hollow marks are the larger and lie above: equal values show as a ring around a dot."""
    are_mixed = len({p.is_simulated for p in marks}) == 2
    for method in dict.fromkeys(p.method for p in marks):
        colour, marker, label = looks.colour(method), looks.marker(method), plain_label(method)
        for is_simulated in (True, False):
            chosen = sorted((p for p in marks if p.method == method and p.is_simulated == is_simulated), key=lambda p: p.x)
            if not chosen:
                continue
            face = colour if not is_simulated else "none" if are_mixed else PAPER
            seaborn.lineplot(x=[p.x for p in chosen], y=[p.y for p in chosen], ax=axes, color=colour, marker=marker,
                             markersize=10 if is_simulated and are_mixed else 6, zorder=4 if is_simulated and are_mixed else 3,
                             linestyle="none" if not are_joined else looks.dashes(method) if is_simulated else "-", markerfacecolor=face,
                             markeredgecolor=colour, errorbar=None, estimator=None,
                             label=f"{label}, simulated" if is_simulated else label, legend=False)
            bars = [p for p in chosen if p.low is not None and p.high is not None]
            if bars:
                axes.errorbar([p.x for p in bars], [p.y for p in bars], fmt="none", ecolor=colour, elinewidth=1.0, capsize=2.5,
                              yerr=[[p.y - p.low for p in bars], [p.high - p.y for p in bars]])


def scale_ratios(axes: Axes, marks: Sequence[Mark], drifts: Sequence[Mapping[str, Any]], foot: float = 0.0) -> None:
    """Log scale around 1, so that twice as slow and half as slow lie equally far from it. `foot` is the share of the height left free."""
    values = [1.0] + [v for p in marks for v in (p.y, p.low, p.high) if v] + [v for d in drifts for v in (d["low"], d["high"])]
    low, high = min(values) / 1.12, max(values) * 1.08
    axes.set_yscale("log")
    axes.set_ylim(low / (high / low) ** (foot / (1 - foot)), high)
    ticks = next(ticks for span, ticks in RATIO_TICKS if high / low <= span)
    axes.yaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def is_infeasible(record: RunRecord) -> bool:
    return record.outcome in (Outcome.PLAN_INFEASIBLE, Outcome.OOM)


def draw_infeasible(axes: Axes, looks: Looks, crosses: Sequence[tuple[str, float]], smallest: Mapping[str, float] | None = None) -> float:
    """A lane for each method at the foot of the figure: a cross at each budget that it could not keep, and a line over the region that it
    cannot reach, where its smallest budget is known. Returns the share of the height that the lanes take."""
    smallest, methods = smallest or {}, list(dict.fromkeys(name for name, _ in crosses))
    if len(methods) > MOST_LANES:
        _draw_together(axes, [x for name, x in crosses if name in methods[MOST_LANES - 1:]], len(methods) - MOST_LANES + 1)
        methods = methods[:MOST_LANES - 1]
    for lane, method in enumerate(methods):
        height, xs = (lane + 1) * LANE_HEIGHT, [x for name, x in crosses if name == method]
        look = {"color": looks.colour(method), "transform": axes.get_xaxis_transform(), "clip_on": False}
        if method in smallest:
            axes.plot([0, smallest[method]], [height, height], linewidth=3, alpha=0.5, solid_capstyle="butt", label=REGION, **look)
        axes.plot(xs, [height] * len(xs), linestyle="none", marker="x", markersize=6, markeredgewidth=1.8,
                  label=f"{plain_label(method)}, infeasible", **look)
    lanes = min(MOST_LANES, len({name for name, _ in crosses}))
    return (lanes + 1) * LANE_HEIGHT if lanes else 0.0


def _draw_together(axes: Axes, xs: Sequence[float], number: int) -> None:
    """The last lane, of all methods that have none of their own."""
    axes.plot(xs, [MOST_LANES * LANE_HEIGHT] * len(xs), linestyle="none", marker="x", markersize=6, markeredgewidth=1.8, color=MUTED,
              transform=axes.get_xaxis_transform(), clip_on=False, label=f"{count_of(number, 'more method')}, infeasible")


def marks_in_words(marks: Sequence[Mark], x_unit: str, y_unit: str) -> str:
    """The drawing for those who cannot see it: each mark, or of each method its range where there are many."""
    if len(marks) > MOST_TOLD:
        return _ranges_in_words(marks, x_unit, y_unit)
    return "; ".join(f"{plain_label(p.method)}{' simulated' if p.is_simulated else ''}: {p.y:.4g} {y_unit} at {p.x:.4g} {x_unit}"
                     for p in marks)


def _ranges_in_words(marks: Sequence[Mark], x_unit: str, y_unit: str) -> str:
    by_look: dict[str, list[Mark]] = {}
    for p in marks:
        by_look.setdefault(f"{plain_label(p.method)}{' simulated' if p.is_simulated else ''}", []).append(p)
    return "; ".join(f"{name}, {count_of(len(found), 'mark')}: {min(p.y for p in found):.4g} to {max(p.y for p in found):.4g} {y_unit} at "
                     f"{min(p.x for p in found):.4g} to {max(p.x for p in found):.4g} {x_unit}" for name, found in by_look.items())
