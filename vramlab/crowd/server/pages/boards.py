"""What the templates show, gathered from rows and records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException
from sqlalchemy.orm import Session

from vramlab.crowd.server import queries
from vramlab.crowd.server.pages import reads, side_by_side, words
from vramlab.crowd.server.pages.asked import device_word
from vramlab.crowd.server.pages.catalogue import PaperEntry
from vramlab.crowd.server.pages.words import Metric
from vramlab.crowd.server.queries import OF_ONE_BATCH, Board, ClaimRow, Facets
from vramlab.crowd.server.tables import Result
from vramlab.record import RunRecord
from vramlab.report.claims import PaperClaim
from vramlab.report.words import DASH

LEADERBOARD_COLUMNS = ("rank", "method", "numbers", "model", "workload", "device", "is_verified", "batch_size", "budget", "metric",
                       "best", "low", "median", "high", "n", "reproduced", "submitters", "machines", "result")
_SETTINGS = ("workload", "workflow", "experiment", "kind", "target", "seed", "harness_version", "method_source_sha256", "cell_id",
             "record_sha256", "telemetry_sha256", "comparison_key")

_COMPARED = ("model", "workload", "method", "device", "target", "batch_size", "budget", "kind", "experiment", "seed",
             "method_source_sha256", "harness_version", "workflow", "machine_hash")
Counts = Mapping[tuple[str, bool], int]  # (name, is verified) -> results


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a leaderboard is asked for; empty texts: whatever has most results."""

    model: str
    device: str
    is_simulated: bool
    workload: str
    batch: int | None
    budget: str
    metric: str
    unverified: bool


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A leaderboard as asked, with what else could be asked."""

    asked: Asked
    metric: Metric
    board: Board
    facets: Facets  # unverified ones too
    budgets: Sequence[str]  # that there are
    left_out: int  # unverified results of this model and device

    def for_template(self) -> dict[str, Any]:
        """What the template takes."""
        board = self.board
        choices = {"models": alike(self.facets.models), "devices": device_choices(self.facets), "workloads": alike(board.workloads),
                   "batches": alike(sorted(board.batch_sizes)), "budgets": alike(self.budgets),
                   "metrics": [(metric.key, metric.title) for metric in words.METRICS.values()]}
        beside = [words.METRICS[key] for key in ("memory_saved", "overhead") if key != self.metric.key]
        return {"choices": choices, "chosen": self.query() | {"unverified": self.asked.unverified}, "metric": self.metric,
                "rows": board.rows, "board": board, "is_of_one_batch": board.metric in OF_ONE_BATCH, "beside": beside,
                "left_out": self.left_out}

    def query(self) -> dict[str, Any]:
        """What stands in its address."""
        board = self.board
        return {"model": board.model, "device": device_word(board.device, board.is_simulated), "workload": board.workload or "",
                "batch": board.batch_size or "", "budget": self.asked.budget, "metric": board.metric,
                "unverified": "1" if self.asked.unverified else ""}

    def plain_rows(self) -> list[dict[str, Any]]:
        """The rows under LEADERBOARD_COLUMNS."""
        board = self.board
        shared = {"numbers": "simulated" if board.is_simulated else "measured", "model": board.model, "workload": board.workload,
                  "device": board.device, "metric": board.metric}
        return [{**shared, "rank": row.rank, "method": row.method, "is_verified": row.is_verified, "batch_size": row.batch_size,
                 "budget": row.budget, **{key: row.metrics[board.metric][key] for key in ("best", "low", "median", "high", "n")},
                 "reproduced": row.reproduced, "submitters": row.accounts, "machines": row.machines, "result": row.result}
                for row in board.rows]


def read_board(session: Session, asked: Asked, facets: Facets) -> Shown:
    """The leaderboard; what is not asked for is what has most results. 400 on an unknown metric."""
    if asked.metric not in words.METRICS:
        raise HTTPException(400, f"There is no metric {asked.metric!r}; there are {', '.join(words.METRICS)}.")
    model, device, is_simulated = _filled(asked, facets)
    board = queries.leaderboard(session, model=model, device=device, metric=asked.metric, is_simulated=is_simulated,
                                workload=asked.workload or None, batch_size=asked.batch, budget=asked.budget or None,
                                include_unverified=asked.unverified)
    return Shown(asked=asked, metric=words.METRICS[asked.metric], board=board, facets=facets,
                 budgets=reads.budgets_of_board(session, model, device, is_simulated, board.workload or ""),
                 left_out=reads.count_unverified(session, model, device, is_simulated))


def _filled(asked: Asked, facets: Facets) -> tuple[str, str, bool]:
    """(model, device, is_simulated): measured ones before simulated ones, then the one with most results."""
    known = asked.model, asked.device, asked.is_simulated
    fitting = [board[:3] for board in facets.boards
               if asked.model in ("", board[0]) and (not asked.device or board[1:3] == (asked.device, asked.is_simulated))]
    return known if all(known[:2]) or not fitting else min(fitting, key=lambda board: board[2])


def alike(names: Iterable[Any]) -> list[tuple[str, str]]:
    """Choices that an address has as a person reads them."""
    return [(str(name), str(name)) for name in names]


def device_choices(facets: Facets) -> list[tuple[str, str]]:
    """(as an address has it, as a person reads it) of every device, those that measured first."""
    found = dict.fromkeys((device, is_simulated) for _, device, is_simulated, _ in sorted(facets.boards, key=lambda board: board[2]))
    return [(device_word(*key), words.device_in_words(*key)) for key in found]


# -------------------------------------------------------------------------------------------------------------------- results
@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of a result's report."""

    title: str
    value: float | None
    unit: str
    is_simulated: bool
    note: str = ""


def figures(row: Result, record: RunRecord | None) -> list[Figure]:
    """A result's numbers; where it was measured, what was predicted for it beside them."""
    interval = ""
    if row.overhead_low is not None and row.overhead_high is not None:
        low, high = (words.value_in_words(value, "share") for value in (row.overhead_low, row.overhead_high))
        interval = f"95 % interval {low} to {high}; {row.samples} timed steps"
    found = [("Peak memory", row.peak_bytes, "bytes", ""), ("Plain eager's peak", row.eager_peak_bytes, "bytes", ""),
             ("Memory saved", row.memory_saved, "share", ""), ("Step time", row.step_seconds, "seconds", ""),
             ("Overhead", row.overhead, "share", interval), ("Largest size that fits", row.largest, "count", ""),
             ("Recomputed ops", row.recomputes, "count", "")]
    shown = [Figure(title=title, value=value, unit=unit, is_simulated=row.is_simulated,
                    note=note or _why_missing(title, value, row, record))
             for title, value, unit, note in found if value is not None or title in ("Peak memory", "Overhead")]
    if row.moved_bytes is not None:
        shown.append(Figure(title="Moved between device and host", value=row.moved_bytes, unit="bytes", is_simulated=True))
    if record and not row.is_simulated:
        shown += [Figure(title=title, value=record.predicted[key], unit=unit, is_simulated=True)
                  for title, key, unit in (("Predicted peak", "peak_bytes", "bytes"), ("Predicted step time", "step_seconds", "seconds"))
                  if record.predicted.get(key) is not None]
    return shown


def _why_missing(title: str, value: Any, row: Result, record: RunRecord | None) -> str:
    if value is not None:
        return ""
    key = {"Peak memory": "measured.peak_bytes", "Overhead": "measured.ratio"}[title]
    said = record.missing.get(key.replace("measured", "predicted") if row.is_simulated else key) if record else None
    return said or (f"the cell ended with {row.outcome}" if row.outcome != "ok" else "the cell was not asked for it")


def settings(row: Result, record: RunRecord | None) -> list[tuple[str, str]]:
    """What the cell was asked to do: its record's config, with what the server keeps of it."""
    told = record.config if record else {"options": row.options}
    kept = {name: getattr(row, name) for name in _SETTINGS if name not in told and getattr(row, name) not in (None, "")}
    return words.leaves({**kept, **told})


def comparison(pair: Sequence[Result], records: Sequence[RunRecord | None]) -> dict[str, Any]:
    """What differs between two results. From their records; where one is not at hand, that is said."""
    first, second = records
    if first is None or second is None:
        warning = "The record of one of them is not at hand: only what the server keeps of each result is compared."
        return {"warnings": [warning], **_comparison_of_rows(*pair)}
    return {"warnings": list(side_by_side.warnings(first, second)), "differences": side_by_side.rows(first, second),
            "settings": side_by_side.settings_that_differ(first, second)}


def _comparison_of_rows(first: Result, second: Result) -> dict[str, Any]:
    """From the columns alone: whether two figures can be told apart stands in records."""
    settings = [(name, *map(words.plainly, pair)) for name in _COMPARED
                if len(set(pair := [getattr(row, name) for row in (first, second)])) > 1]
    if first.is_simulated != second.is_simulated:
        return {"settings": settings, "differences": []}
    rows = [side_by_side.row_of_figures(metric.title, getattr(first, key), getattr(second, key), metric.unit, first.is_simulated)
            for key, metric in words.METRICS.items() if getattr(first, key) is not None or getattr(second, key) is not None]
    return {"settings": settings, "differences": rows}


# ----------------------------------------------------------------------------------------------------------- papers and claims
def paper_counts(entry: PaperEntry, of_methods: Counts, of_models: Counts) -> dict[str, Any]:
    """A paper with the number of results of its methods, or where it has none of its models."""
    counts, names = (of_methods, [n for facts in entry.methods for n in facts.names]) if entry.methods else (of_models, list(entry.models))
    return {"entry": entry, "results": sum(counts.get((name, True), 0) for name in names),
            "unverified": sum(counts.get((name, False), 0) for name in names)}


def claim_rows(names: Iterable[str], known: Mapping[str, PaperClaim], board: Mapping[str, ClaimRow]) -> list[dict[str, Any]]:
    """Claims with what the crowd says of each, measured and by simulation apart."""
    rows = []
    for name in names:
        claim, row = known.get(name), board.get(name)
        rows.append({"id": name, "statement": f"{claim.system}: {claim.metric}" + (f", {claim.model}" if claim.model else "") if claim
                     else "a claim that this server's collection does not know", "claimed": claim.in_words if claim else DASH,
                     "counts": claim.counts if claim else True, "measured": row.measured if row else {},
                     "simulated": row.simulated if row else {}, "neither": row.neither if row else {},
                     "accounts": row.accounts if row else 0})
    return rows
