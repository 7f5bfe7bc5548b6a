"""Tables of cells in Chromium: no column is cut at a common width of a window, and where one must be, a shadow says that there is more.

The oracles are the browser's own layout and the pixels that it paints.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from browser import Page, browser
from hand_made import MIB, measured_step, simulated_step, write_run
from matplotlib.image import imread
from test_report import undrawn

from vramlab.record import RunRecord
from vramlab.report import render

pytestmark = pytest.mark.chromium
WINDOW = 1440
WIDE = ".scroll:has(> .cells)"
CUT = f"""[...document.querySelectorAll("{WIDE}")].filter(e => e.scrollWidth > e.clientWidth).map(e => e.getAttribute("aria-label"))"""
PEAKS = "What is live at the peak of a step"


def with_peak(record: RunRecord) -> RunRecord:
    """With what is live at its peak, by all roles and by layer."""
    roles = ("activation", "parameter", "buffer", "gradient", "optimizer_state", "input", "temporary")
    at_peak = {"by_role": dict.fromkeys(roles, 384 * MIB), "inside_op_bytes": 170 * MIB, "phase": "backward",
               "by_layer": {"classifier.1": 288 * MIB, "features.4": 137 * MIB}}
    return replace(record, predicted=record.predicted | {"at_peak": at_peak})


def networks(step, *, target: str) -> list[RunRecord]:
    """A step of each of three networks, each an experiment of its own, so that every column of a cell's identity is needed."""
    return [with_peak(step("vdnn-baseline", 900 + batch, config={"experiment": name, "model": name, "batch_size": batch, "target": target}))
            for name, batch in (("overfeat", 128), ("googlenet", 64), ("vgg16-wide", 256))]


def rendered(folder: Path, records: list[RunRecord]) -> Path:
    """Their report, without its figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vramlab.report.drawing.finish", undrawn)
        return render(write_run(folder, records))


@pytest.fixture(scope="module")
def page(chromium, tmp_path_factory):
    with browser(chromium, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def simulated(tmp_path_factory) -> Path:
    """The report of simulated steps."""
    return rendered(tmp_path_factory.mktemp("simulated"), networks(simulated_step, target="sim:titan-x-maxwell"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """The report of measured steps on two devices, the widest tables of all."""
    records = [*networks(measured_step, target="cuda:0"), *networks(measured_step, target="cpu")]
    return rendered(tmp_path_factory.mktemp("measured"), records)


def test_no_column_is_cut(page, simulated):
    assert page.open(simulated, width=WINDOW).run(CUT) == []
    assert page.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert PEAKS in page.open(simulated, width=900).run(CUT), "the control: there is no room"


def test_a_wide_table_stands_on_whole_pixels_and_within_the_window(page, measured):
    """Half a pixel would blur its text."""
    for width in (WINDOW, WINDOW + 1, 2000):
        page.open(measured, width=width)
        boxes = page.run(f"""[...document.querySelectorAll("{WIDE}")].map(e => {{ const r = e.getBoundingClientRect();
            return [r.left, r.right]; }})""")
        assert all(0 < left and right < width for left, right in boxes), boxes
        at = page.run("document.querySelector('#cells').getBoundingClientRect().left")
        assert all((left - at) % 1 == 0 for left, _ in boxes), (at, boxes)
    assert page.run(CUT) == [], "two thousand pixels are enough for all"


def edges(page: Page, tmp_path: Path, scrolled: str) -> tuple[float, float]:
    """How dark the first and the last pixels of the widest table's rows are: 0 is paper."""
    page.run(f"""(() => {{ const e = document.querySelector('[aria-label="{PEAKS}"]'); e.id = "looked-at"; e.scrollLeft = {scrolled};
        const blank = document.createElement("style"); blank.textContent = "#looked-at * {{ color: transparent; border: 0 !important }}";
        document.head.append(blank); }})()""")
    page.screenshot(tmp_path / "table.png", "#looked-at")
    row = imread(tmp_path / "table.png")[-12, 2:-2, :3].mean(axis=1)  # within the last row, whose words are taken out
    return 1 - float(row[:6].mean()), 1 - float(row[-6:].mean())


@pytest.mark.parametrize(("scrolled", "left", "right"), [("0", False, True), ("40", True, True), ("1e6", True, False)])
def test_a_shadow_stands_where_columns_are_hidden(page, measured, tmp_path, scrolled, left, right):
    page.open(measured, width=1000, prefers_color_scheme="light")
    dark = edges(page, tmp_path, scrolled)
    assert tuple(d > 0.05 for d in dark) == (left, right) and all(d < 0.005 for d in dark if d <= 0.05), dark


def test_a_table_that_is_whole_has_no_shadow(page, simulated, tmp_path):
    page.open(simulated, width=WINDOW, prefers_color_scheme="light")
    assert max(edges(page, tmp_path, "0")) < 0.005


def test_a_run_of_device_profiles_has_no_column_for_the_meter(simulated, measured):
    """None of its cells was metered, so that all of the column would be dashes."""
    assert "the meter saw as much" not in simulated.read_text() and "the meter saw as much" in measured.read_text()
