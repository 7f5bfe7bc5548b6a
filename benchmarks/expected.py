"""Expected results of a workflow, from a run that is believed: written beside the workflow as `workflows/<name>.expected.json`.

    python benchmarks/expected.py results/resnet50-delta/<run>

One entry a cell: its outcome, its truth and the numbers that do not depend on the machine's speed, with the tolerance inside which another
machine of the same kind should land. Step times are given for orientation, with the processor that they were measured on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from common import ROOT, machine

from vramlab.record import RunRecord
from vramlab.report.claims import judge, load_claims
from vramlab.run_folder import RunFolder
from vramlab.runs import load_run

PEAK_TOLERANCE_SHARE, PEAK_TOLERANCE_BYTES = 0.005, 2**20


def expected_of(run: RunFolder) -> dict[str, Any]:
    """The body of the file."""
    labels = {cell["cell_id"]: cell["label"] for cell in run.plan["cells"]}
    cells = [entry(record, labels[cell_id]) for cell_id, record in run.records().items()]
    known = load_claims([ROOT / "reports" / "claims.yaml"])
    claims = judge(run.plan["workflow"]["claims"], load_run(run.folder), known)
    return {
        "workflow": run.plan["workflow"]["name"],
        "label": run.plan["workflow"]["label"],
        "measured_on": machine(),
        "peak_tolerance": {"share": PEAK_TOLERANCE_SHARE, "bytes": PEAK_TOLERANCE_BYTES, "which": "the larger"},
        "note": "A method that plans by op times may choose another plan on another machine: then its peak is bounded by its budget alone.",
        "cells": cells,
        "claims": [{"id": c.id, "rule": c.rule, "experiment": c.experiment, "claimed": c.claim.in_words, "obtained": c.finding.obtained,
                    "verdict": c.verdict_in_words} for c in claims],
    }


def entry(record: RunRecord, label: str) -> dict[str, Any]:
    """What to expect of one cell; `label` is how the workflow calls its method, told where that is not the method's name."""
    config, measured, predicted = record.config, record.measured, record.predicted
    found = {key: config[key] for key in ("experiment", "kind", "model", "batch_size", "method", "budget", "target")}
    found |= {"label": label if label != config["method"] else None, "devices": config.get("devices")}
    found |= {"budget_bytes": record.budget_bytes, "outcome": str(record.outcome), "truth": str(record.truth)}
    found["micro_batches"] = predicted.get("micro_batches") or record.truth_detail.get("micro_batches")
    found["measured_peak_bytes"] = measured.get("peak_bytes")
    found |= {"simulated_peak_bytes": predicted.get("peak_bytes"), "ratio_to_eager": (measured.get("ratio") or {}).get("median")}
    if record.search:
        simulated = "simulated_" if config["target"].startswith("sim:") else ""
        found[f"{simulated}largest_{record.search['over']}"] = record.search["largest"]
    if record.training:
        found["equal_steps"] = record.training["equal_steps"]
        found["final_accuracy"] = record.training["accuracy"][-1][1] if record.training["accuracy"] else None
    return {key: value for key, value in found.items() if value is not None}


def main() -> None:
    run = RunFolder(Path(sys.argv[1]))
    body = expected_of(run)
    path = ROOT / "workflows" / f"{body['workflow']}.expected.json"
    path.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    print(f"{path.name}: {len(body['cells'])} cells")


if __name__ == "__main__":
    main()
