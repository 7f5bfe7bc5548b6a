"""Predicted against executed: peaks, budgets, truth, step times and the ranking of methods, over models x methods x budgets.

    python benchmarks/prediction.py [--models ...] [--methods ...] [--budgets 80%,60%,50%] [--steps 5] [--no-time] [--name executed]
    python benchmarks/prediction.py --run results/resnet50-delta/<run>

Every cell is planned, gated against eager bit for bit, and its peak is metered in a fresh process. With timing, all cells of one model
take their steps in turns with eager. Reported: budget violations (must be 0), the worst error of a predicted peak, the share of unsafe
predictions (predicted below measured), the median error of the step time relative to eager's, and Kendall's tau between simulated and
executed step times of the cells of a model, pairs inside the drift left out.

The evidence is written after each model. A cell whose row is there already, from the same code, is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from itertools import combinations
from pathlib import Path

from common import keep, kept, specs

from vramlab.cell import run_cell
from vramlab.record import Outcome, Truth
from vramlab.run_folder import RunFolder

SIZES = {
    "resnet18": (16, {"image_size": 112}),
    "vgg11": (8, {"image_size": 96}),
    "densenet121": (4, {"image_size": 96}),
    "mobilenet-v2": (8, {"image_size": 112}),
    "unet": (2, {"image_size": 96}),
    "vit-b-16": (1, {}),
    "resnet8-digits": (64, {"image_size": 32}),
    "resnet50": (8, {"image_size": 112}),
    "vgg16": (4, {"image_size": 112}),
    "inception-v3": (4, {"image_size": 299}),
    "bert-base": (2, {"sequence_length": 128}),
}
TOLERANCE_SHARE, TOLERANCE_BYTES = 0.005, 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--methods", default="replay,checkpoint,delta,network-wide,vdnn-baseline")
    parser.add_argument("--budgets", default="80%,60%,50%")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--name", default="prediction", help="of the evidence file")
    parser.add_argument("--run", type=Path, help="judge the measured cells of this run's folder instead of running cells")
    options = parser.parse_args()
    if options.run:
        records = [
            r.to_json() for r in RunFolder(options.run).records().values() if r.kind == "step" and not r.config["target"].startswith("sim:")
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
        rows.append(row_of(run_cell(spec, place).to_json()))
        print(
            {k: rows[-1][k] for k in ("model", "method", "budget", "outcome", "truth", "error_bytes", "time_ratio", "predicted_ratio")},
            flush=True,
        )
    return rows


def row_of(record: dict) -> dict:
    """What this benchmark keeps of a record."""
    measured, predicted, config = record["measured"], record["predicted"], record["config"]
    ratio = (measured.get("ratio") or {}).get("median")
    eager = statistics.median(measured["baseline_step_seconds"]) if measured.get("baseline_step_seconds") else None
    drift = measured.get("drift") or {}
    return {
        "model": config["model"],
        "method": config["method"],
        "budget": config["budget"],
        "batch_size": config["batch_size"],
        "method_source_sha256": config["sources"]["method"],
        "is_timed": bool(config["measure"]["time"]),
        "outcome": record["outcome"],
        "message": record["message"],
        "truth": record["truth"],
        "peak_bytes": measured.get("peak_bytes"),
        "predicted_peak_bytes": predicted.get("peak_bytes"),
        "error_bytes": measured.get("prediction_error_bytes"),
        "over_budget_bytes": measured.get("over_budget_bytes"),
        "time_ratio": ratio,
        "predicted_step_seconds": predicted.get("step_seconds"),
        "eager_step_seconds": eager,
        "predicted_ratio": None if eager is None or "step_seconds" not in predicted else predicted["step_seconds"] / eager,
        "drift": [drift.get("low"), drift.get("high")],
        "moved_bytes": predicted.get("moved_bytes"),
        "recomputes": predicted.get("recomputes"),
    }


def summarise(rows: list[dict]) -> dict:
    """The figures of benchmarks/README.md."""
    ran = [r for r in rows if r["outcome"] == str(Outcome.OK)]
    errors = [abs(r["error_bytes"]) for r in ran]
    outside = [
        f"{r['model']} {r['method']} {r['budget']}"
        for r in ran
        if abs(r["error_bytes"]) > max(TOLERANCE_SHARE * r["peak_bytes"], TOLERANCE_BYTES)
    ]
    replay = {r["model"]: r for r in ran if r["method"] in ("replay", "eager") and r["predicted_step_seconds"]}
    timed = [r for r in ran if r["time_ratio"] and r["model"] in replay and r["method"] not in ("replay", "eager")]
    time_errors = [abs(relative(r, replay) / r["time_ratio"] - 1) for r in timed]
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
        "worst_error_bytes": max(errors, default=None),
        "worst_error_share": max((abs(r["error_bytes"]) / r["peak_bytes"] for r in ran), default=None),
        "outside_tolerance": outside,
        "unsafe_share": sum(r["error_bytes"] < 0 for r in ran) / len(ran) if ran else None,
        "median_time_error": statistics.median(time_errors) if time_errors else None,
        "kendall_tau": kendall_tau(rows),
    }


def relative(row: dict, replay: dict[str, dict]) -> float:
    """Predicted step time over replay's predicted one: what the method adds, free of the cost table's own bias."""
    return row["predicted_step_seconds"] / replay[row["model"]]["predicted_step_seconds"]


def kendall_tau(rows: list[dict]) -> dict:
    """(concordant - discordant) / pairs over the cells of one model: of all pairs, and of those that differ by more than the drift."""
    everything, beyond_drift = [], []
    for one, other in combinations([r for r in rows if r["time_ratio"]], 2):
        if one["model"] != other["model"] or one["predicted_step_seconds"] == other["predicted_step_seconds"]:
            continue
        noise = max(abs(d - 1) for r in (one, other) for d in r["drift"] if d is not None)
        gap = one["time_ratio"] / other["time_ratio"]
        sign = 1 if (gap > 1) == (one["predicted_step_seconds"] > other["predicted_step_seconds"]) else -1
        everything.append(sign)
        if abs(gap - 1) > noise:
            beyond_drift.append(sign)
    return {"all_pairs": _mean_sign(everything), "pairs_beyond_the_drift": _mean_sign(beyond_drift)}


def _mean_sign(signs: list[int]) -> dict:
    return {"tau": sum(signs) / len(signs) if signs else None, "pairs": len(signs)}


if __name__ == "__main__":
    main()
