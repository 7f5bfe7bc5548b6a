"""A bundle against what went into it: every byte accounted for, nobody given away, nothing half, nothing twice."""

from __future__ import annotations

import getpass
import gzip
import hashlib
import json
import platform
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hand_made import ENVIRONMENT, MIB, full_grid, make_record, measured_step, write_run, write_telemetry

from vramlab.crowd import pack_run
from vramlab.crowd.bundle import Packed
from vramlab.crowd.layout import LIMITS
from vramlab.crowd.rules.asking import Examination, Round
from vramlab.crowd.scrub import Names, scrub, scrub_paths, scrub_text
from vramlab.environment import hash_identity
from vramlab.errors import SubmissionRefused
from vramlab.record import RunRecord, hash_config
from vramlab.schedule import Schedule

ROOT = Path(__file__).parent.parent
HOMES = "/" + "home"  # where people live
UUID = "GPU-11112222-3333-4444-5555-666677778888"
HERE = Names(host="kepler.lab.example.org", user="jdoe", home=f"{HOMES}/jdoe")


@pytest.fixture(autouse=True)
def own_config(tmp_path, monkeypatch) -> None:
    """Each test's own user, with a key of its own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@dataclass(frozen=True)
class Written:
    """A bundle below a folder."""

    packed: Packed
    path: Path
    is_new: bool


def submit_unchecked(run: Path, to: Path) -> Written:
    """What `crowd-submit` does, without the rules: the numbers of these runs are made up."""
    packed = pack_run(run)
    is_new = packed.write(to)
    return Written(packed, packed.place(to), is_new)


def wrapping_faults(bundle: Path) -> list[str]:
    """What the first round of rules finds."""
    examination = Examination(bundle, LIMITS)
    examination.ask(Round.WRAPPING)
    return [f"{f.where} {f.message}".strip() for f in examination.report().findings]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_run(folder: Path, records) -> Path:
    """A run whose records state the hashes of their files, tape included."""
    write_run(folder, records, run_id="0123456789")
    for record in records:
        cell = folder / "cells" / record.cell_id
        write_telemetry(cell / "telemetry.csv.gz", [(0.1 * i, 500 * MIB) for i in range(5)])
        (cell / "tape.json.gz").write_bytes(gzip.compress(b'{"ops": []}', mtime=0))
        (cell / "stdout.log").write_text(f"{HOMES}/jdoe said something")
        files = {p.name: digest(p) for p in cell.iterdir() if p.name.endswith(".gz")}
        replace(record, files=files).save(cell / "record.json")
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    return make_run(tmp_path / "results" / "hand-made" / "run", full_grid())


def test_the_bundle_holds_the_run_and_a_hash_of_every_file(run, tmp_path):
    submitted = submit_unchecked(run, tmp_path / "collection")
    manifest = json.loads((submitted.path / "manifest.json").read_text())
    there = {p.relative_to(submitted.path).as_posix(): p for p in submitted.path.rglob("*") if p.is_file()}
    assert submitted.is_new and submitted.path.parent == tmp_path / "collection" / "hand-made"
    assert {f["path"]: f["sha256"] for f in manifest["files"]} == {n: digest(p) for n, p in there.items() if n != "manifest.json"}
    assert {f["path"]: f["bytes"] for f in manifest["files"]} == {n: p.stat().st_size for n, p in there.items() if n != "manifest.json"}
    assert (manifest["cells"], manifest["planned_cells"], manifest["is_complete"]) == (len(full_grid()), len(full_grid()), True)
    assert not [name for name in there if name.endswith((".log", "spec.json"))]
    assert len([name for name in there if name.startswith("tapes/")]) == 1  # one step, however many cells
    for record in full_grid():
        folder = submitted.path / "cells" / record.cell_id
        copied = RunRecord.load(folder / "record.json")
        assert (copied.measured, copied.outcome, copied.config) == (record.measured, record.outcome, record.config)
        assert (folder / "telemetry.csv.gz").read_bytes() == (run / "cells" / record.cell_id / "telemetry.csv.gz").read_bytes()
        if "schedule.json.gz" in copied.files:
            assert Schedule.load(folder / "schedule.json.gz").instructions
    assert wrapping_faults(submitted.path) == []


def test_the_same_run_again_changes_nothing(run, tmp_path):
    first = submit_unchecked(run, tmp_path / "collection")
    stamps = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in (tmp_path / "collection").rglob("*")}
    again = submit_unchecked(run, tmp_path / "collection")
    assert (again.path, again.is_new) == (first.path, False)
    assert {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in (tmp_path / "collection").rglob("*")} == stamps


def test_another_folder_gets_the_same_bytes(run, tmp_path):
    paths = [submit_unchecked(run, tmp_path / name).path for name in ("a", "b")]
    assert paths[0].name == paths[1].name
    assert [digest(p / "manifest.json") for p in paths] == [digest(paths[0] / "manifest.json")] * 2


def test_a_run_that_grew_is_another_bundle_and_an_unfinished_one_says_so(run, tmp_path):
    first = submit_unchecked(run, tmp_path / "c")
    (run / "cells" / full_grid()[0].cell_id / "record.json").unlink()
    second = submit_unchecked(run, tmp_path / "c")
    assert first.path != second.path and first.path.is_dir()
    manifest = json.loads((second.path / "manifest.json").read_text())
    assert (manifest["is_complete"], manifest["cells"]) == (False, len(full_grid()) - 1)


def spoil(run: Path, how: str) -> None:
    cell = run / "cells" / full_grid()[0].cell_id
    body = json.loads((cell / "record.json").read_text())
    if how == "half":
        (cell / "record.json").write_text((cell / "record.json").read_text()[:200])
    elif how == "config":
        (cell / "record.json").write_text(json.dumps(body | {"config": body["config"] | {"batch_size": 17}}))
    elif how == "cell_id":
        (cell / "record.json").write_text(json.dumps(body | {"cell_id": "0" * 16}))
    elif how == "folder":
        cell.rename(cell.with_name("0" * 16))
    elif how == "schema":
        (cell / "record.json").write_text(json.dumps(body | {"schema_version": 99}))
    elif how == "file":
        (cell / "telemetry.csv.gz").write_bytes(b"changed")
    elif how == "missing file":
        (cell / "schedule.json.gz").unlink()


@pytest.mark.parametrize("how", ["half", "config", "cell_id", "folder", "schema", "file", "missing file"])
def test_what_is_half_or_changed_is_refused_with_exit_code_4_and_nothing_is_written(run, tmp_path, how):
    spoil(run, how)
    with pytest.raises(SubmissionRefused) as refusal:
        submit_unchecked(run, tmp_path / "collection")
    assert refusal.value.exit_code == 4 and refusal.value.problems
    assert not (tmp_path / "collection").exists()


def test_every_problem_is_named_at_once(run, tmp_path):
    for record in full_grid()[:3]:
        (run / "cells" / record.cell_id / "record.json").write_text("{")
    with pytest.raises(SubmissionRefused) as refusal:
        submit_unchecked(run, tmp_path / "c")
    assert [record.cell_id in problem for record, problem in zip(full_grid(), refusal.value.problems)] == [True] * 3


def test_a_run_without_records_is_refused(tmp_path):
    folder = write_run(tmp_path / "run", [])
    with pytest.raises(SubmissionRefused, match="no cell has run"):
        submit_unchecked(folder, tmp_path / "c")


def test_a_bundle_that_was_tampered_with_is_not_taken_for_this_run(run, tmp_path):
    submitted = submit_unchecked(run, tmp_path / "c")
    (submitted.path / "run.json").write_text("{}")
    assert wrapping_faults(submitted.path) == ["run.json has changed since the manifest was written"]
    with pytest.raises(SubmissionRefused, match="differ from this run"):
        submit_unchecked(run, tmp_path / "c")


def test_a_file_that_the_manifest_does_not_name_is_told(run, tmp_path):
    submitted = submit_unchecked(run, tmp_path / "c")
    (submitted.path / "tapes" / f"{'0' * 64}.json.gz").write_bytes(b"")
    assert wrapping_faults(submitted.path) == [f"tapes/{'0' * 64}.json.gz is not named by the manifest"]


def test_a_failed_write_leaves_nothing_behind(run, tmp_path, monkeypatch):
    def full(source, target):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.rename", full)
    with pytest.raises(OSError, match="No space"):
        submit_unchecked(run, tmp_path / "c")
    assert not [p for p in (tmp_path / "c").rglob("*") if p.is_file()]


# ------------------------------------------------------------------------------------------------- who is given away


def test_names_paths_and_uuids_do_not_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: HERE.host)
    monkeypatch.setattr(getpass, "getuser", lambda: HERE.user)
    environment = {**ENVIRONMENT, "variables": {"NVIDIA_VISIBLE_DEVICES": UUID, "CUDA_HOME": f"{HOMES}/jdoe/cuda-12"},
                   "gpus": [{"name": "V100", "note": f"seen as {UUID} on kepler"}]}
    record = measured_step("delta", 500, budget="50%", environment=environment, config={"data": f"imagefolder:{HOMES}/jdoe/pets"},
                           message=f"jdoe: no {HOMES}/jdoe/data/x.bin on kepler.lab.example.org",
                           workflow={"name": "w", "path": f"{HOMES}/jdoe/secret-project/w.yaml", "sha256": "c" * 64})
    folder = make_run(tmp_path / "run", [record])
    submitted = submit_unchecked(folder, tmp_path / "c")
    everything = b"".join(gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes()
                          for p in submitted.path.rglob("*") if p.is_file()).decode()
    for told in ("jdoe", "kepler", UUID, "secret-project", HOMES):
        assert told not in everything, told
    assert f"GPU-{hash_identity(UUID)}" in everything and "x.bin" in everything
    cell = next((submitted.path / "cells").iterdir())
    copied = RunRecord.load(cell / "record.json")
    assert copied.config["data"] == "imagefolder:[path]/pets"
    assert hash_config(copied.config) == copied.cell_id == cell.name != record.cell_id
    plan = json.loads((submitted.path / "run.json").read_text())
    assert [c["cell_id"] for c in plan["cells"]] == [copied.cell_id]
    told = json.loads((submitted.path / "manifest.json").read_text())["scrubbed"][f"cells/{copied.cell_id}/record.json"]
    assert {"config.data", "message", "workflow.path", "environment.variables.CUDA_HOME"} <= set(told)


def test_a_packed_file_that_gives_somebody_away_is_refused(tmp_path):
    record = measured_step("delta", 500, budget="50%")
    folder = make_run(tmp_path / "run", [record])
    cell = folder / "cells" / record.cell_id
    (cell / "tape.json.gz").write_bytes(gzip.compress(f'{{"module": "{HOMES}/someone/model.py"}}'.encode(), mtime=0))
    replace(record, files={"tape.json.gz": digest(cell / "tape.json.gz")}).save(cell / "record.json")
    with pytest.raises(SubmissionRefused, match="tape.json.gz names a path"):
        submit_unchecked(folder, tmp_path / "c")


@pytest.mark.parametrize(("text", "clean"), [
    (f"{HOMES}/jdoe/x/y.py", "[path]/y.py"), ("at /usr/lib/python3/site.py:12", "at [path]/site.py:12"), (f"{HOMES}/jdoe", "[home]"),
    (f"{HOMES}/other/", "[home]"), ("~/data", "[path]/data"), ("PATH=/srv/a:/srv/b", "PATH=[path]/a:[path]/b"),
    ("C:\\Users\\Jane\\x.py", "[path]/x.py"), ("C:\\Users\\Jane", "[home]"), ("imagefolder:/data/pets", "imagefolder:[path]/pets"),
    # no paths
    ("https://doi.org/10.1145/3689338", None), ("12 bytes/s", None), ("step time / eager's", None), ("n/a", None), ("and/or", None),
    ("workflows/smoke.yaml", None), ("aten.convolution.default (layer1.0.conv1)", None), ("60%", None), ("1e-3", None), ("", None),
])
def test_paths(text, clean):
    assert scrub_paths(text, HERE) == (text if clean is None else clean)


@pytest.mark.parametrize(("text", "clean"), [
    ("ran on kepler.lab.example.org", "ran on [host]"), ("kepler died", "[host] died"), ("by jdoe.", "by [user]."),
    ("keplerian jdoes", None), ("my-jdoe", None), ("sm_clock", None),
])
def test_names(text, clean):
    assert scrub_text(text, HERE) == (text if clean is None else clean)


def test_common_and_short_names_are_words_and_stay():
    assert scrub_text("root user at localhost in a", Names(host="a", user="root", home="/root")) == "root user at localhost in a"


def test_a_home_with_a_space_leaves_whole():
    assert scrub_paths("/srv/Jane Roe/x.py", Names(host="h", user="jane", home="/srv/Jane Roe")) == "[path]/x.py"


def test_a_config_keeps_its_words():
    value = {"config": {"method": "jdoe", "data": f"{HOMES}/jdoe/a"}, "message": "jdoe"}
    assert scrub(value, HERE) == ({"config": {"method": "jdoe", "data": "[path]/a"}, "message": "[user]"}, ["config.data", "message"])


def test_scrubbing_twice_changes_nothing_more():
    once, _ = scrub(make_record(message=f"at {HOMES}/jdoe/x on kepler").to_json(), HERE)
    assert scrub(once, HERE) == (once, [])
