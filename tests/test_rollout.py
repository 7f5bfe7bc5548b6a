"""Plays: what a player believes against checker, simulator and a symbolic machine; recomputes, releases and refusals by hand."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Machine
from tapes import MAP, SCALAR, TOYS, WEIGHT, TapeBuilder, chain, random_tape, skip

from vramlab.check import check_schedule
from vramlab.device import DeviceProfile
from vramlab.errors import PlanInfeasible, ScheduleError
from vramlab.liveness import lower_bound_bytes, replay_schedule
from vramlab.planner import UNLIMITED, Budget
from vramlab.player import ON_HOST, Player
from vramlab.rollout import Action, Release, Rollout, RolloutPlanner, Stuck, fixed_plan
from vramlab.schedule import Compute, Free, FreeHost, Offload, Prefetch, Recompute, Wait
from vramlab.simulate import simulate
from vramlab.tape import Phase, Role, Tape


def link(seconds_per_map: float = 1.0, *, latency: float = 0.0, is_full_duplex: bool = True) -> DeviceProfile:
    rate = MAP / seconds_per_map
    return DeviceProfile(name="link", memory_bytes=10**6, flops_per_second=1, flops_efficiency=1, memory_bytes_per_second=1,
                         h2d_bytes_per_second=rate, d2h_bytes_per_second=rate, copy_latency_seconds=latency, is_full_duplex=is_full_duplex)


class Oldest:
    """Releases the candidate made first, always in the same way, and prefetches nothing."""

    def __init__(self, action: Action) -> None:
        self.action = action

    def release(self, candidates: np.ndarray, rollout: Rollout) -> Release | None:
        is_possible = rollout.can_offload if self.action is Action.SWAP else rollout.can_recompute
        return next((Release(int(s), self.action) for s in candidates if is_possible(int(s))), None)

    def prefetch(self, rollout: Rollout) -> list[int]:
        return []


class Whim:
    """Releases and prefetches at random whatever it may."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def release(self, candidates: np.ndarray, rollout: Rollout) -> Release | None:
        ways = [Release(int(s), Action.SWAP) for s in candidates if rollout.can_offload(int(s))]
        ways += [Release(int(s), Action.RECOMPUTE) for s in candidates if rollout.can_recompute(int(s))]
        return self.random.choice(ways) if ways else None

    def prefetch(self, rollout: Rollout) -> list[int]:
        return [s for s, where in enumerate(rollout.residency) if where is ON_HOST and self.random.random() < 0.4]


def play(tape: Tape, device_bytes: int, policy, device: DeviceProfile | None = None, host_bytes: int = UNLIMITED) -> Rollout:
    rollout = Rollout(tape, device or link(), Budget(device_bytes=device_bytes, host_bytes=host_bytes), policy)
    rollout.play()
    return rollout


def state_bytes(tape: Tape) -> int:
    return sum(s.nbytes for s in tape.storages if s.at_start)


# --- the player's beliefs ----------------------------------------------------------------------------------------------
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_any_policy_on_any_tape_gives_a_legal_schedule_and_knows_its_clock(seed):
    """Whatever a policy does: the checker accepts the schedule within the budget, the machine finds every value right, and the clock
    on which the policy decided is the simulator's to the last bit."""
    random = Random(seed)
    tape = random_tape(random, random.randint(1, 14)) if random.random() < 0.6 else TOYS[random.choice(sorted(TOYS))]()
    device = link(random.choice([0.1, 2, 20]), latency=random.choice([0, 0.5]), is_full_duplex=random.random() < 0.6)
    low, high = lower_bound_bytes(tape), check_schedule(tape, replay_schedule(tape)).peak_bytes
    budget = Budget(device_bytes=random.randint(low, max(low, high)), host_bytes=random.choice([UNLIMITED, random.randint(1, 3000)]))
    rollout = Rollout(tape, device, budget, Whim(random))
    try:
        rollout.play()
    except Stuck:
        return
    checked = check_schedule(tape, rollout.schedule(""), budget)
    assert simulate(checked, device).metrics.step_seconds == pytest.approx(rollout.clock_seconds, rel=1e-12)
    assert (rollout.live_bytes, rollout.host_bytes) == (sum(s.nbytes for s in tape.storages if s.at_end), 0)
    machine = Machine(tape)
    for instruction in checked.schedule.instructions:
        machine.step(instruction)
    machine.finish()


def test_most_plays_do_not_get_stuck():
    """The property above would hold for a rollout that always gives up."""
    stuck = 0
    for seed in range(200):
        random = Random(seed)
        tape = random_tape(random, 10)
        try:
            play(tape, check_schedule(tape, replay_schedule(tape)).peak_bytes, Whim(random))
        except Stuck:
            stuck += 1
    assert stuck == 0


def test_a_player_believes_what_the_checker_counts_after_every_instruction():
    """chain(2), every kind of instruction once, no offload moved back: act k is instruction k."""
    tape = chain(2)
    player = Player(tape, link(2.0))
    (x0,), (x1,) = tape.creates[0], tape.creates[1]
    one, dx1, dx0 = tape.creates[3][0], tape.creates[4][0], tape.tensors[tape.ops[5].outputs[0]].storage
    acts = [(player.compute, 0), (player.compute, 1), (player.offload, x0), (player.wait, x0), (player.free, x0), (player.prefetch, x0),
            (player.compute, 2), (player.wait, x0), (player.free, x1), (player.recompute, 1), (player.free_host, x0), (player.free, x1),
            (player.compute, 3), (player.compute, 4), (player.free, one), (player.compute, 5), (player.free, dx1),
            (player.compute, 6, tape.ops[6].takeover[1]), (player.compute, 7), (player.free, dx0), (player.free, x0),
            (player.compute, 8, tape.ops[8].takeover[1])]
    believed = []
    for act, *operands in acts:
        act(*operands)
        believed.append((player.live_bytes, player.host_bytes, player.clock_seconds))
    checked = check_schedule(tape, player.schedule(""))
    assert [live for live, _, _ in believed] == checked.live_bytes.tolist()
    assert [host for _, host, _ in believed] == checked.host_bytes.tolist()
    assert believed[-1][2] == simulate(checked, link(2.0)).metrics.step_seconds


# --- overlap -----------------------------------------------------------------------------------------------------------
def test_an_offload_starts_right_after_the_last_use():
    """Decided after op 2, started after op 1, which read the map last: of its 2 s only 1 is left to wait for."""
    tape = chain(3)
    player = Player(tape, link(2.0))
    for op in range(3):
        player.compute(op)
    (first,) = tape.creates[0]
    player.offload(first)
    player.wait(first)
    assert player.clock_seconds == 4.0
    assert player.schedule("").instructions == (Compute(0), Compute(1), Offload(first), Compute(2), Wait(first))


def test_a_second_offload_queues_behind_the_first():
    """The engine is taken in the order of the list: the older map is released later, and may not overtake."""
    tape = chain(4)
    player = Player(tape, link(2.0))
    for op in range(4):
        player.compute(op)
    (first,), (second,) = tape.creates[0], tape.creates[1]
    player.offload(second)  # last used by op 2, which ends at 3 s: its copy takes from 3 s to 5 s
    player.offload(first)  # last used by op 1, but after the other in the list: from 5 s to 7 s
    player.wait(first)
    assert player.clock_seconds == 7.0
    assert player.schedule("").instructions == (
        Compute(0), Compute(1), Compute(2), Offload(second), Offload(first), Compute(3), Wait(first))


def test_half_duplex_copies_keep_their_order():
    """With one engine an offload may not move in front of a prefetch that is already planned."""
    tape = chain(4)
    player = Player(tape, link(1.0, is_full_duplex=False))
    for op in range(3):
        player.compute(op)
    (first,), (second,) = tape.creates[0], tape.creates[1]
    for act in (player.offload, player.wait, player.free, player.prefetch):
        act(first)
    player.offload(second)
    player.wait(second)
    assert player.schedule("").instructions[-3:] == (Prefetch(first), Offload(second), Wait(second))
    assert player.clock_seconds == 5.0  # 3 s of ops, the way out hidden from 2 s on; then 1 s back and 1 s out


def test_a_full_host_holds_an_offload_back():
    """Room for one map on the host: the second copy cannot start before the first one's host copy is gone."""
    tape = chain(4)
    player = Player(tape, link(0.5), Budget(device_bytes=UNLIMITED, host_bytes=MAP))
    for op in range(3):
        player.compute(op)
    (first,), (second,) = tape.creates[0], tape.creates[1]
    player.offload(first)
    player.wait(first)
    assert not player.can_offload(second)
    player.free_host(first)
    player.offload(second)
    assert player.schedule("").instructions[-3:] == (Wait(first), FreeHost(first), Offload(second))


# --- recompute ---------------------------------------------------------------------------------------------------------
def test_what_was_dropped_is_recomputed_from_what_is_there():
    """chain(3) with room for three maps: the last layer's backward needs its map and two gradients, so the first map makes room, and
    is computed again for the backward that reads it."""
    tape = chain(3)
    (x0,), (x1,), (x2,), (loss,) = (tape.creates[op] for op in range(4))
    rollout = play(tape, state_bytes(tape) + 3 * MAP + 3 * WEIGHT + SCALAR, Oldest(Action.RECOMPUTE))
    runs = [i for i in rollout.schedule("").instructions if isinstance(i, Recompute)]
    assert runs == [Recompute(0)]
    freed = [i.storage for i in rollout.schedule("").instructions if isinstance(i, Free)]
    assert freed.count(x0) == 2 and freed.count(x1) == 1 and freed.count(x2) == 1 and loss not in freed


def test_a_recompute_frees_what_only_it_needed():
    """In-place relus: the map before the relu is needed to recompute the one after it, and is taken over again."""
    tape = TOYS["inplace"]()
    low = lower_bound_bytes(tape)
    rollout = play(tape, low + WEIGHT, Oldest(Action.RECOMPUTE))
    again = [i for i in rollout.schedule("").instructions if isinstance(i, Recompute)]
    assert again and all(i.reuse is not None for i in again if "relu" in tape.ops[i.op].target)
    assert check_schedule(tape, rollout.schedule(""), Budget(device_bytes=low + WEIGHT)).live_bytes[-1] == sum(
        s.nbytes for s in tape.storages if s.at_end)


def test_state_that_will_be_overwritten_ends_recomputing():
    """a is made from w; op 1 overwrites w; a is needed after that. It cannot be dropped for a recompute, though b, needed before, can."""
    tape = TapeBuilder()
    w = tape.state("w", 10, Role.BUFFER)
    a, b, loss = tape.temporary(100), tape.temporary(100), tape.temporary(4, at_end=True)
    tape.call("aten.relu.default", [w], [a])
    tape.call("aten.relu.default", [w], [b])
    tape.call("aten.add_.Tensor", [w, b], [w], mutates=[w])
    tape.call("aten.mean.default", [a], [loss])
    built = tape.build(loss)
    player = Player(built, link())
    player.compute(0)
    player.compute(1)
    assert not player.can_recompute(tape.storage_of(a)) and player.can_recompute(tape.storage_of(b))


def test_inputs_of_a_waiting_op_leave_last():
    """A policy that would take the waiting op's own input first is only offered it when nothing else is left."""
    seen: list[set[int]] = []

    class Watching(Oldest):
        def release(self, candidates, rollout):
            seen.append({int(s) for s in candidates} & set(rollout.tape.reads[rollout.next_op]))
            return super().release(candidates, rollout)

    tape = skip()
    bound = lower_bound_bytes(tape)
    play(tape, bound + MAP, Watching(Action.SWAP))
    assert seen and not any(seen)


# --- the budget --------------------------------------------------------------------------------------------------------
def planner(action: Action) -> RolloutPlanner:
    return RolloutPlanner(lambda *step: Oldest(action), method="uid", name="oldest")


@pytest.mark.parametrize("toy", ["chain", "long_chain", "skip", "diamond", "inplace"])
@pytest.mark.parametrize("action", Action)
def test_the_smallest_budget_is_the_smallest(toy, action):
    """Against every budget in steps of ten bytes."""
    tape = TOYS[toy]()
    peak = check_schedule(tape, replay_schedule(tape)).peak_bytes
    reachable = []
    for device_bytes in range(lower_bound_bytes(tape), peak + 10, 10):
        try:
            play(tape, device_bytes, Oldest(action))
            reachable.append(device_bytes)
        except Stuck:
            continue
    with pytest.raises(PlanInfeasible) as refusal:
        planner(action).plan(tape, link(), Budget(device_bytes=lower_bound_bytes(tape) - 1))
    assert refusal.value.smallest_bytes <= min(reachable) * 1.01 + 10
    planner(action).plan(tape, link(), Budget(device_bytes=refusal.value.smallest_bytes))


def test_a_refusal_names_the_op_that_binds():
    """Room for the state and one map: the second convolution, which needs two, gets stuck first. What binds is the first backward that
    reads a map and a gradient and makes two gradients: no other op needs more."""
    tape = chain(3)
    with pytest.raises(PlanInfeasible) as refusal:
        planner(Action.SWAP).plan(tape, link(), Budget(device_bytes=state_bytes(tape) + MAP))
    assert refusal.value.op == "#6 aten.convolution_backward.default (conv2)" and str(refusal.value).endswith("(conv2) binds")
    assert "oldest" in str(refusal.value) and refusal.value.budget_bytes == state_bytes(tape) + MAP


def test_what_binds_is_the_largest_working_set_and_not_the_first_op_that_fills_the_device():
    """One backward op has a workspace of a map. What else is kept fills that map at other ops too, from the forward phase on."""
    tape = chain(6)
    at = next(op.id for op in tape.ops if op.layer == "conv3" and op.phase is Phase.BACKWARD)
    tape = replace(tape, ops=tuple(replace(op, workspace_bytes=MAP) if op.id == at else op for op in tape.ops))
    with pytest.raises(PlanInfeasible) as refusal:
        planner(Action.SWAP).plan(tape, link(), Budget(device_bytes=state_bytes(tape) + MAP))
    smallest = check_schedule(tape, planner(Action.SWAP).plan(tape, link(), Budget(device_bytes=refusal.value.smallest_bytes)))
    filled = [i.op for i, b in zip(smallest.schedule.instructions, smallest.inner_peak_bytes) if isinstance(i, Compute) and
              b == smallest.peak_bytes]
    assert filled[0] < at and refusal.value.op == f"#{at} aten.convolution_backward.default (conv3)"


def test_a_refusal_without_a_search_names_where_it_got_stuck():
    tape = chain(3)
    with pytest.raises(PlanInfeasible) as refusal:
        planner(Action.SWAP).plan(tape, link(), Budget(device_bytes=state_bytes(tape) + MAP, wants_smallest=False))
    assert refusal.value.op == "#1 aten.convolution.default (conv1)"
    assert str(refusal.value).endswith("it got stuck at #1 aten.convolution.default (conv1)") and "binds" not in str(refusal.value)


def test_a_budget_below_the_state_is_refused():
    tape = chain(3)
    with pytest.raises(Stuck):
        play(tape, state_bytes(tape) - 1, Oldest(Action.SWAP))


def test_the_search_can_be_left_out():
    with pytest.raises(PlanInfeasible) as refusal:
        planner(Action.SWAP).plan(chain(3), link(), Budget(device_bytes=1, wants_smallest=False))
    assert refusal.value.smallest_bytes is None


def test_thrashing_ends():
    """Every map leaves as soon as it may, and comes back by recompute: hopeless on a long chain, and given up in time."""
    tape = chain(60)
    with pytest.raises(Stuck):
        play(tape, lower_bound_bytes(tape), Oldest(Action.RECOMPUTE))


def test_prefetches_that_are_in_the_way_are_given_up():
    """Everything swapped comes back at once, wanted or not; where that leaves no room the copy is waited for and dropped again."""
    class Eager(Oldest):
        def prefetch(self, rollout):
            return [s for s, where in enumerate(rollout.residency) if where is ON_HOST]

    tape = chain(8)
    bound = lower_bound_bytes(tape)
    instructions = play(tape, bound + MAP, Eager(Action.SWAP)).schedule("").instructions
    assert sum(isinstance(i, Prefetch) for i in instructions) > sum(isinstance(i, Offload) for i in instructions)


@pytest.mark.parametrize("answer", [Release(0, Action.SWAP), Release(10**6, Action.SWAP)])
def test_an_impossible_answer_of_a_policy_is_refused(answer):
    class Broken(Oldest):
        def release(self, candidates, rollout):
            return answer

    tape = chain(3)
    with pytest.raises(ValueError, match="not possible"):
        play(tape, lower_bound_bytes(tape), Broken(Action.SWAP))


def test_a_fixed_plan_is_refused_below_its_peak():
    tape = chain(3)
    replay = replay_schedule(tape)
    peak = check_schedule(tape, replay).peak_bytes
    assert fixed_plan(tape, replay, Budget(device_bytes=peak), "fixed") == replay
    with pytest.raises(PlanInfeasible) as refusal:
        fixed_plan(tape, replay, Budget(device_bytes=peak - 1), "fixed")
    assert refusal.value.smallest_bytes == peak and "convolution_backward" in refusal.value.op


def test_the_host_budget_binds_too():
    tape = chain(12)
    budget = state_bytes(tape) + 6 * MAP
    assert play(tape, budget, Oldest(Action.SWAP)).live_bytes
    with pytest.raises(Stuck):
        play(tape, budget, Oldest(Action.SWAP), host_bytes=2 * MAP)


# --- what policies may ask -----------------------------------------------------------------------------------------------
def test_forecast_is_the_plain_profile_less_what_is_away():
    """Against the checker's count of a plain run, with one map away until the op that needs it."""
    tape = chain(4)
    plain = check_schedule(tape, replay_schedule(tape))
    inner = [int(b) for b, i in zip(plain.inner_peak_bytes, plain.schedule.instructions) if isinstance(i, Compute)]
    rollout = Rollout(tape, link(), Budget(device_bytes=UNLIMITED), Oldest(Action.SWAP))
    for op in range(3):
        rollout.compute(op)
    end = len(tape.ops)
    assert rollout.forecast_bytes(end).tolist() == inner[3:]
    (first,) = tape.creates[0]
    needed_at = int(rollout.next_need[first])
    rollout.free(first)
    assert rollout.forecast_bytes(end).tolist() == [b - MAP * (op < needed_at) for op, b in enumerate(inner)][3:]


def test_the_checker_catches_a_player_that_forgets():
    """Negative control for the property above: a schedule with one instruction left out is refused."""
    tape = chain(4)
    rollout = play(tape, lower_bound_bytes(tape) + MAP, Oldest(Action.SWAP))
    whole = rollout.schedule("")
    for k in range(len(whole.instructions)):
        with pytest.raises(ScheduleError):
            check_schedule(tape, type(whole)(whole.instructions[:k] + whole.instructions[k + 1:], whole.tape_digest),
                           rollout.budget)
