"""Verdicts on claims of papers, each by a stated rule from the records of a run.

A workflow lists what it tests: `claims: [{id, rule, experiment, method, baseline, value, tolerance}]`; what the paper says
stands in reports/claims.yaml under that id. Five rules:

    memory_saved_percent  1 - smallest peak of the method / peak of the baseline, over the budgets that the method kept
    max_batch_ratio       largest batch of the method / largest batch of the baseline
    overhead_percent      time ratio to eager - 1, at the smallest peak that the method kept
    training_equal        loss, gradient norm and accuracy equal eager's at every step
    swap_not_first        share of storages that are cheaper to recompute than to swap: above zero, swapping is not always first

Grading is the same for every number. *reproduced*: within the claimed value or range widened by `tolerance`, a share of
the claimed value. *partly*: at least half of a claimed benefit, or at most twice a claimed cost (counted from 0 %, or from a
ratio of 1); more than was claimed is another number than the paper's, and no failure. *not reproduced*: anything else.
*not testable here*: the evidence is missing. Nothing is ever reproduced on missing evidence; measured cells go before
simulated ones, and a verdict that rests on simulation says so.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

import yaml

from vramlab.record import Outcome, RunRecord, Truth, Verdict
from vramlab.report.words import DASH, is_simulated, join_words, significant, span_in_words, target_in_words
from vramlab.runs import Run

DEFAULT_TOLERANCE = 0.1
REFERENCE_METHODS = ("eager", "replay", "network-wide", "vdnn-baseline")
FLOOR_RULES = ("memory_saved_percent",)  # more than the claimed range agrees, too: the budgets choose how much is saved
COST_RULES = ("overhead_percent",)  # less is better
PARTLY_SHARE = 0.5  # of a claimed benefit; its inverse for a cost


@dataclass(frozen=True, kw_only=True)
class PaperClaim:
    """What a paper says, as reports/claims.yaml has it."""

    id: str
    system: str
    metric: str
    value: Any  # number, [low, high], bool or word
    unit: str
    model: str = ""
    baseline: str = ""
    hardware: str = "unknown"
    where: str = ""
    source: str = ""
    confidence: str = "read"
    batch: int | None = None
    note: str = ""

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The claimed range; a single number is a range of no width. None when the claim has no number."""
        values = self.value if isinstance(self.value, list) else [self.value]
        if any(isinstance(v, bool) or not isinstance(v, int | float) for v in values) or not values:
            return None
        return float(values[0]), float(values[-1])

    @property
    def in_words(self) -> str:
        """`40 to 70 %`, `2.04 x`, `comparable`."""
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        unit = {"percent": "%", "text": "", "boolean": ""}.get(self.unit, self.unit)
        values = self.value if isinstance(self.value, list) else [self.value]
        return f"{' to '.join(f'{v:g}' if isinstance(v, int | float) else str(v) for v in values)} {unit}".strip()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule found: the obtained value in words, the verdict and the evidence."""

    verdict: Verdict
    obtained: str
    explanation: str
    evidence: tuple[RunRecord, ...] = ()
    is_simulated: bool | None = None  # None when nothing was found
    baseline: str = ""


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """One row of the claims table."""

    id: str
    claim: PaperClaim | None
    rule: str
    tolerance: float
    finding: Finding
    hardware: str  # what the evidence was obtained on, in words
    experiment: str = ""
    note: str = ""  # the workflow's own

    @property
    def verdict_in_words(self) -> str:
        """`reproduced`, `reproduced, by simulation`, ..."""
        by_simulation = self.finding.is_simulated and self.finding.verdict is not Verdict.NOT_TESTABLE_HERE
        return f"{self.finding.verdict}{', by simulation' if by_simulation else ''}"


def load_claims(paths: Iterable[Path]) -> dict[str, PaperClaim]:
    """Claims of several claims.yaml by id; a later file goes before an earlier one. ValueError on one that cannot be read."""
    found: dict[str, PaperClaim] = {}
    for path in paths:
        for entry in yaml.safe_load(Path(path).read_text(encoding="utf-8"))["claims"]:
            try:
                found[entry["id"]] = PaperClaim(**entry)
            except (TypeError, KeyError) as error:
                raise ValueError(f"{path}: claim {entry.get('id', entry)!r}: {error}") from error
    return found


def judge(requests: Sequence[Mapping[str, Any]], run: Run, known: Mapping[str, PaperClaim]) -> tuple[ClaimResult, ...]:
    """One result for each claim that the workflow lists, in its order."""
    return tuple(_judge_one(request, run, known) for request in requests)


def _judge_one(request: Mapping[str, Any], run: Run, known: Mapping[str, PaperClaim]) -> ClaimResult:
    claim, rule, experiment = known.get(request["id"]), str(request.get("rule", "")), request.get("experiment")
    tolerance = DEFAULT_TOLERANCE if request.get("tolerance") is None else float(request["tolerance"])
    chosen = [r for r in run.records if experiment is None or r.config.get("experiment") == experiment]
    if claim and request.get("value") is not None:
        claim = replace(claim, value=request["value"])
    if claim is None:
        finding = _untestable(f"no collection has a claim {request['id']!r}")
    elif rule not in RULES:
        finding = _untestable(f"there is no rule {rule!r}; there are {join_words(RULES)}")
    elif not chosen:
        finding = _untestable(f"no cell of experiment {experiment!r} has a record")
    else:
        finding = _apply(rule, Question(request, claim, tolerance, chosen, run.label))
    hardware = join_words(sorted({target_in_words(r.config, run.environment_of(r)) for r in finding.evidence})) or DASH
    return ClaimResult(id=request["id"], claim=claim, rule=rule, tolerance=tolerance, finding=finding, hardware=hardware,
                       experiment=str(experiment or ""), note=str(request.get("note") or ""))


class Question:
    """A claim put to the records of its experiment."""

    def __init__(self, request: Mapping[str, Any], claim: PaperClaim, tolerance: float, records: Sequence[RunRecord],
                 label: Callable[[RunRecord], str]) -> None:
        self.claim, self.tolerance, self._records, self._label = claim, tolerance, records, label
        self.baseline = str(request.get("baseline") or "eager")
        self.method = request.get("method") or self._find_method()

    def _find_method(self) -> str | None:
        """The method with the system's name, else the only one that is no reference."""
        methods = {self._label(r) for r in self._records} - {self.baseline}
        if (named := self.claim.system.lower()) in methods:
            return named
        candidates = methods - set(REFERENCE_METHODS)
        return candidates.pop() if len(candidates) == 1 else None

    def of_method(self, kind: str) -> list[RunRecord]:
        """The method's records of a kind."""
        return self._of(self.method, kind)

    def of_baseline(self, like: RunRecord) -> RunRecord | None:
        """The baseline's record for the same step on the same target, None when there is none that counts."""
        found = [r for r in self._of(self.baseline, like.kind) if comparison_key(r) == comparison_key(like) and is_sound(r)]
        return found[0] if found else None

    def _of(self, method: str | None, kind: str) -> list[RunRecord]:
        return [r for r in self._records if r.kind == kind and self._label(r) == method]

    def grade(self, obtained: float, rule: str) -> Verdict:
        """The verdict of a rule on a number."""
        low, high = self.claim.bounds
        is_high_enough = obtained >= low - self.tolerance * abs(low)
        if is_high_enough and (rule in FLOOR_RULES or not self.beyond(obtained)):
            return Verdict.REPRODUCED
        null = 1.0 if rule == "max_batch_ratio" else 0.0  # the value of no effect
        is_near = (obtained - null <= (high - null) / PARTLY_SHARE if rule in COST_RULES
                   else obtained - null >= PARTLY_SHARE * (low - null))
        return Verdict.PARTLY if is_near else Verdict.NOT_REPRODUCED

    def beyond(self, obtained: float) -> str:
        """Words for a value above the claimed range with its tolerance."""
        _, high = self.claim.bounds
        return " (more than claimed)" if obtained > high + self.tolerance * abs(high) else ""


def comparison_key(record: RunRecord) -> tuple[str, str]:
    """What must be equal for two cells to be compared: all of the config but the method, its options, its source and its budget."""
    config = {key: value for key, value in record.config.items() if key not in ("method", "options", "budget", "sources")}
    return record.kind, json.dumps(config, sort_keys=True)


def is_sound(record: RunRecord) -> bool:
    """Whether a record may be the ground of a verdict: it ended well, kept its budget and, unless simulated, is bit-exact."""
    kept = not record.measured.get("over_budget_bytes")
    return record.outcome is Outcome.OK and kept and (is_simulated(record) or record.truth is Truth.EXACT)


def _untestable(reason: str) -> Finding:
    return Finding(verdict=Verdict.NOT_TESTABLE_HERE, obtained=DASH, explanation=reason)


def _apply(rule: str, question: Question) -> Finding:
    if question.method is None:
        return _untestable("the workflow does not say which method the claim is about")
    needs_number = rule in ("memory_saved_percent", "max_batch_ratio", "overhead_percent")
    if needs_number and question.claim.bounds is None:
        return _untestable(f"the claim states no number ({question.claim.in_words})")
    finding = RULES[rule](question)
    recalled = question.claim.confidence == "recalled" and finding.verdict is Verdict.REPRODUCED
    if recalled:
        return replace(finding, verdict=Verdict.PARTLY, explanation=f"{finding.explanation}; the claimed value is recalled, not read")
    return finding


@dataclass(frozen=True)
class _Point:
    """One comparison: the method's record, the baseline's, and the number."""

    value: float
    record: RunRecord
    baseline: RunRecord | None
    is_simulated: bool


def _grade_points(question: Question, points: Sequence[_Point], rule: str, *, what: str, missing: str) -> Finding:
    """A verdict over all models, batches and targets: all must agree for *reproduced*, none may for *not reproduced*."""
    measured = [p for p in points if not p.is_simulated]
    used = measured or list(points)
    if not used:
        return _untestable(missing)
    verdicts = [question.grade(p.value, rule) for p in used]
    verdict = verdicts[0] if len(set(verdicts)) == 1 else Verdict.PARTLY
    unit, decimals = ("x", 2) if rule == "max_batch_ratio" else ("%", 1)
    records = dict.fromkeys(r.cell_id for p in used for r in (p.record, p.baseline) if r)
    by_id = {r.cell_id: r for p in used for r in (p.record, p.baseline) if r}
    return Finding(
        verdict=verdict, is_simulated=not measured, baseline=question.baseline, evidence=tuple(by_id[i] for i in records),
        obtained=span_in_words([p.value for p in used], unit, decimals) + question.beyond(max(p.value for p in used)),
        explanation=f"{what}{_also_simulated(measured, points, unit, decimals)}",
    )


def _also_simulated(measured: Sequence[_Point], points: Sequence[_Point], unit: str, decimals: int) -> str:
    simulated = [p.value for p in points if p.is_simulated]
    if not measured or not simulated:
        return ""
    return f"; simulated beside it: {span_in_words(simulated, unit, decimals)}"


def peak_of(record: RunRecord) -> tuple[int | None, bool]:
    """(peak bytes, whether it is simulated): the measured peak on hardware, the predicted one on a profile."""
    return (record.predicted if is_simulated(record) else record.measured).get("peak_bytes"), is_simulated(record)


def _smallest_peaks(question: Question) -> list[RunRecord]:
    """For each step and target the sound record of the method with the smallest peak."""
    groups: dict[tuple[str, str], list[RunRecord]] = defaultdict(list)
    for record in question.of_method("step"):
        if is_sound(record) and peak_of(record)[0]:
            groups[comparison_key(record)].append(record)
    return [min(group, key=lambda r: peak_of(r)[0]) for group in groups.values()]


def _baseline_peak(question: Question, record: RunRecord) -> tuple[int | None, RunRecord | None, bool]:
    """(peak, its record, whether it is simulated) of the baseline's own cell; for eager, else of what the record carries."""
    baseline = question.of_baseline(record)
    if baseline and peak_of(baseline)[0]:
        return peak_of(baseline)[0], baseline, peak_of(baseline)[1]
    if question.baseline == "eager" and record.eager_peak_is_simulated is not None:
        return record.eager_peak_bytes, None, record.eager_peak_is_simulated
    return None, None, False


def memory_saved_percent(question: Question) -> Finding:
    """1 - smallest peak of the method / peak of the baseline. A range is met from its low end: budgets choose the saving."""
    points = []
    for record in _smallest_peaks(question):
        base, baseline, is_simulated_base = _baseline_peak(question, record)
        if base:
            points.append(_Point(100 * (1 - peak_of(record)[0] / base), record, baseline, is_simulated(record) or is_simulated_base))
    return _grade_points(question, points, "memory_saved_percent",
                         what=f"largest saving of {question.method} against {question.baseline} over the budgets that it kept",
                         missing=f"no bit-exact cell of {question.method} has a peak beside one of {question.baseline}")


def max_batch_ratio(question: Question) -> Finding:
    """Largest batch of the method / largest batch of the baseline, on the same target with the same memory."""
    points, reasons = [], []
    for record in question.of_method("max_batch"):
        baseline = question.of_baseline(record)
        if not is_sound(record) or baseline is None:
            continue
        largest, base = record.search.get("largest"), baseline.search.get("largest")
        ended = [r.config["method"] for r in (record, baseline) if r.search.get("largest") == r.search.get("high")]
        if not largest or not base:
            reasons.append("a search found no batch that fits")
        elif record.search.get("memory_bytes") != baseline.search.get("memory_bytes"):
            reasons.append("the searches had different memory")
        elif ended:
            reasons.append(f"the search of {join_words(ended)} ended at its own limit, so the largest batch is not known")
        else:
            points.append(_Point(largest / base, record, baseline, is_simulated(record)))
    what = "; ".join(_batches_in_words(p.record, p.baseline) for p in points)
    return _grade_points(question, points, "max_batch_ratio", what=f"largest batch: {what}",
                         missing=join_words(dict.fromkeys(reasons)) or
                         f"no finished search for both {question.method} and {question.baseline}")


def _batches_in_words(record: RunRecord, baseline: RunRecord) -> str:
    """`408 against 200, at 0.85 of its samples a second`: the largest batch need not be a fast one."""
    told = f"{record.search['largest']} against {baseline.search['largest']}"
    rates = [_samples_per_second(r) for r in (record, baseline)]
    return told if None in rates else f"{told}, at {significant(rates[0] / rates[1], 2)} of its samples a second"


def _samples_per_second(record: RunRecord) -> float | None:
    """At the largest batch, from the log of the search; None where it has no time."""
    largest = record.search["largest"]
    seconds = next((t.get("step_seconds") for t in record.search.get("trials") or () if t.get("batch_size") == largest), None)
    return largest / seconds if seconds else None


def overhead_percent(question: Question) -> Finding:
    """Extra time of a step against eager at the smallest peak: measured paired ratio, or simulated step / its first runs."""
    points = []
    for record in _smallest_peaks(question):
        ratio = (record.measured.get("ratio") or {}).get("median")
        step, compute = record.predicted.get("step_seconds"), record.predicted.get("compute_seconds")
        if not is_simulated(record) and ratio:
            points.append(_Point(100 * (ratio - 1), record, None, False))
        elif is_simulated(record) and step and compute:
            points.append(_Point(100 * (step / compute - 1), record, None, True))
    return _grade_points(question, points, "overhead_percent",
                         what=f"extra step time of {question.method} at the smallest peak that it kept",
                         missing=f"no bit-exact cell of {question.method} has a step time")


def training_equal(question: Question) -> Finding:
    """Every step of every training cell equals eager's, in loss, gradient norm and accuracy; derived from the raw series."""
    records = [r for r in question.of_method("train") if r.training.get("loss")]
    if not records:
        return _untestable(f"no training cell of {question.method} has a record")
    compared = [_compare_training(record, question.tolerance) for record in records]
    order = [Verdict.NOT_REPRODUCED, Verdict.NOT_TESTABLE_HERE, Verdict.PARTLY, Verdict.REPRODUCED]
    verdict = min((c[0] for c in compared), key=order.index)
    return Finding(verdict=verdict, obtained=join_words(dict.fromkeys(c[1] for c in compared)), is_simulated=False, baseline="eager",
                   explanation="; ".join(dict.fromkeys(c[2] for c in compared)), evidence=tuple(records))


def _compare_training(record: RunRecord, tolerance: float) -> tuple[Verdict, str, str]:
    block = record.training
    series = {name: (block.get(name) or [], block.get(f"eager_{name}") or []) for name in ("loss", "grad_norm", "accuracy")}
    steps, planned = len(series["loss"][0]), int(record.config.get("training", {}).get("steps", 0))
    absent = [name for name in ("loss", "grad_norm") if not series[name][1] or None in series[name][0] or None in series[name][1]]
    if record.outcome not in (Outcome.OK, Outcome.WRONG):
        return Verdict.NOT_TESTABLE_HERE, DASH, f"the training cell ended as {record.outcome}"
    if absent:
        return Verdict.NOT_TESTABLE_HERE, DASH, f"the series of {join_words(absent)} is incomplete"
    differing = {name: _first_difference(*pair) for name, pair in series.items()}
    first = min((step for step in differing.values() if step is not None), default=None)
    if first is not None:
        return _grade_difference(series, first, steps, tolerance)
    if steps < planned:
        return Verdict.NOT_TESTABLE_HERE, f"equal over {steps} steps", f"{planned} steps were planned, {steps} were run"
    if not series["accuracy"][0]:
        return Verdict.PARTLY, f"loss and gradient norm equal at all {steps} steps", "no accuracy was evaluated"
    return (Verdict.REPRODUCED, f"equal at all {steps} steps",
            f"loss, gradient norm and accuracy equal eager's bit for bit; final accuracy {series['accuracy'][0][-1][1]:.4g}")


def _first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int | None:
    """Index of the first unequal entry, the shorter length when one series ends early; None when they are equal."""
    for index, (a, b) in enumerate(zip(ours, theirs)):
        if a != b:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _grade_difference(series: Mapping[str, tuple[Sequence[Any], Sequence[Any]]], first: int, steps: int,
                      tolerance: float) -> tuple[Verdict, str, str]:
    """Unequal series: *partly* when the final accuracy is still within the tolerance of eager's."""
    ours, theirs = (values[-1][1] if values else None for values in series["accuracy"])
    obtained = f"differs from eager at step {first + 1} of {steps}"
    if ours is None or theirs is None:
        return Verdict.NOT_REPRODUCED, obtained, "no accuracy was evaluated"
    is_close = abs(ours - theirs) <= tolerance * abs(theirs)
    return (Verdict.PARTLY if is_close else Verdict.NOT_REPRODUCED), obtained, f"final accuracy {ours:.4g}, eager's {theirs:.4g}"


def swap_not_first(question: Question) -> Finding:
    """Where recomputing a storage is cheaper than swapping it, swapping is not the better first choice. `tolerance` is the
    smallest share of storages that counts as *not always*."""
    found = [(r, r.predicted["swap_vs_recompute"]) for r in question.of_method("step") if r.predicted.get("swap_vs_recompute")]
    found = [(r, block) for r, block in found if r.outcome is Outcome.OK and block.get("storages")]
    if not found:
        return _untestable(f"no cell of {question.method} compares swapping with recomputing")
    shares = [block["recompute_cheaper"] / block["storages"] for _, block in found]
    verdict = (Verdict.REPRODUCED if min(shares) > question.tolerance
               else Verdict.PARTLY if max(shares) > 0 else Verdict.NOT_REPRODUCED)
    counted = "; ".join(dict.fromkeys(f"{block['recompute_cheaper']} of {block['storages']} storages" for _, block in found))
    return Finding(verdict=verdict, is_simulated=True, baseline="swap cost against recompute cost of each storage",
                   obtained=f"recomputing is cheaper for {span_in_words([100 * s for s in shares], '%', 0)} of storages",
                   explanation=counted, evidence=tuple(r for r, _ in found))


RULES: dict[str, Callable[[Question], Finding]] = {
    rule.__name__: rule for rule in (memory_saved_percent, max_batch_ratio, overhead_percent, training_equal, swap_not_first)
}


def expectation(rule: str, claim: PaperClaim, tolerance: float) -> str:
    """What *reproduced* asks of a claim, in words: `at least 36 %`, `1.84 to 2.24 x`. ValueError on an unknown rule."""
    if rule == "training_equal":
        return "loss, gradient norm and accuracy equal eager's at every step"
    if rule == "swap_not_first":
        return f"recomputing is cheaper for more than {100 * tolerance:g} % of storages"
    if rule not in RULES or claim.bounds is None:
        raise ValueError(f"rule {rule!r} and claim {claim.id!r} do not go together")
    low, high = claim.bounds
    least, most = low - tolerance * abs(low), high + tolerance * abs(high)
    unit, decimals = ("x", 2) if rule == "max_batch_ratio" else ("%", 1)
    return f"at least {least:.{decimals}f} {unit}" if rule in FLOOR_RULES else f"{least:.{decimals}f} to {most:.{decimals}f} {unit}"
