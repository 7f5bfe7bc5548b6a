"""What is live at the peak, on hand-written tapes whose bytes are counted by hand; and that it always adds up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from tapes import TOYS, TapeBuilder, random_tapes

from vramlab.at_peak import INPUTS, feature_bytes_at_peak, live_at_peak
from vramlab.check import check_schedule
from vramlab.liveness import replay_schedule
from vramlab.schedule import Compute, Free, FreeHost, Offload, Prefetch, Recompute, Schedule, Wait
from vramlab.tape import Phase, Role, Tape


def step() -> Tape:
    """Forward x, w -> a -> loss, backward a, loss -> g, optimizer. Bytes: w 10, its gradient 10 and momentum 10, x 100, a 200, loss 4."""
    tape = TapeBuilder()
    w, momentum = tape.state("block.conv.weight", 10), tape.state("block.conv.weight.momentum", 10, Role.OPTIMIZER_STATE)
    x = tape.state("input.0", 100, Role.INPUT)
    a, loss = tape.temporary(200, Role.ACTIVATION), tape.temporary(4, at_end=True)
    g = tape.state("block.conv.weight.grad", 10, Role.GRADIENT, at_start=False)
    tape.call("aten.convolution.default", [w, x], [a], layer="block.conv", workspace_bytes=7)
    tape.call("aten.mean.default", [a], [loss], layer="head", workspace_bytes=1)
    tape.call("aten.convolution_backward.default", [a, loss, w], [g], layer="block.conv", phase=Phase.BACKWARD, workspace_bytes=50)
    tape.call("vramlab.optimizer_step", [w, g, momentum], [], phase=Phase.OPTIMIZER, mutates=[w, momentum], workspace_bytes=20)
    return tape.build(loss)


def peak_of(tape: Tape, instructions=None):
    schedule = replay_schedule(tape) if instructions is None else Schedule(instructions=tuple(instructions), tape_digest=tape.digest)
    checked = check_schedule(tape, schedule)
    return checked, live_at_peak(checked)


def test_every_byte_of_the_peak_has_a_role_and_a_layer():
    """In the backward op: w 10 + momentum 10 + x 100 + a 200 + loss 4 + g 10, and 50 inside."""
    checked, found = peak_of(step())
    assert (found.phase, found.op, found.inside_op_bytes, found.bytes) == ("backward", 2, 50, 384) and checked.peak_bytes == 384
    assert {role: n for role, n in found.by_role.items() if n} == {
        "parameter": 10, "optimizer_state": 10, "input": 100, "activation": 200, "temporary": 4, "gradient": 10}
    assert list(found.by_layer.items()) == [("block.conv", 230), (INPUTS, 100), ("head", 4)]


def test_what_of_the_peak_belongs_to_the_feature_extraction():
    """At the backward of the convolution: its w 10, x 100, a 200 and da 200, dw 10, what runs 50; h 30 and v 40 with its gradient 40 are
    of the classifier, and so is the 900 inside its own backward when that is the peak."""
    def tape(inside: int) -> Tape:
        t = TapeBuilder()
        w, v, x = t.state("conv.weight", 10), t.state("fc.weight", 40), t.state("input.0", 100, Role.INPUT)
        dw, dv = (t.state(f"{n}.grad", b, Role.GRADIENT, at_start=False) for n, b in (("conv.weight", 10), ("fc.weight", 40)))
        a, h, loss, da = t.temporary(200, Role.ACTIVATION), t.temporary(30, Role.ACTIVATION), t.temporary(4, at_end=True), t.temporary(200)
        t.call("aten.convolution.default", [w, x], [a], layer="conv")
        t.call("aten.mm.default", [v, a], [h], layer="fc")
        t.call("aten.mse_loss.default", [h], [loss], layer="")
        t.call("aten.mm.default", [h, a], [dv], layer="fc", phase=Phase.BACKWARD, workspace_bytes=inside)
        t.call("aten.mm.default", [h, v], [da], layer="fc", phase=Phase.BACKWARD)
        t.call("aten.convolution_backward.default", [da, x, w], [dw], layer="conv", phase=Phase.BACKWARD, workspace_bytes=50)
        return t.build(loss)

    def schedule(tape: Tape):
        held = [i for i in replay_schedule(tape).instructions if not isinstance(i, Free)]
        freed = [Free(s.id) for s in tape.storages if not s.at_end and (s.at_start or tape.producer[s.id] is not None)]
        return check_schedule(tape, Schedule(instructions=(*held, *freed), tape_digest=tape.digest))

    checked = schedule(tape(0))
    assert checked.peak_bytes == 10 + 40 + 100 + 200 + 30 + 4 + 40 + 200 + 10 + 50
    assert feature_bytes_at_peak(checked) == 10 + 100 + 200 + 10 + 50 + 200  # da is the gradient of the convolution's map
    assert feature_bytes_at_peak(schedule(tape(900))) == 10 + 100 + 200


def test_a_record_names_the_largest_layers():
    body = peak_of(step())[1].to_json(most_layers=1)
    assert body["by_layer"] == {"block.conv": 230} and body["other_layers_bytes"] == 104 and body["layers"] == 3
    assert sum(body["by_role"].values()) + body["inside_op_bytes"] == 384


def toy() -> Tape:
    """x 10 -> a 100 -> b 300 -> loss 4, which reads a too."""
    tape = TapeBuilder()
    x, a, b, loss = tape.state("x", 10, Role.INPUT), tape.temporary(100), tape.temporary(300), tape.temporary(4, at_end=True)
    tape.call("aten.relu.default", [x], [a], layer="first")
    tape.call("aten.neg.default", [a], [b], layer="second")
    tape.call("aten.add.Tensor", [a, b], [loss], layer="third")
    return tape.build(loss)


@pytest.mark.parametrize("name, instructions, phase, bytes_, layers", [
    ("recompute", [Compute(0), Compute(1), Free(1), Recompute(0), Compute(2), Free(1), Free(2)], "forward", 414, {"second": 300}),
    ("swap", [Compute(0), Offload(1), Wait(1), Free(1), Prefetch(1), Wait(1), FreeHost(1), Compute(1), Compute(2), Free(1), Free(2)],
     "forward", 414, {"first": 100}),
])
def test_it_follows_recomputes_and_copies(name, instructions, phase, bytes_, layers):
    checked, found = peak_of(toy(), instructions)
    assert (found.phase, found.bytes, checked.peak_bytes) == (phase, bytes_, bytes_)
    assert layers.items() <= found.by_layer.items()


def test_a_peak_at_a_prefetch_has_the_phase_of_what_ran_last():
    """x 10 -> a 1000, x -> b 500, (a, b) -> c 500 in b's place: nothing is larger than what the prefetch of a brings about."""
    tape = TapeBuilder()
    x, a, b, c = tape.state("x", 10, Role.INPUT), tape.temporary(1000), tape.temporary(500), tape.temporary(500, at_end=True)
    tape.call("aten.relu.default", [x], [a])
    tape.call("aten.neg.default", [x], [b])
    tape.call("aten.add.Tensor", [a, b], [c], takeover=(c, b))
    instructions = [Compute(0), Offload(a), Wait(a), Free(a), Compute(1), Prefetch(a), Wait(a), FreeHost(a), Compute(2, reuse=b), Free(a)]
    checked, found = peak_of(tape.build(c), instructions)
    assert (checked.peak_instruction, found.op, found.phase, found.bytes, found.inside_op_bytes) == (5, None, "forward", 1510, 0)


@pytest.mark.parametrize("make", TOYS.values(), ids=TOYS)
def test_it_adds_up_on_toys(make):
    checked, found = peak_of(make())
    assert found.bytes == checked.peak_bytes and found.inside_op_bytes >= 0
    assert sum(found.by_layer.values()) == sum(found.by_role.values())


@settings(max_examples=60, deadline=None)
@given(random_tapes())
def test_it_adds_up_on_random_tapes(tape):
    checked, found = peak_of(tape)
    assert found.bytes == checked.peak_bytes and sum(found.by_layer.values()) + found.inside_op_bytes == checked.peak_bytes
    assert found.inside_op_bytes <= max((op.workspace_bytes for op in tape.ops), default=0)
