"""Numbers and facts as a person reads them. A number that is missing is a dash; its reason is told beside it."""

from __future__ import annotations

import math
from typing import Any, Iterable, Mapping, Sequence

from vramlab.counted import count_of
from vramlab.record import Outcome, RunRecord, Truth
from vramlab.statistics import FEWEST_SAMPLES, Interval, distinguishable, is_too_few

DASH = "\u2013"
FEW_PAIRS = (f"an interval of fewer than {FEWEST_SAMPLES} pairs of steps does not reach 95 %: so few may well all lie on one side of the "
             "median")
NBSP = "\u00a0"
MIB, GIB = 2**20, 2**30


def bytes_in_words(nbytes: float | None) -> str:
    """`812.4 MiB`, `5.31 GiB`; a dash for None."""
    if nbytes is None:
        return DASH
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{significant(nbytes / size, 4)} {unit}"
    return f"{nbytes:.0f} B"


def seconds_in_words(seconds: float | None) -> str:
    """`1.24 s`, `35.2 ms`, `12.5 min`; a dash for None."""
    if seconds is None:
        return DASH
    if seconds >= 120:
        return f"{significant(seconds / 60, 3)} min"
    return f"{significant(seconds, 3)} s" if seconds >= 1 else f"{significant(seconds * 1000, 3)} ms"


def significant(value: float, digits: int) -> str:
    """A number with so many significant digits, never in powers of ten."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def decimals_for(low: float, high: float) -> int:
    """How many decimals an interval of this width supports: the last digit shown is the first that it leaves in doubt."""
    half = abs(high - low) / 2
    return 3 if half == 0 else min(4, max(0, -math.floor(math.log10(half))))


def interval_in_words(block: Mapping[str, Any]) -> str:
    """`1.23 (1.20 to 1.26; 20 pairs)` of a {median, low, high, n} block, with the digits that its width supports; of too few pairs for an
    interval `1.23 (3 pairs, no interval)`, whatever ends the block has; else a dash."""
    if is_of_few_pairs(block) and block.get("median") is not None:
        return f"{block['median']:.2f} ({count_of(block['n'], 'pair')}, no interval)"
    values = [block.get(key) for key in ("median", "low", "high")]
    if any(value is None for value in values):
        return DASH
    decimals = max(1, decimals_for(values[1], values[2]))
    pairs = f"; {count_of(block['n'], 'pair')}" if block.get("n") else ""
    return f"{values[0]:.{decimals}f} ({values[1]:.{decimals}f} to {values[2]:.{decimals}f}{pairs})"


def is_of_few_pairs(block: Mapping[str, Any]) -> bool:
    """Whether a ratio rests on so few pairs that it has no interval."""
    return bool(block.get("n")) and is_too_few(block["n"])


def is_distinguishable(ratio: Mapping[str, Any], drift: Mapping[str, Any]) -> bool | None:
    """Whether a time ratio stands apart from eager, as `statistics.distinguishable` says; None when either is missing or of too few pairs.
    A block without its number of pairs is taken to have enough."""
    keys = ("median", "low", "high")
    if any(map(is_of_few_pairs, (ratio, drift))) or any(block.get(key) is None for block in (ratio, drift) for key in keys):
        return None
    intervals = (Interval(**{key: block[key] for key in keys}, n=block.get("n") or FEWEST_SAMPLES) for block in (ratio, drift))
    return distinguishable(*intervals)


def join_words(words: Iterable[str], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    items = list(words)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {last} {items[-1]}" if items else ""


def is_simulated_target(config: Mapping[str, Any]) -> bool:
    """Whether a cell runs on a device profile rather than on hardware."""
    return str(config.get("target", "")).startswith("sim:")


def is_eager(config: Mapping[str, Any]) -> bool:
    """Whether a cell is plain PyTorch, which plans nothing."""
    return config.get("method") == "eager"


def is_simulated(record: RunRecord) -> bool:
    """Whether a record's numbers come from the simulator alone."""
    return is_simulated_target(record.config)


def counts(record: RunRecord) -> bool:
    """Whether a record's numbers count: it came to its end and, where it measured, the truth gate passed."""
    if record.outcome is not Outcome.OK:
        return False
    return is_simulated(record) or record.truth not in (Truth.WRONG, Truth.NOT_RUN)


def simulated_ratio(record: RunRecord) -> float | None:
    """Simulated step time / eager's on the same profile; None where either is missing.

    Eager's, not the method's own first runs: those may run by other convolution algorithms or in smaller passes.
    """
    step, eager = record.predicted.get("step_seconds"), record.predicted.get("eager_step_seconds")
    return step / eager if step and eager else None


def budget_in_words(config: Mapping[str, Any]) -> str:
    """`60 %`, `6GiB`, `auto`; `none` for a cell without a budget."""
    budget = config.get("budget")
    return "none" if budget is None else str(budget).replace("%", " %")


def target_in_words(config: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """`simulated v100-32gb`, or the name of the processor or GPU that measured."""
    target = str(config.get("target", ""))
    if target.startswith("sim:"):
        return f"simulated {config.get('profile', {}).get('name') or target.removeprefix('sim:')}"
    return hardware_in_words(target, environment)


def hardware_in_words(target: str, environment: Mapping[str, Any]) -> str:
    """The GPU's name for `cuda:0`, the processor's model with its cores for `cpu`."""
    if target.startswith("cuda"):
        names = [gpu.get("name") for gpu in environment.get("gpus", ()) if gpu.get("name")]
        return join_words(sorted(set(names))) or "an NVIDIA GPU of unknown name"
    cpu = environment.get("cpu", {})
    model = cpu.get("model") or "a processor of unknown name"
    return f"{model}, {count_of(cpu['usable_cores'], 'core')}" if cpu.get("usable_cores") else model


def span_in_words(values: Sequence[float], unit: str, decimals: int = 1) -> str:
    """`41.2 to 60.0 %`, or `60.0 %` when there is one value or all are equal."""
    low, high = f"{min(values):.{decimals}f}", f"{max(values):.{decimals}f}"
    return f"{low} {unit}".strip() if low == high else f"{low} to {high} {unit}".strip()
