"""The DQN agents against the other methods, all *simulated*: models x budgets x device profiles, under two conditions.

    python benchmarks/dqn.py [--models resnet50,...] [--budgets 90,80,...] [--profiles v100-32gb,...] [--minutes 30]

    equal   all plan on the same step with the library's convolution algorithms: nobody gains by choosing others
    own     each gets the step that its card asks for, as in a workflow: vDNN, SuperNeurons and the agent choose algorithms, the first
            two have gradients in place too. Bytes of the budget and eager's seconds are those of the same eager step

A cell counts as won when the agent's step takes at most as long as the best of the others; as lost when the agent finds no plan. Cells
in which nobody finds a plan say nothing and are left out. Models that the agent was not trained on are counted apart. Rows are kept in
benchmarks/evidence/dqn.json after each cell, and those of the same sources are not run again. At the end come the cells as a table,
then the summary, for each condition. `--weights FILE` prints how an agent of `train dqn` does in those cells instead, and keeps nothing.
Exit code 1 under 80 % won in either condition.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import keep, kept, specs

from vramlab.check import check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.costs import roofline_costs
from vramlab.device import DeviceProfile, load_profile
from vramlab.errors import PlanInfeasible, Unsupported
from vramlab.liveness import replay_schedule
from vramlab.measure import make_plan
from vramlab.planner import Budget
from vramlab.prepared import prepare_tape
from vramlab.simulate import simulate
from vramlab.tape import Tape
from vramlab.variants import with_variants

CONDITIONS = ("equal", "own")
KEY = ("model", "profile", "budget", "batch", "condition")
MODELS = ("resnet50", "vgg16", "densenet121", "inception-v3", "mobilenet-v2", "bert-base")
RIVALS = ("vdnn", "superneurons", "checkpoint", "dtr", "delta")
# The default, which plays several times, and then what one play comes to: of the network alone, and of what it is compared with.
ONE_PLAY = {"one play": {}, "mlp": {"agent": "mlp"}, "swap-only": {"actions": "swap-only"}, "recompute-only": {"actions": "recompute-only"},
            "untrained": {"agent": "untrained"}, "random": {"agent": "random"}}
AGENTS = {"dqn": {}, **{name: {"episodes": 1, **settings} for name, settings in ONE_PLAY.items()}}
TARGET = 0.8
WORDS = {True: "won", False: "lost", None: "no plan at all"}


def find_tape(folder: Path | None, model: str, batch: int) -> Tape:
    """From the folder where it is there, else captured."""
    path = (folder or Path()) / f"{model}.tape.json.gz"
    return Tape.load(path) if path.is_file() else tape_of(model, batch)


def tape_of(model: str, batch: int) -> Tape:
    """The captured step; op times are put in for each profile."""
    settings = {"model": model, "batch_sizes": [batch], "methods": ["replay"], "targets": ["sim:v100-32gb"],
                "measure": {"time": False, "peak": False}}
    with tempfile.TemporaryDirectory() as folder:
        make_plan(specs(settings, Path(folder))[0], folder, None)
        return Tape.load(Path(folder) / "tape.json.gz")


@dataclass
class Steps:
    """The steps that are planned on, made when they are asked for and kept for the model and profile at hand."""

    library: Library
    tapes: Path | None  # a folder of captured tapes
    batch: int

    def __post_init__(self) -> None:
        self._captured: dict[str, Tape] = {}
        self._made: dict[tuple[str, str, tuple[str, ...], bool], Tape] = {}

    def eager(self, model: str, profile: DeviceProfile) -> Tape:
        """As it was captured, with the profile's costs."""
        return self._step(model, profile, (), is_chosen=False)

    def of(self, method: str, model: str, profile: DeviceProfile, condition: str) -> Tape:
        """What the method plans on."""
        if condition == "equal":
            return self.eager(model, profile)
        needs = self.library.method(method).card.needs
        return self._step(model, profile, tuple(need for need in needs if need != "variants"), is_chosen="variants" in needs)

    def _step(self, model: str, profile: DeviceProfile, needs: tuple[str, ...], *, is_chosen: bool) -> Tape:
        if model not in self._captured:
            self._captured = {model: find_tape(self.tapes, model, self.batch)}
        key = (model, profile.name, needs, is_chosen)
        if key not in self._made:
            if any(made[:2] != key[:2] for made in self._made):
                self._made.clear()
            prepared = prepare_tape(self._captured[model], needs, None)
            tape = roofline_costs(self._captured[model] if prepared is None else prepared.tape, profile)
            self._made[key] = with_variants(tape, profile) if is_chosen else tape
        return self._made[key]


@dataclass(frozen=True)
class Cell:
    """One question to all: the same model, device, bytes and condition."""

    model: str
    profile: DeviceProfile
    budget: int  # percent of eager's simulated peak
    batch: int
    condition: str

    @property
    def key(self) -> dict[str, Any]:
        """What its row is found by."""
        return {"model": self.model, "profile": self.profile.name, "budget": self.budget, "batch": self.batch, "condition": self.condition}

    def ask(self, steps: Steps, method: str, options: dict[str, Any]) -> dict[str, Any]:
        """One method: simulated step over eager's, None where it has no plan."""
        eager = steps.eager(self.model, self.profile)
        budget = Budget(device_bytes=self.budget * check_schedule(eager, replay_schedule(eager)).peak_bytes // 100, wants_smallest=False)
        tape, started = steps.of(method, self.model, self.profile, self.condition), time.process_time()
        try:
            schedule = steps.library.method(method).build(**options).plan(tape, self.profile, budget)
        except (PlanInfeasible, Unsupported) as refusal:
            return {"ratio": None, "why": type(refusal).__name__, "plan_seconds": round(time.process_time() - started, 3)}
        seconds = time.process_time() - started
        metrics = simulate(check_schedule(tape, schedule, budget), self.profile).metrics
        return {"ratio": metrics.step_seconds / sum(op.seconds for op in eager.ops), "plan_seconds": round(seconds, 3)}


def row_of(cell: Cell, steps: Steps, before: dict[str, Any] | None, sources: dict[str, str],
           agents: list[str]) -> tuple[dict[str, Any], bool]:
    """(all methods' answers, is any of them new); what an unchanged method said before is kept."""
    before = before or {"agents": {}, "rivals": {}, "sources": {}}

    def is_same(name: str) -> bool:
        return before["sources"].get(name) == sources[name]

    rivals = [name for name in sources if name != "dqn"]
    said = {name: before["rivals"][name] for name in rivals if is_same(name) and name in before["rivals"]}
    own = dict(before["agents"]) if is_same("dqn") else {}
    is_new = bool({*rivals} - {*said} or {*agents} - {*own})
    said |= {name: cell.ask(steps, name, {}) for name in rivals if name not in said}
    own |= {name: cell.ask(steps, "dqn", AGENTS[name]) for name in agents if name not in own}
    return {"agents": own, "rivals": said, "sources": sources, **cell.key}, is_new


def summary(rows: list[dict[str, Any]], trained_on: set[str]) -> dict[str, Any]:
    """Shares won, over all models and apart for those that the agent has not seen."""
    found: dict[str, Any] = {"cells": len(rows), "trained_on": sorted(trained_on), "rivals": sorted({n for r in rows for n in r["rivals"]})}
    for agent in AGENTS:
        judged = [(r, won(r, agent)) for r in rows if agent in r["agents"] and won(r, agent) is not None]
        seen = [w for r, w in judged if r["model"] in trained_on]
        unseen = [w for r, w in judged if r["model"] not in trained_on]
        ratios = [r["agents"][agent]["ratio"] for r, _ in judged if r["agents"][agent]["ratio"]]
        found[agent] = {"judged": len(judged), "won": share([w for _, w in judged]), "won_seen_models": share(seen),
                        "won_other_models": share(unseen), "no_plan": sum(r["agents"][agent]["ratio"] is None for r, _ in judged),
                        "mean_ratio": round(sum(ratios) / len(ratios), 4) if ratios else None,
                        "plan_seconds_most": max((r["agents"][agent]["plan_seconds"] for r, _ in judged), default=None)}
    return found


def best_of(rivals: dict[str, Any]) -> float | None:
    """The shortest step of those that found a plan."""
    return min((a["ratio"] for a in rivals.values() if a["ratio"] is not None), default=None)


def won(row: dict[str, Any], agent: str) -> bool | None:
    """None where neither the agent nor a rival has a plan."""
    own, best = row["agents"][agent]["ratio"], best_of(row["rivals"])
    if own is None and best is None:
        return None
    return own is not None and (best is None or own <= best * (1 + 1e-9))


def share(wins: list[bool]) -> float | None:
    """Of the cells that were won."""
    return round(sum(wins) / len(wins), 4) if wins else None


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line a model and profile, with mean steps over eager's of the cells in which anybody has a plan."""
    lines = ["| model | device | cells won | best of the others | " + " | ".join(AGENTS) + " |", "| --- " * (4 + len(AGENTS)) + "|"]
    for model, profile in dict.fromkeys((r["model"], r["profile"]) for r in rows):
        judged = [r for r in rows if (r["model"], r["profile"]) == (model, profile) and won(r, "dqn") is not None]
        wins = sum(bool(won(r, "dqn")) for r in judged)
        cells = [model, profile, f"{wins} of {len(judged)}", mean([best_of(r["rivals"]) for r in judged])]
        asked = [agent for agent in AGENTS if all(agent in r["agents"] for r in judged)]
        cells += [mean([r["agents"][agent]["ratio"] for r in judged]) if agent in asked else "not asked" for agent in AGENTS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mean(ratios: list[float | None]) -> str:
    """With how many are missing, where any is."""
    there = [ratio for ratio in ratios if ratio is not None]
    missing = f" ({len(ratios) - len(there)} no plan)" if len(there) < len(ratios) else ""
    return f"{sum(there) / len(there):.3f}{missing}" if there else "no plan"


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    def cell(answer: dict[str, Any]) -> str:
        return f"{answer['ratio']:.3f}" if answer["ratio"] is not None else "-"

    rivals = " ".join(f"{name} {cell(a)}" for name, a in row["rivals"].items())
    agents = ", ".join(f"{name} {cell(a)}" for name, a in row["agents"].items())
    return f"{row['model']:<14} {row['profile']:<15} {row['budget']:>3} %  {agents} | {rivals}  {WORDS[won(row, 'dqn')]}"


def cells_of(options: argparse.Namespace) -> Iterator[Cell]:
    """Model by model and device by device, so that little is made twice."""
    for model in options.models.split(","):
        for profile in map(load_profile, options.profiles.split(",")):
            for condition in options.conditions.split(","):
                yield from (Cell(model, profile, int(budget), options.batch, condition) for budget in options.budgets.split(","))


def with_weights(cells: Iterator[Cell], steps: Steps, rows: dict[tuple, dict[str, Any]], weights: Path) -> None:
    """Print how an agent of `train dqn` does beside the one that ships, which has been asked before."""
    wins: dict[str, list[bool]] = {}
    for cell in cells:
        row = rows[tuple(cell.key.values())]
        row["agents"] = {"dqn": row["agents"]["dqn"], "trained": cell.ask(steps, "dqn", {"weights": str(weights)})}
        print(f"{cell.condition}  {line(row)}", flush=True)
        for agent in row["agents"]:
            if won(row, agent) is not None:
                wins.setdefault(f"{cell.condition}, {agent}", []).append(won(row, agent))
    print(json.dumps({name: f"{sum(found)} of {len(found)}" for name, found in wins.items()}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--budgets", default="90,80,70,60,50,40", help="percent of eager's simulated peak")
    parser.add_argument("--profiles", default="v100-32gb,titan-x-pascal")
    parser.add_argument("--conditions", default=",".join(CONDITIONS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--agents", default=",".join(AGENTS))
    parser.add_argument("--tapes", type=Path, help="a folder with MODEL.tape.json.gz where those need not be captured")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long; the next call goes on")
    parser.add_argument("--weights", type=Path, help="print how this agent does in cells that have been run")
    options = parser.parse_args()
    library, started = Library([built_in_collection()]), time.monotonic()
    steps = Steps(library, options.tapes, options.batch)
    known = {tuple(row[name] for name in KEY): row for row in kept("dqn")}
    if options.weights:
        with_weights(cells_of(options), steps, known, options.weights)
        return 0
    sources = {name: library.method(name).sha256[:16] for name in [*RIVALS, "dqn"]}
    asked: list[dict[str, Any]] = []
    for cell in cells_of(options):
        if time.monotonic() - started > 60 * options.minutes:
            break
        row, is_new = row_of(cell, steps, known.get(tuple(cell.key.values())), sources, options.agents.split(","))
        asked.append(row)
        known[tuple(cell.key.values())] = row
        if is_new:
            print(f"{cell.condition}  {line(row)}", flush=True)
            with redirect_stdout(io.StringIO()):
                keep("dqn", known.values(), summaries(list(known.values()), library))
    for condition in options.conditions.split(","):
        print(f"\n{condition}\n" + table([row for row in asked if row["condition"] == condition]))
    keep("dqn", known.values(), summaries(list(known.values()), library))
    shares = [found["dqn"]["won"] or 0.0 for found in summaries(asked, library).values()]
    return 0 if min(shares, default=0.0) >= TARGET else 1


def summaries(rows: list[dict[str, Any]], library: Library) -> dict[str, Any]:
    """By condition."""
    trained_on = {world[0] for world in library.method("dqn").load().load_network("graph", None, "", 0).trained["worlds"]}
    found = {condition: [row for row in rows if row["condition"] == condition] for condition in CONDITIONS}
    return {condition: summary(of_condition, trained_on) for condition, of_condition in found.items() if of_condition}


if __name__ == "__main__":
    sys.exit(main())
