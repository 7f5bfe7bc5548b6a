"""show workflow, show run, show key: what a file would run here, what a run has come to, what a key may be."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Iterable, Mapping

from vramlab.cli.progress import summary
from vramlab.cli.words import command
from vramlab.collection import Library
from vramlab.doctor import detect_host
from vramlab.errors import WorkflowError
from vramlab.report.words import hardware_in_words, seconds_in_words
from vramlab.run_folder import RunFolder, is_done, resolve_run
from vramlab.workflow import Cell, expand, load_workflow, name_of
from vramlab.workflow_keys import rows
from vramlab.yaml_nodes import offer


# ------------------------------------------------------------------------------------------------ a workflow
def workflow(library: Library, name: str, results: Path) -> dict[str, Any]:
    """What a workflow runs on the machine at hand, experiment by experiment, and what it judges. WorkflowError as `validate` says it."""
    found = load_workflow(name, library)
    plan = expand(found, detect_host("auto"))
    by_experiment: dict[str, list[Cell]] = {}
    for cell in plan.cells:
        by_experiment.setdefault(cell.config["experiment"], []).append(cell)
    return {
        "name": found.name, "title": plan.title, "description": plan.description, "label": plan.label,
        "run": command("run", "workflow", name), "cells": len(plan.cells), "expected": plan.expected.model_dump(exclude_none=True),
        "experiments": {experiment: _asked(cells) for experiment, cells in by_experiment.items()},
        "left_out": {f"{out.experiment} on {out.target}": out.reason for out in plan.left_out},
        "claims": list(dict.fromkeys(claim.id for claim in found.claims)), "untestable": dict(plan.untestable_claims()),
        "path": found.path, "sha256": found.sha256,
    }


def _asked(cells: Iterable[Cell]) -> dict[str, Any]:
    """What the cells of an experiment ask, each value once."""
    cells = list(cells)

    def each(key: str) -> list[Any]:
        return list(dict.fromkeys(cell.config[key] for cell in cells if cell.config.get(key) is not None))

    return {"kind": cells[0].config["kind"], "models": each("model"), "batch_sizes": each("batch_size"),
            "methods": list(dict.fromkeys(cell.label for cell in cells)), "budgets": each("budget"), "targets": each("target"),
            "devices": each("devices"), "cells": len(cells)}


# ------------------------------------------------------------------------------------------------ a run
def run(library: Library, name: str, results: Path) -> dict[str, Any]:
    """What a run was asked, on which machine, and what its cells have come to so far. WorkflowError where there is none such."""
    found = resolve_run(name, results)
    plan, records = found.plan, found.records()
    asked, environment = plan.get("workflow", {}), plan.get("environment", {})
    git, software = environment.get("git") or {}, environment.get("software") or {}
    return {
        "run": found.name, "title": asked.get("title"), "workflow": asked.get("path"), "overrides": list(plan["overrides"]),
        "started": plan["started"], "machine": hardware_in_words("cpu", environment), "vramlab": software.get("vramlab"),
        "commit": git.get("commit"), "cells": len(plan["cells"]), "done": sum(map(is_done, records.values())),
        "outcomes": dict(Counter(str(record.outcome) for record in records.values())),
        "seconds": sum(record.provenance.get("seconds") or 0 for record in records.values()),
        "left_out": {f"{out['experiment']} on {out['target']}": out["reason"] for out in plan.get("left_out", ())},
        "folder": str(found.folder), "report": command("report", "run", str(found.folder)), "records": _records(found, records),
    }


def _records(found: RunFolder, records: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every planned cell: what it is called, its key, which is its folder's name too, and what it came to."""
    return [{"cell_id": cell["cell_id"], "cell": cell.get("title") or name_of(cell["config"], cell.get("label")),
             "outcome": str(records[cell["cell_id"]].outcome) if cell["cell_id"] in records else None,
             "told": summary(records[cell["cell_id"]]) if cell["cell_id"] in records else "no record yet",
             "folder": str(found.cell_folder(cell["cell_id"]))} for cell in found.plan["cells"]]


def run_in_words(body: Mapping[str, Any]) -> dict[str, Any]:
    """Its cells as one line each, by their ids."""
    told = {record["cell_id"]: f"{record['cell']}: {record['told']}" for record in body["records"]}
    return {**body, "seconds": seconds_in_words(body["seconds"]), "records": told}


# ------------------------------------------------------------------------------------------------ a key
def key(library: Library, name: str, results: Path) -> dict[str, Any]:
    """What a key of a workflow file may be, and the keys below it. Of a list's items, `methods.name` does for `methods[].name`."""
    known = {row["key"]: row for row in rows()}
    plain = {written.replace("[]", ""): written for written in known}
    wanted = name if name in known else plain.get(name)
    if wanted is None:
        raise WorkflowError(f"there is no key {name!r}{offer(name, [*known, *plain], 'there are', '`list keys`')}")
    below = [row for written, row in known.items() if written.startswith((f"{wanted}.", f"{wanted}[]."))]
    return {**known[wanted], "below": {row["key"]: _key_in_words(**row) for row in below}}


def _key_in_words(key: str, default: str, allowed: str) -> str:
    return f"{allowed} {default}" if default.startswith("(") else f"{allowed}; default {default}" if default else allowed
