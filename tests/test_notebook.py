"""docs/analysis.ipynb: its cells run, in order, and give what is committed; that is what the records beside it say."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
NOTEBOOK = json.loads((DOCS / "analysis.ipynb").read_text(encoding="utf-8"))
AGAIN = "jupyter execute --inplace docs/analysis.ipynb writes it"


def run(source: str, names: dict[str, Any]) -> dict[str, str]:
    """What Jupyter would show of a cell: the text that it prints, the last expression as text or HTML, the figures as PNG."""
    import matplotlib.pyplot as plt

    tree, last = ast.parse(source), None
    if isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    shown: dict[str, str] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "cell", "exec"), names)
        value = eval(compile(last, "cell", "eval"), names) if last is not None else None
    if printed.getvalue():
        shown["stream"] = printed.getvalue()
    for number in plt.get_fignums():
        buffer = io.BytesIO()
        plt.figure(number).savefig(buffer, format="png", bbox_inches="tight")
        shown["image/png"] = base64.b64encode(buffer.getvalue()).decode()
        plt.close(number)
    if hasattr(value, "_repr_html_"):
        shown["text/html"] = value._repr_html_()
    elif value is not None:
        shown["text/plain"] = repr(value)
    return shown


def committed(cell: dict[str, Any]) -> dict[str, str]:
    """The same of the notebook's own outputs."""
    shown: dict[str, str] = {}
    for output in cell["outputs"]:
        assert output["output_type"] != "error", output
        if output["output_type"] == "stream":
            assert output["name"] == "stdout", "a warning is no result"
            shown["stream"] = shown.get("stream", "") + "".join(output["text"])
        else:
            data = {kind: "".join(body) for kind, body in output["data"].items()}
            kinds = ("image/png", "text/html") if {"image/png", "text/html"} & set(data) else ("text/plain",)
            shown |= {kind: data[kind] for kind in kinds if kind in data}
    return shown


def pixels(png: str) -> np.ndarray:
    """(height, width, channels) from 0 to 1."""
    return matplotlib.image.imread(io.BytesIO(base64.b64decode(png)))


CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def outputs() -> list[dict[str, str]]:
    """All cells run from the top, beside the records."""
    names: dict[str, Any] = {}
    with contextlib.chdir(DOCS), matplotlib.rc_context():
        matplotlib.use("Agg")
        return [run("".join(cell["source"]), names) for cell in CODE]


def test_the_committed_outputs_are_what_the_cells_give(outputs):
    assert [cell["execution_count"] for cell in CODE] == [*range(1, len(CODE) + 1)], f"not run once from the top: {AGAIN}"
    for cell, ran in zip(CODE, outputs):
        kept = committed(cell)
        assert set(kept) == set(ran) and kept, AGAIN
        for kind in set(kept) - {"image/png"}:
            assert kept[kind].strip() == ran[kind].strip(), AGAIN


def test_the_committed_figure_is_what_the_cell_draws(outputs):
    (ran,), (kept,) = ([shown["image/png"] for shown in found if "image/png" in shown] for found in (outputs, map(committed, CODE)))
    assert pixels(ran).shape == pixels(kept).shape and np.abs(pixels(ran) - pixels(kept)).mean() < 0.01, AGAIN
    assert (pixels(kept)[..., :3].min(axis=2) < 0.5).mean() > 0.005, "an empty drawing"


def test_the_numbers_are_those_of_the_records():
    """The table of the second cell, from the JSON files by hand."""
    records = [json.loads(path.read_text()) for path in sorted(DOCS.glob("example-run/cells/*/record.json"))]
    plan = json.loads((DOCS / "example-run" / "run.json").read_text())["cells"]
    assert len(records) == len(plan) > 0
    by_id = {record["cell_id"]: record for record in records}
    rows = [by_id[cell["cell_id"]] for cell in plan if cell["config"]["experiment"] == "memory"]
    html = committed(CODE[1])["text/html"]
    for record in (row for row in rows if row["truth"] == "exact"):
        share = 100 * record["measured"]["peak_bytes"] / record["eager_peak_bytes"]
        ratio = record["measured"]["ratio"]
        for number in (share, ratio["low"], ratio["median"], ratio["high"]):
            assert f"<td>{number:.2f}</td>" in html
    assert html.count("<tr>") == sum(row["truth"] == "exact" for row in rows)


def test_it_is_small():
    assert (DOCS / "analysis.ipynb").stat().st_size < 100_000
    assert sum(path.stat().st_size for path in DOCS.glob("example-run/**/*.json")) < 400_000
