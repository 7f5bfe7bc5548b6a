"""DELTA: the filter and the director against naive rewrites, prefetch against a timeline written by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random

import pytest
from contract import DEVICE, plain_peak
from tapes import MAP, TOYS, StepBuilder, TapeBuilder, chain

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.device import DeviceProfile
from vramlab.errors import PlanInfeasible
from vramlab.liveness import lower_bound_bytes
from vramlab.planner import UNLIMITED, Budget
from vramlab.rollout import Rollout
from vramlab.schedule import Compute, Free, FreeHost, Offload, Prefetch, Recompute, Wait
from vramlab.simulate import simulate
from vramlab.tape import Phase, Role, Tape

METHOD = Library([built_in_collection()]).method("delta")
PACKAGE = METHOD.load().__package__
method, director = METHOD.load(), sys.modules[f"{PACKAGE}.director"]


def plan(tape: Tape, device_bytes: int, device: DeviceProfile = DEVICE, host_bytes: int = UNLIMITED, **options) -> CheckedSchedule:
    budget = Budget(device_bytes=device_bytes, host_bytes=host_bytes)
    return check_schedule(tape, METHOD.build(**options).plan(tape, device, budget), budget)


def uneven(random: Random, layers: int = 12) -> Tape:
    """A chain of maps of any size and ops of any length; the backward reads the maps in reverse."""
    tape = TapeBuilder()
    maps = [tape.state("x", 50, Role.INPUT)]
    for _ in range(layers):
        maps.append(tape.temporary(random.randint(20, 400), Role.ACTIVATION))
        tape.call("aten.relu.default", maps[-2:-1], maps[-1:], seconds=random.uniform(0.1, 4))
    loss = tape.temporary(4, at_end=True)
    tape.call("aten.mean.default", maps[-1:], [loss])
    gradient = loss
    for x in reversed(maps[:-1]):
        inputs = [gradient, x]
        gradient = tape.temporary(tape.storages[tape.storage_of(x)].nbytes)
        tape.call("aten.relu_backward.default", inputs, [gradient], phase=Phase.BACKWARD, seconds=random.uniform(0.1, 4))
    return tape.build(loss)


# --- filter ----------------------------------------------------------------------------------------------------------
def naive_victims(checked: CheckedSchedule, device: DeviceProfile) -> list[tuple[int, int]]:
    """(what left, what should have left) of each release, from the finished schedule alone: the heaviest of bytes x staleness."""
    tape, trace = checked.tape, simulate(checked, device)
    instructions = checked.schedule.instructions
    last_need = {s: op.id for op in tape.ops for s in tape.reads[op.id]}
    there, used_at, now, done = set(), {}, 0.0, -1
    found = []
    for k, i in enumerate(instructions):
        if isinstance(i, Compute | Wait):
            now = max(now, trace.end_seconds[k])
        if isinstance(i, Compute):
            done = i.op
            there |= set(tape.creates[i.op])
            used_at |= dict.fromkeys((*tape.reads[i.op], *tape.creates[i.op]), now)
        if isinstance(i, Wait) and isinstance(instructions[k + 1], Free):
            continue  # the way out: the victim is judged where it is freed, at the time when it was chosen
        if isinstance(i, Prefetch):
            there.add(i.storage)
        if isinstance(i, Free) and i.storage in there:
            if last_need.get(i.storage, -1) > done:
                next_op = next(j.op for j in instructions[k:] if isinstance(j, Compute))
                chosen_at = trace.start_seconds[k - 1] if isinstance(instructions[k - 1], Wait) else now
                stay = set(tape.reads[next_op])
                weight = {s: tape.storages[s].nbytes * max(chosen_at - used_at[s], 1e-9) for s in sorted(there - stay)}
                found.append((i.storage, max(weight, key=weight.get)))
            there.discard(i.storage)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_filter_takes_the_biggest_and_stalest(seed):
    """Swap only and without prefetch every release shows in the schedule; each is what a naive reading of it says."""
    tape = uneven(Random(seed))
    low, high = lower_bound_bytes(tape), plain_peak(tape)
    checked = plan(tape, low + (high - low) // 4, action="swap-only", prefetch_window=0, small_tensor_switch=False)
    victims = naive_victims(checked, DEVICE)
    assert len(victims) >= 3 and all(left == expected for left, expected in victims)


def test_the_naive_reading_can_tell_another_filter():
    """Negative control: the same check on plans that release the smallest and freshest."""
    class Wrong(method.Delta):
        def release(self, candidates, rollout):
            return super().release(self.filter.rank(candidates, rollout)[-1:], rollout)

    differing = 0
    for seed in range(5):
        tape = uneven(Random(seed))
        budget = Budget(device_bytes=(lower_bound_bytes(tape) + plain_peak(tape)) // 2)
        rollout = Rollout(tape, DEVICE, budget, Wrong(method.Options(action="swap-only", prefetch_window=0, small_tensor_switch=False)))
        rollout.play()
        differing += sum(a != b for a, b in naive_victims(check_schedule(tape, rollout.schedule(""), budget), DEVICE))
    assert differing > 5


def ab_size_stale(size: float, staleness: float) -> float:
    """The score of simrd's ablation without a cost: size and staleness count, the least goes."""
    return 1 / (size * staleness)


class AgainstSimrd(method.Delta):
    """Judges each release by simrd's formula, on what the schedule so far says of sizes and last accesses. Acceptance test A6."""

    def __init__(self, options, key=min) -> None:
        super().__init__(options)
        self.key, self.same, self.others = key, 0, 0

    def release(self, candidates, rollout):
        answer = super().release(candidates, rollout)
        tape, now, used_at = rollout.tape, 0.0, {}
        for i in rollout.schedule("").instructions:
            if not isinstance(i, Free):
                now += tape.ops[i.op].seconds
                used_at |= dict.fromkeys((*tape.reads[i.op], *tape.creates[i.op]), now)
        pools = [s for s in candidates.tolist() if rollout.can_recompute(s) and tape.ops[tape.producer[s]].phase is Phase.FORWARD]
        if answer is not None:
            victim = self.key(pools, key=lambda s: ab_size_stale(tape.storages[s].nbytes, max(now - used_at[s], 1e-9)))
            self.same, self.others = self.same + (victim == answer.storage), self.others + (victim != answer.storage)
        return answer


def against_simrd(seed: int, key) -> tuple[int, int]:
    tape = uneven(Random(seed))
    low, high = lower_bound_bytes(tape), plain_peak(tape)
    policy = AgainstSimrd(method.Options(action="recompute-only", prefetch_window=0, small_tensor_switch=False), key)
    Rollout(tape, DEVICE, Budget(device_bytes=low + (high - low) * 2 // 3), policy).play()
    return policy.same, policy.others


@pytest.mark.parametrize("seed", range(10))
def test_filter_equals_simrds_ablation_without_cost(seed):
    same, others = against_simrd(seed, min)
    assert same >= 1 and others == 0


def test_simrds_formula_can_tell_another_victim():
    """Negative control: the greatest score instead of the least."""
    assert sum(against_simrd(seed, max)[1] for seed in range(5)) > 5


def test_small_storages_leave_last():
    """An old map of 5 bytes and a fresh one of 2000: bytes x staleness takes the old one, the switch spares what is so small."""
    tape = TapeBuilder()
    x = tape.state("x", 4, Role.INPUT)
    small, big = tape.temporary(5, Role.ACTIVATION), tape.temporary(2000, Role.ACTIVATION)
    y, loss, end = tape.temporary(2000), tape.temporary(4, at_end=True), tape.temporary(4)
    for inputs, output, seconds in (([x], small, 1.0), ([x], loss, 3000.0), ([x], big, 1.0), ([x], y, 1.0), ([small, big], end, 1.0)):
        tape.call("aten.relu.default", inputs, [output], seconds=seconds)
    built = tape.build(loss)

    def first_to_leave(**options) -> int:
        return next(i.storage for i in plan(built, 2020, action="swap-only", **options).schedule.instructions if isinstance(i, Offload))

    assert first_to_leave() == tape.storage_of(big)
    assert first_to_leave(small_tensor_switch=False) == tape.storage_of(small)


# --- director --------------------------------------------------------------------------------------------------------
def play_until(tape: Tape, op: int, device: DeviceProfile = DEVICE) -> Rollout:
    """A rollout in which the first ops have run, by hand."""
    rollout = Rollout(tape, device, Budget(device_bytes=UNLIMITED), method.Delta(method.Options()))
    for k in range(op):
        rollout.compute(k)
    return rollout


def naive_recompute_seconds(tape: Tape, storage: int, absent: set[int]) -> float:
    """Recursively: the producer, and the producers of what it reads and is not there."""
    seen: dict[int, float] = {}

    def visit(s: int) -> None:
        op = tape.producer[s]
        if op not in seen:
            seen[op] = tape.ops[op].seconds
            for r in tape.reads[op]:
                if r in absent:
                    visit(r)

    visit(storage)
    return sum(seen.values())


@pytest.mark.parametrize("toy", ["long_chain", "skip", "buffer_writer", "multi_output"])
def test_recompute_cost_includes_the_absent_producers(toy):
    tape = TOYS[toy]()
    forward = [op.id for op in tape.ops if op.phase is Phase.FORWARD]
    for seed in range(10):
        rollout = play_until(tape, len(forward))
        made = [s for op in forward for s in tape.creates[op]]
        absent = set(Random(seed).sample(made, len(made) // 2))
        for s in sorted(absent):
            rollout.free(s)
        for s in set(made) - absent:
            assert rollout.recompute_seconds(s) == pytest.approx(naive_recompute_seconds(tape, s, absent))


def choose(rollout: Rollout, storage: int, **options) -> str | None:
    given = {"action": "director", "units_bug": False, "own_cost_only": False} | options
    return director.Director(**given).choose(storage, rollout)


def two_convolutions(seconds: float) -> Rollout:
    """chain(3) after its forward, with forward ops of this length. A map takes 1.25 s each way."""
    tape = chain(3)
    return play_until(tape.with_costs([seconds if op.phase is Phase.FORWARD else op.seconds for op in tape.ops]), 4)


def test_the_cheaper_action_is_taken_and_ties_go_to_swap():
    first_map = two_convolutions(1.0).tape.creates[0][0]
    assert choose(two_convolutions(2.4), first_map) == "recompute"
    assert choose(two_convolutions(2.6), first_map) == "swap"
    assert choose(two_convolutions(2.5), first_map) == "swap"


def test_absent_producers_turn_the_choice():
    """The second map costs one op while the first is there, two when it is not."""
    rollout = two_convolutions(2.0)
    first, second = rollout.tape.creates[0][0], rollout.tape.creates[1][0]
    assert choose(rollout, second) == "recompute"
    rollout.free(first)
    assert choose(rollout, second) == "swap"
    assert choose(rollout, second, own_cost_only=True) == "recompute"


def test_units_bug_favours_swap_a_thousandfold():
    rollout = two_convolutions(0.0024)
    first = rollout.tape.creates[0][0]
    assert choose(rollout, first) == "recompute" == choose(two_convolutions(0.0026), first)
    assert choose(rollout, first, units_bug=True) == "recompute"  # 2.4 s against 2.5 s
    assert choose(two_convolutions(0.0026), first, units_bug=True) == "swap"


def test_a_copy_on_the_host_halves_the_price_of_swapping():
    rollout = two_convolutions(2.0)
    first = rollout.tape.creates[0][0]
    rollout.offload(first)
    rollout.wait(first)
    assert choose(rollout, first) == "swap"


def test_gradients_in_flight_are_never_recomputed():
    tape = chain(3)
    rollout = play_until(tape, 6)
    gradient = tape.creates[5][0]
    assert tape.ops[5].phase is Phase.BACKWARD and rollout.can_recompute(gradient)
    assert choose(rollout, gradient) == "swap" and choose(rollout, gradient, action="recompute-only") is None


@pytest.mark.parametrize("action, expected", [("swap-only", "swap"), ("swap-first", "swap"), ("recompute-only", "recompute")])
def test_fixed_actions(action, expected):
    rollout = two_convolutions(1.0 if expected == "swap" else 9.0)
    assert choose(rollout, rollout.tape.creates[0][0], action=action) == expected


def test_a_full_host_leaves_recompute():
    """Host memory for one map: swap-first swaps one and recomputes the rest, swap-only refuses what it cannot reach."""
    tape = TOYS["long_chain"]()
    budget = (lower_bound_bytes(tape) + plain_peak(tape)) // 2
    mixed = plan(tape, budget, host_bytes=MAP, action="swap-first")
    assert mixed.peak_host_bytes == MAP and mixed.schedule.count(Recompute) > 0 and mixed.schedule.count(Offload) > 0
    with pytest.raises(PlanInfeasible):
        plan(tape, budget, host_bytes=MAP, action="swap-only")


def test_units_bug_explains_the_released_log():
    """Eight blocks of convolution (8 ms), BatchNorm and relu (1 ms each), 6 ms a map each way. In consistent units a map is cheaper to
    compute again than to move, unless what it comes from is gone too; with the bug not one is, as in the authors' log."""
    step = StepBuilder()
    x = step.input
    for _ in range(8):
        x = step.relu(step.batch_norm(step.convolution(x)), inplace=True)
    tape = step.finish(x)
    tape = tape.with_costs([0.008 if "convolution" in op.target else 0.001 for op in tape.ops])
    link = replace(DEVICE, h2d_bytes_per_second=MAP / 0.006, d2h_bytes_per_second=MAP / 0.006)
    budget = int(0.6 * plain_peak(tape))
    sound, bug = plan(tape, budget, link).schedule, plan(tape, budget, link, units_bug=True).schedule
    assert bug.count(Recompute) == 0 and bug.count(Offload) > 0
    assert sound.count(Recompute) > 0 and sound.count(Offload) < sound.count(Recompute) / 2


# --- prefetch and overlap --------------------------------------------------------------------------------------------
A, B, C, D, E, LOSS = range(1, 7)


def there_and_back() -> Tape:
    """x -> a -> b -> c -> d, then d and b -> e, then e and a -> loss. Ops of 1 s; a, b, c 100 bytes, the others 10."""
    tape = TapeBuilder()
    x = tape.state("x", 10, Role.INPUT)
    a, b, c = (tape.temporary(100, Role.ACTIVATION) for _ in range(3))
    d, e = tape.temporary(10), tape.temporary(10)
    loss = tape.temporary(10, at_end=True)
    for inputs, output in (([x], a), ([a], b), ([b], c), ([c], d), ([d, b], e), ([e, a], loss)):
        tape.call("aten.relu.default", inputs, [output])
    return tape.build(loss)


LINK = DeviceProfile(name="link", memory_bytes=10**6, flops_per_second=1, flops_efficiency=1, memory_bytes_per_second=1,
                     h2d_bytes_per_second=100, d2h_bytes_per_second=100, copy_latency_seconds=0)


def test_prefetch_by_hand():
    """Op 2 does not fit beside a and b: a leaves, from the end of its last use at 2 s on, and the step waits for it until 3 s. Op 3
    needs all there is. At 5 s, before op 4, a fits until its use, to the byte, and comes back while op 4 runs."""
    tape = there_and_back()
    checked = plan(tape, 230, LINK, action="swap-only")
    assert checked.schedule.instructions == (
        Compute(0), Compute(1), Offload(A), Wait(A), Free(A), Compute(2), Compute(3), Free(C),
        Prefetch(A), Compute(4), Free(B), Free(D), Wait(A), Compute(5), Free(A), FreeHost(A), Free(E))
    trace = simulate(checked, LINK)
    assert (trace.start_seconds[2], trace.end_seconds[2]) == (2, 3)  # Offload
    assert (trace.start_seconds[8], trace.end_seconds[8]) == (5, 6)  # Prefetch, beside Compute(4)
    assert trace.metrics.step_seconds == 7 and trace.metrics.stall_seconds == 1 and checked.peak_bytes == 230


@pytest.mark.parametrize("device_bytes, window", [(230, 0), (229, 5)])
def test_without_a_window_or_without_room_the_step_waits(device_bytes, window):
    """One byte less and a does not fit beside op 4: it comes back when op 5 needs it, one second later."""
    trace = simulate(plan(there_and_back(), device_bytes, LINK, action="swap-only", prefetch_window=window), LINK)
    assert trace.metrics.step_seconds == 8 and trace.metrics.stall_seconds == 2


def test_prefetch_costs_no_budget_and_saves_time():
    """On a longer chain, at several budgets: never slower than fetching on demand, never above the budget."""
    tape = TOYS["long_chain"]()
    faster = 0
    for share in (0.9, 0.8, 0.7, 0.6, 0.5):
        budget = int(share * plain_peak(tape))
        plans = [plan(tape, budget, action="swap-only", prefetch_window=window) for window in (5, 0)]
        ahead, on_demand = (simulate(checked, DEVICE).metrics.step_seconds for checked in plans)
        assert ahead <= on_demand
        faster += ahead < on_demand
    assert faster


# --- how low it gets -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("toy", TOYS)
def test_delta_reaches_close_to_the_lower_bound(toy):
    tape = TOYS[toy]()
    bound = lower_bound_bytes(tape)
    with pytest.raises(PlanInfeasible) as refusal:
        plan(tape, bound - 1)
    assert refusal.value.smallest_bytes <= 1.02 * bound + MAP


def test_the_answer_is_none_where_nobody_asks_for_the_smallest():
    with pytest.raises(PlanInfeasible) as refusal:
        METHOD.build().plan(chain(5), DEVICE, Budget(device_bytes=10, wants_smallest=False))
    assert refusal.value.smallest_bytes is None
