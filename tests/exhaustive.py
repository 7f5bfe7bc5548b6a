"""The fastest schedule of a tiny tape by exhaustive search: Dijkstra's algorithm over everything that device and host can hold.

Shares nothing with planner, checker, simulator or bounds: residencies are bits, the clock is counted here, and what is legal was
written down anew. Only for tapes in which nothing is overwritten and nothing is random, of a few ops; times should be whole numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random

from oracle import created_by, read_by
from tapes import TapeBuilder

from vramlab.schedule import Compute, Free, FreeHost, Instruction, Offload, Prefetch, Recompute, Wait
from vramlab.tape import Phase, Role, Tape

OFFLOADS, ROOM, PREFETCHES, READY = range(4)  # the parts of a gap between two runs, in the order that the stated class keeps


@dataclass(frozen=True, slots=True)
class Held:
    """Where a search stands. Sets are bits; `copies` (storage, is to the host, seconds until it ends), of copies not waited for."""

    done: int
    device: int
    host: int
    copies: tuple[tuple[int, bool, float], ...] = ()
    part: int = OFFLOADS  # the fields from here on only matter to a class
    ran: int = -1  # the op that was last recomputed since the last first run
    again: tuple[int, ...] = ()  # recomputes by op
    travelled: int = 0  # storages that were offloaded


@dataclass(frozen=True, kw_only=True)
class Class:
    """Which schedules are searched: first runs in tape order; recomputes between two of them in tape order, each op `recomputes` times
    in all, and only while none of its outputs is anywhere; one round trip a storage; in each gap between runs first copies to the host
    start, then room is made, then copies back start and are waited for."""

    recomputes: int
    copies: bool = True


class Search:
    """All legal schedules within a budget in which state stays, or those of a class."""

    def __init__(self, tape: Tape, budget: int, to_host: float, to_device: float, within: Class | None = None) -> None:
        assert not any(op.mutates or op.is_random or op.variants for op in tape.ops)
        self.tape, self.budget, self.within = tape, budget, within
        self.rate = {True: to_host, False: to_device}  # seconds a byte
        self.nbytes = [s.nbytes for s in tape.storages]
        self.reads = [self._bits(read_by(tape, op)) for op in tape.ops]
        self.makes = [self._bits(created_by(tape, op)) for op in tape.ops]
        self.stays = self._bits({s.id for s in tape.storages if s.at_start and s.at_end})
        self.begin = self._bits({s.id for s in tape.storages if s.at_start})
        self.end = self._bits({s.id for s in tape.storages if s.at_end})

    def fastest(self) -> tuple[float, tuple[Instruction, ...]] | None:
        """Seconds and instructions, None where no schedule is within the budget."""
        start = Held(0, self.begin, 0, again=(0,) * len(self.tape.ops) if self.within else ())
        if self._bytes(start.device) > self.budget:
            return None
        order = count()
        waiting = [(self.left(start), next(order), 0.0, start)]
        came: dict[Held, tuple[Held, tuple[Instruction, ...]]] = {}
        best = {start: 0.0}
        while waiting:
            _, _, clock, held = heapq.heappop(waiting)
            if clock > best[held]:
                continue
            if self._is_finished(held):
                return clock, self._way(came, held)
            for seconds, after, how in self._moves(held):
                if clock + seconds < best.get(after, float("inf")) and (left := self.left(after)) < float("inf"):
                    best[after] = clock + seconds
                    came[after] = held, how
                    heapq.heappush(waiting, (clock + seconds + left, next(order), clock + seconds, after))
        return None

    def left(self, held: Held) -> float:
        """Seconds that are still to come at least; here nothing is known."""
        return 0.0

    def _way(self, came, held: Held) -> tuple[Instruction, ...]:
        way: list[tuple[Instruction, ...]] = []
        while held in came:
            held, how = came[held]
            way.append(how)
        return tuple(i for how in reversed(way) for i in how)

    def _is_finished(self, held: Held) -> bool:
        return held.done == (1 << len(self.tape.ops)) - 1 and held.device == self.end and not held.host and not held.copies

    def _moves(self, held: Held) -> Iterator[tuple[float, Held, tuple[Instruction, ...]]]:
        for op in range(len(self.tape.ops)):
            yield from self._runs(held, op)
        for s in range(len(self.nbytes)):
            if not self.stays >> s & 1:
                yield from self._of_storage(held, s)
        if self.within and held.part < READY:
            yield 0.0, replace(held, part=held.part + 1), ()

    # --- runs -------------------------------------------------------------------------------------------------------------
    def _runs(self, held: Held, op: int) -> Iterator[tuple[float, Held, tuple[Instruction, ...]]]:
        is_first = not held.done >> op & 1
        arriving = self._bits({s for s, to_host, _ in held.copies if not to_host})
        present, made = held.device & ~arriving, self.makes[op]
        missing = made & ~held.device & ~held.host
        if not is_first and self.tape.ops[op].phase is Phase.OPTIMIZER:
            return
        if self.reads[op] & ~present or (missing != made if is_first else not missing):
            return
        if self.within and not self._is_in_class(held, op, is_first, missing):
            return
        for reuse in {None, self._reuse(held, op, missing)}:
            device = held.device & ~(0 if reuse is None else 1 << reuse)
            inside = self._bytes(device) + self._bytes(made) + self.tape.ops[op].workspace_bytes
            if max(inside, self._bytes(held.device)) > self.budget:
                continue
            after = self._later(replace(held, device=device | missing, done=held.done | 1 << op), self.tape.ops[op].seconds)
            yield self.tape.ops[op].seconds, self._noted(after, op, is_first), ((Compute if is_first else Recompute)(op, reuse),)

    def _reuse(self, held: Held, op: int, missing: int) -> int | None:
        pair = self.tape.ops[op].takeover
        leaving = {s for s, to_host, _ in held.copies if to_host}
        if pair is None or not missing >> pair[0] & 1 or pair[1] in leaving or self.stays >> pair[1] & 1:
            return None
        return pair[1]

    def _is_in_class(self, held: Held, op: int, is_first: bool, missing: int) -> bool:
        if held.part != READY:
            return False
        if is_first:
            return held.done == (1 << op) - 1
        return op > held.ran and held.again[op] < self.within.recomputes and missing == self.makes[op]

    def _noted(self, held: Held, op: int, is_first: bool) -> Held:
        if not self.within:
            return held
        again = held.again if is_first else tuple(n + (i == op) for i, n in enumerate(held.again))
        return replace(held, part=OFFLOADS, ran=-1 if is_first else op, again=again)

    # --- frees and copies ---------------------------------------------------------------------------------------------------
    def _of_storage(self, held: Held, s: int) -> Iterator[tuple[float, Held, tuple[Instruction, ...]]]:
        on_device, at_host = held.device >> s & 1, held.host >> s & 1
        flying = [copy for copy in held.copies if copy[0] == s]
        if flying:
            _, to_host, left = flying[0]
            if self._allows(held, ROOM if to_host else READY):
                is_back = self.within is not None and not to_host  # a round trip is over: its host copy goes
                rest = replace(held, copies=tuple(c for c in held.copies if c[0] != s), host=held.host & ~(is_back << s))
                yield left, self._later(rest, left), (Wait(s), FreeHost(s)) if is_back else (Wait(s),)
        elif on_device:
            if self._allows(held, ROOM):
                yield 0.0, replace(held, device=held.device & ~(1 << s)), (Free(s),)
            if not at_host and self._may_travel(held, s) and self._allows(held, OFFLOADS):
                yield 0.0, self._started(replace(held, host=held.host | 1 << s, travelled=self._travelled(held, s)), s, True), (Offload(s),)
        elif at_host and self._allows(held, PREFETCHES):
            after = replace(held, device=held.device | 1 << s)
            if self._bytes(after.device) <= self.budget:
                yield 0.0, self._started(after, s, False), (Prefetch(s),)
        if at_host and not flying and not self.within:
            yield 0.0, replace(held, host=held.host & ~(1 << s)), (FreeHost(s),)

    def _allows(self, held: Held, part: int) -> bool:
        return not self.within or held.part == part

    def _may_travel(self, held: Held, s: int) -> bool:
        return self.nbytes[s] > 0 and (not self.within or self.within.copies and not held.travelled >> s & 1)

    def _travelled(self, held: Held, s: int) -> int:
        return held.travelled | 1 << s if self.within else 0

    def _started(self, held: Held, s: int, to_host: bool) -> Held:
        begin = max([0.0, *(left for _, direction, left in held.copies if direction == to_host)])
        return replace(held, copies=tuple(sorted((*held.copies, (s, to_host, begin + self.rate[to_host] * self.nbytes[s])))))

    @staticmethod
    def _later(held: Held, seconds: float) -> Held:
        return replace(held, copies=tuple((s, to_host, max(left - seconds, 0.0)) for s, to_host, left in held.copies))

    @staticmethod
    def _bits(storages: set[int]) -> int:
        return sum(1 << s for s in storages)

    def _bytes(self, storages: int) -> int:
        return sum(n for s, n in enumerate(self.nbytes) if storages >> s & 1)


class Pruned(Search):
    """The same within a class, for tapes of more ops. Each way of looking at less is argued for below, and tested to change no answer.

    First is looked at what may end soonest, clock and `left` together: a bound that no schedule of the class is below from there on, so the
    first end that is met is the fastest. What nothing can use any more is freed where room is made: it holds bytes, and a recompute that
    would make it once more only profits from its absence. It is not sent to the host either. A copy back is waited for by the first run
    that reads it, or at the end: an earlier wait only delays what comes before.
    """

    def __init__(self, tape: Tape, budget: int, to_host: float, to_device: float, within: Class) -> None:
        super().__init__(tape, budget, to_host, to_device, within)
        self.maker = {s: op for op in range(len(tape.ops)) for s in range(len(self.nbytes)) if self.makes[op] >> s & 1}
        self.seconds = [op.seconds for op in tape.ops]
        self.runs_again = [op.phase is not Phase.OPTIMIZER for op in tape.ops]

    def left(self, held: Held) -> float:
        """The largest of: what the stream runs, the copies back, all on one engine, and what is on its way to the host."""
        arriving = [seconds for _, to_host, seconds in held.copies if not to_host]
        on_the_way = self._bits({s for s, to_host, _ in held.copies if not to_host})
        back = self.rate[False] * self._bytes(held.host & ~on_the_way) + max(arriving, default=0.0)  # a round trip ends on the device
        there = max((seconds for _, to_host, seconds in held.copies if to_host), default=0.0)
        return max(self._runs_left(held), back, there)

    def _runs_left(self, held: Held) -> float:
        """First runs that are to come, and the ops that have to run again: what they made is needed and is nowhere."""
        seconds, needed = 0.0, self.end
        for op in range(len(self.tape.ops)):
            if not held.done >> op & 1:
                seconds += self.seconds[op]
                needed |= self.reads[op]
        for op in reversed(range(len(self.tape.ops))):
            if held.done >> op & 1 and needed & self.makes[op] & ~held.device & ~held.host:
                if not self.runs_again[op] or held.again[op] >= self.within.recomputes:
                    return float("inf")
                seconds += self.seconds[op]
                needed |= self.reads[op]
        gone = needed & self.begin & ~held.device & ~held.host
        return float("inf") if gone else seconds

    def _useful(self, held: Held) -> int:
        """What a run that may still come reads, or the step ends with."""
        wanted = self.end
        for op in reversed(range(len(self.tape.ops))):
            may_run = not held.done >> op & 1 or (self.makes[op] & wanted and held.again[op] < self.within.recomputes)
            wanted |= self.reads[op] if may_run else 0
        return wanted

    def _moves(self, held: Held) -> Iterator[tuple[float, Held, tuple[Instruction, ...]]]:
        if held.part == ROOM:
            flying = self._bits({s for s, _, _ in held.copies})
            useless = held.device & ~self._useful(held) & ~flying & ~held.host & ~self.stays
            if useless:
                freed = tuple(Free(s) for s in range(len(self.nbytes)) if useless >> s & 1)
                yield 0.0, replace(held, device=held.device & ~useless), freed
                return
        yield from super()._moves(held)

    def _may_travel(self, held: Held, s: int) -> bool:
        return super()._may_travel(held, s) and bool(self._useful(held) >> s & 1)

    def _runs(self, held: Held, op: int) -> Iterator[tuple[float, Held, tuple[Instruction, ...]]]:
        """With the waits for what it reads."""
        late = [(left, s) for s, to_host, left in held.copies if not to_host and self.reads[op] >> s & 1]
        is_next = held.part == READY and (held.done == (1 << op) - 1 or held.done >> op & 1)
        if not late or not is_next:
            yield from super()._runs(held, op)
            return
        waited, clock, waits = held, 0.0, ()
        for _, s in sorted(late):
            ((more, waited, how),) = self._waited(waited, s)
            clock, waits = clock + more, (*waits, *how)
        for seconds, after, how in super()._runs(waited, op):
            yield clock + seconds, after, (*waits, *how)

    def _waited(self, held: Held, s: int) -> list[tuple[float, Held, tuple[Instruction, ...]]]:
        return list(super()._of_storage(held, s))

    def _of_storage(self, held: Held, s: int) -> Iterator[tuple[float, Held, tuple[Instruction, ...]]]:
        is_arriving = any(copy[0] == s and not copy[1] for copy in held.copies)
        if is_arriving and held.done != (1 << len(self.tape.ops)) - 1:
            return
        yield from super()._of_storage(held, s)


def random_step(random: Random, ops: int) -> Tape:
    """A small step: ops forward along a chain, then backward ones, each of which reads the last gradient and what its twin made."""
    tape = TapeBuilder()
    maps = [tape.state("x", random.choice([1, 2]), Role.INPUT)]
    forward, kept = max(1, ops // 2), []
    for i in range(forward):
        inputs = {maps[-1], *([random.choice(maps)] if random.random() < 0.2 else [])}
        outputs = [tape.temporary(random.randint(1, 4), Role.ACTIVATION) for _ in range(1 if random.random() < 0.8 else 2)]
        tape.call("aten.relu.default", sorted(inputs), outputs, seconds=float(random.randint(1, 4)), layer=f"f{i}",
                  workspace_bytes=random.choice([0, 0, 1]), takeover=_twin(tape, random, outputs, inputs))
        maps.append(outputs[0])
        kept.append(outputs)
    last = maps[-1]
    for i in range(ops - forward):
        saved = random.choice(kept[max(0, forward - 1 - i)] if random.random() < 0.8 else maps)
        is_end = i == ops - forward - 1
        gradient = tape.temporary(random.randint(1, 4), at_end=is_end)
        tape.call("aten.threshold_backward.default", sorted({last, saved}), [gradient], phase=Phase.BACKWARD, layer=f"b{i}",
                  seconds=float(random.randint(1, 4)), takeover=_twin(tape, random, [gradient], {last, saved}))
        last = gradient
    return tape.build(last)


def _twin(tape: TapeBuilder, random: Random, outputs: list[int], inputs: set[int]) -> tuple[int, int] | None:
    size = {t: tape.storages[tape.storage_of(t)].nbytes for t in (*outputs, *inputs)}
    equal = [(o, i) for o in outputs for i in sorted(inputs) if size[o] == size[i]]
    return random.choice(equal) if equal and random.random() < 0.5 else None
