"""Where a lower budget gave a faster step or a higher peak: found and flagged, never smoothed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Iterator

from vramlab.record import RunRecord
from vramlab.report.figures import peak_of, step_groups
from vramlab.report.words import counts, is_of_few_pairs, is_simulated_target, join_words, simulated_ratio
from vramlab.runs import Run


@dataclass(frozen=True, kw_only=True)
class Inversion:
    """Two cells of one method that differ by the budget alone, none between them that counts."""

    above: RunRecord
    below: RunRecord  # of the lower budget
    is_faster: bool
    is_higher: bool

    @property
    def in_words(self) -> str:
        """`faster step and higher peak`."""
        return join_words(["faster step"] * self.is_faster + ["higher peak"] * self.is_higher)


def inversions(run: Run) -> Iterator[Inversion]:
    """All of a run. Times that were measured differ where their 95 % intervals lie apart; simulated ones and peaks where they do at all."""
    for group in step_groups(run):
        of_method: dict[str, list[RunRecord]] = defaultdict(list)
        for record in group:
            if record.budget_bytes and counts(record):
                of_method[run.label(record)].append(record)
        for records in of_method.values():
            for above, below in pairwise(sorted(records, key=lambda r: r.budget_bytes, reverse=True)):
                found = Inversion(above=above, below=below, is_faster=_is_faster(below, above), is_higher=_is_higher(below, above))
                if found.is_faster or found.is_higher:
                    yield found


def _is_faster(below: RunRecord, above: RunRecord) -> bool:
    if is_simulated_target(below.config):
        ratios = [simulated_ratio(r) for r in (below, above)]
        return None not in ratios and ratios[0] < ratios[1] * (1 - 1e-9)
    ratios = [r.measured.get("ratio") or {} for r in (below, above)]
    high, low = ratios[0].get("high"), ratios[1].get("low")
    return not any(map(is_of_few_pairs, ratios)) and None not in (high, low) and high < low


def _is_higher(below: RunRecord, above: RunRecord) -> bool:
    peaks = [peak_of(r) for r in (below, above)]
    return None not in peaks and peaks[0] > peaks[1]
