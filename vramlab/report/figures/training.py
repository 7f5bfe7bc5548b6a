"""Loss, gradient norm and accuracy of training cells over eager's."""

from __future__ import annotations

from typing import Any, Sequence

import seaborn

from vramlab.counted import count_of
from vramlab.record import RunRecord, Truth
from vramlab.report import drawing
from vramlab.report.drawing import MUTED, Panel, panel_axes, plain_label
from vramlab.report.figures.kinds import MAX_PANELS, FigureSet, Looks
from vramlab.report.words import join_words
from vramlab.runs import Run

TRUTH_IN_WORDS = {Truth.EXACT: "equal it bit for bit", Truth.WITHIN_NOISE: "differ by no more than eager from itself",
                  Truth.SEMANTICS_CHANGED: "change the semantics, and say so", Truth.WRONG: "wrong"}


def training_figures(run: Run, looks: Looks) -> FigureSet:
    """Loss, gradient norm and test accuracy over eager's, one panel each for every training cell."""
    panels: list[Panel] = []
    trained = [r for r in run.records if r.kind == "train" and r.training.get("loss")]
    for index, record in enumerate(trained[:MAX_PANELS]):
        for key, label in (("loss", "training loss"), ("grad_norm", "gradient norm"), ("accuracy", "test accuracy")):
            if panel := _training_panel(run, looks, record, f"train{index}{key}", key, label):
                panels.append(panel)
    note = f"The first {MAX_PANELS} of {len(trained)} training cells are drawn." if len(trained) > MAX_PANELS else ""
    return FigureSet(panels=tuple(panels), note=note, statement=equality_in_words(run))


def _training_panel(run: Run, looks: Looks, record: RunRecord, name: str, key: str, label: str) -> Panel | None:
    method = run.label(record)
    ours, eager = (_series(record.training.get(k) or []) for k in (key, f"eager_{key}"))
    if not ours:
        return None
    title = f"{record.config.get('model')} on {record.config.get('data')}, {method}: {label}"
    with panel_axes(title) as (figure, axes):
        if eager:
            axes.plot(*zip(*eager), color=MUTED, linewidth=5, alpha=0.45, label="eager", solid_capstyle="round")
        seaborn.lineplot(x=[x for x, _ in ours], y=[y for _, y in ours], ax=axes, color=looks.colour(method), errorbar=None, estimator=None,
                         linewidth=1.2, marker=looks.marker(method) if len(ours) < 20 else "", label=plain_label(method), legend=False)
        highest = max([y for _, y in ours + eager])
        top = 1.0 if key == "accuracy" and highest <= 1 else 1.05 * highest
        axes.set(xlim=(0, max(x for x, _ in ours)), ylim=(min(0, min(y for _, y in ours + eager)), top or 1.0), xlabel="step", ylabel=label)
        ends = f"{label} goes from {ours[0][1]:.4g} to {ours[-1][1]:.4g} over {count_of(int(ours[-1][0]), 'step')}"
        return drawing.finish(figure, name=name, title=title, description=f"{ends}; eager ends at {eager[-1][1]:.4g}" if eager else ends)


def _series(values: Sequence[Any]) -> list[tuple[float, float]]:
    """[(step from 1, value)] of a plain list or of [[step, value], ...]; values that are no number are left out."""
    pairs = [v if isinstance(v, list | tuple) else (i, v) for i, v in enumerate(values, 1)]
    return [(float(step), float(value)) for step, value in pairs if value is not None]




def equality_in_words(run: Run) -> str:
    """How many steps and trainings computed what eager computes, bit for bit; "" where none was held against it."""
    told = []
    for kind, noun in (("step", "measured training step"), ("train", "training")):
        held = [r for r in run.records if r.kind == kind and r.truth is not Truth.NOT_RUN]
        words = [f"{count} {TRUTH_IN_WORDS[truth]}" for truth in Truth if (count := sum(r.truth is truth for r in held))]
        if held:
            told.append(f"Of {count_of(len(held), noun)} held against eager PyTorch: {join_words(words)}.")
    return " ".join(told)
