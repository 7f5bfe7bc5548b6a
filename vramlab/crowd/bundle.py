"""A run as a bundle that can be given away: records, schedules, tapes and telemetry, scrubbed, signed, with a manifest of hashes.

    <to>/<workflow>/<bundle>/manifest.json                 every file with its bytes and SHA-256; what was scrubbed; the signature
    <to>/<workflow>/<bundle>/run.json                      the resolved workflow, environment, plan of cells
    <to>/<workflow>/<bundle>/claims.json                   the verdict on each claim of the workflow, with the cells that it rests on
    <to>/<workflow>/<bundle>/cells/<cell_id>/...           record.json, schedule.json.gz, telemetry.csv.gz
    <to>/<workflow>/<bundle>/tapes/<sha256>.json.gz        each captured step once
    <to>/<workflow>/<bundle>/baselines/<id>.json           eager's peak and step times, which several cells compare with

`<bundle>` is a hash of the content: the same run again is the same bundle, and nothing is written twice. Works offline; the
folder may be a git repository of results.
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
from typing import Any, Callable, Mapping

from vramlab import __version__
from vramlab.crowd.canonical import to_canonical
from vramlab.crowd.findings import Report
from vramlab.crowd.layout import CLAIMS_FILE
from vramlab.crowd.manifest import FORMAT_VERSION, bundle_name, describe, signed
from vramlab.crowd.scrub import Names, scrub, scrub_text
from vramlab.crowd.signing import SigningKey, own_key
from vramlab.crowd.verdicts import verdicts
from vramlab.errors import SubmissionRefused
from vramlab.record import RunRecord, hash_config
from vramlab.run_folder import baseline_id
from vramlab.runs import MANIFEST_FILE, RECORD_FILE, RUN_FILE, SCHEDULE_FILE, TAPE_FILE, TELEMETRY_FILE, Cell, Run, load_run

LONGEST_FOLDER_BYTES = 200  # of 255, which file systems take
COPIED_FILES = (SCHEDULE_FILE, TELEMETRY_FILE)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A bundle that lies nowhere yet."""

    workflow: str
    name: str
    contents: Mapping[str, bytes]  # path in the bundle -> bytes, the manifest included
    scrubbed: Mapping[str, list[str]]  # file -> dotted fields that were changed

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(map(len, self.contents.values()))

    def place(self, to: Path) -> Path:
        """Its folder below a collection."""
        return Path(to) / plain_name(self.workflow) / self.name

    def write(self, to: Path, examine: Callable[[Path], Report] | None = None) -> bool:
        """Write it below the folder `to`, whole or not at all; False where it is there already.

        `examine` is asked of the folder before anybody can see it. SubmissionRefused with what it finds, or where a folder of that name
        holds something else.
        """
        target = self.place(to)
        if not target.exists():
            _write(target, self.contents, examine)
            return True
        if changed := [name for name, data in self.contents.items() if not _is_there(target / name, data)]:
            raise SubmissionRefused((f"{target} is there and {', '.join(changed[:5])} in it differ from this run",))
        return False


def pack_run(run_dir: str | Path, *, key: SigningKey | None = None, supersedes: str | None = None) -> Packed:
    """A run's bundle, signed with the user's own key unless another is given.

    SubmissionRefused (exit code 4) names every record that is half, whose config does not hash to its cell_id, or whose files
    have changed. Cells that have not run are left out, and the manifest says that the run is not complete. `supersedes`: an earlier bundle
    of the same submitter, which this one takes the place of.
    """
    run = load_run(Path(run_dir))
    if problems := find_problems(run):
        raise SubmissionRefused(tuple(problems))
    contents, scrubbed = gather(run, Names.here())
    bundled = _run_in(contents)
    contents[CLAIMS_FILE] = _to_bytes(verdicts(bundled))
    manifest = make_manifest(bundled, contents, scrubbed, key or own_key(), supersedes)
    contents[MANIFEST_FILE] = to_canonical(manifest)
    return Packed(workflow=manifest["workflow"], name=manifest["bundle"], contents=contents, scrubbed=scrubbed)


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
    new_configs = {cell.cell_id: scrub(dict(cell.record.config), names, "config")[0] for cell in run.cells if cell.record}
    new_ids = {cell_id: hash_config(config) for cell_id, config in new_configs.items()}
    for cell in run.cells:
        if cell.record:
            _add_cell(cell, new_ids[cell.cell_id], names, contents, scrubbed)
            _add_baseline(run, cell.record, new_configs[cell.cell_id], contents)
    plan, changed = scrub(dict(run.plan), names)
    plan["cells"] = [c | {"cell_id": new_ids.get(c["cell_id"], hash_config(c["config"]))} for c in plan.get("cells", ())]
    _put(RUN_FILE, plan, changed, contents, scrubbed)
    return contents, scrubbed


def _add_cell(cell: Cell, cell_id: str, names: Names, contents: dict[str, bytes], scrubbed: dict[str, list[str]]) -> None:
    """A cell's files; its cell_id is the hash of what stands in the bundle, where paths have left the config."""
    body, changed = scrub(cell.record.to_json(), names)
    _put(f"cells/{cell_id}/{RECORD_FILE}", body | {"cell_id": cell_id}, changed, contents, scrubbed)
    for name in (n for n in COPIED_FILES if n in cell.record.files):  # what a cut-off cell left beside its record is nobody's
        contents[f"cells/{cell_id}/{name}"] = _read_packed(cell.folder / name, names)
    if TAPE_FILE in cell.record.files:
        data = _read_packed(cell.folder / TAPE_FILE, names)
        contents[f"tapes/{hashlib.sha256(data).hexdigest()}.json.gz"] = data


def _add_baseline(run: Run, record: RunRecord, config: Mapping[str, Any], contents: dict[str, bytes]) -> None:
    """Eager's own figures, which the cell compares with, under the id that the scrubbed config gives."""
    path = run.folder / "baselines" / f"{baseline_id(record.config)}.json"
    if path.is_file():
        contents[f"baselines/{baseline_id(config)}.json"] = _to_bytes(json.loads(path.read_text()))


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


def _run_in(contents: Mapping[str, bytes]) -> Run:
    """The run as it will lie in the bundle."""
    plan = json.loads(contents[RUN_FILE])
    planned = {cell["cell_id"]: cell for cell in plan.get("cells", ())}
    on_disk = sorted(name.split("/")[1] for name in contents if name.endswith(f"/{RECORD_FILE}"))
    cells = []
    for cell_id in [*planned, *(name for name in on_disk if name not in planned)]:
        data, entry = contents.get(f"cells/{cell_id}/{RECORD_FILE}"), planned.get(cell_id, {})
        record = RunRecord.from_json(json.loads(data)) if data else None
        config = record.config if record else entry.get("config", {})
        cells.append(Cell(cell_id=cell_id, folder=Path("cells") / cell_id, config=config, record=record,
                          label=str(entry.get("label") or config.get("method", ""))))
    return Run(Path(), plan, tuple(cells))


def make_manifest(run: Run, contents: Mapping[str, bytes], scrubbed: Mapping[str, list[str]], key: SigningKey,
                  supersedes: str | None = None) -> dict[str, Any]:
    """The manifest without a date: the same run and key give the same bytes."""
    files = [{"path": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in sorted(contents.items())]
    body = describe(run) | {"format": FORMAT_VERSION, "bundle": bundle_name(files), "vramlab": __version__, "files": files,
                            "scrubbed": dict(scrubbed), "supersedes": supersedes}
    return signed(body, key)


def _write(target: Path, contents: Mapping[str, bytes], examine: Callable[[Path], Report] | None) -> None:
    """All files in a hidden folder beside the target, examined there, then one rename: a reader sees the whole bundle or none."""
    room = target.parent / f".{target.name}.{os.getpid()}.part"
    part = room / target.name  # a bundle's folder has its name, for who examines it too
    try:
        for name, data in contents.items():
            path = part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
        report = examine(part) if examine else None
        if report and not report.is_accepted:
            raise SubmissionRefused(tuple(f"{f.where or 'the bundle'}: [{f.rule}] {f.message}" for f in report.errors))
        os.rename(part, target)
    except OSError:
        if not target.exists():  # else another process wrote the same bundle first
            raise
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _has_hash(path: Path, sha256: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def _is_there(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data


def _to_bytes(body: Any) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def plain_name(name: str) -> str:
    """A name that is one folder and no other, and that every file system can hold."""
    clean = "".join(c if c.isalnum() or c in "-_." else "_" for c in name).strip(".")
    if len(clean.encode()) > LONGEST_FOLDER_BYTES:
        begin = clean.encode()[:LONGEST_FOLDER_BYTES - 17].decode(errors="ignore")
        clean = f"{begin}-{hashlib.sha256(clean.encode()).hexdigest()[:16]}"
    return clean or "unnamed"
