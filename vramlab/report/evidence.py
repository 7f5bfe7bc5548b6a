"""What a run gives as evidence: its records, telemetry, environment, claims, and the files of the checkout it came from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Iterator, Mapping

from vramlab.record import Outcome, RunRecord
from vramlab.report.claims import ClaimResult
from vramlab.report.points import comparison_key
from vramlab.report.words import counts, is_simulated
from vramlab.runs import Run
from vramlab.telemetry import Telemetry

RUN_LINK = "run.json"
MADE_FROM_RECORDS = ("report.html", "report.pdf", "report.tex", "appendix.tex", "cells.csv", "cells.csv-metadata.json",
                     "ro-crate-metadata.json")


@dataclass(frozen=True, kw_only=True)
class Paper:
    """What a method or a model is cited as; None fields are not known."""

    name: str
    title: str | None
    venue: str | None
    year: int | None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything that rules may look at. `root` is the collection's folder with README, LICENSE, lock file and appendix."""

    run: Run
    claims: tuple[ClaimResult, ...]
    telemetry: Mapping[str, Telemetry]
    telemetry_missing: Mapping[str, str]
    root: Path
    papers: tuple[Paper, ...] = ()

    @property
    def records(self) -> tuple[RunRecord, ...]:
        """All records of the run."""
        return self.run.records

    @cached_property
    def environments(self) -> list[Mapping[str, Any]]:
        """The distinct environments of the records; the run's own where none has one."""
        found = {repr(_identity(r.environment)): r.environment for r in self.records if r.environment}
        return list(found.values()) or ([self.run.environment] if self.run.environment else [])

    @cached_property
    def measured(self) -> list[RunRecord]:
        """Training steps whose measured numbers count."""
        return [r for r in self.records if r.kind == "step" and not is_simulated(r) and counts(r)]

    @cached_property
    def timed(self) -> list[RunRecord]:
        """Those of them that the workflow asked to time."""
        return [r for r in self.measured if r.config.get("measure", {}).get("time", True)]

    def values(self, key: str) -> list[str]:
        """Distinct values of a key of the config, in order of the plan."""
        return [str(v) for v in dict.fromkeys(str(cell.config.get(key)) for cell in self.run.cells if cell.config.get(key) is not None)]

    @cached_property
    def seeds(self) -> list[int]:
        """Distinct seeds."""
        return sorted({c.config["training"]["seed"] for c in self.run.cells if "seed" in c.config.get("training", {})})

    @property
    def seconds(self) -> float | None:
        """Wall time of all cells, None when one does not tell."""
        spent = [r.provenance.get("seconds") for r in self.records]
        return sum(spent) if spent and None not in spent else None

    def link(self, record: RunRecord) -> str:
        """Where a record lies."""
        return f"cells/{record.cell_id}/record.json"

    def comparisons(self) -> Iterator[list[RunRecord]]:
        """Step records that are compared with each other: same experiment, model, batch and target."""
        groups: dict[tuple[Any, ...], list[RunRecord]] = {}
        for record in self.records:
            if record.kind == "step":
                key = tuple(str(record.config.get(k)) for k in ("experiment", "model", "batch_size", "target"))
                groups.setdefault(key, []).append(record)
        yield from groups.values()

    def unequal_settings(self) -> dict[str, list[str]]:
        """Settings outside the method that differ inside a comparison: key -> the values."""
        differing: dict[str, list[str]] = {}
        for group in self.comparisons():
            if len({comparison_key(r) for r in group}) > 1:
                for key in {k for r in group for k in r.config} - {"method", "options", "budget", "sources"}:
                    values = sorted({str(r.config.get(key)) for r in group})
                    if len(values) > 1:
                        differing[key] = values
            parts = [_identity(r.environment) for r in group if r.environment]
            for name in parts[0] if parts else ():
                if len({repr(found[name]) for found in parts}) > 1:
                    differing[name] = [f"{len({repr(found[name]) for found in parts})} different ones"]
        return differing

    @cached_property
    def broken_files(self) -> tuple[int, list[str]]:
        """(how many files records name, those that are missing or have another hash)."""
        named, faults = 0, []
        for cell in self.run.cells:
            for name, sha256 in (cell.record.files if cell.record else {}).items():
                named += 1
                path = cell.folder / name
                if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
                    faults.append(f"cells/{cell.cell_id}/{name}")
        return named, faults

    def has(self, name: str) -> bool:
        """Whether a file lies in the collection's folder."""
        return (self.root / name).is_file()

    def text(self, name: str) -> str:
        """Text of a file of the collection's folder, "" when there is none."""
        return (self.root / name).read_text(encoding="utf-8") if self.has(name) else ""

    @cached_property
    def files(self) -> list[Path]:
        """Files of the run, those left out that are made from its records: the report says the same before and after."""
        made = {self.run.folder / name for name in MADE_FROM_RECORDS}
        return sorted(p for p in self.run.folder.rglob("*") if p.is_file() and p not in made and not p.name.startswith("."))

    def unexplained_nulls(self) -> list[str]:
        """Numbers of measured blocks that are null without a reason. Without a budget there is nothing to be over."""
        def is_answer(record: RunRecord, key: str) -> bool:
            return key == "over_budget_bytes" and record.budget_bytes is None

        return [f"{self.link(r)}: measured.{key}" for r in self.records for key, value in r.measured.items()
                if value is None and not (r.missing.get(f"measured.{key}") or r.missing.get("measured") or is_answer(r, key))]

    def unexpected(self) -> list[RunRecord]:
        """Records that ended in a way that says nothing about the method."""
        return [r for r in self.records if r.outcome in (Outcome.CRASHED, Outcome.TIMEOUT, Outcome.INTERRUPTED, Outcome.WRONG)]


def _identity(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be equal for two cells to have run under the same conditions."""
    software, git = environment.get("software", {}), environment.get("git") or {}
    return {
        "installed packages": (software.get("installed_sha256"), software.get("python")),
        "machine": (environment.get("system", {}).get("host_hash"), environment.get("cpu", {}).get("model"),
                    [gpu.get("name") for gpu in environment.get("gpus", ())]),
        "commit": git.get("commit"),
        "uncommitted changes": git.get("changes_sha256"),
    }
