"""Trace and Metrics: one timeline type, from the simulator and from the executor."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What a timeline comes to."""

    peak_bytes: int  # device bytes: everything the step holds, the inside of ops included
    average_bytes: float | None  # device bytes, averaged over the time of the step; None of a step that takes no time
    peak_host_bytes: int
    peak_instruction: int  # index of the instruction during which the peak stands
    step_seconds: float
    compute_seconds: float  # first runs of ops
    recompute_seconds: float
    stall_seconds: float  # the compute stream waits for a copy
    moved_bytes: int  # both directions
    recomputes: int
    offloads: int
    prefetches: int

    def to_json(self) -> dict[str, Any]:
        """All fields as a dict."""
        return asdict(self)


def average_bytes(inner_peak_bytes: np.ndarray, stream_seconds: np.ndarray) -> float | None:
    """Device bytes averaged over the time of the compute stream: an op holds its inside, and what it makes, as long as it runs.

    One entry an instruction; `stream_seconds` is the time for which it occupies the compute stream. None when that is none at all.
    """
    total = float(stream_seconds.sum())
    return float(inner_peak_bytes @ stream_seconds) / total if total > 0 else None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """When each instruction of a schedule ran and what the device held. Arrays have one entry an instruction."""

    profile: str  # name of the DeviceProfile, or of the executing device
    is_simulated: bool
    start_seconds: np.ndarray  # float64: when the compute stream (Compute, Recompute, Wait) or the copy engine starts it
    end_seconds: np.ndarray  # float64
    live_bytes: np.ndarray  # int64: device bytes after the instruction
    inner_peak_bytes: np.ndarray  # int64: device bytes at the highest instant of the instruction
    host_bytes: np.ndarray  # int64: host bytes after the instruction
    metrics: Metrics
