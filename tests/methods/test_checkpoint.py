"""Checkpointing: sqrt(n) and log(n) on an equal chain, Algorithm 3 by hand and by brute force, cheap maps, the search under a budget."""

from __future__ import annotations

import sys
from itertools import accumulate
from math import sqrt

import pytest
from contract import DEVICE, plain_peak, residual
from tapes import MAP, SCALAR, TOYS, WEIGHT, StepBuilder, chain, random_op

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.errors import PlanInfeasible, Unsupported
from vramlab.layers import articulation_points, cuts_of
from vramlab.planner import UNLIMITED, Budget
from vramlab.schedule import Compute, Recompute
from vramlab.simulate import simulate
from vramlab.tape import Phase, Tape

METHOD = Library([built_in_collection()]).method("checkpoint")
PACKAGE = METHOD.load().__package__
segments, segmented = sys.modules[f"{PACKAGE}.segments"], sys.modules[f"{PACKAGE}.segmented"]


def plan(tape: Tape, device_bytes: int = UNLIMITED, **options) -> CheckedSchedule:
    budget = Budget(device_bytes=device_bytes)
    return check_schedule(tape, METHOD.build(**options).plan(tape, DEVICE, budget), budget)


def state_bytes(tape: Tape) -> int:
    return sum(s.nbytes for s in tape.storages if s.at_start)


def dense() -> Tape:
    """Six layers, each of which reads the sum of all before it: no articulation point between the first map and the last."""
    step = StepBuilder()
    maps = [step.convolution(step.input)]
    for _ in range(6):
        x = maps[0]
        for y in maps[1:]:
            x = step.add(x, y)
        maps.append(step.convolution(x))
    return step.finish(maps[-1])


# --- the paper's square root -----------------------------------------------------------------------------------------
def test_sqrt_on_a_chain_of_a_hundred():
    """Ten segments. When the last one's backward begins: nine kept maps, the nine inside the last segment, two gradient maps."""
    tape = chain(100)
    checked = plan(tape)
    assert checked.peak_bytes - state_bytes(tape) == (9 + 9 + 2) * MAP + WEIGHT + SCALAR
    assert checked.schedule.count(Recompute) == 9 * 9  # each of nine segments runs its inside once more
    assert plain_peak(tape) - state_bytes(tape) == (99 + 2) * MAP + WEIGHT + SCALAR


@pytest.mark.parametrize("layers", [16, 36, 64, 144])
def test_memory_grows_with_the_root_and_time_by_less_than_one_forward(layers):
    tape = chain(layers)
    checked = plan(tape)
    assert checked.peak_bytes - state_bytes(tape) <= (2 * sqrt(layers) + 2) * MAP + layers * WEIGHT
    assert checked.schedule.count(Recompute) <= layers


def test_a_segment_is_recomputed_when_its_backward_begins():
    """chain(4) in two segments: the backward of the second, which starts from the kept map 1, then map 0 again, then its backward."""
    tape = chain(4)
    runs = [i for i in plan(tape, segments=2).schedule.instructions if isinstance(i, Compute | Recompute)]
    first_backward = next(k for k, i in enumerate(runs) if tape.ops[i.op].target == "aten.convolution_backward.default")
    order = [(type(i).__name__, tape.ops[i.op].layer) for i in runs[first_backward:] if "accumulate" not in tape.ops[i.op].target]
    assert order == [("Compute", "conv3"), ("Compute", "conv2"), ("Recompute", "conv0"), ("Compute", "conv1"), ("Compute", "conv0")]


@pytest.mark.parametrize("count, recomputes", [(1, 0), (2, 5), (3, 6), (4, 6), (12, 0)])
def test_segments_option(count, recomputes):
    """Of 12 maps in k segments, each segment but the last runs again what it does not keep: 12 / k - 1 maps."""
    assert plan(chain(12), segments=count).schedule.count(Recompute) == recomputes


def test_random_operators_are_recomputed():
    tape = random_op()
    again = [i.op for i in plan(tape, segments=2).schedule.instructions if isinstance(i, Recompute)]
    assert any(tape.ops[op].is_random for op in again)


# --- Algorithm 3 -----------------------------------------------------------------------------------------------------
def test_algorithm_3_with_no_bytes_keeps_every_candidate():
    tape = chain(7)
    candidates = articulation_points(tape)
    cuts, kept, largest = segments.algorithm_3(tape, candidates, 0)
    assert cuts == candidates and kept == 7 * MAP and largest == MAP


def test_algorithm_3_by_hand():
    """Maps of 1000 bytes, more than 2500 a segment: every third map is kept, and the loss closes the last segment of one."""
    tape = chain(7)
    cuts, kept, largest = segments.algorithm_3(tape, articulation_points(tape), 2500)
    assert [cut.op for cut in cuts] == [2, 5] and kept == 2 * MAP and largest == 3 * MAP


def every_segment_bytes(tape: Tape) -> list[int]:
    """All sums of consecutive maps, ascending: at no other B does Algorithm 3 change its mind."""
    made = [sum(tape.storages[s].nbytes for s in tape.creates[op.id]) for op in tape.ops if op.phase is Phase.FORWARD]
    return sorted({0, *(total for first in range(len(made)) for total in accumulate(made[first:]))})


@pytest.mark.parametrize("share", [1.0, 0.9, 0.8, 0.7, 0.65])
@pytest.mark.parametrize("toy", ["long_chain", "multi_output", "buffer_writer"])
def test_plan_budget_takes_the_least_b_that_fits(toy, share):
    """Against every B that can make a difference, upwards from 0."""
    tape = TOYS[toy]()
    budget = int(share * plain_peak(tape))
    plans = (segments.algorithm_3(tape, segments.candidates_of(tape), b)[0] for b in every_segment_bytes(tape))
    written = (segmented.SegmentedStep(tape, DEVICE, cuts).schedule(METHOD.card.uid) for cuts in plans)
    expected = next((schedule for schedule in written if check_schedule(tape, schedule).peak_bytes <= budget), None)
    if expected is None:
        with pytest.raises(PlanInfeasible):
            plan(tape, budget, plan="budget")
    else:
        assert plan(tape, budget, plan="budget").schedule.digest == expected.digest


def test_the_trials_of_b_are_all_plans_of_a_small_network():
    tape = residual()
    candidates = cuts_of(tape)
    by_brute_force = {segments.algorithm_3(tape, candidates, b)[0] for b in every_segment_bytes(tape)}
    trials = list(segments.growing(tape, candidates))
    assert set(trials) == by_brute_force and len(trials) == len(set(trials))


def test_the_papers_search_without_a_budget():
    """x = 100 maps at B = 0, y = 1 map: B0 = sqrt(x y) = 10 maps, and segments of about so many give about 2 sqrt(n)."""
    tape = chain(100)
    assert plan(tape, plan="budget").peak_bytes - state_bytes(tape) <= (2 * 10 + 2) * MAP + 100 * WEIGHT


# --- recursion -------------------------------------------------------------------------------------------------------
def recursive_runs(maps: int, parts: int) -> int:
    """Forward runs beside the first: each part but the last is swept from its source, less the map that the next part keeps."""
    inside = maps // parts
    return 0 if maps == 1 else parts * recursive_runs(inside, parts) + (parts - 1) * (inside - 1)


@pytest.mark.parametrize("parts, levels", [(2, 3), (2, 5), (2, 7), (3, 3), (3, 4), (4, 3)])
def test_recursion_keeps_log_n_maps(parts, levels):
    """g(n) = k log_{k+1}(n) maps, two gradient maps, one weight's gradient and the loss; O(n log n) forward runs."""
    tape = chain(parts ** levels, gradients_exist=True)
    checked = plan(tape, plan="recursive", segments=parts)
    assert checked.peak_bytes - state_bytes(tape) == ((parts - 1) * levels + 2) * MAP + WEIGHT + SCALAR
    assert checked.schedule.count(Recompute) == recursive_runs(parts ** levels, parts)


@pytest.mark.parametrize("layers", [37, 100])
def test_recursion_on_chains_of_any_length(layers):
    tape = chain(layers, gradients_exist=True)
    checked = plan(tape, plan="recursive")
    assert checked.peak_bytes - state_bytes(tape) <= (layers.bit_length() + 2) * MAP + WEIGHT + SCALAR
    assert checked.peak_bytes < plan(tape).peak_bytes < plan(tape, segments=1).peak_bytes


# --- cheap operators -------------------------------------------------------------------------------------------------
def test_no_convolution_runs_twice_when_only_cheap_maps_are_dropped():
    """Between the plain step and the segments that drop everything, in memory and in recomputes."""
    tape = residual()
    cheap, whole = plan(tape, segments=4, drop_cheap=True), plan(tape, segments=4)
    again = [tape.ops[i.op].target for i in cheap.schedule.instructions if isinstance(i, Recompute)]
    assert again and not any("convolution" in target for target in again)
    assert any("convolution" in tape.ops[i.op].target for i in whole.schedule.instructions if isinstance(i, Recompute))
    assert whole.peak_bytes < cheap.peak_bytes < plain_peak(tape)


def test_a_number_of_segments_contradicts_algorithm_3():
    with pytest.raises(Unsupported, match="segments=4"):
        METHOD.build(plan="budget", segments=4)


# --- the search under a budget ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("toy", ["long_chain", "skip", "buffer_writer"])
def test_no_segmentation_that_fits_is_faster(toy):
    """Against every stride through every cut, written and timed one by one."""
    tape = TOYS[toy]()
    budget = int(0.8 * plain_peak(tape))
    best = simulate(plan(tape, budget), DEVICE).metrics.step_seconds
    for stride in range(1, len(cuts_of(tape)) + 1):
        other = check_schedule(tape, segmented.SegmentedStep(tape, DEVICE, cuts_of(tape)[stride - 1::stride]).schedule(""))
        if other.peak_bytes <= budget:
            assert best <= simulate(other, DEVICE).metrics.step_seconds


def test_a_budget_of_the_plain_peak_costs_nothing():
    tape = chain(12)
    assert plan(tape, plain_peak(tape)).schedule.count(Recompute) == 0


def test_an_unreachable_budget_names_the_smallest_and_the_op():
    tape = chain(12)
    with pytest.raises(PlanInfeasible) as refusal:
        plan(tape, state_bytes(tape) + 2 * MAP)
    assert plan(tape, refusal.value.smallest_bytes).peak_bytes == refusal.value.smallest_bytes
    assert "convolution_backward" in refusal.value.op


def test_a_network_without_articulation_points_is_cut_all_the_same():
    """What is saved comes from cuts that several maps cross."""
    tape = dense()
    inside = [op.id for op in tape.ops if op.phase is Phase.FORWARD][1:-2]
    assert not {cut.op for cut in articulation_points(tape)} & set(inside[:-1])
    with pytest.raises(PlanInfeasible) as refusal:
        plan(tape, state_bytes(tape))
    assert refusal.value.smallest_bytes < plain_peak(tape)
    assert plan(tape, refusal.value.smallest_bytes).schedule.count(Recompute) > 0
