"""Searches: throughput against what is searched over, each curve ending at its method's largest, and the largest itself."""

from __future__ import annotations

from statistics import median
from typing import Any, Iterable, Mapping, Sequence

from vramlab.finder import BATCH
from vramlab.record import RunRecord
from vramlab.report import drawing
from vramlab.report.drawing import Panel, panel_axes
from vramlab.report.figures.bars import Bar, bar_panel
from vramlab.report.figures.groups import grouped, sentence, where_in_words
from vramlab.report.figures.kinds import MAX_PANELS, FigureSet, Looks
from vramlab.report.figures.marks import Mark, draw_marks, marks_in_words
from vramlab.report.words import budget_in_words, counts, is_simulated_target, significant
from vramlab.runs import Run

BASELINE = "eager"


def throughput_figures(run: Run, looks: Looks) -> FigureSet:
    """Samples a second over the batch (or depth, or image size) of every trial that fitted, and over the batches of step cells."""
    searched = [(g, [m for r in g for m in _trial_marks(run, r)]) for g in _searches(run)]
    swept = [(g, [m for r in g for m in _step_marks(run, r)]) for g in _sweeps(run)]
    drawn = [(group, marks) for group, marks in (*searched, *swept) if marks]
    panels = [_throughput_panel(run, looks, f"throughput{i}", group, marks) for i, (group, marks) in enumerate(drawn[:MAX_PANELS])]
    notes = [f"{MAX_PANELS} panels are drawn, of {len(drawn)}" if len(drawn) > MAX_PANELS else ""]
    notes += [f"no throughput of {run.label(r)}: its trials do not hold one" for g, m in searched for r in g
              if counts(r) and not any(mark.method == run.label(r) for mark in m)]
    return FigureSet(panels=tuple(panels), note=sentence(notes))


def largest_figures(run: Run, looks: Looks) -> FigureSet:
    """The largest that each method reaches, absolute and as a multiple of eager's, with the throughput there."""
    groups = _searches(run)
    found = [_largest_panel(run, looks, f"largest{i}", group) for i, group in enumerate(groups[:MAX_PANELS])]
    notes = [f"{MAX_PANELS} panels are drawn, of {len(groups)}" if len(groups) > MAX_PANELS else "",
             *(f"no largest of {run.label(r)}, {where_in_words(run, r)}: {r.message or r.outcome}" for g in groups for r in g
               if r.search.get("largest") is None or not counts(r))]
    return FigureSet(panels=tuple(panel for panel in found if panel), note=sentence(notes))


def _searches(run: Run) -> list[list[RunRecord]]:
    records = [r for r in run.records if r.kind == "max_batch"]
    return grouped(records, lambda r: (*(r.config.get(k) for k in ("experiment", "model", "target", "model_options")), _over(r)))


def _over(record: RunRecord) -> str:
    return str(record.search.get("over") or (record.config.get("search") or {}).get("over") or BATCH).replace("_", " ")


def _sweeps(run: Run) -> list[list[RunRecord]]:
    """Step cells of one budget at several batch sizes; cells without a budget stand beside those of each."""
    steps = [r for r in run.records if r.kind == "step" and counts(r)]
    found = []
    for group in grouped(steps, lambda r: tuple(r.config.get(k) for k in ("experiment", "model", "target"))):
        free = [r for r in group if r.config.get("budget") is None]
        budgeted = grouped([r for r in group if r.config.get("budget") is not None], lambda r: r.config["budget"])
        found += [g + free for g in budgeted or [[]]]
    return [g for g in found if len({r.config.get("batch_size") for r in g}) > 1]


def _trial_marks(run: Run, record: RunRecord) -> Iterable[Mark]:
    for trial in record.search.get("trials") or () if counts(record) else ():
        if trial.get("fits") and trial.get("samples_per_second"):
            yield Mark(method=run.label(record), x=trial["value"], y=trial["samples_per_second"],
                       is_simulated=is_simulated_target(record.config))


def _step_marks(run: Run, record: RunRecord) -> Iterable[Mark]:
    batch, seconds = record.config["batch_size"], record.measured.get("step_seconds")
    if seconds and not is_simulated_target(record.config):
        yield Mark(method=run.label(record), x=batch, y=batch / median(seconds), low=batch / max(seconds), high=batch / min(seconds),
                   is_simulated=False)
    if predicted := record.predicted.get("step_seconds"):
        yield Mark(method=run.label(record), x=batch, y=batch / predicted, is_simulated=True)


def _throughput_panel(run: Run, looks: Looks, name: str, group: Sequence[RunRecord], marks: Sequence[Mark]) -> Panel:
    is_search, over = group[0].kind == "max_batch", _over(group[0])
    where = where_in_words(run, group[0]) if is_search else _sweep_in_words(run, group)
    with panel_axes(where) as (figure, axes):
        draw_marks(axes, looks, marks)
        for record in group if is_search else ():
            if (end := _at_largest(record)) is not None:
                axes.plot([record.search["largest"]], [end], marker="|", markersize=16, markeredgewidth=2, linestyle="none",
                          color=looks.colour(run.label(record)), label="ends at the largest that fits")
        right, top = max(m.x for m in marks), max(m.high or m.y for m in marks)
        axes.set(xlim=(0, 1.05 * right), ylim=(0, 1.12 * top), xlabel=over, ylabel="samples a second")
        return drawing.finish(figure, name=name, title=f"Throughput against {over}: {where}",
                              description=marks_in_words(marks, over, "samples a second"))


def _sweep_in_words(run: Run, group: Sequence[RunRecord]) -> str:
    budget = next((f", budget {budget_in_words(r.config)}" for r in group if r.config.get("budget") is not None), "")
    batch = f", batch {group[0].config['batch_size']}"
    return where_in_words(run, group[0]).replace(batch, "", 1) + budget


def _at_largest(record: RunRecord) -> float | None:
    """Samples a second at the largest: the median of its trials; None where none says."""
    found = [t.get("samples_per_second") for t in record.search.get("trials") or () if _is_at_largest(t, record)]
    rates = [rate for rate in found if rate]
    return median(rates) if rates and counts(record) else None


def _is_at_largest(trial: Mapping[str, Any], record: RunRecord) -> bool:
    return bool(trial.get("fits")) and trial.get("value") == record.search.get("largest")


def _largest_panel(run: Run, looks: Looks, name: str, group: Sequence[RunRecord]) -> Panel | None:
    found = [r for r in group if counts(r) and r.search.get("largest") is not None]
    if not found:
        return None
    where, over = where_in_words(run, group[0]), _over(group[0])
    base = next((r.search["largest"] for r in found if r.config.get("method") == BASELINE), None)
    bars = [Bar(label=run.label(r), length=r.search["largest"], text=_told(r, base), colour=looks.colour(run.label(r)),
                is_simulated=is_simulated_target(r.config)) for r in found]
    named = f"multiples are of {BASELINE}'s" if base else f"no multiple: {BASELINE} was not searched"
    line = (base, f"{BASELINE}'s") if base else None
    return bar_panel(bars, name=name, title=f"Largest {over} that fits: {where} ({named})", heading=f"{where} ({named})",
                     xlabel=f"largest {over}", line=line)


def _told(record: RunRecord, base: int | None) -> str:
    """`408, 2.04 x, 311/s`; `at least 4096` where the search ended at its own limit."""
    largest, rate = record.search["largest"], _at_largest(record)
    told = f"at least {largest}" if record.search.get("hit_upper_end") or largest == record.search.get("high") else str(largest)
    if base and record.config.get("method") != BASELINE:
        told += f", {significant(largest / base, 3)} x"
    return f"{told}, {significant(rate, 3)} samples/s" if rate else told
