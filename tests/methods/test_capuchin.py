"""Capuchin: free times, lanes, the choice and Algorithm 2 on timelines written by hand; triggers, their feedback, on-demand swapping."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
from contract import DEVICE, TAPES, plain_peak
from tapes import MAP, TOYS, StepBuilder, chain

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.errors import PlanInfeasible
from vramlab.planner import UNLIMITED, Budget
from vramlab.schedule import Compute, Offload, Prefetch, Recompute, Wait
from vramlab.simulate import simulate
from vramlab.tape import Phase, Tape

METHOD = Library([built_in_collection()]).method("capuchin")
method = METHOD.load()
accesses, choices, lanes, guided = (import_module(f"{method.__package__}.{name}") for name in ("accesses", "choice", "lanes", "guided"))
COPY = MAP / DEVICE.d2h_bytes_per_second  # 1.25 s, a map each way
SLOW = replace(DEVICE, d2h_bytes_per_second=10.0, h2d_bytes_per_second=10.0)  # a map takes 100 s


def plan(tape: Tape, device_bytes: int = UNLIMITED, device=DEVICE, **options) -> CheckedSchedule:
    budget = Budget(device_bytes=device_bytes)
    return check_schedule(tape, METHOD.build(**options).plan(tape, device, budget), budget)


def candidate(storage: int, evicted: int, back: int, leaves: float, needed: float, seconds: float = COPY):
    return accesses.Candidate(storage=storage, nbytes=MAP, evicted=evicted, back=back, leaves_seconds=leaves, needed_seconds=needed,
                              swap_out_seconds=seconds, swap_in_seconds=seconds)


def map_of(tape: Tape, layer: str) -> int:
    return next(tape.creates[op.id][0] for op in tape.ops if op.layer == layer and op.phase is Phase.FORWARD and tape.creates[op.id])


# --- free time ----------------------------------------------------------------------------------------------------------
def test_free_time_on_a_timeline_by_hand():
    """chain(4): forward ops of a second at 0 to 4 and the loss to 5; two ops of 2 s; then for conv3, conv2, conv1, conv0 a backward of 2 s
    and an accumulation of 0.25 s. conv0's map is read by conv1 until 2 s and by conv1's backward, which begins at 9 + 2 * 2.25 s."""
    tape = chain(4)
    found = {c.storage: c for c in accesses.candidates_of(tape, DEVICE, accesses.over_budget(tape, plain_peak(tape) - 1))}
    c = found[map_of(tape, "conv0")]
    assert (c.leaves_seconds, c.needed_seconds, c.swap_out_seconds, c.swap_in_seconds) == (2.0, 13.5, COPY, COPY)
    assert c.free_seconds == (13.5 - COPY) - (2.0 + COPY)
    assert tape.ops[c.evicted].layer == tape.ops[c.back].layer == "conv1"


def test_only_what_is_idle_at_the_peak_is_a_candidate():
    """One op of chain(4) stands at the peak: conv3's backward, which itself reads conv2's map."""
    tape = chain(4)
    over = accesses.over_budget(tape, plain_peak(tape) - 1)
    at_peak = np.flatnonzero(over > 0).tolist()
    assert [tape.ops[op].layer for op in at_peak] == ["conv3"]
    found = {c.storage for c in accesses.candidates_of(tape, DEVICE, over)}
    assert found == {map_of(tape, "conv0"), map_of(tape, "conv1")}
    assert accesses.candidates_of(tape, DEVICE, accesses.over_budget(tape, plain_peak(tape))) == []


def test_the_pair_of_largest_free_time_is_taken():
    """Read at once, again soon, and again late: away between the last two."""
    step = StepBuilder()
    x = step.convolution(step.input)
    y = step.add(step.convolution(step.convolution(x)), x)
    tape = step.finish(step.convolution(y))
    found = {c.storage: c for c in accesses.candidates_of(tape, DEVICE, accesses.over_budget(tape, 0))}
    c = found[map_of(tape, "conv0")]
    assert tape.ops[c.evicted].target == "aten.add.Tensor" and tape.ops[c.back].phase is Phase.BACKWARD


# --- lanes --------------------------------------------------------------------------------------------------------------
def test_copies_wait_for_each_other_on_a_timeline_by_hand():
    """Both leave at 1 s and are needed at 10 s, 2 s a copy. Out at 3 and 5; in from 8 and, before that, from 6."""
    line = lanes.Lanes()
    first, second = candidate(1, 0, 9, 1.0, 10.0, 2.0), candidate(2, 0, 9, 1.0, 10.0, 2.0)
    line.add(first)
    assert line.away(second) == (5.0, 8.0) and line.overhead(second) == 0
    line.add(second)
    assert line.swap_out_ends() == {1: 3.0, 2: 5.0} and line.swap_in_starts() == {2: 8.0, 1: 6.0}
    assert line.exposed_seconds == 0


def test_what_a_third_swap_adds_is_its_overhead():
    """A third such: out at 7; in from 8, the others from 6 and 4. The second is out at 5 and has 6, the first out at 3 and has 4.
    A fourth is out at 9 and has 8; the others have 6, 4 and 2: each of the four is a second late."""
    line = lanes.Lanes()
    for storage in (1, 2, 3):
        line.add(candidate(storage, 0, 9, 1.0, 10.0, 2.0))
    assert line.exposed_seconds == 0
    assert line.overhead(candidate(4, 0, 9, 1.0, 10.0, 2.0)) == 4.0


# --- the choice ---------------------------------------------------------------------------------------------------------
def chosen(tape: Tape, device_bytes: int, device=DEVICE):
    over = accesses.over_budget(tape, device_bytes)
    return choices.choose(tape, accesses.candidates_of(tape, device, over), over)


def test_hidden_swaps_come_first_by_free_time():
    """chain(12) two maps over: the first two maps have the most time."""
    tape = chain(12)
    choice = chosen(tape, plain_peak(tape) - 2 * MAP)
    assert [c.storage for c in choice.swaps] == [map_of(tape, "conv0"), map_of(tape, "conv1")] and not choice.recomputes
    assert choice.lanes.exposed_seconds == 0


def test_where_copies_are_slow_maps_are_recomputed():
    """Nothing can be hidden at 100 s a copy. Each map costs one run as long as the one before it is there."""
    tape = chain(12)
    choice = chosen(tape, plain_peak(tape) - 2 * MAP, SLOW)
    assert not choice.swaps and len(choice.recomputes) == 2


def test_algorithm_2_by_hand():
    """chain(6): of each map the source is the one before it. With conv1's map recomputed, conv2's costs two runs and has conv0's as source;
    to be without conv0's would now make two dearer: its own run counts once more."""
    tape = chain(6)
    over = accesses.over_budget(tape, 0)
    chooser = choices._Chooser(tape, accesses.candidates_of(tape, SLOW, over), over)
    maps = [map_of(tape, f"conv{k}") for k in range(4)]
    left = {c.storage: c for c in chooser.candidates}
    chooser.lineages = {c.storage: chooser._lineage(c) for c in chooser.candidates}
    assert [chooser.lineages[s].sources for s in maps] == [set(), {maps[0]}, {maps[1]}, {maps[2]}]
    assert all(chooser.lineages[s].seconds == 1.0 for s in maps)
    chooser._recompute(left.pop(maps[1]), left)
    assert chooser.lineages[maps[2]].sources == {maps[0]} and chooser.lineages[maps[2]].seconds == 2.0
    assert chooser.lineages[maps[0]].extra_seconds == 1.0 and chooser._msps(left[maps[0]]) == MAP / 2.0
    assert chooser.lineages[maps[3]].seconds == 1.0, "its source is still there"
    chooser._recompute(left.pop(maps[2]), left)
    assert chooser.lineages[maps[3]].seconds == 3.0 and chooser.lineages[maps[3]].sources == {maps[0]}


@pytest.mark.slow
def test_gradients_are_never_recomputed():
    tape = TAPES["residual"]()
    for share in (0.8, 0.6):
        again = [i.op for i in plan(tape, int(share * plain_peak(tape)), SLOW).schedule.instructions if isinstance(i, Recompute)]
        assert again and all(tape.ops[op].phase is Phase.FORWARD for op in again)


# --- triggers and feedback ----------------------------------------------------------------------------------------------
def test_triggers_start_in_time_and_after_the_peak():
    """chain(12), one map over: conv0's map is needed at 13 + 4 + 10 * 2.25 = 39.5 s, so its swap in starts at 38.25 s: during conv2's
    backward, which begins at 37.25 s. Five hundredths of the copy earlier is the same op, all of it that before: 37 s, an accumulation."""
    tape = chain(12)
    over = accesses.over_budget(tape, plain_peak(tape) - MAP)
    choice = choices.choose(tape, accesses.candidates_of(tape, DEVICE, over), over)
    storage = map_of(tape, "conv0")
    at = [method.triggers_of(tape, choice, over, defaultdict(float, {storage: share}))[storage] for share in (0.0, 0.05, 1.0)]
    assert [tape.ops[op].layer for op in at[:2]] == ["conv2", "conv2"] and at[0] == at[1]
    assert at[2] < at[0] and tape.ops[at[2]].target == "vramlab.accumulate_grad"
    never = method.triggers_of(tape, choice, over, defaultdict(float, {storage: 100.0}))[storage]
    assert never == np.flatnonzero(over > 0)[-1] + 1, "not inside the peak"


def test_a_late_swap_in_is_seen():
    """Fetched where it is read, a map makes the step stand still for its copy; started in time, it does not."""
    tape = chain(12)
    budget = Budget(device_bytes=plain_peak(tape) - MAP)
    over = accesses.over_budget(tape, budget.device_bytes)
    choice = choices.choose(tape, accesses.candidates_of(tape, DEVICE, over), over)
    triggers = method.triggers_of(tape, choice, over, defaultdict(float))
    late, punctual = (method._play(tape, DEVICE, budget, choice, t) for t in ({}, triggers))
    assert method.late_storages(late, DEVICE) == {map_of(tape, "conv0")} and method.late_storages(punctual, DEVICE) == set()
    seconds = [simulate(checked, DEVICE).metrics.step_seconds for checked in (late, punctual)]
    assert seconds[0] == seconds[1] + COPY == sum(op.seconds for op in tape.ops) + COPY


@pytest.mark.parametrize("toy", ["long_chain", "skip", "residual"])
def test_feedback_never_makes_the_step_slower(toy):
    tape = TAPES[toy]()
    for share in (0.8, 0.6):
        seconds = [simulate(plan(tape, int(share * plain_peak(tape)), iterations=n), DEVICE).metrics.step_seconds for n in (1, 5, 20)]
        assert seconds == sorted(seconds, reverse=True)


# --- the step -----------------------------------------------------------------------------------------------------------
def test_the_copy_out_starts_at_the_evicted_access():
    tape = chain(12)
    checked = plan(tape, plain_peak(tape) - MAP)
    k = next(k for k, i in enumerate(checked.schedule.instructions) if isinstance(i, Offload))
    before = next(i for i in reversed(checked.schedule.instructions[:k]) if isinstance(i, Compute))
    assert checked.schedule.instructions[k].storage == map_of(tape, "conv0") and tape.ops[before.op].layer == "conv1"
    assert simulate(checked, DEVICE).metrics.stall_seconds == 0


def test_on_demand_swapping_carries_the_step_where_the_choice_ends():
    """Without any choice the least recently used goes to the host when an op does not fit, and comes back when it is read."""
    tape = TOYS["long_chain"]()
    budget = Budget(device_bytes=int(0.7 * plain_peak(tape)))
    checked = method._play(tape, DEVICE, budget, choices.Choice(), {})
    moved = [i.storage for i in checked.schedule.instructions if isinstance(i, Offload)]
    assert moved == [map_of(tape, f"conv{k}") for k in range(len(moved))] and moved
    kinds = [type(i) for i in checked.schedule.instructions]
    assert all(kinds[k + 1] is Wait for k, kind in enumerate(kinds) if kind is Prefetch)
    assert simulate(plan(tape, budget.device_bytes), DEVICE).metrics.step_seconds < simulate(checked, DEVICE).metrics.step_seconds


def test_a_full_host_leaves_recomputation():
    tape = TOYS["long_chain"]()
    budget = Budget(device_bytes=int(0.7 * plain_peak(tape)), host_bytes=MAP)
    checked = check_schedule(tape, METHOD.build().plan(tape, DEVICE, budget), budget)
    assert checked.peak_host_bytes <= MAP and checked.schedule.count(Recompute) > 0


def test_an_unreachable_budget_names_the_smallest():
    tape = TOYS["long_chain"]()
    with pytest.raises(PlanInfeasible) as refusal:
        plan(tape, 1)
    assert plan(tape, refusal.value.smallest_bytes).peak_bytes <= refusal.value.smallest_bytes
