"""A run in seconds that keeps every rule of the checker: the step and its times are made up, everything that follows from them is derived.

    run = genuine_run(folder, seed=3)         a run's folder: two measured cells, two simulated ones, on a machine that `seed` names;
                                              one more of each for every further budget
    bundle = genuine_bundle(to, seed=3)       the same as a signed bundle below `to`; the bundle's folder

No torch, no capture: what a test of servers and pages needs many of. `tests/real_run.py` has one that really ran.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from hand_made import ENVIRONMENT, make_config, write_telemetry
from tapes import StepBuilder

from vramlab.check import check_schedule
from vramlab.collection import Library
from vramlab.crowd.bundle import pack_run
from vramlab.crowd.signing import SigningKey
from vramlab.device import DeviceProfile, load_profile
from vramlab.layers import basic_layers
from vramlab.liveness import lower_bound_bytes, replay_schedule
from vramlab.planner import UNLIMITED, Budget, parse_percent
from vramlab.predicted import least_step_seconds, predicted_of, swap_against_recompute
from vramlab.record import Outcome, RunRecord, Truth, hash_config, write_atomically
from vramlab.roofline import roofline_costs
from vramlab.run_folder import baseline_id
from vramlab.statistics import distinguishable, drift, paired_ratio
from vramlab.tape import Role, Tape
from vramlab.telemetry import read_telemetry

ROOT = Path(__file__).resolve().parents[1]
BATCH_SIZE, PAIRS, BOARD = 16, 10, "v100-32gb"
STARTED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
WORKFLOW = {"name": "genuine", "title": "A run whose numbers agree", "label": "quick", "path": "workflows/genuine.yaml", "sha256": "c" * 64}
CLAIMS = [{"id": "delta-mem-save", "experiment": "memory", "method": "checkpoint", "rule": "memory_saved_percent", "tolerance": 0.1}]


def genuine_run(folder: Path, *, seed: int = 0, machine: str | None = None, layers: int = 6, budgets: tuple[str, ...] = ("80%",),
                planned_by: str = "") -> Path:
    """Write a run's folder and return it. Other seeds have other step times and, unless `machine` is given, another machine.

    `planned_by`: a method whose schedules checkpoint's cells have, checkpoint's source being that of this repository; checkpoint is honest.
    """
    made = _Made(folder, seed, machine or f"{seed:016x}", layers, planned_by)
    records = [made.measured("eager", None), *(made.measured("checkpoint", budget) for budget in budgets),
               made.simulated("eager", None), *(made.simulated("checkpoint", budget) for budget in budgets)]
    cells = [{"cell_id": r.cell_id, "config": dict(r.config), "label": r.config["method"], "title": r.config["method"]} for r in records]
    plan = {"schema": 1, "workflow": WORKFLOW | {"description": "", "claims": CLAIMS, "untestable": [], "expected": {"minutes": 1}},
            "environment": made.environment, "overrides": [], "started": "2026-01-02T03:04:00Z", "run_id": f"{seed:010x}", "cells": cells,
            "left_out": [], "auto": "cpu", "platform": "cpu"}
    write_atomically(folder / "run.json", json.dumps(plan, sort_keys=True))
    return folder


def genuine_bundle(to: Path, *, seed: int = 0, machine: str | None = None, key: SigningKey | None = None,
                   supersedes: str | None = None, **more: Any) -> Path:
    """Pack a genuine run, write its bundle below `to`, and return the bundle's folder."""
    with tempfile.TemporaryDirectory() as room:
        packed = pack_run(genuine_run(Path(room) / "run", seed=seed, machine=machine, **more), key=key, supersedes=supersedes)
    packed.write(to)
    return packed.place(to)


@cache
def step(layers: int) -> Tape:
    """A training step of elementwise layers, whose FLOP are the elements that they make."""
    builder = StepBuilder()
    x = builder.input
    for _ in range(layers):
        x = builder.relu(x)
    tape = builder.finish(x, optimizer=False)
    return replace(tape, batch_size=BATCH_SIZE)


class _Made:
    """The cells of one run."""

    def __init__(self, folder: Path, seed: int, machine: str, layers: int, planned_by: str = "") -> None:
        self.folder, self.random, self.layers, self.planned_by = folder, Random(seed), layers, planned_by
        self.environment = ENVIRONMENT | {"system": ENVIRONMENT["system"] | {"host_hash": machine}}
        self.first, self.second = self._seconds(1.0), self._seconds(1.0)
        self.cells = count()  # one after the other

    def _seconds(self, about: float) -> list[float]:
        return [about * self.random.uniform(0.98, 1.02) for _ in range(PAIRS)]

    def _config(self, method: str, **changes: Any) -> dict[str, Any]:
        config = make_config(method=method, options={}, batch_size=BATCH_SIZE, **changes)
        source = Library([ROOT]).method(method).sha256 if self.planned_by else config["sources"]["method"]
        return config | {"sources": config["sources"] | {"method": source}}

    def measured(self, method: str, budget: str | None) -> RunRecord:
        config = self._config(method, budget=budget)
        profile = replace(load_profile(BOARD), name="Test Processor 9000")
        tape = step(self.layers).with_costs([1e-3] * len(step(self.layers).ops))
        record, eager_peak = self._planned(config, roofline_flops(tape), profile)
        baseline = drift(self.first, self.second)
        ours, theirs = (self.first, self.second) if method == "eager" else (self._seconds(1.3), self._seconds(1.0))
        ratio = paired_ratio(ours, theirs)
        counts = {name: record.predicted[name] for name in ("recomputes", "offloads", "prefetches")}
        peak = record.predicted["peak_bytes"]
        measured = {
            "meter": "cpu_allocator", "peak_bytes": peak, "cold_peak_bytes": peak, "persistent_bytes": 200, "library_bytes": 0,
            "over_budget_bytes": None if budget is None else 0, "prediction_error_bytes": 0, "is_peak_accounted_for": True,
            "drift": baseline.to_json(), "ratio": ratio.to_json(), "step_seconds": ours, "baseline_step_seconds": theirs,
            "warmup_steps": config["measure"]["warmup"], "is_distinguishable": distinguishable(ratio, baseline),
            "capture_seconds": 0.5, "plan_seconds": 0.1,
        } | (counts if method != "eager" else {})
        absent = ("allocated_peak_bytes", "active_peak_bytes", "reserved_peak_bytes", "nvml_peak_bytes", "outside_torch_bytes",
                  "allocation_retries")
        gated = {"steps": 3, "batch_size": 2, "differing": [], "first_step_that_differs": None, "truth": "exact", "variants": {}} | counts
        body = {"first_seconds": self.first, "second_seconds": self.second, "interval": baseline.to_json()}
        write_atomically(self.folder / "baselines" / f"{baseline_id(config)}.json",
                         json.dumps({"peaks": {"meter": "cpu_allocator", "peak_bytes": eager_peak, "cold_peak_bytes": eager_peak,
                                               "persistent_bytes": 200, "library_bytes": 0}, "peak_bytes": eager_peak, "drift": body}))
        return self._save(replace(
            record, truth=Truth.EXACT, measured=measured | dict.fromkeys(absent),
            missing={f"measured.{name}": "no NVIDIA GPU: the step ran on the CPU" for name in absent}, eager_peak_is_simulated=False,
            truth_detail=gated if method != "eager" else {"steps": 0, "note": "eager is the reference itself"}))

    def simulated(self, method: str, budget: str | None) -> RunRecord:
        config = self._config(method, budget=budget, target=f"sim:{BOARD}", experiment="simulated")
        record, _ = self._planned(config, roofline_costs(step(self.layers), load_profile(BOARD)), load_profile(BOARD))
        return self._save(replace(record, eager_peak_is_simulated=True, missing={"measured": "a simulated target: nothing runs there"},
                                  measured={"capture_seconds": 0.5, "plan_seconds": 0.1}))

    def _planned(self, config: dict[str, Any], tape: Tape, profile: DeviceProfile) -> tuple[RunRecord, int]:
        """A record with its predictions, tape and schedule beside it; and eager's peak."""
        eager = check_schedule(tape, replay_schedule(tape, "replay"))
        budget_bytes = None if config["budget"] is None else int(parse_percent(config["budget"]) * eager.peak_bytes)
        budget = Budget(device_bytes=UNLIMITED if budget_bytes is None else budget_bytes)
        if config["method"] == "eager":
            checked = eager
        else:
            planner = Library([ROOT]).method(self.planned_by or config["method"]).build()
            plan = replace(planner.plan(tape, profile, budget), method=Library([ROOT]).method(config["method"]).card.uid)
            checked = check_schedule(tape, replace(plan, micro_batches=(), needs=()), budget)
        cell = self.folder / "cells" / hash_config(config)
        cell.mkdir(parents=True)
        started = STARTED + next(self.cells) * timedelta(seconds=31)
        tape.save(cell / "tape.json.gz")
        checked.schedule.save(cell / "schedule.json.gz")
        write_telemetry(cell / "telemetry.csv.gz", [(0.1 * i, self.random.randrange(5 * 10**8, 6 * 10**8)) for i in range(300)],
                        started=f"{started:%Y-%m-%dT%H:%M:%S}.000+00:00")
        predicted = predicted_of(checked, profile) | {"eager_step_seconds": sum(op.seconds for op in tape.ops),
                                                      "least_step_seconds": least_step_seconds(checked, profile, budget_bytes),
                                                      "swap_vs_recompute": swap_against_recompute(tape, profile)}
        provenance = {
            "started": f"{started:%Y-%m-%dT%H:%M:%SZ}", "ended": f"{started + timedelta(seconds=30):%Y-%m-%dT%H:%M:%SZ}",
            "seconds": 30.0, "vramlab": "0.1.0", "written_by": "cell",
            "method_source_sha256": config["sources"]["method"], "tape_digest": tape.digest, "schedule_digest": checked.schedule.digest,
            "bytes_by_role": {str(r): tape.bytes_of(r) for r in Role}, "ops": len(tape.ops), "basic_layers": basic_layers(tape),
            "lower_bound_bytes": lower_bound_bytes(tape), "telemetry": read_telemetry(cell / "telemetry.csv.gz").summary(),
        }
        return RunRecord(
            cell_id=hash_config(config), kind="step", workflow=WORKFLOW, config=config, outcome=Outcome.OK, budget_bytes=budget_bytes,
            eager_peak_bytes=eager.peak_bytes, predicted=predicted, environment=self.environment, provenance=provenance), eager.peak_bytes

    def _save(self, record: RunRecord) -> RunRecord:
        cell = self.folder / "cells" / record.cell_id
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(cell.glob("*.gz"))}
        record = replace(record, files=files)
        record.save(cell / "record.json")
        return record


def roofline_flops(tape: Tape) -> Tape:
    """With FLOP, as a measured tape has them."""
    from vramlab.flops import with_flops

    return with_flops(tape)


