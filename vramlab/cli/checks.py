"""check method: what it imports, its options, its plans, the contract that all methods keep, and the truth gate on this machine."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Iterator, Sequence

from vramlab.cli.words import print_json
from vramlab.cli.workflows import Silent, open_library, scratch
from vramlab.collection import Library, Method
from vramlab.method_check import Check, check_contract, check_method
from vramlab.record import Outcome, RunRecord, Truth
from vramlab.runner import Runner
from vramlab.workflow import Host, single_cell

BUDGETS = ("80%", "60%")
# An honest refusal is no fault of a method.
_REFUSED = frozenset({Outcome.PLAN_INFEASIBLE, Outcome.UNSUPPORTED})


def check_one_method(name: str, extra: Sequence[Path], *, as_json: bool) -> int:
    """Print every check of a method; exit code 1 when one fails. WorkflowError (exit code 2) when there is none or its card is wrong."""
    library = open_library(extra)
    method = library.method(name)
    checks = check_method(method)
    if not any(check.faults for check in checks) and not method.card.required:
        checks += check_contract(method) if method.card.kind == "planner" else []
        checks.append(_check_truth(library, method))
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        print("\n".join(f"{'ok  ' if not check.faults else 'FAIL'}  {check.what}" + "".join(f"\n        {fault}" for fault in check.faults)
                        for check in checks))
    return 1 if any(check.faults for check in checks) else 0


def _check_truth(library: Library, method: Method) -> Check:
    """Three steps of a small ResNet on the CPU, against eager PyTorch."""
    settings: dict[str, Any] = {
        "model": {"name": "resnet8-digits", "image_size": 16}, "batch_sizes": [8], "methods": [method.name], "targets": ["cpu"],
        "measure": {"time": False, "peak": False, "timeout_seconds": 300, "plan_timeout_seconds": 120},
    }
    if method.card.takes_budget:
        settings["budgets"] = list(BUDGETS)
    with tempfile.TemporaryDirectory(prefix="check-", dir=scratch()) as folder:
        result = Runner(single_cell(library, settings, [], Host("cpu")), Path(folder), Silent()).run()
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
