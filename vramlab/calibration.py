"""The DeviceProfile of the machine at hand, measured in about a second and kept on disk.

A CPU has no link to a device. Its profile has the one that a V100 of the papers would have if it were as slow as this CPU: bandwidth and
latency scaled by the ratio of convolution FLOP/s, so that swap against recompute stays the question that it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from vramlab.device import DeviceProfile, load_profile

from vramlab.store import device_name, device_store

LINK_MODEL = "v100-32gb"  # whose compute-to-link ratio a CPU is given
_CONVOLUTION = ((8, 64, 56, 56), (64, 64, 3, 3))  # a 3x3 layer of ResNet's first stage
_COPY_BYTES = 64 * 2**20  # beyond any cache


def measure_profile(device: torch.device | str, *, cache_dir: Path | None = None, refresh: bool = False) -> DeviceProfile:
    """Rates of this machine's `device`, each with its source. From the cache on disk unless `refresh`."""
    device = torch.device(device)
    store = device_store("profile", device, cache_dir)
    known = {} if refresh else store.read()
    if not known:
        known = (_measure_cuda if device.type == "cuda" else _measure_cpu)(device).to_json()
        store.add(known)
    return DeviceProfile(**known)


def _measure_cpu(device: torch.device) -> DeviceProfile:
    flops, copy = _convolution_flops_per_second(device), _memory_bytes_per_second(device)
    model = load_profile(LINK_MODEL)
    slowdown = model.flops_per_second * model.flops_efficiency / flops
    scaled = f"paced: {LINK_MODEL}'s, scaled by the convolution FLOP/s of this processor over {LINK_MODEL}'s, 1 / {slowdown:.4g}"
    return DeviceProfile(
        name=f"{device_name(device)}, {torch.get_num_threads()} threads", memory_bytes=psutil.virtual_memory().total,
        flops_per_second=flops, flops_efficiency=1.0, memory_bytes_per_second=copy,
        h2d_bytes_per_second=model.h2d_bytes_per_second / slowdown, d2h_bytes_per_second=model.d2h_bytes_per_second / slowdown,
        copy_latency_seconds=model.copy_latency_seconds * slowdown, launch_seconds=_launch_seconds(device),
        is_full_duplex=model.is_full_duplex,
        sources=_MEASURED | {"memory_bytes": "the machine's main memory", "h2d_bytes_per_second": scaled, "d2h_bytes_per_second": scaled,
                             "copy_latency_seconds": f"{LINK_MODEL}'s, times the same ratio", "is_full_duplex": f"as {LINK_MODEL}"},
    )


def _measure_cuda(device: torch.device) -> DeviceProfile:
    """Not yet run on a GPU: its numbers count only once its tests have run on one."""
    card = torch.cuda.get_device_properties(device)
    to_host, to_device, both = _link_seconds(device)
    copied = f"measured: {_COPY_BYTES >> 20} MiB to and from pinned memory, each direction alone"
    return DeviceProfile(
        name=device_name(device), memory_bytes=card.total_memory,
        flops_per_second=_convolution_flops_per_second(device), flops_efficiency=1.0,
        memory_bytes_per_second=_memory_bytes_per_second(device), d2h_bytes_per_second=_COPY_BYTES / to_host,
        h2d_bytes_per_second=_COPY_BYTES / to_device, copy_latency_seconds=_copy_latency_seconds(device),
        launch_seconds=_launch_seconds(device), is_full_duplex=both < 0.75 * (to_host + to_device),
        sources=_MEASURED | {"memory_bytes": "what the driver reports", "h2d_bytes_per_second": copied, "d2h_bytes_per_second": copied,
                             "copy_latency_seconds": "measured: a copy of 4 bytes",
                             "is_full_duplex": "measured: both directions at once take less than 3/4 of one after the other"},
    )


_MEASURED = {
    "flops_per_second": "measured: forward and backward of a 3x3 convolution, 64 to 64 channels, 56x56, batch 8, fp32",
    "flops_efficiency": "1: flops_per_second is what convolutions reach, not a peak",
    "memory_bytes_per_second": f"measured: copies of {_COPY_BYTES >> 20} MiB, bytes read and written",
    "launch_seconds": "measured: adding two tensors of one element",
}


def _convolution_flops_per_second(device: torch.device) -> float:
    x, weight = (torch.rand(shape, device=device) for shape in _CONVOLUTION)
    grad = torch.rand_like(x)
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def run() -> None:
        torch.ops.aten.convolution.default(x, weight, None, *geometry)
        torch.ops.aten.convolution_backward.default(grad, x, weight, None, *geometry, [True, True, False])

    positions = x.shape[0] * x.shape[2] * x.shape[3]
    return 3 * 2 * positions * weight.numel() / _least_seconds(run, device, runs=7)


def _memory_bytes_per_second(device: torch.device) -> float:
    source, target = torch.zeros(2, _COPY_BYTES, dtype=torch.uint8, device=device)
    return 2 * _COPY_BYTES / _least_seconds(lambda: target.copy_(source), device, runs=7)


def _launch_seconds(device: torch.device) -> float:
    one = torch.ones(1, device=device)

    def run() -> None:
        for _ in range(100):
            torch.add(one, one)

    return _least_seconds(run, device, runs=7) / 100


def _link_seconds(device: torch.device) -> tuple[float, float, float]:
    """Seconds of a copy to the host, of one to the device, and of both at once."""
    there = torch.zeros(2, _COPY_BYTES, dtype=torch.uint8, device=device)
    here = torch.zeros(2, _COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    side = torch.cuda.Stream(device)

    def to_host() -> None:
        here[0].copy_(there[0], non_blocking=True)

    def to_device() -> None:
        there[1].copy_(here[1], non_blocking=True)

    def both() -> None:
        with torch.cuda.stream(side):
            to_host()
        to_device()

    to_host_seconds, to_device_seconds, both_seconds = (_least_seconds(run, device, runs=7) for run in (to_host, to_device, both))
    return to_host_seconds, to_device_seconds, both_seconds


def _copy_latency_seconds(device: torch.device) -> float:
    there, here = torch.zeros(1, device=device), torch.zeros(1, pin_memory=True)
    return _least_seconds(lambda: here.copy_(there, non_blocking=True), device, runs=20)


def _least_seconds(run: Callable[[], object], device: torch.device, *, runs: int) -> float:
    def once() -> float:
        _synchronize(device)
        started = time.perf_counter()
        run()
        _synchronize(device)
        return time.perf_counter() - started

    with torch.no_grad():
        once()
        return min(once() for _ in range(runs))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
