"""Our own planner against all others, simulated: models x budgets x devices, and each cell's distance to what no schedule can beat.

    python benchmarks/hybrid.py [--plan-seconds 30] [--models resnet50 ..] [--devices v100-32gb ...] [--budgets 80% ...] [--limit-seconds S]
    python benchmarks/hybrid.py --reuser | --summarise

A cell is a model's training step (batch and size in SIZES, momentum SGD), timed by the roofline of a device: V100 over PCIe 3, H200 over
PCIe 5, and this machine's CPU as measured, its link paced to its arithmetic as that of a V100 is. A budget is a share of eager's simulated
peak on that tape; `least` is 105 % of the least peak that any schedule has in which state stays. All methods plan on one tape, with
convolution variants and takeovers of gradients, of which each uses what its paper knows of; moDNN leaves the batch whole, as a step over
micro-batches is another computation. Hybrid is handed the schedules of those that its card names; then it plans without them.

Rows are kept in benchmarks/evidence/hybrid.json after each cell; a cell whose row was made by the same code with as many plan seconds is
not run again. `--limit-seconds` ends the run, between two cells, after so many seconds of the processor. Every time is simulated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import ROOT, keep, kept, specs

from vramlab.bounds import least_peak_bytes, step_seconds_bound
from vramlab.check import check_schedule
from vramlab.collection import Library, Method
from vramlab.costs import measure_profile, roofline_costs
from vramlab.device import DeviceProfile, load_profile
from vramlab.errors import PlanInfeasible, ScheduleError, Unsupported
from vramlab.in_place import with_inplace_gradients
from vramlab.liveness import replay_schedule
from vramlab.measure import _Cell
from vramlab.planner import Budget, parse_percent
from vramlab.prepared import prepare_tape
from vramlab.schedule import Schedule
from vramlab.seeds import seeds_for
from vramlab.simulate import simulate
from vramlab.tape import Tape
from vramlab.variants import with_variants

SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet18": (64, {}), "resnet50": (32, {}), "vgg16": (32, {}), "unet": (4, {}), "mobilenet-v2": (64, {}), "inception-v3": (32, {}),
    "vit-b-16": (32, {}), "bert-base": (16, {}),
}
DEVICES = ("v100-32gb", "h200", "this-cpu")
LEAST, ABOVE_LEAST = "least", 1.05
BUDGETS = ("80%", "70%", "60%", "50%", "40%", LEAST)
OTHERS = ("replay", "network-wide", "vdnn-baseline", "modnn")  # beside those that the card of hybrid names
REUSER = "fujitsu-reuse"  # has one plan, whatever the budget, on a step with split backwards; densenet-shared has nothing to share here
WATCHED = 240  # storages that the bound is about
AT_BOUND = 1.02  # of the bound: nothing much is to be gained there
FASTER = 0.98


def tape_of(model: str) -> Tape:
    """The bare step; captured once, then from the cache."""
    batch, options = SIZES[model]
    settings = {"model": {"name": model, **options}, "targets": ["sim:v100-32gb"], "batch_sizes": [batch], "methods": ["replay"],
                "training": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}}
    cell = _Cell.of(specs(settings, Path("."))[0])
    return cell.captured(cell.workload(), batch).tape


def timed(bare: Tape, device: DeviceProfile) -> Tape:
    """As hybrid is given it on a simulated device."""
    return with_variants(roofline_costs(with_inplace_gradients(bare), device), device)


def device_of(name: str, rows: list[dict]) -> DeviceProfile:
    """A stated profile, or this machine's: measured once, then that of the rows."""
    if name != "this-cpu":
        return load_profile(name)
    known = next((row["profile"] for row in rows if row["device"] == name), None)
    if known is not None:
        return DeviceProfile(**known)
    import torch

    return measure_profile(torch.device("cpu"))


def code_of(library: Library, method: Method) -> str:
    """Of what a row depends on: the method, the methods that give seeds, and the floors below."""
    names = ("kernels", "edits", "gaps", "occupancy", "copying", "residence", "annealing", "bounds", "seeds", "variants")
    floors = [(ROOT / "vramlab" / f"{name}.py").read_bytes() for name in names]
    methods = [library.method(name).sha256 for name in (*method.card.seeds, *OTHERS)]
    return hashlib.sha256(b"".join(floors) + "".join([method.sha256, *methods]).encode()).hexdigest()[:12]


def seconds_of(tape: Tape, schedule: Schedule, device: DeviceProfile, budget: Budget) -> float | None:
    """Simulated; None where it is not legal within the budget."""
    try:
        return simulate(check_schedule(tape, schedule, budget), device).metrics.step_seconds
    except ScheduleError:
        return None


def plan_of(method: Method, tape: Tape, device: DeviceProfile, budget: Budget) -> float | None:
    try:
        return seconds_of(tape, method.build().plan(tape, device, budget), device, budget)
    except (PlanInfeasible, Unsupported):
        return None


def row_of(library: Library, tape: Tape, device: DeviceProfile, share: str, plan_seconds: float) -> dict[str, Any]:
    """One cell."""
    peak, least = check_schedule(tape, replay_schedule(tape)).peak_bytes, least_peak_bytes(tape)
    nbytes = int(ABOVE_LEAST * least) if share == LEAST else int(parse_percent(share) * peak)
    budget = Budget(device_bytes=nbytes, wants_smallest=False)
    found: dict[str, Any] = {"ops": len(tape.ops), "eager_peak_bytes": peak, "least_peak_bytes": least, "budget_bytes": nbytes}
    if nbytes < least:
        return found | {"outcome": "below-the-least-peak"}
    hybrid = library.method("hybrid")
    seeds = seeds_for(library, hybrid, tape, device, budget)
    others = {name: seconds_of(tape, schedule, device, budget) for name, schedule in seeds.schedules.items()}
    others |= {name: None for name in seeds.refused} | {name: plan_of(library.method(name), tape, device, budget) for name in OTHERS}
    planner = hybrid.build(plan_seconds=plan_seconds)
    began = time.process_time()
    schedule = planner.plan_from(tuple(seeds.schedules.values()), tape, device, budget)
    took = time.process_time() - began
    alone = planner.plan(tape, device, budget)
    seconds = seconds_of(tape, schedule, device, budget)
    least_seconds = sum(min([op.seconds, *(v.seconds for v in op.variants)]) for op in tape.ops)
    is_least = seconds <= least_seconds * (1 + 1e-9)
    bound = least_seconds if is_least else step_seconds_bound(tape, device, nbytes, watched=WATCHED)
    m = simulate(check_schedule(tape, schedule, budget), device).metrics
    return found | {
        "outcome": "ok", "others": others, "seed_seconds": seeds.seconds, "plan_cpu_seconds": took, "step_seconds": seconds,
        "alone_step_seconds": seconds_of(tape, alone, device, budget), "bound_seconds": bound, "recomputes": m.recomputes,
        "offloads": m.offloads, "stall_seconds": m.stall_seconds, "recompute_seconds": m.recompute_seconds, "peak_bytes": m.peak_bytes,
    }


def best_of(row: dict[str, Any], names: list[str] | None = None) -> tuple[str, float] | None:
    """The fastest other method of a cell."""
    ran = {name: seconds for name, seconds in row["others"].items() if seconds is not None and (names is None or name in names)}
    return min(ran.items(), key=lambda item: item[1]) if ran else None


def seeds_of(row: dict[str, Any]) -> list[str]:
    """The others whose schedules hybrid was handed."""
    return [name for name in row["others"] if name not in (*OTHERS, REUSER)]


def said(row: dict[str, Any]) -> str:
    """A line of the table."""
    head = f"{row['model']:>13} {row['device']:>10} {row['budget']:>6}"
    if row["outcome"] != "ok":
        return f"{head}  below the least peak of any schedule"
    best, alone = best_of(row), row["alone_step_seconds"]
    seed = best_of(row, seeds_of(row))
    rival, start = (f"{b[0]:>12} {100 * (row['step_seconds'] / b[1] - 1):+6.1f} %" if b else f"{'none':>21}" for b in (best, seed))
    return (f"{head}  {row['step_seconds'] / row['bound_seconds']:6.3f} of the bound; against the fastest other, {rival}; "
            f"its best seed, {start}; without seeds {100 * (alone / row['step_seconds'] - 1):+5.1f} %; {row['plan_cpu_seconds']:.1f} s")


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of benchmarks/README.md."""
    ran = [row for row in rows if row["outcome"] == "ok"]
    against = [(row, best_of(row)) for row in ran if best_of(row) is not None]
    open_cells = [(row, best) for row, best in against if best[1] > AT_BOUND * row["bound_seconds"]]
    names = sorted({name for row in ran for name in row["others"]})
    return {
        "cells": len(rows), "below_the_least_peak": len(rows) - len(ran), "ran": len(ran),
        "only_hybrid_has_a_plan": len(ran) - len(against),
        "losses": [f"{r['model']} {r['device']} {r['budget']}: {b[0]} {b[1]:.6g} s, hybrid {r['step_seconds']:.6g} s"
                   for r, b in against if b[1] < r["step_seconds"] * (1 - 1e-9)],
        "losses_without_seeds": [f"{r['model']} {r['device']} {r['budget']}: {b[0]} {b[1]:.6g} s, alone {r['alone_step_seconds']:.6g} s"
                                 for r, b in against if b[1] < r["alone_step_seconds"] * (1 - 1e-9)],
        "open_cells": len(open_cells),
        "open_cells_2_percent_faster": sum(r["step_seconds"] < FASTER * b[1] for r, b in open_cells),
        "median_gain_in_open_cells": statistics.median(1 - r["step_seconds"] / b[1] for r, b in open_cells) if open_cells else None,
        "at_the_bound": sum(r["step_seconds"] <= AT_BOUND * r["bound_seconds"] for r in ran),
        "reaches_least": sum(r["outcome"] == "ok" for r in rows if r["budget"] == LEAST),
        "asked_for_least": sum(r["budget"] == LEAST for r in rows),
        "alone_slower_than_with_seeds_by_1_percent": sum(r["alone_step_seconds"] > 1.01 * r["step_seconds"] for r in ran),
        "fastest_others": {name: sum(b[0] == name for _, b in against) for name in names},
    }


def cells(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    for model in options.models:
        for device in options.devices:
            for budget in options.budgets:
                yield model, device, budget


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plan-seconds", type=float, default=30.0)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--devices", nargs="+", default=list(DEVICES), choices=DEVICES)
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS))
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    parser.add_argument("--reuser", action="store_true", help=f"add the step time of {REUSER} to the rows that there are")
    parser.add_argument("--summarise", action="store_true", help="print the table of the rows that there are, and run nothing")
    options = parser.parse_args()
    rows = kept("hybrid")
    if options.reuser:
        add_reuser(rows)
    elif not options.summarise:
        run(options, rows)
    for row in rows:
        print(said(row))
    found = summarise(rows)
    print(json.dumps(found, indent=1))
    return 0


def run(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Add the cells that have no row by this code."""
    library = Library([ROOT])
    code, began = code_of(library, library.method("hybrid")), time.process_time()
    for model, name, budget in cells(options):
        same = [row for row in rows if (row["model"], row["device"], row["budget"]) == (model, name, budget)]
        if any(row["code"] == code and row["plan_seconds"] == options.plan_seconds for row in same):
            continue
        if time.process_time() - began > options.limit_seconds:
            print("the processor's time is used up; the same command goes on here", flush=True)
            return
        device = device_of(name, rows)
        row = row_of(library, timed(tape_of(model), device), device, budget, options.plan_seconds)
        profile = {key: value for key, value in device.to_json().items() if key != "sources"}
        rows[:] = [other for other in rows if other not in same]
        rows.append({"model": model, "device": name, "budget": budget, "batch_size": SIZES[model][0], "code": code,
                     "plan_seconds": options.plan_seconds, "profile": profile, **row})
        keep("hybrid", rows, summarise(rows))
        print(said(rows[-1]), flush=True)


def add_reuser(rows: list[dict[str, Any]]) -> None:
    """Its step time, in every row whose budget it is within."""
    method = Library([ROOT]).method(REUSER)
    for row in rows:
        if row["outcome"] != "ok":
            continue
        device = device_of(row["device"], rows)
        tape = roofline_costs(prepare_tape(tape_of(row["model"]), method.card.needs, None).tape, device)
        row["others"][REUSER] = plan_of(method, tape, device, Budget(device_bytes=row["budget_bytes"], wants_smallest=False))
    keep("hybrid", rows, summarise(rows))


if __name__ == "__main__":
    sys.exit(main())
