"""Guided execution: evictions as chosen, swaps in by trigger, and on-demand swapping where the choice does not reach."""

from __future__ import annotations

import numpy as np

from vramlab.player import ON_HOST
from vramlab.rollout import Action, Release, Rollout
from vramlab.tape import Phase

from .choice import Choice


class Guided:
    """The policy: one object plays one step. `triggers`: storage -> the op before which its swap in starts."""

    def __init__(self, choice: Choice, triggers: dict[int, int]) -> None:
        self.planned = {c.storage: (c, Action.SWAP) for c in choice.swaps} | {c.storage: (c, Action.RECOMPUTE) for c in choice.recomputes}
        self.out_ends = choice.lanes.swap_out_ends()
        self.triggers = sorted((op, s) for s, op in triggers.items())
        self.due: list[int] = []

    def release(self, candidates: np.ndarray, rollout: Rollout) -> Release | None:
        """Of what was chosen and has had its evicted access: what has been copied by now, then what is recomputed, then what is still being
        copied, each in the order of these accesses. Else the least recently used, on demand."""
        ready = [int(s) for s in candidates if int(s) in self.planned and self._is_between(int(s), rollout)]
        for s in sorted(ready, key=lambda s: (self.out_ends.get(s, 0.0) > rollout.clock_seconds, self.planned[s][1] is Action.RECOMPUTE,
                                              self.planned[s][0].evicted, s)):
            if release := _possible(s, self.planned[s][1], rollout):
                return release
        for s in candidates[np.argsort(rollout.last_access_seconds[candidates], kind="stable")].tolist():
            if release := _possible(s, Action.SWAP, rollout):
                return release
        return None

    def prefetch(self, rollout: Rollout) -> list[int]:
        """What has been triggered and fits at every op until its back access, the soonest needed first."""
        while self.triggers and self.triggers[0][0] <= rollout.next_op:
            self.due.append(self.triggers.pop(0)[1])
        waiting = [s for s in self.due if rollout.residency[s] is ON_HOST]
        self.due = [s for s in self.due if rollout.next_need[s] <= rollout.facts.end and rollout.next_need[s] >= self.planned[s][0].back]
        chosen, extra = [], 0
        for s in sorted(waiting, key=lambda s: int(rollout.next_need[s])):
            nbytes = int(rollout.nbytes[s])
            forecast = rollout.forecast_bytes(min(int(rollout.next_need[s]), rollout.facts.end))
            if max(int(forecast.max(initial=0)), rollout.live_bytes) + extra + nbytes > rollout.budget.device_bytes:
                break
            chosen.append(s)
            extra += nbytes
        return chosen

    def _is_between(self, s: int, rollout: Rollout) -> bool:
        c = self.planned[s][0]
        return c.evicted < rollout.next_op and rollout.next_need[s] >= c.back


def _possible(s: int, action: Action, rollout: Rollout) -> Release | None:
    """The action, or the other one where this cannot be."""
    made_by = rollout.tape.producer[s]
    is_map = rollout.tape.ops[made_by].phase is Phase.FORWARD
    possible = [a for a, can in ((Action.SWAP, rollout.can_offload(s)), (Action.RECOMPUTE, is_map and rollout.can_recompute(s))) if can]
    return Release(s, action if action in possible else possible[0]) if possible else None
