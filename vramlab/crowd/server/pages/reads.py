"""What the pages ask of the database beside vramlab/crowd/server/queries.py. Bound parameters only; nothing here writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from vramlab.crowd.server import queries
from vramlab.crowd.server.accounts import Caller
from vramlab.crowd.server.database import Database
from vramlab.crowd.server.exports import result_row
from vramlab.crowd.server.queries import Facets, ResultFilter
from vramlab.crowd.server.recent import Recent
from vramlab.crowd.server.tables import Result, Standing, Token, now

PAGE = 50  # rows of a page
LARGEST_ID = 2**63 - 1
REFERENCES = ("eager", "replay", "network-wide", "vdnn-baseline")
CHUNK = 500  # rows of an export that are in memory at a time


def visitor(session: Session, public_id: str) -> Caller | None:
    """Whose session it is; None when the token that it began with is revoked, over, or of a disabled account."""
    token = session.scalar(select(Token).where(Token.public_id == public_id))
    if token is None or token.revoked_at or token.account.disabled_at or (token.expires_at and token.expires_at <= now()):
        return None
    return Caller(account_id=token.account_id, account=token.account.name, token=public_id, scopes=frozenset(token.scopes.split()))


def facets(session: Session, recent: Recent) -> Facets:
    """What there is to choose from, unverified results too."""
    return recent.answer(session, "facets", lambda: queries.facets(session, include_unverified=True))


def budgets_of_board(session: Session, model: str, device: str, is_simulated: bool, workload: str) -> Sequence[str]:
    """As written, of all groups of one workload on one device, each once."""
    query = select(Standing.budget).where(Standing.model == model, Standing.device == device, Standing.is_simulated == is_simulated,
                                          Standing.workload == workload, Standing.budget != "")
    return session.scalars(query.distinct().order_by(Standing.budget)).all()


def all_results(database: Database, which: ResultFilter) -> Iterator[dict[str, Any]]:
    """Every one that a filter finds as a row of an export, the newest first, some at a time. Between these it holds no connection: whoever
    downloads slowly keeps nobody else waiting."""
    after = 0
    while True:
        with database.read() as session:
            found = queries.results(session, which, after=after, limit=CHUNK, newest_first=True)
            rows = list(map(result_row, found))
        if not found:
            return
        yield from rows
        after = found[-1].id


def references_beside(session: Session, found: Result) -> Sequence[Result]:
    """Reference methods of the same bundle: same machine, model, batch and target."""
    query = select(Result).where(Result.bundle_id == found.bundle_id, Result.model == found.model, Result.target == found.target,
                                 Result.kind == found.kind, Result.method.in_(REFERENCES), Result.id != found.id)
    if found.batch_size is not None:
        query = query.where(Result.batch_size == found.batch_size)
    return session.scalars(query.order_by(Result.id).limit(PAGE)).all()


def counts_by(session: Session, column: str) -> Mapping[tuple[str, bool], int]:
    """(method or model, is verified) -> results, tombstones left out."""
    name = getattr(Standing, column)
    query = select(name, Standing.is_verified, func.sum(Standing.results)).group_by(name, Standing.is_verified)
    return {(found, is_verified): int(count) for found, is_verified, count in session.execute(query)}


def count_unverified(session: Session, model: str, device: str, is_simulated: bool) -> int:
    """Unverified results of one model on one device."""
    query = select(func.sum(Standing.results)).where(Standing.model == model, Standing.device == device,
                                                     Standing.is_simulated == is_simulated, Standing.is_verified.is_(False))
    return int(session.scalar(query) or 0)


def workloads(session: Session) -> Sequence[str]:
    """What a competition's organiser may choose from."""
    return session.scalars(select(Standing.workload).distinct().order_by(Standing.workload).limit(200)).all()
