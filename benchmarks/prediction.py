"""Predicted against executed: peaks, budgets, truth, step times and the ranking of methods, over models x methods x budgets.

    python benchmarks/prediction.py [--models ...] [--methods ...] [--budgets 80%,60%,50%] [--steps 5] [--no-time] [--name executed]
    python benchmarks/prediction.py --run results/resnet50-delta/<run>

Every cell is planned, gated against eager bit for bit, and its peak is metered in a fresh process. With timing, all cells of one model
take their steps in turns with eager. Reported: budget violations (must be 0), and what `vramlab check prediction` reports: the worst error
of a predicted peak, the share of unsafe predictions (predicted below measured), the median error of the step time without and with
transfers, and Kendall's tau between simulated and executed step times of the cells of a model, with and without pairs inside the drift.

The evidence is written after each model. A cell whose row is there already, from the same code, is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path

from common import keep, kept, specs

from vramlab.cell import run_cell
from vramlab.prediction import Comparison, comparisons, judge
from vramlab.record import Outcome, RunRecord, Truth
from vramlab.run_folder import RunFolder

SIZES = {  # batch and options at which activations, not parameters, dominate where two cores allow it
    "resnet18": (32, {"image_size": 112}),
    "densenet121": (16, {"image_size": 96}),
    "mobilenet-v2": (32, {"image_size": 112}),
    "unet": (2, {"image_size": 96}),
    "resnet50": (16, {"image_size": 112}),
    "resnet8-digits": (64, {"image_size": 32}),
    "vgg11": (8, {"image_size": 96}),
    "vit-b-16": (1, {}),
    "vgg16": (4, {"image_size": 112}),
    "inception-v3": (4, {"image_size": 299}),
    "bert-base": (2, {"sequence_length": 128}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--methods", default="replay,checkpoint,delta,network-wide,vdnn-baseline")
    parser.add_argument("--budgets", default="80%,60%,50%")
    parser.add_argument("--steps", type=int, default=6, help="six pairs are the fewest whose drift is known")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--name", default="prediction", help="of the evidence file")
    parser.add_argument("--run", type=Path, help="judge the measured cells of this run's folder instead of running cells")
    options = parser.parse_args()
    if options.run:
        records = [
            r for r in RunFolder(options.run).records().values() if r.kind == "step" and not r.config["target"].startswith("sim:")
        ]
        rows = [row_of(record) for record in records]
        return keep(f"prediction-{options.run.parent.name}", rows, summarise(rows))
    known = {key_of(row): row for row in kept(options.name)}
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models.split(","):
            known |= {key_of(row): row for row in measure_model(model, Path(folder) / model, options, known)}
            rows = list(known.values())
            keep(options.name, rows, summarise(rows))


def key_of(row: dict) -> tuple:
    """What makes two rows the same cell, run by the same code of the method."""
    return row["model"], row["method"], row["budget"], row["batch_size"], row["method_source_sha256"], row["is_timed"]


def measure_model(name: str, folder: Path, options: argparse.Namespace, known: dict[tuple, dict]) -> list[dict]:
    """One row a cell that has none yet."""
    batch, model_options = SIZES[name]
    settings = {
        "model": {"name": name, **model_options},
        "targets": ["cpu"],
        "batch_sizes": [batch],
        "methods": options.methods.split(","),
        "budgets": options.budgets.split(","),
        "measure": {"warmup": 1, "steps": options.steps, "time": not options.no_time, "gate_batch_size": 2},
    }
    rows = []
    for index, spec in enumerate(specs(settings, folder)):
        config, place = spec["config"], folder / str(index)
        key = (name, config["method"], config["budget"], batch, config["sources"]["method"], not options.no_time)
        if key in known:
            continue
        place.mkdir(parents=True)
        (place / "spec.json").write_text(json.dumps(spec))
        rows.append(row_of(run_cell(spec, place)))
        said = rows[-1] | (rows[-1]["comparison"] or {})
        words = ("model", "method", "budget", "outcome", "truth", "peak_bytes", "predicted_peak_bytes")
        print({k: said.get(k) for k in (*words, "step_seconds", "predicted_step_seconds")}, flush=True)
    return rows


def row_of(record: RunRecord) -> dict:
    """What this benchmark keeps of a record."""
    measured, predicted, config = record.measured, record.predicted, record.config
    baseline = measured.get("baseline_step_seconds")
    return {
        "model": config["model"],
        "method": config["method"],
        "budget": config["budget"],
        "batch_size": config["batch_size"],
        "method_source_sha256": config["sources"]["method"],
        "is_timed": bool(config["measure"]["time"]),
        "outcome": str(record.outcome),
        "message": record.message,
        "truth": str(record.truth),
        "over_budget_bytes": measured.get("over_budget_bytes"),
        "eager_step_seconds": statistics.median(baseline) if baseline else None,
        "recomputes": predicted.get("recomputes"),
        "comparison": next((asdict(c) for c in comparisons([record])), None),
    }


def summarise(rows: list[dict]) -> dict:
    """The figures of benchmarks/README.md."""
    ran = [r for r in rows if r["outcome"] == str(Outcome.OK)]
    cells = [Comparison(**r["comparison"]) for r in ran if r["comparison"]]
    replay = {c.model: c.predicted_step_seconds for c in cells if c.method in ("replay", "eager") and c.predicted_step_seconds}
    added = [  # what a method adds to replay's step, free of the cost table's own bias
        abs(c.predicted_step_seconds / replay[c.model] / c.time_ratio - 1)
        for c in cells
        if c.time_ratio and c.model in replay and c.method not in ("replay", "eager")
    ]
    return {
        "cells": len(rows),
        "ok": len(ran),
        "infeasible": sum(r["outcome"] == str(Outcome.PLAN_INFEASIBLE) for r in rows),
        "failed": [
            f"{r['model']} {r['method']} {r['budget']}: {r['outcome']} {r['message']}"
            for r in rows
            if r["outcome"] not in (str(Outcome.OK), str(Outcome.PLAN_INFEASIBLE))
        ],
        "exact": sum(r["truth"] == str(Truth.EXACT) for r in ran),
        "budget_violations": sum(bool(r["over_budget_bytes"]) for r in rows),
        "worst_error_share": max((abs(c.error_bytes) / c.peak_bytes for c in cells if c.error_bytes is not None), default=None),
        "median_time_error_over_replay": statistics.median(added) if added else None,
        "prediction": asdict(judge(cells)),
    }


if __name__ == "__main__":
    main()
