"""From the clock readings of an executed schedule to a Trace, the same type as the simulator's."""

from __future__ import annotations

import numpy as np

from vramlab.check import CheckedSchedule
from vramlab.execute import Executed
from vramlab.schedule import Compute, Offload, Prefetch, Recompute, Wait
from vramlab.trace import Metrics, Trace


def executed_trace(checked: CheckedSchedule, executed: Executed, device: str) -> Trace:
    """Times are of the compute thread: a copy's own time is not seen, only the time that a `Wait` stands."""
    start, end = executed.start_seconds, executed.end_seconds
    spent = end - start
    kinds = np.array([type(i).__name__ for i in checked.schedule.instructions])

    def total(kind: type) -> float:
        return float(spent[kinds == kind.__name__].sum())

    moved = sum(checked.tape.storages[i.storage].nbytes for i in checked.schedule.instructions if isinstance(i, Offload | Prefetch))
    metrics = Metrics(
        peak_bytes=checked.peak_bytes,
        peak_host_bytes=checked.peak_host_bytes,
        peak_instruction=checked.peak_instruction,
        step_seconds=float(end[-1] - start[0]),
        compute_seconds=total(Compute),
        recompute_seconds=total(Recompute),
        stall_seconds=total(Wait),
        moved_bytes=moved,
        recomputes=executed.recomputes,
        offloads=executed.offloads,
        prefetches=executed.prefetches,
    )
    return Trace(
        profile=device,
        is_simulated=False,
        start_seconds=start - start[0],
        end_seconds=end - start[0],
        live_bytes=checked.live_bytes,
        inner_peak_bytes=checked.inner_peak_bytes,
        host_bytes=checked.host_bytes,
        metrics=metrics,
    )
