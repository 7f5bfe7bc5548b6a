"""Values as the pages show them. A number that was predicted never stands without the word *simulated*."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from vramlab.report.words import DASH, NBSP, bytes_in_words, seconds_in_words, significant

STATE_TONES = {"received": "open", "checked": "good", "reproduced": "good", "repeated": "good", "flagged": "bad", "withdrawn": "bad",
               "superseded": "open"}
STATES = {
    "received": "uploaded; the server's checks have not passed on it, so it is unverified",
    "checked": "every derived number was derived again by the server and agrees",
    "reproduced": "checked, and obtained again by another account on another machine of the same model, within the tolerance",
    "repeated": "checked, and obtained again by the same owner or on the same machine",
    "flagged": "a rule or a person objects; it is unverified until that is settled",
    "withdrawn": "taken back by its submitter: what it said stays listed, its numbers count nowhere",
    "superseded": "replaced by a later submission of the same account",
}
VERDICT_TONES = {"reproduced": "good", "partly": "open", "not reproduced": "bad", "not testable here": "open"}
TRUTH_TONES = {"exact": "good", "within_noise": "good", "semantics_changed": "open", "wrong": "bad", "not_run": "open"}
TRUTHS = {"exact": "bit for bit as eager", "within_noise": "as eager within its noise",
          "semantics_changed": "another mathematics than eager's",
          "wrong": "differs from eager", "not_run": "not gated"}
SEVERITY_TONES = {"error": "bad", "warning": "open", "note": ""}
FILLS = {"auto": "from evidence", "prefill": "drafted, a person confirms", "person": "by a person"}
OUTCOME_TONES = {"ok": "good", "oom": "open", "plan_infeasible": "open"}
_ADDRESS = re.compile(r"https?://[^\s<>\"']+")


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One figure that results are ranked by."""

    key: str  # the column
    title: str
    unit: str  # bytes, seconds, share, count
    is_less_better: bool
    help: str

    def text(self, value: float | None) -> str:
        """The value with its unit; a dash where it is missing."""
        return value_in_words(value, self.unit)


METRICS = {metric.key: metric for metric in (
    Metric(key="peak_bytes", title="peak memory", unit="bytes", is_less_better=True,
           help="most device bytes that one warm training step holds at once, everything included"),
    Metric(key="memory_saved", title="memory saved", unit="share", is_less_better=False,
           help="1 less the peak over plain eager PyTorch's, which the record holds beside it"),
    Metric(key="overhead", title="overhead", unit="share", is_less_better=True,
           help="how much longer a step takes than eager's on the same machine in the same minutes, from the median ratio of paired steps"),
    Metric(key="step_seconds", title="step time", unit="seconds", is_less_better=True, help="median wall time of one training step"),
    Metric(key="largest", title="largest size", unit="count", is_less_better=False,
           help="largest batch (or depth, or image size) that fits the memory, found by a search"),
)}


def value_in_words(value: float | None, unit: str) -> str:
    """`812.4 MiB`, `35.2 ms`, `24.1 %`, `96`."""
    if value is None:
        return DASH
    if unit == "bytes":
        return bytes_in_words(value)
    if unit == "seconds":
        return seconds_in_words(value)
    if unit == "share":
        return f"{100 * value:.1f}{NBSP}%"
    return f"{value:g}" if unit == "count" else significant(value, 3)


def device_in_words(device: str, is_simulated: bool) -> str:
    """`simulated v100-32gb`, or the name of what measured."""
    return f"simulated {device}" if is_simulated and not device.startswith("simulated ") else device


def time_in_words(moment: datetime | None) -> str:
    """`2026-03-01 12:00 UTC`."""
    return DASH if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def is_address(text: Any) -> bool:
    """Whether a text may become a link: http and https only, so that no `javascript:` is ever one."""
    return isinstance(text, str) and bool(_ADDRESS.fullmatch(text))


def leaves(body: Mapping[str, Any], path: str = "") -> list[tuple[str, str]]:
    """(dotted path, value) of every leaf of nested data, for tables of settings."""
    found: list[tuple[str, str]] = []
    for key, value in body.items():
        name = f"{path}.{key}" if path else str(key)
        found += leaves(value, name) if isinstance(value, Mapping) else [(name, plainly(value))]
    return found


def plainly(value: Any) -> str:
    """As JSON has it, so that it can be found in the record; a dash for null."""
    if value is None:
        return DASH
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tally_in_words(tally: Mapping[str, int]) -> str:
    """`2 reproduced, 1 partly`; a dash for none."""
    return ", ".join(f"{count} {verdict}" for verdict, count in tally.items()) or DASH


def rfc3339(moment: datetime) -> str:
    """`2026-03-01T12:00:00Z`."""
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def pairs_in_words(body: Mapping[str, Any]) -> str:
    """`reason: wrong device, result: 4`."""
    return ", ".join(f"{name}: {value}" for name, value in leaves(body))
