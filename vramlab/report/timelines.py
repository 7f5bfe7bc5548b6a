"""The interactive memory timelines of the report: which cells are drawn, and their data for the page's script. All of it is simulated.

A cell's folder holds its tape and its schedule. They are simulated again here, on the device that its record tells, and the result must be
what the record says: else there is no timeline, and the page says why.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import isclose
from pathlib import Path
from typing import Any

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.counted import count_of
from vramlab.device import DeviceProfile, load_profile, perturbed_profile
from vramlab.errors import ScheduleError
from vramlab.record import RunRecord
from vramlab.report.figures import step_groups, where_in_words
from vramlab.report.points import is_sound
from vramlab.report.fastest import step_ratio
from vramlab.report.tables import reason_for, why_void
from vramlab.report.timeline_data import KEYS, peak_rows, tape_json, timeline_json
from vramlab.report.words import budget_in_words, counts, is_simulated_target
from vramlab.runs import SCHEDULE_FILE, Run, tape_path
from vramlab.schedule import Offload, Prefetch, Schedule
from vramlab.simulate import simulate
from vramlab.tape import Tape
from vramlab.trace import Trace

MOST_CELLS, MOST_BYTES = 16, 5_000_000  # of timelines in one report, beside 5 MB of plotly.js, where the page has room for so much
UNREADABLE = (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError, AttributeError)
NO_ROOM = "no room for more in one report"
EXACT_SECONDS = 1e-6  # share: the same sums in the same order


@dataclass(frozen=True)
class Absent:
    """No timeline, and why."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One cell as the page shows it: an entry of the menus, and rows of the table that stands for the drawing."""

    index: int
    where: str
    name: str
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Timelines:
    """What the page needs. `data` is JSON that may stand inside a script element, "" where nothing is drawn."""

    cells: tuple[Drawn, ...]
    data: str
    notes: tuple[str, ...]  # what is left out and why


def timelines(run: Run, room: int = MOST_BYTES) -> Timelines:
    """Eager and the best method at each budget, of each group of step cells, while there is room: bytes of their data."""
    chosen, left_out = choose(run)
    folders = {cell.cell_id: cell.folder for cell in run.cells}
    page = _Page(min(room, MOST_BYTES))
    for record in chosen:
        found = Absent(NO_ROOM) if page.is_full else simulated(record, folders[record.cell_id])
        if not isinstance(found, Absent):
            found = page.add(where_in_words(run, record), name_of(run, record), _lines(record), *found)
        if found:
            left_out[found.reason] += 1
    data = in_script({"keys": KEYS, "tapes": page.tapes, "cells": page.cells}) if page.cells else ""
    return Timelines(cells=tuple(page.drawn), data=data, notes=tuple(_notes(run, len(page.cells), left_out)))


class _Page:
    """What is drawn so far: cells, and the tape of each, once."""

    def __init__(self, room: int) -> None:
        self.cells: list[dict[str, Any]] = []
        self.tapes: list[dict[str, Any]] = []
        self.drawn: list[Drawn] = []
        self._digests: list[str] = []
        self._room = room

    @property
    def is_full(self) -> bool:
        return len(self.cells) >= MOST_CELLS or self._room <= 0

    def add(self, where: str, name: str, lines: Mapping[str, int | None], checked: CheckedSchedule, trace: Trace) -> Absent | None:
        """Add a cell, or say why not."""
        digest = checked.tape.digest
        is_new = digest not in self._digests
        tapes = [tape_json(checked.tape)] if is_new else []
        index = len(self.tapes) if is_new else self._digests.index(digest)
        body = {"name": name, "where": where, "tape": index} | timeline_json(checked, trace) | lines
        nbytes = len(in_script([body, *tapes]))
        if nbytes > self._room:
            return Absent(NO_ROOM)
        self._room -= nbytes
        self.cells.append(body)
        self.tapes += tapes
        self._digests += [digest] if is_new else []
        self.drawn.append(Drawn(index=len(self.drawn), where=where, name=name, rows=tuple(peak_rows(checked, trace))))
        return None


def name_of(run: Run, record: RunRecord) -> str:
    """`delta 60 %`."""
    return run.label(record) if record.config.get("budget") is None else f"{run.label(record)} {budget_in_words(record.config)}"


def choose(run: Run) -> tuple[list[RunRecord], Counter[str]]:
    """The cells to draw, the groups taking turns, and for the others how many there are for each reason."""
    by_group, left_out = [], Counter[str]()
    for group in step_groups(run):
        best = _best(group)
        by_group.append(best)
        left_out.update(_why_not(r) for r in group if not any(r is b for b in best))
    for cell in run.cells:
        kind = cell.record.kind if cell.record else None
        if kind != "step":
            left_out["no record" if kind is None else _OTHER_KINDS.get(kind, f"of kind {kind}")] += 1
    return [r for turn in zip_longest(*by_group) for r in turn if r is not None], left_out


_OTHER_KINDS = {"max_batch": "a search, which keeps no schedule", "train": "a training of many steps"}


def _best(group: Sequence[RunRecord]) -> list[RunRecord]:
    """Eager; at each budget, the smallest first, the fastest method that kept it; of what takes no budget the method of smallest peak."""
    sound = [r for r in group if is_sound(r)]
    eager = [r for r in sound if r.config.get("method") == "eager"][:1]
    timed = [r for r in sound if r.budget_bytes and step_ratio(r)]
    budgets = sorted({r.budget_bytes for r in timed})
    free = [r for r in sound if not r.budget_bytes and r.predicted.get("peak_bytes") and r.config.get("method") != "eager"]
    return [*eager, *(min((r for r in timed if r.budget_bytes == b), key=lambda r: step_ratio(r)[0]) for b in budgets),
            *sorted(free, key=lambda r: r.predicted["peak_bytes"])[:1]]


def _why_not(record: RunRecord) -> str:
    if not counts(record):
        return why_void(record)
    if not is_sound(record):
        return "beyond its budget or not bit-exact"
    if not record.budget_bytes:
        return "without a budget, and another without one has a smaller peak"
    return "slower than the one drawn at its budget" if step_ratio(record) else "no step time"


def simulated(record: RunRecord, folder: Path) -> tuple[CheckedSchedule, Trace] | Absent:
    """A cell's schedule on the device of its record, once more: the record's own peak and step time, or why there is none."""
    schedule = _read(Schedule, record, folder / SCHEDULE_FILE)
    if isinstance(schedule, Absent):
        return schedule
    device = device_of(record, schedule)
    tape = device if isinstance(device, Absent) else _read(Tape, record, tape_path(record, folder))
    if isinstance(tape, Absent):
        return tape
    try:
        checked = check_schedule(tape, schedule)
    except ScheduleError as error:
        return Absent(f"a schedule that is not legal on its tape ({error.rule})")
    return _as_recorded(record, checked, simulate(checked, device))


def _read(kind: type[Tape] | type[Schedule], record: RunRecord, path: Path) -> Tape | Schedule | Absent:
    try:
        return kind.load(path)
    except FileNotFoundError:
        why = record.missing.get("predicted")
        return Absent(f"no {path.name} beside its record{f' ({why})' if why else ''}")
    except UNREADABLE as error:
        return Absent(f"a {path.name} that cannot be read ({type(error).__name__})")


def _as_recorded(record: RunRecord, checked: CheckedSchedule, trace: Trace) -> tuple[CheckedSchedule, Trace] | Absent:
    """Refused where the record tells another peak or step time: then the files are not the record's."""
    peak, seconds = (record.predicted.get(key) for key in ("peak_bytes", "step_seconds"))
    if peak is None or seconds is None:
        return Absent(f"no simulated peak and step time ({reason_for(record, 'predicted')})")
    if peak != checked.peak_bytes:
        return Absent("files whose simulated peak is not the record's")
    if not isclose(seconds, trace.metrics.step_seconds, rel_tol=EXACT_SECONDS):
        return Absent("files whose simulated step time is not the record's")
    return checked, trace


def device_of(record: RunRecord, schedule: Schedule) -> DeviceProfile | Absent:
    """What a record was simulated on. Of executed cells only the link matters, and it only where something is copied: ops carry their
    own seconds."""
    config, target = record.config, str(record.config.get("target"))
    stated = record.predicted.get("device") or config.get("profile")
    try:
        if stated:
            return DeviceProfile(**stated)
        if is_simulated_target(config):
            profile = load_profile(target.removeprefix("sim:"))
            return perturbed_profile(profile, config["perturbation"]) if "perturbation" in config else profile
    except (KeyError, TypeError, ValueError):
        return Absent("a device that this vramlab does not know")
    if schedule.count(Offload) or schedule.count(Prefetch):
        return Absent("copies to the host over a link that its record does not tell")
    return load_profile("v100-32gb")  # any: nothing is copied


def _lines(record: RunRecord) -> dict[str, int | None]:
    """What is drawn across: the budget, and on hardware what the meter saw."""
    measured = None if is_simulated_target(record.config) else record.measured.get("peak_bytes")
    return {"budget": record.budget_bytes, "measured": measured}


def _notes(run: Run, drawn: int, left_out: Mapping[str, int]) -> Iterator[str]:
    """Sentences on what is not drawn."""
    total = sum(left_out.values())
    if not run.cells:
        yield "No timeline: the run has no cell."
    elif not drawn:
        yield f"No timeline: {_reasons(left_out)}." if total else "No timeline: no cell is left to draw."
    elif total:
        yield (f"Drawn are eager and, of each group of cells, the fastest method at each budget; of methods without a budget, the one with "
               f"the smallest peak. Left out: {_reasons(left_out)}.")


def _reasons(left_out: Mapping[str, int]) -> str:
    return "; ".join(f"{count_of(number, 'cell')}: {reason}" for reason, number in left_out.items())


def in_script(body: Mapping[str, Any] | Sequence[Any]) -> str:
    """JSON that no HTML parser can leave by: what could open or close an element, or end a line of script, is written as \\uXXXX."""
    return "".join(_escaped(_compact(body)))


def _compact(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def _escaped(text: str) -> Iterable[str]:
    return (f"\\u{ord(c):04x}" if c in "<>&'" else c for c in text)  # json.dumps has made ASCII of the rest
