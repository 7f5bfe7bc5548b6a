"""README.md: its Python example runs, and what it names exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from vramlab.collection import Library
from vramlab.workflow import Host, expand, load_workflow

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_the_two_commands_stand_first():
    commands = [line.split("#")[0].strip() for line in TEXT.splitlines() if line.startswith("    ")]
    assert commands[:2] == ["./run workflow resnet50-delta.yaml", "./run tests"]


def test_the_python_example_runs_smaller(tmp_path):
    """As printed, but on a small network and small images; afterwards it must have trained what eager trains."""
    code = re.search(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)[1]
    smaller = code
    for printed, small in {"resnet50()": "mobilenet_v2()", "32, 3, 224, 224": "8, 3, 96, 96", "(32,)": "(8,)"}.items():
        assert printed in smaller
        smaller = smaller.replace(printed, small)
    eager = smaller.replace("train_step(x, y)  #", "F.cross_entropy(model(x), y); loss.backward()  #")
    report = "\nprint(loss.item(), *(p.double().sum().item() for p in model.parameters()))\n"
    lines = []
    for text in (smaller, re.sub(r"train_step = .*?\n\)\n", "", eager, flags=re.DOTALL)):
        seeded = text.replace("model = ", "torch.manual_seed(0)\ntorch.use_deterministic_algorithms(True)\nmodel = ", 1) + report
        done = subprocess.run([sys.executable, "-c", seeded], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.splitlines()[-1])
    assert lines[0] == lines[1]


def test_links_and_commands_name_what_exists():
    links = set(re.findall(r"\]\(([\w./-]+)\)", TEXT))
    assert links and not [link for link in links if not (ROOT / link).exists()]
    workflows = set(re.findall(r"run workflow ([\w.-]+\.yaml)", TEXT)) - {"mine.yaml"}  # the page's own
    assert workflows and not [name for name in workflows if not (ROOT / "workflows" / name).is_file()]


def test_the_printed_workflow_is_valid_as_it_stands(tmp_path):
    (tmp_path / "mine.yaml").write_text(re.search(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)[1])
    assert len(expand(load_workflow(str(tmp_path / "mine.yaml"), Library([ROOT])), Host("cpu")).cells) == 2 * (1 + 2 * 2)


def test_printed_overrides_are_taken():
    """As a shell splits them; brackets are quoted, since some shells would look for files of that name."""
    printed = re.findall(r"\./run workflow (\S+\.yaml .*=[^#\n]*)", TEXT)
    assert printed
    for words in map(shlex.split, printed):
        load_workflow(words[0], Library([ROOT]), words[1:])
    assert not re.findall(r"^    [^'\n]*\[", "\n".join(f"    {text}" for text in printed), re.MULTILINE)


def test_every_command_in_the_page_is_one():
    helped = subprocess.run([sys.executable, "-m", "vramlab", "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"^  ([a-z-]+)  ", helped, re.MULTILINE)) | {"workflow", "tests", "clean"}
    used = set(re.findall(r"\./run ([a-z-]+)", TEXT))
    assert used and used <= known
