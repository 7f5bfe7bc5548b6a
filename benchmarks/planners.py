"""How long planning takes, and how it grows: every planner of the collection on steps of 1,000, 3,000 and 10,000 ops.

    python benchmarks/planners.py [--sizes 1000 3000 10000] [--methods NAME ...] [--defaults] [--share 0.6] [--keep]

The steps are captured bottleneck ResNets with as many blocks as it takes, momentum SGD, batch 64, 64 pixels, timed by a V100's roofline.
Each planner is asked once for each size and a budget of `share` of eager's simulated peak, with its default options and with each other
choice of each option that has choices; where it refuses, the refusal is what is timed (without the search for the smallest budget). moDNN's
question for the size of its passes needs captures, and is not in its time. Planners use one thread, so `cpu_seconds`, of the processor, say
what planning takes on a machine that does other work too: target and growth are of these; `seconds` are of the clock. The growth is the
exponent between the two largest steps: 1 is linear. Prints a table, then one line of JSON; `--keep` puts the rows into
benchmarks/evidence/planners.json, in place of these planners' earlier ones. Exit code 1 when a planner takes more than 60 s.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from common import keep, kept, machine
from torchvision.models.resnet import Bottleneck, ResNet

from vramlab.capture import capture
from vramlab.check import check_schedule
from vramlab.collection import Library, Method, built_in_collection
from vramlab.costs import roofline_costs
from vramlab.device import DeviceProfile, load_profile
from vramlab.errors import PlanInfeasible, Unsupported
from vramlab.liveness import replay_schedule
from vramlab.planner import Budget
from vramlab.prepared import prepare_tape
from vramlab.tape import Tape
from vramlab.variants import with_variants

TARGET_SECONDS = 60
FEWEST_BLOCKS = 4
GIVEN = {"optimal": {"groups": 8, "time_limit_seconds": 50.0}}  # options that have no default, and an end to a search for a proof


def step_of(blocks: int, device: DeviceProfile) -> Tape:
    """A training step of a ResNet with this many bottleneck blocks, half of them at each of the first two resolutions."""
    model = ResNet(Bottleneck, [(blocks - 1) // 2, (blocks - 2) // 2, 1, 1])
    batch = [torch.zeros(64, 3, 64, 64), torch.zeros(64, dtype=torch.long)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    captured = capture(model, lambda m, x, y: torch.nn.functional.cross_entropy(m(x), y), batch, optimizer=optimizer)
    return roofline_costs(captured.tape, device)


def steps(sizes: list[int], device: DeviceProfile) -> Iterator[Tape]:
    """Steps of about so many ops: the ops of one block are those by which two small steps differ."""
    few, more = (len(step_of(FEWEST_BLOCKS + extra, device).ops) for extra in (2, 4))
    per_block = (more - few) / 2
    for size in sizes:
        yield step_of(max(FEWEST_BLOCKS, round(FEWEST_BLOCKS + 2 + (size - few) / per_block)), device)


def option_sets(method: Method) -> Iterator[dict[str, Any]]:
    """The defaults, then each other choice."""
    given = GIVEN.get(method.name, {})
    yield given
    for name, option in method.card.options.items():
        yield from (given | {name: value} for value in option.choices or () if value != option.default)


def ask(method: Method, options: dict[str, Any], tape: Tape, device: DeviceProfile, budget: Budget) -> dict[str, Any]:
    """One row: seconds, and what came out."""
    prepared = prepare_tape(tape, method.card.needs, None)
    tape = tape if prepared is None else roofline_costs(prepared.tape, device)
    if "variants" in method.card.needs:
        tape = with_variants(tape, device)
    _ = tape.digest  # names the tape; asked for once, whoever plans
    planner = method.build(**options)
    began, began_cpu = time.perf_counter(), time.process_time()
    try:
        schedule = planner.plan(tape, device, budget)
        outcome, instructions = "ok", len(schedule.instructions)
    except PlanInfeasible:
        outcome, instructions = "plan_infeasible", None
    except Unsupported:
        outcome, instructions = "unsupported", None
    seconds, cpu_seconds = round(time.perf_counter() - began, 3), round(time.process_time() - began_cpu, 3)
    label = " ".join([method.name, *(f"{name}={value}" for name, value in options.items())])
    return {"method": label, "ops": len(tape.ops), "seconds": seconds, "cpu_seconds": cpu_seconds, "outcome": outcome,
            "instructions": instructions}


def growth(rows: list[dict[str, Any]]) -> float | None:
    """The exponent between the two largest steps; None with fewer than two."""
    if len(rows) < 2:
        return None
    small, large = sorted(rows, key=lambda row: row["ops"])[-2:]
    return round(math.log(max(large["cpu_seconds"], 1e-3) / max(small["cpu_seconds"], 1e-3)) / math.log(large["ops"] / small["ops"]), 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 3000, 10000])
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--defaults", action="store_true", help="ask each planner by its default options alone")
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/evidence/planners.json")
    options = parser.parse_args()
    library, device = Library([built_in_collection()]), load_profile("v100-32gb")
    methods = [library.method(name) for name in options.methods or sorted(library.method_paths)]
    asked = [(method, chosen) for method in methods if method.card.kind == "planner" and method.name != "schedule-file"
             for chosen in (list(option_sets(method))[:1] if options.defaults else option_sets(method))]
    rows = []
    for tape in steps(options.sizes, device):
        peak = check_schedule(tape, replay_schedule(tape)).peak_bytes
        budget = Budget(device_bytes=int(options.share * peak), wants_smallest=False)
        for method, chosen in asked:
            rows.append(ask(method, chosen, tape, device, budget))
            print("{method:>40} {ops:>7,} ops {cpu_seconds:>9.3f} s ({seconds:.3f} by the clock)  {outcome}".format(**rows[-1]), flush=True)
    if options.keep:
        fresh = {row["method"] for row in rows}
        where = {key: machine()[key] for key in ("commit", "cpu")}
        rows = [row for row in kept("planners") if row["method"] not in fresh] + [row | where for row in rows]
    found = summarise(rows)
    for name, seconds in found["slowest_seconds"].items():
        print(f"{name:>40} slowest {seconds:8.3f} s, growth {found['growth'][name]}")
    if options.keep:
        keep("planners", rows, found | {"share": options.share})
    return 0 if max(found["slowest_seconds"].values()) <= TARGET_SECONDS else 1


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of benchmarks/README.md, a planner each."""
    of = {name: [row for row in rows if row["method"] == name] for name in dict.fromkeys(row["method"] for row in rows)}
    slowest = {name: max(row["cpu_seconds"] for row in found) for name, found in of.items()}
    return {"target_seconds": TARGET_SECONDS, "slowest_seconds": slowest, "growth": {n: growth(found) for n, found in of.items()}}


if __name__ == "__main__":
    sys.exit(main())
