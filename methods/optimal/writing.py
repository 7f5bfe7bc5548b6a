"""A decision of the program as a schedule: in each gap copies to the host start, room is made, copies back start and are waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vramlab.schedule import Free, FreeHost, Instruction, Offload, Prefetch, Wait

from .mixed import Decision, Mixed


def written(mixed: Mixed, decision: Decision) -> tuple[Instruction, ...]:
    """The schedule that the decision says."""
    return tuple(_Writer(mixed, decision).write())


class _Writer:
    def __init__(self, mixed: Mixed, decision: Decision) -> None:
        self.mixed, self.decision = mixed, decision
        self.here = frozenset(s for s in mixed.storages if mixed.tape.storages[s].at_start)
        self.leaving: set[int] = set()
        self.arriving: set[int] = set()
        self.offloads = _in_order(decision.offloads, decision.offload_start)
        self.prefetches = _in_order(decision.prefetches, decision.prefetch_start)
        self.instructions: list[Instruction] = []

    def write(self) -> list[Instruction]:
        for q, is_used in enumerate(self.decision.used):
            if is_used:
                self._gap(q)
                self._run(q)
        return self.instructions

    def _gap(self, q: int) -> None:
        reads, stays = self.mixed._reads(q), self.decision.on_device[q]
        self._each(Offload, self.offloads.get(q, []))
        self.leaving |= set(self.offloads.get(q, []))
        gone = sorted(self.here - stays)
        for s in gone:
            if s in self.leaving | (self.arriving - reads):
                self._wait(s)
        self._each(Free, [s for s in gone if s not in reads])
        back = self.prefetches.get(q, [])
        self._each(Prefetch, back)
        self.arriving |= set(back)
        self.here = self.here - (set(gone) - reads) | set(back)
        for s in sorted(self.arriving & reads):
            self._wait(s)

    def _each(self, kind: Callable[[int], Instruction], storages: Iterable[int]) -> None:
        self.instructions += [kind(member) for s in storages for member in self.mixed.members[s]]

    def _wait(self, s: int) -> None:
        self._each(Wait, [s])
        if s in self.arriving:
            self._each(FreeHost, [s])
        self.leaving.discard(s)
        self.arriving.discard(s)

    def _run(self, q: int) -> None:
        position, stays = self.mixed.positions[q], self.decision.on_device[q]
        if position.run is None:
            return
        taken = self.here & self.mixed._reads(q) - stays  # only what the output takes over may be gone after it was read
        self.instructions += position.run.instructions(is_first=position.is_first, reuse=next(iter(taken), None))
        self.here = self.here - taken | position.run.makes & set(self.mixed.storages)


def _in_order(gaps: list[frozenset[int]], start: dict[int, float]) -> dict[int, list[int]]:
    """Copies by gap, in the order in which they start. One that starts after another is not issued in an earlier gap."""
    issued = {s: q for q, found in enumerate(gaps) for s in found}
    order = sorted(issued, key=lambda s: (start.get(s, 0.0), issued[s], s)) if start else sorted(issued, key=lambda s: (issued[s], s))
    found: dict[int, list[int]] = {}
    latest = 0
    for s in order:
        latest = max(latest, issued[s])
        found.setdefault(latest, []).append(s)
    return found
