"""The method in CONTRIBUTING.md works as printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import tapes
from vramlab.check import check_schedule
from vramlab.collection import Library
from vramlab.device import load_profile
from vramlab.errors import PlanInfeasible
from vramlab.planner import UNLIMITED, Budget
from vramlab.workflow import Host, expand, load_workflow

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```\w+\n# (methods/\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def collection(tmp_path_factory) -> Path:
    """The files that the page prints, written where it says."""
    root = tmp_path_factory.mktemp("mine")
    blocks = BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert [name for name, _ in blocks] == ["methods/farthest/card.yaml", "methods/farthest/method.py"]
    for name, text in blocks:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_printed_method_plans_within_its_budget(collection):
    method = Library([collection]).method("farthest")
    tape, device = tapes.chain(6), load_profile("v100-32gb")
    whole = check_schedule(tape, method.build().plan(tape, device, Budget(device_bytes=UNLIMITED)))
    with pytest.raises(PlanInfeasible) as refused:
        method.build().plan(tape, device, Budget(device_bytes=1))
    least = refused.value.smallest_bytes
    assert least < whole.peak_bytes
    for budget in (least, (least + whole.peak_bytes) // 2):
        checked = check_schedule(tape, method.build().plan(tape, device, Budget(device_bytes=budget)))
        assert checked.peak_bytes <= budget


@pytest.mark.slow
def test_the_printed_method_passes_the_check(collection):
    command = [sys.executable, "-m", "vramlab", "check", "method", "farthest", "--collection", str(collection)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_printed_workflow_runs_the_printed_method(collection):
    words = shlex.split(re.search(r"\./run workflow (.*)", (ROOT / "CONTRIBUTING.md").read_text())[1])
    plan = expand(load_workflow(words[0], Library([ROOT, collection]), words[1:]), Host("cpu"))
    assert [(cell.label, cell.config["budget"]) for cell in plan.cells] == [("eager", None), ("farthest", "80%"), ("farthest", "60%")]


def test_the_pages_of_a_checkout_call_run_and_nothing_else():
    """`vramlab COMMAND` is what an installed package has; docs/install.md says which is which."""
    words = "run|new|list|show|check|plan|report|view|validate|doctor|calibrate|compare|cite|train"
    called = re.compile(rf"\bvramlab (?:{words})\b|call vramlab")
    assert called.search("`vramlab new method NAME`")
    assert [called.findall((ROOT / page).read_text()) for page in ("README.md", "CONTRIBUTING.md", "artifact_appendix.md")] == [[], [], []]


def test_pages_and_tests_that_the_page_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:tests|methods|vramlab|benchmarks|docs)/[\w./-]+\.(?:py|md|toml))`", text))
    assert named and not [name for name in named if not (ROOT / name).is_file()]
