"""DeviceProfile: the hardware that a schedule is simulated on. Every number carries its source."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Mapping

PROFILES_DIR = Path(__file__).with_name("devices")


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """Rates of one device and its host link. Bytes, seconds, FLOP. ValueError names a rate that nothing could run at."""

    name: str
    memory_bytes: int
    flops_per_second: float  # peak of the dtype that the papers used (fp32 unless the profile says otherwise)
    flops_efficiency: float  # share of that peak which dense kernels reach
    memory_bytes_per_second: float
    h2d_bytes_per_second: float
    d2h_bytes_per_second: float
    copy_latency_seconds: float
    launch_seconds: float = 0.0  # least time of any op
    is_full_duplex: bool = True  # both copy directions at once
    devices: int = 1
    device_link_bytes_per_second: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)  # field name -> where the number comes from

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "flops_per_second", "flops_efficiency", "memory_bytes_per_second", "h2d_bytes_per_second",
                     "d2h_bytes_per_second", "devices"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"device profile {self.name!r}: {name} is {getattr(self, name)!r}; it must be above zero and finite")
        for name in ("copy_latency_seconds", "launch_seconds", "device_link_bytes_per_second"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"device profile {self.name!r}: {name} is {getattr(self, name)!r}; it must not be below zero, and finite")

    def copy_seconds(self, nbytes: int, *, to_host: bool) -> float:
        """Latency + bytes / bandwidth of one copy."""
        rate = self.d2h_bytes_per_second if to_host else self.h2d_bytes_per_second
        return self.copy_latency_seconds + nbytes / rate

    def op_seconds(self, flops: int, moved_bytes: int) -> float:
        """Roofline: the larger of arithmetic and memory traffic, never below the launch time."""
        arithmetic = flops / (self.flops_per_second * self.flops_efficiency)
        return max(arithmetic, moved_bytes / self.memory_bytes_per_second, self.launch_seconds)

    def to_json(self) -> dict:
        """All fields as a dict."""
        return asdict(self)


def profile_names() -> tuple[str, ...]:
    """Names that `load_profile` knows, sorted."""
    return tuple(sorted(p.stem for p in PROFILES_DIR.glob("*.json")))


def load_profile(name: str) -> DeviceProfile:
    """Read `devices/<name>.json`. KeyError lists the names there are."""
    path = PROFILES_DIR / f"{name}.json"
    if "/" in name or not path.is_file():
        raise KeyError(f"no device profile {name!r}; there are {', '.join(profile_names())}")
    return DeviceProfile(**json.loads(path.read_text()))


_LINK = ("h2d_bytes_per_second", "d2h_bytes_per_second", "device_link_bytes_per_second")
# How far a profile may be from the real device: what a simulated verdict must withstand.
PERTURBATIONS: Mapping[str, Mapping[str, float]] = {
    "link -20 %": dict.fromkeys(_LINK, 0.8), "link +20 %": dict.fromkeys(_LINK, 1.2),
    "FLOP/s -20 %": {"flops_per_second": 0.8}, "FLOP/s +20 %": {"flops_per_second": 1.2},
}


def perturbed_profile(profile: DeviceProfile, perturbation: str) -> DeviceProfile:
    """The same device with some of its rates 20 % off, by a name of PERTURBATIONS. KeyError on another."""
    rates = {name: getattr(profile, name) * factor for name, factor in PERTURBATIONS[perturbation].items()}
    return replace(profile, **rates)
