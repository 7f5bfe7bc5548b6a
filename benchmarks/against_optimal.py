"""Our own planner against the proven optimum of `optimal`'s class, simulated, on steps small enough for a proof.

    python benchmarks/against_optimal.py [--limit-seconds 40] [--plan-seconds 3] [--steps "chain of 4" ...]

Steps that tests/exhaustive.py draws (5 to 8 ops), made ones (chains, residual blocks, a small U-Net; 8 to 40 ops, each op on its own) and
real ones that `optimal` first cuts into few groups, at budgets between the least peak and eager's. The link takes 1 or 2 seconds a byte
(drawn steps), half of, twice and eight times as long for a feature map as a forward convolution (made), or is that of a stated device.
Neither gets convolution algorithms, as `optimal` has none. A row counts where `optimal` has a proof within its time. Its class is one
recompute an op (or group) and one round trip a storage, so hybrid may be faster.
Rows are kept in benchmarks/evidence/against_optimal.json; one that was made by the same code of hybrid is not made again. Of one made by
other code hybrid plans anew, and what `optimal` said stands, as that does not depend on hybrid; `--ask-again` asks it too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from common import ROOT, keep, kept

sys.path[:0] = [str(ROOT / "tests")]

from contract import DEVICE  # noqa: E402
from exhaustive import random_step  # noqa: E402
from hybrid import code_of, tape_of  # noqa: E402
from tapes import MAP, StepBuilder, chain  # noqa: E402

from vramlab.bounds import least_peak_bytes  # noqa: E402
from vramlab.check import check_schedule  # noqa: E402
from vramlab.collection import Library  # noqa: E402
from vramlab.costs import roofline_costs  # noqa: E402
from vramlab.device import DeviceProfile, load_profile  # noqa: E402
from vramlab.errors import PlanInfeasible, Unsupported  # noqa: E402
from vramlab.liveness import replay_schedule  # noqa: E402
from vramlab.planner import Budget  # noqa: E402
from vramlab.simulate import simulate  # noqa: E402
from vramlab.tape import Tape  # noqa: E402

SHARES = (0.0, 0.25, 0.5, 0.75)  # of the way from the least peak to eager's
MAP_SECONDS = (0.5, 2.0, 8.0)  # a copy of a map, where a forward convolution takes one second
REAL = {"resnet18": 8, "vgg16": 8, "unet": 8}  # groups
WITHIN = 1.02


def residual(blocks: int) -> Tape:
    """relu(x + conv(conv(x))), so many times."""
    step = StepBuilder()
    x = step.convolution(step.input)
    for _ in range(blocks):
        x = step.relu(step.add(x, step.convolution(step.convolution(x))), inplace=True)
    return step.finish(x)


def hourglass(depth: int) -> Tape:
    """A U-Net of equal maps: what goes down is added on the way up."""
    step = StepBuilder()
    x, down = step.input, []
    for _ in range(depth):
        x = step.convolution(x)
        down.append(x)
    x = step.convolution(x)
    for y in reversed(down):
        x = step.convolution(step.add(x, y))
    return step.finish(x)


MADE = {**{f"chain of {n}": lambda n=n: chain(n) for n in (2, 4, 6, 8, 10)},
        **{f"residual, {n} blocks": lambda n=n: residual(n) for n in (1, 2, 3)},
        **{f"U-Net of depth {n}": lambda n=n: hourglass(n) for n in (1, 2, 3)}}
DRAWN = {f"drawn, {ops} ops, seed {seed}": (ops, seed) for ops in (5, 6, 7, 8) for seed in range(8)}


def questions(steps: list[str]) -> Iterator[tuple[str, Tape, str, DeviceProfile, int]]:
    """Name, tape, link, device and groups."""
    for name in steps:
        if name in MADE:
            tape = MADE[name]()
            for seconds in MAP_SECONDS:
                yield name, tape, f"{seconds:g} s a map", linked(MAP / seconds), 64
        elif name in DRAWN:
            ops, seed = DRAWN[name]
            for seconds in (1, 2):
                yield name, random_step(Random(seed), ops), f"{seconds} s a byte", linked(1 / seconds), 64
        else:
            for profile in ("v100-32gb", "h200"):
                device = load_profile(profile)
                yield name, roofline_costs(tape_of(name), device), profile, device, REAL[name]


def linked(bytes_per_second: float) -> DeviceProfile:
    return replace(DEVICE, h2d_bytes_per_second=bytes_per_second, d2h_bytes_per_second=bytes_per_second)


def shares_of(tape: Tape) -> list[float]:
    """Those at which the budget binds, each budget once."""
    low, high = least_peak_bytes(tape), check_schedule(tape, replay_schedule(tape)).peak_bytes
    found = {int(low + share * (high - low)): share for share in reversed(SHARES)}
    return sorted(found[nbytes] for nbytes in found if nbytes < high)


def optimum_of(library: Library, tape: Tape, device: DeviceProfile, groups: int, budget: Budget,
               options: argparse.Namespace) -> dict[str, Any]:
    """What `optimal` says within its time."""
    began = time.process_time()
    try:
        optimal = library.method("optimal").build(groups=groups, time_limit_seconds=options.limit_seconds)
        solution = optimal.solve(tape, device, budget)
    except (PlanInfeasible, Unsupported):
        solution = None
    return {"items": solution.items if solution else None, "is_proved": solution is not None and solution.is_proved,
            "optimal_seconds": solution.seconds if solution else None, "optimal_cpu_seconds": time.process_time() - began}


def row_of(library: Library, tape: Tape, device: DeviceProfile, groups: int, share: float, options: argparse.Namespace,
           known: dict[str, Any] | None) -> dict[str, Any]:
    """One budget; `known`: its row by other code."""
    low, high = least_peak_bytes(tape), check_schedule(tape, replay_schedule(tape)).peak_bytes
    budget = Budget(device_bytes=int(low + share * (high - low)), wants_smallest=False)
    if known and known["budget_bytes"] == budget.device_bytes:
        optimum = {key: known[key] for key in ("items", "is_proved", "optimal_seconds", "optimal_cpu_seconds")}
    else:
        optimum = optimum_of(library, tape, device, groups, budget, options)
    planned = library.method("hybrid").build(plan_seconds=options.plan_seconds).plan(tape, device, budget)
    seconds = simulate(check_schedule(tape, planned, budget), device).metrics.step_seconds
    return {"ops": len(tape.ops), "budget_bytes": budget.device_bytes, "hybrid_seconds": seconds, **optimum}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit-seconds", type=float, default=40.0, help="for each of the two programs that `optimal` solves")
    parser.add_argument("--plan-seconds", type=float, default=3.0)
    parser.add_argument("--steps", nargs="+", default=[*DRAWN, *MADE, *REAL], choices=[*DRAWN, *MADE, *REAL])
    parser.add_argument("--ask-again", action="store_true", help="ask `optimal` too where it has answered before")
    options = parser.parse_args()
    library, rows = Library([ROOT]), kept("against_optimal")
    code = code_of(library, library.method("hybrid"))
    for name, tape, link, device, groups in questions(options.steps):
        for share in shares_of(tape):
            asked = {"step": name, "link": link, "share": share, "code": code, "plan_seconds": options.plan_seconds}
            if any(asked.items() <= row.items() for row in rows):
                continue
            known = [r for r in rows if (r["step"], r["link"], r["share"]) == (name, link, share)]
            row = asked | row_of(library, tape, device, groups, share, options, None if options.ask_again or not known else known[0])
            rows = [r for r in rows if r not in known] + [row]
            ratio = f"hybrid / optimal {row['hybrid_seconds'] / row['optimal_seconds']:.4f}" if row["is_proved"] else "no proof"
            print(f"{name:>20} {len(tape.ops):4} ops {link:>12} {share:5.2f}: {ratio}", flush=True)
        keep("against_optimal", rows, summarise(rows))
    return 0


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of benchmarks/README.md."""
    ratios = {f"{r['step']}, {r['link']}, {r['share']}": r["hybrid_seconds"] / r["optimal_seconds"] for r in rows if r["is_proved"]}
    return {"asked": len(rows), "proved": len(ratios), "worst": max(ratios.values(), default=None),
            "above_2_percent": {name: ratio for name, ratio in ratios.items() if ratio > WITHIN},
            "faster_than_the_class": sum(ratio < 1 - 1e-6 for ratio in ratios.values())}


if __name__ == "__main__":
    sys.exit(main())
