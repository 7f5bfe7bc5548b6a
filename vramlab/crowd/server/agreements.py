"""Which results agree, and what that counts as.

*Reproduced*: another account, another machine and telemetry of its own, on the same model of GPU (or of processor), the same cell, every
number within the declared tolerance, and times that are not the other's up to a factor and a little. *Repeated*: the same, by the same
owner, on the same machine, or with such times. A simulated result is neither: the server simulates it anew itself when it checks it.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any, Iterable, Mapping, Sequence

from sqlalchemy import case, delete, func, insert, or_, select, update
from sqlalchemy.orm import Session

from vramlab.crowd.server.fingerprints import are_operators_near, are_steps_near
from vramlab.crowd.server.settings import Settings
from vramlab.crowd.server.tables import VERIFIED, Agreement, Result, State, now
from vramlab.report.words import bytes_in_words

MOST_COMPARED = 200  # results of one cell that a new one is compared with, the first ones, so that a popular cell stays cheap
# Agreements that one result keeps with one account: for *reproduced* one is enough.
_MOST_KEPT = {State.REPRODUCED: 1, State.REPEATED: 5}
OPERATOR_TIMES, STEP_TIMES = "operator times", "step times"
MOST_SHOWN = 50  # results that a page says of why they do not agree
NUMBERS = {"peak_bytes": "peak memory", "ratio": "step time over eager's", "largest": "largest size"}
_READ = ("id", "account_id", "truth", "outcome", "peak_bytes", "overhead", "largest", "machine_hash", "telemetry_sha256",
         "samples_sha256", "record_sha256")


def link(session: Session, results: Iterable[Result], settings: Settings) -> set[int]:
    """Find what agrees with these verified results, count anew, and return the ids of results that may have changed."""
    session.flush()
    touched: set[int] = set()
    for result in results:
        if _may_agree(result):
            touched |= _link_one(session, result, settings)
    recount(session, touched)
    return touched


def unlink(session: Session, results: Sequence[Result], settings: Settings) -> set[int]:
    """Take agreements with results that are no longer verified away; what that leaves bare may find others. Ids as `link`."""
    session.flush()
    gone = [result.id for result in results]
    involved = or_(Agreement.result_id.in_(gone), Agreement.other_id.in_(gone))
    others = {number for row in session.execute(select(Agreement.result_id, Agreement.other_id).where(involved)) for number in row}
    session.execute(delete(Agreement).where(involved))
    left = session.scalars(select(Result).where(Result.id.in_(others - set(gone)))).all()
    touched = link(session, left, settings) | {result.id for result in left}
    recount(session, touched | set(gone))
    return touched


def _may_agree(result: Result) -> bool:
    return result.state in VERIFIED and not result.is_simulated and result.outcome == "ok" and bool(numbers_of(result))


def _link_one(session: Session, result: Result, settings: Settings) -> set[int]:
    columns = [getattr(Result, name) for name in _READ]
    others = session.execute(select(*columns).where(Result.comparison_key == result.comparison_key, Result.bundle_id != result.bundle_id,
                                                    Result.state.in_(VERIFIED)).order_by(Result.id).limit(MOST_COMPARED)).all()
    theirs = _kept(session, [other.id for other in others], result.account_id)
    ours = _kept(session, [result.id], None)
    measured = _Measured(session, result.id, [other.id for other in others])
    made = []
    for other in others:
        for one, two, kept, key in ((result, other, ours, other.account_id), (other, result, theirs, other.id)):
            kind = kind_of(one, two)
            if not kind or kept[key, kind] >= _MOST_KEPT[kind] or (differences := within(one, two, settings)) is None:
                continue
            if kind is State.REPRODUCED and (why := measured.why_one(other.id)):
                kind, differences = State.REPEATED, differences | why
            if kept[key, kind] < _MOST_KEPT[kind]:
                kept[key, kind] += 1
                made.append({"result_id": one.id, "other_id": two.id, "account_id": two.account_id, "kind": kind,
                             "differences": differences, "made_at": now()})
    pairs = select(Agreement.result_id, Agreement.other_id)
    there = {tuple(row) for row in session.execute(pairs.where(or_(Agreement.result_id == result.id, Agreement.other_id == result.id)))}
    if made := [row for row in made if (row["result_id"], row["other_id"]) not in there]:
        session.execute(insert(Agreement), made)
    return {row["result_id"] for row in made}


class _Measured:
    """Whether a result and others were measured each on its own. Fingerprints are read for the first that would count as reproduced."""

    def __init__(self, session: Session, number: int, others: Sequence[int]) -> None:
        self._session, self._number, self._others = session, number, others

    @cached_property
    def _known(self) -> Mapping[int, Any]:
        wanted = select(Result.id, Result.fingerprint).where(Result.id.in_([self._number, *self._others]))
        return {number: fingerprint for number, fingerprint in self._session.execute(wanted)}

    def why_one(self, other: int) -> dict[str, str]:
        """{what is the other's -> how}; empty where nothing is, or where there is nothing to compare."""
        pair = self._known.get(self._number), self._known.get(other)
        near = {OPERATOR_TIMES: are_operators_near(*pair), STEP_TIMES: are_steps_near(*pair)}
        return {name: "those of this one up to a factor" for name, is_near in near.items() if is_near}


def _kept(session: Session, numbers: Sequence[int], account: int | None) -> Counter:
    """(result, kind) -> agreements that are kept with this account; without one, of the only result: (account, kind) -> agreements."""
    key = Agreement.account_id if account is None else Agreement.result_id
    wanted = select(key, Agreement.kind, func.count()).where(Agreement.result_id.in_(numbers)).group_by(key, Agreement.kind)
    wanted = wanted if account is None else wanted.where(Agreement.account_id == account)
    return Counter({(name, State(kind)): count for name, kind, count in session.execute(wanted)})


def kind_of(result: Any, other: Any) -> State | None:
    """What `other` would count as for `result`, were its numbers near: reproduced, repeated, or None for nothing."""
    is_own = bool(other.telemetry_sha256) and other.telemetry_sha256 != result.telemetry_sha256
    is_copy = other.record_sha256 == result.record_sha256 or (other.samples_sha256 and other.samples_sha256 == result.samples_sha256)
    if is_copy or not is_own:
        return None
    is_elsewhere = bool(other.machine_hash and result.machine_hash) and other.machine_hash != result.machine_hash
    return State.REPRODUCED if is_elsewhere and other.account_id != result.account_id else State.REPEATED


def numbers_of(result: Any) -> dict[str, float]:
    """The numbers that another result has to come near: peak, ratio of step times, largest batch; of them those that there are."""
    ratio = None if result.overhead is None else 1 + result.overhead
    found = {"peak_bytes": result.peak_bytes, "ratio": ratio, "largest": result.largest}
    return {name: float(value) for name, value in found.items() if value is not None}


def within(result: Any, other: Any, settings: Settings) -> dict[str, Any] | None:
    """{number -> share by which `other` differs}; None where one is missing in `other` or beyond the declared tolerance."""
    if (result.truth, result.outcome) != (other.truth, other.outcome):
        return None
    found, theirs = {}, numbers_of(other)
    for name, value in numbers_of(result).items():
        if name not in theirs or abs(theirs[name] - value) > allowed(name, max(value, theirs[name]), settings):
            return None
        found[name] = theirs[name] / value - 1 if value else 0.0
    return found


def apart(session: Session, result: Result, settings: Settings) -> list[tuple[Result, str]]:
    """Verified results of the same cell in other bundles that count as nothing for this one, and why not, the newest first."""
    if not _may_agree(result):
        return []
    others = session.scalars(select(Result).where(Result.comparison_key == result.comparison_key, Result.bundle_id != result.bundle_id,
                                                  Result.state.in_(VERIFIED)).order_by(Result.id.desc()).limit(MOST_SHOWN))
    return [(other, why) for other in others if (why := why_apart(result, other, settings))]


def why_apart(result: Any, other: Any, settings: Settings) -> str:
    """Why `other` neither reproduces nor repeats `result`, in words; empty where its numbers are near enough."""
    if kind_of(result, other) is None:
        return "its record, raw samples or telemetry are those of this one, or it has no telemetry"
    if (result.truth, result.outcome) != (other.truth, other.outcome):
        return f"outcome and truth are {other.outcome}, {other.truth} against {result.outcome}, {result.truth} here"
    theirs, told = numbers_of(other), []
    for name, value in numbers_of(result).items():
        if name not in theirs:
            told.append(f"it has no {NUMBERS[name]}")
        elif abs(theirs[name] - value) > (limit := allowed(name, max(value, theirs[name]), settings)):
            there, here, limit_told = (bytes_in_words(n) if name == "peak_bytes" else f"{n:.4g}" for n in (theirs[name], value, limit))
            told.append(f"{NUMBERS[name]} {there} against {here} here, and {limit_told} apart is allowed")
    return "; ".join(told)


def allowed(name: str, value: float, settings: Settings) -> float:
    """The declared tolerance of a number, in its own unit."""
    if name == "peak_bytes":
        return max(settings.peak_tolerance_share * value, settings.peak_tolerance_bytes)
    return value * {"ratio": settings.ratio_tolerance_share, "largest": settings.largest_tolerance_share}[name]


def recount(session: Session, numbers: Iterable[int]) -> None:
    """Counts and states of results from the agreements that are kept. *Reproduced(k)* counts accounts."""
    wanted = sorted(set(numbers))
    for start in range(0, len(wanted), MOST_COMPARED):
        _recount(session, wanted[start:start + MOST_COMPARED])


def _recount(session: Session, numbers: Sequence[int]) -> None:
    counts = select(Agreement.result_id, *(func.sum(case((Agreement.kind == kind, 1), else_=0)).label(kind) for kind in _MOST_KEPT))
    found = {number: (int(reproduced), int(repeated)) for number, reproduced, repeated in session.execute(
        counts.where(Agreement.result_id.in_(numbers)).group_by(Agreement.result_id))}
    rows = session.execute(select(Result.id, Result.state, Result.reproduced_count, Result.repeated_count).where(Result.id.in_(numbers)))
    changed = []
    for number, state, *before in rows:
        reproduced, repeated = found.get(number, (0, 0))
        after = _state(reproduced, repeated) if state in VERIFIED else state
        if (state, *before) != (after, reproduced, repeated):
            changed.append({"id": number, "state": after, "reproduced_count": reproduced, "repeated_count": repeated})
    if changed:
        session.execute(update(Result), changed)
        session.expire_all()  # the rows that Python holds are older now


def _state(reproduced: int, repeated: int) -> State:
    return State.REPRODUCED if reproduced else State.REPEATED if repeated else State.CHECKED
