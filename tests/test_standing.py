"""`list claims`: how every claim stands, from hand-made runs whose verdicts are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hand_made import CLAIMS, full_grid, measured_step, simulated_step, write_run

from vramlab.cli import main
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
    assert main(["list", "claims", "--output-dir", str(tmp_path), *(["--json"] if as_json else [])]) == 0
    said = capsys.readouterr().out
    if as_json:
        assert next(row for row in json.loads(said) if row["id"] == "delta-mem-save")["verdict"] == "reproduced"
    else:
        line = next(line for line in said.splitlines() if line.startswith("delta-bs-r50 "))
        assert "2.04 x" in line and "reproduced, by simulation" in line and "/record.json and 1 more" in line
        assert said.splitlines()[-1].endswith("recalled, not counted") and "no run here yet" in said
