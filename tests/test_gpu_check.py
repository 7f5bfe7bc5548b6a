"""benchmarks/gpu_check.py on a CPU: in an interpreter that has nothing but what a bare GPU machine has, and its ways to fail."""

from __future__ import annotations

import dataclasses
import importlib.metadata as metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch

from vramlab.collection import Library, built_in_collection
from vramlab.errors import Unsupported
from vramlab.link import CudaLink

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
THERE = ("torch", "torchvision", "numpy", "numba", "pandas", "scipy", "seaborn", "nvidia-ml-py", "pyyaml")
NOT_THERE = ("pydantic", "psutil", "typer", "rich", "jinja2", "plotly", "sklearn", "hypothesis", "pytest")
SECTIONS = ("capture", "truth", "replay", "prediction", "overlap", "streams", "telemetry", "peers", "largest-batch")


# --- the whole ------------------------------------------------------------------------------------------------------------
def _needed(names: tuple[str, ...]) -> set[str]:
    """Distributions that these need, themselves included, but for Jinja, which torch wants for its compiler alone."""
    found, queue = set(), [n.lower() for n in names]
    while queue:
        name = queue.pop()
        if name in found or name == "jinja2":
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # wanted on another platform
        found.add(name)
        queue += [re.match(r"[\w.-]+", r)[0].lower() for r in requires if "extra ==" not in r]
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A folder of packages with links to those that are there, and no others."""
    folder = tmp_path_factory.mktemp("bare")
    for name in _needed(THERE):
        distribution = metadata.distribution(name)
        for top in {Path(f).parts[0] for f in distribution.files or () if not str(f).startswith("..")}:
            place = folder / top
            if not place.exists() and top != "__pycache__":
                place.symlink_to(distribution.locate_file(top))
    return folder


@pytest.fixture(scope="module")
def run(bare, tmp_path_factory) -> tuple[subprocess.CompletedProcess, dict]:
    out = tmp_path_factory.mktemp("out") / "gpu_check.json"
    command = [sys.executable, "-S", str(BENCHMARKS / "gpu_check.py"), "--device", "cpu", "--quick", "--methods", "replay,delta",
               "--patience", "4", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(bare), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    return done, json.loads(out.read_text()) if out.is_file() else {}


def test_the_bare_interpreter_lacks_what_such_a_machine_lacks(bare):
    lines = [f"import importlib.util; print([n for n in {NOT_THERE} if importlib.util.find_spec(n) is not None])"]
    done = subprocess.run([sys.executable, "-S", "-c", "\n".join(lines)], capture_output=True, text=True, env={"PYTHONPATH": str(bare)})
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
def test_it_runs_there_and_nothing_fails(run):
    done, body = run
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert body["passed"] and body["machine"]["packages"]["psutil"] is None
    assert list(dict.fromkeys(s["name"].split()[0] for s in body["sections"])) == list(SECTIONS)
    assert all(s["outcome"] == "ok" and s["rows"] for s in body["sections"])


@pytest.mark.slow
def test_its_figures_are_there(run):
    _, body = run
    data = {row["name"]: row["data"] for s in body["sections"] for row in s["rows"]}
    assert data["transformer delta 80%"]["truth"] == "exact" and data["transformer delta 80%"]["over_budget_bytes"] == 0
    assert data["hidden"]["stall_seconds"] < data["in the open"]["stall_seconds"]
    assert data["left out: wait-for-prefetch"]["differing"] and data["left out: wait-for-offload"]["differing"]
    assert data["delta"]["largest"] >= data["eager"]["largest"]
    assert data["sampler"]["summary"]["missing"]["power_watts"] == "the cell ran on no GPU"


@pytest.mark.slow
def test_its_table_names_every_section_and_every_note(run):
    done, body = run
    end = done.stdout[done.stdout.rindex("gpu_check on"):]
    assert all(s["name"] in end for s in body["sections"]) and "nothing failed" in end
    assert "not on a CPU, which has no streams" in end and "held against the meter" in end


# --- its parts ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    return _script("gpu_check")


def _script(name: str) -> ModuleType:
    """A file of benchmarks/, which is no package."""
    if name not in sys.modules:
        if str(BENCHMARKS) not in sys.path:
            sys.path.append(str(BENCHMARKS))
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        before = list(sys.path)
        spec.loader.exec_module(sys.modules[name])
        sys.path[:] = before
    return sys.modules[name]


def _results(gpu_check, tmp_path, *asks, seconds: float = 20.0) -> list:
    context = gpu_check.Context(device_name="cpu", is_small=True, folder=tmp_path, methods=(), seconds=seconds)
    return gpu_check.run_together([gpu_check.Child(ask.__name__, ask, context, {}) for ask in asks])


def fine(context, report):
    report("row", True, "it holds")


def broken(context, report):
    report("row", True, "it holds")
    raise RuntimeError("no such kernel")


def dead(context, report):
    report("row", True, "it holds")
    os.kill(os.getpid(), signal.SIGKILL)


def hanging(context, report):
    report("row", True, "it holds")
    time.sleep(60)


def empty(context, report):
    pass


def doubtful(context, report):
    report("row", False, "it does not hold")


def test_a_section_that_fails_dies_or_hangs_is_recorded_and_the_others_go_on(gpu_check, tmp_path):
    failed, crashed, good = _results(gpu_check, tmp_path, broken, dead, fine)
    assert (failed.outcome, crashed.outcome, good.outcome) == ("failed", "crashed", "ok")
    assert "no such kernel" in failed.traceback and failed.message == "RuntimeError: no such kernel"
    assert crashed.message.endswith("exit code -9")
    assert [r.is_good for r in (failed, crashed, good)] == [False, False, True]
    assert all(len(r.rows) == 1 for r in (failed, crashed, good))  # what was found before is kept
    (late,) = _results(gpu_check, tmp_path, hanging, seconds=1.0)
    assert (late.outcome, late.is_good, len(late.rows)) == ("deadline", False, 1) and late.seconds < 10


def test_a_section_without_rows_or_with_one_that_does_not_hold_is_not_good(gpu_check, tmp_path):
    nothing, no = _results(gpu_check, tmp_path, empty, doubtful)
    assert not nothing.is_good and not no.is_good and (nothing.outcome, no.outcome) == ("ok", "ok")


def test_a_part_that_fails_or_is_late_becomes_a_row(gpu_check):
    rows = []

    def report(name, ok, text, **data):
        rows.append((name, ok, text))

    with gpu_check.sections.guarded(report, "broken", 5):
        raise ValueError("two lines\nof it")
    with gpu_check.sections.guarded(report, "late", 0.1):
        time.sleep(5)
    assert rows == [("broken", False, "ValueError: two lines"), ("late", False, "Late: not done in 0 s")]


def test_no_time_left_is_a_skipped_section_and_a_failure(gpu_check, tmp_path):
    context = gpu_check.Context(device_name="cpu", is_small=True, folder=tmp_path, methods=())
    skipped = gpu_check.run_section(gpu_check.SECTIONS[1], context, time.monotonic())
    assert len(skipped) == 3 and all(r.outcome == "skipped" and not r.is_good for r in skipped)


@pytest.mark.parametrize("limit", [7, 64, 65, 200, 1000])
@pytest.mark.parametrize("granule", [1, 8])
def test_the_largest_batch_is_the_one_that_a_known_limit_has(gpu_check, limit, granule):
    asked = []

    def fits(size):
        asked.append(size)
        return size <= limit

    good, bad, is_done = gpu_check.sections.Search(fits, granule, time.monotonic() + 60).largest(64, 2048)
    assert is_done and (good or 0) == limit // granule * granule and bad == (good or 0) + granule
    tries = Counter(asked)
    assert len(tries) <= 20 and max(tries.values()) <= 2 and (good is None or tries[good] == tries[bad] == 2)


def test_a_search_whose_time_is_up_says_how_far_it_came(gpu_check):
    search = gpu_check.sections.Search(lambda size: size <= 100, 8, time.monotonic() - 1)
    assert search.largest(64, 2048) == (None, None, False)


def test_methods_loaded_by_path_have_the_defaults_of_their_cards(gpu_check):
    library = Library([built_in_collection()])
    names = gpu_check.planners()
    assert set(names) == {name for name, card in ((n, library.method(n).card) for n in library.method_paths)
                          if card.kind == "planner" and not card.required}
    for name in names:
        by_card, by_path = library.method(name).build(), gpu_check.sections.steps.method(name).build()
        assert dataclasses.is_dataclass(by_path) and dataclasses.asdict(by_card) == dataclasses.asdict(by_path), name


def test_the_stand_in_for_psutil_says_what_psutil_says():
    spec = importlib.util.spec_from_file_location("stand_in", BENCHMARKS / "stand_ins" / "psutil.py")
    stand_in = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_in)
    ours, theirs = stand_in.virtual_memory(), psutil.virtual_memory()
    assert ours.total == theirs.total and ours.available == pytest.approx(theirs.available, rel=0.2)
    assert stand_in.cpu_count() == psutil.cpu_count() and stand_in.cpu_count(logical=False) == psutil.cpu_count(logical=False)
    child = subprocess.Popen([sys.executable, "-c", "import time; x = bytearray(1 << 25); time.sleep(60)"])
    try:
        time.sleep(0.5)
        mine, real = stand_in.Process(child.pid), psutil.Process(child.pid)
        assert mine.memory_info().rss == pytest.approx(real.memory_info().rss, rel=0.1)
        assert mine.cpu_times().user == pytest.approx(real.cpu_times().user, abs=0.05)
        assert mine.io_counters().read_bytes == real.io_counters().read_bytes
        assert mine in stand_in.Process().children(recursive=True)
    finally:
        child.kill()
        child.wait()
    with pytest.raises(stand_in.NoSuchProcess):
        mine.memory_info()


# --- what it found about the engine -----------------------------------------------------------------------------------------
def test_a_result_that_an_operator_left_on_the_host_is_not_offloaded_on_cuda():
    with pytest.raises(Unsupported, match="on the host already"):
        object.__new__(CudaLink).offload(None, 3, 0, torch.ones(1))
