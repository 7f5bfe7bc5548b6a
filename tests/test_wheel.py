"""The wheel: an installed vramlab has the same collection, device profiles and command as a checkout."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONTRACT = {f"vramlab/builtin/contract/{name}.py" for name in ("contract", "oracle", "tapes")}
SHELVES = ("methods", "models", "workflows", "reports")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return zipfile.ZipFile(next(folder.glob("vramlab-*.whl")))


def sources(folder: Path) -> set[str]:
    """Files below a folder that belong in the wheel."""
    return {str(p.relative_to(ROOT)) for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts and p.suffix != ".pyc"}


def test_the_wheel_holds_the_package_and_the_collection(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = sources(ROOT / "vramlab")
    collection = {f"vramlab/builtin/{name}" for shelf in SHELVES for name in sources(ROOT / shelf)}
    assert {p for p in package if p.endswith(".json")} and collection
    assert names == package | collection | CONTRACT


def test_its_command_is_the_command_line(wheel):
    name = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    entries = configparser.ConfigParser()
    entries.read_string(wheel.read(name).decode())
    module, function = entries["console_scripts"]["vramlab"].split(":")
    code = f"from importlib import import_module; print(callable(getattr(import_module('{module}'), '{function}')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip() == "True"


def test_an_unpacked_wheel_finds_what_a_checkout_finds(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = (
        "from vramlab.collection import Library, built_in_collection\n"
        "from vramlab.device import profile_names\n"
        "root = built_in_collection(); library = Library([root])\n"
        "print(root); print(*library.method_paths, *library.model_paths, *library.workflow_paths, *profile_names())\n"
    )

    def found(package: Path) -> list[str]:
        env = os.environ | {"PYTHONPATH": str(package)}
        return subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=env, check=True, capture_output=True,
                              text=True).stdout.splitlines()

    installed, checkout = found(tmp_path), found(ROOT)
    assert (installed[0], checkout[0]) == (str(tmp_path / "vramlab" / "builtin"), str(ROOT))
    assert installed[1] == checkout[1] and "delta" in checkout[1].split() and "resnet50" in checkout[1].split()


def test_an_unpacked_wheel_brings_the_contract_along(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = "from vramlab.method_check import load_contract; found = load_contract(); print(found.__file__); print(len(found.RULES))"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=True,
                          capture_output=True, text=True)
    assert done.stdout.split() == [str(tmp_path / "vramlab" / "builtin" / "contract" / "contract.py"), "13"]
