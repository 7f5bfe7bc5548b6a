"""The figures of the report, from records alone. Measured marks are filled, simulated ones hollow and said to be so.

Each kind is a function run -> FigureSet in a file of its own; `KINDS` lists them in the order of the page.
"""

from __future__ import annotations

from vramlab.report.figures.ablation import ablation_figures
from vramlab.report.figures.accuracy import accuracy_figures
from vramlab.report.figures.budget import budget_figures, methods_figure
from vramlab.report.figures.fragmentation import fragmentation_figures
from vramlab.report.figures.groups import peak_of, step_groups, where_in_words
from vramlab.report.figures.heat import heat_figures
from vramlab.report.figures.kinds import FigureSet, Kind, Looks
from vramlab.report.figures.largest import largest_figures, throughput_figures
from vramlab.report.figures.planning import planning_figures
from vramlab.report.figures.stacks import role_figures, time_figures
from vramlab.report.figures.telemetry import load_telemetry, telemetry_figures
from vramlab.report.figures.traffic import traffic_figures
from vramlab.report.figures.training import training_figures
from vramlab.runs import Run

__all__ = ["KINDS", "FigureSet", "Kind", "Looks", "ablation_figures", "accuracy_figures", "budget_figures", "fragmentation_figures",
           "heat_figures", "largest_figures", "load_telemetry", "make_figures", "methods_figure", "peak_of", "planning_figures",
           "role_figures", "step_groups", "telemetry_figures", "throughput_figures", "time_figures", "traffic_figures",
           "training_figures", "where_in_words"]

KINDS = (
    Kind(id="methods", title="Every method on every network", make=methods_figure,
         how_to_read="Simulated step time over eager's on the same device with memory enough; the ratio axis is logarithmic. The thin "
                     "dashed line is what no schedule of the whole batch is below."),
    Kind(id="heat", title="Methods by models", make=heat_figures,
         how_to_read="Step time over eager's with memory enough, darker where slower. \u00d7: the method cannot keep the budget; a dash: "
                     "the cell does not count, and the tables say why."),
    Kind(id="budget", title="Peak and step time against budget", make=budget_figures,
         how_to_read="Peak: on or below the dashed line, the budget was kept. Step time: bars are intervals of the paired ratio, of "
                     "95 % from six pairs on, the band is eager against itself, the line at 1 is eager with memory enough; the ratio axis "
                     "is logarithmic, so that equal factors look equal. Crosses are budgets that a method could not keep, a wide line what "
                     "it cannot reach, the hatched region what no schedule reaches. The thin dashed line is what no schedule of the whole "
                     "batch is below, simulated; the distance to it is what a better method could gain at most. Simulated times are "
                     "multiples of eager's simulated step, by the library's convolution algorithms and the whole batch at once."),
    Kind(id="time", title="What the time of a step is spent on", make=time_figures,
         how_to_read="Hollow parts are simulated and sum to the simulated step; the filled mark is the measured step. Planning happens "
                     "once, before the first step, and is no part of it: it stands behind each bar, measured."),
    Kind(id="roles", title="What the peak of a step is made of", make=role_figures,
         how_to_read="Hollow parts are simulated, by role, and sum to the simulated peak; the filled mark is the measured peak."),
    Kind(id="traffic", title="Traffic", make=traffic_figures,
         how_to_read="Bytes out and in of one simulated step. GB/s: over the time for which the copy engines are busy, both directions "
                     "added; hidden: the share of that time for which the step does not wait."),
    Kind(id="throughput", title="Throughput against batch size", make=throughput_figures,
         how_to_read="Each mark is one trial of a search or one cell; bars are the range of its steps. A curve of a search ends at the "
                     "largest that fits."),
    Kind(id="largest", title="Largest that fits", make=largest_figures,
         how_to_read="Absolute, as a multiple of eager's largest, and the throughput there: the largest is often not the fastest."),
    Kind(id="settings", title="One method with several settings", make=ablation_figures,
         how_to_read="What each part of a method gives: its peak and its step time over eager's with memory enough."),
    Kind(id="accuracy", title="Prediction and measurement", make=accuracy_figures,
         how_to_read="One mark a cell that ran and was simulated too. Below the dashed line the simulation said too little."),
    Kind(id="planning", title="Plan time", make=planning_figures,
         how_to_read="Measured on the machine that ran the workflow, once a plan. Both axes are logarithmic: a straight line is a power of "
                     "the number of ops."),
    Kind(id="fragmentation", title="Fragmentation", make=fragmentation_figures,
         how_to_read="What the allocator reserved and no tensor used, from the two peaks, which need not be of one instant."),
    Kind(id="training", title="Training", make=training_figures,
         how_to_read="Each curve lies on eager's, the wide one, wherever both are equal."),
)


def make_figures(run: Run) -> dict[str, FigureSet]:
    """All kinds by id, in the order of the page."""
    looks = Looks(run)
    return {kind.id: kind.make(run, looks) for kind in KINDS}
