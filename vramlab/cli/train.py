"""train dqn: an agent for one model, trained on its captured step and kept in the user's cache."""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vramlab.cli.words import command, device_or_assumed
from vramlab.collection import Library, find_collections
from vramlab.counted import count_of
from vramlab.doctor import detect_host
from vramlab.environment import cache_dir
from vramlab.errors import EnvironmentUnable, WorkflowError
from vramlab.isolate import Call, run_isolated
from vramlab.planner import parse_percent
from vramlab.record import Outcome, write_atomically
from vramlab.tape import Tape
from vramlab.this_machine import known_profiles, open_profile
from vramlab.workflow import single_cell
from vramlab.yaml_nodes import offer

DEFAULT_MINUTES = 10.0
# Decisions learned from in a minute of one core that others use too: what --minutes comes to. The clock ends a training as well.
DECISIONS_A_MINUTE = 4_000


def train_dqn(model: str, batch: int, budgets: str | None, device: str | None, steps: int | None, minutes: float | None, network: str,
              seed: int, output: Path | None, extra: Sequence[Path]) -> int:
    """Train, or go on with a training that was interrupted. The exit code: 0, or 130 when interrupted."""
    device, assumed = device_or_assumed(device)
    if assumed:
        print(f"note: {assumed}", file=sys.stderr)
    if not device.startswith("sim:"):
        raise WorkflowError(f"--device {device}: the agent learns on the simulator; write for example sim:v100-32gb")
    library = Library(find_collections(extra))
    code = library.method("dqn").load()
    training = code.training()
    name = device.removeprefix("sim:")
    if name not in known_profiles():
        known = known_profiles()
        raise WorkflowError(f"--device {device}: there is no such profile{offer(name, known, 'there are', '`list devices`')}")
    profile = open_profile(name)
    shares = _shares(budgets)
    tape = _capture(library, model, batch, device)
    settings = training.Settings(decisions=_decisions(steps, minutes), kind=network, seed=seed, shares=shares)
    folder = output or cache_dir() / "dqn" / profile.name / "training" / f"{tape.digest[:16]}-{training.name_of(settings)}"
    try:
        trainer = training.Trainer([training.World(model, tape, profile)], settings, folder)
    except ValueError as wrong:
        raise WorkflowError(str(wrong)) from wrong
    if trainer.progress.decisions:
        print(f"going on after {count_of(trainer.progress.decisions, 'decision')}")
    try:
        with _bar(settings.decisions) as advance:
            agent = trainer.train(lambda progress: advance(progress.decisions, _said(progress)),
                                  until_seconds=60 * (minutes or DEFAULT_MINUTES) if steps is None else float("inf"))
    except KeyboardInterrupt:
        print(f"Interrupted; {count_of(trainer.kept_decisions, 'decision')} kept, from which the same command goes on.", file=sys.stderr)
        return 130
    path = cache_dir() / "dqn" / profile.name / f"{code.step_digest(tape)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for place in (path, folder / "agent.json"):
        agent.save(place)
    write_atomically(folder / "curve.svg", training.curve_svg(trainer.progress.curve))
    _print_result(trainer, folder, path, model, batch, device)
    return 0


def _decisions(steps: int | None, minutes: float | None) -> int:
    return steps if steps is not None else max(1, int((minutes or DEFAULT_MINUTES) * DECISIONS_A_MINUTE))


def _shares(budgets: str | None) -> tuple[float, ...]:
    try:
        shares = [parse_percent(word) for word in budgets.split(",")] if budgets else []
    except ValueError as wrong:
        raise WorkflowError(f"--budgets {budgets}: {wrong}") from wrong
    if None in shares:
        raise WorkflowError(f"--budgets {budgets}: shares of eager's peak are needed, for example 80%,60%,40%")
    return tuple(shares)


def _capture(library: Library, model: str, batch: int, device: str) -> Tape:
    """The step's tape with the device's op times, captured in a process of its own."""
    settings: dict[str, Any] = {"model": model, "batch_sizes": [batch], "methods": ["replay"], "targets": ["auto"],
                                "measure": {"time": False, "peak": False}}
    plan = single_cell(library, settings, (), detect_host(device), {"model": "--model", "batch_sizes": "--batch"})
    with tempfile.TemporaryDirectory(prefix="train-") as folder:
        spec = {"config": plan.cells[0].config, "workflow": {"name": "train"}, "collections": [str(root) for root in library.roots],
                "run_dir": folder}
        answer = run_isolated(Call(function="vramlab.measure.make_plan", args=(spec, folder, None)))
        if answer.outcome is not Outcome.OK:
            raise EnvironmentUnable(f"{model} at batch {batch} could not be captured: {answer.message}")
        return Tape.load(Path(folder) / "tape.json.gz")


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on a terminal, a line an evaluation elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        told: list[str] = []

        def say(done: int, said: str) -> None:
            if said and told[-1:] != [said]:
                told.append(said)
                print(f"{done:,} of {count_of(total, 'decision')}: {said}", file=sys.stderr, flush=True)

        yield say
        return
    columns = (TextColumn("decisions"), BarColumn(), TextColumn("{task.completed:,.0f}/{task.total:,.0f}"), TimeElapsedColumn(),
               TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total)
        yield lambda done, said: progress.update(task, completed=min(done, total), description=said)


def _said(progress: Any) -> str:
    return f"the step is {progress.curve[-1]['added_percent']:.2f} % longer" if progress.curve else ""


def _print_result(trainer: Any, folder: Path, path: Path, model: str, batch: int, device: str) -> None:
    first, last = trainer.progress.curve[0], trainer.progress.curve[-1]
    progress = trainer.progress
    played = f"{count_of(progress.decisions, 'decision')} in {count_of(progress.episodes, 'play')}"
    print(f"{played}, {progress.seconds:.0f} s of processor time")
    print(f"*simulated* time added at three budgets, mean: {first['added_percent']:.2f} % untrained, {last['added_percent']:.2f} % at "
          f"the end, {progress.best_cost:.2f} % the best, which is kept")
    print(f"learning curve: {folder / 'curve.csv'}, {folder / 'curve.svg'}\nweights: {path}")
    words = ["plan", "step", "--model", model, "--batch", str(batch), "--method", "dqn", "--budget", "60%", "--device", device]
    print(f"use: {command(*words, f'methods=[{{name: dqn, options: {{weights: {path}}}}}]')}")
