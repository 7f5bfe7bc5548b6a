"""Tables of searches, from hand-made records: measured and simulated apart, every trial with its outcome, why no more fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hand_made import MIB, make_record, search, write_run
from test_report import Page

from vramlab.cli.progress import summary
from vramlab.finder import Found, described, trial
from vramlab.record import Outcome, RunRecord, Truth
from vramlab.report import render

TRIALS = [
    trial(37, "ok", "", samples=37, step_seconds=0.5, compute_seconds=0.4, seconds_cap=0.45, peak_bytes=9 * MIB),
    trial(38, "oom", "byte_budget", message="the step held 1,000 bytes more than the cap", peak_bytes=11 * MIB),
    trial(37, "ok", "", attempt=2, samples=37, step_seconds=0.5, compute_seconds=0.4, seconds_cap=0.45, peak_bytes=9 * MIB),
    trial(38, "oom", "byte_budget", attempt=2, peak_bytes=11 * MIB),
    trial(35, "crashed", "SIGSEGV", message="the process died of SIGSEGV"),
    trial(30, "ok", "", samples=30, step_seconds=0.3, compute_seconds=0.3, seconds_cap=0.4, peak_bytes=8 * MIB),
]
ROLES = {"parameter": 1 * MIB, "buffer": 0, "gradient": 1 * MIB, "optimizer_state": 2 * MIB, "input": 0, "activation": 4 * MIB,
         "temporary": MIB // 2}


def measured(method: str = "eager", **changes) -> RunRecord:
    like = search(method, 37)
    bounds = {"over": "batch", "low": 1, "high": 64, "step": 1, "slowdown": None}
    found = Found(largest=37, hit_upper_end=False, holes=(35,), unstable=())
    block = described(bounds, found, 30, TRIALS, memory_bytes=10 * MIB, is_simulated=False, simulated_largest=38, why_no_guess="",
                      at_peak={"by_role": ROLES, "inside_op_bytes": MIB // 2, "phase": "backward"}, simulated_peak_bytes=9 * MIB + 4,
                      steps=3, cap="bytes held against the meter")
    return replace(make_record(config={**like.config, "target": "cpu", "search": bounds}, search=block | changes,
                               measured={"peak_bytes": 9 * MIB}, truth=Truth.EXACT))


def page(tmp_path: Path, *records: RunRecord) -> Page:
    return Page(render(write_run(tmp_path / "run", records)).read_text())


def test_a_measured_search_stands_in_its_own_table_with_what_it_means(tmp_path):
    shown = page(tmp_path, measured(), search("eager", 200))
    (row,) = [row for row in shown.tables["Largest that trains, measured"] if "batch 37" in " ".join(row)]
    assert row[-10:] == ["batch 371", "30", "30 (100/s)", "9.000 MiB", "10.00 MiB", "1 to 64", "6", "38", "+4 B", "record"]
    for words in ("the cap is bytes held against the meter", "3 whole steps a trial, each in a fresh process", "below it 35 does not fit",
                  "35 ended as crashed (SIGSEGV)", "the largest fitted twice and the next failed twice"):
        assert words in shown.text, words
    (other,) = [row for row in shown.tables["Largest that fits, simulated"] if "batch 200" in " ".join(row)]
    assert "batch 37" not in " ".join(other)


def test_every_trial_has_its_outcome_its_reason_and_its_throughput(tmp_path):
    rows = page(tmp_path, measured()).tables["Trials of the searches, measured"][2:]
    assert [(row[-9], row[-8]) for row in rows] == [("37", "1"), ("38", "1"), ("37", "2"), ("38", "2"), ("35", "1"), ("30", "1")]
    assert rows[0][-7:-1] == ["ok", "9.000 MiB", "500 ms", "74.0", "1.25", "no"]
    assert rows[1][-7].startswith("oom (byte budget)") and rows[4][-7].startswith("crashed (SIGSEGV)")
    assert rows[5][-2] == "yes" and rows[1][-2] == "\u2013"


def test_what_is_live_at_the_peak_is_told_by_role(tmp_path):
    rows = page(tmp_path, measured()).tables["What is live at the peak of the largest, simulated"]
    assert {role.replace("_", " ") for role in ROLES} | {"inside the op"} <= set(rows[1])
    assert {"2.000 MiB", "4.000 MiB", "backward"} <= set(rows[2])


def test_numbers_of_a_search_without_truth_do_not_count_and_the_command_line_tells_measured_from_simulated(tmp_path):
    void = replace(measured(), truth=Truth.NOT_RUN)
    row = page(tmp_path, void).tables["Largest that trains, measured"][2]
    assert "batch 37" not in " ".join(row)
    assert "simulated" not in summary(measured()) and "largest batch 37" in summary(measured())
    refused = replace(void, outcome=Outcome.OOM, reason="byte_budget", message="not even batch 1 fits")
    assert summary(refused).startswith("oom (byte budget)")
