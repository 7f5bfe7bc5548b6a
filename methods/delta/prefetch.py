"""DELTA's prefetch: swapped storages come back before they are needed, while the compute stream goes on."""

from __future__ import annotations

from vramlab.player import ON_HOST
from vramlab.rollout import Rollout


class Prefetcher:
    """A stack of what was swapped out. The backward phase needs storages in the reverse order, so the last `window` are looked at."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._stack: list[tuple[int, int]] = []  # (storage, the op that it made room for), oldest first

    def note_swap(self, storage: int, op: int) -> None:
        """It has just left for the host."""
        self._stack = [entry for entry in self._stack if entry[0] != storage]
        self._stack.append((storage, op))

    def due(self, rollout: Rollout) -> list[int]:
        """What to start copying back now: the soonest needed first, as long as each fits at every op until it is used."""
        self._stack = [entry for entry in self._stack if rollout.residency[entry[0]] is ON_HOST]
        last = self._stack[-self.window:] if self.window else []
        window = sorted((s for s, op in last if op < rollout.next_op), key=lambda s: int(rollout.next_need[s]))
        chosen: list[int] = []
        extra = 0
        for s in window:
            nbytes, needed_at = int(rollout.nbytes[s]), int(rollout.next_need[s])
            forecast = rollout.forecast_bytes(min(needed_at, rollout.facts.end))
            peak = max(int(forecast.max(initial=0)), rollout.live_bytes)
            if peak + extra + nbytes > rollout.budget.device_bytes:
                break
            chosen.append(s)
            extra += nbytes
        return chosen
