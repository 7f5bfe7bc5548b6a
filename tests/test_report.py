"""The page against the hand-made records that it is made from: numbers, reasons, escaping, figures, bytes."""

from __future__ import annotations

import html
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hand_made import (
    CLAIMS, ENVIRONMENT, MIB, full_grid, infeasible_step, make_record, measured_step, simulated_step, write_run, write_telemetry,
)
from matplotlib.axes import Axes

from vramlab.record import Outcome, Truth
from vramlab.report import drawing, render
from vramlab.report.figures import Looks, budget_figures, load_telemetry, methods_figure, telemetry_figures, training_figures
from vramlab.report.words import bytes_in_words, interval_in_words, is_distinguishable, seconds_in_words
from vramlab.runs import load_run

ROOT = Path(__file__).parent.parent
HOSTILE = '"><script>document.title="pwned"</script><img src=x onerror="document.title=1">$\\frac{1}{2}$ _&amp;'


class Page(HTMLParser):
    """Tags with attributes, tables as rows of text by caption, all text, and the notes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._table = self._cell = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append((tag, found))
        if found.get("role") == "region":
            self._table = self.tables.setdefault(found["aria-label"], [])
        elif tag == "tr" and self._table is not None:
            self._table.append([])
        elif tag in ("td", "th") and self._table is not None:
            self._table[-1].append("")
            self._cell = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._cell = None
        elif tag == "table":
            self._table = None

    def handle_data(self, data):
        self.text += data
        if self._cell and self._table is not None:
            self._table[-1][-1] += " ".join(data.split())


def undrawn(figure, *, name: str, title: str, description: str, columns: int = 2) -> drawing.Panel:
    """What a figure says; drawing it takes most of a page's time."""
    svg = f"<svg><title>{html.escape(title)}</title><desc>{html.escape(description)}</desc></svg>"
    return drawing.Panel(name=name, title=title, svg=svg, pdf=b"", figure=figure)


def render_page(tmp_path: Path, records, **plan) -> Page:
    """The page, for its words: of its figures it has no more."""
    folder = write_run(tmp_path / "results" / "hand-made" / "run", records, **plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vramlab.report.drawing.finish", undrawn)
        return Page(render(folder).read_text())


@pytest.fixture(scope="module")
def grid(tmp_path_factory) -> Path:
    """The report of the full grid."""
    left_out = [{"experiment": "gpu", "target": "cuda:0", "reason": "no NVIDIA GPU"}]
    return render(write_run(tmp_path_factory.mktemp("grid"), full_grid(), claims=CLAIMS, left_out=left_out))


@pytest.fixture(scope="module")
def page(grid) -> Page:
    """The same, read."""
    return Page(grid.read_text())


def words_between(page: Page, start: str, end: str) -> str:
    """Text of the page, spaces made plain."""
    text = re.sub(r"\s+", " ", page.text.replace("\u00a0", " "))
    return text[text.index(start):text.index(end, text.index(start))]


def row_of(page: Page, table: str, **wanted: str) -> dict[str, str]:
    """The row of a cells table whose columns have these values; a repeated heading gets its group's number behind it."""
    _, headings, *rows = page.tables[table]
    names = [name.replace("\u00a0", " ") for name in headings]
    names = [f"{name} {names[:i].count(name) + 1}" if name in names[:i] else name for i, name in enumerate(names)]
    found = [dict(zip(names, (v.replace("\u00a0", " ") for v in row))) for row in rows if len(row) == len(names)]
    hits = [row for row in found if all(row[key] == value for key, value in wanted.items())]
    assert len(hits) == 1, (wanted, found)
    return hits[0]


def test_numbers_of_a_measured_cell(page):
    row = row_of(page, "Training steps, measured", method="delta", budget="60 %")
    assert (row["outcome"], row["truth"]) == ("ok", "exact")
    assert "Training steps, measured experiment memory, model resnet50, batch 16, on cpu " in " ".join(page.text.split())
    assert (row["peak"], row["of eager's"], row["step time"]) == ("595.0 MiB", "59.5 %", "1.40 s")
    assert (row["time / eager's, interval"], row["eager / eager"]) == ("1.40 (1.38 to 1.42; 10 pairs)", "1.00 (0.99 to 1.01)")
    assert (row["peak 2"], row["off by"], row["step time 2"], row["time / eager's"]) == ("595.0 MiB", "0 B", "1.40 s", "1.40")


def test_what_no_schedule_predicts_is_a_dash_with_the_reason(tmp_path):
    step = measured_step("torch-checkpoint", 700)
    why = "torch-checkpoint has no schedule"
    record = replace(step, predicted={}, measured={**step.measured, "prediction_error_bytes": None},
                     missing={**step.missing, "predicted": why, "measured.prediction_error_bytes": why})
    page = render_page(tmp_path, [record])
    row = row_of(page, "Training steps, measured", method="torch-checkpoint")
    assert {row[c].split(" ")[0].rstrip("0123456789") for c in ("peak 2", "off by", "step time 2", "time / eager's")} == {"\u2013"}
    assert why in page.text and row["peak"] == "700.0 MiB"


def test_simulated_numbers_stand_under_the_word_simulated_only(tmp_path):
    page = render_page(tmp_path, [simulated_step("delta", 598, budget="60%", overhead=0.25)])
    assert "Training steps, measured" not in page.tables and page.text.count("Nothing was executed: no cell shows") == 1
    groups, *_ = page.tables["Training steps, simulated"]
    assert groups == ["", "simulated", ""]
    row = row_of(page, "Training steps, simulated", method="delta")
    assert (row["peak"], row["of eager's"], row["time / eager's"]) == ("598.0 MiB", "59.8 %", "1.25")
    assert "Training steps, simulated experiment memory, model resnet50, batch 16, on v100-32gb " in " ".join(page.text.split())
    best = page.tables["The method at each budget"][2]
    assert best[4] == "simulated" and "Fastest method at each budget" not in page.tables, "one method is no contest"


def test_a_missing_number_is_a_dash_whose_note_gives_the_reason(tmp_path):
    lacking = measured_step("delta", 500, budget="50%")
    reasons = {"measured.ratio": "timing was not asked for", "measured.drift": "no pairs"}
    lacking = replace(lacking, measured={**lacking.measured, "ratio": None, "drift": None}, missing=reasons)
    page = render_page(tmp_path, [lacking])
    row = row_of(page, "Training steps, measured", method="delta")
    assert row["time / eager's, interval"].startswith("\u2013") and row["eager / eager"].startswith("\u2013")
    number = int(row["time / eager's, interval"][1:])
    notes = re.search(r'<ol class="notes">(.*?)</ol>', (tmp_path / "results/hand-made/run/report.html").read_text(), re.DOTALL)[1]
    assert re.findall(r"<li[^>]*>([^<]*)</li>", notes)[number - 1] == "timing was not asked for"


def test_numbers_that_do_not_count_are_not_shown(page, tmp_path):
    row = row_of(page, "Training steps, measured", method="broken")
    assert row["peak"].startswith("\u2013") and row["outcome"].startswith("wrong") and "10.0" not in " ".join(row.values())
    assert "the gradient of conv1.weight differs" in page.text
    not_run = replace(measured_step("delta", 321, budget="50%"), truth=Truth.NOT_RUN)
    assert "321.0 MiB" not in render_page(tmp_path, [not_run]).text


def test_a_difference_inside_the_drift_is_not_distinguishable(tmp_path):
    noisy = measured_step("delta", 500, budget="50%", ratio=1.02)
    noisy = replace(noisy, measured={**noisy.measured, "drift": {"median": 1.0, "low": 0.97, "high": 1.03}})
    clear = measured_step("checkpoint", 500, budget="50%", ratio=1.4)
    page = render_page(tmp_path, [noisy, clear])
    assert row_of(page, "Training steps, measured", method="delta")["time / eager's, interval"].startswith("1.02, not distinguishable")
    assert "1.02 (1.00 to 1.04; 10 pairs)" in (tmp_path / "results" / "hand-made" / "run" / "report.html").read_text(), "the cell's tooltip"
    assert row_of(page, "Training steps, measured", method="checkpoint")["time / eager's, interval"] == "1.40 (1.38 to 1.42; 10 pairs)"


def test_what_a_step_moves_and_runs_again(tmp_path):
    record = measured_step("delta", 500, budget="50%")
    planned = {"flops": 400, "recompute_flops": 50, "deepest_recompute": 7, "copy_seconds": 0.25, "recomputes": 21}
    page = render_page(tmp_path, [replace(record, predicted=record.predicted | planned), measured_step("checkpoint", 700)])
    row = row_of(page, "What a step moves and runs again", method="delta")
    assert (row["recomputes"], row["deepest chain"], row["FLOP run again"], row["copying"]) == ("21", "7", "12.5 %", "250 ms")
    assert (row["recomputes 2"], row["offloads 2"], row["moved"]) == ("20", "3", "5.000 MiB")
    old = row_of(page, "What a step moves and runs again", method="checkpoint")
    assert old["deepest chain"].startswith("\u2013") and old["FLOP run again"].startswith("\u2013")


def test_rows_stand_below_their_place_where_each_has_several(tmp_path):
    here = [measured_step("delta", 500, budget=f"{b}%") for b in (40, 50, 60, 70)]
    there = [measured_step("delta", 400, budget=f"{b}%", config={"batch_size": 8}) for b in (50, 60)]
    groups, headings, *rows = render_page(tmp_path / "a", here + there).tables["Training steps, measured"]
    assert headings[:2] == ["method", "budget"]
    assert [row[0] if len(row) == 1 else row[1].replace("\u00a0", " ") for row in rows] == [
        "batch 16", "40 %", "50 %", "60 %", "70 %", "batch 8", "50 %", "60 %"]
    groups, headings, *rows = render_page(tmp_path / "b", here[:1] + there).tables["Training steps, measured"]
    assert headings[:3] == ["batch", "method", "budget"] and [row[0] for row in rows] == ["16", "8", "8"], "few rows have a column"


def test_what_is_live_at_a_steps_peak_is_told_by_role_and_layer(tmp_path):
    at_peak = {"by_role": {"activation": 400 * MIB, "parameter": 90 * MIB}, "inside_op_bytes": 10 * MIB, "phase": "backward",
               "by_layer": {"a": MIB, "b": 300 * MIB, "c": 2 * MIB, "d": 200 * MIB}}
    record = measured_step("delta", 500, budget="50%")
    record = replace(record, predicted={**record.predicted, "at_peak": at_peak},
                     measured={**record.measured, "is_peak_accounted_for": True})
    row = row_of(render_page(tmp_path, [record, measured_step("checkpoint", 700)]), "What is live at the peak of a step", method="delta")
    assert (row["activation"], row["parameter"], row["inside the op"], row["phase"]) == ("400.0 MiB", "90.00 MiB", "10.00 MiB", "backward")
    assert (row["layers that hold most"], row["the meter saw as much"]) == ("b 300.0 MiB; d 200.0 MiB", "yes")
    assert row["gradient"].startswith("\u2013"), "a role that the record does not have is a dash with its reason"


def test_the_first_screen_says_it_in_words(page):
    first = words_between(page, "Asked", "Graded by rule")
    for words in ("Every number is known.", "Measured on Test Processor 9000, 2 cores.", "Simulated, not measured, for v100-32gb",
                  "16 cells of 16 planned have a record: 14 ok, 1 plan infeasible and 1 wrong",
                  "4 tests of claims. Measured: 2 reproduced. Simulated, not measured: 2 reproduced.",
                  "2 of 16 cells do not count: 1 plan infeasible and 1 wrong.",
                  "Claimed: 40 to 70 %; obtained: 60.5 % (experiment memory).",
                  "resnet50 b16 checkpoint 40 % on cpu: plan infeasible: the smallest it can reach is 700 MiB",
                  "resnet50 b16 broken 60 % on cpu: does not count: the cell ended as wrong: the gradient of conv1.weight differs",
                  "experiment gpu on cuda:0: left out: no NVIDIA GPU"):
        assert words in first, words


def test_budgets_below_what_a_method_can_reach_are_told_once_with_the_smallest(tmp_path):
    block = {"infeasible": {"smallest_bytes": 700 * MIB}}
    low = [replace(infeasible_step("checkpoint", budget), predicted=block) for budget in ("50%", "40%")]
    text = words_between(render_page(tmp_path, low), "Not counted", "Claims")
    assert text.count("the smallest budget that it can reach is 700.0 MiB, 70.0 % of eager's peak") == 1
    assert "2 cells (resnet50 b16 checkpoint 50 % on cpu and resnet50 b16 checkpoint 40 % on cpu): plan infeasible" in text


@pytest.mark.parametrize(("pairs", "is_told"), [(3, True), (5, True), (6, False), (20, False)])
def test_an_interval_of_few_pairs_is_told_to_be_one(tmp_path, pairs, is_told):
    step = measured_step("delta", 395, budget="40%", ratio=1.6)
    few = replace(step, measured=step.measured | {"ratio": step.measured["ratio"] | {"n": pairs}})
    text = " ".join(render_page(tmp_path, [measured_step("eager", 1000), few]).text.split())
    assert f"{pairs} pairs" in text and ("an interval of fewer than 6 pairs of steps does not reach 95 %" in text) is is_told
    assert (f"1.60 ({pairs} pairs, no interval)" in text) is is_told and ("1.58 to 1.62" in text) is not is_told


def test_eager_has_one_interval_of_itself(tmp_path):
    """Its first run against its second, and the same widened to be symmetric: the row shows the second twice."""
    eager = measured_step("eager", 1000, ratio=1.0)
    drift = {"median": 1.0, "low": 0.96, "high": 1.04, "n": 10}
    page = render_page(tmp_path, [replace(eager, measured=eager.measured | {"drift": drift})])
    row = row_of(page, "Training steps, measured", method="eager")
    assert row["time / eager's, interval"] == row["eager / eager"] == "1.00 (0.96 to 1.04; 10 pairs)"


def test_the_fastest_method_at_a_budget_is_told_with_its_rivals(page, tmp_path):
    rows = [[text.replace("\u00a0", " ") for text in row] for row in page.tables["Fastest method at each budget"]]
    here = [text for text, *others in rows if not others]
    assert here == ["resnet50, batch 16, Test Processor 9000, 2 cores", "resnet50, batch 16, simulated v100-32gb"], "each place once"
    (row,) = (row for row in rows[:rows.index(here[1:])] if row[0] == "40 %")
    assert row == ["40 %", "delta", "395.0 MiB, 39.5 % of eager's", "1.60 (1.58 to 1.62; 10 pairs)", "measured", "1 of 2 methods",
                   "no other kept it"]
    ratios = {"delta": 1.30, "checkpoint": 1.33, "slow": 1.5}
    close = [measured_step(method, 450, budget="50%", ratio=ratio) for method, ratio in ratios.items()]
    close.append(replace(measured_step("wrong", 1, budget="50%", ratio=1.0), truth=Truth.WRONG))
    best = render_page(tmp_path, close).tables["Fastest method at each budget"][2]
    assert (best[1], best[6]) == ("delta", "checkpoint")


def test_a_claim_shows_both_values_both_baselines_hardware_and_evidence(page, grid):
    section = words_between(page, "Graded by rule", "What the rules say")
    for words in ("claimed40 to 70 %", "delta-mem-save", "60.5 %: largest saving of delta against eager", "tolerance 10 %", "eager here",
                  "measured on Test Processor 9000, 2 cores", "simulated v100-32gb", "read from abstract", "reproduced, by simulation",
                  "(B_live) inferred", "the paper: unknown"):
        assert words in section, words
    links = [a["href"] for tag, a in page.tags if tag == "a" and (a.get("href") or "").startswith("cells/")]
    assert links and all((grid.parent / link).is_file() for link in links)


def test_every_link_inside_the_page_has_its_target(page):
    ids = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for tag, a in page.tags if tag == "a" and (a.get("href") or "").startswith("#")} <= set(ids)


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes(tmp_path):
    folder = write_run(tmp_path / "run", full_grid(), claims=CLAIMS)
    write_telemetry(folder / "cells" / full_grid()[0].cell_id / "telemetry.csv.gz", [(0.1 * i, 500 * MIB) for i in range(50)])
    first = render(folder).read_bytes()
    assert render(folder).read_bytes() == first
    code = "import sys; from vramlab.report import render; render(sys.argv[1]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)})
    assert done.stdout.strip() == "False", done.stderr
    assert (folder / "report.html").read_bytes() == first


def hostile_run(tmp_path: Path) -> Path:
    """Hostile text wherever a record, a workflow or a submitter can put some."""
    config = {"method": HOSTILE, "model": HOSTILE, "experiment": HOSTILE, "options": {HOSTILE: HOSTILE}}
    record = measured_step("delta", 500, budget="50%", config=config)
    environment = {**ENVIRONMENT, "cpu": {**ENVIRONMENT["cpu"], "model": HOSTILE}, HOSTILE: HOSTILE}
    bad = make_record(config={**config, "budget": HOSTILE}, outcome=Outcome.CRASHED, reason=HOSTILE, message=HOSTILE,
                      environment=environment)
    trained = make_record(config={**config, "kind": "train", "data": HOSTILE}, training={"loss": [1.0, 0.5], "grad_norm": [1.0, 1.0]},
                          environment=environment)
    workflow = {"name": HOSTILE, "title": HOSTILE, "description": HOSTILE, "label": HOSTILE, "path": HOSTILE, "sha256": "c" * 64,
                "claims": [{"id": HOSTILE, "rule": "memory_saved_percent"}, {"id": "delta-mem-save", "rule": HOSTILE, "note": HOSTILE}]}
    return write_run(tmp_path / "run", [replace(record, environment=environment), bad, trained], workflow=workflow, overrides=[HOSTILE],
                     left_out=[{"experiment": HOSTILE, "target": HOSTILE, "reason": HOSTILE}])


def test_hostile_text_is_text(tmp_path):
    text = render(hostile_run(tmp_path)).read_text()
    page = Page(text)
    assert not [tag for tag, _ in page.tags if tag in ("script", "img", "iframe", "object", "embed", "link", "form")]
    assert not [(tag, name) for tag, attributes in page.tags for name in attributes if name.startswith("on")]
    assert HOSTILE[:40] in page.text and "$\\frac" in page.text


def dump_dom(chromium: str, path: Path, tmp_path: Path, width: int = 1280) -> str:
    """The page after it has loaded in Chromium, and what its console said."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
             "--disable-component-update", "--disable-sync",
             f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", "--enable-logging=stderr"]
    done = subprocess.run([chromium, *flags, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.chromium
def test_hostile_text_does_not_run_in_a_browser(tmp_path, chromium):
    folder = hostile_run(tmp_path)
    assert "<title>pwned" not in dump_dom(chromium, render(folder), tmp_path)
    unescaped = folder / "unescaped.html"  # the negative control: the same text, were it not escaped
    unescaped.write_text(f"<title>x</title><p>{HOSTILE}</p>")
    assert re.search("<title>(pwned|1)", dump_dom(chromium, unescaped, tmp_path))


LONG_NAMED = ENVIRONMENT | {"cpu": ENVIRONMENT["cpu"] | {"model": "Intel(R) Xeon(R) Platinum 8481C Processor @ 2.70GHz"}}
CLIPPED = """<script>
const out = (text, svg) => text.width && (text.right > svg.right + 0.5 || text.left < svg.left - 0.5 || text.top < svg.top - 0.5);
document.title = [...document.querySelectorAll("svg text")].filter(
    text => out(text.getBoundingClientRect(), text.ownerSVGElement.getBoundingClientRect())).length;
</script></body>"""


@pytest.mark.chromium
def test_no_word_of_a_figure_is_clipped(tmp_path, chromium):
    records = [replace(record, environment=LONG_NAMED) for record in full_grid()]
    records += [measured_step(f"baseline-of-a-long-name-{i}", 1300, ratio=1.0) for i in range(2)]
    text = render(write_run(tmp_path / "run", records)).read_text()
    assert "Platinum" in text and text.count("<svg") > 5
    control = '<svg viewBox="0 0 60 20" style="width: 60px"><text y="12">a line that is longer than its drawing</text></svg>'
    for name, page, clipped in (("as-it-is", text, 0), ("control", text.replace("</body>", f"{control}</body>"), 1)):
        (tmp_path / f"{name}.html").write_text(page.replace("</body>", CLIPPED))
        assert f"<title>{clipped}</title>" in dump_dom(chromium, tmp_path / f"{name}.html", tmp_path)


@pytest.mark.chromium
@pytest.mark.parametrize("width", [500, 1400])
def test_the_page_itself_never_scrolls_sideways(grid, tmp_path, chromium, width):
    probe = '<script>document.title = document.documentElement.scrollWidth - document.documentElement.clientWidth</script></body>'
    (tmp_path / "probe.html").write_text(grid.read_text().replace("</body>", probe))
    assert "<title>0</title>" in dump_dom(chromium, tmp_path / "probe.html", tmp_path, width)


def test_the_page_is_one_file_that_fetches_nothing(page, grid):
    text = grid.read_text()
    assert not [a for _, a in page.tags if a.get("src")] and "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))


def test_a_run_that_has_not_begun_renders_and_claims_nothing(tmp_path):
    planned = [measured_step("eager", 1000), measured_step("delta", 595, budget="60%")]
    folder = write_run(tmp_path / "run", planned, claims=CLAIMS)
    for record in planned:
        (folder / "cells" / record.cell_id / "record.json").unlink()
    page = Page(render(folder).read_text())
    assert "0 cells of 2 planned have a record" in page.text and "not run yet" in page.text
    assert "4 tests of claims. Without evidence: 4 not testable here." in page.text
    assert "No telemetry" in page.text and "No cell has numbers to draw." in page.text


def test_a_torn_record_is_a_row_that_says_so(tmp_path):
    folder = write_run(tmp_path / "run", [measured_step("eager", 1000), measured_step("delta", 595, budget="60%")])
    (folder / "cells" / measured_step("delta", 595, budget="60%").cell_id / "record.json").write_text("{")
    page = Page(render(folder).read_text())
    assert row_of(page, "Training steps, measured", method="delta")["outcome"].startswith("no record")
    assert "its record cannot be read" in page.text


# ------------------------------------------------------------------------------------------------------- figures


def watched(patch: pytest.MonkeyPatch) -> list[tuple[str, Axes]]:
    """(name, axes) of every panel that is drawn from now on."""
    seen = []
    real = drawing.finish

    def spy(figure, **keywords):
        seen.append((keywords["name"], figure.axes[0]))
        return real(figure, **keywords)

    patch.setattr("vramlab.report.drawing.finish", spy)
    return seen


@pytest.fixture
def drawn(monkeypatch):
    """What the test draws."""
    return watched(monkeypatch)


@pytest.fixture(scope="module")
def all_drawn(tmp_path_factory):
    """The figures of the whole grid with telemetry, and the axes of each by name."""
    folder = write_run(tmp_path_factory.mktemp("drawn"), full_grid())
    write_telemetry(folder / "cells" / full_grid()[0].cell_id / "telemetry.csv.gz", [(0.1 * i, (500 + i) * MIB) for i in range(50)])
    run = load_run(folder)
    with pytest.MonkeyPatch.context() as patch:
        seen, looks = watched(patch), Looks(run)
        sets = [budget_figures(run, looks), training_figures(run, looks), telemetry_figures(load_telemetry(run)[0])]
    return sets, dict(seen)


def test_axes_start_at_zero_and_ratios_are_logarithmic(all_drawn):
    _, axes = all_drawn
    assert len(axes) == 9
    for name, found in axes.items():
        assert found.get_xlim()[0] == 0, name
        if name.startswith("time"):
            assert found.get_yscale() == "log" and found.get_ylim()[0] < 1 < found.get_ylim()[1]
        else:
            assert found.get_ylim()[0] == 0, name
        assert found.get_xlabel() and found.get_ylabel()


def test_points_are_the_records(all_drawn):
    _, axes = all_drawn
    lines = {line.get_label(): list(zip(*(map(float, v) for v in line.get_data()))) for line in axes["peak0"].lines}
    assert lines["delta"] == [(400, 395), (500, 495), (600, 595), (800, 795)]
    assert lines["checkpoint"] == [(800, 700)] and [x for x, _ in lines["checkpoint, infeasible"]] == [400]
    (x0, y0), (x1, y1) = lines["peak = budget"]
    assert x0 == y0 == 0 and x1 == y1 == axes["peak0"].get_xlim()[1]
    overhead = {line.get_label(): list(zip(*(map(float, v) for v in line.get_data()))) for line in axes["time0"].lines}
    assert [(round(x, 4), y) for x, y in overhead["delta"]] == [(40, 1.6), (50, 1.5), (60, 1.4), (80, 1.2)]
    simulated = {line.get_label(): line for line in axes["time1"].lines}
    assert "delta" not in simulated and simulated["delta, simulated"].get_markerfacecolor() == drawing.PAPER


def test_a_simulated_point_shows_around_a_measured_one_of_equal_value(all_drawn):
    _, axes = all_drawn
    lines = {line.get_label(): line for line in axes["peak0"].lines}
    assert [*lines["delta"].get_ydata()] == [*lines["delta, simulated"].get_ydata()]  # each hollow mark lies on a filled one
    hollow, filled = lines["delta, simulated"], lines["delta"]
    assert hollow.get_markerfacecolor() == "none" and hollow.get_zorder() > filled.get_zorder()
    assert hollow.get_markersize() > filled.get_markersize() + 2 * hollow.get_markeredgewidth()


def test_the_command_that_runs_it_again_is_one_for_a_shell(tmp_path):
    words = ["batch_sizes=[8, 16]", "training.optimizer='a $b'"]
    page = render_page(tmp_path, [measured_step("eager", 1000)], overrides=words, auto="sim:v100-32gb")
    shown = next(line for line in page.text.splitlines() if line.startswith("./run workflow"))
    assert shlex.split(shown) == ["./run", "workflow", "workflows/hand-made.yaml", *words, "--device", "sim:v100-32gb"]
    plain = render_page(tmp_path / "2", [measured_step("eager", 1000)], auto="cpu")
    assert "./run workflow workflows/hand-made.yaml\n" in plain.text


def test_telemetry_of_cells_days_apart_lies_end_to_end_and_keeps_its_peaks(tmp_path, drawn):
    records = full_grid()[:2]
    folder = write_run(tmp_path / "run", records)
    for day, record in enumerate(records, 1):
        rows = [(0.1 * i, (700 if i == 333 else 500) * day * MIB) for i in range(1000)]
        write_telemetry(folder / "cells" / record.cell_id / "telemetry.csv.gz", rows, started=f"2026-01-0{3 - day}T00:00:00.000+00:00")
    found = telemetry_figures(load_telemetry(load_run(folder))[0])
    axes = dict(drawn)["telemetry-memory"]
    (line,) = axes.lines
    values = [float(v) for v in line.get_ydata() if v == v]
    assert axes.get_xlim()[1] == pytest.approx(199.8) and len(values) <= 602
    assert values[0] == 1000 and values[-1] == 500  # the second cell ran first
    assert max(values[:300]) == 1400 and max(values[302:]) == 700  # one sample each, kept by thinning
    assert "power_watts (the cell ran on no GPU)" in found.note


def test_the_chart_of_methods_has_a_facet_a_network_with_its_records(tmp_path, drawn):
    cells = [simulated_step("delta", 400, budget=f"{p}%", overhead=o, config={"model": m})
             for m, p, o in (("resnet50", 80, 0.1), ("resnet50", 60, 0.2), ("vgg16", 80, 0.5))]
    run = load_run(write_run(tmp_path / "run", cells))
    (panel,) = methods_figure(run, Looks(run)).panels
    facets = dict(drawn)["methods"].figure.axes
    lines = [{line.get_label(): [*zip(*(map(float, v) for v in line.get_data()))] for line in axes.lines} for axes in facets]
    assert [[(round(x), round(y, 4)) for x, y in line["delta, simulated"]] for line in lines] == [[(60, 1.2), (80, 1.1)], [(80, 1.5)]]
    assert len({axes.get_ylim() for axes in facets}) == 1 and "vgg16: delta simulated: 1.5 times the time at 80 % of the peak" in panel.svg
    alone = load_run(write_run(tmp_path / "alone", cells[:2]))
    assert methods_figure(alone, Looks(alone)).panels == ()


def test_large_peaks_are_drawn_in_gib(tmp_path, drawn):
    delta = replace(simulated_step("delta", 8192, budget="60%"), budget_bytes=9 * 2**30, eager_peak_bytes=16 * 2**30)
    run = load_run(write_run(tmp_path / "run", [delta, simulated_step("eager", 16384)]))
    budget_figures(run, Looks(run))
    axes = dict(drawn)["peak0"]
    lines = {line.get_label(): [*zip(*(map(float, v) for v in line.get_data()))] for line in axes.lines}
    assert axes.get_ylabel() == "peak (GiB)" and lines["delta, simulated"] == [(9, 8)]


def test_a_wrong_cell_is_not_drawn(all_drawn):
    _, axes = all_drawn
    assert not [line for found in axes.values() for line in found.lines if "broken" in str(line.get_label())]


def test_methods_differ_in_more_than_colour_and_keep_their_look(tmp_path):
    run = load_run(write_run(tmp_path / "run", [measured_step(f"m{i}", 500, budget=f"{10 + i}%") for i in range(40)]))
    looks = Looks(run)
    assert len({(looks.colour(f"m{i}"), looks.marker(f"m{i}")) for i in range(40)}) == 40
    assert len({looks.marker(f"m{i}") for i in range(8)}) == 8
    assert len({(looks.colour(f"m{i}"), looks.dashes(f"m{i}")) for i in range(16)}) == 16, "lines of one colour are told apart, too"


def test_colours_come_from_the_style_sheet_in_light_dark_and_print():
    style = (ROOT / "reports" / "styles" / "report.css").read_text()
    light, dark, printed = (style.index(mark) for mark in (":root", "@media (prefers-color-scheme: dark)", "@media print"))
    for variable in drawing.VARIABLES.values():
        name = variable[4:-1]
        assert all(f"{name}:" in part for part in (style[light:dark], style[dark:printed], style[printed:])), name


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def themes() -> dict[str, dict[str, str]]:
    style = (ROOT / "reports" / "styles" / "report.css").read_text()
    starts = {name: style.index(mark) for name, mark in (("light", ":root"), ("dark", "@media (prefers"), ("print", "@media print"))}
    ends = {"light": starts["dark"], "dark": starts["print"], "print": len(style)}
    return {name: dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", style[starts[name]:ends[name]])) for name in starts}


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_text_and_lines_stand_out_from_the_paper(theme):
    colours = themes()[theme]
    for name in ("ink", "muted", "link"):
        assert contrast(colours[name], colours["paper"]) >= 4.5 and contrast(colours[name], colours["shade"]) >= 4.5, name
    for name in ("good", "open", "bad"):
        assert contrast(colours[name], colours[f"{name}-shade"]) >= 4.5, name
    for i in range(1, 9):
        assert contrast(colours[f"series-{i}"], colours["paper"]) >= 3, i


def test_svgs_hold_no_fixed_colour_and_unique_ids(all_drawn):
    sets, _ = all_drawn
    svgs = [panel.svg for found in sets for panel in found.panels]
    ids = [i for svg in svgs for i in re.findall(r'\bid="([^"]*)"', svg)]
    assert len(ids) == len(set(ids))
    assert "var(--series-1)" in "".join(svgs) and not re.search(r"[:\"]\s*#[0-9a-f]{6}\b", "".join(svgs))
    assert all('role="img"' in svg for svg in svgs)


def test_more_groups_than_panels_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr("vramlab.report.drawing.finish", undrawn)
    records = [measured_step("delta", 500, budget="60%", config={"batch_size": b}) for b in range(1, 16)]
    run = load_run(write_run(tmp_path / "run", records))
    found = budget_figures(run, Looks(run))
    assert len(found.panels) == 12 and "12 panels are drawn, of 15 groups" in found.note


# ------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(("nbytes", "words"), [
    (None, "\u2013"), (0, "0 B"), (1023, "1023 B"), (1024, "1.000 KiB"), (812.4 * MIB, "812.4 MiB"), (5.312 * 2**30, "5.312 GiB"),
    (1000 * MIB, "1000 MiB"),
])
def test_bytes(nbytes, words):
    assert bytes_in_words(nbytes) == words


@pytest.mark.parametrize(("seconds", "words"), [(None, "\u2013"), (0.0352, "35.2 ms"), (1.239, "1.24 s"), (750, "12.5 min")])
def test_seconds(seconds, words):
    assert seconds_in_words(seconds) == words


@pytest.mark.parametrize(("block", "words"), [
    ({"median": 1.2345, "low": 1.2, "high": 1.27}, "1.23 (1.20 to 1.27)"),
    ({"median": 1.2345, "low": 1.23, "high": 1.239}, "1.234 (1.230 to 1.239)"),
    ({"median": 1.2345, "low": 1.2, "high": 1.27, "n": 6}, "1.23 (1.20 to 1.27; 6 pairs)"),
    ({"median": 1.2345, "low": 1.2, "high": 1.27, "n": 5}, "1.23 (5 pairs, no interval)"),
    ({"median": 1.2345, "low": None, "high": None, "n": 1}, "1.23 (1 pair, no interval)"),
    ({"median": 3.21, "low": 2.1, "high": 5.5}, "3.2 (2.1 to 5.5)"), ({"median": 1.2, "low": None, "high": 1.3}, "\u2013"), ({}, "\u2013"),
])
def test_an_interval_shows_the_digits_that_its_width_supports(block, words):
    assert interval_in_words(block) == words


@pytest.mark.parametrize(("ratio", "drift", "expected"), [
    ((1.05, 1.10), (0.99, 1.01), True), ((1.005, 1.10), (0.99, 1.01), True), ((0.99, 1.2), (1.0, 1.0), False),
    ((0.90, 0.95), (0.99, 1.01), True), ((1.02, 1.04), (0.95, 1.06), False), ((None, 1.1), (0.9, 1.1), None),
    ((1.0, 1.1), (None, None), None),
])
def test_distinguishable_means_off_one_and_out_of_the_drift(ratio, drift, expected):
    blocks = ({"median": low, "low": low, "high": high} for low, high in (ratio, drift))
    blocks = list(blocks)
    assert is_distinguishable(*blocks) is expected
    assert is_distinguishable(blocks[0] | {"n": 5}, blocks[1]) is is_distinguishable(blocks[0], blocks[1] | {"n": 1}) is None


def test_our_own_words_never_say_up_to(page):
    text = page.text[:page.text.index("ACM / cTuning")] + page.text[page.text.index("Environment of"):]  # a checklist asks about the phrase
    assert "reproduced" in text and not re.search(r"\bup to\b", text, re.IGNORECASE)


def rich(record):
    """With everything that a new record holds."""
    roles = ("activation", "parameter", "buffer", "gradient", "optimizer_state", "input", "temporary")
    at_peak = {"by_role": dict.fromkeys(roles, 91 * MIB),
               "inside_op_bytes": 10 * MIB, "phase": "backward", "by_layer": {f"layer{i}.1.conv1": 10**8 * i for i in range(1, 5)}}
    planned = {"flops": 4 * 10**9, "recompute_flops": 5 * 10**8, "deepest_recompute": 7, "copy_seconds": 0.25, "at_peak": at_peak}
    return replace(record, predicted=record.predicted | planned, measured=record.measured | {"is_peak_accounted_for": True})


def test_details_give_way_where_a_page_has_no_room_and_are_named(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", [rich(measured_step("delta", 500, budget=f"{b}%")) for b in range(20, 60)])
    whole = render(folder).stat().st_size
    assert whole < 2 * 10**6 and "for which one page has no room" not in (folder / "report.html").read_text()
    monkeypatch.setattr("vramlab.report.page.LARGEST_BYTES", 410_000)
    page = Page(render(folder).read_text())
    details = ("What a step moves and runs again", "What is live at the peak of a step")
    assert not set(details) & set(page.tables) and all(name in page.text for name in details)
    assert page.text.count("40 rows, for which one page has no room") == len(details)
    assert len(page.tables["Training steps, measured"]) == 2 + 40, "every cell stays a row"


@pytest.mark.slow
def test_five_thousand_cells(tmp_path):
    import time

    records = [rich(measured_step("delta", 500, budget=f"{10 + b % 80}%", config={"batch_size": b})) for b in range(1, 5001)]
    folder = write_run(tmp_path / "run", records)
    began = time.process_time()  # of this process: other work on the machine is no fault of the page
    path = render(folder)
    took, size = time.process_time() - began, path.stat().st_size
    print(f"5,000 cells: {took:.1f} s, {size / 1e6:.1f} MB")
    assert took < 30 and size < 12 * 10**6
    assert path.read_text().count("/record.json") >= 5000
