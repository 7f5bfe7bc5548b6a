"""The faults of SIGPLAN's checklist for empirical evaluation, looked for in every figure; each look-out must find a planted fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from hand_made import MIB, full_grid, infeasible_step, measured_step, simulated_step, write_run, write_telemetry
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text

from vramlab.report import drawing
from vramlab.report.figures import KINDS, load_telemetry, make_figures, telemetry_figures
from vramlab.runs import load_run


@dataclass(frozen=True)
class Shown:
    """A finished figure and what is said of it."""

    name: str
    figure: Figure
    title: str
    description: str
    how_to_read: str = ""

    @property
    def words(self) -> list[str]:
        """All that can be read in it."""
        return [text.get_text() for text in self.figure.findobj(Text)] + [self.title, self.description]

    def says(self, words: str) -> bool:
        return any(words in text for text in self.words)


def truncated_axes(shown: Shown) -> Iterator[str]:
    """S7.2: an axis of amounts that starts away from zero, unless it is logarithmic and says so."""
    for axes in shown.figure.axes:
        for axis, low in (("x", min(axes.get_xlim())), ("y", min(axes.get_ylim()))):
            is_log, label = getattr(axes, f"get_{axis}scale")() == "log", getattr(axes, f"get_{axis}label")()
            if is_log and "log scale" not in label:
                yield f"{axis} is logarithmic and does not say so"
            if not is_log and label and low > 0:
                yield f"{axis} starts at {low}"


def ratios_on_a_linear_axis(shown: Shown) -> Iterator[str]:
    """S7.3: an axis of ratios on which equal factors look unequal."""
    for axes in shown.figure.axes:
        for axis in "xy":
            if " / " in getattr(axes, f"get_{axis}label")() and getattr(axes, f"get_{axis}scale")() != "log":
                yield f"{axis} shows ratios and is linear"


def summaries_that_mislead(shown: Shown) -> Iterator[str]:
    """S7.1: the best of several results told alone."""
    yield from (text for text in shown.words if re.search(r"\bup to\b|\bat best\b", text, re.IGNORECASE))


def no_baseline(shown: Shown) -> Iterator[str]:
    """S2.1: a ratio or a multiple of something that is not named."""
    if any(re.search(r"\d x\b| / |times", text) for text in shown.words) and not shown.says("eager"):
        yield "a ratio without its baseline"


def no_distribution(shown: Shown) -> Iterator[str]:
    """S4.3: a measured time that is a dot alone: neither an interval nor the number of samples."""
    for axes in shown.figure.axes:
        label = axes.get_ylabel() + axes.get_xlabel()
        filled = [line for line in axes.lines if is_filled(line) and len(line.get_xdata())]
        if "step time /" in label and filled and not axes.containers:
            yield "measured ratios without their intervals"
        if "time of one step" in label and filled and not shown.says("range of"):
            yield "measured times without their spread"


def is_filled(line) -> bool:
    face = line.get_markerfacecolor()
    is_mark = line.get_marker() not in ("None", "none", "", " ", "x", "|", "_", None)
    return is_mark and not (isinstance(face, str) and (face == "none" or to_hex(face) == drawing.PAPER)) and to_rgba(face)[3] > 0


def simulated_as_measured(shown: Shown) -> Iterator[str]:
    """What is simulated is filled, or not said to be simulated."""
    for axes in shown.figure.axes:
        for line in axes.lines:
            if "simulated" in str(line.get_label()) and is_filled(line):
                yield f"{line.get_label()} is filled"
        hollow = [p for p in axes.patches if to_hex(p.get_facecolor()) == drawing.PAPER and p.get_width()]
        if hollow and not (shown.says("simulated") or shown.says("sim:")):
            yield "hollow bars that are not said to be simulated"


def too_many_digits(shown: Shown) -> Iterator[str]:
    """S7.4: a ratio with an interval, of which more digits are shown than the interval supports."""
    for text in shown.words:
        for middle, low, high in re.findall(r"([\d.]+) \(([\d.]+) to ([\d.]+)", text):
            decimals = len(middle.partition(".")[2])
            if decimals and (float(high) - float(low)) / 2 < 10 ** -decimals / 2 or (float(high) - float(low)) / 2 > 99 * 10 ** -decimals:
                yield text


FAULTS: tuple[Callable[[Shown], Iterator[str]], ...] = (
    truncated_axes, ratios_on_a_linear_axis, summaries_that_mislead, no_baseline, no_distribution, simulated_as_measured, too_many_digits)


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> list[Shown]:
    """Every figure of a run that has something for each kind."""
    seen: list[Shown] = []
    real = drawing.finish

    def spy(figure, **told):
        panel = real(figure, **told)
        seen.append(Shown(told["name"], figure, told["title"], told["description"]))
        return panel

    folder = write_run(tmp_path_factory.mktemp("faults") / "run", grid())
    write_telemetry(folder / "cells" / grid()[0].cell_id / "telemetry.csv.gz", [(0.1 * i, (500 + i) * MIB) for i in range(50)])
    run = load_run(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "finish", spy)
        drawn = make_figures(run)
        telemetry_figures(load_telemetry(run)[0])
    assert [kind.id for kind in KINDS if not drawn[kind.id].panels] == []
    return seen


def grid() -> list:
    """The full grid, with what its records lack: ops, bound, roles, allocator, link, a second model, stages and throughputs."""
    at_peak = {"by_role": {"activation": 300 * MIB, "parameter": 90 * MIB}, "inside_op_bytes": 10 * MIB, "phase": "backward"}
    whole = []
    for record in full_grid():
        told = {**record.predicted, "at_peak": at_peak, "copy_seconds": 0.3} if record.predicted else {}
        measured = record.measured | ({"reserved_peak_bytes": 1300 * MIB, "allocated_peak_bytes": 1000 * MIB} if record.measured else {})
        trials = [t | {"samples_per_second": 100.0 + t["value"]} for t in record.search.get("trials") or ()]
        whole.append(replace(record, predicted=told, measured=measured, search=record.search | {"trials": trials} if trials else {},
                             provenance=record.provenance | {"ops": 1000, "lower_bound_bytes": 200 * MIB}))
    whole += [simulated_step(m, 400, budget="60%", config={"model": "vgg16"}) for m in ("delta", "checkpoint")]
    whole += [measured_step("superneurons", 400, budget="50%", ratio=ratio, config={"options": {"stage": stage}})
              for stage, ratio in (("liveness", 1.1), ("offload", 1.2))]
    return [*whole, infeasible_step("superneurons", "20%")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_no_figure_has_the_fault(shown, fault):
    assert len(shown) > 20
    assert [(one.name, found) for one in shown for found in fault(one)] == []


def planted(draw: Callable[[Axes], object], title: str = "") -> Shown:
    figure = Figure()
    axes = figure.add_subplot()
    draw(axes)
    return Shown("planted", figure, title, "")


def bars_from_ninety(axes):
    axes.barh([0, 1], [100, 98])
    axes.set(xlim=(90, 101), xlabel="peak (MiB)")


def a_silent_log_axis(axes):
    axes.plot([1, 10], [1, 10])
    axes.set(yscale="log", ylabel="seconds")


def linear_ratios(axes):
    axes.plot([0, 1], [0.5, 2.0])
    axes.set(ylabel="step time / eager's")


def bare_dots(axes):
    axes.plot([40, 60], [1.4, 1.2], marker="o")
    axes.set(yscale="log", ylabel="step time / eager's (log scale)")


def times_without_spread(axes):
    axes.plot([1.4], [0], marker="D")
    axes.set(xlabel="time of one step (s)")


def filled_simulation(axes):
    axes.plot([1, 2], [1, 2], marker="o", color=drawing.INK, label="delta, simulated")


def hollow_and_silent(axes):
    axes.barh([0], [1.0], facecolor=drawing.PAPER)


def three_decimals(axes):
    axes.set_title("1.234 (0.9 to 1.6; 10 pairs)")


@pytest.mark.parametrize(("fault", "figure"), [
    (truncated_axes, planted(bars_from_ninety)), (truncated_axes, planted(a_silent_log_axis)),
    (ratios_on_a_linear_axis, planted(linear_ratios)), (summaries_that_mislead, planted(lambda axes: None, "Saves up to 70 %")),
    (no_baseline, planted(lambda axes: axes.set_title("delta: 2.04 x"))), (no_distribution, planted(bare_dots)),
    (no_distribution, planted(times_without_spread)), (simulated_as_measured, planted(filled_simulation)),
    (simulated_as_measured, planted(hollow_and_silent)), (too_many_digits, planted(three_decimals)),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_fault_is_found(fault, figure):
    assert list(fault(figure))
