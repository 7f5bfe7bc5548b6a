"""Memory-efficient DenseNets (Pleiss et al.): a dense layer's concatenation and normalization are not kept, they are made again.

    forward     features ─► concat ─► BatchNorm ─► ReLU ─► convolution        what stands between features and convolution is freed at once
    backward    features ─► concat ─► BatchNorm ─► ReLU ─► its backward       made again right before the convolution's backward

A block of m layers that each add k channels concatenates m k0 + k m (m - 1) / 2 channels in all; of these, one layer's worth is alive at a
time, and what stays is linear in m. Where this departs from the paper and its code stands in card.yaml under `deviations`.
"""

from __future__ import annotations

from dataclasses import dataclass

from vramlab.device import DeviceProfile
from vramlab.layers import check_needs
from vramlab.planner import Budget
from vramlab.rollout import fixed_plan
from vramlab.schedule import Schedule
from vramlab.tape import Tape

from .dense_layers import dense_layers
from .shared_step import SharedStep

UID = "92e29c4e5af4a82a"
NEEDS = ("backward",)


@dataclass(frozen=True, slots=True)
class DenseNetShared:
    """The planner."""

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """The same schedule for every budget; PlanInfeasible below its peak."""
        check_needs(tape, NEEDS, "densenet-shared")
        return fixed_plan(tape, SharedStep(tape, device, dense_layers(tape)).schedule(UID), budget, "densenet-shared")


def build() -> DenseNetShared:
    """The planner."""
    return DenseNetShared()
