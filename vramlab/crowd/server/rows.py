"""Records of a checked bundle as rows of the table `result`. What is none in the record is none in the row; nothing is filled in."""

from __future__ import annotations

import hashlib
import json
from statistics import median
from typing import Any, Iterator, Mapping

from vramlab.crowd.contents import Contents
from vramlab.crowd.layout import LIMITS, gunzip
from vramlab.crowd.server.fingerprints import fingerprint_of
from vramlab.crowd.server.tables import NAME, Result
from vramlab.errors import BundleRefused
from vramlab.record import RunRecord
from vramlab.report.words import counts, hardware_in_words, is_simulated, simulated_ratio
from vramlab.runs import RECORD_FILE, TELEMETRY_FILE, Cell, Run

ENOUGH_TO_RANK = 10  # timed steps
# Of a config: how it was measured and by which vramlab, not what was measured.
_APART = ("measure", "target", "sources")


def rows_of(run: Run) -> Iterator[Result]:
    """One row a record, without bundle, account and state. BundleRefused names a text that no row can hold."""
    contents = Contents(run.folder, LIMITS)
    for cell in run.cells:
        if cell.record is not None:
            yield _row(run, cell, cell.record, contents)


def _row(run: Run, cell: Cell, record: RunRecord, contents: Contents) -> Result:
    config, environment = record.config, run.environment_of(record)
    text = _Texts(cell)
    row = Result(
        cell_id=record.cell_id, record_sha256=hashlib.sha256((cell.folder / RECORD_FILE).read_bytes()).hexdigest(),
        workflow=text(run.workflow.get("name"), "workflow.name"), experiment=text(config.get("experiment"), "config.experiment"),
        kind=text(record.kind, "kind", 32), model=text(config.get("model"), "config.model"), workload=text(workload(config), "config"),
        method=text(config.get("method"), "config.method"),
        method_source_sha256=text((config.get("sources") or {}).get("method"), "config.sources.method", 64),
        harness_version=text((environment.get("software") or {}).get("vramlab"), "environment.software.vramlab"),
        device=text(device_of(config, environment), "environment"), target=text(config.get("target"), "config.target"),
        is_cpu=config.get("target") == "cpu", is_simulated=is_simulated(record), batch_size=_whole(config.get("batch_size")),
        budget=text(config.get("budget"), "config.budget"), budget_bytes=_whole(record.budget_bytes),
        seed=_whole((config.get("training") or {}).get("seed")), options=dict(config.get("options") or {}),
        outcome=str(record.outcome), reason=text(record.reason, "reason"), truth=str(record.truth),
        machine_hash=text((environment.get("system") or {}).get("host_hash"), "environment.system.host_hash", 64),
        telemetry_sha256=_telemetry_hash(cell, record), samples_sha256=_samples_hash(record), fingerprint=fingerprint_of(contents, record),
        samples=len(record.measured.get("step_seconds") or ()), **_metrics(record),
    )
    row.comparison_key = _hashed([_comparable(config), row.kind, row.device, row.is_simulated])
    row.standing_key = standing_key(row)
    return row


class _Texts:
    """Texts of a record, as long as a column and without control characters, or a refusal that names the field."""

    def __init__(self, cell: Cell) -> None:
        self._where = cell.path

    def __call__(self, value: Any, where: str, most: int = NAME) -> str:
        text = "" if value is None else str(value)
        if len(text) > most:
            raise BundleRefused("text-length", f"{self._where}:{where}", f"{len(text)} characters; at most {most} are taken")
        if not text.isprintable():
            raise BundleRefused("text-control", f"{self._where}:{where}", "control characters")
        return text


def workload(config: Mapping[str, Any]) -> str:
    """What a step's memory and time hang on beside model, batch and method, in words: `classes=1000 image_size=64, sgd, float32`."""
    training = config.get("training") or {}
    options = " ".join(f"{key}={_plain(value)}" for key, value in sorted((config.get("model_options") or {}).items()) if value is not False)
    words = [options, training.get("optimizer"), training.get("autocast") or "float32",
             "channels_last" if training.get("channels_last") else "", "" if config.get("data") in (None, "synthetic") else config["data"]]
    return _within(", ".join(str(word) for word in words if word))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _within(text: str) -> str:
    """The text, or its beginning with a hash of the whole."""
    return text if len(text) <= NAME else f"{text[:NAME - 18]}… {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def device_of(config: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """The GPU's model, `CPU: ...` for a processor, `simulated ...` for a profile."""
    target = str(config.get("target", ""))
    if target.startswith("sim:"):
        return f"simulated {(config.get('profile') or {}).get('name') or target.removeprefix('sim:')}"
    return f"CPU: {hardware_in_words(target, environment)}" if target == "cpu" else hardware_in_words(target, environment)


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be equal for two results to be the same cell: all of the config but how it was measured; of the sources, the method's
    and the model's."""
    same = {key: value for key, value in config.items() if key not in _APART}
    return same | {"sources": {key: (config.get("sources") or {}).get(key) for key in ("method", "model")}}


def standing_key(row: Result) -> str:
    """Equal for the results of one group of the leaderboard."""
    return _hashed([row.model, row.workload, row.device, row.is_simulated, row.method, row.kind, row.batch_size, row.budget])


def _metrics(record: RunRecord) -> dict[str, Any]:
    """Of a record whose numbers count; of any other all are None."""
    names = ("peak_bytes", "eager_peak_bytes", "memory_saved", "step_seconds", "overhead", "overhead_low", "overhead_high", "largest",
             "recomputes", "moved_bytes")
    if not counts(record):
        return dict.fromkeys(names)
    simulated = is_simulated(record)
    block = record.predicted if simulated else record.measured
    ratio = {"median": simulated_ratio(record)} if simulated else record.measured.get("ratio") or {}
    steps = block.get("step_seconds")
    eager = record.eager_peak_bytes if record.eager_peak_is_simulated is simulated else None
    peak = _whole(block.get("peak_bytes"))
    return {
        "peak_bytes": peak, "eager_peak_bytes": _whole(eager), "memory_saved": 1 - peak / eager if peak is not None and eager else None,
        "step_seconds": median(steps) if isinstance(steps, list) and steps else _number(steps),
        **{name: _less_one(ratio.get(key)) for name, key in (("overhead", "median"), ("overhead_low", "low"), ("overhead_high", "high"))},
        "largest": _whole(record.search.get("largest")), "recomputes": _whole(block.get("recomputes")),
        "moved_bytes": _whole(record.predicted.get("moved_bytes")),
    }


def _telemetry_hash(cell: Cell, record: RunRecord) -> str:
    """Of the samples as text: packed anew they are the same. "" without telemetry."""
    if TELEMETRY_FILE not in record.files:
        return ""
    return hashlib.sha256(gunzip((cell.folder / TELEMETRY_FILE).read_bytes(), TELEMETRY_FILE, may_be_cut=True)).hexdigest()


def _samples_hash(record: RunRecord) -> str:
    """Of the timed steps: no two measurements have the same ones. "" of fewer than two.

    Of enough pairs it is of the order in which they rank: copies whose times were stretched or changed a little are the same still, and two
    measurements of ten pairs rank alike once in (10!)^2 times.
    """
    samples, baseline = record.measured.get("step_seconds") or [], record.measured.get("baseline_step_seconds") or []
    if len(samples) >= ENOUGH_TO_RANK <= len(baseline):
        return _hashed([_order(samples), _order(baseline)])
    return _hashed([samples, record.measured.get("baseline_step_seconds")]) if len(samples) > 1 else ""


def _order(samples: list[float]) -> list[int]:
    return sorted(range(len(samples)), key=samples.__getitem__)


def _less_one(ratio: Any) -> float | None:
    return None if _number(ratio) is None else ratio - 1


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    """A whole number that 64 bits hold."""
    return int(value) if _number(value) is not None and abs(value) < 2**63 else None


def _hashed(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()
