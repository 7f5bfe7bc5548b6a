"""What is done with finished runs, and with this machine: compare, cite, doctor."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Sequence

from vramlab.citations import citations
from vramlab.cli.words import print_json, table
from vramlab.collection import Library, find_collections
from vramlab.counted import count_of
from vramlab.errors import WorkflowError
from vramlab.report.words import DASH, bytes_in_words, join_words
from vramlab.run_folder import RunFolder, resolve_run
from vramlab.workflow import name_of
from vramlab.yaml_nodes import one_of

if TYPE_CHECKING:
    from vramlab.report.compare import Comparison, Difference, Pair

# How a workflow file writes what a cell's config has: keys with a list of values, and mappings.
_LISTS = {"batch_size": "batch_sizes", "budget": "budgets", "target": "targets", "devices": "devices"}
_MAPPINGS = {"training": "training.", "model_options": "model.", "search": "search."}

def compare_two(first: str, second: str, threshold: float, results: Path, *, as_json: bool) -> int:
    """Print what differs between two runs; exit code 1 when the second has regressed."""
    from vramlab.report.compare import compare

    runs = resolve_run(first, results), resolve_run(second, results)
    if runs[0].folder.resolve() == runs[1].folder.resolve():
        print(f"note: A and B are the same run, {runs[0].name}", file=sys.stderr)
    found = compare(*runs, threshold=threshold)
    if not found.pairs:
        raise WorkflowError(f"no cell has a record in both {first} and {second}: there is nothing to compare. {_why_apart(found, runs)}")
    if as_json:
        print_json(asdict(found) | {"has_regressed": found.has_regressed, "runs": [str(run.folder) for run in runs]})
    else:
        print("\n".join([table(("", "run", "started"), [(name, run.folder, run.plan["started"]) for name, run in zip("AB", runs)]), "",
                         *_compared(found, threshold)]))
    return 1 if found.has_regressed else 0


def _why_apart(found: Comparison, runs: Sequence[RunFolder]) -> str:
    """What two runs without a cell in common ask differently, and how to have one that asks the same."""
    empty = [run.name for run, configs in zip(runs, (found.only_first, found.only_second)) if not configs]
    if empty:
        return f"{join_words(empty)} {'has' if len(empty) == 1 else 'have'} no record yet"
    names = [run.name for run in runs]
    told = [f"{q.key} ({_values(q.first)} in {names[0]}, {_values(q.second)} in {names[1]})" for q in found.asked]
    overrides = [_override(q.key, q.first) for q in found.asked]
    way = f"for one that does, run the workflow of {names[1]} again with {' '.join(overrides)}" if all(overrides) else (
        "cells are compared when all that they ask is the same, whatever the machine and the code")
    return f"Their cells do not ask the same: they differ in {one_of(told)}; {way}"


def _override(key: str, values: Sequence[Any]) -> str:
    """The override that gives a workflow these values of a cell's key; empty where there is none such."""
    above, _, below = key.rpartition(".")
    if key in _LISTS and None not in values:
        return shlex.quote(f"{_LISTS[key]}=[{','.join(map(str, values))}]")
    if len(values) != 1 or values[0] is None or above not in _MAPPINGS:
        return ""
    value = values[0] if isinstance(values[0], str) else json.dumps(values[0])
    return shlex.quote(f"{_MAPPINGS[above]}{below}={value}")


def _values(values: Sequence[Any]) -> str:
    return one_of(DASH if value is None else str(value) for value in values) or DASH


def _compared(found: Comparison, threshold: float) -> Iterator[str]:
    if found.settings:
        yield table(("made differently", "A", "B"), found.settings) + "\n"
    rows = [(name_of(pair.config), *_difference(pair, d)) for pair in found.pairs for d in pair.differences
            if d.change is not None or d.is_distinguishable]
    yield table(("cell", "figure", "A", "B", "B / A", ""), rows, right=("A", "B", "B / A"))
    for run, configs in (("A", found.only_first), ("B", found.only_second)):
        for config in configs:
            yield f"only in {run}: {name_of(config)}"
    if found.asked:
        yield "\n" + table(("asked differently", "A", "B"), [(q.key, _values(q.first), _values(q.second)) for q in found.asked])
    worse = sum(len(pair.regressions) for pair in found.pairs)
    told = f"{count_of(worse, 'figure')} worse in B by more than {100 * threshold:g} %, beyond the noise"
    yield f"\n{count_of(len(found.pairs), 'cell')} compared; {told}"


def _difference(pair: Pair, found: Difference) -> tuple[str, str, str, str, str]:
    def in_words(value: Any) -> str:
        if found.figure.endswith("bytes"):
            return bytes_in_words(value)
        return DASH if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    figure = found.figure + (" *simulated*" if pair.is_simulated and found.change is not None else "")
    verdict = "worse" if found.is_regression else "" if found.is_distinguishable or found.first == found.second else "not distinguishable"
    return figure, in_words(found.first), in_words(found.second), DASH if found.change is None else f"{1 + found.change:.3f}", verdict


def print_citations(name: str, results: Path, extra: Sequence[Path]) -> int:
    """BibTeX of each paper, model and data set once, in the order of the run's cells."""
    run = resolve_run(name, results)
    print("\n\n".join(citations((cell["config"] for cell in run.plan["cells"]), Library(find_collections(extra)))))
    return 0


def examine(results: Path, *, as_json: bool) -> int:
    """Print what this machine can do; exit code 3 when nothing can run."""
    from vramlab import doctor

    findings = doctor.examine(results)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        rows = [(str(f.state), f.what, f.said + (f". Fix: {f.fix}" if f.fix else "")) for f in findings]
        print(table(("state", "what", "found"), rows))
    return 0 if doctor.can_run(findings) else 3
