"""The checker: `check(folder) -> Report`, the same on the submitter's machine and on the server. No torch, no network, nothing written.

Rules are asked in rounds; a round that finds errors ends the check, because the next one would read what is not sound.

    wrapping     what lies there, the manifest, every file's bytes, the signature
    form         run.json, records, tapes and schedules: strict JSON of the known schema
    derivation   every number that follows from others, anew: hashes, statistics, schedules checked and simulated again, verdicts
    plausibility what a machine can have measured (notes: allocated <= reserved <= used, telemetry that spans the cell, ...)
    replanning   only where it is wanted: methods plan again on the bundle's tapes, each cell within a time limit
"""

from __future__ import annotations

from pathlib import Path

from vramlab.crowd.findings import Report
from vramlab.crowd.layout import LIMITS, Limits
from vramlab.crowd.rules import (  # noqa: F401  each module enters its rules
    claimed, forms, identity, numbers, plausible, replanned, schedules, searching, sources, wrapping,
)
from vramlab.crowd.rules.asking import ROUNDS, RULES, Examination, Round

__all__ = ["RULES", "check"]


def check(folder: Path, limits: Limits = LIMITS, *, replan_seconds: float = 0.0) -> Report:
    """Ask every rule of a bundle's folder, whose name is to be the bundle's. Methods plan again where `replan_seconds`, for each cell, is
    above zero."""
    examination = Examination(Path(folder), limits, replan_seconds)
    for number in ROUNDS if replan_seconds > 0 else ROUNDS[:Round.REPLANNING - 1]:
        examination.ask(number)
        if examination.has_errors:
            break
    return examination.report()
