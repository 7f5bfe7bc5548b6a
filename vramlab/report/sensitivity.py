"""A simulated cell as it would be on a device whose link or FLOP/s are 20 % off.

The cell re-plans and re-simulates under each of vramlab.device.PERTURBATIONS and keeps what comes out in `sensitivity` of its block
`predicted` (or `search`); here that becomes a record which any rule reads like the cell's own.
"""

from __future__ import annotations

from dataclasses import replace

from vramlab.record import Outcome, RunRecord
from vramlab.report.words import is_simulated_target


def is_known(record: RunRecord) -> bool:
    """Whether the perturbed numbers of a record are there. Measured ones need none."""
    return not is_simulated_target(record.config) or bool(_block(record))


def why_unknown(record: RunRecord) -> str:
    """Why the perturbed numbers are not there."""
    return record.missing.get("sensitivity") or "the workflow does not ask for it (measure: {sensitivity: true})"


def perturbed(record: RunRecord, perturbation: str) -> RunRecord:
    """The record under a perturbation; itself where nothing of it is simulated or nothing is known."""
    if not is_simulated_target(record.config) or perturbation not in _block(record):
        return record
    found = _block(record)[perturbation]
    if "infeasible" in found:
        return replace(record, outcome=Outcome.PLAN_INFEASIBLE, message=found["infeasible"],
                       predicted={"infeasible": {"smallest_bytes": found.get("smallest_bytes"), "message": found["infeasible"]}})
    if record.kind == "step":
        return replace(record, outcome=Outcome.OK, predicted={**record.predicted, **found})
    return replace(record, outcome=Outcome.OK, search={**record.search, **found})


def _block(record: RunRecord) -> dict:
    return (record.predicted if record.kind == "step" else record.search).get("sensitivity") or {}
