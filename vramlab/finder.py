"""The largest value that fits: of a batch, a depth, an image size or any other whole number.

    found = find_largest(fits, range(low, high + 1, step))

Strides that double lead from a first guess to a value that fits and one above it that does not; bisection closes the gap. What fits need
not be monotone: a few values above the edge are tried too, and where one of them fits the search goes on from there. The values that
failed below the largest are the *holes*. Each value is tried once, with `confirm` the two at the edge once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BATCH = "batch"  # what is searched unless a search says otherwise
PROBE_STEPS = (2, 3)  # tried beyond the edge: so many values further on,
PROBE_SHARES = (16, 4)  # and further on by the edge's value divided by these


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to."""

    largest: int | None  # None: nothing that was tried fits
    hit_upper_end: bool  # the largest is the last value of the range; what lies beyond was not asked
    holes: tuple[int, ...]  # tried values below the largest that do not fit, ascending
    unstable: tuple[int, ...]  # they fitted once and failed once, and count as not fitting


def find_largest(fits: Callable[[int], bool], values: range, *, first: int | None = None, doubles: bool = True,
                 confirm: Callable[[int], bool] | None = None) -> Found:
    """The largest of ascending `values` that fits, exactly where all below the first failure fit and none above it does.

    `first`: a guess to start from, anywhere; by default the lowest value. `doubles`: the first stride is as long as the first value, so
    the second trial doubles it; otherwise it is one value. `confirm` tries a value anew: the largest has to fit twice, and the value
    above it to fail twice. ValueError where there are no values.
    """
    if not values:
        raise ValueError(f"there is no value from {values.start} to {values.stop - 1}")
    return _Search(fits, values, confirm).run(first, doubles)


class _Search:
    """Places in `values`, and what is known of them."""

    def __init__(self, fits: Callable[[int], bool], values: range, confirm: Callable[[int], bool] | None) -> None:
        self.ask, self.values, self.confirm = fits, values, confirm
        self.known: dict[int, bool] = {}
        self.confirmed: set[int] = set()
        self.unstable: set[int] = set()

    def run(self, first: int | None, doubles: bool) -> Found:
        place = 0 if first is None else min(max((first - self.values[0]) // self.values.step, 0), len(self.values) - 1)
        stride = max(self.values[place] // self.values.step, 1) if doubles else 1
        good = self._some_good(place, stride)
        while good is not None:
            good = self._edge(good, stride)
            if not self._is_confirmed(good):
                good = self._some_good(good, 1)
                continue
            beyond = [p for p in self._probes(good) if self._fits(p)]
            if not beyond:
                break
            good = max(beyond)
        found = [self.values[p] for p in sorted(self.known) if good is not None and p < good and not self.known[p]]
        return Found(largest=None if good is None else self.values[good], hit_upper_end=good == len(self.values) - 1, holes=tuple(found),
                     unstable=tuple(self.values[p] for p in sorted(self.unstable)))

    def _fits(self, place: int) -> bool:
        if place not in self.known:
            self.known[place] = self.ask(self.values[place])
        return self.known[place]

    def _some_good(self, place: int, stride: int) -> int | None:
        """This place, or one below it that fits."""
        while not self._fits(place):
            if place == 0:
                return None
            place, stride = max(place - stride, 0), stride * 2
        return place

    def _edge(self, good: int, stride: int) -> int:
        """A place at or above `good` that fits while the next one does not."""
        last = len(self.values) - 1
        bad = next((p for p in sorted(self.known) if p > good and not self.known[p]), last + 1)
        while good < last and bad > last:
            trial = min(good + stride, last)
            good, bad, stride = (trial, bad, stride * 2) if self._fits(trial) else (good, trial, stride)
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self._fits(middle) else (good, middle)
        return good

    def _is_confirmed(self, good: int) -> bool:
        """Does it fit, and the next one fail, when both are tried anew? A value that answers differently does not fit."""
        for place in (good, good + 1) if self.confirm else ():
            if place == len(self.values) or place in self.confirmed:
                continue
            self.confirmed.add(place)
            if self.confirm(self.values[place]) != self.known[place]:
                self.unstable.add(place)
                self.known[place] = False
        return self.known[good]

    def _probes(self, good: int) -> list[int]:
        """Places beyond the edge, ascending."""
        ahead = {*PROBE_STEPS, *(self.values[good] // share // self.values.step for share in PROBE_SHARES)}
        return [good + steps for steps in sorted(ahead) if steps > 1 and good + steps < len(self.values)]


# --- the record of a search -----------------------------------------------------------------------------------------------
Trial = dict[str, Any]


def values_of(search: Mapping[str, Any]) -> range:
    """The values that a cell's `search` may try."""
    return range(search["low"], search["high"] + 1, search["step"])


def trial(value: int, outcome: str, reason: str, *, message: str = "", attempt: int = 1, peak_bytes: int | None = None,
          samples: int | None = None, step_seconds: float | None = None, compute_seconds: float | None = None,
          seconds_cap: float | None = None) -> Trial:
    """One line of a search's log. `samples` are those of a step; `compute_seconds` the first runs of its ops."""
    return {
        "value": value, "attempt": attempt, "fits": outcome == "ok", "outcome": str(outcome), "reason": reason, "message": message,
        "peak_bytes": peak_bytes, "step_seconds": step_seconds,
        "samples_per_second": samples / step_seconds if samples and step_seconds else None,
        "slowdown": step_seconds / compute_seconds if step_seconds and compute_seconds else None,
        "within_slowdown": None if step_seconds is None or seconds_cap is None else step_seconds <= seconds_cap,
    }


class TrialLog:
    """Trials that run: the first of each value and, where its answer is confirmed, the second.

    `run(value)` makes one. `kept` are those of a search that was killed: they are not run again. `keep` gets all that are known after each.
    """

    def __init__(self, run: Callable[[int], Trial], kept: Sequence[Trial] = (), keep: Callable[[list[Trial]], None] | None = None) -> None:
        self._run, self._keep = run, keep
        self._known = {(t["value"], t["attempt"]): t for t in kept}
        self._asked: dict[tuple[int, int], Trial] = {}

    @property
    def trials(self) -> list[Trial]:
        """Those that this search asked for, in their order."""
        return list(self._asked.values())

    def fits(self, value: int) -> bool:
        """Does the value fit at its first trial?"""
        return self._trial(value, 1)["fits"]

    def fits_again(self, value: int) -> bool:
        """Does it at its second?"""
        return self._trial(value, 2)["fits"]

    def is_fast(self, value: int) -> bool:
        """Was the first trial's step within the slowdown cap?"""
        return bool(self._trial(value, 1)["within_slowdown"])

    def _trial(self, value: int, attempt: int) -> Trial:
        key = value, attempt
        if key not in self._known:
            self._known[key] = {**self._run(value), "attempt": attempt}
            if self._keep:
                self._keep(list(self._known.values()))
        return self._asked.setdefault(key, self._known[key])


def largest_within(fits: Callable[[int], bool], is_fast: Callable[[int], bool], found: Found, values: range) -> int | None:
    """The largest value that fits and whose step is fast, looked for from the largest that fits downwards; None when there is none."""
    if found.largest is None:
        return None
    below = values[:values.index(found.largest) + 1]
    return find_largest(lambda v: fits(v) and is_fast(v), below, first=found.largest, doubles=False).largest


def described(search: Mapping[str, Any], found: Found, largest_within_slowdown: int | None, trials: Iterable[Trial], *, memory_bytes: int,
              at_peak: Mapping[str, Any], is_simulated: bool, **measured: Any) -> dict[str, Any]:
    """The block `search` of a record: the cell's own `search`, what was found, the log of trials in their order, and what only a
    measured search has."""
    log = list(trials)
    timed = [t for t in log if t["fits"] and t["samples_per_second"]]
    fastest = max(timed, key=lambda t: t["samples_per_second"], default=None)
    return {
        **search, "largest": found.largest, "hit_upper_end": found.hit_upper_end, "holes": list(found.holes),
        "unstable": list(found.unstable), "largest_within_slowdown": largest_within_slowdown,
        "fastest": fastest and {key: fastest[key] for key in ("value", "samples_per_second")},
        "memory_bytes": memory_bytes, "at_peak": dict(at_peak), "is_simulated": is_simulated, **measured, "trials": log,
    }
