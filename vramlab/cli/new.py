"""new: a method, a model or a workflow in the current directory's collection, complete as it stands: to run, to check, to change."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Mapping

from vramlab.cli.words import command
from vramlab.collection import Library, find_collections
from vramlab.errors import WorkflowError
from vramlab.yaml_nodes import offer

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_LONGEST_NAME = 60

_METHOD_CARD = """\
uid: "<uid>"  # names this method for good, whatever it is called; never reuse it
alias: []
tags: [recompute]
version: 1
kind: planner
title: <name>
decides: When an op does not fit, the biggest storage that can be computed again is dropped.  # one sentence
paper: null  # or {title, authors, venue, year, doi, url, bibtex}
options: {}  # name: {default, type, choices, min, max, help, symbol}; each a keyword argument of build()
needs: []
takes_budget: true
claims: []
deviations: []  # every departure from the paper
fidelity: Not from a paper.  # one sentence
exemptions:
  time-rises-as-the-budget-falls: Greedy; at a lower budget it may drop another storage first, and the step may come out faster.
"""

_METHOD_CODE = '''\
"""<name>: what it decides, in a sentence or two."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vramlab.device import DeviceProfile
from vramlab.planner import Budget
from vramlab.rollout import Action, Release, Rollout, RolloutPlanner
from vramlab.schedule import Schedule
from vramlab.tape import Tape

UID = "<uid>"


class Policy:
    """Decides during the step; one object plays one step. `rollout` plays it on the simulated clock, and the play is the schedule."""

    def release(self, candidates: np.ndarray, rollout: Rollout) -> Release | None:
        """Which storage leaves next, until the next op fits; None when none can.

        Of each: `rollout.nbytes`, `rollout.next_need` (the op that needs it next), `rollout.last_access_seconds`, beside
        `rollout.clock_seconds` and `rollout.recompute_seconds(s)`. Action.SWAP copies to the host and asks `rollout.can_offload(s)`.
        """
        droppable = [s for s in candidates.tolist() if rollout.can_recompute(s)]
        return Release(max(droppable, key=lambda s: int(rollout.nbytes[s])), Action.RECOMPUTE) if droppable else None

    def prefetch(self, rollout: Rollout) -> list[int]:
        """Swapped storages whose copy back shall start now, before op `rollout.next_op`."""
        return []


@dataclass(frozen=True)
class NewPlanner:
    """The planner."""

    def plan(self, tape: Tape, device: DeviceProfile, budget: Budget) -> Schedule:
        """A schedule within the budget; PlanInfeasible where there is none."""
        return RolloutPlanner(lambda *step: Policy(), method=UID, name="<name>").plan(tape, device, budget)


def build() -> NewPlanner:
    """The planner. Options of the card arrive here as keyword arguments."""
    return NewPlanner()
'''

_MODEL_CARD = """\
name: <name>
family: cnn
title: <name>
source: "file:<module>.py:build"  # or "torchvision:resnet50", and then no .py
input: {kind: image, channels: 3, image_size: 32}
options:
  image_size: {default: 32, type: int, min: 8, help: "height and width in pixels"}
  classes: {default: 10, type: int, min: 2, help: "outputs of the classifier"}
  width: {default: 16, type: int, min: 1, help: "channels"}
loss: cross_entropy
tags: [image, cnn]
"""

_MODEL_CODE = '''\
"""<name>: what it is and where it comes from."""

from __future__ import annotations

from torch import nn


def build(*, image_size: int, classes: int, width: int) -> nn.Module:
    """Every option of the card arrives here by its name."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes),
    )
'''

_WORKFLOW = """\
schema: 1
name: <name>
title: <name>
description: What this run is to show.
model: {name: resnet8-digits, image_size: 32}
batch_sizes: [64]
methods: [eager, checkpoint, delta]
budgets: [80%, 60%]  # of eager's peak; a size such as 6GiB, or auto
measure: {warmup: 1, steps: 6}
expected: {minutes: 3}
"""


def _method(name: str) -> Mapping[str, str]:
    return {f"methods/{name}/card.yaml": _METHOD_CARD, f"methods/{name}/method.py": _METHOD_CODE}


def _model(name: str) -> Mapping[str, str]:
    return {f"models/{name}.yaml": _MODEL_CARD, f"models/{_stem(name)}.py": _MODEL_CODE}


def _workflow(name: str) -> Mapping[str, str]:
    return {f"workflows/{name}.yaml": _WORKFLOW}


_KINDS = {"method": _method, "model": _model, "workflow": _workflow}


def _stem(name: str) -> str:
    """A module's name: `2-layers` is `model_2_layers`."""
    stem = name.replace("-", "_")
    return f"model_{stem}" if stem[0].isdecimal() else stem


def make(what: str, name: str, here: Path) -> int:
    """Write the files below `here` and say what to do next. WorkflowError on a name that is none, or is taken; nothing is overwritten."""
    if what not in _KINDS:
        raise WorkflowError(f"{what!r} is not allowed{offer(what, _KINDS)}")
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise WorkflowError(f"name {name!r} is not allowed; use lower case letters, digits and hyphens, at most {_LONGEST_NAME}")
    library = Library(find_collections(here=here))
    taken = {"method": library.method_paths, "model": library.model_paths, "workflow": library.workflow_paths}[what]
    if name in taken:
        raise WorkflowError(f"there is a {what} {name!r} already, at {taken[name][0]}; choose another name")
    files = _KINDS[what](name)
    for path in files:
        if (here / path).exists():
            raise WorkflowError(f"{path} is there already; choose another name")
    uid = secrets.token_hex(8)
    for path, text in files.items():
        (here / path).parent.mkdir(parents=True, exist_ok=True)
        (here / path).write_text(_filled(text, name, uid), encoding="utf-8")
        print(f"wrote {path}")
    print(f"Next: {_next(what, name)}")
    return 0


def _filled(text: str, name: str, uid: str) -> str:
    return text.replace("<name>", name).replace("<uid>", uid).replace("<module>", _stem(name))


def _next(what: str, name: str) -> str:
    if what == "method":
        return command("check", "method", name)
    if what == "model":
        return command("plan", "step", "--model", name, "--batch", "8", "--method", "delta", "--budget", "60%")
    return command("run", "workflow", f"workflows/{name}.yaml")
