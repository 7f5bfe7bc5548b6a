"""Who copied whom: a copy in which every number was changed a little is none that reproduces; two measurements of their own are."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from random import Random

import pytest
from alembic import command
from crowd_made import Served, measured, run_of, served, wrapping_only
from fastapi.testclient import TestClient
from sqlalchemy import select, text
from tapes import TapeBuilder

from vramlab.crowd import archive, pack_run
from vramlab.crowd.server.agreements import OPERATOR_TIMES, STEP_TIMES
from vramlab.crowd.server.app import create_app
from vramlab.crowd.server.database import _configuration
from vramlab.crowd.server.fingerprints import (
    FEWEST_FORMS, FEWEST_STEPS, MOST_FORMS, NEAR_OPERATORS, NEAR_STEPS, are_operators_near, are_steps_near,
    fingerprint_of, step_correlation,
)
from vramlab.crowd.server.tables import Result
from vramlab.tape import Tape

BOTH = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]
GPU, FORMS, PAIRS = "Tesla V100-SXM2-32GB", 40, 12


def noisy(values, seed: int, share: float, factor: float = 1.0) -> list[float]:
    """Each value off by about `share`, all of them by a factor."""
    chance = Random(seed)
    return [value * factor * math.exp(chance.gauss(0, share)) for value in values]


OPERATORS = noisy([1e-4] * FORMS, 0, 1.5)  # of very different operators
OURS, THEIRS = noisy([1.3] * PAIRS, 1, 0.01), noisy([1.0] * PAIRS, 2, 0.01)


def fingerprint(operators, steps=((), ()), kind: str = "cpu") -> dict:
    return {"kind": kind, "operators": {f"{i:08x}": s for i, s in enumerate(operators)}, "steps": [list(series) for series in steps]}


# ------------------------------------------------------------------------------------------------------------ two fingerprints
@pytest.mark.parametrize(("kind", "change", "is_near"), [
    ("cpu", lambda s: s, True), ("cpu", lambda s: noisy(s, 3, 0, 1.7), True), ("cpu", lambda s: noisy(s, 3, 0.002, 0.8), True),
    ("cpu", lambda s: [x * (9 if i % 4 == 0 else 1) for i, x in enumerate(s)], True), ("cpu", lambda s: noisy(s, 3, 0.03), False),
    ("cpu", lambda s: noisy(s, 3, 0.02, 0.8), False), ("cpu", lambda s: s[:FEWEST_FORMS - 1], False),
    ("cuda", lambda s: noisy(s, 3, 0.0002, 1.1), True), ("cuda", lambda s: noisy(s, 3, 0.003), False),
    ("cuda", lambda s: [x * (1 if i % 3 else 1.1) for i, x in enumerate(s)], False),  # of two boards many short kernels take equal ticks
    ("xpu", lambda s: s, False),
])
def test_operators_are_one_measurement_where_most_of_their_ratios_are_one(kind, change, is_near):
    pair = fingerprint(OPERATORS, kind=kind), fingerprint(change(OPERATORS), kind=kind)
    assert are_operators_near(*pair) is are_operators_near(*pair[::-1]) is is_near


def test_of_another_kind_of_device_or_of_nothing_nothing_is_said():
    one = fingerprint(OPERATORS, (OURS, THEIRS))
    for other in (None, fingerprint(OPERATORS, kind="cuda"), fingerprint([])):
        assert not are_operators_near(one, other) and not are_operators_near(other, one)
    assert not are_steps_near(one, None) and not are_steps_near(one, fingerprint(OPERATORS))


@pytest.mark.parametrize(("change", "is_near"), [
    (lambda s, n: s, True), (lambda s, n: noisy(s, n, 0, 0.4), True), (lambda s, n: noisy(s, n, 0.001, 1.2), True),
    (lambda s, n: s[:FEWEST_STEPS], True), (lambda s, n: s[:FEWEST_STEPS - 1], False), (lambda s, n: noisy([1.0] * PAIRS, n, 0.01), False),
    (lambda s, n: [1.0] * PAIRS, False),
])
def test_steps_are_one_measurement_where_they_rise_and_fall_together(change, is_near):
    copy = fingerprint(OPERATORS, (change(OURS, 11), change(THEIRS, 12)))
    assert are_steps_near(fingerprint(OPERATORS, (OURS, THEIRS)), copy) is is_near


def test_busy_machines_that_share_a_rhythm_are_two():
    """The same steps wait for their turn on both: ranks alone would take one for the other's copy."""
    def machine(seed: int) -> dict:
        return fingerprint([], [noisy(noisy([1.0] * PAIRS, j, 0.7), seed + j, 0.03) for j in (0, 1)])

    pairs = [(machine(2 * i), machine(2 * i + 1000)) for i in range(50)]
    assert max(step_correlation(one["steps"], other["steps"]) for one, other in pairs) >= NEAR_STEPS, "the ranks are those of a copy"
    assert not any(are_steps_near(*pair) for pair in pairs)
    copy = fingerprint([], [noisy(series, 5, 0.002, 1.3) for series in pairs[0][0]["steps"]])
    assert are_steps_near(pairs[0][0], copy)


def test_machines_that_grow_slower_alike_or_stumble_at_one_step_are_two():
    """Drift over the run and one outlier at the same place would make any two series alike by their plain correlation."""
    def machine(seed: int) -> dict:
        slow = [1 + 0.05 * i for i in range(PAIRS)]
        slow[0] = 4.0
        return fingerprint([], [noisy(slow, seed, 0.01), noisy(slow, seed + 1, 0.01)])

    alike = [step_correlation(machine(2 * i)["steps"], machine(2 * i + 1000)["steps"]) for i in range(200)]
    assert max(alike) < 0.95, max(alike)
    independent = [step_correlation(*[[noisy([1.0] * FEWEST_STEPS, 4 * i + j, 0.01) for j in k] for k in ((0, 1), (2, 3))])
                   for i in range(3000)]
    assert max(independent) < 0.95, max(independent)


# ------------------------------------------------------------------------------------------------------------------- the server
def tape(seconds) -> Tape:
    """One operator of its own form for each time."""
    builder = TapeBuilder()
    x = builder.state("x", 1000)
    for index, each in enumerate(seconds):
        y = builder.temporary(1000 + index)
        builder.call("aten.relu.default", [x], [y], seconds=each)
        x = y
    return builder.build(x)


def send(server, account: str, operators, steps, *, host: str = "", **config) -> dict:
    """Submit one measured result with these times and telemetry of its own; the answer."""
    server.made += 1
    record = measured(server.made, host=host or account, gpu=None, **config)
    block = {**record.measured, "step_seconds": list(steps[0]), "baseline_step_seconds": list(steps[1])}
    record = replace(record, measured=block)
    folder = server.folder / f"{account}-{server.made}"
    cell = run_of(folder / "run", [record], server.made) / "cells" / record.cell_id
    tape(operators).save(cell / "tape.json.gz")
    replace(record, files={p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in cell.glob("*.gz")}).save(cell / "record.json")
    bundle = pack_run(folder / "run", key=server.keys[account])
    bundle.write(folder)
    answer = server.post(account, archive.pack(bundle.place(folder)))
    assert answer.status_code == 201, answer.text
    return answer.json()


def own(seed: int) -> tuple[list[float], list[float]]:
    return noisy([1.3] * PAIRS, 2 * seed, 0.01), noisy([1.0] * PAIRS, 2 * seed + 1, 0.01)


def standing(server, answer: dict) -> tuple[str, int, int]:
    row, = server.get(f"bundles/{answer['bundle']}")["results"]
    return row["state"], row["reproduced_count"], row["repeated_count"]


@pytest.fixture(params=BOTH)
def server(request, tmp_path):
    url = request.getfixturevalue("postgres").fresh() if request.param == "postgresql" else None
    with served(tmp_path, url) as made:
        yield made


def test_two_measurements_of_their_own_reproduce_each_other_and_a_copy_of_one_does_not(server):
    first = send(server, "ada", OPERATORS, own(1))
    copy = send(server, "bob", noisy(OPERATORS, 5, 0.002, 1.03), own(2))
    assert copy["state"] == "checked", "steps of its own: it counts as repeated, and nobody is accused"
    assert standing(server, first) == standing(server, copy) == ("repeated", 0, 1)
    with server.database.read() as session:
        result = session.scalar(select(Result.id).order_by(Result.id))
    agreement, = server.get(f"results/{result}")["agreements"]
    assert (agreement["kind"], agreement["differences"][OPERATOR_TIMES]) == ("repeated", "those of this one up to a factor")
    assert STEP_TIMES not in agreement["differences"] and "fingerprint" not in agreement["other"]
    assert "operator times those of this one up to a factor" in server.web.get(f"/results/{result}").text
    honest = send(server, "chris", noisy(OPERATORS, 6, 0.05), own(3))
    assert standing(server, first) == standing(server, copy) == ("reproduced", 1, 1) and standing(server, honest) == ("reproduced", 2, 0)


def test_steps_that_were_each_changed_a_little_are_flagged_and_stay_their_owners(server):
    steps = own(1)
    first = send(server, "ada", OPERATORS, steps)
    copy = send(server, "bob", noisy(OPERATORS, 5, 0.05), [noisy(series, 7, 0.0005, 1.02) for series in steps])
    assert (copy["state"], [f["rule"] for f in copy["findings"]]) == ("flagged", ["samples-copied"])
    assert standing(server, first) == ("checked", 0, 0)
    again = send(server, "ada", OPERATORS, [noisy(series, 8, 0.0005) for series in steps])
    assert again["state"] == "checked", "who was copied is not the copier"
    assert server.say("olga", f"bundles/{copy['bundle']}/clear", reason="explained").status_code == 200
    assert standing(server, first)[1:] == (0, 2), "not even a person's word makes it a reproduction"


def test_the_kept_forms_are_few_and_do_not_depend_on_times(tmp_path):
    """Two measurements of a long step keep the same operators."""
    class Held:
        def __init__(self, seconds):
            self.made = tape(seconds)

        def tape(self, sha256):
            return self.made

    record = replace(measured(1), files={"tape.json.gz": "0" * 64})
    one, two = (fingerprint_of(Held(noisy([1e-4] * 300, seed, 1.0)), record)["operators"] for seed in (1, 2))
    assert list(one) == list(two) and len(one) == MOST_FORMS and one != two
    assert set(NEAR_OPERATORS) == {"cpu", "cuda"}


def test_results_from_before_are_brought_up_to_date(tmp_path):
    """A database of the step before gets its column, and the server that starts reads the times from the archives."""
    with served(tmp_path) as before:
        first = send(before, "ada", OPERATORS, own(1))
        tokens, keys, made, settings = before.tokens, before.keys, before.made, before.settings
        with before.database.engine.execution_options(vramlab_writes=True).begin() as connection:
            command.downgrade(_configuration(connection), "0001")
            assert "fingerprint" not in connection.execute(text("SELECT * FROM result")).keys()
    with TestClient(create_app(settings, wrapping_only), raise_server_exceptions=False) as web:
        after = Served(settings, web, tokens, keys, tmp_path, made)
        after.web.app.state.intake.fill_fingerprints()
        with after.database.read() as session:
            kept, = session.scalars(select(Result.fingerprint))
        assert sorted(kept["operators"].values()) == pytest.approx(sorted(OPERATORS)) and kept["steps"][0] == own(1)[0]
        copy = send(after, "bob", noisy(OPERATORS, 5, 0.002), own(2))
        assert standing(after, first) == standing(after, copy) == ("repeated", 0, 1)


@pytest.mark.parametrize("pairs", [4, PAIRS])
def test_the_times_of_one_seed_are_not_those_of_another(server, pairs):
    """One run that its own account relabels for the other seeds of a competition; an honest account measures each."""
    steps = [series[:pairs] for series in own(1)]
    training = {"seed": 0, "steps": 0}
    send(server, "ada", OPERATORS, steps, training=training, measure={"steps": pairs})
    again = send(server, "ada", OPERATORS, [series[:pairs] for series in own(2)], training=training | {"seed": 1}, measure={"steps": pairs})
    assert again["state"] == "checked"
    copy = send(server, "ada", OPERATORS, steps, training=training | {"seed": 2}, measure={"steps": pairs})
    assert (copy["state"], [f["rule"] for f in copy["findings"]]) == ("flagged", ["samples-copied"])
    assert "another cell" in copy["findings"][0]["message"]
