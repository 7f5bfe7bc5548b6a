"""Clock readings written by hand, and the Trace that they must become."""

from __future__ import annotations

import numpy as np
import torch
from tapes import TapeBuilder

from vramlab.check import check_schedule
from vramlab.execute import Executed
from vramlab.schedule import Compute, Free, FreeHost, Offload, Prefetch, Recompute, Schedule, Wait
from vramlab.tape import Role
from vramlab.timeline import executed_trace
from vramlab.trace import Metrics


def test_a_timed_run_becomes_a_trace():
    tape = TapeBuilder()
    x = tape.state("x", 100, Role.INPUT)
    a, b, loss = tape.temporary(400), tape.temporary(200), tape.temporary(4, at_end=True)
    tape.call("aten.relu.default", [x], [a])
    tape.call("aten.relu.default", [a], [b])
    tape.call("aten.mean.default", [a, b], [loss])
    tape = tape.build(loss)
    order = [
        Compute(0),
        Offload(a),
        Wait(a),
        Compute(1),
        Free(a),
        Free(b),
        Prefetch(a),
        Wait(a),
        FreeHost(a),
        Recompute(1),
        Compute(2),
        Free(a),
        Free(b),
    ]
    ends = [6.0, 6.25, 8.0, 10.0, 10.0, 10.5, 11.0, 11.5, 11.5, 13.5, 14.5, 14.5, 15.0]
    checked = check_schedule(tape, Schedule(tuple(order), tape.digest))
    executed = Executed(
        loss=torch.zeros(()),
        computes=3,
        recomputes=1,
        offloads=1,
        prefetches=1,
        start_seconds=np.array([5.0, *ends[:-1]]),
        end_seconds=np.array(ends),
    )
    trace = executed_trace(checked, executed, "cpu")
    assert (trace.profile, trace.is_simulated) == ("cpu", False)
    assert trace.start_seconds.tolist() == [0, 1, 1.25, 3, 5, 5, 5.5, 6, 6.5, 6.5, 8.5, 9.5, 9.5]
    assert trace.end_seconds.tolist() == [1, 1.25, 3, 5, 5, 5.5, 6, 6.5, 6.5, 8.5, 9.5, 9.5, 10]
    assert trace.live_bytes.tolist() == [500, 500, 500, 700, 300, 100, 500, 500, 500, 700, 704, 304, 104]
    assert trace.host_bytes.tolist() == [0, 400, 400, 400, 400, 400, 400, 400, 0, 0, 0, 0, 0]
    assert trace.metrics == Metrics(
        peak_bytes=704,
        average_bytes=580.6,  # each instruction's highest instant times its seconds, over 10 s
        peak_host_bytes=400,
        peak_instruction=10,
        step_seconds=10.0,
        compute_seconds=4.0,
        recompute_seconds=2.0,
        stall_seconds=2.25,
        moved_bytes=800,
        recomputes=1,
        offloads=1,
        prefetches=1,
    )
