"""Train the agents that ship in methods/dqn: four models at sampled budgets on one profile.

    python benchmarks/dqn_agents.py --network graph|mlp [--output results/dqn-agents]

Captures the steps, trains (about two minutes of processor time) and writes methods/dqn/agent-NETWORK.json, which holds the settings,
the tapes' digests, the learning curve and this command. An interrupted training goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from common import ROOT
from dqn import tape_of

from vramlab.collection import Library, built_in_collection
from vramlab.costs import roofline_costs
from vramlab.device import load_profile

MODELS, PROFILE, BATCH = ("resnet50", "vgg16", "densenet121", "resnet18"), "v100-32gb", 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--network", choices=("graph", "mlp"), default="graph")
    parser.add_argument("--output", type=Path, default=Path("results/dqn-agents"), help="where the training's state lies")
    options = parser.parse_args()
    method, profile = Library([built_in_collection()]).method("dqn"), load_profile(PROFILE)
    training = method.load().training()
    worlds = [training.World(name, roofline_costs(tape_of(name, BATCH), profile), profile) for name in MODELS]
    trainer = training.Trainer(worlds, training.Settings(kind=options.network), options.output / options.network)
    agent = trainer.train(lambda progress: print(f"{progress.decisions:>7,} decisions", end="\r", file=sys.stderr))
    told = {**agent.trained, "command": f"python benchmarks/dqn_agents.py --network {options.network}"}
    replace(agent, trained=told).save(ROOT / "methods" / "dqn" / f"agent-{options.network}.json")
    print(training.curve_csv(trainer.progress.curve), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
