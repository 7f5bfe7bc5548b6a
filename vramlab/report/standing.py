"""How every claim stands after the runs that there are: its tests, the weightiest first, and how many are settled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramlab.counted import count_of
from vramlab.record import Verdict
from vramlab.report.claims import ClaimResult, PaperClaim, judge
from vramlab.report.words import join_words
from vramlab.runs import Run

UNTESTED = "no run here yet"


@dataclass(frozen=True, kw_only=True)
class Test:
    """What one run says of a claim."""

    run: Path
    result: ClaimResult

    @property
    def is_settled(self) -> bool:
        """Did the run have evidence?"""
        return self.result.finding.verdict is not Verdict.NOT_TESTABLE_HERE

    @property
    def basis(self) -> str:
        """`measured`, `simulated`, or "" where there is nothing."""
        return "" if not self.is_settled else "simulated" if self.result.finding.is_simulated else "measured"

    @property
    def evidence(self) -> list[str]:
        """Paths of the records, or why there are none."""
        paths = [str(self.run / "cells" / record.cell_id / "record.json") for record in self.result.finding.evidence]
        return paths or [self.result.finding.explanation]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One claim and its tests, the weightiest first: measured before simulated, of the paper's own value before one that a workflow puts in
    its place, a later run before an earlier one, and in a run as its workflow lists them."""

    claim: PaperClaim
    tests: tuple[Test, ...]

    @property
    def state(self) -> str:
        """`reproduced, by simulation`, `no run here yet`; whether other tests say otherwise, and whether it counts."""
        if not self.tests:
            told = UNTESTED
        else:
            others = {t.result.verdict_in_words for t in self.tests if t.is_settled} - {self.tests[0].result.verdict_in_words}
            told = self.tests[0].result.verdict_in_words + (f" (elsewhere {join_words(sorted(others))})" if others else "")
        return told if self.claim.counts else f"{told}; recalled, not counted"

    @property
    def verdict(self) -> Verdict | None:
        """Of the weightiest test; None without one."""
        return self.tests[0].result.finding.verdict if self.tests else None

    def to_json(self) -> dict[str, Any]:
        """One row of `list claims`; `counts` is false of what is only recalled."""
        first = self.tests[0] if self.tests else None
        return {"id": self.claim.id, "system": self.claim.system, "model": self.claim.model, "metric": self.claim.metric,
                "value": self.claim.in_words, "state": self.state, "obtained": first.result.finding.obtained if first else None,
                "verdict": str(self.verdict) if first else None, "basis": first.basis or None if first else None,
                "counts": self.claim.counts, "confidence": self.claim.confidence, "evidence": first.evidence if first else []}


def standings(runs: Iterable[Run], known: Mapping[str, PaperClaim]) -> list[Standing]:
    """One for each known claim, in their order. `runs`: the last started last."""
    tests: dict[str, list[Test]] = {name: [] for name in known}
    for run in reversed(list(runs)):
        for result in judge(run.workflow.get("claims") or (), run, known):
            if result.id in tests:
                tests[result.id].append(Test(run=run.folder, result=result))
    weight = {"measured": 0, "simulated": 1, "": 2}

    def order(test: Test) -> tuple[int, bool]:
        return weight[test.basis], test.result.claim != known[test.result.id]

    return [Standing(claim=known[name], tests=tuple(sorted(found, key=order))) for name, found in tests.items()]


def tally(rows: Sequence[Mapping[str, Any]]) -> str:
    """`205 claims: 3 reproduced (2 by simulation) and 190 with no run here yet; 12 recalled, not counted`, of rows of `list claims`."""
    counted = [row for row in rows if row["counts"]]
    words = []
    for verdict in map(str, Verdict):
        hits = [row for row in counted if row["verdict"] == verdict]
        simulated = sum(row["basis"] == "simulated" for row in hits)
        words += [f"{len(hits)} {verdict}{f' ({simulated} by simulation)' if simulated else ''}"] if hits else []
    untested = sum(row["verdict"] is None for row in counted)
    words += [f"{untested} with {UNTESTED}"] if untested else []
    recalled = len(rows) - len(counted)
    return f"{count_of(len(counted), 'claim')}: {join_words(words)}" + (f"; {recalled} recalled, not counted" if recalled else "")
