"""Bounds: the least peak and the time bound against exhaustive search, hand-made tapes where they are tight, and any legal schedule.

Each bound raised by one byte, or by a hair, is broken by a schedule that exists: the bounds are not merely low.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random

import numpy as np
import pytest
from contract import DEVICE
from exhaustive import Search, random_step
from hand_made import make_record
from oracle import Machine, ScheduleWriter
from tapes import TOYS, TapeBuilder, random_tape

from vramlab.bounds import leanest_schedule, least_peak_bytes, predecessors, step_seconds_bound
from vramlab.check import check_schedule
from vramlab.crowd.rules.schedules import Planned, _bound_faults
from vramlab.liveness import replay_schedule
from vramlab.planner import Budget
from vramlab.predicted import least_step_seconds
from vramlab.program import INFEASIBLE, LIMIT, OPTIMAL, ZERO, Program, total
from vramlab.schedule import Compute, Schedule
from vramlab.simulate import simulate
from vramlab.tape import Phase, Role, Tape

HAIR = 1e-4


def link(seconds_per_byte: float, **changes):
    """The toy device with this link."""
    return replace(DEVICE, h2d_bytes_per_second=1 / seconds_per_byte, d2h_bytes_per_second=1 / seconds_per_byte, **changes)


def seconds_of(tape: Tape, instructions, budget: int, device) -> float:
    checked = check_schedule(tape, Schedule(tuple(instructions), tape.digest), Budget(device_bytes=budget))
    return simulate(checked, device).metrics.step_seconds


# --- peak -----------------------------------------------------------------------------------------------------------------
def peak_by_machine(tape: Tape, schedule: Schedule) -> int:
    machine = Machine(tape)
    peak = machine.device_bytes
    for instruction in schedule.instructions:
        machine.step(instruction)
        peak = max(peak, machine.inner_peak)
    machine.finish()
    return peak


@pytest.mark.parametrize("state_stays", [True, False])
def test_some_schedule_reaches_the_least_peak(state_stays):
    """So the bound plus one byte is broken, on every tape."""
    tapes = [make() for make in TOYS.values()] + [random_tape(Random(seed), ops=1 + seed % 8) for seed in range(150)]
    for tape in tapes:
        schedule = leanest_schedule(tape, state_stays=state_stays)
        least = least_peak_bytes(tape, state_stays=state_stays)
        assert peak_by_machine(tape, schedule) == check_schedule(tape, schedule).peak_bytes == least


@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_at_all_is_below_the_least_peak(seed):
    """Exhaustive, with copies: nothing fits into one byte less."""
    tape = random_step(Random(seed), ops=3 + seed % 2)
    least = least_peak_bytes(tape)
    assert Search(tape, least - 1, 1, 1).fastest() is None
    _, instructions = Search(tape, least, 1, 1).fastest()
    assert peak_by_machine(tape, Schedule(instructions, tape.digest)) == least


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_that_moves_state_is_below_its_least_peak(seed):
    tape = random_tape(Random(seed), ops=1 + seed % 7)
    schedule = Schedule(ScheduleWriter(tape, Random(seed)).write(), tape.digest)
    assert peak_by_machine(tape, schedule) >= least_peak_bytes(tape, state_stays=False) <= least_peak_bytes(tape)


def test_least_peaks_by_hand():
    """Weights of 50 and 30 bytes, an input of 10, maps of 20: one op uses 10 + 50 + 20, the other 20 + 30 + 20."""
    tape = TapeBuilder()
    x, v, w = tape.state("x", 10, Role.INPUT), tape.state("v", 50), tape.state("w", 30)
    y, z = tape.temporary(20), tape.temporary(20, at_end=True)
    tape.call("aten.mm.default", [x, v], [y])
    tape.call("aten.mm.default", [y, w], [z])
    built = tape.build(z)
    assert least_peak_bytes(built) == 10 + 50 + 30 + 20 + 20
    assert least_peak_bytes(built, state_stays=False) == 10 + 50 + 30 + 20  # what the step ends with


# --- time -----------------------------------------------------------------------------------------------------------------
def pinched(phase: Phase) -> tuple[Tape, int]:
    """a (4 bytes) is made by an op of this phase, has to be away while an op needs 5 bytes inside, and is read last; and that budget."""
    tape = TapeBuilder()
    x = tape.state("x", 1, Role.INPUT)
    a, c, d, end = tape.temporary(4), tape.temporary(1), tape.temporary(1), tape.temporary(1, at_end=True)
    tape.call("aten.relu.default", [x], [a], seconds=2.0, phase=phase)
    tape.call("aten.relu.default", [a], [c], seconds=1.0)
    tape.call("aten.relu.default", [c], [d], seconds=1.0, workspace_bytes=5)
    tape.call("aten.add.Tensor", [a, d], [end], seconds=1.0)
    return tape.build(end), 1 + 1 + 1 + 5


@pytest.mark.parametrize("phase, rate, expected", [(Phase.FORWARD, 1e7, 2 + 3 + 2.0), (Phase.OPTIMIZER, 2, 2 + 3 + 7 + 8)])
def test_the_time_bound_is_tight_where_a_storage_has_to_leave(phase, rate, expected):
    """A link that is no help: it runs again. It may not: 8 s to the host, 1 s of them under an op, and 8 s back before the last."""
    tape, budget = pinched(phase)
    fastest, instructions = Search(tape, budget, rate, rate).fastest()
    assert seconds_of(tape, instructions, budget, link(rate)) == fastest == expected
    bound = step_seconds_bound(tape, link(rate), budget)
    assert bound == pytest.approx(fastest, rel=1e-6) and bound <= fastest
    assert bound * (1 + HAIR) > fastest, "raised by a hair, the bound would be broken"


@cache
def searched(seed: int, rate: int) -> list[tuple[Tape, int, float]]:
    """A generated tape at its least budget and halfway to eager's, with the fastest step that there is."""
    tape = random_step(Random(seed), ops=3 + seed % 3)
    low, high = least_peak_bytes(tape), check_schedule(tape, replay_schedule(tape)).peak_bytes
    return [(tape, budget, Search(tape, budget, rate, rate).fastest()[0]) for budget in sorted({low, (low + high) // 2})]


@pytest.mark.parametrize("seed", range(7))
def test_no_schedule_at_all_is_faster_than_the_time_bound(seed):
    for rate in (1, 2):
        for tape, budget, fastest in searched(seed, rate):
            for snapshots, watched in ((16, 120), (2, 3)):
                assert step_seconds_bound(tape, link(rate), budget, snapshots=snapshots, watched=watched) <= fastest


def test_the_time_bound_says_more_than_the_ops_alone():
    """On the generated tapes where a slower step is forced, the bound is above the ops' seconds in most."""
    slower = [(step_seconds_bound(tape, link(rate), budget), sum(op.seconds for op in tape.ops), fastest)
              for seed, rate in product(range(7), (1, 2)) for tape, budget, fastest in searched(seed, rate)]
    forced = [(bound, plain, fastest) for bound, plain, fastest in slower if fastest > plain]
    assert len(forced) >= 3 and sum(bound > plain * (1 + HAIR) for bound, plain, _ in forced) > len(forced) / 2


@pytest.mark.parametrize("is_full_duplex", [True, False])
def test_legal_schedules_of_any_kind_keep_the_time_bound(is_full_duplex):
    """Overwritten state, random ops, variants, other orders, state that moves: within the peak that each schedule has."""
    device, checks = link(0.05, is_full_duplex=is_full_duplex), 0
    for seed in range(60):
        tape = random_tape(Random(seed), ops=2 + seed % 6)
        checked = check_schedule(tape, Schedule(ScheduleWriter(tape, Random(seed + 1)).write(), tape.digest))
        if checked.peak_bytes == 0:
            continue
        bound = step_seconds_bound(tape, device, checked.peak_bytes, state_stays=False)
        assert bound <= simulate(checked, device).metrics.step_seconds * (1 + 1e-9)
        checks += 1
    assert checks > 40


def test_what_cannot_be_reached_takes_forever():
    tape, _ = pinched(Phase.FORWARD)
    least = least_peak_bytes(tape)
    assert step_seconds_bound(tape, link(1), least - 1) == math.inf > step_seconds_bound(tape, link(1), least)


def test_a_lower_budget_never_lowers_the_bound_and_no_budget_costs_nothing():
    for toy in ("skip", "long_chain", "buffer_writer"):
        tape = TOYS[toy]()
        low, high = least_peak_bytes(tape), check_schedule(tape, replay_schedule(tape)).peak_bytes
        bounds = [step_seconds_bound(tape, link(0.01), low + (high - low) * i // 3) for i in range(4)]
        assert all(a >= b * (1 - 1e-6) for a, b in zip(bounds, bounds[1:]))
        assert bounds[-1] == sum(op.seconds for op in tape.ops) < bounds[0]


def test_orders_that_the_bound_relies_on_hold_in_every_legal_schedule():
    for seed in range(80):
        tape = random_tape(Random(seed), ops=2 + seed % 6)
        instructions = ScheduleWriter(tape, Random(seed)).write()
        place = {i.op: k for k, i in enumerate(instructions) if isinstance(i, Compute)}
        assert all(place[b] < place[op] for op, before in enumerate(predecessors(tape)) for b in before)


def test_a_record_holds_the_bound_of_its_budget_and_a_claim_beyond_it_is_a_fault():
    """Without a budget it is the ops' seconds. A submitted bound above the step that is, or below the ops', is named."""
    tape, budget = pinched(Phase.FORWARD)
    checked = check_schedule(tape, Schedule(Search(tape, budget, 1e7, 1e7).fastest()[1], tape.digest))
    assert least_step_seconds(checked, link(1e7), None) == 5.0
    bound = least_step_seconds(checked, link(1e7), budget)
    assert bound == step_seconds_bound(tape, link(1e7), budget) == pytest.approx(7.0)
    for claimed, is_fault in ((bound, False), (None, False), (7.1, True), (4.9, True)):
        found = Planned("r", make_record(predicted={"least_step_seconds": claimed}), tape, checked.schedule)
        assert bool(list(_bound_faults(found, 7.0))) == is_fault


# --- programs ---------------------------------------------------------------------------------------------------------------
def test_programs_by_hand():
    """Two items of 3 and 2 in a sack of 4: 4/3 of the first and nothing else in parts, the first alone when whole."""
    for is_integer, best in ((False, -3 - 2 / 2), (True, -3.0)):
        sack = Program()
        first, second = (sack.column(is_integer=is_integer) for _ in range(2))
        sack.at_most(first * 3 + second * 2, 4)
        answer = sack.minimise(total([first * -3, second * -2]))
        assert answer.status == OPTIMAL and answer.objective == pytest.approx(best) == pytest.approx(answer.bound)


def test_a_program_without_a_point_says_so_and_one_without_an_end_is_an_error():
    empty = Program()
    column = empty.column()
    empty.at_most(2.0, column)
    assert empty.minimise(column).status == INFEASIBLE
    nothing = Program()
    nothing.at_most(1.0, 2.0)
    assert nothing.minimise(ZERO + 5.0).objective == 5.0
    nothing.at_most(2.0, 1.0)
    assert nothing.minimise(ZERO + 5.0).status == INFEASIBLE
    endless = Program()
    with pytest.raises(RuntimeError, match="HiGHS"):
        endless.minimise(endless.column(high=math.inf) * -1)


@pytest.mark.parametrize("point, is_one", [([1.0, 0.0], True), ([0.0, 1.0], True), ([1.0, 1.0], False), ([0.5, 0.0], False),
                                           ([-1.0, 0.0], False), ([2.0, 0.0], False)])
def test_a_point_that_is_none_is_not_taken_from_a_solver_that_the_clock_stopped(monkeypatch, point, is_one):
    """Of the sack: too heavy, not whole, or outside the columns; from one that has finished it is an error."""
    from scipy import optimize

    sack = Program()
    first, second = sack.binary(), sack.binary()
    sack.at_most(first * 3 + second * 2, 4)
    for status in (OPTIMAL, LIMIT):
        found = optimize.OptimizeResult(status=status, x=np.array(point), fun=-7.0, mip_dual_bound=-8.0, message="")
        monkeypatch.setattr(optimize, "milp", lambda *_, found=found, **__: found)
        if status == OPTIMAL and not is_one:
            with pytest.raises(RuntimeError, match="breaks a row"):
                sack.minimise(first * -3)
            continue
        answer = sack.minimise(first * -3)
        assert (answer.values is not None) == is_one and answer.objective == (-7.0 if is_one else math.inf) and answer.bound == -8.0
