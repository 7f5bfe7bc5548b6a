"""A run as a bundle that can be given away: records, schedules, tapes and telemetry, scrubbed, with a manifest of hashes.

    <to>/<workflow>/<bundle>/manifest.json                 every file with its bytes and SHA-256; what was scrubbed
    <to>/<workflow>/<bundle>/run.json                      the resolved workflow, environment, plan of cells
    <to>/<workflow>/<bundle>/cells/<cell_id>/...           record.json, schedule.json.gz, telemetry.csv.gz
    <to>/<workflow>/<bundle>/tapes/<sha256>.json.gz        each captured step once

`<bundle>` is a hash of the content: the same run again is the same bundle, and nothing is written twice. Works offline; the
folder may be a git repository.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from vramlab import __version__
from vramlab.crowd.scrub import Names, scrub, scrub_text
from vramlab.errors import SubmissionRefused
from vramlab.record import hash_config
from vramlab.runs import RECORD_FILE, RUN_FILE, SCHEDULE_FILE, TAPE_FILE, TELEMETRY_FILE, Cell, Run, load_run

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
COPIED_FILES = (SCHEDULE_FILE, TELEMETRY_FILE)


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """Where a bundle lies and what it holds."""

    path: Path
    files: int
    nbytes: int
    is_new: bool  # False when it was there already
    scrubbed: Mapping[str, list[str]]  # file -> dotted fields that were changed


def submit_to_directory(run_dir: str | Path, to: str | Path) -> Submitted:
    """Write a run's bundle below the folder `to`, whole or not at all.

    SubmissionRefused (exit code 4) names every record that is half, whose config does not hash to its cell_id, or whose files
    have changed. Cells that have not run are left out, and the manifest says that the run is not complete.
    """
    run = load_run(Path(run_dir))
    if problems := find_problems(run):
        raise SubmissionRefused(tuple(problems))
    contents, scrubbed = gather(run, Names.here())
    manifest = make_manifest(run, contents, scrubbed)
    target = Path(to) / _plain_name(str(run.workflow.get("name") or "unnamed")) / manifest["bundle"]
    contents[MANIFEST_FILE] = _to_bytes(manifest)
    is_new = not target.exists()
    if is_new:
        _write(target, contents)
    elif changed := [name for name, data in contents.items() if not _is_there(target / name, data)]:
        raise SubmissionRefused((f"{target} is there and {', '.join(changed[:5])} in it differ from this run",))
    return Submitted(path=target, files=len(contents), nbytes=sum(map(len, contents.values())), is_new=is_new, scrubbed=scrubbed)


def find_problems(run: Run) -> list[str]:
    """Why a run may not be given away, one sentence each; empty when it may."""
    problems = [problem for cell in run.cells for problem in _cell_problems(cell)]
    if not run.records and not problems:
        problems.append("no cell has run")
    return problems


def _cell_problems(cell: Cell) -> list[str]:
    record, path = cell.record, cell.folder / RECORD_FILE
    if record is None:
        return [f"cell {cell.cell_id}: {cell.problem}"] if path.exists() else []
    if hash_config(record.config) != record.cell_id or cell.folder.name != record.cell_id:
        return [f"cell {cell.cell_id}: its config hashes to {hash_config(record.config)}, not to its cell_id {record.cell_id}"]
    return [f"cell {cell.cell_id}: {name} is missing or has changed since the record was written"
            for name, sha256 in record.files.items() if not _has_hash(cell.folder / name, sha256)]


def gather(run: Run, names: Names) -> tuple[dict[str, bytes], dict[str, list[str]]]:
    """(path in the bundle -> bytes, path -> fields that were scrubbed)."""
    contents: dict[str, bytes] = {}
    scrubbed: dict[str, list[str]] = {}
    new_ids = {cell.cell_id: _scrubbed_id(cell, names) for cell in run.cells if cell.record}
    for cell in run.cells:
        if cell.record:
            _add_cell(cell, new_ids[cell.cell_id], names, contents, scrubbed)
    plan, changed = scrub(dict(run.plan), names)
    plan["cells"] = [c | {"cell_id": new_ids.get(c["cell_id"], hash_config(c["config"]))} for c in plan.get("cells", ())]
    _put(RUN_FILE, plan, changed, contents, scrubbed)
    return contents, scrubbed


def _scrubbed_id(cell: Cell, names: Names) -> str:
    """The cell_id once paths have left the config: a bundle's cell_id is the hash of what stands in the bundle."""
    return hash_config(scrub(dict(cell.record.config), names, "config")[0])


def _add_cell(cell: Cell, cell_id: str, names: Names, contents: dict[str, bytes], scrubbed: dict[str, list[str]]) -> None:
    body, changed = scrub(cell.record.to_json(), names)
    _put(f"cells/{cell_id}/{RECORD_FILE}", body | {"cell_id": cell_id}, changed, contents, scrubbed)
    for name in COPIED_FILES:
        if (path := cell.folder / name).is_file():
            contents[f"cells/{cell_id}/{name}"] = _read_packed(path, names)
    if (path := cell.folder / TAPE_FILE).is_file():
        data = _read_packed(path, names)
        contents[f"tapes/{hashlib.sha256(data).hexdigest()}.json.gz"] = data


def _put(name: str, body: Any, changed: list[str], contents: dict[str, bytes], scrubbed: dict[str, list[str]]) -> None:
    contents[name] = _to_bytes(body)
    if changed:
        scrubbed[name] = changed


def _read_packed(path: Path, names: Names) -> bytes:
    """A packed file as it is: its hash stands in the record. SubmissionRefused when its text would give somebody away."""
    data = path.read_bytes()
    try:
        text = gzip.decompress(data).decode()
    except EOFError:  # telemetry of a sampler that was killed: what there is
        text = zlib.decompressobj(wbits=31).decompress(data).decode(errors="ignore")
    except (OSError, zlib.error, UnicodeDecodeError) as error:
        raise SubmissionRefused((f"{path.parent.name}/{path.name} cannot be read: {error}",)) from error
    if scrub_text(text, names) != text:
        raise SubmissionRefused((f"{path.parent.name}/{path.name} names a path, a host, a user or a GPU's UUID",))
    return data


def make_manifest(run: Run, contents: Mapping[str, bytes], scrubbed: Mapping[str, list[str]]) -> dict[str, Any]:
    """The manifest without a date: the same run gives the same bytes."""
    files = [{"path": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in sorted(contents.items())]
    return {
        "format": FORMAT_VERSION, "bundle": hashlib.sha256(_to_bytes(files)).hexdigest()[:16], "vramlab": __version__,
        "workflow": run.workflow.get("name"), "run_id": run.plan.get("run_id"), "is_complete": all(cell.record for cell in run.cells),
        "cells": sum(cell.record is not None for cell in run.cells), "planned_cells": len(run.cells), "files": files,
        "scrubbed": dict(scrubbed),
    }


def _write(target: Path, contents: Mapping[str, bytes]) -> None:
    """All files in a folder beside the target, then one rename: a reader sees the whole bundle or none."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        for name, data in contents.items():
            path = part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
        os.rename(part, target)
    except OSError:
        if not target.exists():  # else another process wrote the same bundle first
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_bundle(path: Path) -> list[str]:
    """What is wrong with a bundle on disk: files that are missing, changed or not named by its manifest; empty when whole."""
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
        named = {entry["path"]: entry["sha256"] for entry in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{MANIFEST_FILE} cannot be read: {error}"]
    there = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()} - {MANIFEST_FILE}
    faults = [f"{name} is missing or changed" for name, sha256 in named.items() if not _has_hash(path / name, sha256)]
    return faults + [f"{name} is not named by the manifest" for name in sorted(there - set(named))]


def _has_hash(path: Path, sha256: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def _is_there(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data


def _to_bytes(body: Any) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _plain_name(name: str) -> str:
    """A name that is one folder and no other."""
    clean = "".join(c if c.isalnum() or c in "-_." else "_" for c in name).strip(".")
    return clean or "unnamed"
