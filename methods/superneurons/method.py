"""SuperNeurons (Wang et al.): liveness, offload of convolution maps through an LRU cache, cost-aware recomputation of what lies between.

    stage             peak on a chain of N layers
    baseline          sum(l_f) + sum(l_b)
    liveness          sum(l_f) + l_b of the last
    offload           sum(l_f of the layers that are not offloaded) + l_b
    recomputation     max(l)

Beside these, each convolution takes the fastest algorithm whose workspace fits in the bytes that are left. Each stage can be
switched off. Where this departs from the paper stands in card.yaml under `deviations`.
"""

from __future__ import annotations

from dataclasses import dataclass

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.device import DeviceProfile
from vramlab.layers import check_needs
from vramlab.planner import Budget
from vramlab.rollout import Stuck, refusal
from vramlab.schedule import Schedule
from vramlab.tape import Tape

from .layout import Layout
from .step import Stages, SuperNeuronsStep

UID = "97aadfb05abdb9e2"
NEEDS = ("backward", "variants", "inplace_gradients")


@dataclass(frozen=True, slots=True)
class SuperNeurons:
    """The planner."""

    stages: Stages

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """PlanInfeasible where the stages that are on cannot keep the budget."""
        check_needs(tape, NEEDS, "superneurons")
        layout = Layout(tape, self.stages.recomputation, self.stages.counted)
        try:
            return self._play(tape, device, budget, layout).schedule
        except Stuck as stuck:
            stuck_op = stuck.op
        raise refusal(lambda at: self._try(tape, device, at, layout), tape, budget, "superneurons", stuck_op)

    def _play(self, tape: Tape, device: DeviceProfile, budget: Budget, layout: Layout) -> CheckedSchedule:
        return check_schedule(tape, SuperNeuronsStep(tape, device, budget, self.stages, layout).schedule(UID), budget)

    def _try(self, tape: Tape, device: DeviceProfile, budget: Budget, layout: Layout) -> CheckedSchedule | None:
        try:
            return self._play(tape, device, budget, layout)
        except Stuck:
            return None


def build(**options: bool | str) -> SuperNeurons:
    """The planner for these options."""
    return SuperNeurons(Stages(**options))
