"""When each instruction of a checked schedule runs on a device: one compute stream, one engine for each copy direction.

The compute stream runs `Compute` and `Recompute` one after the other and stands still in `Wait` until that storage's copy has
ended. A copy starts when its engine is free and what the compute stream was given before it is done; a `Prefetch` also waits
for the storage's last `Offload`. On a half-duplex device both directions share one engine. Memory takes no time.
"""

from __future__ import annotations

import numpy as np

from vramlab.check import CheckedSchedule
from vramlab.device import DeviceProfile
from vramlab.trace import Metrics, Trace, average_bytes


def simulate(checked: CheckedSchedule, device: DeviceProfile) -> Trace:
    """The timeline of a checked schedule with the tape's seconds of ops and variants and the device's copy seconds."""
    from vramlab import kernels  # numba takes half a second to load

    tape, schedule = kernels.flatten_tape(checked.tape), kernels.flatten_schedule(checked.schedule)
    is_compute, is_recompute = schedule.code == kernels.COMPUTE, schedule.code == kernels.RECOMPUTE
    is_offload, is_prefetch = schedule.code == kernels.OFFLOAD, schedule.code == kernels.PREFETCH
    is_run = is_compute | is_recompute
    seconds = np.zeros(len(schedule.code))
    seconds[is_run] = tape.seconds[schedule.operand[is_run]]
    kernels.fill_variant_seconds(tape, schedule, seconds)
    for moves, to_host in ((is_offload, True), (is_prefetch, False)):
        seconds[moves] = device.copy_seconds(tape.nbytes[schedule.operand[moves]], to_host=to_host)
    start, end = np.zeros_like(seconds), np.zeros_like(seconds)
    step, stall = kernels.run_clock(schedule, seconds, len(tape.nbytes), device.is_full_duplex, start, end)
    start.flags.writeable = end.flags.writeable = False
    on_stream = np.where(is_offload | is_prefetch, 0.0, end - start)
    metrics = Metrics(
        peak_bytes=checked.peak_bytes, average_bytes=average_bytes(checked.inner_peak_bytes, on_stream),
        peak_host_bytes=checked.peak_host_bytes, peak_instruction=checked.peak_instruction,
        step_seconds=step, compute_seconds=float(seconds[is_compute].sum()), recompute_seconds=float(seconds[is_recompute].sum()),
        stall_seconds=stall, moved_bytes=int(tape.nbytes[schedule.operand[is_offload | is_prefetch]].sum()),
        recomputes=int(is_recompute.sum()), offloads=int(is_offload.sum()), prefetches=int(is_prefetch.sum()),
    )
    return Trace(profile=device.name, is_simulated=True, start_seconds=start, end_seconds=end, live_bytes=checked.live_bytes,
                 inner_peak_bytes=checked.inner_peak_bytes, host_bytes=checked.host_bytes, metrics=metrics)
