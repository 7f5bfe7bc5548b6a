"""Third round, first part: what names what. Hashes, and that everything in the bundle belongs to a cell."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from vramlab.crowd.contents import tape_name
from vramlab.crowd.manifest import describe
from vramlab.crowd.rules.asking import Examination, Fault, Round, rule
from vramlab.record import hash_config
from vramlab.run_folder import baseline_id
from vramlab.runs import MANIFEST_FILE, RUN_FILE, SCHEDULE_FILE, TAPE_FILE, TELEMETRY_FILE

FEWEST_SAMPLES = 3  # of which a clock of nanoseconds does not give the same twice


@rule(Round.DERIVATION, "config-hash", "a cell_id is the hash of its config, in the record, in the plan and as a folder's name")
def _config_hash(e: Examination) -> Iterator[Fault]:
    planned = {}
    for index, cell in enumerate(e.contents.run.plan["cells"]):
        e.count()
        if hash_config(cell["config"]) != cell["cell_id"]:
            yield f"{RUN_FILE}:cells.{index}.cell_id", f"the config hashes to {hash_config(cell['config'])}, not to {cell['cell_id']}"
        if cell["cell_id"] in planned:
            yield f"{RUN_FILE}:cells.{index}", f"cell {cell['cell_id']} is planned twice"
        planned[cell["cell_id"]] = cell["config"]
    for name, record in e.contents.records.items():
        e.count()
        folder = name.split("/")[1]
        if not hash_config(record.config) == record.cell_id == folder:
            yield f"{name}:config", f"it hashes to {hash_config(record.config)}; cell_id is {record.cell_id}, the folder {folder}"
        if record.cell_id not in planned:
            yield name, f"{RUN_FILE} plans no such cell"


@rule(Round.DERIVATION, "one-run", "records are of the run's workflow, and of the kind and the method's source that their config names")
def _one_run(e: Examination) -> Iterator[Fault]:
    workflow = e.contents.run.workflow
    for name, record in e.contents.records.items():
        e.count()
        for key in ("name", "title", "label", "path", "sha256"):
            if (value := record.workflow.get(key)) != workflow.get(key):
                yield f"{name}:workflow.{key}", f"{value!r}; the run's is {workflow.get(key)!r}"
        if record.kind != record.config["kind"]:
            yield f"{name}:kind", f"{record.kind}; the config says {record.config['kind']}"
        stated = record.provenance["method_source_sha256"]
        if stated != record.config["sources"]["method"]:
            yield f"{name}:provenance.method_source_sha256", "is not that of the config"
        if record.provenance["vramlab"] != record.config["sources"]["harness"]:
            yield f"{name}:provenance.vramlab", f"{record.provenance['vramlab']}; the config says {record.config['sources']['harness']}"


@rule(Round.DERIVATION, "manifest-describes", "the manifest says of the run what the run says of itself")
def _manifest_describes(e: Examination) -> Iterator[Fault]:
    for key, value in describe(e.contents.run).items():
        e.count()
        if e.contents.manifest[key] != value:
            yield f"{MANIFEST_FILE}:{key}", f"{str(e.contents.manifest[key])[:80]}; the run has {str(value)[:80]}"
    for name in e.contents.manifest["scrubbed"]:
        if name not in e.contents.files:
            yield f"{MANIFEST_FILE}:scrubbed", f"names {name}, which is not there"


@rule(Round.DERIVATION, "record-files", "a record names its tape, schedule and telemetry by SHA-256, and nothing belongs to no record")
def _record_files(e: Examination) -> Iterator[Fault]:
    owned = set()
    for name, record in e.contents.records.items():
        cell = name.rpartition("/")[0]
        owned.add(f"baselines/{baseline_id(record.config)}.json")
        for file, sha256 in record.files.items():
            e.count()
            place = tape_name(sha256) if file == TAPE_FILE else f"{cell}/{file}"
            owned.add(place)
            if place not in e.contents.files:
                yield f"{name}:files.{file}", f"{place} is not there"
            elif e.contents.sha256(place) != sha256:
                yield f"{name}:files.{file}", "has another SHA-256"
    for name in e.contents.files:
        if name.startswith(("tapes/", "baselines/")) or name.endswith((f"/{SCHEDULE_FILE}", f"/{TELEMETRY_FILE}")):
            if name not in owned:
                yield name, "belongs to no record"


@rule(Round.DERIVATION, "copied-telemetry", "no two cells have the same telemetry")
def _copied(e: Examination) -> Iterator[Fault]:
    seen: dict[str, str] = {}
    for name, record in e.contents.records.items():
        place = f"{name.rpartition('/')[0]}/{TELEMETRY_FILE}"
        if TELEMETRY_FILE in record.files and place in e.contents.files:
            e.count()
            sha256 = hashlib.sha256(e.contents.unpacked(place, may_be_cut=True)).hexdigest()  # packed anew it is the same
            if sha256 in seen:
                yield f"{name}:files.{TELEMETRY_FILE}", f"is that of {seen[sha256]}: samples of one cell were copied to another"
            seen.setdefault(sha256, name)


@rule(Round.DERIVATION, "copied-steps", "no two cells have the same step times, but for eager's of one baseline")
def _copied_steps(e: Examination) -> Iterator[Fault]:
    seen: dict[tuple, str] = {}
    for name, record in e.contents.records.items():
        if record.config["method"] == "eager":
            continue
        for key in ("step_seconds", "baseline_step_seconds"):
            samples = tuple(record.measured.get(key) or ()) if record.kind == "step" else ()
            if len(samples) < FEWEST_SAMPLES:
                continue
            e.count()
            if (first := seen.setdefault(tuple(sorted(samples)), name)) != name:
                yield f"{name}:measured.{key}", f"are those of {first}: samples of one cell were copied to another"
