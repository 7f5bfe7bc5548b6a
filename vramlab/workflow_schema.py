"""The keys of a workflow file, as pydantic models. Unknown keys are errors and nothing is coerced."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from vramlab.finder import BATCH
from vramlab.planner import parse_bytes, parse_percent
from vramlab.record import Outcome
from vramlab.schema import Strict, spelt
from vramlab.this_machine import known_profiles
from vramlab.yaml_nodes import offer

PLATFORMS = ("cpu", "cuda")
KINDS = ("step", "train", "max_batch")
CLAIM_RULES = (
    "memory_saved_percent", "max_batch_ratio", "overhead_percent", "training_equal", "swap_not_first", "fits", "fastest_of_all",
    "average_memory_saved_percent", "average_maps_saved_percent", "memory_ratio", "slowdown_percent", "step_time_ratio", "peak_bytes",
    "step_time", "images_per_second", "speedup_on_devices", "max_depth_ratio", "performance_loss_percent", "throughput_percent",
    "feature_share_percent", "peak_maps_bytes", "maps_ratio",
    "extra_forwards", "largest_found", "samples_per_second_ratio", "meets_its_bound", "overhead_removed_percent",
)


def _as_mapping(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _check_budget(value: Any) -> str:
    wanted = "must be a share of eager's peak such as 60%, a size such as 6GiB, or auto"
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(wanted)
    if value == "auto":
        return value
    if str(value).strip().isdecimal() and 0 < int(value) <= 100:
        raise ValueError(f"write {value}% for a share of eager's peak, {value}GiB for a size, or auto")
    try:
        share = parse_percent(value)
        if share is None:
            parse_bytes(value)
            return str(value)
    except ValueError:
        raise ValueError(wanted) from None
    return f"{share * 100:g}%"


def _check_target(value: str) -> str:
    kind, _, name = value.partition(":")
    if kind == "sim" and name not in known_profiles():
        raise ValueError(f"there is no device profile {name!r}{offer(name, known_profiles(), 'there are', '`list devices`')}")
    if not re.fullmatch(r"auto|cpu|cuda:[0-9]+|sim:.+", value):
        raise ValueError(offer(value, ("auto", "cpu", "cuda:0", "sim:NAME")).removeprefix("; "))
    return value


def _check_data(value: str) -> str:
    if value not in ("synthetic", "digits") and not re.fullmatch(r"imagefolder:.+", value):
        raise ValueError(offer(value, ("synthetic", "digits", "imagefolder:PATH")).removeprefix("; "))
    return value


def check_schema(value: Any) -> Any:
    """The schema's number, before pydantic reads it. ValueError for what only equals it."""
    if isinstance(value, bool | float):  # true and 1.0 equal 1
        raise ValueError("must be the whole number 1")
    return value


def _check_claimed(value: Any) -> Any:
    numbers = value if isinstance(value, list) and len(value) == 2 else [value]
    if not all(isinstance(number, int | float) for number in numbers):
        raise ValueError("must be a number, true, false or a range [low, high]")
    return value


# What the checks above let pass, in words.
SPELT = {_check_budget: "60% of eager's peak, 6GiB, or auto", _check_target: "auto, cpu, cuda:0 or sim:NAME",
         _check_data: "synthetic, digits or imagefolder:PATH", _check_claimed: "a number, true, false or a range [low, high]"}
Name = Annotated[str, Field(max_length=100), spelt(  # becomes the name of a folder
    r"[A-Za-z0-9]+([-_.][A-Za-z0-9]+)*", "must be letters and digits, between them single hyphens, underscores or dots, such as my-run-2")]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Seconds = Annotated[int, Field(ge=1, le=7 * 24 * 3600)]  # a week; the system's own timers end at 24 days
Budgets = Annotated[list[Annotated[Any, AfterValidator(_check_budget)]], Field(min_length=1)]


class ModelEntry(Strict):
    """`resnet50` or `{name: resnet50, image_size: 64, ...}`; the options are the model card's."""

    model_config = ConfigDict(extra="allow")
    name: str | None = None


class MethodEntry(Strict):
    """`delta` or `{name: delta, options: {...}, budgets: [...], label: ...}`."""

    name: str
    options: dict[str, Any] = {}
    budgets: Budgets | None = None
    label: str | None = None


class Training(Strict):
    """How the step trains. `lr` and `momentum` default by optimizer."""

    optimizer: Literal["sgd", "adam", "adamw", "none"] = "sgd"
    lr: Annotated[float, Field(gt=0)] | None = None
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    autocast: Literal["bfloat16", "float16"] | None = None
    channels_last: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    steps: Count = 200  # of kind train
    eval_every: Count = 50  # of kind train


class Measure(Strict):
    """How a cell is measured."""

    warmup: Count = 2
    steps: Count = 10  # timed, in pairs with eager's; fewer than 6 have no interval, and tell nothing apart
    gate_steps: Count = 3
    gate_batch_size: Count | None = None
    time: bool = True
    peak: bool = True
    sensitivity: bool = False  # plan and simulate again with link and FLOP/s 20 % off; of simulated targets
    timeout_seconds: Seconds = 1800
    plan_timeout_seconds: Seconds = 600


class Search(Strict):
    """What the largest value is looked for of, and where. Only values that the model's card allows are tried."""

    over: str = BATCH  # or a whole-number option of the model: depth, image_size, ...
    low: Count = 1
    high: Count = 4096
    step: Count | None = None  # from one value to the next; absent = 1, or as blocks repeat
    slowdown: Annotated[float, Field(ge=1)] | None = None  # step / its ops' first runs; absent = one extra forward phase


class Expected(Strict):
    """What a run takes and may end with."""

    minutes: Annotated[float, Field(gt=0)] | None = None
    disk_bytes: Count | None = None
    outcomes: list[Literal[tuple(map(str, Outcome))]] | None = None


class Claim(Strict):
    """One claim of a paper, to be judged from an experiment's records by a rule."""

    id: str
    rule: Literal[CLAIM_RULES]
    experiment: str | list[str] | None = None  # several: one verdict over all of them
    method: str | None = None  # as the workflow calls it: its label, else its name
    baseline: str | None = None
    budget: Annotated[Any, AfterValidator(_check_budget)] = None  # absent = the smallest that was kept
    batch_size: Count | None = None
    baseline_batch_size: Count | None = None  # absent = the method's own
    devices: Count | None = None
    value: Annotated[Any, AfterValidator(_check_claimed)] = None  # the paper's; absent = as the claim's data says
    tolerance: Annotated[float, Field(ge=0)] | None = None
    note: str | None = None

    @property
    def experiments(self) -> tuple[str, ...]:
        """Those that the verdict is drawn from."""
        return tuple(self.experiment) if isinstance(self.experiment, list) else () if self.experiment is None else (self.experiment,)


class Untestable(Strict):
    """Claims of the paper that nothing here can decide, and why."""

    claims: Annotated[list[str], Field(min_length=1)]
    reason: str


class Settings(Strict):
    """What a file, an experiment and a `when` block may all set."""

    model: Annotated[ModelEntry, BeforeValidator(_as_mapping)] | None = None
    data: Annotated[str, AfterValidator(_check_data)] | None = None
    training: Training | None = None
    batch_sizes: Annotated[list[Count], Field(min_length=1)] | None = None
    methods: Annotated[list[Annotated[MethodEntry, BeforeValidator(_as_mapping)]], Field(min_length=1)] | None = None
    budgets: Budgets | None = None
    targets: Annotated[list[Annotated[str, AfterValidator(_check_target)]], Field(min_length=1)] | None = None
    devices: Annotated[list[Count], Field(min_length=1)] | None = None  # of a simulated target: each trains on its share of the batch
    measure: Measure | None = None
    search: Search | None = None


class FileWhen(Settings):
    """A `when` block of the file."""

    label: str | None = None
    expected: Expected | None = None


class FileWhens(Strict):
    """`when:` of the file."""

    cpu: FileWhen | None = None
    cuda: FileWhen | None = None


class ExperimentWhen(Settings):
    """A `when` block of an experiment."""

    skip: str | None = None


class ExperimentWhens(Strict):
    """`when:` of an experiment."""

    cpu: ExperimentWhen | None = None
    cuda: ExperimentWhen | None = None


class Experiment(Settings):
    """One experiment; `skip` leaves it out and says why."""

    name: Name
    kind: Literal[KINDS] = "step"
    skip: str | None = None
    when: ExperimentWhens | None = None


class WorkflowFile(Settings):
    """The whole file."""

    lister = "`list keys`"
    version: Annotated[Literal[1], BeforeValidator(check_schema)] = Field(alias="schema")
    name: Name
    title: str
    description: str = ""
    label: str | None = None  # "quick": said wherever the run is named
    experiments: Annotated[list[Experiment], Field(min_length=1)] | None = None
    claims: list[Claim] = []
    untestable: list[Untestable] = []
    when: FileWhens | None = None
    expected: Expected | None = None


class CompleteExperiment(Experiment):
    """An experiment with all that it needs."""

    lister = "`list keys`"
    model: Annotated[ModelEntry, BeforeValidator(_as_mapping)]
    methods: Annotated[list[Annotated[MethodEntry, BeforeValidator(_as_mapping)]], Field(min_length=1)]


OF_EXPERIMENTS = frozenset(Settings.model_fields)
OF_THE_FILE = frozenset({"schema", *WorkflowFile.model_fields}) - OF_EXPERIMENTS - {"version"}
