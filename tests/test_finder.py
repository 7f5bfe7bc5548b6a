"""The finder against fake workloads whose limit is known, monotone or not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramlab.finder import find_largest


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
    assert workload.trials.count(found.largest) == 2


def test_a_largest_value_that_fits_only_once_does_not_count():
    answers = {7: [True, False]}
    found = find_largest(lambda v: v <= 7, range(1, 20), confirm=lambda v: answers[v][1] if v in answers else v <= 7)
    assert found.largest == 6 and found.unstable == (7,)


def test_no_values():
    with pytest.raises(ValueError, match="no value from 5 to 4"):
        find_largest(lambda v: True, range(5, 5))
