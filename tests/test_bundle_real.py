"""A run that really ran, given away, taken and checked: what the engine writes keeps every rule, and forgeries of it are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crowd_made import served
from forging import Members, forge, members_of, with_json
from real_run import real_run

from vramlab.crowd import check, pack_run
from vramlab.crowd.client import Server
from vramlab.crowd.signing import make_key

pytestmark = pytest.mark.slow  # a run that really runs takes most of a minute

KEY = make_key()


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    base = tmp_path_factory.getbasetemp()
    return real_run((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "given-away")


@pytest.fixture(scope="module")
def bundle(run, tmp_path_factory) -> Path:
    to = tmp_path_factory.mktemp("real")
    packed = pack_run(run, key=KEY)
    packed.write(to, check)
    return packed.place(to)


@pytest.fixture(scope="module")
def members(bundle) -> Members:
    return members_of(bundle)


def record_of(members: Members, experiment: str, method: str) -> str:
    for name, data in members.items():
        if name.endswith("record.json"):
            config = json.loads(data)["config"]
            if (config["experiment"], config["method"]) == (experiment, method):
                return name
    raise AssertionError(f"no cell of {method} in {experiment}")


def test_what_the_engine_writes_keeps_every_rule(bundle, members):
    report = check(bundle)
    assert report.is_accepted, report.findings
    assert {f.rule for f in report.findings} <= {"not-derived", "telemetry-quality", "prediction-far"}, report.findings
    records = [json.loads(data) for name, data in members.items() if name.endswith("record.json")]
    ends = {"largest": 2, "memory": 3, "simulated": 3, "training": 1}
    assert sorted((r["config"]["experiment"], r["outcome"]) for r in records) == sorted(
        [(name, "ok") for name, count in ends.items() for _ in range(count)] + [("refused", "plan_infeasible")])
    looked = report.examined
    assert (looked["simulated"], looked["roofline"], looked["search"], looked["training"], looked["step-times"], looked["verdicts"]) == (
        7, 3, 2, 1, 3, 3)


def test_its_methods_plan_again_what_it_says_they_planned(bundle):
    """Measured, trained and simulated cells of checkpoint and delta. A measured refusal keeps no device, simulated trials no tape."""
    report = check(bundle, replan_seconds=120.0)
    assert report.is_accepted and report.examined["replanned"] == 5, report.findings
    assert sorted(finding.message for finding in report.findings if finding.rule == "not-replanned") == [
        *["a native method plans nothing"] * 2, "the record names no device that it was planned for",
        *["there is no tape of it in the bundle"] * 2]


def test_nobody_is_given_away(run, bundle):
    """The folder in which it ran, by its whole path, stands in the run's specs and in nothing that leaves."""
    import gzip

    everything = b"".join(gzip.decompress(d) if n.endswith(".gz") else d for n, d in members_of(bundle).items())
    told = str(run.parents[2]).encode()
    assert told not in everything and told in b"".join(p.read_bytes() for p in run.glob("cells/*/spec.json"))


def test_it_goes_to_the_server_and_counts_as_checked(run, tmp_path):
    with served(tmp_path, examine=check) as server:
        client = Server("http://localhost", token=server.tokens["ada"], transport=server.web._transport)
        receipt = client.submit(pack_run(run, key=KEY))
        assert receipt.is_new and receipt.state == "checked", receipt
        assert len(server.get(f"bundles/{receipt.bundle}")["results"]) == 10
        (pulled,) = client.pull(tmp_path / "crowd")
        assert check(pulled.path).is_accepted and pulled.is_marked


def flip(index: int) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        body["search"]["trials"][index]["fits"] ^= True
    return change


def a_third_less(body: dict[str, Any]) -> None:
    """The peak, and all that follows from it."""
    m, predicted = body["measured"], body["predicted"]
    m["peak_bytes"] = int(2 / 3 * m["peak_bytes"])
    m["prediction_error_bytes"] = predicted["peak_bytes"] + m["library_bytes"] - m["peak_bytes"]
    m["is_peak_accounted_for"] = False


FORGERIES: dict[str, tuple[str, str, Callable[[Any], Any], str]] = {  # what -> (experiment, method, change, rule)
    "a loss": ("training", "delta", lambda b: b["training"]["loss"].__setitem__(3, 0.5), "training"),
    "a loss of both": ("training", "delta", lambda b: [b["training"][k].pop() for k in ("loss", "eager_loss")], "training"),
    "equal for longer": ("training", "delta", lambda b: b["training"].update(equal_steps=7), "training"),
    "a first difference": ("training", "delta", lambda b: b["training"].update(first_difference=2), "training"),
    "another state": ("training", "delta", lambda b: b["training"].update(state_equal_at_end=False), "training"),
    "a better accuracy": ("training", "delta", lambda b: b["training"]["accuracy"][-1].__setitem__(1, 0.99), "training"),
    "more steps": ("training", "delta", lambda b: b["training"]["steps"].append(7), "training"),
    "a measured peak of eager": ("training", "delta", lambda b: b.update(eager_peak_is_simulated=False), "simulated-stays-simulated"),
    "a peak of eager that is neither": ("training", "delta", lambda b: b.update(eager_peak_is_simulated=None), "simulated-stays-simulated"),
    "a larger batch": ("largest", "delta", lambda b: b["search"].update(largest=b["search"]["largest"] + 1), "search"),
    "a faster batch": ("largest", "delta", lambda b: b["search"]["fastest"].update(samples_per_second=1e9), "search"),
    "a hole": ("largest", "delta", lambda b: b["search"].update(holes=[1]), "search"),
    "all of the range": ("largest", "eager", lambda b: b["search"].update(hit_upper_end=True), "search"),
    "more memory": ("largest", "delta", lambda b: b["search"].update(memory_bytes=2**40), "search"),
    "a trial that fits": ("largest", "delta", flip(-1), "search"),
    "a trial less": ("largest", "delta", lambda b: b["search"]["trials"].pop() and None, "search"),
    "no trials": ("largest", "delta", lambda b: b["search"].update(trials=[]), "search"),
    "a search that ran": ("largest", "delta", lambda b: b["search"].update(is_simulated=False), "simulated-stays-simulated"),
    "a faster trial": ("largest", "delta", lambda b: b["search"]["trials"][0].update(step_seconds=1e-9), "search"),
    "no search": ("largest", "delta", lambda b: b.update(search={}), "search"),
    "a refusal within the budget": ("refused", "checkpoint", lambda b: b["predicted"]["infeasible"].update(smallest_bytes=5), "outcome"),
    "a refusal without a reason": ("refused", "checkpoint", lambda b: b["predicted"].pop("infeasible") and None, "outcome"),
    "a refusal that went well": ("refused", "checkpoint", lambda b: b.update(outcome="ok", reason=""), "outcome"),
    "a faster simulation": ("simulated", "delta", lambda b: b["predicted"].update(step_seconds=1e-6), "simulated"),
    "a smaller peak": ("memory", "delta", lambda b: b["measured"].update(peak_bytes=b["measured"]["peak_bytes"] - 1), "peak"),
    "a peak a third less": ("memory", "checkpoint", a_third_less, "schedule-peak"),
    "a faster step": ("memory", "delta", lambda b: b["measured"]["ratio"].update(median=0.5), "step-times"),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_forgery_of_it_is_refused_by_its_rule(members, tmp_path, what):
    experiment, method, change, rule = FORGERIES[what]

    def in_place(body: Any) -> None:
        change(body)
    report = check(forge(with_json(members, record_of(members, experiment, method), in_place), tmp_path, KEY))
    assert rule in {f.rule for f in report.errors}, report.findings
    assert "rule-failed" not in {f.rule for f in report.errors}, report.findings
