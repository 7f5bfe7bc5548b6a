"""Keeps the table `standing` up: one row a group of comparable results. A leaderboard reads a few of them, however many results there are.

A group is computed anew from its results whenever one of them comes or changes its state; nothing is counted up or down.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Iterable, Sequence

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from vramlab.crowd.server.queries import METRICS, spread
from vramlab.crowd.server.tables import UNVERIFIED, VERIFIED, Result, Standing, State, now

_GROUP = ("model", "workload", "device", "is_cpu", "is_simulated", "method", "kind", "batch_size", "budget")
_READ = (*_GROUP, *METRICS, "id", "state", "account_id", "machine_hash", "standing_key")
_AT_A_TIME = 200  # keys of one statement


def refresh(session: Session, keys: Iterable[str]) -> None:
    """Compute the groups with these keys anew. In a session of `Database.write`."""
    session.flush()
    wanted = sorted(set(keys))
    for start in range(0, len(wanted), _AT_A_TIME):
        _refresh(session, wanted[start:start + _AT_A_TIME])


def refresh_all(session: Session) -> None:
    """Every group, from nothing."""
    session.execute(delete(Standing))
    refresh(session, session.scalars(select(Result.standing_key).distinct()).all())


def _refresh(session: Session, keys: Sequence[str]) -> None:
    session.execute(delete(Standing).where(Standing.standing_key.in_(keys)))
    columns = [getattr(Result, name) for name in _READ]
    groups: dict[tuple[str, bool], list[Any]] = defaultdict(list)
    for row in session.execute(select(*columns).where(Result.standing_key.in_(keys), Result.state.in_((*VERIFIED, *UNVERIFIED)))):
        groups[row.standing_key, row.state in VERIFIED].append(row)
    for (key, is_verified), rows in sorted(groups.items()):
        session.add(_standing(key, is_verified, rows))
    session.flush()


def _standing(key: str, is_verified: bool, rows: Sequence[Any]) -> Standing:
    metrics = {name: found for name in METRICS if (found := _metric(name, rows))}
    return Standing(standing_key=key, is_verified=is_verified, **{name: getattr(rows[0], name) for name in _GROUP}, results=len(rows),
                    accounts=len({r.account_id for r in rows}), machines=len({r.machine_hash for r in rows if r.machine_hash}),
                    reproduced=sum(r.state == State.REPRODUCED for r in rows), metrics=metrics, changed_at=now())


def _metric(name: str, rows: Sequence[Any]) -> dict[str, Any]:
    """{best, low, median, high, n, result}; of equal ones the first result is the best. {} where none has the metric."""
    values = [(getattr(r, name), r.id) for r in rows if getattr(r, name) is not None]
    if not values:
        return {}
    found = spread([value for value, _ in values], METRICS[name][0])
    return found | {"result": min(number for value, number in values if value == found["best"])}
