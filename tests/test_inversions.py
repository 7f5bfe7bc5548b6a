"""A lower budget that gives a faster step or a higher peak is found and flagged: hand-made records, each with its counterpart."""

from __future__ import annotations

from dataclasses import replace

from hand_made import infeasible_step, measured_step, simulated_step
from test_claims import as_run

from vramlab.report.inversions import inversions
from vramlab.report.tables import inversions_table, methods_table


def found_in(records) -> list[tuple[str, str, str]]:
    return [(f.above.config["budget"], f.below.config["budget"], f.in_words) for f in inversions(as_run(records))]


def simulated(**overhead_and_peak) -> list:
    """A cell at each budget: p80=(overhead, peak in MiB)."""
    return [simulated_step("delta", peak, budget=f"{name[1:]}%", overhead=overhead) for name, (overhead, peak) in overhead_and_peak.items()]


def test_a_grid_that_falls_and_rises_as_it_should_has_none():
    assert found_in(simulated(p80=(0.1, 790), p60=(0.1, 600), p40=(0.3, 400))) == []


def test_a_faster_step_and_a_higher_peak_are_found_whatever_the_order_of_the_records():
    records = simulated(p40=(0.3, 390), p80=(0.2, 550), p60=(0.1, 560), p50=(0.3, 390))
    assert found_in(records) == [("80%", "60%", "faster step and higher peak")]
    assert found_in(simulated(p80=(0.2, 550), p60=(0.2, 551))) == [("80%", "60%", "higher peak")]
    assert found_in(simulated(p80=(0.2, 550), p60=(0.19, 550))) == [("80%", "60%", "faster step")]


def test_a_budget_without_a_plan_between_two_hides_nothing():
    pair = simulated(p80=(0.2, 550), p40=(0.1, 300))
    refused = replace(infeasible_step("delta", "60%"), config=pair[0].config | {"budget": "60%"})
    assert found_in([pair[0], refused, pair[1]]) == [("80%", "40%", "faster step")]


def test_methods_batches_and_networks_are_not_compared_with_each_other():
    slow, fast = simulated(p80=(0.2, 550), p60=(0.1, 560))
    for other in ({"model": "vgg16"}, {"batch_size": 8}, {"target": "sim:p100"}, {"experiment": "other"}, {"method": "dtr"}):
        assert found_in([slow, simulated_step("delta", 560, budget="60%", overhead=0.1, config=other)]) == [], other
    assert found_in([slow, fast])


def test_measured_times_differ_where_their_intervals_lie_apart():
    above = measured_step("delta", 500, budget="80%", ratio=1.3)  # 1.28 to 1.32
    assert found_in([above, measured_step("delta", 400, budget="60%", ratio=1.25)]) == [("80%", "60%", "faster step")]
    assert found_in([above, measured_step("delta", 400, budget="60%", ratio=1.27)]) == []
    few = replace(above, measured=above.measured | {"ratio": above.measured["ratio"] | {"n": 5}})
    assert found_in([few, measured_step("delta", 400, budget="60%", ratio=1.25)]) == [], "five pairs have no interval"


def test_the_report_lists_them_and_marks_them_in_the_table_of_methods():
    records = [*simulated(p80=(0.2, 550), p60=(0.1, 540)), simulated_step("delta", 550, budget="80%", config={"model": "vgg16"})]
    (row,) = inversions_table(as_run(records)).rows
    assert [v.text for v in row.values[1:-1]] == ["resnet50", "16", "delta", "v100-32gb", "faster step, simulated", "80 %", "60 %",
                                                  "550.0 MiB", "540.0 MiB", "1.2000", "1.1000"]
    table = methods_table(as_run(records))
    marked = [v for r in table.rows for v in r.values if v.note and v.href]
    assert [v.text for v in marked] == ["1.10"] and table.notes[marked[0].note - 1] == "faster step than at 80 %"


def test_a_step_is_held_against_eagers_not_against_its_own_first_runs():
    """Slow algorithms and small passes lengthen a method's own first runs: they must not vanish from its ratio."""
    record = simulated_step("modnn", 500, budget="60%")
    record = replace(record, predicted={**record.predicted, "step_seconds": 3.0, "compute_seconds": 3.0, "eager_step_seconds": 2.0})
    unknown = {**record.predicted, "eager_step_seconds": None}
    other = replace(record, config={**record.config, "model": "vgg16"}, cell_id="other", predicted=unknown)
    (row,) = methods_table(as_run([record, other])).rows
    assert [v.text for v in row.values[3:]] == ["1.50", "\u2013"]
