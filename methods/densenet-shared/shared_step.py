"""The step's schedule: maps of dense layers are freed after their forward use, and a layer's are made again when its backward begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vramlab.device import DeviceProfile
from vramlab.player import ABSENT, Player
from vramlab.schedule import Schedule
from vramlab.tape import Phase, Tape


class SharedStep:
    """Writes the schedule. `dense_layers`: per layer its maps, as they are made."""

    def __init__(self, tape: Tape, device: DeviceProfile, dense_layers: Sequence[Sequence[int]]) -> None:
        self.tape, self.player = tape, Player(tape, device)
        self.facts = self.player.facts
        layers = [maps for maps in dense_layers if all(map(self._comes_back, maps))]
        self.layer_of = {s: maps for maps in layers for s in maps}
        self.sources = {maps: self._features(maps) for maps in layers}
        self.held = Counter(s for features in self.sources.values() for s in features)  # by layers that are yet to be made again
        self.forward_end = {s: self._last_forward_use(s) for s in self.layer_of}

    def schedule(self, method: str) -> Schedule:
        """The whole step."""
        self._free_dead([s.id for s in self.tape.storages if s.at_start])
        for op in range(len(self.tape.ops)):
            for maps in {self.layer_of[s] for s in self.facts.needs[op] if s in self.layer_of and self.player.residency[s] is ABSENT}:
                self._make_again(maps)
            self.player.compute(op, self._reuse(op))
            self._free_dead(self.facts.uses[op])
            for s in self.facts.uses[op]:
                if self.forward_end.get(s) == op and self.player.is_settled[s]:
                    self.player.free(s)
        self.held.clear()  # by layers whose backward needed nothing again
        self._free_dead(range(len(self.tape.storages)))
        return self.player.schedule(method)

    def _comes_back(self, storage: int) -> bool:
        """Can it be made again until the backward needs it for the last time, or is it needed no more by then?"""
        needed = [op for op in self.facts.needed_at[storage] if op == self.facts.end or self.tape.ops[op].phase is not Phase.FORWARD]
        return not needed or needed[-1] <= min(self.facts.recomputable_until[self.tape.producer[storage]], self.facts.end - 1)

    def _features(self, maps: Sequence[int]) -> tuple[int, ...]:
        """What the concatenation reads; those that another dense layer makes are not among them, for they come back themselves."""
        reads = self.tape.reads[self.tape.producer[maps[0]]]
        return tuple(s for s in reads if s not in self.layer_of and self.tape.producer[s] is not None)

    def _last_forward_use(self, storage: int) -> int:
        readers = [op for op in self.facts.needed_at[storage] if op < self.facts.end and self.tape.ops[op].phase is Phase.FORWARD]
        return max([self.tape.producer[storage], *readers])

    def _make_again(self, maps: Sequence[int]) -> None:
        """All maps of the layer that the backward needs; what only the next map needed goes as soon as that is there."""
        wanted = [s for s in maps if self.player.is_live(s) and self.player.residency[s] is ABSENT]
        ops = self.player.ops_to_recompute(wanted)
        reads = Counter(s for op in ops for s in self.tape.reads[op])
        for op in ops:
            self.player.recompute(op, self._reuse_again(op, reads))
            reads.subtract(self.tape.reads[op])
            self._free_dead(self.facts.uses[op], reads)
        for s in self.sources.pop(tuple(maps), ()):
            self.held[s] -= 1
            self._free_dead([s])

    def _reuse(self, op: int) -> int | None:
        """In the first run what eager overwrites, and what a dense layer has no more use for in the forward phase."""
        out, taken = self.tape.ops[op].takeover or (None, None)
        if taken is None or self.held[taken] or not self.player.is_settled[taken] or self.player.residency[out] is not ABSENT:
            return None
        return taken if op in (self.facts.last_use[taken], self.forward_end.get(taken)) else None

    def _reuse_again(self, op: int, reads: Counter) -> int | None:
        out, taken = self.tape.ops[op].takeover or (None, None)
        if taken is None or self.held[taken] or not self.player.is_settled[taken] or self.player.residency[out] is not ABSENT:
            return None
        return taken if reads[taken] == 1 and not self.player.is_live(taken) else None

    def _free_dead(self, storages: Sequence[int], reads: Counter | None = None) -> None:
        for s in storages:
            if self.player.is_settled[s] and not self.player.is_live(s) and not self.held[s] and not (reads and reads[s]):
                self.player.free(s)
