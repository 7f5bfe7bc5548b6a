"""SuperNeurons: its stages by the paper's formulas on an equal chain, its counts of extra forwards, the cache's order, the memory test."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from contract import DEVICE, TAPES, plain_peak, toy_variants
from tapes import MAP, StepBuilder, chain

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.errors import PlanInfeasible
from vramlab.planner import UNLIMITED, Budget
from vramlab.schedule import Compute, Offload, Prefetch, Recompute
from vramlab.tape import Phase, Tape

LIBRARY = Library([built_in_collection()])
METHOD = LIBRARY.method("superneurons")
layout = sys.modules[f"{METHOD.load().__package__}.layout"]

BASELINE = {"liveness": False, "offload": "none", "recomputation": "none"}
LIVENESS = {"offload": "none", "recomputation": "none"}
OFFLOAD = {"recomputation": "none", "cache": False, "prefetch": False}
RECOMPUTATION = {"cache": False, "prefetch": False}


def plan(tape: Tape, device_bytes: int = UNLIMITED, **options) -> CheckedSchedule:
    budget = Budget(device_bytes=device_bytes)
    return check_schedule(tape, METHOD.build(**options).plan(tape, DEVICE, budget), budget)


def state_bytes(tape: Tape) -> int:
    return sum(s.nbytes for s in tape.storages if s.at_start)


def smallest_bytes(tape: Tape, **options) -> int:
    with pytest.raises(PlanInfeasible) as refusal:
        plan(tape, 1, **options)
    return refusal.value.smallest_bytes


def convolutions_and_norms(pairs: int) -> Tape:
    """N = 2 * pairs layers; the backward reads each map but the last: of convolutions for BatchNorm, of BatchNorms for convolutions."""
    step = StepBuilder(gradients_exist=True)
    x = step.input
    for _ in range(pairs):
        x = step.batch_norm(step.convolution(x))
    return step.finish(x)


def segments_of_relus(*lengths: int) -> Tape:
    """A convolution before each run of so many relus, and one after the last. The backward of a relu reads what it made."""
    step = StepBuilder(gradients_exist=True)
    x = step.input
    for length in lengths:
        x = step.convolution(x)
        for _ in range(length):
            x = step.relu(x)
    return step.finish(step.convolution(x))


# --- the stages ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pairs", [2, 4, 8])
def test_stages_on_an_equal_chain(pairs):
    """N layers of one size: 2N, N + 1, one map of each pair and a layer's backward (x, dx in, dx out), then that alone."""
    tape = convolutions_and_norms(pairs)
    maps = [(plan(tape, **stage).peak_bytes - state_bytes(tape)) // MAP for stage in (BASELINE, LIVENESS, OFFLOAD, RECOMPUTATION)]
    assert maps == [4 * pairs, 2 * pairs + 1, (pairs - 1) + 3, 3]
    assert layout.l_peak(tape) // MAP == 3


@pytest.mark.parametrize("pairs", [2, 8])
def test_under_a_budget_the_largest_layer_is_enough(pairs):
    tape = convolutions_and_norms(pairs)
    assert (smallest_bytes(tape) - state_bytes(tape)) // MAP == 3


@pytest.mark.parametrize("toy", TAPES)
def test_the_baseline_is_the_network_wide_one(toy):
    tape = TAPES[toy]()
    network_wide = LIBRARY.method("network-wide").build().plan(tape, DEVICE, Budget(device_bytes=UNLIMITED))
    assert plan(tape, **BASELINE).peak_bytes == check_schedule(tape, network_wide).peak_bytes


@pytest.mark.parametrize("toy", TAPES)
def test_liveness_alone_holds_no_more_than_eager(toy):
    tape = TAPES[toy]()
    assert plan(tape, **LIVENESS).peak_bytes <= plain_peak(tape)


# --- recomputation ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lengths", [(1,), (4,), (2, 3, 1), (3, 3, 1, 1, 2, 2, 2)], ids=str)
def test_extra_forwards(lengths):
    """n a segment of n cheap layers when it is kept, n (n + 1) / 2 when it is not. The last case has AlexNet's segments: 14 and 23."""
    tape = segments_of_relus(*lengths)
    assert plan(tape, recomputation="speed-centric").schedule.count(Recompute) == sum(lengths)
    assert plan(tape, recomputation="memory-centric").schedule.count(Recompute) == sum(n * (n + 1) // 2 for n in lengths)
    assert plan(tape, recomputation="none").schedule.count(Recompute) == 0


def test_cost_aware_chooses_for_each_segment():
    """Largest layer: three maps. Beside the two gradients of a backward op a segment may hold one map: one relu, not six."""
    tape = segments_of_relus(1, 6, 1)
    found = layout.Layout(tape, "cost-aware")
    assert [len(found.members[segment]) for segment in sorted(found.memory_centric)] == [6]
    peaks, runs = {}, {}
    for strategy in ("speed-centric", "memory-centric", "cost-aware"):
        checked = plan(tape, **{**RECOMPUTATION, "recomputation": strategy})
        peaks[strategy], runs[strategy] = checked.peak_bytes, checked.schedule.count(Recompute)
    assert peaks["cost-aware"] == peaks["memory-centric"] < peaks["speed-centric"]
    assert runs["speed-centric"] == 8 and runs["cost-aware"] == runs["memory-centric"] == 1 + 21 + 1


def test_a_segment_may_count_whole():
    """The backward of the first of two relus holds five maps, its workspace among them, and needs the second's map no more: six with it."""
    tape = segments_of_relus(2)
    heavy = [replace(op, workspace_bytes=2 * MAP) if op.layer == "relu1" and op.phase is Phase.BACKWARD else op for op in tape.ops]
    tape = replace(tape, ops=tuple(heavy))
    assert layout.l_peak(tape) == 5 * MAP
    assert [len(layout.Layout(tape, "cost-aware", counted).memory_centric) for counted in ("needed", "whole")] == [0, 1]
    assert [plan(tape, counted=counted).schedule.count(Recompute) for counted in ("needed", "whole")] == [2, 3]


def test_only_what_lies_between_checkpoint_layers_runs_again():
    tape = TAPES["residual"]()
    again = {tape.ops[i.op].target for i in plan(tape).schedule.instructions if isinstance(i, Recompute)}
    assert again == {"aten.native_batch_norm.default", "aten.relu.default"}


# --- the tensor cache ------------------------------------------------------------------------------------------------
def test_without_a_budget_the_cache_keeps_everything():
    assert plan(chain(8), recomputation="none").schedule.count(Offload) == 0
    assert plan(chain(8), recomputation="none", cache=False).schedule.count(Offload) == 7  # no backward op reads the last map


def test_the_least_recently_used_leaves_first():
    """Head to tail in the forward; in the backward they come back tail to head."""
    tape = chain(8)
    moves = [i for i in plan(tape, smallest_bytes(tape)).schedule.instructions if isinstance(i, Offload | Prefetch)]
    out = [tape.producer[i.storage] for i in moves if isinstance(i, Offload)]
    back = [tape.producer[i.storage] for i in moves if isinstance(i, Prefetch)]
    assert out == sorted(out) and len(out) >= 5
    assert back == out[::-1]


def test_a_larger_budget_moves_less():
    tape = chain(12)
    low = smallest_bytes(tape)
    moved = [plan(tape, low + k * MAP).schedule.count(Offload) for k in range(10)]
    assert moved == sorted(moved, reverse=True) and moved[0] > moved[4] > moved[9] == 0


def test_only_convolutions_are_offloaded_unless_told_otherwise():
    tape = TAPES["residual"]()

    def makers(**options) -> set[str]:
        schedule = plan(tape, cache=False, **options).schedule
        return {tape.ops[tape.producer[i.storage]].target for i in schedule.instructions if isinstance(i, Offload)}

    assert makers() == {"aten.convolution.default"}
    assert makers(offload="all") > makers() and not makers(offload="none")
    assert smallest_bytes(tape, offload="all") < smallest_bytes(tape)


def test_prefetch_starts_one_layer_ahead():
    """Without it each map comes back when its op is next; with it, before the backward op of the layer after it."""
    tape = chain(8)

    def ops_between(prefetch: bool) -> list[int]:
        """Per map that comes back: the backward ops that run between the start of the copy and the op that reads it."""
        schedule, found = plan(tape, cache=False, recomputation="none", prefetch=prefetch).schedule.instructions, []
        for k, i in enumerate(schedule):
            if isinstance(i, Prefetch):
                ran = [j.op for j in schedule[k:] if isinstance(j, Compute)]
                reader = next(n for n, op in enumerate(ran) if i.storage in tape.reads[op])
                found.append(sum(tape.ops[op].target == "aten.convolution_backward.default" for op in ran[:reader]))
        return found

    assert ops_between(prefetch=False) == [0] * 7
    assert ops_between(prefetch=True) == [0] + [1] * 6


def test_a_full_host_is_respected():
    tape = chain(8)
    budget = Budget(device_bytes=plain_peak(tape) - 2 * MAP, host_bytes=2 * MAP)
    checked = check_schedule(tape, METHOD.build().plan(tape, DEVICE, budget), budget)
    assert 0 < checked.peak_host_bytes <= 2 * MAP
    with pytest.raises(PlanInfeasible):
        METHOD.build().plan(tape, DEVICE, Budget(device_bytes=budget.device_bytes, host_bytes=MAP // 2))


def test_backward_comes_after_forward_in_every_plan():
    """Nothing of a segment is recomputed while the forward phase lasts."""
    tape = TAPES["residual"]()
    runs = [i for i in plan(tape).schedule.instructions if isinstance(i, Compute | Recompute)]
    first_again = next(k for k, i in enumerate(runs) if isinstance(i, Recompute))
    assert all(tape.ops[i.op].phase is Phase.BACKWARD for i in runs[first_again:] if isinstance(i, Compute))


# --- dynamic workspace -----------------------------------------------------------------------------------------------
def variants_chosen(tape: Tape, device_bytes: int, **options) -> list[str | None]:
    """In the order of the convolutions' runs, backward ones among them."""
    runs = [i for i in plan(tape, device_bytes, **LIVENESS, **options).schedule.instructions if isinstance(i, Compute)]
    return [i.variant for i in runs if tape.ops[i.op].variants]


def test_the_fastest_algorithm_that_fits_in_what_is_left():
    """Four convolutions and their backward; the library's own needs 500 bytes inside, lean none and fast 300. The maps come first."""
    tape = chain(4, workspace_bytes=500, gradients_exist=True)
    tape = tape.with_variants([toy_variants(op) for op in tape.ops])
    working_set = state_bytes(tape) + 5 * MAP + 100  # the last convolution's backward: three maps, two gradients, one of the weight
    assert variants_chosen(tape, UNLIMITED) == ["fast"] * 8
    assert variants_chosen(tape, UNLIMITED, workspace=False) == [None] * 8
    assert variants_chosen(tape, working_set + 304) == ["fast"] * 8  # the loss is there too
    assert variants_chosen(tape, working_set + 303) == ["fast"] * 4 + ["lean"] + ["fast"] * 3
    assert variants_chosen(tape, working_set + 4) == ["fast"] * 4 + ["lean"] + ["fast"] * 3
    with pytest.raises(PlanInfeasible):
        variants_chosen(tape, working_set + 3)
