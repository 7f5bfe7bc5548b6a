"""Links: how bytes move between the device and the host while the compute stream goes on.

On CUDA a link is two copy streams and one pinned slab. On the CPU it is two threads that only copy, a host arena outside torch's
allocator, and a pace: each copy ends no earlier than a link of the stated bandwidth would end it, so that swap against recompute is a
real question on a CPU too.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import threading
import time
import weakref
from typing import Mapping, Protocol, Sequence

import torch

from vramlab.device import DeviceProfile
from vramlab.errors import Unsupported

Stays = Mapping[int, Sequence[tuple[int, int]]]  # storage -> (offset, bytes) of each of its stays in the arena


class Link(Protocol):
    """Moves whole storages. `stay` counts how often this storage has been offloaded before in this step."""

    def arena(self, stays: Stays) -> object:
        """Reserve host memory for these stays, once for all steps."""
        ...

    def offload(self, arena: object, storage: int, stay: int, source: torch.Tensor) -> None:
        """Start the device-to-host copy of the storage behind `source`."""
        ...

    def prefetch(self, arena: object, storage: int, stay: int, target: torch.Tensor) -> None:
        """Start the host-to-device copy into the storage behind `target`."""
        ...

    def wait(self, storage: int) -> None:
        """The compute stream waits for this storage's copy."""
        ...


class HostArena:
    """Anonymous memory that torch's allocator does not know. `nbytes` is what it reserves."""

    def __init__(self, stays: Stays) -> None:
        self.stays = stays
        self.nbytes = max((offset + size for places in stays.values() for offset, size in places), default=0)
        self._map = mmap.mmap(-1, max(self.nbytes, 1))
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def address(self, storage: int, stay: int) -> int:
        """Where this stay of the storage lies."""
        return self._start + self.stays[storage][stay][0]


class PacedLink:
    """The CPU's link: one copy thread a direction, each copy paced to latency + bytes / bandwidth.

    The bytes are moved at the end of the paced time: a step that reads too early reads wrong values, as on a real link.
    """

    def __init__(self, profile: DeviceProfile) -> None:
        self.profile = profile
        self._done: dict[int, threading.Event] = {}
        self._failed: list[BaseException] = []
        engines = 2 if profile.is_full_duplex else 1
        queues = [queue.SimpleQueue() for _ in range(engines)]
        self._queues = {"d2h": queues[0], "h2d": queues[-1]}
        for q in queues:
            threading.Thread(target=_serve, args=(q, self._failed), daemon=True, name="vramlab-copy").start()
            weakref.finalize(self, q.put, None)

    def arena(self, stays: Stays) -> HostArena:
        """Host memory outside torch's allocator."""
        return HostArena(stays)

    def offload(self, arena: HostArena, storage: int, stay: int, source: torch.Tensor) -> None:
        """See Link."""
        whole = source.untyped_storage()
        self._start("d2h", storage, arena.address(storage, stay), whole.data_ptr(), whole.nbytes(), to_host=True)

    def prefetch(self, arena: HostArena, storage: int, stay: int, target: torch.Tensor) -> None:
        """See Link."""
        whole = target.untyped_storage()
        self._start("h2d", storage, whole.data_ptr(), arena.address(storage, stay), whole.nbytes(), to_host=False)

    def wait(self, storage: int) -> None:
        """See Link."""
        self._done.pop(storage).wait()
        if self._failed:
            raise self._failed.pop()

    def _start(self, engine: str, storage: int, to: int, source: int, nbytes: int, *, to_host: bool) -> None:
        event = self._done[storage] = threading.Event()
        self._queues[engine].put((event, to, source, nbytes, self.profile.copy_seconds(nbytes, to_host=to_host)))


def _serve(jobs: queue.SimpleQueue, failed: list[BaseException]) -> None:
    """One copy engine: jobs in order, until None comes."""
    while (job := jobs.get()) is not None:
        event, to, source, nbytes, seconds = job
        end = time.perf_counter() + seconds
        try:
            time.sleep(max(0.0, seconds - nbytes / _COPY_BYTES_PER_SECOND))
            ctypes.memmove(to, source, nbytes)
            time.sleep(max(0.0, end - time.perf_counter()))
        except BaseException as wrong:  # handed to the thread that waits
            failed.append(wrong)
        event.set()


_COPY_BYTES_PER_SECOND = 4e9  # how early before its paced end a copy starts to move bytes; the pace itself does not depend on it


class CudaLink:
    """One copy stream a direction, one pinned slab, one event a transfer, no `record_stream`.

    Allocation and release happen on the compute stream alone. A copy first waits for the compute stream as it is now, so it
    starts when the ops before it have ended; a `Wait` makes the compute stream wait, so a `Free` after it hands the region on safely.
    Untested until run on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = {"d2h": torch.cuda.Stream(device), "h2d": torch.cuda.Stream(device)}
        self._done: dict[int, torch.cuda.Event] = {}

    def arena(self, stays: Stays) -> PinnedSlab:
        """One pinned slab for all stays."""
        return PinnedSlab(stays)

    def offload(self, arena: PinnedSlab, storage: int, stay: int, source: torch.Tensor) -> None:
        """See Link. Unsupported where an operator left its result on the host, as attention does with the seeds of its dropout."""
        if source.device.type != "cuda":
            raise Unsupported(f"storage {storage} is on the host already; it cannot come back to where its reader expects it")
        self._copy("d2h", storage, arena.view(storage, stay), _bytes_of(source))

    def prefetch(self, arena: PinnedSlab, storage: int, stay: int, target: torch.Tensor) -> None:
        """See Link."""
        self._copy("h2d", storage, _bytes_of(target), arena.view(storage, stay))

    def wait(self, storage: int) -> None:
        """See Link."""
        torch.cuda.current_stream(self.device).wait_event(self._done.pop(storage))

    def _copy(self, engine: str, storage: int, to: torch.Tensor, source: torch.Tensor) -> None:
        compute, stream = torch.cuda.current_stream(self.device), self._streams[engine]
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        self._done[storage] = event


class PinnedSlab:
    """Page-locked host memory, reserved once: `cudaHostAlloc` costs milliseconds and synchronises."""

    def __init__(self, stays: Stays) -> None:
        self.stays = stays
        self.nbytes = max((offset + size for places in stays.values() for offset, size in places), default=0)
        self._slab = torch.empty(max(self.nbytes, 1), dtype=torch.uint8, pin_memory=True)

    def view(self, storage: int, stay: int) -> torch.Tensor:
        """The bytes of this stay."""
        offset, nbytes = self.stays[storage][stay]
        return self._slab[offset : offset + nbytes]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(whole, 0, (whole.nbytes(),), (1,))


def make_link(device: torch.device, profile: DeviceProfile | None = None) -> Link:
    """The link of a device. `profile` paces the CPU's; by default it is this machine's own (vramlab.costs.measure_profile)."""
    if device.type == "cuda":
        return CudaLink(device)
    if profile is None:
        from vramlab.costs import measure_profile

        profile = measure_profile(device)
    return PacedLink(profile)
