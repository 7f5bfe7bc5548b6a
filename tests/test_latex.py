"""appendix.tex against the records, read by a small parser of LaTeX that knows nothing of what wrote it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hand_made import CLAIMS, full_grid, measured_step, write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from no_torch import run_without_torch

from vramlab.cli import main
from vramlab.report.latex import ROWS_A_TABLE, escape

HOSTILE = "\\input{/etc/passwd} %$&#_{}~^ \\\\ ]] [x] *2 --force ,, <<>> ?` ''\" \u00e9\u6f22 \u2013\n\n\\end{table*}"
HEADINGS = ["Artifact Appendix", "Abstract", "Artifact check-list (meta-information)", "Description", "How to access",
            "Hardware dependencies", "Software dependencies", "Data sets", "Models", "Installation", "Experiment workflow",
            "Evaluation and expected results", "Experiment customization", "Notes", "Methodology"]
WORDS = {"textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^", "textless": "<", "textgreater": ">", "textbar": "|",
         "textquotesingle": "'", "textasciigrave": "`", "textendash": "\u2013", "textemdash": "\u2014", "ldots": "\u2026"}
TOKEN = re.compile(r"\\(?P<word>[a-zA-Z]+)\{\}|\\symbol\{(?P<code>\d+)\}|\\texttt\{U\+(?P<point>[0-9A-F]{4,6})\}|\\(?P<sign>[{}$&#%_])"
                   r"|\{(?P<kept>[][*])\}|(?P<nothing>\{\})|(?P<plain>[^\\{}$&#%_~^<>|\"'`\[\]*])", re.DOTALL)


def printed(tex: str) -> str:
    """What LaTeX prints for escaped text; ValueError at anything that is a command, a group or a special character."""
    out, at = "", 0
    while at < len(tex):
        token = TOKEN.match(tex, at)
        if not token:
            raise ValueError(f"not plain text at {tex[at:at + 20]!r}")
        if token["plain"] in ("-", ",") and tex[at + 1:at + 2] == token["plain"]:
            raise ValueError("a ligature")
        found = token.groupdict()
        out += (WORDS[found["word"]] if found["word"] else chr(int(found["code"])) if found["code"]
                else chr(int(found["point"], 16)) if found["point"] else found["sign"] or found["kept"] or found["plain"] or "")
        at = token.end()
    return out


@settings(max_examples=300, deadline=None)
@given(st.text(st.one_of(st.sampled_from("\\{}$&#%_~^<>|\"'`[]*-,?! a\u00e9\u0142\u2013\u6f22"), st.characters(codec="utf-8"))))
def test_any_text_is_printed_as_it_is(text):
    symbols = {"\u00d7", "\u2212", "\u2264", "\u2265", "\u2192", "\u00b0", "\u00b1", "\u00b5", "\u03bc", "\u2018", "\u2019", "\u201c",
               "\u201d", "\u200a", "\u00ad", "\u00a0", "\u202f"}
    plain = "".join(" " if c.isspace() else c for c in text if c not in symbols)
    assert printed(escape(plain)) == plain
    assert printed(escape(escape(plain))) == plain, "what is LaTeX already stays"


@pytest.mark.parametrize("unescaped", ["a_b", "50%", "a & b", "$x$", "\\input{x}", "{", "--x", "]"])
def test_the_parser_refuses_what_is_not_escaped(unescaped):
    with pytest.raises(ValueError):
        printed(unescaped)


def structure(tex: str) -> tuple[list[str], list[str]]:
    """(environments, faults): braces balance, environments nest, every line of a tabular has its number of columns."""
    faults, stack, seen, depth = [], [], [], 0
    text = re.sub(r"(?<!\\)%.*", "", tex)
    for token in re.finditer(r"\\\\|\\(begin|end)\{([a-z*]+)\}|\\[^a-zA-Z]|[{}]", text):
        if token[1] == "begin":
            stack.append((token[2], depth))
            seen.append(token[2])
        elif token[1] == "end":
            if not stack or stack.pop() != (token[2], depth):
                faults.append(f"\\end{{{token[2]}}} out of place")
        elif token[0] in "{}":
            depth += 1 if token[0] == "{" else -1
            if depth < 0:
                faults.append("a brace too many")
    for columns, body in re.findall(r"\\begin\{tabular\}\{([lr]+)\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        for line in (part for part in body.split("\\\\\n") if "&" in part):
            spans = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", line))
            if len(re.findall(r"(?<!\\)&", line)) + 1 + spans != len(columns):
                faults.append(f"a row of other columns: {line[:60]}")
    return seen, faults + [f"{name} is not ended" for name, _ in stack] + (["a brace is not closed"] if depth else [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The full grid with four claims."""
    folder = write_run(tmp_path_factory.mktemp("latex") / "run", full_grid(), claims=CLAIMS, overrides=["measure.steps=10"])
    assert main(["report", "run", str(folder), "--latex"]) == 0
    return folder


@pytest.fixture(scope="module")
def text(folder) -> str:
    return (folder / "appendix.tex").read_text()


def test_sections_stand_in_cTunings_order(text):
    assert re.findall(r"\\(?:sub)*section\{(.*)\}", text) == HEADINGS


def test_environments_and_rows_are_whole(text):
    seen, faults = structure(text)
    assert not faults and {"tabular", "itemize", "description", "quote", "minipage"} <= set(seen)
    for spoilt in (text.replace("\\end{itemize}", "", 1), text.replace(" & ", " ", 1), text.replace("\\bottomrule\n", "}", 1)):
        assert structure(spoilt)[1], "the parser's own control"


def test_each_claim_names_its_command_expected_value_tolerance_minutes_and_disk(text):
    items = re.findall(r"\\item\[(delta[^]]*)\](.*?)(?=\\item\[|\\end\{description\})", text, re.DOTALL)
    assert [name for name, _ in items] == [claim["id"] for claim in CLAIMS]
    saved = " ".join(items[0][1].split())
    saved = saved.replace("\\allowbreak{}", "")
    command = "\\texttt{./run workflow workflows/hand-made.yaml measure.steps=10}"
    order = ["40 to 70 \\%", command, "experiment memory", "at least 36.0 \\%", "tolerance 10 \\%", "6 minutes", "95.37 MiB", "60.5 \\%",
             "Test Processor 9000", "\\textbf{reproduced}"]
    places = [saved.index(words) for words in order]
    assert places == sorted(places)
    assert "reproduced, by simulation" in items[1][1] and "simulated v100-32gb" in items[1][1]


def test_numbers_of_the_cells_are_those_of_the_report(text):
    table = text[text.index("Training steps, measured"):]
    row = next(line for line in table.splitlines() if line.startswith("delta & 60 \\%"))
    cells = [cell.strip() for cell in row.removesuffix("\\\\").split(" & ")]
    assert cells[2:6] == ["ok", "exact", "595.0 MiB", "59.5 \\%"] and "1.40 (1.38 to 1.42; 10 pairs)" in cells
    assert "10.00 MiB" not in text, "the wrong cell's peak does not count"
    assert "\\caption{Training steps, measured (experiment memory, model resnet50, batch 16, on cpu)}" in text
    assert "\\toprule" in text and "\\multicolumn{4}{c}{simulated}" in text and "record.json}" not in text


def test_what_only_a_person_can_say_is_open(text):
    assert "\\textbf{Archived?:} \\emph{Open: only a person can answer this.}" in text
    assert "\\subsection{Notes}\n\n\\emph{Open:" in text and "for the authors to confirm" in text


def test_long_tables_are_cut_into_floats(tmp_path):
    records = [measured_step("delta", 100 + i, budget=f"{20 + i / 4:g}%") for i in range(2 * ROWS_A_TABLE + 1)]
    folder = write_run(tmp_path / "run", records)
    assert main(["report", "run", str(folder), "--latex"]) == 0
    text = (folder / "appendix.tex").read_text()
    parts = re.findall(r"\\caption\{Training steps, measured, part (\d) of 3 \(experiment[^}]*\}(.*?)\\end\{tabular\}", text, re.DOTALL)
    assert [(number, body.count("\\\\\n") - 2) for number, body in parts] == [("1", 40), ("2", 40), ("3", 1)]
    assert not structure(text)[1]


def hostile(tmp_path: Path) -> Path:
    """Commands of TeX wherever a record or a workflow can put text."""
    config = {"method": HOSTILE, "model": HOSTILE, "experiment": HOSTILE, "options": {HOSTILE: HOSTILE}}
    records = [measured_step("delta", 500, budget="50%", config=config), measured_step("eager", 900, message=HOSTILE)]
    workflow = {"name": HOSTILE, "title": HOSTILE, "description": HOSTILE, "path": HOSTILE, "sha256": HOSTILE, "label": HOSTILE,
                "claims": [*CLAIMS, {"id": HOSTILE, "rule": HOSTILE, "experiment": HOSTILE}], "expected": {}}
    folder = write_run(tmp_path / "run", records, workflow=workflow, overrides=[HOSTILE])
    assert main(["report", "run", str(folder), "--latex"]) == 0
    return folder


def test_hostile_text_is_no_command(tmp_path):
    folder = hostile(tmp_path)
    for name in ("appendix.tex", "report.tex"):
        text = (folder / name).read_text()
        assert not structure(text)[1] and "\\input{/etc" not in text and "\\textbackslash{}input\\{/etc/passwd\\}" in text


def test_the_same_records_give_the_same_bytes_without_torch(folder):
    first = [(folder / name).read_bytes() for name in ("appendix.tex", "report.tex", "report.html")]
    done = run_without_torch("report", "run", str(folder), "--latex", "--csv")
    assert done.returncode == 0, done.stderr
    assert [(folder / name).read_bytes() for name in ("appendix.tex", "report.tex", "report.html")] == first


@pytest.mark.latex
@pytest.mark.parametrize("is_hostile", [False, True])
def test_it_compiles(folder, tmp_path, is_hostile):
    source = hostile(tmp_path) if is_hostile else folder
    for name in ("appendix.tex", "report.tex"):
        shutil.copy(source / name, tmp_path)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "report.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=120)
    assert done.returncode == 0 and (tmp_path / "report.pdf").is_file(), done.stdout[-2000:]
    two_columns = (tmp_path / "report.tex").read_text().replace("[10pt]{article}", "[10pt,twocolumn]{article}")
    (tmp_path / "report.tex").write_text(two_columns)
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120).returncode == 0
