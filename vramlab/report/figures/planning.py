"""What planning takes against the size of the graph."""

from __future__ import annotations

from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from vramlab.report import drawing
from vramlab.report.drawing import panel_axes
from vramlab.report.figures.groups import sentence
from vramlab.report.figures.kinds import FigureSet, Looks
from vramlab.report.figures.marks import Mark, draw_marks, marks_in_words
from vramlab.report.words import counts, is_eager
from vramlab.runs import Run


def planning_figures(run: Run, looks: Looks) -> FigureSet:
    """Plan time of every step cell over the ops of its tape; measured on the machine that ran the workflow, whatever the target is.
    Eager plans nothing: its time is that of writing its order down."""
    steps = [r for r in run.records if r.kind == "step" and counts(r) and not is_eager(r.config)]
    timed = [r for r in steps if r.measured.get("plan_seconds") is not None]
    sized = [r for r in timed if r.provenance.get("ops")]
    note = sentence(["plan time is not drawn where the record does not hold the number of ops" if len(sized) < len(timed) else ""])
    if not sized:
        return FigureSet(note=note)
    marks = [Mark(method=run.label(r), x=r.provenance["ops"], y=r.measured["plan_seconds"], is_simulated=False) for r in sized]
    with panel_axes("One mark a cell") as (figure, axes):
        draw_marks(axes, looks, marks, are_joined=False)
        axes.set(xscale="log", yscale="log", xlabel="ops of the step (log scale)", ylabel="plan time in s (log scale)")
        axes.set(xlim=(min(m.x for m in marks) / 1.5, max(m.x for m in marks) * 1.5),
                 ylim=(min(m.y for m in marks) / 2, max(m.y for m in marks) * 2))
        for axis, ticks in ((axes.xaxis, (1.0, 2.0, 5.0)), (axes.yaxis, (1.0,))):
            axis.set_major_locator(LogLocator(subs=ticks))
            axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:,.10g}"))
            axis.set_minor_locator(NullLocator())
        panel = drawing.finish(figure, name="planning", title="Plan time against the size of the graph",
                               description=marks_in_words(marks, "ops", "s"))
    return FigureSet(panels=(panel,), note=note)
