"""check method: what it imports, its options, its plans, the contract that all methods keep, and the truth gate on this machine.
check prediction: what the simulator said of steps, against what they took.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterator, Sequence

from vramlab.cli.words import print_json, table
from vramlab.cli.progress import PlainDisplay
from vramlab.cli.progress import SilentDisplay
from vramlab.cli.workflows import open_library, scratch
from vramlab.collection import Library, Method
from vramlab.counted import count_of
from vramlab.errors import WorkflowError
from vramlab.doctor import detect_host
from vramlab.isolate import Call, Settings, run_isolated
from vramlab.method_check import Check
from vramlab.prediction import Comparison, Prediction, comparisons, judge, to_json
from vramlab.record import Outcome, RunRecord, Truth
from vramlab.report.claims import load_claims
from vramlab.report.words import DASH, bytes_in_words, seconds_in_words
from vramlab.run_folder import resolve_run
from vramlab.runner import Runner
from vramlab.workflow import Host, single_cell
from vramlab.yaml_nodes import nearest

BUDGETS = ("80%", "60%")
# How long a method may take over its plans of a small chain, and over the whole contract on all toys.
PLANS_SECONDS, CONTRACT_SECONDS = 120.0, 1200.0
# An honest refusal is no fault of a method.
_REFUSED = frozenset({Outcome.PLAN_INFEASIBLE, Outcome.UNSUPPORTED})


def check_one_method(name: str, extra: Sequence[Path], *, as_json: bool) -> int:
    """Print every check of a method, which is named, or given by its folder; exit code 1 when one fails. WorkflowError (exit code 2) when
    there is none or its card is wrong."""
    name, collection = _named_or_at(name)
    library = open_library([*extra, *collection])
    method = library.method(name)
    checks = [_check_claims(library, method), *_apart("check_folder", method, PLANS_SECONDS)]
    if not any(check.faults for check in checks) and not method.card.required:
        checks += _apart("check_contract_of_folder", method, CONTRACT_SECONDS) if method.card.kind == "planner" else []
        checks.append(_check_truth(library, method))
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        print("\n".join(f"{'ok  ' if not check.faults else 'FAIL'}  {check.what}" + "".join(f"\n        {fault}" for fault in check.faults)
                        for check in checks))
    return 1 if any(check.faults for check in checks) else 0


def _named_or_at(text: str) -> tuple[str, list[Path]]:
    """A method's name, and the collection that it lies in where its folder was given."""
    folder = Path(text)
    if not (folder / "card.yaml").is_file() or "/" not in f"{text}{'/' if text in ('.', '..') else ''}":
        return text, []
    folder = folder.resolve()
    if folder.parent.name != "methods":
        raise WorkflowError(f"{text} is not in a folder methods/: a collection holds its methods as COLLECTION/methods/NAME")
    return folder.name, [folder.parent.parent]


def _check_claims(library: Library, method: Method) -> Check:
    known = load_claims(library.report_files("claims.yaml"))
    return Check("the card's claims are in reports/claims.yaml", [f"claim {claim!r} is unknown{nearest(claim, known)}"
                                                                  for claim in method.card.claims if claim not in known])


def _apart(questions: str, method: Method, seconds: float) -> list[Check]:
    """Put to the method in a process of its own: one that hangs, dies or prints has its faults told like any other."""
    call = Call(function=f"vramlab.method_check.{questions}", args=(str(method.folder),))
    answer = run_isolated(call, timeout_seconds=seconds, settings=Settings(output=sys.__stderr__.fileno()))
    if answer.outcome is Outcome.OK:
        return answer.value
    return [Check("answers every question in a process of its own", [f"{answer.outcome}: {answer.message}"])]


def _check_truth(library: Library, method: Method) -> Check:
    """Three steps of a small ResNet on the CPU, against eager PyTorch."""
    settings: dict[str, Any] = {
        "model": {"name": "resnet8-digits", "image_size": 16}, "batch_sizes": [8], "methods": [method.name], "targets": ["cpu"],
        "measure": {"time": False, "peak": False, "timeout_seconds": 300, "plan_timeout_seconds": 120},
    }
    if method.card.takes_budget:
        settings["budgets"] = list(BUDGETS)
    with tempfile.TemporaryDirectory(prefix="check-", dir=scratch()) as folder:
        result = Runner(single_cell(library, settings, [], Host("cpu")), Path(folder), SilentDisplay()).run()
    records = list(result.records.values())
    said = "; ".join(f"{r.config['budget'] or 'no budget'}: {r.truth if r.outcome is Outcome.OK else r.outcome}" for r in records)
    return Check(f"three steps of a small ResNet give eager PyTorch's bits ({said})".replace("_", " "), list(_truth_faults(records)))


def _truth_faults(records: Sequence[RunRecord]) -> Iterator[str]:
    if not records:
        yield "the step was not run: its cell left no record"
    for record in records:
        is_told = record.outcome is Outcome.OK and record.truth in (Truth.EXACT, Truth.WITHIN_NOISE, Truth.SEMANTICS_CHANGED)
        if not is_told and record.outcome not in _REFUSED:
            yield f"{record.config['budget'] or 'no budget'}: {record.outcome}, {record.message or record.truth}"


# ------------------------------------------------------------------------------------------------ check prediction
@dataclass(frozen=True, kw_only=True)
class Grid:
    """Cells to run for a check: models x methods x budgets."""

    models: Sequence[str]
    methods: Sequence[str]
    budgets: Sequence[str]
    batch: int
    steps: int  # timed
    device: str
    overrides: Sequence[str]


def check_prediction(runs: Sequence[str], results: Path, grid: Grid, extra: Sequence[Path], *, as_json: bool) -> int:
    """Simulated against measured, over the cells of runs or of a grid that is run now; exit code 1 when step times are too far off."""
    if bool(runs) == bool(grid.models):
        raise WorkflowError("check prediction needs runs, or --models to run cells of their own; not both")
    records = [r for name in runs for r in resolve_run(name, results).records().values()] if runs else _run_grid(grid, extra)
    cells = comparisons(records)
    found = judge(cells)
    if as_json:
        print_json(to_json(found, cells))
    else:
        print("\n".join(_in_lines(found, cells)))
    return 1 if found.faults else 0


# Which option of `check prediction` sets which key of a workflow.
_OPTIONS = {"model": "--models", "batch_sizes": "--batch", "methods": "--methods", "budgets": "--budgets", "targets": "--device",
            "measure": "--steps"}


def _run_grid(grid: Grid, extra: Sequence[Path]) -> list[RunRecord]:
    """The records of all cells, in a folder that is thrown away. One line a cell on stderr."""
    library, host, records = open_library(extra), detect_host(grid.device), []
    if host.auto.startswith("sim:"):
        raise WorkflowError(f"{host.auto} is simulated: there is nothing to compare a prediction with")
    for model in grid.models:
        settings: dict[str, Any] = {
            "model": model, "batch_sizes": [grid.batch], "methods": list(grid.methods), "targets": ["auto"],
            "measure": {"warmup": 1, "steps": grid.steps, "gate_batch_size": min(2, grid.batch), "gate_steps": 1},
        }
        if any(library.method(name).card.takes_budget for name in grid.methods):
            settings["budgets"] = list(grid.budgets)
        with tempfile.TemporaryDirectory(prefix="prediction-", dir=scratch()) as folder:
            plan = single_cell(library, settings, grid.overrides, host, _OPTIONS)
            result = Runner(plan, Path(folder), PlainDisplay(sys.stderr)).run()
        records += result.records.values()
        if result.is_interrupted:
            raise KeyboardInterrupt
    return records


def _in_lines(found: Prediction, cells: Sequence[Comparison]) -> Iterator[str]:
    columns = ("model", "batch", "method", "budget", "peak", "predicted", "off by", "step", "predicted", "off by")
    yield table(columns, [_row(c) for c in cells], right=columns[4:])
    yield ""
    by = f"(the most by {found.worst_unsafe_bytes:,} bytes)"
    unsafe = DASH if found.unsafe_share is None else f"{found.unsafe_share:.1%} of {found.cells} {by}"
    yield f"unsafe predictions, of a peak below the measured one: {unsafe}"
    yield f"peaks beyond the tolerance of 0.5 % or 1 MiB: {len(found.outside_tolerance)}"
    for words, error, cells_timed in (("without transfers", found.median_time_error, found.timed),
                                      ("with transfers", found.median_time_error_with_transfers, found.timed_with_transfers)):
        yield f"step time {words}, median error: {DASH if error is None else f'{error:.1%}'} over {count_of(cells_timed, 'cell')}"
    for words, tau, pairs in (("", found.kendall_tau, found.pairs), (" beyond the drift", found.kendall_tau_beyond_drift,
                                                                     found.pairs_beyond_drift)):
        yield f"Kendall's tau of step times{words}: {DASH if tau is None else f'{tau:.2f}'} over {count_of(pairs, 'pair')}"
    yield from (f"FAIL  {fault}" for fault in found.faults)


def _row(cell: Comparison) -> list[str]:
    return [
        cell.model, str(cell.batch_size), cell.method, cell.budget or DASH, bytes_in_words(cell.peak_bytes),
        bytes_in_words(cell.predicted_peak_bytes), DASH if cell.error_bytes is None else f"{cell.error_bytes:+,} B",
        seconds_in_words(cell.step_seconds), seconds_in_words(cell.predicted_step_seconds),
        DASH if cell.time_error is None else f"{cell.time_error:+.1%}",
    ]
