"""The report of runs that are empty, small, failed, torn, of another version, crowded or foreign: it is made, says what is wrong, keeps
what is whole, and a browser shows it without a word on its console and without scrolling sideways."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import browser
from hand_made import CLAIMS, full_grid, infeasible_step, make_record, measured_step, search, simulated_step, training, write_run

from vramlab.doctor import CHROMIUMS
from vramlab.errors import WorkflowError
from vramlab.record import Outcome, RunRecord, Truth
from vramlab.report import render
from vramlab.runs import load_run

pytestmark = pytest.mark.slow

EAGER, DELTA = measured_step("eager", 1000), measured_step("delta", 590, budget="60%")
FOREIGN = ("m\u00e9thode \u65b9\u6cd5 \u0645\u0630\u0643\u0631\u0629", "\u202eright to left\u202c",
           "e\u0301\u0301\u0301\u0301\u200d\U0001f469\u200d\U0001f4bb",
           "a" * 200, "a name with spaces " * 9, "tab\there", "$x_1^2$ \\frac{a}{b} %d {braces}", "_underscore", "\ud800")


def spoil(folder: Path, record: RunRecord, change: Callable[[dict], object]) -> Path:
    """A record on disk with something changed that no code of ours would write."""
    path = folder / "cells" / record.cell_id / "record.json"
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))
    return folder


def many_methods() -> Iterator[RunRecord]:
    for i in range(40):
        for budget in (80, 60, 40):
            if i % 7 == 3:
                yield infeasible_step(f"method-number-{i}", f"{budget}%")
            else:
                yield measured_step(f"method-number-{i}", budget * 10 - i, budget=f"{budget}%", ratio=1 + (i + 1) * (100 - budget) / 1000)


def failed(outcome: Outcome) -> RunRecord:
    return make_record(config={"method": str(outcome), "budget": "60%"}, outcome=outcome, truth=Truth.NOT_RUN, reason="a_reason",
                       message=f"it ended as {outcome}", budget_bytes=None, measured={}, predicted={}, environment={}, provenance={})


RUNS: dict[str, tuple[list[RunRecord], list[str]]] = {  # name -> (records, words that the page must say)
    "empty": ([], ["The workflow has no cells.", "no cell has ended", "No timeline: the run has no cell."]),
    "one cell": ([EAGER], ["The one cell counts.", "Every measured number that counts is of a step that equals eager"]),
    "one method": ([DELTA], ["The method at each budget"]),
    "all failed": ([failed(o) for o in Outcome if o is not Outcome.OK],
                   ["8 of 8 cells do not count", "it ended as crashed", "No cell has numbers to draw."]),
    "only infeasible": ([infeasible_step("delta", f"{b}%") for b in (60, 40)], ["2 of 2 cells do not count: 2 plan infeasible"]),
    "only searches": ([search("eager", 200), search("delta", None), search("dtr", 4096)],
                      ["Largest batch of resnet50 on simulated v100-32gb: eager 200 and dtr at least 4096."]),
    "only training": ([training("delta", steps=3, accuracy=False)], ["at every step"]),
    "forty methods": (list(many_methods()), ["method-number-39", "34 of 40 methods"]),
    "forty that cannot": ([DELTA, *(infeasible_step(f"m{i}", "40%") for i in range(40))], ["m6, infeasible", "m39"]),
    "foreign names": ([replace(measured_step("delta", 500, budget="50%", config={"method": name, "model": name}), message=name)
                       for name in FOREIGN[:-1]], list(FOREIGN[:2])),
    "zero and none": ([measured_step("delta", 0, budget="60%", ratio=0.0), simulated_step("x", 0, budget="1%"),
                       replace(DELTA, eager_peak_bytes=0), replace(EAGER, measured={}, predicted={})], ["delta"]),
    "huge": ([replace(measured_step("delta", 2**30, budget="99%", ratio=1e9), budget_bytes=2**60)], ["1048576 GiB"]),
}


@pytest.fixture(scope="module", params=RUNS)
def made(request, tmp_path_factory) -> tuple[Path, list[str]]:
    """A run's report, and what it must say."""
    records, words = RUNS[request.param]
    folder = write_run(tmp_path_factory.mktemp("broken") / "run", records)
    return render(folder), words


def plain(text: str) -> str:
    return " ".join(text.replace("\u00a0", " ").split())


def test_it_is_made_and_says_what_is_the_matter(made):
    path, words = made
    text = plain(path.read_text())
    for said in words:
        assert plain(said) in text, said
    assert "Traceback" not in text and not re.search(r"\b(nan|inf)\b", text.split("</style>")[1].split("<script>")[0], re.IGNORECASE)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    chromium = next(path for name in CHROMIUMS if (path := shutil.which(name)))
    with browser(chromium, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.chromium
@pytest.mark.parametrize("width", [390, 1300])
def test_a_browser_shows_it_in_silence_and_without_scrolling_sideways(made, page, width):
    page.said.clear()
    page.open(made[0], width=width)
    assert page.said == [] and page.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert page.run("document.querySelectorAll('main h2').length") >= 8


SPOILS: dict[str, tuple[Callable[[dict], object], str]] = {
    "another schema": (lambda body: body.update(schema_version=99), "record schema 99, this vramlab reads 1"),
    "an unknown field": (lambda body: body.update(later=1), "unknown record fields: later"),
    "an unknown outcome": (lambda body: body.update(outcome="glorious"), "glorious"),
    "a missing field": (lambda body: body.pop("kind"), "kind"),
    "a block that is a list": (lambda body: body.update(measured=[1]), "measured: [1] is no mapping"),
    "a block that is null": (lambda body: body.update(predicted=None), "predicted: None is no mapping"),
    "a config that is a text": (lambda body: body.update(config="x"), "config: 'x' is no mapping"),
    "not a number": (lambda body: body["measured"].update(peak_bytes=float("nan")), "NaN is no number of JSON"),
}


@pytest.mark.parametrize("name", SPOILS)
def test_a_record_that_cannot_be_trusted_is_a_row_with_the_reason_and_the_others_stay(name, tmp_path):
    change, words = SPOILS[name]
    folder = spoil(write_run(tmp_path / "run", [EAGER, DELTA], claims=CLAIMS), DELTA, change)
    text = plain(render(folder).read_text()).replace("&#39;", "'")
    assert "its record cannot be read" in text and words in text and "1000 MiB" in text


@pytest.mark.parametrize("body", ["", "{", "[]", "null", "\x00\xff", '{"schema_version": 1}', '"text"', "1e999"])
def test_half_a_record_is_a_row(body, tmp_path):
    folder = write_run(tmp_path / "run", [EAGER, DELTA])
    (folder / "cells" / DELTA.cell_id / "record.json").write_bytes(body.encode("latin-1"))
    assert "its record cannot be read" in plain(render(folder).read_text())


@pytest.mark.parametrize(("change", "words"), [
    (lambda body: body.update(schema=2), "not of schema 1"), (lambda body: body.update(cells="x"), "cells"),
    (lambda body: body.update(cells=[{"config": {}}]), "cells"), (lambda body: body.update(cells=["x"]), "cells"),
    (lambda body: body.update(workflow=[]), "workflow"),
])
def test_a_plan_of_another_kind_is_refused_by_name(change, words, tmp_path):
    folder = write_run(tmp_path / "run", [EAGER])
    body = json.loads((folder / "run.json").read_text())
    change(body)
    (folder / "run.json").write_text(json.dumps(body))
    with pytest.raises(WorkflowError, match=words):
        load_run(folder)


def test_a_telemetry_tape_or_schedule_that_is_torn_costs_its_figure_only(tmp_path):
    folder = write_run(tmp_path / "run", full_grid(), claims=CLAIMS)
    for name in ("telemetry.csv.gz", "tape.json.gz", "schedule.json.gz"):
        (folder / "cells" / full_grid()[0].cell_id / name).write_bytes(b"\x1f\x8b\x08half")
    text = plain(render(folder).read_text())
    assert "a schedule.json.gz that cannot be read" in text and "595.0 MiB" in text


def test_a_record_of_a_cell_that_was_never_planned_is_a_row_too(tmp_path):
    folder = write_run(tmp_path / "run", [EAGER])
    extra = measured_step("delta", 321, budget="50%")
    extra.save(folder / "cells" / extra.cell_id / "record.json")
    assert "321.0 MiB" in render(folder).read_text()


def test_a_record_in_another_cells_folder_is_not_taken_for_that_cells(tmp_path):
    folder = write_run(tmp_path / "run", [EAGER, DELTA])
    replace(DELTA, measured=DELTA.measured | {"peak_bytes": 7}).save(folder / "cells" / EAGER.cell_id / "record.json")
    text = plain(render(folder).read_text()).replace("&#39;", "'")
    assert f"its record is another cell's: {DELTA.cell_id}" in text and ">7 B<" not in text
