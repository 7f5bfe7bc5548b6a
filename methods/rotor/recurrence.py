"""Opt(s, t, m): the least forward time by which stages s to t get their backward within m bytes beside the input of s. Compiled.

    Opt(s, t, m) = min of
        checkpoint first   min over j:  F_ck(s) F_none(s+1) ... F_none(j-1)   + Opt(j, t, m - |x_{j-1}|) + Opt(s, j-1, m)
        keep all first                  F_all(s)                              + Opt(s+1, t, m - |saved_s|)

Persistent: what a checkpoint or a run that keeps all has stored stays until its backward. Time of the backward itself is the same for
every schedule and not in it. Bytes are in slots of equal size, rounded up. Import this module when it is needed: numba is slow to load.
"""

from __future__ import annotations

import numpy as np

from vramlab.kernels import compiled
from vramlab.stages import ChainFacts, in_slots, levels_of

INFEASIBLE, KEEP_ALL = -1, 0  # choices beside j, the stage that is checkpointed next


class Recurrence:
    """The table of a chain, for every range of stages and every number of slots up to `slots`."""

    def __init__(self, facts: ChainFacts, slots: int, slot_bytes: int) -> None:
        self.last, self.slots = facts.count - 1, slots
        count = facts.count
        self.table = np.full((count, count, slots + 1), np.inf)
        self.choice = np.full((count, count, slots + 1), INFEASIBLE, np.int16)
        sizes = [in_slots(nbytes, slot_bytes) for nbytes in (facts.x_bytes, facts.saved_bytes)]
        _fill(self.table, self.choice, *sizes, *_needs(facts, slot_bytes), *_seconds(facts))

    def seconds(self, slots: int) -> float:
        """Of the forward runs of the whole chain; infinite where nothing fits."""
        return float(self.table[0, self.last, slots])

    def levels(self) -> list[int]:
        """The numbers of slots at which the chain becomes faster, ascending: one for each schedule that is worth looking at."""
        return levels_of(self.table[0, self.last])


def _needs(facts: ChainFacts, slot_bytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots without which the pieces of a schedule cannot run: [s, t] each.

    drop[i, t]: F_none(i) while the gradients of what is behind t are there, its input apart; last[s, t]: F_all(s); back[s]: B(s).
    """
    count = facts.count
    first = np.arange(count) == count - 1  # per t: ranges that reach the end of the chain are run for the first time
    behind = facts.gradient_bytes
    drop = np.where(first, facts.drop_rise_bytes[:, None], facts.again_drop_rise_bytes[:, None]) + behind
    keep = np.where(first, facts.keep_rise_bytes[:, None], facts.again_keep_rise_bytes[:, None])
    np.fill_diagonal(keep, np.where(first, facts.keep_rise_bytes, facts.again_last_rise_bytes))
    return in_slots(drop, slot_bytes), in_slots(keep + behind, slot_bytes), in_slots(behind + facts.backward_bytes, slot_bytes)


def _seconds(facts: ChainFacts) -> tuple[np.ndarray, np.ndarray]:
    """Of F_none (F_ck takes as long) and F_all: [s, t] each."""
    count = facts.count
    first = np.arange(count) == count - 1
    drop = np.where(first, facts.forward_seconds[:, None], facts.again_drop_seconds[:, None])
    keep = np.where(first, facts.forward_seconds[:, None], facts.again_keep_seconds[:, None])
    np.fill_diagonal(keep, np.where(first, facts.forward_seconds, facts.again_last_seconds))
    return drop, keep


@compiled
def _fill(table, choice, x, saved, drop_needs, keep_needs, back_needs, drop_seconds, keep_seconds):
    """Shorter ranges first."""
    count, slots = table.shape[0], table.shape[2] - 1
    for length in range(count):
        for s in range(count - length):
            t = s + length
            _keep_all_first(table, choice, s, t, saved[s], max(keep_needs[s, t], back_needs[s]), keep_seconds[s, t])
            seconds, needed = 0.0, 0
            for j in range(s + 1, t + 1):
                needed = max(needed, drop_needs[j - 1, t] + (x[j - 2] if j - 1 > s else 0))
                seconds += drop_seconds[j - 1, t]
                inner, outer, best, chosen = table[j, t], table[s, j - 1], table[s, t], choice[s, t]
                for m in range(max(needed, x[j - 1]), slots + 1):
                    total = seconds + inner[m - x[j - 1]] + outer[m]
                    if total < best[m]:
                        best[m] = total
                        chosen[m] = j


@compiled
def _keep_all_first(table, choice, s, t, saved, needed, seconds):
    best, chosen = table[s, t], choice[s, t]
    for m in range(needed if s == t else max(needed, saved), len(best)):
        total = seconds if s == t else seconds + table[s + 1, t, m - saved]
        if total < best[m]:
            best[m] = total
            chosen[m] = KEEP_ALL
