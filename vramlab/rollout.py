"""A policy that decides during the step becomes a planner: it is played on the simulated clock, and the play is the schedule.

Before each op of the tape the rollout brings back what the op needs (it recomputes what was dropped, recursively, and copies back
what was swapped out), asks the policy for storages to release until the op fits, and runs it. What the step no longer needs is
dropped at once. Memory is bounded *before* an op runs, never after it, so the budget holds at every instant:

    prefetches of the policy ─► inputs readable ─► release until the op fits ─► run ─► drop what is dead

What cannot fit, or thrashes, ends the play; the planner then searches the smallest budget that the policy does reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import numpy as np

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.device import DeviceProfile
from vramlab.errors import PlanInfeasible
from vramlab.liveness import floor_bytes, lower_bound_bytes
from vramlab.planner import UNLIMITED, Budget
from vramlab.player import ABSENT, BOTH, ON_HOST, PREFETCHING, Player
from vramlab.schedule import Compute, Recompute, Schedule
from vramlab.tape import Tape

# A play is given up when it has run this many recomputes an op of the tape, or recomputes nest this deep: it thrashes.
RECOMPUTES_PER_OP = 6
NESTED_RECOMPUTES = 12
# The search for the smallest reachable budget ends within this share of it.
SEARCH_PRECISION = 1 / 256


class Action(StrEnum):
    """How a storage leaves the device."""

    RECOMPUTE = "recompute"  # dropped; computed again when it is needed
    SWAP = "swap"  # copied to the host, where there is no copy yet, and dropped


@dataclass(frozen=True, slots=True)
class Release:
    """A policy's answer: this storage leaves the device in this way."""

    storage: int
    action: Action


class Policy(Protocol):
    """Decides during the step. One object plays one step."""

    def release(self, candidates: np.ndarray, rollout: Rollout) -> Release | None:
        """Which of the candidates (storage ids, ascending, at least one) to release next, and how; None when none can be.

        Called again until the bytes that the op needs are free. RECOMPUTE needs `rollout.can_recompute`, SWAP `rollout.can_offload`.
        """
        ...

    def prefetch(self, rollout: Rollout) -> Sequence[int]:
        """Storages on the host whose copy back shall start now, before op `rollout.next_op`; those that do not fit are passed over."""
        ...


class Stuck(Exception):
    """The play cannot go on within the budget. `op` is the op for which no room could be made."""

    def __init__(self, op: int) -> None:
        super().__init__(op)
        self.op = op


class Rollout(Player):
    """One step, played by one policy within one budget."""

    def __init__(self, tape: Tape, device: DeviceProfile, budget: Budget, policy: Policy, *,
                 recomputes_per_op: float = RECOMPUTES_PER_OP, nested_recomputes: int = NESTED_RECOMPUTES) -> None:
        super().__init__(tape, device, budget)
        self.policy = policy
        self.most_recomputes = recomputes_per_op * len(tape.ops)
        self.nested_recomputes = nested_recomputes
        self._may_leave = (self.facts.there_from >= 0) & (self.nbytes > 0)
        self._held = np.zeros(len(tape.storages), np.int64)  # by ops that are about to run: they stay
        self._wanted = np.zeros(len(tape.storages), np.int64)  # by ops that are about to run or wait for a recompute: they leave last
        self._depth = 0

    def play(self) -> None:
        """The whole step. Raises Stuck."""
        if self.live_bytes > self.budget.device_bytes:
            raise Stuck(0)
        self._drop_dead([s.id for s in self.tape.storages if s.at_start])
        for op in range(len(self.tape.ops)):
            self._start_prefetches()
            self._bring(self.facts.needs[op])
            reuse = self._reuse(op, wanted_by_the_op=1)
            self._make_room(self.run_bytes(op, reuse), op)
            self.compute(op, reuse)
            self._let_go(self.facts.needs[op])
            self._drop_dead(self.facts.uses[op])
        self._finish()

    # --- what a policy may ask -------------------------------------------------------------------------------------------
    def recompute_seconds(self, storage: int, limit_seconds: float = float("inf")) -> float:
        """Time to compute a storage again, producers that are absent by now included. Stops counting at the limit."""
        seconds, stack, seen = 0.0, [self.tape.producer[storage]], set()
        while stack and seconds <= limit_seconds:
            op = stack.pop()
            if op is None or op in seen:
                continue
            seen.add(op)
            seconds += self.tape.ops[op].seconds
            stack += [self.tape.producer[s] for s in self.tape.reads[op] if self.residency[s] is ABSENT]
        return seconds

    def forecast_bytes(self, until: int) -> np.ndarray:
        """Device bytes at the highest instant of each op from `next_op` to before `until`, if nothing more is released until then.

        What is off the device is taken to come back at the op that needs it next. int64, one entry an op.
        """
        first = self.next_op
        away = np.flatnonzero(~self.is_on_device & (self.next_need <= self.facts.end) & (self.facts.there_from < first))
        missing = np.bincount(np.minimum(self.next_need[away], until) - first, weights=self.nbytes[away], minlength=until - first + 1)
        still_missing = self.nbytes[away].sum() - np.cumsum(missing)[:-1].astype(np.int64)
        return self.facts.inner_bytes[first:until] - still_missing

    # --- making an op's inputs readable ------------------------------------------------------------------------------------
    def _start_prefetches(self) -> None:
        for s in self.policy.prefetch(self):
            if self.residency[s] is ON_HOST and self.live_bytes + self._bytes[s] <= self.budget.device_bytes:
                self.prefetch(s)

    def _bring(self, storages: Sequence[int]) -> None:
        """Make these readable, and hold them until `_let_go`.

        First what is there may leave again, if nothing else can, for what has to be recomputed; the second time it stays.
        """
        for s in storages:
            self._wanted[s] += 1
        self._recompute_absent(storages)
        for s in storages:
            self._held[s] += 1
        self._recompute_absent(storages)
        on_host = [s for s in storages if self.residency[s] is ON_HOST]
        for s in on_host:
            self._make_room(self._bytes[s], self.next_op)
            self.prefetch(s)
        for s in storages:
            if self.residency[s] is PREFETCHING:
                self.wait(s)

    def _let_go(self, storages: Sequence[int]) -> None:
        for s in storages:
            self._held[s] -= 1
            self._wanted[s] -= 1

    def _recompute_absent(self, storages: Sequence[int]) -> None:
        """Run what has to run again, in tape order; what only the recompute needed is dropped as soon as it has been read."""
        ops = self.ops_to_recompute(storages)
        self._depth += 1
        if ops and self._depth > self.nested_recomputes:
            raise Stuck(self.next_op)
        for op in ops:
            for s in self.tape.reads[op]:
                self._wanted[s] += 1
        for op in ops:
            if any(self._wanted[s] and self.residency[s] is ABSENT for s in self.tape.creates[op]):
                self._recompute(op)
            for s in self.tape.reads[op]:
                self._wanted[s] -= 1
            self._drop_dead(self.facts.uses[op])
        self._depth -= 1

    def _recompute(self, op: int) -> None:
        if self.recomputes >= self.most_recomputes:
            raise Stuck(self.next_op)
        reads = self.tape.reads[op]
        self._bring(reads)
        reuse = self._reuse(op, wanted_by_the_op=2)
        self._make_room(self.run_bytes(op, reuse), op)
        self.recompute(op, reuse)
        self._let_go(reads)

    def _reuse(self, op: int, wanted_by_the_op: int) -> int | None:
        """The input that the op's output takes over: one that nobody needs afterwards."""
        if self.tape.ops[op].takeover is None:
            return None
        out, taken = self.tape.ops[op].takeover
        last_need = op if op == self.next_op else self.next_op - 1
        is_free = self.facts.last_use[taken] <= last_need and self._wanted[taken] == wanted_by_the_op and self.is_settled[taken]
        return taken if is_free and self.residency[out] is ABSENT else None

    # --- making room -------------------------------------------------------------------------------------------------------
    def _make_room(self, nbytes: int, op: int) -> None:
        """Release storages until `nbytes` more fit. Raises Stuck naming `op`."""
        while self.live_bytes + nbytes > self.budget.device_bytes:
            if not (self._release(self._wanted == 0) or self._cancel_prefetch() or self._release(self._wanted > 0)):
                raise Stuck(op)

    def _release(self, among: np.ndarray) -> bool:
        """Let the policy release one storage; False when it cannot."""
        candidates = np.flatnonzero(among & self.is_settled & self._may_leave & (self._held == 0))
        release = self.policy.release(candidates, self) if len(candidates) else None
        if release is None:
            return False
        s, is_possible = release.storage, self.can_offload if release.action is Action.SWAP else self.can_recompute
        if s not in candidates or not is_possible(s):
            raise ValueError(f"the policy answered {release}, which is not possible; the candidates were {candidates.tolist()}")
        if release.action is Action.SWAP and not self.has_host_copy(s):
            self.offload(s)
            self.wait(s)
        self.free(s)
        return True

    def _cancel_prefetch(self) -> bool:
        """Give up a copy to the device that no op waits for."""
        for s in np.flatnonzero(self.is_on_device & ~self.is_settled & (self._held == 0)):
            self.wait(int(s))
            self.free(int(s))
            return True
        return False

    def _drop_dead(self, storages: Sequence[int]) -> None:
        """Drop what the step needs no more, its host copy too."""
        for s in storages:
            if self._wanted[s] or self.is_live(s):
                continue
            if self.residency[s] is PREFETCHING:
                self.wait(s)
            if self.is_settled[s]:
                self.free(s)
            if self.residency[s] is ON_HOST:
                self.free_host(s)

    def _finish(self) -> None:
        """What the step keeps is resident at its end, and nothing is on the host."""
        kept = [s.id for s in self.tape.storages if s.at_end]
        self._bring(kept)
        for s in kept:
            if self.residency[s] is BOTH:
                self.free_host(s)


@dataclass(frozen=True)
class RolloutPlanner:
    """Plans by playing a policy. `make_policy` gives a fresh one for each play; `method` is the uid, `name` what messages say.

    A policy that recomputes in long chains on purpose raises the limits at which a play counts as thrashing.
    """

    make_policy: Callable[[Tape, DeviceProfile, Budget], Policy]
    method: str
    name: str
    recomputes_per_op: float = RECOMPUTES_PER_OP
    nested_recomputes: int = NESTED_RECOMPUTES

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """The play's schedule, checked against the budget. PlanInfeasible names the smallest budget that the policy reaches."""
        try:
            return self._play(tape, device, budget).schedule
        except Stuck as stuck:
            stuck_op = stuck.op
        raise refusal(lambda at: self._try(tape, device, at), tape, budget, self.name, stuck_op)

    def _play(self, tape: Tape, device: DeviceProfile, budget: Budget) -> CheckedSchedule:
        rollout = Rollout(tape, device, budget, self.make_policy(tape, device, budget),
                          recomputes_per_op=self.recomputes_per_op, nested_recomputes=self.nested_recomputes)
        rollout.play()
        return check_schedule(tape, rollout.schedule(self.method), budget)

    def _try(self, tape: Tape, device: DeviceProfile, budget: Budget) -> CheckedSchedule | None:
        try:
            return self._play(tape, device, budget)
        except Stuck:
            return None


def fixed_plan(tape: Tape, schedule: Schedule, budget: Budget, name: str) -> Schedule:
    """A schedule that does not depend on the budget: as it is, PlanInfeasible where the budget is below its peak."""
    checked = check_schedule(tape, schedule)
    if checked.peak_bytes > budget.device_bytes:
        raise infeasible(checked, budget, name)
    return check_schedule(tape, schedule, budget).schedule


def infeasible(smallest: CheckedSchedule, budget: Budget, name: str, smallest_bytes: int | None = None) -> PlanInfeasible:
    """What to raise when `smallest` is the method's schedule of least peak, and still above the budget. `smallest_bytes` is the budget
    that it was made for, its peak when none was."""
    upto = smallest.schedule.instructions[:smallest.peak_instruction + 1]
    ran = [i.op for i in upto if isinstance(i, Compute | Recompute)] or [0]
    op = ran[-1] if smallest_bytes is None else _largest_near_the_peak(smallest, ran[-1])
    return PlanInfeasible(method=name, budget_bytes=budget.device_bytes, smallest_bytes=smallest_bytes or smallest.peak_bytes,
                          op=smallest.tape.op_name(op))


def _largest_near_the_peak(smallest: CheckedSchedule, at_peak: int) -> int:
    """Of the ops at which a plan within a budget comes near its peak, the one with the largest working set: whoever plays within a budget
    fills it wherever there is something to keep, and of these ops that one can do with less the least. The first of equals."""
    tape, near = smallest.tape, smallest.peak_bytes * (1 - SEARCH_PRECISION)
    runs = zip(smallest.schedule.instructions, smallest.inner_peak_bytes.tolist())
    ops = [i.op for i, nbytes in runs if isinstance(i, Compute | Recompute) and nbytes >= near]
    floor = floor_bytes(tape)
    return max(ops, key=lambda op: floor[op] + tape.ops[op].least_workspace_bytes, default=at_peak)


def refusal(attempt: Callable[[Budget], CheckedSchedule | None], tape: Tape, budget: Budget, name: str, stuck_op: int) -> PlanInfeasible:
    """What to raise when a play got stuck at `stuck_op`. `attempt` plays under another budget, and gives None where it gets stuck.

    The smallest budget is searched by bisection between the one that failed and one that does not bind; it has been played.
    """
    if not budget.wants_smallest:
        op = tape.op_name(min(stuck_op, len(tape.ops) - 1))  # after the last op, what the step keeps has to come back
        return PlanInfeasible(method=name, budget_bytes=budget.device_bytes, smallest_bytes=None, op=op)
    smallest = attempt(replace(budget, device_bytes=UNLIMITED))
    low, high = max(budget.device_bytes, lower_bound_bytes(tape) - 1), smallest.peak_bytes
    while high - low > max(1, int(high * SEARCH_PRECISION)):
        middle = (low + high) // 2
        played = attempt(replace(budget, device_bytes=middle))
        if played is None:
            low = middle
        else:
            smallest, high = played, middle
    return infeasible(smallest, budget, name, high)
