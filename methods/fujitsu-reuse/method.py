"""Memory reuse (Shirahata, Tomita, Ike): the backward phase lives in the regions of the forward phase.

    weight gradient first     dW_l     = f(x_{l-1}, dx_l)      the last reader of x_{l-1} inside layer l
    data gradient second      dx_{l-1} = g(W_l, dx_l)          into the region of x_{l-1}

So no gradient map has a region of its own: 2 sum(|x|) becomes sum(|x|) and a scratch region where a map may not be overwritten yet.
When it may is what the tape says, for every kind of layer alike: when no op that is still to come reads it. Where this departs from the
paper stands in card.yaml under `deviations`.
"""

from __future__ import annotations

from dataclasses import dataclass

from vramlab.device import DeviceProfile
from vramlab.layers import check_needs
from vramlab.planner import Budget
from vramlab.rollout import fixed_plan
from vramlab.schedule import Schedule
from vramlab.tape import Tape

from .order import weight_gradients_first
from .regions import place

UID = "a67e4ff41bc2df49"
NEEDS = ("backward", "split_convolutions")


@dataclass(frozen=True, slots=True, kw_only=True)
class FujitsuReuse:
    """The planner. `regions`: network-wide | live."""

    regions: str = "network-wide"

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """The same schedule for every budget; PlanInfeasible below its peak."""
        check_needs(tape, NEEDS, "fujitsu-reuse")
        instructions = place(tape, weight_gradients_first(tape), stays=self.regions == "network-wide")
        return fixed_plan(tape, Schedule(instructions=instructions, tape_digest=tape.digest, method=UID), budget, "fujitsu-reuse")


def build(**options: str) -> FujitsuReuse:
    """The planner for these options."""
    return FujitsuReuse(**options)
