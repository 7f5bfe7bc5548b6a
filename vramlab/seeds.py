"""Seeds: schedules of other planners for a planner that begins with them. Methods never import each other; the engine asks and hands over.

A card names in `seeds` the methods whose schedules its planner takes through `plan_from`. Each is asked once for a tape, a device and a
budget; what it answered is kept in the user's cache folder under all that the answer depends on. One that refuses gives no seed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vramlab.check import check_schedule
from vramlab.collection import Library, Method
from vramlab.device import DeviceProfile
from vramlab.environment import cache_dir
from vramlab.errors import PlanInfeasible, ScheduleError, Unsupported
from vramlab.planner import Budget
from vramlab.record import write_atomically
from vramlab.schedule import Schedule
from vramlab.tape import Tape


_logger = logging.getLogger("vramlab")


@dataclass(frozen=True)
class Seeds:
    """What the other planners answered."""

    schedules: Mapping[str, Schedule] = field(default_factory=dict)  # by method
    refused: Mapping[str, str] = field(default_factory=dict)  # method -> why
    seconds: float = 0.0  # that planning them took when they were made, those that were kept included


def seeds_for(library: Library, method: Method, tape: Tape, device: DeviceProfile, budget: Budget) -> Seeds:
    """The seeds that a method's card asks for, in the card's order. UnknownName where it names a method that is not there."""
    schedules, refused, seconds = {}, {}, 0.0
    for name in method.card.seeds:
        answer = _answer(library.method(name), tape, device, budget)
        seconds += answer["seconds"]
        if answer["schedule"] is None:
            refused[name] = answer["why"]
        else:
            schedules[name] = Schedule.from_json(answer["schedule"])
    return Seeds(schedules, refused, seconds)


def _answer(method: Method, tape: Tape, device: DeviceProfile, budget: Budget) -> dict:
    """From the cache, or asked now."""
    path = cache_dir() / "seeds" / f"{_key(method, tape, device, budget)}.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        answer = _ask(method, tape, device, budget)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(answer))
    except OSError:  # a cache that cannot be written is no cache
        pass
    return answer


def _ask(method: Method, tape: Tape, device: DeviceProfile, budget: Budget) -> dict:
    began = time.perf_counter()
    _logger.info("planning with %s, whose schedule is a seed ...", method.name)
    try:
        question = Budget(device_bytes=budget.device_bytes, host_bytes=budget.host_bytes, wants_smallest=False)
        schedule, why = check_schedule(tape, method.build().plan(tape, device, question), budget).schedule.to_json(), ""
    except (PlanInfeasible, Unsupported, ScheduleError) as refusal:
        schedule, why = None, str(refusal)
    return {"schedule": schedule, "why": why, "seconds": time.perf_counter() - began}


def _key(method: Method, tape: Tape, device: DeviceProfile, budget: Budget) -> str:
    rates = {key: value for key, value in device.to_json().items() if key != "sources"}
    seconds = [[op.seconds, *(v.seconds for v in op.variants)] for op in tape.ops]
    source = [_SOURCE, method.sha256, tape.digest, seconds, rates, budget.device_bytes, budget.host_bytes]
    return hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()[:32]


def _digest_of_floors() -> str:
    """Of the modules that methods plan with: another source may give other schedules."""
    here = Path(__file__).parent
    names = ("kernels", "check", "liveness", "layers", "player", "rollout", "simulate", "stages", "schedule", "in_place", "variants")
    return hashlib.sha256(b"".join((here / f"{name}.py").read_bytes() for name in names)).hexdigest()


_SOURCE = _digest_of_floors()
