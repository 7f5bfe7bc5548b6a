"""The mixed-integer program: which items run again, which storages make a round trip, and when; exact in bytes and in seconds.

Positions q = 0, 1, ... are the possible runs in order: before the first run of item t, each earlier item k < t may run again, in order.
The last position runs nothing: the step ends there. With 0 or 1 for each

    R[q]   the position is used                     off[s,q], pf[s,q]   a copy of s to, from the host starts in the gap before q
    x[s,q] s is on the device while q runs          out[s,q]            s has been offloaded by q and not prefetched

and, in seconds, c[q] <= e[q] (start and end of the run), g[q] (in the gap before q, room has been made), start and end of each copy:

    x[s,q] <= x[s,q-1] + R[q] where q makes s + pf[s,q]          nothing moves, comes or goes at a position that is not used
    R[q] <= x[s,q-1] + pf[s,q], x[s,q] for each s that q reads   (but for an input that the output takes over, which then is gone)
    R[q] <= x[s,q] <= 1 - x[s,q-1], out[s,q] for what a position makes again: all of it is absent
    sum of bytes x[s,q] + inner bytes R[q] <= budget
    e[q-1] <= g[q] <= c[q], e[q] = c[q] + seconds R[q]           c[q] >= end of the copy back of what q reads
    copy to the host of s: starts after e[q-1] if off[s,q], and has ended by g[q] if s is out and not on the device at q
    copy back of s: starts after g[q] if pf[s,q]                 one copy after the other in each direction
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

from vramlab.device import DeviceProfile
from vramlab.program import ZERO, Affine, Answer, Program, total
from vramlab.tape import Tape

from .items import Item, Run

FINE = 1e4  # of the budget: rows of bytes are in these parts of it, so that what the solver lets them be off by is small
SPAN = 100.0  # the seconds of all runs once, in the units of the program


@dataclass(frozen=True)
class Position:
    """A possible run; `run` None is the end of the step."""

    item: int
    run: Run | None
    is_first: bool


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the program decides. Sets by position; start seconds of copies by storage."""

    used: list[bool]
    on_device: list[frozenset[int]]
    offloads: list[frozenset[int]]  # that start in the gap before the position
    prefetches: list[frozenset[int]]
    offload_start: dict[int, float]
    prefetch_start: dict[int, float]


def positions_of(items: Sequence[Item], at_end: frozenset[int]) -> list[Position]:
    """All runs that can be of use."""
    found: list[Position] = []
    for t, item in enumerate(items):
        wanted = set(at_end).union(*(later.first.reads for later in items[t:]))
        again: list[Position] = []
        for k in reversed(range(t)):
            run = items[k].again
            if run is not None and items[k].until >= item.first.ops[0] and wanted & items[k].makes:
                again.append(Position(k, run, False))
                wanted |= run.reads
        found += [*reversed(again), Position(t, item.first, True)]
    return [*found, Position(len(items), None, True)]


class Mixed:
    """The program of one tape, device and class of schedules. `storages` of it may stand for several of the tape: `members`."""

    def __init__(self, tape: Tape, items: Sequence[Item], device: DeviceProfile, recomputes: int) -> None:
        self.tape, self.items, self.device, self.recomputes = tape, items, device, recomputes
        self.state = frozenset(s.id for s in tape.storages if s.at_start and s.at_end)
        self.nbytes = [s.nbytes for s in tape.storages]
        self.at_end = frozenset(s.id for s in tape.storages if s.at_end) - self.state
        self.positions = positions_of(items, self.at_end)
        made = {s for item in items for s in item.makes}
        self.overwritten = {s for op in tape.ops for s in op.mutates}
        self.members = self._bundled(made | {s.id for s in tape.storages if s.at_start and not s.at_end})
        self.storages = sorted(self.members)
        self.travellers = [s for s in self.storages if self._size(s) and s not in self.overwritten]
        self.program = Program()
        self.scale = sum(item.first.seconds for item in items) / SPAN or 1.0
        self._add_columns()
        self._add_presence()

    # --- bundles ------------------------------------------------------------------------------------------------------------
    def _bundled(self, storages: set[int]) -> dict[int, tuple[int, ...]]:
        """The storages that the program knows, with those that each stands for: what one item of several ops makes for the same readers
        goes and comes together. Sizes and copy times are those of all its members."""
        found: dict[object, list[int]] = {}
        for s in sorted(storages):
            makers = [k for k, item in enumerate(self.items) if s in item.makes and len(item.first.ops) > 1]
            readers = tuple(k for k, item in enumerate(self.items) if s in item.first.reads)
            again = tuple(k for k, item in enumerate(self.items) if item.again is not None and s in item.again.reads)
            key = (makers[0], readers, again, s in self.at_end) if makers and s not in self.overwritten else s
            found.setdefault(key, []).append(s)
        return {members[0]: tuple(members) for members in found.values()}

    def _size(self, s: int) -> int:
        return sum(self.nbytes[member] for member in self.members[s])

    # --- columns ------------------------------------------------------------------------------------------------------------
    def _add_columns(self) -> None:
        self.R = [ZERO + 1.0 if p.is_first else self.program.binary() for p in self.positions]
        for k, item in enumerate(self.items):
            if item.again is not None:
                again = total(self.R[q] for q, p in enumerate(self.positions) if p.item == k and not p.is_first)
                self.program.at_most(again, self.recomputes)
        self.x: dict[tuple[int, int], Affine] = {}
        self.off: dict[tuple[int, int], Affine] = {}
        self.pf: dict[tuple[int, int], Affine] = {}
        for s in self.storages:
            begin, end = self._lifetime(s)
            for q in range(begin, end + 1):
                self.x[s, q] = self.program.binary()
            if s in self.travellers:
                for q in range(begin + 1, end + 1):
                    self.off[s, q], self.pf[s, q] = self.program.binary(), self.program.binary()

    def _lifetime(self, s: int) -> tuple[int, int]:
        """The first position at which s can be there, and the last at which it can be of use, or is made beside what is."""
        uses = [q for q, p in enumerate(self.positions) if p.run is not None and s in p.run.reads]
        makes = [q for q, p in enumerate(self.positions) if p.run is not None and s in p.run.makes]
        last = len(self.positions) - 1 if s in self.at_end else max(uses + makes, default=-1)
        return 0 if self.tape.storages[s].at_start else makes[0], last

    def _reads(self, q: int) -> frozenset[int]:
        run = self.positions[q].run
        return (self.at_end if run is None else run.reads) & set(self.storages)

    def _made(self, s: int, q: int) -> Affine:
        run = self.positions[q].run
        return self.R[q] if run is not None and s in run.makes else ZERO

    def _on(self, s: int, q: int) -> Affine:
        if q < 0:
            return ZERO + float(self.tape.storages[s].at_start)
        return self.x.get((s, q), ZERO)

    def _so_far(self, of: dict[tuple[int, int], Affine], s: int, q: int) -> Affine:
        return total(of.get((s, i), ZERO) for i in range(q + 1))

    # --- where things are -----------------------------------------------------------------------------------------------------
    def _add_presence(self) -> None:
        for (s, q), x in self.x.items():
            before, back = self._on(s, q - 1), self.pf.get((s, q), ZERO)
            self.program.at_most(x, before + self._made(s, q) + back)
            if not self.positions[q].is_first:
                self.program.at_most(before - self.R[q], x)
        for q in range(len(self.positions)):
            self._add_run(q)
        for s in self.travellers:
            self._add_trip(s)

    def _add_run(self, q: int) -> None:
        position, runs = self.positions[q], self.R[q]
        takeover = self.items[position.item].takeover if position.run is not None else None
        for s in sorted(self._reads(q)):
            self.program.at_most(runs, self._on(s, q - 1) + self.pf.get((s, q), ZERO))
            if takeover is None or s != takeover[1]:
                self.program.at_most(runs, self._on(s, q))
        if position.run is None:
            return
        for s in position.run.makes & set(self.storages):
            self.program.at_most(runs, self._on(s, q))
            if not position.is_first:
                out = self._so_far(self.off, s, q) - self._so_far(self.pf, s, q - 1)
                self.program.at_most(self._on(s, q - 1) + runs, 1)
                self.program.at_most(out + runs, 1)

    def _add_trip(self, s: int) -> None:
        """At most one, there and back; away during a run at least."""
        gaps = [q for q in range(len(self.positions)) if (s, q) in self.off]
        there, back = total(self.off[s, q] for q in gaps), total(self.pf[s, q] for q in gaps)
        self.program.at_most(there, 1)
        self.program.at_most(there, back)
        self.program.at_most(back, there)
        for q in gaps:
            self.program.at_most(self.off[s, q], self._on(s, q - 1))
            self.program.at_most(self.pf[s, q] + self._on(s, q - 1), 1)
            self.program.at_most(self.pf[s, q], self._so_far(self.off, s, q - 1))
            if not self.positions[q].is_first:
                self.program.at_most(self.off[s, q] + self.pf[s, q], self.R[q])

    # --- bytes ------------------------------------------------------------------------------------------------------------------
    def _held(self, q: int, unit: float) -> Affine:
        run = self.positions[q].run
        state = sum(self.nbytes[s] for s in self.state) / unit
        parts = [self._on(s, q) * (self._size(s) / unit) for s in self.storages]
        return total([*parts, self.R[q] * (run.inner_bytes / unit if run is not None else 0.0), state])

    @property
    def unit_of_peak(self) -> float:
        """Bytes."""
        return max(1, sum(self.nbytes)) / FINE

    def least_peak(self, time_limit_seconds: float | None) -> Answer:
        """The answer to: how little memory? Its objective and bound are in units of `unit_of_peak` bytes."""
        unit = self.unit_of_peak
        peak = self.program.column(high=math.inf)
        for q in range(len(self.positions)):
            self.program.at_most(self._held(q, unit), peak)
        return self.program.minimise(peak, time_limit_seconds=time_limit_seconds)

    def fastest(self, budget_bytes: int, host_bytes: int, time_limit_seconds: float | None, known_seconds: float | None = None) -> Answer:
        """The answer to: how fast within the budget? Its objective and bound are in units of `scale` seconds.

        `known_seconds`: of a schedule of the class that is known to be within the budget; slower ones are not looked at.
        """
        self.known = self._horizon if known_seconds is None else min(self._horizon, known_seconds / self.scale * (1 + 1e-5))
        for q in range(len(self.positions)):
            self.program.at_most(self._held(q, budget_bytes / FINE), FINE)
        if host_bytes < sum(self._size(s) for s in self.travellers):
            self.program.at_most(total(off * (self._size(s) / max(host_bytes, 1)) for (s, _), off in self.off.items()),
                                 1.0 if host_bytes else 0.0)
        return self.program.minimise(self._add_time(), time_limit_seconds=time_limit_seconds, relative_gap=1e-6)

    def fewest_reruns(self, budget_bytes: int, time_limit_seconds: float | None) -> Answer:
        """The answer to: how fast without any copy? The whole problem of time without a clock, and so a small one."""
        for q in range(len(self.positions)):
            self.program.at_most(self._held(q, budget_bytes / FINE), FINE)
        self.program.at_most(total(self.off.values()), 0.0)
        again = total(self.R[q] * (p.run.seconds / self.scale) for q, p in enumerate(self.positions) if not p.is_first)
        return self.program.minimise(again + SPAN, time_limit_seconds=time_limit_seconds, relative_gap=1e-6)

    # --- seconds ----------------------------------------------------------------------------------------------------------------
    def _copy(self, s: int, *, to_host: bool) -> float:
        return sum(self.device.copy_seconds(self.nbytes[member], to_host=to_host) for member in self.members[s]) / self.scale

    @cached_property
    def _horizon(self) -> float:
        """No schedule of the class needs more: all runs and copies one after the other."""
        runs = sum(item.first.seconds + self.recomputes * (item.again.seconds if item.again else 0.0) for item in self.items) / self.scale
        return runs + sum(self._copy(s, to_host=True) + self._copy(s, to_host=False) for s in self.travellers)

    @cached_property
    def _big(self) -> float:
        """No instant and no end of a copy, of one that never starts too, is further apart."""
        return self.known + max((self._copy(s, to_host=way) for s in self.travellers for way in (True, False)), default=0.0)

    def _time(self) -> Affine:
        return self.program.column(high=self.known)

    def _if(self, condition: Affine, earlier: Affine, later: Affine) -> None:
        """Where the condition is 1: earlier <= later. It may be 0 or below otherwise."""
        self.program.at_most(earlier, later + (1 - condition) * self._big)

    def _add_time(self) -> Affine:
        end, self.there, self.back = ZERO, {s: self._time() for s in self.travellers}, {s: self._time() for s in self.travellers}
        copied = {s: self.there[s] + self._copy(s, to_host=True) for s in self.travellers}
        returned = {s: self.back[s] + self._copy(s, to_host=False) for s in self.travellers}
        ends: dict[int, Affine] = {}
        for q, position in enumerate(self.positions):
            room, start = self._time(), self._time()
            self.program.at_most(end, room)
            self.program.at_most(room, start)
            for s in self.travellers:
                if (s, q) in self.off:
                    self._add_copies(s, q, end, room, copied[s], returned[s])
            for s in sorted(self._reads(q) & set(self.travellers)):
                self._if(self._so_far(self.pf, s, q) + self.R[q] - 1, returned[s], start)
            end = start + self.R[q] * (0.0 if position.run is None else position.run.seconds / self.scale)
            if position.is_first:
                self._add_link_so_far(q, room, start, ends)
            ends[q] = end
        for q, after in ends.items():
            if self.positions[q].is_first:
                self.program.at_most(after + self._copies_back(self.travellers, q, len(self.positions) - 1), end)
        self._add_engine(self.there, self.off, copied)
        self._add_engine(self.back, self.pf, returned)
        return end

    def _copies_back(self, storages: Iterable[int], after: int, until: int) -> Affine:
        """Units of the copies back that start in the gaps before the positions from `after` + 1 to `until`."""
        gaps = [(s, q) for s in storages for q in range(after + 1, until + 1) if (s, q) in self.pf]
        return total(self.pf[s, q] * self._copy(s, to_host=False) for s, q in gaps)

    def _add_link_so_far(self, q: int, room: Affine, start: Affine, ends: dict[int, Affine]) -> None:
        """Follows from the other rows where all is whole; without it the relaxation has copies that take no time."""
        gone = []
        for s in self.travellers:
            if (s, q) in self.off:
                over = self.program.column()
                self.program.at_most(self._so_far(self.off, s, q) - self._on(s, q), over)
                gone.append(over * self._copy(s, to_host=True))
        self.program.at_most(total(gone), room)
        reads = sorted(self._reads(q) & set(self.travellers))
        for earlier, after in ends.items():
            if self.positions[earlier].is_first and reads:
                self.program.at_most(after + self._copies_back(reads, earlier, q), start)

    def _add_copies(self, s: int, q: int, before: Affine, room: Affine, copied: Affine, returned: Affine) -> None:
        self._if(self.off[s, q], before, self.there[s])
        self._if(self.pf[s, q], room, self.back[s])
        has_gone, has_come = self._so_far(self.off, s, q), self._so_far(self.pf, s, q)
        self._if(has_gone - has_come - self._on(s, q), copied, room)
        self._if(self._so_far(self.pf, s, q - 1) - self._on(s, q), returned, room)

    def _add_engine(self, start: dict[int, Affine], issue: dict[tuple[int, int], Affine], end: dict[int, Affine]) -> None:
        """One copy after the other, in the order of issue: what starts later may as well be issued later."""
        for a, b in combinations(self.travellers, 2):
            both = total([*(moves for (s, _), moves in issue.items() if s in (a, b)), -1.0])
            is_first = self.program.binary()
            self._if(both + is_first - 1, end[a], start[b])
            self._if(both - is_first, end[b], start[a])
            for q in sorted({q for s, q in issue if s in (a, b)}):
                ahead = self._so_far(issue, a, q) - self._so_far(issue, b, q)
                never = 1 - both  # where not both travel, the order is of nothing
                self.program.at_most(ahead, is_first + never)
                self.program.at_most(ahead * -1, 1 - is_first + never)

    # --- what it says -------------------------------------------------------------------------------------------------------------
    def decision(self, values: np.ndarray) -> Decision:
        """The point as sets and start times, in units of the program."""
        def chosen(of: dict[tuple[int, int], Affine]) -> list[frozenset[int]]:
            return [frozenset(s for s in self.storages if (s, q) in of and of[s, q].at(values) > 0.5) for q in range(len(self.positions))]

        timed = hasattr(self, "there")
        return Decision(used=[r.at(values) > 0.5 for r in self.R], on_device=chosen(self.x), offloads=chosen(self.off),
                        prefetches=chosen(self.pf),
                        offload_start={s: t.at(values) for s, t in self.there.items()} if timed else {},
                        prefetch_start={s: t.at(values) for s, t in self.back.items()} if timed else {})
