"""appendix.tex: the artifact appendix of a run in the order of cTuning's sections, and its tables, for a paper.

    appendix.tex   sections and tables, to be \\input; needs the packages booktabs and graphicx, fonts in T1
    report.tex     a document of its own around it, for pdflatex

Answers come from the same rules as the report's checklists: what a person has to say is said to be open. Every text of a record is
escaped, character by character: what pdflatex's fonts do not have is written as its code point.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import jinja2

from vramlab import __version__
from vramlab.collection import Library, built_in_collection
from vramlab.counted import count_of
from vramlab.record import write_atomically
from vramlab.report.authors import answers_of
from vramlab.report.checklists import Answered, answer_all, load_checklists
from vramlab.report.claims import ClaimResult, expectation
from vramlab.report.drawing import plain_label
from vramlab.report.evidence import Evidence
from vramlab.report.facts import METRICS, command
from vramlab.report.page import TABLES, evidence_of
from vramlab.report.summary import summarise
from vramlab.report.tables import Table, Value
from vramlab.report.words import DASH, bytes_in_words, seconds_in_words
from vramlab.runs import Run, load_run, report_folder

APPENDIX_TEX, REPORT_TEX = "appendix.tex", "report.tex"
CHECKLIST = "ctuning-ae"
BREAK = r"\1\\allowbreak{}"
LONGEST_ENTRY = 48  # characters of one entry: a table is shrunk to the page, and one long list would make it too small to read
LONGEST_CAPTION = 160  # of what all rows of a table share
ROWS_A_TABLE = 40  # a float is never longer than a page
TABLES_A_CHUNK = 8  # LaTeX holds only so many floats back

_SPECIALS = {
    "\\": "\\textbackslash{}", "{": "\\{", "}": "\\}", "$": "\\$", "&": "\\&", "#": "\\#", "%": "\\%", "_": "\\_",
    "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "\\textless{}", ">": "\\textgreater{}", "|": "\\textbar{}",
    '"': "\\symbol{34}", "'": "\\textquotesingle{}", "`": "\\textasciigrave{}",
    "[": "{[}", "]": "{]}", "*": "{*}",  # no option of a command or of a line's end that stands before them
}
_SYMBOLS = {
    "\u2013": "\\textendash{}", "\u2014": "\\textemdash{}", "\u2026": "\\ldots{}", "\u00a0": "~", "\u202f": "~", "\u00d7": "$\\times$",
    "\u2212": "$-$", "\u2264": "$\\leq$", "\u2265": "$\\geq$", "\u2192": "$\\rightarrow$", "\u00b0": "$^\\circ$", "\u00b1": "$\\pm$",
    "\u00b5": "$\\mu$", "\u03bc": "$\\mu$", "\u2018": "\\textquoteleft{}", "\u2019": "\\textquoteright{}", "\u201c": "\\textquotedblleft{}",
    "\u201d": "\\textquotedblright{}", "\u200a": "", "\u00ad": "",
}


_LIGATURES = re.compile("([-,])(?=\\1)")  # of which fonts make one character: `--device` has two hyphens


class Tex(str):
    """Text that is LaTeX already."""


def escape(text: Any) -> Tex:
    """A text as LaTeX prints it, whatever it holds; one that is Tex stays."""
    return text if isinstance(text, Tex) else Tex(_LIGATURES.sub(r"\1{}", "".join(map(_escaped, str(text)))))


def _escaped(character: str) -> str:
    if known := _SPECIALS.get(character, _SYMBOLS.get(character)):
        return known
    if character in _SYMBOLS:
        return ""
    if " " <= character <= "~" or _is_latin(character):
        return character
    if character.isspace():
        return " "
    return f"\\texttt{{U+{ord(character):04X}}}"


def _is_latin(character: str) -> bool:
    """Whether T1 fonts have it: an accented letter up to Latin Extended-A."""
    return "\u00c0" <= character <= "\u017e" and unicodedata.category(character) in ("Lu", "Ll")


def verbatim(text: Any) -> Tex:
    """A command as it is typed; a line may end behind a slash or an equals sign."""
    return Tex(f"\\texttt{{{re.sub('([/=])', BREAK, escape(text))}}}")


# --- tables ---------------------------------------------------------------------------------------------------------------
def tables_in_tex(tables: Sequence[Table]) -> Tex:
    """Every table as floats of so many rows over the whole width of the page, its notes below."""
    parts, count = [], 0
    for table in tables:
        for part in _floats(table):
            count += 1
            parts.append(part + ("\\clearpage\n" if count % TABLES_A_CHUNK == 0 else ""))
    return Tex("\n".join(parts))


def _floats(table: Table) -> Iterator[str]:
    groups, kept = table.on_paper
    chunks = [table.rows[i:i + ROWS_A_TABLE] for i in range(0, len(table.rows), ROWS_A_TABLE)]
    for number, rows in enumerate(chunks, 1):
        part = f", part {number} of {len(chunks)}" if len(chunks) > 1 else ""
        body = [_line([escape(_with_note(row.values[i])) for i in kept]) for row in rows]
        aligned = "".join("l" if table.rows[0].values[i].is_word else "r" for i in kept)
        shared = f" ({plain_label(table.shared_in_words, LONGEST_CAPTION)})" if table.shared_in_words else ""
        lines = [f"\\caption{{{escape(table.title + part + shared)}}}", "\\vramlabfit{%", f"\\begin{{tabular}}{{{aligned}}}", "\\toprule",
                 *_heads(groups), "\\midrule", *body, "\\bottomrule", "\\end{tabular}}"]
        notes = _notes(table) if number == len(chunks) else []
        yield "\n".join(["\\begin{table*}[tbp]", "\\centering\\footnotesize", *lines, *notes, "\\end{table*}"]) + "\n"


def _heads(groups: Sequence[tuple[str, list[str]]]) -> Iterator[str]:
    if any(heading for heading, _ in groups):
        yield _line([f"\\multicolumn{{{len(names)}}}{{c}}{{{escape(heading)}}}" for heading, names in groups])
        first = 1
        for heading, names in groups:
            if heading:
                yield f"\\cmidrule(lr){{{first}-{first + len(names) - 1}}}"
            first += len(names)
    yield _line([escape(name) for _, names in groups for name in names])


def _line(entries: Sequence[str]) -> str:
    return " & ".join(entries) + " \\\\"


def _with_note(value: Value) -> Tex:
    text = escape(plain_label(value.text, LONGEST_ENTRY))
    return Tex(f"{text}\\,$^{{{value.note}}}$") if value.note else text


def _notes(table: Table) -> list[str]:
    if not table.notes:
        return []
    told = "; ".join(f"$^{{{number}}}$\\,{escape(note)}" for number, note in enumerate(table.notes, 1))
    return ["\\par\\smallskip", f"\\begin{{minipage}}{{\\textwidth}}\\raggedright\\scriptsize {told}\\end{{minipage}}"]


# --- the appendix ---------------------------------------------------------------------------------------------------------
def write_latex(run_dir: Path, library: Library) -> tuple[Path, Path]:
    """Write appendix.tex and report.tex where report.html is; their paths. WorkflowError when run.json cannot be read."""
    run = load_run(Path(run_dir))
    evidence = evidence_of(run, library)
    folder = report_folder(run.folder)
    paths = folder / APPENDIX_TEX, folder / REPORT_TEX
    title = escape(run.workflow.get("title") or run.workflow.get("name"))
    write_atomically(paths[0], appendix(evidence, library))
    write_atomically(paths[1], _template("report.tex.j2").render(title=title, appendix=Tex(APPENDIX_TEX.removesuffix(".tex"))))
    return paths


def appendix(evidence: Evidence, library: Library) -> str:
    """The text of appendix.tex."""
    run = evidence.run
    paths = [path for path in library.report_files("checklists/*.yaml")]
    (answered,) = answer_all([c for c in load_checklists(paths) if c.id == CHECKLIST], evidence, answers_of(run, library))
    answers = {answer.item.id: answer for answer in answered.answers}
    fields = [a for name, a in answers.items() if not name.startswith("AE-S")]
    tables = [table for table in (make(run) for make in TABLES) if table.rows]
    found = summarise(run, evidence.claims)
    return _template("appendix.tex.j2").render(
        version=__version__, run=run, summary=found, fields=[(f.item.title, _answer(f)) for f in fields],
        section=lambda name: _answer(answers[f"AE-S{name}"]), command=verbatim(command(evidence)), claims=list(_claims(evidence)),
        minutes=_minutes(run), disk=_disk(run), took=seconds_in_words(evidence.seconds), metrics=METRICS, tables=tables_in_tex(tables),
        checklist=answered.checklist, verbatim=verbatim,
    )


def _answer(found: Answered) -> Tex:
    """From evidence as it is; the authors' word, a draft and what is open say so: nobody takes one for another."""
    if found.basis == "open":
        return Tex(f"\\emph{{Open: {escape(found.justification)}.}}")
    said = {"draft": " \\emph{(A draft, for the authors to confirm.)}", "author": " \\emph{(The authors' word, no evidence.)}"}
    return Tex(f"{escape(found.justification.rstrip('.'))}.{said.get(found.basis, '')}")


def _minutes(run: Run) -> str:
    minutes = (run.workflow.get("expected") or {}).get("minutes")
    return DASH if minutes is None else count_of(minutes, "minute")


def _disk(run: Run) -> str:
    return bytes_in_words((run.workflow.get("expected") or {}).get("disk_bytes"))


def _claims(evidence: Evidence) -> Iterator[dict[str, str]]:
    """Each claim in the order claim, expected value and tolerance, obtained, verdict."""
    for result in sorted(evidence.claims, key=lambda c: not c.counts):
        claim = result.claim
        yield {
            "id": result.id, "claimed": f"{claim.system}, {claim.metric}: {claim.in_words}" if claim else "no collection has this claim",
            "expected": _expected(result), "tolerance": f"{100 * result.tolerance:g} %", "experiment": result.experiment or DASH,
            "obtained": result.finding.obtained, "verdict": result.verdict_in_words, "hardware": result.hardware,
            "explanation": result.finding.explanation, "recalled": "" if result.counts else "recalled, not read: shown and not counted",
        }


def _expected(result: ClaimResult) -> str:
    try:
        return expectation(result.rule, result.claim, result.tolerance) if result.claim else DASH
    except ValueError:  # the claim states no number, and its verdict says so
        return DASH


def _template(name: str) -> jinja2.Template:
    """LaTeX with delimiters that are none of its own; every text that is put in is escaped."""
    finalize: Callable[[Any], str] = escape
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(built_in_collection() / "reports" / "templates"), undefined=jinja2.StrictUndefined,
        finalize=finalize, block_start_string="<%", block_end_string="%>", variable_start_string="<<", variable_end_string=">>",
        comment_start_string="<#", comment_end_string="#>", trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return environment.get_template(name)
