"""What a record says of a checked schedule on a device: all of it *simulated*, from tape, schedule and profile alone. No torch.

A bundle's checker comes to the same block from the same three, on a machine that has none of the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vramlab.at_peak import feature_bytes_at_peak, live_at_peak
from vramlab.bounds import step_seconds_bound
from vramlab.check import CheckedSchedule
from vramlab.device import DeviceProfile
from vramlab.effort import effort
from vramlab.planner import UNLIMITED
from vramlab.schedule import Compute, Free, Offload
from vramlab.simulate import simulate
from vramlab.tape import Role, Tape
from vramlab.trace import Trace


def predicted_of(checked: CheckedSchedule, profile: DeviceProfile) -> dict[str, Any]:
    """The record's block `predicted`: metrics, the profile, what is live at the peak, and what papers count besides."""
    trace = simulate(checked, profile)
    metrics = trace.metrics
    at_peak = checked.schedule.instructions[metrics.peak_instruction]
    op = getattr(at_peak, "op", None)
    live = live_at_peak(checked).to_json()
    device = {key: value for key, value in profile.to_json().items() if key != "sources"}
    found = metrics.to_json() | {"profile": profile.name, "device": device, "peak_op": None if op is None else checked.tape.op_name(op),
                                 "peak_phase": live["phase"], "at_peak": live, "average_state_bytes": average_state_bytes(checked, trace),
                                 "feature_bytes_at_peak": feature_bytes_at_peak(checked)}
    found |= effort(checked, trace)
    return found | ({"micro_batches": list(checked.tape.micro_batches)} if checked.tape.micro_batches else {})


def least_step_seconds(checked: CheckedSchedule, profile: DeviceProfile, budget_bytes: int | None) -> float:
    """What no schedule of this tape within the budget is below in simulated step time: see vramlab/bounds.py.

    State is taken to stay on the device where this schedule leaves it there. The ops' least seconds alone where there is no budget.
    """
    state = {s.id for s in checked.tape.storages if s.at_start and s.at_end}
    moves = any(isinstance(i, Free | Offload) and i.storage in state for i in checked.schedule.instructions)
    return step_seconds_bound(checked.tape, profile, UNLIMITED if budget_bytes is None else budget_bytes, state_stays=not moves)


def average_state_bytes(checked: CheckedSchedule, trace: Trace) -> float | None:
    """Bytes of parameters, buffers, optimizer state and, from when each is there, gradients, averaged over the step: the part of
    `average_bytes` that papers on feature maps leave out. None of a step that takes no time. State that leaves meanwhile counts on."""
    step, made = trace.metrics.step_seconds, {}
    if step <= 0:
        return None
    for index, instruction in enumerate(checked.schedule.instructions):
        if isinstance(instruction, Compute):
            made.setdefault(instruction.op, trace.end_seconds[index])
    held = 0.0
    for storage in checked.tape.storages:
        if storage.role in (Role.PARAMETER, Role.BUFFER, Role.OPTIMIZER_STATE):
            held += storage.nbytes
        elif storage.role is Role.GRADIENT:
            held += storage.nbytes * (1 - made.get(checked.tape.producer[storage.id], 0.0) / step)
    return held


def swap_against_recompute(tape: Tape, profile: DeviceProfile) -> dict[str, Any]:
    """Over the activations: is the round trip over the link dearer than running the producing op again?"""
    ratios = []
    for storage in tape.storages:
        producer = tape.producer[storage.id]
        if storage.role is not Role.ACTIVATION or producer is None or storage.nbytes == 0:
            continue
        swap = profile.copy_seconds(storage.nbytes, to_host=True) + profile.copy_seconds(storage.nbytes, to_host=False)
        again = tape.ops[producer].seconds
        ratios.append(swap / again if again > 0 else float("inf"))
    cheaper = sum(r > 1 for r in ratios)
    finite = [r for r in ratios if np.isfinite(r)]
    return {
        "storages": len(ratios),
        "recompute_cheaper": cheaper,
        "share": cheaper / len(ratios) if ratios else None,
        "median_ratio": float(np.median(finite)) if finite else None,
    }
