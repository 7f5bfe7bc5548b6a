"""What schedules run again and move, on hand-written tapes whose chains and seconds are counted by hand."""

from __future__ import annotations

import pytest
from tapes import TapeBuilder

from vramlab.check import check_schedule
from vramlab.device import DeviceProfile
from vramlab.effort import deepest_recompute, effort
from vramlab.schedule import Compute, Free, FreeHost, Instruction, Offload, Prefetch, Recompute, Schedule, Wait
from vramlab.simulate import simulate
from vramlab.tape import Role, Tape


def line() -> Tape:
    """x -> a -> b -> c -> loss; then b and c are read again. Bytes: x 8, a 100, b 200, c 300, loss 4. FLOP: 10, 20, 40, 80, 160."""
    t = TapeBuilder()
    x = t.state("input.0", 8, Role.INPUT)
    a, b, c = (t.temporary(n, Role.ACTIVATION) for n in (100, 200, 300))
    loss = t.temporary(4, at_end=True)
    for (source, made), flops in zip(((x, a), (a, b), (b, c)), (10, 20, 40)):
        t.call("aten.relu.default", [source], [made], flops=flops)
    t.call("aten.mean.default", [c], [loss], flops=80)
    t.call("aten.add.Tensor", [c, b], [t.temporary(1)], flops=160)
    return t.build(loss)


X, A, B, C, LOSS, LAST = range(6)  # storages
FORWARD = [Compute(0), Compute(1), Free(A), Compute(2), Free(B), Compute(3)]
END = [Compute(4), Free(B), Free(C), Free(LAST)]


def checked_of(instructions: list[Instruction]):
    tape = line()
    return check_schedule(tape, Schedule(tuple(instructions), tape.digest, "hand"))


@pytest.mark.parametrize(("instructions", "deepest"), [
    ([Compute(0), Compute(1), Free(A), Compute(2), Compute(3), *END], 0),
    ([*FORWARD, Recompute(0), Recompute(1), Free(A), *END], 2),  # a and b, for c is still there
    ([*FORWARD, Free(C), Recompute(0), Recompute(1), Free(A), Recompute(2), *END], 3),
    ([Compute(0), Compute(1), Compute(2), Free(B), Compute(3), Recompute(1), Free(A), *END], 1),  # from an a that never left
    ([Compute(0), Compute(1), Free(A), Offload(B), Wait(B), Compute(2), Free(B), Compute(3), Free(C), Prefetch(B), Wait(B),
      Recompute(2), *END, FreeHost(B)], 1),  # a copy back starts a new chain
])
def test_the_deepest_chain(instructions, deepest):
    assert deepest_recompute(checked_of(instructions)) == deepest


def test_arithmetic_run_again_and_time_on_the_link():
    link = DeviceProfile(name="link", memory_bytes=10**6, flops_per_second=1.0, flops_efficiency=1.0, memory_bytes_per_second=1.0,
                         h2d_bytes_per_second=100.0, d2h_bytes_per_second=50.0, copy_latency_seconds=0.0)
    checked = checked_of([Compute(0), Compute(1), Free(A), Offload(B), Wait(B), Compute(2), Free(B), Compute(3), Free(C), Prefetch(B),
                          Wait(B), Recompute(2), *END, FreeHost(B)])
    found = effort(checked, simulate(checked, link))
    assert (found["flops"], found["recompute_flops"], found["deepest_recompute"]) == (310, 40, 1)
    assert found["copy_seconds"] == pytest.approx(200 / 50 + 200 / 100)
    plain = checked_of([Compute(0), Compute(1), Free(A), Compute(2), Compute(3), *END])
    assert effort(plain, simulate(plain, link)) == {"copy_seconds": 0.0, "flops": 310, "recompute_flops": 0, "deepest_recompute": 0}
