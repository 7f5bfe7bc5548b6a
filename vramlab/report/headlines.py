"""Numbers that the headlines of papers state, each taken from the records of a run; vramlab/report/claims.py grades them.

Every function answers a question with one Point a comparison, in the unit that its Scale or the claim names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Mapping, Sequence

from vramlab.counted import count_of
from vramlab.finder import BATCH
from vramlab.record import RunRecord
from vramlab.report.points import Point, baseline_peak, comparison_key, is_sound, peak_of, smallest_peaks
from vramlab.report.words import budget_in_words, is_simulated, join_words, simulated_ratio

if TYPE_CHECKING:
    from vramlab.report.claims import Question

# The footprint of these is reserved for the whole step: its average is its peak, whatever of it is in use.
RESERVED_FOR_THE_STEP = ("network-wide", "vdnn-baseline")
STATE = ("parameter", "buffer", "gradient", "optimizer_state")
BYTES = {"bytes": 1.0, "MB": 1e6, "MiB": 2.0**20, "GB": 1e9, "GiB": 2.0**30}
SECONDS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How a rule's number reads and what it is held against."""

    unit: str = ""  # "" is the claim's own
    decimals: int = 1
    no_effect: float = 0.0
    kind: Literal["benefit", "cost", "amount"] = "benefit"  # an amount is good neither large nor small
    is_floor: bool = False  # more than the claimed range agrees, too: the budgets choose how much is saved


PERCENT, COST, AMOUNT = Scale(unit="%"), Scale(unit="%", kind="cost"), Scale(kind="amount")
RATIO = Scale(unit="x", decimals=2, no_effect=1.0)
SCALES: Mapping[str, Scale] = {
    "memory_saved_percent": Scale(unit="%", is_floor=True), "max_batch_ratio": RATIO, "overhead_percent": COST,
    "average_memory_saved_percent": PERCENT,
    "average_maps_saved_percent": PERCENT,
    "memory_ratio": Scale(unit="x", decimals=2, no_effect=1.0, is_floor=True), "slowdown_percent": COST,
    "step_time_ratio": Scale(unit="x", decimals=2, no_effect=1.0, kind="cost"), "max_depth_ratio": RATIO, "speedup_on_devices": RATIO,
    "maps_ratio": Scale(unit="x", decimals=2, no_effect=1.0, is_floor=True),
    "peak_bytes": AMOUNT, "peak_maps_bytes": AMOUNT, "step_time": AMOUNT, "images_per_second": AMOUNT,
    "performance_loss_percent": COST, "throughput_percent": PERCENT, "feature_share_percent": Scale(unit="%", kind="amount"),
    "extra_forwards": Scale(unit="layers", decimals=0, kind="amount"), "largest_found": Scale(decimals=0, kind="amount"),
    "samples_per_second_ratio": Scale(unit="x", decimals=3, is_floor=True), "overhead_removed_percent": PERCENT,
}


@dataclass(frozen=True)
class Answer:
    """The points of a question, what they are, and why there are none."""

    points: Sequence[Point]
    what: str
    missing: str


def average_memory_saved_percent(question: Question) -> Answer:
    """1 - time-weighted average of what the method's step holds / the baseline's. An allocation for the whole network
    (network-wide, vdnn-baseline) holds its footprint throughout, so that its average is its peak. Simulated only."""
    points = []
    for record in smallest_peaks(question):
        average, base = record.predicted.get("average_bytes"), question.of_baseline(record)
        if is_simulated(record) and average and base and (reference := _average(base)):
            points.append(Point(100 * (1 - average / reference), record, base, True))
    return Answer(points, f"bytes held by {question.method}, averaged over the step, against {question.baseline}",
                  f"no simulated cell of {question.method} has an average beside one of {question.baseline}")


def _average(baseline: RunRecord) -> float | None:
    return baseline.predicted.get("peak_bytes" if _is_reserved(baseline) else "average_bytes")


def average_maps_saved_percent(question: Question) -> Answer:
    """As average_memory_saved_percent, with parameters, buffers, gradients of parameters and optimizer state left out on both sides:
    what remains is what a method that moves feature maps manages. Simulated only."""
    points = []
    for record in smallest_peaks(question):
        base = question.of_baseline(record)
        if not is_simulated(record) or base is None:
            continue
        ours, theirs = _without_state(record, is_reserved=False), _without_state(base, is_reserved=_is_reserved(base))
        if ours is not None and theirs:
            points.append(Point(100 * (1 - ours / theirs), record, base, True))
    return Answer(points, f"bytes of {question.method} beside the network's state, averaged over the step, against {question.baseline}",
                  f"no simulated cell of {question.method} has an average beside one of {question.baseline}")


def _without_state(record: RunRecord, *, is_reserved: bool) -> float | None:
    """Average bytes beside the state; of a footprint reserved for the step, all of it less all state."""
    predicted, roles = record.predicted, record.provenance.get("bytes_by_role") or {}
    if is_reserved:
        return predicted["peak_bytes"] - sum(roles[role] for role in STATE) if set(STATE) <= set(roles) else None
    if predicted.get("average_bytes") is None or predicted.get("average_state_bytes") is None:
        return None
    return predicted["average_bytes"] - predicted["average_state_bytes"]


def _is_reserved(baseline: RunRecord) -> bool:
    return baseline.config.get("method") in RESERVED_FOR_THE_STEP


def memory_ratio(question: Question) -> Answer:
    """Peak of the baseline / smallest peak that the method kept, for the same step. The baseline is named by the workflow: eager,
    network-wide, vdnn-baseline."""
    points = []
    for record in smallest_peaks(question):
        base, baseline, simulated_base = baseline_peak(question, record)
        if base:
            points.append(Point(base / peak_of(record)[0], record, baseline, is_simulated(record) or simulated_base))
    return Answer(points, f"peak of {question.baseline} / smallest peak of {question.method}",
                  f"no sound cell of {question.method} has a peak beside one of {question.baseline}")


def slowdown_percent(question: Question) -> Answer:
    """Step time of the method / that of the baseline on the same device with enough memory - 1, at the smallest peak that the method
    kept. Simulated only: the simulator runs the baseline whether or not it would fit."""
    return Answer([Point(100 * (ratio - 1), record, base, True) for ratio, record, base in _time_ratios(question)],
                  f"extra step time of {question.method} against {question.baseline} on the same device with enough memory",
                  f"no simulated cells of {question.method} and {question.baseline} for the same step have times")


def performance_loss_percent(question: Question) -> Answer:
    """1 - step time of the baseline on the same device with enough memory / that of the method: the loss of throughput, at the smallest
    peak that the method kept. Simulated only."""
    return Answer([Point(100 * (1 - 1 / ratio), record, base, True) for ratio, record, base in _time_ratios(question)],
                  f"throughput that {question.method} loses against {question.baseline} on the same device with enough memory",
                  f"no simulated cells of {question.method} and {question.baseline} for the same step have times")


def throughput_percent(question: Question) -> Answer:
    """Step time of the baseline on the same device with enough memory / that of the method. Simulated only."""
    return Answer([Point(100 / ratio, record, base, True) for ratio, record, base in _time_ratios(question)],
                  f"throughput of {question.method} against {question.baseline} on the same device with enough memory",
                  f"no simulated cells of {question.method} and {question.baseline} for the same step have times")


def step_time_ratio(question: Question) -> Answer:
    """Step time of the method / that of the baseline on the same device with enough memory. Simulated only."""
    return Answer([Point(ratio, record, base, True) for ratio, record, base in _time_ratios(question)],
                  f"step time of {question.method} / {question.baseline}",
                  f"no simulated cells of {question.method} and {question.baseline} for the same step have times")


def _time_ratios(question: Question) -> list[tuple[float, RunRecord, RunRecord]]:
    found = [(record, question.of_baseline(record)) for record in smallest_peaks(question) if is_simulated(record)]
    return [(record.predicted["step_seconds"] / base.predicted["step_seconds"], record, base) for record, base in found
            if base and record.predicted.get("step_seconds") and base.predicted.get("step_seconds")]


def overhead_removed_percent(question: Question) -> Answer:
    """1 - overhead of the method / that of the baseline within the same budget, the smallest that both kept; an overhead is the step time
    over eager's, less 1. What a second resource gives beside the first one. Simulated only."""
    groups: dict[tuple[str, str], list[tuple[RunRecord, RunRecord]]] = {}
    for record in question.of_method("step"):
        others = [r for r in question.of_baselines(record) if r.config.get("budget") == record.config.get("budget")]
        if others and record.budget_bytes and is_sound(record) and all(map(simulated_ratio, (record, others[0]))):
            groups.setdefault(comparison_key(record), []).append((record, others[0]))
    smallest = [min(pairs, key=lambda pair: pair[0].budget_bytes) for pairs in groups.values()]
    points = [Point(100 * (1 - (simulated_ratio(record) - 1) / (simulated_ratio(base) - 1)), record, base, True)
              for record, base in smallest if simulated_ratio(base) > 1]
    told = "; ".join(f"{p.record.config['model']} within {budget_in_words(p.record.config)}: {100 * (simulated_ratio(p.record) - 1):.1f} % "
                     f"against {100 * (simulated_ratio(p.baseline) - 1):.1f} %" for p in points)
    return Answer(points, f"overhead of {question.method} against that of {question.baseline}: {told}",
                  f"no simulated cells of {question.method} and {question.baseline} within the same budget have overheads")


def peak_bytes(question: Question) -> Answer:
    """Smallest peak that the method kept, everything that the step holds counted, in the claim's unit; GB are 10^9 bytes."""
    per_unit = _per_unit(question, BYTES)
    points = [Point(peak_of(r)[0] / per_unit, r, None, is_simulated(r)) for r in smallest_peaks(question)] if per_unit else []
    return Answer(points, f"peak of {question.method}", f"no sound cell of {question.method} has a peak{_in_unit(question, per_unit)}")


def peak_maps_bytes(question: Question) -> Answer:
    """As peak_bytes, with the parameters, buffers, gradients of parameters and optimizer state left out that are live at the peak: what
    papers count that leave them out. Simulated only."""
    per_unit = _per_unit(question, BYTES)
    found = [(r, _maps_at_peak(r)) for r in smallest_peaks(question)] if per_unit else []
    return Answer([Point(maps / per_unit, r, None, True) for r, maps in found if maps],
                  f"peak of {question.method} less the network's state",
                  f"no simulated cell of {question.method} says what is live at its peak{_in_unit(question, per_unit)}")


def maps_ratio(question: Question) -> Answer:
    """As memory_ratio, with the network's state left out on both sides. Simulated only."""
    found = [(r, _maps_at_peak(r), base, _maps_at_peak(base)) for r in smallest_peaks(question) if (base := question.of_baseline(r))]
    return Answer([Point(theirs / ours, r, base, True) for r, ours, base, theirs in found if ours and theirs],
                  f"peak of {question.baseline} / smallest peak of {question.method}, both less the network's state",
                  f"no simulated cells of {question.method} and {question.baseline} say what is live at their peaks")


def _maps_at_peak(record: RunRecord) -> float | None:
    live = (record.predicted.get("at_peak") or {}).get("by_role")
    return peak_of(record)[0] - sum(live.get(role, 0) for role in STATE) if is_simulated(record) and live is not None else None


def step_time(question: Question) -> Answer:
    """Time of a step at the smallest peak that the method kept, in the claim's unit. Simulated only: measured times belong to another
    machine than the paper's."""
    per_unit = _per_unit(question, SECONDS)
    timed = [r for r in smallest_peaks(question) if is_simulated(r) and r.predicted.get("step_seconds")]
    points = [Point(r.predicted["step_seconds"] / per_unit, r, None, True) for r in timed] if per_unit else []
    return Answer(points, f"step time of {question.method}",
                  f"no simulated cell of {question.method} has a step time{_in_unit(question, per_unit)}")


def feature_share_percent(question: Question) -> Answer:
    """Share of the peak that belongs to the feature extraction: layers up to the last convolution and what follows it of its kind, with
    their maps, gradients, parameters and workspace, and the batch. Simulated only."""
    points = [Point(100 * r.predicted["feature_bytes_at_peak"] / peak_of(r)[0], r, None, True) for r in smallest_peaks(question)
              if is_simulated(r) and r.predicted.get("feature_bytes_at_peak")]
    return Answer(points, f"share of the peak of {question.method} in layers of the feature extraction",
                  f"no simulated cell of {question.method} says what of its peak belongs to which layers")


def extra_forwards(question: Question) -> Answer:
    """Operators that the step runs a second time, or more, at the smallest peak that the method kept. Simulated only."""
    points = [Point(r.predicted["recomputes"], r, None, True) for r in smallest_peaks(question)
              if is_simulated(r) and r.predicted.get("recomputes") is not None]
    return Answer(points, f"forward operators that {question.method} runs again", f"no simulated cell of {question.method} has a plan")


def images_per_second(question: Question) -> Answer:
    """Batch size / step time at the smallest peak that the method kept at that batch. Simulated only."""
    points = [Point(r.config["batch_size"] / r.predicted["step_seconds"], r, None, True) for r in smallest_peaks(question)
              if is_simulated(r) and r.predicted.get("step_seconds")]
    return Answer(points, f"samples a second of {question.method}", f"no simulated cell of {question.method} has a step time")


def samples_per_second_ratio(question: Question) -> Answer:
    """Samples a second of the method at its batch / those of the baseline at the batch that the claim names for it. Simulated only."""
    pairs = [(r, base) for r in smallest_peaks(question) if is_simulated(r) and (base := question.of_baseline(r))]
    points = [Point(_rate(record) / _rate(base), record, base, True) for record, base in pairs]
    told = "; ".join(f"{_rate(r):.1f} a second at batch {r.config['batch_size']} against {_rate(base):.1f} at {base.config['batch_size']}"
                     for r, base in pairs)
    return Answer(points, f"samples of {question.method} against {question.baseline}: {told}",
                  f"no simulated cells of {question.method} and {question.baseline} at these batches have times")


def _rate(record: RunRecord) -> float:
    return record.config["batch_size"] / record.predicted["step_seconds"]


def _per_unit(question: Question, units: Mapping[str, float]) -> float | None:
    """`GB per GPU` -> 1e9."""
    return units.get(question.claim.unit.split(" ")[0])


def _in_unit(question: Question, per_unit: float | None) -> str:
    return "" if per_unit else f" in {question.claim.unit!r}"


def speedup_on_devices(question: Question) -> Answer:
    """Step time of one device on the whole batch / that of the workflow's number of devices on their shares, gradients exchanged.
    Simulated only."""
    records = [r for r in question.of_method("step") if is_sound(r) and is_simulated(r) and r.predicted.get("speedup_over_one_device")]
    return Answer([Point(r.predicted["speedup_over_one_device"], r, None, True) for r in records],
                  f"speed-up of {question.method} over one device", f"no cell of {question.method} was simulated on several devices")


def max_depth_ratio(question: Question) -> Answer:
    """Deepest network of the method / deepest network of the baseline, on the same target with the same memory and batch."""
    answer = searched(question, "depth")
    told = "; ".join(f"{count_of(p.record.search['largest'], 'layer')} against {p.baseline.search['largest']}" for p in answer.points)
    return Answer(answer.points, f"deepest network: {told}", answer.missing)


def largest_found(question: Question) -> Answer:
    """The largest batch, depth or other value that a search of the method found, where it did not end at its own limit."""
    ended = [r for r in question.of_method("max_batch") if is_sound(r) and r.search.get("largest")]
    points = [Point(r.search["largest"], r, None, True) for r in ended if r.search["largest"] != r.search.get("high")]
    told = join_words(dict.fromkeys(r.search.get("over", BATCH) for r in ended))
    return Answer(points, f"largest {told} of {question.method}", f"no search of {question.method} came to an end below its own limit")


def searched(question: Question, over: str | None = None) -> Answer:
    """Largest value that a search (over this option, where one is named) of the method found / that of the baseline's; no point where one
    of them did not come to an end."""
    points, reasons = [], []
    for record in question.of_method("max_batch"):
        noun = record.config["search"].get("over", BATCH)
        if over not in (None, noun):
            continue
        baseline = question.of_baseline(record)
        if not is_sound(record) or baseline is None:
            continue
        largest, base = record.search.get("largest"), baseline.search.get("largest")
        ended = [r.config["method"] for r in (record, baseline) if r.search.get("largest") == r.search.get("high")]
        if not largest or not base:
            reasons.append(f"a search found no {noun} that fits")
        elif record.search.get("memory_bytes") != baseline.search.get("memory_bytes"):
            reasons.append("the searches had different memory")
        elif ended:
            reasons.append(f"the search of {join_words(ended)} ended at its own limit, so the largest {noun} is not known")
        else:
            points.append(Point(largest / base, record, baseline, is_simulated(record)))
    return Answer(points, "", join_words(dict.fromkeys(reasons)) or
                  f"no finished search for both {question.method} and {question.baseline}")


HEADLINES = (average_memory_saved_percent, average_maps_saved_percent, memory_ratio, slowdown_percent, step_time_ratio, peak_bytes,
             step_time, images_per_second, speedup_on_devices, max_depth_ratio, performance_loss_percent, throughput_percent,
             feature_share_percent, extra_forwards, largest_found, samples_per_second_ratio,
             peak_maps_bytes, maps_ratio, overhead_removed_percent)
