"""Single rates of the machine at hand: arithmetic by class of shape, memory, link, latencies. Each takes a fraction of a second.

What is measured once and alone says what a kernel can reach, not what it reaches in a step, where caches are cold and clocks fall.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vramlab.this_machine import Rate

COPY_BYTES = 64 * 2**20  # beyond any cache
PINNED_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A class of convolutions by one layer that stands for it."""

    what: str
    x: tuple[int, int, int, int]  # batch, channels, height, width
    weight: tuple[int, int, int, int]  # channels out, channels in a group, height, width
    stride: int = 1
    groups: int = 1


HEADLINE_CONVOLUTION = Convolution(what="3x3, 64 to 64 channels, 56x56, batch 8", x=(8, 64, 56, 56), weight=(64, 64, 3, 3))
CONVOLUTIONS = (
    Convolution(what="7x7 stem, 3 to 64 channels, 112x112, stride 2, batch 8", x=(8, 3, 112, 112), weight=(64, 3, 7, 7), stride=2),
    HEADLINE_CONVOLUTION,
    Convolution(what="3x3, 512 to 512 channels, 7x7, batch 8", x=(8, 512, 7, 7), weight=(512, 512, 3, 3)),
    Convolution(what="1x1, 256 to 64 channels, 56x56, batch 8", x=(8, 256, 56, 56), weight=(64, 256, 1, 1)),
    Convolution(what="3x3 depthwise, 144 channels, 56x56, batch 8", x=(8, 144, 56, 56), weight=(144, 1, 3, 3), groups=144),
)
MATRICES = {"square, 1024 x 1024 x 1024": (1024, 1024, 1024), "tall, 4096 x 256 x 256": (4096, 256, 256),
            "thin, 16 x 2048 x 1024": (16, 2048, 1024)}


def measure_rates(device: torch.device) -> dict[str, Any]:
    """`{"rates": [...], "missing": {what: reason}}`, JSON-able."""
    rates = [*_arithmetic(device), *_memory(device)]
    if device.type == "cuda":
        return {"rates": [asdict(r) for r in (*rates, *_link(device))], "missing": {}}
    reason = "a CPU has no link to a device: its profile paces one"
    return {"rates": [asdict(r) for r in rates], "missing": dict.fromkeys(("link", "copy latency", "pinned allocation"), reason)}


def _arithmetic(device: torch.device) -> Iterator[Rate]:
    for what, (m, n, k) in MATRICES.items():
        yield Rate(what=f"matrix product, {what}", value=matrix_flops_per_second(m, n, k, device), unit="FLOP/s",
                   source="measured: torch.mm, fp32, least of 7 runs")
    for layer in CONVOLUTIONS:
        yield Rate(what=f"convolution, {layer.what}", value=convolution_flops_per_second(layer, device), unit="FLOP/s",
                   source="measured: forward and backward, fp32, least of 7 runs")


def _memory(device: torch.device) -> Iterator[Rate]:
    yield Rate(what="memory, read and written", value=memory_bytes_per_second(device), unit="byte/s",
               source=f"measured: copies of {COPY_BYTES >> 20} MiB, least of 7 runs")
    yield Rate(what="launch of an op", value=launch_seconds(device), unit="s", source="measured: adding two tensors of one element")


def _link(device: torch.device) -> Iterator[Rate]:
    to_host, to_device, both = link_seconds(device)
    copied = f"measured: {COPY_BYTES >> 20} MiB, pinned, least of 7 runs"
    yield Rate(what="link to the host, alone", value=COPY_BYTES / to_host, unit="byte/s", source=copied)
    yield Rate(what="link to the device, alone", value=COPY_BYTES / to_device, unit="byte/s", source=copied)
    yield Rate(what="link, both ways at once, sum", value=2 * COPY_BYTES / both, unit="byte/s", source=copied)
    yield Rate(what="copy latency", value=copy_latency_seconds(device), unit="s", source="measured: a copy of 4 bytes, least of 20 runs")
    yield Rate(what=f"pinned allocation of {PINNED_BYTES >> 20} MiB", value=pinned_allocation_seconds(), unit="s",
               source="measured: the first one of its size; later ones may come from torch's cache")


def _own_generators(device: torch.device):
    """What is measured in the middle of somebody's program must not move the numbers that it draws."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def matrix_flops_per_second(m: int, n: int, k: int, device: torch.device) -> float:
    """Of an m x k by k x n product."""
    with _own_generators(device):
        a, b = torch.rand(m, k, device=device), torch.rand(k, n, device=device)
    return 2 * m * n * k / least_seconds(lambda: torch.mm(a, b), device, runs=7)


def convolution_flops_per_second(layer: Convolution, device: torch.device) -> float:
    """Of its forward and backward together."""
    half = layer.weight[2] // 2
    geometry = ([layer.stride] * 2, [half, half], [1, 1], False, [0, 0], layer.groups)
    with _own_generators(device):
        x, weight = torch.rand(layer.x, device=device), torch.rand(layer.weight, device=device)
        grad = torch.rand_like(torch.ops.aten.convolution.default(x, weight, None, *geometry))

    def run() -> None:
        torch.ops.aten.convolution.default(x, weight, None, *geometry)
        torch.ops.aten.convolution_backward.default(grad, x, weight, None, *geometry, [True, True, False])

    positions = grad.shape[0] * grad.shape[2] * grad.shape[3]
    return 3 * 2 * positions * weight.numel() / least_seconds(run, device, runs=7)


def memory_bytes_per_second(device: torch.device) -> float:
    """Bytes read and written by a copy within the device's memory."""
    source, target = torch.zeros(2, COPY_BYTES, dtype=torch.uint8, device=device)
    return 2 * COPY_BYTES / least_seconds(lambda: target.copy_(source), device, runs=7)


def launch_seconds(device: torch.device) -> float:
    """Of an op that does next to nothing."""
    one = torch.ones(1, device=device)

    def run() -> None:
        for _ in range(100):
            torch.add(one, one)

    return least_seconds(run, device, runs=7) / 100


def link_seconds(device: torch.device) -> tuple[float, float, float]:
    """Seconds of a copy to the host, of one to the device, and of both at once. Not yet run on a GPU."""
    there = torch.zeros(2, COPY_BYTES, dtype=torch.uint8, device=device)
    here = torch.zeros(2, COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    side = torch.cuda.Stream(device)

    def to_host() -> None:
        here[0].copy_(there[0], non_blocking=True)

    def to_device() -> None:
        there[1].copy_(here[1], non_blocking=True)

    def both() -> None:
        with torch.cuda.stream(side):
            to_host()
        to_device()

    to_host_seconds, to_device_seconds, both_seconds = (least_seconds(run, device, runs=7) for run in (to_host, to_device, both))
    return to_host_seconds, to_device_seconds, both_seconds


def copy_latency_seconds(device: torch.device) -> float:
    """Of a copy of 4 bytes to pinned memory. Not yet run on a GPU."""
    there, here = torch.zeros(1, device=device), torch.zeros(1, pin_memory=True)
    return least_seconds(lambda: here.copy_(there, non_blocking=True), device, runs=20)


def pinned_allocation_seconds() -> float:
    """Of memory that no copy has used before: the driver locks its pages one by one. Not yet run on a GPU."""
    torch.empty(1, pin_memory=True)  # the first one starts the driver
    started = time.perf_counter()
    torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    return time.perf_counter() - started


def least_seconds(run: Callable[[], object], device: torch.device, *, runs: int) -> float:
    """The quickest of some runs after one that warms up: what nothing else disturbed."""
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
