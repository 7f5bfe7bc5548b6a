"""The CPU meter against hand-counted allocations, and its blind spots as negative controls."""

from __future__ import annotations

import threading

import pytest
import torch

from vramlab.isolate import Call, run_isolated
from vramlab.meter import (
    AllocatorMeter, MeterError, measure_peak, measure_step_peak, refuse_false_watermark, refuse_low_peak, storage_bytes,
)

FLOAT = 4


def in_thread(function) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_hand_counted_peak():
    def run():
        a = torch.empty(1000)  # 4000
        b = torch.empty(2000)  # 12000
        del a  # 8000
        c = torch.empty(500)  # 10000
        return [b, c]

    reading = measure_peak(run)
    assert (reading.peak_bytes, reading.final_bytes, reading.events) == (3000 * FLOAT, 2500 * FLOAT, 4)


def test_sees_inside_an_operator():
    def run():
        x, y = torch.empty(64, 64), torch.empty(64, 64)
        return [x, y, torch.cat([x, y.t()]).sum()]  # the concatenation lives only until the sum

    reading = measure_peak(run)
    assert reading.peak_bytes == (2 + 2) * 64 * 64 * FLOAT + FLOAT
    assert reading.final_bytes == 2 * 64 * 64 * FLOAT + FLOAT


def test_views_of_one_storage_count_once():
    base = torch.empty(10, 10)
    assert storage_bytes([base, base[2:], base.t(), base.expand(7, 10, 10)]) == 100 * FLOAT
    assert measure_peak(lambda: [view for t in [torch.empty(8)] for view in (t, t[1:])]).final_bytes == 8 * FLOAT


def test_spans_start_from_what_is_live():
    with AllocatorMeter() as meter:
        kept = torch.empty(100)
        with meter.span("quiet"):
            pass
        with meter.span("busy"):
            torch.empty(50)
            also_kept = torch.empty(10)
    assert meter.span_bytes("quiet") == (400, 400, 400)
    assert meter.span_bytes("busy") == (400, 600, 440)
    assert meter.reading.final_bytes == storage_bytes([kept, also_kept])


def linear_step(width: int = 64):
    model = torch.nn.Linear(width, width, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.ones(8, width)

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    def live():
        momenta = [s["momentum_buffer"] for s in optimizer.state.values()]
        return [x, model.weight, model.weight.grad, *momenta]

    return step, live


def test_cold_and_warm_step_counted_by_hand():
    peaks = measure_step_peak(linear_step, steps=4)
    weight, batch = 64 * 64 * FLOAT, 8 * 64 * FLOAT
    assert peaks.persistent_bytes == 3 * weight + batch  # weight, gradient, momentum
    # Warm: the second gradient stands beside the first while it is accumulated; loss, its seed and output are small beside that.
    assert 4 * weight + batch <= peaks.peak_bytes <= 4 * weight + 4 * batch
    assert peaks.cold_peak_bytes < peaks.peak_bytes
    assert len(set(peaks.step_peak_bytes[1:])) == 1  # steady after the first step
    assert peaks.unnamed_bytes == 0 and peaks.reserved_peak_bytes is None


def test_a_forgotten_tensor_is_refused():
    def build():
        step, live = linear_step()
        return step, lambda: list(live())[1:]

    with pytest.raises(MeterError, match="live storages"):
        measure_step_peak(build)


def test_one_step_has_no_warm_peak():
    with pytest.raises(ValueError, match="at least 2"):
        measure_step_peak(linear_step, steps=1)


def test_it_refuses_to_start_inside_another_profiler():
    """Negative control: two of torch's own profilers, nested. The outer one sees nothing from then on."""
    with AllocatorMeter() as outer:
        with pytest.raises(MeterError, match="do not nest"):
            measure_peak(lambda: [torch.empty(8)])
        kept = torch.empty(1000)
    assert outer.reading.final_bytes == kept.nbytes
    assert run_isolated(Call(function="isolated_work.bytes_that_an_outer_profiler_sees")).value == 0


def test_an_exception_passes_through():
    with pytest.raises(ZeroDivisionError):
        measure_peak(lambda: [torch.empty(1 // 0)])


def test_blind_to_the_free_of_an_older_block():
    """4000 bytes go away and nothing is seen. In a fresh process: an earlier meter could know that address."""
    assert run_isolated(Call(function="isolated_work.free_of_an_older_block")).value == (0, 0)


def test_a_free_of_a_block_of_an_earlier_meter_is_refused():
    box: list[torch.Tensor] = []

    def run():
        box.append(torch.empty(1000))
        return box

    assert measure_peak(run).final_bytes == 4000
    with pytest.raises(MeterError, match="older than the meter was freed"):
        measure_peak(lambda: box.clear() or [])


def test_an_older_block_named_as_live_is_refused():
    older = torch.empty(1000)
    with pytest.raises(MeterError):
        measure_peak(lambda: [older])


def test_resize_of_an_older_block_is_refused():
    older = torch.empty(1000)

    def run():
        older.untyped_storage().resize_(0)
        older.untyped_storage().resize_(4000)
        return []

    with pytest.raises(MeterError, match="4,000 bytes"):
        measure_peak(run)


def test_an_allocation_in_a_second_thread_is_refused():
    box: list[torch.Tensor] = []

    def run():
        in_thread(lambda: box.append(torch.empty(1000)))
        return box

    with pytest.raises(MeterError, match="is 0 bytes"):
        measure_peak(run)


def test_a_free_in_a_second_thread_is_refused():
    def run():
        box = [torch.empty(1000)]
        in_thread(box.clear)
        return box

    with pytest.raises(MeterError, match="live storages are 0"):
        measure_peak(run)


def test_blind_to_a_short_life_in_a_second_thread():
    def run():
        in_thread(lambda: torch.empty(1000).fill_(1))
        return []

    assert measure_peak(run).peak_bytes == 0


def test_memory_from_numpy_is_refused():
    numpy = pytest.importorskip("numpy")
    with pytest.raises(MeterError, match="numpy"):
        measure_peak(lambda: [torch.from_numpy(numpy.zeros(10, dtype="float32"))])


def watermarks(**changes: int) -> dict[str, int]:
    """Statistics of a caching allocator right after a reset; `kind_peak` or `kind_current` changes one."""
    held = {"requested": 90, "allocated": 100, "active": 100, "reserved": 200}
    stats = {f"{kind}_bytes.all.{what}": nbytes for kind, nbytes in held.items() for what in ("peak", "current")}
    return stats | {f"{kind}_bytes.all.{what}": n for key, n in changes.items() for kind, what in [key.rsplit("_", 1)]}


def test_a_watermark_that_was_not_reset_is_refused():
    refuse_false_watermark(watermarks())
    with pytest.raises(MeterError, match="watermark of allocated_bytes is 3,000 and 100 are live"):
        refuse_false_watermark(watermarks(allocated_peak=3000))


@pytest.mark.parametrize("changes, said", [
    ({"requested_peak": 89}, "peak of requested_bytes is 89, below the 90"), ({"reserved_peak": 199}, "below the 200"),
    ({"requested_peak": 150}, "out of order: .150, 100, 100, 200"),
])
def test_a_peak_that_cannot_be_is_refused(changes, said):
    refuse_low_peak(watermarks(requested_peak=95, allocated_peak=120, active_peak=130))
    with pytest.raises(MeterError, match=said):
        refuse_low_peak(watermarks(**changes))


@pytest.mark.gpu
def test_a_gpu_step_that_follows_a_larger_one_has_its_own_peak():
    big = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    del big

    def build():
        x = torch.zeros(2**20, device="cuda")
        return lambda: x.add_(1), lambda: [x]

    assert measure_step_peak(build, device="cuda").peak_bytes < 32 * 2**20


@pytest.mark.gpu
def test_requested_bytes_of_a_gpu_step_by_hand():
    def build():
        kept = torch.zeros(1000, device="cuda")

        def step():
            first, second = torch.empty(500, device="cuda"), torch.empty(300, device="cuda")
            return first, second

        return step, lambda: [kept]

    peaks = measure_step_peak(build, device="cuda")
    assert peaks.peak_bytes - peaks.persistent_bytes == peaks.cold_peak_bytes - peaks.persistent_bytes == 800 * FLOAT
    assert peaks.persistent_bytes == 1000 * FLOAT + peaks.unnamed_bytes
    assert peaks.peak_bytes <= peaks.allocated_peak_bytes <= peaks.active_peak_bytes <= peaks.reserved_peak_bytes
