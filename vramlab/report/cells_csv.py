"""cells.csv: the table of `vramlab.results` for any spreadsheet, one row a cell, and beside it what each column is.

    cells.csv                one row a cell; bytes and seconds, as in the records; what is missing is blank
    cells.csv-metadata.json  name, description, unit and type of each column, as W3C's CSV on the Web (CSVW) has them

A text that a spreadsheet would take for a formula has an apostrophe put in front; `read_cells` takes it off again.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from vramlab.record import write_atomically
from vramlab.report.facts import METRICS
from vramlab.runs import IDENTITY_COLUMNS, report_folder, results

if TYPE_CHECKING:
    import pandas

CSV_FILE, COLUMNS_FILE = "cells.csv", "cells.csv-metadata.json"
# What spreadsheets take for a formula at the start of a text (OWASP's list and its full-width twins), and our own mark.
FORMULA = re.compile("['\t\r\n]|\\s*[=+@\uff1d\uff0b\uff0d\uff20-]")
_WHOLE = ("_bytes", "_n")

_IDENTITY = {
    "run": "the run's folder", "workflow": "the workflow's name", "experiment": "the experiment of the workflow",
    "kind": "step: one training step; train: many; max_batch: a search for the largest size", "model": "the model's card",
    "batch_size": "samples a step", "label": "how the workflow calls the method", "method": "the method's folder",
    "options": "the method's options, JSON", "budget": "as the workflow writes it: 60% of eager's peak, 6GiB, auto; blank without one",
    "target": "cpu, cuda:N, or sim:NAME where the cell is simulated", "cell_id": "hash of the resolved cell; the name of its folder",
    "outcome": "what became of the cell; blank where it has no record", "reason": "why it did not end well",
    "truth": "how its values stand to eager PyTorch's, bit for bit", "message": "one sentence for a person",
    "budget_bytes": "the budget of the device", "eager_peak_bytes": "what a budget in % is taken of",
    "eager_peak_is_simulated": "whether that peak is simulated", "seconds": "wall time of the whole cell",
    "missing": "why numbers are missing, JSON: field of the record -> reason",
}
_BLOCKS = {"measured": "measured on the hardware that `target` names", "predicted": "simulated, never measured",
           "search": "of a search for the largest size", "training": "of a real training run"}


def write_cells(run_dir: Path) -> tuple[Path, Path]:
    """Write cells.csv and what documents it where report.html is; (the table, its columns)."""
    table = results(run_dir)
    folder = report_folder(Path(run_dir))
    paths = folder / CSV_FILE, folder / COLUMNS_FILE
    write_atomically(paths[0], to_csv(table))
    write_atomically(paths[1], json.dumps(describe(table), indent=1, ensure_ascii=False) + "\n")
    return paths


def to_csv(table: pandas.DataFrame) -> str:
    """The text of cells.csv. Every text stands in quotes: no line end or comma inside one can end a row."""
    plain = table.copy()
    for name in table.columns:
        kind = datatype(table, name)
        if kind == "string":
            plain[name] = table[name].map(_as_text, na_action="ignore")
        elif kind == "integer" and table[name].notna().any():
            plain[name] = table[name].astype("Int64")
    return plain.to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")


def _as_text(value: Any) -> str:
    text = str(value)
    return f"'{text}" if FORMULA.match(text) else text


def read_cells(path: str | Path) -> pandas.DataFrame:
    """The table of `results`, from a cells.csv with its columns beside it; an empty text and a missing value are both missing here."""
    import pandas as pd

    path = Path(path)
    columns = json.loads(path.with_name(f"{path.name}-metadata.json").read_text(encoding="utf-8"))["tableSchema"]["columns"]
    texts = [column["titles"] for column in columns if column["datatype"] == "string"]
    table = pd.read_csv(path, keep_default_na=False, na_values=[""], dtype=dict.fromkeys(texts, str))
    for name in texts:
        table[name] = table[name].map(lambda text: text.removeprefix("'"), na_action="ignore")
    return table


def describe(table: pandas.DataFrame) -> dict[str, Any]:
    """The columns, as CSVW has them."""
    columns = [{"name": quote(name, safe=""), "titles": name, "dc:description": describe_column(name), "datatype": datatype(table, name)}
               | ({"unit": unit} if (unit := _unit(name)) else {}) for name in table.columns]
    return {
        "@context": ["http://www.w3.org/ns/csvw", {"unit": "http://schema.org/unitText"}], "url": CSV_FILE,
        "dc:description": f"One row a cell. {_FORMULA_NOTE}", "dialect": {"encoding": "utf-8", "header": True},
        "tableSchema": {"columns": columns, "primaryKey": ["run", "cell_id"]},
    }


_FORMULA_NOTE = ("A text that begins like a formula, or with an apostrophe, has one more apostrophe in front. "
                 "What is missing is blank; the column missing says why.")


def describe_column(name: str) -> str:
    """What a column holds, in words. Metrics are described as the report describes them."""
    if name in _IDENTITY:
        return _IDENTITY[name]
    for metric in sorted(METRICS, key=len, reverse=True):
        stem = metric.replace(".", "_")
        if name == stem or name.startswith(f"{stem}_"):
            part = name[len(stem) + 1:]
            return METRICS[metric] + (f"; here: {_PARTS.get(part, part)}" if part else "")
    block, _, rest = name.partition("_")
    stem, _, part = rest.rpartition("_")
    told = f"{stem.replace('_', ' ')}, {_PARTS[part]}" if stem and part in _PARTS else rest.replace("_", " ")
    return f"{told}; {_BLOCKS[block]}" if block in _BLOCKS else told


_PARTS = {"median": "the median", "low": "the lower end of the interval", "high": "the upper end of the interval", "last": "the last one",
          "n": "how many there are"}


def _unit(name: str) -> str:
    """The unit that a name ends with, or that stands before its part."""
    stem = re.sub("_(median|last|low|high)$", "", name)
    return next((unit for unit, ends in (("byte", "bytes"), ("second", "seconds")) if stem == ends or stem.endswith(f"_{ends}")), "")


def datatype(table: pandas.DataFrame, name: str) -> str:
    """boolean, integer, number or string: what the column's values are."""
    values = table[name].dropna()
    if name in _TEXTS or any(isinstance(value, str) for value in values):
        return "string"
    if len(values) and all(value is True or value is False for value in values.astype(object)):
        return "boolean"
    if any(isinstance(value, list | dict) for value in values):
        return "string"
    is_whole = name.endswith(_WHOLE) or name == "batch_size" or table[name].dtype.kind == "i"
    return "integer" if is_whole and all(float(value).is_integer() for value in values) else "number"


_TEXTS = frozenset(IDENTITY_COLUMNS) - {"batch_size", "budget_bytes", "eager_peak_bytes", "eager_peak_is_simulated"} | {"missing"}
