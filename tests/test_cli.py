"""The command line as a user meets it: words, exit codes, hints in the form that was called, and what stays unimported."""

from __future__ import annotations

import functools
import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from hand_made import infeasible_step, measured_step, search, simulated_step, training
from shelves import small_workflow, write_fake_cell, write_method, write_model, write_workflow

import vramlab.cli.workflows as workflows
from vramlab import doctor
from vramlab.cli import main
from vramlab.cli.app import app
from vramlab.cli.progress import TimeLeft, summary
from vramlab.cli.words import command, duration, listed, table
from vramlab.collection import Library
from vramlab.doctor import State, TorchFacts, detect_host
from vramlab.errors import EnvironmentUnable, WorkflowError
from vramlab.method_check import chain, check_method
from vramlab.record import Outcome
from vramlab.runner import Runner
from vramlab.workflow import Host, expand, load_workflow

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"torch", "numba", "pandas", "plotly", "numpy", "pydantic", "jinja2", "psutil", "yaml"}


@pytest.fixture
def shelf(tmp_path, monkeypatch) -> Path:
    for name, takes_budget in (("toy-eager", False), ("toy-good", True), ("toy-segfault", True), ("toy-infeasible", True)):
        write_method(tmp_path, name, takes_budget=takes_budget)
    write_model(tmp_path)
    cell = write_fake_cell(tmp_path)
    cell.write_text(cell.read_text().replace('config["method"]', 'config["method"].removeprefix("toy-")'))
    write_workflow(tmp_path, small_workflow("[toy-eager, toy-good]", budgets=["60%"]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("VRAMLAB_PROG", raising=False)
    monkeypatch.setattr(workflows, "Runner", functools.partial(Runner, command=(sys.executable, str(cell))))
    return tmp_path


def call(*words: str, prog: str | None = None) -> subprocess.CompletedProcess:
    env = {key: value for key, value in os.environ.items() if key != "VRAMLAB_PROG"} | ({"VRAMLAB_PROG": prog} if prog else {})
    return subprocess.run([sys.executable, "-m", "vramlab", *words], capture_output=True, text=True, env=env, cwd=ROOT)


# ------------------------------------------------------------------------------------------------ help


def test_help_answers_in_half_a_second():
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        done = call("--help")
        seconds.append(time.perf_counter() - started)
        assert done.returncode == 0
    assert min(seconds) < 0.5, seconds
    for word in ("run", "validate", "list", "show", "plan", "report", "crowd-submit", "doctor", "check", "cite"):
        assert re.search(rf"^  {word} ", done.stdout, re.MULTILINE), word


def test_help_of_the_script_names_its_own_words_too():
    said = " ".join(call("--help", prog="./run").stdout.split())
    assert all(words in said for words in ("short for ./run run workflow FILE", "./run tests", "./run clean [--all]"))
    assert "clean" not in call("--help").stdout


@pytest.mark.parametrize("words", [["--help"], ["run", "workflow", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(words):
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "vramlab", *words], capture_output=True, text=True, cwd=ROOT)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == 0 and "typer" in imported and not imported & (HEAVY - {"pydantic"})


def parameters(command, path: str = "") -> Iterator[tuple[str, object]]:
    """Path of a command and each of its parameters, for all commands."""
    for name, below in getattr(command, "commands", {}).items():
        yield from parameters(below, f"{path} {name}".strip())
    yield from ((path, parameter) for parameter in command.params)


def test_every_option_and_argument_says_what_it_is():
    """A metavar of choices says it itself."""
    told = list(parameters(typer.main.get_command(app)))
    assert len(told) > 100
    assert [(path, p.name) for path, p in told if not p.help and "|" not in (p.metavar or "")] == []


@pytest.mark.parametrize(("words", "code", "said"), [
    (["lst"], 2, "No such command 'lst'. Did you mean 'list'?"),
    (["list", "model"], 2, "not allowed; did you mean 'models'? Allowed: models, methods, workflows, keys, devices, claims, runs"),
    (["show", "methods", "delta"], 2, "did you mean 'method'? Allowed: method, model, workflow, key, device, claim, run"),
    (["show", "method", "detla"], 2, "did you mean 'delta'?"),
    (["show", "model", "resnet5"], 2, "did you mean 'resnet50'?"),
    (["show", "device", "v100"], 2, "did you mean 'v100-16gb'?"),
    (["show", "claim", "delta-bs-r5"], 2, "did you mean 'delta-bs-r50'?"),
    (["run", "workflow", "smok"], 2, "there is no workflow 'smok'; did you mean 'smoke'? There are all-methods, "),
    (["report", "first"], 2, "No such command 'first'. Did you mean 'vramlab report run first'?"),
    (["compare", "A", "B"], 2, "Did you mean 'vramlab compare run A'?"),
    (["report", "rnu", "first"], 2, "No such command 'rnu'. Did you mean 'run'?"),
    (["validate", "workflow", "smoke", "budgets=60%"], 2, "budgets: '60%' is not allowed; must be a list: [60%]"),
    (["run", "workflow", "smoke", "batch_size=[8]"], 2, "unknown key 'batch_size'; did you mean 'batch_sizes'? Allowed:"),
    (["validate", "workflow", "smoke", "budgets=[60]"], 2,
     "budgets: 60 is not allowed; write 60% for a share of eager's peak, 60GiB for a size, or auto"),
    (["run", "workflow", "smoke", "--device", "gpu"], 2, "--device 'gpu' is not allowed; did you mean 'cpu'? Allowed: auto, cpu, "),
    (["run", "workflow", "smoke", "--device", "v100"], 2, "not allowed; did you mean 'sim:v100-16gb' or 'sim:v100-32gb'?"),
    (["run", "workflow", "smoke", "--device", "v100-32gb"], 2, "not allowed; did you mean 'sim:v100-32gb'? Allowed: auto, "),
    (["run", "workflow", "smoke", "--device", "sim:v100"], 2, "there is no device profile 'v100'"),
    (["run", "workflow", "workflows/smok.yaml"], 2, "there is no file workflows/smok.yaml; did you mean 'workflows/smoke.yaml'?"),
    (["validate", "workflow", "mine.yaml"], 2, "there is no file mine.yaml\n"),
    (["run", "workflow", "smoke", "--device", "cuda:99"], 3, "torch finds 0 NVIDIA GPUs on this machine; `doctor` says why"),
    (["run", "workflow", "smoke", "--collection", "docs"], 2, "docs is no collection"),
    (["report", "run", "nothing"], 2, "there is no run 'nothing' in results/"),
])
def test_wrong_words_get_the_code_and_the_nearest_right_one(words, code, said, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("VRAMLAB_PROG", raising=False)
    assert main(words) == code
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told


def test_hints_have_the_form_that_was_called(monkeypatch):
    monkeypatch.setenv("VRAMLAB_PROG", "./run")
    assert command("run", "workflow", "a b.yaml", "x=[1]") == "./run workflow 'a b.yaml' 'x=[1]'" and command("doctor") == "./run doctor"
    monkeypatch.delenv("VRAMLAB_PROG")
    assert command("run", "workflow", "x.yaml") == "vramlab run workflow x.yaml"
    assert call("lst", prog="./run").stderr.startswith("Usage: ./run ") and call("lst").stderr.startswith("Usage: vramlab ")
    assert call("workflow", "-h", prog="./run").stdout.startswith("Usage: ./run workflow [OPTIONS]")
    assert call("run", "workflow", "-h", prog="./run").stdout.startswith("Usage: ./run run workflow [OPTIONS]")
    assert call("run", "workflow", "-h").stdout.startswith("Usage: vramlab run workflow [OPTIONS]")


def test_first_words_of_the_script_have_their_nearest_spelling():
    for typo, meant in (("wrkflow", "workflow"), ("test", "tests"), ("claen", "clean"), ("lst", "list")):
        done = call(typo, "x", prog="./run")
        assert done.returncode == 2 and f"No such command {typo!r}. Did you mean {meant!r}?" in done.stderr
    assert "Did you mean" not in call("nothing-like-it", prog="./run").stderr


# ------------------------------------------------------------------------------------------------ shelves


@pytest.mark.parametrize("content, why", [
    ("{", "cannot be read"), ('{"schema": 7}', "is not of schema 1"), ('{"schema": 1}', "is not whole: cells, overrides, started"),
])
def test_a_run_that_cannot_be_read_is_listed_with_the_reason(shelf, capsys, content, why):
    folder = Path("results") / "small" / "broken"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(content)
    assert main(["list", "runs"]) == 0
    said = capsys.readouterr().out
    assert "small/broken" in said and "unreadable: " in said and why in said


@pytest.mark.parametrize("method", ["eager", "replay"])
def test_a_budget_for_a_method_that_takes_none_is_refused(capsys, method):
    words = ["plan", "step", "--model", "resnet8-digits", "--batch", "2", "--method", method, "--budget", "50%"]
    assert main(words) == 2
    assert f"method '{method}' takes no budget" in capsys.readouterr().err


def test_lists_as_text_and_json(shelf, capsys):
    assert main(["list", "methods", "--json"]) == 0
    named = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"toy-eager", "toy-good", "delta", "eager"} <= set(named) and named["toy-good"]["takes_budget"] is True
    assert main(["list", "methods", "--tags", "toy, toy-good"]) == 0
    assert re.findall(r"^toy\S+", capsys.readouterr().out, re.MULTILINE) == ["toy-good"]
    assert main(["list", "models", "--tags", "no-such-tag"]) == 0 and capsys.readouterr().out == "no models with tags no-such-tag\n"
    expected = {"models": "resnet50", "workflows": "vramlab run workflow small", "devices": "v100-32gb", "claims": "DELTA (released code)",
                "keys": "measure.steps"}
    for what, word in expected.items():
        assert main(["list", what]) == 0 and word in capsys.readouterr().out
    assert main(["list", "runs"]) == 0 and capsys.readouterr().out == "no runs\n"


def test_a_broken_card_is_told_and_the_rest_is_listed(shelf, capsys):
    card = shelf / "methods" / "toy-good" / "card.yaml"
    card.write_text(card.read_text().replace("kind: planner", "kind: x"))
    assert main(["list", "methods"]) == 2
    said = capsys.readouterr()
    assert "toy-eager" in said.out and "toy-good" not in said.out and f"{card}:5:7: kind: 'x' is not allowed" in said.err


def test_show(shelf, capsys):
    assert main(["show", "method", "toy-good"]) == 0
    shown = capsys.readouterr().out
    assert "threshold: float, default 1, at least 0, at most 8: when to do it" in shown and "source_sha256" in shown
    assert main(["show", "method", "toy-good", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["source_sha256"] == Library([shelf]).method("toy-good").sha256
    assert main(["show", "method", "delta", "--collection", str(ROOT)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[0] != " "][:5] == ["name", "title", "paper", "decides", "kind"]
    assert lines[2].split()[1:6] == ["Yu", "Tang,", "Chenyu", "Wang,", "Yufan"]
    assert (lines[-7], lines[-6]) == ("bibtex", "  @article{tang2022delta,")
    assert max(map(len, lines[:-7])) <= 120 and any(line.startswith("takes a budget  yes") for line in lines)
    whole = " ".join(" ".join(lines).split())
    assert "swapped storages are prefetched." in whole and "swapping is the better" not in whole
    assert main(["show", "method", "replay"]) == 0 and "\npaper           none: " in capsys.readouterr().out
    assert main(["show", "claim", "delta-bs-r50", "--json"]) == 0 and json.loads(capsys.readouterr().out)["value"] == 2.04
    assert main(["show", "device", "v100-32gb", "--json"]) == 0 and json.loads(capsys.readouterr().out)["memory_bytes"] == 32 * 2**30
    assert main(["show", "model", "toy", "--json"]) == 0 and json.loads(capsys.readouterr().out)["family"] == "toy"


def show(capsys, *words: str) -> tuple[dict, str]:
    """(the document, the text) of `show`."""
    assert main(["show", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert main(["show", *words]) == 0
    return document, capsys.readouterr().out


def test_show_a_workflow(shelf, capsys):
    """The oracle is the plan that the file was written for."""
    write_workflow(shelf, small_workflow(
        "[toy-eager, toy-good]", budgets=["60%", "50%"], experiments=[{"name": "here"}, {"name": "there", "targets": ["cuda:9"]}],
        claims=[{"id": "c", "experiment": "there", "rule": "training_equal"}], untestable=[{"claims": ["d"], "reason": "no words"}],
    ), "both")
    body, said = show(capsys, "workflow", "both")
    assert (body["cells"], list(body["experiments"])) == (3, ["here"]), "eager once, toy-good at two budgets"
    here = body["experiments"]["here"]
    assert (here["methods"], here["budgets"]) == (["toy-eager", "toy-good"], ["60%", "50%"])
    assert (here["batch_sizes"], here["models"], here["targets"]) == ([4], ["toy"], [detect_host("auto").auto])
    assert body["left_out"]["there on cuda:9"].startswith("this machine has") and body["claims"] == ["c"]
    assert body["untestable"] == {"c": body["left_out"]["there on cuda:9"], "d": "no words"}
    assert body["run"] == "vramlab run workflow both" and body["path"] == "workflows/both.yaml"
    assert "\n    methods      toy-eager toy-good\n" in said and "\n  d  no words\n" in said
    write_workflow(shelf, small_workflow("[toy-god]"), "bad")
    assert main(["show", "workflow", "bad"]) == 2 and "there is no method 'toy-god'" in capsys.readouterr().err


def test_show_a_run(shelf, capsys):
    assert main(["run", "workflow", "small", "measure.steps=3"]) == 0
    first, second = sorted(Path("results").glob("small/*/cells/*"))
    (second / "record.json").unlink()
    capsys.readouterr()
    body, said = show(capsys, "run", "small")
    run = first.parents[1]
    assert (body["run"], body["folder"], body["workflow"]) == (f"small/{run.name}", str(run), "workflows/small.yaml")
    assert (body["cells"], body["done"], body["outcomes"], body["seconds"]) == (2, 1, {"ok": 1}, 2.5)
    assert body["overrides"] == ["measure.steps=3"]
    told = {record["cell_id"]: (record["outcome"], record["folder"]) for record in body["records"]}
    assert told == {first.name: ("ok", str(first)), second.name: (None, str(second))}
    assert body["report"] == f"vramlab report run {run}" and main(body["report"].split()[1:]) == 0
    assert re.search(rf"^  {first.name}  toy b4 \S+( 60%)? on cpu: ok, exact", said, re.MULTILINE) and "took       2.50 s\n" in said
    assert re.search(rf"^  {second.name}  .*: no record yet$", said, re.MULTILINE)
    capsys.readouterr()
    assert main(["show", "run", "elsewhere"]) == 2 and "there is no run 'elsewhere' in results/" in capsys.readouterr().err
    assert main(["show", "run", "small", "--output-dir", "other"]) == 2


def test_show_a_key(capsys):
    body, said = show(capsys, "key", "measure.steps")
    assert body == {"key": "measure.steps", "default": "10", "allowed": "a whole number, at least 1", "below": {}}
    assert said.split() == "key measure.steps default 10 allowed a whole number, at least 1".split()
    assert main(["list", "keys", "--json"]) == 0
    listed = {row["key"] for row in json.loads(capsys.readouterr().out) if row["key"].startswith("methods[].")}
    body, said = show(capsys, "key", "methods")
    assert set(body["below"]) == listed and body["below"]["methods[].name"] == "text (needed)" and "\n  methods[].name " in said
    assert show(capsys, "key", "methods.name")[0]["key"] == "methods[].name"
    assert main(["show", "key", "measure.stpes"]) == 2 and "did you mean 'measure.steps'?" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ workflows


def test_validate(shelf, capsys):
    assert main(["validate", "workflow", "small"]) == 0
    assert capsys.readouterr().out == "workflows/small.yaml is valid: 2 cells on a CPU, 2 with a GPU\n"
    assert main(["validate", "workflow", "small", "budgets=[60%, 50%]", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cells"] == {"cpu": 3, "cuda": 3}
    write_workflow(shelf, small_workflow("[toy-god]"), "bad")
    assert main(["validate", "workflow", "workflows/bad.yaml"]) == 2
    assert re.match(r"workflows/bad\.yaml:1:\d+: there is no method 'toy-god'; did you mean 'toy-good'\? There are capuchin, checkpoint, ",
                    capsys.readouterr().err)


def test_dry_run_says_what_would_run_and_what_cannot_be_tested_and_writes_nothing(shelf, capsys):
    write_workflow(shelf, small_workflow(
        "[toy-eager, toy-good]", budgets=["60%"], expected={"minutes": 4, "disk_bytes": 2**20},
        experiments=[{"name": "here"}, {"name": "there", "targets": ["cuda:9"]}],
        claims=[{"id": "c", "experiment": "there", "rule": "training_equal"}]))
    assert main(["run", "workflow", "small", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "2 cells, 0 done; time left: about 4 min; disk: 1.000 MiB" in said and said.count("to run") == 2
    assert "left out: there on cuda:9: this machine has" in said and "not testable here: claim c: this machine has" in said
    assert ("not measured here: GPU memory" in said) is (doctor.count_cuda_devices() == 0)
    assert not (shelf / "results").exists()
    assert main(["run", "workflow", "small", "--dry-run", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["minutes_left"] == 4 and body["disk_bytes"] == 2**20 and [claim["id"] for claim in body["untestable_claims"]] == ["c"]
    assert main(["run", "workflow", "small", "targets=[cuda:9]", "--dry-run"]) == 3


def test_run_prints_the_table_and_the_report_and_resumes(shelf, capsys):
    assert main(["run", "workflow", "small"]) == 0
    said = capsys.readouterr().out
    assert "\r" not in said and "\x1b" not in said
    assert re.search(r"^\[1/2\] toy b4 toy-eager on cpu: ok, exact, peak 1000 B, .*left$", said, re.MULTILINE)
    rows = re.findall(r"^main +toy +4 +(\S+) +(\S+(?: %)?) +cpu +ok +exact +1000 B", said, re.MULTILINE)
    assert rows == [("toy-eager", "–"), ("toy-good", "60 %")]
    report = Path(re.search(r"^report: (.*)$", said, re.MULTILINE)[1])
    assert report.is_file() and report.parent.parent == Path("results/small")
    assert main(["run", "workflow", "small"]) == 0 and "2 cells, 2 done" in capsys.readouterr().out
    assert main(["list", "runs", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["run"], row["cells"], row["outcomes"]) == (f"small/{report.parent.name}", 2, "2 ok")
    assert main(["report", "run", "small"]) == 0 and capsys.readouterr().out.strip() == str(report)


def test_run_as_json_keeps_stdout_for_the_document(shelf, capsys):
    assert main(["run", "workflow", "small", "methods=[toy-eager, toy-infeasible]", "--json", "--output-dir", "elsewhere"]) == 0
    said = capsys.readouterr()
    body = json.loads(said.out)
    assert body["outcomes"] == {"ok": 1, "plan_infeasible": 1} and body["exit_code"] == 0 and Path(body["report"]).is_file()
    assert body["run_folder"].startswith("elsewhere/small/") and "[1/2]" in said.err


def test_a_failed_cell_is_told_with_its_log_and_the_command_that_runs_it_again(shelf, capsys, monkeypatch):
    monkeypatch.setenv("VRAMLAB_PROG", "./run")
    assert main(["run", "workflow", "small", "methods=[toy-segfault, toy-good]"]) == 1
    said = capsys.readouterr().out
    assert "\ntoy b4 toy-segfault 60% on cpu: crashed (SIGSEGV): the cell's process died of SIGSEGV" in said
    assert re.search(r"^  results/small/\w+/cells/\w+/stdout\.log$", said, re.MULTILINE)
    assert "To run the cells again that crashed or timed out: ./run workflow small 'methods=[toy-segfault, toy-good]'" in said


def test_an_interrupt_says_how_to_go_on(shelf, capsys, monkeypatch):
    def interrupted(*words, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("vramlab.runner.run_child", interrupted)
    assert main(["run", "workflow", "small", "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "Interrupted: 0 of 2 cells done. To go on: vramlab run workflow small --device cpu\n"


def test_plan_step_is_one_cell_that_leaves_nothing_behind(shelf, capsys):
    words = ["plan", "step", "--model", "toy", "--batch", "4", "--method", "toy-good"]
    assert main([*words, "--budget", "60%", "model.classes=3", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    config, assumed = body["config"], "no --device was given: sim:v100-32gb is assumed"
    assert (config["target"], config["budget"], config["model_options"]["classes"]) == ("sim:v100-32gb", "60%", 3)
    assert body["assumed"] == {"device": assumed}
    assert main([*words, "--budget", "60%"]) == 0
    out = capsys.readouterr().out
    assert "all *simulated* on sim:v100-32gb:" in out and f"\n  classes 10, image_size 32, optimizer sgd\n  {assumed}\n" in out
    assert main([*words, "--budget", "60%", "--device", "sim:h100"]) == 0
    out = capsys.readouterr().out
    assert "all *simulated* on sim:h100:" in out and "assumed" not in out
    assert main([*words, "--budget", "60%", "--device", "sim:v100-32gb", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["assumed"] == {}
    assert list(workflows._room("sim:v100-32gb", 32 * 2**30)) == [("device's memory", "32.00 GiB: the peak fits")]
    assert list(workflows._room("sim:v100-32gb", 32 * 2**30 + 1)) == [
        ("device's memory", "32.00 GiB: the peak does not fit, so this step cannot run there")]
    assert list(workflows._room("cpu", 1)) == list(workflows._room("sim:v100-32gb", None)) == []
    assert not (shelf / "results").exists() and not list((shelf / "cache").rglob("record.json"))
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "--method: method 'toy-good' plans for a budget and none is given; write for example --budget 60%")


class Terminal(io.StringIO):
    """What a terminal was sent."""

    def isatty(self) -> bool:
        return True


def test_plan_step_says_on_a_terminal_what_it_does_and_nothing_on_a_pipe(shelf, capsys, monkeypatch):
    cell = (shelf / "fake_cell.py").read_text()
    (shelf / "fake_cell.py").write_text(cell.replace('print("starting", what, flush=True)', 'print("capturing [toy] ...", flush=True)'))
    write_method(shelf, "toy-slow")
    words = ["plan", "step", "--model", "toy", "--batch", "4", "--method", "toy-slow", "--device", "sim:h100"]
    assert main(words) == 0
    told = capsys.readouterr()
    assert told.err == "" and "capturing" not in told.out
    for name, value in (("TERM", "xterm"), ("COLUMNS", "100"), ("SLOW", "1.5")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert main(words) == 0
    shown = sys.stderr.getvalue()
    assert "capturing [toy] ..." in shown and "0:00:01" in shown and shown.endswith("\x1b[2K")
    assert "capturing" not in capsys.readouterr().out


def test_the_result_table_shows_how_many_pairs_a_ratio_rests_on(capsys):
    record = measured_step("delta", 600, budget="60%", ratio=1.4)
    assert workflows.result_row("delta", record)[-1] == "1.40x eager, 10 pairs"
    few = replace(record, measured=record.measured | {"ratio": record.measured["ratio"] | {"n": 5}})
    assert workflows.result_row("delta", few)[-1] == "1.40x eager, 5 pairs, too few to tell"
    workflows.print_few_pairs([record])
    assert capsys.readouterr().out == ""
    workflows.print_few_pairs([record, few])
    assert "fewer than 6 pairs of steps does not reach 95 %" in capsys.readouterr().out


def test_plan_step_without_a_plan_fails(shelf, capsys):
    words = ["plan", "step", "--model", "toy", "--batch", "4", "--budget", "150%", "--method"]
    assert main([*words, "toy-infeasible"]) == 1
    said = capsys.readouterr()
    assert "plan infeasible" in said.out and said.err.startswith("note: --budget 150% is above eager's peak")
    assert main([*words, "toy-good"]) == 0


def test_cite(shelf, capsys):
    assert main(["run", "workflow", "small", "model={name: resnet50, image_size: 32}"]) == 0
    capsys.readouterr()
    assert main(["cite", "small"]) == 0
    said = capsys.readouterr().out
    assert "@inproceedings{he2016deep," in said and "@misc{torchvision2016torchvision," in said and said.count("@") == 2
    assert "% method toy-good: its card names no paper" in said and "% data synthetic: made from a seed" in said


@pytest.mark.slow
def test_a_bar_on_a_terminal(shelf):
    cell = shelf / "fake_cell.py"
    run = f"""
import functools, sys
import vramlab.cli.workflows as workflows
from vramlab.cli import main
from vramlab.runner import Runner
workflows.Runner = functools.partial(Runner, command=(sys.executable, {str(cell)!r}))
sys.exit(main(["run", "workflow", "small", "--device", "cpu"]))
"""
    main_end, terminal = pty.openpty()
    env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen([sys.executable, "-c", run], stdout=terminal, stderr=subprocess.STDOUT, stdin=terminal, env=env)
    os.close(terminal)
    said = b""
    while True:
        try:
            piece = os.read(main_end, 4096)
        except OSError:  # the other end closed
            break
        if not piece:
            break
        said += piece
    assert process.wait(30) == 0, said
    text = said.decode()
    assert "\x1b[" in text and "0/2" in text and "main: toy b4 toy-good 60% on cpu: ok, exact, peak 1000 B" in text


# ------------------------------------------------------------------------------------------------ time left, words


def test_time_left_goes_by_the_same_cell_then_like_cells_then_what_the_file_says(tmp_path):
    write_method(tmp_path, "eager")
    write_model(tmp_path)
    text = small_workflow("[eager]", batch_sizes=[1, 2, 3, 4], expected={"minutes": 2})
    plan = expand(load_workflow(str(write_workflow(tmp_path, text)), Library([tmp_path])), Host("cpu"))
    first, second, *_ = plan.cells
    left = TimeLeft(plan, {}, set())
    assert left.seconds() == 120
    left.cell_took(first, 50)
    assert left.seconds() == 3 * 50
    known = TimeLeft(plan, {second.cell_id: 7.0}, {first.cell_id})
    assert known.seconds() == 3 * 7
    known.cell_took(second, 0.0)  # another runner's
    assert known.seconds() == 2 * 7


def test_time_left_of_a_grown_workflow_goes_by_its_other_runs(shelf, capsys):
    assert main(["run", "workflow", "small"]) == 0  # two cells, whose records say 2.5 s
    capsys.readouterr()
    assert main(["run", "workflow", "small", "budgets=[60%, 50%, 40%]", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["minutes_left"] == 4 * 2.5 / 60


def test_a_list_in_an_option_has_each_word_once_and_says_so(capsys):
    assert listed("--models", "a, b,,a,c,a") == ["a", "b", "c"]
    assert capsys.readouterr().err == "note: --models: a stands here 3 times; it counts once\n"
    assert listed("--models", "") == [] and listed("--models", "a,b") == ["a", "b"] and capsys.readouterr().err == ""


def test_words():
    assert [duration(s) for s in (0.4, 89, 91, 3600, 5460, None)] == ["0 s", "89 s", "2 min", "60 min", "1 h 31 min", "-"]
    assert table(("a", "bb"), [("x", 1), ("yyy", None)], right=("bb",)) == "a    bb\n---  --\nx     1\nyyy"


def noisy_step():
    record = measured_step("delta", 600, budget="60%", ratio=1.01)
    return replace(record, measured={**record.measured, "is_distinguishable": False})


def few_pairs_step():
    record = measured_step("delta", 600, budget="60%", ratio=1.4)
    ratio = {"median": 1.4, "low": None, "high": None, "n": 5}
    return replace(record, measured={**record.measured, "is_distinguishable": None, "ratio": ratio})


@pytest.mark.parametrize(("record", "said"), [
    (training("delta", steps=200), "ok, exact, equal to eager at all 200 steps"),
    (replace(training("delta", steps=200, wrong_at=8), outcome=Outcome.OK), "ok, wrong, equal to eager at 7 of 200 steps"),
    (search("delta", 408), "ok, *simulated*, largest batch 408"),
    (search("delta", 512, high=512), "ok, *simulated*, largest batch at least 512"),
    (infeasible_step("checkpoint", "40%"), "plan infeasible (gpu memory): the smallest it can reach is 700 MiB"),
    (measured_step("delta", 600, budget="60%", ratio=1.4), "ok, exact, peak 600.0 MiB of 600.0 MiB, 1.40x eager's time"),
    (replace(measured_step("delta", 600, budget="60%", ratio=1.4), message="the batch stays whole"),
     "ok, exact, peak 600.0 MiB of 600.0 MiB, 1.40x eager's time, the batch stays whole"),
    (few_pairs_step(), "ok, exact, peak 600.0 MiB of 600.0 MiB, 1.40x eager's time (5 pairs, too few to tell)"),
    (noisy_step(), "ok, exact, peak 600.0 MiB of 600.0 MiB, 1.01x eager's time (not distinguishable)"),
    (measured_step("eager", 1000, ratio=0.98), "ok, exact, peak 1000 MiB, 0.98x its own time"),
    (simulated_step("delta", 598, budget="60%"), "ok, *simulated*, peak 598.0 MiB of 600.0 MiB"),
])
def test_a_cell_in_a_few_words(record, said):
    assert summary(record) == said


# ------------------------------------------------------------------------------------------------ doctor


def test_doctor_on_this_machine(tmp_path):
    done = call("doctor", "--output-dir", str(tmp_path), "--json")
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0 and findings["python"]["state"] == "ok" and findings["torch"]["state"] == "ok"
    assert {"CUDA", "memory", "disk", "cache", "chromium"} <= set(findings)


V100 = ("Tesla V100", 32 * 2**30)


@pytest.mark.parametrize(("facts", "expected"), [
    (TorchFacts("2.9", cuda="13.0", devices=(V100,)), {"CUDA": (State.GOOD, "13.0; cuda:0 Tesla V100 with 32.0 GiB")}),
    (TorchFacts("2.9", hip="6.4", devices=(("MI300", 1),)),
     {"CUDA": (State.LIMITED, "simulation"), "ROCm": (State.LIMITED, "simulation and the CPU only")}),
    (TorchFacts("2.9", mps=True), {"MPS": (State.LIMITED, "Apple, which vramlab does not use: simulation and the CPU only")}),
    (TorchFacts("2.9", xpu=True), {"XPU": (State.LIMITED, "Intel")}),
    (TorchFacts(error="ImportError: libtorch.so"), {"torch": (State.BROKEN, "does not load: ImportError: libtorch.so")}),
])
def test_doctor_on_other_machines(tmp_path, monkeypatch, facts, expected):
    monkeypatch.setattr(doctor, "probe_torch", lambda: facts)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = {finding.what: finding for finding in doctor.examine(tmp_path)}
    for what, (state, said) in expected.items():
        assert found[what].state is state and said in found[what].said
    assert doctor.can_run(list(found.values())) is not any(state is State.BROKEN for state, _ in expected.values())


def test_doctor_ends_with_3_when_nothing_can_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "probe_torch", lambda: TorchFacts(error="ImportError: broken"))
    assert main(["doctor", "--output-dir", str(tmp_path)]) == 3
    said = capsys.readouterr().out
    assert re.search(r"^broken +torch +does not load: ImportError: broken\. Fix: ", said, re.MULTILINE)


def test_auto_is_the_first_gpu_where_there_is_one(monkeypatch):
    for devices, expected in ((0, Host("cpu", 0)), (2, Host("cuda:0", 2))):
        monkeypatch.setattr(doctor, "count_cuda_devices", lambda devices=devices: devices)
        assert detect_host("auto") == expected
    assert detect_host("cuda:1") == Host("cuda:1", 2) and detect_host("cpu") == Host("cpu", 2)
    assert detect_host("sim:h100").platform == "cuda"
    with pytest.raises(EnvironmentUnable):
        detect_host("cuda:2")
    with pytest.raises(WorkflowError):
        detect_host("cuda:x")


# ------------------------------------------------------------------------------------------------ check method

SOUND = """
from vramlab.liveness import replay_schedule
from vramlab.check import check_schedule
from vramlab.errors import PlanInfeasible


class Planner:
    def plan(self, tape, device, budget):
        schedule = replay_schedule(tape, "toy")
        peak = check_schedule(tape, schedule).peak_bytes
        if peak > budget.device_bytes:
            raise PlanInfeasible(method="toy", budget_bytes=budget.device_bytes, smallest_bytes=peak, op="op")
        return schedule


def build(action="director", threshold=1.0):
    return Planner()
"""


def faults_of(root: Path, code: str) -> list[str]:
    folder = write_method(root, "toy-planner", takes_budget=True, code=code)
    return [fault for check in check_method(Library([root]).method(folder.name)) for fault in check.faults]


def test_a_sound_method_has_no_faults(tmp_path):
    assert faults_of(tmp_path, SOUND) == []


def test_an_agents_training_has_torch_inside_its_functions_only(tmp_path):
    folder = write_method(tmp_path, "toy-planner", takes_budget=True, code=SOUND)
    (folder / "training.py").write_text("def train():\n    import torch\n    return torch\n")
    assert not any(check.faults for check in check_method(Library([tmp_path]).method(folder.name)))
    (folder / "training.py").write_text("import torch\n")
    faults = [fault for check in check_method(Library([tmp_path]).method(folder.name)) for fault in check.faults]
    assert faults == ["training.py:1 imports torch outside a function"]


@pytest.mark.parametrize(("old", "new", "said"), [
    ("from vramlab.liveness", "import torch\nfrom vramlab.liveness", "imports torch"),
    ("from vramlab.liveness", "from vramlab import capture\nfrom vramlab.liveness", "imports vramlab.capture"),
    ("from vramlab.liveness", "from nowhere import x\nfrom vramlab.liveness", "ModuleNotFoundError: No module named 'nowhere'"),
    ("threshold=1.0", "threshold=2.0", "option 'threshold' defaults to 1 in the card and to 2.0 in build()"),
    ("threshold=1.0", "limit=2.0", "build() has no parameter for option 'threshold'"),
    ("threshold=1.0", "threshold=1.0, other=3", "build() has a parameter 'other' that the card does not declare"),
    ("if peak > budget.device_bytes", "if False", "[device-budget]"),
    ("return schedule", "return type(schedule)(schedule.instructions[:-1], schedule.tape_digest, 'toy')", "["),
    ("if peak > budget.device_bytes", "if True", "are refused, although"),
    ("return Planner()", "return None", "AttributeError"),
    ("        return schedule", "        return tape.storages[0].bytes", "'Storage' object has no attribute 'bytes' (method.py:13)"),
    ("        return schedule",
     "        import random\n        return type(schedule)(schedule.instructions, schedule.tape_digest, str(random.random()))",
     "a second call gave another plan"),
])
def test_each_fault_of_a_method_is_found(tmp_path, old, new, said):
    assert old in SOUND
    assert any(said in fault for fault in faults_of(tmp_path, SOUND.replace(old, new)))


def test_the_chain_by_hand():
    tape = chain(2)
    assert [op.target.split(".")[1] for op in tape.ops] == [
        "convolution", "convolution", "mean", "expand_copy", "convolution_backward", "convolution_backward"]
    assert [len(made) for made in tape.creates] == [1, 1, 1, 1, 2, 1] and tape.storages[tape.loss].at_end


@pytest.mark.slow
def test_check_method_of_the_shipped_ones(capsys):
    assert main(["check", "method", "delta"]) == 0 and "FAIL" not in capsys.readouterr().out
    assert main(["check", "method", "schedule-file", "--json"]) == 0
    assert not any(check["faults"] for check in json.loads(capsys.readouterr().out))


# ------------------------------------------------------------------------------------------------ new


@pytest.fixture
def empty(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_new_method_passes_its_check_as_it_stands_and_a_spoiled_one_does_not(empty, capsys):
    assert main(["new", "method", "mine"]) == 0
    assert main(["check", "method", "mine", "--json"]) == 0
    checks = {check["what"]: check["faults"] for check in json.loads(capsys.readouterr().out.partition("\n[")[2].join(["[", ""]))}
    assert sum(what.startswith("contract: ") for what in checks) == 13 and not any(checks.values())
    assert any("80%: exact" in what for what in checks)
    code = empty / "methods" / "mine" / "method.py"
    code.write_text(code.read_text().replace("method=UID", "method='another'"))
    assert main(["check", "method", "mine"]) == 1
    assert "FAIL  contract: schedules carry uid and tape" in capsys.readouterr().out
    assert main(["check", "method", "minee"]) == 2 and "did you mean 'mine'?" in capsys.readouterr().err


def test_a_new_model_and_a_new_workflow_are_valid(empty, capsys):
    assert main(["new", "model", "2-layers"]) == 0 and main(["new", "workflow", "first"]) == 0
    model = Library([empty]).model("2-layers")
    assert model.load_builder()(image_size=32, classes=10, width=4)
    assert main(["validate", "workflow", "first"]) == 0 and "is valid: 5 cells" in capsys.readouterr().out


@pytest.mark.parametrize(("what", "name", "said"), [
    ("method", "delta", "there is a method 'delta' already"), ("method", "My Method", "use lower case letters"),
    ("method", "../up", "use lower case letters"), ("modell", "x", "did you mean 'model'?"), ("workflow", "a" * 61, "at most 60"),
])
def test_new_refuses_names_that_are_taken_or_none(empty, capsys, what, name, said):
    assert main(["new", what, name]) == 2
    assert said in capsys.readouterr().err and not any(empty.iterdir())
