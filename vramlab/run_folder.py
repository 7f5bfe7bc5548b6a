"""Runs on disk: results/<workflow>/<run>/{run.json, cells/<cell_id>/{spec.json, record.json, stdout.log, ...}, report.html}."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Iterator, Mapping

from vramlab.errors import WorkflowError
from vramlab.record import Outcome, RunRecord, hash_config, write_atomically
from vramlab.yaml_nodes import offer, one_of

SCHEMA = 1
RESULTS = Path("results")
_KEYS = {"cells": list, "overrides": list, "started": str}
# Ends that say nothing about the method: the same command runs these cells again.
UNFINISHED = frozenset({Outcome.CRASHED, Outcome.INTERRUPTED, Outcome.TIMEOUT})


@dataclass(frozen=True)
class RunFolder:
    """One run's folder."""

    folder: Path

    @cached_property
    def plan(self) -> Mapping[str, Any]:
        """run.json: workflow, overrides, claims, cells, left_out, environment, started. WorkflowError when it cannot be read."""
        path = self.folder / "run.json"
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise WorkflowError(f"{path} cannot be read: {error}") from None
        if not isinstance(body, dict) or body.get("schema") != SCHEMA:
            raise WorkflowError(f"{path} is not of schema {SCHEMA}, which this vramlab reads")
        missing = [key for key, kind in _KEYS.items() if not isinstance(body.get(key), kind)]
        missing += [] if isinstance(body.get("workflow", {}), dict) else ["workflow"]
        missing += [] if "cells" in missing or all(map(_is_cell, body["cells"])) else ["cells"]
        if missing:
            raise WorkflowError(f"{path} is not whole: {one_of(missing)} is missing or of another kind")
        return body

    @property
    def name(self) -> str:
        """`<workflow>/<run>`, as `list runs` prints it."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    def cell_folder(self, cell_id: str) -> Path:
        """Where a cell's files are."""
        return self.folder / "cells" / cell_id

    def record(self, cell_id: str) -> RunRecord | None:
        """A cell's record; None when there is none or it is not whole."""
        return read_record(self.cell_folder(cell_id), cell_id)

    def records(self) -> dict[str, RunRecord]:
        """Records of the planned cells that have one, in the plan's order."""
        found = {cell["cell_id"]: self.record(cell["cell_id"]) for cell in self.plan["cells"]}
        return {cell_id: record for cell_id, record in found.items() if record is not None}

    def write_plan(self, body: Mapping[str, Any]) -> None:
        """Write run.json whole or not at all; the first start's date stays."""
        text = json.dumps({"schema": SCHEMA, "started": self._first_start(), **body}, indent=1, sort_keys=True, allow_nan=False)
        write_atomically(self.folder / "run.json", text + "\n")

    def _first_start(self) -> str:
        try:
            return RunFolder(self.folder).plan["started"]
        except WorkflowError:  # there is none, it was cut short or is of another schema: no kept cell began before its run
            records = (read_record(path.parent, path.parent.name) for path in self.folder.glob("cells/*/record.json"))
            return min([now(), *(str(r.provenance["started"]) for r in records if r and r.provenance.get("started"))])


def _is_cell(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("cell_id"), str) and isinstance(entry.get("config", {}), dict)


def read_record(cell_folder: Path, cell_id: str) -> RunRecord | None:
    """The record in a cell's folder; None when there is none, it is not whole, or it is another cell's."""
    try:
        record = RunRecord.load(cell_folder / "record.json")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return record if record.cell_id == cell_id else None


# What a baseline does not depend on: it is eager's, whatever method is compared with it.
_NOT_OF_A_BASELINE = ("method", "options", "budget", "experiment", "kind", "search")


def baseline_id(config: Mapping[str, Any]) -> str:
    """Names the file baselines/<id>.json of a run: eager's own peak and step times, for all cells that compare with them."""
    kept = {key: value for key, value in config.items() if key not in _NOT_OF_A_BASELINE}
    kept["sources"] = {key: value for key, value in config["sources"].items() if key not in ("method", "files")}
    return hash_config(kept)


def is_done(record: RunRecord | None) -> bool:
    """True when the same command keeps this record."""
    return record is not None and record.outcome not in UNFINISHED


def now() -> str:
    """UTC, RFC 3339, whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def find_runs(results: Path = RESULTS, workflow: str = "*") -> list[RunFolder]:
    """Every run below a results folder, of one workflow or of all, the last started last."""
    runs = [RunFolder(path.parent) for path in results.glob(f"{workflow}/*/run.json")]
    return sorted((run for run in runs if _is_readable(run)), key=lambda run: (run.plan["started"], run.name))


def unreadable_runs(results: Path = RESULTS) -> list[tuple[RunFolder, str]]:
    """Runs whose run.json cannot be read, each with the reason."""
    runs = [RunFolder(path.parent) for path in sorted(results.glob("*/*/run.json"))]
    return [(run, why) for run in runs if (why := _why_unreadable(run))]


def _is_readable(run: RunFolder) -> bool:
    return not _why_unreadable(run)


def _why_unreadable(run: RunFolder) -> str:
    try:
        return "" if run.plan else "it is empty"
    except WorkflowError as error:
        return str(error)


def resolve_run(text: str, results: Path = RESULTS) -> RunFolder:
    """A run by its folder, `<workflow>/<run>`, a unique start of either, or a workflow's name (its last run)."""
    if (Path(text) / "run.json").is_file():
        return RunFolder(Path(text))
    runs = find_runs(results)
    hits = [run for run in runs if (run.name if "/" in text else run.folder.name).startswith(text)]
    if not hits:
        hits = [run for run in runs if run.folder.parent.name == text][-1:]
    if len(hits) == 1:
        return hits[0]
    if hits:
        raise WorkflowError(f"{text!r} is the start of several runs: {one_of(run.name for run in hits)}; write more of it")
    known = [run.name for run in reversed(runs)]  # the last first
    workflows = {run.folder.parent.name for run in runs}
    raise WorkflowError(f"there is no run {text!r} in {results}/{offer(text, known, 'there are', '`list runs`', workflows)}")


def seconds_of_cells(workflow_folder: Path) -> Iterator[tuple[str, float]]:
    """(cell_id, seconds) of every cell that was ever run below results/<workflow>/: what the same cell will take."""
    for run in find_runs(workflow_folder.parent, workflow_folder.name):
        for cell_id, record in run.records().items():
            seconds = record.provenance.get("seconds")
            if isinstance(seconds, int | float):
                yield cell_id, float(seconds)
