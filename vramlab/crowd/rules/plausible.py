"""Fourth round: what a machine can have measured. An error cannot be; a warning seldom is, and is shown beside the numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

from vramlab.crowd.findings import Severity
from vramlab.crowd.keys import comparability_key, device_of
from vramlab.crowd.manifest import machine_of
from vramlab.crowd.rules.agreeing import disagreements
from vramlab.crowd.rules.asking import Examination, Fault, Round, rule
from vramlab.crowd.rules.numbers import measured_steps
from vramlab.crowd.rules.schedules import checked_of, planned
from vramlab.liveness import lower_bound_bytes
from vramlab.prediction import TOLERANCE_BYTES, TOLERANCE_SHARE
from vramlab.record import Outcome, RunRecord
from vramlab.report.words import is_simulated
from vramlab.runs import RUN_FILE, TELEMETRY_FILE
from vramlab.telemetry import Telemetry

FUTURE = timedelta(hours=26)  # a clock in another time zone that believes it is UTC
SECONDS_APART = 5.0  # by which dates in whole seconds, and a sampler's start and end, may be off
CLOCK_SET_BACK = 2.0  # seconds by which a clock that is kept may be put back between two cells
LARGEST_PERIOD = 2.0  # achieved period over the requested one
LEAST_SPAN = 0.5  # of a cell's seconds that its telemetry covers
_OF_BOARDS = ("allocated_peak_bytes", "active_peak_bytes", "reserved_peak_bytes", "nvml_peak_bytes", "outside_torch_bytes")
LOWER_PEAK = 0.05  # by which a larger batch may have a lower peak
FASTEST = 1e17  # FLOP/s that no single board comes near, at any precision
LEAST_RATIO = 0.5  # of a planned step's time to eager's
FEWEST_SAMPLES = 4  # of which no two are equal to the last digit, by a clock of nanoseconds
# Memory of boards in bytes, as sold; what a driver reports is at most this, and a little less with ECC.
BOARDS: Mapping[str, float] = {
    "H200": 141e9, "H100 NVL": 94e9 * 1.024, "H100": 80 * 2**30, "GH200": 144 * 2**30, "A100.*80GB": 80 * 2**30, "A100.*40GB": 40 * 2**30,
    "V100.*32GB": 32 * 2**30, "V100.*16GB": 16 * 2**30, "P100.*16GB": 16 * 2**30, "RTX 4090": 24 * 2**30, "RTX 3090": 24 * 2**30,
    "L40S": 48 * 2**30, r"\bT4\b": 16 * 2**30, "TITAN V": 12 * 2**30, "TITAN X": 12 * 2**30, "GTX 1080 Ti": 11 * 2**30, "K40": 12 * 2**30,
}
LARGEST_SURPLUS, SMALLEST_BOARD = 1.03, 0.85
# Least major version of the driver that runs a CUDA runtime, as NVIDIA's release notes have it (minor-version compatibility).
DRIVERS: Mapping[int, int] = {11: 450, 12: 525, 13: 580}


def _of_time(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None


@rule(Round.PLAUSIBILITY, "clock",
      "a run starts before its cells and a cell before it ends, takes no more time than lies between, and none of it lies in the future")
def _clock(e: Examination) -> Iterator[Fault]:
    latest, began = datetime.now(UTC) + FUTURE, _of_time(e.contents.run.plan["started"])
    if began is None or began > latest:
        yield f"{RUN_FILE}:started", "is no date" if began is None else "lies in the future"
    for name, record in e.contents.records.items():
        e.count()
        where, seconds = f"{name}:provenance", record.provenance.get("seconds")
        started, ended = _span_of(record)
        if started is None or ended is None:
            yield where, "no date"
        elif started > ended or ended > latest:
            yield where, f"it ended at {record.provenance['ended']}" + (", before it started" if started > ended else ", in the future")
        elif began is not None and started < began - _slack_of(e, record):
            yield f"{where}.started", f"{record.provenance['started']}; its run started at {e.contents.run.plan['started']}"
        elif seconds is not None and seconds > 1.01 * (ended - started).total_seconds() + SECONDS_APART:  # less: the machine slept
            yield f"{where}.seconds", f"{seconds:.0f} s; between its start and its end lie {(ended - started).total_seconds():.0f} s"


def _span_of(record: RunRecord) -> tuple[datetime | None, datetime | None]:
    started, ended = (_of_time(record.provenance[key]) for key in ("started", "ended"))
    return started, ended


def _slack_of(e: Examination, record: RunRecord) -> timedelta:
    """By which a cell may seem to start before its run: two machines that share a run need not agree on the time."""
    run = e.contents.run
    is_at_home = machine_of(run.environment_of(record)) == machine_of(run.plan.get("environment") or {})
    return timedelta(seconds=SECONDS_APART) if is_at_home else FUTURE


@rule(Round.PLAUSIBILITY, "turns", "cells that ran on one machine took turns, as its lock has them")
def _turns(e: Examination) -> Iterator[Fault]:
    """Simulated cells wait for nobody, and nobody for them."""
    spans: dict[str | None, list[tuple[datetime, datetime, str]]] = defaultdict(list)
    for name, record in e.contents.records.items():
        started, ended = _span_of(record)
        if not is_simulated(record) and started is not None and ended is not None and started <= ended:  # the rule `clock` tells of others
            e.count()
            spans[machine_of(e.contents.run.environment_of(record))].append((started, ended, name))
    for ran in spans.values():
        last = min(ran)
        for started, ended, name in sorted(ran)[1:]:
            if started < last[1] - timedelta(seconds=CLOCK_SET_BACK):
                yield f"{name}:provenance.started", f"{_told(started)}; {last[2]} ran on this machine until {_told(last[1])}"
            last = max(last, (started, ended, name), key=lambda span: span[1])


def _told(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


@rule(Round.PLAUSIBILITY, "time-fits", "capture, planning and the steps of a cell fit the time that it took")
def _time_fits(e: Examination) -> Iterator[Fault]:
    for name, record in measured_steps(e):
        seconds, m = record.provenance.get("seconds"), record.measured
        if seconds is None:
            continue
        e.count()
        planning = sum(m.get(key) or 0 for key in ("capture_seconds", "plan_seconds"))  # seeds may have been planned before the cell
        if planning > seconds + SECONDS_APART:
            yield f"{name}:measured.plan_seconds", f"capture and planning took {planning:.0f} s of a cell that took {seconds:.0f} s"
        if not m.get("step_seconds") or record.config["method"] == "eager":  # eager's may have run in another cell
            continue
        spent = planning + sum(m["step_seconds"]) + sum(m["baseline_step_seconds"])
        if planning <= seconds + SECONDS_APART < spent:
            yield f"{name}:measured.step_seconds", f"planning and steps took {spent:.0f} s of a cell that took {seconds:.0f} s"


@rule(Round.PLAUSIBILITY, "speed", "no step computes faster than any one device can")
def _speed(e: Examination) -> Iterator[Fault]:
    for found in planned(e):
        if found.is_simulated:
            continue
        flops = sum(op.flops for op in found.tape.ops)
        for key in ("step_seconds", "baseline_step_seconds"):
            samples = found.record.measured.get(key) or []
            e.count(bool(samples))
            if samples and flops > FASTEST * min(samples):
                yield f"{found.name}:measured.{key}", f"{min(samples):.3g} s for {flops:.3g} FLOP; no device does {FASTEST:.0e} a second"


@rule(Round.PLAUSIBILITY, "faster-than-eager", "a step that computes all that eager does, and more, takes at least half of eager's time",
      Severity.WARNING)
def _faster(e: Examination) -> Iterator[Fault]:
    """A busy machine, or an allocator that eager exhausts, may make it so. Other algorithms for an op may be faster by more."""
    for found in planned(e):
        ratio = found.record.measured.get("ratio") or {}
        if found.is_simulated or not ratio or any(op.variants for op in found.tape.ops):
            continue
        e.count()
        if ratio["median"] < LEAST_RATIO:
            yield f"{found.name}:measured.ratio.median", f"{ratio['median']:.3g} of eager's time"


@rule(Round.PLAUSIBILITY, "constant-samples", "step times differ from each other, as a clock of nanoseconds has them")
def _constant(e: Examination) -> Iterator[Fault]:
    for name, record in measured_steps(e):
        for key in ("step_seconds", "baseline_step_seconds"):
            samples = record.measured.get(key) or []
            e.count(bool(samples))
            if len(samples) >= FEWEST_SAMPLES and len(set(samples)) == 1:
                yield f"{name}:measured.{key}", f"all {len(samples)} samples are {samples[0]!r}"


@rule(Round.PLAUSIBILITY, "memory-order",
      "requested <= allocated <= reserved <= the board's memory, and no peak or automatic budget is beyond the machine's")
def _memory_order(e: Examination) -> Iterator[Fault]:
    for name, record in measured_steps(e):
        yield from _automatic(name, record, e.contents.run.environment_of(record))
        m, where = record.measured, f"{name}:measured"
        if m.get("peak_bytes") is None:
            continue
        e.count()
        total, what = _memory_of(record, e.contents.run.environment_of(record))
        if record.config["target"] == "cpu":
            yield from ((f"{where}.{key}", "is claimed of a step on the CPU") for key in _OF_BOARDS if m.get(key) is not None)
        ordered = [("peak_bytes", m.get("peak_bytes")), ("allocated_peak_bytes", m.get("allocated_peak_bytes")),
                   ("reserved_peak_bytes", m.get("reserved_peak_bytes")), (what, total)]
        for (one, less), (other, more) in pairwise([pair for pair in ordered if pair[1] is not None]):
            if less > more:
                yield f"{where}.{one}", f"{less:,} bytes; {other} is {more:,}"
        if m.get("persistent_bytes") is not None and m["persistent_bytes"] > max(m["peak_bytes"], m.get("cold_peak_bytes") or 0):
            yield f"{where}.persistent_bytes", "what stays between steps is more than the peak"


def _automatic(name: str, record: RunRecord, environment: Mapping[str, Any]) -> Iterator[Fault]:
    """What a machine had to give is not more than it has."""
    total, what = _memory_of(record, environment)
    if record.config["budget"] == "auto" and None not in (total, record.budget_bytes) and record.budget_bytes > total:
        yield f"{name}:budget_bytes", f"{record.budget_bytes:,} bytes; {what} is {total:,}"


def _memory_of(record: RunRecord, environment: Mapping[str, Any]) -> tuple[int | None, str]:
    target = record.config["target"]
    if target == "cpu":
        return environment["cpu"].get("memory_bytes"), "the machine's memory"
    gpus, index = environment.get("gpus") or [], int(target.partition(":")[2] or 0)
    return (gpus[index].get("memory_bytes") if index < len(gpus) else None), "the board's memory"


@rule(Round.PLAUSIBILITY, "lower-bound", "no step holds less than any schedule of it must")
def _lower_bound(e: Examination) -> Iterator[Fault]:
    for name, record in measured_steps(e):
        peak, bound = record.measured.get("peak_bytes"), record.provenance.get("lower_bound_bytes")
        if peak is None or bound is None or record.predicted.get("micro_batches"):
            continue
        e.count()
        if peak < bound - max(TOLERANCE_SHARE * bound, TOLERANCE_BYTES):
            yield f"{name}:measured.peak_bytes", f"{peak:,} bytes; every schedule of this step holds {bound:,}"
    for found in planned(e):  # the step that ran, where it is another than eager's: what a record says of eager's alone binds nobody
        peak = found.record.measured.get("peak_bytes")
        if found.is_plain or found.is_simulated or peak is None or found.tape.micro_batches or found.devices > 1:
            continue
        e.count()
        own = e.once(("bound", found.tape_sha256), lambda t=found.tape: lower_bound_bytes(t))
        bound = own + (found.record.measured.get("library_bytes") or 0)
        if peak < bound - max(TOLERANCE_SHARE * bound, TOLERANCE_BYTES):
            yield f"{found.name}:measured.peak_bytes", f"{peak:,} bytes; every schedule of its tape holds {bound:,}"


@rule(Round.PLAUSIBILITY, "schedule-peak", "no step holds less than its own schedule must, by more than 0.5 % or 1 MiB")
def _schedule_peak(e: Examination) -> Iterator[Fault]:
    """On a CPU the meter sees every byte that the simulator counts. On a GPU the inside of an op may take less than it did alone, so that
    only what lies between the ops is held against the peak. Eager's own order runs no schedule."""
    for found in planned(e):
        record, peak = found.record, found.record.measured.get("peak_bytes")
        if found.is_simulated or found.schedule is None or peak is None or record.config["method"] == "eager":
            continue
        e.count()
        checked = checked_of(e, found)
        simulated = checked.peak_bytes if record.config["target"] == "cpu" else int(checked.live_bytes.max(initial=0))
        held = simulated + (record.measured.get("library_bytes") or 0)
        if peak < held - max(TOLERANCE_SHARE * held, TOLERANCE_BYTES):
            yield f"{found.name}:measured.peak_bytes", f"{peak:,} bytes; its schedule, simulated again, holds {held:,}"


@rule(Round.PLAUSIBILITY, "prediction-far", "a measured peak is within 0.5 % or 1 MiB of its prediction", Severity.WARNING)
def _prediction_far(e: Examination) -> Iterator[Fault]:
    for name, record in measured_steps(e):
        error, peak = record.measured.get("prediction_error_bytes"), record.measured.get("peak_bytes")
        if error is None or peak is None:
            continue
        e.count()
        if abs(error) > max(TOLERANCE_SHARE * peak, TOLERANCE_BYTES):
            yield f"{name}:measured.prediction_error_bytes", f"{error:+,} bytes of {peak:,}"


@rule(Round.PLAUSIBILITY, "telemetry-summary", "what a record keeps of its telemetry follows from the samples")
def _summary(e: Examination) -> Iterator[Fault]:
    for name, record, telemetry in _sampled(e):
        e.count()
        yield from disagreements(f"{name}:provenance.telemetry", record.provenance.get("telemetry"), telemetry.summary())


@rule(Round.PLAUSIBILITY, "telemetry-span", "telemetry begins within its cell and spans it, and none is longer")
def _span(e: Examination) -> Iterator[Fault]:
    for name, record, telemetry in _sampled(e):
        seconds, times = record.provenance.get("seconds"), telemetry.columns["t_seconds"]
        where = f"{name}:files.{TELEMETRY_FILE}"
        e.count()
        if not _lies_within(telemetry.header["started"], record.provenance):
            yield where, f"it began at {telemetry.header['started'][:40]!r}, its cell at {record.provenance['started']}"
        if seconds is None or not times or not telemetry.trailer:
            continue
        if times[-1] > seconds + SECONDS_APART:
            yield where, f"it has samples at {times[-1]:.0f} s of a cell that took {seconds:.0f} s"
        if times[-1] < LEAST_SPAN * (seconds - SECONDS_APART):
            yield where, f"it ends at {times[-1]:.0f} s of a cell that took {seconds:.0f} s"


def _lies_within(began: str, provenance: Mapping[str, Any]) -> bool:
    """Did a sampler begin while its cell ran? Samples of another cell, or of another day, did not."""
    started, ended = (_of_time(provenance[key]) for key in ("started", "ended"))
    try:
        at = datetime.fromisoformat(began)
    except ValueError:
        return False
    if started is None or ended is None or at.tzinfo is None:
        return at.tzinfo is not None  # the rule `clock` tells of a cell without dates
    slack = timedelta(seconds=SECONDS_APART)
    return started - slack <= at <= ended + slack


@rule(Round.PLAUSIBILITY, "telemetry-quality", "samples come as often as asked, sensors move, the file is whole", Severity.WARNING)
def _quality(e: Examination) -> Iterator[Fault]:
    for name, record in e.contents.records.items():
        if record.outcome is Outcome.OK and TELEMETRY_FILE not in record.files:
            yield name, "the cell has no telemetry"
    for name, _, telemetry in _sampled(e):
        e.count()
        where = f"{name}:files.{TELEMETRY_FILE}"
        period, achieved = telemetry.header.get("period_seconds"), telemetry.trailer.get("achieved_period_seconds")
        if not telemetry.trailer:
            yield where, "the sampler ended before the cell did"
        if isinstance(period, int | float) and isinstance(achieved, int | float) and achieved > LARGEST_PERIOD * period:
            yield where, f"a sample every {achieved:.2f} s; every {period:.2f} s was asked for"
        yield from ((where, f"{column} never moves") for column in telemetry.constant_columns())
        yield from ((where, flag) for flag in telemetry.flags())


def _sampled(e: Examination) -> Iterator[tuple[str, RunRecord, Telemetry]]:
    for name, record in e.contents.records.items():
        if TELEMETRY_FILE in record.files:
            yield name, record, e.contents.telemetry(record.cell_id)


@rule(Round.PLAUSIBILITY, "board", "no more of a board is in use than there is")
def _board(e: Examination) -> Iterator[Fault]:
    for name, record, used in _used(e):
        total, _ = _memory_of(record, e.contents.run.environment_of(record))
        if total is not None and used > total:
            yield f"{name}:files.{TELEMETRY_FILE}", f"{used:,.0f} bytes in use on a board of {total:,}"


@rule(Round.PLAUSIBILITY, "driver-saw", "the driver saw in use what torch had reserved", Severity.WARNING)
def _driver_saw(e: Examination) -> Iterator[Fault]:
    for name, record, used in _used(e):
        reserved = record.measured.get("reserved_peak_bytes")
        if reserved is not None and used < reserved * (1 - TOLERANCE_SHARE):  # samples miss what is short
            yield f"{name}:measured.reserved_peak_bytes", f"{reserved:,} bytes; the driver saw {used:,.0f} in use at most"


def _used(e: Examination) -> Iterator[tuple[str, RunRecord, float]]:
    """The most that a sample saw of a board."""
    for name, record, telemetry in _sampled(e):
        used = [value for value in telemetry.columns["gpu_memory_used_bytes"] if value is not None]
        if used and record.config["target"].startswith("cuda"):
            e.count()
            yield name, record, max(used)


@rule(Round.PLAUSIBILITY, "power", "energy is at most what the power limit allows over the time", Severity.WARNING)
def _power(e: Examination) -> Iterator[Fault]:
    for name, record, telemetry in _sampled(e):
        counted = [(t, j) for t, j in zip(telemetry.columns["t_seconds"], telemetry.columns["energy_joules"]) if j is not None]
        gpus = e.contents.run.environment_of(record).get("gpus") or []
        limits = [gpu["power_limit_watts"] for gpu in gpus if gpu.get("power_limit_watts")]
        if len(counted) < 2 or not limits:
            continue
        e.count()
        seconds, joules = counted[-1][0] - counted[0][0], counted[-1][1] - counted[0][1]
        if joules < 0 or joules > 1.1 * max(limits) * (seconds + 1):
            yield f"{name}:files.{TELEMETRY_FILE}", f"{joules:,.0f} J in {seconds:.1f} s at a limit of {max(limits):,.0f} W"


@rule(Round.PLAUSIBILITY, "gpu-name", "a board has the memory that its name says, and its driver runs torch's CUDA", Severity.WARNING)
def _gpu_name(e: Examination) -> Iterator[Fault]:
    for name, record in e.contents.records.items():
        environment = e.contents.run.environment_of(record)
        for index, gpu in enumerate(environment.get("gpus") or []):
            e.count()
            where = f"{name}:environment.gpus.{index}"
            sold = next((memory for pattern, memory in BOARDS.items() if re.search(pattern, gpu.get("name") or "")), None)
            has = gpu.get("memory_bytes")
            if sold and has and not SMALLEST_BOARD * sold <= has <= LARGEST_SURPLUS * sold:
                yield f"{where}.memory_bytes", f"{has:,} bytes on a {gpu['name']}"
            runtime = ((environment.get("software") or {}).get("torch_build") or {}).get("cuda") or ""
            needed, driver = DRIVERS.get(_major(runtime) or 0), _major(gpu.get("driver") or "")
            if needed and driver and driver < needed:
                yield f"{where}.driver", f"driver {gpu['driver']} does not run CUDA {runtime}"


def _major(version: str) -> int | None:
    match = re.match(r"\d{1,6}", version)
    return int(match[0]) if match else None


@rule(Round.PLAUSIBILITY, "comparable", "a record says on what it was made: its machine, its device, its torch")
def _comparable(e: Examination) -> Iterator[Fault]:
    for name, record in e.contents.records.items():
        e.count()
        environment = e.contents.run.environment_of(record)
        if record.provenance.get("written_by") == "cell" and not record.environment:
            yield f"{name}:environment", "is missing: a cell says itself on what it ran"
        if machine_of(environment) is None:
            yield f"{name}:environment.system.host_hash", "is missing"
        if record.outcome is Outcome.OK and device_of(record, environment) is None:
            yield f"{name}:environment", f"names no device for the target {record.config['target']}"
        if record.outcome is Outcome.OK and not (environment.get("software") or {}).get("packages", {}).get("torch"):
            yield f"{name}:environment.software.packages.torch", "is missing"


@rule(Round.PLAUSIBILITY, "same-machine", "cells that are compared were measured on one machine", Severity.WARNING)
def _same_machine(e: Examination) -> Iterator[Fault]:
    groups: dict[str, set[str | None]] = defaultdict(set)
    for _, record in measured_steps(e):
        environment = e.contents.run.environment_of(record)
        groups[comparability_key(record, environment)].add(machine_of(environment))
    e.count(len(groups))
    for machines in groups.values():
        if len(machines) > 1:
            yield "", f"cells of one step were measured on {len(machines)} machines"


@rule(Round.PLAUSIBILITY, "one-processor", "a machine has one model of processor in all records", Severity.WARNING)
def _one_processor(e: Examination) -> Iterator[Fault]:
    """A virtual machine that was moved, or hosts of one name, may make it so; either way its cells were not measured on one machine."""
    models: dict[str, dict[str, str]] = defaultdict(dict)  # of a machine: model -> where it stands first
    for name, environment in _environments(e):
        machine, model = machine_of(environment), (environment.get("cpu") or {}).get("model")
        if machine is not None and model is not None:
            e.count()
            models[machine].setdefault(model, name)
    for found in models.values():
        (first, _), *others = found.items()
        yield from ((f"{name}:environment.cpu.model", f"{model!r}; the same machine has {first!r} elsewhere") for model, name in others)


def _environments(e: Examination) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield RUN_FILE, e.contents.run.plan.get("environment") or {}
    yield from ((name, record.environment) for name, record in e.contents.records.items() if record.environment)


@rule(Round.PLAUSIBILITY, "larger-batch", "a larger batch of the same method does not hold less", Severity.WARNING)
def _larger_batch(e: Examination) -> Iterator[Fault]:
    groups: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for name, record in measured_steps(e):
        peak = record.measured.get("peak_bytes")
        if peak is not None and record.outcome is Outcome.OK and record.config["budget"] is None:
            apart = {key: value for key, value in record.config.items() if key not in ("batch_size", "experiment", "measure")}
            groups[repr(sorted(apart.items(), key=lambda item: item[0]))].append((record.config["batch_size"], peak, name))
    for group in groups.values():
        for (one, less, _), (other, more, name) in pairwise(sorted(group)):
            e.count()
            if one < other and more < (1 - LOWER_PEAK) * less:
                yield f"{name}:measured.peak_bytes", f"{more:,} bytes at batch {other}, {less:,} at batch {one}"
