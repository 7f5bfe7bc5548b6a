"""The memory timeline against a step written by hand, and against the checker's own arrays on planned toys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tapes import TOYS, TapeBuilder
from timeline_steps import DEVICE, EVENTS, INSTANTS, PEAK_BYTES, PHASES, ROLES, SWAPPING, schedule_of, swapping_tape

from vramlab.at_peak import INPUTS, live_at_peak
from vramlab.check import check_schedule
from vramlab.collection import Library
from vramlab.errors import PlanInfeasible, Unsupported
from vramlab.live_bytes import START, lanes, live_bytes, phase_spans
from vramlab.liveness import replay_schedule
from vramlab.planner import Budget
from vramlab.schedule import Compute, Free, FreeHost, Offload, Recompute, Schedule, Wait
from vramlab.simulate import simulate
from vramlab.tape import Role

ROOT = Path(__file__).parent.parent


def by_hand():
    tape = swapping_tape()
    checked = check_schedule(tape, schedule_of(tape))
    return checked, simulate(checked, DEVICE)


def test_every_instant_of_a_step_written_by_hand():
    checked, trace = by_hand()
    found = live_bytes(checked, trace)
    roles = found.by_group([ROLES.index(s.role) for s in checked.tape.storages], len(ROLES))
    rows = [(s, i, n, *row) for s, i, n, row in zip(found.seconds.tolist(), found.instruction.tolist(), found.inside_bytes.tolist(),
                                                    roles.tolist())]
    assert rows == [tuple(map(float, row[:1])) + row[1:] for row in INSTANTS]
    assert found.total().tolist() == [sum(row[2:]) for row in INSTANTS]
    assert found.total().max() == checked.peak_bytes == PEAK_BYTES


def test_a_wrong_byte_by_hand_would_be_seen():
    """The negative control: with one storage of another size nothing above holds."""
    tape = swapping_tape()
    other = type(tape)(**{**tape.__dict__, "storages": (*tape.storages[:3], type(tape.storages[3])(
        id=3, nbytes=61, role=Role.ACTIVATION, name="%3", at_start=False, at_end=False), *tape.storages[4:])})
    checked = check_schedule(other, schedule_of(other))
    assert live_bytes(checked, simulate(checked, DEVICE)).total().tolist() != [sum(row[2:]) for row in INSTANTS]


def test_phases_and_lanes_of_the_step_written_by_hand():
    checked, trace = by_hand()
    assert [(str(s.phase), s.start_seconds, s.end_seconds, s.first_instruction) for s in phase_spans(checked, trace)] == list(PHASES)
    found = {name: tuple((e.instruction, e.start_seconds, e.end_seconds) for e in events) for name, events in lanes(checked, trace).items()}
    assert found == EVENTS


def test_what_a_recompute_makes_again_beside_its_host_copy_is_inside_the_op():
    """a 100 and b 30 of one op, then c 50. a goes to the host and b away; the op runs again for b, and its second a is thrown away."""
    tape = TapeBuilder()
    x, a, b, c = tape.state("x", 10, Role.INPUT), tape.temporary(100), tape.temporary(30), tape.temporary(50)
    loss = tape.temporary(4, at_end=True)
    tape.call("aten.max_pool2d_with_indices.default", [x], [a, b], layer="pool")
    tape.call("aten.neg.default", [x], [c], layer="neg")
    tape.call("aten.add.Tensor", [b, c], [loss], layer="head")
    step = tape.build(loss)
    checked = check_schedule(step, schedule_of(step, (
        Compute(0), Offload(1), Wait(1), Free(1), Free(2), Compute(1), Recompute(0), Compute(2), Free(2), Free(3), FreeHost(1))))
    found = live_bytes(checked, simulate(checked, DEVICE))
    assert found.total().tolist() == [10, 140, 40, 10, 60, 190, 90, 94, 64, 14]
    assert found.inside_bytes.tolist() == [0, 0, 0, 0, 0, 100, 0, 0, 0, 0]
    at_peak = live_at_peak(checked)
    assert (at_peak.bytes, at_peak.inside_op_bytes, at_peak.by_layer) == (190, 100, {"neg": 50, "pool": 30, INPUTS: 10})


def replayed(checked, trace) -> None:
    """The checker's arrays, from the instants alone."""
    found = live_bytes(checked, trace)
    total, at = found.total(), found.instruction
    assert total.max() == checked.peak_bytes and (np.diff(found.seconds) >= 0).all() and at[0] == START
    for index in range(len(checked.schedule.instructions)):
        before, own = total[at < index][-1], total[at == index]
        assert checked.inner_peak_bytes[index] == max([before, *own])
        assert checked.live_bytes[index] == (own[-1] if len(own) else before)


@pytest.mark.parametrize("method", ["delta", "vdnn", "superneurons", "checkpoint"])
def test_the_instants_are_the_checkers_arrays(method):
    planner, planned = Library([ROOT]).method(method).build(), 0
    for make in TOYS.values():
        tape = make()
        eager = check_schedule(tape, replay_schedule(tape))
        replayed(eager, simulate(eager, DEVICE))
        for share in (1.0, 0.8, 0.65):
            try:
                schedule = planner.plan(tape, DEVICE, Budget(device_bytes=int(share * eager.peak_bytes)))
            except (PlanInfeasible, Unsupported):
                continue
            checked = check_schedule(tape, schedule)
            replayed(checked, simulate(checked, DEVICE))
            planned += 1
    assert planned > 5


def test_a_step_without_instructions_has_its_start_only():
    tape = TapeBuilder()
    w = tape.state("w", 10)
    checked = check_schedule(tape.build(w), Schedule((), tape.build(w).digest))
    found = live_bytes(checked, simulate(checked, DEVICE))
    assert found.total().tolist() == [10] and phase_spans(checked, simulate(checked, DEVICE)) == ()
    assert set(map(len, lanes(checked, simulate(checked, DEVICE)).values())) == {0}


def test_all_of_the_steps_instructions_are_used():
    assert {type(i).__name__ for i in SWAPPING} == {"Compute", "Recompute", "Free", "Offload", "Prefetch", "Wait", "FreeHost"}
