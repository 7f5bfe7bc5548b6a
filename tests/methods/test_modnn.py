"""moDNN: the lower bound is reached, the sub-batch is the largest that passes the window's test, algorithms use what is left."""

from __future__ import annotations

import importlib
from dataclasses import replace
from math import ceil

import pytest
from oracle import Machine
from tapes import MAP, TOYS, chain

from vramlab.check import check_schedule
from vramlab.device import DeviceProfile
from vramlab.errors import CaptureError, PlanInfeasible, Unsupported
from vramlab.liveness import lower_bound_bytes, replay_schedule
from vramlab.micro_batches import compose
from vramlab.planner import UNLIMITED, Budget
from vramlab.schedule import Compute, Offload, Recompute
from vramlab.simulate import simulate
from vramlab.tape import Role, Tape, Variant

modnn = importlib.import_module("methods.modnn.method")
sub_batch = importlib.import_module("methods.modnn.sub_batch")

DEVICE = DeviceProfile(name="toy", memory_bytes=10**6, flops_per_second=1, flops_efficiency=1, memory_bytes_per_second=1,
                       h2d_bytes_per_second=800, d2h_bytes_per_second=800, copy_latency_seconds=0)


def sized(size: int, layers: int = 4, optimizer: bool = False) -> Tape:
    """A chain whose maps and input grow with the batch: `size` samples of MAP bytes each."""
    tape = chain(layers, optimizer=optimizer)
    grown = {s.id for s in tape.storages if s.nbytes == MAP}
    storages = tuple(replace(s, nbytes=size * MAP) if s.id in grown else s for s in tape.storages)
    tensors = tuple(replace(t, shape=(size, MAP), strides=(MAP, 1)) if t.storage in grown else t for t in tape.tensors)
    return replace(tape, storages=storages, tensors=tensors, batch_size=size)


def composed(sizes: tuple[int, ...]) -> Tape:
    tapes = [sized(size, optimizer=True) for size in sizes]
    inputs = [t.id for t in tapes[0].tensors if tapes[0].storages[t.storage].role is Role.INPUT]
    return compose(tapes, inputs).tape


def plan(tape: Tape, nbytes: int, **options):
    return check_schedule(tape, modnn.build(**options).plan(tape, DEVICE, Budget(device_bytes=nbytes)), Budget(device_bytes=nbytes))


# --- the lower bound -------------------------------------------------------------------------------------------------------
CASES = {**TOYS, "three_passes": lambda: composed((2, 2, 1))}


@pytest.mark.parametrize("name", CASES)
def test_at_the_lower_bound_feasible_and_one_byte_below_refused(name: str):
    tape = CASES[name]()
    bound = lower_bound_bytes(tape)
    assert plan(tape, bound).peak_bytes <= bound
    with pytest.raises(PlanInfeasible) as refusal:
        plan(tape, bound - 1)
    assert (refusal.value.smallest_bytes, refusal.value.budget_bytes) == (bound, bound - 1)


def test_a_step_over_micro_batches_computes_what_a_plain_run_computes():
    tape = composed((2, 2, 1))
    peak = check_schedule(tape, replay_schedule(tape)).peak_bytes
    for share in (1.0, 0.9, 0.8):
        checked = plan(tape, max(int(share * peak), lower_bound_bytes(tape)))
        machine = Machine(tape)
        for instruction in checked.schedule.instructions:
            machine.step(instruction)
        machine.finish()


# --- transfers -------------------------------------------------------------------------------------------------------------
def test_nothing_is_computed_twice_and_data_of_farthest_next_use_leaves():
    """A chain: the first map is needed last."""
    tape = chain(6)
    checked = plan(tape, int(0.8 * check_schedule(tape, replay_schedule(tape)).peak_bytes))
    instructions = checked.schedule.instructions
    moved = [i.storage for i in instructions if isinstance(i, Offload) and tape.storages[i.storage].role is Role.ACTIVATION]
    assert not any(isinstance(i, Recompute) for i in instructions)
    assert moved and moved[0] == tape.creates[0][0] and moved == sorted(moved)


def test_on_a_fast_link_a_budget_costs_almost_nothing():
    tape = chain(12)
    fast = replace(DEVICE, h2d_bytes_per_second=10**4, d2h_bytes_per_second=10**4)
    budget = Budget(device_bytes=int(0.7 * check_schedule(tape, replay_schedule(tape)).peak_bytes))
    seconds = simulate(check_schedule(tape, modnn.build().plan(tape, fast, budget)), fast).metrics.step_seconds
    assert seconds <= 1.02 * sum(op.seconds for op in tape.ops)


def test_a_full_host_is_a_refusal():
    tape = chain(6)
    with pytest.raises(PlanInfeasible) as refusal:
        modnn.build().plan(tape, DEVICE, Budget(device_bytes=lower_bound_bytes(tape), host_bytes=10))
    assert refusal.value.smallest_bytes is None


# --- sub-batches (A13) -----------------------------------------------------------------------------------------------------
def window_by_hand(tape: Tape, share: float) -> int:
    """The sets themselves, window by window."""
    length = ceil(share * len(tape.ops))
    stays = {s.id for s in tape.storages if s.at_start or s.role is Role.GRADIENT}
    most = 0
    for first in range(len(tape.ops) - length + 1):
        ops = range(first, first + length)
        touched = stays.union(*({*tape.reads[i], *tape.ops[i].mutates, *tape.creates[i]} for i in ops))
        most = max(most, sum(tape.storages[s].nbytes for s in touched) + max(tape.ops[i].workspace_bytes for i in ops))
    return most


@pytest.mark.parametrize("share", [0.05, 0.15, 0.5, 1.0])
@pytest.mark.parametrize("name", TOYS)
def test_the_window_is_that_of_the_sets(name: str, share: float):
    tape = TOYS[name]()
    assert sub_batch.window_bytes(tape, share) == window_by_hand(tape, share)


def test_the_largest_divisor_that_passes_the_window_is_taken():
    batch = 12
    for budget in range(16_000, 110_000, 2_000):
        waiting = {size: (batch - size) * MAP for size in (1, 2, 3, 4, 6, 12)}
        passing = [size for size in waiting if window_by_hand(sized(size), 0.15) + waiting[size] <= budget]
        bounded = [size for size in range(1, 13) if lower_bound_bytes(sized(size)) + (batch - size) * MAP <= budget]
        expected = max(passing) if passing else max(bounded) if bounded else None
        assert sub_batch.sub_batch_size(sized, batch, budget, 0.15) == expected
        if expected is None:
            with pytest.raises(PlanInfeasible):
                modnn.build().micro_batches(sized, batch, Budget(device_bytes=budget))
        else:
            sizes = modnn.build().micro_batches(sized, batch, Budget(device_bytes=budget))
            assert sum(sizes) == batch and sizes[0] == expected


def test_a_batch_is_not_cut_where_the_second_gradient_of_a_large_weight_would_need_more():
    """From the second pass on a new gradient stands beside the one that it is added to."""
    def heavy(size: int) -> Tape:
        tape = sized(size)
        weights = ("conv0.weight", "conv0.weight.grad")
        return replace(tape, storages=tuple(replace(s, nbytes=100 * MAP) if s.name in weights else s for s in tape.storages))

    bound = lower_bound_bytes(heavy(8))
    assert bound + 90 * MAP < sub_batch.passes_bound_bytes(heavy(1))  # tests/test_step_passes.py holds this against real passes
    assert modnn.build().micro_batches(heavy, 8, Budget(device_bytes=bound)) == (8,)
    with pytest.raises(PlanInfeasible) as refusal:
        modnn.build().micro_batches(heavy, 8, Budget(device_bytes=bound - 1))
    assert refusal.value.smallest_bytes == bound


@pytest.mark.parametrize("least", [2, 3, 5])
def test_a_pass_has_no_fewer_samples_than_the_network_takes(least: int):
    """By every size that the network runs, and every rest of the batch: divisors by the window, the others by the lower bound."""
    def picky(size: int) -> Tape:
        if size < least:
            raise CaptureError("too few values a channel")
        return sized(size)

    batch, seen = 12, set()
    for budget in range(16_000, 110_000, 2_000):
        waiting = {size: (batch - size) * MAP for size in range(least, batch + 1)}
        passing = [s for s in waiting if batch % s == 0 and window_by_hand(sized(s), 0.15) + waiting[s] <= budget]
        bounded = [s for s in waiting if batch % s in (0, *waiting) and lower_bound_bytes(sized(s)) + waiting[s] <= budget]
        expected = max(passing) if passing else max(bounded) if bounded else None
        seen.add(expected)
        assert sub_batch.sub_batch_size(picky, batch, budget, 0.15) == expected
        sizes = () if expected is None else modnn.build().micro_batches(picky, batch, Budget(device_bytes=budget))
        assert all(size >= least for size in sizes)
        if expected is None:
            with pytest.raises(PlanInfeasible):
                modnn.build().micro_batches(picky, batch, Budget(device_bytes=budget))
    assert len(seen) > 3  # the budgets tell sizes apart


def test_what_fits_is_one_pass_and_the_option_switches_the_choice_off():
    assert modnn.build().micro_batches(sized, 8, Budget(device_bytes=UNLIMITED)) == (8,)
    assert modnn.build(sub_batches=False).micro_batches(sized, 8, Budget(device_bytes=1)) == (8,)


def test_sub_batches_go_below_what_transfers_alone_can_reach():
    whole, passes = sized(8, optimizer=True), composed((2,) * 4)
    assert lower_bound_bytes(passes) < lower_bound_bytes(whole)
    assert plan(passes, lower_bound_bytes(passes)).peak_bytes < lower_bound_bytes(whole)


# --- convolution algorithms --------------------------------------------------------------------------------------------------
def with_algorithms(workspace_bytes: int) -> Tape:
    """Each convolution takes 1 s by a fast algorithm with this workspace, 3 s by a lean one and 2 s by the library's choice."""
    tape = chain(4)
    tape = tape.with_costs([2.0 if "convolution" in op.target else 0.5 for op in tape.ops], [100 if "convolution" in op.target else 0
                                                                                          for op in tape.ops])
    choices = (Variant("fast", 1.0, workspace_bytes), Variant("lean", 3.0, 0))
    return tape.with_variants([choices if "convolution" in op.target else () for op in tape.ops])


def algorithms_of(checked) -> list[str | None]:
    tape = checked.tape
    return [i.variant for i in checked.schedule.instructions if isinstance(i, Compute) and tape.ops[i.op].variants]


def test_the_fastest_algorithm_where_there_is_room_and_the_leanest_at_the_bound():
    tape = with_algorithms(600)
    assert set(algorithms_of(plan(tape, UNLIMITED))) == {"fast"}
    bound = lower_bound_bytes(tape)
    at_bound = plan(tape, bound)
    assert at_bound.peak_bytes <= bound and "lean" in algorithms_of(at_bound)
    assert set(algorithms_of(plan(tape, UNLIMITED, algorithms=False))) == {None}
    with pytest.raises(PlanInfeasible):
        plan(tape, bound, algorithms=False)


def test_an_algorithm_is_not_bought_with_transfers_that_cost_more():
    """Where its workspace would push maps out over a slow link, a slower algorithm is taken."""
    tape = with_algorithms(2500)
    slow = replace(DEVICE, h2d_bytes_per_second=20, d2h_bytes_per_second=20)
    budget = Budget(device_bytes=check_schedule(tape, replay_schedule(tape)).peak_bytes)
    checked = check_schedule(tape, modnn.build().plan(tape, slow, budget), budget)
    metrics = simulate(checked, slow).metrics
    assert metrics.offloads == 0 and metrics.step_seconds <= sum(op.seconds for op in tape.ops)


def test_needs_are_asked_for():
    with pytest.raises(Unsupported, match="timings"):
        modnn.build().plan(chain().with_costs([0.0] * len(chain().ops)), DEVICE, Budget(device_bytes=UNLIMITED))
