"""The network-wide baseline, as Caffe allocates: every map and every gradient map is held all step.

    B_net = sum(|x| + |dx|) + sum(|W| + |dW| + optimizer state) + workspace

How it maps to a tape. A layer is a forward operator (vramlab/layers.py). Held from the op that makes them to the end of the step:

    x           every storage that a forward op creates: maps, and what else its backward reads (statistics, pooling indices)
    dx          for each layer the complete gradient of its map
    W, dW       state: parameters and optimizer state are there all step, a gradient from the op that completes it on

An in-place activation shares: eager writes its map over its input, so one x is held for both, and for both one dx. Not held,
because Caffe has no such blob: summands of a gradient, gradients that become a dW, the inside of ops (one workspace at a time).
The order of ops is eager's.
"""

from __future__ import annotations

from dataclasses import dataclass

from vramlab.device import DeviceProfile
from vramlab.layers import check_needs, layers_of
from vramlab.liveness import replay_schedule
from vramlab.planner import Budget
from vramlab.rollout import fixed_plan
from vramlab.schedule import Compute, Free, Schedule
from vramlab.tape import Phase, Tape

UID = "dbe4a6bbcd7ded78"
NEEDS = ("backward",)


@dataclass(frozen=True)
class NetworkWide:
    """The planner."""

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """The same schedule for every budget; PlanInfeasible below its peak."""
        check_needs(tape, NEEDS, "network-wide")
        return fixed_plan(tape, network_wide_schedule(tape), budget, "network-wide")


def network_wide_schedule(tape: Tape) -> Schedule:
    """Eager's schedule with the frees of what is held moved to the end."""
    replay = replay_schedule(tape)
    held = held_storages(tape)
    at_end = [i for i in replay.instructions if isinstance(i, Free) and i.storage in held]
    before = [i for i in replay.instructions if not (isinstance(i, Free) and i.storage in held)]
    return Schedule(instructions=(*before, *at_end), tape_digest=tape.digest, method=UID)


def held_storages(tape: Tape) -> frozenset[int]:
    """Every x, and the dx of every layer that has a region of its own; what is overwritten in place ends with that."""
    overwritten = {i.reuse for i in replay_schedule(tape).instructions if isinstance(i, Compute) and i.reuse is not None}
    maps = {s for op in tape.ops if op.phase is Phase.FORWARD for s in tape.creates[op.id]}
    gradients = {layer.dx for layer in layers_of(tape) if layer.dx is not None and not layer.shares_input}
    return frozenset((maps | gradients) - overwritten)


def build() -> NetworkWide:
    """The planner."""
    return NetworkWide()
