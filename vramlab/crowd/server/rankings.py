"""Who stands where in a competition: the median over the whole seed set, never the luckiest seed.

Results of one account and one configuration (method, its source and options, workload, batch size, budget) contend together, one result a
seed. They are ranked when every seed of the set has one that is checked; until then they are shown as incomplete. Of several results of
one seed the first that was entered counts. A tombstone gives its place up to what is entered after it, so that nobody picks among results
that are entered already.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any, Iterable, Mapping, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from vramlab.crowd.server.queries import known_metric
from vramlab.crowd.server.tables import TOMBSTONES, VERIFIED, Competition, Entry, Result, State


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One account's results of one configuration, a checked one a seed."""

    account: str
    method: str
    method_source_sha256: str
    options: Mapping[str, Any]
    batch_size: int | None
    budget: str
    results: Sequence[Result]  # in the order of their seeds
    missing: Sequence[int]  # seeds of the set that none of them has
    value: float | None  # the median over the seed set, None while a seed is missing
    low: float  # over the seeds that there are
    high: float
    entered_at: datetime  # of the last one


@dataclass(frozen=True, kw_only=True)
class CompetitionView:
    """One competition and all that was entered."""

    competition: Competition
    ranked: Sequence[Contender]  # the best first; one an account, its best
    incomplete: Sequence[Contender]  # without a checked result of each seed
    unranked: Sequence[tuple[Entry, str]]  # results that count in neither, with the reason


def competition(session: Session, name: str) -> CompetitionView | None:
    """One competition by its name; of a withdrawn one nothing is ranked. None when there is none."""
    rules = session.scalar(select(Competition).where(Competition.name == name))
    if rules is None:
        return None
    if rules.withdrawn_at:
        return CompetitionView(competition=rules, ranked=[], incomplete=[], unranked=[])
    found = session.scalars(select(Entry).where(Entry.competition_id == rules.id).order_by(Entry.id)).all()
    entries = [_Entered(entry, _living(session, entry.result)) for entry in found]
    reasons = {e.entry.id: reason for e in entries if (reason := _why_out(rules, e))}
    counting = _counting([e for e in entries if e.entry.id not in reasons], bool(rules.seeds), reasons)
    contenders = [(_contender(rules, group), group) for group in counting]
    is_less, *_ = known_metric(rules.metric)
    complete = sorted((pair for pair in contenders if not pair[0].missing),
                      key=lambda pair: (pair[0].value if is_less else -pair[0].value, max(e.entry.id for e in pair[1])))
    best: dict[str, Contender] = {}
    for contender, group in complete:
        if best.setdefault(contender.account, contender) is not contender:
            reasons |= {e.entry.id: "the account has a better one" for e in group}
    return CompetitionView(competition=rules, ranked=list(best.values()), incomplete=[c for c, _ in contenders if c.missing],
                           unranked=[(entry, reasons[entry.id]) for entry in found if entry.id in reasons])


@dataclass(frozen=True)
class _Entered:
    entry: Entry
    row: Result  # the result that was entered, or the one that holds the same record since


def _living(session: Session, row: Result) -> Result:
    """A result, or, where a later bundle of its account holds the same record again, that one."""
    if row.state != State.SUPERSEDED:
        return row
    same = select(Result).where(Result.record_sha256 == row.record_sha256, Result.account_id == row.account_id,
                                Result.state.not_in(TOMBSTONES))
    return session.scalar(same.order_by(Result.id).limit(1)) or row


def _why_out(rules: Competition, entered: _Entered) -> str:
    """Why an entry could never count, whatever its state is; "" when it could."""
    if reason := why_unfit(rules, entered.row):
        return reason
    is_in_time = rules.opens_at <= entered.entry.entered_at <= (rules.closed_early_at or rules.closes_at)
    return "" if is_in_time else "it was entered outside the dates"


def why_unfit(rules: Competition, row: Result) -> str:
    """Why a result is none that a competition asks for; "" when it is one."""
    for name in ("model", "workload", "device", "budget", "batch_size"):
        wanted = getattr(rules, name)
        if wanted not in (None, "") and getattr(row, name) != wanted:
            return f"its {name.replace('_', ' ')} is {getattr(row, name)!r}, the competition's {wanted!r}"
    if row.is_simulated:
        return "it is simulated"
    if rules.seeds and row.seed not in rules.seeds:
        return f"its seed is {row.seed}, not one of {', '.join(map(str, rules.seeds))}"
    if row.outcome != "ok" or getattr(row, rules.metric) is None:
        return f"it has no {rules.metric}: {row.outcome}"
    return ""


def _counting(entries: Iterable[_Entered], has_seeds: bool, reasons: dict[int, str]) -> list[list[_Entered]]:
    """Of each configuration the checked entries that hold a seed's place; `reasons` gets why the others do not count.

    A competition without seeds, which only an older vramlab announced, ranks each result by itself.
    """
    places: dict[tuple, dict[Any, list[_Entered]]] = defaultdict(lambda: defaultdict(list))
    for entered in entries:
        places[_configuration(entered.row)][entered.row.seed if has_seeds else entered.entry.id].append(entered)
    counting = []
    for of_seed in places.values():
        holders = [_holder(claimants) for claimants in of_seed.values()]
        for holder, claimants in zip(holders, of_seed.values()):
            reasons |= {e.entry.id: f"result {holder.row.id}, entered before it, holds the place of seed {e.row.seed}"
                        for e in claimants if e is not holder}
        reasons |= {e.entry.id: f"it is {e.row.state}, not checked" for e in holders if e.row.state not in VERIFIED}
        checked = [e for e in holders if e.row.state in VERIFIED]
        counting += [checked] if has_seeds and checked else [[e] for e in checked]
    return counting


def _configuration(row: Result) -> tuple:
    return row.account_id, row.standing_key, row.method_source_sha256, json.dumps(row.options, sort_keys=True)


def _holder(claimants: Sequence[_Entered]) -> _Entered:
    """Of the results of one seed, in the order in which they were entered, the one that counts."""
    holder = claimants[0]
    for entered in claimants[1:]:
        left_at = _left_at(holder.row)
        if left_at and entered.entry.entered_at > left_at:
            holder = entered
    return holder


def _left_at(row: Result) -> datetime | None:
    """When a result became a tombstone with its bundle; None when it did not."""
    return row.bundle.state_changed_at if row.state in TOMBSTONES and row.bundle.state in TOMBSTONES else None


def _contender(rules: Competition, group: Sequence[_Entered]) -> Contender:
    rows = sorted((e.row for e in group), key=lambda row: (row.seed is None, row.seed))
    values = [getattr(row, rules.metric) for row in rows]
    missing = sorted(set(rules.seeds) - {row.seed for row in rows})
    first = rows[0]
    return Contender(account=first.account.name, method=first.method, method_source_sha256=first.method_source_sha256,
                     options=first.options, batch_size=first.batch_size, budget=first.budget, results=rows, missing=missing,
                     value=None if missing else median(values), low=min(values), high=max(values),
                     entered_at=max(e.entry.entered_at for e in group))
