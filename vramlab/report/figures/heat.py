"""Methods against models: one number a field, at a glance where a method is cheap and where it cannot go."""

from __future__ import annotations

import math
from typing import Sequence

import numpy as np
import seaborn
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgb

from vramlab.record import RunRecord
from vramlab.report import drawing
from vramlab.report.drawing import INK, SERIES, Panel, panel_axes, plain_label
from vramlab.report.figures.groups import grouped, sentence
from vramlab.report.figures.kinds import MAX_PANELS, FigureSet, Looks
from vramlab.report.figures.marks import is_infeasible
from vramlab.report.words import budget_in_words, counts, is_simulated_target, join_words, simulated_ratio, target_in_words
from vramlab.runs import Run

DARKEST = 0.5  # opacity of the largest value: ink stays legible on it
INFEASIBLE, NO_CELL = "\u00d7", "no cell"
_SHADES = LinearSegmentedColormap.from_list("shades", [(*to_rgb(SERIES[0]), 0.0), (*to_rgb(SERIES[0]), DARKEST)])


def heat_figures(run: Run, looks: Looks) -> FigureSet:
    """For each target and budget on which several methods met several models: step time over eager's."""
    steps = [r for r in run.records if r.kind == "step" and r.config.get("budget") is not None]
    groups = grouped(steps, lambda r: (r.config.get("target"), r.config.get("budget")))
    groups = [g for g in groups if len({_model(r) for r in g}) > 1 and len({run.label(r) for r in g}) > 1]
    panels = [_panel(run, f"heat{i}", group) for i, group in enumerate(groups[:MAX_PANELS])]
    notes = [f"{MAX_PANELS} panels are drawn, of {len(groups)}" if len(groups) > MAX_PANELS else ""]
    return FigureSet(panels=tuple(panels), note=sentence(notes))


def _panel(run: Run, name: str, group: Sequence[RunRecord]) -> Panel:
    models, methods = (list(dict.fromkeys(names)) for names in ((_model(r) for r in group), (run.label(r) for r in group)))
    values = np.full((len(methods), len(models)), math.nan)
    words = np.full(values.shape, "", dtype=object)
    for record in group:
        at = methods.index(run.label(record)), models.index(_model(record))
        ratio = _ratio(record)
        values[at] = math.nan if ratio is None else ratio
        words[at] = INFEASIBLE if is_infeasible(record) else "\u2013" if ratio is None else f"{ratio:.2f}"
    hardware = target_in_words(group[0].config, run.environment_of(group[0]))
    heading = f"budget {budget_in_words(group[0].config)}, {hardware}"
    highest = max(np.nanmax(values), 1.0001) if np.isfinite(values).any() else 2.0
    size = (2.4 + 0.95 * len(models), 1.5 + 0.28 * len(methods))
    with panel_axes(heading, (max(4.4, size[0]), size[1])) as (figure, axes):
        seaborn.heatmap(values, ax=axes, cmap=_SHADES, norm=LogNorm(1.0, highest, clip=True), cbar=False)
        for (row, column), word in np.ndenumerate(words):
            axes.text(column + 0.5, row + 0.5, word, ha="center", va="center", fontsize=8.5, color=INK)
        axes.set_xticks(np.arange(len(models)) + 0.5, [plain_label(m, 20) for m in models], rotation=30, ha="right", rotation_mode="anchor")
        axes.set_yticks(np.arange(len(methods)) + 0.5, [plain_label(m, 32) for m in methods], rotation=0)
        axes.grid(visible=False)
        axes.tick_params(length=0)
        told = [f"{method}: {join_words(f'{m} {w or NO_CELL}' for m, w in zip(models, row))}" for method, row in zip(methods, words)]
        kind = "simulated" if is_simulated_target(group[0].config) else "measured"
        return drawing.finish(figure, name=name, title=f"Step time over eager's, methods by models, {kind}: {heading}",
                              description="; ".join(told))


def _model(record: RunRecord) -> str:
    batch = record.config.get("batch_size")
    return f"{record.config.get('model')} b{batch}"


def _ratio(record: RunRecord) -> float | None:
    """Measured on hardware, simulated on a profile; None where it does not count."""
    if not counts(record):
        return None
    return simulated_ratio(record) if is_simulated_target(record.config) else (record.measured.get("ratio") or {}).get("median")
