"""Records and runs written by hand: every number in them is known to the test that uses them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, Mapping, Sequence

from vramlab.record import Outcome, RunRecord, Truth, hash_config
from vramlab.schedule import Compute, Free, Schedule

MIB = 2**20
EAGER_PEAK = 1000 * MIB
ENVIRONMENT = {
    "software": {"vramlab": "0.1.0", "python": "3.11.7", "packages": {"torch": "2.14.1", "numpy": "2.4.6"}, "installed_sha256": "ab" * 32,
                 "torch_build": {"cuda": "13.0", "hip": None, "git_version": "c0ffee"}, "compilers": {"gcc": "gcc 12.2.0", "nvcc": None}},
    "system": {"os": "Linux", "kernel": "6.1", "machine": "x86_64", "distribution": "Debian 12", "in_container": True,
               "is_administrator": False, "host_hash": "1111222233334444", "user_hash": "5555666677778888"},
    "cpu": {"model": "Test Processor 9000", "physical_cores": 2, "logical_cores": 4, "usable_cores": 2, "frequency_mhz": 2600,
            "memory_bytes": 16 * 2**30, "memory_limit_bytes": None},
    "gpus": [], "git": {"commit": "f" * 40, "dirty": False, "changes_sha256": None}, "variables": {"OMP_NUM_THREADS": "2"},
    "missing": {"gpus": "no NVIDIA driver answers", "cpu.memory_limit_bytes": "no control group limits memory",
                "software.compilers.nvcc": "nvcc is not installed"},
}


def make_config(**changes: Any) -> dict[str, Any]:
    """A resolved cell: ResNet-50, batch 16, delta at 60 % on the CPU, unless changed."""
    config = {
        "experiment": "memory", "kind": "step", "model": "resnet50", "model_options": {"image_size": 64, "classes": 1000}, "batch_size": 16,
        "training": {"optimizer": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 0.0, "autocast": None, "channels_last": False,
                     "seed": 0, "steps": 0, "eval_every": 0},
        "data": "synthetic", "method": "delta", "options": {"action": "director"}, "budget": "60%", "target": "cpu",
        "measure": {"warmup": 2, "steps": 10, "gate_steps": 3, "gate_batch_size": 2, "time": True, "peak": True,
                    "timeout_seconds": 600, "plan_timeout_seconds": 60},
        "sources": {"method": "a" * 64, "model": "b" * 64, "harness": "0.1.0"},
    }
    return config | changes


def make_record(*, config: Mapping[str, Any] | None = None, **changes: Any) -> RunRecord:
    """A record of `make_config(**config)`, its cell_id true to the config."""
    whole = make_config(**(config or {}))
    fields: dict[str, Any] = {
        "cell_id": hash_config(whole), "kind": whole["kind"], "config": whole, "outcome": Outcome.OK, "truth": Truth.EXACT,
        "workflow": {"name": "hand-made", "path": "workflows/hand-made.yaml", "sha256": "c" * 64}, "environment": ENVIRONMENT,
        "provenance": {"started": "2026-01-02T03:04:05Z", "ended": "2026-01-02T03:04:35Z", "seconds": 30.0,
                       "method_source_sha256": "a" * 64, "tape_digest": "d" * 64, "schedule_digest": "e" * 64},
    }
    return RunRecord(**(fields | changes))


def measured_step(method: str, peak_mib: float, *, budget: str | None = None, ratio: float = 1.3, **changes: Any) -> RunRecord:
    """A bit-exact measured cell with this peak; its interval is the ratio +- 0.02, and eager drifts by +- 0.01."""
    share = float(budget.rstrip("%")) / 100 if budget else None
    measured = {
        "meter": "cpu-allocator", "peak_bytes": int(peak_mib * MIB), "cold_peak_bytes": int(peak_mib * MIB), "persistent_bytes": 200 * MIB,
        "rss_peak_bytes": 1500 * MIB, "nvml_peak_bytes": None, "over_budget_bytes": 0, "prediction_error_bytes": 0, "plan_seconds": 0.4,
        "capture_seconds": 2.5, "step_seconds": [ratio * s for s in (1.0, 1.01, 0.99, 1.02, 1.0)],
        "baseline_step_seconds": [1.0, 1.01, 0.99, 1.02, 1.0], "recomputes": 20, "offloads": 3, "prefetches": 3,
        "ratio": {"median": ratio, "low": ratio - 0.02, "high": ratio + 0.02, "n": 10}, "drift": {"median": 1.0, "low": 0.99, "high": 1.01},
    }
    predicted = {"profile": "this machine", "peak_bytes": int(peak_mib * MIB), "step_seconds": ratio, "compute_seconds": 1.0,
                 "eager_step_seconds": 1.0, "recompute_seconds": 0.2, "stall_seconds": ratio - 1.2, "moved_bytes": 5 * MIB,
                 "recomputes": 20, "offloads": 3, "prefetches": 3, "peak_host_bytes": 9 * MIB, "peak_instruction": 7,
                 "peak_op": "aten.convolution_backward.default"}
    config = {"method": method, "budget": budget, "options": {"action": "director"} if method == "delta" else {}}
    fields: dict[str, Any] = {
        "measured": measured, "predicted": predicted, "budget_bytes": int(share * EAGER_PEAK) if share else None,
        "eager_peak_bytes": EAGER_PEAK, "eager_peak_is_simulated": False,
        "missing": {"measured.nvml_peak_bytes": "no NVIDIA GPU on this machine"},
        "truth_detail": {"steps": 3, "batch_size": 2, "recomputes": 20, "offloads": 3, "prefetches": 3, "differing": []},
    }
    return make_record(config=config | changes.pop("config", {}), **(fields | changes))


def simulated_step(method: str, peak_mib: float, *, budget: str | None = None, overhead: float = 0.2, **changes: Any) -> RunRecord:
    """A cell on a simulated V100."""
    record = measured_step(method, peak_mib, budget=budget, ratio=1 + overhead)
    config = {**record.config, "target": "sim:v100-32gb", **changes.pop("config", {})}
    return make_record(config=config, predicted={**record.predicted, "profile": "v100-32gb"}, truth=Truth.NOT_RUN,
                       budget_bytes=record.budget_bytes, eager_peak_bytes=EAGER_PEAK, eager_peak_is_simulated=True, **changes)


def infeasible_step(method: str, budget: str) -> RunRecord:
    """A budget that the method cannot reach."""
    return make_record(config={"method": method, "budget": budget, "options": {}}, outcome=Outcome.PLAN_INFEASIBLE, reason="gpu_memory",
                       message="the smallest it can reach is 700 MiB", truth=Truth.NOT_RUN,
                       budget_bytes=int(float(budget.rstrip("%")) / 100 * EAGER_PEAK), eager_peak_bytes=EAGER_PEAK,
                       eager_peak_is_simulated=False, missing={"measured.peak_bytes": "no schedule within the budget"})


def search(method: str, largest: int | None, *, high: int = 4096) -> RunRecord:
    """A finished search for the largest batch on a simulated V100."""
    config = {"experiment": "largest", "kind": "max_batch", "method": method, "options": {}, "budget": None, "batch_size": None,
              "target": "sim:v100-32gb", "search": {"over": "batch", "low": 1, "high": high, "step": 1}}
    trials = [{"value": b, "fits": largest is not None and b <= largest, "peak_bytes": b * MIB, "outcome": "ok"} for b in (1, 64, 512)]
    return make_record(config=config, truth=Truth.NOT_RUN, search={"over": "batch", "largest": largest, "low": 1, "high": high,
                                                                  "memory_bytes": 32 * 2**30,
                                                                  "trials": trials, "hit_upper_end": largest == high})


def training(method: str, *, steps: int = 200, wrong_at: int | None = None, accuracy: bool = True, planned: int | None = None,
             final_accuracy: float = 0.9) -> RunRecord:
    """A training cell whose loss is 2/step; `wrong_at` spoils the loss from that step (1 = the first) on."""
    loss = [2.0 / (i + 1) for i in range(steps)]
    ours = [v * (1.5 if wrong_at is not None and i >= wrong_at - 1 else 1.0) for i, v in enumerate(loss)]
    accuracies = [[[steps // 2, 0.5], [steps, last]] if accuracy else [] for last in (final_accuracy, 0.9)]
    block = {"steps": list(range(1, steps + 1)), "loss": ours, "grad_norm": [1.0] * steps, "accuracy": accuracies[0],
             "eager_loss": loss, "eager_grad_norm": [1.0] * steps, "eager_accuracy": accuracies[1],
             "equal_steps": steps if wrong_at is None else wrong_at - 1, "first_difference": wrong_at}
    config = make_config()["training"] | {"steps": planned or steps, "eval_every": steps // 2}
    return make_record(config={"experiment": "training", "kind": "train", "method": method, "data": "digits", "training": config,
                               "model": "resnet18"}, training=block, truth=Truth.EXACT if wrong_at is None else Truth.WRONG,
                       outcome=Outcome.OK if wrong_at is None else Outcome.WRONG)


def full_grid() -> list[RunRecord]:
    """A run as resnet50-delta makes it: measured, simulated, searched and trained cells; one is infeasible and one is wrong."""
    swap = {"storages": 50, "recompute_cheaper": 40, "share": 0.8, "median_ratio": 0.3}
    delta = [measured_step("delta", 10 * p - 5, budget=f"{p}%", ratio=1 + (100 - p) / 100) for p in (80, 60, 50, 40)]
    simulated = [simulated_step("delta", 10 * p - 2, budget=f"{p}%", overhead=(100 - p) / 200) for p in (80, 60, 40)]
    with_swap = make_record(config=dict(simulated[1].config), predicted={**simulated[1].predicted, "swap_vs_recompute": swap},
                            truth=Truth.NOT_RUN, budget_bytes=simulated[1].budget_bytes, eager_peak_bytes=EAGER_PEAK,
                            eager_peak_is_simulated=True)
    return [
        measured_step("eager", 1000, ratio=1.0), measured_step("network-wide", 1300, ratio=1.0),
        measured_step("checkpoint", 700, budget="80%"), infeasible_step("checkpoint", "40%"), *delta,
        make_record(config={"method": "broken", "budget": "60%", "options": {}}, outcome=Outcome.WRONG, truth=Truth.WRONG,
                    message="the gradient of conv1.weight differs", budget_bytes=600 * MIB, eager_peak_bytes=EAGER_PEAK,
                    eager_peak_is_simulated=False, measured={"peak_bytes": 10 * MIB}),
        simulated[0], with_swap, simulated[2], simulated_step("eager", 1000, overhead=0.0),
        search("eager", 200), search("delta", 408), training("delta"),
    ]


CLAIMS = [
    {"id": "delta-mem-save", "experiment": "memory", "rule": "memory_saved_percent", "tolerance": 0.1},
    {"id": "delta-bs-r50", "experiment": "largest", "rule": "max_batch_ratio", "tolerance": 0.1},
    {"id": "delta-convergence", "experiment": "training", "rule": "training_equal", "tolerance": 0.01},
    {"id": "delta-swap-not-first", "experiment": "memory", "rule": "swap_not_first", "tolerance": 0.05},
]


def write_run(folder: Path, records: Sequence[RunRecord], *, claims: Sequence[Mapping[str, Any]] = (), **plan: Any) -> Path:
    """A run's folder as the runner leaves it: run.json, records, a schedule beside each planned cell."""
    cells = [{"cell_id": r.cell_id, "config": dict(r.config), "label": r.config["method"]} for r in records]
    body = {"schema": 1, "workflow": {"name": "hand-made", "title": "A run written by hand", "description": "Every number is known.",
                                      "label": "quick", "path": "workflows/hand-made.yaml", "sha256": "c" * 64, "claims": list(claims),
                                      "expected": {"minutes": 6, "disk_bytes": 10**8}},
            "environment": ENVIRONMENT, "overrides": [], "started": "2026-01-01T00:00:00Z", "cells": cells, "left_out": []}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(body | plan))
    for record in records:
        cell = folder / "cells" / record.cell_id
        record.save(cell / "record.json")
        if record.outcome is Outcome.OK and record.kind == "step":
            Schedule((Compute(0), Free(0)), "d" * 64, "method").save(cell / "schedule.json.gz")
    return folder


def write_telemetry(path: Path, rows: Sequence[tuple[float, int]], *, started: str = "2026-01-02T03:04:05.000+00:00") -> None:
    """A telemetry file with (seconds, resident bytes) rows on a machine without a GPU."""
    from vramlab.nvml import GPU_COLUMNS
    from vramlab.telemetry import COLUMNS

    reasons = dict.fromkeys(GPU_COLUMNS, "the cell ran on no GPU")
    header = {"format": 1, "started": started, "period_seconds": 0.1, "gpu": None, "missing": reasons}
    lines = [f"# {json.dumps(header)}", ",".join(COLUMNS)]
    for seconds, rss in rows:
        values = {"t_seconds": f"{seconds:.3f}", "rss_bytes": str(rss), "cpu_percent": "98.500", "read_bytes": "0", "written_bytes": "0"}
        lines.append(",".join(values.get(name, "") for name in COLUMNS))
    trailer = {"rows": len(rows), "missed": 0, "seconds": rows[-1][0], "achieved_period_seconds": 0.1, "missing": reasons}
    lines.append(f"# {json.dumps(trailer)}")
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))
