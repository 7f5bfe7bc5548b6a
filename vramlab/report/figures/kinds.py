"""What every kind of figure shares: the set of panels that it hands over, and how a method looks in all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from vramlab.report.drawing import MARKERS, SERIES, Panel
from vramlab.runs import Run

MAX_PANELS = 12


@dataclass(frozen=True, kw_only=True)
class FigureSet:
    """Panels of one kind; `note` says what is not drawn and why, "" when all is. `statement` is what they show, in words."""

    panels: tuple[Panel, ...] = ()
    note: str = ""
    statement: str = ""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of figure: its place on the page, how it is read, and what makes it from the records."""

    id: str
    title: str
    how_to_read: str
    make: Callable[[Run, Looks], FigureSet]


class Looks:
    """The same colour and marker for a method in all figures, in order of appearance."""

    def __init__(self, run: Run) -> None:
        names = dict.fromkeys(run.label(record) for record in run.records)
        self._index = {name: i for i, name in enumerate(names)}

    def colour(self, method: str) -> str:
        """The method's series colour."""
        return SERIES[self._index.get(method, 0) % len(SERIES)]

    def marker(self, method: str) -> str:
        """The method's marker: colour is never the only difference."""
        index = self._index.get(method, 0)
        return MARKERS[(index + index // len(SERIES)) % len(MARKERS)]

    def dashes(self, method: str) -> str | tuple[int, tuple[float, ...]]:
        """The line of what is simulated: dots for a method whose colour another had before it."""
        return (0, (1.0, 1.4)) if self._index.get(method, 0) // len(SERIES) % 2 else "--"
