"""The audit log: what was done, by whom. Append-only; each row carries the hash of the one before."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Iterable, Mapping

from sqlalchemy import select
from sqlalchemy.orm import Session

from vramlab.crowd.server.tables import Audit, now


def note(session: Session, *, actor: str, action: str, subject: str, token: str = "", detail: Mapping[str, Any] | None = None) -> Audit:
    """Append one row, in a session of `Database.write`: one at a time, so that rows follow each other without a gap."""
    last = session.scalar(select(Audit).order_by(Audit.id.desc()).limit(1))
    row = Audit(id=last.id + 1 if last else 1, at=now(), actor=actor[:200], token=token, action=action, subject=subject[:200],
                detail=dict(detail or {}), previous_sha256=last.sha256 if last else "")
    row.sha256 = hash_of(row)
    session.add(row)
    session.flush()
    return row


def last_row(session: Session) -> tuple[int, str]:
    """(number, hash) of the last row; (0, "") of none. Names all that was ever done: nothing changes without a row."""
    found = session.execute(select(Audit.id, Audit.sha256).order_by(Audit.id.desc()).limit(1)).first()
    return (found.id, found.sha256) if found else (0, "")


def hash_of(row: Audit) -> str:
    """SHA-256 of everything in a row but its own hash."""
    body = [row.id, row.at.isoformat(timespec="microseconds"), row.actor, row.token, row.action, row.subject, row.detail,
            row.previous_sha256]
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def broken_links(rows: Iterable[Audit]) -> list[int]:
    """Ids of rows that do not follow from the one before, or that were changed; `rows` from the first on, in order."""
    broken, previous, number = [], "", 0
    for row in rows:
        if row.id != number + 1 or row.previous_sha256 != previous or row.sha256 != hash_of(row):
            broken.append(row.id)
        previous, number = row.sha256, row.id
    return broken
