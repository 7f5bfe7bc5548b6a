"""run workflow, validate workflow, plan step."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Sequence

from vramlab.cli.progress import display_for, status_for, summary, time_left
from vramlab.cli.words import command, device_or_assumed, duration, print_json, table
from vramlab.collection import Library, find_collections
from vramlab.counted import count_of
from vramlab.doctor import detect_host
from vramlab.environment import cache_dir
from vramlab.errors import EnvironmentUnable, WorkflowError
from vramlab.record import Outcome, RunRecord
from vramlab.report.authors import check_beside
from vramlab.report.words import (
    DASH, FEW_PAIRS, budget_in_words, bytes_in_words, is_of_few_pairs, is_simulated, seconds_in_words,
)
from vramlab.run_folder import RunFolder, is_done
from vramlab.runner import Result, Runner, plan_to_json
from vramlab.this_machine import open_profile
from vramlab.workflow import Host, Plan, expand, load_workflow, single_cell
from vramlab.workflow_notes import ABOVE_EAGER, is_above_eager, notes


def open_library(extra: Sequence[Path]) -> Library:
    """All collections in sight."""
    return Library(find_collections(extra))


def run(file: str, overrides: Sequence[str], device: str, results: Path, extra: Sequence[Path], *, is_dry: bool, as_json: bool) -> int:
    """Run or resume; the exit code."""
    workflow = load_workflow(file, open_library(extra), overrides)
    check_beside(Path(workflow.path), workflow.name, workflow.library)  # told now, not by the report after hours
    plan = expand(workflow, detect_host(device))
    _print_notes(notes(workflow, plan.host.platform))
    if is_dry:
        return _dry_run(plan, results, as_json)
    result = Runner(plan, results, display_for(as_json)).run()
    again = command("run", "workflow", file, *overrides, *_options(device, results, extra))
    if result.is_interrupted:
        print(f"Interrupted: {_count_done(result)} of {count_of(len(plan.cells), 'cell')} done. To go on: {again}", file=sys.stderr)
        return result.exit_code
    from vramlab.report import render

    report = render(result.run.folder, tuple(extra))
    if as_json:
        print_json(_result_to_json(plan, result, report))
    else:
        _print_result(plan, result, report, again)
    return result.exit_code


def _print_notes(found: Sequence[str]) -> None:
    """On stderr: stdout may belong to a document."""
    for note in found:
        print(f"note: {note}", file=sys.stderr)


def _options(device: str, results: Path, extra: Sequence[Path]) -> list[str]:
    words = [] if device == "auto" else ["--device", device]
    words += [] if results == Path("results") else ["--output-dir", str(results)]
    return words + [word for folder in extra for word in ("--collection", str(folder))]


def _count_done(result: Result) -> int:
    return sum(is_done(record) for record in result.records.values())


# ------------------------------------------------------------------------------------------------ the result


def result_row(plan_label: str, record: RunRecord) -> list[str]:
    """One line of the result table."""
    config, is_from_simulator = record.config, is_simulated(record)
    block = record.predicted if is_from_simulator else record.measured
    batch = config["batch_size"] if config["batch_size"] is not None else record.search.get("largest")
    target = f"{config['target'].removeprefix('sim:')} *simulated*" if is_from_simulator else config["target"]
    return [
        config["experiment"], config["model"], DASH if batch is None else str(batch), plan_label,
        DASH if config["budget"] is None else budget_in_words(config), target, str(record.outcome).replace("_", " "),
        _truth(record), bytes_in_words(block.get("peak_bytes")), _time(record),
    ]


def _truth(record: RunRecord) -> str:
    return DASH if is_simulated(record) else str(record.truth).replace("_", " ")


def _time(record: RunRecord) -> str:
    if is_simulated(record):
        return seconds_in_words(record.predicted.get("step_seconds"))
    ratio = record.measured.get("ratio") or {}
    if ratio.get("median") is None:
        return DASH
    pairs = f", {count_of(ratio['n'], 'pair')}" if ratio.get("n") else ""
    is_told = record.measured.get("is_distinguishable") is not False
    noise = ", too few to tell" if is_of_few_pairs(ratio) else "" if is_told else ", not distinguishable"
    return f"{ratio['median']:.2f}x {'itself' if record.config['method'] == 'eager' else 'eager'}{pairs}{noise}"


COLUMNS = ("experiment", "model", "batch", "method", "budget", "target", "outcome", "truth", "peak", "step time")


def _print_result(plan: Plan, result: Result, report: Path, again: str) -> None:
    labels = {cell.cell_id: cell.label for cell in plan.cells}
    print()
    print(table(COLUMNS, [result_row(labels[cell_id], record) for cell_id, record in result.records.items()], right=("batch", "peak")))
    print_few_pairs(result.records.values())
    failed = [(cell_id, record) for cell_id, record in result.records.items() if not plan.is_expected(record.kind, record.outcome)]
    for cell_id, record in failed:
        print(f"\n{_title(plan, cell_id)}: {summary(record)}\n  {result.run.cell_folder(cell_id) / 'stdout.log'}")
    if any(not is_done(record) for _, record in failed):
        print(f"\nTo run the cells again that crashed or timed out: {again}")
    _print_untestable(plan)
    print(f"\nreport: {report}")


def print_few_pairs(records: Iterable[RunRecord]) -> None:
    """A line where an interval rests on few."""
    if any(is_of_few_pairs(record.measured.get("ratio") or {}) for record in records):
        print(f"\n{FEW_PAIRS}; measure.steps says how many are taken")


def _title(plan: Plan, cell_id: str) -> str:
    return next(cell.title for cell in plan.cells if cell.cell_id == cell_id)


def _print_untestable(plan: Plan) -> None:
    for out in plan.left_out:
        print(f"left out: {out.experiment} on {out.target}: {out.reason}")
    for name, reason in plan.untestable_claims():
        print(f"not testable here: claim {name}: {reason}")


def _result_to_json(plan: Plan, result: Result, report: Path) -> dict[str, Any]:
    return {
        "run": result.run.name, "run_folder": str(result.run.folder), "report": str(report), "exit_code": result.exit_code,
        "outcomes": dict(Counter(str(record.outcome) for record in result.records.values())),
        "cells": [record.to_json() for record in result.records.values()],
        "left_out": plan_to_json(plan)["left_out"],
    }


# ------------------------------------------------------------------------------------------------ dry run, validate


def _dry_run(plan: Plan, results: Path, as_json: bool) -> int:
    run = RunFolder(results / plan.workflow.name / plan.run_id)
    done = {cell.cell_id for cell in plan.cells if is_done(run.record(cell.cell_id))}
    seconds = time_left(plan, run).seconds()
    exit_code = 0 if plan.cells else 3
    if as_json:
        print_json(plan_to_json(plan) | {
            "run_folder": str(run.folder), "done": sorted(done), "minutes_left": None if seconds is None else seconds / 60,
            "disk_bytes": plan.expected.disk_bytes, "disk_free_bytes": _free_bytes(results),
            "untestable_claims": [{"id": name, "reason": reason} for name, reason in plan.untestable_claims()],
        })
        return exit_code
    label = f" ({plan.label})" if plan.label else ""
    print(f"{plan.title}{label}\n")
    print(table(("cell", "experiment", "what", "state"), [
        (cell.cell_id, cell.config["experiment"], cell.title, "done" if cell.cell_id in done else "to run") for cell in plan.cells
    ]))
    left = "not known yet" if seconds is None else f"about {duration(seconds)}"
    print(f"\n{count_of(len(plan.cells), 'cell')}, {len(done)} done; time left: {left}; disk: {_disk_in_words(plan, results)}")
    print(f"run folder: {run.folder}")
    if not plan.host.cuda_devices:
        print("not measured here: GPU memory, transfers and times (this machine has no NVIDIA GPU)")
    _print_untestable(plan)
    return exit_code


def _free_bytes(results: Path) -> int:
    there = next(path for path in (results.absolute(), *results.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def _disk_in_words(plan: Plan, results: Path) -> str:
    needed = plan.expected.disk_bytes
    return f"{'not stated' if needed is None else bytes_in_words(needed)}, {bytes_in_words(_free_bytes(results))} free"


def validate(file: str, overrides: Sequence[str], extra: Sequence[Path], *, as_json: bool) -> int:
    """Check for both platforms and count the cells of each. WorkflowError lists what is wrong."""
    workflow = load_workflow(file, open_library(extra), overrides)
    check_beside(Path(workflow.path), workflow.name, workflow.library)
    plans = {"cpu": expand(workflow, Host("cpu")), "cuda": expand(workflow, Host("cuda:0", 1))}
    _print_notes(notes(workflow))
    if as_json:
        print_json({"name": workflow.name, "path": workflow.path, "sha256": workflow.sha256,
                    "cells": {platform: len(plan.cells) for platform, plan in plans.items()}})
    else:
        print(f"{workflow.path} is valid: {count_of(len(plans['cpu'].cells), 'cell')} on a CPU, {len(plans['cuda'].cells)} with a GPU")
    return 0


# ------------------------------------------------------------------------------------------------ plan step


# Which option of `plan step` sets which key of a workflow.
_OPTIONS = {"model": "--model", "batch_sizes": "--batch", "methods": "--method", "budgets": "--budget", "targets": "--device"}


def plan_one_step(model: str, batch: int, method: str, budget: str | None, device: str | None, overrides: Sequence[str],
                  extra: Sequence[Path], save_schedule: Path | None = None, *, as_json: bool) -> int:
    """One cell, run in a folder that is thrown away; what is predicted for it, and what was assumed of the device. Its schedule is kept
    where that is asked for.

    Exit code 1 when there is no plan: unlike a workflow, which expects some of its budgets to be out of reach, this was asked for one.
    """
    library = open_library(extra)
    if budget is not None and method in library.method_paths and not library.method(method).card.takes_budget:
        raise WorkflowError(f"--budget: method {method!r} takes no budget; its plan does not depend on one. Leave it out")
    settings: dict[str, Any] = {"model": model, "batch_sizes": [batch], "methods": [method], "targets": ["auto"],
                                "measure": {"time": False, "peak": False}}
    if budget is not None:
        settings["budgets"] = [budget]
        _print_notes([f"--budget {ABOVE_EAGER.format(budget)}"] if is_above_eager(budget) else [])
    device, assumed = device_or_assumed(device)
    plan = single_cell(library, settings, overrides, detect_host(device), _OPTIONS)
    with tempfile.TemporaryDirectory(prefix="plan-", dir=scratch()) as folder:
        result = Runner(plan, Path(folder), status_for(sys.stderr)).run()
        if result.is_interrupted:
            return result.exit_code
        record = next(iter(result.records.values()), None)
        if save_schedule is not None and record is not None:
            _keep_schedule(result.run.cell_folder(record.cell_id) / "schedule.json.gz", save_schedule)
    if record is None:
        raise EnvironmentUnable("the step was not planned: its cell left no record")
    if as_json:
        print_json(record.to_json() | {"assumed": {"device": assumed} if assumed else {}})
    else:
        _print_prediction(record, assumed)
    return result.exit_code if record.outcome is Outcome.OK else 1


def _keep_schedule(made: Path, wanted: Path) -> None:
    if not made.is_file():
        print(f"{wanted} was not written: the method made no schedule", file=sys.stderr)
        return
    shutil.copyfile(made, wanted)


def scratch() -> Path:
    """Where runs that are thrown away lie."""
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _print_prediction(record: RunRecord, assumed: str) -> None:
    config, predicted = record.config, record.predicted
    options = f" {json.dumps(config['options'])}" if config["options"] else ""
    outcome = "planned" if record.outcome is Outcome.OK else str(record.outcome).replace("_", " ")
    print(f"{config['model']} batch {config['batch_size']}, {config['method']}{options}: {outcome}"
          f"{f' ({record.message})' if record.message else ''}")
    print(f"  {_of_step(config)}" + (f"\n  {assumed}" if assumed else ""))
    if record.outcome is not Outcome.OK:
        return
    if "predicted" in record.missing:
        print(f"  nothing is predicted: {record.missing['predicted']}")
        return
    rows = [
        ("budget", "none" if record.budget_bytes is None else bytes_in_words(record.budget_bytes)),
        ("peak", f"{bytes_in_words(predicted.get('peak_bytes'))} at op {predicted.get('peak_op', DASH)}"),
        *_room(config["target"], predicted.get("peak_bytes")),
        ("host peak", bytes_in_words(predicted.get("peak_host_bytes"))),
        ("eager's peak", bytes_in_words(record.eager_peak_bytes)),
        ("step", seconds_in_words(predicted.get("step_seconds"))),
        ("recomputing", seconds_in_words(predicted.get("recompute_seconds"))),
        ("waiting for copies", seconds_in_words(predicted.get("stall_seconds"))),
        ("moved", bytes_in_words(predicted.get("moved_bytes"))),
    ]
    print(f"all *simulated* on {predicted.get('profile', config['target'])}:")
    print("\n".join(f"  {name:<19} {value}" for name, value in rows))


def _of_step(config: Mapping[str, Any]) -> str:
    """`image_size 224, classes 1000, sgd`: what the step is of where nothing else was asked for."""
    options = [f"{name} {value}" for name, value in config["model_options"].items() if value is not None]
    return ", ".join([*options, f"optimizer {config['training']['optimizer']}"])


def _room(target: str, peak_bytes: int | None) -> Iterator[tuple[str, str]]:
    """Whether a stated device holds the peak; a plan without a budget may well exceed it."""
    if target.startswith("sim:") and peak_bytes is not None:
        memory_bytes = open_profile(target.removeprefix("sim:")).memory_bytes
        verdict = "fits" if peak_bytes <= memory_bytes else "does not fit, so this step cannot run there"
        yield "device's memory", f"{bytes_in_words(memory_bytes)}: the peak {verdict}"
