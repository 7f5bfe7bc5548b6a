"""advise: which methods fit a step on a device, how fast, up to what batch, and the commands that run the best."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vramlab.advice import EAGER, HIGHEST, Advice, Answer, Question, advise, largest_in_words
from vramlab.cli.words import command, device_or_assumed, listed, print_json, table
from vramlab.collection import Library, find_collections
from vramlab.doctor import detect_host
from vramlab.errors import WorkflowError
from vramlab.report.words import DASH, bytes_in_words, seconds_in_words

NO_METHOD = ", plain PyTorch: it fits, and no method makes the step shorter"
COLUMNS = ("method", "step", "over eager", "over the bound", "peak", "largest batch", "planned in")


def print_advice(model: str, batch: int, device: str | None, budget: str | None, methods: str | None, seconds: float,
                 overrides: Sequence[str], extra: Sequence[Path], *, as_json: bool) -> int:
    """The exit code: 0, or 1 when no method fits."""
    device, assumed = device_or_assumed(device)
    if not device.startswith("sim:"):
        raise WorkflowError(f"--device {device}: advise simulates; write for example sim:rtx-4090, or sim:this for this machine after "
                            "`calibrate`")
    if os.getcwd() not in sys.path:  # where a user's own module lies
        sys.path.insert(0, os.getcwd())
    question = Question.of(Library(find_collections(extra)), model=model, batch=batch, host=detect_host(device), budget=budget,
                           methods=listed("--methods", methods or ""), overrides=overrides)
    with _progress() as tell:
        advice = advise(question, seconds=seconds, tell=tell)
    words = Commands(model, batch, device, budget, advice, overrides, extra)
    if as_json:
        print_json(advice.to_json() | {"model": model, "batch_size": batch, "device": device, "commands": words.to_json(),
                                       "assumed": {"device": assumed} if assumed else {}})
    else:
        print("\n".join(_lines(advice, words, assumed)))
    return 0 if any(answer.fits for answer in advice.answers) else 1


class Commands:
    """What runs the best method: by a workflow where the model has a card, in Python always."""

    def __init__(self, model: str, batch: int, device: str, budget: str | None, advice: Advice, overrides: Sequence[str],
                 extra: Sequence[Path]) -> None:
        self.model, self.batch, self.device, self.best = model, batch, device, advice.best
        self.budget = budget or _typed(advice.step["budget_bytes"])
        self.overrides, self.extra = overrides, extra

    @property
    def plan(self) -> str | None:
        """Plans and simulates the best again."""
        if self._is_own or not self.best:
            return None
        budget = [] if self.best.method == EAGER else ["--budget", self.budget]
        return command("plan", "step", "--model", self.model, "--batch", str(self.batch), "--method", self.best.method, *budget,
                       "--device", self.device, *self._overrides, *self._collections)

    @property
    def run(self) -> str | None:
        """Runs the best beside eager where it is called, proves it equal and measures it."""
        if self._is_own or not self.best:
            return None
        is_eager = self.best.method == EAGER
        compared = ["methods=[eager]"] if is_eager else [f"methods=[eager, {self.best.method}]", f"budgets=[{self.budget}]"]
        return command("run", "workflow", "one-step.yaml", f"model={self.model}", f"batch_sizes=[{self.batch}]", *compared,
                       *self._overrides, *self._collections)

    @property
    def python(self) -> list[str] | None:
        """The lines of a program."""
        if not self.best or self.best.method == EAGER:
            return None
        given: dict[str, object] = {"method": self.best.method, "budget": int(self.budget) if self.budget.isdigit() else self.budget}
        given |= dict(self._set_options()) | ({"collections": [str(folder) for folder in self.extra]} if self.extra else {})
        step = ", ".join(f"{name}={_literal(value)}" for name, value in given.items()) + ")"
        if not self._is_own:
            return ["import vramlab", "", f"train_step = vramlab.train_step(model, loss_fn, example, optimizer=optimizer, {step}"]
        module, _, function = self.model.partition(":")
        return ["import vramlab", f"from {module} import {function}", "",
                f"model, loss_fn, example, optimizer = (*{function}({self.batch}), None)[:4]",
                f"train_step = vramlab.train_step(model, loss_fn, example, optimizer=optimizer, {step}", "loss = train_step(*example)"]

    def to_json(self) -> dict[str, object]:
        """None where there is none."""
        return {"plan": self.plan, "run": self.run, "python": self.python and "\n".join(self.python)}

    @property
    def _is_own(self) -> bool:
        return ":" in self.model

    @property
    def _overrides(self) -> list[str]:
        """Those that speak of the step, or of the best method."""
        mine = f"methods.{self.best.method}."
        return [text for text in self.overrides if not text.startswith("methods.") or text.startswith(mine)]

    @property
    def _collections(self) -> list[str]:
        return [word for folder in self.extra for word in ("--collection", str(folder))]

    def _set_options(self) -> Iterator[tuple[str, object]]:
        """The options of the best that the command line set."""
        start = f"methods.{self.best.method}.options."
        named = [text.removeprefix(start).partition("=")[0] for text in self.overrides if text.startswith(start)]
        yield from ((name, self.best.options[name]) for name in dict.fromkeys(named))


def _literal(value: object) -> str:
    """As Python has it, text in double quotes."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


# --- what is printed ------------------------------------------------------------------------------------------------------
def _lines(advice: Advice, words: Commands, assumed: str) -> Iterator[str]:
    step, fitting = advice.step, [a for a in advice.answers if a.fits]
    yield f"{words.model} batch {words.batch} on {words.device}, within {bytes_in_words(step['budget_bytes'])}: all *simulated*"
    if assumed:
        yield assumed
    does = "fits" if step["eager_peak_bytes"] <= step["budget_bytes"] else "does not fit"
    yield (f"eager: {bytes_in_words(step['eager_peak_bytes'])} at its peak, which {does}; "
           f"{seconds_in_words(step['eager_step_seconds'])} a step with memory enough")
    seconds = advice.least_step_seconds
    least = f", nor, within this budget, of less than {seconds_in_words(seconds)}" if seconds else ""
    eagers = step["least_step_seconds"]
    if eagers and seconds_in_words(eagers) != seconds_in_words(seconds):
        least += f"; by the library's convolution algorithms, of less than {seconds_in_words(eagers)}"
    yield f"bound: no schedule of the whole batch is below {bytes_in_words(advice.least_peak_bytes)}{least}"
    if fitting:
        yield ""
        yield table(COLUMNS, map(_row, fitting), right=COLUMNS[1:])
    yield from _notes(advice, words)
    if advice.best:
        yield ""
        yield f"best: {advice.best.method}{NO_METHOD if advice.best.method == EAGER else ''}"
        told = (("to plan it again", words.plan), ("to run it and measure it on the machine at hand", words.run))
        yield from (f"  {what}: {text}" for what, text in told if text)
        if words.python:
            yield "  in Python:"
            yield from (f"    {line}".rstrip() for line in words.python)


def _row(answer: Answer) -> list[str]:
    name = f"{answer.method} (another step)" if answer.changes_semantics else answer.method
    above = DASH if answer.above_bound is None else f"{answer.above_bound:+z.1%}"
    return [name, seconds_in_words(answer.step_seconds), f"{answer.overhead:+z.1%}", above, bytes_in_words(answer.peak_bytes),
            largest_in_words(answer), DASH if answer.method == EAGER else seconds_in_words(answer.plan_seconds)]


def _notes(advice: Advice, words: Commands) -> Iterator[str]:
    without = [a for a in advice.answers if not a.fits]
    if without:
        yield "\ndo not fit, or gave no plan:"
        yield from (f"  {a.method}: {a.why}; largest batch {largest_in_words(a)}" for a in without)
    if advice.skipped:
        yield "\nnot asked:"
        reasons = dict.fromkeys(advice.skipped.values())
        yield from (f"  {', '.join(n for n, why in advice.skipped.items() if why == reason)}: {reason}" for reason in reasons)
    if any(a.changes_semantics for a in advice.answers):
        yield "\nanother step: it cuts the batch, and BatchNorm or dropout make that another result than the whole batch's"
    more = [a.largest_batch for a in advice.answers if a.is_at_least and a.largest_batch]
    tried = max(HIGHEST, words.batch)
    if tried in more:
        yield f"\n{tried} or more: no larger batch is tried"
    if any(batch != tried for batch in more):
        yield "\nor more: the search for the largest batch was not through; --seconds gives it longer"


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal, a line an answer elsewhere; on stderr, as stdout belongs to what is found."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text, done, total: print(f"[{done}/{total}] {text}", file=sys.stderr, flush=True)
        return
    columns = (TextColumn("{task.completed}/{task.total}"), BarColumn(bar_width=30), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        task = progress.add_task("", total=0)

        def tell(text: str, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, description=text.replace("[", r"\["))

        yield tell


def _typed(nbytes: int) -> str:
    """A budget as a person would type it: whole GiB as such, anything else to the byte."""
    return f"{nbytes // 2**30}GiB" if nbytes and nbytes % 2**30 == 0 else str(nbytes)
