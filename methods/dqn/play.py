"""One step, played until a decision is due: the rollout of vramlab.rollout, turned inside out.

`decisions()` is a generator. It plays by itself and stops at a `Question`; what it is sent is the answer. It asks

    release    an op does not fit: which storage leaves, and is it swapped out or dropped
    prefetch   the link to the device is idle and something on the host would fit until it is used: fetch it now, or do nothing

and only where there is a choice: with one possible answer it goes on alone. It ends with the step or raises `Stuck`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import nsmallest

import numpy as np

from vramlab.device import DeviceProfile
from vramlab.planner import Budget
from vramlab.player import ABSENT, BOTH, ON_HOST, PREFETCHING, Residency
from vramlab.rollout import NESTED_RECOMPUTES, RECOMPUTES_PER_OP, Rollout, Stuck
from vramlab.tape import Phase, Tape

# How many of the storages on the host, the soonest needed first, a prefetch is offered for.
PREFETCH_CHOICES = 2


class Move(IntEnum):
    """What the agent may do."""

    NOOP = 0
    SWAP = 1
    DROP = 2
    PREFETCH = 3


@dataclass(frozen=True, slots=True)
class Question:
    """A decision that is due. `short_bytes` is what is missing on the device; 0 for a prefetch, where doing nothing is allowed."""

    swappable: tuple[int, ...]
    droppable: tuple[int, ...]
    fetchable: tuple[int, ...]
    short_bytes: int

    @property
    def choices(self) -> int:
        """How many different answers there are."""
        return len(self.swappable) + len(self.droppable) + len(self.fetchable) + bool(self.fetchable)


@dataclass(frozen=True, slots=True)
class Answer:
    """What to do, and with which storage; NOOP has none."""

    move: Move
    storage: int = -1


Decisions = Generator[Question, Answer, None]
NOTHING = Answer(Move.NOOP)


class Play(Rollout):
    """One step within one budget. `swaps` and `drops`: which of the two the agent has at all."""

    def __init__(self, tape: Tape, device: DeviceProfile, budget: Budget, *, swaps: bool = True, drops: bool = True) -> None:
        super().__init__(tape, device, budget, policy=None)
        self.swaps, self.drops = swaps, drops
        until = [-1 if p is None or tape.ops[p].phase is not Phase.FORWARD else self.facts.recomputable_until[p] for p in tape.producer]
        self._droppable_until = np.array(until, np.int64)  # maps only: a gradient's recompute is the backward up to there
        self.recompute_spent_seconds = 0.0
        self.on_host: set[int] = set()  # and nowhere else

    def decisions(self) -> Decisions:
        """The whole step. Raises Stuck."""
        if self.live_bytes > self.budget.device_bytes:
            raise Stuck(0)
        self._drop_dead([s.id for s in self.tape.storages if s.at_start])
        for op in range(len(self.tape.ops)):
            yield from self._offer_prefetches(op)
            yield from self._bring(self.facts.needs[op])
            reuse = self._reuse(op, wanted_by_the_op=1)
            yield from self._make_room(self.run_bytes(op, reuse), op)
            self.compute(op, reuse)
            self._let_go(self.facts.needs[op])
            self._drop_dead(self.facts.uses[op])
        kept = [s.id for s in self.tape.storages if s.at_end]
        yield from self._bring(kept)
        for s in kept:
            if self.residency[s] is BOTH:
                self.free_host(s)

    # --- what the agent sees -----------------------------------------------------------------------------------------------
    @property
    def out_free_seconds(self) -> float:
        """When the engine to the host is done with what it has."""
        return self._engine_free[True]

    @property
    def in_free_seconds(self) -> float:
        """When the engine to the device is done with what it has."""
        return self._engine_free[not self.device.is_full_duplex]

    @property
    def depth(self) -> int:
        """How deep recomputes are nested at this moment."""
        return self._depth

    def out_end_seconds(self, storage: int) -> float:
        """When its copy to the host would end if it were offloaded now; now, where there is a copy."""
        if self.has_host_copy(storage):
            return self.clock_seconds
        group = max(self._touched_in[storage], self._offload_floor)
        start = self._ran_seconds[group] if group < len(self._heads) else self.clock_seconds
        return max(self.out_free_seconds, start) + self.device.copy_seconds(self._bytes[storage], to_host=True)

    def out_end_seconds_of(self, settled: np.ndarray) -> np.ndarray:
        """`out_end_seconds` of each of these storages, which are on the device with no copy in flight."""
        storages, now, count = settled.tolist(), self.clock_seconds, len(self._heads)
        groups = [max(self._touched_in[s], self._offload_floor) for s in storages]
        starts = np.array([self._ran_seconds[g] if g < count else now for g in groups])
        ends = np.maximum(self.out_free_seconds, starts) + self.device.copy_seconds(self.nbytes[settled], to_host=True)
        return np.where([self.residency[s] is BOTH for s in storages], now, ends)

    def _set(self, storage: int, residency: Residency) -> None:
        super()._set(storage, residency)
        if residency is ON_HOST:
            self.on_host.add(storage)
        else:
            self.on_host.discard(storage)

    # --- prefetch ----------------------------------------------------------------------------------------------------------
    def _offer_prefetches(self, op: int) -> Decisions:
        while self.on_host and self.in_free_seconds <= self.clock_seconds + self.tape.ops[op].seconds:
            fetchable = self._fetchable()
            if not fetchable:
                return
            answer = yield Question((), (), fetchable, 0)
            if answer.move is Move.NOOP:
                return
            self.prefetch(answer.storage)

    def _fetchable(self) -> tuple[int, ...]:
        """The soonest needed of what is on the host, as far as each fits at every op until it is used."""
        room = self.budget.device_bytes - self.live_bytes
        if min(self._bytes[s] for s in self.on_host) > room:
            return ()
        need, first = self.next_need, self.next_op
        waiting = [(int(need[s]), s) for s in self.on_host]
        found = []
        for _, s in nsmallest(PREFETCH_CHOICES, [pair for pair in waiting if pair[0] > first]):
            if self._bytes[s] > room:
                continue
            forecast = self.forecast_bytes(min(int(self.next_need[s]), self.facts.end))
            if int(forecast.max(initial=0)) + self._bytes[s] <= self.budget.device_bytes:
                found.append(s)
        return tuple(found)

    # --- making an op's inputs readable, as Rollout does -------------------------------------------------------------------
    def _bring(self, storages: Sequence[int]) -> Decisions:
        for s in storages:
            self._wanted[s] += 1
        yield from self._recompute_absent(storages)
        for s in storages:
            self._held[s] += 1
        yield from self._recompute_absent(storages)
        for s in [s for s in storages if self.residency[s] is ON_HOST]:
            yield from self._make_room(self._bytes[s], self.next_op)
            self.prefetch(s)
        for s in storages:
            if self.residency[s] is PREFETCHING:
                self.wait(s)

    def _recompute_absent(self, storages: Sequence[int]) -> Decisions:
        ops = self.ops_to_recompute(storages)
        self._depth += 1
        if ops and self._depth > NESTED_RECOMPUTES:
            raise Stuck(self.next_op)
        for op in ops:
            for s in self.tape.reads[op]:
                self._wanted[s] += 1
        for op in ops:
            if any(self._wanted[s] and self.residency[s] is ABSENT for s in self.tape.creates[op]):
                yield from self._recompute(op)
            for s in self.tape.reads[op]:
                self._wanted[s] -= 1
            self._drop_dead(self.facts.uses[op])
        self._depth -= 1

    def _recompute(self, op: int) -> Decisions:
        if self.recomputes >= RECOMPUTES_PER_OP * len(self.tape.ops):
            raise Stuck(self.next_op)
        reads = self.tape.reads[op]
        yield from self._bring(reads)
        reuse = self._reuse(op, wanted_by_the_op=2)
        yield from self._make_room(self.run_bytes(op, reuse), op)
        self.recompute(op, reuse)
        self.recompute_spent_seconds += self.tape.ops[op].seconds
        self._let_go(reads)

    # --- making room -------------------------------------------------------------------------------------------------------
    def _make_room(self, nbytes: int, op: int) -> Decisions:
        while self.live_bytes + nbytes > self.budget.device_bytes:
            short = self.live_bytes + nbytes - self.budget.device_bytes
            if not (yield from self._release(self._wanted == 0, short)) and not self._cancel_prefetch():
                if not (yield from self._release(self._wanted > 0, short)):
                    raise Stuck(op)

    def _release(self, among: np.ndarray, short_bytes: int) -> Generator[Question, Answer, bool]:
        candidates = np.flatnonzero(among & self.is_settled & self._may_leave & (self._held == 0))
        droppable = candidates[self._droppable_until[candidates] >= self.next_need[candidates]] if self.drops else candidates[:0]
        swappable = candidates if self.swaps else candidates[:0]
        if self.host_bytes + int(self.nbytes[swappable].max(initial=0)) > self.budget.host_bytes:
            swappable = np.array([s for s in swappable if self.can_offload(int(s))], np.int64)
        question = Question(tuple(swappable.tolist()), tuple(droppable.tolist()), (), short_bytes)
        if not question.choices:
            return False
        answer = yield question
        s = answer.storage
        if answer.move is Move.SWAP and not self.has_host_copy(s):
            self.offload(s)
            self.wait(s)
        self.free(s)
        if answer.move is Move.DROP and self.residency[s] is ON_HOST:
            self.free_host(s)
        return True
