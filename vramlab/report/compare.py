"""Two runs held against each other, cell by cell: what differs in how they were made, what in what they found, and whether it can be told.

From records only. Step times of two machines are compared as multiples of eager's beside them, never as seconds; predicted numbers have no
noise, so every difference of theirs is one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vramlab.record import Outcome, RunRecord, Truth
from vramlab.report.words import is_of_few_pairs, is_simulated
from vramlab.run_folder import RunFolder

_NOT_ASKED = ("sources", "measure")  # of a config: how it was measured and with which code, not what was asked
_ENVIRONMENT = ("cpu", "gpus", "software", "variables", "git")
_FOLLOWS = {"options": "method", "model_options": "model", "search": "kind", "profile": "target"}  # whose key it is that brings them
_RANK = {Truth.EXACT: 0, Truth.WITHIN_NOISE: 1, Truth.SEMANTICS_CHANGED: 2, Truth.NOT_RUN: 3, Truth.WRONG: 4}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One figure of a pair. `change` is second over first, less 1; None where one is missing or no number."""

    figure: str
    first: Any
    second: Any
    change: float | None
    is_distinguishable: bool
    is_regression: bool


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same cell of two runs."""

    config: Mapping[str, Any]
    is_simulated: bool
    differences: tuple[Difference, ...]  # of all figures that either has, equal ones too

    @property
    def regressions(self) -> tuple[Difference, ...]:
        """Those that are worse in the second run, beyond the threshold and the noise."""
        return tuple(d for d in self.differences if d.is_regression)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A key of a workflow's cells that the cells without a partner have other values of, in either run. A key that one run's cells lack has
    no values there."""

    key: str  # dotted, as in a cell's config: training.seed
    first: tuple[Any, ...]
    second: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Of two runs."""

    settings: tuple[tuple[str, Any, Any], ...]  # (name, first's, second's) of what differs in how they were made
    asked: tuple[Question, ...]  # why cells have no partner; empty where one run has a partner for all of its own
    pairs: tuple[Pair, ...]
    only_first: tuple[Mapping[str, Any], ...]  # configs of cells that the other run has no record of
    only_second: tuple[Mapping[str, Any], ...]

    @property
    def has_regressed(self) -> bool:
        """Whether anything is worse in the second run."""
        return any(pair.regressions for pair in self.pairs)


def compare(first: RunFolder, second: RunFolder, *, threshold: float = 0.05) -> Comparison:
    """The second run against the first. A figure has regressed when it is worse by more than `threshold`, a share, and beyond its noise."""
    one, other = (_by_question(run.records().values()) for run in (first, second))
    shared = [(one[key], other[key]) for key in one if key in other]
    only_first = tuple(one[key].config for key in one if key not in other)
    only_second = tuple(other[key].config for key in other if key not in one)
    return Comparison(settings=tuple(_settings(first, second, shared)), asked=_asked(only_first, only_second),
                      pairs=tuple(_pair(*records, threshold) for records in shared), only_first=only_first, only_second=only_second)


def _by_question(records: Iterable[RunRecord]) -> dict[str, RunRecord]:
    return {json.dumps({k: v for k, v in r.config.items() if k not in _NOT_ASKED}, sort_keys=True): r for r in records}


# --- what they asked ------------------------------------------------------------------------------------------------------
def _asked(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> tuple[Question, ...]:
    """Keys that no cell of one shares a value of with any of the other, each of which alone keeps them apart; where there is none, all keys
    whose values differ."""
    if not first or not second:
        return ()
    one, other = map(_values, (first, second))
    found = [Question(key=key, first=tuple(a.values()), second=tuple(b.values())) for key in dict.fromkeys([*one, *other])
             if (a := one.get(key, {})).keys() != (b := other.get(key, {})).keys()]
    apart = [q for q in found if one.get(q.key, {}).keys().isdisjoint(other.get(q.key, {}))] or found
    named = {q.key for q in apart}
    return tuple(q for q in apart if _FOLLOWS.get(q.key.partition(".")[0]) not in named)


def _values(configs: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """{dotted key: {a value as JSON: the value}}."""
    found: dict[str, dict[str, Any]] = {}
    for config in configs:
        for key, value in _leaves("", {k: v for k, v in config.items() if k not in _NOT_ASKED}):
            found.setdefault(key, {})[json.dumps(value, sort_keys=True)] = value
    return found


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(f"{path}.{key}" if path else key, inner)


# --- how they were made ---------------------------------------------------------------------------------------------------
def _settings(first: RunFolder, second: RunFolder, pairs: list[tuple[RunRecord, RunRecord]]) -> Iterator[tuple[str, Any, Any]]:
    sides = (first, second)
    yield from unlike("workflow", *(run.plan["workflow"].get("name") for run in sides))
    yield from unlike("overrides", *(run.plan["overrides"] for run in sides))
    found: dict[str, tuple[Any, Any]] = {}
    for records in pairs:
        for name in _ENVIRONMENT:
            for path, a, b in unlike(name, *(r.environment.get(name) for r in records)):
                found.setdefault(path, (a, b))
        for name in _NOT_ASKED:
            of = f" of {records[0].config['method']}" if name == "sources" else ""
            for path, a, b in unlike(name, *(r.config.get(name) for r in records)):
                found.setdefault(path + of, (a, b))
    yield from ((path, a, b) for path, (a, b) in found.items())


def compare_records(first: RunRecord, second: RunRecord, *, threshold: float = 0.05) -> tuple[Difference, ...]:
    """Every figure of two records. The second's target decides whether they are measured or simulated ones."""
    return _pair(first, second, threshold).differences


def unlike(path: str, first: Any, second: Any) -> Iterator[tuple[str, Any, Any]]:
    """Leaves that differ, by dotted path."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in dict.fromkeys([*first, *second]):
            yield from unlike(f"{path}.{key}", first.get(key), second.get(key))
    elif first != second:
        yield path, first, second


# --- what they found ------------------------------------------------------------------------------------------------------
def _pair(first: RunRecord, second: RunRecord, threshold: float) -> Pair:
    return Pair(config=second.config, is_simulated=is_simulated(second),
                differences=(*_ends(first, second), *_numbers(first, second, threshold)))


def _ends(first: RunRecord, second: RunRecord) -> Iterator[Difference]:
    lost = first.outcome is Outcome.OK and second.outcome is not Outcome.OK
    yield _word("outcome", first.outcome, second.outcome, is_worse=lost)
    if not is_simulated(second):
        yield _word("truth", first.truth, second.truth, is_worse=not lost and _RANK[second.truth] > _RANK[first.truth])


def _word(figure: str, first: Any, second: Any, *, is_worse: bool) -> Difference:
    return Difference(figure=figure, first=str(first), second=str(second), change=None, is_distinguishable=first != second,
                      is_regression=is_worse)


def _numbers(first: RunRecord, second: RunRecord, threshold: float) -> Iterator[Difference]:
    block = "predicted" if is_simulated(second) else "measured"
    found = [(figure, getattr(first, block).get(key), getattr(second, block).get(key), sign) for figure, key, sign in (
        ("peak bytes", "peak_bytes", 1), ("moved bytes", "moved_bytes", 1))]
    if is_simulated(second):
        found.append(("step seconds", first.predicted.get("step_seconds"), second.predicted.get("step_seconds"), 1))
    searches = [record.search or {} for record in (first, second)]
    found.append((f"largest {searches[1].get('over', '')}", *(search.get("largest") for search in searches), -1))
    for figure, a, b, sign in found:
        if a is not None or b is not None:
            yield _number(figure, a, b, sign, threshold, is_told=a != b)
    if second.config.get("method") != "eager":  # its ratio is to itself: the noise of a run, no figure of it
        yield from _time(first.measured.get("ratio") or {}, second.measured.get("ratio") or {}, threshold)


def _number(figure: str, first: float | None, second: float | None, sign: int, threshold: float, *, is_told: bool) -> Difference:
    """`sign` 1: less is better; -1: more is."""
    change = second / first - 1 if first and second is not None else None
    is_worse = change is not None and is_told and sign * change > threshold
    return Difference(figure=figure, first=first, second=second, change=change, is_distinguishable=is_told, is_regression=is_worse)


def _time(first: Mapping[str, Any], second: Mapping[str, Any], threshold: float) -> Iterator[Difference]:
    """Told apart when neither interval reaches into the other; ratios of too few pairs have none."""
    if not first or not second:
        return
    has_ends = not any(is_of_few_pairs(block) or None in (block["low"], block["high"]) for block in (first, second))
    is_told = has_ends and (first["high"] < second["low"] or second["high"] < first["low"])
    yield _number("step time / eager's", first["median"], second["median"], 1, threshold, is_told=is_told)
