"""What the device holds at every instant of a checked schedule, storage by storage: the memory timeline, before anyone draws it.

An instant is a moment from which on the device holds something else. A run of an op has two: where it starts, with what it makes and with
its inside (workspace, and duplicates that a recompute makes); and where it ends, without its inside. `Free` and `Prefetch` have one,
when the compute stream comes to them: a prefetch counts from then on, however late its copy starts. The other instructions have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from vramlab.check import CheckedSchedule
from vramlab.schedule import Compute, Free, FreeHost, Instruction, Offload, Prefetch, Recompute, Wait
from vramlab.tape import Phase, Tape
from vramlab.trace import Trace

START = -1  # the instruction of the first instant


@dataclass(frozen=True)
class Effect:
    """What an instruction of a legal schedule does to the device: storage ids, and the bytes inside the op that it runs."""

    arrives: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()
    inside_bytes: int = 0


class Residents:
    """The storages on the device and those with a host copy, as a legal schedule is followed."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.device = {s.id for s in tape.storages if s.at_start}
        self.host: set[int] = set()

    def apply(self, instruction: Instruction) -> Effect:
        """Follow one instruction."""
        effect = self._effect(instruction)
        self.device.update(effect.arrives)
        self.device.difference_update(effect.leaves)
        return effect

    def _effect(self, instruction: Instruction) -> Effect:
        match instruction:
            case Compute() | Recompute():
                return self._run(instruction)
            case Free(storage):
                return Effect(leaves=(storage,))
            case Prefetch(storage):
                return Effect(arrives=(storage,))
            case Offload(storage):
                self.host.add(storage)
            case FreeHost(storage):
                self.host.discard(storage)
        return Effect()

    def _run(self, run: Compute | Recompute) -> Effect:
        op, made = self.tape.ops[run.op], self.tape.creates[run.op]
        absent = tuple(s for s in made if s not in self.device and s not in self.host)
        if isinstance(run, Compute):
            self.host.difference_update(op.mutates)  # a host copy of what is overwritten is stale
        duplicates = sum(self.tape.storages[s].nbytes for s in made if s not in absent)  # made again, and thrown away
        left = () if run.reuse is None else (run.reuse,)
        return Effect(arrives=absent, leaves=left, inside_bytes=op.variant(run.variant).workspace_bytes + duplicates)


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveBytes:
    """The instants of a schedule in order, the first of them its start. Arrays with an entry an instant, or one a change of a storage."""

    seconds: np.ndarray  # float64 [instants]: never falls
    instruction: np.ndarray  # int64 [instants]: what brought the instant about; START of the first
    runs: np.ndarray  # int64 [instants]: runs of ops that have ended
    inside_bytes: np.ndarray  # int64 [instants]
    change_instant: np.ndarray  # int64 [changes]
    change_storage: np.ndarray  # int64 [changes]
    change_bytes: np.ndarray  # int64 [changes]: above zero where the storage arrives

    def by_group(self, group_of: Sequence[int], groups: int) -> np.ndarray:
        """Bytes of storages by group, int64 [instants, groups]; `group_of` has the group of each storage of the tape."""
        change = np.zeros((len(self.seconds), groups), np.int64)
        np.add.at(change, (self.change_instant, np.asarray(group_of, np.int64)[self.change_storage]), self.change_bytes)
        return change.cumsum(axis=0)

    def total(self) -> np.ndarray:
        """Device bytes, int64 [instants]: all storages and the inside of the op that runs."""
        return self.by_group(np.zeros(self.change_storage.max(initial=0) + 1, np.int64), 1)[:, 0] + self.inside_bytes


def live_bytes(checked: CheckedSchedule, trace: Trace) -> LiveBytes:
    """The instants of a schedule, at the times of a trace of it."""
    walk = _Walk(checked.tape)
    ends = stream_seconds(checked, trace)
    for index, instruction in enumerate(checked.schedule.instructions):
        effect, begins = walk.residents.apply(instruction), ends[index - 1] if index else 0.0
        if isinstance(instruction, Compute | Recompute):
            walk.instant(index, float(trace.start_seconds[index]), effect.inside_bytes, effect)
            walk.runs += 1
            if effect.inside_bytes:
                walk.instant(index, float(trace.end_seconds[index]), 0, Effect())
        elif effect.arrives or effect.leaves:
            walk.instant(index, float(begins), 0, effect)
    return walk.done()


def stream_seconds(checked: CheckedSchedule, trace: Trace) -> np.ndarray:
    """When the compute stream is done with each instruction, float64: a copy does not hold it."""
    is_copy = np.array([isinstance(i, Offload | Prefetch) for i in checked.schedule.instructions], bool)
    return np.maximum.accumulate(np.where(is_copy, 0.0, trace.end_seconds)) if len(is_copy) else np.zeros(0)


@dataclass(frozen=True)
class Span:
    """A stretch of the step in one phase."""

    phase: Phase
    start_seconds: float
    end_seconds: float
    first_instruction: int


def phase_spans(checked: CheckedSchedule, trace: Trace) -> tuple[Span, ...]:
    """The phases in order of time: each begins with the first run of an op of it, and lasts until another begins."""
    runs = [(checked.tape.ops[i.op].phase, k) for k, i in enumerate(checked.schedule.instructions) if isinstance(i, Compute)]
    begins = [(phase, next(group)[1]) for phase, group in groupby(runs, key=lambda run: run[0])]
    starts = [0.0, *(float(trace.start_seconds[k]) for _, k in begins[1:]), trace.metrics.step_seconds]
    firsts = [0, *(k for _, k in begins[1:])]
    return tuple(Span(phase, start, end, first) for (phase, _), start, end, first in zip(begins, starts, starts[1:], firsts))


@dataclass(frozen=True)
class Event:
    """An instruction that takes time: it runs an op, copies a storage, or stands still."""

    instruction: int  # its index
    start_seconds: float
    end_seconds: float


LANES: dict[str, type] = {"compute": Compute, "recompute": Recompute, "wait": Wait, "copy out": Offload, "copy in": Prefetch}


def lanes(checked: CheckedSchedule, trace: Trace) -> dict[str, tuple[Event, ...]]:
    """What runs when, by kind in the order of LANES: the trace's own intervals, a wait only where the stream really stands still."""
    found: dict[str, list[Event]] = {name: [] for name in LANES}
    names = {kind: name for name, kind in LANES.items()}
    for k, instruction in enumerate(checked.schedule.instructions):
        name = names.get(type(instruction))
        if name and (name != "wait" or trace.end_seconds[k] > trace.start_seconds[k]):
            found[name].append(Event(k, float(trace.start_seconds[k]), float(trace.end_seconds[k])))
    return {name: tuple(events) for name, events in found.items()}


class _Walk:
    """Collects instants."""

    def __init__(self, tape: Tape) -> None:
        self.tape, self.residents, self.runs = tape, Residents(tape), 0
        self._instants: list[tuple[float, int, int, int]] = []
        self._changes: list[tuple[int, int, int]] = []
        self.instant(START, 0.0, 0, Effect(arrives=tuple(sorted(self.residents.device))))

    def instant(self, instruction: int, seconds: float, inside_bytes: int, effect: Effect) -> None:
        at, storages = len(self._instants), self.tape.storages
        self._instants.append((seconds, instruction, self.runs, inside_bytes))
        self._changes += [(at, s, storages[s].nbytes) for s in effect.arrives]
        self._changes += [(at, s, -storages[s].nbytes) for s in effect.leaves]

    def done(self) -> LiveBytes:
        seconds, instruction, runs, inside = zip(*self._instants)
        instant, storage, nbytes = zip(*self._changes) if self._changes else ((), (), ())
        return LiveBytes(seconds=np.array(seconds, np.float64), instruction=np.array(instruction, np.int64),
                         runs=np.array(runs, np.int64), inside_bytes=np.array(inside, np.int64), change_instant=np.array(instant, np.int64),
                         change_storage=np.array(storage, np.int64), change_bytes=np.array(nbytes, np.int64))
