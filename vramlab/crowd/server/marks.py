"""The mark: what the server found of a bundle, signed with the server's own key. A submitter cannot make one."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from vramlab import __version__
from vramlab.crowd.findings import RULES_VERSION
from vramlab.crowd.server.tables import Bundle, Mark, Result, now
from vramlab.crowd.signing import ALGORITHM, SigningKey

PURPOSE = "mark 1"


def mark_of(session: Session, bundle: Bundle) -> Mark | None:
    """The last mark of a bundle when it still says what is so; None when a new one is due."""
    mark = session.scalar(select(Mark).where(Mark.bundle_id == bundle.id).order_by(Mark.id.desc()).limit(1))
    return mark if mark and _without_date(mark.body) == _without_date(_body(session, bundle)) else None


def make_mark(session: Session, bundle: Bundle, key: SigningKey) -> Mark:
    """Sign what is so now. In a session of `Database.write`; the marks before it stay."""
    body = _body(session, bundle)
    block = key.signature_block(body, PURPOSE)
    mark = Mark(bundle_id=bundle.id, body=body, key_id=key.key_id, signature=block["signature"])
    session.add(mark)
    session.flush()
    return mark


def in_json(mark: Mark, key: SigningKey) -> dict[str, Any]:
    """`{"body", "signature"}`; `vramlab.crowd.signing.is_signed(body, signature, PURPOSE)` checks it. ValueError on another key's mark."""
    if mark.key_id != key.key_id:
        raise ValueError(f"the mark was made with key {mark.key_id}, this server's is {key.key_id}")
    block = {"algorithm": ALGORITHM, "key_id": key.key_id, "public_key": key.public_key, "signature": mark.signature}
    return {"body": mark.body, "signature": block}


def _body(session: Session, bundle: Bundle) -> dict[str, Any]:
    rows = session.execute(select(Result.cell_id, Result.record_sha256, Result.state, Result.reproduced_count, Result.repeated_count)
                           .where(Result.bundle_id == bundle.id).order_by(Result.cell_id))
    return {
        "bundle": bundle.name, "archive_sha256": bundle.archive_sha256, "manifest_sha256": bundle.manifest_sha256,
        "account": bundle.account.name, "state": bundle.state, "rules_version": RULES_VERSION, "vramlab": __version__,
        "checked_at": bundle.checked_at.isoformat() if bundle.checked_at else None, "made_at": now().isoformat(),
        "results": {cell: {"record_sha256": sha256, "state": state, "reproduced": reproduced, "repeated": repeated}
                    for cell, sha256, state, reproduced, repeated in rows},
    }


def _without_date(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "made_at"}
