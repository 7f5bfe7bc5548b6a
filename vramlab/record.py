"""RunRecord: what is known of one cell of a workflow. One JSON file a cell, written atomically.

Sizes are bytes and times seconds; units stand in the key names; a missing number is None and `missing` says why.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Mapping

SCHEMA_VERSION = 1


class Outcome(StrEnum):
    """What became of a cell: data, never a missing row."""

    OK = "ok"
    OOM = "oom"
    PLAN_INFEASIBLE = "plan_infeasible"
    PLAN_TIMEOUT = "plan_timeout"
    WRONG = "wrong"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    UNSUPPORTED = "unsupported"
    INTERRUPTED = "interrupted"


class Truth(StrEnum):
    """How the step's values stand to eager PyTorch's."""

    EXACT = "exact"
    WITHIN_NOISE = "within_noise"
    SEMANTICS_CHANGED = "semantics_changed"
    WRONG = "wrong"
    NOT_RUN = "not_run"


class Verdict(StrEnum):
    """Of a claim only."""

    REPRODUCED = "reproduced"
    PARTLY = "partly"
    NOT_REPRODUCED = "not reproduced"
    NOT_TESTABLE_HERE = "not testable here"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One cell. Every block is JSON-able; a block that does not apply is empty."""

    cell_id: str  # hash of `config`
    kind: str  # "step" (one training step, measured or simulated), "train" (many steps), "max_batch" (a search)
    workflow: Mapping[str, Any]  # name, path as given, sha256 of the file's bytes
    config: Mapping[str, Any]  # the resolved cell: model, batch_size, method, options, budget, target, seed, ...
    outcome: Outcome
    reason: str = ""  # gpu_memory, host_memory, pinned_limit, ... "" when ok
    message: str = ""  # one sentence for a person
    truth: Truth = Truth.NOT_RUN
    truth_detail: Mapping[str, Any] = field(default_factory=dict)  # steps, batch_size, recomputes, offloads, prefetches, differing
    budget_bytes: int | None = None  # resolved; None when the cell has no budget
    eager_peak_bytes: int | None = None  # what a percentage was taken of
    eager_peak_is_simulated: bool | None = None
    predicted: Mapping[str, Any] = field(default_factory=dict)  # Metrics.to_json() + profile: always *simulated*
    measured: Mapping[str, Any] = field(default_factory=dict)  # peak_bytes, cold_peak_bytes, step_seconds samples, ratio, ...
    search: Mapping[str, Any] = field(default_factory=dict)  # of a search: what is largest and the trial log
    training: Mapping[str, Any] = field(default_factory=dict)  # train: loss, gradient norm, accuracy per step, eager's beside
    missing: Mapping[str, str] = field(default_factory=dict)  # dotted field -> why it is None
    environment: Mapping[str, Any] = field(default_factory=dict)  # software and hardware of the process that measured
    provenance: Mapping[str, Any] = field(default_factory=dict)  # started, ended (UTC), seconds, digests of method, tape and schedule
    files: Mapping[str, str] = field(default_factory=dict)  # name in the cell's folder -> sha256
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """All fields as a dict, enums as their words."""
        return asdict(self) | {"outcome": str(self.outcome), "truth": str(self.truth)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> RunRecord:
        """Inverse of `to_json`. ValueError on another schema version, an unknown field, or a block that is none."""
        if body.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"record schema {body.get('schema_version')!r}, this vramlab reads {SCHEMA_VERSION}")
        unknown = set(body) - set(cls.__dataclass_fields__)
        if unknown:
            raise ValueError(f"unknown record fields: {', '.join(sorted(unknown))}")
        if wrong := [name for name in BLOCKS if not isinstance(body.get(name, {}), Mapping)]:
            raise ValueError(f"{wrong[0]}: {body[wrong[0]]!r} is no mapping")
        return cls(**{**body, "outcome": Outcome(body["outcome"]), "truth": Truth(body["truth"])})

    def save(self, path: Path) -> None:
        """Write atomically: a reader sees the whole record or none."""
        write_atomically(path, json.dumps(self.to_json(), indent=1, sort_keys=True, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        """Inverse of `save`. ValueError as `from_json`, and where a number is none: NaN and infinities are not written."""
        return cls.from_json(json.loads(path.read_text(), parse_constant=_refuse_constant))


BLOCKS = tuple(field.name for field in fields(RunRecord) if str(field.type).startswith("Mapping"))


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def hash_config(config: Mapping[str, Any]) -> str:
    """The cell_id of a resolved config: 16 hex digits of the SHA-256 of its sorted JSON."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_atomically(path: Path, body: str | bytes) -> None:
    """Temporary file in the same folder, fsync, rename. What is written in part does not stay, unless the process is killed.

    OSError names `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as f:
            f.write(body.encode() if isinstance(body, str) else body)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except OSError as error:
        error.filename = str(path)  # of a full disk it is not told, as only a descriptor was written to
        raise
    finally:
        part.unlink(missing_ok=True)
