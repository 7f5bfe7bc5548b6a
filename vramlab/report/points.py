"""What a verdict is drawn from: records that may be its ground, what is compared with what, and one number of each comparison."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vramlab.device import load_profile
from vramlab.record import Outcome, RunRecord, Truth
from vramlab.report.words import is_simulated, is_simulated_target

if TYPE_CHECKING:
    from vramlab.report.claims import Question

BYTES_OF_A_PARAMETER = 4  # float32, autocast or not


@dataclass(frozen=True)
class Point:
    """One comparison: the method's record, the baseline's, and the number."""

    value: float
    record: RunRecord
    baseline: RunRecord | None
    is_simulated: bool


def comparison_key(record: RunRecord) -> tuple[str, str]:
    """What must be equal for two cells to be compared: all of the config but the method, its options, its source and, where it does not
    bound a search, its budget."""
    apart = ("method", "options", "sources", *(() if record.kind == "max_batch" else ("budget",)))
    config = {key: value for key, value in record.config.items() if key not in apart}
    return record.kind, json.dumps(config, sort_keys=True)


def is_sound(record: RunRecord) -> bool:
    """Whether a record may be the ground of a verdict: it ended well, kept its budget and, unless simulated, is bit-exact."""
    kept = not record.measured.get("over_budget_bytes")
    return record.outcome is Outcome.OK and kept and (is_simulated(record) or record.truth is Truth.EXACT)


def peak_of(record: RunRecord) -> tuple[int | None, bool]:
    """(peak bytes, whether it is simulated): the measured peak on hardware, the predicted one on a profile."""
    return (record.predicted if is_simulated(record) else record.measured).get("peak_bytes"), is_simulated(record)


def smallest_peaks(question: Question) -> list[RunRecord]:
    """For each step and target the sound record of the method with the smallest peak."""
    groups: dict[tuple[str, str], list[RunRecord]] = defaultdict(list)
    for record in question.of_method("step"):
        if is_sound(record) and peak_of(record)[0]:
            groups[comparison_key(record)].append(record)
    return [min(group, key=lambda r: peak_of(r)[0]) for group in groups.values()]


def fits_the_board(record: RunRecord) -> bool:
    """Whether a peak is within the simulated board's memory; what ran on hardware was within it."""
    if not is_simulated_target(record.config):
        return True
    stated, name = record.config.get("profile"), record.config["target"].removeprefix("sim:")
    memory = load_profile(name).memory_bytes if stated is None else stated["memory_bytes"]
    return peak_of(record)[0] <= memory


def size_of_network(record: RunRecord, unit: str) -> float | None:
    """In `layers` (operators that make a map, and forks, as SuperNeurons' code counts them) or `million` parameters of 4 bytes; None in
    another unit, or where the record does not say."""
    provenance = record.provenance
    if unit == "layers":
        return provenance.get("basic_layers")
    if unit == "million":
        parameters = (provenance.get("bytes_by_role") or {}).get("parameter")
        return None if parameters is None else parameters / BYTES_OF_A_PARAMETER / 1e6
    return None


def baseline_peak(question: Question, record: RunRecord) -> tuple[int | None, RunRecord | None, bool]:
    """(peak, its record, whether it is simulated) of the baseline's own cell; for eager, else of what the record carries."""
    baseline = question.of_baseline(record)
    if baseline and peak_of(baseline)[0]:
        return peak_of(baseline)[0], baseline, peak_of(baseline)[1]
    if question.baseline == "eager" and record.eager_peak_is_simulated is not None:
        return record.eager_peak_bytes, None, record.eager_peak_is_simulated
    return None, None, False
