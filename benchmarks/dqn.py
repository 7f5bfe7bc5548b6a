"""The DQN agents against the other methods, all *simulated*: models x budgets x device profiles.

    python benchmarks/dqn.py [--models resnet50,...] [--budgets 90,80,...] [--profiles v100-32gb,...] [--minutes 30]

A cell counts as won when the agent's step takes at most as long as the best of the others; as lost when the agent finds no plan. Cells
in which nobody finds a plan say nothing and are left out. Models that the agent was not trained on are counted apart. Rows are kept in
benchmarks/evidence/dqn.json after each cell, and those of the same sources are not run again. At the end come the cells as a table,
then the summary. Exit code 1 under 80 % won.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from common import keep, kept, specs

from vramlab.check import check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.costs import roofline_costs
from vramlab.device import load_profile
from vramlab.errors import PlanInfeasible, Unsupported
from vramlab.liveness import replay_schedule
from vramlab.measure import make_plan
from vramlab.planner import Budget
from vramlab.simulate import simulate
from vramlab.tape import Tape

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


def ask(library: Library, method: str, options: dict[str, Any], tape: Tape, profile: Any, device_bytes: int) -> dict[str, Any]:
    """One method at one budget: simulated step over eager's, None where it has no plan."""
    budget = Budget(device_bytes=device_bytes, wants_smallest=False)
    started = time.process_time()
    try:
        schedule = library.method(method).build(**options).plan(tape, profile, budget)
    except (PlanInfeasible, Unsupported) as refusal:
        return {"ratio": None, "why": type(refusal).__name__, "plan_seconds": round(time.process_time() - started, 3)}
    seconds = time.process_time() - started
    metrics = simulate(check_schedule(tape, schedule, budget), profile).metrics
    return {"ratio": metrics.step_seconds / sum(op.seconds for op in tape.ops), "plan_seconds": round(seconds, 3)}


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
        cells += [mean([r["agents"].get(agent, {"ratio": None})["ratio"] for r in judged]) for agent in AGENTS]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--budgets", default="90,80,70,60,50,40", help="percent of eager's simulated peak")
    parser.add_argument("--profiles", default="v100-32gb,titan-x-pascal")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--agents", default=",".join(AGENTS))
    parser.add_argument("--tapes", type=Path, help="a folder with MODEL.tape.json.gz where those need not be captured")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long; the next call goes on")
    options = parser.parse_args()
    library, started = Library([built_in_collection()]), time.monotonic()
    rivals = [name for name in RIVALS if name in library.method_paths]
    sources = {name: library.method(name).sha256[:16] for name in [*rivals, "dqn"]}
    trained_on = {world[0] for world in library.method("dqn").load().load_network("graph", None, "", 0).trained["worlds"]}
    known = {(r["model"], r["profile"], r["budget"], r["batch"]): r for r in kept("dqn")}
    rows: list[dict[str, Any]] = []
    for model in options.models.split(","):
        captured = None
        for profile in map(load_profile, options.profiles.split(",")):
            for budget in map(int, options.budgets.split(",")):
                row = known.get((model, profile.name, budget, options.batch), {"agents": {}, "rivals": {}, "sources": {}})
                is_new = row["sources"] != sources or not set(options.agents.split(",")) <= set(row["agents"])
                if is_new and time.monotonic() - started < 60 * options.minutes:
                    if captured is None:
                        captured = find_tape(options.tapes, model, options.batch)
                    tape = roofline_costs(captured, profile)
                    limit = budget * check_schedule(tape, replay_schedule(tape)).peak_bytes // 100
                    row = run_cell(library, row, sources, rivals, options.agents.split(","), tape, profile, limit)
                    row |= {"model": model, "profile": profile.name, "budget": budget, "batch": options.batch, "sources": sources}
                    print(line(row), flush=True)
                elif is_new:
                    continue
                rows.append(row)
                known.pop((model, profile.name, budget, options.batch), None)
                if is_new:
                    with redirect_stdout(io.StringIO()):
                        keep("dqn", [*rows, *known.values()], summary(rows, trained_on))
    print(table(rows))
    result = summary(rows, trained_on)
    keep("dqn", rows, result)
    return 0 if (result["dqn"]["won"] or 0.0) >= TARGET else 1


def run_cell(library: Library, row: dict[str, Any], sources: dict[str, str], rivals: list[str], agents: list[str], tape: Tape, profile: Any,
             limit: int) -> dict[str, Any]:
    """All methods at one budget; what an unchanged method said before is kept."""
    def is_same(name: str) -> bool:
        return row["sources"].get(name) == sources[name]

    said = {name: row["rivals"][name] if is_same(name) and name in row["rivals"] else ask(library, name, {}, tape, profile, limit)
            for name in rivals}
    own = dict(row["agents"]) if is_same("dqn") else {}
    own |= {name: ask(library, "dqn", AGENTS[name], tape, profile, limit) for name in agents if name not in own}
    return {"agents": own, "rivals": said}


if __name__ == "__main__":
    sys.exit(main())
