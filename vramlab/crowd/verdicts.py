"""The verdicts of a bundle: what vramlab's own claims.yaml and rules make of the records in it. The same here and on the server."""

from __future__ import annotations

from functools import cache
from typing import Any

from vramlab.collection import Library, built_in_collection
from vramlab.report.claims import PaperClaim, judge, load_claims
from vramlab.runs import Run


@cache
def known_claims() -> dict[str, PaperClaim]:
    """Claims of papers, by id, as the built-in collection has them. A claim of a user's collection is not testable elsewhere."""
    return load_claims(Library([built_in_collection()]).report_files("claims.yaml"))


def verdicts(run: Run) -> list[dict[str, Any]]:
    """One entry a claim that the workflow lists, in its order. `evidence` names cells."""
    found = judge(run.workflow.get("claims", ()), run, known_claims())
    return [{
        "id": result.id, "rule": result.rule, "experiment": result.experiment, "tolerance": result.tolerance,
        "verdict": str(result.finding.verdict), "obtained": result.finding.obtained, "is_simulated": result.finding.is_simulated,
        "counts": result.counts, "evidence": sorted({record.cell_id for record in result.finding.evidence}),
    } for result in found]
