"""The sequence that a filled table stands for, and the step that it writes."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import numpy as np

from vramlab.device import DeviceProfile
from vramlab.schedule import Schedule
from vramlab.stages import Stage, StagePlayer, in_slots
from vramlab.tape import Tape

from .recurrence import KEEP_ALL, Recurrence


class Operation(StrEnum):
    """The paper's operations on a stage."""

    F_NONE = "F_none"  # run it, drop what is inside and its input
    F_CK = "F_ck"  # run it, drop what is inside, keep its input
    F_ALL = "F_all"  # run it, keep what its backward needs
    LAST_F_ALL = "last F_all"  # the same right before its backward: nothing behind it runs any more
    B = "B"
    DROP = "drop"  # the map that it hands on, whose uses are over


Step = tuple[Operation, int]


def sequence(recurrence: Recurrence, x_bytes: np.ndarray, saved_bytes: np.ndarray, slot_bytes: int, slots: int) -> Iterator[Step]:
    """Operations on stages (by index), in order. `slots`: with a finite time."""
    x, saved = in_slots(x_bytes, slot_bytes), in_slots(saved_bytes, slot_bytes)
    pending: list[tuple[int, int, int] | Step] = [(0, recurrence.last, slots)]  # ranges with their slots, operations as they are
    while pending:
        what = pending.pop()
        if len(what) == 2:
            yield what
            continue
        s, t, m = what
        j = int(recurrence.choice[s, t, m])
        if j == KEEP_ALL:
            rest = [(s + 1, t, m - int(saved[s]))] if s < t else []
            pending += [(Operation.B, s), *rest, (Operation.F_ALL if s < t else Operation.LAST_F_ALL, s)]
        else:
            passing = [(Operation.F_NONE, i) for i in range(s + 1, j)]
            pending += [(s, j - 1, m), (Operation.DROP, j - 1), (j, t, m - int(x[j - 1])), *passing[::-1], (Operation.F_CK, s)]


def written(tape: Tape, device: DeviceProfile, stages: tuple[Stage, ...], steps: Iterator[Step], method: str) -> Schedule:
    """The step in which the stages run in this sequence."""
    player = StagePlayer(tape, device, stages)
    for operation, k in steps:
        stage = stages[k]
        match operation:
            case Operation.F_NONE:
                player.forward(stage, keeps=False)
                player.drop([stages[k - 1].x])
            case Operation.F_CK:
                player.forward(stage, keeps=False, holds=True)
            case Operation.F_ALL | Operation.LAST_F_ALL:
                player.forward(stage, keeps=True, hands_on=operation is Operation.F_ALL)
            case Operation.B:
                player.backward(stage)
            case Operation.DROP:
                player.drop([stage.x])
    return player.schedule(method)
