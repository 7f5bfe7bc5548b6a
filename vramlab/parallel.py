"""Several devices by simulation: each trains on its share of the batch, and gradients are exchanged while the backward phase runs.

    compute    every device runs the same checked schedule, of a step over ceil(batch / devices) samples
    exchange   a gradient is sent as soon as the op that completes it has run, all of it at once; one exchange after the other
    optimizer  starts when the last exchange has ended

An exchange of n bytes among d devices, by the algorithm that is named:

    ring   2 (d - 1) rounds of n / d bytes a link:            2 (d - 1) (latency + n / (d rate))
    tree   up and down a binary tree, n bytes a level:        2 ceil(log2 d) (latency + n / rate)

Devices that have links of their own exchange over them, beside all copies to and from the host. Where a profile has none, the
exchange goes over the host link and takes both of its directions: it waits for the copies before it in the list, and the copies after it
wait for it. Each device has a host link of its own. Adding up what arrives takes no time. All of it is *simulated*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import ceil, log2
from typing import Any

from vramlab.check import CheckedSchedule
from vramlab.device import DeviceProfile
from vramlab.schedule import Compute, Offload, Prefetch, Recompute, Wait
from vramlab.tape import Phase, Role, Tape


class AllReduce(StrEnum):
    """How gradients are summed over the devices."""

    RING = "ring"
    TREE = "tree"


@dataclass(frozen=True, kw_only=True)
class ParallelStep:
    """One step on several devices, simulated."""

    devices: int
    algorithm: AllReduce
    link: str  # "device" or "host": over what gradients are exchanged
    step_seconds: float
    compute_seconds: float  # of one device: when its forward and backward have run
    exchange_seconds: float  # sum over the exchanges
    exposed_seconds: float  # by which the exchanges end after forward and backward
    exchanged_bytes: int  # of gradients, by one device

    def to_json(self) -> dict[str, Any]:
        """All fields as a dict."""
        return asdict(self) | {"algorithm": str(self.algorithm)}


def share_of(batch_size: int, devices: int) -> int:
    """Samples of the device that has the most. ValueError where there are more devices than samples."""
    if not 1 <= devices <= batch_size:
        raise ValueError(f"a batch of {batch_size} is not shared among {devices} devices")
    return ceil(batch_size / devices)


def exchange_seconds(nbytes: int, devices: int, device: DeviceProfile, algorithm: AllReduce = AllReduce.RING) -> float:
    """Seconds to sum `nbytes` over all devices, so that each has the sum."""
    if devices == 1:
        return 0.0
    rate, latency = _link_rate(device), device.copy_latency_seconds
    if algorithm is AllReduce.RING:
        return 2 * (devices - 1) * (latency + nbytes / (devices * rate))
    return 2 * ceil(log2(devices)) * (latency + nbytes / rate)


def simulate_parallel(
    checked: CheckedSchedule, device: DeviceProfile, devices: int, algorithm: AllReduce = AllReduce.RING
) -> ParallelStep:
    """The step of `devices` devices that each run this schedule, as `simulate` has it on one, with the exchange of gradients."""
    clock = _Clock(checked, device, devices, algorithm)
    for instruction in checked.schedule.instructions:
        clock.advance(instruction)
    return clock.result()


def speedup(
    batch_size: int, devices: int, plan_at: Callable[[int], CheckedSchedule], device: DeviceProfile, algorithm: AllReduce = AllReduce.RING
) -> tuple[float, ParallelStep]:
    """Step time of one device on the whole batch over that of `devices` on their shares, and the latter step.

    `plan_at` gives the checked schedule of a device that trains on so many samples.
    """
    one = simulate_parallel(plan_at(batch_size), device, 1, algorithm)
    many = simulate_parallel(plan_at(share_of(batch_size, devices)), device, devices, algorithm)
    return one.step_seconds / many.step_seconds, many


def completing_ops(tape: Tape) -> dict[int, list[int]]:
    """Op -> the gradients (storages) that it completes: no later op before the optimizer writes them."""
    last: dict[int, int] = {}
    for op in tape.ops:
        if op.phase is not Phase.OPTIMIZER:
            for s in (*tape.creates[op.id], *op.mutates):
                if tape.storages[s].role is Role.GRADIENT:
                    last[s] = op.id
    completed: dict[int, list[int]] = {}
    for s, op in last.items():
        completed.setdefault(op, []).append(s)
    return completed


def _link_rate(device: DeviceProfile) -> float:
    """Bytes per second and direction between two devices."""
    return device.device_link_bytes_per_second or min(device.h2d_bytes_per_second, device.d2h_bytes_per_second)


class _Clock:
    """The timeline of one of the devices; the rules for compute stream and copies are those of `simulate`."""

    def __init__(self, checked: CheckedSchedule, device: DeviceProfile, devices: int, algorithm: AllReduce) -> None:
        self.tape, self.device, self.devices, self.algorithm = checked.tape, device, devices, algorithm
        self.has_links = device.device_link_bytes_per_second > 0
        self.completed = completing_ops(checked.tape)
        self.now = self.to_host_free = self.to_device_free = self.link_free = 0.0
        self.copy_end: dict[int, float] = {}
        self.before_optimizer: float | None = None
        self.exchange_seconds, self.exchanged_bytes = 0.0, 0

    def advance(self, instruction: Any) -> None:
        """One instruction."""
        match instruction:
            case Compute() | Recompute():
                self._run(instruction)
            case Offload(storage):
                start = max(self.now, self.to_host_free)
                self._occupy_host_link(start, self.device.copy_seconds(self.tape.storages[storage].nbytes, to_host=True), storage, True)
            case Prefetch(storage):
                start = max(self.now, self.to_device_free, self.copy_end.get(storage, 0.0))
                self._occupy_host_link(start, self.device.copy_seconds(self.tape.storages[storage].nbytes, to_host=False), storage, False)
            case Wait(storage):
                self.now = max(self.now, self.copy_end[storage])

    def result(self) -> ParallelStep:
        """After the last instruction."""
        backward_end = self.now if self.before_optimizer is None else self.before_optimizer
        end = max(self.now, self.link_free)
        return ParallelStep(
            devices=self.devices, algorithm=self.algorithm, link="device" if self.has_links else "host", step_seconds=end,
            compute_seconds=backward_end, exchange_seconds=self.exchange_seconds,
            exposed_seconds=max(0.0, self.link_free - backward_end), exchanged_bytes=self.exchanged_bytes)

    def _run(self, instruction: Compute | Recompute) -> None:
        op = self.tape.ops[instruction.op]
        if op.phase is Phase.OPTIMIZER and self.before_optimizer is None:
            self.before_optimizer = self.now
            self.now = max(self.now, self.link_free)
        self.now += op.variant(instruction.variant).seconds
        if self.devices > 1 and isinstance(instruction, Compute):
            for s in self.completed.get(op.id, ()):
                self._exchange(self.tape.storages[s].nbytes)

    def _exchange(self, nbytes: int) -> None:
        seconds = exchange_seconds(nbytes, self.devices, self.device, self.algorithm)
        start = max(self.now, self.link_free)
        if not self.has_links:
            start = max(start, self.to_host_free, self.to_device_free)
            self.to_host_free = self.to_device_free = start + seconds
        self.link_free = start + seconds
        self.exchange_seconds += seconds
        self.exchanged_bytes += nbytes

    def _occupy_host_link(self, start: float, seconds: float, storage: int, to_host: bool) -> None:
        end = self.copy_end[storage] = start + seconds
        if to_host or not self.device.is_full_duplex:
            self.to_host_free = max(self.to_host_free, end)
        if not to_host or not self.device.is_full_duplex:
            self.to_device_free = max(self.to_device_free, end)
