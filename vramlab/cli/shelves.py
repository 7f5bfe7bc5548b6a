"""list, show and check: what the collections and the results hold."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from vramlab.cli import shown
from vramlab.cli.claim_tables import claim_lines
from vramlab.cli.words import command, print_json, table
from vramlab.collection import Library, Method, Model, Option, find_collections
from vramlab.counted import count_of
from vramlab.device import profile_names
from vramlab.errors import WorkflowError
from vramlab.report.claims import load_claims
from vramlab.report.standing import standings
from vramlab.report.words import bytes_in_words, join_words
from vramlab.run_folder import find_runs, is_done, unreadable_runs
from vramlab.runs import load_run
from vramlab.this_machine import THIS, is_calibrated, known_profiles, open_profile
from vramlab.yaml_nodes import offer, one_of, plain, read_yaml

Rows = list[dict[str, Any]]
_HEADINGS = {"takes_budget": "takes a budget", "seconds": "took"}  # what --json names by a key
# How a method is told: what it is first, then how it is used, then what it is not, then what names it.
_OF_METHOD = ("name", "title", "paper", "decides", "kind", "takes_budget", "options", "needs", "deviations", "fidelity", "exemptions",
              "claims", "tags", "alias", "version", "uid", "folder", "source_sha256", "bibtex")
_WIDTH = 120  # columns, where there is no terminal to ask


def list_shelf(what: str, tags: Sequence[str], extra: Sequence[Path], results: Path, *, shows_all: bool = False, as_json: bool) -> int:
    """Print what there is; of claims a summary unless all are asked for. Exit code 2 when a card cannot be read: its problems are on
    stderr, the others are listed."""
    _require(what, _LISTS)
    problems: list[str] = []
    rows = _LISTS[what](Library(find_collections(extra)), results, problems)
    wanted = {tag.strip() for tag in tags if tag.strip()}
    rows = [row for row in rows if wanted <= set(row.get("tags", ()))]
    if as_json:
        print_json(rows)
    elif rows and what == "claims":
        print("\n".join(claim_lines(rows, shows_all=shows_all, is_terminal=sys.stdout.isatty())))
    elif rows:
        told = [[_in_words(value) for value in row.values()] for row in rows]
        print(table([_HEADINGS.get(column, column) for column in rows[0]], told))
    else:
        print(f"no {what}" + (f" with tags {join_words(sorted(wanted))}" if wanted else ""))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 2 if problems else 0


def show_item(what: str, name: str, extra: Sequence[Path], results: Path, *, as_json: bool) -> int:
    """Print all that is known of one thing."""
    _require(what, _SHOWS)
    body = _SHOWS[what](Library(find_collections(extra)), name, results)
    if as_json:
        print_json(body)
    else:
        print("\n".join(_lines(_IN_WORDS.get(what, dict)(body))))
    return 0


def _method_in_words(body: Mapping[str, Any]) -> dict[str, Any]:
    """Its paper in one line, its BibTeX last."""
    paper = body["paper"]
    cited = paper and (f"{join_words(paper['authors'])}: {paper['title']}. {paper['venue']} {paper['year']}"
                       + "".join(f", {paper[key]}" for key in ("doi", "url") if paper[key]))
    whole = {**body, "paper": cited or "none: a baseline, a tool or PyTorch's own", "bibtex": paper and paper["bibtex"]}
    return {key: whole[key] for key in _OF_METHOD}


def _require(what: str, known: Mapping[str, Any]) -> None:
    if what not in known:
        raise WorkflowError(f"{what!r} is not allowed{offer(what, known)}")


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        words = [str(word) for word in value]
        return (", " if any(" " in word for word in words) else " ").join(words)
    if isinstance(value, float):
        return f"{value:.12g}"
    return {True: "yes", False: "no", None: ""}.get(value, str(value)) if isinstance(value, bool | None) else str(value)


# ------------------------------------------------------------------------------------------------ lists


def _read_all(paths: Mapping[str, Any], read: Callable[[str], Any], problems: list[str]) -> list[Any]:
    found = []
    for name in paths:
        try:
            found.append(read(name))
        except WorkflowError as error:
            problems.append(str(error))
    return found


def _methods(library: Library, results: Path, problems: list[str]) -> Rows:
    methods: list[Method] = _read_all(library.method_paths, library.method, problems)
    return [{"name": m.name, "kind": m.card.kind, "takes_budget": m.card.takes_budget, "title": m.card.title, "tags": m.card.tags}
            for m in methods]


def _models(library: Library, results: Path, problems: list[str]) -> Rows:
    models: list[Model] = _read_all(library.model_paths, library.model, problems)
    return [{"name": m.name, "family": m.card.family, "title": m.card.title, "size": _input_size(m), "tags": m.card.tags} for m in models]


def _input_size(model: Model) -> str:
    options = model.card.options
    if "image_size" in options:
        return f"{options['image_size'].default} px"
    return count_of(options["sequence_length"].default, "token")


def _workflows(library: Library, results: Path, problems: list[str]) -> Rows:
    def read(name: str) -> dict[str, Any]:
        path = library.workflow(name)
        body = plain(read_yaml(path))
        body = body if isinstance(body, dict) else {}
        return {"name": name, "title": body.get("title"), "run": command("run", "workflow", name), "tags": []}

    return [{key: value for key, value in row.items() if key != "tags"} for row in _read_all(library.workflow_paths, read, problems)]


def _keys(library: Library, results: Path, problems: list[str]) -> Rows:
    from vramlab.workflow_keys import rows

    return [dict(row) for row in rows()]


def _devices(library: Library, results: Path, problems: list[str]) -> Rows:
    return [{"name": name, "memory": bytes_in_words(profile.memory_bytes), "TFLOP/s": round(profile.flops_per_second / 1e12, 2),
             "GB/s": round(profile.memory_bytes_per_second / 1e9), "to host GB/s": round(profile.d2h_bytes_per_second / 1e9, 1)}
            for name in (*profile_names(), *([THIS] if is_calibrated() else [])) for profile in [open_profile(name)]]


def _claims(library: Library, results: Path, problems: list[str]) -> Rows:
    runs = [load_run(run.folder) for run in find_runs(results)]
    return [standing.to_json() for standing in standings(runs, load_claims(library.report_files("claims.yaml")))]


def _runs(library: Library, results: Path, problems: list[str]) -> Rows:
    rows: Rows = [{"run": run.name, "started": None, "cells": None, "done": None, "outcomes": f"unreadable: {why}", "overrides": []}
                  for run, why in unreadable_runs(results)]
    for run in find_runs(results):
        records = run.records()
        outcomes = Counter(str(record.outcome) for record in records.values())
        rows.append({"run": run.name, "started": run.plan["started"], "cells": len(run.plan["cells"]),
                     "done": sum(map(is_done, records.values())),
                     "outcomes": ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())),
                     "overrides": list(run.plan["overrides"])})
    return rows


_LISTS: Mapping[str, Callable[[Library, Path, list[str]], Rows]] = {
    "models": _models, "methods": _methods, "workflows": _workflows, "keys": _keys, "devices": _devices, "claims": _claims, "runs": _runs,
}


# ------------------------------------------------------------------------------------------------ one item


def _method(library: Library, name: str, results: Path) -> dict[str, Any]:
    method = library.method(name)
    return {"name": method.name, **method.card.model_dump(), "folder": str(method.folder), "source_sha256": method.sha256}


def _model(library: Library, name: str, results: Path) -> dict[str, Any]:
    model = library.model(name)
    return {**model.body, "path": str(model.path), "source_sha256": model.sha256}


def _device(library: Library, name: str, results: Path) -> dict[str, Any]:
    if name not in known_profiles():
        raise WorkflowError(f"there is no device profile {name!r}{offer(name, known_profiles(), 'there are', '`list devices`')}")
    return open_profile(name).to_json()


def _claim(library: Library, name: str, results: Path) -> dict[str, Any]:
    known = load_claims(library.report_files("claims.yaml"))
    if name not in known:
        raise WorkflowError(f"there is no claim {name!r}{offer(name, known, 'there are', '`list claims --all`')}")
    methods = [method for method in library.method_paths if name in library.method(method).card.claims]
    return {**asdict(known[name]), "methods": methods}


_SHOWS: Mapping[str, Callable[[Library, str, Path], dict[str, Any]]] = {
    "method": _method, "model": _model, "workflow": shown.workflow, "key": shown.key, "device": _device, "claim": _claim, "run": shown.run,
}
_IN_WORDS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"method": _method_in_words, "run": shown.run_in_words}


def _lines(body: Mapping[str, Any], indent: str = "") -> list[str]:
    """A mapping as aligned `key  value` lines; nested ones below their key, empty ones left out. Long lines go on below their beginning."""
    lines = []
    names = {key: _HEADINGS.get(key, key) for key in body}
    width = max((len(names[key]) for key, value in body.items() if not isinstance(value, dict)), default=0)
    for key, value in body.items():
        if value in (None, "", [], {}):
            continue
        if key == "options" and isinstance(value, dict):
            lines += [f"{indent}options", *(line for name, option in value.items()
                                            for line in _folded(f"{indent}  {name}: {_option(option)}", len(indent) + 6))]
        elif isinstance(value, dict):
            lines += [f"{indent}{names[key]}", *_lines(value, indent + "  ")]
        elif key == "bibtex":
            lines += [f"{indent}{key}", *(f"{indent}  {entry}" for entry in value.splitlines())]
        elif key == "deviations":
            lines += [f"{indent}{key}", *(line for entry in value for line in _folded(f"{indent}  - {entry}", len(indent) + 4))]
        else:
            lines += _folded(f"{indent}{names[key]:<{width}}  {_in_words(value)}", len(indent) + width + 2)
    return lines


def _folded(line: str, indent: int) -> list[str]:
    """A line at the width of the terminal, else at a width that reads well; words are never cut."""
    width = shutil.get_terminal_size((_WIDTH, 24)).columns if sys.stdout.isatty() else _WIDTH
    return textwrap.wrap(line, max(width, indent + 20), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _option(declared: Mapping[str, Any]) -> str:
    option = Option(**declared)
    facts = [f"default {_in_words(option.default) or 'none'}"]
    facts += [f"one of {one_of(map(str, option.choices))}"] if option.choices else []
    facts += [f"at least {option.min:g}"] if option.min is not None else []
    facts += [f"at most {option.max:g}"] if option.max is not None else []
    facts += [f"{option.symbol} in the paper"] if option.symbol else []
    return f"{option.type}, {', '.join(facts)}: {option.help}"
