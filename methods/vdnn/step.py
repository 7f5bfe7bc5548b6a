"""One step written down: which instructions follow from what is moved.

    forward    Offload X ─► Compute layer ─► Wait X, Free X                    both streams meet at the end of the layer
    backward   search ─► Prefetch X' ─► Compute the layer's backward ─► Wait X'

With `is_async` (vDNN++) the streams meet where something needs it: a map is freed as soon as its copy is known to be done, or when an op
would not fit otherwise; a prefetched map is waited for by the op that reads it. What is on the way is then known from a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vramlab.device import DeviceProfile
from vramlab.liveness import gradient_reuse, last_use
from vramlab.planner import Budget
from vramlab.schedule import Compute, Free, FreeHost, Instruction, Offload, Prefetch, Wait
from vramlab.tape import Op, Phase, Tape

from .offload import SMALL, Moves
from .prefetch import find_prefetch_layer

HERE, LEAVING, AWAY, COMING = "here", "leaving", "away", "coming"
Algorithms = Mapping[int, str | None]  # op -> variant


class Step:
    """Writes one schedule. `algorithms` names the variant of each op, the library's own choice where it names none."""

    def __init__(self, tape: Tape, device: DeviceProfile, budget: Budget, moves: Moves, algorithms: Algorithms, *,
                 is_async: bool = False, skips_small: bool = False) -> None:
        self.tape, self.device, self.budget, self.moves, self.algorithms = tape, device, budget, moves, algorithms
        self.is_async, self.skips_small = is_async, skips_small
        self.instructions: list[Instruction] = []
        self.place = {s: HERE for found in moves.storages for s in found}  # of what moves
        self.leaving: list[int] = []  # to be freed when their copy is done
        self.last = last_use(tape)
        self.kinds = [layer.kind for layer in moves.layers]
        self.is_offloaded = [bool(found) for found in moves.storages]
        self.is_prefetched = [False] * len(self.kinds)
        self.owner = {op: layer.id for layer in moves.layers for op in layer.backward_ops}
        self.clock = _Clock(device)
        self.live_bytes = sum(s.nbytes for s in tape.storages if s.at_start)

    def write(self) -> tuple[Instruction, ...]:
        """All of it."""
        self._drop([s.id for s in self.tape.storages if s.at_start and not s.at_end and self.last[s.id] is None])
        for op in self.tape.ops:
            if op.phase is Phase.FORWARD:
                self._forward(op)
        rest = [op for op in self.tape.ops if op.phase is not Phase.FORWARD]
        begun: set[int] = set()
        for group in self._groups(rest):
            layer = self.owner.get(group[0].id)
            coming = self._prefetch_for(layer) if layer is not None and layer not in begun else ()
            begun |= {layer} - {None}
            for op in group:
                self._run(op)
            if not self.is_async:
                self._arrive(coming)
        return tuple(self.instructions)

    # --- forward and backward ------------------------------------------------------------------------------------------
    def _forward(self, op: Op) -> None:
        moved = self.moves.starts_at.get(op.id, ())
        for s in moved:
            self._offload(s)
        self._run(op)
        if not self.is_async:
            for s in moved:
                self._depart(s)

    def _groups(self, ops: Sequence[Op]) -> list[list[Op]]:
        """The backward op by op, cut where another layer's begins; what belongs to no layer goes with what is before it."""
        groups: list[list[Op]] = []
        for op in ops:
            owner = self.owner.get(op.id)
            if not groups or owner not in (None, self.owner.get(groups[-1][0].id)):
                groups.append([])
            groups[-1].append(op)
        return groups

    def _prefetch_for(self, layer: int) -> tuple[int, ...]:
        """What starts to come back while this layer's backward runs."""
        if self.skips_small and self.kinds[layer] in SMALL:
            return ()
        found = find_prefetch_layer(layer, self.kinds, self.is_offloaded, self.is_prefetched)
        coming = () if found is None else self.moves.storages[found]
        for s in coming:
            if s in self.leaving:
                self.leaving.remove(s)  # it has not left yet, and stays
        coming = tuple(s for s in coming if self.place[s] == AWAY)
        for s in coming:
            self._prefetch(s)
        return coming

    def _run(self, op: Op) -> None:
        """One op: what it reads is there before, what nobody needs is gone after."""
        reads = self.tape.reads[op.id]
        for s in reads:
            if self.place.get(s) == AWAY:
                self._prefetch(s, reads)  # missing at the start of the op: a blocking fetch
            self._arrive([s])
        reuse = gradient_reuse(self.tape, op, op.takeover is not None and self.last[op.takeover[1]] == op.id)
        if reuse is not None:
            self._land(reuse)
        variant = op.variant(self.algorithms.get(op.id))
        made = sum(self.tape.storages[s].nbytes for s in self.tape.creates[op.id]) - self._nbytes(reuse)
        self._make_room(made + variant.workspace_bytes, reads)
        self.instructions.append(Compute(op.id, reuse, variant.name or None))
        self.clock.run(variant.seconds)
        self.live_bytes += made
        used = {*reads, *op.mutates, *self.tape.creates[op.id]} - {reuse}
        self._drop([s for s in sorted(used) if self.last[s] == op.id and not self.tape.storages[s].at_end])
        for s in [s for s in self.leaving if self.clock.is_done(s)]:
            self._depart(s)

    # --- instructions --------------------------------------------------------------------------------------------------
    def _offload(self, s: int) -> None:
        self.instructions.append(Offload(s))
        self.clock.copy(s, self._nbytes(s), to_host=True)
        self.place[s] = LEAVING
        if self.is_async:
            self.leaving.append(s)

    def _depart(self, s: int) -> None:
        """The copy is done and the device's copy goes."""
        self.instructions += [Wait(s), Free(s)]
        self.clock.wait(s)
        self.live_bytes -= self._nbytes(s)
        self.place[s] = AWAY
        if s in self.leaving:
            self.leaving.remove(s)

    def _prefetch(self, s: int, held: Sequence[int] = ()) -> None:
        self._make_room(self._nbytes(s), held)
        self.instructions.append(Prefetch(s))
        self.clock.copy(s, self._nbytes(s), to_host=False)
        self.live_bytes += self._nbytes(s)
        self.place[s] = COMING

    def _arrive(self, storages: Sequence[int]) -> None:
        for s in storages:
            if self.place.get(s) == COMING:
                self._land(s)

    def _land(self, s: int) -> None:
        """Nothing of it is in flight and nothing on the host; the device keeps it."""
        if self.place.get(s) in (COMING, LEAVING):
            self.instructions += [Wait(s), FreeHost(s)]
            self.clock.wait(s)
            self.place[s] = HERE
            if s in self.leaving:
                self.leaving.remove(s)

    def _drop(self, storages: Sequence[int]) -> None:
        for s in storages:
            self._land(s)
            self.instructions.append(Free(s))
            self.live_bytes -= self._nbytes(s)

    def _make_room(self, nbytes: int, held: Sequence[int] = ()) -> None:
        """Wait for what is leaving, the oldest first, as far as the budget needs it; what is held stays."""
        for s in [s for s in self.leaving if s not in held]:
            if self.live_bytes + nbytes > self.budget.device_bytes:
                self._depart(s)

    def _nbytes(self, s: int | None) -> int:
        return 0 if s is None else self.tape.storages[s].nbytes


class _Clock:
    """The compute stream and the copy engines, as the simulator has them."""

    def __init__(self, device: DeviceProfile) -> None:
        self.device, self.now = device, 0.0
        self.free = {True: 0.0, False: 0.0}  # engine to the host, to the device
        self.end: dict[int, float] = {}

    def run(self, seconds: float) -> None:
        self.now += seconds

    def copy(self, s: int, nbytes: int, *, to_host: bool) -> None:
        engine = to_host or not self.device.is_full_duplex
        start = max(self.now, self.free[engine], self.end.get(s, 0.0))
        self.free[engine] = self.end[s] = start + self.device.copy_seconds(nbytes, to_host=to_host)

    def wait(self, s: int) -> None:
        self.now = max(self.now, self.end[s])

    def is_done(self, s: int) -> bool:
        return self.end[s] <= self.now
