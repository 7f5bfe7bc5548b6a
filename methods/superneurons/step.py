"""One step as SuperNeurons runs it: drop and recompute segments, keep maps in a cache on the device, offload the least recently used.

    before an op   recompute what its segments dropped ─► bring its maps from the host ─► evict until it fits ─► prefetch
    after an op    forward: drop maps of segments; backward: drop again what a memory-centric segment brought; free what is dead
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from vramlab.device import DeviceProfile
from vramlab.liveness import eager_reuse
from vramlab.planner import Budget
from vramlab.player import ABSENT, BOTH, OFFLOADING, ON_HOST, PREFETCHING, Player
from vramlab.rollout import Stuck
from vramlab.schedule import Schedule
from vramlab.tape import Phase, Tape

from .layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The paper's stages, as card.yaml declares them."""

    liveness: bool = True
    offload: str = "convolution"
    cache: bool = True
    prefetch: bool = True
    recomputation: str = "cost-aware"
    counted: str = "needed"
    workspace: bool = True


class SuperNeuronsStep:
    """Writes the schedule of one step within one budget."""

    def __init__(self, tape: Tape, device: DeviceProfile, budget: Budget, stages: Stages, layout: Layout) -> None:
        self.tape, self.budget, self.stages, self.layout = tape, budget, stages, layout
        self.player = Player(tape, device, budget)
        self.facts, self.residency = self.player.facts, self.player.residency
        self.offloadable = layout.offloadable(stages.offload)
        self.cache: OrderedDict[int, None] = OrderedDict()  # offloadable maps on the device, least recently used first
        self.locked: Counter[int] = Counter()  # by ops that are about to run
        self.chosen: dict[int, str | None] = {}  # per op that ran: its variant
        self.leaving: list[int] = []  # on their way to the host and done with in the forward phase
        self.held = frozenset() if stages.liveness else self._network_wide()
        self.dying, self.source_ends = self._ends()
        self.ahead = self._ahead() if stages.prefetch else {}

    def schedule(self, method: str) -> Schedule:
        """The whole step. Raises Stuck where the budget cannot be kept."""
        if self.player.live_bytes > self.budget.device_bytes:
            raise Stuck(0)
        self._drop(s.id for s in self.tape.storages if s.at_start and self.facts.last_use[s.id] < 0)
        for op in range(self.facts.end):
            self._recompute_dropped(op)
            self._drop(self.source_ends[op])
            if self.tape.ops[op].phase is not Phase.FORWARD or not self.offloadable.isdisjoint(self.tape.creates[op]):
                self._finish_offloads()
            self._bring(self.facts.needs[op])
            reuse = self._reuse(op)
            variant = self._algorithm(op, reuse)
            self._prefetch(op, self.player.run_bytes(op, reuse, variant))
            self.player.compute(op, reuse, variant)
            self.locked.subtract(self.facts.needs[op])
            self._after(op)
        self._drop(self.dying[self.facts.end])
        return self.player.schedule(method)

    # --- liveness --------------------------------------------------------------------------------------------------------
    def _network_wide(self) -> frozenset[int]:
        """Without liveness: every x, and the complete dx of every layer that has a region of its own, stay to the end."""
        gradients = {layer.dx for layer in self.layout.layers if layer.dx is not None and not layer.shares_input}
        return frozenset(s for op in self.tape.ops if op.phase is Phase.FORWARD for s in self.tape.creates[op.id]) | gradients

    def _ends(self) -> tuple[list[list[int]], list[list[int]]]:
        """Per op, and for the end of the step: what dies after it; what only recomputes needed, and no longer after those before it."""
        dying, source_ends = ([[] for _ in range(self.facts.end + 1)] for _ in range(2))
        for s in self.tape.storages:
            last, source = self.facts.last_use[s.id], self.layout.source_until[s.id]
            if s.at_end or last < 0:
                continue
            if s.id in self.held:
                dying[self.facts.end].append(s.id)
            elif source > last and s.id not in self.layout.replayable:
                source_ends[source].append(s.id)
            else:
                dying[last].append(s.id)
        return dying, source_ends

    def _after(self, op: int) -> None:
        is_forward = self.tape.ops[op].phase is Phase.FORWARD
        for s in self.facts.uses[op]:
            if self.layout.forward_end.get(s) == op and s in self.layout.dropped:
                self._free(s)
            elif not is_forward and self._is_passing_through(s):
                self._free(s)
            self._touch(s)
        if is_forward and not self.stages.cache:
            self._offload_at_once(op)
        self._drop(self.dying[op])

    def _free(self, storage: int) -> None:
        if self.player.is_settled[storage]:
            self.player.free(storage)
            self.cache.pop(storage, None)

    def _drop(self, storages: Iterable[int]) -> None:
        """What the step needs no more leaves device and host."""
        for s in storages:
            if self.residency[s] in (OFFLOADING, PREFETCHING):
                self.player.wait(s)
            self._free(s)
            if self.residency[s] is ON_HOST:
                self.player.free_host(s)

    def _reuse(self, op: int) -> int | None:
        """The input that the op's output takes over: one that would be freed right after the op."""
        out, taken = self.tape.ops[op].takeover or (None, None)
        if taken is None or not self.player.is_settled[taken] or self.residency[out] is not ABSENT:
            return None
        if not self.stages.liveness:
            return eager_reuse(self.tape, self.tape.ops[op], self._ends_at(taken, op))
        is_dropped = taken in self.layout.dropped and self.layout.forward_end[taken] == op
        return taken if is_dropped or (self._ends_at(taken, op) and not self.tape.storages[taken].at_end) else None

    def _ends_at(self, storage: int, op: int) -> bool:
        source = -1 if storage in self.layout.replayable else self.layout.source_until[storage]
        return self.facts.last_use[storage] == op and source <= op

    # --- recomputation -----------------------------------------------------------------------------------------------------
    def _recompute_dropped(self, op: int) -> None:
        """Speed-centric: the whole segment, which stays; memory-centric: what this op needs, and nothing on the way to it stays."""
        for s in self.facts.needs[op]:
            if self.residency[s] is ABSENT:
                segment = self.layout.segment_of.get(s)
                is_whole = segment in self.layout.members and segment not in self.layout.memory_centric
                members = self.layout.members[segment] if is_whole else ()
                self._sweep([s, *(m for m in members if m != s and self.player.is_live(m))])

    def _is_passing_through(self, storage: int) -> bool:
        """In a memory-centric segment: will the next backward op that needs the segment do without this map?"""
        segment = self.layout.segment_of.get(storage)
        if storage not in self.layout.dropped or segment not in self.layout.memory_centric:
            return False
        next_need = self.player.next_need
        return next_need[storage] > min(next_need[s] for s in self.layout.members[segment])

    def _sweep(self, targets: Sequence[int]) -> None:
        ops = self.player.ops_to_recompute(targets)
        reads = Counter(s for op in ops for s in self.tape.reads[op])
        passing = {s for op in ops for s in self.tape.creates[op] if self.residency[s] is ABSENT}.difference(targets)
        for op in ops:
            self._bring(self.tape.reads[op])
            reuse = self._reuse_again(op, reads, passing)
            variant = self._algorithm(op, reuse)
            self.player.recompute(op, reuse, variant)
            self.locked.subtract(self.tape.reads[op])
            reads.subtract(self.tape.reads[op])
            for s in self.facts.uses[op]:
                self._touch(s)
                if s in passing and not reads[s]:
                    self._free(s)
        if not self.stages.cache:
            self._send_back({s for op in ops for s in self.tape.reads[op]})

    def _send_back(self, sources: Iterable[int]) -> None:
        """Without the cache: what a recompute has read and the next op does not is on the host again; its copy is still there."""
        for s in sorted(sources):
            if self.residency[s] is BOTH and s not in self.facts.needs[self.player.next_op]:
                self._free(s)

    def _reuse_again(self, op: int, reads: Counter, passing: Collection[int]) -> int | None:
        out, taken = self.tape.ops[op].takeover or (None, None)
        is_free = taken in passing and reads[taken] == 1 and self.player.is_settled[taken] and self.residency[out] is ABSENT
        return taken if is_free else None

    # --- the tensor cache over the unified tensor pool -----------------------------------------------------------------------
    def _touch(self, storage: int) -> None:
        """It is now the most recently used."""
        if storage in self.offloadable and self.player.is_on_device[storage]:
            self.cache[storage] = None
            self.cache.move_to_end(storage)

    def _bring(self, storages: Sequence[int]) -> None:
        """Lock these, and copy back those that are on the host."""
        for s in storages:
            self.locked[s] += 1
        for s in storages:
            if self.residency[s] is ON_HOST:
                self._make_room(int(self.player.nbytes[s]), self.player.next_op)
                self.player.prefetch(s)
        for s in storages:
            if self.residency[s] is PREFETCHING:
                self.player.wait(s)
            self._touch(s)

    def _make_room(self, nbytes: int, op: int) -> None:
        """Evict until so many bytes more fit. Raises Stuck naming the op."""
        while self.player.live_bytes + nbytes > self.budget.device_bytes:
            if not self._evict():
                raise Stuck(op)

    def _evict(self) -> bool:
        """The least recently used map that no op has locked leaves for the host."""
        for s in self.cache:
            if not self.locked[s] and (self.player.has_host_copy(s) or self.player.can_offload(s)):
                if not self.player.has_host_copy(s):
                    self.player.offload(s)
                if not self.player.is_settled[s]:
                    self.player.wait(s)
                self._free(s)
                return True
        return False

    def _offload_at_once(self, op: int) -> None:
        """Without the cache: a map starts for the host when it is made."""
        for s in self.tape.creates[op]:
            if s in self.offloadable and self.player.can_offload(s):
                self.player.offload(s)
        self.leaving += [s for s in self.facts.uses[op] if self.residency[s] is OFFLOADING and self._is_last_forward_use(s, op)]

    def _finish_offloads(self) -> None:
        """What is leaving has left before the next such map is made, and before the backward begins."""
        for s in self.leaving:
            if self.residency[s] is OFFLOADING:
                self.player.wait(s)
            self._free(s)
        self.leaving.clear()

    def _is_last_forward_use(self, storage: int, op: int) -> bool:
        return all(need <= op or need >= self.facts.end or self.tape.ops[need].phase is not Phase.FORWARD
                   for need in self.facts.needed_at[storage])

    # --- dynamic workspace -----------------------------------------------------------------------------------------------
    def _algorithm(self, op: int, reuse: int | None) -> str | None:
        """Make room for the leanest run of the op; then the fastest variant whose workspace fits in what is left. One for all its runs."""
        def run_bytes(name: str | None) -> int:
            return self.player.run_bytes(op, reuse, name)

        if op in self.chosen:
            names = [self.chosen[op]]
        else:
            names = [None, *(v.name for v in self.tape.ops[op].variants)] if self.stages.workspace else [None]
        self._make_room(min(map(run_bytes, names)), op)
        left = self.budget.device_bytes - self.player.live_bytes
        fitting = [self.tape.ops[op].variant(name) for name in names if run_bytes(name) <= left]
        self.chosen[op] = min(fitting, key=lambda v: (v.seconds, v.workspace_bytes)).name or None
        return self.chosen[op]

    # --- prefetch --------------------------------------------------------------------------------------------------------
    def _ahead(self) -> dict[int, range]:
        """Per backward op of a convolution, or other layer whose map may be offloaded: the ops up to that of the next such layer."""
        starts = sorted({op for layer in self.layout.layers if layer.kind == "convolution" or layer.x in self.offloadable
                         for op in layer.backward_ops if {*layer.inputs, *layer.W} & set(self.tape.reads[op])})
        return {op: range(op + 1, after + 1) for op, after in zip(starts, starts[1:])}

    def _prefetch(self, op: int, run_bytes: int) -> None:
        """While this op runs, what the next such layer needs comes back, as far as it fits beside it."""
        for later in self.ahead.get(op, ()):
            for s in self._on_host(self.facts.needs[later]):
                if self.player.live_bytes + run_bytes + int(self.player.nbytes[s]) > self.budget.device_bytes:
                    return
                self.player.prefetch(s)
                self._touch(s)

    def _on_host(self, storages: Sequence[int]) -> list[int]:
        """Those on the host, and those from which absent ones will be recomputed."""
        found, stack, seen = [], list(storages), set()
        while stack:
            s = stack.pop()
            if s in seen:
                continue
            seen.add(s)
            if self.residency[s] is ON_HOST:
                found.append(s)
            elif self.residency[s] is ABSENT and s in self.layout.replayable:
                stack += self.tape.reads[self.tape.producer[s]]
        return found
