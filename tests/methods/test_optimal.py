"""optimal: equal to an exhaustive search of the same class, budgets and seconds alike; what a time limit leaves is told."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from random import Random

import pytest
from contract import DEVICE, RULES, Inquiry, peak_of_machine, plain_peak
from exhaustive import Class, Held, Pruned, Search, random_step
from tapes import TOYS, random_tape

from vramlab.bounds import least_peak_bytes, step_seconds_bound
from vramlab.check import check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.errors import PlanInfeasible, Unsupported
from vramlab.planner import Budget
from vramlab.program import LIMIT, Answer
from vramlab.schedule import Offload, Recompute, Schedule
from vramlab.simulate import simulate

METHOD = Library([built_in_collection()]).method("optimal")
method = METHOD.load()
items, mixed = (sys.modules[f"{method.__package__}.{name}"] for name in ("items", "mixed"))
HAIR = 1e-4


def link(seconds_per_byte: float):
    """The toy device with this link."""
    return replace(DEVICE, h2d_bytes_per_second=1 / seconds_per_byte, d2h_bytes_per_second=1 / seconds_per_byte)


def tapes_that_bind(ops: int, seeds: range):
    """Generated tapes whose least peak is below eager's, with that budget and, of few ops, the one halfway."""
    for seed in seeds:
        tape = random_step(Random(seed), ops)
        low, high = least_peak_bytes(tape), plain_peak(tape)
        if low < high:
            yield from ((tape, budget) for budget in sorted({low, (low + high) // 2} if ops < 6 else {low}))


def compare(tape, budget: int, rate: float, recomputes: int) -> float | None:
    """Seconds of the optimum, None where the class has no schedule: the search says the same, and the bound is no hair higher."""
    search = Search if len(tape.ops) < 5 else Pruned
    found = search(tape, budget, rate, rate, Class(recomputes=recomputes)).fastest()
    try:
        solution = METHOD.build(groups=8, recomputes=recomputes).solve(tape, link(rate), Budget(device_bytes=budget))
    except PlanInfeasible as refusal:
        assert found is None and refusal.smallest_bytes > budget
        return None
    assert solution.is_proved and solution.items == len(tape.ops)
    assert solution.seconds == pytest.approx(found[0], rel=1e-6) == simulate(solution.checked, link(rate)).metrics.step_seconds
    assert solution.bound_seconds <= found[0] * (1 + 1e-9) < solution.bound_seconds * (1 + HAIR)
    assert peak_of_machine(tape, solution.checked.schedule) <= budget
    assert step_seconds_bound(tape, link(rate), budget) <= solution.seconds
    return solution.seconds


@pytest.mark.parametrize("ops, rate", [(3, 2), (4, 1), (4, 2), (5, 2)])
def test_equal_to_the_search_of_the_same_class(ops, rate):
    seconds = [compare(tape, budget, rate, recomputes=1) for tape, budget in tapes_that_bind(ops, range({3: 20, 4: 6, 5: 1}[ops]))]
    assert len(seconds) >= 2 and any(s is not None for s in seconds)


@pytest.mark.slow
@pytest.mark.parametrize("ops, rate", [(5, 1), (6, 2), (7, 2), (8, 2)])
def test_equal_to_the_search_up_to_eight_ops(ops, rate):
    seconds = [compare(tape, budget, rate, recomputes=1) for tape, budget in tapes_that_bind(ops, range({5: 8, 6: 8, 7: 6, 8: 4}[ops]))]
    assert len(seconds) >= 3 and any(s is not None for s in seconds)


# --- the search that looks at less --------------------------------------------------------------------------------------------
def fastest_of(search: type[Search], tape, budget: int, rate: float, recomputes: int) -> float | None:
    found = search(tape, budget, rate, rate, Class(recomputes=recomputes)).fastest()
    return None if found is None else found[0]


@pytest.mark.parametrize("ops, rate, recomputes", [(3, 1, 1), (4, 2, 1), (4, 1, 0), (4, 9, 2)])
def test_what_the_search_leaves_out_changes_no_answer(ops, rate, recomputes):
    """Held against the one that leaves nothing out. Its instructions are a step of that many seconds within the budget."""
    answers = []
    for tape, budget in tapes_that_bind(ops, range(8 if ops > 3 else 40)):
        answers.append(fastest_of(Pruned, tape, budget, rate, recomputes))
        assert answers[-1] == fastest_of(Search, tape, budget, rate, recomputes)
        if answers[-1] is not None:
            _, instructions = Pruned(tape, budget, rate, rate, Class(recomputes=recomputes)).fastest()
            checked = check_schedule(tape, Schedule(instructions, tape.digest), Budget(device_bytes=budget))
            assert simulate(checked, link(rate)).metrics.step_seconds == pytest.approx(answers[-1])
    assert len(answers) >= 4 and any(s is not None for s in answers)


@pytest.mark.slow
def test_what_the_search_leaves_out_changes_no_answer_of_five_ops():
    for tape, budget in tapes_that_bind(5, range(12)):
        for rate, recomputes in ((1, 1), (3, 2)):
            assert fastest_of(Pruned, tape, budget, rate, recomputes) == fastest_of(Search, tape, budget, rate, recomputes)


class TooSure(Pruned):
    """Its bound is no bound: twice what is still to come."""

    def left(self, held: Held) -> float:
        return 2 * super().left(held) if held.copies else super().left(held)


def test_a_search_that_leaves_out_too_much_is_seen():
    differing = [budget for ops in (3, 4) for tape, budget in tapes_that_bind(ops, range(8))
                 if fastest_of(TooSure, tape, budget, 1, 1) != fastest_of(Pruned, tape, budget, 1, 1)]
    assert differing


def test_a_smaller_class_is_seen_to_be_slower():
    """Without recomputes, and held against the search of the class that has one: some optimum differs, so the comparison can fail."""
    tape, budget = next(tapes_that_bind(4, range(9)))
    with_one = compare(tape, budget, 9.0, recomputes=1)
    without = compare(tape, budget, 9.0, recomputes=0)
    assert with_one is not None and (without is None or without > with_one)
    assert compare(tape, budget, 9.0, recomputes=2) <= with_one


def test_an_output_that_nobody_reads_takes_over_its_input():
    """Found by the search at six ops: 10 bytes are enough only where it does; the search gives 54 s."""
    tape, budget = list(tapes_that_bind(6, range(4)))[1]
    assert budget == 10 and METHOD.build(groups=8).solve(tape, link(2), Budget(device_bytes=budget)).seconds == pytest.approx(54.0)


def test_without_a_host_nothing_is_copied():
    tape, budget = next(tapes_that_bind(4, range(9)))
    solution = METHOD.build(groups=8).solve(tape, link(0.1), Budget(device_bytes=budget, host_bytes=0))
    assert solution.checked.schedule.count(Offload) == 0 < solution.checked.schedule.count(Recompute)
    assert solution.seconds == Search(tape, budget, 0.1, 0.1, Class(recomputes=1, copies=False)).fastest()[0]


def test_tapes_that_do_everything_a_tape_may():
    """Overwritten state, random ops, several outputs: what a plain run computes, within the budget, and the clock that was counted."""
    proved = 0
    for seed in range(24):
        tape = random_tape(Random(seed), ops=2 + seed % 6)
        for budget in {plain_peak(tape) - 1, least_peak_bytes(tape)} - {-1, 0, plain_peak(tape)}:
            planner = METHOD.build(groups=8)
            try:
                schedule = planner.plan(tape, link(1 / 16), Budget(device_bytes=budget))
            except PlanInfeasible as refusal:
                smallest = refusal.smallest_bytes
                again = planner.plan(tape, link(1 / 16), Budget(device_bytes=smallest))
                assert budget < smallest >= peak_of_machine(tape, again)
                continue
            assert peak_of_machine(tape, schedule) <= budget and planner.proof["is_proved"]
            proved += 1
    assert proved > 10


@pytest.mark.parametrize("toy", ["chain", "skip"])
def test_the_contract_of_all_methods(toy):
    """A planner whose class has to be stated is not asked by default; here with four items."""
    inquiry = Inquiry(METHOD, {"groups": 4}, toy)
    for name, rule in RULES.items():
        if name not in METHOD.card.exemptions:
            rule(inquiry)


@pytest.mark.slow
@pytest.mark.parametrize("toy", [toy for toy in TOYS if toy not in ("chain", "skip")])
def test_the_contract_on_every_toy(toy):
    test_the_contract_of_all_methods(toy)


def test_card_and_code_agree():
    assert method.UID == METHOD.card.uid and list(method.NEEDS) == METHOD.card.needs
    assert method.build(groups=8) == METHOD.build(groups=8)


@pytest.mark.parametrize("most", [1, 3, 8, 100])
def test_coarse_items_hold_every_op_once_and_their_bytes_are_those_of_their_runs(most):
    tape = TOYS["buffer_writer"]()
    coarse = items.coarse_items(tape, most)
    assert [op for item in coarse for op in item.first.ops] == list(range(len(tape.ops))) and len(coarse) == min(most, len(tape.ops))
    if most == 1:
        assert coarse[0].first.inner_bytes <= plain_peak(tape) - sum(s.nbytes for s in tape.storages if s.at_start)


# --- when time is up --------------------------------------------------------------------------------------------------------
NOTHING = Answer(status=LIMIT, objective=math.inf, bound=-math.inf, values=None)


def test_a_time_limit_leaves_the_best_schedule_its_bound_and_its_gap(monkeypatch):
    """The solver is cut short: by then only what moves nothing is known, and a bound below it."""
    tape, budget = next(tapes_that_bind(4, range(9)))
    planner = METHOD.build(groups=8, time_limit_seconds=5.0)
    still = METHOD.build(groups=8).solve(tape, link(9.0), Budget(device_bytes=budget, host_bytes=0)).seconds
    plain = sum(op.seconds for op in tape.ops)
    bound = (plain + still) / 2
    monkeypatch.setattr(mixed.Mixed, "fastest", lambda self, *_: replace(NOTHING, bound=bound / self.scale))
    solution = planner.solve(tape, link(9.0), Budget(device_bytes=budget))
    assert (solution.seconds, solution.bound_seconds) == (still, pytest.approx(bound)) and not solution.is_proved
    assert 0 < solution.gap == pytest.approx((still - bound) / still)
    schedule = planner.plan(tape, link(9.0), Budget(device_bytes=budget))
    assert planner.proof["is_proved"] is False and planner.proof["gap"] == solution.gap
    assert check_schedule(tape, schedule, Budget(device_bytes=budget)).peak_bytes <= budget


def test_a_time_limit_that_leaves_nothing_is_said_so(monkeypatch):
    tape, budget = next(tapes_that_bind(4, range(9)))
    monkeypatch.setattr(mixed.Mixed, "fastest", lambda self, *_: NOTHING)
    monkeypatch.setattr(mixed.Mixed, "fewest_reruns", lambda self, *_: NOTHING)
    planner = METHOD.build(groups=8, time_limit_seconds=5.0)
    with pytest.raises(Unsupported, match="neither a schedule nor a proof"):
        planner.plan(tape, link(9.0), Budget(device_bytes=budget))
    assert planner.proof is None


def test_one_engine_for_both_directions_is_refused():
    tape, budget = next(tapes_that_bind(4, range(9)))
    with pytest.raises(Unsupported, match="engine"):
        METHOD.build(groups=8).plan(tape, replace(DEVICE, is_full_duplex=False), Budget(device_bytes=budget))
