"""`advise`: the largest batch against every batch tried, the printed commands against what they do, one clear line for each wrong word."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import vramlab.advice
import vramlab.cli.advise as cli_advise
from vramlab.advice import EAGER, Advice, Answer, Question, advise, largest_in_words
from vramlab.capture import capture
from vramlab.check import check_schedule
from vramlab.cli import main
from vramlab.cli.advise import Commands, _lines
from vramlab.collection import Library, Method
from vramlab.costs import roofline_costs
from vramlab.device import load_profile
from vramlab.doctor import detect_host
from vramlab.errors import PlanInfeasible
from vramlab.isolate import CallResult
from vramlab.liveness import lower_bound_bytes, replay_schedule
from vramlab.planner import Budget
from vramlab.record import Outcome
from vramlab.simulate import simulate
from vramlab.variants import with_variants

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "sim:v100-32gb"
OWN = "my_pkg.my_module:build"
MODULE = '''
"""A step of one's own."""
import torch
from torch import nn


def build(batch_size):
    body = [layer for _ in range(6) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.Tanh())]
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(1024, 2))
    example = torch.zeros(batch_size, 4, 16, 16), torch.zeros(batch_size, dtype=torch.long)
    print("noise that belongs to nobody")
    return model, lambda model, x, y: nn.functional.cross_entropy(model(x), y), example, torch.optim.SGD(model.parameters(), lr=0.1)
'''


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """A module of the user's own in the current directory, and processes that are none: what they would run is called here."""
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "my_module.py").write_text(MODULE)
    for name in [name for name in sys.modules if name.startswith("my_pkg")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(vramlab.advice, "run_isolated", called_here)
    monkeypatch.setattr(vramlab.advice, "AT_ONCE", 1)  # two in one process would share its stdout
    return tmp_path


def called_here(call, *, timeout_seconds, settings) -> CallResult:
    module, _, name = call.function.rpartition(".")
    try:
        return CallResult(outcome=Outcome.OK, value=getattr(import_module(module), name)(*call.args))
    except Exception as error:
        return CallResult(outcome=Outcome.CRASHED, message=str(error), error_type=type(error).__name__)


def question(model: str = OWN, batch: int = 8, **options) -> Question:
    return Question.of(Library([ROOT]), model=model, batch=batch, host=detect_host(DEVICE), **options)


def own_tape(batch_size: int):
    model, loss_fn, example, optimizer = import_module("my_pkg.my_module").build(batch_size)
    return roofline_costs(capture(model, loss_fn, example, optimizer=optimizer).tape, load_profile("v100-32gb"))


# --- what is found --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["delta", "checkpoint"])
def test_the_largest_batch_is_that_of_trying_every_batch_on_a_tape_of_its_own(own, capsys, method):
    """The oracle captures each size, and asks the method alone; `advise` captures three."""
    device, planner = load_profile("v100-32gb"), Library([ROOT]).method(method).build()
    limit = check_schedule(own_tape(8), replay_schedule(own_tape(8))).peak_bytes
    fitting = {}
    for n in range(1, 33):
        tape = own_tape(n)
        try:
            fitting[n] = check_schedule(tape, planner.plan(tape, device, Budget(device_bytes=limit)), Budget(device_bytes=limit))
        except PlanInfeasible:
            continue
    found = {a.method: a for a in advise(question(budget=str(limit), methods=[method]), seconds=60).answers}
    answer, eager = found[method], found[EAGER]
    assert max(fitting) in range(9, 32) and (answer.largest_batch, answer.is_at_least) == (max(fitting), False)
    assert (eager.largest_batch, eager.overhead, eager.fits) == (8, pytest.approx(0), True)
    metrics = simulate(fitting[8], device).metrics
    assert (answer.step_seconds, answer.peak_bytes) == (metrics.step_seconds, metrics.peak_bytes)
    assert answer.overhead == pytest.approx(metrics.step_seconds / sum(op.seconds for op in own_tape(8).ops) - 1)
    assert 0 < answer.least_step_seconds <= answer.step_seconds and answer.above_bound >= 0


def test_within_a_share_of_eagers_peak_and_what_does_not_fit_says_what_would(own):
    advice = advise(question(budget="70%", methods=["delta", "replay"]), seconds=60)
    peak = check_schedule(own_tape(8), replay_schedule(own_tape(8))).peak_bytes
    found = {a.method: a for a in advice.answers}
    assert advice.step["eager_peak_bytes"] == peak and advice.step["budget_bytes"] == int(0.7 * peak)
    assert found["delta"].fits and found["delta"].peak_bytes <= 0.7 * peak and advice.best == found["delta"]
    for name in (EAGER, "replay"):
        assert not found[name].fits and found[name].smallest_bytes == peak and found[name].largest_batch < 8
        assert "does not fit: it reaches" in found[name].why


def test_who_is_not_through_in_time_is_told_with_what_is_known(own, monkeypatch):
    """A worker that is stopped after its plan and three trials, and one that never planned."""
    def slow(call, *, timeout_seconds, settings):
        if call.function.endswith("advise"):
            name, out = call.args[0]["config"]["method"], Path(call.args[1])
            called_here(call, timeout_seconds=None, settings=None)
            (out / "found.json").unlink()
            if name == "delta":
                trials = json.loads((out / "trials.json").read_text())[:3]
                (out / "trials.json").write_text(json.dumps(trials))
                known.append(max(t["value"] for t in trials if t["fits"]))
            if name == "checkpoint":
                (out / "plan.json").unlink()
                (out / "trials.json").unlink()
            return CallResult(outcome=Outcome.TIMEOUT, message="no answer within 1 s")
        return called_here(call, timeout_seconds=None, settings=None)

    known: list[int] = []
    monkeypatch.setattr(vramlab.advice, "run_isolated", slow)
    found = {a.method: a for a in advise(question(budget="90%", methods=["delta", "checkpoint"]), seconds=1).answers}
    assert found["delta"].fits and largest_in_words(found["delta"]) == f"{known[0]} or more"
    late = found["checkpoint"]
    assert not late.fits and late.why == "no plan within 1 s" and largest_in_words(late) == "unknown"


def test_a_method_that_changes_the_step_is_never_the_best():
    late = Answer(method="dtr", options={}, why="no plan within 1 s")
    slow = Answer(method="delta", options={}, fits=True, step_seconds=2.0)
    fast = replace(slow, method="modnn", step_seconds=1.0, changes_semantics=True)
    assert Advice(step={}, answers=(fast, slow, late), skipped={}).best == slow
    assert Advice(step={}, answers=(fast, late), skipped={}).best is None


@pytest.mark.parametrize("other, told", [(0.003, "less than 3.00 ms; by the library's convolution algorithms, of less than 4.00 ms"),
                                        (0.004, "less than 4.00 ms"), (None, "less than 4.00 ms")])
def test_both_bounds_are_told_where_a_method_chooses_algorithms(other, told):
    """The column over the bound is of the method's own step: one figure alone would not explain it."""
    step = {"budget_bytes": 1000, "eager_peak_bytes": 2000, "eager_step_seconds": 0.005, "least_peak_bytes": 500,
            "least_step_seconds": 0.004}
    answer = Answer(method="dqn", options={}, fits=True, step_seconds=0.0045, overhead=-0.1, peak_bytes=900, plan_seconds=0.1,
                    least_step_seconds=other, above_bound=other and 0.0045 / other - 1)
    advice = Advice(step=step, answers=(answer,), skipped={})
    bound, = (line for line in _lines(advice, Commands("m", 16, DEVICE, None, advice, [], []), "") if line.startswith("bound:"))
    assert bound.endswith(told)


def test_where_eager_fits_a_method_is_the_best_only_when_it_is_faster(capsys):
    eager = Answer(method=EAGER, options={}, fits=True, step_seconds=1.0, overhead=0.0)
    same, faster = replace(eager, method="dqn", step_seconds=0.9995, overhead=-0.0005), replace(eager, method="vdnn", step_seconds=0.9)
    assert Advice(step={}, answers=(same, eager), skipped={}).best == eager
    assert Advice(step={}, answers=(faster, same, eager), skipped={}).best == faster
    assert Advice(step={}, answers=(same, replace(eager, fits=False)), skipped={}).best == same
    advice = Advice(step={"budget_bytes": 1000}, answers=(same, eager), skipped={})
    words = Commands("resnet8-digits", 16, DEVICE, None, advice, [], [])
    assert words.python is None and "budget" not in words.plan + words.run and "'methods=[eager]'" in words.run


def test_eager_is_planned_in_no_time():
    """It plans nothing: what its cell records is how long it takes to write its order down."""
    answer = Answer(method=EAGER, options={}, fits=True, step_seconds=1.0, overhead=0.0, peak_bytes=900, plan_seconds=0.5)
    step = {"budget_bytes": 1000, "eager_peak_bytes": 900, "eager_step_seconds": 1.0, "least_step_seconds": None, "least_peak_bytes": 500}
    advice = Advice(step=step, answers=(answer, replace(answer, method="delta")), skipped={})
    printed = "\n".join(_lines(advice, Commands("m", 16, DEVICE, None, advice, [], []), ""))
    ends = {line.split()[0]: line.split()[-1] for line in printed.splitlines() if line.startswith(("eager ", "delta "))}
    assert ends == {"eager": "\u2013", "delta": "ms"}


def test_the_bound_is_below_every_step_that_is_told(own):
    """A method that chooses convolution algorithms has another step than eager, and may be below the bound of eager's."""
    eager = Answer(method=EAGER, options={}, why="does not fit", least_peak_bytes=90)
    freer = Answer(method="dqn", options={}, fits=True, step_seconds=0.9, least_step_seconds=0.8, least_peak_bytes=70)
    cut = replace(freer, method="modnn", least_step_seconds=0.2, least_peak_bytes=10, changes_semantics=True)
    step = {"least_step_seconds": 1.0, "least_peak_bytes": 90}
    advice = Advice(step=step, answers=(freer, cut, eager), skipped={})
    assert (advice.least_step_seconds, advice.least_peak_bytes) == (0.8, 70)
    assert advice.to_json()["bound"] == {"step_seconds": 0.8, "peak_bytes": 70}
    assert replace(advice, step=step | {"least_step_seconds": None}, answers=(eager,)).least_step_seconds is None


@pytest.mark.slow
def test_a_search_for_the_largest_batch_does_not_search_long_for_speed(own, monkeypatch):
    """hybrid reaches any budget from the least peak on; the oracle asks for that peak at each batch size."""
    built = []
    monkeypatch.setattr(Method, "build", lambda self, build=Method.build, **options: (built.append(options), build(self, **options))[1])
    limit = int(1.5 * lower_bound_bytes(own_tape(8)))
    largest = max(n for n in range(8, 33) if lower_bound_bytes(with_variants(own_tape(n), load_profile("v100-32gb"))) <= limit)
    found = {a.method: a for a in advise(question(budget=str(limit), methods=["hybrid"]), seconds=600).answers}["hybrid"]
    assert (found.largest_batch, found.is_at_least) == (largest, False) and 8 < largest < 32
    asked = [options["plan_seconds"] for options in built if "plan_seconds" in options]
    assert 0 in asked and any(asked), "the batch that was asked about is searched for long, the others are not"


def test_methods_that_are_not_asked_say_why(own):
    asked = question(batch=4)
    assert next(iter(asked.configs)) == EAGER and {"delta", "dtr", "rotor"} < set(asked.configs)
    assert "nothing predicts it" in asked.skipped["torch-checkpoint"] and "'groups'" in asked.skipped["optimal"]
    assert "baseline" in asked.skipped["network-wide"] and not set(asked.skipped) & set(asked.configs)
    chosen = question(methods=["optimal"], overrides=["methods.optimal.options.groups=4"])
    assert list(chosen.configs) == [EAGER, "optimal"] and chosen.configs["optimal"]["options"]["groups"] == 4 and not chosen.skipped


# --- what is printed ------------------------------------------------------------------------------------------------------
def test_the_document_and_the_page(own, capsys):
    words = ["advise", "--model", OWN, "--batch", "8", "--device", DEVICE, "--budget", "80%", "--methods", "delta,checkpoint"]
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["is_simulated"] and {m["method"] for m in found["methods"]} == {"eager", "delta", "checkpoint"}
    assert found["best"] in ("delta", "checkpoint") and found["commands"]["run"] is None, "a module of one's own has no workflow"
    assert "[3/3]" in err and "noise" not in out
    assert main(words) == 0
    page = capsys.readouterr().out
    assert "*simulated*" in page and "eager: " in page and "does not fit" in page and "bound: " in page and f"best: {found['best']}" in page
    assert main([*words[:7], "--budget", "20000", "--methods", "delta"]) == 1
    assert "best" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_printed_program_trains_within_the_budget(own):
    """Of a step whose ops hold nothing inside, so that this machine needs the bytes that the simulated device does."""
    text = MODULE.replace("nn.Conv2d(4, 4, 3, padding=1)", "nn.Linear(16, 16)")
    assert text != MODULE
    (own / "my_pkg" / "my_module.py").write_text(text)
    asked = question(budget="80%", methods=["delta"], overrides=["methods.delta.options.action=recompute-only"])
    advice = advise(asked, seconds=60)
    words = Commands(OWN, 8, DEVICE, str(advice.step["budget_bytes"]), advice, ["methods.delta.options.action=recompute-only"], [])
    assert 'action="recompute-only"' in words.python[-2]
    names: dict = {}
    exec("\n".join(words.python), names)
    step = names["train_step"]
    assert torch.isfinite(names["loss"]) and str(step.truth) == "exact" and step.method == "delta"
    assert step.budget_bytes == advice.step["budget_bytes"] and step.predicted.peak_bytes <= step.budget_bytes
    assert all(p.grad is not None for p in names["model"].parameters())


def test_the_printed_commands_are_commands(tmp_path, monkeypatch, capsys):
    """Of a model with a card: the workflow's is taken with its overrides, and speaks of the step that was asked about."""
    monkeypatch.delenv("VRAMLAB_PROG", raising=False)
    monkeypatch.chdir(tmp_path)
    answer = Answer(method="delta", options={"action": "swap-first"}, fits=True, step_seconds=1.0)
    step = {"budget_bytes": 30_000_000}
    overrides = ["model.image_size=32", "training.optimizer=adam", "methods.delta.options.action=swap-first",
                 "methods.dtr.options.heuristic=eq"]
    words = Commands("resnet8-digits", 16, DEVICE, None, Advice(step=step, answers=(answer,), skipped={}), overrides, [])
    program, *run = shlex.split(words.run)
    assert program == "vramlab" and main([*run, "--dry-run", "--json", "--device", "cpu"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    configs = [cell["config"] for cell in cells]
    assert [(c["model"], c["batch_size"], c["method"], c["budget"]) for c in configs] == [
        ("resnet8-digits", 16, "eager", None), ("resnet8-digits", 16, "delta", "30000000")]
    assert configs[1]["options"]["action"] == "swap-first" and configs[1]["training"]["optimizer"] == "adam"
    assert configs[1]["model_options"]["image_size"] == 32
    assert shlex.split(words.plan)[1:] == ["plan", "step", "--model", "resnet8-digits", "--batch", "16", "--method", "delta", "--budget",
                                           "30000000", "--device", DEVICE, *overrides[:3]]


@pytest.mark.slow
def test_advice_in_processes_of_their_own_and_its_commands(tmp_path, monkeypatch, capsys):
    """As a user calls it: the plan that is told to plan it again says what was advised; the workflow runs and is exact."""
    monkeypatch.delenv("VRAMLAB_PROG", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert main(["advise", "--model", "resnet8-digits", "--batch", "16", "--device", DEVICE, "--budget", "80%", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = next(m for m in found["methods"] if m["method"] == found["best"])
    assert len([m for m in found["methods"] if m["fits"]]) >= 5 and best["overhead"] == min(
        m["overhead"] for m in found["methods"] if m["fits"] and not m["changes_semantics"])
    modnn = next(m for m in found["methods"] if m["method"] == "modnn")
    assert modnn["fits"] and modnn["changes_semantics"]
    assert main([*shlex.split(found["commands"]["plan"])[1:], "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["predicted"]["step_seconds"] == best["step_seconds"] and again["predicted"]["peak_bytes"] == best["peak_bytes"]
    assert main([*shlex.split(found["commands"]["run"])[1:], "--device", "cpu", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["truth"] for cell in cells] == ["exact", "exact"]


# --- wrong words ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words, code, said", [
    (["--model", "resnet5O"], 2, r"--model.*resnet5O.*did you mean 'resnet50'\?"),
    (["--model", "resnet50", "--methods", "dleta"], 2, r"--methods.*'dleta'.*did you mean 'delta'\?"),
    (["--model", "resnet50", "--methods", "torch-offload"], 2, r"--methods: 'torch-offload' cannot be asked: PyTorch decides"),
    (["--model", "resnet50", "--budget", "24gigs"], 2, r"--budget: '24gigs' is no size; .* or a share of eager's peak such as 60%"),
    (["--model", "resnet50", "--device", "cpu"], 2, r"--device cpu: advise simulates; write for example sim:rtx-4090"),
    (["--model", "resnet50", "--device", "sim:rtx4090"], 2, r"rtx-4090"),
    (["--model", "resnet50", "model.image_sizes=3"], 2, r"image_size"),
    (["--model", OWN, "model.image_size=3"], 2, r"model.image_size=3: --model my_pkg.my_module:build says itself what it is"),
    (["--model", "my_pkg.other:build"], 2, r"--model my_pkg.other:build: there is no module my_pkg.other"),
    (["--model", "resnet50", "--budget", "0%"], 2, r"--budget: '0%' is no share of eager's peak: it must be above 0 %"),
    (["--model", ":build"], 2, r"^--model :build: a function of a module is written my_pkg.my_module:build"),
    (["--model", "../x:build"], 2, r"^--model ../x:build: a function of a module is written"),
    (["--model", "my_pkg.my_module:biuld"], 2, r"^--model my_pkg.*: my_pkg.my_module has no function 'biuld'; did you mean 'build'\?"),
])
def test_one_clear_line_for_each_wrong_word(own, capsys, words, code, said):
    device = [] if "--device" in words else ["--device", DEVICE]
    assert main(["advise", "--batch", "4", *words, *device]) == code
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(said, told), told


WRONG = {
    "return model, loss_fn": r"my_pkg.wrong:build\(2\) must return \(model, loss_fn, example\) or .*; it returned 2 values",
    "return None": r"must return .*; it returned NoneType",
    "return loss_fn, loss_fn, example": r"its model is a function, no torch.nn.Module",
    "return model, 3, example": r"its loss_fn is a int and cannot be called",
    "return model, loss_fn, (1, 2)": r"there is no tensor in its example",
    "return model, loss_fn, example, 0.1": r"its optimizer is a float, no torch.optim.Optimizer",
    "return model, loss_fn, example, torch.optim.SGD(torch.nn.Linear(4, 2).parameters())":
        r"its optimizer updates 2 tensors that the model does not have as a parameter: build it from model.parameters\(\)",
    "return model, loss_fn, torch.zeros(7, 4)": r"build\(2\) returned an example of 7 samples: the first dimension",
    "raise KeyError('data')": r"my_pkg.wrong:build\(2\) raised KeyError: 'data'",
    "import no_such_package_xyz": r"raised ModuleNotFoundError",
    "raise SystemExit('bye')": r"my_pkg.wrong:build\(2\) raised SystemExit: bye",
    "return model, loss_fn, example, torch.optim.LBFGS(model.parameters())": r"cannot capture .*: the optimizer LBFGS takes no plain step",
    "return model, lambda model, x: model(x).sum().item(), example": r"cannot capture this training step",
}


@pytest.mark.parametrize("body", WRONG)
def test_one_clear_line_for_each_module_that_is_wrong(own, capsys, body):
    lines = ["import torch", "def build(n):", "    model = torch.nn.Linear(4, 2)", "    example = torch.zeros(n, 4)",
             "    loss_fn = lambda model, x: model(x).sum()", f"    {body}"]
    (own / "my_pkg" / "wrong.py").write_text("\n".join(lines))
    sys.modules.pop("my_pkg.wrong", None)
    code = main(["advise", "--model", "my_pkg.wrong:build", "--batch", "4", "--device", DEVICE, "--methods", "delta"])
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == (1 if "capture" in WRONG[body] else 2) and re.search(WRONG[body], told), told


def test_a_module_whose_import_fails_says_what_it_lacks(own, capsys):
    (own / "my_pkg" / "lacking.py").write_text("import no_such_package_xyz\n")
    assert main(["advise", "--model", "my_pkg.lacking:build", "--batch", "4", "--device", DEVICE]) == 2
    assert "my_pkg.lacking imports no_such_package_xyz, which is not installed" in capsys.readouterr().err


def test_a_module_that_ends_the_program_is_a_wrong_module(own, capsys):
    (own / "my_pkg" / "ending.py").write_text("import sys\nsys.exit('usage: ...')\n")
    assert main(["advise", "--model", "my_pkg.ending:build", "--batch", "4", "--device", DEVICE]) == 2
    assert "--model my_pkg.ending:build: importing my_pkg.ending raised SystemExit: usage: ..." in capsys.readouterr().err


def test_where_nothing_is_gained_the_best_is_plain_pytorch_and_the_last_batch_tried_is_said(own, capsys, monkeypatch):
    """With memory enough every method does what eager does; a name earlier in the alphabet makes none better."""
    monkeypatch.setattr(vramlab.advice, "HIGHEST", 16)
    monkeypatch.setattr(cli_advise, "HIGHEST", 16)
    assert main(["advise", "--model", OWN, "--batch", "8", "--device", DEVICE, "--methods", "capuchin,delta"]) == 0
    told = capsys.readouterr().out
    assert "best: eager" in told and "16 or more: no larger batch is tried" in told and "--seconds" not in told


def test_an_example_of_a_size_is_what_build_returns_for_it(own):
    from vramlab.own_module import OwnModule

    made, foretold = import_module("my_pkg.my_module").build(37)[2], OwnModule(OWN).batch(37)
    assert [(t.shape, t.stride(), t.dtype) for t in foretold] == [(t.shape, t.stride(), t.dtype) for t in made]
    assert isinstance(OwnModule(OWN).step(3).model, nn.Module)
