"""From the clock readings of an executed schedule to a Trace, the same type as the simulator's."""

from __future__ import annotations

from vramlab.check import CheckedSchedule
from vramlab.execute import Executed
from vramlab.schedule import Compute, Offload, Prefetch, Recompute, Wait
from vramlab.trace import Metrics, Trace, average_bytes


def executed_trace(checked: CheckedSchedule, executed: Executed, device: str) -> Trace:
    """A timed run as a Trace; its first instruction starts at zero.

    Times are of the compute thread: of a copy it sees the start, and the time for which a `Wait` stands. Bytes are the checker's.
    """
    instructions = checked.schedule.instructions
    start, end = executed.start_seconds - executed.start_seconds[0], executed.end_seconds - executed.start_seconds[0]

    def seconds(kind: type) -> float:
        return float(sum(e - s for i, s, e in zip(instructions, start, end) if type(i) is kind))

    metrics = Metrics(
        peak_bytes=checked.peak_bytes,
        average_bytes=average_bytes(checked.inner_peak_bytes, end - start),
        peak_host_bytes=checked.peak_host_bytes,
        peak_instruction=checked.peak_instruction,
        step_seconds=float(end[-1]),
        compute_seconds=seconds(Compute),
        recompute_seconds=seconds(Recompute),
        stall_seconds=seconds(Wait),
        moved_bytes=sum(checked.tape.storages[i.storage].nbytes for i in instructions if isinstance(i, Offload | Prefetch)),
        recomputes=executed.recomputes,
        offloads=executed.offloads,
        prefetches=executed.prefetches,
    )
    return Trace(
        profile=device,
        is_simulated=False,
        start_seconds=start,
        end_seconds=end,
        live_bytes=checked.live_bytes,
        inner_peak_bytes=checked.inner_peak_bytes,
        host_bytes=checked.host_bytes,
        metrics=metrics,
    )
