"""Verdicts on claims of papers, each by a stated rule from the records of a run.

A workflow lists what it tests: `claims: [{id, rule, experiment, method, baseline, value, tolerance}]`; what the paper says
stands in reports/claims.yaml under that id. The rules of this file, and those of vramlab/report/headlines.py for what papers'
headlines state:

    memory_saved_percent  1 - smallest peak of the method / peak of the baseline, over the budgets that the method kept
    max_batch_ratio       largest batch (or depth, ...) of the method / that of the baseline
    overhead_percent      time ratio to eager - 1, at the smallest peak that the method kept
    training_equal        loss, gradient norm and accuracy equal eager's at every step
    swap_not_first        share of storages that are cheaper to recompute than to swap: above zero, swapping is not always first
    fits                  a network of the claimed size has a plan within the budget
    meets_its_bound       a plan at the smallest budget that refusals name, none one byte below
    fastest_of_all        share of cells in which no other planner has a faster step

Grading is the same for every number. *reproduced*: within the claimed value or range widened by `tolerance`, a share of
the claimed value. *partly*: at least half of a claimed benefit, or at most twice a claimed cost (counted from 0 %, or from a
ratio of 1), or within a factor of two of a claimed amount; more than was claimed is another number than the paper's, and no
failure. *not reproduced*: anything else.
*not testable here*: the evidence is missing. Nothing is ever reproduced on missing evidence; measured cells go before
simulated ones, and a verdict that rests on simulation says so; where it changes when the device's link or FLOP/s are 20 % off, for
better or worse, it is *partly* (vramlab/report/sensitivity.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

import yaml

from vramlab.counted import all_of, count_of
from vramlab.device import PERTURBATIONS
from vramlab.finder import BATCH
from vramlab.record import Outcome, RunRecord, Verdict
from vramlab.report import sensitivity
from vramlab.report.headlines import HEADLINES, SCALES, Answer, searched
from vramlab.report.points import Point, baseline_peak, comparison_key, fits_the_board, is_sound, peak_of, size_of_network, smallest_peaks
from vramlab.report.words import (
    DASH, bytes_in_words, is_of_few_pairs, is_simulated, join_words, significant, simulated_ratio, span_in_words, target_in_words,
)
from vramlab.runs import Run

DEFAULT_TOLERANCE = 0.1
REFERENCE_METHODS = ("eager", "replay", "network-wide", "vdnn-baseline")
PARTLY_SHARE = 0.5  # of a claimed benefit; its inverse for a cost; both ends for an amount


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
    def counts(self) -> bool:
        """A claim that is recalled and not read is shown, and never counted."""
        return self.confidence != "recalled"

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The claimed range; a single number is a range of no width. None when the claim has no number."""
        values = self.value if isinstance(self.value, list) else [self.value]
        if any(isinstance(v, bool) or not isinstance(v, int | float) for v in values) or not values:
            return None
        return float(values[0]), float(values[-1])

    def stated_as(self, value: Any, rule: str) -> PaperClaim:
        """The claim with the value that a workflow derives from it: a ratio of two entries of the paper's table has no unit of either."""
        return replace(self, value=value, unit="x" if rule.endswith("_ratio") else self.unit)

    @property
    def in_words(self) -> str:
        """`40 to 70 %`, `2.04 x`, `comparable`."""
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        unit = {"percent": "%", "text": "", "boolean": "", "bytes/s": "GB/s"}.get(self.unit, self.unit)
        size, digits = (1e9, 4) if self.unit == "bytes/s" else (1, 12)  # as it is stated, but for a rate in single bytes
        values = self.value if isinstance(self.value, list) else [self.value]
        told = (f"{v / size:.{digits}g}" if isinstance(v, int | float) else str(v) for v in values)
        return f"{' to '.join(told)} {'' if unit.startswith('dimensionless') else unit}".strip()


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
    sensitivity: str = ""  # of a simulated verdict, in words

    @property
    def counts(self) -> bool:
        """Not what is only recalled of a paper."""
        return self.claim is None or self.claim.counts

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
    told = ""
    claim, rule, named = known.get(request["id"]), str(request.get("rule", "")), request.get("experiment")
    experiments = named if isinstance(named, list) else [named] if named else []
    tolerance = DEFAULT_TOLERANCE if request.get("tolerance") is None else float(request["tolerance"])
    chosen = [r for r in run.records if not experiments or r.config.get("experiment") in experiments]
    if claim and request.get("value") is not None:
        claim = claim.stated_as(request["value"], rule)
    if claim is None:
        finding = _untestable(f"no collection has a claim {request['id']!r}")
    elif rule not in RULES:
        finding = _untestable(f"there is no rule {rule!r}; there are {join_words(RULES)}")
    elif not chosen:
        finding = _untestable(f"no cell of experiment {join_words(map(repr, experiments))} has a record")
    else:
        def ask(records: Sequence[RunRecord]) -> Finding:
            return _apply(rule, Question(request, claim, tolerance, records, run.label))

        finding, told = _under_perturbation(ask(chosen), ask, chosen)
    hardware = join_words(sorted({target_in_words(r.config, run.environment_of(r)) for r in finding.evidence})) or DASH
    return ClaimResult(id=request["id"], claim=claim, rule=rule, tolerance=tolerance, finding=finding, hardware=hardware,
                       experiment=join_words(experiments), note=str(request.get("note") or ""), sensitivity=told)


def _under_perturbation(finding: Finding, ask: Callable[[Sequence[RunRecord]], Finding],
                        records: Sequence[RunRecord]) -> tuple[Finding, str]:
    """The finding, *partly* where another device 20 % off gives another verdict, and what the perturbations give, in words."""
    if not finding.is_simulated or finding.verdict is Verdict.NOT_TESTABLE_HERE:
        return finding, ""
    if lacking := [r for r in finding.evidence if not sensitivity.is_known(r)]:
        return finding, f"not computed: {sensitivity.why_unknown(lacking[0])}"
    found = {name: ask([sensitivity.perturbed(r, name) for r in records]) for name in PERTURBATIONS}
    told = "; ".join(f"{name}: {f.obtained}, {f.verdict}" for name, f in found.items())
    flipped = [name for name, f in found.items() if f.verdict is not finding.verdict]
    if not flipped:
        return finding, f"holds at {told}"
    return replace(finding, verdict=Verdict.PARTLY), f"flips at {join_words(flipped)} (unperturbed: {finding.verdict}). {told}"


class Question:
    """A claim put to the records of its experiment."""

    def __init__(self, request: Mapping[str, Any], claim: PaperClaim, tolerance: float, records: Sequence[RunRecord],
                 label: Callable[[RunRecord], str]) -> None:
        self.claim, self.tolerance, self.records, self.label = claim, tolerance, records, label
        self._only = {key: request[key] for key in ("budget", "batch_size", "devices") if request.get(key) is not None}
        self.baseline_batch_size: int | None = request.get("baseline_batch_size")
        self.baseline = str(request.get("baseline") or "eager")
        self.method = request.get("method") or self._find_method()

    def _find_method(self) -> str | None:
        """The method with the system's name, else the only one that is no reference."""
        methods = {self.label(r) for r in self.records} - {self.baseline}
        if (named := self.claim.system.lower()) in methods:
            return named
        candidates = methods - set(REFERENCE_METHODS)
        return candidates.pop() if len(candidates) == 1 else None

    def of_method(self, kind: str) -> list[RunRecord]:
        """The method's records of a kind; of the budget, batch size and number of devices that the claim names."""
        return [r for r in self._of(self.method, kind) if all(r.config.get(key) == value for key, value in self._only.items())]

    def of_baseline(self, like: RunRecord) -> RunRecord | None:
        """The baseline's record for the same step on the same target, None when there is none that counts."""
        return next(iter(self.of_baselines(like)), None)

    def of_baselines(self, like: RunRecord) -> list[RunRecord]:
        """All of them, one a budget."""
        size = self.baseline_batch_size
        wanted = comparison_key(like if size is None else replace(like, config={**like.config, "batch_size": size}))
        return [r for r in self._of(self.baseline, like.kind) if comparison_key(r) == wanted and is_sound(r)]

    def _of(self, method: str | None, kind: str) -> list[RunRecord]:
        return [r for r in self.records if r.kind == kind and self.label(r) == method]

    def grade(self, obtained: float, rule: str) -> Verdict:
        """The verdict of a rule on a number."""
        (low, high), scale = self.claim.bounds, SCALES[rule]
        is_high_enough = obtained >= low - self.tolerance * abs(low)
        if is_high_enough and (scale.is_floor or not self.beyond(obtained)):
            return Verdict.REPRODUCED
        effect = obtained - scale.no_effect
        is_enough = effect >= PARTLY_SHARE * (low - scale.no_effect)
        is_little = effect <= (high - scale.no_effect) / PARTLY_SHARE
        is_near = {"benefit": is_enough, "cost": is_little, "amount": is_enough and is_little}[scale.kind]
        return Verdict.PARTLY if is_near else Verdict.NOT_REPRODUCED

    def beyond(self, obtained: float) -> str:
        """Words for a value above the claimed range with its tolerance."""
        _, high = self.claim.bounds
        return " (more than claimed)" if obtained > high + self.tolerance * abs(high) else ""


def _untestable(reason: str) -> Finding:
    return Finding(verdict=Verdict.NOT_TESTABLE_HERE, obtained=DASH, explanation=reason)


def _apply(rule: str, question: Question) -> Finding:
    if question.method is None:
        return _untestable("the workflow does not say which method the claim is about")
    if rule in SCALES and question.claim.bounds is None:
        return _untestable(f"the claim states no number ({question.claim.in_words})")
    finding = RULES[rule](question)
    if finding.verdict is Verdict.REPRODUCED and not question.claim.counts:
        return replace(finding, verdict=Verdict.PARTLY, explanation=f"{finding.explanation}; the claimed value is recalled, not read")
    return finding


def _grade_points(question: Question, points: Sequence[Point], rule: str, *, what: str, missing: str,
                  refused: Sequence[RunRecord] = ()) -> Finding:
    """A verdict over all models, batches and targets: all must agree for *reproduced*, none may for *not reproduced*. A step that the
    method has no plan for, at any of its budgets, does not agree."""
    measured = [p for p in points if not p.is_simulated]
    used = measured or list(points)
    if not used:
        return _untestable(missing)
    verdicts = [question.grade(p.value, rule) for p in used] + [Verdict.NOT_REPRODUCED] * len(refused)
    verdict = verdicts[0] if len(set(verdicts)) == 1 else Verdict.PARTLY
    unit, decimals = _unit_of(rule, question.claim)
    by_id = {r.cell_id: r for r in (*(r for p in used for r in (p.record, p.baseline) if r), *refused)}
    also = f"; refused: {join_words(f'{_step_in_words(r)} ({r.message})' for r in refused)}" if refused else ""
    return Finding(
        verdict=verdict, is_simulated=not measured, baseline=question.baseline, evidence=tuple(by_id.values()),
        obtained=span_in_words([p.value for p in used], unit, decimals) + question.beyond(max(p.value for p in used))
        + (f", {len(refused)} refused" if refused else ""),
        explanation=f"{what}{_also_simulated(measured, points, unit, decimals)}{also}",
    )


def _step_in_words(record: RunRecord) -> str:
    return f"{record.config['model']} at batch {record.config['batch_size']}"


def _refused_steps(question: Question) -> list[RunRecord]:
    """One simulated refusal for each step and target for which the method has no plan at any of its budgets."""
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for r in question.of_method("step"):
        groups.setdefault(comparison_key(r), []).append(r)
    return [group[0] for group in groups.values() if all(r.outcome is Outcome.PLAN_INFEASIBLE and is_simulated(r) for r in group)]


def _unit_of(rule: str, claim: PaperClaim) -> tuple[str, int]:
    """(unit, decimals) in which a rule's number is told."""
    unit = SCALES[rule].unit or claim.unit
    if unit.split(" ")[0] in ("layers", "images"):
        return unit, 0
    return unit, 3 if unit.split(" ")[0] in ("GB", "GiB", "s") else SCALES[rule].decimals


def _also_simulated(measured: Sequence[Point], points: Sequence[Point], unit: str, decimals: int) -> str:
    simulated = [p.value for p in points if p.is_simulated]
    if not measured or not simulated:
        return ""
    return f"; simulated beside it: {span_in_words(simulated, unit, decimals)}"


def memory_saved_percent(question: Question) -> Finding:
    """1 - smallest peak of the method / peak of the baseline. A range is met from its low end: budgets choose the saving."""
    points = []
    for record in smallest_peaks(question):
        base, baseline, is_simulated_base = baseline_peak(question, record)
        if base:
            points.append(Point(100 * (1 - peak_of(record)[0] / base), record, baseline, is_simulated(record) or is_simulated_base))
    return _grade_points(question, points, "memory_saved_percent",
                         what=f"largest saving of {question.method} against {question.baseline} over the budgets that it kept",
                         missing=f"no bit-exact cell of {question.method} has a peak beside one of {question.baseline}")


def max_batch_ratio(question: Question) -> Finding:
    """What fits at most with the method / with the baseline, on the same target with the same memory: a batch, an image size."""
    answer = searched(question)
    over = answer.points[0].record.search.get("over", BATCH) if answer.points else BATCH
    what = "; ".join(_batches_in_words(p.record, p.baseline) for p in answer.points)
    return _grade_points(question, answer.points, "max_batch_ratio", what=f"largest {over}: {what}", missing=answer.missing)


def _batches_in_words(record: RunRecord, baseline: RunRecord) -> str:
    """`408 against 200, at 0.85 of its samples a second`: the largest batch need not be a fast one."""
    told = f"{record.search['largest']} against {baseline.search['largest']}"
    rates = [_samples_per_second(r) for r in (record, baseline)]
    return told if None in rates else f"{told}, at {significant(rates[0] / rates[1], 2)} of its samples a second"


def _samples_per_second(record: RunRecord) -> float | None:
    """At the largest that fits, from the log of the search; None where it has no time."""
    largest = record.search["largest"]
    seconds = next((t.get("step_seconds") for t in record.search.get("trials") or () if t.get("value") == largest), None)
    samples = record.config["batch_size"] or largest
    return samples / seconds if seconds else None


def overhead_percent(question: Question) -> Finding:
    """Extra time of a step against eager at the smallest peak: measured paired ratio, or both simulated."""
    points = []
    for record in smallest_peaks(question):
        ratio = (record.measured.get("ratio") or {}).get("median")
        if is_simulated(record):
            ratio = simulated_ratio(record)
        if ratio:
            points.append(Point(100 * (ratio - 1), record, None, is_simulated(record)))
    few = any(is_of_few_pairs(p.record.measured.get("ratio") or {}) for p in points)
    return _grade_points(question, points, "overhead_percent",
                         what=f"extra step time of {question.method} at the smallest peak that it kept"
                              + (", measured in too few pairs of steps for an interval" if few else ""),
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
        return Verdict.NOT_TESTABLE_HERE, f"equal over {count_of(steps, 'step')}", f"{count_of(planned, 'step')} planned, {steps} run"
    if not series["accuracy"][0]:
        return Verdict.PARTLY, f"loss and gradient norm equal at {all_of(steps, 'step')}", "no accuracy was evaluated"
    return (Verdict.REPRODUCED, f"equal at {all_of(steps, 'step')}",
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
    counted = "; ".join(dict.fromkeys(f"{block['recompute_cheaper']} of {count_of(block['storages'], 'storage')}" for _, block in found))
    return Finding(verdict=verdict, is_simulated=True, baseline="swap cost against recompute cost of each storage",
                   obtained=f"recomputing is cheaper for {span_in_words([100 * s for s in shares], '%', 0)} of storages",
                   explanation=counted, evidence=tuple(r for r, _ in found))


def fits(question: Question) -> Finding:
    """The method has a plan for the step within the budget and the board's memory, as the paper says that a network of so many layers or
    parameters can be trained at all. It is reproduced by a sound cell of a network of at least that size, less the tolerance; partly by
    one of a smaller network; not reproduced where the method refuses or needs more."""
    peaks = [r for r in question.of_method("step") if is_sound(r) and peak_of(r)[0]]
    sound = [r for r in peaks if fits_the_board(r)]
    refused = [r for r in question.of_method("step") if r.outcome in (Outcome.PLAN_INFEASIBLE, Outcome.OOM)]
    refused += [r for r in peaks if not fits_the_board(r)]
    sizes = [size_of_network(r, question.claim.unit) for r in sound]
    if not sound and not refused:
        return _untestable(f"no cell of {question.method} came to a plan or to a refusal")
    if question.claim.bounds is None or None in sizes:
        return _untestable(f"no record says how many {question.claim.unit} the network has")
    least = question.claim.bounds[0] * (1 - question.tolerance)
    is_whole = bool(sizes) and min(sizes) >= least and not refused
    verdict = Verdict.REPRODUCED if is_whole else Verdict.PARTLY if sound else Verdict.NOT_REPRODUCED
    told = [f"{_step_in_words(r)} has {size:,.4g} {question.claim.unit} and holds {bytes_in_words(peak_of(r)[0])}"
            for r, size in zip(sound, sizes)]
    fitting = [f"{span_in_words(sizes, question.claim.unit, 0 if question.claim.unit == 'layers' else 1)} fit"] if sound else []
    return Finding(verdict=verdict, obtained=join_words([*fitting, *(["does not fit"] if refused else [])]),
                   is_simulated=all(is_simulated(r) for r in sound or refused), baseline=DASH, evidence=tuple(sound or refused),
                   explanation="; ".join([*told, *(r.message or f"it needs {bytes_in_words(peak_of(r)[0])}" for r in refused)]))


def meets_its_bound(question: Question) -> Finding:
    """The smallest budget that the method's refusals name has a plan, and one byte less is refused. Simulated only; several sets of
    options under one name are several questions."""
    groups: dict[str, list[RunRecord]] = {}
    for r in question.of_method("step"):
        if is_simulated(r) and r.budget_bytes:
            groups.setdefault(f"{comparison_key(r)} {r.config['options']}", []).append(r)
    met, told, evidence = [], [], []
    for group in groups.values():
        at = {r.budget_bytes: r for r in group}
        named = [n for r in group if (n := (r.predicted.get("infeasible") or {}).get("smallest_bytes"))]
        if named and {min(named), min(named) - 1} <= set(at):
            pair = at[min(named)], at[min(named) - 1]
            met.append(is_sound(pair[0]) and pair[1].outcome is Outcome.PLAN_INFEASIBLE)
            told.append(f"{_step_in_words(pair[0])}: {min(named):,} bytes {'have a plan' if is_sound(pair[0]) else 'have none'}")
            evidence += pair
    if not met:
        return _untestable(f"{question.method} was not asked at the smallest budget that it names and one byte below")
    verdict = Verdict.REPRODUCED if all(met) else Verdict.PARTLY if any(met) else Verdict.NOT_REPRODUCED
    return Finding(verdict=verdict, obtained=f"met in {sum(met)} of {len(met)} cases", is_simulated=True, baseline=DASH,
                   explanation="; ".join(told), evidence=tuple(evidence))


def fastest_of_all(question: Question) -> Finding:
    """Share of steps and budgets at which no other planner of the experiment has a faster step; `tolerance` is the share that may be
    lost. A refusal counts as lost where another method has a plan, and so does a cell without a record. Nothing is won against a rival
    that has neither a plan nor a refusal there: one that crashed, ran out of time or has no record might have been faster."""
    cells: dict[tuple, dict[str, RunRecord]] = {}
    for r in question.records:
        if r.kind == "step" and is_simulated(r) and r.config.get("budget") is not None:
            cells.setdefault((comparison_key(r), r.config["budget"]), {})[question.label(r)] = r
    compared = [by for by in cells.values() if any(is_sound(r) for name, r in by.items() if name != question.method)]
    if not compared:
        return _untestable("no other method has a plan under a budget")
    ours = [by.get(question.method) for by in compared]
    best = [min(r.predicted["step_seconds"] for name, r in by.items() if name != question.method and is_sound(r)) for by in compared]
    rivals = {name for by in cells.values() for name in by} - {question.method}
    unknown = [sorted(name for name in rivals if not _has_answered(by.get(name))) for by in compared]
    won = sum(r is not None and is_sound(r) and r.predicted["step_seconds"] <= least and not silent
              for r, least, silent in zip(ours, best, unknown))
    share = won / len(compared)
    verdict = (Verdict.REPRODUCED if share >= 1 - question.tolerance else Verdict.PARTLY if share >= PARTLY_SHARE
               else Verdict.NOT_REPRODUCED)
    silent = sorted({name for names in unknown for name in names})
    without = f"; not won where {join_words(silent)} has neither a plan nor a refusal" if silent else ""
    return Finding(verdict=verdict, obtained=f"fastest in {won} of {count_of(len(compared), 'cell')}", is_simulated=True,
                   baseline="every other method",
                   explanation=f"step times at the same step and budget{without}", evidence=tuple(r for r in ours if r))


def _has_answered(record: RunRecord | None) -> bool:
    return record is not None and (is_sound(record) or record.outcome in (Outcome.PLAN_INFEASIBLE, Outcome.UNSUPPORTED))


def _graded(points_of: Callable[[Question], Answer]) -> Callable[[Question], Finding]:
    """A rule that grades the points of a headline. A method that refuses the budget of the claim does not reproduce it."""
    @wraps(points_of)
    def rule(question: Question) -> Finding:
        answer = points_of(question)
        refused = _refused_steps(question)
        if not answer.points and refused:
            return Finding(verdict=Verdict.NOT_REPRODUCED, obtained="refused", is_simulated=True,
                           baseline=question.baseline, explanation=refused[0].message, evidence=tuple(refused))
        return _grade_points(question, answer.points, points_of.__name__, what=answer.what, missing=answer.missing, refused=refused)
    return rule


RULES: dict[str, Callable[[Question], Finding]] = {
    rule.__name__: rule for rule in (memory_saved_percent, max_batch_ratio, overhead_percent, training_equal, swap_not_first, fits,
                                     meets_its_bound, fastest_of_all, *map(_graded, HEADLINES))
}


def expectation(rule: str, claim: PaperClaim, tolerance: float) -> str:
    """What *reproduced* asks of a claim, in words: `at least 36 %`, `1.84 to 2.24 x`. ValueError on an unknown rule."""
    if rule == "training_equal":
        return "loss, gradient norm and accuracy equal eager's at every step"
    if rule == "swap_not_first":
        return f"recomputing is cheaper for more than {100 * tolerance:g} % of storages"
    if rule == "fastest_of_all":
        return f"the fastest step in at least {100 * (1 - tolerance):g} % of cells"
    if rule == "fits":
        return f"a plan within the budget for {100 * (1 - tolerance):g} % of {claim.in_words} at least"
    if rule == "meets_its_bound":
        return "a plan at the smallest budget that it names, and none one byte below"
    if rule not in SCALES or claim.bounds is None:
        raise ValueError(f"rule {rule!r} and claim {claim.id!r} do not go together")
    low, high = claim.bounds
    least, most = low - tolerance * abs(low), high + tolerance * abs(high)
    unit, decimals = _unit_of(rule, claim)
    return f"at least {least:.{decimals}f} {unit}" if SCALES[rule].is_floor else f"{least:.{decimals}f} to {most:.{decimals}f} {unit}"
