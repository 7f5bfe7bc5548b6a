"""A bundle's folder as rules read it: each file once, strictly, within limits."""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import Any, Mapping

from vramlab.crowd.canonical import read_strict
from vramlab.crowd.forms import check_schedule_form, check_tape, check_telemetry
from vramlab.crowd.layout import Limits, check_size, files_below, gunzip
from vramlab.errors import BundleRefused
from vramlab.record import RunRecord
from vramlab.run_folder import baseline_id
from vramlab.runs import MANIFEST_FILE, RECORD_FILE, RUN_FILE, SCHEDULE_FILE, TELEMETRY_FILE, Cell, Run
from vramlab.schedule import Schedule
from vramlab.tape import Tape
from vramlab.telemetry import Telemetry, parse_telemetry

# What reading a body that is of the schema only in part may raise. BundleRefused is none of them.
_OF_A_STRANGER = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)


KEPT_TELEMETRY_BYTES = 2**24  # of text: seven rules ask for it, and in Python's numbers it is some ten times as much


def tape_name(sha256: str) -> str:
    """Where a bundle keeps a tape."""
    return f"tapes/{sha256}.json.gz"


class Contents:
    """Everything is read when it is asked for; what cannot be read raises BundleRefused by its rule."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder, self.limits = folder, limits
        self._unpacked: dict[str, int] = {}  # name -> bytes of the .gz files that were read
        self._tapes: dict[str, Tape] = {}
        self._schedules: dict[str, Schedule] = {}
        self._telemetry: dict[str, Telemetry] = {}

    @cached_property
    def files(self) -> Mapping[str, int]:
        """Name -> bytes of all files."""
        return files_below(self.folder, self.limits)

    def read(self, name: str) -> bytes:
        """A file's bytes; no link is followed. BundleRefused (missing-file) where there is none."""
        if name not in self.files:
            raise BundleRefused("missing-file", name, "is not there")
        handle = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(handle, "rb") as f:
            data = f.read(self.limits.file_bytes + 1)
        check_size(name, len(data), self.limits)
        return data

    def sha256(self, name: str) -> str:
        """Of a file's bytes."""
        return hashlib.sha256(self.read(name)).hexdigest()

    def unpacked(self, name: str, *, may_be_cut: bool = False) -> bytes:
        """The content of a .gz file. BundleRefused (zip-bomb) where all that were read are too much together."""
        data = gunzip(self.read(name), name, self.limits, may_be_cut=may_be_cut)
        self._unpacked[name] = len(data)
        if sum(self._unpacked.values()) > self.limits.all_unpacked_bytes:
            raise BundleRefused("zip-bomb", name, f"all that is packed unpacks to more than {self.limits.all_unpacked_bytes:,} bytes")
        return data

    def json(self, name: str) -> Any:
        """A .json file's value."""
        return read_strict(self.read(name), name)

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        """manifest.json as an object."""
        if MANIFEST_FILE not in self.files:
            raise BundleRefused("manifest-missing", MANIFEST_FILE, "there is no manifest: this is no bundle")
        body = self.json(MANIFEST_FILE)
        if not isinstance(body, dict):
            raise BundleRefused("manifest", MANIFEST_FILE, "is no JSON object")
        return body

    @property
    def bundle(self) -> str | None:
        """The name that the manifest states; None where it states none."""
        try:
            name = self.manifest.get("bundle")
        except (BundleRefused, OSError):
            return None
        return name if isinstance(name, str) and len(name) <= 64 else None

    def tape(self, sha256: str) -> Tape:
        """tapes/<sha256>.json.gz. BundleRefused (tape) where it is none."""
        if sha256 not in self._tapes:
            name = tape_name(sha256)
            body = read_strict(self.unpacked(name), name, most_bytes=self.limits.unpacked_bytes)
            try:
                check_tape(body)
                self._tapes[sha256] = Tape.from_json(body)
            except _OF_A_STRANGER as error:
                raise BundleRefused("tape", name, f"is no tape: {type(error).__name__}: {str(error)[:200]}") from None
        return self._tapes[sha256]

    def schedule(self, cell_id: str) -> Schedule:
        """A cell's schedule. BundleRefused (schedule) where it is none."""
        if cell_id not in self._schedules:
            self._schedules[cell_id] = self._schedule(f"cells/{cell_id}/{SCHEDULE_FILE}")
        return self._schedules[cell_id]

    def _schedule(self, name: str) -> Schedule:
        body = read_strict(self.unpacked(name), name, most_bytes=self.limits.unpacked_bytes)
        try:
            check_schedule_form(body)
            return Schedule.from_json(body)
        except _OF_A_STRANGER as error:
            raise BundleRefused("schedule", name, f"is no schedule: {type(error).__name__}: {str(error)[:200]}") from None

    def telemetry(self, cell_id: str) -> Telemetry:
        """A cell's telemetry, which may be cut off. BundleRefused (telemetry) where it is none."""
        if cell_id in self._telemetry:
            return self._telemetry[cell_id]
        name = f"cells/{cell_id}/{TELEMETRY_FILE}"
        found = self._read_telemetry(name)
        if sum(self._unpacked[f"cells/{cell}/{TELEMETRY_FILE}"] for cell in (*self._telemetry, cell_id)) <= KEPT_TELEMETRY_BYTES:
            self._telemetry[cell_id] = found
        return found

    def _read_telemetry(self, name: str) -> Telemetry:
        text = self.unpacked(name, may_be_cut=True)
        try:
            found = parse_telemetry(text[:text.rfind(b"\n") + 1], name)
            for line in (x for x in text.splitlines() if x.startswith(b"# {") and x.endswith(b"}")):
                read_strict(line[2:], name)
            check_telemetry(found)
            return found
        except _OF_A_STRANGER as error:
            raise BundleRefused("telemetry", name, f"is no telemetry: {type(error).__name__}: {str(error)[:200]}") from None

    def baseline(self, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Eager's own figures that a cell of this config compares with; None where the bundle has none."""
        name = f"baselines/{baseline_id(config)}.json"
        return self.json(name) if name in self.files else None

    @cached_property
    def run(self) -> Run:
        """The run with its records. Only after the rules of form."""
        plan = self.json(RUN_FILE)
        planned = {cell["cell_id"]: cell for cell in plan["cells"]}
        names = [*planned, *sorted(set(self._cell_ids) - set(planned))]
        return Run(self.folder, plan, tuple(self._cell(name, planned.get(name, {})) for name in names))

    @cached_property
    def records(self) -> Mapping[str, RunRecord]:
        """Name of the file -> record. Only after the rules of form."""
        return {f"cells/{cell.cell_id}/{RECORD_FILE}": cell.record for cell in self.run.cells if cell.record}

    @property
    def record_files(self) -> list[str]:
        """Names of all record.json."""
        return [name for name in sorted(self.files) if name.endswith(f"/{RECORD_FILE}")]

    @property
    def _cell_ids(self) -> list[str]:
        return [name.split("/")[1] for name in self.record_files]

    def _cell(self, cell_id: str, planned: Mapping[str, Any]) -> Cell:
        name = f"cells/{cell_id}/{RECORD_FILE}"
        record = RunRecord.from_json(self.json(name)) if name in self.files else None
        config = record.config if record else planned.get("config", {})
        return Cell(cell_id=cell_id, folder=self.folder / "cells" / cell_id, config=config, record=record,
                    label=str(planned.get("label") or config.get("method", "")), problem="" if record else "not run yet")
