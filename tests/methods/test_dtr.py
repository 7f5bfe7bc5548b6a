"""DTR: every choice against the formulas read off the schedule so far, the theorem's chain, groups by hand, thrash limits."""

from __future__ import annotations

import sys
from math import isqrt, sqrt
from random import Random

import numpy as np
import pytest
from contract import DEVICE, plain_peak
from tapes import TOYS, TapeBuilder

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.errors import PlanInfeasible
from vramlab.liveness import lower_bound_bytes
from vramlab.planner import UNLIMITED, Budget
from vramlab.rollout import Rollout, Stuck
from vramlab.schedule import Compute, Free, Offload, Prefetch, Recompute
from vramlab.tape import Phase, Role, Tape

METHOD = Library([built_in_collection()]).method("dtr")
method = METHOD.load()
heuristics, groups, evicted = (sys.modules[f"{method.__package__}.{name}"] for name in ("heuristics", "groups", "evicted"))
FORMULAS = ("dtr", "local", "lru", "size", "msps", "e-star")


def plan(tape: Tape, device_bytes: int, **options) -> CheckedSchedule:
    budget = Budget(device_bytes=device_bytes)
    return check_schedule(tape, METHOD.build(**options).plan(tape, DEVICE, budget), budget)


# --- every choice ------------------------------------------------------------------------------------------------------
class Situation:
    """What the instructions so far say: what is evicted, when each storage was used, what time it is."""

    def __init__(self, rollout: Rollout) -> None:
        tape = self.tape = rollout.tape
        self.now, there, made, self.used_at = 0.0, set(), set(), {}
        for i in rollout.schedule("").instructions:
            if isinstance(i, Free):
                there.discard(i.storage)
            else:
                self.now += tape.ops[i.op].seconds
                made |= set(tape.creates[i.op])
                there |= set(tape.creates[i.op])
                there.discard(i.reuse)
                self.used_at |= dict.fromkeys((*tape.reads[i.op], *tape.creates[i.op]), self.now)
        last = rollout.facts.recomputable_until
        self.absent = {s for s in made - there if last[tape.producer[s]] >= rollout.next_op}

    def needed_for(self, storage: int, seen: set[int]) -> set[int]:
        """Absent storages that have to be computed first, directly or not."""
        for s in self.tape.reads[self.tape.producer[storage]]:
            if s in self.absent and s not in seen:
                seen.add(s)
                self.needed_for(s, seen)
        return seen

    def waiting_for(self, storage: int) -> set[int]:
        """Absent storages that cannot be computed without this one: those that would need it, were it absent."""
        self.absent.add(storage)
        found = {s for s in self.absent - {storage} if storage in self.needed_for(s, set())}
        self.absent.discard(storage)
        return found

    def seconds(self, storages: set[int]) -> float:
        return sum(self.tape.ops[op].seconds for op in {self.tape.producer[s] for s in storages})

    def score(self, name: str, s: int) -> float:
        m, stale = self.tape.storages[s].nbytes, max(self.now - self.used_at[s], 1e-9)
        backward = self.needed_for(s, set())
        around = backward | self.waiting_for(s)
        own = self.tape.producer[s]
        return {"dtr": self.seconds(around | {s}) / (m * stale), "local": self.seconds({s}) / (m * stale), "lru": 1 / stale, "size": 1 / m,
                "msps": self.seconds(backward | {s}) / m, "e-star": float(len({self.tape.producer[x] for x in around} - {own}))}[name]


class Watched(method.Dtr):
    """Compares each choice with the formula `judge`."""

    def __init__(self, options, judge: str) -> None:
        super().__init__(options)
        self.judge, self.right, self.wrong = judge, 0, 0

    def release(self, candidates, rollout):
        answer = super().release(candidates, rollout)
        if answer is not None:
            situation = Situation(rollout)
            scores = {s: situation.score(self.judge, s) for s in candidates.tolist() if rollout.can_recompute(s)}
            is_right = scores[answer.storage] <= min(scores.values()) * (1 + 1e-9)
            self.right, self.wrong = self.right + is_right, self.wrong + (not is_right)
        return answer


def watched(tape: Tape, name: str, judge: str) -> tuple[int, int]:
    low, high = lower_bound_bytes(tape), plain_peak(tape)
    right = wrong = 0
    for share in (0.3, 0.6):
        policy = Watched(method.Options(heuristic=name, small_tensor_filter=False), judge)
        try:
            Rollout(tape, DEVICE, Budget(device_bytes=int(low + share * (high - low))), policy).play()
        except Stuck:
            pass  # the choices up to there count
        right, wrong = right + policy.right, wrong + policy.wrong
    return right, wrong


def uneven(random: Random, layers: int = 14) -> Tape:
    """A forward phase with skips, maps of any size, ops of any length; the backward reads the maps in reverse."""
    tape = TapeBuilder()
    maps = [tape.state("x", 50, Role.INPUT)]
    for _ in range(layers):
        maps.append(tape.temporary(random.randint(20, 400), Role.ACTIVATION))
        inputs = sorted({maps[-2], random.choice(maps[:-1])})
        tape.call("aten.relu.default", inputs, maps[-1:], seconds=random.uniform(0.1, 4))
    loss = gradient = tape.temporary(4, at_end=True)
    tape.call("aten.mean.default", maps[-1:], [loss])
    for x in reversed(maps[:-1]):
        inputs = [gradient, x]
        gradient = tape.temporary(tape.storages[tape.storage_of(x)].nbytes)
        tape.call("aten.relu_backward.default", inputs, [gradient], phase=Phase.BACKWARD, seconds=random.uniform(0.1, 4))
    return tape.build(loss)


@pytest.mark.parametrize("name", FORMULAS)
def test_every_eviction_is_the_formulas(name):
    tapes = [uneven(Random(seed)) for seed in range(5)] + [TOYS[toy]() for toy in ("long_chain", "skip", "multi_output", "buffer_writer")]
    counts = np.array([watched(tape, name, name) for tape in tapes])
    assert counts[:, 0].sum() > 40 and counts[:, 1].sum() == 0


@pytest.mark.parametrize("name", FORMULAS)
def test_the_formulas_tell_the_heuristics_apart(name):
    """Negative control: another heuristic's choices do not pass."""
    other = "size" if name in ("lru", "local", "dtr") else "lru"
    assert sum(watched(uneven(Random(seed)), other, name)[1] for seed in range(5)) > 5


# --- h_eq --------------------------------------------------------------------------------------------------------------
class Moment:
    """As much of a rollout as `Evicted` looks at: a chain of ops of 1, 2, 4, ... seconds, all run, some outputs absent."""

    def __init__(self, length: int) -> None:
        builder = TapeBuilder()
        maps = [builder.state("x", 8, Role.INPUT)]
        for k in range(length):
            maps.append(builder.temporary(8, at_end=k == length - 1))
            builder.call("aten.relu.default", maps[-2:-1], maps[-1:], seconds=float(2**k))
        self.tape = builder.build(maps[-1])
        self.rollout = Rollout(self.tape, DEVICE, Budget(device_bytes=UNLIMITED), method.Dtr(method.Options()))
        self.rollout.next_op = length
        self.rollout.is_on_device[:] = True

    def set(self, op: int, *, there: bool) -> None:
        self.rollout.is_on_device[self.tape.creates[op][0]] = there


def test_groups_grow_together_and_are_never_split():
    moment = Moment(6)
    found = groups.Groups(moment.rollout)

    def cost(op: int) -> float:
        found.update(moment.rollout)
        return found.cost(moment.tape.creates[op][0])

    assert cost(2) == 4  # c0
    moment.set(1, there=False)
    assert (cost(0), cost(2), cost(3)) == (1 + 2, 4 + 2, 8)
    moment.set(3, there=False)
    assert (cost(2), cost(4)) == (4 + 2 + 8, 16 + 8)  # two groups
    moment.set(2, there=False)
    assert (cost(0), cost(4)) == (1 + 14, 16 + 14)  # now one
    moment.set(2, there=True)
    # The exact neighbourhood of op 0 is op 1 alone; the group remembers op 3, which is the spurious link.
    assert (cost(0), cost(4), cost(2)) == (1 + 10, 16 + 10, 4 + 10)
    exact = heuristics.Exact(moment.rollout)
    exact.look(moment.rollout)
    assert exact.cost(moment.tape.creates[0][0]) == 1 + 2


# --- A8: the theorem's chain -------------------------------------------------------------------------------------------
def unit_chain(length: int) -> Tape:
    """N forward and N backward ops of one second over maps of one unit; backward op i reads a gradient and the map before layer i."""
    tape = TapeBuilder()
    maps = [tape.state("x", 0, Role.INPUT)]
    for _ in range(length):
        maps.append(tape.temporary(1, Role.ACTIVATION))
        tape.call("aten.relu.default", maps[-2:-1], maps[-1:])
    gradient = maps[-1]
    for x in reversed(maps[:-1]):
        inputs = [gradient, x]
        gradient = tape.temporary(1, at_end=x == maps[0])
        tape.call("aten.relu_backward.default", inputs, [gradient], phase=Phase.BACKWARD)
    return tape.build(gradient)


@pytest.mark.parametrize("name, most", [("e-star", 2.0), ("dtr", 2.0), ("eq", 3.0)])
def test_a_chain_within_two_roots_of_n_takes_linear_time(name, most):
    """Ops run over the 2 N of the plain step. Linear: bounded from N = 64 to 1024, and no longer rising."""
    ratios = []
    for length in (64, 256, 1024):
        checked = plan(unit_chain(length), 2 * isqrt(length), heuristic=name, recomputes_per_op=50, nested_recomputes=150)
        ratios.append(sum(isinstance(i, Compute | Recompute) for i in checked.schedule.instructions) / (2 * length))
    assert max(ratios) <= most and ratios[-1] <= 1.25 * ratios[0], ratios


# --- options -----------------------------------------------------------------------------------------------------------
def test_nothing_is_ever_swapped():
    tape = TOYS["skip"]()
    checked = plan(tape, (lower_bound_bytes(tape) + plain_peak(tape)) // 2)
    assert checked.schedule.count(Recompute) > 0
    assert not [i for i in checked.schedule.instructions if isinstance(i, Offload | Prefetch)]


def considered(tape: Tape, ops: int, **options) -> list[int]:
    """What a policy looks at once the first ops have run."""
    policy = method.Dtr(method.Options(**options))
    rollout = Rollout(tape, DEVICE, Budget(device_bytes=UNLIMITED), policy)
    for op in range(ops):
        rollout.compute(op)
    return policy._considered(np.flatnonzero(rollout.is_on_device & (rollout.facts.there_from >= 0)), rollout).tolist()


def test_a_sample_is_a_root_of_the_candidates():
    tape = unit_chain(100)
    every = considered(tape, 100)
    samples = [considered(tape, 100, sampling=True, seed=seed) for seed in range(20)]
    assert len(every) == 100 and all(len(set(sample)) == 10 and set(sample) <= set(every) for sample in samples)
    assert len({tuple(sample) for sample in samples}) == 20


def test_small_storages_are_looked_at_only_when_no_other_is_left():
    tape = TapeBuilder()
    x = tape.state("x", 4, Role.INPUT)
    outputs = [tape.temporary(5), tape.temporary(2000), tape.temporary(2000, at_end=True)]
    for y in outputs:
        tape.call("aten.relu.default", [x], [y])
    tape.call("aten.add.Tensor", outputs)
    built = tape.build(outputs[-1])
    small, *big = (built.creates[op][0] for op in range(3))
    assert considered(built, 3) == big
    assert considered(built, 3, small_tensor_filter=False) == [small, *big]
    policy = method.Dtr(method.Options())
    rollout = Rollout(built, DEVICE, Budget(device_bytes=UNLIMITED), policy)
    for op in range(3):
        rollout.compute(op)
    assert policy._considered(np.array([small]), rollout).tolist() == [small]


def test_the_limits_of_a_play_are_options():
    """What one recompute an op of the step cannot reach is reached with the default."""
    tape = unit_chain(64)
    low = {}
    for limit in (1, 6):
        with pytest.raises(PlanInfeasible) as refusal:
            plan(tape, 1, recomputes_per_op=limit)
        low[limit] = refusal.value.smallest_bytes
    assert low[6] < low[1] < 2 * sqrt(64)
    with pytest.raises(PlanInfeasible):
        plan(tape, low[6], recomputes_per_op=1)
