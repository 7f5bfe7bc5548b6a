"""The captured step as eager runs it: eager's order, eager's liveness, our executor, no method."""

from __future__ import annotations

from dataclasses import dataclass

from vramlab.device import DeviceProfile
from vramlab.liveness import replay_schedule
from vramlab.planner import Budget
from vramlab.rollout import fixed_plan
from vramlab.schedule import Schedule
from vramlab.tape import Tape

UID = "f424d89c1ab35162"


@dataclass(frozen=True)
class Replay:
    """The planner."""

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """The same schedule for every budget; PlanInfeasible below its peak."""
        return fixed_plan(tape, replay_schedule(tape, UID), budget, "replay")


def build() -> Replay:
    """The planner."""
    return Replay()
