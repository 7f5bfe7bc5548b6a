"""A small collection written to disk, and a stand-in for `python -m vramlab.cell` that does as the method's name says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

METHOD_CARD = """\
uid: "{uid}"
alias: [{alias}]
tags: [toy, {name}]
version: 1
kind: planner
title: {name} in a test
decides: Nothing at all.
paper: null
options:
  action: {{default: director, type: str, choices: [director, swap-only], help: "what to do"}}
  threshold: {{default: 1, type: float, min: 0, max: 8, help: "when to do it"}}
takes_budget: {takes_budget}
fidelity: None, it is a toy.
"""
METHOD_CODE = "from .words import WORD\n\n\ndef build(action='director', threshold=1.0):\n    return WORD, action, threshold\n"

MODEL_CARD = """\
name: {name}
family: toy
title: A toy
source: "file:toy.py:build"
input: {{kind: {kind}, channels: 3, image_size: 32}}
options:
  image_size: {{default: 32, type: int, min: 8, help: "pixels"}}
  classes: {{default: 10, type: int, min: 2, help: "outputs"}}
loss: cross_entropy
"""

# The method's name says what its cell does. Every start is noted in the file `starts`, one line a start.
FAKE_CELL = r'''
import json, os, signal, subprocess, sys, time
from pathlib import Path

folder = Path(sys.argv[1])
spec = json.loads((folder / "spec.json").read_text())
config = spec["config"]
what = config["method"]
starts = Path(os.environ["STARTS"])
with open(starts, "a") as f:
    f.write(f"{what} {config['batch_size']} {os.getpid()}\n")
print("starting", what, flush=True)


def record(outcome="ok", **fields):
    body = {"cell_id": folder.name, "kind": config["kind"], "workflow": spec["workflow"], "config": config, "outcome": outcome,
            "truth": "exact", "measured": {"peak_bytes": 1000}, "provenance": {"seconds": 2.5}, "schema_version": 1} | fields
    part = folder / "record.part"
    part.write_text(json.dumps(body))
    os.replace(part, folder / "record.json")


if what == "segfault":
    os.kill(os.getpid(), signal.SIGSEGV)
elif what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "raises":
    raise RuntimeError("no luck today")
elif what == "silent":
    pass
elif what == "half":
    (folder / "record.json").write_text('{"cell_id": "' + folder.name)
elif what == "foreign":
    record()
    body = json.loads((folder / "record.json").read_text()) | {"cell_id": "0" * 16}
    (folder / "record.json").write_text(json.dumps(body))
elif what == "hangs":
    subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); print('grandchild', os.getpid(), flush=True); time.sleep(600)"])
    time.sleep(600)
elif what == "fills":
    (folder / "big").write_bytes(b"0" * 10_000)
    print("x" * 200_000, flush=True)
    raise OSError(28, "No space left on device")
elif what == "infeasible":
    record("plan_infeasible", reason="budget", message="the smallest it can reach is 7 bytes")
elif what == "wrong":
    record("wrong", reason="truth")
elif what == "slow":
    began = time.monotonic()
    time.sleep(float(os.environ.get("SLOW", "1.5")))
    record(measured={"span": [began, time.monotonic()]})
elif what == "flaky":  # crashes the first time
    if starts.read_text().count("flaky") == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    record()
else:
    record()
'''


def write_method(root: Path, name: str, *, takes_budget: bool = False, code: str = METHOD_CODE, alias: str = "", uid: str = "") -> Path:
    """methods/<name>/ with three files; returns the folder."""
    folder = root / "methods" / name
    folder.mkdir(parents=True)
    uid = uid or hashlib.sha256(name.encode()).hexdigest()[:16]
    (folder / "card.yaml").write_text(METHOD_CARD.format(name=name, alias=alias, uid=uid, takes_budget=str(takes_budget).lower()))
    (folder / "method.py").write_text(code)
    (folder / "words.py").write_text(f"WORD = {name!r}\n")
    return folder


def write_model(root: Path, name: str = "toy", kind: str = "image") -> Path:
    """models/<name>.yaml and models/toy.py; returns the card's path."""
    path = root / "models" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MODEL_CARD.format(name=name, kind=kind))
    (path.parent / "toy.py").write_text("def build(image_size, classes):\n    return ('toy', image_size, classes)\n")
    return path


def write_workflow(root: Path, text: str, name: str = "small") -> Path:
    """workflows/<name>.yaml; returns its path."""
    path = root / "workflows" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def write_fake_cell(root: Path) -> Path:
    """The stand-in; run it with STARTS in the environment."""
    path = root / "fake_cell.py"
    path.write_text(FAKE_CELL)
    return path


def small_workflow(methods: str, **more: Any) -> str:
    """YAML of a step experiment over some methods."""
    body = {"schema": 1, "name": "small", "title": "A small run", "model": "toy", "batch_sizes": [4], **more}
    return json.dumps(body)[:-1] + f', "methods": {methods}}}\n'
