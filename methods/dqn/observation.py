"""What the agent sees at a decision: a short list of candidates, and one row of numbers for each action.

The action space has a fixed layout, of which a mask says what is possible now:

    0                     do nothing (of a prefetch only)
    1 .. K                swap candidate k out
    K+1 .. 2K             drop candidate k, to be computed again
    2K+1 .. 2K+P          fetch candidate p

Times are shares of the step without memory actions, bytes shares of the budget. Nothing names a tape or a device, so that one
agent serves many.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, log1p

import numpy as np

from vramlab.player import ABSENT, ON_HOST
from vramlab.rollout import NESTED_RECOMPUTES

from .play import NOTHING, PREFETCH_CHOICES, Answer, Move, Play, Question

CANDIDATES = 16
ACTIONS = 1 + 2 * CANDIDATES + PREFETCH_CHOICES
# A time of this share of the step, and a cost per byte of this many steps per budget, come out as log 2.
SMALL = 1e-3
# A ratio of this logarithm, about ten thousand, is 1 in the wide columns.
WIDE = 9.2
# What a second of the link to the device is worth, in seconds of the step.
LINK_PRICE = 0.03


@dataclass(frozen=True, slots=True)
class Observation:
    """One decision. Rows of actions that are masked are zero."""

    features: np.ndarray  # float32 [ACTIONS, FEATURES]
    mask: np.ndarray  # bool [ACTIONS]
    storages: np.ndarray  # int64 [ACTIONS]: what the action is about, -1 for doing nothing
    answers: tuple[Answer | None, ...]  # per action, None where it is masked


class Observer:
    """Makes observations of one play."""

    def __init__(self, play: Play) -> None:
        self.play = play
        tape, device = play.tape, play.device
        self.seconds = np.array([op.seconds for op in tape.ops])
        self.until_op = np.concatenate([[0.0], np.cumsum(self.seconds), [self.seconds.sum()]])  # tape seconds before each op, end, never
        self.step_seconds = max(float(self.until_op[-1]), 1e-12)
        self.own = np.array([0.0 if p is None else self.seconds[p] for p in tape.producer])
        self.copy_in = device.copy_seconds(0, to_host=False) + play.nbytes / device.h2d_bytes_per_second
        self.copy_out = device.copy_seconds(0, to_host=True) + play.nbytes / device.d2h_bytes_per_second
        self._until, self._own, self._copy_in = self.until_op.tolist(), self.own.tolist(), self.copy_in.tolist()  # one by one
        self._nbytes = play.nbytes.tolist()
        self.bytes = float(max(play.budget.device_bytes, 1))
        fixed = sum(s.nbytes for s in tape.storages if s.at_start and s.at_end)
        moving = play.facts.there_from >= 0
        self.room = float(max(play.budget.device_bytes - fixed, 1))
        self.price = self._price()
        self.constants = [
            _log(self.price * self.room, self.step_seconds),
            fixed / self.bytes,
            _log(float(play.facts.inner_bytes.max(initial=0)) - fixed, self.room),
            _log(float(self.copy_in[moving].sum()), self.step_seconds),
        ]

    def _price(self) -> float:
        """Seconds a byte: about what the last byte costs that has to leave, were every choice made alone.

        What the links can carry beside the compute is free; the rest is computed again, the cheapest a byte first.
        """
        play, facts, least = self.play, self.play.facts, 1e-2 * self.step_seconds / self.room
        peak = int(facts.inner_bytes.argmax()) if facts.end else 0
        excess = float(facts.inner_bytes.max(initial=0) - play.budget.device_bytes)
        if excess <= 0:
            return least
        now, rest = float(self.until_op[peak]), float(self.until_op[facts.end] - self.until_op[peak])
        free = min(now * play.device.d2h_bytes_per_second, rest * play.device.h2d_bytes_per_second) if play.swaps else 0.0
        last = np.array([needed[-1] if needed else -1 for needed in facts.needed_at])
        across = np.flatnonzero((facts.there_from >= 0) & (facts.there_from < peak) & (last > peak) & (play.nbytes > 0))
        density = np.sort(self.own[across] / play.nbytes[across]) if play.drops else self.copy_in[across] / play.nbytes[across]
        order = np.argsort(self.own[across] / play.nbytes[across], kind="stable")
        covered = np.cumsum(play.nbytes[across][order])
        at = max(int(np.searchsorted(covered, max(0.0, excess - free))), len(density) // 3)
        return max(least, float(density[min(at, len(density) - 1)])) if len(density) else least

    def observe(self, question: Question) -> Observation:
        """The rows of one question."""
        play = self.play
        features, mask = np.zeros((ACTIONS, FEATURES), np.float32), np.zeros(ACTIONS, np.bool_)
        storages, answers = np.full(ACTIONS, -1, np.int64), [None] * ACTIONS
        forecast = play.forecast_bytes(play.facts.end)
        shared = self._global(question, forecast)
        self._stale_now = self._stale_seconds()
        self._over: dict[int, np.ndarray] = {}
        rows = [(0, Answer(NOTHING.move))] if question.fetchable else []
        rows += [(1 + 2 * CANDIDATES + i, Answer(Move.PREFETCH, s)) for i, s in enumerate(question.fetchable)]
        swappable, droppable = set(question.swappable), set(question.droppable)
        for k, s in enumerate(self.shortlist(question)):
            if s in swappable:
                rows.append((1 + k, Answer(Move.SWAP, s)))
            if s in droppable:
                rows.append((1 + CANDIDATES + k, Answer(Move.DROP, s)))
        local: dict[int, list[float]] = {}
        for action, answer in rows:
            s = answer.storage
            if s not in local:
                local[s] = self._local(s, question, forecast) if s >= 0 else [0.0] * LOCAL
            kind = [0.0] * len(Move)
            kind[answer.move] = 1.0
            features[action] = [*kind, *self._cost(answer, local[s], question), *local[s], *shared]
            mask[action], storages[action], answers[action] = True, s, answer
        return Observation(features, mask, storages, tuple(answers))

    # --- the short list ----------------------------------------------------------------------------------------------------
    def shortlist(self, question: Question) -> list[int]:
        """At most CANDIDATES storages, the first few by each of several criteria."""
        play = self.play
        swap, drop = np.array(question.swappable, np.int64), np.array(question.droppable, np.int64)
        if not len(swap) and not len(drop):
            return []
        least = min(question.short_bytes, SMALL * self.room)
        for_all = self._union(swap, drop)
        if (play.nbytes[for_all] >= least).any():  # small ones go only when nothing else can
            swap, drop = swap[play.nbytes[swap] >= least], drop[play.nbytes[drop] >= least]
        everything = self._union(swap, drop)
        if len(everything) <= CANDIDATES:
            return everything.tolist()

        def of(among: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            """Of each: bytes that are of use, seconds since its last access, seconds of the tape before its next need."""
            useful = np.minimum(play.nbytes[among], max(4 * question.short_bytes, 1)).astype(np.float64)
            return useful, self._stale_now[among], self.until_op[play.next_need[among]]

        nbytes, stale, need = of(everything)
        rankings = [(everything, -nbytes * stale, 2), (everything, -need, 2), (everything, -need * nbytes, 2)]
        if len(swap):
            nbytes, _, need = of(swap)
            out = self._out_stalls(swap)
            free_first = np.where(out <= 0, -1e30, 0.0) - nbytes * (need - self.copy_in[swap])
            rankings += [(swap, out / nbytes, 3), (swap, free_first, 2)]
        if len(drop):
            (nbytes, stale, need), own = of(drop), self.own[drop]
            rankings += [(drop, own / nbytes, 3), (drop, (own + self.step_seconds * SMALL) / (nbytes * stale), 2),
                         (drop, own / (nbytes * np.maximum(need - self.until_op[play.next_op], 1e-9)), 2)]
            rankings.insert(0, (drop, own / (play.nbytes[drop] * stale + 1e-30), 3))
        chosen: dict[int, None] = {}
        for among, scores, count in rankings:
            chosen.update(dict.fromkeys(among[_least(scores, count)].tolist()))
        return list(chosen)[:CANDIDATES]

    def _union(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """The storages of both, ascending."""
        is_there = np.zeros(len(self.play.nbytes), np.bool_)
        is_there[one] = is_there[other] = True
        return np.flatnonzero(is_there)

    def _stale_seconds(self) -> np.ndarray:
        """Per storage: how long ago it was last accessed, at least a ten-thousandth of the step."""
        return np.maximum(self.play.clock_seconds - self.play.last_access_seconds, 1e-4 * self.step_seconds)

    def _out_stalls(self, storages: np.ndarray) -> np.ndarray:
        """Per storage: how long the compute stream would stand still if it left for the host now."""
        return np.maximum(0.0, self.play.out_end_seconds_of(storages) - self.play.clock_seconds)

    # --- rows --------------------------------------------------------------------------------------------------------------
    def _global(self, question: Question, forecast: np.ndarray) -> list[float]:
        play, T = self.play, self.step_seconds
        self._away = np.array(sorted(play.on_host), np.int64)
        self._away_need, self._away_in = self.until_op[play.next_need[self._away]], self.copy_in[self._away]
        excess = float(max(forecast.max(initial=0) - play.budget.device_bytes, 0))
        is_over = np.flatnonzero(forecast > play.budget.device_bytes)
        over_until = self.until_op[play.next_op + int(is_over[-1]) + 1] if len(is_over) else self.until_op[play.next_op]
        now = self.until_op[play.next_op]
        phase = play.tape.ops[min(play.next_op, play.facts.end - 1)].phase
        return [
            *self.constants,
            now / T, float(phase == "forward"), (over_until - now) / T,
            _log(question.short_bytes, self.room), question.short_bytes / self.room, _log(excess, self.room), excess / self.room,
            max(0.0, play.out_free_seconds - play.clock_seconds) / T, max(0.0, play.in_free_seconds - play.clock_seconds) / T,
            float(self.copy_in[self._away].sum()) / T, play.depth / NESTED_RECOMPUTES, play.recompute_spent_seconds / T,
        ]

    def _local(self, s: int, question: Question, forecast: np.ndarray) -> list[float]:
        play, T, nbytes = self.play, self.step_seconds, float(self._nbytes[s])
        first, need_op = play.next_op, min(int(play.next_need[s]), play.facts.end)
        now, need = self._until[first], self._until[need_op]
        over = self._over_with(self._nbytes[s], forecast)
        behind_last = int(over.searchsorted(need_op - first))
        back_from = self._until[first + int(over[behind_last - 1]) + 1] if behind_last else now
        window = max(0.0, need - back_from)
        is_behind = self._away_need > need
        ahead = float(self._away_in[(self._away_need > back_from) & ~is_behind].sum())
        behind = float(self._away_in[is_behind].sum())
        out = 0.0 if s in play.on_host else max(0.0, play.out_end_seconds(s) - play.clock_seconds)
        back = max(0.0, self._copy_in[s] + ahead - window)
        closure, marginal, length, dependents = self._recompute(s)
        neighbourhood = closure + self._later_seconds(s)
        made_by = play.tape.producer[s]
        useful = min(nbytes, 4.0 * question.short_bytes) if question.short_bytes else nbytes
        worth = self.price * max(useful, 1.0)
        return [
            nbytes / self.room, _log(nbytes, self.room), float(nbytes >= question.short_bytes), _log(useful, self.room),
            (need - now) / T, _log(need - now, T), (need_op - first) / play.facts.end, need / T,
            (play.clock_seconds - float(play.last_access_seconds[s])) / T, self._until[made_by] / T, float(play.has_host_copy(s)),
            out / T, _log(out, T), back / T, _log(back, T), window / T, ahead / T, behind / T, self._copy_in[s] / T,
            closure / T, _log(closure, T), marginal / T, _log(marginal, T), self._own[s] / T, length / 16.0, min(dependents, 8) / 8.0,
            _ratio(out + back, worth), _ratio(marginal, worth), _ratio(closure, worth), _ratio(self._copy_in[s], worth),
            float(len(play.facts.needed_at[s]) > 1),
            log(self._stale_now[s] / T) / WIDE, log(max(need - now, 1e-4 * T) / T) / WIDE, log(max(nbytes, 1.0) / self.room) / WIDE,
            _wide_ratio(out + back, self.price * nbytes), _wide_ratio(marginal, self.price * nbytes),
            _wide_ratio(closure, self.price * nbytes), _wide_ratio(neighbourhood, self.price * nbytes),
        ]

    def _over_with(self, nbytes: int, forecast: np.ndarray) -> np.ndarray:
        """The ops, counted from the next, at which so many bytes more than the forecast's would not fit; many storages are of one size."""
        if nbytes not in self._over:
            self._over[nbytes] = np.flatnonzero(forecast > self.play.budget.device_bytes - nbytes)
        return self._over[nbytes]

    def _cost(self, answer: Answer, local: list[float], question: Question) -> list[float]:
        """The action's own cost, whatever it does.

        Over its worth (log), as a share of the step, what remains of the worth; then, over all its bytes and over staleness too as in
        DTR's heuristic (Kirisame et al., ICLR 2021), and over the time until it is needed.
        """
        if answer.move is Move.NOOP or answer.move is Move.PREFETCH:
            return [0.0, 0.0, float(answer.move is Move.PREFETCH), 0.0, 0.0, 0.0]
        is_swap = answer.move is Move.SWAP
        ratio, cost = (local[26], local[11] + local[13]) if is_swap else (local[27], local[21])
        useful = min(float(self.play.nbytes[answer.storage]), 4.0 * question.short_bytes)
        gain = (self.price * useful - cost * self.step_seconds) / (0.1 * self.price * self.room)
        stale, need = local[31], local[32]
        a_byte, around = (local[34], local[34]) if is_swap else (local[35], local[37])
        return [ratio, cost, min(3.0, max(-3.0, gain)), a_byte, around - stale, around - need]

    def _recompute(self, storage: int) -> tuple[float, float, int, int]:
        """To compute it again: seconds with all absent producers, seconds of what nobody else brings back, ops, absent dependents."""
        play = self.play
        tape, residency, last_use = play.tape, play.residency, play.facts.last_use
        made_by = tape.producer[storage]
        total, marginal, stack, seen = 0.0, 0.0, [made_by], set()
        while stack and len(seen) < 64:
            op = stack.pop()
            if op is None or op in seen:
                continue
            seen.add(op)
            seconds = tape.ops[op].seconds
            total += seconds
            if op == made_by or not any(last_use[s] >= play.next_op and residency[s] is ABSENT for s in tape.creates[op]):
                marginal += seconds
            stack += [tape.producer[s] for s in tape.reads[op] if residency[s] is ABSENT]
        dependents = 0
        for reader in tape.readers[storage]:
            if reader >= play.next_op:
                break
            for out in tape.creates[reader]:
                dependents += residency[out] is ABSENT and last_use[out] >= play.next_op
        return total, marginal, len(seen), dependents


    def _later_seconds(self, storage: int) -> float:
        """Seconds of the absent storages, still needed, that would be recomputed from this one, directly or through each other."""
        play = self.play
        tape, residency, last_use = play.tape, play.residency, play.facts.last_use
        stack, seen, total = [storage], set(), 0.0
        while stack and len(seen) < 64:
            for reader in tape.readers[stack.pop()]:
                if reader >= play.next_op:
                    break
                if reader not in seen:
                    absent = [s for s in tape.creates[reader] if residency[s] is ABSENT and last_use[s] >= play.next_op]
                    if absent:
                        seen.add(reader)
                        total += tape.ops[reader].seconds
                        stack += absent
        return total


def pending_seconds(observer: Observer) -> float:
    """An estimate of what is still to be paid; minus the potential of the reward.

    What is away has to be recomputed, or stalls for its copy; what is still too much has to leave, at the price. The link's time is
    worth something too, so that fetching early is better than late where nothing else tells them apart.
    """
    play = observer.play
    forecast = play.forecast_bytes(play.facts.end)
    excess = max(0, int(forecast.max(initial=0)) - play.budget.device_bytes)
    link = LINK_PRICE * sum(float(observer.copy_in[s]) for s in play.on_host)
    return _back_seconds(observer, forecast) + observer.price * excess + link


def _back_seconds(observer: Observer, forecast: np.ndarray) -> float:
    play = observer.play
    tape, residency, facts = play.tape, play.residency, play.facts
    live = [s for s in np.flatnonzero(~play.is_on_device & (play.next_need <= facts.end) & (facts.there_from < play.next_op)).tolist()]
    stack, seen = [tape.producer[s] for s in live if residency[s] is ABSENT], set()
    while stack:
        op = stack.pop()
        if op is not None and op not in seen:
            seen.add(op)
            stack += [tape.producer[s] for s in tape.reads[op] if residency[s] is ABSENT]
    recompute = sum(tape.ops[op].seconds for op in seen)
    away = sorted((int(play.next_need[s]), s) for s in live if residency[s] is ON_HOST)
    if not away:
        return recompute
    is_over = np.flatnonzero(forecast > play.budget.device_bytes)
    end = float(observer.until_op[play.next_op + int(is_over[-1]) + 1] if len(is_over) else observer.until_op[play.next_op])
    end, stall = min(end, float(observer.until_op[away[0][0]])), 0.0
    for need, s in away:
        end += float(observer.copy_in[s])
        stall = max(stall, end - float(observer.until_op[need]))
    return recompute + stall


def _least(scores: np.ndarray, count: int) -> np.ndarray:
    """Where the `count` least scores are, the least first, of equals the first: the head of a stable sort, without sorting the rest."""
    if len(scores) <= 4 * count:
        return np.argsort(scores, kind="stable")[:count]
    among = np.flatnonzero(scores <= np.partition(scores, count - 1)[count - 1])
    return among[np.argsort(scores[among], kind="stable")[:count]]


def _log(value: float, unit: float) -> float:
    """log(1 + value / (SMALL x unit)), about 0 to 1."""
    return log1p(max(value, 0.0) / (unit * SMALL)) / 7.0


def _ratio(cost: float, worth: float) -> float:
    """log(cost / worth), -1 at a hundredth and less, 1 at a hundredfold and more."""
    return min(1.0, max(-1.0, log(max(cost, 1e-30) / worth) / 4.6))


def _wide_ratio(cost: float, worth: float) -> float:
    """log(cost / worth), -1 at a ten-thousandth and less, 1 at ten-thousandfold and more."""
    return min(1.0, max(-1.0, log(max(cost, 1e-30) / max(worth, 1e-30)) / WIDE))


# Columns that a guide of the training reads. An action's own cost over its worth; over its bytes and its staleness, with what depends
# on it; the same with all absent producers, and over the time until it is needed; absent storages that would be recomputed from it.
COST = len(Move)
A_BYTE, AROUND_STALE, AROUND_NEED = COST + 3, COST + 4, COST + 5
COSTS = 6
CLOSURE, NEED, DEPENDENTS, STALE = (len(Move) + COSTS + i for i in (28, 4, 25, 31))
LOCAL = 38
FEATURES = len(Move) + COSTS + LOCAL + 16
# Of the action and its storage; the columns before say which move it is, those behind are alike for all actions.
ACTION_COLUMNS = (np.arange(FEATURES) >= COST) & (np.arange(FEATURES) < COST + COSTS + LOCAL)
