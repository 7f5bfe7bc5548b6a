"""Table of what a step moves and runs again: how often, how deep, and whether the executed step did as planned."""

from __future__ import annotations

from vramlab.record import RunRecord
from vramlab.report.tables import IDENTITY, Numbers, Table, Value, add_row, cells_of
from vramlab.runs import Run

_COUNTS = ("offloads", "prefetches", "recomputes")


def counts_table(run: Run) -> Table:
    """Every step cell that has a schedule. The deepest chain and the FLOP of recomputes are of the plan."""
    planned = (*_COUNTS, "deepest chain", "FLOP run again", "moved", "copying")
    table = Table("counts", "What a step moves and runs again",
                  (("", IDENTITY), ("simulated", planned), ("measured", _COUNTS), ("", ("evidence",))), is_detail=True)
    for cell in cells_of(run, "step"):
        if cell.record and any(cell.record.predicted.get(name) is not None for name in _COUNTS):
            add_row(table, cell, len(planned) + len(_COUNTS), lambda record: _counted(table, record))
    return table


def _counted(table: Table, record: RunRecord) -> list[Value]:
    numbers, predicted = Numbers(table, record), record.predicted
    flops, again = predicted.get("flops"), predicted.get("recompute_flops")
    return [
        *(numbers.show(predicted.get(name), str, f"predicted.{name}") for name in _COUNTS),
        numbers.show(predicted.get("deepest_recompute"), str, "predicted.deepest_recompute"),
        numbers.show(again / flops if flops and again is not None else None, lambda v: f"{100 * v:.1f} %", "predicted.recompute_flops"),
        numbers.bytes(predicted.get("moved_bytes"), "predicted.moved_bytes"),
        numbers.seconds(predicted.get("copy_seconds"), "predicted.copy_seconds"),
        *(numbers.show(record.measured.get(name), str, f"measured.{name}") for name in _COUNTS),
    ]
