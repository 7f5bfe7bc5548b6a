"""`list claims`: how every claim stands, from hand-made runs whose verdicts are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hand_made import CLAIMS, full_grid, measured_step, simulated_step, write_run

from vramlab.cli import main
from vramlab.cli.claim_tables import claim_lines
from vramlab.report.claims import load_claims
from vramlab.report.standing import standings, tally
from vramlab.runs import load_run

KNOWN = load_claims([Path(__file__).parent.parent / "reports" / "claims.yaml"])


def rows_of(*runs: Path, known=KNOWN) -> dict[str, dict]:
    return {row["id"]: row for row in (s.to_json() for s in standings(map(load_run, runs), known))}


def test_without_a_run_every_claim_says_so():
    rows = rows_of()
    assert len(rows) == len(KNOWN) and all(row["evidence"] == [] and row["verdict"] is row["basis"] is None for row in rows.values())
    assert {row["state"] for row in rows.values() if row["counts"]} == {"no run here yet"}
    assert {row["state"] for row in rows.values() if not row["counts"]} == {"no run here yet; recalled, not counted"}


def test_a_claim_has_its_verdict_what_it_rests_on_and_the_path_of_its_record(tmp_path):
    run = write_run(tmp_path / "hand-made" / "run", full_grid(), claims=CLAIMS)
    rows = rows_of(run)
    assert (rows["delta-mem-save"]["state"], rows["delta-mem-save"]["basis"]) == ("reproduced", "measured")
    assert (rows["delta-bs-r50"]["state"], rows["delta-bs-r50"]["basis"]) == ("reproduced, by simulation", "simulated")
    for name in ("delta-mem-save", "delta-bs-r50"):
        assert rows[name]["evidence"] and all(Path(path).is_file() and Path(path).name == "record.json" for path in rows[name]["evidence"])


def grid(tmp_path: Path, name: str, records, started: str) -> Path:
    return write_run(tmp_path / "hand-made" / name, records, claims=CLAIMS[:1], started=started)


def test_measured_goes_before_simulated_and_a_later_run_before_an_earlier_one(tmp_path):
    eager = measured_step("eager", 1000, ratio=1.0)
    old = grid(tmp_path, "old", [eager, measured_step("delta", 500, budget="60%")], "2026-01-01T00:00:00Z")
    new = grid(tmp_path, "new", [eager, measured_step("delta", 900, budget="90%")], "2026-01-02T00:00:00Z")
    simulated = grid(tmp_path, "sim", [simulated_step("eager", 1000, overhead=0.0), simulated_step("delta", 500, budget="60%")],
                     "2026-01-03T00:00:00Z")
    row = rows_of(old, new, simulated)["delta-mem-save"]
    assert (row["verdict"], row["basis"], row["obtained"]) == ("not reproduced", "measured", "10.0 %")
    assert row["state"] == "not reproduced (elsewhere reproduced and reproduced, by simulation)" and "/new/" in row["evidence"][0]


def test_the_papers_own_value_goes_before_one_that_a_workflow_puts_in_its_place(tmp_path):
    records = [measured_step("eager", 1000, ratio=1.0), measured_step("delta", 900, budget="90%")]
    restated = {**CLAIMS[0], "value": 10.0}
    run = write_run(tmp_path / "hand-made" / "run", records, claims=[restated, CLAIMS[0]])
    assert rows_of(run)["delta-mem-save"]["state"] == "not reproduced (elsewhere reproduced)"
    assert rows_of(write_run(tmp_path / "hand-made" / "run", records, claims=[restated]))["delta-mem-save"]["verdict"] == "reproduced"


def test_a_run_without_evidence_says_why_and_outweighs_nothing(tmp_path):
    eager = measured_step("eager", 1000, ratio=1.0)
    empty = grid(tmp_path, "empty", [eager], "2026-01-02T00:00:00Z")
    row = rows_of(empty)["delta-mem-save"]
    assert (row["state"], row["basis"]) == ("not testable here", None) and row["evidence"] != [] and "record.json" not in row["evidence"][0]
    full = grid(tmp_path, "full", [eager, measured_step("delta", 500, budget="60%")], "2026-01-01T00:00:00Z")
    assert rows_of(full, empty)["delta-mem-save"]["state"] == "reproduced"


def test_a_recalled_claim_is_shown_and_never_counted(tmp_path):
    known = {**KNOWN, "delta-mem-save": replace(KNOWN["delta-mem-save"], confidence="recalled")}
    run = write_run(tmp_path / "hand-made" / "run", full_grid(), claims=CLAIMS)
    rows = rows_of(run, known=known)
    assert rows["delta-mem-save"]["state"] == "partly; recalled, not counted" and not rows["delta-mem-save"]["counts"]
    with_it, without = (tally(list(rows_of(run, known=k).values())) for k in (KNOWN, known))
    assert "4 reproduced (2 by simulation)" in with_it and "3 reproduced (2 by simulation)" in without and "partly" not in without


def test_the_tally_by_hand(tmp_path):
    recalled = sum(claim.confidence == "recalled" for claim in KNOWN.values())
    told = tally(list(rows_of(write_run(tmp_path / "hand-made" / "run", full_grid(), claims=CLAIMS)).values()))
    counted = len(KNOWN) - recalled
    assert told == (f"{counted} claims: 4 reproduced (2 by simulation) and {counted - 4} with no run here yet"
                    + (f"; {recalled} recalled, not counted" if recalled else ""))


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command(tmp_path, capsys, as_json):
    write_run(tmp_path / "hand-made" / "run", full_grid(), claims=CLAIMS)
    assert main(["list", "claims", "--all", "--output-dir", str(tmp_path), *(["--json"] if as_json else [])]) == 0
    said = capsys.readouterr().out
    if as_json:
        assert next(row for row in json.loads(said) if row["id"] == "delta-mem-save")["verdict"] == "reproduced"
    else:
        line = next(line for line in said.splitlines() if line.startswith("delta-bs-r50 "))
        assert "2.04 x" in line and "reproduced, by simulation" in line and "/record.json and 1 more" in line
        assert said.splitlines()[-1].endswith("recalled, not counted") and "no run here yet" in said


def claim(name: str, system: str, **changes) -> dict:
    """A row of `list claims` without a run."""
    return {"id": name, "system": system, "model": "m", "metric": "memory", "value": "2 x", "state": "no run here yet", "obtained": None,
            "verdict": None, "basis": None, "counts": True, "confidence": "read", "evidence": [], **changes}


LONG = "memory that is held by a step " * 3
ROWS = [
    claim("a1", "A", verdict="reproduced", basis="measured", state="reproduced", obtained="2.1 x", metric=LONG.strip(), evidence=["p"]),
    claim("a2", "A", verdict="reproduced", basis="simulated", state="reproduced, by simulation", obtained="1.9 x", evidence=["r"]),
    claim("a3", "A", verdict="not testable here", state="not testable here", evidence=["no GPU"]),
    claim("b1", "B"), claim("b2", "B", counts=False, state="no run here yet; recalled, not counted"),
]


def test_the_summary_is_a_line_a_paper_and_the_claims_that_a_run_settled():
    lines = list(claim_lines(ROWS, shows_all=False, is_terminal=False))
    assert [line.split() for line in lines[0].splitlines()[2:]] == [["A", "3", "2", "(1", "simulated)", "1"], ["B", "2", "1", "1"]]
    header, _, a, b = lines[0].splitlines()
    for paper, column, figure in ((a, "not testable here", "1"), (b, "no run here yet", "1"), (b, "recalled only", "1")):
        assert paper[:header.index(column) + len(column)].endswith(figure), (paper, column)
    assert [line.split()[0] for line in lines[2].splitlines()[2:]] == ["a1", "a2"]
    assert lines[-1] == "vramlab list claims --all shows all 5, and why those without a verdict have none"
    whole = list(claim_lines(ROWS, shows_all=True, is_terminal=False))
    assert [line.split()[0] for line in whole[0].splitlines()[2:]] == ["a1", "a2", "a3", "b1", "b2"] and "no GPU" in whole[0]
    assert whole[-1] == lines[-2] == (
        "4 claims: 2 reproduced (1 by simulation), 1 not testable here and 1 with no run here yet; 1 recalled, not counted")


@pytest.mark.parametrize("shows_all", [False, True])
def test_only_a_terminal_cuts_words(shows_all):
    for is_terminal in (True, False):
        text = "\n".join(claim_lines(ROWS, shows_all=shows_all, is_terminal=is_terminal))
        assert (" ..." in text) is is_terminal and (LONG.strip() in text) is not is_terminal


def test_without_a_verdict_the_summary_says_where_to_begin():
    text = "\n".join(claim_lines(ROWS[2:], shows_all=False, is_terminal=False))
    assert "no claim has a verdict yet: `list workflows`" in text and "no GPU" not in text


@pytest.mark.parametrize(("value", "unit", "words"), [
    (12025908428.8, "bytes/s", "12.03 GB/s"), (0.2181, "dimensionless (units bug)", "0.2181"), (2189.437, "MB", "2189.437 MB"),
    (2.0, "x", "2 x"), ([40, 70], "percent", "40 to 70 %"), (4901.81, "MB", "4901.81 MB"), ("better", "text", "better"),
    (True, "boolean", "yes"),
])
def test_a_value_is_told_as_the_paper_states_it(value, unit, words):
    assert replace(KNOWN["delta-bs-r50"], value=value, unit=unit).in_words == words
