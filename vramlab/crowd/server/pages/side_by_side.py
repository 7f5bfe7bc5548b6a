"""Two results held against each other: which settings differ, what they found, and whether that can be told apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vramlab.crowd.server.pages.words import plainly, value_in_words
from vramlab.record import RunRecord
from vramlab.report.compare import Difference, compare_records, unlike
from vramlab.report.words import DASH, is_simulated, significant

_UNITS = {"peak bytes": "bytes", "moved bytes": "bytes", "step seconds": "seconds", "step time / eager's": "ratio"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of both, in words."""

    figure: str
    first: str
    second: str
    ratio: str  # second / first; a dash where one is missing or is a word
    told: str  # whether the two can be told apart, and why


def settings_that_differ(first: RunRecord, second: RunRecord) -> list[tuple[str, str, str]]:
    """(dotted name, first's, second's) of config and environment, every leaf that is not equal."""
    found = [*unlike("", first.config, second.config), *unlike("environment", first.environment, second.environment)]
    return [(name.lstrip("."), plainly(a), plainly(b)) for name, a, b in found if not name.startswith("environment.missing")]


def warnings(first: RunRecord, second: RunRecord) -> Iterator[str]:
    """Why the two should not be compared, or only with care."""
    if is_simulated(first) != is_simulated(second):
        yield "One of them was measured and the other is simulated: their figures are not held against each other."
    for key, what in (("model", "models"), ("batch_size", "batch sizes"), ("kind", "kinds of cell")):
        if first.config.get(key) != second.config.get(key):
            yield f"They are of different {what}: their figures say little about each other."
    if not is_simulated(first) and not is_simulated(second) and _machine(first) != _machine(second):
        yield "They come from different machines: step times are compared as multiples of eager's beside them, never as seconds."


def rows(first: RunRecord, second: RunRecord) -> list[Row]:
    """What both found. Empty where one is measured and one simulated."""
    if is_simulated(first) != is_simulated(second):
        return []
    return [_row(difference, is_simulated(first)) for difference in compare_records(first, second)]


def _row(difference: Difference, simulated: bool) -> Row:
    ratio = DASH if difference.change is None else significant(1 + difference.change, 4)
    return Row(figure=difference.figure, first=_shown(difference.figure, difference.first, simulated),
               second=_shown(difference.figure, difference.second, simulated), ratio=ratio, told=_told(difference, simulated))


def row_of_figures(figure: str, first: float | None, second: float | None, unit: str, simulated: bool) -> Row:
    """One figure of two results whose records are not at hand."""
    shown = [value_in_words(value, unit) + (" simulated" if simulated and value is not None else "") for value in (first, second)]
    ratio = significant(second / first, 4) if first and second is not None else DASH
    return Row(figure=figure, first=shown[0], second=shown[1], ratio=ratio, told="not decided: the samples stand in the records")


def _told(difference: Difference, simulated: bool) -> str:
    if difference.first is None or difference.second is None:
        return "no: one of them has no such figure"
    if difference.first == difference.second:
        return "equal"
    if difference.figure == "step time / eager's":
        apart, not_apart = "yes: neither 95 % interval reaches into the other", "no: their 95 % intervals overlap, or have too few pairs"
        return apart if difference.is_distinguishable else not_apart
    return "yes: a prediction has no noise" if simulated else "yes"


def _shown(figure: str, value: Any, simulated: bool) -> str:
    if isinstance(value, str) or value is None:
        return value or DASH
    return value_in_words(value, _UNITS.get(figure, "count")) + (" simulated" if simulated else "")


def _machine(record: RunRecord) -> Any:
    return record.environment.get("system", {}).get("host_hash")


