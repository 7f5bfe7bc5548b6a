"""Plans run on the machine, against plain eager PyTorch: loss, gradients, state and generator bit for bit, and ops as planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contract import DEVICE
from steps import differences, training_steps

from vramlab.capture import capture
from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.errors import PlanInfeasible
from vramlab.execute import Executor
from vramlab.planner import Budget
from vramlab.schedule import Offload, Recompute

LIBRARY = Library([built_in_collection()])
STEPS = ("conv-bn-dropout", "transformer-prenorm", "write-through-view", "tied-weights", "two-heads")
ASKED = [("checkpoint", {}), ("checkpoint", {"plan": "recursive"}), ("delta", {}), ("delta", {"action": "swap-only"}),
         ("delta", {"action": "recompute-only"}), ("superneurons", {}), ("superneurons", {"recomputation": "memory-centric"}),
         ("superneurons", {"offload": "all"}), ("network-wide", {}), ("vdnn-baseline", {}), ("replay", {}),
         ("vdnn", {"policy": "all"}), ("vdnn", {"policy": "conv"})]
ASKED += [("dtr", {}), ("dtr", {"heuristic": "eq"}), ("rotor", {}), ("capuchin", {}), ("pofo", {}), ("hybrid", {"plan_seconds": 0.1})]


def tightest(tape, method: str, options: dict) -> CheckedSchedule:
    """The plan for the smallest budget that the method can reach."""
    planner = LIBRARY.method(method).build(**options)
    try:
        schedule = planner.plan(tape, DEVICE, Budget(device_bytes=1))
    except PlanInfeasible as refusal:
        schedule = planner.plan(tape, DEVICE, Budget(device_bytes=refusal.smallest_bytes))
    return check_schedule(tape, schedule)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("method, options", ASKED, ids=[f"{m}-{'-'.join(map(str, o.values())) or 'defaults'}" for m, o in ASKED])
def test_the_tightest_plan_gives_eagers_bits(step, method, options):
    make_model, loss_fn, batch = training_steps()[step]

    def make_step(model):
        captured = capture(model, loss_fn, batch)
        tape = captured.tape.with_costs([1.0] * len(captured.tape.ops))
        executor = Executor(replace(captured, tape=tape), tightest(tape, method, options), model)
        return lambda *inputs: executor(*inputs).loss

    assert differences(make_model, loss_fn, batch, make_step) == []


def test_the_tightest_plans_do_recompute_and_move():
    """The test above would prove little if its plans did nothing."""
    make_model, loss_fn, batch = training_steps()["conv-bn-dropout"]
    captured = capture(make_model(), loss_fn, batch)
    tape = captured.tape.with_costs([1.0] * len(captured.tape.ops))
    assert all(tightest(tape, name, {}).schedule.count(Recompute) > 0 for name in ("checkpoint", "rotor"))
    assert tightest(tape, "delta", {"action": "swap-only"}).schedule.count(Offload) > 3
    assert tightest(tape, "vdnn", {"policy": "all"}).schedule.count(Offload) > 3
    superneurons = tightest(tape, "superneurons", {}).schedule
    assert superneurons.count(Offload) > 0 and superneurons.count(Recompute) > 3
    instructions = tightest(tape, "delta", {"action": "recompute-only"}).schedule.instructions
    again = [tape.ops[i.op] for i in instructions if isinstance(i, Recompute)]
    assert any(op.is_random for op in again) and any(op.throwaway_state for op in again)
