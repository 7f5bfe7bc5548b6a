"""artifact_appendix.md, generated: headings of the cTuning/ACM artifact appendix, every claim with its exact command, the
expected value with its tolerance, minutes and disk. What stands in it is read from the workflows, cards and lock file, so that
no value is typed twice.

    python -m vramlab.appendix           write artifact_appendix.md
    python -m vramlab.appendix --check   exit with 1 when it is out of date
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence

import jinja2

from vramlab import __version__
from vramlab.collection import ARTIFACT_FILE, Library, built_in_collection
from vramlab.counted import count_of
from vramlab.record import write_atomically
from vramlab.report.authors import read_answers
from vramlab.report.checklists import load_checklists
from vramlab.report.claims import DEFAULT_TOLERANCE, PaperClaim, expectation, load_claims
from vramlab.report.facts import DATA, METRICS
from vramlab.report.words import DASH, bytes_in_words, join_words
from vramlab.workflow import Host, Plan, expand, load_workflow
from vramlab.workflow_schema import Untestable

APPENDIX_FILE = "artifact_appendix.md"
CHECKLIST = "ctuning-ae"
OPEN = "to be answered by the authors"
HOSTS = {"cpu": Host(auto="cpu"), "gpu": Host(auto="cuda:0", cuda_devices=1)}
NAMED_PACKAGES = ("torch", "torchvision", "numpy", "numba", "pandas", "scikit-learn")


@dataclass(frozen=True, kw_only=True)
class ClaimRow:
    """A claim as an evaluator tests it."""

    id: str
    paper: str  # system and metric
    claimed: str
    expected: str
    evidence: str  # measured, or simulated with the device's name
    experiment: str
    command: str
    minutes: str
    disk: str


@dataclass(frozen=True, kw_only=True)
class WorkflowRow:
    """A workflow: its command and what it takes on a CPU and on a GPU."""

    command: str
    title: str
    description: str
    cells: str
    minutes: str
    disk: str


def render_appendix(root: Path) -> str:
    """The text of artifact_appendix.md for the collection at `root`."""
    library = Library([root])
    plans = {name: {host: _plan(name, library, host) for host in HOSTS} for name in library.workflow_paths}
    known = load_claims(library.report_files("claims.yaml"))
    return _template(root).render(
        version=__version__, claims=[row for by_host in plans.values() for row in _claim_rows(by_host, known)],
        untestable=[{"claims": join_words(given_up.claims), "reason": given_up.reason} for by_host in plans.values()
                    for given_up in _untestable(by_host["cpu"], known)],
        workflows=[_workflow_row(by_host) for by_host in plans.values()], methods=_methods(library), models=_models(library),
        data=DATA, metrics=METRICS, packages=_pinned(root), licence=_licence(root), authors=_authors(library),
    )


def _licence(root: Path) -> str:
    """Name and version, as the licence's own head gives them."""
    return " ".join((root / "LICENSE").read_text(encoding="utf-8").split()[:4]).rstrip(",")


def _authors(library: Library) -> Callable[[str], str]:
    """What artifact.yaml says of an item of the cTuning checklist: the authors' word, with the workflows that it is said of."""
    checklists = load_checklists(library.report_files("checklists/*.yaml"))
    said: dict[str, dict[str, list[str]]] = {}
    for name in library.workflow_paths:
        path = library.workflow(name).parent / ARTIFACT_FILE
        for (checklist, item), answer in (read_answers(path, name, checklists) if path.is_file() else {}).items():
            if checklist == CHECKLIST:
                said.setdefault(item, {}).setdefault(answer.why, []).append(name)
    return lambda item: _in_words(said.get(item, {}), len(library.workflow_paths))


def _in_words(said: Mapping[str, Sequence[str]], workflows: int) -> str:
    if not said:
        return OPEN
    scopes = {why: "" if len(names) == workflows else f", for {join_words(names)}" for why, names in said.items()}
    return "; ".join(f"{why.rstrip('.')} (the authors' word{scope})" for why, scope in scopes.items())


def _template(root: Path) -> jinja2.Template:
    """Markdown: nothing is HTML, and a bar inside a value does not end a table's cell."""
    def keep_in_cell(value: Any) -> Any:
        return value.replace("|", "\\|") if isinstance(value, str) else value

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(root / "reports" / "templates"), undefined=jinja2.StrictUndefined,
                                     finalize=keep_in_cell, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return environment.get_template("artifact_appendix.md.j2")


def _plan(name: str, library: Library, host: str) -> Plan:
    return expand(load_workflow(name, library), HOSTS[host])


def _claim_rows(plans: dict[str, Plan], known: dict[str, PaperClaim]) -> Iterator[ClaimRow]:
    for request in plans["cpu"].workflow.claims:
        if request.id not in known:
            raise ValueError(f"workflow {plans['cpu'].workflow.name!r} names claim {request.id!r}, which reports/claims.yaml does not have")
        claim = known[request.id] if request.value is None else known[request.id].stated_as(request.value, request.rule)
        tolerance = DEFAULT_TOLERANCE if request.tolerance is None else request.tolerance
        yield ClaimRow(
            id=claim.id, paper=f"{claim.system}, {claim.metric}", claimed=claim.in_words, experiment=join_words(request.experiments),
            expected=expectation(request.rule, claim, tolerance), evidence=_evidence(plans["cpu"], request.experiments),
            command=_command(plans["cpu"]), minutes=_minutes(plans), disk=_disk(plans))


def _untestable(plan: Plan, known: dict[str, PaperClaim]) -> tuple[Untestable, ...]:
    unknown = [name for given_up in plan.workflow.untestable for name in given_up.claims if name not in known]
    if unknown:
        raise ValueError(f"workflow {plan.workflow.name!r} names claim {unknown[0]!r}, which reports/claims.yaml does not have")
    return plan.workflow.untestable


def _evidence(plan: Plan, experiments: tuple[str, ...]) -> str:
    """Where the experiments' numbers come from."""
    targets = {str(cell.config["target"]) for cell in plan.cells if cell.config["experiment"] in experiments}
    simulated = sorted(target.removeprefix("sim:") for target in targets if target.startswith("sim:"))
    return f"simulated {join_words(simulated)}" if simulated and len(simulated) == len(targets) else "measured"


def _workflow_row(plans: dict[str, Plan]) -> WorkflowRow:
    plan = plans["cpu"]
    cells = join_words(dict.fromkeys(f"{len(p.cells)} on a {host.upper()}" for host, p in plans.items()))
    return WorkflowRow(command=_command(plan), title=plan.title, description=" ".join(plan.description.split()), cells=cells,
                       minutes=_minutes(plans), disk=_disk(plans))


def _command(plan: Plan) -> str:
    return f"./run workflow {plan.workflow.name}.yaml"


def _minutes(plans: dict[str, Plan]) -> str:
    return _by_host(plans, lambda plan: None if plan.expected.minutes is None else f"{plan.expected.minutes:g}")


def _disk(plans: dict[str, Plan]) -> str:
    return _by_host(plans, lambda plan: None if plan.expected.disk_bytes is None else bytes_in_words(plan.expected.disk_bytes))


def _by_host(plans: dict[str, Plan], say: Any) -> str:
    """One value when CPU and GPU agree, else both; a dash where the workflow does not say."""
    said = {host: say(plan) or DASH for host, plan in plans.items()}
    return said["cpu"] if len(set(said.values())) == 1 else f"CPU {said['cpu']}, GPU {said['gpu']}"


def _methods(library: Library) -> list[dict[str, str]]:
    """Name, one sentence and paper of each method."""
    rows = []
    for name in library.method_paths:
        card = library.method(name).card
        paper = f"{card.paper.title} ({card.paper.venue}, {card.paper.year})" if card.paper else DASH
        rows.append({"name": name, "decides": " ".join(card.decides.split()), "paper": paper})
    return rows


def _models(library: Library) -> str:
    families: dict[str, list[str]] = {}
    for name in library.model_paths:
        families.setdefault(library.model(name).card.family, []).append(name)
    return f"{count_of(sum(map(len, families.values())), 'model')}: " + "; ".join(join_words(names) for names in families.values())


def _pinned(root: Path) -> str:
    """Main packages as the lock file pins them."""
    pins = dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", (root / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE))
    lower = {name.lower(): version for name, version in pins.items()}
    return join_words(f"{name} {lower[name]}" for name in NAMED_PACKAGES if name in lower)


def main() -> int:
    """Write the file, or compare with it."""
    parser = argparse.ArgumentParser(description="Write artifact_appendix.md from the workflows and cards of this checkout.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the file is out of date")
    options = parser.parse_args()
    root = built_in_collection()
    text, path = render_appendix(root), root / APPENDIX_FILE
    if options.check:
        is_current = path.is_file() and path.read_text(encoding="utf-8") == text
        print(f"{APPENDIX_FILE} is {'up to date' if is_current else 'out of date: python -m vramlab.appendix writes it'}")
        return 0 if is_current else 1
    write_atomically(path, text)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
