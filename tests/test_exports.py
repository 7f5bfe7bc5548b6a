"""`report run` with its options: bad input is one line and the design's exit code, and half a run still has every export."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hand_made import full_grid, measured_step, write_run
from no_torch import command_of, run_without_torch

from vramlab.cli import main
from vramlab.report.evidence import MADE_FROM_RECORDS
from vramlab.runs import results

OPTIONS = {"--pdf": ["report.pdf"], "--latex": ["appendix.tex", "report.tex"], "--csv": ["cells.csv", "cells.csv-metadata.json"],
           "--format=ro-crate": ["ro-crate-metadata.json"]}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_run_that_cannot_be_read_is_one_line_and_2(option, tmp_path, capsys):
    torn = write_run(tmp_path / "torn", [])
    (torn / "run.json").write_text("{")
    for name in (str(tmp_path / "absent"), str(torn)):
        assert main(["report", "run", name, option, "--output-dir", str(tmp_path)]) == 2
        told = capsys.readouterr()
        assert len(told.err.splitlines()) == 1 and "Traceback" not in told.err and not told.out
    assert [path.name for path in torn.iterdir() if path.is_file()] == ["run.json"]


@pytest.mark.parametrize("option", OPTIONS)
def test_a_file_that_cannot_be_written_is_one_line_and_3(option, tmp_path, capsys):
    folder = write_run(tmp_path / "run", [measured_step("eager", 1000)])
    (folder / OPTIONS[option][0]).mkdir()
    assert main(["report", "run", str(folder), option]) == 3
    told = capsys.readouterr().err
    assert OPTIONS[option][0] in told and len(told.splitlines()) == 1


@pytest.mark.parametrize(("words", "written"), [
    (["--format", "csv"], OPTIONS["--csv"]), (["--format", "html"], []),
    (["--format", "latex", "--csv"], [*OPTIONS["--csv"], *OPTIONS["--latex"]]),
    (["--format", "csv", "--format", "pdf"], [*OPTIONS["--csv"], *OPTIONS["--pdf"]]), (["--format", "csv", "--csv"], OPTIONS["--csv"]),
])
def test_each_format_may_be_asked_for_by_either_word(words, written, tmp_path, capsys):
    folder = write_run(tmp_path / "run", [measured_step("eager", 1000)])
    assert main(["report", "run", str(folder), *words]) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder / name) for name in ("report.html", *written)]


@pytest.mark.parametrize(("wrong", "said"), [
    ("pfd", "--format 'pfd' is not allowed; did you mean 'pdf'? Allowed: html, pdf, latex, csv, ro-crate"),
    ("word", "--format 'word' is not allowed; allowed: html, pdf, latex, csv, ro-crate"),
])
def test_a_format_that_is_none_is_refused_before_anything_is_written(wrong, said, tmp_path, capsys):
    folder = write_run(tmp_path / "run", [measured_step("eager", 1000)])
    assert main(["report", "run", str(folder), "--csv", "--format", wrong]) == 2
    assert capsys.readouterr().err == said + "\n" and not (folder / "cells.csv").exists() and not (folder / "report.html").exists()


@pytest.mark.parametrize("records", [[], full_grid()[:3]], ids=["not begun", "torn"])
def test_half_a_run_has_every_export(records, tmp_path, capsys):
    folder = write_run(tmp_path / "run", records)
    for record in records[:1]:
        (folder / "cells" / record.cell_id / "record.json").write_text('{"cell_id": "half')
    assert main(["report", "run", str(folder), *OPTIONS]) == 0
    written = [str(folder / name) for name in ("report.html", *OPTIONS["--csv"], *OPTIONS["--pdf"], *OPTIONS["--latex"],
                                               *OPTIONS["--format=ro-crate"])]
    assert capsys.readouterr().out.splitlines() == written
    assert sorted(MADE_FROM_RECORDS) == sorted(Path(path).name for path in written)


@pytest.mark.slow
def test_all_of_it_without_torch_and_to_the_same_bytes_elsewhere(tmp_path):
    first = write_run(tmp_path / "a" / "run", full_grid())
    second = Path(shutil.copytree(first, tmp_path / "b" / "run"))
    assert main(["report", "run", str(first), *OPTIONS]) == 0
    done = run_without_torch("report", "run", str(second), *OPTIONS)
    assert done.returncode == 0, done.stderr
    for name in MADE_FROM_RECORDS:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_the_blocked_import_is_blocked():
    code = "import sys, no_torch; sys.meta_path.insert(0, no_torch.Blocked()); import vramlab.capture"
    done = subprocess.run([sys.executable, "-c", code], env=command_of()[1], capture_output=True, text=True)
    assert done.returncode == 1 and "torch is blocked" in done.stderr


def test_a_run_is_named_by_its_folder_from_inside_it_too(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "0012", [measured_step("eager", 1000)])
    monkeypatch.chdir(folder)
    assert results(".").run.tolist() == results(folder).run.tolist() == ["0012"]
    assert main(["report", "run", ".", "--csv"]) == 0 and '"0012"' in (folder / "cells.csv").read_text()
