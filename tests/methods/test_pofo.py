"""POFO: its recurrence against brute force at several prices, copies in the step by hand, against rotor, budgets and refusals."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from random import Random

import numpy as np
import pytest
from chain_oracle import BruteForce, random_chain
from contract import DEVICE, TAPES, plain_peak
from tapes import MAP, SCALAR, WEIGHT, chain

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.errors import PlanInfeasible
from vramlab.planner import UNLIMITED, Budget
from vramlab.schedule import Compute, Offload, Prefetch, Recompute
from vramlab.simulate import simulate
from vramlab.tape import Tape

LIBRARY = Library([built_in_collection()])
METHOD = LIBRARY.method("pofo")
method = METHOD.load()
SLOW = replace(DEVICE, d2h_bytes_per_second=0.01, h2d_bytes_per_second=0.01)


def recurrence():
    """Compiled when it is asked for."""
    return import_module(f"{method.__package__}.recurrence")


def plan(tape: Tape, device_bytes: int = UNLIMITED, device=DEVICE, name: str = "pofo", host_bytes: int = UNLIMITED) -> CheckedSchedule:
    budget = Budget(device_bytes=device_bytes, host_bytes=host_bytes)
    return check_schedule(tape, LIBRARY.method(name).build().plan(tape, device, budget), budget)


def seconds(checked: CheckedSchedule, device=DEVICE) -> float:
    return simulate(checked, device).metrics.step_seconds


def prices(random: Random, stages: int):
    """A few tenths of a second each: cheap for some stages, dear for others. The last stage's maps go nowhere."""
    x, inside = (np.array([random.choice([0.0, 0.25, 2.0, 9.0]) for _ in range(stages)]) for _ in range(2))
    return recurrence().Prices(x, inside)


# --- the recurrence -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stages, chains, bytes_apart", [(1, 3, 1), (2, 10, 1), (3, 10, 2), (4, 4, 3), (5, 2, 6)])
def test_the_row_equals_brute_force(stages, chains, bytes_apart):
    random, moved = Random(stages), 0
    for _ in range(chains):
        facts, at = random_chain(random, stages), prices(random, stages)
        most = facts.most_bytes + 2
        again = recurrence().Again(facts, most, 1)
        row, still = recurrence().First(again, at).table[0], recurrence().First(again, method.priced(at, np.inf)).table[0]
        for limit in range(most, 0, -bytes_apart):
            assert row[limit] == BruteForce(facts, limit, at.x, at.inside).least(), (facts, at, limit)
            assert still[limit] == BruteForce(facts, limit).least() and row[limit] <= still[limit]
            moved += row[limit] < still[limit]
            if row[limit] == np.inf:
                break
    assert stages < 3 or moved > chains, "copies were worth it, and not only once"


def test_brute_force_sees_a_price_and_a_byte():
    """The test above would prove little if it could not fail."""
    random = Random(4)
    facts, at = random_chain(random, 4), prices(random, 4)
    most = facts.most_bytes + 2
    row = recurrence().First(recurrence().Again(facts, most, 1), at).table[0]
    for other, x, inside in ((facts, at.x + 0.5, at.inside + 0.5), (replace(facts, x_bytes=facts.x_bytes + 1), at.x, at.inside)):
        assert any(row[limit] != BruteForce(other, limit, x, inside).least() for limit in range(most, 0, -1))


# --- the step -----------------------------------------------------------------------------------------------------------
def test_maps_wait_on_the_host_while_others_are_computed():
    """chain(12), a map takes 1.25 s each way and a layer 1 s and 2.25 s: the link is idle enough to move one map a layer on the way back
    and four of five on the way out, so that a budget far below costs nothing, which no recomputation can do."""
    tape = chain(12)
    budget = int(0.7 * plain_peak(tape))
    mine, rotors = plan(tape, budget), plan(tape, budget, name="rotor")
    assert seconds(mine) == sum(op.seconds for op in tape.ops) < seconds(rotors)
    assert mine.schedule.count(Offload) == mine.schedule.count(Prefetch) > 2 and mine.schedule.count(Recompute) == 0


def test_a_copy_back_starts_in_time():
    """Each map that comes back is on its way before the op ahead of its reader ends."""
    tape = chain(12)
    checked = plan(tape, int(0.7 * plain_peak(tape)))
    trace = simulate(checked, DEVICE)
    assert trace.metrics.stall_seconds == 0
    for k, i in enumerate(checked.schedule.instructions):
        if isinstance(i, Prefetch):
            ran = [j for j in checked.schedule.instructions[k:] if isinstance(j, Compute)]
            readers = [n for n, j in enumerate(ran) if i.storage in tape.reads[j.op]]
            assert sum(tape.ops[j.op].seconds for j in ran[:readers[0]]) >= MAP / DEVICE.h2d_bytes_per_second - 1


@pytest.mark.parametrize("toy", ["chain", "long_chain", "skip", "multi_output", "buffer_writer", "inplace", "random_op"])
@pytest.mark.parametrize("device", [DEVICE, SLOW], ids=["link", "slow-link"])
def test_never_slower_than_rotor(toy, device):
    """Its sequences are among those that are tried."""
    tape = TAPES[toy]()
    for share in (1.0, 0.9, 0.75, 0.6, 0.5):
        try:
            rotors = plan(tape, int(share * plain_peak(tape)), device, "rotor")
        except PlanInfeasible:
            continue
        assert seconds(plan(tape, int(share * plain_peak(tape)), device), device) <= seconds(rotors, device) + 1e-9


def test_on_a_slow_link_nothing_moves():
    tape = chain(12)
    assert plan(tape, int(0.7 * plain_peak(tape)), SLOW).schedule.count(Offload) == 0


def test_the_host_is_a_limit_too():
    tape = chain(12)
    checked = plan(tape, int(0.7 * plain_peak(tape)), host_bytes=MAP)
    assert checked.peak_host_bytes <= MAP and checked.schedule.count(Recompute) > 0


def test_an_unreachable_budget_names_the_smallest():
    """Three maps, a weight's gradient and the loss beside what stays: rotor's least, for at the least every map is made again."""
    tape = chain(9, gradients_exist=True)
    with pytest.raises(PlanInfeasible) as refusal:
        plan(tape, 1)
    least = sum(s.nbytes for s in tape.storages if s.at_start) + 3 * MAP + WEIGHT + SCALAR
    assert refusal.value.smallest_bytes == least == plan(tape, least).peak_bytes
