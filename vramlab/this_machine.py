"""The machine at hand as a device to simulate: what `vramlab calibrate` measured, under the name `this`.

The numbers go into the resolved cell, so that a record says on what it was simulated and another calibration makes another cell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vramlab.device import DeviceProfile, load_profile, profile_names
from vramlab.environment import cache_dir
from vramlab.errors import EnvironmentUnable
from vramlab.record import write_atomically

THIS = "this"


@dataclass(frozen=True, kw_only=True)
class Rate:
    """One measured number."""

    what: str
    value: float
    unit: str  # "FLOP/s", "byte/s", "s"
    source: str


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A device of this machine, measured."""

    device: str  # "cpu", "cuda:0"
    profile: DeviceProfile
    rates: Sequence[Rate]
    missing: Mapping[str, str]  # what could not be measured -> why

    def to_json(self) -> dict[str, Any]:
        """All fields as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Calibration:
        """Inverse of `to_json`."""
        return cls(device=body["device"], profile=DeviceProfile(**body["profile"]), rates=tuple(Rate(**r) for r in body["rates"]),
                   missing=body["missing"])


def known_profiles() -> tuple[str, ...]:
    """Names that a target `sim:NAME` may have."""
    return (*profile_names(), THIS)


def open_profile(name: str) -> DeviceProfile:
    """A stated profile, or that of this machine. KeyError when there is none; EnvironmentUnable when this machine is not calibrated."""
    return read_calibration().profile if name == THIS else load_profile(name)


def is_calibrated() -> bool:
    """Is there a calibration of this machine?"""
    return _path().is_file()


def read_calibration() -> Calibration:
    """What `vramlab calibrate` measured last. EnvironmentUnable when it never ran, or its file is damaged."""
    try:
        return Calibration.from_json(json.loads(_path().read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise EnvironmentUnable("this machine has not been measured: run `calibrate`, then sim:this stands for it") from None
    except (ValueError, KeyError, TypeError) as wrong:
        raise EnvironmentUnable(f"{_path()} is damaged ({wrong}); run `calibrate` again") from None


def keep_calibration(calibration: Calibration) -> None:
    """From now on `this` is what it says."""
    write_atomically(_path(), json.dumps(calibration.to_json(), indent=1, sort_keys=True) + "\n")


def _path() -> Path:
    return cache_dir() / "devices" / f"{THIS}.json"
