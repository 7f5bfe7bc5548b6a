"""ro-crate-metadata.json against the rules of RO-Crate 1.1, read here by other means, and against the records."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from hand_made import full_grid, make_record, measured_step, simulated_step, write_run, write_telemetry

from vramlab.cli import main
from vramlab.collection import Library, built_in_collection
from vramlab.record import Outcome

pytestmark = pytest.mark.slow

DESCRIPTOR, SPECIFICATION = "ro-crate-metadata.json", "https://w3id.org/ro/crate/1.1"


def references(value: object) -> Iterator[str]:
    """Ids that a property's value refers to."""
    if isinstance(value, dict):
        assert set(value) == {"@id"}, f"nested instead of flat: {value}"
        yield value["@id"]
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def faults(crate: dict, folder: Path) -> list[str]:
    """What breaks RO-Crate 1.1: a person's reading of the specification, not the code's."""
    found = []
    graph = crate["@graph"]
    contexts = crate["@context"] if isinstance(crate["@context"], list) else [crate["@context"]]
    if f"{SPECIFICATION}/context" not in contexts:
        found.append("context")
    ids = [entity["@id"] for entity in graph]
    if len(ids) != len(set(ids)):
        found.append("ids are not unique")
    by_id = {entity["@id"]: entity for entity in graph}
    descriptor, root = by_id.get(DESCRIPTOR, {}), by_id.get("./", {})
    if descriptor.get("@type") != "CreativeWork" or descriptor.get("conformsTo") != {"@id": SPECIFICATION}:
        found.append("descriptor")
    if descriptor.get("about") != {"@id": "./"} or root.get("@type") != "Dataset":
        found.append("root")
    found += [f"root has no {name}" for name in ("name", "description", "datePublished", "license", "hasPart") if not root.get(name)]
    if len(str(root.get("datePublished"))) < len("2026-01-01"):
        found.append("datePublished to the day")
    known_terms = {"sha256"} if {"sha256": "http://schema.org/sha256"} in contexts else set()
    for entity in graph:
        name = entity["@id"]
        if not entity.get("@type"):
            found.append(f"{name} has no type")
        if not entity.get("name") and name not in (DESCRIPTOR,):
            found.append(f"{name} has no name")
        if " " in name or "\\" in name:
            found.append(f"{name} is no URI")
        for key, value in entity.items():
            if not key.startswith("@"):
                found += [f"{name}.{key} -> {target} is not in the graph" for target in references(value) if target not in by_id]
        if "sha256" in entity and "sha256" not in known_terms:
            found.append("sha256 is no term of the context")
        if entity.get("@type") == "File":
            found += _file_faults(entity, root, folder)
    targets = {target for entity in graph for key, value in entity.items() if key[0] != "@" for target in references(value)}
    found += [f"nothing refers to {name}" for name in ids if name != DESCRIPTOR and name not in targets]
    return found


def _file_faults(entity: dict, root: dict, folder: Path) -> Iterator[str]:
    name = entity["@id"]
    path = folder / unquote(name)
    if urlsplit(name).scheme or name.startswith(("/", "..")):
        yield f"{name} is not relative"
    if {"@id": name} not in root.get("hasPart", ()):
        yield f"{name} is no part"
    if not path.is_file():
        yield f"{name} does not exist"
    elif entity.get("sha256") != hashlib.sha256(path.read_bytes()).hexdigest() or entity.get("contentSize") != str(path.stat().st_size):
        yield f"{name} has other bytes"
    if not entity.get("encodingFormat"):
        yield f"{name} has no media type"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The full grid, with telemetry, made by the command."""
    folder = write_run(tmp_path_factory.mktemp("crate") / "run", full_grid())
    write_telemetry(folder / "cells" / full_grid()[0].cell_id / "telemetry.csv.gz", [(0.0, 1), (1.0, 2)])
    (folder / "cells" / full_grid()[-1].cell_id / "record.json").unlink()
    assert main(["report", "run", str(folder), "--format", "ro-crate"]) == 0
    return folder


@pytest.fixture(scope="module")
def crate(folder) -> dict:
    return json.loads((folder / DESCRIPTOR).read_text())


def test_the_crate_keeps_the_rules(crate, folder):
    assert not faults(crate, folder)
    assert crate["@graph"][0]["@id"] == DESCRIPTOR


def _entity(crate: dict, name: str) -> dict:
    return next(entity for entity in crate["@graph"] if entity["@id"] == name)


SPOILS: dict[str, Callable[[dict], object]] = {
    "descriptor": lambda c: _entity(c, DESCRIPTOR).pop("conformsTo"),
    "root has no license": lambda c: _entity(c, "./").pop("license"),
    "ids are not unique": lambda c: c["@graph"].append(dict(c["@graph"][1])),
    "other bytes": lambda c: _entity(c, "run.json").update(sha256="0" * 64),
    "is no part": lambda c: _entity(c, "./")["hasPart"].remove({"@id": "report.html"}),
    "is not in the graph": lambda c: c["@graph"].remove(_entity(c, "#method-delta")),
    "does not exist": lambda c: _entity(c, "run.json").update({"@id": "gone.json"}),
    "sha256 is no term": lambda c: c.update({"@context": c["@context"][0]}),
    "nothing refers to": lambda c: c["@graph"].append({"@id": "#x", "@type": "Thing", "name": "x"}),
}


@pytest.mark.parametrize("said", SPOILS)
def test_the_rules_find_what_is_wrong(crate, folder, said):
    spoilt = copy.deepcopy(crate)
    SPOILS[said](spoilt)
    assert any(said in fault for fault in faults(spoilt, folder))


def test_every_record_schedule_and_telemetry_is_a_part(crate, folder):
    parts = {part["@id"] for part in _entity(crate, "./")["hasPart"]}
    on_disk = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {DESCRIPTOR}
    assert parts == on_disk and sum(name.endswith("telemetry.csv.gz") for name in parts) == 1


def test_what_made_each_cell_is_told(crate):
    kinds = {entity["@id"]: entity for entity in crate["@graph"]}
    actions = [entity for entity in crate["@graph"] if entity["@type"] == "CreateAction"]
    records = full_grid()[:-1]
    assert [a["@id"] for a in actions] == [f"#cell-{r.cell_id}" for r in records]
    for action, record in zip(actions, records):
        instruments = [kinds[i["@id"]] for i in action["instrument"]]
        assert [i["name"] for i in instruments] == ["vramlab", "Test Processor 9000, 2 cores; no NVIDIA GPU", record.config["method"],
                                                    record.config["model"]]
        needs = {kinds[n["@id"]]["name"]: kinds[n["@id"]]["softwareVersion"] for n in instruments[0]["softwareRequirements"]}
        assert needs == {"Python": "3.11.7", "torch": "2.14.1", "numpy": "2.4.6"}
        assert instruments[0]["license"] == {"@id": "https://spdx.org/licenses/Apache-2.0"}
        assert ("simulated v100-32gb" in action["description"]) == record.config["target"].startswith("sim:")
        assert ("error" in action) == (record.outcome is not Outcome.OK)
        assert f"cells/{record.cell_id}/record.json" in [r["@id"] for r in action["result"]]
    wrong = next(a for a, r in zip(actions, records) if r.outcome is Outcome.WRONG)
    assert wrong["error"] == "the gradient of conv1.weight differs" and wrong["actionStatus"]["@id"].endswith("/FailedActionStatus")


def test_papers_stand_under_their_doi_with_their_authors(crate):
    library = Library([built_in_collection()])
    found = {entity["@id"]: entity for entity in crate["@graph"]}
    for name in ("delta", "checkpoint"):
        paper = library.method(name).card.paper
        article = found[found[f"#method-{name}"]["citation"]["@id"]]
        assert (article["@type"], article["name"], article["datePublished"]) == ("ScholarlyArticle", paper.title, str(paper.year))
        assert article["@id"] == (f"https://doi.org/{paper.doi}" if paper.doi else paper.url)
        assert [found[a["@id"]]["name"] for a in article["author"]] == paper.authors
    assert "citation" not in found["#method-eager"] and "no collection" in found["#method-broken"]["description"]


def test_it_is_dated_by_the_run(crate, tmp_path, capsys):
    assert _entity(crate, "./")["datePublished"] == "2026-01-02T03:04:35Z"
    begun = write_run(tmp_path / "begun", [])
    assert main(["report", "run", str(begun), "--format", "ro-crate"]) == 0
    assert _entity(json.loads((begun / DESCRIPTOR).read_text()), "./")["datePublished"] == "2026-01-01T00:00:00Z"
    assert not faults(json.loads((begun / DESCRIPTOR).read_text()), begun)
    undated = write_run(tmp_path / "undated", [], started="yesterday")
    capsys.readouterr()
    assert main(["report", "run", str(undated), "--format", "ro-crate"]) == 2
    assert "'yesterday' is no date" in capsys.readouterr().err


def test_whose_the_results_are_is_what_the_command_says_and_else_not_stated(crate, tmp_path, capsys):
    assert _entity(crate, "./")["license"] == {"@id": "#license-of-the-results"} and "author" not in _entity(crate, "./")
    folder = write_run(tmp_path / "run", [measured_step("eager", 1000)])
    said = ["--author", "Ada Example <https://orcid.org/0000-0001-2345-6789>", "--author", "B. C. Éxample", "--licence", "CC-BY-4.0"]
    assert main(["report", "run", str(folder), "--format", "ro-crate", *said]) == 0
    stated = json.loads((folder / DESCRIPTOR).read_text())
    assert not faults(stated, folder)
    root = _entity(stated, "./")
    assert root["license"] == {"@id": "https://spdx.org/licenses/CC-BY-4.0"}
    assert [(_entity(stated, a["@id"])["@type"], _entity(stated, a["@id"])["name"]) for a in root["author"]] == [
        ("Person", "Ada Example"), ("Person", "B. C. Éxample")]
    assert root["author"][0]["@id"] == "https://orcid.org/0000-0001-2345-6789"
    capsys.readouterr()
    for wrong, told in ((["--licence", "my own <terms>"], "an SPDX identifier"), (["--author", "<x>"], "a name, or")):
        assert main(["report", "run", str(folder), "--format", "ro-crate", *wrong]) == 2 and told in capsys.readouterr().err
    assert main(["report", "run", str(folder), "--licence", "MIT"]) == 2 and "--format ro-crate" in capsys.readouterr().err


def test_vramlab_names_who_wrote_it(crate):
    cff = yaml.safe_load((Path(__file__).parent.parent / "CITATION.cff").read_text())
    software = next(e for e in crate["@graph"] if e.get("name") == "vramlab")
    assert [_entity(crate, a["@id"])["name"] for a in software["author"]] == [one["name"] for one in cff["authors"]]


def test_hostile_names_stay_inside_one_id(tmp_path):
    hostile = 'a b/../"<script>#?\u202e'
    record = measured_step("delta", 500, budget="50%", config={"method": hostile, "model": hostile})
    record = replace(record, provenance={"ended": hostile, "started": 7})
    folder = write_run(tmp_path / "run", [record, simulated_step("eager", 1000), make_record(outcome=Outcome.CRASHED, message=hostile)])
    assert main(["report", "run", str(folder), "--format", "ro-crate"]) == 0
    crate = json.loads((folder / DESCRIPTOR).read_text())
    assert not faults(crate, folder) and hostile in [entity.get("name") for entity in crate["@graph"]]


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes_and_the_report_does_not_change(folder):
    before = {name: (folder / name).read_bytes() for name in (DESCRIPTOR, "report.html", "cells.csv")}
    assert main(["report", "run", str(folder), "--format", "ro-crate", "--csv"]) == 0
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_a_format_that_there_is_not_names_those_that_there_are(folder, capsys):
    assert main(["report", "run", str(folder), "--format", "rocrate"]) == 2
    assert "ro-crate" in capsys.readouterr().err
