"""A step played instruction by instruction: what check.py says of memory and simulate.py of time, known while it is written.

Methods that decide as they go write their schedule through a `Player`. It keeps the residency of every storage, the bytes on
device and host, and the clock of the compute stream, so that a decision sees exactly what the finished schedule will show:

    player.compute(3)          op 3 runs; the clock advances
    player.offload(7)          the copy starts right after the op that used storage 7 last, if its engine is free there
    player.wait(7)             the compute stream stands still until the copy has ended
    player.free(7)

The ops of the tape are computed in the tape's order. Nothing here decides; nothing here checks: `check_schedule` does.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from vramlab.device import DeviceProfile
from vramlab.liveness import used_storages
from vramlab.planner import UNLIMITED, Budget
from vramlab.schedule import Compute, Free, FreeHost, Instruction, Offload, Prefetch, Recompute, Schedule, Wait
from vramlab.tape import Phase, Tape


class Residency(IntEnum):
    """Where a storage is. The same six as in check.py."""

    ABSENT = 0
    RESIDENT = 1
    OFFLOADING = 2
    RESIDENT_AND_HOST = 3
    ON_HOST = 4
    PREFETCHING = 5


ABSENT, RESIDENT, OFFLOADING, BOTH, ON_HOST, PREFETCHING = Residency
OFF_DEVICE = frozenset({ABSENT, ON_HOST})
WITH_HOST_COPY = frozenset({OFFLOADING, BOTH, ON_HOST, PREFETCHING})


class StepFacts:
    """What a player asks of a tape again and again; made once for a tape. Op `len(ops)` stands for the end of the step."""

    def __init__(self, tape: Tape) -> None:
        self.end = len(tape.ops)
        self.uses = [used_storages(tape, op.id) for op in tape.ops]
        self.needs = [tuple(sorted({*tape.reads[op.id], *op.mutates})) for op in tape.ops]  # readable before an op's first run
        self.needed_at: list[list[int]] = [[] for _ in tape.storages]  # per storage: the ops that read or overwrite it, the end
        self.last_use = [-1] * len(tape.storages)
        for op, used in enumerate(self.uses):
            for s in used:
                self.last_use[s] = op
        for op, needed in enumerate(self.needs):
            for s in needed:
                self.needed_at[s].append(op)
        for s in tape.storages:
            if s.at_end:
                self.needed_at[s.id].append(self.end)
                self.last_use[s.id] = self.end
        self.recomputable_until = self._recomputable_until(tape)
        self.there_from = np.array([-1 if p is None else p for p in tape.producer], np.int64)  # per storage: the op that creates it
        until = [-1 if p is None else self.recomputable_until[p] for p in tape.producer]
        self.can_return_until = np.array(until, np.int64)  # per storage: the last op before which it may be computed again; -1 for never
        self.inner_bytes = self._inner_bytes(tape)

    @classmethod
    def of(cls, tape: Tape) -> StepFacts:
        """The facts of a tape, kept with it."""
        if "_facts" not in tape.__dict__:
            tape.__dict__["_facts"] = cls(tape)
        return tape.__dict__["_facts"]

    def _recomputable_until(self, tape: Tape) -> list[int]:
        """Per op: the last op before whose first run it may run again, whatever else has to run again for it; -1 for never.

        A later write to what it reads, or to what it creates, ends this; so does the end of an input that does not stay.
        """
        writers: list[list[int]] = [[] for _ in tape.storages]
        for op in tape.ops:
            for s in op.mutates:
                writers[s].append(op.id)
        until = [self.end] * len(tape.ops)
        for op in tape.ops:
            if op.phase is Phase.OPTIMIZER or (op.mutates and not op.throwaway_state):
                until[op.id] = -1
                continue
            limits = [writers[s][version] for s, version in tape.read_versions[op.id] if version < len(writers[s])]
            limits += [writers[s][0] for s in tape.creates[op.id] if writers[s]]
            for s in tape.reads[op.id]:
                made_by = tape.producer[s]
                limits.append(self.last_use[s] if made_by is None else until[made_by])
            until[op.id] = min(limits, default=self.end)
        return until


    def _inner_bytes(self, tape: Tape) -> np.ndarray:
        """Per op: device bytes at its highest instant when nothing leaves the device before its last use. int64."""
        live = sum(s.nbytes for s in tape.storages if s.at_start)
        inner = np.zeros(self.end, np.int64)
        for op in tape.ops:
            out, taken = op.takeover or (None, None)
            is_taken = taken is not None and self.last_use[taken] == op.id
            made = sum(tape.storages[s].nbytes for s in tape.creates[op.id]) - (tape.storages[taken].nbytes if is_taken else 0)
            inner[op.id] = live + made + op.workspace_bytes
            dead = sum(tape.storages[s].nbytes for s in self.uses[op.id] if self.last_use[s] == op.id and not (is_taken and s == taken))
            live += made - dead
        return inner


class Player:
    """Writes a schedule and keeps what follows from it. `budget` bounds nothing here but where a hoisted offload fits on the host."""

    def __init__(self, tape: Tape, device: DeviceProfile, budget: Budget | None = None) -> None:
        self.tape, self.device, self.budget = tape, device, budget or Budget(device_bytes=UNLIMITED)
        self.facts = StepFacts.of(tape)
        count = len(tape.storages)
        self.nbytes = np.array([s.nbytes for s in tape.storages], np.int64)
        self.residency: list[Residency] = [RESIDENT if s.at_start else ABSENT for s in tape.storages]
        self.is_on_device = np.array([s.at_start for s in tape.storages], np.bool_)
        self.is_settled = self.is_on_device.copy()  # on the device, and no copy of it in flight
        self.last_access_seconds = np.zeros(count)
        self.next_need = np.array([needed[0] if needed else self.facts.end + 1 for needed in self.facts.needed_at], np.int64)
        self.next_op = 0  # the op of the tape to be computed next
        self.live_bytes = int(self.nbytes[self.is_on_device].sum())
        self.host_bytes = 0
        self.clock_seconds = 0.0
        self.recomputes = 0
        self._bytes = [s.nbytes for s in tape.storages]
        self._need_cursor = [0] * count
        # Instructions in groups: one run of an op, then the offloads that start as it ends, then the rest.
        self._heads: list[list[Instruction]] = [[]]
        self._tails: list[list[Instruction]] = [[]]
        self._ran_seconds = [0.0]  # per group: the clock right after its op
        self._host_high = [0]  # per group: the most host bytes in it
        self._touched_in = [0] * count  # per storage: the group of its last use
        self._copy_end = [0.0] * count
        self._engine_free = {True: 0.0, False: 0.0}  # to host, to device
        self._offload_floor = 0  # the first group in whose head a further offload keeps the engine's order

    # --- what is -------------------------------------------------------------------------------------------------------
    def is_live(self, storage: int) -> bool:
        """Is it needed again by the first run of an op, or at the end?"""
        return self.facts.last_use[storage] >= self.next_op

    def has_host_copy(self, storage: int) -> bool:
        """Can its device copy be dropped and come back from the host?"""
        return self.residency[storage] in WITH_HOST_COPY

    def can_recompute(self, storage: int) -> bool:
        """If it is dropped now: can it be computed again by the time the tape needs it, whatever else is dropped until then?"""
        made_by = self.tape.producer[storage]
        return made_by is not None and made_by < self.next_op and self.facts.recomputable_until[made_by] >= self.next_need[storage]

    def recomputable(self, storages: np.ndarray) -> np.ndarray:
        """`can_recompute` of each."""
        made_by = self.facts.there_from[storages]
        return (made_by >= 0) & (made_by < self.next_op) & (self.facts.can_return_until[storages] >= self.next_need[storages])

    def can_offload(self, storage: int) -> bool:
        """Is there a host copy, or host memory for one?"""
        return self.has_host_copy(storage) or self.host_bytes + self._bytes[storage] <= self.budget.host_bytes

    def ops_to_recompute(self, storages: list[int] | tuple[int, ...]) -> list[int]:
        """The ops that have to run again, in tape order, before none of these storages is absent; copies on the host are sources."""
        stack = [s for s in storages if self.residency[s] is ABSENT]
        ops: set[int] = set()
        while stack:
            made_by = self.tape.producer[stack.pop()]
            if made_by is not None and made_by not in ops:
                ops.add(made_by)
                stack += [s for s in self.tape.reads[made_by] if self.residency[s] is ABSENT]
        return sorted(ops)

    def run_bytes(self, op: int, reuse: int | None, variant: str | None = None) -> int:
        """Device bytes that a run of the op adds at its highest instant, by this variant."""
        made = sum(self._bytes[s] for s in self.tape.creates[op] if op == self.next_op or self.residency[s] is ABSENT)
        duplicates = 0 if op == self.next_op else sum(self._bytes[s] for s in self.tape.creates[op] if self.residency[s] is not ABSENT)
        return made + duplicates + self.tape.ops[op].variant(variant).workspace_bytes - (0 if reuse is None else self._bytes[reuse])

    # --- instructions --------------------------------------------------------------------------------------------------
    def compute(self, op: int, reuse: int | None = None, variant: str | None = None) -> None:
        """The first run of the tape's next op."""
        assert op == self.next_op, "ops are computed in tape order"
        self._run(Compute(op, reuse, variant))
        for s in self.tape.ops[op].mutates:
            if self.residency[s] is BOTH:
                self._set(s, RESIDENT)
        self.next_op += 1
        for s in self.facts.needs[op]:
            self._need_cursor[s] += 1
            needed = self.facts.needed_at[s]
            self.next_need[s] = needed[self._need_cursor[s]] if self._need_cursor[s] < len(needed) else self.facts.end + 1

    def recompute(self, op: int, reuse: int | None = None, variant: str | None = None) -> None:
        """A further run: its absent outputs become resident."""
        self._run(Recompute(op, reuse, variant))
        self.recomputes += 1

    def free(self, storage: int) -> None:
        """Drop the device copy."""
        self._tails[-1].append(Free(storage))
        self._set(storage, ON_HOST if self.residency[storage] is BOTH else ABSENT)

    def free_host(self, storage: int) -> None:
        """Drop the host copy."""
        self._tails[-1].append(FreeHost(storage))
        self._set(storage, RESIDENT if self.residency[storage] is BOTH else ABSENT)
        self._touched_in[storage] = len(self._heads)  # a new copy cannot start before this one is gone

    def offload(self, storage: int) -> None:
        """Start the copy to the host: right after the storage's last use where the engine's order and the host's memory allow it.

        Moving the start back takes no device memory (the storage was there all along) and changes no copy that is already planned,
        for a copy starts after those before it in the list.
        """
        group = max(self._touched_in[storage], self._offload_floor)
        if group < len(self._heads) and self._fits_on_host(group, self._bytes[storage]):
            self._heads[group].append(Offload(storage))
            self._offload_floor, start = group, self._ran_seconds[group]
            for g in range(group, len(self._heads) if self._bounds_host() else group):
                self._host_high[g] += self._bytes[storage]
        else:
            self._tails[-1].append(Offload(storage))
            self._offload_floor, start = len(self._heads), self.clock_seconds
        self._copy(storage, start, to_host=True)
        self._set(storage, OFFLOADING)

    def prefetch(self, storage: int) -> None:
        """Start the copy to the device."""
        self._tails[-1].append(Prefetch(storage))
        if not self.device.is_full_duplex:
            self._offload_floor = len(self._heads)
        self._copy(storage, max(self.clock_seconds, self._copy_end[storage]), to_host=False)
        self._set(storage, PREFETCHING)

    def wait(self, storage: int) -> None:
        """The compute stream stands still until the storage's copy has ended."""
        self._tails[-1].append(Wait(storage))
        self.clock_seconds = max(self.clock_seconds, self._copy_end[storage])
        self._set(storage, BOTH)

    def schedule(self, method: str) -> Schedule:
        """What was played so far."""
        instructions = tuple(i for head, tail in zip(self._heads, self._tails) for i in (*head, *tail))
        return Schedule(instructions=instructions, tape_digest=self.tape.digest, method=method)

    # --- bookkeeping ---------------------------------------------------------------------------------------------------
    def _run(self, instruction: Compute | Recompute) -> None:
        op, reuse = instruction.op, instruction.reuse
        self._heads.append([instruction])
        self._tails.append([])
        ran = self.tape.ops[op]
        self.clock_seconds += ran.seconds if instruction.variant is None else ran.variant(instruction.variant).seconds
        self._ran_seconds.append(self.clock_seconds)
        self._host_high.append(self.host_bytes)
        group = len(self._heads) - 1
        for s in self.tape.creates[op]:
            if self.residency[s] is ABSENT:
                self._set(s, RESIDENT)
        for s in self.facts.uses[op]:
            self.last_access_seconds[s] = self.clock_seconds
            self._touched_in[s] = group
        if reuse is not None:
            self._set(reuse, ON_HOST if self.residency[reuse] is BOTH else ABSENT)

    def _set(self, storage: int, residency: Residency) -> None:
        before, nbytes = self.residency[storage], self._bytes[storage]
        device = (residency not in OFF_DEVICE) - (before not in OFF_DEVICE)
        host = (residency in WITH_HOST_COPY) - (before in WITH_HOST_COPY)
        self.residency[storage] = residency
        self.is_on_device[storage] = residency not in OFF_DEVICE
        self.is_settled[storage] = residency is RESIDENT or residency is BOTH
        self.live_bytes += device * nbytes
        self.host_bytes += host * nbytes
        if self.host_bytes > self._host_high[-1]:
            self._host_high[-1] = self.host_bytes

    def _copy(self, storage: int, ready_seconds: float, *, to_host: bool) -> None:
        engine = to_host or not self.device.is_full_duplex
        end = max(self._engine_free[engine], ready_seconds) + self.device.copy_seconds(self._bytes[storage], to_host=to_host)
        self._engine_free[engine] = self._copy_end[storage] = end

    def _bounds_host(self) -> bool:
        return self.budget.host_bytes < UNLIMITED

    def _fits_on_host(self, group: int, nbytes: int) -> bool:
        return not self._bounds_host() or max(self._host_high[group:]) + nbytes <= self.budget.host_bytes
