"""What a step's time and its peak are made of, cell by cell. The parts are simulated; what was measured stands as a filled mark."""

from __future__ import annotations

from statistics import median
from typing import Callable, Sequence

from vramlab.counted import count_of
from vramlab.record import RunRecord
from vramlab.report.drawing import Panel
from vramlab.report.figures.bars import MAX_BARS, Stack, stack_panel
from vramlab.report.figures.groups import cell_in_words, sentence, step_groups, thin, where_in_words
from vramlab.report.figures.kinds import FigureSet, Looks
from vramlab.report.words import GIB, MIB, counts, is_eager, is_simulated_target, join_words, seconds_in_words
from vramlab.runs import Run
from vramlab.tape import Role

MOST_GROUPS = 6
TIME_PARTS = (("compute_seconds", "compute"), ("recompute_seconds", "recompute"), ("stall_seconds", "waiting for copies"))
INSIDE = "inside the op"


def time_figures(run: Run, looks: Looks) -> FigureSet:
    """A step's time by what the compute stream does; planning, once before the first step, is told with each cell."""
    return _stack_figures(run, "time split", "predicted.compute_seconds", lambda r: _has(r, [key for key, _ in TIME_PARTS]), _time_panel)


def role_figures(run: Run, looks: Looks) -> FigureSet:
    """The bytes of the peak by role."""
    return _stack_figures(run, "roles at the peak", "predicted.at_peak", lambda r: bool((r.predicted.get("at_peak") or {}).get("by_role")),
                          _role_panel)


def _stack_figures(run: Run, what: str, missing: str, is_known: Callable[[RunRecord], bool],
                   draw: Callable[[Run, str, str, Sequence[RunRecord]], Panel]) -> FigureSet:
    panels, notes = [], []
    groups = [[r for r in group if counts(r)] for group in step_groups(run)]
    for index, group in enumerate(group for group in groups if group):
        known, unknown = [r for r in group if is_known(r)], [r for r in group if not is_known(r)]
        notes += [f"{what} of {cell_in_words(run, r)} is not drawn: {_why(r, missing)}" for r in unknown]
        if known and len(panels) < MOST_GROUPS:
            chosen, left_out = thin(known, MAX_BARS)
            panels.append(draw(run, f"{what.replace(' ', '-')}{index}", where_in_words(run, known[0]), chosen))
            notes.append(left_out)
        elif known:
            notes.append(f"{MOST_GROUPS} panels are drawn, of {count_of(len(groups), 'group')} of cells; the tables hold all")
    return FigureSet(panels=tuple(panels), note=sentence(notes))


def _why(record: RunRecord, name: str) -> str:
    return record.missing.get("predicted") or record.missing.get(name) or "not recorded"


def _has(record: RunRecord, keys: Sequence[str]) -> bool:
    return all(record.predicted.get(key) is not None for key in keys)


def _time_panel(run: Run, name: str, where: str, records: Sequence[RunRecord]) -> Panel:
    longest = max(sum(r.predicted[key] for key, _ in TIME_PARTS) for r in records)
    unit, size = ("s", 1.0) if longest >= 1 else ("ms", 1e-3)
    stacks = [Stack(label=cell_in_words(run, r), parts={part: r.predicted[key] / size for key, part in TIME_PARTS},
                    text="" if is_eager(r.config) else f"planned in {seconds_in_words(r.measured.get('plan_seconds'))}",
                    measured=_span([s / size for s in r.measured.get("step_seconds") or ()])) for r in records]
    numbers = sorted({len(r.measured.get("step_seconds") or ()) for r in records} - {0})
    title = f"Time of a step by what it is spent on: {where}"
    return stack_panel(stacks, name=name, title=title, heading=where, xlabel=f"time of one step ({unit})",
                       measured=f"measured: median and range of {join_words(map(str, numbers), 'or')} steps")


def _span(samples: Sequence[float]) -> tuple[float, float, float] | None:
    return (median(samples), min(samples), max(samples)) if samples else None


def _role_panel(run: Run, name: str, where: str, records: Sequence[RunRecord]) -> Panel:
    largest = max(r.predicted.get("peak_bytes") or 0 for r in records)
    unit, size = ("GiB", GIB) if largest >= 4 * GIB else ("MiB", MIB)
    stacks = [Stack(label=cell_in_words(run, r), parts=_roles(r, size), measured=_measured_peak(r, size)) for r in records]
    return stack_panel(stacks, name=name, title=f"Memory at the peak of a step by role: {where}", heading=where,
                       xlabel=f"memory at the peak ({unit})", measured="measured peak")


def _roles(record: RunRecord, size: float) -> dict[str, float]:
    at_peak = record.predicted["at_peak"]
    return {str(role).replace("_", " "): (at_peak["by_role"].get(str(role)) or 0) / size for role in Role} | {
        INSIDE: (at_peak.get("inside_op_bytes") or 0) / size}


def _measured_peak(record: RunRecord, size: float) -> tuple[float, float, float] | None:
    peak = None if is_simulated_target(record.config) else record.measured.get("peak_bytes")
    return None if peak is None else (peak / size,) * 3
