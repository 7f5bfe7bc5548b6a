"""Which cells stand in one drawing, how it is called, and which of two peaks a record shows."""

from __future__ import annotations

from collections import defaultdict
from typing import Callable, Sequence

from vramlab.counted import count_of
from vramlab.record import RunRecord
from vramlab.report.words import budget_in_words, is_simulated_target, target_in_words
from vramlab.runs import Run

COMPARED = ("experiment", "model", "batch_size", "target")


def step_groups(run: Run) -> list[list[RunRecord]]:
    """Step cells that are compared: of equal experiment, model, batch size and target, in order of the plan."""
    return grouped([r for r in run.records if r.kind == "step"], lambda r: tuple(r.config.get(key) for key in COMPARED))


def grouped(records: Sequence[RunRecord], key: Callable[[RunRecord], object]) -> list[list[RunRecord]]:
    """Records of equal key together, in the order of their first."""
    groups: dict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        groups[repr(key(record))].append(record)
    return list(groups.values())


def thin(records: Sequence[RunRecord], most: int) -> tuple[list[RunRecord], str]:
    """(records to draw, what was left out): all, or of each method the one with the smallest budget where there are more than `most`."""
    if len(records) <= most:
        return list(records), ""
    methods = grouped(records, lambda r: (r.config.get("method"), r.config.get("options")))
    least = [min(group, key=lambda r: float("inf") if r.budget_bytes is None else r.budget_bytes) for group in methods]
    shown = f"the first {most} of {count_of(len(least), 'method')}" if len(least) > most else "each method"
    return least[:most], f"{shown} at the smallest of the budgets that it kept; the tables hold all"


def where_in_words(run: Run, record: RunRecord) -> str:
    """`resnet50, batch 16, simulated v100-32gb`."""
    hardware = target_in_words(record.config, run.environment_of(record))
    batch = record.config.get("batch_size")
    return f"{record.config.get('model')}, {hardware}" if batch is None else f"{record.config.get('model')}, batch {batch}, {hardware}"


def cell_in_words(run: Run, record: RunRecord) -> str:
    """`delta 60 %`; `eager` without a budget."""
    return run.label(record) if record.config.get("budget") is None else f"{run.label(record)} {budget_in_words(record.config)}"


def peak_of(record: RunRecord) -> int | None:
    """Measured on hardware, predicted on a simulated device."""
    return (record.predicted if is_simulated_target(record.config) else record.measured).get("peak_bytes")


def sentence(parts: Sequence[str]) -> str:
    """Notes as one sentence, "" where there is none; the first letter is made large and the others stay."""
    told = "; ".join(dict.fromkeys(part for part in parts if part))
    return f"{told[0].upper()}{told[1:]}." if told else ""
