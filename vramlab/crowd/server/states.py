"""What a bundle may become, and everything that hangs on it: its results, verdicts, agreements, standings, and a row of the audit log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Mapping, Sequence

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from vramlab.crowd.server.agreements import link, unlink
from vramlab.crowd.server.audit import note
from vramlab.crowd.server.settings import Settings
from vramlab.crowd.server.standings import refresh
from vramlab.crowd.server.tables import TOMBSTONES, VERIFIED, Bundle, Result, State, Verdict, now
from vramlab.errors import VramlabError

ALLOWED: Mapping[State, frozenset[State]] = {
    State.RECEIVED: frozenset({State.CHECKED, State.FLAGGED, State.WITHDRAWN, State.SUPERSEDED}),
    State.CHECKED: frozenset({State.FLAGGED, State.WITHDRAWN, State.SUPERSEDED}),
    State.FLAGGED: frozenset({State.CHECKED, State.WITHDRAWN, State.SUPERSEDED}),
    State.WITHDRAWN: frozenset(),  # a tombstone stays one
    State.SUPERSEDED: frozenset({State.WITHDRAWN}),
}


class StateError(VramlabError):
    """A bundle cannot become that from what it is."""


@dataclass(frozen=True, kw_only=True)
class Actor:
    """Who does something, for the audit log."""

    name: str  # an account's; "server", "command line"
    token: str = ""  # its public id


SERVER = Actor(name="server")


def move(session: Session, bundle: Bundle, to: State, *, reason: str = "", actor: Actor, settings: Settings) -> None:
    """Bring a bundle and all that hangs on it into another state. StateError where it cannot be. In a session of `Database.write`."""
    before = State(bundle.state)
    if to not in ALLOWED[before]:
        raise StateError(f"a bundle that is {before} cannot become {to}")
    results = session.scalars(select(Result).where(Result.bundle_id == bundle.id, Result.state.not_in(TOMBSTONES))).all()
    records = [result.record_sha256 for result in results]
    bundle.state, bundle.state_reason, bundle.state_changed_at = to, reason, now()
    session.execute(update(Verdict).where(Verdict.bundle_id == bundle.id).values(state=to))
    _move_results(session, results, to, was_verified=before in VERIFIED, settings=settings)
    if to is State.CHECKED:
        _supersede_older(session, bundle, records, settings)
    detail = {"from": str(before), "reason": reason} if reason else {"from": str(before)}
    note(session, actor=actor.name, token=actor.token, action=f"bundle {to}", subject=f"bundle {bundle.name}", detail=detail)


def _move_results(session: Session, results: Iterable[Result], to: State, *, was_verified: bool, settings: Settings) -> None:
    results = list(results)
    keys = {result.standing_key for result in results}
    for result in results:
        result.state = to
    session.flush()
    touched: set[int] = set()
    if to in VERIFIED:
        touched = link(session, results, settings)
    elif was_verified:
        touched = unlink(session, results, settings)
    changed = session.scalars(select(Result.standing_key).where(Result.id.in_(touched))).all() if touched else []
    refresh(session, keys | set(changed))


def _supersede_older(session: Session, bundle: Bundle, records: Sequence[str], settings: Settings) -> None:
    """What this bundle replaces: the one that its manifest names, and records (by hash) of the same account that it holds again."""
    if bundle.supersedes:
        older = session.scalar(select(Bundle).where(Bundle.name == bundle.supersedes, Bundle.account_id == bundle.account_id))
        if older and State.SUPERSEDED in ALLOWED[State(older.state)]:
            older.superseded_by = bundle.name
            owner = Actor(name=bundle.account.name)
            move(session, older, State.SUPERSEDED, reason=f"by bundle {bundle.name}", actor=owner, settings=settings)
    again = session.scalars(select(Result).where(Result.record_sha256.in_(records), Result.account_id == bundle.account_id,
                                                 Result.bundle_id != bundle.id, Result.state.not_in(TOMBSTONES))).all()
    if again:
        _move_results(session, again, State.SUPERSEDED, was_verified=True, settings=settings)
