"""Cells from spec to record, in real processes on a small network, and what becomes of those that go wrong."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from vramlab import measure
from vramlab.cell import _judge_peak, _tell_apart, run_cell
from vramlab.collection import Library, built_in_collection
from vramlab.device import PERTURBATIONS, load_profile
from vramlab.record import Outcome, RunRecord, Truth, hash_config
from vramlab.report.timelines import simulated
from vramlab.schedule import Schedule
from vramlab.statistics import drift, paired_ratio, why_no_interval
from vramlab.tape import Tape
from vramlab.workflow import Host, single_cell

SMALL = {
    "model": {"name": "resnet8-digits", "image_size": 16, "width": 8},
    "batch_sizes": [16],
    "targets": ["cpu"],
    "measure": {"warmup": 1, "steps": 2, "timeout_seconds": 120},
}


def make_spec(run_dir: Path, roots: list[Path] | None = None, **settings) -> dict:
    library = Library(roots or [built_in_collection()])
    (cell,) = single_cell(library, {**SMALL, **settings}, (), Host()).cells
    return {"config": cell.config, "workflow": {"name": "test"}, "collections": [str(r) for r in library.roots], "run_dir": str(run_dir)}


def run(tmp_path: Path, **settings) -> RunRecord:
    """The record, after a trip through JSON. As in a run, eager is measured once for all cells that are compared with it."""
    folder = tmp_path / "cell"
    folder.mkdir(exist_ok=True)
    record = run_cell(make_spec(tmp_path.parent, **settings), folder)
    record.save(folder / "record.json")
    return RunRecord.load(folder / "record.json")


def test_a_measured_cell_is_exact_within_its_budget_and_as_predicted(tmp_path):
    record = run(tmp_path, methods=["delta"], budgets=["80%"])
    assert (record.outcome, record.truth) == (Outcome.OK, Truth.EXACT), record.message
    assert record.truth_detail["steps"] == 3
    assert record.budget_bytes == int(0.8 * record.eager_peak_bytes) and record.eager_peak_is_simulated is False
    assert 0 < record.measured["peak_bytes"] <= record.budget_bytes and record.measured["over_budget_bytes"] == 0
    assert abs(record.measured["prediction_error_bytes"]) <= max(0.005 * record.measured["peak_bytes"], 2**20)
    assert len(record.measured["step_seconds"]) == len(record.measured["baseline_step_seconds"]) == 2
    assert record.missing["measured.nvml_peak_bytes"].startswith("no NVIDIA GPU")
    ratio = record.measured["ratio"]
    assert (ratio["low"], ratio["high"], ratio["n"], record.measured["is_distinguishable"]) == (None, None, 2, None) and ratio["median"] > 0
    assert record.missing["measured.ratio.low"] == "too few pairs: 2, and an interval of 95 % needs 6"
    at_peak = record.predicted["at_peak"]
    assert sum(at_peak["by_role"].values()) + at_peak["inside_op_bytes"] == record.predicted["peak_bytes"]
    assert record.measured["is_peak_accounted_for"] is True and record.predicted["peak_phase"] in ("forward", "backward")
    assert record.cell_id == hash_config(record.config)
    for name, digest in record.files.items():
        assert hashlib.sha256((tmp_path / "cell" / name).read_bytes()).hexdigest() == digest
    tape, schedule = Tape.load(tmp_path / "cell" / "tape.json.gz"), Schedule.load(tmp_path / "cell" / "schedule.json.gz")
    assert schedule.tape_digest == tape.digest == record.provenance["tape_digest"]
    assert schedule.digest == record.provenance["schedule_digest"]
    assert gzip.decompress((tmp_path / "cell" / "telemetry.csv.gz").read_bytes()).startswith(b"# {")


def test_an_unreachable_budget_is_an_outcome_with_the_smallest_that_can_be_reached(tmp_path):
    record = run(tmp_path, methods=["delta"], budgets=["2%"])
    assert record.outcome is Outcome.PLAN_INFEASIBLE and record.truth is Truth.NOT_RUN
    smallest = record.predicted["infeasible"]["smallest_bytes"]
    assert smallest > record.budget_bytes and f"{smallest:,} bytes (" in record.message
    assert f"within {record.budget_bytes:,} bytes (" in record.message and "iB, 2.0 % of eager's peak); the smallest" in record.message
    assert record.measured["peak_bytes"] is None and "smallest" in record.missing["measured.peak_bytes"]


def test_what_libraries_keep_is_in_the_budget_and_in_no_plan(tmp_path):
    """As cuBLAS workspaces are on CUDA; on the CPU the meter finds none, so the number is made up here."""
    from vramlab.measure import make_plan

    spec, kept = make_spec(tmp_path, methods=["delta"], budgets=["80%"]), 100_000
    whole, less = (make_plan(spec, str(tmp_path), 1_600_000, library_bytes) for library_bytes in (0, kept))
    assert whole["budget_bytes"] == less["budget_bytes"] == 1_280_000
    assert whole["predicted"]["peak_bytes"] > 1_280_000 - kept >= less["predicted"]["peak_bytes"], "negative control first"
    tight = make_spec(tmp_path, methods=["delta"], budgets=["2%"])
    refused = [make_plan(tight, str(tmp_path), 1_600_000, library_bytes)["infeasible"] for library_bytes in (0, kept)]
    assert refused[1]["smallest_bytes"] - refused[0]["smallest_bytes"] == kept
    for found in refused:  # what is told is what was asked and what the record says
        assert "within 32,000 bytes (31.25 KiB, 2.0 % of eager's peak); the smallest" in found["message"]
        assert f"is {found['smallest_bytes']:,} bytes (" in found["message"]

    measured = {"peak_bytes": 1100, "cold_peak_bytes": 1100, "library_bytes": 100}
    predicted = {"peak_bytes": 1000, "at_peak": {"by_role": {"activation": 900}, "inside_op_bytes": 100}}
    draft = SimpleNamespace(measured=measured, facts={"budget_bytes": 1100, "predicted": predicted})
    _judge_peak(draft)
    assert (measured["prediction_error_bytes"], measured["over_budget_bytes"], measured["is_peak_accounted_for"]) == (0, 0, True)


@pytest.mark.parametrize("pairs", [(6, 6), (6, 5), (1, 6)])
def test_too_few_pairs_tell_nothing_apart_and_the_record_says_why(pairs):
    """Three times as slow without any noise: it is told from six pairs on, of the ratio and of the drift alike."""
    draft = SimpleNamespace(measured={}, missing={})
    _tell_apart(draft, paired_ratio([3.0] * pairs[0], [1.0] * pairs[0]), drift([1.0] * pairs[1], [1.0] * pairs[1]))
    few = [(name, n) for name, n in zip(("ratio", "drift"), pairs) if n < 6]
    assert draft.measured == {"is_distinguishable": None if few else True}
    reasons = {f"measured.{name}.{end}": why_no_interval(n) for name, n in few for end in ("low", "high")}
    assert {key: why for key, why in draft.missing.items() if key != "measured.is_distinguishable"} == reasons
    assert ("measured.is_distinguishable" in draft.missing) is bool(few)


@pytest.mark.slow
def test_a_cell_that_copies_can_be_simulated_again_from_its_files(tmp_path):
    """Its record tells the device, the link included; without that nobody could say when a copy ends."""
    record = run(tmp_path, methods=["vdnn"], budgets=["80%"])
    assert (record.outcome, record.truth) == (Outcome.OK, Truth.EXACT), record.message
    checked, trace = simulated(record, tmp_path / "cell")
    assert record.predicted["offloads"] == trace.metrics.offloads > 0 and checked.peak_bytes == record.predicted["peak_bytes"]
    assert trace.metrics.step_seconds == record.predicted["step_seconds"]
    told = {key: value for key, value in record.predicted.items() if key != "device"}
    assert "link" in simulated(replace(record, predicted=told), tmp_path / "cell").reason


def test_a_simulated_cell_measures_nothing_and_says_so(tmp_path):
    record = run(tmp_path, methods=["checkpoint"], budgets=["80%"], targets=["sim:v100-32gb"])
    assert record.outcome is Outcome.OK and record.truth is Truth.NOT_RUN
    assert record.predicted["profile"] == "v100-32gb" and record.eager_peak_is_simulated is True
    assert record.missing["measured"] == "a simulated target: nothing runs there"
    assert 0 <= record.predicted["swap_vs_recompute"]["share"] <= 1


def test_a_simulated_step_is_held_against_eagers_over_the_whole_batch(tmp_path):
    """moDNN's passes lengthen its own first runs; eager's step beside it is that of eager's own cell."""
    found = {}
    for method, budgets in (("eager", {}), ("modnn", {"budgets": ["30%"]})):
        folder = tmp_path / method
        folder.mkdir()
        found[method] = run(folder, methods=[method], targets=["sim:k40c"], **budgets).predicted
    eager, modnn = found["eager"], found["modnn"]
    assert eager["eager_step_seconds"] == pytest.approx(eager["step_seconds"], rel=1e-12)
    assert modnn["eager_step_seconds"] == pytest.approx(eager["step_seconds"], rel=1e-12)
    assert len(modnn["micro_batches"]) > 1 and modnn["compute_seconds"] > 1.5 * eager["step_seconds"]


def test_a_native_method_is_measured_and_nothing_is_predicted_of_it(tmp_path):
    record = run(tmp_path, methods=["torch-checkpoint"], measure={**SMALL["measure"], "time": False})
    assert (record.outcome, record.truth) == (Outcome.OK, Truth.EXACT), record.message
    assert record.predicted == {} and "has no schedule" in record.missing["predicted"]
    assert record.measured["prediction_error_bytes"] is None and "has no schedule" in record.missing["measured.prediction_error_bytes"]
    assert 0 < record.measured["peak_bytes"] < record.eager_peak_bytes and record.eager_peak_is_simulated is False
    assert not (tmp_path / "cell" / "schedule.json.gz").exists()


@pytest.mark.parametrize("kind", ["step", "max_batch"])
def test_a_native_method_cannot_be_simulated(tmp_path, kind):
    search = {"search": {"low": 1, "high": 2}} if kind == "max_batch" else {}
    record = run(tmp_path, methods=["torch-checkpoint"], targets=["sim:v100-32gb"], experiments=[{"name": "e", "kind": kind, **search}])
    assert record.outcome is Outcome.UNSUPPORTED and "nothing to simulate" in record.message
    assert record.predicted == {}


def test_eager_is_predicted_by_its_own_replay(tmp_path):
    record = run(tmp_path, methods=["eager"], measure={**SMALL["measure"], "time": False})
    assert "predicted" not in record.missing
    assert abs(record.measured["prediction_error_bytes"]) <= max(0.005 * record.measured["peak_bytes"], 2**20)


def test_a_method_that_asks_for_it_gets_split_convolutions(tmp_path):
    """Measured: exact, as predicted, and the record says what was split."""
    record = run(tmp_path, methods=["fujitsu-reuse"], measure={**SMALL["measure"], "time": False})
    assert (record.outcome, record.truth) == (Outcome.OK, Truth.EXACT), record.message
    split = record.predicted["split_convolutions"]
    tape = Tape.load(tmp_path / "cell" / "tape.json.gz")
    halves = [op for op in tape.ops if op.target == "aten.convolution_backward.default" and "form" in op.args[1]]
    assert split["is_checked"] and split["split_ops"] == len(halves) > 0
    assert abs(record.measured["prediction_error_bytes"]) <= max(0.005 * record.measured["peak_bytes"], 2**20)


def test_a_simulated_cell_splits_all_and_says_that_no_bit_was_checked(tmp_path):
    record = run(tmp_path, methods=["fujitsu-reuse"], targets=["sim:titan-x-pascal"])
    split = record.predicted["split_convolutions"]
    assert record.outcome is Outcome.OK and not split["is_checked"] and split["split_ops"] > 0 and split["unsplit_ops"] == []


def test_a_cell_over_micro_batches_is_held_against_eager_over_the_same_ones(tmp_path):
    """Fewer bytes than the whole batch needs at any moment; BatchNorm makes it another computation, and the record says how far off."""
    record = run(tmp_path, methods=["modnn"], budgets=["30%"], measure={**SMALL["measure"], "time": False})
    assert (record.outcome, record.truth) == (Outcome.OK, Truth.SEMANTICS_CHANGED), record.message
    sizes = record.predicted["micro_batches"]
    assert len(sizes) > 1 and sum(sizes) == 16 and record.truth_detail["micro_batches"] == sizes
    assert record.truth_detail["differing"] == [] and record.truth_detail["distance_to_whole_batch"]["gradient"] > 0.001
    assert 0 < record.measured["peak_bytes"] <= record.budget_bytes
    assert abs(record.measured["prediction_error_bytes"]) <= max(0.005 * record.measured["peak_bytes"], 2**20)
    assert Schedule.load(tmp_path / "cell" / "schedule.json.gz").micro_batches == tuple(sizes)


COUPLED = """
from torch import nn


class Net(nn.Module):
    def __init__(self, couples):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 3), nn.Flatten(), nn.LazyLinear(10))
        self.couples = couples
        self.body(__import__("torch").zeros(1, 3, 16, 16))

    def forward(self, x):
        y = self.body(x)
        return y - y.mean(0) if self.couples else y


def build(image_size, classes, couples):
    return Net(couples)
"""


@pytest.mark.parametrize("couples", [True, False])
def test_a_step_whose_samples_know_of_each_other_is_not_run_over_micro_batches(tmp_path, couples):
    """Eager over the same micro-batches would agree bit for bit, and be another step than over the whole batch."""
    models = tmp_path / "models"
    models.mkdir()
    (models / "net.py").write_text(COUPLED)
    (models / "net.yaml").write_text("""
name: net
family: net
title: A net
source: "file:net.py:build"
input: {kind: image, channels: 3, image_size: 16}
options:
  image_size: {default: 16, type: int, help: pixels}
  classes: {default: 10, type: int, help: classes}
  couples: {default: true, type: bool, help: outputs less their mean over the batch}
loss: cross_entropy
""")
    model = {"name": "net", "couples": couples}
    record = run(tmp_path, roots=[built_in_collection(), tmp_path], model=model, methods=["modnn"], budgets=["40%"],
                 measure={**SMALL["measure"], "time": False})
    if couples:
        assert record.outcome is Outcome.UNSUPPORTED and "no mean over the batch" in record.message
    else:
        assert (record.outcome, record.truth) == (Outcome.OK, Truth.EXACT), record.message
        assert len(record.predicted["micro_batches"]) > 1 and record.truth_detail["distance_to_whole_batch"]["gradient"] < 1e-5


def test_the_same_budget_without_sub_batches_is_refused(tmp_path):
    record = run(tmp_path, methods=[{"name": "modnn", "options": {"sub_batches": False}}], budgets=["1%"], targets=["sim:v100-32gb"])
    assert record.outcome is Outcome.PLAN_INFEASIBLE and "micro_batches" not in record.predicted


def test_several_simulated_devices_share_the_batch(tmp_path):
    """Within the same budget; the exchange keeps them below the ideal, and one device is exactly one."""
    found = {}
    for devices in (1, 2, 4):
        folder = tmp_path / str(devices)
        folder.mkdir()
        found[devices] = run(folder, methods=["modnn"], budgets=["90%"], targets=["sim:v100-32gb"], batch_sizes=[64], devices=[devices])
    assert all(record.outcome is Outcome.OK for record in found.values())
    assert found[1].predicted["speedup_over_one_device"] == 1.0
    for devices, record in found.items():
        predicted = record.predicted
        assert predicted["devices"] == predicted["parallel"]["devices"] == devices and predicted["parallel"]["algorithm"] == "ring"
        assert predicted["one_device_step_seconds"] == found[1].predicted["parallel"]["step_seconds"]
        assert predicted["speedup_over_one_device"] == predicted["one_device_step_seconds"] / predicted["parallel"]["step_seconds"]
        assert Tape.load(tmp_path / str(devices) / "cell" / "tape.json.gz").batch_size == 64 // devices
        assert predicted["speedup_over_one_device"] <= devices


@pytest.mark.slow
def test_a_small_gate_batch_takes_as_many_passes(tmp_path):
    record = run(tmp_path, methods=["modnn"], budgets=["30%"],
                 measure={**SMALL["measure"], "time": False, "peak": False, "gate_batch_size": 16, "gate_steps": 1}, batch_sizes=[32])
    assert record.truth is Truth.SEMANTICS_CHANGED and sum(record.truth_detail["micro_batches"]) == 16
    assert len(record.truth_detail["micro_batches"]) == len(record.predicted["micro_batches"])


def test_training_under_a_plan_equals_eager_at_every_step(tmp_path):
    record = run(
        tmp_path,
        methods=["delta"],
        budgets=["70%"],
        data="digits",
        training={"steps": 6, "eval_every": 3},
        experiments=[{"name": "t", "kind": "train"}],
    )
    assert (record.outcome, record.truth) == (Outcome.OK, Truth.EXACT), record.message
    assert record.training["loss"] == record.training["eager_loss"] and len(record.training["loss"]) == 6
    assert [step for step, _ in record.training["accuracy"]] == [3, 6]


def test_a_simulated_cell_on_devices_that_are_20_percent_off(tmp_path):
    """Recomputing alone does not see the link; with more FLOP/s no step is slower."""
    record = run(tmp_path, methods=["checkpoint"], budgets=["80%"], targets=["sim:k40c"], measure={**SMALL["measure"], "sensitivity": True})
    found, own = record.predicted["sensitivity"], record.predicted
    assert set(found) == set(PERTURBATIONS)
    assert found["link -20 %"]["step_seconds"] == found["link +20 %"]["step_seconds"] == own["step_seconds"]
    assert found["FLOP/s +20 %"]["step_seconds"] <= own["step_seconds"] <= found["FLOP/s -20 %"]["step_seconds"]
    assert 0 < own["average_state_bytes"] < own["average_bytes"] <= own["peak_bytes"]
    plain = run(tmp_path, methods=["checkpoint"], budgets=["80%"], targets=["sim:k40c"])
    assert "sensitivity" not in plain.predicted and plain.cell_id != record.cell_id


def test_the_largest_simulated_batch_is_at_the_edge(tmp_path):
    record = run(
        tmp_path,
        methods=["eager"],
        targets=["sim:k40c"],
        experiments=[{"name": "b", "kind": "max_batch", "search": {"low": 1024, "high": 2**20}}],
    )
    assert record.outcome is Outcome.OK
    trials = {t["value"]: t for t in record.search["trials"]}
    largest = record.search["largest"]
    assert record.search["over"] == "batch" and record.search["largest_within_slowdown"] == largest  # eager never slows down
    live = record.search["at_peak"]
    assert sum(live["by_role"].values()) + live["inside_op_bytes"] == trials[largest]["peak_bytes"]
    assert trials[largest]["fits"] and not trials[largest + 1]["fits"]
    assert trials[largest]["peak_bytes"] <= load_profile("k40c").memory_bytes < trials[largest + 1]["peak_bytes"]


@pytest.mark.slow
def test_adam_leaves_less_room_than_sgd_and_the_record_says_why(tmp_path):
    found = {}
    for optimizer in ("sgd", "adam"):
        folder = tmp_path / optimizer
        folder.mkdir()
        found[optimizer] = run(folder, methods=["eager"], budgets=["20MiB"], targets=["sim:k40c"], training={"optimizer": optimizer},
                               experiments=[{"name": "b", "kind": "max_batch"}]).search
    assert 0 < found["adam"]["largest"] < found["sgd"]["largest"]
    held = {optimizer: search["at_peak"]["by_role"] for optimizer, search in found.items()}
    assert held["adam"]["optimizer_state"] >= 2 * held["sgd"]["optimizer_state"] > 0
    assert held["adam"]["parameter"] == held["sgd"]["parameter"]


def test_a_tiled_step_that_is_not_cut_says_so(tmp_path):
    """Depth 56 is tiled and 26 is not. The chosen budget lies below what a whole batch takes, and above what half of it does."""
    def message(depth: int, method: str) -> tuple[Outcome, str, bool]:
        folder = tmp_path / f"{depth}{method}"
        folder.mkdir()
        record = run(folder, model={"name": "resnet1202", "width": 4, "depth": depth}, batch_sizes=[8], methods=[method],
                     budgets=["30%"], targets=["sim:k40c"])
        return record.outcome, record.message, "micro_batches" in record.predicted

    whole = "the batch stays whole: this deep network's tape is tiled"
    _, said, is_cut = message(56, "modnn")
    assert whole in said and not is_cut
    assert measure._why_whole(Library([built_in_collection()]).method("delta").build(), None) == ""  # never cuts
    outcome, said, is_cut = message(26, "modnn")
    assert (outcome, said, is_cut) == (Outcome.OK, "", True)


@pytest.mark.slow
def test_the_deepest_simulated_network_is_at_the_edge(tmp_path):
    """Depths are those of the card; tapes are tiled from three shallow captures. Where plans recompute, deeper networks fit."""
    largest = {}
    for method in ("eager", "checkpoint"):
        folder = tmp_path / method
        folder.mkdir()
        record = run(folder, model={"name": "resnet1202", "width": 4}, methods=[method], targets=["sim:k40c"], budgets=["12MiB"],
                     experiments=[{"name": "d", "kind": "max_batch", "search": {"over": "depth", "low": 10, "high": 70}}])
        assert record.outcome is Outcome.OK, record.message
        search, trials = record.search, {t["value"]: t for t in record.search["trials"]}
        largest[method] = search["largest"]
        assert (search["low"], search["high"], search["step"], record.config["batch_size"]) == (14, 68, 6, 16)
        assert all((depth - 2) % 6 == 0 for depth in trials)
        assert search["hit_upper_end"] or not trials[search["largest"] + 6]["fits"]
        assert trials[search["largest"]]["peak_bytes"] <= search["memory_bytes"] == 12 * 2**20
    assert largest["checkpoint"] > largest["eager"] > 14


@pytest.mark.slow
def test_the_largest_simulated_image_is_at_the_edge(tmp_path):
    record = run(tmp_path, methods=["eager"], targets=["sim:k40c"], budgets=["12MiB"],
                 experiments=[{"name": "i", "kind": "max_batch", "search": {"over": "image_size", "low": 9, "high": 64, "step": 4}}])
    search, trials = record.search, {t["value"]: t for t in record.search["trials"]}
    assert (search["over"], search["low"], search["high"]) == ("image_size", 12, 64) and "image_size" not in record.config["model_options"]
    assert trials[search["largest"]]["peak_bytes"] <= 12 * 2**20 < trials[search["largest"] + 4]["peak_bytes"]


BROKEN = """
from dataclasses import replace
from vramlab.liveness import replay_schedule
from vramlab.schedule import Compute, Recompute


class Broken:
    def plan(self, tape, device, budget):
        schedule = replay_schedule(tape, "broken")
        {damage}


def build():
    return Broken()
"""
CARD = """
uid: 0123456789abcdef
version: 1
kind: planner
title: A broken method
decides: Nothing good.
paper: null
takes_budget: {takes_budget}
fidelity: none
"""


@pytest.mark.parametrize(
    "damage, takes_budget, budgets, word",
    [
        ("return replace(schedule, instructions=schedule.instructions[:-1])", "false", None, "op-not-computed"),
        ("return schedule", "true", ["50%"], "device-budget"),
        ("raise RuntimeError('lost')", "false", None, "lost"),
        ("return 'a plan'", "false", None, "method 'broken' returned str, not a Schedule"),
    ],
)
def test_a_method_that_breaks_the_rules_is_recorded_as_wrong(tmp_path, damage, takes_budget, budgets, word):
    folder = tmp_path / "mine" / "methods" / "broken"
    folder.mkdir(parents=True)
    (folder / "method.py").write_text(BROKEN.format(damage=damage))
    (folder / "card.yaml").write_text(CARD.format(takes_budget=takes_budget))
    settings = {"methods": ["broken"], "roots": [built_in_collection(), tmp_path / "mine"]} | ({"budgets": budgets} if budgets else {})
    record = run(tmp_path, **settings)
    assert record.outcome is (Outcome.CRASHED if "lost" in word or "str" in word else Outcome.WRONG) and word in record.message
    assert record.truth is Truth.NOT_RUN and record.measured["peak_bytes"] is None


def test_a_schedule_changed_after_planning_is_found(tmp_path):
    """Negative control of the chain: the peak's process takes the schedule from disk and proves it again."""
    folder = tmp_path / "cell"
    folder.mkdir()
    spec = make_spec(tmp_path, methods=["replay"])
    from vramlab.isolate import Call, run_isolated

    assert run_isolated(Call(function="vramlab.measure.make_plan", args=(spec, str(folder), None))).outcome is Outcome.OK
    path = folder / "schedule.json.gz"
    body = json.loads(gzip.decompress(path.read_bytes()))
    body["instructions"] = [i for i in body["instructions"] if i[0] != "free"][:-1]
    path.write_bytes(gzip.compress(json.dumps(body).encode()))
    result = run_isolated(Call(function="vramlab.measure.measure_peak_of", args=(spec, str(folder))))
    assert result.outcome is Outcome.WRONG and result.reason == "illegal_schedule"
