"""The step that a sequence writes within a budget: copies leave as soon as they can and free their bytes when those are needed or the copy
has ended; what comes back comes back as early as it fits and the link needs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.device import DeviceProfile
from vramlab.planner import Budget
from vramlab.player import BOTH, ON_HOST
from vramlab.schedule import Compute, Free, Instruction, Prefetch, Recompute, Schedule
from vramlab.stages import Stage, StagePlayer
from vramlab.tape import Tape

from .sequence import Operation, Step


class OffloadingPlayer(StagePlayer):
    """A stage player with a way to the host."""

    def __init__(self, tape: Tape, device: DeviceProfile, stages: tuple[Stage, ...], budget: Budget) -> None:
        super().__init__(tape, device, stages, budget)
        self.leaving: list[int] = []  # being copied to the host, the oldest first

    def out(self, storages: Iterable[int]) -> None:
        """Start to copy what is there to the host."""
        for s in storages:
            if self.is_settled[s] and self.nbytes[s]:
                self.offload(s)
                self.leaving.append(s)

    def back(self, storages: Iterable[int]) -> None:
        """Have it on the device alone: it stays if it has not left yet."""
        for s in storages:
            if s in self.leaving:
                self.leaving.remove(s)
                self.wait(s)
            elif self.residency[s] is ON_HOST:
                self.make_room(int(self.nbytes[s]), self.next_op)
                self.prefetch(s)
                self.wait(s)
            if self.residency[s] is BOTH:
                self.free_host(s)

    def make_room(self, nbytes: int, op: int) -> None:
        """What has been copied by now goes; what is still being copied, the oldest first, as far as the budget needs it."""
        for s in list(self.leaving):
            if self._copy_end[s] <= self.clock_seconds or self.live_bytes + nbytes > self.budget.device_bytes:
                self.leaving.remove(s)
                self.wait(s)
                self.free(s)


def written(tape: Tape, device: DeviceProfile, stages: tuple[Stage, ...], steps: Iterable[Step], budget: Budget, method: str) -> Schedule:
    """The step in which the stages run in this sequence; what comes back is fetched where it is needed."""
    player = OffloadingPlayer(tape, device, stages, budget)
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
            case Operation.X_OUT:
                player.out([stage.x])
            case Operation.X_BACK:
                player.back([stage.x])
            case Operation.INSIDE_OUT:
                player.out(inside(player, stage))
            case Operation.INSIDE_BACK:
                player.back(s for s in stage.made if s != stage.x)
    return player.schedule(method)


def inside(player: StagePlayer, stage: Stage) -> list[int]:
    """What a stage keeps for its backward beside x."""
    return [s for s in stage.made if s != stage.x and player.is_live(s) and player.can_return[s]]


def hoisted(checked: CheckedSchedule, device: DeviceProfile, budget: Budget) -> CheckedSchedule:
    """Each copy back starts as early as it has to, so that the copies, one after the other, end where they are waited for, and as it fits.

    The last one first, on the clock of a step that never stands still.
    """
    tape, instructions = checked.tape, checked.schedule.instructions
    begins = np.cumsum([0.0, *(tape.ops[i.op].seconds if isinstance(i, Compute | Recompute) else 0.0 for i in instructions)])
    inner, gone, left_at = checked.inner_peak_bytes.copy(), {}, {}
    for k, i in enumerate(instructions):
        if isinstance(i, Free):
            gone[i.storage] = k
        elif isinstance(i, Prefetch):
            left_at[k] = gone[i.storage]
    starts, earlier = np.inf, {}
    for k in reversed([k for k, i in enumerate(instructions) if isinstance(i, Prefetch)]):
        nbytes = tape.storages[instructions[k].storage].nbytes
        starts = min(starts, begins[k]) - device.copy_seconds(nbytes, to_host=False)
        first = max(int(np.searchsorted(begins, starts, side="right")) - 1, left_at[k] + 1)
        tight = np.flatnonzero(inner[first:k] + nbytes > budget.device_bytes)
        first = min(first + int(tight[-1]) + 1 if len(tight) else first, k)
        inner[first:k] += nbytes
        earlier[k] = first
    return check_schedule(tape, Schedule(instructions=tuple(_moved(instructions, earlier)), tape_digest=tape.digest,
                                         method=checked.schedule.method))


def _moved(instructions: tuple[Instruction, ...], earlier: dict[int, int]) -> Iterable[Instruction]:
    before: dict[int, list[Instruction]] = {}
    for k, to in sorted(earlier.items()):
        before.setdefault(to, []).append(instructions[k])
    for k, i in enumerate(instructions):
        yield from before.get(k, ())
        if k not in earlier:
            yield i
