"""Least forward time, and price of copies, by which a chain gets its backward within m bytes: rotor's recurrence with a way to the host.

    Again(s, t, m)   stages that run again: checkpoint first, or keep all first, as in rotor; nothing moves
    First(s, m)      stages s to the last, for the first time:  min of
        checkpoint first   min over j, o:  F_ck(s) F_none ... + First(j, m - |x_{j-1}| + o |x_{s-1}|) + Again(s, j-1, m) + o price(x_{s-1})
        keep all first     min over o, p:  F_all(s) + First(s+1, m - |saved_s| + o |x_{s-1}| + p |inside_s|) + prices

o: the input of s leaves after the first run of s, and is back before s is used again; p: so does what s keeps beside x. A price is a share
of the seconds of both copies: of two resources, compute and link, one is minimised at a price of the other. Bytes are in slots, rounded up.
Import this module when it is needed: numba is slow to load.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vramlab.kernels import compiled
from vramlab.stages import ChainFacts, in_slots, levels_of

INFEASIBLE, KEEP_ALL = -1, 0  # choices beside j, the stage that is checkpointed next
INPUT, INSIDE = 1, 2  # what leaves, as bits


class Prices(NamedTuple):
    """Seconds that each copy counts, out and back: of x and of what a stage keeps beside it; infinite for what stays."""

    x: np.ndarray
    inside: np.ndarray


class Again:
    """The table of all ranges that end before the last stage. Its `choice` says j, or KEEP_ALL."""

    def __init__(self, facts: ChainFacts, slots: int, slot_bytes: int) -> None:
        count = facts.count
        self.facts, self.slots, self.slot_bytes = facts, slots, slot_bytes
        self.x, self.saved = (in_slots(nbytes, slot_bytes) for nbytes in (facts.x_bytes, facts.saved_bytes))
        self.inside = np.maximum(facts.saved_bytes - facts.x_bytes, 0) // slot_bytes  # what leaves frees no more than whole slots
        self.x_away = facts.x_bytes // slot_bytes
        behind = facts.gradient_bytes
        keep, seconds = (np.repeat(column[:, None], count, 1) for column in (facts.again_keep_rise_bytes, facts.again_keep_seconds))
        np.fill_diagonal(keep, facts.again_last_rise_bytes)
        np.fill_diagonal(seconds, facts.again_last_seconds)
        self.back = in_slots(behind + facts.backward_bytes, slot_bytes)
        self.table = np.full((count, count, slots + 1), np.inf)
        self.choice = np.full((count, count, slots + 1), INFEASIBLE, np.int16)
        _again(self.table, self.choice, self.x, self.saved, in_slots(facts.again_drop_rise_bytes[:, None] + behind, slot_bytes),
               in_slots(keep + behind, slot_bytes), self.back, facts.again_drop_seconds, seconds)


class First:
    """The row of ranges that end with the last stage, at given prices."""

    def __init__(self, again: Again, prices: Prices) -> None:
        facts, count = again.facts, again.facts.count
        behind = facts.gradient_bytes[-1]
        self.table = np.full((count, again.slots + 1), np.inf)
        self.choice = np.full((count, again.slots + 1), INFEASIBLE, np.int16)
        self.away = np.zeros((count, again.slots + 1), np.int8)
        _first(self.table, self.choice, self.away, again.table, again.x, again.saved, again.x_away, again.inside,
               in_slots(facts.drop_rise_bytes + behind, again.slot_bytes), in_slots(facts.keep_rise_bytes + behind, again.slot_bytes),
               again.back, facts.forward_seconds, prices.x, prices.inside)

    def levels(self) -> list[int]:
        """The numbers of slots at which the chain becomes cheaper, ascending."""
        return levels_of(self.table[0])


@compiled
def _again(table, choice, x, saved, drop_needs, keep_needs, back_needs, drop_seconds, keep_seconds):
    """Shorter ranges first; all of them before the last stage."""
    count, slots = table.shape[0] - 1, table.shape[2] - 1
    for length in range(count):
        for s in range(count - length):
            t = s + length
            best, chosen = table[s, t], choice[s, t]
            needed = max(keep_needs[s, t], back_needs[s])
            for m in range(needed if length == 0 else max(needed, saved[s]), slots + 1):
                total = keep_seconds[s, t] if length == 0 else keep_seconds[s, t] + table[s + 1, t, m - saved[s]]
                if total < best[m]:
                    best[m] = total
                    chosen[m] = KEEP_ALL
            seconds, needed = 0.0, 0
            for j in range(s + 1, t + 1):
                needed = max(needed, drop_needs[j - 1, t] + (x[j - 2] if j - 1 > s else 0))
                seconds += drop_seconds[j - 1]
                for m in range(max(needed, x[j - 1]), slots + 1):
                    total = seconds + table[j, t, m - x[j - 1]] + table[s, j - 1, m]
                    if total < best[m]:
                        best[m] = total
                        chosen[m] = j


@compiled
def _first(table, choice, away, again, x, saved, x_away, inside, drop_needs, keep_needs, back_needs, seconds, x_price, inside_price):
    """From the last stage to the first."""
    count, slots = table.shape[0], table.shape[1] - 1
    for s in range(count - 1, -1, -1):
        best, chosen, gone = table[s], choice[s], away[s]
        for leaves in range(4):
            if (leaves & INPUT and s == 0) or (leaves & INSIDE and inside[s] == 0) or (leaves and s == count - 1):
                continue
            freed = (x_away[s - 1] if leaves & INPUT else 0) + (inside[s] if leaves & INSIDE else 0)
            price = (x_price[s - 1] if leaves & INPUT else 0.0) + (inside_price[s] if leaves & INSIDE else 0.0)
            for m in range(max(keep_needs[s], back_needs[s]), slots + 1):
                left = min(m - saved[s] + freed, slots)
                if s < count - 1 and left < 0:
                    continue
                total = seconds[s] + price + (table[s + 1, left] if s < count - 1 else 0.0)
                if total < best[m]:
                    best[m] = total
                    chosen[m] = KEEP_ALL
                    gone[m] = leaves
        for leaves in range(2 if s else 1):
            freed, price = (x_away[s - 1], x_price[s - 1]) if leaves else (0, 0.0)
            total_seconds, needed = price, drop_needs[s]
            for j in range(s + 1, count):
                if j - 1 > s:
                    needed = max(needed, drop_needs[j - 1] + x[j - 2] - freed)
                total_seconds += seconds[j - 1]
                for m in range(needed, slots + 1):
                    left = min(m - x[j - 1] + freed, slots)
                    if left < 0:
                        continue
                    total = total_seconds + table[j, left] + again[s, j - 1, m]
                    if total < best[m]:
                        best[m] = total
                        chosen[m] = j
                        gone[m] = leaves
