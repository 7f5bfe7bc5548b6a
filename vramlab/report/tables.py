"""The tables of the report: measured and simulated apart, every cell a row, and a dash with its reason for a missing number."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Callable, Collection, Mapping, Sequence

from vramlab.counted import count_of
from vramlab.record import Outcome, RunRecord, Truth
from vramlab.report.figures import peak_of
from vramlab.report.inversions import inversions
from vramlab.report.words import (
    DASH, FEW_PAIRS, budget_in_words, bytes_in_words, counts, interval_in_words, is_distinguishable, is_eager, is_of_few_pairs,
    is_simulated, is_simulated_target, seconds_in_words, significant, simulated_ratio,
)
from vramlab.runs import Cell, Run


SHAREABLE = ("experiment", "model", "batch", "on")  # columns that stand above a table once where all its rows agree
LEAST_ROWS_A_PLACE = 3  # on average, where rows of a table stand below their place


@dataclass(frozen=True, kw_only=True)
class Value:
    """One entry of a table: text, the number of the note that explains it, a link."""

    text: str
    note: int | None = None
    href: str = ""
    exact: str = ""  # the number in full, for a tooltip
    is_word: bool = False  # aligned like text
    tone: str = ""  # good, bad, open: how a verdict is coloured, never without its word


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row; `is_void` when its numbers do not count."""

    values: tuple[Value, ...]
    is_void: bool = False


@dataclass
class Table:
    """Columns in groups, rows and the notes under them. What all rows share of their identity stands once, above them."""

    id: str
    title: str
    groups: tuple[tuple[str, tuple[str, ...]], ...]  # (heading over the columns, their headings)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_detail: bool = False  # left out of a page that has no room for it; every cell is a row of a table that is none

    @property
    def headings(self) -> list[str]:
        """Of all columns."""
        return [name for _, names in self.groups for name in names]

    @property
    def shared(self) -> dict[int, str]:
        """Columns that say the same of every row, by index, and what they say."""
        found = {i: {row.values[i].text for row in self.rows} for i, name in enumerate(self.headings) if name in SHAREABLE}
        return {i: texts.pop() for i, texts in found.items() if len(texts) == 1}

    @property
    def shared_in_words(self) -> str:
        """`experiment memory, model resnet50, batch 16, on cpu`; "" where the rows share nothing."""
        return self._in_words(self.shared)

    @property
    def places(self) -> list[tuple[str, list[Row]]]:
        """(what its rows share beyond that, rows), where places have several rows each; else all rows under ""."""
        varied = self._varied
        found = [(dict(zip(varied, texts)), list(rows))
                 for texts, rows in groupby(self.rows, key=lambda row: [row.values[i].text for i in varied])]
        if len(found) < 2 or len(self.rows) < LEAST_ROWS_A_PLACE * len(found):
            return [("", self.rows)]
        return [(self._in_words(texts), rows) for texts, rows in found]

    @property
    def shown(self) -> tuple[list[tuple[str, list[str]]], list[int]]:
        """(groups of headings, indices of their columns), without what all rows share and, where places are told apart, without those."""
        return self._without({*self.shared, *(self._varied if len(self.places) > 1 else ())})

    @property
    def on_paper(self) -> tuple[list[tuple[str, list[str]]], list[int]]:
        """The same with a column for what rows do not share, and without links, which a paper cannot follow."""
        return self._without({*self.shared, *(i for i, name in enumerate(self.headings) if name == "evidence")})

    @property
    def _varied(self) -> list[int]:
        return [i for i, name in enumerate(self.headings) if name in SHAREABLE and i not in self.shared]

    def _in_words(self, texts: Mapping[int, str]) -> str:
        return ", ".join(f"{self.headings[i]} {text}" for i, text in texts.items() if text != DASH)

    def _without(self, left_out: Collection[int]) -> tuple[list[tuple[str, list[str]]], list[int]]:
        groups, index = [], 0
        for heading, names in self.groups:
            kept = [name for i, name in enumerate(names, index) if i not in left_out]
            groups += [(heading, kept)] if kept else []
            index += len(names)
        return groups, [i for i in range(index) if i not in left_out]

    def note(self, text: str) -> int:
        """Number of the note with this text, from 1."""
        if text not in self.notes:
            self.notes.append(text)
        return self.notes.index(text) + 1

    def dash(self, reason: str) -> Value:
        """A missing number."""
        return Value(text=DASH, note=self.note(reason))


def word(text: Any, *, tone: str = "", href: str = "") -> Value:
    """A text entry."""
    return Value(text=str(text), is_word=True, tone=tone, href=href)


def reason_for(record: RunRecord, *names: str) -> str:
    """Why a number is missing, by its dotted name, then its block's; else what the cell ended as."""
    for name in (*names, *(name.partition(".")[0] for name in names)):
        if record.missing.get(name):
            return str(record.missing[name])
    if is_simulated_target(record.config) and all(name.startswith("measured") for name in names):
        return "simulated only: this device is not at hand"
    if record.outcome is not Outcome.OK:
        return f"the cell ended as {outcome_in_words(record)}"
    return "not recorded"


def outcome_in_words(record: RunRecord) -> str:
    """`plan infeasible`, `oom (gpu memory)`."""
    outcome, reason = (str(text).replace("_", " ") for text in (record.outcome, record.reason))
    return f"{outcome} ({reason})" if reason else outcome


def why_void(record: RunRecord) -> str:
    """Why a record's numbers do not count; "" when they do."""
    if counts(record):
        return ""
    if record.outcome is not Outcome.OK:
        return f"does not count: the cell ended as {outcome_in_words(record)}"
    return f"does not count: truth is {str(record.truth).replace('_', ' ')}"


IDENTITY = ("experiment", "model", "batch", "method", "budget", "on")
STATE = ("outcome", "truth")


def identity(cell: Cell) -> list[Value]:
    """What a cell is."""
    config, batch = cell.config, cell.config.get("batch_size")
    return [word(config.get("experiment", DASH)), word(config.get("model", DASH)), Value(text=DASH if batch is None else str(batch)),
            word(cell.label or DASH), word(budget_in_words(config)), word(str(config.get("target", DASH)).removeprefix("sim:"))]


def state(table: Table, cell: Cell) -> list[Value]:
    """What became of a cell: outcome and truth, with the message as a note."""
    record = cell.record
    if record is None:
        return [Value(text="no record", note=table.note(cell.problem), is_word=True, tone="open"), word(DASH)]
    told = f"{outcome_in_words(record)}: {record.message or 'the cell gave no message'}"
    note = table.note(told) if record.outcome is not Outcome.OK or record.message else None
    outcome = Value(text=str(record.outcome).replace("_", " "), note=note, is_word=True, tone=OUTCOME_TONES.get(record.outcome, "bad"))
    return [outcome, word(str(record.truth).replace("_", " "), tone="" if is_simulated(record) else TRUTH_TONES[record.truth])]


OUTCOME_TONES = {Outcome.OK: "good", Outcome.PLAN_INFEASIBLE: "open", Outcome.UNSUPPORTED: "open", Outcome.INTERRUPTED: "open"}
TRUTH_TONES = {Truth.EXACT: "good", Truth.WITHIN_NOISE: "open", Truth.SEMANTICS_CHANGED: "open", Truth.WRONG: "bad", Truth.NOT_RUN: "open"}


def link(cell: Cell) -> Value:
    """The record's file, as evidence."""
    return word("record", href=cell.path) if cell.record else word(DASH)


class Numbers:
    """Entries for numbers of one record: a dash with the reason where one is missing or does not count."""

    def __init__(self, table: Table, record: RunRecord) -> None:
        self._table, self._record, self._void = table, record, why_void(record)

    def bytes(self, value: int | None, *names: str) -> Value:
        """Bytes."""
        return self.show(value, bytes_in_words, *names, unit="bytes")

    def seconds(self, value: float | None, *names: str) -> Value:
        """Seconds."""
        return self.show(value, seconds_in_words, *names, unit="seconds")

    def show(self, value: Any, words: Any, *names: str, unit: str = "") -> Value:
        """`words(value)`, the exact number beside it."""
        if self._void:
            return self._table.dash(self._void)
        if value is None:
            return self._table.dash(reason_for(self._record, *names))
        return Value(text=words(value), exact=f"{value} {unit}".strip())


def measured_table(run: Run) -> Table:
    """Training steps that ran on this machine, and beside them what was simulated for it."""
    table = Table("steps", "Training steps, measured", (
        ("", (*IDENTITY, *STATE)), ("measured", ("peak", "of eager's", "step time", "time / eager's, interval", "eager / eager")),
        ("simulated", ("peak", "off by", "step time", "time / eager's")), ("", ("evidence",))))
    for cell in cells_of(run, "step", simulated=False):
        add_row(table, cell, 9, lambda record: [*_measured(table, Numbers(table, record), record),
                                                *_predicted(Numbers(table, record), record)])
    return table


def simulated_table(run: Run) -> Table:
    """Training steps on devices that are not at hand."""
    columns = ("peak", "of eager's", "step time", "time / eager's", "over the bound", "recomputing", "waiting for copies", "copied")
    table = Table("simulated", "Training steps, simulated", (("", (*IDENTITY, *STATE)), ("simulated", columns), ("", ("evidence",))))
    for cell in cells_of(run, "step", simulated=True):
        add_row(table, cell, len(columns), lambda record: _simulated(Numbers(table, record), record))
    return table


def cells_of(run: Run, kind: str, *, simulated: bool | None = None) -> list[Cell]:
    """The cells of a kind: on device profiles, on hardware, or both."""
    return [c for c in run.cells if c.config.get("kind") == kind and simulated in (None, is_simulated_target(c.config))]


def add_row(table: Table, cell: Cell, columns: int, numbers: Callable[[RunRecord], list[Value]]) -> None:
    """One row: identity, state but in a detail, numbers, link; dashes when there is no record."""
    values = [*identity(cell), *(() if table.is_detail else state(table, cell))]
    values += numbers(cell.record) if cell.record else [table.dash(cell.problem)] * columns
    table.rows.append(Row(values=(*values, link(cell)), is_void=cell.record is None or bool(why_void(cell.record))))


def _measured(table: Table, numbers: Numbers, record: RunRecord) -> list[Value]:
    block = record.measured
    peak, ratio, drift = block.get("peak_bytes"), block.get("ratio") or {}, block.get("drift") or {}
    share = 100 * peak / record.eager_peak_bytes if peak and record.eager_peak_bytes else None
    return [
        numbers.bytes(peak, "measured.peak_bytes"),
        numbers.show(share, lambda v: f"{v:.1f} %", "eager_peak_bytes", "measured.peak_bytes"),
        numbers.seconds(_median(block.get("step_seconds")), "measured.step_seconds"),
        _ratio(table, numbers, ratio, drift, record),
        _interval(table, numbers, drift, "measured.drift", "measured.step_seconds"),
    ]


def _ratio(table: Table, numbers: Numbers, ratio: Mapping[str, Any], drift: Mapping[str, Any], record: RunRecord) -> Value:
    """The ratio with its interval, or beside it the words *not distinguishable* when that lies inside the drift, and the interval as its
    tooltip: both would not fit a page. Eager's own is its drift: one step against itself has one interval."""
    if is_eager(record.config) and drift:
        return _interval(table, numbers, drift, "measured.drift", "measured.step_seconds")
    if is_distinguishable(ratio, drift) is False and counts(record):
        told = interval_in_words(ratio)
        return Value(text=f"{told.partition(' ')[0]}, not distinguishable", is_word=True, exact=told,
                     note=table.note("the interval of time / eager's holds 1.0, or lies inside that of eager against itself"))
    return _interval(table, numbers, ratio, "measured.ratio", "measured.step_seconds")


def _interval(table: Table, numbers: Numbers, block: Mapping[str, Any], *names: str) -> Value:
    """With its number of pairs, and a note where they are few."""
    value = numbers.show(block or None, interval_in_words, *names)
    return replace(value, note=table.note(FEW_PAIRS)) if is_of_few_pairs(block) and value.note is None else value


def _predicted(numbers: Numbers, record: RunRecord) -> list[Value]:
    """The simulated step of a measured cell, and how far its peak is from the measured one."""
    predicted, measured = record.predicted, record.measured
    peak = predicted.get("peak_bytes")
    error = peak - measured["peak_bytes"] if peak is not None and measured.get("peak_bytes") is not None else None
    return [numbers.bytes(peak, "predicted.peak_bytes"),
            numbers.show(error, signed_bytes, "measured.prediction_error_bytes", "measured.peak_bytes"), *_simulated_time(numbers, record)]


def _simulated(numbers: Numbers, record: RunRecord) -> list[Value]:
    """The simulated step of a simulated cell."""
    predicted = record.predicted
    peak, seconds = predicted.get("peak_bytes"), ("recompute_seconds", "stall_seconds")
    share = 100 * peak / record.eager_peak_bytes if peak and record.eager_peak_bytes else None
    return [numbers.bytes(peak, "predicted.peak_bytes"),
            numbers.show(share, lambda v: f"{v:.1f} %", "eager_peak_bytes", "predicted.peak_bytes"), *_simulated_time(numbers, record),
            numbers.show(over_bound(record), lambda v: f"{100 * v:.1f} %", "predicted.least_step_seconds"),
            *(numbers.seconds(predicted.get(key), f"predicted.{key}") for key in seconds),
            numbers.bytes(predicted.get("moved_bytes"), "predicted.moved_bytes")]


def _simulated_time(numbers: Numbers, record: RunRecord) -> list[Value]:
    return [numbers.seconds(record.predicted.get("step_seconds"), "predicted.step_seconds"),
            numbers.show(simulated_ratio(record), lambda v: f"{v:.2f}", "predicted.eager_step_seconds")]


def over_bound(record: RunRecord) -> float | None:
    """How much longer the simulated step is than what no schedule of it within the budget is below: 0.1 is 10 %."""
    step, least = record.predicted.get("step_seconds"), record.predicted.get("least_step_seconds")
    return step / least - 1 if step and least else None


def signed_bytes(nbytes: int) -> str:
    """`+1.2 MiB`, `-3 B`, `0 B`."""
    return f"{'+' if nbytes > 0 else '-' if nbytes < 0 else ''}{bytes_in_words(abs(nbytes))}"


def _median(samples: Sequence[float] | None) -> float | None:
    if not samples:
        return None
    ordered = sorted(samples)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def methods_table(run: Run) -> Table:
    """Simulated step times of every method on every network at every budget, where a run has several of both."""
    cells = [c for c in cells_of(run, "step", simulated=True) if c.record]
    models = tuple(dict.fromkeys(str(c.config.get("model")) for c in cells))
    table = Table("methods", "Methods on networks, simulated: step time / eager's",
                  (("", ("on", "method", "budget")), ("simulated", models)))
    if len(models) < 2:
        return table
    flags = {i.below.cell_id: f"{i.in_words} than at {budget_in_words(i.above.config)}" for i in inversions(run)}
    rows: dict[tuple[str, str, str], dict[str, Cell]] = {}
    for cell in cells:
        key = str(cell.config["target"]).removeprefix("sim:"), cell.label or DASH, budget_in_words(cell.config)
        rows.setdefault(key, {})[str(cell.config["model"])] = cell
    for key, found in rows.items():
        values = [_time_of(table, found[m], flags) if m in found else table.dash("no such cell") for m in models]
        table.rows.append(Row(values=(*map(word, key), *values)))
    return table


def _time_of(table: Table, cell: Cell, flags: Mapping[str, str]) -> Value:
    """Time / eager's, with the record behind it; a dash with what the cell ended as."""
    value = _simulated_time(Numbers(table, cell.record), cell.record)[1]
    if value.note is not None:
        return value
    return replace(value, href=cell.path, note=table.note(flags[cell.cell_id]) if cell.cell_id in flags else None)


def inversions_table(run: Run) -> Table:
    """Pairs of budgets of which the lower one gave a faster step or a higher peak."""
    table = Table("inversions", "Flagged: a lower budget that gave a faster step or a higher peak", (
        ("", ("experiment", "model", "batch", "method", "on", "flag")), ("budget", ("higher", "lower")),
        ("peak", ("at the higher", "at the lower")), ("time / eager's", ("at the higher", "at the lower")), ("", ("evidence",))))
    cells = {cell.cell_id: cell for cell in run.cells}
    for found in inversions(run):
        below = cells[found.below.cell_id]
        experiment, model, batch, method, _, on = identity(below)
        both = found.above, found.below
        kind = "simulated" if is_simulated_target(below.config) else "measured"
        table.rows.append(Row(values=(
            experiment, model, batch, method, on, word(f"{found.in_words}, {kind}"), *(word(budget_in_words(r.config)) for r in both),
            *(Numbers(table, r).bytes(peak_of(r), "measured.peak_bytes") for r in both), *(_either_ratio(table, r) for r in both),
            link(below))))
    return table


def _either_ratio(table: Table, record: RunRecord) -> Value:
    """Measured on hardware, simulated on a device profile."""
    numbers = Numbers(table, record)
    if is_simulated_target(record.config):
        return numbers.show(simulated_ratio(record), lambda v: f"{v:.4f}", "predicted.eager_step_seconds")
    return _interval(table, numbers, record.measured.get("ratio") or {}, "measured.ratio")


def training_table(run: Run) -> Table:
    """Real training beside eager's."""
    columns = ("steps", "equal to eager", "final loss", "eager's", "final test accuracy", "eager's")
    table = Table("training", "Training, measured", (("", (*IDENTITY, *STATE)), ("measured", columns), ("", ("evidence",))))
    for cell in cells_of(run, "train"):
        add_row(table, cell, len(columns), lambda record: _trained(table, record))
    return table


def _trained(table: Table, record: RunRecord) -> list[Value]:
    block = record.training
    loss, eager_loss = block.get("loss") or [], block.get("eager_loss") or []
    accuracy, eager_accuracy = block.get("accuracy") or [], block.get("eager_accuracy") or []

    def show(value: Any, words: Any, name: str) -> Value:
        return table.dash(reason_for(record, f"training.{name}")) if value is None else Value(text=words(value), exact=str(value))

    ours, eager = ([*zip(block.get(f"{prefix}loss") or [], block.get(f"{prefix}grad_norm") or [])] for prefix in ("", "eager_"))
    equal = sum(a == b for a, b in zip(ours, eager)) if ours and eager else None
    return [
        show(len(loss) or None, str, "loss"),
        show(equal, lambda v: "at every step" if v == len(ours) == len(eager) else f"at {v} of {count_of(len(ours), 'step')}",
             "eager_loss"),
        show(loss[-1] if loss else None, lambda v: significant(v, 4), "loss"),
        show(eager_loss[-1] if eager_loss else None, lambda v: significant(v, 4), "eager_loss"),
        show(accuracy[-1][1] if accuracy else None, lambda v: significant(v, 4), "accuracy"),
        show(eager_accuracy[-1][1] if eager_accuracy else None, lambda v: significant(v, 4), "eager_accuracy"),
    ]
