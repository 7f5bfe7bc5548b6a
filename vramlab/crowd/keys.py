"""What must be equal for two results to be compared: a leaderboard and a reproduction ask it of records from different machines."""

from __future__ import annotations

import json
from typing import Any, Mapping

from vramlab.crowd.findings import RULES_VERSION
from vramlab.record import RunRecord


def device_of(record: RunRecord, environment: Mapping[str, Any]) -> str | None:
    """The board, the processor or the simulated profile that a record is of, by its own name; None where it has none."""
    target = record.config["target"]
    if target.startswith("sim:"):
        return target
    if target == "cpu":
        return (environment.get("cpu") or {}).get("model")
    gpus, index = environment.get("gpus") or [], int(target.partition(":")[2] or 0)
    named = [gpu.get("name") for gpu in gpus]
    return named[index] if index < len(named) else None


def comparability_key(record: RunRecord, environment: Mapping[str, Any]) -> str:
    """Canonical words of: kind, model and its options, batch, data, dtype and all of training but the seed, number of devices, device, what
    is searched, and the version of the rules. Method, its options and the budget are what is compared."""
    config = record.config
    training = {key: value for key, value in config["training"].items() if key != "seed"}
    parts = {"kind": record.kind, "model": config["model"], "model_options": config["model_options"], "batch_size": config["batch_size"],
             "data": config["data"], "training": training, "devices": config.get("devices") or 1, "device": device_of(record, environment),
             "search": config.get("search"), "rules_version": RULES_VERSION}
    return json.dumps(parts, sort_keys=True, separators=(",", ":"))
