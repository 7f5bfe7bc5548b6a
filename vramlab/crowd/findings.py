"""What a check of a bundle comes to: findings by named rules, and the report that client and server share."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Mapping

from vramlab import __version__
from vramlab.errors import BundleRefused

RULES_VERSION = 1  # raised when a rule accepts or refuses what it did not before


class Severity(StrEnum):
    """An error refuses the bundle; a warning is shown beside its numbers; a note says what could not be checked, and why."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One thing that a rule found. `where` is a file of the bundle, `file:dotted.field` where one field is to blame."""

    rule: str
    severity: Severity
    where: str
    message: str

    @classmethod
    def of(cls, refusal: BundleRefused) -> Finding:
        """What was refused before any rule could be asked."""
        return cls(refusal.rule, Severity.ERROR, refusal.where, refusal.detail)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Of one bundle."""

    bundle: str | None  # None where no manifest could be read
    findings: tuple[Finding, ...]
    examined: Mapping[str, int] = field(default_factory=dict)  # rule -> how many things it looked at; a rule that is not here was not asked

    @property
    def is_accepted(self) -> bool:
        """No finding is an error."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that refuse the bundle."""
        return tuple(f for f in self.findings if f.severity is Severity.ERROR)

    def to_json(self) -> dict[str, Any]:
        """`{"bundle", "is_accepted", "vramlab", "rules_version", "counts", "examined", "findings"}`."""
        counts = Counter(str(f.severity) for f in self.findings)
        return {"bundle": self.bundle, "is_accepted": self.is_accepted, "vramlab": __version__, "rules_version": RULES_VERSION,
                "counts": {str(severity): counts[severity] for severity in Severity}, "examined": dict(self.examined),
                "findings": [asdict(f) | {"severity": str(f.severity)} for f in self.findings]}
