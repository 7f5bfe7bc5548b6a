"""rotor: the recurrence against brute force on small chains, the table's times and bytes against the checked step, budgets, refusals."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from random import Random

import numpy as np
import pytest
from chain_oracle import BruteForce, random_chain
from contract import DEVICE, TAPES, plain_peak
from tapes import MAP, SCALAR, TOYS, WEIGHT, StepBuilder, chain

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.errors import PlanInfeasible
from vramlab.planner import UNLIMITED, Budget
from vramlab.schedule import Compute, Recompute
from vramlab.simulate import simulate
from vramlab.stages import chain_facts, stages_of
from vramlab.tape import Phase, Tape

LIBRARY = Library([built_in_collection()])
METHOD = LIBRARY.method("rotor")
method = METHOD.load()


def part(name: str):
    """A module of the method, compiled when it is asked for."""
    return import_module(f"{method.__package__}.{name}")


def plan(tape: Tape, device_bytes: int = UNLIMITED, name: str = "rotor", **options) -> CheckedSchedule:
    budget = Budget(device_bytes=device_bytes)
    return check_schedule(tape, LIBRARY.method(name).build(**options).plan(tape, DEVICE, budget), budget)


def start_bytes(tape: Tape) -> int:
    return sum(s.nbytes for s in tape.storages if s.at_start)


# --- the recurrence: test A10 -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stages, chains, bytes_apart", [(1, 3, 1), (2, 10, 1), (3, 10, 2), (4, 6, 3), (5, 3, 6), (6, 1, 9)])
def test_the_table_equals_brute_force(stages, chains, bytes_apart):
    random, finite = Random(stages), 0
    for _ in range(chains):
        facts = random_chain(random, stages)
        most = facts.most_bytes + 2
        table = part("recurrence").Recurrence(facts, most, 1)
        for limit in range(most, 0, -bytes_apart):
            assert table.seconds(limit) == BruteForce(facts, limit).least(), (facts, limit)
            finite += table.seconds(limit) < np.inf
            if table.seconds(limit) == np.inf:
                break
    assert finite > chains, "something was feasible, and not only at one limit"


def test_brute_force_sees_a_byte_and_a_second():
    """The test above would prove little if it could not fail."""
    facts = random_chain(Random(4), 4)
    most = facts.most_bytes + 2
    table = part("recurrence").Recurrence(facts, most, 1)
    for field in ("saved_bytes", "x_bytes", "gradient_bytes", "again_drop_seconds", "backward_bytes", "again_last_seconds"):
        other = replace(facts, **{field: getattr(facts, field) + 1})
        assert any(table.seconds(limit) != BruteForce(other, limit).least() for limit in range(most, 0, -1)), field


def test_bytes_are_rounded_up_to_slots():
    facts = random_chain(Random(7), 4)
    exact, coarse = (part("recurrence").Recurrence(facts, 60, slot) for slot in (1, 3))
    assert all(coarse.seconds(m) >= exact.seconds(min(3 * m, 60)) for m in range(21))


# --- stages ---------------------------------------------------------------------------------------------------------------
def test_the_stages_of_a_chain_are_its_layers():
    tape = chain(4)
    stages = stages_of(tape)
    assert [[tape.ops[op].layer for op in stage.forward_ops] for stage in stages] == [["conv0"], ["conv1"], ["conv2"], ["conv3"], [""]]
    backward = [{tape.ops[op].layer for op in stage.backward_ops if "convolution" in tape.ops[op].target} for stage in stages]
    assert backward == [{"conv0"}, {"conv1"}, {"conv2"}, {"conv3"}, set()]
    assert [op for stage in reversed(stages) for op in stage.backward_ops] == [op.id for op in tape.ops if op.phase is not Phase.FORWARD]


def test_the_facts_of_a_chain_by_hand():
    """conv1 of chain(3): it hands on one map, which is all it keeps. Behind it are one gradient map, one weight's gradient and the loss.
    Its backward holds what it saved no more, and makes a map and a weight's gradient beside the gradient that it reads."""
    tape = chain(3)
    facts = chain_facts(tape, DEVICE, stages_of(tape))
    assert [int(column[1]) for column in (facts.x_bytes, facts.saved_bytes, facts.drop_rise_bytes, facts.keep_rise_bytes)] == [MAP] * 4
    assert facts.forward_seconds.tolist() == [1, 1, 1, 1] and facts.again_drop_seconds.tolist()[:3] == [1, 1, 1]
    assert int(facts.gradient_bytes[1]) == MAP + WEIGHT + SCALAR
    assert facts.backward_seconds.tolist() == [2.25, 2.25, 2.25, 4]


@pytest.mark.parametrize("toy", TAPES)
def test_stages_cover_the_step_once_and_few_stages_are_fewer(toy):
    tape = TAPES[toy]()
    for most in (None, 3, 2, 1):
        stages = stages_of(tape, most)
        assert most is None or len(stages) <= most
        ran = [op for stage in stages for op in stage.forward_ops] + [op for stage in reversed(stages) for op in stage.backward_ops]
        assert ran == list(range(len(tape.ops)))


def test_what_skips_over_a_cut_joins_its_stages():
    """A map that the backward of a later layer reads beside the articulation point: no split there."""
    step = StepBuilder()
    x = step.convolution(step.input)
    y = step.add(step.convolution(step.convolution(x)), x)
    tape = step.finish(step.convolution(y))
    inside = [stage for stage in stages_of(tape) if len(stage.forward_ops) == 3]
    assert len(inside) == 1 and [tape.ops[op].target for op in inside[0].forward_ops][-1] == "aten.add.Tensor"


# --- the step -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("toy", ["long_chain", "chain_with_workspace", "multi_output", "buffer_writer", "inplace", "residual", "random_op"])
def test_the_steps_take_the_tables_time_and_no_more_than_its_bytes(toy):
    tape = TAPES[toy]()
    stages = stages_of(tape)
    facts = chain_facts(tape, DEVICE, stages)
    table, sequences = part("recurrence").Recurrence(facts, facts.most_bytes // 4 + 50, 4), part("sequence")
    for level in table.levels():
        steps = sequences.sequence(table, facts.x_bytes, facts.saved_bytes, 4, level)
        checked = check_schedule(tape, sequences.written(tape, DEVICE, stages, steps, METHOD.card.uid))
        seconds = simulate(checked, DEVICE).metrics.step_seconds
        assert seconds == pytest.approx(table.seconds(level) + facts.backward_seconds.sum())
        assert checked.peak_bytes <= start_bytes(tape) + 4 * level


def test_a_level_of_an_equal_chain_is_its_peak():
    """Nothing is estimated there: the fewest slots at which a sequence fits are the bytes that it takes, to a slot an entry."""
    tape = chain(9, gradients_exist=True)
    levels, write = METHOD.build(slots=4000).table(tape, DEVICE)
    peaks = [check_schedule(tape, write(level)).peak_bytes for level in levels]
    assert peaks == sorted(peaks) and len(set(peaks)) == len(peaks) and len(peaks) >= 6
    # All nine maps but the last one's input at once, two gradients of maps, one of a weight, the loss; at the least three maps.
    assert peaks[-1] == plain_peak(tape) and peaks[0] - start_bytes(tape) == 3 * MAP + WEIGHT + SCALAR


def test_the_sequence_of_a_chain_by_hand():
    """chain(4) with room for one map less than everything: one map is given up, the first, which costs one run."""
    tape = chain(4)
    checked = plan(tape, plain_peak(tape) - MAP)
    again = [i.op for i in checked.schedule.instructions if isinstance(i, Recompute)]
    assert len(again) == 1 and simulate(checked, DEVICE).metrics.step_seconds == sum(op.seconds for op in tape.ops) + 1


@pytest.mark.parametrize("toy", ["long_chain", "chain_with_workspace", "inplace"])
def test_no_segmentation_is_faster_on_a_chain(toy):
    """Checkpointing's segments are persistent schedules of the chain, those of its last segment apart."""
    tape = TOYS[toy]()
    for share in (0.9, 0.8, 0.7, 0.6):
        try:
            rival = plan(tape, int(share * plain_peak(tape)), "checkpoint")
        except PlanInfeasible:
            continue
        mine = plan(tape, int(share * plain_peak(tape)), slots=2000)
        assert simulate(mine, DEVICE).metrics.step_seconds <= simulate(rival, DEVICE).metrics.step_seconds


def test_a_long_chain_is_planned_in_few_stages_by_bisection():
    tape = chain(150)
    budget = int(0.3 * plain_peak(tape))
    checked = plan(tape, budget, slots=100)
    assert checked.peak_bytes <= budget and 0 < checked.schedule.count(Recompute) < 150
    with pytest.raises(PlanInfeasible) as refusal:
        plan(tape, start_bytes(tape) + 2 * MAP, slots=100)
    assert plan(tape, refusal.value.smallest_bytes, slots=100).peak_bytes <= refusal.value.smallest_bytes


def test_first_runs_keep_the_tapes_order():
    tape = TAPES["residual"]()
    runs = [i.op for i in plan(tape, int(0.8 * plain_peak(tape))).schedule.instructions if isinstance(i, Compute)]
    assert runs == list(range(len(tape.ops)))
