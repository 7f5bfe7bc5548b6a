"""The baseline of vDNN, as Torch allocates: every map is held all step, gradient maps and the workspace are shared.

    B_vdnn = sum(|x|) + 2 max(|dx|) + sum(|W| + |dW|) + max(workspace)

How it maps to a tape. Held from the op that makes it to the end of the step: every storage that a forward op creates (maps, and
what else their backward reads); an in-place activation shares its input's region, as in eager. All that the backward creates
lives from the op that makes it to its last use: on a chain these are the gradient that comes into a layer's backward and the one
that goes out, so two shared buffers of the largest size suffice; where a network branches the step itself holds more of them. A
gradient of a parameter is state from the op that completes it on. The order of ops is eager's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vramlab.device import DeviceProfile
from vramlab.layers import check_needs
from vramlab.liveness import gradient_reuse, replay_schedule
from vramlab.planner import Budget
from vramlab.rollout import fixed_plan
from vramlab.schedule import Compute, Free, Instruction, Schedule
from vramlab.tape import Phase, Tape
from vramlab.variants import fastest, leanest

UID = "87237e2b45c223a0"
NEEDS = ("backward", "variants", "inplace_gradients")


@dataclass(frozen=True)
class VdnnBaseline:
    """The planner. `algorithms` is library, p (the fastest) or m (the leanest)."""

    algorithms: str = "library"
    winograd: bool = False

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """The same schedule for every budget; PlanInfeasible below its peak."""
        check_needs(tape, NEEDS, "vdnn-baseline")
        return fixed_plan(tape, self._by_algorithms(vdnn_baseline_schedule(tape), tape), budget, "vdnn-baseline")

    def _by_algorithms(self, schedule: Schedule, tape: Tape) -> Schedule:
        if self.algorithms == "library":
            return schedule
        choose, without = {"p": fastest, "m": leanest}[self.algorithms], "-" if self.winograd else "winograd"

        def named(i: Instruction) -> Instruction:
            return replace(i, variant=choose(tape.ops[i.op], without).name or None) if isinstance(i, Compute) else i

        return replace(schedule, instructions=tuple(map(named, schedule.instructions)))


def vdnn_baseline_schedule(tape: Tape) -> Schedule:
    """Eager's schedule with the frees of all maps moved to the end."""
    maps = {s for op in tape.ops if op.phase is Phase.FORWARD for s in tape.creates[op.id]}
    replay = replay_schedule(tape, reuse_of=gradient_reuse).instructions
    at_end = [i for i in replay if isinstance(i, Free) and i.storage in maps]
    before = [i for i in replay if not (isinstance(i, Free) and i.storage in maps)]
    return Schedule(instructions=(*before, *at_end), tape_digest=tape.digest, method=UID)


def build(algorithms: str = "library", winograd: bool = False) -> VdnnBaseline:
    """The planner for these options."""
    return VdnnBaseline(algorithms, winograd)
