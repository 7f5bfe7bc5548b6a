"""How many bytes a training step really holds, read from the allocator.

On the CPU torch's profiler reports each allocation and each free. Their running total, from zero, is the exact number of allocated bytes
at every instant, what operators hold inside included; it shares no code with the simulator or the executor. Its blind spots:

- a block that is older than the meter is not counted, and its free gives no event (or a wrong one, with the size of a block that an earlier
  meter of this process saw at that address and did not see freed: measure in a fresh process);
- `resize_(0)` and back on such a block counts its bytes and never forgets them;
- a second Python thread is not seen at all: what it allocates is missing, what it frees stays counted;
- memory that torch's allocator does not own (numpy arrays, a library's own malloc) is missing;
- profilers do not nest: the inner one ends the outer one's session, so the meter refuses to start in another's.

So everything is built inside the metered region, on one thread, and the total at the end must equal the live storages that the caller
names: the meter refuses its own reading otherwise. On CUDA the caching allocator keeps the watermarks itself.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from vramlab.errors import VramlabError

_MEMORY_EVENT = "[memory]"
_SPAN_PREFIX = "vramlab.meter: "

Build = Callable[[], tuple[Callable[[], Any], Callable[[], Iterable[torch.Tensor]]]]


class MeterError(VramlabError):
    """The meter does not believe its own reading: allocator traffic and live storages disagree."""


@dataclass(frozen=True, kw_only=True)
class MeterReading:
    """What the CPU allocator did in one region. Bytes, counted from zero at its start."""

    peak_bytes: int  # highest total
    lowest_bytes: int  # below zero when a block older than the meter was freed
    final_bytes: int  # total at the end, equal to the live storages
    events: int  # allocations and frees seen


@dataclass(frozen=True, kw_only=True)
class StepPeaks:
    """Peaks of a training step, everything that it holds included. Bytes."""

    meter: str  # "cpu_allocator" or "cuda_caching_allocator"
    peak_bytes: int  # a steady, warm step; on CUDA the requested bytes
    cold_peak_bytes: int  # the first step
    persistent_bytes: int  # live between two steps
    step_peak_bytes: tuple[int, ...]  # one entry a step; on CUDA the first and the measured ones as one
    unnamed_bytes: int = 0  # live between two steps and owned by nobody named: 0 on the CPU, cuBLAS workspaces on CUDA
    allocated_peak_bytes: int | None = None  # CUDA only, from here on: requested, rounded up to blocks
    active_peak_bytes: int | None = None  # allocated + freed blocks that still wait for a stream
    reserved_peak_bytes: int | None = None  # taken from the driver
    allocation_retries: int | None = None  # times that the cache had to be flushed to serve an allocation


class AllocatorMeter:
    """Context manager: meters the CPU allocator of this thread. Read it after the `with` block."""

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports its start and stop on stderr otherwise
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._starts_ns = self._totals = np.zeros(0, dtype=np.int64)
        self._spans: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> AllocatorMeter:
        if torch.autograd._profiler_enabled():
            raise MeterError("a torch profiler already runs in this thread, and two do not nest: start it after what vramlab measures "
                             "(vramlab.train_step measures each operator that it does not know yet when it is called)")
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._profile.__exit__(*exception)
        if exception[0] is None:
            self._read()

    def span(self, name: str) -> AbstractContextManager:
        """Names a part of the region, inside the `with` block. Each name is used once."""
        return record_function(_SPAN_PREFIX + name)

    @property
    def reading(self) -> MeterReading:
        """The whole region."""
        peak, lowest = int(self._totals.max(initial=0)), int(self._totals.min(initial=0))
        return MeterReading(peak_bytes=peak, lowest_bytes=lowest, final_bytes=self._total_before(2**62), events=len(self._totals))

    def span_bytes(self, name: str) -> tuple[int, int, int]:
        """(total when the span began, highest total in it, total when it ended)."""
        start_ns, end_ns = self._spans[name]
        first, last = np.searchsorted(self._starts_ns, [start_ns, end_ns])
        before, after = self._total_before(start_ns), self._total_before(end_ns)
        return before, int(self._totals[first:last].max(initial=before)), after

    def _read(self) -> None:
        memory = []
        for event in self._profile.profiler.kineto_results.events():
            name = event.name()
            if name == _MEMORY_EVENT:
                memory.append((event.start_ns(), event.nbytes()))
            elif name.startswith(_SPAN_PREFIX):
                self._spans[name.removeprefix(_SPAN_PREFIX)] = (event.start_ns(), event.end_ns())
        memory.sort(key=lambda event: event[0])  # stable: events of one instant stay in the order in which they came
        self._starts_ns = np.array([start for start, _ in memory], dtype=np.int64)
        self._totals = np.cumsum(np.array([nbytes for _, nbytes in memory], dtype=np.int64))

    def _total_before(self, instant_ns: int) -> int:
        index = int(np.searchsorted(self._starts_ns, instant_ns))
        return int(self._totals[index - 1]) if index else 0


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes behind these tensors, each storage once however many views of it there are."""
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(storages.values())


def measure_peak(run: Callable[[], Iterable[torch.Tensor]]) -> MeterReading:
    """Peak of allocated CPU bytes while `run()` builds and computes; it returns every tensor that is then alive.

    Raises MeterError when the allocator's total is not the bytes of these tensors.
    """
    with AllocatorMeter() as meter:
        live = list(run())
        gc.collect()
    _refuse_disagreement(meter.reading, storage_bytes(live))
    return meter.reading


def measure_step_peak(build: Build, *, steps: int = 3, device: torch.device | str = "cpu") -> StepPeaks:
    """Cold and warm peak of a training step.

    `build()` makes model, optimizer and batch inside the metered region and returns `(step, live)`: `step()` runs one training step (what
    it returns is dropped at once), `live()` names every tensor that is alive between two steps, gradients and optimizer state included.
    The warm peak is the last step's, counted with all that is live when it starts. Raises MeterError when the meter cannot be believed.
    """
    if steps < 2:
        raise ValueError(f"{steps} steps have no warm step; measure at least 2")
    device = torch.device(device)
    return _measure_cuda_steps(build, steps, device) if device.type == "cuda" else _measure_cpu_steps(build, steps)


def _measure_cpu_steps(build: Build, steps: int) -> StepPeaks:
    with AllocatorMeter() as meter:
        step, live = build()
        for index in range(steps):
            with meter.span(f"step {index}"):
                step()
        gc.collect()
        live_bytes = storage_bytes(live())
    _refuse_disagreement(meter.reading, live_bytes)
    peaks = tuple(meter.span_bytes(f"step {index}")[1] for index in range(steps))
    return StepPeaks(meter="cpu_allocator", peak_bytes=peaks[-1], cold_peak_bytes=peaks[0], persistent_bytes=live_bytes,
                     step_peak_bytes=peaks)


def _refuse_disagreement(reading: MeterReading, live_bytes: int) -> None:
    if reading.lowest_bytes < 0:
        raise MeterError(f"the allocator's total fell to {reading.lowest_bytes:,} bytes: a block older than the meter was freed")
    if reading.final_bytes != live_bytes:
        raise MeterError(
            f"the allocator's total is {reading.final_bytes:,} bytes and the live storages are {live_bytes:,}: something was allocated "
            f"before the meter started, by another thread or outside torch (a tensor from numpy), or a live tensor was not named"
        )


def _measure_cuda_steps(build: Build, steps: int, device: torch.device) -> StepPeaks:
    """All but the last step warm up, at least two. Not yet run on a GPU: no number of it counts before its tests have run on one."""
    torch.cuda.init()
    step, live = build()
    cold = _cuda_peaks(step, device)["requested_bytes.all.peak"]
    for _ in range(max(2, steps - 1)):
        step()
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()  # what the cold step reserved is not what a steady step needs
    stats = _cuda_peaks(step, device)
    persistent = stats["requested_bytes.all.current"]
    return StepPeaks(
        meter="cuda_caching_allocator", peak_bytes=stats["requested_bytes.all.peak"], cold_peak_bytes=cold, persistent_bytes=persistent,
        step_peak_bytes=(cold, stats["requested_bytes.all.peak"]), unnamed_bytes=persistent - storage_bytes(live()),
        allocated_peak_bytes=stats["allocated_bytes.all.peak"], active_peak_bytes=stats["active_bytes.all.peak"],
        reserved_peak_bytes=stats["reserved_bytes.all.peak"], allocation_retries=stats["num_alloc_retries"],
    )


def _cuda_peaks(step: Callable[[], Any], device: torch.device) -> dict[str, int]:
    """Statistics of the caching allocator over one step. MeterError when the reset watermark is not what is live, or falls below it."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    refuse_false_watermark(torch.cuda.memory_stats(device))
    step()
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    refuse_low_peak(stats)
    return stats


_KINDS = ("requested_bytes", "allocated_bytes", "active_bytes", "reserved_bytes")


def refuse_false_watermark(stats: Mapping[str, int]) -> None:
    """A reset lowers the watermark to what is live now, and to nothing else: else a step's peak is that of an earlier one."""
    for kind in _KINDS:
        peak, live = stats[f"{kind}.all.peak"], stats[f"{kind}.all.current"]
        if peak != live:
            raise MeterError(f"after its reset the watermark of {kind} is {peak:,} and {live:,} are live: the reset did not work")


def refuse_low_peak(stats: Mapping[str, int]) -> None:
    """A peak below what is live, or kinds out of order (requested, allocated, active, reserved), is no reading."""
    for kind in _KINDS:
        peak, live = stats[f"{kind}.all.peak"], stats[f"{kind}.all.current"]
        if peak < live:
            raise MeterError(f"the peak of {kind} is {peak:,}, below the {live:,} that are live")
    peaks = [stats[f"{kind}.all.peak"] for kind in _KINDS]
    if peaks != sorted(peaks):
        raise MeterError(f"requested, allocated, active and reserved bytes have peaks out of order: {peaks}")
