"""The first screen, in words: what was asked, on what hardware, the answer, and what is invalid and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from vramlab.record import Outcome, RunRecord, Truth, Verdict
from vramlab.report.claims import ClaimResult
from vramlab.report.points import is_sound
from vramlab.report.figures import peak_of, step_groups, where_in_words
from vramlab.report.tables import why_void
from vramlab.report.words import (
    budget_in_words, bytes_in_words, count_of, counts, interval_in_words, is_of_few_pairs, is_simulated_target, join_words,
    seconds_in_words, significant, simulated_ratio, target_in_words,
)
from vramlab.runs import Run


@dataclass(frozen=True, kw_only=True)
class Best:
    """The fastest method at one budget among those that kept it bit for bit."""

    where: str  # model, batch, hardware
    budget: str
    method: str
    peak: str
    time: str
    is_simulated: bool
    rivals: str  # methods that cannot be told apart from it, "" when none


@dataclass(frozen=True, kw_only=True)
class Invalid:
    """Something that does not count, and why."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What the first screen says."""

    asked: str
    ran: str
    hardware: tuple[str, ...]
    answer: str
    best: tuple[Best, ...]
    invalid: tuple[Invalid, ...]  # and what has no number


def summarise(run: Run, claims: Sequence[ClaimResult]) -> Summary:
    """Words from records alone."""
    return Summary(asked=_asked(run), ran=_ran(run), hardware=tuple(_hardware(run)), answer=_answer(claims), best=tuple(_best(run)),
                   invalid=tuple(_invalid(run)))


def _asked(run: Run) -> str:
    description = " ".join(str(run.workflow.get("description") or "").split())
    configs = [cell.config for cell in run.cells]
    models = join_words(dict.fromkeys(str(c.get("model")) for c in configs))
    methods = join_words(dict.fromkeys(cell.label for cell in run.cells))
    budgets = join_words(dict.fromkeys(budget_in_words(c) for c in configs if c.get("budget") is not None))
    scope = f"Models: {models or 'none'}. Methods: {methods or 'none'}. Budgets: {budgets or 'none'}."
    return f"{description} {scope}".strip()


def _ran(run: Run) -> str:
    ended = Counter(str(r.outcome).replace("_", " ") for r in run.records)
    seconds = sum(r.provenance.get("seconds") or 0 for r in run.records)
    outcomes = join_words(f"{number} {outcome}" for outcome, number in ended.most_common())
    left = len(run.cells) - len(run.records)
    told = f"{count_of(len(run.records), 'cell')} of {len(run.cells)} planned {'has' if len(run.records) == 1 else 'have'} a record"
    return f"{told}{f': {outcomes}' if outcomes else ''}; {seconds_in_words(seconds)} in all{f'; {left} without a record' if left else ''}."


def _hardware(run: Run) -> list[str]:
    """One sentence a kind of evidence."""
    measured = {target_in_words(r.config, run.environment_of(r)) for r in run.records if not is_simulated_target(r.config)}
    is_simulated_only = bool(run.records) and not measured
    simulated = {target_in_words(r.config, {}).removeprefix("simulated ") for r in run.records if is_simulated_target(r.config)}
    nothing = "Nothing was executed: no cell shows that a step runs on a machine." if is_simulated_only else "Nothing was measured."
    sentences = [f"Measured on {join_words(sorted(measured))}."] if measured else [nothing]
    if simulated:
        sentences.append(f"Simulated, not measured, for {join_words(sorted(simulated))}: predictions from each device's stated rates.")
    return sentences


def _answer(claims: Sequence[ClaimResult]) -> str:
    if not claims:
        return "The workflow names no claim of a paper; the tables below are the answer."
    counted = [c for c in claims if c.counts]
    recalled = len(claims) - len(counted)
    if not counted:
        return f"All {count_of(recalled, 'test')} are of claims that are recalled, not read: they are shown and not counted."
    parts = []
    for verdict in Verdict:
        hits = [c for c in counted if c.finding.verdict is verdict]
        if hits:
            simulated = sum(bool(c.finding.is_simulated) for c in hits) if verdict is not Verdict.NOT_TESTABLE_HERE else 0
            parts.append(f"{len(hits)} {verdict}{f' ({simulated} by simulation)' if simulated else ''}")
    verb = "is" if recalled == 1 else "are"
    beside = f" {count_of(recalled, 'further test')} of claims that are recalled, not read, {verb} not counted." if recalled else ""
    return f"Of {count_of(len(counted), 'test')} of claims: {join_words(parts)}.{beside}"


def _best(run: Run) -> list[Best]:
    found = []
    for group in step_groups(run):
        kept = [r for r in group if r.config.get("budget") is not None and is_sound(r) and step_ratio(r)]
        for budget in dict.fromkeys(budget_in_words(r.config) for r in kept):
            found.append(_best_of(run, [r for r in kept if budget_in_words(r.config) == budget]))
    return found


def step_ratio(record: RunRecord) -> tuple[float, float, float] | None:
    """(median, low, high) of step time / eager's: measured, or simulated on both sides on a simulated device."""
    if is_simulated_target(record.config):
        ratio = simulated_ratio(record)
        return ratio and (ratio,) * 3
    ratio = record.measured.get("ratio") or {}
    values = tuple(ratio.get(key) for key in ("median", "low", "high"))
    return None if None in values else values


def _best_of(run: Run, records: Sequence[RunRecord]) -> Best:
    best = min(records, key=lambda r: step_ratio(r)[0])
    rivals = [run.label(r) for r in records if r is not best and step_ratio(r)[1] <= step_ratio(best)[2]]
    is_simulated = is_simulated_target(best.config)
    time = f"{significant(step_ratio(best)[0], 3)}" if is_simulated else _in_words(best.measured["ratio"])
    peak = peak_of(best)
    share = f", {100 * peak / best.eager_peak_bytes:.1f} % of eager's" if best.eager_peak_bytes and peak else ""
    return Best(where=where_in_words(run, best), budget=budget_in_words(best.config), method=run.label(best),
                peak=f"{bytes_in_words(peak)}{share}", time=time, is_simulated=is_simulated, rivals=join_words(rivals))


def _in_words(ratio: Mapping[str, Any]) -> str:
    return interval_in_words(ratio) + (", few: no interval of 95 %" if is_of_few_pairs(ratio) else "")


def _invalid(run: Run) -> list[Invalid]:
    """Cells whose numbers do not count, cells without a record, budgets that were exceeded, experiments left out."""
    found: dict[str, list[str]] = {}
    for cell in run.cells:
        reasons = [cell.problem] if cell.record is None else _faults(cell.record)
        for reason in reasons:
            found.setdefault(reason, []).append(_name(cell.config, cell.label))
    listed = [Invalid(what=_listed(names), why=reason) for reason, names in found.items()]
    return listed + [_left_out(out) for out in run.plan.get("left_out", ())]


def _left_out(out: Mapping[str, Any]) -> Invalid:
    where = f" on {out['target']}" if out.get("target") else ""
    return Invalid(what=f"experiment {out.get('experiment')}{where}", why=f"left out: {out.get('reason')}")


def _faults(record: RunRecord) -> list[str]:
    faults = []
    if void := why_void(record):
        detail = _smallest_in_words(record) or record.message or record.reason.replace("_", " ")
        is_answer = record.outcome in (Outcome.PLAN_INFEASIBLE, Outcome.UNSUPPORTED)  # data about the method, not a failure of the run
        what = str(record.outcome).replace("_", " ") if is_answer else void
        faults.append(f"{what}: {detail}" if detail else what)
    if over := record.measured.get("over_budget_bytes"):
        faults.append(f"exceeded its budget by {bytes_in_words(over)}")
    if record.truth in (Truth.WITHIN_NOISE, Truth.SEMANTICS_CHANGED) and counts(record):
        faults.append(f"truth is {str(record.truth).replace('_', ' ')}: shown, but no ground for a verdict")
    return faults


def _smallest_in_words(record: RunRecord) -> str:
    """What an infeasible cell's method could do at least; "" when it was not searched."""
    smallest = (record.predicted.get("infeasible") or {}).get("smallest_bytes")
    if not smallest or not record.eager_peak_bytes:
        return ""
    share = 100 * smallest / record.eager_peak_bytes
    return f"the smallest budget that it can reach is {bytes_in_words(smallest)}, {share:.1f} % of eager's peak"


def _name(config: Mapping[str, Any], label: str) -> str:
    batch = f" b{config['batch_size']}" if config.get("batch_size") is not None else ""
    budget = f" {budget_in_words(config)}" if config.get("budget") is not None else ""
    return f"{config.get('model')}{batch} {label}{budget} on {config.get('target')}"


def _listed(names: Sequence[str], limit: int = 4) -> str:
    shown = join_words(names if len(names) <= limit else [*names[:limit], f"{len(names) - limit} more"])
    return shown if len(names) == 1 else f"{len(names)} cells ({shown})"
