"""Where each storage is between two of its uses, chosen gap by gap, and the schedule that follows, in compiled loops.

    choices (vramlab/gaps.py) ─► what is where (vramlab/occupancy.py) ─► when copies run, and the clock (vramlab/copying.py) ─► a schedule

Import this module when it is needed: numba is slow to load.
"""

from __future__ import annotations

import numpy as np

from vramlab.copying import clock_step, place_backs
from vramlab.device import DeviceProfile
from vramlab.edits import costs_of
from vramlab.gaps import AFTER, DROP, KEEP, NONE, SWAP, Choices, flatten, variants_of
from vramlab.kernels import COMPUTE, FREE, FREE_HOST, OFFLOAD, PREFETCH, RECOMPUTE, WAIT, bare, inlined
from vramlab.occupancy import EFFORT, FITS, NOW, SAME, WRITTEN, copy_log, occupy, work_for
from vramlab.planner import Budget
from vramlab.schedule import Compute, Free, FreeHost, Instruction, Offload, Prefetch, Recompute, Schedule, Wait
from vramlab.tape import Tape

APART = 8  # copies back and what is done once take about this part of a walk
ROUNDING = 1e-9  # relative: how far sums of the same seconds in another order may be apart


# --- decoding: numba's cache on disk does not notice when gaps, kernels, occupancy or copying change: touch this file then ----------
@bare
def decode(step, choices, costs, w, row, limit):
    """All passes, the first from a saved row on. What came of it; the step's seconds are `w.clock[NOW]`, the schedule its four columns.

    SLOW as soon as it is seen that they are more than `limit` seconds.
    """
    limit *= 1 + ROUNDING
    w.count[EFFORT] += 1 + step.ops // APART
    status = occupy(step, choices, w, costs.device_budget, row, limit)
    if status != FITS:
        return status
    place_backs(choices, costs.h2d_seconds, step.nbytes, w, costs.device_budget)
    return clock_step(step, choices, costs, w, limit)


@inlined
def row_of(step, op):
    """The last saved row before an op."""
    return max(op, 0) // step.spacing


@bare
def begin_try(step, w, row):
    """The choices that were kept are to be changed from this row on, and tried."""
    if row > w.count[SAME]:
        copy_log(step, w, w.kept, w.log, w.count[SAME], row)
    w.count[SAME] = row


@bare
def decode_from(step, choices, costs, w, row, limit):
    """As `decode`; the choices differ only from this row on from those that were decoded last, or from those kept since `begin_try`."""
    w.count[SAME] = min(w.count[SAME], row)
    return decode(step, choices, costs, w, row, limit)


@bare
def keep(step, w):
    """What was decoded last, and fits, is kept from now on."""
    copy_log(step, w, w.log, w.kept, w.count[SAME], step.rows - 1)
    w.count[SAME] = step.rows - 1


# --- from a tape and back -------------------------------------------------------------------------------------------------
class Residence:
    """The choices that a step has on a device within a budget, and what follows from them."""

    def __init__(self, tape: Tape, device: DeviceProfile, budget: Budget) -> None:
        self.tape = tape
        self._variants = [variants_of(op) for op in tape.ops]
        self.step = flatten(tape, self._variants)
        self.costs = costs_of(tape.storages, device, budget)
        self.work = work_for(self.step)
        self._names = [name for found in self._variants for name, _, _ in found]

    @property
    def gaps(self) -> int:
        """How many."""
        return len(self.step.gap_storage)

    def choices(self) -> Choices:
        """Everything is kept as long as an op of the tape needs it, and each op takes its fastest variant that fits."""
        is_over = self.step.gap_kind == AFTER
        return Choices(np.where(is_over, DROP, KEEP).astype(np.int8), ~is_over, np.zeros(self.gaps, np.int8),
                       np.zeros(self.step.ops, np.int8))

    def decode(self, choices: Choices) -> tuple[int, float]:
        """What came of the choices, and seconds of the step where they fit. `work` then has the rest."""
        status = decode(self.step, choices, self.costs, self.work, 0, np.inf)
        return int(status), float(self.work.clock[NOW]) if status == FITS else float("inf")

    def schedule(self, method: str) -> Schedule:
        """What was decoded last, which fitted."""
        w = self.work
        columns = (column[:w.count[WRITTEN]].tolist() for column in (w.code, w.argument, w.reuse, w.variant))
        return Schedule(tuple(self._instruction(*row) for row in zip(*columns)), self.tape.digest, method)

    def _instruction(self, code: int, argument: int, reuse: int, variant: int) -> Instruction:
        if code in (COMPUTE, RECOMPUTE):
            kind = Compute if code == COMPUTE else Recompute
            return kind(argument, None if reuse == NONE else reuse, self._names[variant])
        return {FREE: Free, OFFLOAD: Offload, PREFETCH: Prefetch, WAIT: Wait, FREE_HOST: FreeHost}[code](argument)

    def choices_of(self, schedule: Schedule) -> Choices:
        """What a schedule of the tape has chosen, as far as gaps can say: in each, how its storage left and came back last."""
        choices, returns, rereads, step = self.choices(), _returns(self.tape, schedule), _rereads(self.tape, schedule), self.step
        for g, (s, begin, end) in enumerate(zip(step.gap_storage.tolist(), step.gap_begin.tolist(), step.gap_end.tolist())):
            here = [(at, kind) for at, kind in returns.get(s, ()) if begin < at <= end]
            if step.gap_kind[g] == AFTER:
                read = [at for at in rereads.get(s, ()) if begin < at <= end]
                if read:  # it can stay for all of them only where the last of them ends the gap
                    is_once = read[-1] == (here[0][0] if here else read[0])
                    choices.action[g] = here[0][1] if here else KEEP if is_once or read[-1] == end else SWAP
                    choices.stays[g] = not is_once and read[-1] == end
            elif here:
                at, kind = here[-1]
                choices.action[g] = SWAP if kind == SWAP or not step.gap_may_drop[g] else DROP
                choices.stays[g] = at < end or len(here) == 1
        return choices


def _rereads(tape: Tape, schedule: Schedule) -> dict[int, list[int]]:
    """Per storage: before the first run of which ops a further run reads it."""
    found: dict[int, list[int]] = {}
    at = 0
    for i in schedule.instructions:
        if isinstance(i, Compute):
            at = i.op + 1
        elif isinstance(i, Recompute):
            for s in tape.reads[i.op]:
                found.setdefault(s, []).append(at)
    return found


def _returns(tape: Tape, schedule: Schedule) -> dict[int, list[tuple[int, int]]]:
    """Per storage: before the first run of which op, and how, it came back to the device."""
    found: dict[int, list[tuple[int, int]]] = {}
    absent: set[int] = set()
    at = 0
    for i in schedule.instructions:
        if isinstance(i, Compute):
            at = i.op + 1
        elif isinstance(i, Recompute):
            for s in absent.intersection(tape.creates[i.op]):
                found.setdefault(s, []).append((at, DROP))
                absent.discard(s)
        elif isinstance(i, Prefetch):
            found.setdefault(i.storage, []).append((at, SWAP))
            absent.discard(i.storage)
        if isinstance(i, Free):
            absent.add(i.storage)
        elif isinstance(i, Compute | Recompute) and i.reuse is not None:
            absent.add(i.reuse)
    return found
