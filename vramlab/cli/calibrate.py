"""calibrate: measure the machine at hand, print its rates with their sources."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from vramlab.cli.words import print_json, table
from vramlab.doctor import detect_host
from vramlab.errors import WorkflowError
from vramlab.isolate import Call, run_isolated
from vramlab.record import Outcome
from vramlab.report.words import DASH, bytes_in_words, significant
from vramlab.this_machine import Calibration

LIMIT_SECONDS = 600.0
_SCALES = {"FLOP/s": (1e9, "GFLOP/s"), "byte/s": (1e9, "GB/s"), "s": (1e-6, "us")}
_PROFILE_UNITS = {"flops_per_second": "FLOP/s", "memory_bytes_per_second": "byte/s", "h2d_bytes_per_second": "byte/s",
                  "d2h_bytes_per_second": "byte/s", "copy_latency_seconds": "s", "launch_seconds": "s"}


def calibrate(device: str, *, refresh: bool, as_json: bool) -> int:
    """Measure, keep and print; 1 when the measuring process came to grief."""
    target = detect_host(device).auto
    if target.startswith("sim:"):
        raise WorkflowError(f"--device {device!r} is not allowed; allowed: auto, cpu, cuda:0: a profile that is stated needs no measuring")
    result = run_isolated(Call(function="vramlab.calibration.calibrate", args=(target, refresh)), timeout_seconds=LIMIT_SECONDS)
    if result.outcome is not Outcome.OK:
        print(f"{target} was not measured: {result.outcome}, {result.message}", file=sys.stderr)
        return 1
    if as_json:
        print_json(result.value)
    else:
        print("\n".join(_in_lines(Calibration.from_json(result.value))))
    return 0


def _in_lines(calibration: Calibration) -> Iterator[str]:
    profile = calibration.profile
    yield f"{profile.name} ({calibration.device}), {bytes_in_words(profile.memory_bytes)}. What sim:this is simulated on:"
    yield ""
    rows = [(field, _in_words(getattr(profile, field), unit), profile.sources.get(field, "")) for field, unit in _PROFILE_UNITS.items()]
    rows.append(("is_full_duplex", "yes" if profile.is_full_duplex else "no", profile.sources.get("is_full_duplex", "")))
    yield table(("profile", "value", "source"), rows, right=("value",))
    yield ""
    single = [(r.what, _in_words(r.value, r.unit), r.source) for r in calibration.rates]
    yield table(("rate", "value", "source"), [*single, *((what, DASH, why) for what, why in calibration.missing.items())], right=("value",))


def _in_words(value: float, unit: str) -> str:
    scale, name = _SCALES[unit]
    return f"{significant(value / scale, 3)} {name}"
