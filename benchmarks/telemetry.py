"""What the sampler itself costs: eager's step time with it and without it, in turns in one process.

    python benchmarks/telemetry.py [--model resnet18] [--periods 0.1,0.02] [--rounds 10] [--steps 5] [--device cpu]

Each round takes a block of steps without the sampler, one with it at each period, and one more without: the last against the first is
the drift, below which a cost cannot be told. The order within a round is reversed every second time. A sampler's start and end are not in
the blocks. A block counts with its median step; the ratio of a period is that of its blocks to the first ones, in pairs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

from common import keep, specs

from vramlab.measure import timed_step
from vramlab.statistics import Interval, distinguishable, drift, median, paired_ratio
from vramlab.telemetry import Sampler

SIZES = {"resnet18": (8, {"image_size": 112}), "resnet50": (8, {"image_size": 112}), "resnet8-digits": (64, {"image_size": 16})}
SETTLE_SECONDS = 1.0  # a sampler has started, or is gone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18", choices=SIZES)
    parser.add_argument("--periods", default="0.1,0.02", help="seconds between samples")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="steps a block")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    batch, model_options = SIZES[options.model]
    with tempfile.TemporaryDirectory() as folder:
        model = {"name": options.model, **model_options}
        (spec,) = specs({"model": model, "methods": ["eager"], "targets": [options.device], "batch_sizes": [batch]}, Path(folder))
        step = timed_step(spec, None)
        for _ in range(2):
            step()
        rows = measure(step, Path(folder), [float(p) for p in options.periods.split(",")], options)
    keep("telemetry", rows, {"model": options.model, "device": options.device, **summarise(rows)})


def measure(step: Callable[[], Any], folder: Path, periods: list[float], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a block."""
    rows = []
    blocks = [("without", None), *((f"every {p:g} s", p) for p in periods), ("without again", None)]
    for index in range(options.rounds):
        for name, period in blocks if index % 2 == 0 else blocks[::-1]:
            sampler = None if period is None else Sampler(folder / "telemetry.csv.gz", target=options.device, period_seconds=period).start()
            time.sleep(SETTLE_SECONDS)
            seconds = [seconds_of(step, options.device) for _ in range(options.steps)]
            summary = None if sampler is None else sampler.stop()
            rows.append({"round": index, "block": name, "period_seconds": period, "step_seconds": seconds, "telemetry": summary})
    return rows


def seconds_of(step: Callable[[], Any], device: str) -> float:
    """Wall time of one step, to its end on a GPU too."""
    import torch

    started = time.perf_counter()
    step()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratio of each period to steps without a sampler, the drift beside it, and whether the sampler kept its period."""
    blocks = {name: [median(r["step_seconds"]) for r in by_round(rows, name)] for name in dict.fromkeys(r["block"] for r in rows)}
    noise = drift(blocks["without"], blocks["without again"])
    return {"drift": noise.to_json(), "periods": [of_period(rows, name, blocks, noise) for name in blocks if name.startswith("every")]}


def by_round(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """A block's rows in the order of rounds."""
    return sorted((r for r in rows if r["block"] == name), key=lambda r: r["round"])


def of_period(rows: list[dict[str, Any]], name: str, blocks: dict[str, list[float]], noise: Interval) -> dict[str, Any]:
    """The cost of one period."""
    ratio = paired_ratio(blocks[name], blocks["without"])
    told = [r["telemetry"] for r in by_round(rows, name)]
    return {
        "period_seconds": by_round(rows, name)[0]["period_seconds"],
        "ratio": ratio.to_json(),
        "is_distinguishable": distinguishable(ratio, noise),
        "failures": [t["failure"] for t in told if t["failure"]],
        "missed": sum(t.get("missed") or 0 for t in told),
        "achieved_period_seconds": [t.get("achieved_period_seconds") for t in told],
    }


if __name__ == "__main__":
    main()
