"""Runs a plan with the stand-in cell, as a program of its own: what the tests interrupt, kill and start twice.

    python run_small.py COLLECTION WORKFLOW RESULTS
"""

from __future__ import annotations

import sys
from pathlib import Path

from vramlab.cli.progress import PlainDisplay
from vramlab.collection import Library
from vramlab.runner import Runner
from vramlab.workflow import Host, expand, load_workflow


def main() -> int:
    root, workflow, results = map(Path, sys.argv[1:4])
    plan = expand(load_workflow(str(workflow), Library([root])), Host("cpu"))
    command = (sys.executable, str(root / "fake_cell.py"))
    return Runner(plan, results, PlainDisplay(sys.stdout), command=command, machine_lock=root / "machine.lock").run().exit_code


if __name__ == "__main__":
    sys.exit(main())
