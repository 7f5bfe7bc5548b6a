"""Telemetry of all cells over the time that they ran."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from typing import Mapping, Sequence

from vramlab.report import drawing
from vramlab.report.drawing import SERIES, Panel, panel_axes
from vramlab.report.figures.kinds import FigureSet
from vramlab.report.words import MIB
from vramlab.runs import TELEMETRY_FILE, Run
from vramlab.telemetry import Telemetry, read_telemetry

MAX_POINTS = 600  # of a time series, each the largest value of its span
TELEMETRY_PANELS = (
    ("memory", "memory (MiB)", MIB, (("gpu_memory_used_bytes", "GPU memory in use"),
                                     ("rss_bytes", "resident host memory, shared pages in each process"))),
    ("use", "use (%, 100 = one core)", 1, (("gpu_busy_percent", "GPU busy"), ("cpu_percent", "processor"))),
    ("power", "power (W)", 1, (("power_watts", "GPU board"),)),
    ("temperature", "temperature (\u00b0C)", 1, (("temperature_celsius", "GPU"),)),
)


def telemetry_figures(found: Mapping[str, Telemetry]) -> FigureSet:
    """Memory, use, power and temperature over the time that cells ran; columns without a value are not drawn but listed."""
    parts = _end_to_end(found)
    panels, absent = [], {}
    for name, ylabel, scale, columns in TELEMETRY_PANELS:
        drawn = [(column, label) for column, label in columns if any(v is not None for _, t in parts for v in t.columns[column])]
        absent |= {column: _reason(found, column) for column, _ in columns if column not in dict(drawn)}
        if drawn:
            panels.append(_telemetry_panel(parts, f"telemetry-{name}", ylabel, scale, drawn))
    note = f"Not drawn: {'; '.join(f'{column} ({reason})' for column, reason in absent.items())}." if absent and parts else ""
    return FigureSet(panels=tuple(panels), note=note)


def load_telemetry(run: Run) -> tuple[dict[str, Telemetry], dict[str, str]]:
    """Telemetry of each cell, and why some of them have none."""
    found, missing = {}, {}
    for cell in run.cells:
        path = cell.folder / TELEMETRY_FILE
        try:
            found[cell.cell_id] = read_telemetry(path)
        except FileNotFoundError:
            missing[cell.cell_id] = "no telemetry file"
        except (OSError, ValueError) as error:
            missing[cell.cell_id] = str(error)
    return found, missing


def _reason(found: Mapping[str, Telemetry], column: str) -> str:
    reasons = (t.summary()["missing"].get(column) for t in found.values())
    return next(filter(None, reasons), "no value in any sample")


def _end_to_end(found: Mapping[str, Telemetry]) -> list[tuple[float, Telemetry]]:
    """(seconds of telemetry before it, telemetry) in order of time: a pause between two cells, of days perhaps, takes no room."""
    parts, offset = [], 0.0
    for telemetry in sorted((t for t in found.values() if t.rows), key=lambda t: datetime.fromisoformat(t.header["started"])):
        parts.append((offset, telemetry))
        offset += telemetry.columns["t_seconds"][-1]
    return parts


def _telemetry_panel(parts: Sequence[tuple[float, Telemetry]], name: str, ylabel: str, scale: float,
                     columns: Sequence[tuple[str, str]]) -> Panel:
    title = f"Telemetry: {ylabel}"
    with panel_axes(title) as (figure, axes):
        last_offset, last = parts[-1]
        highest, right = 0.0, last_offset + last.columns["t_seconds"][-1]
        for index, (column, label) in enumerate(columns):
            xs, ys = _joined(parts, column, scale)
            axes.plot(xs, ys, color=SERIES[index], label=label, linewidth=1.1)
            highest = max([highest, *(y for y in ys if y == y)])
        axes.set(xlim=(0, right or 1), ylim=(0, 1.08 * highest or 1), xlabel="seconds, cells one after another", ylabel=ylabel)
        described = f"{', '.join(label for _, label in columns)}; highest value {highest:.4g}"
        return drawing.finish(figure, name=name, title=title, description=described)


def _joined(parts: Sequence[tuple[float, Telemetry]], column: str, scale: float) -> tuple[list[float], list[float]]:
    """One line over all cells, broken between them; thinned to the largest value of each span."""
    share = max(2, MAX_POINTS // max(1, len(parts)))
    xs: list[float] = []
    ys: list[float] = []
    for offset, telemetry in parts:
        samples = [(t, v / scale) for t, v in zip(telemetry.columns["t_seconds"], telemetry.columns[column]) if v is not None]
        edges = [round(i * len(samples) / share) for i in range(share + 1)] if len(samples) > share else list(range(len(samples) + 1))
        for start, end in pairwise(edges):
            t, v = max(samples[start:end], key=lambda sample: sample[1])
            xs.append(offset + t)
            ys.append(v)
        xs.append(xs[-1] if xs else offset)
        ys.append(float("nan"))
    return xs, ys
