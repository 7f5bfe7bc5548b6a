"""Competitions: announced by an organiser, entered by submitters. What the API and the pages do alike; `Refused` says why not."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Mapping

from sqlalchemy import select
from sqlalchemy.orm import Session

from vramlab.crowd.server.accounts import Caller
from vramlab.crowd.server.audit import note
from vramlab.crowd.server.intake import Refused
from vramlab.crowd.server.rankings import why_unfit
from vramlab.crowd.server.tables import TOMBSTONES, Competition, Entry, Result, now

NO_DEVICE = ("a device is the name of a GPU or a processor as results have it, such as NVIDIA H200; "
             "cpu, cuda and sim:NAME are words of workflows")


def is_target(device: str) -> bool:
    """Whether a workflow's word for where to run stands in place of a device's name: no result would ever fit."""
    return device.lower() in ("auto", "cpu", "cuda") or device.lower().startswith(("cuda:", "sim:"))


def announce(session: Session, rules: Mapping[str, Any], caller: Caller) -> Competition:
    """A new competition with these columns. In a session of `Database.write`."""
    if rules["name"] == "new":  # the address of the form that announces one
        raise Refused(422, "a competition is not called 'new'")
    if is_target(rules["device"]):
        raise Refused(422, NO_DEVICE)
    if session.scalar(select(Competition).where(Competition.name == rules["name"])):
        raise Refused(409, f"there is a competition {rules['name']!r} already")
    row = Competition(**rules, organiser_id=caller.account_id)
    session.add(row)
    session.flush()
    told = {key: value.isoformat() if isinstance(value, datetime) else value for key, value in rules.items()}
    note(session, actor=caller.account, token=caller.token, action="competition announced", subject=f"competition {row.name}", detail=told)
    session.refresh(row)
    return row


def enter(session: Session, name: str, number: int, caller: Caller) -> Entry:
    """One of the caller's results enters. It may be unchecked: it counts once it is checked. In a session of `Database.write`."""
    rules = session.scalar(select(Competition).where(Competition.name == name))
    result = session.get(Result, number)
    if rules is None or result is None:
        raise Refused(404, f"there is no such {'competition' if rules is None else 'result'}")
    if result.account_id != caller.account_id:
        raise Refused(403, "the result is another account's")
    if phase(rules) != "open":
        raise Refused(409, f"the competition is {phase(rules)}")
    if reason := f"it is {result.state}" if result.state in TOMBSTONES else why_unfit(rules, result):
        raise Refused(409, f"the result does not fit: {reason}")
    if session.scalar(select(Entry).where(Entry.competition_id == rules.id, Entry.result_id == result.id)):
        raise Refused(409, "the result is entered already")
    row = Entry(competition_id=rules.id, result_id=result.id, account_id=caller.account_id)
    session.add(row)
    session.flush()
    note(session, actor=caller.account, token=caller.token, action="competition entered", subject=f"competition {name}",
         detail={"result": result.id})
    session.refresh(row)
    return row


def phase(rules: Competition, at: datetime | None = None) -> str:
    """`to come`, `open` or `closed`."""
    at = at or now()
    if at < rules.opens_at:
        return "to come"
    return "open" if at <= (rules.closed_early_at or rules.closes_at) else "closed"
