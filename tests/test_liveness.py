"""Lifetimes and the schedule that follows from them by hand; the lower bound against every schedule of small tapes."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Machine, ScheduleWriter
from tapes import MAP, SCALAR, STATISTIC, TOYS, WEIGHT, TapeBuilder, buffer_writer, chain, inplace, random_tape, random_tapes, skip

from vramlab.check import check_schedule
from vramlab.liveness import first_use, last_use, live_storages, lower_bound_bytes, replay_schedule, used_storages, working_set_bytes
from vramlab.schedule import Compute, Free, Recompute, Schedule
from vramlab.tape import Phase, Role, Tape, Variant


def small() -> Tape:
    """Storages: x 0 (100), unused state 1 (7), a 2 (200), b 3 (200, over a), indices 4 (30, never read), grad 5 (200), loss 6 (4)."""
    tape = TapeBuilder()
    x = tape.state("x", 100, Role.INPUT)
    tape.state("unused", 7, Role.INPUT, at_end=False)
    a, b, indices = tape.temporary(200), tape.temporary(200), tape.temporary(30)
    grad = tape.state("grad", 200, Role.GRADIENT, at_start=False)
    loss = tape.temporary(4, at_end=True)
    tape.call("aten.max_pool2d_with_indices.default", [x], [a, indices], workspace_bytes=11)
    tape.call("aten.relu.default", [a], [b], takeover=(b, a), is_eager_inplace=True)
    tape.call("aten.mean.default", [b], [loss])
    tape.call("vramlab.accumulate_grad", [b], [grad], phase=Phase.BACKWARD, takeover=(grad, b))
    return tape.build(loss)


def test_first_and_last_use():
    tape = small()
    assert first_use(tape) == (0, None, 0, 1, 0, 3, 2)
    assert last_use(tape) == (0, None, 1, 3, 0, 3, 2)
    assert [used_storages(tape, op) for op in range(4)] == [(0, 2, 4), (2, 3), (3, 6), (3, 5)]


def test_live_storages_after_each_op():
    assert [live_storages(small(), op) for op in range(4)] == [(0, 2), (0, 3), (0, 3, 6), (0, 5, 6)]


def test_replay_frees_after_the_last_use_and_reuses_as_eager_does():
    schedule = replay_schedule(small(), method="uid")
    assert schedule.instructions == (Free(1), Compute(0), Free(4), Compute(1, reuse=2), Compute(2), Compute(3, reuse=3))
    assert schedule.method == "uid" and schedule.tape_digest == small().digest


def test_eager_takes_over_only_where_it_does():
    """An out-of-place relu has a twin that could write over its input, but eager does not use it; nor over what is read later."""
    tape = TapeBuilder()
    x, a, b, c = tape.state("x", 8, Role.INPUT), tape.temporary(8), tape.temporary(8), tape.temporary(8, at_end=True)
    tape.call("aten.relu.default", [x], [a], takeover=(a, x), is_eager_inplace=True)  # x outlives the step
    tape.call("aten.relu.default", [a], [b], takeover=(b, a))
    tape.call("aten.add.Tensor", [b, a], [c], takeover=(c, b))
    assert replay_schedule(tape.build(c)).instructions == (Compute(0), Compute(1), Compute(2, reuse=2), Free(1))
    kept = TapeBuilder()
    x, a, b, c = kept.state("x", 8, Role.INPUT), kept.temporary(8), kept.temporary(8), kept.temporary(8, at_end=True)
    kept.call("aten.relu.default", [x], [a])
    kept.call("aten.add.Tensor", [a, x], [b], takeover=(b, a))
    kept.call("aten.mean.default", [a, b], [c])
    assert replay_schedule(kept.build(c)).instructions == (Compute(0), Compute(1), Compute(2), Free(1), Free(2))


def test_replay_of_a_chain():
    """x, w0 -> a -> b, mean, then back: the peak stands in the first convolution's backward."""
    tape = chain(2)
    names = [tape.storages[i.storage].name if isinstance(i, Free) else i.op for i in replay_schedule(tape).instructions]
    assert names == [0, 1, 2, "%4", 3, 4, "%6", 5, "%2", "%7", 6, 7, "%9", 8]
    state = MAP + 2 * WEIGHT
    expected = [state + MAP, state + 2 * MAP, state + 2 * MAP + SCALAR]
    checked = check_schedule(tape, replay_schedule(tape))
    assert checked.live_bytes.tolist()[:3] == expected
    assert checked.peak_bytes == state + SCALAR + 3 * MAP + WEIGHT  # a, dy, dx, dw
    assert checked.live_bytes[-1] == state + SCALAR + 2 * WEIGHT


def test_replay_of_in_place_activations_holds_each_map_once():
    """Three convolutions and relus in place: six maps as ops, three as regions."""
    tape = inplace()
    checked = check_schedule(tape, replay_schedule(tape))
    forward = [i for i, ins in enumerate(checked.schedule.instructions) if isinstance(ins, Compute) and ins.op == 5][0]
    assert checked.live_bytes[forward] == MAP + 3 * WEIGHT + 3 * MAP


@pytest.mark.parametrize("toy", TOYS)
def test_replay_is_eagers_order_without_recomputes(toy):
    tape = TOYS[toy]()
    schedule = replay_schedule(tape)
    assert [i.op for i in schedule.instructions if isinstance(i, Compute)] == list(range(len(tape.ops)))
    assert schedule.count(Recompute) == 0
    assert check_schedule(tape, schedule).live_bytes[-1] == sum(s.nbytes for s in tape.storages if s.at_end)


@pytest.mark.parametrize("toy", TOYS)
def test_live_storages_are_those_of_the_replay(toy):
    tape = TOYS[toy]()
    machine, op = Machine(tape), -1
    for instruction in (*replay_schedule(tape).instructions, None):
        if (instruction is None or isinstance(instruction, Compute)) and op >= 0:
            assert live_storages(tape, op) == tuple(sorted(machine.device))
        if instruction is not None:
            machine.step(instruction)
            op = instruction.op if isinstance(instruction, Compute) else op


def test_working_sets_by_hand():
    tape = small()
    assert [working_set_bytes(tape, op) for op in range(4)] == [100 + 200 + 30 + 11, 200, 204, 200]
    norm = next(op for op in buffer_writer().ops if op.throwaway_state)
    assert working_set_bytes(buffer_writer(), norm.id) == 2 * MAP + WEIGHT + 4 * STATISTIC
    add = next(op for op in skip().ops if op.target == "aten.add.Tensor")
    assert working_set_bytes(skip(), add.id) == 2 * MAP


def test_lower_bounds_by_hand():
    assert lower_bound_bytes(chain(3)) == MAP + 3 * WEIGHT + 3 * MAP + WEIGHT  # state; a map, its gradient, the next; one dw
    assert lower_bound_bytes(small()) == 100 + 200 + 30 + 11


def test_the_bound_counts_what_the_step_ends_with():
    tape = TapeBuilder()
    x = tape.state("x", 10, Role.INPUT)
    kept = [tape.temporary(50, at_end=True) for _ in range(3)]
    for k in kept:
        tape.call("aten.relu.default", [x], [k])
    assert lower_bound_bytes(tape.build(kept[-1])) == 160


def test_a_takeover_of_state_saves_nothing_while_state_stays():
    tape = TapeBuilder()
    x, y = tape.state("x", 10, Role.INPUT), tape.temporary(10, at_end=True)
    tape.call("aten.relu.default", [x], [y], takeover=(y, x), workspace_bytes=50)
    built = tape.build(y)
    assert working_set_bytes(built, 0) == 60 and lower_bound_bytes(built) == 70


def least_peak(tape: Tape) -> int:
    """The least peak of all schedules that keep state resident and move nothing, by search over the oracle's states."""
    state = {s.id for s in tape.storages if s.at_start and s.at_end}
    runs = [kind(op.id, reuse) for kind in (Compute, Recompute) for op in tape.ops
            for reuse in {None, op.takeover and op.takeover[1]} if reuse not in state]
    frees = [Free(s.id) for s in tape.storages if s.id not in state]
    start = Machine(tape)
    best, waiting = {start.key(): start.device_bytes}, [(start.device_bytes, 0, start)]
    while waiting:
        waiting.sort(key=lambda entry: entry[:2], reverse=True)
        peak, _, machine = waiting.pop()
        if machine.is_finished():
            return peak
        for instruction in runs + frees:
            after = machine.clone()
            if after.try_step(instruction):
                height = max(peak, after.inner_peak)
                if height < best.get(after.key(), height + 1):
                    best[after.key()] = height
                    waiting.append((height, len(best), after))
    raise AssertionError("no schedule at all")


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_at_all_beats_the_bound(seed):
    """Exhaustive: the least peak that any order, free, recompute and takeover reaches on a small tape."""
    tape = random_tape(Random(seed), ops=3)
    assert lower_bound_bytes(tape) <= least_peak(tape) <= check_schedule(tape, replay_schedule(tape)).peak_bytes


def test_the_bound_is_reached_by_a_tape_of_one_op():
    tape = TapeBuilder()
    x, y = tape.state("x", 10, Role.INPUT), tape.temporary(10, at_end=True)
    tape.call("aten.relu.default", [x], [y], workspace_bytes=5)
    built = tape.build(y)
    assert lower_bound_bytes(built) == least_peak(built) == 25


@settings(max_examples=150, deadline=None, derandomize=True)
@given(random_tapes(), st.randoms(use_true_random=False))
def test_working_sets_bound_every_schedule(tape, random):
    """Also where state moves away: while an op first runs, the device holds its working set."""
    schedule = Schedule(ScheduleWriter(tape, random).write(), tape.digest)
    checked = check_schedule(tape, schedule)
    for instruction, peak in zip(schedule.instructions, checked.inner_peak_bytes.tolist()):
        if isinstance(instruction, Compute):
            assert working_set_bytes(tape, instruction.op) <= peak
    assert lower_bound_bytes(tape) <= check_schedule(tape, replay_schedule(tape)).peak_bytes


def test_the_leanest_variant_bounds():
    """x 1000 and w 100 bytes in, 1000 out; the library's own choice takes 500 inside, the variants 700 and 30."""
    tape = chain(1, workspace_bytes=500)
    assert working_set_bytes(tape, 0) == 2600
    lean = tape.with_variants([[Variant("fft", 1.0, 700), Variant("direct", 1.0, 30)], *([[]] * (len(tape.ops) - 1))])
    assert working_set_bytes(lean, 0) == 2130
