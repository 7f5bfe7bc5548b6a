"""How the suite itself behaves: what cannot run here is left out in the open, and only a whole full run is evidence."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]
HERE = Path(__file__).parent

MARKED = """
import pytest

def test_plain(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.gpu
def test_gpu(): raise RuntimeError("ran without a GPU")

@pytest.mark.chromium
def test_page(chromium): raise RuntimeError("ran without Chromium")
"""


TORCH = """
__version__ = "pretended"

class cuda:
    is_available = staticmethod(lambda: HAS_GPU)
    get_device_name = staticmethod(lambda index: "a GPU")
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    """The suite's conftest over four tests, with a torch that finds no GPU and a PATH on which there is no Chromium."""
    monkeypatch.setenv("PATH", "")
    pytester.makepyfile(torch=TORCH.replace("HAS_GPU", "False"))
    tests = pytester.mkdir("tests")
    text = (HERE / "conftest.py").read_text()
    (tests / "conftest.py").write_text(text)
    (tests / "test_marked.py").write_text(MARKED)
    pytester.makeini("[pytest]\npythonpath = .\ntestpaths = tests\nmarkers =\n  slow: s\n  gpu: g\n  chromium: c\n")
    return pytester


def test_what_cannot_run_is_listed_last_with_the_reason(suite):
    result = suite.runpytest_subprocess()
    result.assert_outcomes(passed=1, deselected=3)
    assert result.outlines[-4:] == [
        "Groups that did not run:",
        "  slow (1 test): left out: ./run tests --full runs them",
        "  gpu (1 test): torch finds no CUDA device on this machine",
        "  chromium (1 test): none of chromium, chromium-browser, google-chrome, google-chrome-stable is on PATH",
    ]


@pytest.mark.slow
def test_workers_report_what_they_left_out(suite):
    result = suite.runpytest_subprocess("-n", "2")
    result.assert_outcomes(passed=1)
    assert "  gpu (1 test): torch finds no CUDA device on this machine" in result.outlines[-4:]


def test_a_group_that_was_not_asked_for_is_not_listed(suite):
    result = suite.runpytest_subprocess("-k", "plain or slow")
    assert result.outlines[-2:] == ["Groups that did not run:", "  slow (1 test): left out: ./run tests --full runs them"]


def test_with_a_gpu_its_tests_run(suite):
    suite.makepyfile(torch=TORCH.replace("HAS_GPU", "True"))
    result = suite.runpytest_subprocess()
    result.assert_outcomes(passed=1, failed=1, deselected=2)
    result.stdout.fnmatch_lines("*ran without a GPU*")


@pytest.mark.parametrize("words", [[], ["-p", "no:cacheprovider"], ["-n", "2"], ["tests"]])
def test_a_whole_full_run_is_kept_as_evidence(suite, words):
    suite.runpytest_subprocess("--full", *words).assert_outcomes(passed=2)
    kept = json.loads((suite.path / "benchmarks" / "evidence" / "tests-full.json").read_text())
    assert (kept["passed"], kept["failed"], sorted(kept["not_run"])) == (2, [], ["chromium", "gpu"])
    assert kept["files"]["tests/test_marked.py"]["passed"] == 2


@pytest.mark.parametrize("words", [[], ["--full", "-k", "plain"], ["--full", "tests/test_marked.py"], ["--full", "-x"]])
def test_a_part_of_the_suite_is_no_evidence(suite, words):
    suite.runpytest_subprocess(*words)
    assert not (suite.path / "benchmarks").exists()


def test_a_failure_is_kept_by_name(suite):
    (suite.path / "tests" / "test_marked.py").write_text("def test_wrong(): assert 1 == 2\n")
    suite.runpytest_subprocess("--full").assert_outcomes(failed=1)
    kept = json.loads((suite.path / "benchmarks" / "evidence" / "tests-full.json").read_text())
    assert (kept["passed"], kept["failed"]) == (0, ["tests/test_marked.py::test_wrong"])


@pytest.fixture
def front(monkeypatch):
    """tests/__main__.py on a machine whose programs are those in `front.programs`; `front.calls` are the commands that it ran."""
    spec = importlib.util.spec_from_file_location("suite_front", HERE / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.programs, module.calls, module.statuses = {"apt-get"}, [], []

    def run(command, **how):
        module.calls.append(command[1])
        status = module.statuses.pop(0)
        if command[1] == "install" and status == 0:
            module.programs.add(command[-1])
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(module.shutil, "which", lambda name: name if name in module.programs else None)
    for name, package in (("find_chromium", "chromium"), ("find_postgres", "postgresql")):
        monkeypatch.setattr(module, name, lambda package=package: package if package in module.programs else None)
    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setattr(module.os, "geteuid", lambda: 0)
    return module


@pytest.mark.parametrize("statuses, calls, reason", [
    ([0], ["install"], ""),
    ([100, 0, 0], ["install", "update", "install"], ""),
    ([100, 100, 100], ["install", "update", "install"], "ended with exit status 100"),
])
def test_a_program_is_installed_where_it_can_be(front, statuses, calls, reason):
    front.statuses = statuses
    said = front.provide("Chromium", "chromium", front.find_chromium, "that look")
    assert said.endswith(reason) and bool(said) == bool(reason)
    assert front.calls == calls
    assert ("chromium" in front.programs) == (reason == "")


def test_a_program_is_not_installed_where_it_cannot_be(front, monkeypatch):
    front.programs = set()
    words = ("Chromium", "chromium", front.find_chromium, "that look")
    assert "no apt-get" in front.provide(*words)
    front.programs = {"apt-get"}
    monkeypatch.setattr(front.os, "geteuid", lambda: 1000)
    assert "takes root" in front.provide(*words)
    front.programs = {"chromium"}
    assert front.provide(*words) == ""
    assert front.calls == []


def test_chromium_and_postgresql_are_seen_to_and_each_reason_is_told(front, monkeypatch):
    for name in ("VRAMLAB_TESTS_NO_CHROMIUM", "VRAMLAB_TESTS_NO_POSTGRES"):
        monkeypatch.setenv(name, "")  # put back afterwards
    front.statuses = [0, 100, 100, 100]
    front.provide_all()
    assert front.calls == ["install", "install", "update", "install"] and "chromium" in front.programs
    assert front.os.environ["VRAMLAB_TESTS_NO_CHROMIUM"] == ""
    assert "postgresql" in front.os.environ["VRAMLAB_TESTS_NO_POSTGRES"]
