"""The first screen must not mislead who stops there: runs in which something is wrong, missing or only simulated, and what is said then.
Each has a run beside it in which that is not so, and the words do not stand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hand_made import CLAIMS, MIB, infeasible_step, make_record, measured_step, search, simulated_step, write_run
from test_report import render_page, words_between

from vramlab.record import Outcome, Truth, Verdict
from vramlab.report.claims import ClaimResult, Finding, PaperClaim, judge, load_claims
from vramlab.report.summary import Summary, summarise
from vramlab.runs import load_run

EAGER, DELTA = measured_step("eager", 1000), measured_step("delta", 590, budget="60%")
CLAIM = [CLAIMS[0]]
WRONG = make_record(config={"method": "broken", "budget": "60%", "options": {}}, outcome=Outcome.WRONG, truth=Truth.WRONG,
                    message="the gradient of conv1.weight differs",
                    measured={"peak_bytes": MIB, "ratio": {"median": 0.1, "low": 0.1, "high": 0.1}})


def with_ratio(record, median: float, half: float = 0.02, n: int = 10):
    return replace(record, measured=record.measured | {"ratio": {"median": median, "low": median - half, "high": median + half, "n": n}})


def screen(tmp_path, records, **plan) -> str:
    """All words of the first screen, in order."""
    return words_between(render_page(tmp_path, records, **{"claims": CLAIM} | plan), "Asked", "Graded by rule")


def summary(tmp_path, records, **plan) -> Summary:
    run = load_run(write_run(tmp_path, records, **plan))
    known = load_claims([Path(__file__).parent.parent / "reports" / "claims.yaml"])
    return summarise(run, judge(run.workflow["claims"], run, known))


def test_a_clean_run_says_that_all_count(tmp_path):
    found = summary(tmp_path, [EAGER, DELTA], claims=[])
    assert found.standing == "All 2 cells count. Every measured number that counts is of a step that equals eager PyTorch's bit for bit."
    assert found.invalid == ()
    assert found.answer == "The workflow names no claim of a paper. All 2 cells count; 1 of 1 cell with a budget kept it."


def test_one_wrong_cell_is_said_first_and_is_nobodys_best(tmp_path):
    others = [replace(infeasible_step(f"m{i}", "40%"), message=f"reason {i}") for i in range(9)]
    found = summary(tmp_path, [*others, WRONG, EAGER, DELTA])
    assert "10 of 12 cells do not count: 9 plan infeasible and 1 wrong." in found.standing
    assert "the gradient of conv1.weight differs" in found.invalid[0].why, "before what is folded away"
    assert [b.method for b in found.best if b.budget == "60 %"] == ["delta"]
    assert [b.kept for b in found.best if b.budget == "60 %"] == ["1 of 2 methods"]


def test_one_cell_over_its_budget_is_said_and_is_nobodys_best(tmp_path):
    over = replace(with_ratio(DELTA, 0.5), measured=DELTA.measured | {"over_budget_bytes": 3 * MIB})
    found = summary(tmp_path, [EAGER, over])
    assert "1 cell exceeded its budget." in found.standing and "exceeded its budget by 3.000 MiB" in found.invalid[0].why
    assert [b.method for b in found.best] == ["none kept it"]
    assert "exceeded" not in summary(tmp_path / "kept", [EAGER, DELTA]).standing


def test_only_simulated_cells_show_nothing_of_a_machine(tmp_path):
    text = screen(tmp_path / "a", [simulated_step("eager", 1000, overhead=0.0), simulated_step("delta", 590, budget="60%")])
    for words in ("Nothing was executed: no cell shows that a step runs on a machine.", "1 test of claims. Simulated, not measured: 1",
                  "no cell shows that it computes what eager PyTorch computes", "1.20 simulated Claims"):
        assert words in text, words
    assert "Measured on" not in text and "bit for bit." not in text.partition("Fastest")[0] and "Measured:" not in text
    both = screen(tmp_path / "b", [EAGER, DELTA, simulated_step("delta", 590, budget="60%")])
    assert "Nothing was executed" not in both and "Measured: 1 reproduced." in both


def test_when_no_budget_could_be_kept_each_says_so(tmp_path):
    found = summary(tmp_path, [infeasible_step("delta", b) for b in ("60%", "40%")], claims=CLAIM)
    assert [(b.budget, b.method, b.kept, b.time) for b in found.best] == [
        ("60 %", "none kept it", "0 of 1 method", "\u2013"), ("40 %", "none kept it", "0 of 1 method", "\u2013")]
    assert found.answer == "1 test of claims. Without evidence: 1 not testable here."
    assert found.standing.startswith("2 of 2 cells do not count: 2 plan infeasible. Nothing that was measured counts")


def test_claims_that_are_only_recalled_are_no_result(tmp_path):
    recalled = [ClaimResult(id="x", claim=PaperClaim(id="x", system="s", metric="m", value=1, unit="x", confidence=confidence), rule="fits",
                            tolerance=0.1, hardware="here", finding=Finding(verdict=Verdict.REPRODUCED, obtained="1 x", explanation=""))
                for confidence in ("recalled", "recalled", "read")]
    run = load_run(write_run(tmp_path, [EAGER, DELTA]))
    assert summarise(run, recalled[:2]).answer == "All 2 tests are of claims that are recalled, not read: they are shown and not counted."
    assert summarise(run, recalled).answer == ("1 test of claims. Measured: 1 reproduced. 2 further tests of claims that are recalled, "
                                               "not read, are not counted.")


@pytest.mark.parametrize(("ours", "theirs", "n", "rivals"), [
    (1.30, 1.33, 10, "checkpoint"),  # intervals of +- 0.02 overlap
    (1.30, 1.50, 10, ""),
    (1.30, 1.50, 5, "checkpoint"),  # apart, but five pairs carry no interval of 95 %
])
def test_what_cannot_be_told_apart_is_no_winner_alone(tmp_path, ours, theirs, n, rivals):
    checkpoint = measured_step("checkpoint", 590, budget="60%")
    (best,) = summary(tmp_path, [EAGER, with_ratio(DELTA, ours, n=n), with_ratio(checkpoint, theirs, n=n)]).best
    assert (best.method, best.rivals, best.kept) == ("delta", rivals, "2 of 2 methods")


@pytest.mark.parametrize(("median", "is_told"), [(1.01, True), (1.30, False)])
def test_a_time_within_eagers_noise_is_not_a_difference(tmp_path, median, is_told):
    (best,) = summary(tmp_path, [EAGER, with_ratio(DELTA, median)]).best
    assert ("not distinguishable from eager's" in best.time) is is_told


def test_a_run_that_is_not_complete_says_so_in_the_answer(tmp_path):
    cells = [{"cell_id": r.cell_id, "config": dict(r.config), "label": r.config["method"]} for r in (EAGER, DELTA)]
    text = screen(tmp_path, [EAGER], cells=cells)
    assert "AnswerThis run is not complete: 1 of 2 cells has no record." in text.replace("Answer ", "Answer")
    assert "1 of 2 cells does not count: 1 without a record." in text


def test_steps_that_are_not_bit_exact_are_told_and_win_nothing(tmp_path):
    changed = replace(DELTA, truth=Truth.SEMANTICS_CHANGED)
    found = summary(tmp_path, [EAGER, changed])
    assert "1 cell is semantics changed: shown, no ground for a verdict." in found.standing and found.best[0].method == "none kept it"


def test_a_budget_that_was_kept_without_a_time_has_no_fastest(tmp_path):
    (best,) = summary(tmp_path, [EAGER, replace(DELTA, measured=DELTA.measured | {"ratio": None})]).best
    assert (best.method, best.rivals) == ("none was timed", "kept by delta")


def test_a_share_of_a_simulated_eager_peak_says_so(tmp_path):
    for is_simulated, words in ((True, "59.0 % of eager's simulated peak"), (False, "59.0 % of eager's")):
        (best,) = summary(tmp_path / words[-4:], [replace(DELTA, eager_peak_is_simulated=is_simulated)]).best
        assert best.peak.endswith(words)


def test_a_verdict_that_is_not_good_tells_why(tmp_path):
    text = screen(tmp_path / "a", [infeasible_step("delta", "60%")])
    assert "obtained: \u2013 (experiment memory): no bit-exact cell of delta has a peak beside one of eager." in text
    assert "(experiment memory)." in screen(tmp_path / "b", [EAGER, DELTA])


def test_a_run_of_many_budgets_shows_the_first_and_says_how_many_more(tmp_path):
    cells = [measured_step("delta", 500, budget=f"{20 + i % 60}%", config={"batch_size": i + 1}) for i in range(75)]
    found = summary(tmp_path, cells)
    assert len(found.best) == 75 and sum(len(rows) for _, rows in found.best_by_place) == 60 and found.best_left == 15
    assert "15 more budgets stand in the tables below." in screen(tmp_path / "page", cells)


def test_a_run_without_claims_answers_by_its_cells_and_its_searches(tmp_path):
    cells = [EAGER, DELTA, infeasible_step("delta", "20%"), search("eager", 200), search("delta", 4096), search("dtr", None)]
    assert summary(tmp_path, cells, claims=[]).answer == (
        "The workflow names no claim of a paper. 5 of 6 cells count; 1 of 2 cells with a budget kept it. "
        "Largest batch of resnet50 on simulated v100-32gb: eager 200 and delta at least 4096.")
    assert summary(tmp_path / "none", [], claims=[]).answer == "The workflow names no claim of a paper, and no cell has ended."


def test_each_place_is_named_once_and_experiments_are_told_apart(tmp_path):
    cells = [DELTA, measured_step("delta", 500, budget="50%"), measured_step("delta", 500, budget="50%", config={"experiment": "again"})]
    places = [(where, [row.budget for row in rows]) for where, rows in summary(tmp_path, cells).best_by_place]
    here = "resnet50, batch 16, Test Processor 9000, 2 cores"
    assert places == [(f"memory: {here}", ["60 %", "50 %"]), (f"again: {here}", ["50 %"])]
    assert summary(tmp_path / "one", cells[:2]).best_by_place[0][0] == here
