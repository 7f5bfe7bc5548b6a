"""Third round, fourth part: a search is run again over the log of its trials."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vramlab.crowd.rules.agreeing import disagreements
from vramlab.crowd.rules.asking import Examination, Fault, Round, rule
from vramlab.device import load_profile
from vramlab.finder import BATCH, described, find_largest, largest_within, values_of
from vramlab.planner import parse_bytes
from vramlab.record import Outcome, RunRecord, Truth

_MOST_VALUES = 10_000_000  # of a range that is searched


class _NotLogged(Exception):
    """The search would have tried a value that is not in the log."""


@rule(Round.DERIVATION, "search", "the largest that fits, and all that is said of it, follow from the log of trials")
def _search(e: Examination) -> Iterator[Fault]:
    for name, record in e.contents.records.items():
        if not record.search:
            if record.kind == "max_batch" and record.outcome is Outcome.OK:
                yield f"{name}:search", "a search without a log"
            continue
        e.count()
        asked, search, where = record.config.get("search"), record.search, f"{name}:search"
        if not asked or not search.get("trials") or search.get("is_simulated") is None:
            yield where, "a search without its question, its kind or its trials"
            continue
        if asked["high"] < asked["low"] or asked["high"] - asked["low"] > _MOST_VALUES:
            yield f"{name}:config.search", "no range that can be searched"
            continue
        try:
            derived = _found_again(record, asked, search)
        except _NotLogged as gap:
            yield f"{where}.trials", str(gap)
            continue
        yield from disagreements(where, {key: search.get(key) for key in derived}, derived)
        yield from _trials(where, record, search)
        yield from _answer(name, record, search)


def _found_again(record: RunRecord, asked: Mapping[str, Any], search: Mapping[str, Any]) -> dict[str, Any]:
    """The search over its log: what it found, and the block's own words."""
    log = {(t["value"], t["attempt"]): t for t in search["trials"]}

    def trial(value: int, attempt: int) -> Mapping[str, Any]:
        if (value, attempt) not in log:
            raise _NotLogged(f"the search would have tried {value} ({attempt}), which is not in the log")
        return log[value, attempt]

    first, confirm = None, None
    if not search["is_simulated"]:
        first, confirm = search.get("simulated_largest"), lambda v: trial(v, 2)["fits"]
    values = values_of(asked)
    found = find_largest(lambda v: trial(v, 1)["fits"], values, first=first, doubles=first is None, confirm=confirm)
    fast = largest_within(lambda v: trial(v, 1)["fits"], lambda v: bool(trial(v, 1)["within_slowdown"]), found, values)
    derived = described(asked, found, fast, search["trials"], memory_bytes=search.get("memory_bytes"), at_peak=search.get("at_peak") or {},
                        is_simulated=record.config["target"].startswith("sim:"))
    del derived["trials"]
    return derived | _memory(record, search)


def _memory(record: RunRecord, search: Mapping[str, Any]) -> dict[str, Any]:
    """What may be filled: a size in bytes, or all of a simulated board. What a machine had only it can say."""
    budget, target = record.config["budget"], record.config["target"]
    if budget not in (None, "auto"):
        return {"memory_bytes": parse_bytes(budget)}
    return {"memory_bytes": load_profile(target.removeprefix("sim:")).memory_bytes} if target.startswith("sim:") else {}


def _trials(where: str, record: RunRecord, search: Mapping[str, Any]) -> Iterator[Fault]:
    for index, trial in enumerate(search["trials"]):
        at, seconds = f"{where}.trials.{index}", trial["step_seconds"]
        if trial["fits"] != (trial["outcome"] == "ok"):
            yield f"{at}.fits", f"{trial['fits']} is claimed of a trial that ended as {trial['outcome']}"
        samples = trial["value"] if record.config["search"]["over"] == BATCH else record.config["batch_size"]
        rate = samples / seconds if samples and seconds else None
        yield from disagreements(f"{at}.samples_per_second", trial["samples_per_second"], rate)
        memory, peak = search.get("memory_bytes"), trial["peak_bytes"]
        if trial["fits"] and None not in (memory, peak) and peak > memory:
            yield f"{at}.peak_bytes", f"{peak:,} bytes do not fit {memory:,}"
        if not trial["fits"] and seconds:
            yield f"{at}.step_seconds", "a step that does not fit takes no time"


def _answer(name: str, record: RunRecord, search: Mapping[str, Any]) -> Iterator[Fault]:
    largest = search.get("largest")
    is_ok = record.outcome is Outcome.OK
    if is_ok and largest is None or not is_ok and largest is not None and record.truth is not Truth.WRONG:  # the largest may be wrong
        yield f"{name}:outcome", f"{record.outcome} is claimed; the largest that fits is {largest}"
    if not search["is_simulated"] and largest is not None:
        held = next(t["peak_bytes"] for t in search["trials"] if t["value"] == largest)
        yield from disagreements(f"{name}:measured.peak_bytes", record.measured.get("peak_bytes"), held)
