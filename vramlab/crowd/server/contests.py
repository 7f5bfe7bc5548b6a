"""Competitions: announced, corrected and withdrawn by an organiser, entered by submitters. What the API and the pages do alike; `Refused`
says why not.

What decides the ranking stands from the first entry on. Title, description and dates can be corrected later, as long as nobody who entered
falls out of the dates, and none opens again that is over. Every change is a row of the audit log, with what was there before.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Mapping

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from vramlab.crowd.server.accounts import Caller
from vramlab.crowd.server.audit import note
from vramlab.crowd.server.intake import Refused
from vramlab.crowd.server.rankings import why_unfit
from vramlab.crowd.server.tables import TOMBSTONES, Competition, Entry, Result, now
from vramlab.planner import parse_bytes, parse_percent

NO_DEVICE = ("a device is the name of a GPU or a processor as results have it, such as NVIDIA H200; "
             "cpu, cuda and sim:NAME are words of workflows")
NO_BUDGET = "a budget is as results have it: a share of eager's peak such as 60%, a size such as 6GiB, or auto; empty for any"

RANKING = ("model", "workload", "batch_size", "device", "budget", "seeds", "metric")  # what decides who stands where
CORRECTABLE = ("title", "description", "opens_at", "closes_at", *RANKING)


def is_target(device: str) -> bool:
    """Whether a workflow's word for where to run stands in place of a device's name: no result would ever fit."""
    return device.lower() in ("auto", "cpu", "cuda") or device.lower().startswith(("cuda:", "sim:"))


def is_budget(text: str) -> bool:
    """Whether a result can have this budget, or every result fits: empty. Shares are as workflows resolve them: 60%, not 60 or 60 %."""
    if text in ("", "auto"):
        return True
    if text.isdecimal() and int(text) <= 100:  # a workflow asks whether a share is meant
        return False
    try:
        share = parse_percent(text)
        return parse_bytes(text) > 0 if share is None else text == f"{share * 100:g}%"
    except ValueError:
        return False


def announce(session: Session, rules: Mapping[str, Any], caller: Caller) -> Competition:
    """A new competition with these columns. In a session of `Database.write`."""
    if rules["name"] == "new":  # the address of the form that announces one
        raise Refused(422, "a competition is not called 'new'")
    if is_target(rules["device"]):
        raise Refused(422, NO_DEVICE)
    if not is_budget(rules["budget"]):
        raise Refused(422, NO_BUDGET)
    if session.scalar(select(Competition).where(Competition.name == rules["name"])):
        raise Refused(409, f"there is a competition {rules['name']!r} already")
    row = Competition(**rules, organiser_id=caller.account_id)
    session.add(row)
    session.flush()
    told = {key: _in_json(value) for key, value in rules.items()}
    note(session, actor=caller.account, token=caller.token, action="competition announced", subject=f"competition {row.name}", detail=told)
    session.refresh(row)
    return row


def correct(session: Session, name: str, wanted: Mapping[str, Any], caller: Caller) -> Competition:
    """Other columns for a competition, some of CORRECTABLE; those that are as they were are no change. In a session of `Database.write`."""
    rules = _own(session, name, caller)
    changes = {key: value for key, value in wanted.items() if getattr(rules, key) != value}
    if not changes:
        return rules
    if is_target(changes.get("device", "")):
        raise Refused(422, NO_DEVICE)
    if not is_budget(changes.get("budget", "")):
        raise Refused(422, NO_BUDGET)
    opens_at, closes_at = (changes.get(key, getattr(rules, key)) for key in ("opens_at", "closes_at"))
    if closes_at <= opens_at:
        raise Refused(422, "it would close before it opens")
    _check_entered(session, rules, changes, opens_at, closes_at)
    before = {key: [_in_json(getattr(rules, key)), _in_json(value)] for key, value in changes.items()}
    for key, value in changes.items():
        setattr(rules, key, value)
    rules.corrected_at = now()
    note(session, actor=caller.account, token=caller.token, action="competition corrected", subject=f"competition {name}", detail=before)
    session.flush()
    session.refresh(rules)
    return rules


def _check_entered(session: Session, rules: Competition, changes: Mapping[str, Any], opens_at: datetime, closes_at: datetime) -> None:
    """Refused where a change would be one of the rules under those who have entered."""
    entered = select(func.min(Entry.entered_at), func.max(Entry.entered_at)).where(Entry.competition_id == rules.id)
    first, last = session.execute(entered).one()
    if first is None:
        return
    if fixed := [key.replace("_", " ") for key in RANKING if key in changes]:
        raise Refused(409, f"somebody has entered, so that what decides the ranking stands: {', '.join(fixed)}")
    if not opens_at <= first <= last <= closes_at:
        raise Refused(409, f"those who have entered, the last at {last:%Y-%m-%d %H:%M} UTC, would be outside the dates")
    if phase(rules) == "closed" and closes_at > now():
        raise Refused(409, "it is over, and would be open again for those who know its ranking")


def withdraw(session: Session, name: str, reason: str, caller: Caller) -> Competition:
    """Leave a tombstone in a competition's place. In a session of `Database.write`."""
    rules = _own(session, name, caller)
    rules.withdrawn_at, rules.withdrawn_reason = now(), reason
    note(session, actor=caller.account, token=caller.token, action="competition withdrawn", subject=f"competition {name}",
         detail={"reason": reason})
    session.flush()
    session.refresh(rules)
    return rules


def has_entries(session: Session, rules: Competition) -> bool:
    """Whether what decides the ranking stands."""
    return session.scalar(select(Entry.id).where(Entry.competition_id == rules.id).limit(1)) is not None


def may_change(rules: Competition, caller: Caller | None) -> bool:
    """Whether somebody may correct and withdraw it: who announced it, and administrators."""
    return (caller is not None and rules.withdrawn_at is None
            and (caller.may("admin") or caller.may("organise") and rules.organiser_id == caller.account_id))


def _own(session: Session, name: str, caller: Caller) -> Competition:
    rules = session.scalar(select(Competition).where(Competition.name == name))
    if rules is None:
        raise Refused(404, "there is no such competition")
    if rules.withdrawn_at:
        raise Refused(409, "the competition is withdrawn")
    if not may_change(rules, caller):
        raise Refused(403, "the competition is another organiser's")
    return rules


def _in_json(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


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
    """`to come`, `open`, `closed` or `withdrawn`."""
    if rules.withdrawn_at:
        return "withdrawn"
    at = at or now()
    if at < rules.opens_at:
        return "to come"
    return "open" if at <= (rules.closed_early_at or rules.closes_at) else "closed"
