"""What pages, the API and exports look up. Reads only; every function takes a session and gives rows or plain data.

Unverified results (received, flagged) are left out unless asked for; tombstones (withdrawn, superseded) never come up in a list or an
aggregate, they are found by their address only.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median
from typing import Any, Iterable, Mapping, Sequence

from sqlalchemy import Select, func, or_, select
from sqlalchemy.orm import Session, joinedload

from vramlab.crowd.server.tables import (
    TOMBSTONES, UNVERIFIED, VERIFIED, Account, Agreement, Audit, Bundle, Competition, Entry, Mark, Result, Standing, State, Verdict,
)

# metric -> (whether less is better, what it is, its unit)
METRICS: Mapping[str, tuple[bool, str, str]] = {
    "peak_bytes": (True, "peak memory of one step", "bytes"),
    "memory_saved": (False, "share of eager's peak that is saved", "share"),
    "overhead": (True, "step time beyond eager's", "share"),
    "step_seconds": (True, "step time", "seconds"),
    "largest": (False, "largest batch that fits", "samples"),
}
OF_ONE_BATCH = ("peak_bytes", "step_seconds")  # a smaller batch takes less of either
MOST_ROWS = 500


@dataclass(frozen=True, kw_only=True)
class LeaderboardRow:
    """One method on one board: its best group by the asked metric."""

    rank: int
    method: str
    is_verified: bool
    kind: str
    batch_size: int | None
    budget: str
    value: float  # the best result's, by the asked metric
    result: int  # its id
    metrics: Mapping[str, Mapping[str, Any]]  # metric -> {best, low, median, high, n, result}, over the group
    results: int  # in the group
    accounts: int
    machines: int
    reproduced: int  # results of the group that somebody else reproduced


@dataclass(frozen=True, kw_only=True)
class Board:
    """What was asked for, filled in, and its rows, which are comparable: one workload, and one batch where the metric hangs on it."""

    model: str
    device: str
    is_simulated: bool
    metric: str
    workload: str | None  # None: there is no result at all
    batch_size: int | None  # None: any, for a metric that is a ratio or a search's
    workloads: Mapping[str, int]  # to choose from, with their results; the most first
    batch_sizes: Mapping[int, int]  # of the workload
    rows: Sequence[LeaderboardRow]


def leaderboard(session: Session, *, model: str, device: str, metric: str = "memory_saved", is_simulated: bool = False,
                workload: str | None = None, batch_size: int | None = None, budget: str | None = None, method: str | None = None,
                include_unverified: bool = False, limit: int = 100) -> Board:
    """Methods on one model and device, best first. ValueError on an unknown metric.

    Without a workload it is the one with the most results; a metric in bytes or seconds is shown for one batch size, again the one with the
    most. One row a method: its best group (batch, budget). Verified rows come first, unverified ones only when they are asked for.
    """
    is_less, *_ = known_metric(metric)
    board = [Standing.model == model, Standing.device == device, Standing.is_simulated == is_simulated,
             Standing.is_verified.in_([True, False] if include_unverified else [True])]
    workloads, sizes = _choices(session, board)
    workload = next(iter(workloads), None) if workload is None else workload
    of_workload = _most_first(sizes.get(workload, {}))
    if batch_size is None and metric in OF_ONE_BATCH:
        batch_size = next(iter(of_workload), None)
    wanted = select(*_READ).where(*board, Standing.workload == workload)
    for column, value in ((Standing.batch_size, batch_size), (Standing.budget, budget), (Standing.method, method)):
        wanted = wanted if value is None else wanted.where(column == value)
    rows = _ranked(session.execute(wanted), metric, is_less)[:max(1, min(limit, MOST_ROWS))]
    return Board(model=model, device=device, is_simulated=is_simulated, metric=metric, workload=workload, batch_size=batch_size,
                 workloads=workloads, batch_sizes=of_workload, rows=rows)


def _choices(session: Session, board: Sequence[Any]) -> tuple[dict[str, int], dict[str, dict[int, int]]]:
    """(workload -> results, workload -> batch size -> results) of a board."""
    columns = (Standing.workload, Standing.batch_size)
    workloads: dict[str, int] = defaultdict(int)
    sizes: dict[str, dict[int, int]] = defaultdict(dict)
    for workload, size, count in session.execute(select(*columns, func.sum(Standing.results)).where(*board).group_by(*columns)):
        workloads[workload] += int(count)
        if size is not None:
            sizes[workload][size] = int(count)
    return _most_first(workloads), sizes


# Columns in place of whole rows: half of the time of a board.
_READ = (Standing.method, Standing.is_verified, Standing.kind, Standing.batch_size, Standing.budget, Standing.metrics, Standing.results,
         Standing.accounts, Standing.machines, Standing.reproduced)


def _ranked(standings: Iterable[Any], metric: str, is_less: bool) -> list[LeaderboardRow]:
    sign = 1 if is_less else -1
    best: dict[tuple[bool, str], tuple[float, Any]] = {}
    for standing in standings:
        value = (standing.metrics.get(metric) or {}).get("best")
        key = (not standing.is_verified, standing.method)
        if value is not None and (key not in best or sign * value < best[key][0]):
            best[key] = (sign * value, standing)
    ordered = sorted(best.items(), key=lambda item: (item[0][0], item[1][0], item[0][1]))
    return [_row(rank, standing, metric) for rank, (_, (_, standing)) in enumerate(ordered, 1)]


def known_metric(metric: str) -> tuple[bool, str, str]:
    """What METRICS says of a metric. ValueError names the ones there are."""
    if metric not in METRICS:
        raise ValueError(f"{metric!r} is no metric; there are {', '.join(METRICS)}")
    return METRICS[metric]


def _row(rank: int, s: Any, metric: str) -> LeaderboardRow:
    return LeaderboardRow(rank=rank, method=s.method, is_verified=s.is_verified, kind=s.kind, batch_size=s.batch_size, budget=s.budget,
                          value=s.metrics[metric]["best"], result=s.metrics[metric]["result"], metrics=s.metrics, results=s.results,
                          accounts=s.accounts, machines=s.machines, reproduced=s.reproduced)


@dataclass(frozen=True, kw_only=True)
class Facets:
    """What there is to choose from, each with its number of results; the most first."""

    models: Mapping[str, int]
    devices: Mapping[str, int]
    methods: Mapping[str, int]
    boards: Sequence[tuple[str, str, bool, int]]  # (model, device, is_simulated, results), the most first


def facets(session: Session, *, include_unverified: bool = False) -> Facets:
    """The choices of the leaderboard's filters."""
    columns = (Standing.is_verified, Standing.model, Standing.device, Standing.is_simulated, Standing.method)  # as an index has them
    wanted = select(*columns, func.sum(Standing.results)).group_by(*columns)
    wanted = wanted if include_unverified else wanted.where(Standing.is_verified)
    models, devices, methods, boards = (defaultdict[Any, int](int) for _ in range(4))
    for _, model, device, is_simulated, method, count in session.execute(wanted):
        for found, key in ((models, model), (devices, device), (methods, method), (boards, (model, device, is_simulated))):
            found[key] += int(count)
    return Facets(models=_most_first(models), devices=_most_first(devices), methods=_most_first(methods),
                  boards=[(*key, count) for key, count in _most_first(boards).items()])


def _most_first(counts: Mapping[Any, int]) -> dict[Any, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


# ------------------------------------------------------------------------------------------------------- results and bundles
@dataclass(frozen=True, kw_only=True)
class ResultFilter:
    """Which results; None: any."""

    model: str | None = None
    workload: str | None = None
    device: str | None = None
    method: str | None = None
    workflow: str | None = None
    account: str | None = None  # its name
    bundle: str | None = None  # its name
    outcome: str | None = None
    state: str | None = None  # one state; then `include_unverified` says nothing
    batch_size: int | None = None
    budget: str | None = None
    is_simulated: bool | None = None
    include_unverified: bool = False


def results(session: Session, which: ResultFilter = ResultFilter(), *, after: int = 0, limit: int = 100,
            newest_first: bool = False) -> list[Result]:
    """Results in the order of their ids; `after` is the last id of the page before."""
    wanted = _narrowed(select(Result), which).options(joinedload(Result.bundle, innerjoin=True))
    return list(session.scalars(_page(wanted, Result.id, after, limit, newest_first)))


def count_results(session: Session, which: ResultFilter = ResultFilter()) -> int:
    """How many results a filter finds."""
    return session.scalar(_narrowed(select(func.count()).select_from(Result), which)) or 0


def _narrowed(wanted: Select, which: ResultFilter) -> Select:
    for name in ("model", "workload", "device", "method", "workflow", "outcome", "batch_size", "budget", "is_simulated"):
        if (value := getattr(which, name)) is not None:
            wanted = wanted.where(getattr(Result, name) == value)
    if which.account is not None:
        wanted = wanted.where(Result.account_id == select(Account.id).where(Account.name == which.account).scalar_subquery())
    if which.bundle is not None:
        wanted = wanted.where(Result.bundle_id == select(Bundle.id).where(Bundle.name == which.bundle).scalar_subquery())
    return wanted.where(Result.state.in_(_states(which.state, which.include_unverified)))


def _states(state: str | None, include_unverified: bool) -> Sequence[str]:
    if state is not None:
        return (state,)
    return (*VERIFIED, *UNVERIFIED) if include_unverified else VERIFIED


def _page(wanted: Select, column: Any, after: int, limit: int, newest_first: bool) -> Select:
    if after:
        wanted = wanted.where(column < after if newest_first else column > after)
    return wanted.order_by(column.desc() if newest_first else column).limit(max(1, min(limit, MOST_ROWS)))


@dataclass(frozen=True, kw_only=True)
class ResultView:
    """One result with what stands around it."""

    result: Result
    bundle: Bundle
    agreements: Sequence[tuple[Agreement, Result]]  # with the results that agree with it
    others: Sequence[Result]  # further results of the same group that are on no tombstone, the newest first
    entries: Sequence[tuple[Entry, Competition]]


def result(session: Session, number: int) -> ResultView | None:
    """One result by its id, whatever its state. None when there is none."""
    found = session.get(Result, number, options=[joinedload(Result.bundle, innerjoin=True)])
    if found is None:
        return None
    agreeing = session.execute(select(Agreement, Result).join(Result, Result.id == Agreement.other_id)
                               .where(Agreement.result_id == number).order_by(Agreement.id)).all()
    others = session.scalars(select(Result).where(Result.standing_key == found.standing_key, Result.id != number,
                                                  Result.state.not_in(TOMBSTONES)).order_by(Result.id.desc()).limit(50))
    entries = session.execute(select(Entry, Competition).join(Competition).where(Entry.result_id == number)).unique().all()
    return ResultView(result=found, bundle=found.bundle, agreements=[tuple(row) for row in agreeing], others=list(others),
                      entries=[tuple(row) for row in entries])


@dataclass(frozen=True, kw_only=True)
class BundleView:
    """One bundle with its results, verdicts and last mark."""

    bundle: Bundle
    results: Sequence[Result]
    verdicts: Sequence[Verdict]
    mark: Mark | None


def bundle(session: Session, name: str) -> BundleView | None:
    """One bundle by its name, whatever its state. None when there is none."""
    found = session.scalar(select(Bundle).where(Bundle.name == name))
    if found is None:
        return None
    rows = session.scalars(select(Result).where(Result.bundle_id == found.id).order_by(Result.id))
    verdicts = session.scalars(select(Verdict).where(Verdict.bundle_id == found.id).order_by(Verdict.id))
    mark = session.scalar(select(Mark).where(Mark.bundle_id == found.id).order_by(Mark.id.desc()).limit(1))
    return BundleView(bundle=found, results=list(rows), verdicts=list(verdicts), mark=mark)


def bundles(session: Session, *, workflow: str | None = None, account: str | None = None, state: str | None = None,
            include_unverified: bool = False, after: int = 0, limit: int = 100, newest_first: bool = False) -> list[Bundle]:
    """Bundles in the order in which they came; `after` is the last id of the page before. A bundle of verified results is `checked`."""
    wanted = select(Bundle).where(Bundle.state.in_(_states(state, include_unverified)))
    wanted = wanted if workflow is None else wanted.where(Bundle.workflow == workflow)
    if account is not None:
        wanted = wanted.where(Bundle.account_id == select(Account.id).where(Account.name == account).scalar_subquery())
    return list(session.scalars(_page(wanted, Bundle.id, after, limit, newest_first)))


# ------------------------------------------------------------------------------------------------- papers, claims, submitters
def results_of_methods(session: Session, methods: Iterable[str], *, include_unverified: bool = False, limit: int = 200) -> list[Result]:
    """Results of a paper's methods, by their aliases: those that others reproduced first, then the newest."""
    wanted = select(Result).where(Result.method.in_(list(methods)), Result.state.in_(_states(None, include_unverified)))
    wanted = wanted.options(joinedload(Result.bundle, innerjoin=True))
    return list(session.scalars(wanted.order_by(Result.reproduced_count.desc(), Result.id.desc()).limit(min(limit, MOST_ROWS))))


@dataclass(frozen=True, kw_only=True)
class ClaimRow:
    """What the crowd says of one claim."""

    claim: str  # its id in reports/claims.yaml
    verdicts: Mapping[str, int]  # verdict -> number of runs
    measured: Mapping[str, int]  # the same, over the runs that measured
    simulated: Mapping[str, int]  # the same, over verdicts that rest on simulation
    neither: Mapping[str, int]  # the same, over verdicts without evidence: not testable there
    accounts: int
    latest: datetime


def claim_board(session: Session, *, include_unverified: bool = False) -> list[ClaimRow]:
    """One row a claim, in the order of their ids. Each account counts once a claim, rule and verdict: a run again is not a vote more."""
    columns = (Verdict.claim, Verdict.verdict, Verdict.is_simulated, Verdict.account_id)
    wanted = select(*columns, func.max(Bundle.submitted_at)).join(Bundle, Bundle.id == Verdict.bundle_id)
    wanted = wanted.where(Verdict.state.in_(_states(None, include_unverified))).group_by(*columns)
    found: dict[str, list[Any]] = defaultdict(list)
    for row in session.execute(wanted):
        found[row.claim].append(row)
    return [_claim_row(claim, rows) for claim, rows in sorted(found.items())]


def _claim_row(claim: str, rows: Sequence[Any]) -> ClaimRow:
    def accounts(sides: Iterable[bool | None]) -> dict[str, int]:
        found: dict[str, set[int]] = defaultdict(set)
        for row in rows:
            if row.is_simulated in sides:
                found[row.verdict].add(row.account_id)
        return {verdict: len(by) for verdict, by in sorted(found.items())}

    return ClaimRow(claim=claim, verdicts=accounts((True, False, None)), measured=accounts((False,)), simulated=accounts((True,)),
                    neither=accounts((None,)), accounts=len({row.account_id for row in rows}), latest=max(row[-1] for row in rows))


def verdicts_of_claim(session: Session, claim: str, *, include_unverified: bool = False, limit: int = 200) -> list[Verdict]:
    """Each run's verdict on one claim, the newest first."""
    wanted = select(Verdict).where(Verdict.claim == claim, Verdict.state.in_(_states(None, include_unverified)))
    return list(session.scalars(wanted.order_by(Verdict.id.desc()).limit(min(limit, MOST_ROWS))))


@dataclass(frozen=True, kw_only=True)
class SubmitterView:
    """One account as everybody may see it."""

    account: Account
    states: Mapping[str, int]  # state -> number of its results, tombstones too
    bundles: Sequence[Bundle]  # the newest first, unverified ones and tombstones too
    reproduces: int  # results of others that its results reproduce


def submitter(session: Session, name: str) -> SubmitterView | None:
    """One account by its name. None when there is none."""
    account = session.scalar(select(Account).where(Account.name == name))
    if account is None:
        return None
    states = session.execute(select(Result.state, func.count()).where(Result.account_id == account.id).group_by(Result.state)).all()
    own = session.scalars(select(Bundle).where(Bundle.account_id == account.id).order_by(Bundle.id.desc()).limit(MOST_ROWS))
    confirmed = session.scalar(select(func.count(func.distinct(Agreement.result_id))).join(Result, Result.id == Agreement.other_id)
                               .where(Result.account_id == account.id, Agreement.kind == State.REPRODUCED))
    return SubmitterView(account=account, states={state: count for state, count in states}, bundles=list(own), reproduces=confirmed or 0)


@dataclass(frozen=True, kw_only=True)
class ComparisonView:
    """Two results side by side."""

    first: Result
    second: Result
    is_comparable: bool  # the same cell on the same model of device
    differing: Sequence[str]  # the settings that differ, by the columns' names
    metrics: Mapping[str, tuple[Any, Any, float | None]]  # metric -> (first, second, second / first - 1)


def comparison(session: Session, first: int, second: int) -> ComparisonView | None:
    """Two results by their ids. None when there is not both."""
    one, two = (session.get(Result, number) for number in (first, second))
    if one is None or two is None:
        return None
    settings = ("model", "workload", "method", "device", "target", "batch_size", "budget", "kind", "experiment", "options", "seed",
                "method_source_sha256", "harness_version", "workflow", "machine_hash")
    differing = [name for name in settings if getattr(one, name) != getattr(two, name)]
    return ComparisonView(first=one, second=two, is_comparable=one.comparison_key == two.comparison_key, differing=differing,
                          metrics={name: _pair(getattr(one, name), getattr(two, name)) for name in METRICS})


def _pair(one: float | None, two: float | None) -> tuple[Any, Any, float | None]:
    return one, two, two / one - 1 if one and two is not None else None


# ------------------------------------------------------------------------------------------------------------- competitions
def competitions(session: Session) -> list[Competition]:
    """All competitions, the one that closes last first."""
    return list(session.scalars(select(Competition).order_by(Competition.closes_at.desc(), Competition.id.desc())))


# --------------------------------------------------------------------------------------------------------------------- others
def tombstones(session: Session, *, limit: int = 100) -> list[Bundle]:
    """Bundles that are withdrawn or superseded, the last change first."""
    wanted = select(Bundle).where(Bundle.state.in_(TOMBSTONES)).order_by(Bundle.state_changed_at.desc(), Bundle.id.desc())
    return list(session.scalars(wanted.limit(min(limit, MOST_ROWS))))


def audit_log(session: Session, *, subject: str | None = None, after: int = 0, limit: int = 100) -> list[Audit]:
    """What was done, in order."""
    wanted = select(Audit) if subject is None else select(Audit).where(Audit.subject == subject)
    return list(session.scalars(_page(wanted, Audit.id, after, limit, False)))


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The collection in numbers."""

    results: int = 0  # verified
    unverified: int = 0
    reproduced: int = 0
    accounts: int = 0  # with a verified result
    states: Mapping[str, int] = field(default_factory=dict)  # of all results


def totals(session: Session) -> Totals:
    """The collection in numbers, for the first page."""
    states = {state: count for state, count in session.execute(select(Result.state, func.count()).group_by(Result.state)).all()}
    accounts = session.scalar(select(func.count(func.distinct(Bundle.account_id))).where(Bundle.state.in_(VERIFIED))) or 0
    return Totals(results=sum(states.get(s, 0) for s in VERIFIED), unverified=sum(states.get(s, 0) for s in UNVERIFIED),
                  reproduced=states.get(State.REPRODUCED, 0), accounts=accounts, states=states)


def search(session: Session, words: str, *, limit: int = 50) -> list[Result]:
    """Results whose model, method, device or workflow holds the words, literally; verified ones, the newest first."""
    literal = words.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    columns = (Result.model, Result.method, Result.device, Result.workflow)
    wanted = select(Result).where(or_(*(column.ilike(f"%{literal}%", escape="\\") for column in columns)), Result.state.in_(VERIFIED))
    return list(session.scalars(wanted.order_by(Result.id.desc()).limit(min(limit, MOST_ROWS))))


def spread(values: Sequence[float], is_less_better: bool) -> dict[str, Any]:
    """{best, low, median, high, n} of a group's values; {} of none."""
    if not values:
        return {}
    low, high = min(values), max(values)
    return {"best": low if is_less_better else high, "low": low, "median": median(values), "high": high, "n": len(values)}
