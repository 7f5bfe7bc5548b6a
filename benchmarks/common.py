"""What the benchmarks share: a workflow of one's own, its specs, and where the evidence goes."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, Iterable

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vramlab.collection import Library, built_in_collection  # noqa: E402
from vramlab.workflow import Host, single_cell  # noqa: E402

EVIDENCE = Path(__file__).with_name("evidence")


def specs(settings: dict[str, Any], run_dir: Path) -> list[dict[str, Any]]:
    """The specs of all cells of a workflow given as a dict, as `vramlab.measure` takes them."""
    library = Library([built_in_collection()])
    plan = single_cell(library, settings, (), Host())
    return [
        {"config": cell.config, "workflow": {"name": "benchmark"}, "collections": [str(r) for r in library.roots], "run_dir": str(run_dir)}
        for cell in plan.cells
    ]


def machine() -> dict[str, Any]:
    """Commit, CPU and versions."""
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    names = (
        [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        if Path("/proc/cpuinfo").exists()
        else []
    )
    return {
        "commit": commit,
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def kept(name: str) -> list[dict[str, Any]]:
    """The rows of benchmarks/evidence/<name>.json, none where there is no such file."""
    path = EVIDENCE / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def keep(name: str, rows: Iterable[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Print the summary as one JSON line; write it with all rows to benchmarks/evidence/<name>.json."""
    EVIDENCE.mkdir(exist_ok=True)
    body = {"benchmark": name, "machine": machine(), "summary": summary, "rows": list(rows)}
    (EVIDENCE / f"{name}.json").write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    print(json.dumps(summary, sort_keys=True))
