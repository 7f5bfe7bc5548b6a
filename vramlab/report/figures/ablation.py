"""One method with several settings side by side: what each of its parts gives."""

from __future__ import annotations

from typing import Sequence

from vramlab.record import RunRecord
from vramlab.report.drawing import Panel
from vramlab.report.figures.bars import MAX_BARS, Bar, bar_panel
from vramlab.report.figures.groups import COMPARED, grouped, peak_of, sentence, where_in_words
from vramlab.report.figures.kinds import MAX_PANELS, FigureSet, Looks
from vramlab.report.words import GIB, MIB, budget_in_words, bytes_in_words, counts, interval_in_words, is_simulated_target, simulated_ratio
from vramlab.runs import Run


def ablation_figures(run: Run, looks: Looks) -> FigureSet:
    """For each step, budget and method that ran with several settings: the peak of each, in order of the plan, and its step time."""
    steps = [r for r in run.records if r.kind == "step"]
    groups = grouped(steps, lambda r: (*(r.config.get(key) for key in COMPARED), r.config.get("method"), r.config.get("budget")))
    groups = [g for g in groups if len({repr(r.config.get("options")) for r in g}) > 1]
    found = [_panel(run, looks, f"settings{i}", group) for i, group in enumerate(groups[:MAX_PANELS])]
    notes = [f"{MAX_PANELS} panels are drawn, of {len(groups)}" if len(groups) > MAX_PANELS else "",
             *(f"{run.label(r)} is not drawn: {r.message or r.outcome}" for g in groups for r in g if not counts(r) or not peak_of(r))]
    return FigureSet(panels=tuple(panel for panel in found if panel), note=sentence(notes))


def _panel(run: Run, looks: Looks, name: str, group: Sequence[RunRecord]) -> Panel | None:
    found = [r for r in group if counts(r) and peak_of(r)][:MAX_BARS]
    if not found:
        return None
    first = found[0]
    budget = "" if first.config.get("budget") is None else f", budget {budget_in_words(first.config)}"
    heading = f"{first.config.get('method')}: {where_in_words(run, first)}{budget}"
    eager = next((r.eager_peak_bytes for r in found if r.eager_peak_bytes), None)
    unit, size = ("GiB", GIB) if max(peak_of(r) for r in found) >= 4 * GIB else ("MiB", MIB)
    bars = [Bar(label=run.label(r), length=peak_of(r) / size, text=_told(r), colour=looks.colour(run.label(r)),
                is_simulated=is_simulated_target(r.config)) for r in found]
    return bar_panel(bars, name=name, title=f"Settings of {heading}", heading=heading, xlabel=f"peak ({unit})",
                     line=(eager / size, "eager's peak") if eager else None)


def _told(record: RunRecord) -> str:
    """`812.4 MiB, time 1.23 (1.20 to 1.26; 10 pairs) x eager's`."""
    ratio, simulated = record.measured.get("ratio") or {}, simulated_ratio(record)
    time = f"{simulated:.2f}" if is_simulated_target(record.config) and simulated else interval_in_words(ratio)
    return f"{bytes_in_words(peak_of(record))}, time {time} x"
