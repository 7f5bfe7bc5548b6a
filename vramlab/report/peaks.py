"""Tables of what is live at a peak: by role, by layer, and whether the meter saw as much."""

from __future__ import annotations

from typing import Any, Mapping

from vramlab.record import RunRecord
from vramlab.report.tables import IDENTITY, Numbers, Table, Value, add_row, cells_of, word
from vramlab.report.words import DASH, bytes_in_words, is_simulated
from vramlab.runs import Run
from vramlab.tape import Role

_ROLES = (*(str(role).replace("_", " ") for role in Role), "inside the op")
_LAYERS = 2


def step_peaks_table(run: Run) -> Table:
    """What a step holds at its peak, as the plan has it."""
    cells = [cell for cell in cells_of(run, "step") if cell.record and (cell.record.predicted.get("at_peak") or {}).get("by_role")]
    columns = ("peak", *_ROLES, "phase", "layers that hold most")
    metered = ("the meter saw as much",) if any(not is_simulated(cell.record) for cell in cells) else ()  # a run of profiles has no meter
    table = Table("peaks", "What is live at the peak of a step",
                  (("", IDENTITY), ("simulated", columns), ("measured", metered), ("", ("evidence",))), is_detail=True)
    for cell in cells:
        add_row(table, cell, len(columns) + len(metered), lambda record: _step(table, record)[:len(columns) + len(metered)])
    return table


def search_peaks_table(run: Run) -> Table:
    """What the largest value of a search holds at its peak: why no more fits."""
    columns = ("largest", *_ROLES, "phase")
    table = Table("searches-roles", "What is live at the peak of the largest, simulated",
                  (("", IDENTITY), ("simulated", columns), ("", ("evidence",))), is_detail=True)
    for cell in cells_of(run, "max_batch"):
        if cell.record and (cell.record.search.get("at_peak") or {}).get("by_role"):
            add_row(table, cell, len(columns), lambda record: _search(table, record))
    return table


def _step(table: Table, record: RunRecord) -> list[Value]:
    numbers, at_peak = Numbers(table, record), record.predicted["at_peak"]
    by_layer = sorted(at_peak["by_layer"].items(), key=lambda item: -item[1])[:_LAYERS]
    seen = record.measured.get("is_peak_accounted_for")
    return [numbers.bytes(record.predicted.get("peak_bytes"), "predicted.peak_bytes"), *_held(numbers, at_peak, "predicted.at_peak"),
            word("; ".join(f"{name} {bytes_in_words(nbytes)}" for name, nbytes in by_layer)),
            numbers.show(seen, lambda v: "yes" if v else "no", "measured.is_peak_accounted_for", "measured.peak_bytes")]


def _search(table: Table, record: RunRecord) -> list[Value]:
    numbers = Numbers(table, record)
    return [numbers.show(record.search.get("largest"), str, "search.largest"), *_held(numbers, record.search["at_peak"], "search.at_peak")]


def _held(numbers: Numbers, at_peak: Mapping[str, Any], name: str) -> list[Value]:
    """Bytes by role and inside the op, and the phase."""
    held = [*(at_peak["by_role"].get(str(role)) for role in Role), at_peak.get("inside_op_bytes")]
    return [*(numbers.bytes(nbytes, name) for nbytes in held), word(at_peak.get("phase") or DASH)]
