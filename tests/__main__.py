"""`./run tests [--full] [pytest arguments]`: sees to a Chromium and a PostgreSQL where it can, then hands over to pytest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Callable

import pytest

from conftest import find_chromium, find_postgres


def provide(what: str, package: str, find: Callable[[], object | None], purpose: str) -> str:
    """Install Debian's package where `find` finds nothing and we may. Returns why there is none, "" when there is one."""
    if find():
        return ""
    if not shutil.which("apt-get"):
        return f"no {what} is here and there is no apt-get to install one with"
    if os.geteuid() != 0:
        return f"no {what} is here, and installing it takes root: 'apt install {package}'"
    print(f"Installing {what} for the tests {purpose} ...", flush=True)
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package]
    for command in (install, ["apt-get", "update", "-qq"], install):
        try:
            status = subprocess.run(command, env=env, capture_output=True, timeout=600).returncode
        except subprocess.TimeoutExpired:
            return f"'{' '.join(command)}' did not end within 10 minutes"
        if find():
            return ""
    return f"'{' '.join(install)}' ended with exit status {status}"


def provide_all() -> None:
    """Chromium and PostgreSQL; why one is missing is told with the groups that did not run."""
    if reason := provide("Chromium", "chromium", find_chromium, "that look at reports"):
        os.environ["VRAMLAB_TESTS_NO_CHROMIUM"] = reason
    if reason := provide("PostgreSQL", "postgresql", find_postgres, "of the server"):
        os.environ["VRAMLAB_TESTS_NO_POSTGRES"] = reason


def in_parallel() -> list[str]:
    """pytest's words for one process a core, up to four, and one more, as many tests wait: for servers, browsers and children that they
    kill. Torch has its share of the cores in each: small tests gain nothing from more."""
    cores = len(os.sched_getaffinity(0))
    busy = min(cores, 4)
    os.environ.setdefault("OMP_NUM_THREADS", str(cores // busy))  # read when torch loads
    return ["-n", str(busy + 1), "--dist", "worksteal"]


def main(words: list[str]) -> int:
    """pytest's exit code. A call that names tests runs them in one process, unless it says -n."""
    names_tests = any(not word.startswith("-") for word in words)
    if not names_tests:
        provide_all()
        words = in_parallel() + words
    return pytest.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
