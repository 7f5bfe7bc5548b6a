"""Checkpointing: sqrt(n) on an equal chain, Algorithm 3 by hand, the search under a budget."""

from __future__ import annotations

import sys
from math import sqrt

import pytest
from contract import DEVICE, plain_peak
from tapes import MAP, SCALAR, TOYS, WEIGHT, StepBuilder, chain, random_op

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.errors import PlanInfeasible
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
