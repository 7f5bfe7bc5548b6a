"""The floors of the house, the shelves of the collection, and words that no file may carry. Each check has a planted fault."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from house import SHELVES, House
from vramlab.collection import Library, read_method, read_model

ROOT = Path(__file__).resolve().parents[1]
HOUSE = House(ROOT)

# A folder of one machine, or the host of a package registry: neither means anything on another machine.
MACHINE_PATH = re.compile(r"(?<![\w./~$}-])/(?:work|root|home|Users|tmp|opt)/[\w.]")
REGISTRY_HOST = re.compile(r"pythonhosted\.org|pypi\.org|npmjs\.org|deb\.debian\.org|download\.pytorch\.org|anaconda\.org", re.IGNORECASE)


def repository_files(root: Path) -> list[Path]:
    """Text files that are, or are about to be, in the repository."""
    if (root / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"], capture_output=True, check=True)
        paths = [root / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    else:
        ours = ("vramlab", "tests", "docs", "benchmarks", *SHELVES)
        paths = [*root.glob("*.*"), root / "run", *(path for folder in ours for path in (root / folder).rglob("*"))]
    return sorted(path for path in set(paths) if path.is_file() and path.suffix not in {".png", ".gz", ".pyc"})


def lines_with(pattern: re.Pattern, root: Path) -> list[str]:
    """`file:line` of each match."""
    return [f"{path.relative_to(root)}:{number}: {line.strip()[:120]}" for path in repository_files(root)
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1) if pattern.search(line)]


def doubled(names: list[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def test_every_floor_is_made_of_modules_that_exist():
    assert HOUSE.misplaced() == []


def test_pure_floors_import_pure_floors_only():
    assert HOUSE.broken_pure() == []


def test_the_floors_without_torch_do_not_reach_it():
    assert HOUSE.paths_to_torch() == []


def test_nobody_imports_a_collection():
    assert HOUSE.broken_shelves() == []


def test_methods_see_the_pure_floors_only():
    assert HOUSE.broken_methods() == []


def test_the_floors_without_torch_load_without_torch():
    """The same by running: all of them are imported, and torch is not there afterwards."""
    names = [name for name in HOUSE.torch_free if not name.endswith("__main__")]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def loads_bare(module: str) -> subprocess.CompletedProcess:
    """Imports a module of benchmarks/ or of vramlab where the packages that a bare GPU machine lacks cannot be imported."""
    lacking = ("pydantic", "typer", "rich", "jinja2", "plotly", "sklearn", "hypothesis", "pytest")
    code = "\n".join(["import sys", f"sys.modules |= dict.fromkeys({lacking})", "sys.path.insert(0, 'benchmarks')", f"import {module}"])
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_what_is_checked_on_a_bare_gpu_machine_loads_there():
    """The control: cards cannot be read there."""
    done = loads_bare("gpu_check")
    assert done.returncode == 0, done.stderr
    assert "pydantic" in loads_bare("vramlab.collection").stderr


def test_import_linter_agrees():
    """A second reader of the same floors, with contracts in pyproject.toml."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


PLANTED = {
    "a pure module with torch inside a function": ("vramlab/check.py", "def f():\n    import torch\n", "broken_pure"),
    "a pure module on the machine floor": ("vramlab/check.py", "from vramlab.capture import capture\n", "broken_pure"),
    "a pure module with pandas": ("vramlab/check.py", "import pandas\n", "broken_pure"),
    "the ground floor with numpy": ("vramlab/device.py", "import numpy\n", "broken_pure"),
    "a relative way down to the machine": ("vramlab/check.py", "from . import capture\n", "broken_pure"),
    "a report that reaches torch by two steps": ("vramlab/report/page.py", "from vramlab.results import read\n", "paths_to_torch"),
    "a command line that imports by name": ("vramlab/cli/main.py", "from importlib import import_module\nimport_module('torch')\n",
                                            "paths_to_torch"),
    "an engine that imports a collection": ("vramlab/planner.py", "from methods.delta import method\n", "broken_shelves"),
    "a method with torch": ("methods/delta/method.py", "def plan():\n    import torch\n", "broken_methods"),
    "a method on the machine floor": ("methods/delta/method.py", "from vramlab.costs import measure\n", "broken_methods"),
    "a method that imports its neighbour": ("methods/delta/method.py", "from ..other import method\n", "broken_methods"),
    "an agent's training with torch at the top": ("methods/delta/training.py", "import torch\n", "broken_methods"),
    "a native method with torch at the top": ("methods/native/method.py", "import torch\n", "broken_methods"),
}


def plant(root: Path, where: str, text: str) -> House:
    """A small house with one fault in it."""
    sound = {
        "vramlab/__init__.py": "", "vramlab/errors.py": "", "vramlab/device.py": "import json\n", "vramlab/planner.py": "",
        "vramlab/check.py": "import numpy\nfrom vramlab.errors import VramlabError\n",
        "vramlab/capture.py": "import torch\n", "vramlab/costs.py": "import torch\n", "vramlab/results.py": "import pandas\n",
        "vramlab/report/__init__.py": "", "vramlab/cli/__init__.py": "",
        "methods/delta/card.yaml": "kind: planner\n", "methods/delta/method.py": "from vramlab.check import f\nfrom .filter import g\n",
        "methods/delta/filter.py": "from . import method\n",
        "methods/delta/training.py": "def train():\n    import torch\n",
        "methods/other/card.yaml": "kind: planner\n", "methods/other/method.py": "",
        "methods/native/card.yaml": "kind: native\n", "methods/native/method.py": "def step():\n    import torch.utils.checkpoint\n",
    }
    if "report" in where:
        sound["vramlab/results.py"] = "def read():\n    from vramlab.capture import capture\n"
    for name, body in (sound | ({where: text} if where else {})).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
    return House(root)


def faults(house: House) -> dict[str, list[str]]:
    checks = ("broken_pure", "paths_to_torch", "broken_shelves", "broken_methods")
    return {check: found for check in checks if (found := getattr(house, check)())}


def test_a_sound_house_has_no_faults(tmp_path):
    assert faults(plant(tmp_path, "", "")) == {}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_import_is_caught(tmp_path, fault):
    where, text, check = PLANTED[fault]
    found = faults(plant(tmp_path, where, text))[check]
    assert any(where in line or where.removesuffix(".py").replace("/", ".") in line for line in found), found


def test_every_folder_of_methods_has_a_valid_card():
    folders = [path for path in (ROOT / "methods").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert folders
    cards = [read_method(folder).card for folder in folders]
    assert doubled([card.uid for card in cards]) == []
    assert doubled([folder.name for folder in folders] + [alias for card in cards for alias in card.alias]) == []


def test_claims_of_method_cards_exist():
    known = {claim["id"] for claim in yaml.safe_load((ROOT / "reports" / "claims.yaml").read_text())["claims"]}
    library = Library([ROOT])
    unknown = {name: missing for name in library.method_paths if (missing := set(library.method(name).card.claims) - known)}
    assert unknown == {}


def test_every_model_card_is_valid():
    paths = sorted((ROOT / "models").glob("*.yaml"))
    assert paths
    cards = [read_model(path).card for path in paths]
    assert doubled([card.name for card in cards] + [alias for card in cards for alias in card.alias]) == []


def test_no_file_names_a_path_of_a_machine():
    assert lines_with(MACHINE_PATH, ROOT) == []


def test_no_file_names_a_registry_host():
    assert lines_with(REGISTRY_HOST, ROOT) == []


@pytest.mark.parametrize("pattern, text", [
    (MACHINE_PATH, "see /" + "work/main/run"), (MACHINE_PATH, 'open("/' + 'tmp/x.json")'), (MACHINE_PATH, "cd /" + "home/me"),
    (REGISTRY_HOST, "index-url = https://py" + "pi.org/simple"), (REGISTRY_HOST, "https://files.python" + "hosted.org/a.whl"),
])
def test_a_planted_word_is_caught(tmp_path, pattern, text):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(f"first line\n{text}\n")
    assert lines_with(pattern, tmp_path) == [f"docs/page.md:2: {text}"]


@pytest.mark.parametrize("text", ["results/run/cells", "$HOME/.cache/vramlab", "~/work/x", "tests/tmp/x", "https://example.org/tmp/a"])
def test_harmless_words_are_let_pass(tmp_path, text):
    (tmp_path / "page.md").write_text(text + "\n")
    assert lines_with(MACHINE_PATH, tmp_path) == [] and lines_with(REGISTRY_HOST, tmp_path) == []


def test_ruff_finds_nothing(tmp_path):
    """Also: it finds a planted fault under the same rules."""
    def check(*paths: str) -> int:
        command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml"), *paths]
        return subprocess.run(command, capture_output=True, cwd=ROOT).returncode

    (tmp_path / "fault.py").write_text("print(undefined)\n")
    assert check(str(tmp_path / "fault.py")) == 1 and check(".") == 0
