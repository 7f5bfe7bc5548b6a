"""What a machine measured, as far as it tells a second measurement from a copy: seconds of operators and raw step times.

Two measurements of one step differ from operator to operator and from step to step, by what a machine does besides. A copy differs by one
factor, and by the little that each number was changed. Kept with each measured result, and compared with those of the same cell:

    operators   the seconds of up to 128 forms of operators (target, types, shapes and strides); near where most of their ratios are one
    steps       the raw times of the method's steps and of eager's beside them; near where both rise and fall together, step by step, and
                their ratios are one: busy machines may share a rhythm, but not to a hundredth
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import log
from statistics import median
from typing import Any

import numpy as np
from scipy.stats import rankdata

from vramlab.crowd.contents import Contents
from vramlab.record import Outcome, RunRecord
from vramlab.report.words import is_simulated
from vramlab.runs import TAPE_FILE
from vramlab.tape import Op, Tape

MOST_FORMS, MOST_STEPS = 128, 200  # that are kept
FEWEST_FORMS, FEWEST_STEPS = 16, 8  # in common; of fewer nothing is said
# (share of the common factor, share of the operators that lie so near it): docs/bundles.md says what was measured.
NEAR_OPERATORS: Mapping[str, tuple[float, float]] = {"cpu": (0.005, 0.5), "cuda": (0.001, 0.9)}
NEAR_STEPS = 0.95  # rank correlation of the changes from step to step
NEAR_STEP_TIMES = 0.01  # and the median distance of a step's ratio from the common factor


def fingerprint_of(contents: Contents, record: RunRecord) -> dict[str, Any] | None:
    """`{"kind", "operators": {form: seconds}, "steps": [[seconds], [eager's seconds]]}` of a measured result; None of any other.

    BundleRefused where the bundle's tape is none.
    """
    if is_simulated(record) or record.outcome is not Outcome.OK:
        return None
    measured, tape = record.measured, record.files.get(TAPE_FILE)
    pair = [list(measured.get(name) or ())[:MOST_STEPS] for name in ("step_seconds", "baseline_step_seconds")]
    if not all(seconds > 0 for series in pair for seconds in series):
        pair = [[], []]
    kind = str(record.config.get("target")).partition(":")[0]
    return {"kind": kind, "operators": _operators(contents.tape(tape)) if tape else {}, "steps": pair}


def _operators(tape: Tape) -> dict[str, float]:
    """Form -> least seconds. Which forms are kept depends on no time, so that two measurements keep the same."""
    found: dict[str, float] = {}
    for op in tape.ops:
        if op.seconds > 0:
            form = _form(tape, op)
            found[form] = min(op.seconds, found.get(form, op.seconds))
    return {form: found[form] for form in sorted(found)[:MOST_FORMS]}


def _form(tape: Tape, op: Op) -> str:
    tensors = [None if t is None else tape.tensors[t] for t in (*op.inputs, *op.outputs)]
    body = [op.target, [t and [t.dtype, t.shape, t.strides] for t in tensors]]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()[:8]


def are_operators_near(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether the seconds of operators of two fingerprints are one measurement: equal, or the other's up to a factor and a little."""
    if not one or not other or one["kind"] != other["kind"] or one["kind"] not in NEAR_OPERATORS:
        return False
    ratios = log_ratios(one["operators"], other["operators"])
    near, share = NEAR_OPERATORS[one["kind"]]
    return len(ratios) >= FEWEST_FORMS and float(np.mean(np.abs(ratios - np.median(ratios)) <= near)) > share


def log_ratios(one: Mapping[str, float], other: Mapping[str, float]) -> np.ndarray:
    """Of the seconds of the forms that both have."""
    common = [form for form in one if form in other]
    return np.log([one[form] / other[form] for form in common]) if common else np.empty(0)


def are_steps_near(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether the raw step times of two fingerprints are one measurement: both series rise and fall from step to step as the other's do,
    and are the other's up to a factor and a little."""
    if not one or not other:
        return False
    pair = one["steps"], other["steps"]
    if min(map(len, (*pair[0], *pair[1]))) < FEWEST_STEPS or step_distance(*pair) > NEAR_STEP_TIMES:  # the cheap question first
        return False
    alike = step_correlation(*pair)
    return alike is not None and alike >= NEAR_STEPS


def step_distance(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Median distance of the ratio of two steps from the common factor, as a share; the larger of the method's and eager's."""
    return max(_distance(ours, theirs) for ours, theirs in zip(one, other))


def _distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """In plain Python: of so few numbers it takes a tenth of NumPy's time, and a popular cell asks it 200 times a result."""
    ratios = [log(a / b) for a, b in zip(ours, theirs)]
    middle = median(ratios)
    return median(abs(ratio - middle) for ratio in ratios)


def step_correlation(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float | None:
    """Rank correlation of the changes from step to step, the method's and eager's together; None of too few, or where nothing changes.

    Of changes, so that two machines that both grow slower do not pass for one; of ranks, so that one outlier decides nothing.
    """
    count = min(map(len, (*one, *other)))
    if count < FEWEST_STEPS:
        return None
    ours, theirs = (np.concatenate([np.diff(np.log(series[:count])) for series in pair]) for pair in (one, other))
    if not np.ptp(ours) or not np.ptp(theirs):
        return None
    return float(np.corrcoef(rankdata(ours), rankdata(theirs))[0, 1])
