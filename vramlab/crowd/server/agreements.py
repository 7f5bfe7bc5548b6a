"""Which results agree, and what that counts as.

*Reproduced*: another account, another machine and telemetry of its own, on the same model of GPU (or of processor), the same cell, every
number within the declared tolerance. *Repeated*: the same, by the same owner or on the same machine. A simulated result is neither: the
server simulates it anew itself when it checks it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Iterable, Sequence

from sqlalchemy import delete, or_, select
from sqlalchemy.orm import Session

from vramlab.crowd.server.settings import Settings
from vramlab.crowd.server.tables import VERIFIED, Agreement, Result, State

# Of one cell: the first so many results are compared with a new one, so that a popular cell stays cheap.
MOST_COMPARED = 200
_MOST_REPEATED = 5  # agreements with one's own that are kept


def link(session: Session, results: Iterable[Result], settings: Settings) -> set[int]:
    """Find what agrees with these verified results, count anew, and return the ids of results that may have changed."""
    touched: set[int] = set()
    for result in results:
        if _may_agree(result):
            touched |= _link_one(session, result, settings)
    session.flush()
    recount(session, touched)
    return touched


def unlink(session: Session, results: Sequence[Result], settings: Settings) -> set[int]:
    """Take agreements with results that are no longer verified away; what that leaves bare may find others. Ids as `link`."""
    gone = [result.id for result in results]
    involved = or_(Agreement.result_id.in_(gone), Agreement.other_id.in_(gone))
    others = {number for row in session.execute(select(Agreement.result_id, Agreement.other_id).where(involved)) for number in row}
    session.execute(delete(Agreement).where(involved))
    for result in results:
        result.reproduced_count = result.repeated_count = 0
    left = session.scalars(select(Result).where(Result.id.in_(others - set(gone)))).all()
    touched = link(session, left, settings) | {result.id for result in left}
    recount(session, touched)
    return touched


def _may_agree(result: Result) -> bool:
    return result.state in VERIFIED and not result.is_simulated and result.outcome == "ok" and bool(numbers_of(result))


def _link_one(session: Session, result: Result, settings: Settings) -> set[int]:
    candidates = session.scalars(
        select(Result).where(Result.comparison_key == result.comparison_key, Result.bundle_id != result.bundle_id,
                             Result.state.in_(VERIFIED)).order_by(Result.id).limit(MOST_COMPARED)).all()
    known = _partners(session, [result.id, *(c.id for c in candidates)])
    touched = set()
    for other in candidates:
        for one, two in ((result, other), (other, result)):
            kind = kind_of(one, two)
            if not kind or not _is_wanted(known[one.id], two, kind):
                continue
            differences = within(one, two, settings)
            if differences is not None:
                session.add(Agreement(result_id=one.id, other_id=two.id, kind=kind, differences=differences))
                known[one.id].append((two.id, two.account_id, kind))
                touched.add(one.id)
    return touched


def _partners(session: Session, numbers: Sequence[int]) -> dict[int, list[tuple[int, int, str]]]:
    """result -> [(other, the other's account, kind)] of the agreements that are kept already."""
    found: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    rows = session.execute(select(Agreement.result_id, Agreement.other_id, Result.account_id, Agreement.kind)
                           .join(Result, Result.id == Agreement.other_id).where(Agreement.result_id.in_(numbers)))
    for result, other, account, kind in rows:
        found[result].append((other, account, kind))
    return found


def _is_wanted(known: Sequence[tuple[int, int, str]], other: Result, kind: str) -> bool:
    """One agreement an account and kind is enough for *reproduced*; a few are kept of *repeated*."""
    if any(number == other.id for number, *_ in known):
        return False
    if kind == State.REPRODUCED:
        return not any(account == other.account_id and kept == kind for _, account, kept in known)
    return sum(kept == kind for *_, kept in known) < _MOST_REPEATED


def kind_of(result: Result, other: Result) -> str:
    """What `other` would count as for `result`, were its numbers near: reproduced, repeated or "" for nothing."""
    is_own = bool(other.telemetry_sha256) and other.telemetry_sha256 != result.telemetry_sha256
    is_copy = other.record_sha256 == result.record_sha256 or (other.samples_sha256 and other.samples_sha256 == result.samples_sha256)
    if is_copy or not is_own:
        return ""
    is_elsewhere = bool(other.machine_hash and result.machine_hash) and other.machine_hash != result.machine_hash
    return State.REPRODUCED if is_elsewhere and other.account_id != result.account_id else State.REPEATED


def numbers_of(result: Result) -> dict[str, float]:
    """The numbers that another result has to come near: peak, ratio of step times, largest batch; of them those that there are."""
    ratio = None if result.overhead is None else 1 + result.overhead
    found = {"peak_bytes": result.peak_bytes, "ratio": ratio, "largest": result.largest}
    return {name: float(value) for name, value in found.items() if value is not None}


def within(result: Result, other: Result, settings: Settings) -> dict[str, Any] | None:
    """{number -> share by which `other` differs}; None where one is missing in `other` or beyond the declared tolerance."""
    if (result.truth, result.outcome) != (other.truth, other.outcome):
        return None
    found, theirs = {}, numbers_of(other)
    for name, value in numbers_of(result).items():
        if name not in theirs or abs(theirs[name] - value) > allowed(name, max(value, theirs[name]), settings):
            return None
        found[name] = theirs[name] / value - 1 if value else 0.0
    return found


def allowed(name: str, value: float, settings: Settings) -> float:
    """The declared tolerance of a number, in its own unit."""
    if name == "peak_bytes":
        return max(settings.peak_tolerance_share * value, settings.peak_tolerance_bytes)
    return value * {"ratio": settings.ratio_tolerance_share, "largest": settings.largest_tolerance_share}[name]


def recount(session: Session, numbers: Iterable[int]) -> None:
    """Counts and states of verified results from the agreements that are kept. *Reproduced(k)* counts accounts."""
    wanted = sorted(set(numbers))
    for start in range(0, len(wanted), MOST_COMPARED):
        part = wanted[start:start + MOST_COMPARED]
        known = _partners(session, part)
        for result in session.scalars(select(Result).where(Result.id.in_(part))):
            _count(result, known[result.id])
    session.flush()


def _count(result: Result, known: Sequence[tuple[int, int, str]]) -> None:
    result.reproduced_count = len({account for _, account, kind in known if kind == State.REPRODUCED})
    result.repeated_count = sum(kind == State.REPEATED for *_, kind in known)
    if result.state in VERIFIED:
        result.state = State.REPRODUCED if result.reproduced_count else State.REPEATED if result.repeated_count else State.CHECKED
