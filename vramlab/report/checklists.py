"""Checklists of venues, answered from evidence. An answer is a value, a justification and where the evidence lies.

Items whose `fill` is auto are answered by a rule below or left open with the reason: never yes on missing evidence. Items
of fill prefill get a draft that a person confirms. Items of fill person stay open.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Mapping, Sequence

import yaml

from vramlab.report.evidence import Evidence
from vramlab.report.facts import Open
from vramlab.report.rules import DRAFTS, RULES

FILLS = ("auto", "prefill", "person")


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
class Answered:
    """An item with its answer. basis: auto (evidence), draft (to be confirmed), open."""

    item: Item
    value: str  # one of the checklist's answers, or "unanswered"
    basis: str
    justification: str
    evidence: tuple[str, ...] = ()  # links: files of the run, or parts of the report


@dataclass(frozen=True, kw_only=True)
class AnsweredChecklist:
    """A checklist with all its answers."""

    checklist: Checklist
    answers: tuple[Answered, ...]

    @property
    def counts(self) -> Mapping[str, int]:
        """How many items are answered from evidence (auto), drafted (draft) and open."""
        return Counter(answer.basis for answer in self.answers)


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


def answer_all(checklists: Sequence[Checklist], evidence: Evidence) -> tuple[AnsweredChecklist, ...]:
    """Every item of every checklist."""
    return tuple(AnsweredChecklist(checklist=c, answers=tuple(_answer(c, item, evidence) for item in c.items)) for c in checklists)


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
    return Answered(item=item, value="unanswered", basis="open", justification=reason, evidence=evidence)
