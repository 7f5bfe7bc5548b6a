"""One small run that really ran, made once a test session: measured, trained, refused, simulated and searched cells, with claims.

    run = real_run(folder)       the run's folder; with pytest-xdist, the first worker makes it and the others wait

It takes about a minute on two cores, most of it in twenty processes that each load torch.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = """\
schema: 1
name: given-away
title: A small run to give away
model: {name: resnet8-digits, image_size: 16}
methods: [eager, checkpoint, delta]
budgets: [80%]
experiments:
  - name: memory
    kind: step
    targets: [cpu]
    batch_sizes: [32]
    measure: {warmup: 1, steps: 6, gate_batch_size: 4}
  - name: refused
    kind: step
    targets: [cpu]
    methods: [checkpoint]
    budgets: [5%]
    batch_sizes: [32]
    measure: {warmup: 1, steps: 6, gate_batch_size: 4}
  - name: training
    kind: train
    targets: [cpu]
    data: digits
    methods: [delta]
    training: {steps: 6, eval_every: 3, lr: 0.02}
    batch_sizes: [32]
  - name: simulated
    kind: step
    targets: ["sim:v100-32gb"]
    batch_sizes: [64]
  - name: largest
    kind: max_batch
    targets: ["sim:v100-32gb"]
    methods: [eager, delta]
    budgets: [24MiB]
    search: {low: 1, high: 256}
claims:
  - {id: delta-mem-save, experiment: memory, rule: memory_saved_percent, method: delta, baseline: eager, tolerance: 0.1}
  - {id: delta-convergence, experiment: training, rule: training_equal, method: delta, tolerance: 0.01}
  - {id: delta-bs-r50, experiment: largest, rule: max_batch_ratio, method: delta, baseline: eager, tolerance: 0.1}
expected: {minutes: 1, disk_bytes: 5000000}
"""


def real_run(folder: Path) -> Path:
    """The run below `folder`, made there unless it is."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            (folder / "given-away.yaml").write_text(WORKFLOW)
            command = [sys.executable, "-m", "vramlab", "run", "workflow", "given-away.yaml", "--device", "cpu", "--output-dir", "results"]
            search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900,
                                  env={**os.environ, "PYTHONPATH": search})
            assert done.returncode == 0, done.stdout + done.stderr
            (folder / "done").touch()
    return next((folder / "results" / "given-away").iterdir())
