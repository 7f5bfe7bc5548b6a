"""What no schedule can beat: the least peak that a tape allows, and a lower bound on the time of a step within a budget.

Both hold for every legal schedule: any order of first runs that the checker takes, any recomputes, copies, variants and takeovers.

**The least peak** (`least_peak_bytes`) is exact. *No schedule is below*: at the start the device holds all `at_start` storages and
at the end all `at_end` ones; every op runs once as a `Compute`, and then the device holds what it reads, overwrites and creates
(a region that the output takes over once), the inside of its leanest variant, and the state that stays. *Some schedule is there*:
`leanest_schedule` moves everything that may move to the host after every op, brings back what the next one uses, and writes over
whatever may be written over; between ops it holds only the state that stays. So it cannot be tightened where the host has room.

**The time bound** (`step_seconds_bound`) is the optimum of a linear program that every legal schedule within the budget satisfies. On
a longest path of dependencies c1 -> c2 -> ... some ops are chosen as *snapshots*: every legal schedule runs them first in that order,
which cuts it into stages 1, 2, ...; stage t ends with the run of ct. For some storages s, those that weigh most by their bytes and by the
snapshots at which eager holds them, and a schedule, let

    x[s,t] = 1 when s is on the device after ct       F[p,t] = 1 when op p first runs in stage t
    R[p,t] = 1 when p runs again in stage t            P[s,t] = 1 when a copy of s from the host starts in stage t
    O[s,t] = 1 when a copy of s to the host starts in stage t, and before any P of s in it
    V[k,t] = 1 when the first run of ct takes its variant k; they sum to 1

These satisfy, with seen(s,t) = x[s,t-1] + F[p,t] + R[p,t] + P[s,t] for the op p that creates s (what is on the device at some
instant of a stage was there when it began, or was made or prefetched in it; the first copy from the host has one to it before):

    x[s,t] <= seen(s,t)        F[q,t], R[q,t] <= seen(s,t) for each s that q reads        O[s,t] <= seen(s,t) - P[s,t]
    P[s,t] <= sum of O[s,1..t]          R[p,t] <= sum of F[p,1..t]          sum over t of F[p,t] = 1
    state + sum of bytes x[s,t] + what else ct uses + sum of workspace V[k,t] <= budget       x[s,t] = 1 for what ct uses and keeps

The **compute** stream is serial: the start of ct is after everything that runs before it, and its own run takes the sum of seconds V[k,t];
every other run is counted with the fastest variant of its op. A variant that another beats in seconds and in workspace may be left out:
to put the other in its place satisfies the rows where it did. The **link** is serial in each direction. A
copy that starts in a stage after t starts after ct has run, and each copy is waited for before the step ends, since the checker frees
or keeps nothing in flight; so the step ends no sooner than ct plus all later copies of one direction. A copy to the host that starts
before ct has ended by then, unless s is still on the device after ct; a copy to the device of what ct reads has ended. On a half-duplex
device both directions share that time. Dropping that the columns are 0 or 1 only lowers the optimum.
What is left out (small storages, ops that are no snapshot) only drops rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from vramlab.check import check_schedule
from vramlab.device import DeviceProfile
from vramlab.liveness import first_use, last_use, lower_bound_bytes, replay_schedule, used_storages, working_set_bytes
from vramlab.program import OPTIMAL, ZERO, Affine, Program, total
from vramlab.schedule import Compute, Free, FreeHost, Instruction, Offload, Prefetch, Schedule, Wait
from vramlab.tape import Op, Phase, Storage, Tape

SNAPSHOTS, WATCHED = 16, 120  # how many ops, and storages, the program of the time bound is about
SLACK = 1e-7  # relative: what HiGHS may be off by in its optimum, taken off the bound


# --- peak -----------------------------------------------------------------------------------------------------------------
def least_peak_bytes(tape: Tape, *, state_stays: bool = True) -> int:
    """The least peak that any legal schedule has, in bytes, with as much room on the host as it wants.

    With `state_stays`, what is there at the start and at the end (parameters, buffers, optimizer state, inputs) neither moves nor leaves.
    """
    if state_stays:
        return lower_bound_bytes(tape)
    ends = [sum(s.nbytes for s in tape.storages if s.at_start), sum(s.nbytes for s in tape.storages if s.at_end)]
    return max([*ends, *(working_set_bytes(tape, op.id) for op in tape.ops)])


def leanest_schedule(tape: Tape, *, state_stays: bool = True) -> Schedule:
    """A legal schedule whose peak is `least_peak_bytes`: between two ops, all that may move is on the host. Slow beyond use."""
    return Schedule(tuple(_Leanest(tape, state_stays).write()), tape.digest)


class _Leanest:
    """Writes that schedule."""

    def __init__(self, tape: Tape, state_stays: bool) -> None:
        self.tape, self.last = tape, last_use(tape)
        self.staying = {s.id for s in tape.storages if state_stays and s.at_start and s.at_end}
        self.on_host: set[int] = set()
        self.written: list[Instruction] = []

    def write(self) -> list[Instruction]:
        self._send_away((s.id for s in self.tape.storages if s.at_start), after=-1)
        for op in self.tape.ops:
            self._run(op)
        self._bring(s.id for s in self.tape.storages if s.at_end)
        self.written += [FreeHost(s.id) for s in self.tape.storages if s.at_end and s.id in self.on_host]
        return self.written

    def _run(self, op: Op) -> None:
        self._bring((*self.tape.reads[op.id], *op.mutates))
        reuse = op.takeover[1] if op.takeover and op.takeover[1] not in self.staying else None
        self.on_host -= set(op.mutates)
        leanest = min(op.variants, key=lambda v: v.workspace_bytes, default=None)
        is_leaner = leanest is not None and leanest.workspace_bytes < op.workspace_bytes
        self.written.append(Compute(op.id, reuse, leanest.name if is_leaner else None))
        self._send_away((s for s in used_storages(self.tape, op.id) if s != reuse), after=op.id)
        if reuse in self.on_host and not self._is_needed(reuse, op.id):
            self._drop_copy(reuse)

    def _is_needed(self, storage: int, after: int) -> bool:
        last = self.last[storage]
        return self.tape.storages[storage].at_end or (last is not None and last > after)

    def _bring(self, storages: Iterable[int]) -> None:
        for s in dict.fromkeys(storages):
            if s in self.on_host and s not in self.staying:
                self.written += [Prefetch(s), Wait(s)]

    def _send_away(self, storages: Iterable[int], after: int) -> None:
        for s in storages:
            if s in self.staying:
                continue
            if not self._is_needed(s, after):
                self.written.append(Free(s))
                self._drop_copy(s)
            elif s in self.on_host:
                self.written.append(Free(s))
            else:
                self.written += [Offload(s), Wait(s), Free(s)]
                self.on_host.add(s)

    def _drop_copy(self, storage: int) -> None:
        if storage in self.on_host:
            self.on_host.discard(storage)
            self.written.append(FreeHost(storage))


# --- time -----------------------------------------------------------------------------------------------------------------
def step_seconds_bound(tape: Tape, device: DeviceProfile, budget_bytes: int, *, state_stays: bool = True, snapshots: int = SNAPSHOTS,
                       watched: int = WATCHED) -> float:
    """Seconds that no legal schedule within the budget is below on the simulated device; inf where no schedule is within it.

    More watched storages give a bound that is higher, or as high, and take longer; another number of snapshots chooses other ones.
    """
    if budget_bytes < least_peak_bytes(tape, state_stays=state_stays):
        return math.inf
    compute = sum(_least_seconds(op) for op in tape.ops)
    if budget_bytes >= check_schedule(tape, replay_schedule(tape)).peak_bytes:
        return compute  # eager fits: hardly anything is to be gained
    stages = _Stages(tape, snapshots)
    relaxed = _Relaxation(stages, _watched(stages, state_stays, watched), device, state_stays)
    return max(compute, relaxed.solve(budget_bytes) * (1 - SLACK))


def _least_seconds(op: Op) -> float:
    return min([op.seconds, *(v.seconds for v in op.variants)])


def _watched(stages: _Stages, state_stays: bool, count: int) -> list[int]:
    """Of the storages that may leave those that weigh most, ascending: by bytes at each snapshot where eager holds them, then by size."""
    tape, first, last = stages.tape, first_use(stages.tape), last_use(stages.tape)

    def weight(s: Storage) -> tuple[int, int, int]:
        begin = -1 if s.at_start else first[s.id]
        end = len(tape.ops) if s.at_end else last[s.id]
        spans = 0 if begin is None or end is None else sum(begin <= op <= end for op in stages.snapshots)
        return -s.nbytes * spans, -s.nbytes, s.id

    movable = [s for s in tape.storages if s.nbytes and not (state_stays and s.at_start and s.at_end)]
    return sorted(s.id for s in sorted(movable, key=weight)[:count])


def _variants(op: Op) -> list[tuple[float, int]]:
    """Seconds and workspace of the variants that no other beats."""
    found: list[tuple[float, int]] = []
    for seconds, nbytes in sorted([(op.seconds, op.workspace_bytes), *((v.seconds, v.workspace_bytes) for v in op.variants)]):
        if not found or nbytes < found[-1][1]:
            found.append((seconds, nbytes))
    return found


def predecessors(tape: Tape) -> list[set[int]]:
    """Per op: ops that run before it for the first time in every legal schedule; with theirs, all that the checker insists on."""
    before: list[set[int]] = [set() for _ in tape.ops]
    writer: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    random: int | None = None
    for op in tape.ops:
        bound = {s for s, _ in tape.read_versions[op.id]}
        for s in (*tape.reads[op.id], *op.mutates):
            if (made := tape.producer[s]) is not None and made != op.id:
                before[op.id].add(made)
            if s in writer and (s in bound or s in op.mutates):
                before[op.id].add(writer[s])
        for s in op.mutates:
            before[op.id] |= readers.pop(s, set()) - {op.id}
            writer[s] = op.id
        for s in bound - set(op.mutates):
            readers.setdefault(s, set()).add(op.id)
        if op.is_random:
            before[op.id] |= set() if random is None else {random}
            random = op.id
    return before


@dataclass(frozen=True, eq=False)
class _Stages:
    """Snapshots on a longest path of dependencies; stages 1 to `last`, each but the last ending with the first run of its snapshot."""

    tape: Tape
    count: int

    @cached_property
    def before(self) -> list[set[int]]:
        return predecessors(self.tape)

    @cached_property
    def snapshots(self) -> list[int]:
        """Of equal parts of the path, the op at which eager holds most."""
        path, held = self._path(), self._eager_bytes
        cuts = [len(path) * i // self.count for i in range(self.count + 1)]
        parts = [path[a:b] for a, b in zip(cuts, cuts[1:]) if a < b]
        return [max(part, key=lambda op: held[op]) for part in parts]

    @property
    def last(self) -> int:
        return len(self.snapshots) + 1

    @cached_property
    def window(self) -> list[tuple[int, int]]:
        """Per op: the first and the last stage in which a legal schedule can first run it."""
        place = {op: t for t, op in enumerate(self.snapshots, 1)}
        earliest, latest = [1] * len(self.tape.ops), [self.last] * len(self.tape.ops)
        for op in range(len(self.tape.ops)):
            for b in self.before[op]:
                earliest[op] = max(earliest[op], place[b] + 1 if b in place else earliest[b])
            earliest[op] = place.get(op, earliest[op])
        for op in reversed(range(len(self.tape.ops))):
            latest[op] = place.get(op, latest[op])
            for b in self.before[op]:
                latest[b] = min(latest[b], latest[op])
        return list(zip(earliest, latest))

    def _path(self) -> list[int]:
        length, came_from = [1] * len(self.tape.ops), [-1] * len(self.tape.ops)
        for op, before in enumerate(self.before):
            for b in sorted(before):
                if length[b] + 1 > length[op]:
                    length[op], came_from[op] = length[b] + 1, b
        at = max(range(len(length)), key=lambda op: (length[op], -op), default=-1)
        path = []
        while at >= 0:
            path.append(at)
            at = came_from[at]
        return path[::-1]

    @cached_property
    def _eager_bytes(self) -> dict[int, int]:
        """Per op: what eager holds at the highest instant of it."""
        checked = check_schedule(self.tape, replay_schedule(self.tape))
        instructions = checked.schedule.instructions
        return {i.op: held for i, held in zip(instructions, checked.inner_peak_bytes.tolist()) if isinstance(i, Compute)}


class _Relaxation:
    """The linear program of the time bound; names are those of the module's docstring."""

    def __init__(self, stages: _Stages, watched: Sequence[int], device: DeviceProfile, state_stays: bool) -> None:
        self.stages, self.tape, self.device, self.watched = stages, stages.tape, device, watched
        self.staying = {s.id for s in self.tape.storages if state_stays and s.at_start and s.at_end}
        self.seconds = [_least_seconds(op) for op in self.tape.ops]
        self.program = Program()
        self.F: dict[tuple[int, int], Affine] = {}
        self.R: dict[tuple[int, int], Affine] = {}
        self.O: dict[tuple[int, int], Affine] = {}  # noqa: E741
        self.P: dict[tuple[int, int], Affine] = {}
        self.x: dict[tuple[int, int], Affine] = {}
        self.first_seconds: dict[int, Affine] = {}  # of the first run of each snapshot
        self.workspace: dict[int, Affine] = {}
        self._add_columns()
        self._add_presence()

    def solve(self, budget_bytes: int) -> float:
        """The optimum in seconds."""
        self._add_memory(budget_bytes)
        scale = sum(self.seconds) or 1.0  # so that HiGHS sees numbers near 1
        end = self._add_time(scale)
        answer = self.program.minimise(end)
        if answer.status != OPTIMAL:  # a budget from the least peak on has a schedule, whose numbers satisfy the rows
            raise RuntimeError("HiGHS gives no optimum of a linear program that has one")
        return answer.bound * scale

    def _times(self) -> range:
        return range(1, self.stages.last + 1)

    def _add_columns(self) -> None:
        for op in self.tape.ops:
            low, high = self.stages.window[op.id]
            if low == high:
                self.F[op.id, low] = ZERO + 1.0
                continue
            if not self._touches(op):
                continue
            for t in range(low, high + 1):
                self.F[op.id, t] = self.program.column()
            whole = total(self.F[op.id, t] for t in range(low, high + 1))
            self.program.at_most(whole, 1.0)
            self.program.at_most(1.0, whole)
        for s in self.watched:
            self._add_storage(s)
        for snapshot in self.stages.snapshots:
            self._add_variants(snapshot)

    def _add_variants(self, snapshot: int) -> None:
        variants = _variants(self.tape.ops[snapshot])
        taken = [self.program.column() for _ in variants] if len(variants) > 1 else [ZERO + 1.0]
        if len(variants) > 1:
            self.program.at_most(total(taken), 1.0)
            self.program.at_most(1.0, total(taken))
        self.first_seconds[snapshot] = total(v * seconds for v, (seconds, _) in zip(taken, variants))
        self.workspace[snapshot] = total(v * float(nbytes) for v, (_, nbytes) in zip(taken, variants))

    def _touches(self, op: Op) -> bool:
        return not set(self.watched).isdisjoint(used_storages(self.tape, op.id))

    def _add_storage(self, s: int) -> None:
        producer = self.tape.producer[s]
        start = 1 if producer is None else self.stages.window[producer][0]
        self.x[s, 0] = ZERO + float(self.tape.storages[s].at_start)
        for t in range(start, self.stages.last + 1):
            self.x[s, t] = ZERO + 1.0 if self._is_kept(s, t) else self.program.column()
        for t in range(self._there_from(s), self.stages.last + 1):
            self.O[s, t], self.P[s, t] = self.program.column(), self.program.column()
            if producer is not None and (producer, t) not in self.R and self._may_run_again(self.tape.ops[producer]):
                self.R[producer, t] = self.program.column()

    def _there_from(self, s: int) -> int:
        """The first stage in which s can be copied or made again: a stage ends with the first run of its snapshot."""
        producer = self.tape.producer[s]
        return 1 if producer is None else self.stages.window[producer][0] + (producer in self.stages.snapshots)

    def _may_run_again(self, op: Op) -> bool:
        return op.phase is not Phase.OPTIMIZER and (op.throwaway_state or not op.mutates)

    def _is_kept(self, s: int, t: int) -> bool:
        """Is s on the device after ct in every schedule?"""
        if t == self.stages.last:
            return self.tape.storages[s].at_end
        op = self.tape.ops[self.stages.snapshots[t - 1]]
        return s in used_storages(self.tape, op.id) and not (op.takeover and op.takeover[1] == s)

    def _seen(self, s: int, t: int) -> Affine:
        producer = self.tape.producer[s]
        parts = [self.x.get((s, t - 1), ZERO), self.P.get((s, t), ZERO)]
        if producer is not None:
            parts += [self.F.get((producer, t), ZERO), self.R.get((producer, t), ZERO)]
        return total(parts)

    def _add_presence(self) -> None:
        watched = set(self.watched)
        seen = {(s, t): self._seen(s, t) for s in watched for t in self._times()}
        for (s, t), x in self.x.items():
            self.program.at_most(x, seen.get((s, t), x))  # before stage 1 there is no stage to be seen in
        for (s, t), offload in self.O.items():
            self.program.at_most(offload, seen[s, t] - self.P[s, t])
            self.program.at_most(self.P[s, t], total(self.O.get((s, u), ZERO) for u in range(1, t + 1)))
        for (op, t), run in self.F.items():
            for s in watched.intersection((*self.tape.reads[op], *self.tape.ops[op].mutates)):
                self.program.at_most(run, seen[s, t])
        for (op, t), run in self.R.items():
            self.program.at_most(run, total(self.F.get((op, u), ZERO) for u in range(1, t + 1)))
            for s in watched.intersection(self.tape.reads[op]):
                self.program.at_most(run, seen[s, t])

    def _add_memory(self, budget_bytes: int) -> None:
        watched, nbytes = set(self.watched), [s.nbytes for s in self.tape.storages]
        state = sum(nbytes[s] for s in self.staying)
        for t, snapshot in enumerate(self.stages.snapshots, 1):
            op = self.tape.ops[snapshot]
            others = set(used_storages(self.tape, snapshot)) - self.staying - watched - ({op.takeover[1]} if op.takeover else set())
            fixed = state + sum(nbytes[s] for s in others)
            held = total(self.x[s, t] * (nbytes[s] / budget_bytes) for s in self.watched if (s, t) in self.x)
            self.program.at_most(held + self.workspace[snapshot] * (1 / budget_bytes), 1.0 - fixed / budget_bytes)

    def _add_time(self, scale: float) -> Affine:
        """Rows of compute stream and link; the end of the step, in units of `scale` seconds."""
        begin, after = [ZERO], [ZERO]  # of the run of ct: its start and its end, at the earliest; before stage 1 nothing has run
        for t, snapshot in enumerate(self.stages.snapshots, 1):
            begin.append(self.program.column(high=math.inf))
            self.program.at_most(after[-1] + self._run_seconds(t, snapshot) * (1 / scale), begin[-1])
            after.append(begin[-1] + self.first_seconds[snapshot] * (1 / scale))
        end = self.program.column(high=math.inf)
        self.program.at_most(after[-1] + self._run_seconds(self.stages.last, None) * (1 / scale), end)
        again = total(run * self.seconds[op] for (op, _), run in self.R.items())
        slower = total(seconds - self.seconds[snapshot] for snapshot, seconds in self.first_seconds.items())
        self.program.at_most((again + slower + sum(self.seconds)) * (1 / scale), end)
        for t in range(self.stages.last):
            for copies in self._directions(t):
                self.program.at_most(after[t] + copies * (1 / scale), end)
        for t in range(1, self.stages.last):
            self._add_copies_before(t, begin, after, scale)
        return end

    def _run_seconds(self, t: int, snapshot: int | None) -> Affine:
        """What runs in stage t, its snapshot apart."""
        first = [run * self.seconds[op] for (op, u), run in self.F.items() if u == t and op != snapshot]
        return total([*first, *(run * self.seconds[op] for (op, u), run in self.R.items() if u == t)])

    def _copy_seconds(self, s: int, *, to_host: bool) -> float:
        return self.device.copy_seconds(self.tape.storages[s].nbytes, to_host=to_host)

    def _directions(self, after: int) -> list[Affine]:
        """Seconds of the copies that start in a later stage: per engine."""
        to_host = total(o * self._copy_seconds(s, to_host=True) for (s, t), o in self.O.items() if t > after)
        to_device = total(p * self._copy_seconds(s, to_host=False) for (s, t), p in self.P.items() if t > after)
        return [to_host, to_device] if self.device.is_full_duplex else [to_host + to_device]

    def _add_copies_before(self, t: int, begin: Sequence[Affine], after: Sequence[Affine], scale: float) -> None:
        """What the link has done when ct starts: the copies to the host that are over, those to the device that ct waits for."""
        ended = []
        for s in self.watched:
            if (s, t) not in self.x:
                continue
            started = total(self.O.get((s, u), ZERO) for u in range(1, t + 1))
            over = self.program.column(high=math.inf)  # copies of s: at least those started less one that still holds the device copy
            self.program.at_most(started - self.x[s, t], over)
            ended.append(over * self._copy_seconds(s, to_host=True))
            if 1 < (stage := self._there_from(s)) <= t:
                self.program.at_most(after[stage - 1] + ended[-1] * (1 / scale), begin[t])
        self.program.at_most(total(ended) * (1 / scale), begin[t])
        op = self.stages.snapshots[t - 1]
        needed = set(self.watched).intersection((*self.tape.reads[op], *self.tape.ops[op].mutates))
        for u in range(t if needed else 0):
            copies = total(self.P[s, v] * self._copy_seconds(s, to_host=False)
                           for s in sorted(needed) for v in range(u + 1, t + 1) if (s, v) in self.P)
            self.program.at_most(after[u] + copies * (1 / scale), begin[t])
