"""cells.csv against the records, read back by pandas and by the standard library."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace

import pandas as pd
import pytest
from hand_made import MIB, full_grid, measured_step, write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

import vramlab
from vramlab.report.cells_csv import COLUMNS_FILE, CSV_FILE, read_cells, to_csv, write_cells

FORMULAS = ['=HYPERLINK("http://x","y")', "+1+2", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1", "\uff1d1", "'=1", "'"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The full grid, one cell of it not run."""
    folder = write_run(tmp_path_factory.mktemp("csv") / "0012", full_grid())
    (folder / "cells" / full_grid()[2].cell_id / "record.json").unlink()
    write_cells(folder)
    return folder


def alike(table: pd.DataFrame) -> pd.DataFrame:
    """An empty text is a missing value."""
    return table.astype(object).where(table.notna() & (table != ""), math.nan)


def test_the_table_comes_back_through_pandas(folder):
    assert_frame_equal(alike(read_cells(folder / CSV_FILE)), alike(vramlab.results(folder)), check_dtype=False)
    plain = pd.read_csv(folder / CSV_FILE)
    assert len(plain) == len(full_grid()) and plain.measured_peak_bytes.sum() == vramlab.results(folder).measured_peak_bytes.sum()


def test_numbers_are_the_records_own(folder):
    with open(folder / CSV_FILE, encoding="utf-8", newline="") as file:
        rows = {row["cell_id"]: row for row in csv.DictReader(file)}
    assert [*rows] == [record.cell_id for record in full_grid()]
    for record in full_grid()[3:]:
        row, peak = rows[record.cell_id], record.measured.get("peak_bytes")
        assert row["measured_peak_bytes"] == ("" if peak is None else str(peak)), "bytes are whole numbers"
        ratio = (record.measured.get("ratio") or {}).get("median")
        assert row["measured_ratio_median"] == ("" if ratio is None else repr(ratio))
        assert (row["outcome"], row["run"], row["budget"]) == (str(record.outcome), "0012", record.config["budget"] or "")
    absent = rows[full_grid()[2].cell_id]
    assert (absent["outcome"], absent["message"]) == ("", "not run yet")


def test_every_column_is_documented_with_its_unit(folder):
    body = json.loads((folder / COLUMNS_FILE).read_text())
    columns = {column["titles"]: column for column in body["tableSchema"]["columns"]}
    with open(folder / CSV_FILE, encoding="utf-8", newline="") as file:
        assert [*columns] == next(csv.reader(file)) and body["url"] == CSV_FILE
    assert all(len(column["dc:description"]) > 2 for column in columns.values())
    assert columns["measured_peak_bytes"]["unit"] == "byte" and columns["measured_step_seconds_median"]["unit"] == "second"
    assert "unit" not in columns["measured_ratio_low"] and "lower end" in columns["measured_ratio_low"]["dc:description"]
    assert all("simulated" in c["dc:description"] for name, c in columns.items() if name.startswith("predicted_"))
    kinds = {name: column["datatype"] for name, column in columns.items()}
    assert (kinds["measured_peak_bytes"], kinds["measured_ratio_low"], kinds["eager_peak_is_simulated"], kinds["run"]) == (
        "integer", "number", "boolean", "string")


def test_layers_are_one_column_and_roles_have_their_unit(tmp_path):
    at_peak = {"by_role": {"activation": 4 * MIB}, "by_layer": {"conv1": 3, "=layer": 4}, "inside_op_bytes": 0}
    record = measured_step("delta", 500, budget="50%")
    table = vramlab.results(write_run(tmp_path / "run", [replace(record, predicted=record.predicted | {"at_peak": at_peak})]))
    assert table.predicted_at_peak_by_role_activation_bytes[0] == 4 * MIB
    assert json.loads(table.predicted_at_peak_by_layer_bytes[0]) == {"conv1": 3, "=layer": 4}
    assert not [name for name in table.columns if "conv1" in name]


def test_what_was_not_measured_at_all_leaves_no_empty_column(tmp_path):
    whole = measured_step("delta", 500, budget="50%")
    without = measured_step("eager", 900)
    without = replace(without, measured=without.measured | {"ratio": None})
    table = vramlab.results(write_run(tmp_path / "run", [whole, without]))
    assert "measured_ratio" not in table and table.measured_ratio_median.notna().tolist() == [True, False]
    assert "measured_ratio" in vramlab.results(write_run(tmp_path / "other", [without])), "its reason would have no column"


@pytest.mark.parametrize("text", FORMULAS)
def test_no_text_begins_like_a_formula(text, tmp_path):
    record = measured_step("delta", 500, budget="50%", config={"model": text}, message=text)
    folder = write_run(tmp_path / "run", [record])
    path, _ = write_cells(folder)
    with open(path, encoding="utf-8", newline="") as file:
        row = next(csv.DictReader(file))
    assert row["model"] == row["message"] == f"'{text}"
    assert read_cells(path).model[0] == read_cells(path).message[0] == text


def test_negative_numbers_stay_numbers(tmp_path):
    record = measured_step("delta", 500, budget="50%")
    record = replace(record, measured=record.measured | {"prediction_error_bytes": -4})
    path, _ = write_cells(write_run(tmp_path / "run", [record]))
    assert ",-4," in path.read_text() and pd.read_csv(path).measured_prediction_error_bytes[0] == -4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1), min_size=1, max_size=4))
def test_any_text_comes_back_and_none_is_a_formula(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("any") / CSV_FILE
    table = pd.DataFrame({"model": texts, "run": "1", "cell_id": "2"})
    path.write_text(to_csv(table), encoding="utf-8", newline="")
    columns = [{"titles": name, "datatype": "string"} for name in table]
    path.with_name(COLUMNS_FILE).write_text(json.dumps({"tableSchema": {"columns": columns}}))
    assert read_cells(path).model.tolist() == texts
    with open(path, encoding="utf-8", newline="") as file:
        assert not [row for row in csv.reader(file) for text in row if text.strip()[:1] and text.strip()[0] in "=+-@"]


def test_the_same_records_give_the_same_bytes(folder):
    first = [(folder / name).read_bytes() for name in (CSV_FILE, COLUMNS_FILE)]
    write_cells(folder)
    assert [(folder / name).read_bytes() for name in (CSV_FILE, COLUMNS_FILE)] == first
