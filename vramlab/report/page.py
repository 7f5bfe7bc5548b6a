"""report.html: everything that the template shows, gathered from the records of one run, and the page written in one piece."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any, Mapping, Sequence
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from vramlab import __version__
from vramlab.collection import Library, built_in_collection, find_collections
from vramlab.counted import count_of
from vramlab.errors import WorkflowError
from vramlab.record import RunRecord, Verdict, write_atomically
from vramlab.report.authors import answers_of, is_address
from vramlab.report.checklists import BASES, AnsweredChecklist, answer_all, load_checklists
from vramlab.report.claims import RULES, ClaimResult, PaperClaim, judge, load_claims
from vramlab.report.counts import counts_table
from vramlab.report.evidence import Evidence, Paper
from vramlab.report.facts import METRICS, command
from vramlab.report.figures import KINDS, FigureSet, load_telemetry, make_figures, telemetry_figures
from vramlab.report.peaks import search_peaks_table, step_peaks_table
from vramlab.report.searches import measured_search_table, search_table, trials_table
from vramlab.report.summary import summarise
from vramlab.report.tables import Table, inversions_table, measured_table, methods_table, simulated_table, training_table
from vramlab.report.timeline_data import ROW_HEADINGS
from vramlab.report.timelines import Timelines, timelines
from vramlab.report.words import DASH, NBSP, budget_in_words, bytes_in_words, join_words, span_in_words
from vramlab.runs import Run, load_run, report_folder

REPORT_FILE = "report.html"
TABLES = (methods_table, inversions_table, measured_table, simulated_table, counts_table, step_peaks_table, measured_search_table,
          search_table, search_peaks_table, trials_table, training_table)
LARGEST_BYTES = 11_500_000  # of the page: figures come first, then tables in their order, then timelines
PLOTLY_BYTES, REST_BYTES, ENTRY_BYTES = 4_900_000, 400_000, 40  # REST: style and lists; ENTRY: of a table, beside its words
VERDICT_TONES = {Verdict.REPRODUCED: "good", Verdict.PARTLY: "open", Verdict.NOT_REPRODUCED: "bad", Verdict.NOT_TESTABLE_HERE: "open"}


def render(run_dir: str | Path, collections: tuple[Path, ...] = ()) -> Path:
    """Write `report.html` into a run's folder, or beside a bundle (see `report_folder`), and return its path.

    Claims, checklists and method cards come from the built-in collection, the current directory and `collections`. The same
    records give the same bytes. WorkflowError when run.json cannot be read; a cell without a readable record is shown as such.
    """
    run = load_run(Path(run_dir))
    folder = report_folder(run.folder)
    path = folder / REPORT_FILE
    write_atomically(path, page(run, Library(find_collections(collections)), "" if folder == run.folder else _way(folder, run.folder)))
    return path


def _way(start: Path, to: Path) -> str:
    """The relative address of a folder as a page in another one has it."""
    return quote(os.path.relpath(to.resolve(), start.resolve()).replace(os.sep, "/")) + "/"


def page(run: Run, library: Library, way: str = "") -> str:
    """The page as text. `way`: the relative address of the run's folder, with a slash behind it; "" for a page that lies in it."""
    def at(link: str) -> str:
        return link if link.startswith("#") or is_address(link) else f"{way}{link}"

    known, evidence = load_claims(library.report_files("claims.yaml")), evidence_of(run, library)
    claims, telemetry, telemetry_missing = evidence.claims, evidence.telemetry, evidence.telemetry_missing
    checklists = answer_all(load_checklists(library.report_files("checklists/*.yaml")), evidence, answers_of(run, library))
    figures = make_figures(run) | {"telemetry": telemetry_figures(telemetry)}
    reports, room = built_in_collection() / "reports", LARGEST_BYTES - REST_BYTES - _bytes_of_figures(figures)
    tables, without_room = fit([t for t in (make(run) for make in TABLES) if t.rows], room)
    room -= PLOTLY_BYTES + sum(map(_bytes_of_table, tables))
    return _environment(reports).get_template("report.html.j2").render(
        run=run, title=str(run.workflow.get("title") or run.workflow.get("name")), label=run.workflow.get("label"), version=__version__,
        summary=summarise(run, claims), rules=_rules(claims),
        claims=[_claim(run, result) for result in sorted(claims, key=lambda c: not c.counts)],
        untestable=[{"reason": g["reason"], "claims": [_given_up(known, name) for name in g["claims"]]}
                    for g in run.workflow.get("untestable") or ()],
        tables=tables, without_room=without_room, kinds=KINDS, figures=_drawn(figures),
        told=figures, absent_kinds=[k for k in KINDS if not figures[k.id].panels and (figures[k.id].note or figures[k.id].statement)],
        telemetry=_telemetry(run, telemetry, telemetry_missing), at=at,
        checklists=[_checklist(found) for found in checklists], answered=_totals(checklists), bases=BASES,
        contradictions=[(c.checklist.id, a) for c in checklists for a in c.contradictions], is_address=is_address,
        beyond_evidence=[(c.checklist.id, a, reason) for c in checklists for a, reason in c.beyond_evidence],
        environments=_environments(evidence),
        metrics=METRICS, command=command(evidence), dash=DASH, timelines=_timelines(timelines(run, room), reports),
        style=Markup((reports / "styles" / "report.css").read_text(encoding="utf-8")),
    )


def evidence_of(run: Run, library: Library) -> Evidence:
    """All that rules may look at: claims judged, telemetry read, papers found. The page and the appendix answer from the same."""
    telemetry, telemetry_missing = load_telemetry(run)
    claims = judge(run.workflow.get("claims") or (), run, load_claims(library.report_files("claims.yaml")))
    return Evidence(run=run, claims=claims, telemetry=telemetry, telemetry_missing=telemetry_missing, root=built_in_collection(),
                    papers=_papers(run, library))


def _environment(reports: Path) -> jinja2.Environment:
    """Templates with every string escaped, undefined names as errors, and a number kept beside its per-cent sign."""
    def keep_together(value: Any) -> Any:
        return value.replace(" %", f"{NBSP}%") if type(value) is str else value

    return jinja2.Environment(loader=jinja2.FileSystemLoader(reports / "templates"), autoescape=True, finalize=keep_together,
                              undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def _papers(run: Run, library: Library) -> tuple[Paper, ...]:
    """What the methods of a run cite; a method whose card is not at hand is left out."""
    found = []
    for name in dict.fromkeys(str(cell.config.get("method")) for cell in run.cells):
        try:
            paper = library.method(name).card.paper
        except WorkflowError:
            continue
        found.append(Paper(name=name, title=paper.title if paper else None, venue=paper.venue if paper else None,
                           year=paper.year if paper else None))
    return tuple(found)


def _drawn(figures: Mapping[str, FigureSet]) -> dict[str, list[dict[str, Any]]]:
    """Panels by kind. The SVG is our own drawing, its text already escaped; the PDF lies in the page, which is one file."""
    return {key: [{"name": p.name, "title": p.title, "svg": Markup(p.svg), "pdf": base64.b64encode(p.pdf).decode()} for p in found.panels]
            for key, found in figures.items()}


def _bytes_of_figures(figures: Mapping[str, FigureSet]) -> int:
    return sum(len(p.svg) + 4 * len(p.pdf) // 3 for found in figures.values() for p in found.panels)


def _bytes_of_table(table: Table) -> int:
    entries = (v for row in table.rows for v in row.values)
    return sum(ENTRY_BYTES + len(v.text) + len(v.exact) + len(v.href) for v in entries) + sum(map(len, table.notes))


def fit(tables: Sequence[Table], room: int) -> tuple[list[Table], list[Table]]:
    """(tables to show, details for which there is no room), in their order: a run of thousands of cells still opens."""
    room -= sum(_bytes_of_table(table) for table in tables if not table.is_detail)
    left = []
    for table in (table for table in tables if table.is_detail):
        size = _bytes_of_table(table)
        if size > room:
            left.append(table)
        else:
            room -= size
    return [table for table in tables if not any(table is one for one in left)], left


def _timelines(found: Timelines, reports: Path) -> dict[str, Any]:
    """The drawings' data, and the scripts that draw them: plotly.js once, and only where something is drawn."""
    drawn = {"cells": found.cells, "notes": found.notes, "headings": ROW_HEADINGS}
    if not found.cells:
        return drawn
    from plotly.offline import get_plotlyjs  # takes a while to load

    script = (reports / "scripts" / "timeline.js").read_text(encoding="utf-8")
    return drawn | {"data": Markup(found.data), "plotly": Markup(get_plotlyjs()), "script": Markup(script)}


def _claim(run: Run, result: ClaimResult) -> dict[str, Any]:
    """One row of the claims table."""
    claim, finding = result.claim, result.finding
    return {
        "id": result.id, "verdict": result.verdict_in_words, "tone": VERDICT_TONES[finding.verdict],
        "statement": _statement(claim) if claim else "unknown claim",
        "claimed": claim.in_words if claim else DASH, "obtained": finding.obtained, "explanation": finding.explanation,
        "baseline": finding.baseline or DASH, "claimed_baseline": claim.baseline if claim else DASH,
        "tolerance": f"{100 * result.tolerance:g} %", "experiment": result.experiment,
        "hardware": f"measured on {result.hardware}" if finding.is_simulated is False else result.hardware,
        "claimed_hardware": claim.hardware if claim else DASH,
        "source": f"{claim.where}; {claim.confidence} from {claim.source}" if claim else DASH,
        "notes": [note for note in (claim.note if claim else "", result.note) if note],
        "rule": result.rule, "sensitivity": result.sensitivity, "counts": result.counts,
        "evidence": [(_name(run, r), f"cells/{r.cell_id}/record.json") for r in finding.evidence],
    }


def _given_up(known: Mapping[str, PaperClaim], name: str) -> str:
    return f"{name}: {_statement(known[name])}, {known[name].in_words}" if name in known else f"{name}: unknown claim"


def _name(run: Run, record: RunRecord) -> str:
    """`delta 60 %`."""
    return run.label(record) if record.config.get("budget") is None else f"{run.label(record)} {budget_in_words(record.config)}"


def _statement(claim: PaperClaim) -> str:
    model = "" if claim.model in ("", "n/a", "unspecified", "unspecified set") else f", {claim.model}"
    return f"{claim.system}: {claim.metric}{model}"


def _rules(claims: tuple[ClaimResult, ...]) -> dict[str, str]:
    """What the rules used here say, from their own docstrings."""
    return {c.rule: " ".join((RULES[c.rule].__doc__ or "").split()) for c in claims if c.rule in RULES}


def _telemetry(run: Run, found: Mapping[str, Any], missing: Mapping[str, str]) -> dict[str, Any]:
    """What the samplers did, in words."""
    summaries = [t.summary() for t in found.values()]
    periods = sorted({s["period_seconds"] for s in summaries})
    achieved = [s["achieved_period_seconds"] for s in summaries if s["achieved_period_seconds"] is not None]
    failures = sorted({s["failure"] for s in summaries if s["failure"]})
    return {
        "cells": count_of(len(found), "cell"), "without": count_of(len(missing), "cell") if missing else "",
        "why": join_words(sorted(set(missing.values()))), "rows": sum(s["rows"] for s in summaries),
        "missed": sum(s["missed"] or 0 for s in summaries), "periods": join_words(f"{p:g} s" for p in periods),
        "achieved": span_in_words(achieved, "s", 3) if achieved else DASH, "failures": failures,
        "constant": sorted({name for s in summaries for name in s["constant"]}),
        "flags": sorted({flag for s in summaries for flag in s["flags"]}),
    }


def _checklist(found: AnsweredChecklist) -> dict[str, Any]:
    return {"checklist": found.checklist, "answers": found.answers, "counts": _counted([found])}


def _totals(checklists: tuple[AnsweredChecklist, ...]) -> str:
    items = sum(len(found.answers) for found in checklists)
    return f"{count_of(items, 'item')} in {count_of(len(checklists), 'checklist')}: {_counted(checklists)}"


def _counted(checklists: Sequence[AnsweredChecklist]) -> str:
    """Only evidence and the authors answer: a draft is as open as what has none."""
    auto, author, draft, bare = (sum(found.counts[basis] for found in checklists) for basis in BASES)
    who = join_words([f"{auto} from evidence", *([f"{author} by the authors"] if author else [])])
    drafted = f" ({draft} with a draft to be confirmed)" if draft else ""
    return f"{auto + author} answered, {who}; {draft + bare} open{drafted}"


def _environments(evidence: Evidence) -> list[list[tuple[str, str]]]:
    """Each distinct environment as (name, value) pairs; a null shows its reason."""
    return [list(_pairs(environment)) for environment in evidence.environments]


def _pairs(environment: Mapping[str, Any]) -> Any:
    missing = environment.get("missing") or {}
    for name, value in _flat("", {k: v for k, v in environment.items() if k != "missing"}):
        if name.endswith("_bytes") and isinstance(value, int):
            yield name, f"{value} ({bytes_in_words(value)})"
        elif value in (None, [], {}):
            yield name, f"{DASH} ({missing.get(name, 'none')})"
        else:
            yield name, str(value)


def _flat(prefix: str, value: Any) -> Any:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}".lstrip("."), inner)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for index, inner in enumerate(value):
            yield from _flat(f"{prefix}.{index}", inner)
    else:
        yield prefix, value
