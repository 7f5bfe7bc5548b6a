"""Groups of tests that this machine or this call leaves out: never run, never hidden, listed last with the reason.

`slow` runs with --full only; `gpu`, `chromium`, `latex` and `postgres` need what they are named after. A whole --full run is kept as
benchmarks/evidence/tests-full.json.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Iterator

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: spinning threads slow each other down on a busy machine

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "benchmarks" / "evidence" / "tests-full.json"
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """Path of a Chromium on PATH, None when there is none."""
    return next((path for name in CHROMIUM_NAMES if (path := shutil.which(name))), None)


def find_postgres() -> Path | None:
    """The folder with `postgres` and `initdb`, None when there is none."""
    on_path = shutil.which("postgres")
    found = [Path(on_path).resolve().parent] if on_path else sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in found if (folder / "postgres").exists() and (folder / "initdb").exists()), None)


def _why_no_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "torch finds no CUDA device on this machine"


def _why_no_chromium() -> str:
    said = os.environ.get("VRAMLAB_TESTS_NO_CHROMIUM", "none of " + ", ".join(CHROMIUM_NAMES) + " is on PATH")
    return "" if find_chromium() else said


def _why_no_postgres() -> str:
    said = os.environ.get("VRAMLAB_TESTS_NO_POSTGRES", "there is no postgres with initdb on PATH or in Debian's place for them")
    return "" if find_postgres() else said


def _reasons(config: pytest.Config) -> dict[str, object]:
    """Marker -> a function that says why its tests cannot run, "" when they can."""
    return {"slow": lambda: "" if config.getoption("--full") else "left out: ./run tests --full runs them",
            "gpu": _why_no_gpu, "chromium": _why_no_chromium,
            "latex": lambda: "" if shutil.which("pdflatex") else "there is no pdflatex on PATH", "postgres": _why_no_postgres}


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the Chromium to use, for tests marked `chromium`."""
    path = find_chromium()
    assert path, "mark this test `chromium`: there is none here"
    return path


@pytest.fixture(scope="session")
def postgres() -> Iterator[object]:
    """A PostgreSQL of this session's own, for tests marked `postgres`."""
    from postgres import Postgres

    server = Postgres()
    yield server
    server.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the slow tests too; a whole run is kept in benchmarks/evidence/")


def pytest_configure(config: pytest.Config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")  # each takes turns with itself alone, and with no run beside the tests
    locks = Path(tempfile.gettempdir()) / f"vramlab-tests-{os.getuid()}-{worker}"
    locks.mkdir(mode=0o700, exist_ok=True)
    os.environ["VRAMLAB_LOCK_DIR"] = str(locks)
    config.pluginmanager.register(Session(config), "vramlab-session")


class Session:
    """What ran and what did not, over one call of pytest (with -n, over all its workers)."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.is_worker = hasattr(config, "workerinput")
        self.left_out: dict[str, tuple[int, str]] = {}
        self.counts: dict[str, dict[str, float]] = defaultdict(lambda: {"passed": 0, "failed": 0, "seconds": 0.0})
        self.failures: list[str] = []
        self.started = time.time()

    @pytest.hookimpl(trylast=True)  # after -k and -m: only what this call would have run is counted
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for group, why in _reasons(config).items():
            marked = [item for item in items if item.get_closest_marker(group)]
            reason = why() if marked else ""
            if reason:
                self.left_out[group] = (len(marked), reason)
                config.hook.pytest_deselected(items=marked)
                items[:] = [item for item in items if item not in marked]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        count = self.counts[report.nodeid.split("::")[0]]
        count["seconds"] += report.duration
        if report.failed:
            count["failed"] += 1
            self.failures.append(report.nodeid)
        elif report.when == "call" and report.passed:
            count["passed"] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.is_worker:
            self.config.workeroutput["left_out"] = self.left_out
        elif _is_whole_run(self.config) and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self._write_evidence()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error) -> None:  # xdist: every worker collects alike
        self.left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))

    def pytest_unconfigure(self) -> None:
        if self.left_out and not self.is_worker:
            print("\nGroups that did not run:")
            for group, (count, reason) in self.left_out.items():
                print(f"  {group} ({count} {'test' if count == 1 else 'tests'}): {reason}")

    def _write_evidence(self) -> None:
        import torch

        body = {
            "command": "./run tests --full",
            "commit": _git("rev-parse", "HEAD"),
            "is_dirty": None if (status := _git("status", "--porcelain", "--untracked-files=no")) is None else bool(status),
            "started_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)),
            "seconds": round(time.time() - self.started, 1),
            "passed": sum(int(c["passed"]) for c in self.counts.values()),
            "failed": self.failures,
            "not_run": {group: {"tests": n, "reason": why} for group, (n, why) in self.left_out.items()},
            "files": {name: {**c, "seconds": round(c["seconds"], 2)} for name, c in sorted(self.counts.items())},
            "machine": {"system": platform.platform(), "cpu": _cpu_model(), "cores": os.cpu_count(),
                        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None},
            "software": {"python": platform.python_version(), "torch": torch.__version__},
        }
        EVIDENCE.parent.mkdir(parents=True, exist_ok=True)
        EVIDENCE.write_text(json.dumps(body, indent=1) + "\n")


def _is_whole_run(config: pytest.Config) -> bool:
    """Full, and nothing narrowed by path, -k, -m, -x or --deselect."""
    option = config.option
    narrowed = option.keyword or option.markexpr or option.maxfail or option.deselect or option.collectonly or getattr(option, "lf", False)
    chosen = [str(a) for a in config.args if Path(a).resolve() != ROOT / "tests"]
    return config.getoption("--full") and not narrowed and not chosen


def _git(*words: str) -> str | None:
    """What git says of this checkout, None where there is no git or no repository (an unpacked archive)."""
    if not shutil.which("git"):
        return None
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
