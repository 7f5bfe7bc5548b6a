"""Replay against eager: peak and step time of our executor with no method, side by side with plain PyTorch.

    python benchmarks/replay.py [--models resnet50,vgg16,...] [--steps 12] [--warmup 3]

For each model: the allocator meter's peak of a warm step of both, each in a fresh process; then two long-lived processes that take
steps in turns, replay and
eager, and once more eager and eager (the drift). A ratio whose 95 % interval reaches 1.00, or that lies inside the drift, is no difference.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from common import keep, specs

from vramlab.isolate import Call, alternate, run_isolated
from vramlab.record import Outcome
from vramlab.statistics import DISTINGUISHABLE_IN_WORDS, distinguishable, drift, paired_ratio

SIZES = {
    "resnet50": (8, {"image_size": 112}),
    "vgg16": (4, {"image_size": 112}),
    "densenet121": (8, {"image_size": 112}),
    "vit-b-16": (2, {}),
    "mobilenet-v2": (16, {"image_size": 112}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(name, Path(folder), options) for name in options.models.split(",")]
    worst = max(row["peak_ratio"] for row in rows)
    slower = [row["model"] for row in rows if row["is_distinguishable"] and row["time_ratio"]["low"] > 1]
    keep(
        "replay",
        rows,
        {
            "worst_peak_ratio": worst,
            "models_with_slower_replay": slower,
            "time_ratios": {r["model"]: r["time_ratio"]["median"] for r in rows},
        },
    )


def measure(name: str, folder: Path, options: argparse.Namespace) -> dict:
    """One row."""
    batch, model_options = SIZES[name]
    (spec,) = specs({"model": {"name": name, **model_options}, "methods": ["replay"], "targets": ["cpu"], "batch_sizes": [batch]}, folder)
    place = folder / name
    place.mkdir()
    plan = value(run_isolated(Call(function="vramlab.measure.make_plan", args=(spec, str(place), None))))
    eager, replay = (
        value(run_isolated(Call(function="vramlab.measure.measure_peak_of", args=(spec, where)))) for where in (None, str(place))
    )
    steps = {where: Call(function="vramlab.measure.timed_step", args=(spec, where)) for where in (None, str(place))}
    turns = alternate(steps[str(place)], steps[None], warmup=options.warmup, steps=options.steps)
    control = alternate(steps[None], steps[None], warmup=options.warmup, steps=options.steps)
    ratio, noise = paired_ratio(turns.first_seconds, turns.second_seconds), drift(control.first_seconds, control.second_seconds)
    row = {
        "model": name,
        "batch_size": batch,
        "model_options": model_options,
        "eager_peak_bytes": eager["peak_bytes"],
        "replay_peak_bytes": replay["peak_bytes"],
        "peak_ratio": replay["peak_bytes"] / eager["peak_bytes"],
        "predicted_peak_bytes": plan["predicted"]["peak_bytes"],
        "time_ratio": ratio.to_json(),
        "drift": noise.to_json(),
        "is_distinguishable": distinguishable(ratio, noise),
        "replay_seconds": turns.first_seconds,
        "eager_seconds": turns.second_seconds,
        "predicted_step_seconds": plan["predicted"]["step_seconds"],
        "capture_seconds": plan["capture_seconds"],
    }
    verdict = DISTINGUISHABLE_IN_WORDS[row["is_distinguishable"]]
    print(f"{name}: peak {row['peak_ratio']:.4f} x eager, time {ratio} x eager's, drift {noise}: {verdict}", flush=True)
    return row


def value(result):
    """The value of an isolated call, or the end."""
    if result.outcome is not Outcome.OK:
        raise SystemExit(f"{result.outcome}: {result.message}\n{result.traceback}")
    return result.value


if __name__ == "__main__":
    main()
