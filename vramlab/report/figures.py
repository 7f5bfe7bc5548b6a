"""The figures of the report, from records alone. Measured points are filled, simulated ones hollow and said to be so."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Any, Iterable, Mapping, Sequence

import seaborn
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from vramlab.record import Outcome, RunRecord
from vramlab.report.drawing import MARKERS, MUTED, PAPER, SERIES, Panel, facets, finish, panel_axes, plain_label
from vramlab.report.words import GIB, MIB, count_of, counts, is_simulated_target, join_words, simulated_ratio, target_in_words
from vramlab.runs import TELEMETRY_FILE, Run
from vramlab.telemetry import Telemetry, read_telemetry

MAX_PANELS = 12
FACETS_A_ROW = 3
MAX_POINTS = 600  # of a time series, each the largest value of its span
RATIO_TICKS = (  # for spans from low to high of at most so many times
    (1.6, (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5)),
    (4.0, (0.5, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0)),
    (float("inf"), (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)),
)


@dataclass(frozen=True, kw_only=True)
class FigureSet:
    """Panels of one kind; `note` says what is not drawn, "" when all is."""

    panels: tuple[Panel, ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class _Point:
    """One record as a mark. x and y are what the axes say."""

    method: str
    x: float
    y: float
    is_simulated: bool
    low: float | None = None
    high: float | None = None


class Looks:
    """The same colour and marker for a method in all figures, in order of appearance."""

    def __init__(self, run: Run) -> None:
        names = dict.fromkeys(run.label(record) for record in run.records)
        self._index = {name: i for i, name in enumerate(names)}

    def colour(self, method: str) -> str:
        """Stand-in of the method's series colour."""
        return SERIES[self._index.get(method, 0) % len(SERIES)]

    def marker(self, method: str) -> str:
        """The method's marker: colour is never the only difference."""
        index = self._index.get(method, 0)
        return MARKERS[(index + index // len(SERIES)) % len(MARKERS)]


def step_groups(run: Run) -> list[list[RunRecord]]:
    """Step cells that are compared: of equal experiment, model, batch size and target, in order of the plan."""
    groups: dict[tuple[str, ...], list[RunRecord]] = defaultdict(list)
    for record in run.records:
        if record.kind == "step":
            groups[tuple(str(record.config.get(key)) for key in ("experiment", "model", "batch_size", "target"))].append(record)
    return list(groups.values())


def budget_figures(run: Run, looks: Looks) -> FigureSet:
    """For each model, batch and target: peak against budget, with the line on which both are equal, and step time against
    eager's over the budget as a share of eager's peak."""
    panels, groups = [], step_groups(run)
    for index, group in enumerate(groups):
        if len(panels) >= MAX_PANELS:
            return FigureSet(panels=tuple(panels), note=f"{MAX_PANELS} panels are drawn, of {count_of(len(groups), 'group')} of cells; "
                                                        "the tables hold all.")
        drawn = (_peak_panel(run, looks, f"peak{index}", group), _overhead_panel(run, looks, f"time{index}", group))
        panels += [panel for panel in drawn if panel]
    return FigureSet(panels=tuple(panels))


def methods_figure(run: Run, looks: Looks) -> FigureSet:
    """One chart of a run that simulates several networks on one device: step time over budget of every method, a facet each."""
    groups = [g for g in step_groups(run) if is_simulated_target(g[0].config)]
    drawn = [(g[0], [p for r in g if r.budget_bytes and counts(r) for p in _overhead_points(run, r)]) for g in groups]
    drawn = [(record, points) for record, points in drawn if points]
    if len({record.config["model"] for record, _ in drawn}) < 2:
        return FigureSet(panels=())
    rows = -(-len(drawn) // FACETS_A_ROW)
    with facets([where_in_words(run, r) for r, _ in drawn], (3.3 * FACETS_A_ROW, 2.6 * rows + 1), FACETS_A_ROW) as figure:
        for axes, (_, points) in zip(figure.axes, drawn):
            axes.axhline(1.0, color=MUTED, linewidth=1.0)
            _draw_points(axes, looks, points)
            axes.set(xlim=(0, 105), xlabel="budget (% of eager's peak)", ylabel="step time / eager's (log scale)")
            _scale_ratios(axes, [p for _, shown in drawn for p in shown], [])
        title = "Step time of every method on every network, against eager's"
        described = ". ".join(f"{r.config['model']}: {_in_words(points, '% of the peak', 'times the time')}" for r, points in drawn)
        return FigureSet(panels=(finish(figure, name="methods", title=title, description=described, columns=4),),
                         note="A line ends at the smallest of the budgets that its method can keep.")


def where_in_words(run: Run, record: RunRecord) -> str:
    """`resnet50, batch 16, simulated v100-32gb`."""
    hardware = target_in_words(record.config, run.environment_of(record))
    return f"{record.config.get('model')}, batch {record.config.get('batch_size')}, {hardware}"


def _peak_panel(run: Run, looks: Looks, name: str, group: Sequence[RunRecord]) -> Panel | None:
    budgeted = [r for r in group if r.budget_bytes]
    points = [p for r in budgeted if counts(r) for p in _peak_points(run, r)]
    if not points:
        return None
    title, references = where_in_words(run, group[0]), _reference_peaks(run, group)
    top = 1.08 * max([v for p in points for v in (p.x, p.y)] + [r.budget_bytes for r in budgeted] + list(references.values()))
    unit, size = ("GiB", GIB) if top >= 4 * GIB else ("MiB", MIB)
    points = [replace(p, x=p.x / size, y=p.y / size) for p in points]
    with panel_axes(title) as (figure, axes):
        axes.plot([0, top / size], [0, top / size], color=MUTED, linestyle="--", linewidth=1.0, label="peak = budget")
        for style, (peak, names) in zip((":", "-.", (0, (1, 3))), _merge_close(references)):
            axes.axhline(peak / size, color=MUTED, linestyle=style, linewidth=1.2, label=f"{join_words(names)}, no budget")
        _draw_points(axes, looks, points)
        _draw_infeasible(axes, looks, [(run.label(r), r.budget_bytes / size) for r in budgeted if _is_infeasible(r)])
        axes.set(xlim=(0, top / size), ylim=(0, top / size), xlabel=f"budget ({unit})", ylabel=f"peak ({unit})")
        described = _in_words(points, f"{unit} budget", f"{unit} peak")
        return finish(figure, name=name, title=f"Peak against budget: {title}", description=described)


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


def peak_of(record: RunRecord) -> int | None:
    """Measured on hardware, predicted on a simulated device."""
    return (record.predicted if is_simulated_target(record.config) else record.measured).get("peak_bytes")


def _peak_points(run: Run, record: RunRecord) -> Iterable[_Point]:
    method, x = run.label(record), record.budget_bytes
    measured, predicted = record.measured.get("peak_bytes"), record.predicted.get("peak_bytes")
    if measured is not None and not is_simulated_target(record.config):
        yield _Point(method=method, x=x, y=measured, is_simulated=False)
    if predicted is not None:
        yield _Point(method=method, x=x, y=predicted, is_simulated=True)


def _overhead_panel(run: Run, looks: Looks, name: str, group: Sequence[RunRecord]) -> Panel | None:
    budgeted = [r for r in group if r.budget_bytes and r.eager_peak_bytes]
    points = [p for r in budgeted if counts(r) for p in _overhead_points(run, r)]
    if not points:
        return None
    title = where_in_words(run, group[0])
    drifts = [r.measured["drift"] for r in group if (r.measured.get("drift") or {}).get("low") is not None]
    with panel_axes(title) as (figure, axes):
        if drifts:
            axes.axhspan(min(d["low"] for d in drifts), max(d["high"] for d in drifts), color=MUTED, alpha=0.18, linewidth=0,
                         label="eager against itself")
        axes.axhline(1.0, color=MUTED, linewidth=1.0)
        _draw_points(axes, looks, points)
        infeasible = [(run.label(r), 100 * r.budget_bytes / r.eager_peak_bytes) for r in budgeted if _is_infeasible(r)]
        _draw_infeasible(axes, looks, infeasible)
        right = max([100.0] + [p.x for p in points])
        axes.set(xlim=(0, 1.05 * right), xlabel="budget (% of eager's peak)", ylabel="step time / eager's (log scale)")
        _scale_ratios(axes, points, drifts)
        return finish(figure, name=name, title=f"Step time against budget: {title}",
                      description=_in_words(points, "% of eager's peak", "times eager's step"))


def _overhead_points(run: Run, record: RunRecord) -> Iterable[_Point]:
    method, x = run.label(record), 100 * record.budget_bytes / record.eager_peak_bytes
    ratio = record.measured.get("ratio") or {}
    if ratio.get("median") and not is_simulated_target(record.config):
        yield _Point(method=method, x=x, y=ratio["median"], low=ratio.get("low"), high=ratio.get("high"), is_simulated=False)
    if simulated := simulated_ratio(record):
        yield _Point(method=method, x=x, y=simulated, is_simulated=True)


def _scale_ratios(axes: Axes, points: Sequence[_Point], drifts: Sequence[Mapping[str, Any]]) -> None:
    """Log scale around 1, so that twice as slow and half as slow lie equally far from it."""
    values = [1.0] + [v for p in points for v in (p.y, p.low, p.high) if v] + [v for d in drifts for v in (d["low"], d["high"])]
    low, high = min(values) / 1.12, max(values) * 1.08
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    ticks = next(ticks for span, ticks in RATIO_TICKS if high / low <= span)
    axes.yaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _is_infeasible(record: RunRecord) -> bool:
    return record.outcome in (Outcome.PLAN_INFEASIBLE, Outcome.OOM)


def _draw_points(axes: Axes, looks: Looks, points: Sequence[_Point]) -> None:
    """Lines through simulated points, marks on measured ones with their 95 % interval. Where both are drawn the hollow marks are the larger
    and lie above: equal values show as a ring around a dot."""
    are_mixed = len({p.is_simulated for p in points}) == 2
    for method in dict.fromkeys(p.method for p in points):
        colour, marker, label = looks.colour(method), looks.marker(method), plain_label(method)
        for is_simulated in (True, False):
            chosen = sorted((p for p in points if p.method == method and p.is_simulated == is_simulated), key=lambda p: p.x)
            if not chosen:
                continue
            face = colour if not is_simulated else "none" if are_mixed else PAPER
            seaborn.lineplot(x=[p.x for p in chosen], y=[p.y for p in chosen], ax=axes, color=colour, marker=marker,
                             markersize=10 if is_simulated and are_mixed else 6, zorder=4 if is_simulated and are_mixed else 3,
                             linestyle="--" if is_simulated else "-", markerfacecolor=face,
                             markeredgecolor=colour, errorbar=None, estimator=None,
                             label=f"{label}, simulated" if is_simulated else label, legend=False)
            bars = [p for p in chosen if p.low is not None and p.high is not None]
            if bars:
                axes.errorbar([p.x for p in bars], [p.y for p in bars], fmt="none", ecolor=colour, elinewidth=1.0, capsize=2.5,
                              yerr=[[p.y - p.low for p in bars], [p.high - p.y for p in bars]])


def _draw_infeasible(axes: Axes, looks: Looks, marks: Sequence[tuple[str, float]]) -> None:
    """A cross at the foot of the figure for each budget that a method could not keep."""
    for method in dict.fromkeys(name for name, _ in marks):
        axes.plot([x for name, x in marks if name == method], [0.035 for name, _ in marks if name == method], linestyle="none",
                  marker="x", markersize=7, markeredgewidth=2, color=looks.colour(method), transform=axes.get_xaxis_transform(),
                  clip_on=False, label=f"{plain_label(method)}, infeasible")


def _in_words(points: Sequence[_Point], x_unit: str, y_unit: str) -> str:
    """The drawing for those who cannot see it."""
    return "; ".join(f"{plain_label(p.method)}{' simulated' if p.is_simulated else ''}: {p.y:.4g} {y_unit} at {p.x:.4g} {x_unit}"
                     for p in points)


def training_figures(run: Run, looks: Looks) -> FigureSet:
    """Loss, gradient norm and test accuracy over eager's, one panel each for every training cell."""
    panels: list[Panel] = []
    trained = [r for r in run.records if r.kind == "train" and r.training.get("loss")]
    for index, record in enumerate(trained[:MAX_PANELS]):
        for key, label in (("loss", "training loss"), ("grad_norm", "gradient norm"), ("accuracy", "test accuracy")):
            if panel := _training_panel(run, looks, record, f"train{index}{key}", key, label):
                panels.append(panel)
    note = f"The first {MAX_PANELS} of {len(trained)} training cells are drawn." if len(trained) > MAX_PANELS else ""
    return FigureSet(panels=tuple(panels), note=note)


def _training_panel(run: Run, looks: Looks, record: RunRecord, name: str, key: str, label: str) -> Panel | None:
    method = run.label(record)
    ours, eager = (_series(record.training.get(k) or []) for k in (key, f"eager_{key}"))
    if not ours:
        return None
    title = f"{record.config.get('model')} on {record.config.get('data')}, {method}: {label}"
    with panel_axes(title) as (figure, axes):
        if eager:
            axes.plot(*zip(*eager), color=MUTED, linewidth=5, alpha=0.45, label="eager", solid_capstyle="round")
        seaborn.lineplot(x=[x for x, _ in ours], y=[y for _, y in ours], ax=axes, color=looks.colour(method), errorbar=None, estimator=None,
                         linewidth=1.2, marker=looks.marker(method) if len(ours) < 20 else "", label=plain_label(method), legend=False)
        highest = max([y for _, y in ours + eager])
        top = 1.0 if key == "accuracy" and highest <= 1 else 1.05 * highest
        axes.set(xlim=(0, max(x for x, _ in ours)), ylim=(min(0, min(y for _, y in ours + eager)), top or 1.0), xlabel="step", ylabel=label)
        ends = f"{label} goes from {ours[0][1]:.4g} to {ours[-1][1]:.4g} over {int(ours[-1][0])} steps"
        return finish(figure, name=name, title=title, description=f"{ends}; eager ends at {eager[-1][1]:.4g}" if eager else ends)


def _series(values: Sequence[Any]) -> list[tuple[float, float]]:
    """[(step from 1, value)] of a plain list or of [[step, value], ...]; values that are no number are left out."""
    pairs = [v if isinstance(v, list | tuple) else (i, v) for i, v in enumerate(values, 1)]
    return [(float(step), float(value)) for step, value in pairs if value is not None]


TELEMETRY_PANELS = (
    ("memory", "memory (MiB)", MIB, (("gpu_memory_used_bytes", "GPU memory in use"),
                                     ("rss_bytes", "resident host memory, shared pages in each process"))),
    ("use", "use (%, 100 = one core)", 1, (("gpu_busy_percent", "GPU busy"), ("cpu_percent", "processor"))),
    ("power", "power (W)", 1, (("power_watts", "GPU board"),)),
    ("temperature", "temperature (\u00b0C)", 1, (("temperature_celsius", "GPU"),)),
)


def telemetry_figures(found: Mapping[str, Telemetry]) -> FigureSet:
    """Memory, use, power and temperature over the time that cells ran; columns without a value are not drawn but listed."""
    parts = _end_to_end(found)
    panels, absent = [], {}
    for name, ylabel, scale, columns in TELEMETRY_PANELS:
        drawn = [(column, label) for column, label in columns if any(v is not None for _, t in parts for v in t.columns[column])]
        absent |= {column: _reason(found, column) for column, _ in columns if column not in dict(drawn)}
        if drawn:
            panels.append(_telemetry_panel(parts, f"telemetry-{name}", ylabel, scale, drawn))
    note = f"Not drawn: {'; '.join(f'{column} ({reason})' for column, reason in absent.items())}." if absent and parts else ""
    return FigureSet(panels=tuple(panels), note=note)


def load_telemetry(run: Run) -> tuple[dict[str, Telemetry], dict[str, str]]:
    """Telemetry of each cell, and why some of them have none."""
    found, missing = {}, {}
    for cell in run.cells:
        path = cell.folder / TELEMETRY_FILE
        try:
            found[cell.cell_id] = read_telemetry(path)
        except FileNotFoundError:
            missing[cell.cell_id] = "no telemetry file"
        except (OSError, ValueError) as error:
            missing[cell.cell_id] = str(error)
    return found, missing


def _reason(found: Mapping[str, Telemetry], column: str) -> str:
    reasons = (t.summary()["missing"].get(column) for t in found.values())
    return next(filter(None, reasons), "no value in any sample")


def _end_to_end(found: Mapping[str, Telemetry]) -> list[tuple[float, Telemetry]]:
    """(seconds of telemetry before it, telemetry) in order of time: a pause between two cells, of days perhaps, takes no room."""
    parts, offset = [], 0.0
    for telemetry in sorted((t for t in found.values() if t.rows), key=lambda t: datetime.fromisoformat(t.header["started"])):
        parts.append((offset, telemetry))
        offset += telemetry.columns["t_seconds"][-1]
    return parts


def _telemetry_panel(parts: Sequence[tuple[float, Telemetry]], name: str, ylabel: str, scale: float,
                     columns: Sequence[tuple[str, str]]) -> Panel:
    title = f"Telemetry: {ylabel}"
    with panel_axes(title) as (figure, axes):
        last_offset, last = parts[-1]
        highest, right = 0.0, last_offset + last.columns["t_seconds"][-1]
        for index, (column, label) in enumerate(columns):
            xs, ys = _joined(parts, column, scale)
            axes.plot(xs, ys, color=SERIES[index], label=label, linewidth=1.1)
            highest = max([highest, *(y for y in ys if y == y)])
        axes.set(xlim=(0, right or 1), ylim=(0, 1.08 * highest or 1), xlabel="seconds, cells one after another", ylabel=ylabel)
        described = f"{', '.join(label for _, label in columns)}; highest value {highest:.4g}"
        return finish(figure, name=name, title=title, description=described)


def _joined(parts: Sequence[tuple[float, Telemetry]], column: str, scale: float) -> tuple[list[float], list[float]]:
    """One line over all cells, broken between them; thinned to the largest value of each span."""
    share = max(2, MAX_POINTS // max(1, len(parts)))
    xs: list[float] = []
    ys: list[float] = []
    for offset, telemetry in parts:
        samples = [(t, v / scale) for t, v in zip(telemetry.columns["t_seconds"], telemetry.columns[column]) if v is not None]
        edges = [round(i * len(samples) / share) for i in range(share + 1)] if len(samples) > share else list(range(len(samples) + 1))
        for start, end in pairwise(edges):
            t, v = max(samples[start:end], key=lambda sample: sample[1])
            xs.append(offset + t)
            ys.append(v)
        xs.append(xs[-1] if xs else offset)
        ys.append(float("nan"))
    return xs, ys
