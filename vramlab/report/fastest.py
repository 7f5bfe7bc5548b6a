"""The fastest method at each budget that a run planned: among those that kept it and computed what eager computes, and what it is not
distinguishable from. A budget that no method kept is a row, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from vramlab.counted import count_of
from vramlab.record import RunRecord
from vramlab.report.figures import peak_of, step_groups, where_in_words
from vramlab.report.points import is_sound
from vramlab.report.words import (
    DASH, budget_in_words, bytes_in_words, interval_in_words, is_distinguishable, is_of_few_pairs, is_simulated_target,
    join_words, significant, simulated_ratio,
)
from vramlab.runs import Run

NONE_KEPT, NOT_TIMED = "none kept it", "none was timed"
ALONE, UNCOMPARED = "no other kept it", "no other was asked"


@dataclass(frozen=True, kw_only=True)
class Best:
    """The fastest method at one budget among those that kept it bit for bit."""

    where: str  # model, batch, hardware; the experiment where a run has several
    budget: str
    method: str  # or that there is none
    asked: tuple[str, ...]  # the methods that were asked for this budget
    kept: str  # how many of them kept it
    peak: str
    time: str
    is_simulated: bool
    rivals: str  # methods that cannot be told apart from it, "" when none


def fastest(run: Run) -> list[Best]:
    """One row for each budget of each step and target, in order of the plan."""
    groups = [[r for r in group if r.config.get("budget") is not None] for group in step_groups(run)]
    are_several = len({str(group[0].config.get("experiment")) for group in groups if group}) > 1
    return [_best_of(run, [r for r in group if budget_in_words(r.config) == budget], are_several) for group in groups
            for budget in dict.fromkeys(budget_in_words(r.config) for r in group)]


def step_ratio(record: RunRecord) -> tuple[float, float | None, float | None] | None:
    """(median, low, high) of step time / eager's: measured, without ends where its pairs are too few for an interval, or simulated on both
    sides on a simulated device."""
    if is_simulated_target(record.config):
        ratio = simulated_ratio(record)
        return ratio and (ratio,) * 3
    ratio = record.measured.get("ratio") or {}
    values = tuple(ratio.get(key) for key in ("median", "low", "high"))
    return None if values[0] is None else values


def _best_of(run: Run, asked: Sequence[RunRecord], are_several: bool) -> Best:
    kept = [r for r in asked if is_sound(r)]
    timed = [r for r in kept if step_ratio(r)]
    experiment = f"{asked[0].config.get('experiment')}: " if are_several else ""
    told = {"where": experiment + where_in_words(run, asked[0]), "budget": budget_in_words(asked[0].config),
            "is_simulated": is_simulated_target(asked[0].config), "asked": tuple(dict.fromkeys(run.label(r) for r in asked)),
            "kept": f"{len(kept)} of {count_of(len(asked), 'method')}"}
    if not timed:
        names = join_words(dict.fromkeys(run.label(r) for r in kept))
        return Best(method=NOT_TIMED if kept else NONE_KEPT, peak=DASH, time=DASH, rivals=f"kept by {names}" if kept else "", **told)
    best = min(timed, key=lambda r: step_ratio(r)[0])
    rivals = join_words(dict.fromkeys(run.label(r) for r in timed if r is not best and not _is_slower(r, best)))
    return Best(method=run.label(best), peak=_peak_in_words(best), time=_time_in_words(best),
                rivals=rivals or (UNCOMPARED if len(asked) == 1 else ALONE if len(kept) == 1 else ""), **told)


def _is_slower(record: RunRecord, best: RunRecord) -> bool:
    """Whether it can be told to be slower: intervals of enough pairs that lie apart, or two simulated times that differ."""
    is_of_few = any(is_of_few_pairs(r.measured.get("ratio") or {}) for r in (record, best))
    low, high = step_ratio(record)[1], step_ratio(best)[2]
    return not is_of_few and None not in (low, high) and low > high


def _peak_in_words(record: RunRecord) -> str:
    peak, eager = peak_of(record), record.eager_peak_bytes
    whose = "eager's simulated peak" if record.eager_peak_is_simulated and not is_simulated_target(record.config) else "eager's"
    return f"{bytes_in_words(peak)}, {100 * peak / eager:.1f} % of {whose}" if eager and peak else bytes_in_words(peak)


def _time_in_words(record: RunRecord) -> str:
    if is_simulated_target(record.config):
        return significant(step_ratio(record)[0], 3)
    ratio: Mapping[str, Any] = record.measured["ratio"]
    is_told = is_distinguishable(ratio, record.measured.get("drift") or {})
    return interval_in_words(ratio) + (", not distinguishable from eager's" if is_told is False else "")
