"""The first screen, in words: what was asked, on what hardware, the answer, and what is invalid and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Mapping, Sequence

from vramlab.counted import count_of
from vramlab.finder import BATCH
from vramlab.record import Outcome, RunRecord, Truth, Verdict
from vramlab.report.claims import ClaimResult
from vramlab.report.fastest import Best, fastest
from vramlab.report.points import is_sound
from vramlab.report.tables import why_void
from vramlab.report.words import (
    budget_in_words, bytes_in_words, counts, is_simulated_target, join_words, seconds_in_words, target_in_words,
)
from vramlab.runs import Run

INEXACT = (Truth.WITHIN_NOISE, Truth.SEMANTICS_CHANGED)
MOST_SEARCHES, MOST_BEST = 4, 60  # places of searches, and budgets, on the first screen
WRONG, OVER_BUDGET, FAILED, NO_RECORD, DOUBTFUL, ANSWER = range(6)  # the gravest first: a reader may stop early


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
    standing: str  # how many cells count, and how many do not for which reason
    invalid: tuple[Invalid, ...]  # and what has no number; the gravest first

    @property
    def best_by_place(self) -> list[tuple[str, list[Best]]]:
        """(where, its budgets), so that each place is said once."""
        return [(where, list(rows)) for where, rows in groupby(self.best[:MOST_BEST], key=lambda best: best.where)]

    @property
    def best_left(self) -> int:
        """How many budgets beyond those the first screen has no room for."""
        return max(0, len(self.best) - MOST_BEST)

    @property
    def is_contest(self) -> bool:
        """Whether several methods were asked for one budget: else none is the fastest of them."""
        return any(len(best.asked) > 1 for best in self.best)


def summarise(run: Run, claims: Sequence[ClaimResult]) -> Summary:
    """Words from records alone."""
    return Summary(asked=_asked(run), ran=_ran(run), hardware=tuple(_hardware(run)), answer=_answer(run, claims), best=tuple(fastest(run)),
                   standing=_standing(run), invalid=tuple(_invalid(run)))


def _asked(run: Run) -> str:
    description = " ".join(str(run.workflow.get("description") or "").split())
    configs = [cell.config for cell in run.cells]
    budgets = [budget_in_words(c) for c in configs if c.get("budget") is not None]
    are_shares = bool(budgets) and all(text.endswith("%") for text in budgets)
    scope = [("model", [str(c.get("model")) for c in configs]),
             ("batch size", [str(c["batch_size"]) for c in configs if c.get("batch_size") is not None]),
             ("method", [cell.label for cell in run.cells]), ("budget", budgets)]
    whole = " of eager's peak" if are_shares else ""
    return f"{description} {' '.join(_named(noun, values) for noun, values in scope)}{whole}.".strip()


def _named(noun: str, values: Sequence[str]) -> str:
    """`Model: resnet50.`, `Budgets: 80 % and 60 %`: no full stop behind the budget, whose whole may follow."""
    distinct = list(dict.fromkeys(values))
    stop = "" if noun == "budget" else "."
    return f"{noun.capitalize()}{'' if len(distinct) == 1 else 's'}: {join_words(distinct) or 'none'}{stop}"


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


def _answer(run: Run, claims: Sequence[ClaimResult]) -> str:
    left = len(run.cells) - len(run.records)
    verb = "has" if left == 1 else "have"
    unfinished = f"This run is not complete: {left} of {count_of(len(run.cells), 'cell')} {verb} no record. " if left else ""
    return unfinished + (_claims_in_words(claims) if claims else _cells_in_words(run))


def _claims_in_words(claims: Sequence[ClaimResult]) -> str:
    """Verdicts on measured and on simulated evidence apart."""
    counted = [c for c in claims if c.counts]
    recalled = len(claims) - len(counted)
    if not counted:
        return f"All {count_of(recalled, 'test')} are of claims that are recalled, not read: they are shown and not counted."
    told = [f"{count_of(len(counted), 'test')} of claims."]
    tested = [c for c in counted if c.finding.verdict is not Verdict.NOT_TESTABLE_HERE]
    for basis, is_simulated in (("Measured", False), ("Simulated, not measured", True)):
        found = Counter(c.finding.verdict for c in tested if bool(c.finding.is_simulated) is is_simulated)
        told += [f"{basis}: {join_words(f'{found[verdict]} {verdict}' for verdict in Verdict if found[verdict])}."] if found else []
    if untested := len(counted) - len(tested):
        told.append(f"Without evidence: {untested} {Verdict.NOT_TESTABLE_HERE}.")
    if recalled:
        verb = "is" if recalled == 1 else "are"
        told.append(f"{count_of(recalled, 'further test')} of claims that are recalled, not read, {verb} not counted.")
    return " ".join(told)


def _cells_in_words(run: Run) -> str:
    """The answer of a run that tests no claim: what counts, whether budgets were kept, what the searches found."""
    if not run.records:
        return "The workflow names no claim of a paper, and no cell has ended."
    ended, kept = sum(counts(r) for r in run.records), [is_sound(r) for r in run.records if r.kind == "step" and r.budget_bytes]
    of_all = _all_count(ended) if ended == len(run.cells) else f"{ended} of {count_of(len(run.cells), 'cell')} count"
    of_budgets = f"; {sum(kept)} of {count_of(len(kept), 'cell')} with a budget kept it" if kept else ""
    told = [f"The workflow names no claim of a paper. {of_all}{of_budgets}."]
    return " ".join([*told, *_searches_in_words(run)])


def _all_count(cells: int) -> str:
    return "The one cell counts" if cells == 1 else f"All {cells} cells count"


def _searches_in_words(run: Run) -> list[str]:
    """`Largest batch of resnet50 on v100-32gb, simulated: eager 200 and delta 408.`, for the first few places."""
    found: dict[str, list[str]] = {}
    for record in run.records:
        if record.kind == "max_batch" and counts(record) and record.search.get("largest") is not None:
            over = record.search.get("over", BATCH)
            where = f"Largest {over} of {record.config.get('model')} on {target_in_words(record.config, run.environment_of(record))}"
            is_end = record.search["largest"] == record.search.get("high")
            found.setdefault(where, []).append(f"{run.label(record)} {'at least ' if is_end else ''}{record.search['largest']}")
    told = [f"{where}: {join_words(values)}." for where, values in found.items()]
    more = len(told) - MOST_SEARCHES
    return told if more <= 0 else [*told[:MOST_SEARCHES], f"{count_of(more, 'further place')} below."]


def _standing(run: Run) -> str:
    """`2 of 16 cells do not count: 1 wrong and 1 plan infeasible. 1 exceeded its budget.`"""
    if not run.records:
        return "No cell has a record: nothing counts." if run.cells else "The workflow has no cells."
    void = Counter(_outcome_in_words(r) for r in run.records if not counts(r))
    left = len(run.cells) - len(run.records)
    number = void.total() + left
    reasons = join_words([f"{n} {word}" for word, n in void.most_common()] + ([f"{left} without a record"] if left else []))
    told = [f"{number} of {count_of(len(run.cells), 'cell')} {'does' if number == 1 else 'do'} not count: {reasons}." if number else
            f"{_all_count(len(run.cells))}."]
    over = sum(bool(r.measured.get("over_budget_bytes")) for r in run.records)
    told += [f"{count_of(over, 'cell')} exceeded {'its budget' if over == 1 else 'their budgets'}."] if over else []
    return " ".join([*told, *_truth_in_words(run)])


def _truth_in_words(run: Run) -> list[str]:
    """Whether what counts computes what eager computes."""
    measured = [r for r in run.records if counts(r) and not is_simulated_target(r.config)]
    if not measured:
        return ["Nothing that was measured counts: no cell shows that it computes what eager PyTorch computes."]
    inexact = Counter(r.truth for r in measured if r.truth in INEXACT)
    if not inexact:
        return ["Every measured number that counts is of a step that equals eager PyTorch's bit for bit."]
    return [f"{count_of(n, 'cell')} {'is' if n == 1 else 'are'} {_spaced(truth)}: shown, no ground for a verdict."
            for truth, n in inexact.items()]


def _outcome_in_words(record: RunRecord) -> str:
    """The outcome; of a cell that ended well and does not count, its truth."""
    return _spaced(record.truth if record.outcome is Outcome.OK else record.outcome)


def _spaced(word: Outcome | Truth) -> str:
    return str(word).replace("_", " ")


def _invalid(run: Run) -> list[Invalid]:
    """Cells whose numbers do not count, cells without a record, budgets that were exceeded, experiments left out: what says that something
    is wrong before what is merely out of reach."""
    found: dict[tuple[int, str], list[str]] = {}
    for cell in run.cells:
        reasons = [(NO_RECORD, cell.problem)] if cell.record is None else _faults(cell.record)
        for reason in reasons:
            found.setdefault(reason, []).append(_name(cell.config, cell.label))
    listed = [Invalid(what=_listed(found[key]), why=key[1]) for key in sorted(found, key=lambda key: key[0])]
    return listed + [_left_out(out) for out in run.plan.get("left_out", ())]


def _left_out(out: Mapping[str, Any]) -> Invalid:
    where = f" on {out['target']}" if out.get("target") else ""
    return Invalid(what=f"experiment {out.get('experiment')}{where}", why=f"left out: {out.get('reason')}")


def _faults(record: RunRecord) -> list[tuple[int, str]]:
    """(how grave, why) of each fault."""
    faults = []
    if void := why_void(record):
        detail = _smallest_in_words(record) or record.message or record.reason.replace("_", " ")
        is_answer = record.outcome in (Outcome.PLAN_INFEASIBLE, Outcome.UNSUPPORTED)  # data about the method, not a failure of the run
        what = _spaced(record.outcome) if is_answer else void
        is_wrong = Truth.WRONG is record.truth or record.outcome is Outcome.WRONG
        faults.append((WRONG if is_wrong else ANSWER if is_answer else FAILED, f"{what}: {detail}" if detail else what))
    if over := record.measured.get("over_budget_bytes"):
        faults.append((OVER_BUDGET, f"exceeded its budget by {bytes_in_words(over)}"))
    if record.truth in INEXACT and counts(record):
        faults.append((DOUBTFUL, f"truth is {_spaced(record.truth)}: shown, but no ground for a verdict"))
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
