"""report.pdf: read back by hand from its own streams, against the records and the style sheet."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest
from hand_made import CLAIMS, MIB, full_grid, measured_step, write_run, write_telemetry
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from no_torch import ROOT, run_without_torch

from vramlab.cli import main
from vramlab.collection import Library, built_in_collection
from vramlab.report import pdf
from vramlab.report.drawing import INK, SERIES
from vramlab.report.evidence import Evidence
from vramlab.report.page import evidence_of
from vramlab.report.pdf import PAGE_INCHES, for_print, to_pdf
from vramlab.runs import load_run

pytestmark = pytest.mark.slow

LIBRARY = Library([built_in_collection()])
OF_THE_SCREEN = re.compile(rb"\b0\.086\d+ 0\.094\d+ 0\.113\d+ (?:rg|RG)\b")  # ink that is not black: it is for a lit page


def streams(data: bytes) -> bytes:
    """All that is drawn, unpacked."""
    found = []
    for match in re.finditer(rb"stream\r?\n(.*?)\r?\nendstream", data, re.DOTALL):
        try:
            found.append(zlib.decompress(match[1]))
        except zlib.error:
            continue
    return b"\n".join(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The full grid, with telemetry."""
    folder = write_run(tmp_path_factory.mktemp("pdf") / "run", full_grid(), claims=CLAIMS)
    write_telemetry(folder / "cells" / full_grid()[0].cell_id / "telemetry.csv.gz", [(0.1 * i, (500 + i) * MIB) for i in range(50)])
    assert main(["report", "run", str(folder), "--pdf"]) == 0
    return folder


@pytest.fixture(scope="module")
def data(folder) -> bytes:
    return (folder / "report.pdf").read_bytes()


def pages_of(evidence: Evidence, monkeypatch) -> list[Figure]:
    """Every page as it goes into the file."""
    seen: list[Figure] = []

    class Pages(pdf.PdfPages):
        def savefig(self, figure=None, **keywords):
            seen.append(figure)
            super().savefig(figure, **keywords)

    monkeypatch.setattr(pdf, "PdfPages", Pages)
    to_pdf(evidence)
    return seen


def extent(text: Text) -> Bbox:
    """Where a text lies on its page, in dots."""
    return text.get_window_extent(FigureCanvasAgg(text.get_figure()).get_renderer())


def test_each_figure_of_the_report_is_a_page_of_its_own_size(folder, data):
    figures = (folder / "report.html").read_text().count("<svg")
    boxes = re.findall(rb"/MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", data)
    whole = [box for box in boxes if abs(float(box[0]) - 72 * PAGE_INCHES[0]) < 0.1]
    assert figures == len(boxes) - len(whole) == 16 and len(whole) >= 5


def test_figures_have_the_colours_of_a_printed_page(data):
    assert not OF_THE_SCREEN.findall(streams(data))
    style = (ROOT / "reports" / "styles" / "report.css").read_text().split("@media print")[1]
    of_delta = re.search("--series-4: #(......)", style)[1]  # the fourth method of the grid
    wanted = [int(of_delta[i:i + 2], 16) / 255 for i in (0, 2, 4)]
    drawn = [[*map(float, match.split()[:3])] for match in re.findall(rb"[\d.]+ [\d.]+ [\d.]+ RG", streams(data))]
    assert any(max(abs(a - b) for a, b in zip(colour, wanted)) < 1e-3 for colour in drawn)


def test_colours_of_the_screen_would_be_found(tmp_path):
    figure = Figure()
    figure.text(0.1, 0.1, "x", color=INK)
    figure.add_subplot().plot([0, 1], [0, 1], color=SERIES[0], marker="o")
    figure.savefig(tmp_path / "raw.pdf")
    assert OF_THE_SCREEN.findall(streams((tmp_path / "raw.pdf").read_bytes()))
    for_print(figure).savefig(tmp_path / "print.pdf")
    assert not OF_THE_SCREEN.findall(streams((tmp_path / "print.pdf").read_bytes()))


def test_the_tables_show_the_records_and_no_line_leaves_its_page(folder, monkeypatch):
    pages = pages_of(evidence_of(load_run(folder), LIBRARY), monkeypatch)
    texts = [[text.get_text() for text in page.texts] for page in pages]
    lines = [line for page in texts for line in page]
    (row,) = [line for line in lines if re.match(r"delta +60 % +ok +exact", line) and "pairs" in line]
    (counted,) = [line for line in lines if re.match(r"delta +60 % +cpu +3 ", line)]
    assert "Training steps, measured: experiment memory, model resnet50, batch 16, on cpu" in lines
    assert "5.000 MiB" in counted
    assert "595.0 MiB" in row and "1.40 (1.38 to 1.42; 10 pairs)" in row and "59.5 %" in row
    assert any("4 tests of claims. Measured: 2 reproduced. Simulated, not measured: 2 reproduced." in line for line in lines)
    assert any(line.startswith("Training steps, simulated") for line in lines) and not any("10.00 MiB" in line for line in lines)
    for page in pages:
        width, height = page.get_size_inches()
        for text in page.texts:
            box = extent(text)
            assert -1 <= box.x0 and box.x1 <= page.dpi * width + 1 and -1 <= box.y0 and box.y1 <= page.dpi * height + 1, text.get_text()


def test_hostile_and_foreign_text_fits_and_is_no_markup(tmp_path, monkeypatch):
    names = ["$\\frac{1}{2}$ <script>", "\u6f22\u5b57\u0007 method", "a-method-of-a-very-long-name" * 8]
    records = [measured_step(name, 500, budget="50%", config={"model": name}) for name in names]
    folder = write_run(tmp_path / "run", records)
    pages = pages_of(evidence_of(load_run(folder), LIBRARY), monkeypatch)
    lines = [text.get_text() for page in pages for text in page.texts]
    assert any("$\\frac{1}{2}$ <script>" in line for line in lines) and any("U+6F22U+5B57  method" in line for line in lines)
    for page in pages:
        for text in page.texts:
            assert extent(text).x1 <= page.dpi * page.get_size_inches()[0] + 1


def test_long_tables_go_on_over_pages_and_no_row_is_lost(tmp_path, monkeypatch):
    records = [measured_step("delta", 100 + i, budget=f"{20 + i / 4:g}%") for i in range(150)]
    folder = write_run(tmp_path / "run", records)
    pages = pages_of(evidence_of(load_run(folder), LIBRARY), monkeypatch)
    rows = [text.get_text() for page in pages for text in page.texts if text.get_text().startswith("delta")]
    assert len([row for row in rows if "10 pairs" in row and " exact " in row]) == 150  # of times
    assert len([row for row in rows if "5.000 MiB" in row]) == 150  # of counts


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes_without_torch(folder, data):
    assert b"CreationDate" not in data
    before = (folder / "report.html").read_bytes()
    done = run_without_torch("report", "run", str(folder), "--pdf")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(folder / "report.html"), str(folder / "report.pdf")]
    assert (folder / "report.pdf").read_bytes() == data and (folder / "report.html").read_bytes() == before
