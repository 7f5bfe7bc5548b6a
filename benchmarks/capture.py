"""How long capture takes, fresh and from the cache, and which models are captured.

    python benchmarks/capture.py [--models resnet50,densenet121,...] [--again] [--loaded]

Each model in a fresh process: seconds of the capture alone and of reading it back from the cache. Models that are refused are listed with
the reason. Every row is written to benchmarks/evidence/capture.json as soon as it is there; a model that has a row with the same options
is not captured again unless `--again` asks for it, so a run that was cut goes on where it stopped. `--loaded` marks the rows as measured
while the machine did other work.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from common import keep, kept, machine, specs

from vramlab.collection import Library, built_in_collection
from vramlab.isolate import Call, run_isolated
from vramlab.record import Outcome

SMALL = {"image_size": 64}
OPTIONS = {
    "inception-v3": {},
    "inception-v4": {"image_size": 96},
    "googlenet": {"image_size": 96},
    "alexnet": {"image_size": 128},
    "overfeat": {"image_size": 96},
    "vit-b-16": {},
    "bert-base": {},
    "bert-large": {},
    "gpt2-small": {},
    "gpt2-large": {},
    "lstm": {},
    "resnet50": {},
    "densenet121": {},
    "densenet-bc-100": {},
    "resnet1001": {},
    "resnet1202": {},
    "resnet8-digits": {},
    # Deeper ones are never captured whole: their repeated block is captured once and tiled.
    "resnet-deep": {"image_size": 64, "depth": 149},
    "vgg-deep": {"image_size": 64, "depth": 31},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="")
    parser.add_argument("--again", action="store_true", help="capture also what has a row")
    parser.add_argument("--loaded", action="store_true", help="the machine does other work meanwhile")
    options = parser.parse_args()
    names = options.models.split(",") if options.models else sorted(Library([built_in_collection()]).model_paths)
    rows = {row["model"]: row for row in kept("capture")}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if options.again or rows.get(name, {}).get("options") != options_of(name):
                rows[name] = measure(name, Path(folder)) | {"commit": machine()["commit"], "loaded_machine": options.loaded}
                keep("capture", [rows[model] for model in sorted(rows)], summary(list(rows.values())))


def options_of(name: str) -> dict[str, Any]:
    """The options with which a model is captured: small pictures where the model takes any."""
    return OPTIONS.get(name, SMALL)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What came out over all rows."""
    captured = {row["model"]: row for row in rows if not row["refused"]}
    shown = [captured[model] for model in ("resnet50", "densenet121") if model in captured]
    slowest = max(captured.values(), key=lambda row: row["capture_seconds"], default=None)
    return {
        "captured": len(captured),
        "refused": {row["model"]: row["refused"] for row in rows if row["refused"]},
        "slowest": slowest and [slowest["model"], slowest["capture_seconds"]],
        "seconds": {row["model"]: row["capture_seconds"] for row in shown},
        "cached_seconds": {row["model"]: row["cached_seconds"] for row in shown},
    }


def measure(name: str, folder: Path) -> dict[str, Any]:
    """One row."""
    options = options_of(name)
    (spec,) = specs({"model": {"name": name, **options}, "methods": ["replay"], "targets": ["cpu"], "batch_sizes": [2]}, folder)
    result = run_isolated(Call(function="capture.capture_twice", args=(spec, str(folder))))
    refused = "" if result.outcome is Outcome.OK else result.message
    row = {"model": name, "options": options, "refused": refused, **(result.value or {})}
    print(
        f"{name}: "
        + (
            row["refused"]
            or f"{row['ops']} ops, capture {row['capture_seconds']:.2f} s, again from the cache {row['cached_seconds']:.2f} s"
        ),
        flush=True,
    )
    return row


def capture_twice(spec: dict, folder: str) -> dict:
    """In a process of its own: capture, then read it back from the cache."""
    from vramlab.capture import capture
    from vramlab.measure import _Cell
    from vramlab.prepare import cached_capture

    cell = _Cell.of(spec)
    step = cell.workload()
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        captured = cached_capture(
            {"benchmark": spec["config"]["model"]},
            lambda: capture(step.model, step.loss_fn, step.batch, optimizer=step.make_optimizer()),
            Path(folder),
        )
        seconds.append(time.perf_counter() - started)
    return {
        "ops": len(captured.tape.ops),
        "storages": len(captured.tape.storages),
        "capture_seconds": seconds[0],
        "cached_seconds": seconds[1],
    }


if __name__ == "__main__":
    main()
