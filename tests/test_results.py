"""The table against the hand-made records that it is read from."""

from __future__ import annotations

import json

import pytest
from hand_made import MIB, full_grid, make_record, measured_step, training, write_run

import vramlab
from vramlab.record import Outcome
from vramlab.runs import IDENTITY_COLUMNS, find_run_folders, load_run, results


def test_one_row_a_cell_over_a_run_a_workflow_and_all_results(tmp_path):
    first = write_run(tmp_path / "results" / "a" / "run-1", full_grid())
    write_run(tmp_path / "results" / "a" / "run-2", [measured_step("eager", 1000)])
    write_run(tmp_path / "results" / "b" / "run-1", [measured_step("eager", 1000)])
    counts = [len(results(path)) for path in (first, tmp_path / "results" / "a", tmp_path / "results")]
    assert counts == [len(full_grid()), len(full_grid()) + 1, len(full_grid()) + 2]
    assert [p.name for p in find_run_folders(tmp_path / "results" / "a")] == ["run-1", "run-2"]


def test_numbers_are_the_records_in_bytes_and_seconds(tmp_path):
    folder = write_run(tmp_path / "run", [measured_step("delta", 595, budget="60%", ratio=1.4), training("delta")])
    table = vramlab.results(folder)
    step = table[table.kind == "step"].iloc[0]
    assert tuple(table.columns[: len(IDENTITY_COLUMNS)]) == IDENTITY_COLUMNS
    assert (step.measured_peak_bytes, step.budget_bytes, step.eager_peak_bytes) == (595 * MIB, 600 * MIB, 1000 * MIB)
    assert (step.measured_ratio_median, step.measured_ratio_low, step.measured_drift_high) == (1.4, 1.38, 1.01)
    assert step.measured_step_seconds_median == 1.4 and step.measured_step_seconds_n == 5
    assert step.predicted_step_seconds == 1.4 and step.outcome == "ok" and step.truth == "exact"
    assert json.loads(step["options"]) == {"action": "director"} and json.loads(step["missing"])
    trained = table[table.kind == "train"].iloc[0]
    assert trained.training_loss_last == 2.0 / 200 and trained.training_equal_steps == 200


def test_a_missing_number_is_nan_and_the_reason_stands_beside_it(tmp_path):
    row = results(write_run(tmp_path / "run", [measured_step("eager", 1000)])).iloc[0]
    assert row.isna()["measured_nvml_peak_bytes"]
    assert json.loads(row["missing"]) == {"measured.nvml_peak_bytes": "no NVIDIA GPU on this machine"}


def test_a_cell_without_a_record_is_a_row_that_says_so(tmp_path):
    done, planned, torn = measured_step("eager", 1000), measured_step("delta", 1, budget="1%"), measured_step("delta", 2, budget="2%")
    folder = write_run(tmp_path / "run", [done, planned, torn])
    (folder / "cells" / planned.cell_id / "record.json").unlink()
    (folder / "cells" / torn.cell_id / "record.json").write_text('{"cell_id": "half')
    table = results(folder).set_index("cell_id")
    assert table.loc[planned.cell_id, "message"] == "not run yet" and table.loc[planned.cell_id, "budget"] == "1%"
    assert "cannot be read" in table.loc[torn.cell_id, "message"] and table["outcome"].notna().sum() == 1


def test_cells_keep_the_order_of_the_plan_and_unplanned_ones_come_last(tmp_path):
    records = full_grid()
    folder = write_run(tmp_path / "run", records)
    extra = make_record(config={"method": "extra"}, outcome=Outcome.CRASHED)
    extra.save(folder / "cells" / extra.cell_id / "record.json")
    assert [cell.cell_id for cell in load_run(folder).cells] == [r.cell_id for r in records] + [extra.cell_id]


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run below"):
        results(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        results(tmp_path / "absent")
