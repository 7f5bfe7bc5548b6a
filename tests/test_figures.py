"""Figures against the hand-written records that they are drawn from. Marks, bars and ticks are read back from the SVG itself."""

from __future__ import annotations

import re
from dataclasses import replace
from math import nan
from xml.etree import ElementTree

import pytest
from hand_made import EAGER_PEAK, MIB, full_grid, infeasible_step, make_record, measured_step, search, simulated_step, training, write_run

from vramlab.record import RunRecord, Truth
from vramlab.report.drawing import Panel
from vramlab.report.figures import KINDS, FigureSet, Looks, make_figures
from vramlab.runs import load_run

SVG = "{http://www.w3.org/2000/svg}"


class Drawn:
    """What a viewer sees of an SVG: positions in the units of its axes, by the ticks that are printed beside them."""

    def __init__(self, panel: Panel) -> None:
        self.root, self.name = ElementTree.fromstring(panel.svg), panel.name
        self.texts = ["".join(text.itertext()).strip() for text in self.root.iter(f"{SVG}text")]
        self.axes = next(g for g in self.root.iter(f"{SVG}g") if g.get("id") == f"{self.name}-axes_1")

    def ticks(self, axis: str) -> list[tuple[float, float]]:
        """[(position, printed number)]."""
        found = []
        for group in self.axes.iter(f"{SVG}g"):
            use = next(group.iter(f"{SVG}use"), None)
            if use is not None and re.fullmatch(rf"{self.name}-{axis}tick_\d+", group.get("id", "")):
                printed = "".join("".join(t.itertext()) for t in group.iter(f"{SVG}text")).replace("\u2212", "-").strip()
                if re.fullmatch(r"-?[\d.]+", printed):
                    found.append((float(use.get(axis)), float(printed)))
        return found

    def value(self, axis: str, position: float, *, is_log: bool = False) -> float:
        """The number at a position, between or beyond two ticks; NaN on an axis of words."""
        if len(self.ticks(axis)) < 2:
            return nan
        (p0, v0), *_, (p1, v1) = self.ticks(axis)
        share = (position - p0) / (p1 - p0)
        return v0 * (v1 / v0) ** share if is_log else v0 + share * (v1 - v0)

    def bars(self) -> list[tuple[float, float, str]]:
        """[(left, right, fill)] of every rectangle, from the top row down and in each row from the left."""
        found = []
        for path in self._own("patch", "path"):
            corners = [tuple(map(float, pair)) for pair in re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", path.get("d", ""))]
            fill = re.search(r"fill: ([^;]+)", path.get("style", ""))
            if len(corners) == 4 and fill and fill[1] != "none":
                xs, ys = zip(*corners)
                found.append((round(min(ys)), self.value("x", min(xs)), self.value("x", max(xs)), fill[1]))
        return [bar[1:] for bar in sorted(found)]

    def marks(self, *, log: str = "") -> list[tuple[float, float, str]]:
        """[(x, y, fill)] of every marker; `log` names the axes with a log scale."""
        fills = [(use, re.search(r"fill: ([^;]+)", use.get("style", ""))) for use in self._own("line2d", "use")]
        return [(*(self.value(a, float(use.get(a)), is_log=a in log) for a in "xy"), fill[1] if fill else "") for use, fill in fills]

    def _own(self, kind: str, tag: str) -> list[ElementTree.Element]:
        groups = [g for g in self.axes if re.match(rf"{self.name}-{kind}_\d+$", g.get("id", ""))]
        return [element for group in groups for element in group.iter(f"{SVG}{tag}")]


def figures_of(tmp_path, records: list[RunRecord], kind: str) -> FigureSet:
    run = load_run(write_run(tmp_path / "run", records))
    (make,) = (k.make for k in KINDS if k.id == kind)
    return make(run, Looks(run))


def only(found: FigureSet) -> Drawn:
    (panel,) = found.panels
    return Drawn(panel)


def near(*numbers: float):
    return pytest.approx(numbers, rel=0.005, abs=1e-9)


def spent(step: RunRecord, compute: float, recompute: float, stall: float, **more) -> RunRecord:
    seconds = {"compute_seconds": compute, "recompute_seconds": recompute, "stall_seconds": stall}
    seconds["step_seconds"] = sum(seconds.values())
    return replace(step, predicted={**step.predicted, **seconds, **more})


def test_time_is_split_into_parts_that_add_up_and_the_measured_step_is_a_filled_mark(tmp_path):
    record = spent(measured_step("delta", 500, budget="50%", ratio=2.0), 1.0, 0.4, 0.2)
    record = replace(record, measured={**record.measured, "step_seconds": [2.0, 3.0, 2.5], "plan_seconds": 0.036})
    drawn = only(figures_of(tmp_path, [record], "time"))
    (l0, r0, f0), (l1, r1, f1), (l2, r2, f2) = drawn.bars()
    assert (l0, r0, l1, r1, l2, r2) == near(0, 1.0, 1.0, 1.4, 1.4, 1.6)
    assert not [f for f in (f0, f1, f2) if "series" in f], "what is simulated is hollow"
    assert tuple(sorted(x for x, _, fill in drawn.marks() if fill == "var(--ink)")) == near(2.0, 2.5, 3.0), "least, median, most"
    assert "measured: median and range of 3 steps" in " ".join(drawn.texts) and "planned in 36.0 ms" in drawn.texts
    assert {"compute", "recompute", "delta 50 %"} <= set(drawn.texts)


def test_eager_which_plans_nothing_has_no_plan_time(tmp_path):
    steps = [spent(measured_step(method, 500), 1.0, 0.4, 0.2) for method in ("eager", "delta")]
    steps = [replace(r, measured={**r.measured, "plan_seconds": 0.036}, provenance={**r.provenance, "ops": 100}) for r in steps]
    assert sum(text.startswith("planned in") for text in only(figures_of(tmp_path, steps, "time")).texts) == 1
    (panel,) = figures_of(tmp_path, steps, "planning").panels
    assert "delta" in panel.svg and "eager" not in panel.svg


def test_a_part_looks_alike_in_all_panels(tmp_path):
    stalls = spent(simulated_step("vdnn", 500, budget="50%"), 1.0, 0.0, 0.4)
    recomputes = spent(simulated_step("delta", 500, budget="50%", config={"batch_size": 32}), 1.0, 0.2, 0.4)
    one, other = (Drawn(panel) for panel in figures_of(tmp_path, [stalls, recomputes], "time").panels)
    patterns = [[re.sub("^.*-", "", fill) for *_, fill in drawn.bars() if "url" in fill] for drawn in (one, other)]
    assert patterns[0][0] == patterns[1][1] != patterns[1][0]


def test_a_part_that_nothing_spends_is_not_in_the_legend(tmp_path):
    drawn = only(figures_of(tmp_path, [spent(simulated_step("delta", 500, budget="50%"), 1.0, 0.4, 0.0)], "time"))
    assert "recompute" in drawn.texts and "waiting for copies" not in " ".join(drawn.texts)


def test_roles_at_the_peak(tmp_path):
    at_peak = {"by_role": {"activation": 300 * MIB, "parameter": 90 * MIB, "gradient": 0}, "inside_op_bytes": 10 * MIB, "phase": "backward"}
    known = measured_step("delta", 402, budget="50%")
    known = replace(known, predicted={**known.predicted, "at_peak": at_peak, "peak_bytes": 400 * MIB})
    found = figures_of(tmp_path, [known, measured_step("checkpoint", 700)], "roles")
    drawn = only(found)
    assert [v for left, right, _ in drawn.bars() for v in (left, right)] == near(0, 90, 90, 390, 390, 400)
    assert drawn.marks()[0][0] == pytest.approx(402, rel=0.005)
    assert "gradient" not in drawn.texts and found.note == "Roles at the peak of checkpoint is not drawn: not recorded."


def test_traffic_with_its_rate_and_what_is_hidden(tmp_path):
    moved = {"moved_bytes": 3 * 10**9, "stall_seconds": 0.05}
    fast, old, still = (simulated_step(name, 500, budget="50%") for name in ("delta", "vdnn", "checkpoint"))
    records = [replace(fast, predicted={**fast.predicted, **moved, "copy_seconds": 0.25}),
               replace(old, predicted={**old.predicted, **moved}), replace(still, predicted={**still.predicted, "moved_bytes": 0})]
    found = figures_of(tmp_path, records, "traffic")
    drawn = only(found)
    assert [(left, right) for left, right, _ in drawn.bars()] == [near(0, 3), near(0, 3)]
    assert {"3 GB, 12 GB/s, 80 % hidden", "3 GB, time on the link not recorded"} <= set(drawn.texts)
    assert found.note == "Nothing is moved by checkpoint 50 %."


@pytest.mark.parametrize("moved, told", [
    (8, "8 B"), (16_000, "16 kB"), (50_300_000, "50.3 MB"), (920_000_000, "0.92 GB"), (8_390_000, "8.39 MB")])
def test_little_traffic_is_told_in_a_smaller_unit(tmp_path, moved, told):
    record = simulated_step("delta", 500, budget="50%")
    record = replace(record, predicted={**record.predicted, "moved_bytes": moved, "stall_seconds": 0.5, "copy_seconds": 1.0})
    assert f"{told}, {told}/s, 50 % hidden" in only(figures_of(tmp_path, [record], "traffic")).texts


def searched(method: str, rates: dict[int, float], largest: int, failed: int) -> RunRecord:
    record = search(method, largest)
    trials = [{"value": v, "fits": True, "outcome": "ok", "samples_per_second": rate} for v, rate in rates.items()]
    return replace(record, search={**record.search, "trials": [*trials, {"value": failed, "fits": False, "samples_per_second": None}]})


def test_throughput_curves_end_at_the_largest_that_fits(tmp_path):
    eager, delta = searched("eager", {64: 300.0, 200: 310.0}, 200, 201), searched("delta", {64: 280.0, 200: 290.0, 408: 250.0}, 408, 409)
    drawn = only(figures_of(tmp_path, [eager, delta], "throughput"))
    marks = sorted((round(x), round(y)) for x, y, fill in drawn.marks() if fill == "var(--paper)")
    assert marks == [(64, 280), (64, 300), (200, 290), (200, 310), (408, 250)], "a trial that failed has no throughput"
    ends = sorted((round(x), round(y)) for x, y, fill in drawn.marks() if fill != "var(--paper)")
    assert ends == [(200, 310), (408, 250)] and drawn.ticks("x")[0][1] == drawn.ticks("y")[0][1] == 0


def test_throughput_over_the_batches_of_steps(tmp_path):
    steps = [measured_step("eager", 500, ratio=r, config={"batch_size": b}) for b, r in ((16, 1.0), (32, 1.6))]
    drawn = only(figures_of(tmp_path, steps, "throughput"))
    measured = sorted((round(x), round(y, 1)) for x, y, fill in drawn.marks() if fill == "var(--series-1)")
    assert measured == [(16, 16.0), (32, 20.0)]
    alone = figures_of(tmp_path / "alone", [steps[0], measured_step("delta", 400, budget="50%")], "throughput")
    assert alone.panels == (), "one batch is no curve"


def test_the_largest_absolute_and_against_eagers(tmp_path):
    records = [searched("eager", {200: 310.0}, 200, 201), searched("delta", {408: 250.0}, 408, 409), search("vdnn", 4096),
               search("none", None)]
    found = figures_of(tmp_path, records, "largest")
    drawn = only(found)
    assert [(left, right) for left, right, _ in drawn.bars()] == [near(0, 200), near(0, 408), near(0, 4096)]
    assert {"200, 310 samples/s", "408, 2.04 x, 250 samples/s", "at least 4096, 20.5 x"} <= set(drawn.texts)
    assert "no largest of none" in found.note.lower() and "multiples are of eager's" in " ".join(drawn.texts)
    alone = only(figures_of(tmp_path / "alone", [records[1]], "largest"))
    assert "408, 250 samples/s" in alone.texts and "eager was not searched" in " ".join(alone.texts)


def test_settings_of_one_method_stand_side_by_side(tmp_path):
    stages = [measured_step("superneurons", peak, budget="50%", ratio=ratio, config={"options": {"stage": stage}})
              for stage, peak, ratio in (("liveness", 800, 1.0), ("offload", 600, 1.1), ("recompute", 400, 1.3))]
    drawn = only(figures_of(tmp_path, stages, "settings"))
    assert [v for left, right, _ in drawn.bars() for v in (left, right)] == near(0, 800, 0, 600, 0, 400)
    assert {fill for *_, fill in drawn.bars()} == {"var(--series-1)"}, "measured bars are filled"
    assert "400.0 MiB, time 1.30 (1.28 to 1.32; 10 pairs) x" in drawn.texts and "eager's peak" in drawn.texts
    assert figures_of(tmp_path / "one", stages[:1], "settings").panels == ()


def test_predictions_against_measurements_and_the_unsafe_rate(tmp_path):
    peaks = (("a", 100, 100), ("b", 100, 99), ("c", 200, 204), ("d", 400, 400))
    records = [measured_step(method, measured, budget="50%") for method, measured, _ in peaks]
    records = [replace(r, predicted={**r.predicted, "peak_bytes": predicted * MIB}) for r, (_, _, predicted) in zip(records, peaks)]
    found = figures_of(tmp_path, records, "accuracy")
    drawn = Drawn(found.panels[0])
    assert sorted((round(x), round(y)) for x, y, _ in drawn.marks()) == [(100, 99), (100, 100), (200, 204), (400, 400)]
    assert found.statement.startswith("Peak, 4 cells: predicted less measured is -1.0 % to +2.0 % of the measured, 0 % in the median; "
                                      "without sign 0.50 % in the median, 2.0 % at the most; 1 of 4 held more than was predicted, "
                                      "by 1.000 MiB or less (unsafe rate 25 %: the share that would have broken a "
                                      "budget of just the predicted peak).")
    nothing = figures_of(tmp_path / "simulated", [simulated_step("delta", 500, budget="50%")], "accuracy")
    assert nothing.panels == () and nothing.note.startswith("Nothing to compare")


def test_budgets_above_eagers_peak_are_on_the_chart_of_methods(tmp_path):
    cells = [replace(simulated_step("delta", 400, budget="60%", config={"model": m}), budget_bytes=3 * EAGER_PEAK) for m in ("a", "b")]
    (panel,) = figures_of(tmp_path, cells, "methods").panels
    assert Drawn(panel).marks()[0][0] == pytest.approx(300, rel=0.01) and Drawn(panel).ticks("x")[-1][1] >= 300


def test_plan_time_over_ops_on_two_log_axes(tmp_path):
    steps = [measured_step("delta", 500, budget=f"{p}%") for p in (50, 60, 70)]
    steps = [replace(r, provenance={**r.provenance, "ops": ops}, measured={**r.measured, "plan_seconds": seconds})
             for r, ops, seconds in zip(steps, (100, 1000, 2000), (0.02, 0.5, 30.0))]
    found = figures_of(tmp_path, steps, "planning")
    labels = Drawn(found.panels[0]).texts
    assert found.note == "" and "ops of the step (log scale)" in labels and "plan time in s (log scale)" in labels
    described = found.panels[0].svg
    assert all(f"{seconds} s at {ops} ops" in described for ops, seconds in ((100, 0.02), (1000, 0.5), (2000, 30)))
    old = figures_of(tmp_path / "old", [measured_step("delta", 500, budget="50%")], "planning")
    assert old.panels == () and "does not hold the number of ops" in old.note


def test_no_figure_shows_the_source_of_a_formula(tmp_path):
    """Log axes of a narrow range, too: their ticks are plain numbers."""
    step = measured_step("delta", 500, budget="50%")
    (panel,) = figures_of(tmp_path, [replace(step, provenance=step.provenance | {"ops": 97})], "planning").panels
    words = Drawn(panel).texts
    assert not [t for t in words if "$" in t or "math" in t] and "100" in words


def test_fragmentation_where_an_allocator_was_sampled(tmp_path):
    record = measured_step("delta", 500, budget="50%", config={"target": "cuda:0"})
    known = replace(record, measured={**record.measured, "reserved_peak_bytes": 800 * MIB, "allocated_peak_bytes": 600 * MIB})
    drawn = only(figures_of(tmp_path, [known], "fragmentation"))
    assert drawn.bars()[0][:2] == near(0, 25) and "25.0 % of 800.0 MiB" in drawn.texts
    absent = replace(record, missing={"measured.reserved_peak_bytes": "no NVIDIA GPU: the step ran on the CPU"})
    found = figures_of(tmp_path / "cpu", [absent], "fragmentation")
    assert found.panels == () and found.note == "Not measured: no NVIDIA GPU: the step ran on the CPU."


def test_the_map_of_methods_and_models(tmp_path):
    cells = [simulated_step(m, 400, budget="60%", overhead=o, config={"model": n})
             for m, n, o in (("delta", "resnet50", 0.1), ("delta", "vgg16", 0.5), ("checkpoint", "resnet50", 1.0))]
    no = infeasible_step("checkpoint", "60%")
    config = {**no.config, "model": "vgg16", "target": "sim:v100-32gb"}
    cells.append(make_record(config=config, outcome=no.outcome, truth=Truth.NOT_RUN, budget_bytes=no.budget_bytes))
    drawn = only(figures_of(tmp_path, cells, "heat"))
    assert [t for t in drawn.texts if re.fullmatch(r"[\d.]+|\u00d7", t)] == ["1.10", "1.50", "2.00", "\u00d7"]
    shades = [float(s) for s in re.findall(r"fill: var\(--series-1\); fill-opacity: ([\d.]+)", ElementTree.tostring(drawn.root).decode())]
    assert shades == sorted(shades) and len(shades) == 3 and shades[-1] == pytest.approx(0.5, abs=0.01), "darker where slower"
    assert figures_of(tmp_path / "one", cells[:1], "heat").panels == ()


def test_the_bound_and_what_a_method_cannot_reach(tmp_path):
    delta = measured_step("delta", 500, budget="50%", ratio=1.5)
    delta = replace(delta, provenance={**delta.provenance, "lower_bound_bytes": EAGER_PEAK // 5})
    refused = replace(infeasible_step("checkpoint", "40%"), predicted={"infeasible": {"smallest_bytes": int(0.7 * EAGER_PEAK)}})
    found = figures_of(tmp_path, [delta, refused], "budget")
    time = next(p for p in found.panels if p.name == "time0")
    drawn = Drawn(time)
    hatched = [(left, right) for left, right, fill in drawn.bars() if fill.startswith("url(#")]
    assert hatched == [near(0, 20)] and "no schedule of the whole batch" in " ".join(drawn.texts)
    lines = [path.get("d") for path in drawn._own("line2d", "path") if "stroke-width: 3" in path.get("style", "")]
    ends = [drawn.value("x", float(x)) for x in re.findall(r"[ML] (-?[\d.]+)", lines[0])]
    assert (min(ends), max(ends)) == near(0, 70)
    assert "bound" not in found.note and "eager, memory enough" in drawn.texts
    old = figures_of(tmp_path / "old", [measured_step("delta", 500, budget="50%"), infeasible_step("checkpoint", "40%")], "budget")
    assert "lower bound of all schedules is not drawn" in old.note and "cannot reach" not in Drawn(old.panels[1]).texts


def described(panel: Panel) -> str:
    """What the drawing says to those who cannot see it."""
    return " ".join("".join(text.itertext()) for text in ElementTree.fromstring(panel.svg).iter(f"{SVG}desc"))


def bounded(method: str, budget: str, least: float, **more) -> RunRecord:
    """A simulated cell whose step is 1.5 times eager's, of 1 s, and whose bound this is."""
    record = simulated_step(method, 300, budget=budget, overhead=0.5, **more)
    return replace(record, predicted={**record.predicted, "least_step_seconds": least})


def test_the_time_that_no_schedule_is_below_is_a_line_of_steps(tmp_path):
    """Within 40 to 60 % no schedule is below what holds at 60 %. Of two steps at one budget the lower bound counts, since each holds for
    its own; without bounds no line is drawn."""
    cells = [bounded("delta", "40%", 1.25), bounded("delta", "60%", 1.1), bounded("dqn", "40%", 1.2), bounded("dqn", "80%", 0.9)]
    cells[0] = replace(cells[0], budget_bytes=cells[0].budget_bytes - 1)  # 40 % of eager's peak, rounded otherwise
    time = next(p for p in figures_of(tmp_path, cells, "budget").panels if p.name == "time0")
    drawn = Drawn(time)
    (line,) = [path.get("d") for path in drawn._own("line2d", "path") if "stroke-dasharray: 6" in path.get("style", "")]
    corners = [tuple(map(float, pair)) for pair in re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", line)]
    found = [(round(drawn.value("x", x)), round(drawn.value("y", y, is_log=True), 2)) for x, y in corners]
    assert found == [(0, 1.2), (0, 1.2), (40, 1.2), (40, 1.1), (60, 1.1), (60, 0.9), (80, 0.9)] or found == [
        (0, 1.2), (40, 1.2), (40, 1.1), (60, 1.1), (60, 0.9), (80, 0.9)]
    assert "bound of all schedules, simulated" in " ".join(drawn.texts)
    assert "below 1.2 times eager's step at 40 %, 1.1 times eager's step at 60 %, 0.9 times eager's step at 80 %" in described(time)
    assert min(time.figure.axes[0].get_ylim()) < 0.9, "the line lies within the figure"
    old = next(p for p in figures_of(tmp_path / "old", [simulated_step("delta", 300, budget="40%")], "budget").panels if p.name == "time0")
    assert not [path for path in Drawn(old)._own("line2d", "path") if "stroke-dasharray: 6" in path.get("style", "")]


def test_the_least_peak_of_any_schedule_is_a_line_in_the_figure_of_peaks(tmp_path):
    record = simulated_step("delta", 500, budget="50%")
    record = replace(record, provenance={**record.provenance, "lower_bound_bytes": EAGER_PEAK // 5})
    drawn = Drawn(next(p for p in figures_of(tmp_path, [record], "budget").panels if p.name == "peak0"))
    lines = [path.get("d") for path in drawn._own("line2d", "path") if "stroke: var(--ink)" in path.get("style", "")]
    levels = [{round(drawn.value("y", float(y))) for _, y in re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", line)} for line in lines]
    assert {200} in levels and "bound of all schedules" in " ".join(drawn.texts)


def test_facets_of_networks_have_the_bound_each(tmp_path):
    cells = [bounded("delta", "40%", 1.25), bounded("delta", "40%", 1.05, config={"model": "vgg16"})]
    (panel,) = figures_of(tmp_path, cells, "methods").panels
    (first, second) = described(panel).split("vgg16: ")
    assert "resnet50: delta simulated" in first and "below 1.25 times eager's step at 40 %" in first
    assert "below 1.05 times eager's step at 40 %" in second


def test_forty_methods_that_cannot_keep_a_budget_share_the_foot_of_the_figure(tmp_path):
    cells = [measured_step("delta", 500, budget="50%", ratio=1.5), *(infeasible_step(f"m{i}", "40%") for i in range(40))]
    time = next(p for p in figures_of(tmp_path, cells, "budget").panels if p.name == "time0")
    words = " ".join(Drawn(time).texts)
    assert "m6, infeasible" in words and "m7, infeasible" not in words and "33 more methods, infeasible" in words
    low, high = time.figure.axes[0].get_ylim()
    assert 0.1 < low < 1 < high < 2, "most of the height is left for what is compared"


def test_what_thousands_of_cells_show_is_told_by_ranges_and_keeps_the_worst(tmp_path):
    cells = []
    for i in range(1500):
        record = measured_step("delta" if i % 2 else "dtr", 100 + i % 300, budget="50%", config={"batch_size": i + 1})
        off = 50 if i in (7, 1200) else 0
        cells.append(replace(record, predicted={**record.predicted, "peak_bytes": (100 + i % 300 - off) * MIB}))
    found = figures_of(tmp_path, cells, "accuracy")
    drawn, peak = Drawn(found.panels[0]), found.panels[0]
    marks = [(round(x), round(y)) for x, y, _ in drawn.marks()]
    assert len(marks) == 600 and {(107, 57), (100, 50)} <= set(marks) and "600 marks of more are drawn" in found.note
    assert "Peak, 1,500 cells" in found.statement and "2 of 1,500 held more than was predicted, by 50.00 MiB or less" in found.statement
    assert re.search(r"delta, \d+ marks: 57 to \d+ MiB simulated at 101 to \d+ MiB measured; dtr, |dtr, \d+ marks: .*; delta, ", peak.svg)


def test_equality_with_eager_is_stated(tmp_path):
    changed = replace(measured_step("modnn", 500, budget="50%"), truth=Truth.SEMANTICS_CHANGED)
    found = figures_of(tmp_path, [measured_step("eager", 1000), measured_step("delta", 400, budget="40%"), changed, training("delta")],
                       "training")
    assert found.statement == ("Of 3 measured training steps held against eager PyTorch: 2 equal it bit for bit and 1 change the "
                                           "semantics, and say so. Of 1 training held against eager PyTorch: 1 equal it bit for bit.")


def test_what_is_wrong_is_drawn_in_no_figure(tmp_path):
    for kind, found in make_figures(load_run(write_run(tmp_path / "run", full_grid()))).items():
        for panel in found.panels:
            assert "broken" not in panel.svg, kind


def test_every_kind_renders_records_that_hold_nothing(tmp_path):
    bare = [replace(r, predicted={}, measured={}, search={}, training={}) for r in full_grid()]
    for found in make_figures(load_run(write_run(tmp_path / "run", bare))).values():
        assert found.panels == ()


def test_many_cells_are_thinned_to_each_methods_smallest_budget_and_that_is_said(tmp_path):
    records = [spent(simulated_step("delta", 900 - i, budget=f"{90 - i}%"), 1.0, 0.1 * i, 0.0) for i in range(30)]
    found = figures_of(tmp_path, records, "time")
    drawn = only(found)
    assert drawn.bars()[-1][1] == pytest.approx(1.0 + 2.9, rel=0.01) and "delta 61 %" in drawn.texts
    assert found.note == "Each method at the smallest of the budgets that it kept; the tables hold all."


def test_kinds_have_titles_and_say_how_to_read_them():
    assert len({kind.id for kind in KINDS}) == len({kind.title for kind in KINDS}) == len(KINDS)
    assert all(kind.how_to_read.endswith(".") for kind in KINDS)
