"""How rules are stated and asked."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from vramlab.crowd.contents import Contents
from vramlab.crowd.findings import Finding, Report, Severity
from vramlab.crowd.layout import Limits
from vramlab.errors import BundleRefused


class Round(IntEnum):
    """When a rule is asked."""

    WRAPPING = 1
    FORM = 2
    DERIVATION = 3
    PLAUSIBILITY = 4
    REPLANNING = 5


ROUNDS = tuple(Round)
Fault = tuple[str, str]  # (where, message)
Ask = Callable[["Examination"], Iterator[Fault]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One named rule: `asks` says in a sentence what has to hold."""

    name: str
    severity: Severity
    asks: str
    ask: Ask


RULES: dict[Round, list[Rule]] = {number: [] for number in Round}


def rule(number: Round, name: str, asks: str, severity: Severity = Severity.ERROR) -> Callable[[Ask], Ask]:
    """Enters a function as a rule: it yields (where, message) for every fault, and calls `examination.count()` for all it looked at."""
    def enter(ask: Ask) -> Ask:
        RULES[number].append(Rule(name=name, severity=severity, asks=asks, ask=ask))
        return ask
    return enter


class Examination:
    """One check of one bundle: what was found by now, and the bundle's contents as the rules read them."""

    def __init__(self, folder: Path, limits: Limits, replan_seconds: float = 0.0) -> None:
        self.contents, self.replan_seconds = Contents(folder, limits), replan_seconds
        self._findings: list[Finding] = []
        self._examined = Counter[str]()
        self._asked = ""
        self._known: dict[Hashable, Any] = {}

    def ask(self, number: Round) -> None:
        """Ask all rules of a round."""
        for asked in RULES[number]:
            self._asked = asked.name
            self._examined[asked.name] += 0
            self._findings.extend(self._answers(asked))

    def _answers(self, asked: Rule) -> Iterator[Finding]:
        try:
            for where, message in asked.ask(self):
                yield Finding(asked.name, asked.severity, where, message)
        except BundleRefused as refusal:
            yield Finding.of(refusal)
        except Exception as error:  # what a stranger's bundle does to a rule refuses the bundle, and never passes for an answer
            at = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{type(error).__name__}: {str(error)[:200]} ({Path(at.filename).name}:{at.lineno})"
            yield Finding("rule-failed", Severity.ERROR, asked.name, f"the rule cannot be asked of this bundle: {told}")

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What several rules need and is dear to make; made for the first that asks."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def count(self, things: int = 1) -> None:
        """So many things more were looked at by the rule that is being asked."""
        self._examined[self._asked] += things

    @property
    def has_errors(self) -> bool:
        """Whether the bundle is refused already."""
        return any(f.severity is Severity.ERROR for f in self._findings)

    def report(self) -> Report:
        """Findings with the errors first, in the rules' order."""
        order, unique = list(Severity), dict.fromkeys(self._findings)  # what cannot be read is told by one rule, not by each that reads it
        return Report(bundle=self.contents.bundle, findings=tuple(sorted(unique, key=lambda f: order.index(f.severity))),
                      examined=dict(self._examined))
