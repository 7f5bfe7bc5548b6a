"""A schedule that a search edits: what an edit makes of legality, peak and time, without walking all of it again.

    edited = Edits(checked, device, budget)
    value = edited.evaluate(begin, end, piece)       instructions begin to end are replaced by those of piece; None where that is illegal
    edited.accept(begin, end, piece)                 from now on this is the schedule

The walk restarts from a saved state before the first instruction that changes. As soon as the bytes, storages and ops are those of the
schedule without the edit at a saved state, what follows is as legal and takes as much; only its time is counted, in the simulator's own
arithmetic. So a value is that of `check_schedule` and `simulate` to the last bit (tests/test_edits.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from vramlab.check import CheckedSchedule, check_schedule, table
from vramlab.device import DeviceProfile
from vramlab.planner import UNLIMITED, Budget
from vramlab.schedule import Instruction, Schedule

if TYPE_CHECKING:
    from vramlab.kernels import Costs, Fault, FlatSchedule, Saved, Scratch

MOST_ROWS = 64  # saved states
SHORTEST = 16  # instructions between two of them, at least


@dataclass(frozen=True, slots=True)
class Value:
    """What a schedule comes to."""

    step_seconds: float
    stall_seconds: float
    peak_bytes: int
    peak_host_bytes: int


class Edits:
    """One schedule, its saved states, and edits of it. ScheduleError where the schedule is not within the budget."""

    def __init__(self, checked: CheckedSchedule, device: DeviceProfile, budget: Budget | None = None) -> None:
        self.tape, self.device = checked.tape, device
        self.budget = budget or Budget(device_bytes=UNLIMITED)
        self._begin(check_schedule(checked.tape, checked.schedule, self.budget).schedule)

    @property
    def value(self) -> Value:
        """Of the schedule as it stands."""
        return self.evaluate(0, 0, ())

    def evaluate(self, begin: int, end: int, piece: Sequence[Instruction]) -> Value | None:
        """Of the schedule with `piece` in place of its instructions from `begin` to before `end`; None where that is illegal.

        ValueError where these are no instructions of it.
        """
        from vramlab import kernels

        if not 0 <= begin <= end <= len(self.schedule.instructions):
            raise ValueError(f"instructions {begin} to {end} of {len(self.schedule.instructions)}")
        flat = kernels.flatten_schedule(Schedule(tuple(piece), self.tape.digest))
        scratch = self._scratch
        if not kernels.walk_edited(*self._walked, begin, end, flat, scratch):
            return None
        return Value(float(scratch.clock[kernels.NOW]), float(scratch.clock[kernels.STALL]), int(scratch.peaks[0]), int(scratch.peaks[1]))

    @property
    def fault(self) -> Fault:
        """Why the last edit was illegal; its reason is LEGAL where it was not."""
        from vramlab import kernels

        return kernels.Fault(*self._scratch.state.fault.tolist())

    def evaluate_moves(self, moves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each move of one instruction, int64 [moves, 2]: from where, to where, each evaluated on its own.

        Step seconds [moves], inf where it is illegal; and peaks on device and host, int64 [moves, 2].
        """
        from vramlab import kernels

        if len(moves) and not (0 <= moves.min() and moves.max() < len(self.schedule.instructions)):
            raise ValueError(f"a move of an instruction that is none of the {len(self.schedule.instructions)}")
        seconds, peaks = np.zeros(len(moves)), np.zeros((len(moves), 2), np.int64)
        kernels.walk_moves(*self._walked, np.ascontiguousarray(moves, np.int64), seconds, peaks, self._scratch)
        return seconds, peaks

    def accept(self, begin: int, end: int, piece: Sequence[Instruction]) -> None:
        """Make this edit. ScheduleError where it is illegal."""
        old = self.schedule.instructions
        edited = replace(self.schedule, instructions=(*old[:begin], *piece, *old[end:]))
        self._begin(check_schedule(self.tape, edited, self.budget).schedule)

    def _begin(self, schedule: Schedule) -> None:
        from vramlab import kernels

        self.schedule = schedule
        tape, flat = kernels.flatten_tape(self.tape), kernels.flatten_schedule(schedule)
        every = max(SHORTEST, -(-len(flat.code) // MOST_ROWS))
        saved = _rows(len(flat.code), every, len(tape.nbytes), len(tape.seconds))
        costs = costs_of(self.tape.storages, self.device, self.budget)
        kernels.save(table(), tape, costs, flat, saved)
        self._walked: tuple[np.ndarray, kernels.FlatTape, Costs, FlatSchedule, Saved] = table(), tape, costs, flat, saved
        self._scratch = _scratch(len(tape.nbytes), len(tape.seconds))


def costs_of(storages: Sequence, device: DeviceProfile, budget: Budget) -> Costs:
    """Copies and budgets as the compiled loops take them."""
    from vramlab import kernels

    return kernels.Costs(
        d2h_seconds=np.array([device.copy_seconds(s.nbytes, to_host=True) for s in storages], np.float64),
        h2d_seconds=np.array([device.copy_seconds(s.nbytes, to_host=False) for s in storages], np.float64),
        is_full_duplex=device.is_full_duplex,
        device_budget=min(budget.device_bytes, UNLIMITED), host_budget=min(budget.host_bytes, UNLIMITED))


def _rows(size: int, every: int, storages: int, ops: int) -> Saved:
    from vramlab import kernels

    rows = max(1, -(-size // every))
    return kernels.Saved(
        every=every, residency=np.zeros((rows, storages), np.int64), version=np.zeros((rows, storages), np.int64),
        is_computed=np.zeros((rows, ops), np.bool_), held=np.zeros((rows, 3), np.int64), clock=np.zeros((rows, kernels.CLOCK)),
        copy_end=np.zeros((rows, storages)), peaks_before=np.zeros((rows, 2), np.int64), peaks_after=np.zeros((rows, 2), np.int64),
        duration=np.zeros(size))


def _scratch(storages: int, ops: int) -> Scratch:
    from vramlab import kernels

    state = kernels.State(np.zeros(storages, np.int64), np.zeros(storages, np.int64), np.zeros(ops, np.bool_), np.zeros(3, np.int64),
                          np.full(7, kernels.NONE))
    return kernels.Scratch(state, np.zeros(kernels.CLOCK), np.zeros(storages), np.zeros(2, np.int64))
