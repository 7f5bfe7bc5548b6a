"""What a GPU can have measured: each rule of plausibility on records and telemetry written by hand, sound ones and impossible ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hand_made import ENVIRONMENT, MIB, measured_step
from tapes import chain

from vramlab.crowd.keys import comparability_key, device_of
from vramlab.crowd.rules import RULES
from vramlab.liveness import lower_bound_bytes
from vramlab.nvml import GPU_COLUMNS
from vramlab.record import Outcome, RunRecord
from vramlab.runs import load_run
from vramlab.telemetry import COLUMNS, Telemetry

GIB = 2**30
V100 = {"name": "Tesla V100-SXM2-32GB", "memory_bytes": 32 * GIB, "driver": "580.65", "power_limit_watts": 300.0}


def telemetry(seconds: int = 30, **columns: Any) -> Telemetry:
    """A sample a second; a column is a list, or a function of the second."""
    made = {name: [None] * (seconds + 1) for name in COLUMNS}
    made["t_seconds"] = [float(s) for s in range(seconds + 1)]
    made["rss_bytes"] = [float(10**9 + s) for s in range(seconds + 1)]
    for name, value in columns.items():
        made[name] = [float(value(s)) for s in range(seconds + 1)] if callable(value) else value
    header = {"format": 1, "period_seconds": 1.0, "started": "2026-01-02T03:04:05.250+00:00", "gpu": None,
              "missing": dict.fromkeys(GPU_COLUMNS, "none")}
    return Telemetry(header=header, trailer={"rows": seconds + 1, "missed": 0, "achieved_period_seconds": 1.0}, columns=made)


def on_gpu(gpu: dict | None = None, peak_mib: float = 500, **measured: Any) -> RunRecord:
    record = measured_step("delta", peak_mib, budget="60%", environment=ENVIRONMENT | {"gpus": [V100 | (gpu or {})]},
                           config={"target": "cuda:0"}, files={"telemetry.csv.gz": "0" * 64})
    block = record.measured | {"allocated_peak_bytes": int(peak_mib * MIB) + 512, "reserved_peak_bytes": int(peak_mib * MIB) + 2 * MIB}
    return measured_step("delta", peak_mib, budget="60%", environment=record.environment, config={"target": "cuda:0"},
                         files=record.files, measured=block | measured)


def found(rule: str, *records: RunRecord, samples: Telemetry | None = None) -> list[tuple[str, str]]:
    """What one rule says of records."""
    (asked,) = [r for group in RULES.values() for r in group if r.name == rule]
    run = SimpleNamespace(environment_of=lambda record: record.environment, plan={"started": "2026-01-01T00:00:00Z"})
    named = {f"r{i}": r for i, r in enumerate(records)}
    contents = SimpleNamespace(records=named, run=run, telemetry=lambda cell_id: samples or telemetry())
    counted: list[int] = []
    faults = list(asked.ask(SimpleNamespace(contents=contents, count=lambda n=1: counted.append(n))))
    assert counted or not faults, "what is found was looked at"
    return faults


@pytest.mark.parametrize("rule", ["memory-order", "board", "driver-saw", "gpu-name", "power", "telemetry-span", "telemetry-quality",
                                  "comparable", "clock", "time-fits", "constant-samples", "prediction-far", "lower-bound"])
def test_a_sound_record_of_a_gpu_is_plausible(rule):
    samples = telemetry(gpu_memory_used_bytes=lambda s: GIB + s, energy_joules=lambda s: 250.0 * s, power_watts=lambda s: 250 + s % 2)
    assert [f for f in found(rule, on_gpu(), samples=samples) if "in use before" not in f[1]] == []


@pytest.mark.parametrize(("measured", "field"), [
    ({"allocated_peak_bytes": 400 * MIB}, "peak_bytes"), ({"reserved_peak_bytes": 100 * MIB}, "allocated_peak_bytes"),
    ({"reserved_peak_bytes": 40 * GIB}, "reserved_peak_bytes"), ({"persistent_bytes": 501 * MIB}, "persistent_bytes"),
])
def test_memory_is_in_order(measured, field):
    assert [where for where, _ in found("memory-order", on_gpu(**measured))] == [f"r0:measured.{field}"]


def test_the_driver_sees_what_torch_reserved():
    little = telemetry(gpu_memory_used_bytes=lambda s: 100 * MIB + s)
    assert "the driver saw" in found("driver-saw", on_gpu(), samples=little)[0][1]
    much = telemetry(gpu_memory_used_bytes=lambda s: 33 * GIB)
    assert "on a board of" in found("board", on_gpu(), samples=much)[0][1]


@pytest.mark.parametrize(("peak", "is_told"), [(lambda bound: bound, False), (lambda bound: bound - 2 * MIB, True)])
def test_a_prepared_tape_has_a_bound_of_its_own(peak, is_told):
    """What its record says of eager's, which is not in the bundle, lets nothing pass: here one byte."""
    tape = chain(workspace_bytes=8 * MIB)
    record = on_gpu(peak_mib=peak(lower_bound_bytes(tape)) / MIB, library_bytes=0)
    record = replace(record, files={"tape.json.gz": "0" * 64}, predicted={**record.predicted, "inplace_gradients": {"ops": 1}},
                     provenance={**record.provenance, "lower_bound_bytes": 1})
    contents = SimpleNamespace(records={"r0": record}, tape=lambda sha256: tape)
    (asked,) = [r for group in RULES.values() for r in group if r.name == "lower-bound"]
    faults = list(asked.ask(SimpleNamespace(contents=contents, count=lambda n=1: None, once=lambda key, make: make())))
    assert [where for where, _ in faults] == ["r0:measured.peak_bytes"] * is_told


@pytest.mark.parametrize(("gpu", "field"), [
    ({"memory_bytes": 80 * GIB}, "memory_bytes"), ({"memory_bytes": 16 * GIB}, "memory_bytes"), ({"driver": "525.10"}, "driver"),
    ({"name": "NVIDIA H200"}, "memory_bytes")])
def test_a_board_has_the_memory_of_its_name_and_a_driver_that_runs_its_cuda(gpu, field):
    assert [where for where, _ in found("gpu-name", on_gpu(gpu))] == [f"r0:environment.gpus.0.{field}"]


@pytest.mark.parametrize("gpu", [{"name": "Board of 2031"}, {"name": None}, {"memory_bytes": None}, {"driver": None}, {"driver": "x"}])
def test_a_board_that_nobody_knows_is_no_fault(gpu):
    assert found("gpu-name", on_gpu(gpu)) == []


def test_energy_is_within_the_power_limit():
    assert found("power", on_gpu(), samples=telemetry(energy_joules=lambda s: 1000.0 * s))
    assert found("power", on_gpu(), samples=telemetry(energy_joules=lambda s: -1.0 * s))
    assert not found("power", on_gpu(), samples=telemetry(energy_joules=lambda s: 299.0 * s))


def test_telemetry_spans_the_cell_and_comes_as_often_as_asked():
    assert found("telemetry-span", on_gpu(), samples=telemetry(5))  # of 30 seconds
    assert found("telemetry-span", on_gpu(), samples=telemetry(60))


@pytest.mark.parametrize(("began", "is_told"), [
    ("2026-01-02T03:04:01.000+00:00", False), ("2026-01-02T04:04:06.000+01:00", False), ("2026-01-02T03:04:41.000+00:00", True),
    ("2026-01-02T03:03:50.000+00:00", True), ("2019-01-02T03:04:05.000+00:00", True), ("", True), ("2026-01-02T03:04:05", True)])
def test_telemetry_begins_while_its_cell_runs(began, is_told):
    samples = telemetry()
    dated = replace(samples, header={**samples.header, "started": began})
    assert bool(found("telemetry-span", on_gpu(), samples=dated)) is is_told
    constant = telemetry(power_watts=lambda s: 70)
    assert any("never moves" in message for _, message in found("telemetry-quality", on_gpu(), samples=constant))


def test_steps_fit_the_cell_and_differ():
    record = on_gpu(step_seconds=[9.0, 9.1, 9.2, 9.3], baseline_step_seconds=[1.0] * 4)
    assert [where for where, _ in found("time-fits", record)] == ["r0:measured.step_seconds"]
    assert [where for where, _ in found("constant-samples", record)] == ["r0:measured.baseline_step_seconds"]


def test_a_larger_batch_does_not_hold_less():
    def at(batch: int, peak: float) -> RunRecord:
        return measured_step("eager", peak, config={"batch_size": batch})
    assert found("larger-batch", at(8, 500), at(16, 400)) and not found("larger-batch", at(8, 500), at(16, 490), at(32, 900))


def test_methods_are_compared_on_one_machine():
    other = ENVIRONMENT | {"system": ENVIRONMENT["system"] | {"host_hash": "9" * 16}}
    assert found("same-machine", measured_step("eager", 900), measured_step("delta", 500, environment=other))
    assert not found("same-machine", measured_step("eager", 900), measured_step("delta", 500))


def between(started: int, ended: int, method: str = "delta", host: str = "a" * 16, target: str = "cpu") -> RunRecord:
    """A cell that ran from second to second of a minute."""
    record = measured_step(method, 500, config={"target": target},
                           environment=ENVIRONMENT | {"system": ENVIRONMENT["system"] | {"host_hash": host}})
    at = {"started": f"2026-01-02T03:04:{started:02}Z", "ended": f"2026-01-02T03:04:{ended:02}Z"}
    return replace(record, provenance=record.provenance | at)


@pytest.mark.parametrize(("cells", "told"), [
    ([(5, 20), (20, 30), (30, 31)], []),
    ([(5, 20), (19, 30)], []),  # a clock that was put back by a second
    ([(5, 20), (15, 30)], ["r1"]), ([(15, 30), (5, 20)], ["r0"]),
    ([(5, 40), (10, 15), (30, 35), (40, 50)], ["r1", "r2"]),  # within the first
    ([(5, 20), (5, 20)], ["r1"]), ([(5, 5), (5, 20)], []),
])
def test_cells_that_ran_on_one_machine_took_turns(cells, told):
    assert [where.partition(":")[0] for where, _ in found("turns", *(between(*span) for span in cells))] == told


@pytest.mark.parametrize("other", [{"host": "b" * 16}, {"target": "sim:v100-32gb"}])
def test_other_machines_and_simulated_cells_wait_for_nobody(other):
    assert not found("turns", between(5, 30), between(10, 20, **other)) and found("turns", between(5, 30), between(10, 20))


@pytest.mark.parametrize(("host", "started", "is_told"), [
    ("a" * 16, "2026-01-02T03:04:09Z", False), ("a" * 16, "2026-01-02T03:04:11Z", True),  # of a cell that began at 5 seconds
    ("b" * 16, "2026-01-02T20:00:00Z", False), ("b" * 16, "2026-01-04T20:00:00Z", True),  # by the clock of another machine
])
def test_a_run_starts_before_its_cells(host, started, is_told):
    (asked,) = [r for group in RULES.values() for r in group if r.name == "clock"]
    run = SimpleNamespace(environment_of=lambda record: record.environment,
                          plan={"started": started, "environment": ENVIRONMENT | {"system": {"host_hash": "a" * 16}}})
    contents = SimpleNamespace(records={"r0": between(5, 35, host=host)}, run=run)
    faults = list(asked.ask(SimpleNamespace(contents=contents, count=lambda n=1: None)))
    assert [where for where, _ in faults] == ["r0:provenance.started"] * is_told


def test_the_run_beside_the_documents_keeps_the_rules_of_one_machine():
    """A run that ran. With one of its dates, processors or claims changed it does not."""
    run = load_run(Path(__file__).parents[1] / "docs" / "example-run")
    records = {f"cells/{record.cell_id}/record.json": record for record in run.records}

    def faults(records: dict[str, RunRecord]) -> dict[str, int]:
        e = SimpleNamespace(contents=SimpleNamespace(records=records, run=run), count=lambda n=1: None)
        return {r.name: len(list(r.ask(e))) for group in RULES.values() for r in group
                if r.name in ("clock", "turns", "one-processor", "own-claims")}

    assert faults(records) == {"own-claims": 0, "clock": 0, "turns": 0, "one-processor": 0}
    name, last = max(((n, r) for n, r in records.items() if r.config["target"] == "cpu"), key=lambda pair: pair[1].provenance["ended"])
    early = replace(last, provenance=last.provenance | {"started": run.plan["started"]})
    assert faults(records | {name: early})["turns"] == 10, "it ran while ten others did"
    other = replace(last, environment=last.environment | {"cpu": last.environment["cpu"] | {"model": "another"}})
    assert faults(records | {name: other})["one-processor"] == 1


def test_what_may_be_compared_has_one_key():
    """Method, budget and seed are compared or repeated; model, batch, training and device are not."""
    one = measured_step("delta", 500, budget="60%")
    same = [measured_step("eager", 900), measured_step("delta", 400, budget="40%"),
            measured_step("delta", 500, config={"training": one.config["training"] | {"seed": 9}})]
    unlike = [measured_step("delta", 500, config={"batch_size": 8}), measured_step("delta", 500, config={"model": "vgg16"}), on_gpu(),
              measured_step("delta", 500, config={"training": one.config["training"] | {"autocast": "bfloat16"}}),
              measured_step("delta", 500, config={"target": "sim:v100-32gb"})]
    key = comparability_key(one, one.environment)
    assert [comparability_key(r, r.environment) == key for r in same] == [True] * 3
    assert [comparability_key(r, r.environment) == key for r in unlike] == [False] * 5
    assert device_of(on_gpu(), on_gpu().environment) == V100["name"] and device_of(one, {}) is None
    assert device_of(on_gpu(), ENVIRONMENT) is None, "a record of a board names it"


def test_out_of_memory_has_no_step_times():
    record = on_gpu()
    oom = measured_step("delta", 500, outcome=Outcome.OOM, config={"target": "cuda:0"}, measured=record.measured)
    assert any("no step times" in message for _, message in found("outcome", oom))
