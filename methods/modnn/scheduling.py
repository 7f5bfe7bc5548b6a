"""A step simulated op by op in the tape's order: data leaves for the host when the next op does not fit, and comes back ahead of its use.

    bring the op's inputs ─► make room ─► run ─► drop what is dead ─► prefetch what fits until it is used

What makes room, in this order: the settled data of farthest next use, a prefetch that nothing waits for, and, for an op that may
write over an input, that input, once it has a copy on the host. So any budget from the step's lower bound on can be kept.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from vramlab.device import DeviceProfile
from vramlab.planner import Budget
from vramlab.player import ABSENT, BOTH, OFF_DEVICE, ON_HOST, PREFETCHING, Player
from vramlab.tape import Tape


class DoesNotFit(Exception):
    """The simulation cannot go on within the budget; `op` binds."""

    def __init__(self, op: int) -> None:
        super().__init__(op)
        self.op = op


class Scheduler(Player):
    """One step under a budget with these convolution algorithms, one an op, None for the library's own choice."""

    def __init__(self, tape: Tape, device: DeviceProfile, budget: Budget, algorithms: Sequence[str | None]) -> None:
        super().__init__(tape, device, budget)
        self.algorithms = algorithms
        own = np.array([op.workspace_bytes for op in tape.ops], np.int64)
        chosen = np.array([op.variant(name).workspace_bytes for op, name in zip(tape.ops, algorithms)], np.int64)
        self._inner_bytes = self.facts.inner_bytes + (chosen - own)
        self._may_leave = (self.facts.there_from >= 0) & (self.nbytes > 0)
        self._away: list[tuple[int, int]] = []  # on the host only, needed again: (next need, storage), the soonest first

    def run(self) -> None:
        """The whole step. Raises DoesNotFit."""
        if self.live_bytes > self.budget.device_bytes:
            raise DoesNotFit(0)
        self._drop_dead([s.id for s in self.tape.storages if s.at_start])
        for op in range(len(self.tape.ops)):
            reuse = self._make_ready(op)
            self.compute(op, reuse, self.algorithms[op])
            if reuse is not None and self.is_live(reuse):
                self._is_away(reuse)
            self._drop_dead(self.facts.uses[op])
            self._prefetch_ahead()
        self._finish()

    # --- one op --------------------------------------------------------------------------------------------------------
    def _make_ready(self, op: int) -> int | None:
        """Bring the op's inputs and make room for it. Returns the input whose region its output takes over."""
        needed = self.facts.needs[op]
        missing = [s for s in needed if self.residency[s] is ON_HOST]
        reuse = self._dying_input(op)
        rises = sum(self._bytes[s] for s in missing)
        while self.live_bytes + rises + self.run_bytes(op, reuse, self.algorithms[op]) > self.budget.device_bytes:
            if self._evict(needed) or self._cancel_prefetch(needed):
                continue
            if reuse is None and self._is_replaceable(op):
                reuse = self.tape.ops[op].takeover[1]
                continue
            raise DoesNotFit(op)
        self._fetch(missing)
        for s in needed:
            if self.residency[s] is PREFETCHING:
                self.wait(s)
        if reuse is not None and self.is_live_after(op, reuse) and not self.has_host_copy(reuse):
            self.offload(reuse)
            self.wait(reuse)
        return reuse

    def is_live_after(self, op: int, storage: int) -> bool:
        """Is it needed after this op?"""
        return self.facts.last_use[storage] > op

    def _dying_input(self, op: int) -> int | None:
        takeover = self.tape.ops[op].takeover
        return takeover[1] if takeover and not self.is_live_after(op, takeover[1]) else None

    def _is_replaceable(self, op: int) -> bool:
        """May the op write over an input that is needed later, a copy of it being on the host?"""
        takeover = self.tape.ops[op].takeover
        return takeover is not None and bool(self._may_leave[takeover[1]]) and self.can_offload(takeover[1])

    def _fetch(self, storages: Sequence[int]) -> None:
        for s in storages:
            self.prefetch(s)
            gone = self._away.pop(bisect_left(self._away, self._when(s)))
            assert gone[1] == s, "what is on the host and needed again is among what is away"

    # --- making room ---------------------------------------------------------------------------------------------------
    def _evict(self, needed: Sequence[int]) -> bool:
        """Move the data of farthest next use to the host; of equals the largest. False when nothing can go."""
        may = self.is_settled & self._may_leave
        may[list(needed)] = False
        candidates = np.flatnonzero(may)
        for s in candidates[np.lexsort((self.nbytes[candidates], self.next_need[candidates]))][::-1].tolist():
            if self.can_offload(s):
                self._send_away(s)
                return True
        return False

    def _send_away(self, storage: int) -> None:
        if not self.has_host_copy(storage):
            self.offload(storage)
            self.wait(storage)
        self.free(storage)
        self._is_away(storage)

    def _is_away(self, storage: int) -> None:
        insort(self._away, self._when(storage))

    def _when(self, storage: int) -> tuple[int, int]:
        """Its place among what is away: no op uses it meanwhile, so that its next need stays what it was."""
        return int(self.next_need[storage]), storage

    def _cancel_prefetch(self, needed: Sequence[int]) -> bool:
        """Give up a copy to the device that the op does not wait for."""
        in_flight = np.flatnonzero(self.is_on_device & ~self.is_settled)
        idle = [s for s in in_flight.tolist() if s not in needed]
        if not idle:
            return False
        self.wait(idle[-1])
        self._send_away(idle[-1])
        return True

    def _drop_dead(self, storages: Sequence[int]) -> None:
        for s in storages:
            if self.is_live(s) or self.residency[s] is ABSENT:
                continue
            if self.residency[s] not in OFF_DEVICE:
                self.free(s)
            if self.residency[s] is ON_HOST:
                self.free_host(s)

    # --- bringing back -------------------------------------------------------------------------------------------------
    def _prefetch_ahead(self) -> None:
        """Start copies back in order of next use; the first that would not fit until its use ends it."""
        while self._away and self._fits_until_use(self._away[0][1]):
            self._fetch([self._away[0][1]])

    def _fits_until_use(self, storage: int) -> bool:
        free = self.budget.device_bytes - self._bytes[storage]
        if self.live_bytes > free:
            return False
        first, until = self.next_op, min(int(self.next_need[storage]), self.facts.end)
        away = np.array([s for _, s in self._away], np.int64)
        returns = np.minimum(self.next_need[away], until) - first
        back = np.cumsum(np.bincount(returns, weights=self.nbytes[away], minlength=until - first + 1))[:-1]
        return bool(np.all(self._inner_bytes[first:until] - self.nbytes[away].sum() + back <= free))

    def _finish(self) -> None:
        """What the step keeps is resident at its end, and nothing is on the host."""
        kept = [s.id for s in self.tape.storages if s.at_end]
        missing = [s for s in kept if self.residency[s] is ON_HOST]
        if self.live_bytes + sum(self._bytes[s] for s in missing) > self.budget.device_bytes:
            raise DoesNotFit(len(self.tape.ops) - 1)
        self._fetch(missing)
        for s in kept:
            if self.residency[s] is PREFETCHING:
                self.wait(s)
            if self.residency[s] is BOTH:
                self.free_host(s)
