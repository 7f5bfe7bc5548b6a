"""What a user sees when the machine or a method misbehaves: one line and an exit code, never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vramlab.collection import read_method
from vramlab.method_check import check_method

ROOT = Path(__file__).resolve().parents[1]


def test_results_that_cannot_be_written_are_told_in_one_line(tmp_path):
    (tmp_path / "a file").write_text("")
    words = ["run", "workflow", "smoke", "--output-dir", str(tmp_path / "a file" / "results")]
    run = subprocess.run([sys.executable, "-m", "vramlab", *words], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert run.returncode == 3
    assert run.stderr.splitlines()[-1].endswith("Not a directory") and "Traceback" not in run.stderr


@pytest.mark.parametrize("where", ["import", "plan"])
def test_a_method_that_ends_the_process_is_a_fault_of_the_method(where, tmp_path):
    replay = ROOT / "methods" / "replay"
    folder = tmp_path / "leaves"
    folder.mkdir()
    (folder / "card.yaml").write_text((replay / "card.yaml").read_text())
    code = (replay / "method.py").read_text()
    mark = "        return fixed_plan("
    assert mark in code
    at_import, in_plan = code + "\nraise SystemExit(7)\n", code.replace(mark, f"        raise SystemExit(7)\n{mark}")
    (folder / "method.py").write_text(at_import if where == "import" else in_plan)
    faults = [fault for check in check_method(read_method(folder)) for fault in check.faults]
    assert any("SystemExit: 7" in fault for fault in faults)
