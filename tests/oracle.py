"""A second opinion on schedules: run them on symbolic values and see whether every op gets what it should.

`Machine` knows no residencies and no version counts. It holds device copies and host copies with the *values* in them, each a
hash of the op that wrote it and of all that this op read, and compares them with the values of a plain run in tape order.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from random import Random

from vramlab.schedule import Compute, Free, FreeHost, Instruction, Offload, Prefetch, Recompute, Wait
from vramlab.tape import Op, Phase, Tape


class Illegal(Exception):
    """The machine refuses an instruction."""


def refuse_unless(condition: bool, why: str) -> None:
    if not condition:
        raise Illegal(why)


def storages_in(tape: Tape, tensors) -> set[int]:
    return {tape.tensors[t].storage for t in tensors if t is not None}


def read_by(tape: Tape, op: Op) -> set[int]:
    return storages_in(tape, op.inputs)


def created_by(tape: Tape, op: Op) -> set[int]:
    return storages_in(tape, op.outputs) - read_by(tape, op) - set(op.mutates)


@dataclass(frozen=True)
class Effect:
    """What one run of an op sees and gives: values by storage."""

    seen: dict[int, int]
    created: dict[int, int]
    written: dict[int, int]


def run(tape: Tape, op: Op, memory: dict[int, int], draw: int) -> Effect:
    """The op as a function of values. Batch norm normalises by the batch: what it returns ignores the statistics that it updates."""
    ignored = set(op.mutates) if op.throwaway_state else set()
    seen = {s: memory[s] for s in sorted(read_by(tape, op) - ignored)}
    key = (op.id, draw if op.is_random else None, tuple(seen.items()))
    return Effect(seen=seen, created={s: hash(("created", s, key)) for s in created_by(tape, op)},
                  written={s: hash(("written", s, memory.get(s), key)) for s in op.mutates})


def plain_run(tape: Tape) -> tuple[list[Effect], dict[int, int]]:
    """Every op in tape order, nothing ever dropped: what each sees and gives, and what memory holds at the end."""
    memory = {s.id: hash(("start", s.id)) for s in tape.storages if s.at_start}
    effects, draws = [], 0
    for op in tape.ops:
        effects.append(run(tape, op, memory, draws))
        draws += op.is_random
        memory |= effects[-1].created | effects[-1].written
    return effects, memory


@dataclass
class Machine:
    """Device and host with symbolic values. `step` raises Illegal; then the machine is spoilt."""

    tape: Tape
    device: dict[int, int] = field(default_factory=dict)
    host: dict[int, int] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)  # device-to-host copies under way
    arriving: set[int] = field(default_factory=set)
    done: list[int] = field(default_factory=list)
    seeds: dict[int, int] = field(default_factory=dict)  # random op -> number of its first draw
    truth: dict[int, int] = field(default_factory=dict)  # what first runs have last put into each storage
    inner_peak: int = 0

    def __post_init__(self) -> None:
        self.effects, self.final = plain_run(self.tape)
        self.device = {s.id: hash(("start", s.id)) for s in self.tape.storages if s.at_start}

    def clone(self) -> Machine:
        twin = copy.copy(self)
        for name in ("device", "host", "leaving", "arriving", "done", "seeds", "truth"):
            setattr(twin, name, copy.copy(getattr(self, name)))
        return twin

    def try_step(self, instruction: Instruction) -> bool:
        try:
            self.step(instruction)
        except Illegal:
            return False
        return True

    def allows(self, instruction: Instruction) -> bool:
        return self.clone().try_step(instruction)

    def is_finished(self) -> bool:
        try:
            self.finish()
        except Illegal:
            return False
        return True

    @property
    def device_bytes(self) -> int:
        return sum(self.tape.storages[s].nbytes for s in self.device)

    @property
    def host_bytes(self) -> int:
        return sum(self.tape.storages[s].nbytes for s in self.host)

    def key(self) -> tuple:
        """Equal for machines with the same future."""
        return (frozenset(self.device.items()), frozenset(self.host.items()), frozenset(self.leaving), frozenset(self.arriving),
                frozenset(self.done), len(self.seeds))

    def step(self, instruction: Instruction) -> None:
        before, self.inner_peak = self.device_bytes, 0
        if isinstance(instruction, Compute | Recompute):
            refuse_unless(instruction.op in range(len(self.tape.ops)), "no such op")
            self._run(instruction, self.tape.ops[instruction.op])
        else:
            refuse_unless(instruction.storage in range(len(self.tape.storages)), "no such storage")
            getattr(self, f"_{type(instruction).__name__.lower()}")(instruction.storage)
        self.inner_peak = max(before, self.device_bytes, self.inner_peak)

    def finish(self) -> None:
        refuse_unless(sorted(self.done) == [op.id for op in self.tape.ops], "not every op ran")
        refuse_unless(not self.host and not self.leaving and not self.arriving, "host copies are left")
        kept = {s.id: self.final[s.id] for s in self.tape.storages if s.at_end}
        refuse_unless(self.device == kept, "the device holds something else than a plain run leaves")

    def _run(self, instruction: Compute | Recompute, op: Op) -> None:
        first = isinstance(instruction, Compute)
        refuse_unless((op.id in self.done) != first, "first runs are Computes, others Recomputes")
        known = {None: op.workspace_bytes} | {v.name: v.workspace_bytes for v in op.variants}
        refuse_unless(instruction.variant in known, "no such variant")
        refuse_unless(first or (op.phase != Phase.OPTIMIZER and (op.throwaway_state or not op.mutates)), "runs once")
        refuse_unless(all(s in self.device and s not in self.arriving for s in read_by(self.tape, op)), "an input is not there")
        refuse_unless(not first or all(s in self.device and s not in self.leaving | self.arriving for s in op.mutates), "cannot write")
        draw = len(self.seeds) if first else self.seeds.get(op.id, 0)
        effect, expected = run(self.tape, op, self.device, draw), self.effects[op.id]
        refuse_unless(effect.seen == expected.seen and effect.created == expected.created, "another result than in a plain run")
        refuse_unless(not first or effect.written == expected.written, "another state than in a plain run")
        fresh = {s: v for s, v in effect.created.items() if s not in self.device and s not in self.host}
        refuse_unless(len(fresh) == len(effect.created) if first else len(fresh) > 0, "outputs are there already")
        refuse_unless(first or all(self.truth[s] == v for s, v in fresh.items()), "brings back what was overwritten")
        self._take_over(instruction, op, fresh)
        self.inner_peak = self.device_bytes + known[instruction.variant] + sum(
            self.tape.storages[s].nbytes for s in effect.created)  # every output is allocated, duplicates too
        self.device |= fresh
        if first:
            self._commit(op, effect)

    def _take_over(self, instruction: Compute | Recompute, op: Op, fresh: dict[int, int]) -> None:
        if instruction.reuse is None:
            return
        refuse_unless(op.takeover is not None and op.takeover[1] == instruction.reuse, "no such twin")
        refuse_unless(op.takeover[0] in fresh, "the output has a place")
        refuse_unless(instruction.reuse not in self.leaving, "a copy still reads that region")
        del self.device[instruction.reuse]

    def _commit(self, op: Op, effect: Effect) -> None:
        self.device |= effect.written
        self.truth |= effect.created | effect.written
        for s in effect.written:
            self.host.pop(s, None)
        self.done.append(op.id)
        if op.is_random:
            self.seeds[op.id] = len(self.seeds)

    def _free(self, s: int) -> None:
        refuse_unless(s in self.device and s not in self.leaving | self.arriving, "not there or in use by a copy")
        del self.device[s]

    def _offload(self, s: int) -> None:
        refuse_unless(s in self.device and s not in self.host, "nothing to copy or copied already")
        self.host[s] = self.device[s]
        self.leaving.add(s)

    def _prefetch(self, s: int) -> None:
        refuse_unless(s in self.host and s not in self.device, "no host copy or there already")
        self.device[s] = self.host[s]
        self.arriving.add(s)

    def _wait(self, s: int) -> None:
        refuse_unless(s in self.leaving | self.arriving, "no copy under way")
        self.leaving.discard(s)
        self.arriving.discard(s)

    def _freehost(self, s: int) -> None:
        refuse_unless(s in self.host and s not in self.leaving | self.arriving, "no host copy or in use by a copy")
        del self.host[s]


class ScheduleWriter:
    """Writes a random legal schedule: any topological order, with frees, offloads, prefetches, recomputes and takeovers thrown in."""

    def __init__(self, tape: Tape, random: Random) -> None:
        self.tape, self.random = tape, random
        self.machine, self.instructions = Machine(tape), []
        self.overwritten = {s for op in tape.ops for s in op.mutates}
        self.recomputable = self._recomputable()

    def write(self, restlessness: float = 0.5) -> tuple[Instruction, ...]:
        while ready := self._ready():
            self._compute(self.random.choice(ready[:3]))
            for s in self.random.sample(range(len(self.tape.storages)), len(self.tape.storages)):
                if self.random.random() < restlessness:
                    self._disturb(s)
        self._tidy_up()
        return tuple(self.instructions)

    def _emit(self, instruction: Instruction) -> None:
        self.machine.step(instruction)
        self.instructions.append(instruction)

    def _recomputable(self) -> set[int]:
        """Storages that can be had again whenever wanted: from state that never changes, or from others such."""
        lasting = {s.id for s in self.tape.storages if s.at_start} - self.overwritten
        found: set[int] = set()
        for op in self.tape.ops:
            again = op.phase != Phase.OPTIMIZER and not op.mutates and not created_by(self.tape, op) & self.overwritten
            if again and read_by(self.tape, op) <= lasting | found:
                found |= created_by(self.tape, op)
        return found

    def _ready(self) -> list[Op]:
        return [op for op in self.tape.ops if op.id not in self.machine.done and self._is_ready(op)]

    def _is_ready(self, op: Op) -> bool:
        touched = read_by(self.tape, op) | set(op.mutates)
        for earlier in self.tape.ops[:op.id]:
            if earlier.id in self.machine.done:
                continue
            makes = created_by(self.tape, earlier) | set(earlier.mutates)
            if makes & touched or read_by(self.tape, earlier) & set(op.mutates) or (earlier.is_random and op.is_random):
                return False
        return True

    def _compute(self, op: Op) -> None:
        for s in sorted(read_by(self.tape, op) | set(op.mutates)):
            self._want(s)
        for s in op.mutates:
            if s in self.machine.leaving:
                self._emit(Wait(s))
        reuse = None
        if op.takeover and self.random.random() < 0.7 and self._may_lose(op.takeover[1], but_for=op):
            reuse = op.takeover[1] if op.takeover[1] not in self.machine.leaving else None
        self._emit(Compute(op.id, reuse, self._variant(op)))

    def _variant(self, op: Op) -> str | None:
        return self.random.choice([None, *(v.name for v in op.variants)])

    def _want(self, s: int) -> None:
        """Make a storage readable."""
        if s in self.machine.arriving:
            self._emit(Wait(s))
        elif s not in self.machine.device and s in self.machine.host:
            self._emit(Prefetch(s))
            self._emit(Wait(s))
        elif s not in self.machine.device:
            producer = next(op for op in self.tape.ops if s in created_by(self.tape, op))
            for read in sorted(read_by(self.tape, producer)):
                self._want(read)
            self._emit(Recompute(producer.id, variant=self._variant(producer)))

    def _may_lose(self, s: int, but_for: Op | None = None) -> bool:
        """Is the device copy of no further use, or can it be had again?"""
        if s in self.machine.host or s in self.recomputable:
            return True
        users = [op for op in self.tape.ops if s in read_by(self.tape, op) | set(op.mutates)]
        is_dead = all(op.id in self.machine.done or op is but_for for op in users)
        return is_dead and not self.tape.storages[s].at_start and not self.tape.storages[s].at_end

    def _disturb(self, s: int) -> None:
        """One random thing that does no harm."""
        machine = self.machine
        on_device, at_host, flying = s in machine.device, s in machine.host, s in machine.leaving | machine.arriving
        options: list[Instruction] = []
        if flying:
            options = [Wait(s)]
        elif on_device and at_host:
            options = [Free(s), FreeHost(s)]
        elif on_device:
            options = [Offload(s)] + [Free(s)] * self._may_lose(s)
        elif at_host:
            options = [Prefetch(s)] + [FreeHost(s)] * (s in self.recomputable)
        if options:
            self._emit(self.random.choice(options))

    def _tidy_up(self) -> None:
        for s in self.tape.storages:
            if s.at_end:
                self._want(s.id)
        for s in [s.id for s in self.tape.storages]:
            if s in self.machine.leaving | self.machine.arriving:
                self._emit(Wait(s))
            if s in self.machine.device and not self.tape.storages[s].at_end:
                self._emit(Free(s))
            if s in self.machine.host:
                self._emit(FreeHost(s))


def random_instruction(tape: Tape, random: Random) -> Instruction:
    """Any instruction on ops and storages of the tape, legal or not."""
    kind = random.choice([Compute, Recompute, Free, Offload, Prefetch, Wait, FreeHost])
    if kind not in (Compute, Recompute):
        return kind(random.randrange(len(tape.storages)))
    op = random.choice(tape.ops)
    return kind(op.id, op.takeover[1] if op.takeover and random.random() < 0.5 else None, random.choice([None] * 3 + ["fft", "winograd"]))


def random_edit(tape: Tape, instructions: tuple[Instruction, ...], random: Random) -> tuple[Instruction, ...]:
    """Delete, swap, duplicate, move, replace or insert one instruction, or two."""
    edited = list(instructions)
    for _ in range(random.choice([1, 1, 2])):
        at, to = random.randrange(len(edited)), random.randrange(len(edited))
        match random.choice(["delete", "swap", "swap next", "duplicate", "move", "replace", "insert"]):
            case "delete" if len(edited) > 1:
                del edited[at]
            case "swap":
                edited[at], edited[to] = edited[to], edited[at]
            case "swap next":
                edited[at:at + 2] = edited[at:at + 2][::-1]
            case "duplicate":
                edited.insert(to, edited[at])
            case "move":
                edited.insert(to, edited.pop(at))
            case "replace":
                edited[at] = random_instruction(tape, random)
            case _:
                edited.insert(to, random_instruction(tape, random))
    return tuple(edited)
