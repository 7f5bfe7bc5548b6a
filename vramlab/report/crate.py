"""ro-crate-metadata.json: a run's folder as an RO-Crate 1.1, which archives and registries read.

The folder itself is the crate: records, schedules, tapes and telemetry where they lie, each with its bytes and SHA-256, report.html and
cells.csv, what made them (vramlab, torch, the machine, the methods with their papers), and an action for each cell. Nothing is copied.

    https://w3id.org/ro/crate/1.1: the descriptor, the root and their required properties; ids are relative, percent-encoded and unique;
    whatever is referred to stands in the graph
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping
from urllib.parse import quote

import yaml

from vramlab import __version__
from vramlab.collection import Library, Paper, UnknownName, built_in_collection
from vramlab.counted import count_of
from vramlab.errors import WorkflowError
from vramlab.record import Outcome, RunRecord, write_atomically
from vramlab.report.cells_csv import COLUMNS_FILE, CSV_FILE, write_cells
from vramlab.report.page import REPORT_FILE
from vramlab.report.words import hardware_in_words, is_simulated, target_in_words
from vramlab.runs import RECORD_FILE, RUN_FILE, SCHEDULE_FILE, TELEMETRY_FILE, Cell, Run, load_run
from vramlab.workflow import name_of

CRATE_FILE, SPECIFICATION = "ro-crate-metadata.json", "https://w3id.org/ro/crate/1.1"
SPDX = "https://spdx.org/licenses/"
_ADDRESS = r"https?://[^\s<>\"]+"
_AUTHOR = rf"([^<>\s][^<>]*?)(?:\s*<({_ADDRESS})>)?"
_CELL_FILES = {
    RECORD_FILE: "what is known of the cell: config, outcome, numbers, environment", SCHEDULE_FILE: "the plan, instruction by instruction",
    "tape.json.gz": "the captured training step", TELEMETRY_FILE: "samples of memory, use, power and temperature while the cell ran",
}
_TYPES = {".json": "application/json", ".gz": "application/gzip", ".html": "text/html", ".csv": "text/csv"}
_AT_THE_ROOT = {RUN_FILE: "the resolved workflow, the environment, the plan of cells", REPORT_FILE: "the report, one offline file",
                CSV_FILE: "the cells as a table, one a row", COLUMNS_FILE: "what each column of cells.csv is (CSV on the Web)"}
Entity = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rights:
    """Whose results these are, and what may be done with them: for those to say who made them, and in no record."""

    authors: tuple[str, ...] = ()  # `Name`, or `Name <https://orcid.org/...>`
    licence: str = ""  # an identifier of SPDX, or an address; "" when none is stated

    def __post_init__(self) -> None:
        """WorkflowError names what is neither."""
        if self.licence and not re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9.+-]*|{_ADDRESS}", self.licence):
            raise WorkflowError(f"--licence {self.licence}: an SPDX identifier such as CC-BY-4.0, or an address that begins with https://")
        if wrong := [text for text in self.authors if not re.fullmatch(_AUTHOR, text)]:
            raise WorkflowError(f"--author {wrong[0]}: a name, or 'Name <https://orcid.org/...>'")


def write_crate(run_dir: Path, library: Library, rights: Rights | None = None) -> Path:
    """Write ro-crate-metadata.json, and cells.csv which it lists, into a run's folder that has its report.html."""
    run = load_run(Path(run_dir))
    write_cells(run.folder)
    path = run.folder / CRATE_FILE
    write_atomically(path, json.dumps(describe(run, library, rights or Rights()), indent=1, ensure_ascii=False) + "\n")
    return path


def describe(run: Run, library: Library, rights: Rights) -> dict[str, Any]:
    """The crate's metadata: a flat graph of entities, the same for the same files and rights."""
    graph = _Graph()
    root = graph.add({"@id": "./", "@type": "Dataset"})
    graph.add({"@id": CRATE_FILE, "@type": "CreativeWork", "conformsTo": {"@id": SPECIFICATION}, "about": root})
    graph.add({"@id": SPECIFICATION, "@type": "CreativeWork", "name": "RO-Crate Metadata Specification 1.1", "version": "1.1"})
    parts = [graph.add(_file(run, name, told)) for name, told in _AT_THE_ROOT.items() if (run.folder / name).is_file()]
    actions = []
    for cell in run.cells:
        if cell.record:
            files = [graph.add(_file(run, f"cells/{cell.cell_id}/{name}", f"{name_of(cell.config)}: {told}"))
                     for name, told in _CELL_FILES.items() if (cell.folder / name).is_file()]
            parts += files
            actions.append(graph.add(_action(run, cell, cell.record, files, graph, library)))
    graph.update("./", _root(run) | _of_rights(rights, graph) | {"hasPart": parts} | ({"mentions": actions} if actions else {}))
    return {"@context": [f"{SPECIFICATION}/context", {"sha256": "http://schema.org/sha256"}], "@graph": graph.entities}


class _Graph:
    """Entities by id, each once, in the order in which they were added."""

    def __init__(self) -> None:
        self._by_id: dict[str, Entity] = {}

    def add(self, entity: Entity) -> Entity:
        """A reference to the entity; one that is there already stays."""
        self._by_id.setdefault(entity["@id"], entity)
        return {"@id": entity["@id"]}

    def __contains__(self, name: str) -> bool:
        return name in self._by_id

    def update(self, name: str, more: Mapping[str, Any]) -> None:
        """Further properties of an entity."""
        self._by_id[name] |= more

    @property
    def entities(self) -> list[Entity]:
        """The descriptor first, as readers expect it."""
        return sorted(self._by_id.values(), key=lambda entity: entity["@id"] != CRATE_FILE)


def _named(kind: str, *words: Any) -> str:
    """The id of something that has no address: `#method-delta`."""
    return f"#{kind}-{quote('-'.join(map(str, words)), safe='')}"


def _short_hash(parts: Any) -> str:
    """Tells apart what has the same name: two sets of versions, two machines of one model."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]


_NO_LICENCE = {"@id": "#license-of-the-results", "@type": "CreativeWork", "name": "No licence is stated",
               "description": "Those who made this run have not said here under which terms its records may be used."}


def _of_rights(rights: Rights, graph: _Graph) -> Entity:
    """Licence and authors of the results."""
    licence = graph.add(_licence(rights.licence) if rights.licence else _NO_LICENCE)
    authors = [graph.add(_person(*re.fullmatch(_AUTHOR, text).groups())) for text in rights.authors]
    return {"license": licence} | ({"author": authors} if authors else {})


def _licence(text: str) -> Entity:
    is_address = re.fullmatch(_ADDRESS, text)
    return {"@id": text if is_address else f"{SPDX}{text}", "@type": "CreativeWork", "name": text} | (
        {} if is_address else {"identifier": text})


def _person(name: str, address: str | None) -> Entity:
    return {"@id": address or _named("person", name), "@type": "Person", "name": name}


def _maintainers(graph: _Graph) -> list[Entity]:
    """Who wrote vramlab, as CITATION.cff says; none where the file did not come with it."""
    path = built_in_collection() / "CITATION.cff"
    said = yaml.safe_load(path.read_text(encoding="utf-8")).get("authors", ()) if path.is_file() else ()
    named = [(one["name"], "Organization") if "name" in one else (f"{one['given-names']} {one['family-names']}", "Person") for one in said]
    return [graph.add({"@id": _named(kind.lower(), name), "@type": kind, "name": name}) for name, kind in named]


def _root(run: Run) -> Entity:
    done = f"{count_of(len(run.records), 'cell')} of {len(run.cells)} planned {'has' if len(run.records) == 1 else 'have'} a record"
    description = " ".join(str(run.workflow.get("description") or "A run of a vramlab workflow.").split())
    name = str(run.workflow.get("title") or run.workflow.get("name") or "A run of vramlab")
    return {"name": name, "datePublished": _last_date(run), "description": f"{description} {done}.",
            "identifier": str(run.plan.get("run_id") or run.folder.resolve().name),
            "keywords": "GPU memory, deep learning, reproducibility"}


def _last_date(run: Run) -> str:
    """When the last cell ended, else when the run began. WorkflowError when neither is a date."""
    ends = [text for r in run.records if _is_date(text := r.provenance.get("ended"))]
    found = max(ends, default=run.plan.get("started"), key=datetime.fromisoformat)
    if not _is_date(found):
        raise WorkflowError(f"{run.folder / RUN_FILE}: started: {found!r} is no date, and no record says when its cell ended")
    return found


def _is_date(text: Any) -> bool:
    """RFC 3339 with its zone, so that two can be compared."""
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except (TypeError, ValueError):
        return False


def _file(run: Run, name: str, told: str) -> Entity:
    data = (run.folder / name).read_bytes()
    return {"@id": quote(name), "@type": "File", "name": name, "description": told, "contentSize": str(len(data)),
            "encodingFormat": _TYPES[Path(name).suffix if not name.endswith("-metadata.json") else ".json"],
            "sha256": hashlib.sha256(data).hexdigest()}


# --- what made a cell -----------------------------------------------------------------------------------------------------
def _action(run: Run, cell: Cell, record: RunRecord, files: list[Entity], graph: _Graph, library: Library) -> Entity:
    environment = run.environment_of(record)
    told = f"{target_in_words(record.config, environment)}" if is_simulated(record) else f"measured on {_machine_in_words(environment)}"
    failed = record.outcome is not Outcome.OK
    found: Entity = {
        "@id": _named("cell", cell.cell_id), "@type": "CreateAction", "name": name_of(cell.config),
        "description": f"{told}; outcome {record.outcome}, truth {record.truth}", "object": {"@id": RUN_FILE}, "result": files,
        "instrument": [*_software(environment, graph), graph.add(_machine(environment)), *_cards(record, graph, library)],
        "actionStatus": {"@id": f"http://schema.org/{'Failed' if failed else 'Completed'}ActionStatus"},
    }
    graph.add({"@id": found["actionStatus"]["@id"], "@type": "ActionStatusType", "name": "failed" if failed else "completed"})
    found |= {name: text for name, key in (("startTime", "started"), ("endTime", "ended")) if _is_date(text := record.provenance.get(key))}
    return found | ({"error": record.message or str(record.outcome)} if failed else {})


def _software(environment: Mapping[str, Any], graph: _Graph) -> Iterator[Entity]:
    """vramlab, with what it ran on: each version of each once."""
    software = environment.get("software", {})
    versions = {"Python": software.get("python")} | dict(software.get("packages") or {})
    needs = [graph.add({"@id": _named("software", name, version), "@type": "SoftwareApplication", "name": name, "softwareVersion": version})
             for name, version in versions.items() if version]
    version, commit = software.get("vramlab") or __version__, (environment.get("git") or {}).get("commit")
    licence = graph.add(_licence("Apache-2.0"))
    authors = _maintainers(graph)
    name = _named("software", "vramlab", version, _short_hash([versions, commit]))
    yield graph.add({"@id": name, "@type": "SoftwareApplication", "name": "vramlab", "softwareVersion": version, "license": licence,
                     "softwareRequirements": needs, "description": f"commit {commit}" if commit else "no commit is recorded"}
                    | ({"author": authors} if authors else {}))


def _machine_in_words(environment: Mapping[str, Any]) -> str:
    gpus = hardware_in_words("cuda", environment) if environment.get("gpus") else "no NVIDIA GPU"
    return f"{hardware_in_words('cpu', environment)}; {gpus}"


def _machine(environment: Mapping[str, Any]) -> Entity:
    """The hardware, by what it is: its name stays where it is."""
    memory, system = (environment.get("cpu") or {}).get("memory_bytes"), environment.get("system") or {}
    told = [f"{memory} bytes of memory" if memory else "", *(str(system[key]) for key in ("distribution", "kernel") if system.get(key))]
    words = _machine_in_words(environment)
    return {"@id": _named("machine", _short_hash([words, told])), "@type": "IndividualProduct", "name": words,
            "description": "; ".join(filter(None, told)) or "nothing more is recorded"}


def _cards(record: RunRecord, graph: _Graph, library: Library) -> Iterator[Entity]:
    """The method and the model, each with the paper that its card cites."""
    for kind, find in (("method", library.method), ("model", library.model)):
        name = str(record.config.get(kind))
        entity: Entity = {"@id": _named(kind, name), "@type": "SoftwareSourceCode", "name": name}
        if entity["@id"] in graph:  # a card is read once, not once a cell
            yield graph.add(entity)
            continue
        try:
            card = find(name).card
        except UnknownName:
            yield graph.add(entity | {"description": f"a {kind} that is in no collection here"})
            continue
        cited = {"citation": _article(card.paper, graph)} if card.paper else {}
        title = " ".join(str(getattr(card, "decides", "") or getattr(card, "title", "") or getattr(card, "family", name)).split())
        yield graph.add(entity | {"description": title} | ({"identifier": card.uid} if card.uid else {}) | cited)


def _article(paper: Paper, graph: _Graph) -> Entity:
    """Under its DOI, else its address."""
    where = f"https://doi.org/{quote(paper.doi)}" if paper.doi else paper.url or _named("paper", paper.title)
    authors = [graph.add({"@id": _named("person", name), "@type": "Person", "name": name}) for name in _plain(paper.authors)]
    venue = graph.add({"@id": _named("venue", paper.venue), "@type": "CreativeWork", "name": paper.venue})
    return graph.add({"@id": where, "@type": "ScholarlyArticle", "name": paper.title, "author": authors, "datePublished": str(paper.year),
                      "isPartOf": venue})


def _plain(names: Iterable[str]) -> list[str]:
    """Names without BibTeX's braces."""
    return [re.sub(r"[{}]", "", name) for name in names]
