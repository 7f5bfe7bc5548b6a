"""What a running workflow says: a bar on a terminal, plain lines with the time left elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vramlab.cli.words import duration
from vramlab.counted import all_of, count_of
from vramlab.record import Outcome, RunRecord
from vramlab.report.words import bytes_in_words, is_of_few_pairs, is_simulated
from vramlab.run_folder import RunFolder, is_done, seconds_of_cells
from vramlab.runner import Display
from vramlab.workflow import Cell, Plan


class TimeLeft:
    """Seconds until the run ends, from what the same or like cells took."""

    def __init__(self, plan: Plan, known: dict[str, float], done: set[str]) -> None:
        self._plan, self._known, self._done = plan, dict(known), set(done)

    def cell_took(self, cell: Cell, seconds: float) -> None:
        """A cell is done; 0 seconds teach nothing."""
        self._done.add(cell.cell_id)
        if seconds > 0:
            self._known[cell.cell_id] = seconds

    def seconds(self) -> float | None:
        """None while nothing is known to go by."""
        left = [cell for cell in self._plan.cells if cell.cell_id not in self._done]
        estimates = [self._estimate(cell) for cell in left]
        return None if None in estimates else sum(estimates)

    def _estimate(self, cell: Cell) -> float | None:
        if cell.cell_id in self._known:
            return self._known[cell.cell_id]
        known = [(other.config["experiment"], self._known[other.cell_id]) for other in self._plan.cells if other.cell_id in self._known]
        like = [seconds for experiment, seconds in known if experiment == cell.config["experiment"]] or [seconds for _, seconds in known]
        if like:
            return sum(like) / len(like)
        minutes = self._plan.expected.minutes
        return 60 * minutes / len(self._plan.cells) if minutes else None


def time_left(plan: Plan, run: RunFolder) -> TimeLeft:
    """For a run as it stands on disk; other runs of the same cells tell how long those take."""
    done = {cell.cell_id for cell in plan.cells if is_done(run.record(cell.cell_id))}
    return TimeLeft(plan, dict(seconds_of_cells(run.folder.parent)), done)


def summary(record: RunRecord) -> str:
    """`ok, exact, peak 612 MiB of 640 MiB, 1.21x eager's time`: one cell in a few words."""
    if record.outcome is not Outcome.OK:
        outcome, reason = (str(word).replace("_", " ") for word in (record.outcome, record.reason))
        return f"{outcome}{f' ({reason})' if reason else ''}: {record.message}".rstrip(": ")
    block = record.predicted if is_simulated(record) else record.measured
    parts = ["ok, *simulated*" if is_simulated(record) else f"ok, {str(record.truth).replace('_', ' ')}"]
    if record.search:
        parts.append(f"largest {record.search['over']} {'at least ' if record.search['hit_upper_end'] else ''}{record.search['largest']}")
    if block.get("peak_bytes") is not None:
        budget = f" of {bytes_in_words(record.budget_bytes)}" if record.budget_bytes else ""
        parts.append(f"peak {bytes_in_words(block['peak_bytes'])}{budget}")
    if (record.measured.get("ratio") or {}).get("median") is not None:
        whose = "its own" if record.config["method"] == "eager" else "eager's"
        is_of_few = is_of_few_pairs(record.measured["ratio"])
        is_told = record.measured.get("is_distinguishable") is not False
        few = f" ({count_of(record.measured['ratio']['n'], 'pair')}, too few to tell)" if is_of_few else ""
        noise = few or ("" if is_told else " (not distinguishable)")
        parts.append(f"{record.measured['ratio']['median']:.2f}x {whose} time{noise}")
    if record.training:
        equal, steps = record.training["equal_steps"], len(record.training["steps"])
        parts.append(f"equal to eager at {all_of(steps, 'step') if equal == steps else f'{equal} of {steps} steps'}")
    if record.message:
        parts.append(record.message)
    return ", ".join(parts)


class PlainDisplay:
    """One line a cell, no carriage returns: for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._number, self._last_wait = stream, 0, ""

    def begin(self, plan: Plan, run: RunFolder, done: int) -> None:
        """Say what starts."""
        self._plan, self._left = plan, time_left(plan, run)
        label = f" ({plan.label})" if plan.label else ""
        self._say(f"{plan.title}{label}: {count_of(len(plan.cells), 'cell')}, {done} done; {run.folder}")

    def cell_begins(self, cell: Cell, number: int) -> None:
        """Say which."""
        self._number = number
        self._say(f"[{number}/{len(self._plan.cells)}] {cell.config['experiment']}: {cell.title} ...")

    def tick(self, cell: Cell, seconds: float, status: str) -> None:
        """Nothing: a log wants one line a cell."""

    def cell_ends(self, cell: Cell, record: RunRecord, seconds: float) -> None:
        """Say what became of it and how long the rest takes."""
        self._left.cell_took(cell, seconds)
        left = self._left.seconds()
        rest = f"; about {duration(left)} left" if left else ""
        took = f", {duration(seconds)}" if seconds else ", by another runner"
        self._say(f"[{self._number}/{len(self._plan.cells)}] {cell.title}: {summary(record)}{took}{rest}")

    def waits(self, why: str) -> None:
        """Say it once for each reason."""
        if why != self._last_wait:
            self._say(f"waiting: {why}")
        self._last_wait = why

    def end(self) -> None:
        """Nothing to close."""

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class TerminalDisplay:
    """A bar of cells with the running cell's last line below it. Redrawn twice a second: more would disturb what is measured."""

    def __init__(self, stream: TextIO) -> None:
        self._progress = Progress(
            TextColumn("{task.completed}/{task.total}"), BarColumn(bar_width=30), TimeElapsedColumn(), TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}"), console=Console(file=stream, highlight=False), refresh_per_second=2, transient=True,
        )

    def begin(self, plan: Plan, run: RunFolder, done: int) -> None:
        """Draw the bar."""
        self._left = time_left(plan, run)
        label = f" ({plan.label})" if plan.label else ""
        self._progress.start()
        self._print(f"{plan.title}{label}: {count_of(len(plan.cells), 'cell')}, {done} done; {run.folder}")
        self._bar = self._progress.add_task("", total=len(plan.cells), completed=done, left=self._left_in_words())

    def cell_begins(self, cell: Cell, number: int) -> None:
        """Name it beside the bar."""
        self._progress.update(self._bar, description=escape(cell.title))

    def tick(self, cell: Cell, seconds: float, status: str) -> None:
        """Its last line."""
        self._progress.update(self._bar, description=escape(f"{cell.title}  {status}"))

    def cell_ends(self, cell: Cell, record: RunRecord, seconds: float) -> None:
        """A line above the bar, and the bar moves."""
        self._left.cell_took(cell, seconds)
        took = duration(seconds) if seconds else "by another runner"
        self._print(f"{cell.config['experiment']}: {cell.title}: {summary(record)}, {took}")
        self._progress.update(self._bar, advance=1, left=self._left_in_words())

    def waits(self, why: str) -> None:
        """Beside the bar."""
        self._progress.update(self._bar, description=escape(f"waiting: {why}"))

    def end(self) -> None:
        """Take the bar away."""
        self._progress.stop()

    def _left_in_words(self) -> str:
        left = self._left.seconds()
        return f"about {duration(left)} left" if left else ""

    def _print(self, line: str) -> None:
        self._progress.console.print(escape(line), soft_wrap=True)


class StatusDisplay(PlainDisplay):
    """The running cell's last line beside the time so far; it goes when the cell ends, as the answer is one block."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._progress = Progress(TimeElapsedColumn(), TextColumn("{task.description}"), console=Console(file=stream, highlight=False),
                                  refresh_per_second=2, transient=True)

    def begin(self, plan: Plan, run: RunFolder, done: int) -> None:
        """The clock starts."""
        self._progress.start()
        self._line = self._progress.add_task("", total=None)

    def cell_begins(self, cell: Cell, number: int) -> None:
        """Name it."""
        self._show(cell.title)

    def tick(self, cell: Cell, seconds: float, status: str) -> None:
        """Its last line."""
        self._show(status or cell.title)

    def cell_ends(self, cell: Cell, record: RunRecord, seconds: float) -> None:
        """Nothing: the answer follows."""

    def waits(self, why: str) -> None:
        """In its place."""
        self._show(f"waiting: {why}")

    def end(self) -> None:
        """Take the line away."""
        self._progress.stop()

    def _show(self, text: str) -> None:
        self._progress.update(self._line, description=escape(text))


class SilentDisplay(PlainDisplay):
    """Says nothing."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def _say(self, line: str) -> None:
        pass


def status_for(stream: TextIO) -> Display:
    """What the one cell of a command does, on a terminal; nothing elsewhere."""
    return StatusDisplay(stream) if stream.isatty() else SilentDisplay()


def display_for(as_json: bool) -> Display:
    """Bar or lines; with --json stdout belongs to the document, so that both go to stderr."""
    stream = sys.stderr if as_json else sys.stdout
    return TerminalDisplay(stream) if stream.isatty() else PlainDisplay(stream)
