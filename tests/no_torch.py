"""Runs one command of vramlab where torch cannot be imported: `python -m no_torch WORDS...` with tests/ on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Blocked(MetaPathFinder):
    """Refuses torch."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision"):
            raise ImportError(f"{name} is blocked")


def command_of(*words: str) -> tuple[list[str], dict[str, str]]:
    """(command, environment) of a process that does it; hashes are seeded otherwise than in most processes."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return [sys.executable, "-m", "no_torch", *words], os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": "7"}


def run_without_torch(*words: str) -> subprocess.CompletedProcess[str]:
    """One command, to its end."""
    command, environment = command_of(*words)
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)


if __name__ == "__main__":
    sys.meta_path.insert(0, Blocked())
    from vramlab.cli import main

    sys.exit(main(sys.argv[1:]))
