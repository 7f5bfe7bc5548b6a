"""The finder against fake workloads whose limit is known, monotone or not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramlab.finder import TrialLog, find_largest, trial


class Workload:
    """Fits where `is_small` says so; `flaky` values fail at their first trial, or fit at it, and then answer the other way."""

    def __init__(self, is_small, flaky=()) -> None:
        self.is_small, self.flaky, self.trials = is_small, set(flaky), []

    def __call__(self, value: int) -> bool:
        self.trials.append(value)
        return self.is_small(value) != (value in self.flaky and self.trials.count(value) == 1)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 60), st.integers(-5, 400), st.one_of(st.none(), st.integers(-9, 400)),
       st.booleans())
def test_a_limit_is_found_exactly_from_any_guess(low, step, count, limit, first, doubles):
    values = range(low, low + step * count, step)
    workload = Workload(lambda v: v <= limit)
    found = find_largest(workload, values, first=first, doubles=doubles)
    assert found.largest == max([v for v in values if v <= limit], default=None)
    assert found.hit_upper_end == (found.largest == values[-1]) and found.holes == found.unstable == ()
    assert len(set(workload.trials)) == len(workload.trials)
    if found.largest is not None and not found.hit_upper_end:
        assert found.largest + step in workload.trials


@pytest.mark.parametrize(("holes", "largest"), [
    (range(64, 71), 100),  # a probe beyond 63 fits, and the search goes on
    (range(16, 17), 100),
    (range(90, 92), 100),
    (range(101, 103), 100),  # not holes, but failures beyond the limit
])
def test_holes_are_found_and_named(holes, largest):
    workload = Workload(lambda v: v <= 100 and v not in holes)
    found = find_largest(workload, range(1, 4097))
    assert found.largest == largest
    assert found.holes == tuple(sorted(v for v in set(workload.trials) if v in holes and v < largest))
    assert set(holes) & set(workload.trials) or holes.start > 80


def test_an_island_beyond_an_edge_is_found_and_its_own_edge_too():
    """Fits up to 45, and again from 51 to 57; bisection meets 48."""
    found = find_largest(Workload(lambda v: v <= 45 or 51 <= v <= 57), range(1, 200))
    assert found.largest == 57 and found.holes == (46, 47, 48)


@given(st.sets(st.integers(1, 60)))
def test_whatever_fits_the_answer_fits_and_its_next_does_not(fitting):
    workload = Workload(fitting.__contains__)
    found = find_largest(workload, range(1, 61))
    if found.largest is None:
        assert 1 not in fitting
    else:
        assert found.largest in fitting and found.largest + 1 not in fitting
        assert set(found.holes) == {v for v in workload.trials if v < found.largest and v not in fitting}


@pytest.mark.parametrize(("flaky", "largest"), [((), 37), ((37,), 37), ((38,), 37)])
def test_the_edge_is_confirmed_by_a_second_trial(flaky, largest):
    """37 that fails at first is not found; 38 that fits at first has to fit twice."""
    workload = Workload(lambda v: v <= 37, flaky)
    found = find_largest(workload, range(1, 200), confirm=workload)
    assert found.largest == (36 if flaky == (37,) else largest)
    assert set(found.unstable) == set(flaky)
    assert workload.trials.count(found.largest) == workload.trials.count(found.largest + 1) == 2


@given(st.integers(1, 60), st.sets(st.integers(1, 80), max_size=3), st.sets(st.integers(1, 80), max_size=3), st.integers(1, 80))
def test_with_holes_and_flaky_trials_what_is_found_fitted_twice_and_the_next_did_not(limit, holes, flaky, first):
    workload = Workload(lambda v: v <= limit and v not in holes, flaky)
    found = find_largest(workload, range(1, 81), first=first, doubles=False, confirm=workload)
    assert set(found.unstable) <= flaky and max(workload.trials.count(v) for v in set(workload.trials)) <= 2
    if found.largest is not None:
        assert workload.is_small(found.largest) and found.largest not in flaky and workload.trials.count(found.largest) == 2
        assert found.largest + 1 in flaky or not workload.is_small(found.largest + 1)
    if not holes and not flaky:
        assert found.largest == limit


def test_a_good_guess_saves_trials():
    """Nine of a range of 4,096: the guess, the next, both again, four beyond and the one between."""
    for off in (0, 1, -1):
        workload = Workload(lambda v: v <= 300)
        assert find_largest(workload, range(1, 4097), first=300 + off, doubles=False, confirm=workload).largest == 300
        assert len(workload.trials) <= 9


def test_a_largest_value_that_fits_only_once_does_not_count():
    answers = {7: [True, False]}
    found = find_largest(lambda v: v <= 7, range(1, 20), confirm=lambda v: answers[v][1] if v in answers else v <= 7)
    assert found.largest == 6 and found.unstable == (7,)


def test_no_values():
    with pytest.raises(ValueError, match="no value from 5 to 4"):
        find_largest(lambda v: True, range(5, 5))


# ------------------------------------------------------------------------------------------------ trials that are kept


class Killed(Exception):
    pass


class Trials:
    """Runs of a workload that fits up to 37; dies at the `dies_at`-th."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.values, self.dies_at = [], dies_at

    def __call__(self, value: int) -> dict:
        if len(self.values) == self.dies_at:
            raise Killed
        self.values.append(value)
        fits = value <= 37
        return trial(value, "ok" if fits else "oom", "" if fits else "gpu_memory", samples=value, step_seconds=0.1, compute_seconds=0.1,
                     seconds_cap=0.2 if value <= 30 else 0.05)


def search(log: TrialLog):
    return find_largest(log.fits, range(1, 200), first=50, doubles=False, confirm=log.fits_again)


@pytest.mark.parametrize("dies_at", range(12))
def test_a_search_that_was_killed_goes_on_from_the_trials_that_are_kept(dies_at):
    whole, kept = Trials(), []
    expected = search(TrialLog(whole))
    first = Trials(dies_at)
    with pytest.raises(Killed):
        search(TrialLog(first, keep=lambda trials: kept.__setitem__(slice(None), trials)))
    second = Trials()
    log = TrialLog(second, kept)
    assert search(log) == expected and first.values + second.values == whole.values
    assert [t["value"] for t in log.trials] == whole.values


def test_the_log_has_both_trials_of_the_edge_and_what_is_fast():
    log = TrialLog(Trials())
    search(log)
    tries = sorted((t["value"], t["attempt"]) for t in log.trials if t["value"] in (37, 38))
    assert tries == [(37, 1), (37, 2), (38, 1), (38, 2)]
    assert log.is_fast(30) and not log.is_fast(37) and not log.is_fast(60)


def test_kept_trials_that_this_search_does_not_ask_for_stay_out_of_its_log():
    log = TrialLog(Trials(), kept=[trial(150, "oom", "gpu_memory")])
    search(log)
    assert 150 not in [t["value"] for t in log.trials]
