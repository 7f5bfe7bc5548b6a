"""Timelines written by hand, to the second and the byte; then a second opinion on random schedules."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import ScheduleWriter
from tapes import TOYS, TapeBuilder, chain, random_tapes

from vramlab.check import check_schedule
from vramlab.device import DeviceProfile
from vramlab.liveness import replay_schedule
from vramlab.schedule import Compute, Free, FreeHost, Instruction, Offload, Prefetch, Recompute, Schedule, Wait
from vramlab.simulate import simulate
from vramlab.tape import Role, Tape, Variant
from vramlab.trace import Trace

X, A, B, C, LOSS = range(5)


def link(*, d2h: float = 100, h2d: float = 200, latency: float = 0.0, is_full_duplex: bool = True) -> DeviceProfile:
    """A device of which only the link matters. Bytes per second."""
    return DeviceProfile(
        name="by hand", memory_bytes=10**6, flops_per_second=1, flops_efficiency=1, memory_bytes_per_second=1, h2d_bytes_per_second=h2d,
        d2h_bytes_per_second=d2h, copy_latency_seconds=latency, is_full_duplex=is_full_duplex)


def line() -> Tape:
    """x -> a -> b -> c -> loss, and the loss reads a again. 1, 2, 3 and 1 seconds; x 100, a 400, b 200, c 200, loss 4 bytes."""
    tape = TapeBuilder()
    x = tape.state("x", 100, Role.INPUT)
    a, b, c = tape.temporary(400), tape.temporary(200), tape.temporary(200)
    loss = tape.temporary(4, at_end=True)
    tape.call("aten.relu.default", [x], [a], seconds=1.0)
    tape.call("aten.relu.default", [a], [b], seconds=2.0, workspace_bytes=50)
    tape.call("aten.relu.default", [b], [c], seconds=3.0, takeover=(c, b))
    tape.call("aten.mean.default", [a, c], [loss], seconds=1.0)
    return tape.build(loss)


def timeline(*instructions: Instruction, device: DeviceProfile | None = None, tape: Tape | None = None) -> Trace:
    tape = tape or line()
    return simulate(check_schedule(tape, Schedule(instructions, tape.digest)), device or link())


def spans(trace: Trace) -> list[tuple[float, float]]:
    return list(zip(trace.start_seconds.tolist(), trace.end_seconds.tolist()))


def test_compute_only():
    trace = timeline(Compute(0), Compute(1), Compute(2), Free(B), Compute(3), Free(A), Free(C))
    assert spans(trace) == [(0, 1), (1, 3), (3, 6), (6, 6), (6, 7), (7, 7), (7, 7)]
    assert trace.live_bytes.tolist() == [500, 700, 900, 700, 704, 304, 104]
    assert trace.inner_peak_bytes.tolist() == [500, 750, 900, 900, 704, 704, 304]
    assert trace.profile == "by hand" and trace.is_simulated
    m = trace.metrics
    assert (m.peak_bytes, m.peak_instruction, m.peak_host_bytes) == (900, 2, 0)
    assert (m.step_seconds, m.compute_seconds, m.recompute_seconds, m.stall_seconds) == (7, 7, 0, 0)
    assert (m.moved_bytes, m.recomputes, m.offloads, m.prefetches) == (0, 0, 0, 0)


def test_reuse_takes_no_time_and_no_bytes():
    trace = timeline(Compute(0), Compute(1), Compute(2, reuse=B), Compute(3), Free(A), Free(C))
    assert spans(trace) == [(0, 1), (1, 3), (3, 6), (6, 7), (7, 7), (7, 7)]
    assert trace.live_bytes.tolist() == [500, 700, 700, 704, 304, 104]
    assert trace.metrics.peak_bytes == 750 and trace.metrics.peak_instruction == 1


def test_an_offload_overlaps_compute():
    """The copy of a (400 bytes at 100/s) runs from 1 to 5 beside ops 1 and 2; waiting at 6 costs nothing."""
    trace = timeline(Compute(0), Offload(A), Compute(1), Compute(2), Wait(A), FreeHost(A), Free(B), Compute(3), Free(A), Free(C))
    assert spans(trace) == [(0, 1), (1, 5), (1, 3), (3, 6), (6, 6), (6, 6), (6, 6), (6, 7), (7, 7), (7, 7)]
    assert trace.host_bytes.tolist() == [0, 400, 400, 400, 400, 0, 0, 0, 0, 0]
    assert trace.live_bytes.tolist() == [500, 500, 700, 900, 900, 900, 700, 704, 304, 104]
    assert trace.metrics.stall_seconds == 0 and trace.metrics.step_seconds == 7
    assert trace.metrics.moved_bytes == 400 and trace.metrics.peak_host_bytes == 400


def test_stalls_add_up():
    """Offload 1-5, compute until 3, so 2 s stall; prefetch (400 bytes at 200/s) from 8 to 10, another 2 s stall."""
    trace = timeline(Compute(0), Offload(A), Compute(1), Wait(A), Free(A), Compute(2, reuse=B), Prefetch(A), Wait(A), FreeHost(A),
                     Compute(3), Free(A), Free(C))
    assert spans(trace) == [(0, 1), (1, 5), (1, 3), (3, 5), (5, 5), (5, 8), (8, 10), (8, 10), (10, 10), (10, 11), (11, 11), (11, 11)]
    assert trace.live_bytes.tolist() == [500, 500, 700, 700, 300, 300, 700, 700, 700, 704, 304, 104]
    assert trace.inner_peak_bytes.tolist() == [500, 500, 750, 700, 700, 300, 700, 700, 700, 704, 704, 304]
    m = trace.metrics
    assert (m.step_seconds, m.stall_seconds, m.moved_bytes, m.offloads, m.prefetches) == (11, 4, 800, 1, 1)


def test_a_prefetch_ahead_hides_behind_compute():
    trace = timeline(Compute(0), Offload(A), Compute(1), Wait(A), Free(A), Prefetch(A), Compute(2, reuse=B), Wait(A), FreeHost(A),
                     Compute(3), Free(A), Free(C))
    assert spans(trace)[5:8] == [(5, 7), (5, 8), (8, 8)]
    assert trace.metrics.step_seconds == 9 and trace.metrics.stall_seconds == 2


def two_maps() -> Tape:
    """x -> a (1 s), x -> b (1 s), then a, b -> loss (1 s). a and b 400 bytes."""
    tape = TapeBuilder()
    x, a, b = tape.state("x", 100, Role.INPUT), tape.temporary(400), tape.temporary(400)
    loss = tape.temporary(4, at_end=True)
    tape.call("aten.relu.default", [x], [a])
    tape.call("aten.relu.default", [x], [b])
    tape.call("aten.add.Tensor", [a, b], [loss])
    return tape.build(loss)


def test_copies_of_one_direction_queue():
    """Both offloads leave by one engine: 1-5, then 5-9."""
    trace = timeline(Compute(0), Offload(1), Compute(1), Offload(2), Wait(1), Wait(2), FreeHost(1), FreeHost(2), Compute(2),
                     Free(1), Free(2), tape=two_maps())
    assert spans(trace)[:6] == [(0, 1), (1, 5), (1, 2), (5, 9), (2, 5), (5, 9)]
    assert trace.metrics.stall_seconds == 7 and trace.metrics.step_seconds == 10


BOTH_WAYS = (Compute(0), Offload(1), Wait(1), Free(1), Compute(1), Offload(2), Prefetch(1), Wait(1), Wait(2), FreeHost(1), FreeHost(2),
             Compute(2), Free(1), Free(2))


def test_full_duplex_copies_overlap():
    """a leaves 1-5; b leaves 6-10 while a returns 6-8."""
    trace = timeline(*BOTH_WAYS, tape=two_maps())
    assert spans(trace) == [(0, 1), (1, 5), (1, 5), (5, 5), (5, 6), (6, 10), (6, 8), (6, 8), (8, 10), (10, 10), (10, 10), (10, 11),
                            (11, 11), (11, 11)]
    assert trace.metrics.stall_seconds == 4 + 2 + 2


def test_half_duplex_copies_share_one_engine():
    """a returns only when b has left: 10-12."""
    trace = timeline(*BOTH_WAYS, tape=two_maps(), device=link(is_full_duplex=False))
    assert spans(trace) == [(0, 1), (1, 5), (1, 5), (5, 5), (5, 6), (6, 10), (10, 12), (6, 12), (12, 12), (12, 12), (12, 12), (12, 13),
                            (13, 13), (13, 13)]
    assert trace.metrics.stall_seconds == 4 + 6


def test_half_duplex_the_other_way_round():
    """An offload waits for a prefetch as well: a returns 6-8, b leaves 8-12."""
    order = (*BOTH_WAYS[:5], Prefetch(1), Offload(2), *BOTH_WAYS[7:])
    assert spans(timeline(*order, tape=two_maps(), device=link(is_full_duplex=False)))[5:9] == [(6, 8), (8, 12), (6, 8), (8, 12)]
    assert spans(timeline(*order, tape=two_maps()))[5:9] == [(6, 8), (6, 10), (6, 8), (8, 10)]


def test_latency_counts_once_a_copy():
    trace = timeline(*BOTH_WAYS, tape=two_maps(), device=link(latency=0.5))
    assert spans(trace)[:8] == [(0, 1), (1, 5.5), (1, 5.5), (5.5, 5.5), (5.5, 6.5), (6.5, 11), (6.5, 9), (6.5, 9)]


def test_a_copy_starts_when_the_compute_before_it_has_finished():
    """Offload stands after both ops: it starts at 2, though a was ready at 1."""
    trace = timeline(Compute(0), Compute(1), Offload(1), Wait(1), FreeHost(1), Compute(2), Free(1), Free(2), tape=two_maps())
    assert spans(trace)[2:4] == [(2, 6), (2, 6)]


def test_recompute():
    """a is dropped after its first reader and computed again before its second: 1 second more, 400 bytes less on the way."""
    trace = timeline(Compute(0), Compute(1), Free(A), Compute(2, reuse=B), Recompute(0), Compute(3), Free(A), Free(C))
    assert spans(trace) == [(0, 1), (1, 3), (3, 3), (3, 6), (6, 7), (7, 8), (8, 8), (8, 8)]
    assert trace.live_bytes.tolist() == [500, 700, 300, 300, 700, 704, 304, 104]
    m = trace.metrics
    assert (m.step_seconds, m.compute_seconds, m.recompute_seconds, m.recomputes, m.peak_bytes) == (8, 7, 1, 1, 750)


def test_an_offload_and_a_recompute_share_the_timeline():
    """a leaves 1-5 while op 1 runs 1-3; b is recomputed beside it 3-5."""
    tape = line()
    trace = timeline(Compute(0), Offload(A), Compute(1), Free(B), Recompute(1), Compute(2, reuse=B), Wait(A), FreeHost(A), Compute(3),
                     Free(A), Free(C), tape=tape)
    assert spans(trace)[:7] == [(0, 1), (1, 5), (1, 3), (3, 3), (3, 5), (5, 8), (8, 8)]
    assert trace.inner_peak_bytes.tolist()[:7] == [500, 500, 750, 700, 750, 700, 700]


def by_variants() -> Tape:
    """`line` with two algorithms for op 0: fast takes 0.5 s and 300 bytes, slow 4 s and none."""
    tape = line()
    return tape.with_variants([[Variant("fast", 0.5, 300), Variant("slow", 4.0, 0)], [], [], []])


def test_each_run_takes_the_seconds_of_its_variant():
    trace = timeline(Compute(0, variant="slow"), Free(A), Recompute(0, variant="fast"), Compute(1), Compute(2, reuse=B), Compute(3),
                     Free(A), Free(C), tape=by_variants())
    assert spans(trace)[:5] == [(0, 4), (4, 4), (4, 4.5), (4.5, 6.5), (6.5, 9.5)]
    assert trace.metrics.compute_seconds == 4 + 2 + 3 + 1 and trace.metrics.recompute_seconds == 0.5
    assert trace.inner_peak_bytes.tolist()[:3] == [500, 500, 800]


def test_average_bytes_by_hand():
    """500 bytes for 1 s, 700 and 50 inside for 2 s, 900 for 3 s, 704 for 1 s."""
    trace = timeline(Compute(0), Compute(1), Compute(2), Free(B), Compute(3), Free(A), Free(C))
    assert trace.metrics.average_bytes == (500 * 1 + 750 * 2 + 900 * 3 + 704 * 1) / 7


def test_average_bytes_count_stalls_but_not_copies_beside_compute():
    """As in `test_stalls_add_up`: 1 s 500, 2 s 750, 2 s stall 700, 3 s 300 (b becomes c), 2 s stall 700, 1 s 704."""
    trace = timeline(Compute(0), Offload(A), Compute(1), Wait(A), Free(A), Compute(2, reuse=B), Prefetch(A), Wait(A), FreeHost(A),
                     Compute(3), Free(A), Free(C))
    assert trace.metrics.average_bytes == (500 + 2 * 750 + 2 * 700 + 3 * 300 + 2 * 700 + 704) / 11


def test_an_empty_schedule_takes_no_time():
    tape = TapeBuilder()
    trace = timeline(tape=tape.build(tape.state("x", 100, Role.INPUT)))
    assert trace.metrics.step_seconds == 0 and trace.metrics.average_bytes is None and trace.metrics.peak_bytes == 100


def test_a_chain_by_hand():
    """Three convolutions: 3 s forward, 1 s mean, 4 s seed and its division, 3 x 2 s backward, 3 x 0.25 s accumulation."""
    tape = chain(3)
    trace = simulate(check_schedule(tape, replay_schedule(tape)), link())
    assert trace.metrics.step_seconds == 3 + 1 + 4 + 6 + 0.75


# ---------------------------------------------------------------- a second opinion

def longest_paths(tape: Tape, instructions: tuple[Instruction, ...], device: DeviceProfile) -> list[tuple[float, float]]:
    """Start and end of each instruction, from what each has to wait for: a graph instead of clocks."""
    ends: list[float] = []
    found: list[tuple[float, float]] = []
    for at, instruction in enumerate(instructions):
        on_stream = [e for e, i in zip(ends, instructions) if isinstance(i, Compute | Recompute | Wait)]
        waits, seconds = [0.0, *on_stream], 0.0
        if isinstance(instruction, Compute | Recompute):
            op = tape.ops[instruction.op]
            seconds = {None: op.seconds, **{v.name: v.seconds for v in op.variants}}[instruction.variant]
        elif isinstance(instruction, Offload | Prefetch):
            kinds = type(instruction) if device.is_full_duplex else Offload | Prefetch
            waits += [e for e, i in zip(ends, instructions) if isinstance(i, kinds)]
            waits += [e for e, i in zip(ends, instructions) if isinstance(i, Offload) and i.storage == instruction.storage
                      and isinstance(instruction, Prefetch)]
            rate = device.d2h_bytes_per_second if isinstance(instruction, Offload) else device.h2d_bytes_per_second
            seconds = device.copy_latency_seconds + tape.storages[instruction.storage].nbytes / rate
        start = max(waits)
        end = start + seconds
        if isinstance(instruction, Wait):
            copies = [e for e, i in zip(ends, instructions[:at]) if isinstance(i, Offload | Prefetch) and i.storage == instruction.storage]
            end = max(start, copies[-1])
        ends.append(end)
        found.append((start, end))
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(random_tapes(), st.randoms(use_true_random=False), st.booleans(), st.sampled_from([0.0, 0.25]))
def test_random_timelines_agree(tape, random, is_full_duplex, latency):
    device = link(d2h=2, h2d=4, latency=latency, is_full_duplex=is_full_duplex)  # halves and quarters: sums are exact
    instructions = ScheduleWriter(tape, random).write(0.6)
    trace = timeline(*instructions, tape=tape, device=device)
    expected = longest_paths(tape, instructions, device)
    assert spans(trace) == expected
    stream = [(i, span) for i, span in zip(instructions, expected) if isinstance(i, Compute | Recompute | Wait)]
    assert trace.metrics.step_seconds == max([0.0, *(end for _, (_, end) in stream)])
    assert trace.metrics.stall_seconds == sum(end - start for i, (start, end) in stream if isinstance(i, Wait))
    m = trace.metrics
    assert m.step_seconds == m.compute_seconds + m.recompute_seconds + m.stall_seconds
    assert m.moved_bytes == sum(tape.storages[i.storage].nbytes for i in instructions if isinstance(i, Offload | Prefetch))


@pytest.mark.parametrize("toy", TOYS)
def test_toys_agree(toy):
    tape = TOYS[toy]()
    for is_full_duplex in (True, False):
        instructions = ScheduleWriter(tape, Random(toy)).write(0.3)
        device = link(d2h=1024, h2d=512, is_full_duplex=is_full_duplex)
        assert spans(timeline(*instructions, tape=tape, device=device)) == longest_paths(tape, instructions, device)


def test_memory_never_depends_on_time():
    tape = chain(4)
    instructions = ScheduleWriter(tape, Random(1)).write()
    slow = timeline(*instructions, tape=tape, device=link(d2h=1, h2d=1, is_full_duplex=False))
    fast = timeline(*instructions, tape=tape.with_costs([9.0] * len(tape.ops)), device=link(d2h=1e9, h2d=1e9))
    assert slow.metrics.step_seconds != fast.metrics.step_seconds
    for name in ("live_bytes", "inner_peak_bytes", "host_bytes"):
        assert np.array_equal(getattr(slow, name), getattr(fast, name))


def test_the_arrays_are_read_only():
    trace = timeline(Compute(0), Compute(1), Compute(2, reuse=B), Compute(3), Free(A), Free(C))
    for name in ("start_seconds", "end_seconds", "live_bytes", "inner_peak_bytes", "host_bytes"):
        with pytest.raises(ValueError):
            getattr(trace, name)[0] = 1
