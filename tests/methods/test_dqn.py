"""The learning method: its environment, its network, its training, and its plans against all plans there are."""

from __future__ import annotations

import heapq
import sys

import pytest
from contract import DEVICE, plain_peak
from tapes import TOYS, StepBuilder

from vramlab.check import check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.device import DeviceProfile
from vramlab.errors import PlanInfeasible
from vramlab.planner import Budget
from vramlab.simulate import simulate
from vramlab.tape import Tape

METHOD = Library([built_in_collection()]).method("dqn")
CODE = METHOD.load()
ENVIRONMENT = sys.modules[f"{CODE.__package__}.environment"]
NETWORK = sys.modules[f"{CODE.__package__}.network"]
PLAY = sys.modules[f"{CODE.__package__}.play"]


def step_seconds(tape: Tape, device_bytes: int, **options) -> float:
    """Simulated time of the plan."""
    budget = Budget(device_bytes=device_bytes)
    schedule = METHOD.build(**options).plan(tape, DEVICE, budget)
    return simulate(check_schedule(tape, schedule, budget), DEVICE).metrics.step_seconds


# --- against every plan there is ------------------------------------------------------------------------------------------
class Exhaustive:
    """The fastest step within a budget: Dijkstra's search over all orders of computing, recomputing, copying and dropping maps.

    Knows tape and device only. A state is where each map is, when its copy ends and when each engine is free, all relative to now.
    Only storages of at least `small` bytes move, and those that the step keeps stay.
    """

    def __init__(self, tape: Tape, device: DeviceProfile, budget: int, small: int = 500) -> None:
        self.tape, self.device, self.budget = tape, device, budget
        self.maps = [s.id for s in tape.storages if s.nbytes >= small and not s.at_start and not s.at_end]
        self.last = {s: max([op.id for op in tape.ops if s in tape.reads[op.id]], default=tape.producer[s]) for s in self.maps}
        self.rest = self._bytes_of_the_rest()

    def _bytes_of_the_rest(self) -> list[int]:
        """Per op: what it holds beside the maps while it runs."""
        tape, found = self.tape, []
        last = {s.id: max([op.id for op in tape.ops if s.id in {*tape.reads[op.id], *tape.creates[op.id], *op.mutates}], default=-1)
                for s in tape.storages}
        for op in tape.ops:
            live = [s for s in tape.storages if s.id not in self.maps
                    and (s.at_start or tape.producer[s.id] <= op.id) and (s.at_end or last[s.id] >= op.id)]
            taken = op.takeover and op.takeover[1]
            overlap = tape.storages[taken].nbytes if taken is not None and taken not in self.maps and last[taken] == op.id else 0
            found.append(sum(s.nbytes for s in live) - overlap + op.workspace_bytes)
        return found

    def fastest(self) -> float:
        """Seconds; infinite where the budget cannot be met."""
        start = (0, (("absent", 0.0),) * len(self.maps), 0.0, 0.0)  # next op; residency and copy left; engines left: out, in
        best, queue, count = {start: 0.0}, [(0.0, 0, start)], 0
        while queue:
            clock, _, state = heapq.heappop(queue)
            if clock > best[state]:
                continue
            if state[0] == len(self.tape.ops):
                return clock
            for then, seconds in self.moves(state):
                if clock + seconds < best.get(then, float("inf")):
                    best[then] = clock + seconds
                    count += 1
                    heapq.heappush(queue, (clock + seconds, count, then))
        return float("inf")

    def moves(self, state):
        """Every state that one instruction leads to, and the seconds it takes."""
        op, maps, out, back = state
        for i, (residency, left) in enumerate(maps):
            s, nbytes = self.maps[i], self.tape.storages[self.maps[i]].nbytes
            if residency in ("resident", "both"):
                yield (op, self._with(maps, i, "on_host" if residency == "both" else "absent"), out, back), 0.0
            if residency == "resident" and self.last[s] >= op:
                end = out + self.device.copy_seconds(nbytes, to_host=True)
                yield (op, self._with(maps, i, "offloading", end), end, back), 0.0
            if residency == "on_host" and self._fits(maps, nbytes, op):
                end = back + self.device.copy_seconds(nbytes, to_host=False)
                yield (op, self._with(maps, i, "prefetching", end), out, end), 0.0
            if residency in ("offloading", "prefetching"):
                op_, later, *engines = self._later(state, left)
                yield (op_, self._with(later, i, "both"), *engines), left
            made_by = self.tape.producer[s]
            if residency == "absent" and made_by < op and self.last[s] >= op and (then := self._run(state, made_by, is_first=False)):
                yield then, self.tape.ops[made_by].seconds
        if then := self._run(state, op, is_first=True):
            yield then, self.tape.ops[op].seconds

    def _run(self, state, op: int, is_first: bool):
        """The state after a run of an op, None where an input is away or it does not fit."""
        at, maps, *engines = state
        where = dict(zip(self.maps, maps))
        if any(s in where and where[s][0] not in ("resident", "offloading", "both") for s in self.tape.reads[op]):
            return None
        made = [s for s in self.tape.creates[op] if s in where]
        taken = self.tape.ops[op].takeover and self.tape.ops[op].takeover[1]
        is_over = bool(made) and taken in where and where[taken][0] == "resident" and self.last[taken] <= (op if is_first else at - 1)
        new = sum(self.tape.storages[s].nbytes for s in made) - (self.tape.storages[taken].nbytes if is_over else 0)
        if not self._fits(maps, new, at):
            return None
        for s in made:
            maps = self._with(maps, self.maps.index(s), "resident")
        if is_over:
            maps = self._with(maps, self.maps.index(taken), "absent")
        at, maps, *engines = self._later((at, maps, *engines), self.tape.ops[op].seconds)
        if is_first:
            dead = [self.last[s] <= op and entry[1] == 0.0 for s, entry in zip(self.maps, maps)]
            maps = tuple(("absent", 0.0) if is_dead else entry for is_dead, entry in zip(dead, maps))
        return at + is_first, maps, *engines

    def _later(self, state, seconds: float):
        op, maps, *engines = state
        moved = tuple((residency, max(0.0, round(left - seconds, 9))) for residency, left in maps)
        return op, moved, *(max(0.0, round(left - seconds, 9)) for left in engines)

    def _fits(self, maps, nbytes: int, op: int) -> bool:
        held = sum(self.tape.storages[s].nbytes for s, (residency, _) in zip(self.maps, maps) if residency not in ("absent", "on_host"))
        return held + nbytes + self.rest[min(op, len(self.rest) - 1)] <= self.budget

    @staticmethod
    def _with(maps, i: int, residency: str, left: float = 0.0):
        return (*maps[:i], (residency, left), *maps[i + 1:])


def two_convolutions_and_relu() -> Tape:
    step = StepBuilder()
    return step.finish(step.relu(step.convolution(step.convolution(step.input))))


def squares() -> Tape:
    step = StepBuilder()
    return step.finish(step.matmul_with_itself(step.matmul_with_itself(step.relu(step.convolution(step.input)))))


SMALL = {"chain": TOYS["chain"], "two_convolutions_and_relu": two_convolutions_and_relu, "squares": squares}


@pytest.mark.parametrize("name", SMALL)
def test_small_steps_are_within_5_percent_of_the_fastest_plan(name):
    tape = SMALL[name]()
    assert len(tape.ops) <= 12
    peak, judged = plain_peak(tape), 0
    for share in (1.0, 0.9, 0.8, 0.7, 0.6):
        budget = int(share * peak)
        try:
            seconds = step_seconds(tape, budget)
        except PlanInfeasible:
            continue
        fastest = Exhaustive(tape, DEVICE, budget).fastest()
        assert fastest <= seconds * (1 + 1e-9), "the search is not exhaustive"
        assert seconds <= 1.05 * fastest, f"{seconds} s at {budget} bytes, {fastest} s are possible"
        judged += seconds > sum(op.seconds for op in tape.ops)
    assert judged, "no budget of these presses"
