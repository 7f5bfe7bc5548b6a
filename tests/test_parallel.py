"""Several devices by simulation, against timelines worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tapes import TOYS, WEIGHT, chain

from vramlab.check import check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.device import DeviceProfile
from vramlab.liveness import lower_bound_bytes, replay_schedule
from vramlab.micro_batches import compose
from vramlab.parallel import AllReduce, completing_ops, exchange_seconds, share_of, simulate_parallel, speedup
from vramlab.planner import Budget
from vramlab.schedule import Compute, FreeHost, Offload, Schedule, Wait
from vramlab.simulate import simulate
from vramlab.tape import Role, Tape

LINKED = DeviceProfile(name="toy", memory_bytes=10**6, flops_per_second=1, flops_efficiency=1, memory_bytes_per_second=1,
                       h2d_bytes_per_second=100, d2h_bytes_per_second=100, copy_latency_seconds=0, device_link_bytes_per_second=100)
HOST_ONLY = replace(LINKED, device_link_bytes_per_second=0.0)


def replayed(tape: Tape):
    return check_schedule(tape, replay_schedule(tape))


# A chain of two convolutions: forward to 3 s, backward of conv1 to 9 s, its gradient complete at 9.25 s, conv0's at 11.5 s.
@pytest.mark.parametrize(("rate", "step", "exposed"), [
    (100, 16.5, 1.0),  # 1 s each: 9.25 to 10.25 beside the backward, 11.5 to 12.5; the optimizer's 4 s follow
    (10, 33.25, 17.75),  # 10 s each, one after the other: 9.25 to 19.25 to 29.25
])
def test_exchanges_run_beside_the_backward_phase(rate: float, step: float, exposed: float):
    found = simulate_parallel(replayed(chain(2, optimizer=True)), replace(LINKED, device_link_bytes_per_second=rate), 2)
    assert (found.compute_seconds, found.step_seconds, found.exposed_seconds) == (11.5, step, exposed)
    assert (found.exchanged_bytes, found.link) == (2 * WEIGHT, "device")


def test_without_an_optimizer_the_step_ends_with_the_last_exchange():
    assert simulate_parallel(replayed(chain(2)), LINKED, 2).step_seconds == 12.5


def test_ring_and_tree_by_formula():
    profile = replace(LINKED, copy_latency_seconds=0.5)
    assert exchange_seconds(400, 1, profile) == 0
    assert exchange_seconds(400, 2, profile) == 2 * 1 * (0.5 + 400 / 200) == 5
    assert exchange_seconds(400, 4, profile) == 2 * 3 * (0.5 + 400 / 400) == 9
    assert exchange_seconds(400, 2, profile, AllReduce.TREE) == 2 * 1 * (0.5 + 4) == 9
    assert exchange_seconds(400, 4, profile, AllReduce.TREE) == 2 * 2 * (0.5 + 4) == 18
    assert exchange_seconds(400, 3, profile, AllReduce.TREE) == exchange_seconds(400, 4, profile, AllReduce.TREE)


def swapping(tape: Tape) -> Schedule:
    """Conv0's map is copied to the host right after the first gradient is complete, that of the last layer."""
    first_map = tape.creates[0][0]
    instructions, gradients = [], 0
    for i in replay_schedule(tape).instructions:
        instructions.append(i)
        if isinstance(i, Compute) and tape.ops[i.op].target == "vramlab.accumulate_grad":
            gradients += 1
            if gradients == 1:
                instructions += [Offload(first_map), Wait(first_map), FreeHost(first_map)]
    return Schedule(instructions=tuple(instructions), tape_digest=tape.digest)


def test_without_links_of_their_own_copies_and_exchanges_wait_for_each_other():
    """The exchange from 10.25 s to 11.25 s delays the 10 s copy; conv1 to 23.25 s, conv0 to 25.5 s, the last gradient at 25.75 s."""
    checked = check_schedule(chain(3), swapping(chain(3)))
    found = simulate_parallel(checked, HOST_ONLY, 2)
    assert (found.step_seconds, found.compute_seconds, found.link) == (26.75, 25.75, "host")
    assert simulate_parallel(checked, LINKED, 2).compute_seconds == 24.75, "beside each other where there are links"


@pytest.mark.parametrize("full_duplex", [True, False])
@pytest.mark.parametrize("name", TOYS)
def test_one_device_is_the_plain_simulation(name: str, full_duplex: bool):
    tape = TOYS[name]()
    profile = replace(HOST_ONLY, h2d_bytes_per_second=800, d2h_bytes_per_second=700, is_full_duplex=full_duplex)
    method = Library([built_in_collection()]).method("modnn").build()
    checked = check_schedule(tape, method.plan(tape, profile, Budget(device_bytes=lower_bound_bytes(tape))))
    found = simulate_parallel(checked, profile, 1)
    assert found.step_seconds == pytest.approx(simulate(checked, profile).metrics.step_seconds, rel=1e-12)
    assert (found.exchange_seconds, found.exposed_seconds, found.exchanged_bytes) == (0, 0, 0)


def test_over_micro_batches_only_complete_gradients_are_exchanged():
    tapes = [replace(chain(2, optimizer=True), batch_size=n) for n in (2, 2)]
    inputs = [t.id for t in tapes[0].tensors if tapes[0].storages[t.storage].role is Role.INPUT]
    tapes = [replace(tape, tensors=tuple(replace(t, shape=(2, 500), strides=(500, 1)) if t.id in inputs else t for t in tape.tensors))
             for tape in tapes]
    whole = compose(tapes, inputs).tape
    last_pass = [op.id for op in whole.ops if op.target == "vramlab.accumulate_grad"][2:]
    assert sorted(completing_ops(whole)) == last_pass
    assert simulate_parallel(replayed(whole), LINKED, 2).exchanged_bytes == 2 * WEIGHT


# --- speed-up --------------------------------------------------------------------------------------------------------------
def plan_at(size: int):
    """Op times in proportion to the batch, the optimizer's apart."""
    tape = chain(4)
    return replayed(replace(tape.with_costs([op.seconds * size for op in tape.ops]), batch_size=size))


def test_a_free_exchange_gives_the_number_of_devices():
    fast = replace(LINKED, device_link_bytes_per_second=1e12)
    for devices in (1, 2, 4):
        assert speedup(8, devices, plan_at, fast)[0] == pytest.approx(devices, rel=1e-6)
    assert speedup(9, 2, plan_at, fast)[0] == pytest.approx(9 / 5, rel=1e-6), "the larger share decides"


def test_a_slow_exchange_costs_its_exposed_part():
    one = sum(op.seconds for op in chain(4).ops) * 8
    ratio, many = speedup(8, 2, plan_at, replace(LINKED, device_link_bytes_per_second=1.0))
    assert many.exposed_seconds > 0 and ratio == one / (one / 2 + many.exposed_seconds) < 2


def test_a_batch_is_not_shared_among_more_devices_than_samples():
    assert [share_of(10, d) for d in (1, 2, 3, 4, 10)] == [10, 5, 4, 3, 1]
    with pytest.raises(ValueError, match="not shared"):
        share_of(3, 4)
