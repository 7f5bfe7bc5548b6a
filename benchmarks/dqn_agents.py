"""Train the agents that ship in methods/dqn: six models at sampled budgets on one profile.

    python benchmarks/dqn_agents.py --network graph|mlp [--output results/dqn-agents] [--minutes 20] [--tapes FOLDER]

Captures the steps, trains and writes methods/dqn/agent-NETWORK.json, which holds the settings, the tapes' digests, the learning curve
and this command; benchmarks/evidence/dqn_training_NETWORK.csv is the training log. An interrupted training goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from common import EVIDENCE, ROOT
from dqn import find_tape

from vramlab.collection import Library, built_in_collection
from vramlab.costs import roofline_costs
from vramlab.device import load_profile
from vramlab.record import write_atomically

MODELS = ("resnet50", "vgg16", "densenet121", "resnet18", "mobilenet-v3-large", "googlenet")
PROFILE, BATCH = "v100-32gb", 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--network", choices=("graph", "mlp"), default="graph")
    parser.add_argument("--output", type=Path, default=Path("results/dqn-agents"), help="where the training's state lies")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long; the next call goes on")
    parser.add_argument("--tapes", type=Path, help="a folder with MODEL.tape.json.gz where those need not be captured")
    options = parser.parse_args()
    method, profile = Library([built_in_collection()]).method("dqn"), load_profile(PROFILE)
    training = method.load().training()
    worlds = [training.World(name, roofline_costs(find_tape(options.tapes, name, BATCH), profile), profile) for name in MODELS]
    trainer = training.Trainer(worlds, training.Settings(kind=options.network), options.output / options.network)
    agent = trainer.train(lambda progress: print(f"{progress.decisions:>7,} decisions", end="\r", file=sys.stderr),
                          until_seconds=60 * options.minutes)
    log = training.curve_csv(trainer.progress.curve)
    print(log, end="")
    if trainer.progress.decisions < trainer.settings.decisions:
        return 3
    write_atomically(EVIDENCE / f"dqn_training_{options.network}.csv", log)
    told = {**agent.trained, "command": f"python benchmarks/dqn_agents.py --network {options.network}"}
    replace(agent, trained=told).save(ROOT / "methods" / "dqn" / f"agent-{options.network}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
