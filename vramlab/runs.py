"""Runs on disk, read for analysis: `load_run` for the report and for submissions, `results` as a pandas table.

    results/<workflow>/<run>/run.json                     the resolved workflow, environment, plan of cells
    results/<workflow>/<run>/cells/<cell_id>/record.json  one RunRecord a cell
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Iterator, Mapping

from vramlab.record import RunRecord
from vramlab.run_folder import RunFolder

if TYPE_CHECKING:
    import pandas

MANIFEST_FILE = "manifest.json"  # of a bundle
RUN_FILE, RECORD_FILE, TELEMETRY_FILE = "run.json", "record.json", "telemetry.csv.gz"
SCHEDULE_FILE, TAPE_FILE = "schedule.json.gz", "tape.json.gz"
IDENTITY_COLUMNS = ("run", "workflow", "experiment", "kind", "model", "batch_size", "label", "method", "options", "budget", "target",
                    "cell_id", "outcome", "reason", "truth", "message", "budget_bytes", "eager_peak_bytes", "eager_peak_is_simulated")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a run: its record, or why there is none."""

    cell_id: str
    folder: Path
    config: Mapping[str, Any]
    label: str  # how the workflow calls the method
    record: RunRecord | None
    problem: str = ""  # "" when there is a record

    @property
    def path(self) -> str:
        """The record's place below the run's folder, for links."""
        return f"cells/{self.cell_id}/{RECORD_FILE}"


@dataclass(frozen=True)
class Run:
    """One run of a workflow as it lies on disk; `plan` is the body of run.json."""

    folder: Path
    plan: Mapping[str, Any]
    cells: tuple[Cell, ...]  # in the order of the plan

    @property
    def workflow(self) -> Mapping[str, Any]:
        """The resolved workflow: name, title, description, claims, expected, path, sha256."""
        return self.plan.get("workflow", {})

    @property
    def environment(self) -> Mapping[str, Any]:
        """Software and hardware of the process that ran the workflow."""
        return self.plan.get("environment", {})

    @cached_property
    def records(self) -> tuple[RunRecord, ...]:
        """The records there are."""
        return tuple(cell.record for cell in self.cells if cell.record)

    @cached_property
    def _labels(self) -> Mapping[str, str]:
        return {cell.cell_id: cell.label for cell in self.cells}

    def label(self, record: RunRecord) -> str:
        """How the workflow calls the method of a record."""
        return self._labels.get(record.cell_id) or str(record.config.get("method"))

    def environment_of(self, record: RunRecord) -> Mapping[str, Any]:
        """Software and hardware that a record was made on."""
        return record.environment or self.environment


def load_run(folder: Path) -> Run:
    """Read a run's folder. WorkflowError when its run.json cannot be read; a cell that cannot be says so itself."""
    folder = Path(folder)
    plan = RunFolder(folder).plan
    planned = {str(cell["cell_id"]): cell for cell in plan.get("cells", ())}
    on_disk = sorted(path.parent.name for path in (folder / "cells").glob(f"*/{RECORD_FILE}"))
    names = [*planned, *(name for name in on_disk if name not in planned)]
    return Run(folder, plan, tuple(_load_cell(folder / "cells" / name, planned.get(name, {})) for name in names))


def _load_cell(folder: Path, planned: Mapping[str, Any]) -> Cell:
    config, problem, record = planned.get("config", {}), "", None
    try:
        record = RunRecord.load(folder / RECORD_FILE)
        if record.cell_id != folder.name:
            record, problem = None, f"its record is another cell's: {record.cell_id}"
        else:
            config = record.config
    except FileNotFoundError:
        problem = "not run yet"
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        problem = f"its record cannot be read: {error}"
    label = str(planned.get("label") or config.get("method", ""))
    return Cell(cell_id=folder.name, folder=folder, config=config, label=label, record=record, problem=problem)


def report_folder(folder: Path) -> Path:
    """Where what is made of a run's records goes: into its folder. Beside it for a bundle, which holds what its manifest names and nothing
    else: `<bundle>.report`."""
    if not (folder / MANIFEST_FILE).is_file():
        return folder
    whole = folder.resolve()
    return (folder.parent if folder.name else whole.parent) / f"{whole.name}.report"


def tape_path(record: RunRecord, folder: Path) -> Path:
    """Where a cell's tape is: beside its record, or, in a bundle, under its SHA-256 among those of all cells."""
    shared = folder.parent.parent / "tapes" / f"{record.files.get(TAPE_FILE)}.json.gz"
    return shared if shared.is_file() else folder / TAPE_FILE


def find_run_folders(path: Path) -> list[Path]:
    """Folders of runs at or below `path`, sorted. FileNotFoundError when there is no such folder."""
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder")
    return sorted(found.parent for found in path.rglob(RUN_FILE))


def results(path: str | Path = "results") -> pandas.DataFrame:
    """One row a cell of the run, the workflow's folder or the results folder at `path`.

    Bytes and seconds, as in the records. `measured_*` holds what was measured, `predicted_*` what was *simulated*; a missing
    number is NaN and column `missing` says why. A list of numbers is its median, its last value and its length; what is live
    at a peak is a column for each role, and one of JSON for the layers. Cells that have not run, or whose record cannot be
    read, have no outcome and say so in `message`. FileNotFoundError when there is no run below `path`.
    """
    import pandas as pd

    folders = find_run_folders(Path(path))
    if not folders:
        raise FileNotFoundError(f"there is no run below {path}")
    rows = [_row(run, cell) for run in map(load_run, folders) for cell in run.cells]
    table = pd.DataFrame(rows, columns=None if rows else list(IDENTITY_COLUMNS))
    others = [name for name in table.columns if name not in IDENTITY_COLUMNS]
    unfolded = [name for name in others if table[name].isna().all() and any(other.startswith(f"{name}_") for other in others)]
    return table[[*IDENTITY_COLUMNS, *(name for name in others if name not in unfolded)]]


def _row(run: Run, cell: Cell) -> dict[str, Any]:
    config, record = cell.config, cell.record
    row: dict[str, Any] = {name: config.get(name) for name in IDENTITY_COLUMNS}
    row |= {"run": run.folder.resolve().name, "workflow": run.workflow.get("name"), "cell_id": cell.cell_id, "label": cell.label,
            "options": json.dumps(config.get("options", {}), sort_keys=True), "message": cell.problem}
    if record is None:
        return row
    row |= {"outcome": str(record.outcome), "reason": record.reason, "truth": str(record.truth), "message": record.message,
            "budget_bytes": record.budget_bytes, "eager_peak_bytes": record.eager_peak_bytes,
            "eager_peak_is_simulated": record.eager_peak_is_simulated}
    for block in ("measured", "predicted", "search", "training"):
        row |= dict(_flatten(block, getattr(record, block)))
    return row | {"seconds": record.provenance.get("seconds"), "missing": json.dumps(dict(record.missing), sort_keys=True)}


def _flatten(prefix: str, block: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Numbers and words under their joined names; a list of numbers as its median, its last value and its length."""
    for key, value in block.items():
        name = f"{prefix}_{key}"
        if key == "by_layer":  # hundreds of names, other ones for each model
            yield f"{name}_bytes", json.dumps(value, sort_keys=True)
        elif key == "by_role" and isinstance(value, Mapping):
            yield from ((f"{name}_{role}_bytes", nbytes) for role, nbytes in value.items())
        elif isinstance(value, Mapping):
            yield from _flatten(name, value)
        elif not isinstance(value, list):
            yield name, value
        elif value and all(isinstance(item, int | float) for item in value):
            yield from ((f"{name}_median", median(value)), (f"{name}_last", value[-1]), (f"{name}_n", len(value)))
