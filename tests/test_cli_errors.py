"""What a user sees when the machine or a method misbehaves: one line and an exit code, never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vramlab.cli import checks, main
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


def spoiled(root: Path, name: str, old: str, new: str, file: str = "method.py") -> Path:
    """Method replay under another name, with one change."""
    folder = root / "methods" / name
    folder.mkdir(parents=True)
    for each in ("card.yaml", "method.py"):
        text = (ROOT / "methods" / "replay" / each).read_text().replace("f424d89c1ab35162", "f424d89c1ab35163")
        assert each != file or old in text
        (folder / each).write_text(text.replace(old, new) if each == file else text)
    return folder


@pytest.mark.parametrize(("new", "said"), [
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed: the process died of SIGSEGV"),
    ("while True: pass", "timeout: no answer within 5 s"),
    ("raise KeyboardInterrupt", "crashed"),
])
def test_a_method_that_dies_or_hangs_is_told_and_the_command_ends(new, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checks, "PLANS_SECONDS", 5.0 if "while" in new else 120.0)
    monkeypatch.chdir(tmp_path)
    spoiled(tmp_path, "bad", "        return fixed_plan(", f"        {new}\n        return fixed_plan(")
    assert checks.check_one_method("bad", [], as_json=False) == 1
    assert said in capsys.readouterr().out


def test_what_a_method_prints_is_not_among_the_answers(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    loud = "        print('a word')\n        raise RuntimeError('boom')\n        return fixed_plan("
    spoiled(tmp_path, "bad", "        return fixed_plan(", loud)
    assert checks.check_one_method("bad", [], as_json=True) == 1
    told = capfd.readouterr()
    assert any("boom" in fault for check in json.loads(told.out) for fault in check["faults"]) and "a word" in told.err


@pytest.mark.parametrize(("file", "old", "new", "said"), [
    ("method.py", "@dataclass", "def (:", "method.py cannot be read as Python"),
    ("card.yaml", "needs: []", "needs: [backwards]", "need 'backwards' is unknown; did you mean 'backward"),
    ("method.py", "        return fixed_plan(", "        __import__('torch')\n        return fixed_plan(", "torch was imported while"),
    ("card.yaml", "claims: []", "claims: [vdnn-page-2]", "claim 'vdnn-page-2' is unknown"),
])
def test_what_reading_the_method_does_not_show(file, old, new, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    spoiled(tmp_path, "bad", old, new, file)
    assert checks.check_one_method("bad", [], as_json=False) == 1
    assert said in capsys.readouterr().out


def test_a_method_may_be_named_by_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = spoiled(tmp_path / "mine", "bad", "needs: []", "needs: [backwards]", "card.yaml")
    for word in ("mine/methods/bad", "mine/methods/bad/", str(folder)):
        assert checks.check_one_method(word, [], as_json=False) == 1
        assert "need 'backwards' is unknown" in capsys.readouterr().out
    assert main(["check", "method", "bad"]) == 2 and "there is no method 'bad'" in capsys.readouterr().err
    assert main(["check", "method", "mine/methods/worse"]) == 2 and "no method 'mine/methods/worse'" in capsys.readouterr().err
    folder.rename(tmp_path / "bad")
    assert main(["check", "method", "./bad"]) == 2 and "not in a folder methods/" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "said"), [
    (["--budgets", "0%"], "--budgets 0%: '0%' is no share"), (["--device", "sim:k40"], "there is no such profile"),
    (["--network", "gnn"], "no network 'gnn'; there are graph, mlp"), (["--budgets", "1%"], "out of reach"),
])
@pytest.mark.slow
def test_train_dqn_tells_what_is_wrong_in_one_line(words, said, tmp_path, capsys):
    found = ["train", "dqn", "--model", "resnet8-digits", "--batch", "2", "--steps", "5", "--output", str(tmp_path), *words]
    assert main(found) == 2
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told and not list(tmp_path.iterdir())


def test_a_full_disk_behind_stdout_is_told_in_a_line():
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "vramlab", "list", "devices"]
        ended = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (3, "No space left on device\n")
