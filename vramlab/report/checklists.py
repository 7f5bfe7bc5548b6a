"""Checklists of venues, answered from evidence. An answer is a value, a justification and where the evidence lies.

Items whose `fill` is auto are answered by a rule or left open with the reason: never yes on missing evidence. Items of fill
prefill get a draft that a person confirms. Items of fill person stay open. What the authors say (vramlab/report/authors.py) answers what
is open or drafted, as their word; where evidence answers, evidence stands, and a word that says otherwise is shown as a contradiction.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Iterable, Mapping, Sequence

import yaml

from vramlab.report.evidence import Evidence
from vramlab.report.facts import Open
from vramlab.report.rules import DRAFTS, RULES

FILLS = ("auto", "prefill", "person")
BASES = {"auto": "from evidence", "author": "the authors' word", "draft": "draft, to be confirmed", "open": "open"}
UNANSWERED = "unanswered"


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question of a checklist."""

    id: str
    title: str
    ask: str
    fill: str


@dataclass(frozen=True, kw_only=True)
class Checklist:
    """A checklist as data; `url` is the official text."""

    id: str
    title: str
    version: str
    url: str
    answers: tuple[str, ...]
    items: tuple[Item, ...]


@dataclass(frozen=True, kw_only=True)
class AuthorAnswer:
    """What the authors say of an item."""

    value: str  # one of the checklist's answers
    why: str
    see: tuple[str, ...] = ()  # addresses and files that they point to: no evidence


@dataclass(frozen=True, kw_only=True)
class Answered:
    """An item with its answer. basis: auto (evidence), author (their word), draft (to be confirmed), open."""

    item: Item
    value: str  # one of the checklist's answers, or "unanswered"
    basis: str
    justification: str
    evidence: tuple[str, ...] = ()  # links: files of the run, or parts of the report; none of an author's answer
    see: tuple[str, ...] = ()  # what the authors point to
    note: str = ""  # beside an author's word: why evidence leaves the item open, or what the draft said
    contradiction: str = ""  # the authors' word where evidence says otherwise


@dataclass(frozen=True, kw_only=True)
class AnsweredChecklist:
    """A checklist with all its answers."""

    checklist: Checklist
    answers: tuple[Answered, ...]

    @property
    def counts(self) -> Mapping[str, int]:
        """How many items are answered from evidence (auto), by the authors (author), drafted (draft) and open."""
        return Counter(answer.basis for answer in self.answers)

    @property
    def contradictions(self) -> tuple[Answered, ...]:
        """Items of which the authors say another thing than evidence."""
        return tuple(answer for answer in self.answers if answer.contradiction)

    @property
    def beyond_evidence(self) -> tuple[tuple[Answered, str], ...]:
        """Items that evidence should answer and cannot, each with the reason."""
        return tuple((a, a.note or a.justification) for a in self.answers if a.item.fill == "auto" and a.basis != "auto")


def load_checklists(paths: Iterable[Path]) -> tuple[Checklist, ...]:
    """Read checklist files. ValueError names the file and what is wrong with it."""
    return tuple(_load(Path(path)) for path in paths)


def _load(path: Path) -> Checklist:
    body = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        items = tuple(Item(**entry) for entry in body.pop("items"))
        checklist = Checklist(**{**body, "version": str(body["version"]), "answers": tuple(body["answers"]), "items": items})
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from error
    if wrong := [item.id for item in items if item.fill not in FILLS]:
        raise ValueError(f"{path}: items {', '.join(wrong)}: fill must be one of {', '.join(FILLS)}")
    return checklist


def answer_all(checklists: Sequence[Checklist], evidence: Evidence,
               authors: Mapping[tuple[str, str], AuthorAnswer] = MappingProxyType({})) -> tuple[AnsweredChecklist, ...]:
    """Every item of every checklist. `authors`: (checklist's id, item's id) -> their word; no rule reads it."""
    def answer(checklist: Checklist, item: Item) -> Answered:
        found, said = _answer(checklist, item, evidence), authors.get((checklist.id, item.id))
        return found if said is None else _beside_authors(found, said)

    return tuple(AnsweredChecklist(checklist=c, answers=tuple(answer(c, item) for item in c.items)) for c in checklists)


def _beside_authors(found: Answered, said: AuthorAnswer) -> Answered:
    """An answer from evidence stays as it is; what is open or drafted becomes the authors' own."""
    if found.basis == "auto":
        return found if said.value == found.value else replace(found, contradiction=f"{said.value}: {said.why}", see=said.see)
    if found.item.fill == "auto":
        note = found.justification
    else:
        note = f"draft: {found.value}: {found.justification}" if found.basis == "draft" and found.value != said.value else ""
    return Answered(item=found.item, value=said.value, basis="author", justification=said.why, see=said.see, note=note)


def _answer(checklist: Checklist, item: Item, evidence: Evidence) -> Answered:
    key = (checklist.id, item.id)
    if item.fill == "person":
        return _open(item, "only a person can answer this")
    rule = (RULES if item.fill == "auto" else DRAFTS).get(key)
    if rule is None:
        return _open(item, "no evidence of a run answers this" if item.fill == "auto" else "a person writes this; there is no draft")
    found = rule(evidence)
    if isinstance(found, Open):
        return _open(item, found.reason, found.evidence)
    if found.value not in checklist.answers:
        raise ValueError(f"{checklist.id} {item.id}: {found.value!r} is none of the answers {', '.join(checklist.answers)}")
    return Answered(item=item, value=found.value, basis="auto" if item.fill == "auto" else "draft", justification=found.justification,
                    evidence=found.evidence)


def _open(item: Item, reason: str, evidence: tuple[str, ...] = ()) -> Answered:
    return Answered(item=item, value=UNANSWERED, basis="open", justification=reason, evidence=evidence)
