"""The schema of what strangers send: records, run.json, verdicts, baselines, tapes and schedules. Nothing is coerced.

Where a field is of the schema, no rule has to ask what it is. Blocks of a record may hold fields that a newer vramlab knows: they are told
as a warning (`unknown_fields`), and read by nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Mapping

from pydantic import BaseModel, ConfigDict, Field

from vramlab.record import SCHEMA_VERSION, Outcome, Truth
from vramlab.telemetry import COLUMNS, Telemetry

LARGEST = 2**53 - 1  # of a whole number in canonical JSON

Bytes = Annotated[int, Field(ge=0, le=LARGEST)]
Signed = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Count = Bytes
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Word = Annotated[str, Field(max_length=300)]
Text = Annotated[str, Field(max_length=20_000)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
CellId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Utc = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
# Of each, 10,000 resamples are drawn.
Samples = Annotated[list[Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]], Field(min_length=1, max_length=1_000)]


class Closed(BaseModel):
    """Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Block(BaseModel):
    """Unknown keys are kept, and told as a warning."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class Open(BaseModel):
    """A block whose other keys nobody has to know: what is asked of a model or measured of a machine."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


# --- a record -------------------------------------------------------------------------------------------------------------
class IntervalForm(Closed):
    """Median and its bounds over so many samples; no bounds over too few."""

    median: Number
    low: Number | None
    high: Number | None
    n: Annotated[int, Field(ge=1)]


class Training(Open):
    """How the network is trained."""

    optimizer: Word
    seed: Signed
    steps: Count
    lr: Number


class Measure(Open):
    """How a cell is measured."""

    warmup: Count
    steps: Annotated[int, Field(ge=1, le=1_000)]
    gate_steps: Count
    gate_batch_size: Annotated[int, Field(ge=1)] | None
    time: bool
    peak: bool
    timeout_seconds: Number
    plan_timeout_seconds: Number


class Sources(Open):
    """Hashes of the code that a cell depends on."""

    method: Hash
    model: Hash
    harness: Word


class Search(Open):
    """What is searched."""

    over: Word
    low: Annotated[int, Field(ge=1)]
    high: Annotated[int, Field(ge=1)]
    step: Annotated[int, Field(ge=1)]
    slowdown: Number | None = None


class Config(Open):
    """A resolved cell."""

    experiment: Word | None
    kind: Literal["step", "train", "max_batch"]
    model: Word
    model_options: dict[Word, Any]
    batch_size: Annotated[int, Field(ge=1, le=LARGEST)] | None
    training: Training
    data: Word
    method: Word
    options: dict[Word, Any]
    budget: Word | None
    target: Annotated[str, Field(pattern=r"^(?:cpu|cuda(?::\d{1,3})?|sim:[a-z0-9][a-z0-9.-]{0,60})$")]
    measure: Measure
    sources: Sources
    search: Search | None = None
    devices: Annotated[int, Field(ge=1, le=100_000)] | None = None


class Measured(Block):
    """Block `measured`."""

    meter: Word | None = None
    peak_bytes: Bytes | None = None
    cold_peak_bytes: Bytes | None = None
    persistent_bytes: Bytes | None = None
    library_bytes: Bytes | None = None
    allocated_peak_bytes: Bytes | None = None
    active_peak_bytes: Bytes | None = None
    reserved_peak_bytes: Bytes | None = None
    nvml_peak_bytes: Bytes | None = None
    outside_torch_bytes: Bytes | None = None
    pinned_host_bytes: Bytes | None = None
    allocation_retries: Count | None = None
    recomputes: Count | None = None
    offloads: Count | None = None
    prefetches: Count | None = None
    over_budget_bytes: Bytes | None = None
    prediction_error_bytes: Signed | None = None
    is_peak_accounted_for: bool | None = None
    drift: IntervalForm | None = None
    ratio: IntervalForm | None = None
    step_seconds: Samples | None = None
    baseline_step_seconds: Samples | None = None
    warmup_steps: Count | None = None
    is_distinguishable: bool | None = None
    capture_seconds: Seconds | None = None
    seed_seconds: Seconds | None = None
    plan_seconds: Seconds | None = None


class AtPeak(Closed):
    """What is live at the peak."""

    phase: Word
    op: Count | None
    inside_op_bytes: Signed
    by_role: dict[Word, Bytes]
    by_layer: dict[Word, Bytes]
    other_layers_bytes: Bytes
    layers: Count


class Device(Closed):
    """A DeviceProfile without its sources."""

    name: Word
    memory_bytes: Bytes
    flops_per_second: Number
    flops_efficiency: Number
    memory_bytes_per_second: Number
    h2d_bytes_per_second: Number
    d2h_bytes_per_second: Number
    copy_latency_seconds: Number
    launch_seconds: Number
    is_full_duplex: bool
    devices: Count
    device_link_bytes_per_second: Number


class Infeasible(Closed):
    """Why there is no plan."""

    smallest_bytes: Bytes | None
    op: Word
    message: Text


class Swap(Closed):
    """Swapping against recomputing."""

    storages: Count
    recompute_cheaper: Count
    share: Number | None
    median_ratio: Number | None


class Predicted(Block):
    """Block `predicted`: all of it simulated."""

    peak_bytes: Bytes | None = None
    average_bytes: Number | None = None
    average_state_bytes: Number | None = None
    peak_host_bytes: Bytes | None = None
    peak_instruction: Count | None = None
    step_seconds: Seconds | None = None
    compute_seconds: Seconds | None = None
    recompute_seconds: Seconds | None = None
    stall_seconds: Seconds | None = None
    copy_seconds: Seconds | None = None
    moved_bytes: Bytes | None = None
    recomputes: Count | None = None
    offloads: Count | None = None
    prefetches: Count | None = None
    deepest_recompute: Count | None = None
    flops: Count | None = None
    recompute_flops: Count | None = None
    feature_bytes_at_peak: Signed | None = None
    profile: Word | None = None
    device: Device | None = None
    peak_op: Word | None = None
    peak_phase: Word | None = None
    at_peak: AtPeak | None = None
    micro_batches: list[Annotated[int, Field(ge=1)]] | None = None
    eager_step_seconds: Seconds | None = None
    least_step_seconds: Seconds | None = None
    proof: dict[Word, Any] | None = None
    swap_vs_recompute: Swap | None = None
    infeasible: Infeasible | None = None
    split_convolutions: dict[Word, Any] | None = None
    inplace_gradients: dict[Word, Any] | None = None
    sensitivity: dict[Word, dict[Word, Any]] | None = None
    devices: Count | None = None
    parallel: dict[Word, Any] | None = None
    one_device_step_seconds: Seconds | None = None
    speedup_over_one_device: Number | None = None


class Trial(Open):
    """One line of a search's log."""

    value: Annotated[int, Field(ge=1)]
    attempt: Annotated[int, Field(ge=1, le=2)]
    fits: bool
    outcome: Outcome | Word
    reason: Word
    message: Text
    peak_bytes: Bytes | None
    step_seconds: Seconds | None
    samples_per_second: Number | None
    slowdown: Number | None
    within_slowdown: bool | None


class Fastest(Closed):
    """The trial with the most samples a second."""

    value: Annotated[int, Field(ge=1)]
    samples_per_second: Number


class Searched(Block):
    """Block `search`."""

    over: Word | None = None
    low: Count | None = None
    high: Count | None = None
    step: Count | None = None
    slowdown: Number | None = None
    largest: Count | None = None
    hit_upper_end: bool | None = None
    holes: list[Count] | None = None
    unstable: list[Count] | None = None
    largest_within_slowdown: Count | None = None
    fastest: Fastest | None = None
    memory_bytes: Bytes | None = None
    at_peak: AtPeak | dict[Word, Any] | None = None
    is_simulated: bool | None = None
    trials: Annotated[list[Trial], Field(max_length=10_000)] | None = None
    simulated_largest: Count | None = None
    simulated_peak_bytes: Bytes | None = None
    why_no_guess: Text | None = None
    why_whole: Text | None = None
    steps: Count | None = None
    cap: Word | None = None
    sensitivity: dict[Word, dict[Word, Any]] | None = None


Series = Annotated[list[Number | None], Field(max_length=10_000_000)]
Accuracy = list[Annotated[list[Number], Field(min_length=2, max_length=2)]]


class Trained(Block):
    """Block `training`."""

    steps: list[Count] | None = None
    loss: Series | None = None
    grad_norm: Series | None = None
    accuracy: Accuracy | None = None
    eager_loss: Series | None = None
    eager_grad_norm: Series | None = None
    eager_accuracy: Accuracy | None = None
    equal_steps: Count | None = None
    first_difference: Count | None = None
    state_equal_at_end: bool | None = None


class TruthDetail(Block):
    """Block `truth_detail`."""

    steps: Count | None = None
    batch_size: Annotated[int, Field(ge=1)] | None = None
    recomputes: Count | None = None
    offloads: Count | None = None
    prefetches: Count | None = None
    differing: list[dict[Word, Any]] | None = None
    first_step_that_differs: Count | None = None
    truth: Literal["exact", "within_noise", "wrong"] | None = None
    variants: dict[Word, Count] | None = None
    note: Word | None = None
    noise: list[Any] | None = None
    micro_batches: list[Annotated[int, Field(ge=1)]] | None = None
    distance_to_whole_batch: dict[Word, Any] | None = None


class Cpu(Open):
    """The host's processor."""

    model: Word | None = None
    memory_bytes: Bytes | None = None
    usable_cores: Count | None = None


class Gpu(Open):
    """One GPU as NVML describes it."""

    name: Word | None = None
    memory_bytes: Bytes | None = None
    driver: Word | None = None
    uuid_hash: Word | None = None
    power_limit_watts: Number | None = None


class TorchBuild(Open):
    """What torch was built for."""

    cuda: Word | None = None
    hip: Word | None = None


class Software(Open):
    """Versions."""

    vramlab: Word | None = None
    python: Word | None = None
    packages: dict[Word, Word | None] = {}
    torch_build: TorchBuild | None = None


class System(Open):
    """The operating system."""

    host_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    os: Word | None = None


class Environment(Open):
    """Software and hardware."""

    software: Software
    system: System
    cpu: Cpu
    gpus: list[Gpu]


class TelemetryForm(Open):
    """What a record keeps of its telemetry."""

    failure: Text | None = None
    rows: Count | None = None
    period_seconds: Seconds | None = None
    achieved_period_seconds: Seconds | None = None
    missed: Count | None = None
    constant: list[Word] | None = None
    flags: list[Text] | None = None


class Provenance(Block):
    """Block `provenance`."""

    started: Utc
    ended: Utc
    vramlab: Word
    written_by: Literal["cell", "runner"]
    method_source_sha256: Hash
    seconds: Seconds | None = None
    tape_digest: Hash | None = None
    schedule_digest: Hash | None = None
    bytes_by_role: dict[Word, Bytes] | None = None
    basic_layers: Count | None = None
    ops: Count | None = None
    lower_bound_bytes: Bytes | None = None
    telemetry: TelemetryForm | None = None
    exit_code: Signed | None = None


class WorkflowOfRecord(Closed):
    """Which workflow a record is of."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    path: Word
    sha256: Hash
    title: Word | None = None
    label: Word | None = None


class Record(Closed):
    """record.json. See vramlab.record.RunRecord."""

    cell_id: CellId
    kind: Literal["step", "train", "max_batch"]
    workflow: WorkflowOfRecord
    config: Config
    outcome: Literal[tuple(str(o) for o in Outcome)]
    reason: Word
    message: Text
    truth: Literal[tuple(str(t) for t in Truth)]
    truth_detail: TruthDetail
    budget_bytes: Bytes | None
    eager_peak_bytes: Bytes | None
    eager_peak_is_simulated: bool | None
    predicted: Predicted
    measured: Measured
    search: Searched
    training: Trained
    missing: dict[Word, Text]
    environment: Environment | dict[Word, None]
    provenance: Provenance
    files: dict[Literal["schedule.json.gz", "tape.json.gz", "telemetry.csv.gz"], Hash]
    schema_version: Literal[SCHEMA_VERSION]


_BLOCKS = ("measured", "predicted", "search", "training", "truth_detail", "provenance")


def unknown_fields(record: Record) -> Iterator[str]:
    """Dotted names of what the schema does not know."""
    for block in _BLOCKS:
        yield from (f"{block}.{name}" for name in getattr(record, block).model_extra or ())


# --- run.json, claims.json, baselines -------------------------------------------------------------------------------------
class ClaimRequest(Open):
    """A claim that the workflow lists."""

    id: Word
    rule: Word | None = None
    experiment: Word | list[Word] | None = None
    method: Word | None = None
    baseline: Word | None = None
    tolerance: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    value: Number | bool | Word | list[Number] | None = None
    budget: Word | None = None
    batch_size: Count | None = None
    baseline_batch_size: Count | None = None
    devices: Count | None = None
    note: Text | None = None


class Workflow(Open):
    """The resolved workflow."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    path: Word
    sha256: Hash
    title: Word | None = None
    label: Word | None = None
    description: Text | None = None
    claims: Annotated[list[ClaimRequest], Field(max_length=200)]


class PlannedCell(Open):
    """One cell of the plan."""

    cell_id: CellId
    config: Config
    label: Word | None = None


class Plan(Open):
    """run.json."""

    schema_: Literal[1] = Field(alias="schema")
    workflow: Workflow
    environment: Environment
    overrides: list[Word]
    started: Utc
    run_id: Word | None = None
    cells: Annotated[list[PlannedCell], Field(min_length=1)]


class Verdict(Closed):
    """One entry of claims.json."""

    id: Word
    rule: Word
    experiment: Word
    tolerance: Number
    verdict: Literal["reproduced", "partly", "not reproduced", "not testable here"]
    obtained: Word
    is_simulated: bool | None
    counts: bool
    evidence: list[CellId]


class Verdicts(BaseModel):
    """claims.json, as `{"verdicts": [...]}`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    verdicts: list[Verdict]


class BaselineDrift(Closed):
    """Eager against eager."""

    first_seconds: Samples
    second_seconds: Samples
    interval: IntervalForm


class Peaks(Measured):
    """Eager's own peaks."""

    peak_bytes: Bytes


class Baseline(Closed):
    """baselines/<id>.json."""

    peaks: Peaks
    peak_bytes: Bytes
    drift: BaselineDrift | None = None


# --- tapes and schedules --------------------------------------------------------------------------------------------------
def check_tape(body: Any) -> None:
    """ValueError on a tape's JSON whose numbers are of another kind: compiled loops trust them. Ids are for `Tape.from_json`."""
    if not isinstance(body, Mapping) or not isinstance(body.get("ops"), list):
        raise ValueError("no tape")
    for nbytes, _, name, at_start, at_end in body["storages"]:
        _whole(nbytes, "bytes of a storage")
        if not isinstance(name, str) or not isinstance(at_start, bool) or not isinstance(at_end, bool):
            raise ValueError("a storage is not of the schema")
    for storage, dtype, shape, strides, offset in body["tensors"]:
        for number in (storage, *shape, offset):
            _whole(number, "a tensor's form")
        if not isinstance(dtype, str) or len(strides) != len(shape) or not all(type(s) is int for s in strides):
            raise ValueError("a tensor is not of the schema")
    for op in body["ops"]:
        _check_op(op)
    for number in (body["loss"], body["batch_size"], *body.get("micro_batches", ())):
        _whole(number, "a size of the step")
    if sum(storage[0] for storage in body["storages"]) > LARGEST:
        raise ValueError("more bytes than any device has")


def _check_op(op: Mapping[str, Any]) -> None:
    if not isinstance(op["target"], str) or not isinstance(op["layer"], str):
        raise ValueError("an op is not of the schema")
    for flag in ("is_eager_inplace", "is_random", "throwaway_state"):
        if not isinstance(op.get(flag, False), bool):
            raise ValueError(f"{flag} of an op is no truth value")
    for number in (op.get("flops", 0), op.get("workspace_bytes", 0), *(v[2] for v in op.get("variants", ()))):
        _whole(number, "flops or workspace of an op")
    for seconds in (op.get("seconds", 0.0), *(v[1] for v in op.get("variants", ()))):
        if type(seconds) not in (int, float) or not 0 <= seconds < 1e9:
            raise ValueError(f"{str(seconds)[:40]} is no time of an op")
    if not all(isinstance(v[0], str) for v in op.get("variants", ())):
        raise ValueError("a variant has no name")


def check_schedule_form(body: Any) -> None:
    """ValueError on a schedule's JSON whose numbers are of another kind."""
    if not isinstance(body, Mapping) or not isinstance(body.get("instructions"), list):
        raise ValueError("no schedule")
    if not isinstance(body.get("tape_digest"), str) or not isinstance(body.get("method"), str):
        raise ValueError("a schedule names its tape and its method")
    for row in body["instructions"]:
        if not isinstance(row, list) or not 2 <= len(row) <= 4 or not isinstance(row[0], str):
            raise ValueError(f"{str(row)[:60]} is no instruction")
        is_run = row[0] in ("compute", "recompute")
        if type(row[1]) is not int or not is_run and len(row) != 2 or len(row) > 2 and not (row[2] is None or type(row[2]) is int):
            raise ValueError(f"{str(row)[:60]} is no instruction")
        if len(row) == 4 and not (row[3] is None or isinstance(row[3], str)):
            raise ValueError(f"{str(row)[:60]} is no instruction")


def check_telemetry(telemetry: Telemetry) -> None:
    """ValueError where a column is missing, a value is not finite or time runs backwards."""
    if tuple(telemetry.columns) != COLUMNS:
        raise ValueError("the columns are others")
    if not isinstance(telemetry.header.get("started"), str) or not isinstance(telemetry.header.get("missing"), Mapping):
        raise ValueError("the header is not of the schema")
    if not all(value is None or math.isfinite(value) for column in telemetry.columns.values() for value in column):
        raise ValueError("a value is not finite")
    times = telemetry.columns["t_seconds"]
    if None in times or any(b < a for a, b in zip(times, times[1:])):
        raise ValueError("time runs backwards")


def _whole(number: Any, what: str) -> None:
    if type(number) is not int or not 0 <= number <= LARGEST:
        raise ValueError(f"{what}: {str(number)[:40]} is no whole number of at least zero")
