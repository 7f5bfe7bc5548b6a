"""Every planner of a collection, alike: each rule of tests/contract.py on every toy tape, at six budgets or 36, and without one.

A rule that a published heuristic may honestly break can be exempted in the method's card, by name and with a reason; an
exemption that nothing needs is a fault too. Planted methods that break one rule each must be caught.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
from contract import EXEMPTIBLE, RULES, TAPES, Inquiry, option_sets
from oracle import Illegal

from vramlab.collection import Library, Method, built_in_collection
from vramlab.errors import ScheduleError

ROOT = Path(__file__).resolve().parents[2]


@cache
def planners(root: Path) -> list[Method]:
    library = Library([root])
    found = [library.method(name) for name in library.method_paths]
    return [method for method in found if method.card.kind == "planner" and not method.card.required]


@cache
def subjects(root: Path) -> dict[str, list[Inquiry]]:
    """`name-option=value` -> one inquiry a toy, which keeps its answers for all that is asked of them."""
    found = {}
    for method in planners(root):
        for options in option_sets(method):
            said = ",".join(f"{key}={value}" for key, value in options.items()) or "defaults"
            found[f"{method.name}-{said}"] = [Inquiry(method, options, toy) for toy in TAPES]
    return found


def is_slow(name: str, inquiries: list[Inquiry]) -> bool:
    """A learned method plays every step many times, and so does a search; of their options only the defaults are asked each time."""
    return bool({"learned", "search"} & set(inquiries[0].method.card.tags)) and not name.endswith("-defaults")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    root = Path(metafunc.config.getoption("--collection", default=None) or built_in_collection())
    if "subject" in metafunc.fixturenames:
        found = subjects(root)
        metafunc.parametrize("subject", [pytest.param(s, marks=pytest.mark.slow) if is_slow(name, s) else s for name, s in found.items()],
                             ids=found.keys())
    if "asked" in metafunc.fixturenames:  # by method, with each set of its options, the defaults first
        by_method: dict[str, list[Inquiry]] = {}
        for inquiry in chain.from_iterable(subjects(root).values()):
            by_method.setdefault(inquiry.method.name, []).append(inquiry)
        metafunc.parametrize("asked", by_method.values(), ids=by_method.keys())
    if "method" in metafunc.fixturenames:
        found = {method.name: method for method in planners(root)}
        metafunc.parametrize("method", found.values(), ids=found.keys())


@pytest.mark.parametrize("rule", RULES)
def test_contract(subject: list[Inquiry], rule: str):
    if rule in subject[0].method.card.exemptions:
        return  # whether it is needed is asked below
    for inquiry in subject:
        RULES[rule](inquiry)


def test_exemptions_are_allowed_and_needed(asked: list[Inquiry]):
    for rule, reason in asked[0].method.card.exemptions.items():
        assert rule in EXEMPTIBLE and len(reason) > 20
        assert any(breaks(rule, inquiry) for inquiry in asked), rule


def test_card_and_code_agree(method: Method):
    code = method.load()
    assert code.UID == method.card.uid
    assert list(getattr(code, "NEEDS", ())) == method.card.needs
    assert code.build() == method.build(), "the defaults of the code are those of the card"


OF_OTHER_HASHES = ("skip", "multi_output")
DIGESTS = """
import sys
from pathlib import Path
sys.path[:0] = [*sys.argv[1:3], sys.argv[2] + "/methods"]
from contract import Inquiry
from test_contract import OF_OTHER_HASHES, told
from vramlab.collection import Library
print(hash("vramlab"))
library = Library([Path(sys.argv[1])])
for name in sys.argv[3:]:
    for toy in OF_OTHER_HASHES:
        print(told(name, Inquiry(library.method(name), {}, toy)))
"""


def told(name: str, inquiry: Inquiry) -> str:
    """The method, the toy, and what was answered at each budget."""
    found = [str(answer.schedule.digest if answer.schedule else answer.refusal.smallest_bytes) for answer in inquiry.answers]
    return " ".join([name, inquiry.toy, *found])


def test_plans_do_not_depend_on_the_hash_seed():
    """Another process, whose strings hash otherwise, makes the plans that this one makes."""
    names = [method.name for method in planners(ROOT)]
    command = [sys.executable, "-c", DIGESTS, str(ROOT), str(ROOT / "tests"), *names]
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": seed}, check=True)
    hashed, *there = done.stdout.splitlines()
    toys = list(TAPES)
    here = [told(name, subjects(ROOT)[f"{name}-defaults"][toys.index(toy)]) for name in names for toy in OF_OTHER_HASHES]
    assert int(hashed) != hash("vramlab") and there == here


def breaks(rule: str, inquiry: Inquiry) -> bool:
    try:
        RULES[rule](inquiry)
    except (AssertionError, Illegal, ScheduleError, TypeError, pytest.fail.Exception):
        return True
    return False


# --- methods with one fault each ---------------------------------------------------------------------------------------
CARD = """
uid: 0123456789abcdef
version: 1
kind: planner
title: planted
decides: Something wrong.
paper: null
needs: [timings]
takes_budget: false
fidelity: none
"""
CODE = """
from dataclasses import replace
from itertools import count
import numpy as np
from vramlab.check import check_schedule
from vramlab.errors import PlanInfeasible
from vramlab.layers import check_needs
from vramlab.liveness import replay_schedule
from vramlab.planner import UNLIMITED
from vramlab.schedule import *
UID = "0123456789abcdef"
calls = count()

class Planted:
    def plan(self, tape, device, budget):
        needs, smallest, uid, refuses = ["timings"], None, UID, True
        replay = replay_schedule(tape)
        peak = check_schedule(tape, replay).peak_bytes
        run = list(replay.instructions)
        frees = [i for i in run if isinstance(i, Free)]
        again = [Compute(0), Free(tape.creates[0][0]), Recompute(0)] if len(tape.creates[0]) == 1 else run[:1]
        BODY
        check_needs(tape, needs, "planted")
        if refuses and peak > budget.device_bytes:
            raise PlanInfeasible(method="planted", budget_bytes=budget.device_bytes, smallest_bytes=smallest or peak, op=tape.op_name(0))
        return replace(replay, instructions=tuple(run), method=uid)

def build():
    return Planted()
"""
PLANTED = {
    "plans-compute-what-a-plain-run-computes": "run = [i for i in run if not isinstance(i, Free)]",
    "plans-keep-the-budget": "refuses = False",
    "refusals-name-what-can-be-reached": "smallest = budget.device_bytes + 1",
    "no-overhead-without-a-budget": "run[:1] = again",
    "peak-falls-with-the-budget": "run = run if budget.device_bytes >= UNLIMITED else [i for i in run if i not in frees] + frees",
    "time-rises-as-the-budget-falls": "run[:1] = again if budget.device_bytes >= UNLIMITED else run[:1]",
    "equal-questions-get-equal-answers": "run[:1] = again if next(calls) % 2 else run[:1]",
    "unmet-needs-are-refused": "needs = []",
    "random-ops-are-recomputed-from-a-recorded-state": "run.reverse()",
    "json-round-trips": "run[0] = Compute(np.int64(0))",
    "schedules-carry-uid-and-tape": "uid = ''",
    "a-method-without-budget-ignores-it": "run[:1] = again if budget.device_bytes < UNLIMITED else run[:1]",
    "state-stays-where-it-is": "run[:0] = [Offload(0), Wait(0), FreeHost(0)]",
}


def plant(folder: Path, body: str) -> Method:
    folder.mkdir(parents=True)
    (folder / "card.yaml").write_text(CARD)
    (folder / "method.py").write_text(CODE.replace("BODY", body))
    return Library([folder.parents[1]]).method(folder.name)


def rules_broken_by(method: Method, rules: Iterable[str] = RULES) -> set[str]:
    inquiries = [Inquiry(method, {}, toy) for toy in ("chain", "random_op", "multi_output")]
    return {rule for rule in rules if any(breaks(rule, inquiry) for inquiry in inquiries)}


def test_a_sound_method_breaks_no_rule(tmp_path):
    assert rules_broken_by(plant(tmp_path / "methods" / "sound", "pass")) == set()


@pytest.mark.parametrize("rule", RULES)
def test_a_planted_fault_is_caught(tmp_path, rule):
    assert rules_broken_by(plant(tmp_path / "methods" / "faulty", PLANTED[rule]), [rule])
