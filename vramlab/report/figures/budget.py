"""Peak and step time against the memory budget: one panel each for every step that is compared, and one chart over all networks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Iterable, Mapping, Sequence

from matplotlib.axes import Axes

from vramlab.counted import count_of
from vramlab.record import RunRecord
from vramlab.report import drawing
from vramlab.report.drawing import INK, MUTED, Panel, facets, panel_axes, plain_label
from vramlab.report.figures.groups import peak_of, step_groups, where_in_words
from vramlab.report.figures.kinds import MAX_PANELS, FigureSet, Looks
from vramlab.report.figures.marks import Mark, draw_infeasible, draw_marks, is_infeasible, marks_in_words, scale_ratios
from vramlab.report.words import GIB, MIB, counts, is_of_few_pairs, is_simulated_target, join_words, simulated_ratio
from vramlab.runs import Run

FACETS_A_ROW = 3
ORACLE = "eager, memory enough"
BOUND = "bound of all schedules"


def budget_figures(run: Run, looks: Looks) -> FigureSet:
    """For each model, batch and target: peak against budget, with the line on which both are equal, and step time against
    eager's over the budget as a share of eager's peak; with the bounds below which no schedule is, and what each method cannot reach."""
    panels, groups = [], step_groups(run)
    notes = [] if any(map(_bound, groups)) else ["the lower bound of all schedules is not drawn: these records do not hold it"]
    for index, group in enumerate(groups):
        if len(panels) >= MAX_PANELS:
            notes.append(f"{MAX_PANELS} panels are drawn, of {count_of(len(groups), 'group')} of cells; the tables hold all")
            break
        drawn = (_peak_panel(run, looks, f"peak{index}", group), _overhead_panel(run, looks, f"time{index}", group))
        panels += [panel for panel in drawn if panel]
    return FigureSet(panels=tuple(panels), note=f"{'; '.join(notes).capitalize()}." if notes and panels else "")


def methods_figure(run: Run, looks: Looks) -> FigureSet:
    """One chart of a run that simulates several networks on one device: step time over budget of every method, a facet each."""
    groups = [g for g in step_groups(run) if is_simulated_target(g[0].config)]
    drawn = [(g[0], [p for r in g if r.budget_bytes and counts(r) for p in _overhead_marks(run, r)], _time_bound(g)) for g in groups]
    drawn = [(record, marks, bound) for record, marks, bound in drawn if marks]
    if len({record.config["model"] for record, _, _ in drawn}) < 2:
        return FigureSet()
    rows = -(-len(drawn) // FACETS_A_ROW)
    with facets([where_in_words(run, r) for r, _, _ in drawn], (3.3 * FACETS_A_ROW, 3.2 * rows + 1), FACETS_A_ROW) as figure:
        for axes, (_, marks, bound) in zip(figure.axes, drawn):
            axes.axhline(1.0, color=MUTED, linewidth=1.0, label=ORACLE)
            _draw_time_bound(axes, bound)
            draw_marks(axes, looks, marks)
            axes.set(xlim=(0, 1.05 * max([100.0] + [m.x for m in marks])), xlabel="budget (% of eager's peak)",
                     ylabel="step time / eager's (log scale)")
            scale_ratios(axes, [p for _, shown, edge in drawn for p in (*shown, *edge)], [])
        title = "Step time of every method on every network, against eager's"
        described = ". ".join("; ".join([f"{r.config['model']}: {marks_in_words(marks, '% of the peak', 'times the time')}",
                                         *_time_bound_in_words(bound)]) for r, marks, bound in drawn)
        return FigureSet(panels=(drawing.finish(figure, name="methods", title=title, description=described, columns=4),),
                         note="A line ends at the smallest of the budgets that its method can keep.")


def _peak_panel(run: Run, looks: Looks, name: str, group: Sequence[RunRecord]) -> Panel | None:
    budgeted = [r for r in group if r.budget_bytes]
    marks = [p for r in budgeted if counts(r) for p in _peak_marks(run, r)]
    if not marks:
        return None
    title, references = where_in_words(run, group[0]), _reference_peaks(run, group)
    top = 1.08 * max([v for p in marks for v in (p.x, p.y)] + [r.budget_bytes for r in budgeted] + list(references.values()))
    unit, size = ("GiB", GIB) if top >= 4 * GIB else ("MiB", MIB)
    marks = [replace(p, x=p.x / size, y=p.y / size) for p in marks]
    with panel_axes(title) as (figure, axes):
        axes.plot([0, top / size], [0, top / size], color=MUTED, linestyle="--", linewidth=1.0, label="peak = budget")
        for style, (peak, names) in zip((":", "-.", (0, (1, 3))), _merge_close(references)):
            axes.axhline(peak / size, color=MUTED, linestyle=style, linewidth=1.2, label=f"{join_words(names)}, no budget")
        if bound := _bound(group):
            axes.axhline(bound[1] / size, color=INK, linestyle=(0, (5, 2)), linewidth=1.0, label=BOUND)
        draw_marks(axes, looks, marks)
        draw_infeasible(axes, looks, [(run.label(r), r.budget_bytes / size) for r in budgeted if is_infeasible(r)])
        axes.set(xlim=(0, top / size), ylim=(0, top / size), xlabel=f"budget ({unit})", ylabel=f"peak ({unit})")
        described = marks_in_words(marks, f"{unit} budget", f"{unit} peak")
        return drawing.finish(figure, name=name, title=f"Peak against budget: {title}", description=described)


def _merge_close(peaks: Mapping[str, float], share: float = 0.005) -> list[tuple[float, list[str]]]:
    """[(peak, methods)]: peaks that no eye tells apart are one line."""
    merged: list[tuple[float, list[str]]] = []
    for method, peak in peaks.items():
        near = next((names for value, names in merged if abs(value - peak) <= share * value), None)
        if near is None:
            merged.append((peak, [plain_label(method)]))
        else:
            near.append(plain_label(method))
    return merged


def _reference_peaks(run: Run, group: Sequence[RunRecord]) -> dict[str, float]:
    """Peaks in bytes of the methods that take no budget; of eager also where only other cells carry it."""
    peaks = {run.label(r): peak_of(r) for r in group if counts(r) and not r.budget_bytes and peak_of(r)}
    carried = next((r.eager_peak_bytes for r in group if r.eager_peak_bytes), None)
    return peaks if "eager" in peaks or not carried else {"eager": carried, **peaks}


def _peak_marks(run: Run, record: RunRecord) -> Iterable[Mark]:
    method, x = run.label(record), record.budget_bytes
    measured, predicted = record.measured.get("peak_bytes"), record.predicted.get("peak_bytes")
    if measured is not None and not is_simulated_target(record.config):
        yield Mark(method=method, x=x, y=measured, is_simulated=False)
    if predicted is not None:
        yield Mark(method=method, x=x, y=predicted, is_simulated=True)


def _overhead_panel(run: Run, looks: Looks, name: str, group: Sequence[RunRecord]) -> Panel | None:
    budgeted = [r for r in group if r.budget_bytes and r.eager_peak_bytes]
    marks = [p for r in budgeted if counts(r) for p in _overhead_marks(run, r)]
    if not marks:
        return None
    title = where_in_words(run, group[0])
    drifts = [d for r in group if (d := r.measured.get("drift") or {}).get("low") is not None and not is_of_few_pairs(d)]
    with panel_axes(title) as (figure, axes):
        if drifts:
            axes.axhspan(min(d["low"] for d in drifts), max(d["high"] for d in drifts), color=MUTED, alpha=0.18, linewidth=0,
                         label="eager against itself")
        axes.axhline(1.0, color=MUTED, linewidth=1.0, label=ORACLE)
        fastest = _time_bound(group)
        bounded = [*_shade_below_bound(axes, group), *_time_bound_in_words(fastest)]
        _draw_time_bound(axes, fastest)
        draw_marks(axes, looks, marks)
        crosses = [(run.label(r), _percent_of_eager(r, r.budget_bytes)) for r in budgeted if is_infeasible(r)]
        foot = draw_infeasible(axes, looks, crosses, _smallest_reached(run, budgeted))
        right = max([100.0] + [p.x for p in marks])
        axes.set(xlim=(0, 1.05 * right), xlabel="budget (% of eager's peak)", ylabel="step time / eager's (log scale)")
        scale_ratios(axes, [*marks, *fastest], drifts, foot)
        described = "; ".join([marks_in_words(marks, "% of eager's peak", "times eager's step"), *bounded])
        return drawing.finish(figure, name=name, title=f"Step time against budget: {title}", description=described)


def _overhead_marks(run: Run, record: RunRecord) -> Iterable[Mark]:
    method, x = run.label(record), _percent_of_eager(record, record.budget_bytes)
    ratio = record.measured.get("ratio") or {}
    if ratio.get("median") and not is_simulated_target(record.config):
        low, high = (None, None) if is_of_few_pairs(ratio) else (ratio.get("low"), ratio.get("high"))
        yield Mark(method=method, x=x, y=ratio["median"], low=low, high=high, is_simulated=False)
    if simulated := simulated_ratio(record):
        yield Mark(method=method, x=x, y=simulated, is_simulated=True)


def _percent_of_eager(record: RunRecord, nbytes: int) -> float:
    return 100 * nbytes / record.eager_peak_bytes


def _bound(group: Sequence[RunRecord]) -> tuple[RunRecord, int] | None:
    """The record of a group with the smallest lower bound of its step, and the bound in bytes: methods that may choose algorithms, or
    write in place, have a lower one."""
    held = [(r, r.provenance["lower_bound_bytes"]) for r in group if r.eager_peak_bytes and r.provenance.get("lower_bound_bytes")]
    return min(held, key=lambda pair: pair[1], default=None)


def _shade_below_bound(axes: Axes, group: Sequence[RunRecord]) -> list[str]:
    """The region in which no schedule of the whole batch can be, where a record holds the bound; what was shaded, in words."""
    if not (found := _bound(group)):
        return []
    percent = _percent_of_eager(*found)
    axes.axvspan(0, percent, facecolor="none", edgecolor=MUTED, hatch="////", alpha=0.4, linewidth=0,
                 label="no schedule of the whole batch")
    return [f"no schedule of the whole batch at once is below {percent:.4g} % of eager's peak"]


def _time_bound(group: Sequence[RunRecord]) -> list[Mark]:
    """The budgets of a group, ascending, each with the step time that no schedule within it is below, over eager's; simulated. Where
    methods have steps of their own (other convolution algorithms, split backwards), the lowest of their bounds."""
    least: dict[float, float] = {}
    for r in group:
        bound, eager = (r.predicted.get(key) for key in ("least_step_seconds", "eager_step_seconds"))
        if r.budget_bytes and r.eager_peak_bytes and bound and eager:
            x = round(_percent_of_eager(r, r.budget_bytes), 2)  # one budget, though its bytes were rounded
            least[x] = min(bound / eager, least.get(x, math.inf))
    return [Mark(method=BOUND, x=x, y=least[x], is_simulated=True) for x in sorted(least)]


def _draw_time_bound(axes: Axes, bound: Sequence[Mark]) -> None:
    """Steps: what no schedule within a budget is below, none within a smaller one is below either. Above the largest nothing is drawn."""
    if bound:
        axes.plot([0.0, *(p.x for p in bound)], [bound[0].y, *(p.y for p in bound)], drawstyle="steps-pre", color=INK, linewidth=1.2,
                  linestyle=(0, (5, 2)), zorder=2, label=f"{BOUND}, simulated")


def _time_bound_in_words(bound: Sequence[Mark]) -> list[str]:
    if not bound:
        return []
    told = ", ".join(f"{p.y:.4g} times eager's step at {p.x:.4g} %" for p in bound)
    return [f"no schedule of the whole batch at once is, simulated, below {told}"]


def _smallest_reached(run: Run, records: Sequence[RunRecord]) -> dict[str, float]:
    """For each method that said so: the smallest budget that it can reach, in per cent of eager's peak."""
    told = [(run.label(r), _percent_of_eager(r, (r.predicted.get("infeasible") or {}).get("smallest_bytes") or 0)) for r in records]
    return {method: percent for method, percent in told if percent}
