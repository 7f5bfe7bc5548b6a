"""Brute force over the persistent schedules of a small chain: Dijkstra over what is stored, one operation at a time.

    F_drop(i)   runs stage i and leaves its map in passing; its input stays if it is stored, and is stored now or gone if it was in passing
    F_all(i)    runs stage i and stores what its backward needs, and its input
    B(b)        the backward of the last stage that has not had its; what that needed is gone
    out, back   what has just been read by a first run leaves the device, at a price; it comes back for nothing

What is stored stays until its backward (persistence), on the device or away. The memory of a state is the sum of what is stored there.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random

import numpy as np

from vramlab.stages import ChainFacts


@dataclass(frozen=True, slots=True)
class State:
    maps: frozenset[int] = frozenset()  # stages whose x is stored by itself
    saved: frozenset[int] = frozenset()  # stages that keep what their backward needs
    away: frozenset[tuple[str, int]] = frozenset()  # ("x", stage) or ("inside", stage) that are not on the device
    passing: int | None = None  # the stage whose x is there until the next run
    ran: int = 0  # stages that have run
    left: int = 0  # stages that have not had their backward
    may_leave: frozenset[tuple[str, int]] = frozenset()  # just read or made by a first run


@dataclass(frozen=True)
class BruteForce:
    """`price[k]` of moving x of stage k, `inside_price[k]` of the rest of what it keeps; nothing moves without."""

    facts: ChainFacts
    limit: int
    price: np.ndarray | None = None
    inside_price: np.ndarray | None = None

    def least(self) -> float:
        """Forward seconds and prices of the best schedule; infinite where there is none."""
        total = self.facts.count
        tie = count()
        queue = [(0.0, next(tie), State(left=total))]
        done = set()
        while queue:
            cost, _, state = heapq.heappop(queue)
            if state in done:
                continue
            done.add(state)
            if state.left == 0:
                return cost
            for extra, then in self.moves(state):
                if then not in done:
                    heapq.heappush(queue, (cost + extra, next(tie), then))
        return float("inf")

    def held(self, state: State) -> int:
        f = self.facts
        nbytes = sum(int(f.x_bytes[k]) for k in state.maps) + sum(int(f.saved_bytes[k]) for k in state.saved)
        nbytes -= sum(int(f.x_bytes[k] if what == "x" else f.saved_bytes[k] - f.x_bytes[k]) for what, k in state.away)
        return nbytes + (0 if state.passing is None else int(f.x_bytes[state.passing]))

    def moves(self, state: State) -> Iterator[tuple[float, State]]:
        f, b = self.facts, state.left - 1
        behind = self.held(state) + int(f.gradient_bytes[b])
        for i in range(b + 1):
            if self.is_there(state, i - 1):
                yield from self.runs(state, i, behind)
        if b in state.saved and self.is_there(state, b - 1, stored=True) and ("inside", b) not in state.away and ("x", b) not in state.away:
            if behind - int(f.saved_bytes[b]) + int(f.backward_bytes[b]) <= self.limit:
                yield 0.0, replace(state, saved=state.saved - {b}, maps=state.maps - {b - 1}, passing=None, left=b, may_leave=frozenset())
        for item in state.away:
            back = replace(state, away=state.away - {item}, may_leave=frozenset())
            if self.held(back) <= self.limit:
                yield 0.0, back
        for what, k in state.may_leave if self.price is not None else ():
            yield float((self.price if what == "x" else self.inside_price)[k]), replace(
                state, away=state.away | {(what, k)}, may_leave=state.may_leave - {(what, k)})

    def is_there(self, state: State, k: int, stored: bool = False) -> bool:
        if k < 0:
            return True
        is_stored = (k in state.maps or k in state.saved) and ("x", k) not in state.away
        return is_stored or (state.passing == k and not stored)

    def runs(self, state: State, i: int, behind: int) -> Iterator[tuple[float, State]]:
        f, is_first, is_last = self.facts, i >= state.ran, i == state.left - 1
        source_passes = state.passing == i - 1 and i > 0
        stored = state.maps | ({i - 1} if source_passes else set())
        read = {("x", i - 1)} if is_first and i > 0 else set()
        ran = max(state.ran, i + 1)
        if i < f.count - 1 and not is_last and not self.is_there(state, i):
            seconds = float(f.forward_seconds[i] if is_first else f.again_drop_seconds[i])
            if behind + int(f.drop_rise_bytes[i] if is_first else f.again_drop_rise_bytes[i]) <= self.limit:
                yield seconds, replace(state, maps=stored, passing=i, ran=ran, may_leave=frozenset(read))
                if source_passes:
                    yield seconds, replace(state, passing=i, ran=ran, may_leave=frozenset())
        if i not in state.saved and i not in state.maps:
            again = (f.again_last_seconds, f.again_last_rise_bytes) if is_last else (f.again_keep_seconds, f.again_keep_rise_bytes)
            seconds, rise = (f.forward_seconds, f.keep_rise_bytes) if is_first else again
            if behind + int(rise[i]) <= self.limit:
                leave = read | ({("inside", i)} if is_first else set())
                yield float(seconds[i]), replace(state, maps=stored, saved=state.saved | {i}, passing=None, ran=ran,
                                                 may_leave=frozenset(leave))


def random_chain(random: Random, stages: int) -> ChainFacts:
    """Unlike stages: few bytes each, so that every number of bytes makes a difference."""
    def some(low: int, high: int) -> np.ndarray:
        return np.array([random.randint(low, high) for _ in range(stages)], np.int64)

    x = some(1, 4)
    x[-1] = 0
    saved = x + some(0, 5)
    again_drop, again_keep = some(1, 9).astype(float), some(1, 9).astype(float)
    return ChainFacts(
        x_bytes=x, saved_bytes=saved, gradient_bytes=np.append(some(1, 4)[1:], 0), forward_seconds=some(1, 9).astype(float),
        drop_rise_bytes=x + some(0, 4), keep_rise_bytes=saved + some(0, 3),
        again_drop_seconds=again_drop, again_drop_rise_bytes=x + some(0, 4),
        again_keep_seconds=again_keep, again_keep_rise_bytes=saved + some(0, 3),
        again_last_seconds=again_keep - some(0, 1), again_last_rise_bytes=saved + some(0, 2),
        backward_seconds=some(1, 9).astype(float), backward_bytes=saved + some(0, 6))
