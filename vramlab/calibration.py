"""The DeviceProfile of the machine at hand, measured in about a second and kept on disk.

A CPU has no link to a device. Its profile has the one that a V100 of the papers would have if it were as slow as this CPU: bandwidth and
latency scaled by the ratio of convolution FLOP/s, so that swap against recompute stays the question that it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch

from vramlab.device import DeviceProfile, load_profile
from vramlab.rates import (
    COPY_BYTES, HEADLINE_CONVOLUTION, convolution_flops_per_second, copy_latency_seconds, launch_seconds, link_seconds,
    measure_rates, memory_bytes_per_second,
)
from vramlab.store import device_name, device_store
from vramlab.this_machine import Calibration, keep_calibration

LINK_MODEL = "v100-32gb"  # whose compute-to-link ratio a CPU is given


def measure_profile(device: torch.device | str, *, cache_dir: Path | None = None, refresh: bool = False) -> DeviceProfile:
    """Rates of this machine's `device`, each with its source. From the cache on disk unless `refresh`."""
    device = torch.device(device)
    store = device_store("profile", device, cache_dir)
    known = {} if refresh else store.read()
    if not known:
        known = (_measure_cuda if device.type == "cuda" else _measure_cpu)(device).to_json()
        store.add(known)
    return DeviceProfile(**known)


def calibrate(device: str, refresh: bool = False) -> dict[str, Any]:
    """The profile of the machine at hand and its single rates, measured where they are not known; kept as what `sim:this` stands for."""
    at = torch.device(device)
    profile = measure_profile(at, refresh=refresh)
    store = device_store("rates", at)
    known = {} if refresh else store.read()
    if not known:
        known = measure_rates(at)
        store.add(known)
    calibration = Calibration.from_json({"device": device, "profile": profile.to_json(), **known})
    keep_calibration(calibration)
    return calibration.to_json()


def _measure_cpu(device: torch.device) -> DeviceProfile:
    flops, copy = convolution_flops_per_second(HEADLINE_CONVOLUTION, device), memory_bytes_per_second(device)
    model = load_profile(LINK_MODEL)
    slowdown = model.flops_per_second * model.flops_efficiency / flops
    scaled = f"paced: {LINK_MODEL}'s, scaled by the convolution FLOP/s of this processor over {LINK_MODEL}'s, 1 / {slowdown:.4g}"
    return DeviceProfile(
        name=f"{device_name(device)}, {torch.get_num_threads()} threads", memory_bytes=psutil.virtual_memory().total,
        flops_per_second=flops, flops_efficiency=1.0, memory_bytes_per_second=copy,
        h2d_bytes_per_second=model.h2d_bytes_per_second / slowdown, d2h_bytes_per_second=model.d2h_bytes_per_second / slowdown,
        copy_latency_seconds=model.copy_latency_seconds * slowdown, launch_seconds=launch_seconds(device),
        is_full_duplex=model.is_full_duplex,
        sources=_MEASURED | {"memory_bytes": "the machine's main memory", "h2d_bytes_per_second": scaled, "d2h_bytes_per_second": scaled,
                             "copy_latency_seconds": f"{LINK_MODEL}'s, times the same ratio", "is_full_duplex": f"as {LINK_MODEL}"},
    )


def _measure_cuda(device: torch.device) -> DeviceProfile:
    """Not yet run on a GPU: its numbers count only once its tests have run on one."""
    card = torch.cuda.get_device_properties(device)
    to_host, to_device, both = link_seconds(device)
    copied = f"measured: {COPY_BYTES >> 20} MiB to and from pinned memory, each direction alone"
    return DeviceProfile(
        name=device_name(device), memory_bytes=card.total_memory,
        flops_per_second=convolution_flops_per_second(HEADLINE_CONVOLUTION, device), flops_efficiency=1.0,
        memory_bytes_per_second=memory_bytes_per_second(device), d2h_bytes_per_second=COPY_BYTES / to_host,
        h2d_bytes_per_second=COPY_BYTES / to_device, copy_latency_seconds=copy_latency_seconds(device),
        launch_seconds=launch_seconds(device), is_full_duplex=both < 0.75 * (to_host + to_device),
        sources=_MEASURED | {"memory_bytes": "what the driver reports", "h2d_bytes_per_second": copied, "d2h_bytes_per_second": copied,
                             "copy_latency_seconds": "measured: a copy of 4 bytes",
                             "is_full_duplex": "measured: both directions at once take less than 3/4 of one after the other"},
    )


_MEASURED = {
    "flops_per_second": "measured: forward and backward of a 3x3 convolution, 64 to 64 channels, 56x56, batch 8, fp32",
    "flops_efficiency": "1: flops_per_second is what convolutions reach, not a peak",
    "memory_bytes_per_second": f"measured: copies of {COPY_BYTES >> 20} MiB, bytes read and written",
    "launch_seconds": "measured: adding two tensors of one element",
}
