"""How long capture takes, fresh and from the cache, and which models are captured.

    python benchmarks/capture.py [--models resnet50,densenet121,...]

Each model in a fresh process: seconds of the capture alone, of measuring the costs of ops that this machine has not measured yet, and
of the same again from
the cache. Models that are refused are listed with the reason.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from common import keep, specs

from vramlab.collection import Library, built_in_collection
from vramlab.isolate import Call, run_isolated
from vramlab.record import Outcome

SMALL = {"image_size": 64}
OPTIONS = {
    "inception-v3": {},
    "googlenet": {"image_size": 96},
    "alexnet": {"image_size": 128},
    "vit-b-16": {},
    "bert-base": {},
    "gpt2-small": {},
    "resnet50": {},
    "densenet121": {},
    "resnet1202": {},
    "resnet8-digits": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="")
    options = parser.parse_args()
    names = options.models.split(",") if options.models else list(Library([built_in_collection()]).model_paths)
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(name, Path(folder)) for name in names]
    refused = {row["model"]: row["refused"] for row in rows if row["refused"]}
    slowest = max((row for row in rows if not row["refused"]), key=lambda row: row["capture_seconds"])
    keep(
        "capture",
        rows,
        {
            "captured": len(rows) - len(refused),
            "refused": refused,
            "slowest": [slowest["model"], slowest["capture_seconds"]],
            "seconds": {row["model"]: row["capture_seconds"] for row in rows if row["model"] in ("resnet50", "densenet121")},
            "cached_seconds": {row["model"]: row["cached_seconds"] for row in rows if row["model"] in ("resnet50", "densenet121")},
        },
    )


def measure(name: str, folder: Path) -> dict:
    """One row."""
    options = OPTIONS.get(name, SMALL)
    (spec,) = specs({"model": {"name": name, **options}, "methods": ["replay"], "targets": ["cpu"], "batch_sizes": [2]}, folder)
    result = run_isolated(Call(function="capture.capture_twice", args=(spec, str(folder))))
    row = {"model": name, "refused": "" if result.outcome is Outcome.OK else result.message, **(result.value or {})}
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
