"""Bytes that a step moves over the link, how fast, and how much of that time the step does not wait for. Simulated."""

from __future__ import annotations

from typing import Sequence

from vramlab.counted import count_of
from vramlab.record import RunRecord
from vramlab.report.drawing import Panel
from vramlab.report.figures.bars import MAX_BARS, Bar, bar_panel
from vramlab.report.figures.groups import cell_in_words, sentence, step_groups, thin, where_in_words
from vramlab.report.figures.kinds import FigureSet, Looks
from vramlab.report.words import counts, join_words
from vramlab.runs import Run

GB = 10**9
MOST_GROUPS = 6


def traffic_figures(run: Run, looks: Looks) -> FigureSet:
    """Bytes out and in of one step, a bar a cell; at its end the rate on the link and the share of its time that is hidden."""
    panels, notes = [], []
    groups = [[r for r in group if counts(r)] for group in step_groups(run)]
    moving = [[r for r in group if r.predicted.get("moved_bytes")] for group in groups]
    still = dict.fromkeys(cell_in_words(run, r) for g in groups for r in g if r.predicted.get("moved_bytes") == 0)
    for index, group in enumerate(found := [g for g in moving if g]):
        if index == MOST_GROUPS:
            notes.append(f"{MOST_GROUPS} panels are drawn, of {count_of(len(found), 'group')} of cells; the tables hold all")
            break
        chosen, left_out = thin(group, MAX_BARS)
        panels.append(_panel(run, looks, f"traffic{index}", chosen))
        notes.append(left_out)
    if still:
        notes.append(f"nothing is moved by {join_words(still) if len(still) <= MAX_BARS else count_of(len(still), 'cell')}")
    return FigureSet(panels=tuple(panels), note=sentence(notes))


def _panel(run: Run, looks: Looks, name: str, records: Sequence[RunRecord]) -> Panel:
    where = where_in_words(run, records[0])
    bars = [Bar(label=cell_in_words(run, r), length=r.predicted["moved_bytes"] / GB, text=_rate_in_words(r),
                colour=looks.colour(run.label(r)), is_simulated=True) for r in records]
    return bar_panel(bars, name=name, title=f"Traffic of one step, simulated: {where}", heading=where,
                     xlabel="moved out and in, one step, simulated (GB of 10\u2079 bytes)")


def _rate_in_words(record: RunRecord) -> str:
    """`0.92 GB, 11.2 GB/s, 87 % hidden`."""
    moved, copying = record.predicted["moved_bytes"], record.predicted.get("copy_seconds")
    told = _in_decimal_units(moved)
    if not copying:
        return f"{told}, time on the link not recorded"
    hidden = max(0.0, 1 - (record.predicted.get("stall_seconds") or 0.0) / copying)
    return f"{told}, {_in_decimal_units(moved / copying)}/s, {100 * hidden:.0f} % hidden"


def _in_decimal_units(amount: float) -> str:
    """`0.92 GB`, as links are rated; the next smaller unit where that would be less than 0.1."""
    unit, size = next(((unit, size) for unit, size in (("GB", GB), ("MB", 10**6), ("kB", 10**3)) if amount >= size / 10), ("B", 1))
    return f"{amount / size:.3g} {unit}"
