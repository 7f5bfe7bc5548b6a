"""Every method really executed: truth against eager, budgets and predicted peaks, over models x methods x budgets. No times.

    python benchmarks/executed.py [--models resnet50,vgg16,...] [--methods delta,dtr,...]

One process runs a method on a model at three budgets: the smallest that the method says it can reach, and a quarter and half of the way
from there to eager's measured peak. At each it plans, runs three optimizer steps of the plan against eager bit for bit, and meters a cold
and a warm step. Reported: what is exact, budget violations (must be 0), the worst error of a predicted peak, the share of unsafe
predictions (predicted below measured). The evidence is written after each process; what it has from the same method's code is not run
again, rows of a method's earlier code are replaced, and each row names the commit that it was run at.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import keep, kept, machine, specs

from vramlab.collection import Library, built_in_collection
from vramlab.isolate import Call, run_isolated
from vramlab.record import Outcome, Truth

SIZES = {
    "resnet50": (4, {"image_size": 96}),
    "vgg16": (4, {"image_size": 96}),
    "densenet121": (4, {"image_size": 96}),
    "inception-v3": (2, {"image_size": 299}),
    "bert-base": (2, {"sequence_length": 96}),
}
GATE_STEPS = 3
WAYS = (0.5, 0.25, 0.0)  # from the smallest budget to eager's peak
TOLERANCE_SHARE, TOLERANCE_BYTES = 0.005, 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--methods", default=",".join(planners()))
    parser.add_argument("--seconds", type=float, default=600, help="limit of one process")
    options = parser.parse_args()
    rows = {_key(row): row for row in kept("executed")}
    for model in options.models.split(","):
        for method in options.methods.split(","):
            done = {_key(row)[:-1] for row in rows.values()}
            fresh = measure(model, method, done, options.seconds)
            if earlier := [k for k, row in rows.items() if fresh and _what(row) == _what(fresh[0])]:
                print(f"{len(earlier)} rows of {method} on {model} are of earlier code and replaced")
                rows = {k: row for k, row in rows.items() if k not in earlier}
            for row in fresh:
                rows[_key(row)] = row | {"commit": machine()["commit"]}
                print(" ".join(str(row[k]) for k in ("model", "method", "way", "outcome", "truth", "message")), flush=True)
            keep("executed", rows.values(), summarise(list(rows.values())))


def planners() -> list[str]:
    """Methods that plan without being given a file."""
    library = Library([built_in_collection()])
    found = (library.method(name) for name in library.method_paths)
    return sorted(m.name for m in found if m.card.kind == "planner" and m.name != "schedule-file")


def measure(model: str, method: str, done: set[tuple], limit_seconds: float) -> list[dict[str, Any]]:
    """The rows of one method on one model, none where there are some already."""
    batch, model_options = SIZES[model]
    with tempfile.TemporaryDirectory() as folder:
        settings = {"model": {"name": model, **model_options}, "targets": ["cpu"], "batch_sizes": [batch], "methods": [method],
                    "budgets": ["100%"], "training": {"momentum": 0.0}, "measure": {"gate_steps": GATE_STEPS, "peak": True, "time": False}}
        (spec,) = specs(settings, Path(folder))
        if _key(_row(spec, None))[:-1] in done:
            return []
        result = run_isolated(Call(function="executed.run_cells", args=(spec, folder)), timeout_seconds=limit_seconds)
        if result.outcome is Outcome.OK:
            return result.value
        return [_row(spec, None) | {"outcome": str(result.outcome), "message": result.message.splitlines()[0]}]


def run_cells(spec: dict, folder: str) -> list[dict[str, Any]]:
    """In a process of its own: eager's peak, the smallest budget, then each cell."""
    from vramlab import measure

    eager_peak = measure.measure_peak_of(spec, None)["peak_bytes"]
    refused = measure.make_plan(_at(spec, 1), folder, eager_peak)
    smallest = refused.get("infeasible", {}).get("smallest_bytes")
    budgets = {None: None} if smallest is None else {way: int(smallest + way * max(0, eager_peak - smallest)) for way in WAYS}
    return [_run(_at(spec, nbytes), way, folder, eager_peak) for way, nbytes in budgets.items()]


def _at(spec: dict, budget_bytes: int | None) -> dict:
    takes_budget = Library([built_in_collection()]).method(spec["config"]["method"]).card.takes_budget
    return spec | {"config": spec["config"] | {"budget": budget_bytes if takes_budget else None}}


def _run(spec: dict, way: float | None, folder: str, eager_peak: int) -> dict[str, Any]:
    from vramlab import measure

    plan = measure.make_plan(spec, folder, eager_peak)
    row = _row(spec, way) | {"eager_peak_bytes": eager_peak, "budget_bytes": plan["budget_bytes"], "plan_seconds": plan["plan_seconds"]}
    if "infeasible" in plan:
        return row | {"outcome": str(Outcome.PLAN_INFEASIBLE), "message": plan["infeasible"]["message"]}
    gc.collect()
    peaks = measure.measure_peak_of(spec, folder)
    gc.collect()
    answer = measure.gate(spec, folder)
    peak, predicted = peaks["peak_bytes"], plan["predicted"]["peak_bytes"]
    highest = max(peak, peaks["cold_peak_bytes"])
    return row | {
        "outcome": str(Outcome.OK), "truth": answer["truth"], "peak_bytes": peak, "cold_peak_bytes": peaks["cold_peak_bytes"],
        "predicted_peak_bytes": predicted, "error_bytes": predicted - peak,
        "over_budget_bytes": 0 if plan["budget_bytes"] is None else max(0, highest - plan["budget_bytes"]),
        "differing": [d["name"] for d in answer["detail"]["differing"][:5]],
        "ran": {k: answer["detail"][k] for k in ("recomputes", "offloads", "prefetches")},
    }


def _row(spec: dict, way: float | None) -> dict[str, Any]:
    config = spec["config"]
    return {"model": config["model"], "batch_size": config["batch_size"], "method": config["method"], "way": way,
            "method_source_sha256": config["sources"]["method"], "outcome": None, "truth": None, "message": "", "peak_bytes": None}


def _what(row: dict) -> tuple:
    return tuple(row[k] for k in ("model", "batch_size", "method"))


def _key(row: dict) -> tuple:
    return tuple(row[k] for k in ("model", "batch_size", "method", "method_source_sha256", "way"))


def summarise(rows: list[dict]) -> dict[str, Any]:
    """The figures of benchmarks/README.md."""
    ran = [r for r in rows if r["outcome"] == str(Outcome.OK)]
    names = ("model", "method", "way")
    return {
        "cells": len(rows), "models": sorted({r["model"] for r in rows}), "methods": sorted({r["method"] for r in rows}),
        "ran": len(ran), "exact": sum(r["truth"] == str(Truth.EXACT) for r in ran),
        "not_exact": [" ".join([*(str(r[n]) for n in names), r["truth"]]) for r in ran if r["truth"] != str(Truth.EXACT)],
        "infeasible": sum(r["outcome"] == str(Outcome.PLAN_INFEASIBLE) for r in rows),
        "failed": [" ".join([*(str(r[n]) for n in names), r["outcome"], r["message"]]) for r in rows
                   if r["outcome"] not in (str(Outcome.OK), str(Outcome.PLAN_INFEASIBLE))],
        "budget_violations": sum(bool(r["over_budget_bytes"]) for r in ran),
        "worst_error_bytes": max((abs(r["error_bytes"]) for r in ran), default=None),
        "outside_tolerance": [" ".join(str(r[n]) for n in names) for r in ran
                              if abs(r["error_bytes"]) > max(TOLERANCE_SHARE * r["peak_bytes"], TOLERANCE_BYTES)],
        "unsafe_share": sum(r["error_bytes"] < 0 for r in ran) / len(ran) if ran else None,
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
