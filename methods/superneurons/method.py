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

from dataclasses import dataclass, replace

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.device import DeviceProfile
from vramlab.errors import PlanInfeasible
from vramlab.layers import check_needs
from vramlab.liveness import lower_bound_bytes
from vramlab.planner import UNLIMITED, Budget
from vramlab.rollout import Stuck
from vramlab.schedule import Schedule
from vramlab.tape import Tape

from .layout import Layout
from .step import Stages, SuperNeuronsStep

UID = "97aadfb05abdb9e2"
NEEDS = ("backward", "variants", "inplace_gradients")
# The search for the smallest reachable budget ends within this share of it.
SEARCH_PRECISION = 1 / 256


@dataclass(frozen=True, slots=True)
class SuperNeurons:
    """The planner."""

    stages: Stages

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """PlanInfeasible where the stages that are on cannot keep the budget."""
        check_needs(tape, NEEDS, "superneurons")
        layout = Layout(tape, self.stages.recomputation)
        try:
            return self._play(tape, device, budget, layout).schedule
        except Stuck as stuck:
            smallest = self._smallest_bytes(tape, device, budget, layout) if budget.wants_smallest else None
            op = tape.op_name(stuck.op)
        raise PlanInfeasible(method="superneurons", budget_bytes=budget.device_bytes, smallest_bytes=smallest, op=op)

    def _play(self, tape: Tape, device: DeviceProfile, budget: Budget, layout: Layout) -> CheckedSchedule:
        return check_schedule(tape, SuperNeuronsStep(tape, device, budget, self.stages, layout).schedule(UID), budget)

    def _smallest_bytes(self, tape: Tape, device: DeviceProfile, budget: Budget, layout: Layout) -> int:
        """By bisection between a budget that failed and one that does not bind; the answer has been played."""
        low = max(budget.device_bytes, lower_bound_bytes(tape) - 1)
        high = self._play(tape, device, replace(budget, device_bytes=UNLIMITED), layout).peak_bytes
        while high - low > max(1, int(high * SEARCH_PRECISION)):
            middle = (low + high) // 2
            try:
                self._play(tape, device, replace(budget, device_bytes=middle), layout)
                high = middle
            except Stuck:
                low = middle
        return high


def build(**options: bool | str) -> SuperNeurons:
    """The planner for these options."""
    return SuperNeurons(Stages(**options))
