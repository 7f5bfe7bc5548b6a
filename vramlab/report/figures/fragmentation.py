"""Memory that the allocator holds and no tensor uses, where an allocator was sampled."""

from __future__ import annotations

from vramlab.record import RunRecord
from vramlab.report.figures.bars import MAX_BARS, Bar, bar_panel
from vramlab.report.figures.groups import COMPARED, cell_in_words, grouped, sentence, where_in_words
from vramlab.report.figures.kinds import MAX_PANELS, FigureSet, Looks
from vramlab.report.words import bytes_in_words, counts, is_simulated_target
from vramlab.runs import Run


def fragmentation_figures(run: Run, looks: Looks) -> FigureSet:
    """Reserved less allocated, as a share of reserved, a bar a cell that measured both."""
    ran = [r for r in run.records if r.kind == "step" and counts(r) and not is_simulated_target(r.config)]
    known = [r for r in ran if _share(r) is not None]
    reasons = {str(r.missing.get("measured.reserved_peak_bytes") or "not recorded") for r in ran if _share(r) is None}
    groups = grouped(known, lambda r: tuple(r.config.get(k) for k in COMPARED))
    panels = []
    for index, group in enumerate(groups[:MAX_PANELS]):
        where = where_in_words(run, group[0])
        bars = [Bar(label=cell_in_words(run, r), length=_share(r), colour=looks.colour(run.label(r)), is_simulated=False,
                    text=f"{_share(r):.1f} % of {bytes_in_words(r.measured['reserved_peak_bytes'])}") for r in group[:MAX_BARS]]
        panels.append(bar_panel(bars, name=f"fragmentation{index}", title=f"Fragmentation, measured: {where}", heading=where,
                                xlabel="reserved and not allocated (% of the reserved peak)"))
    notes = [f"not measured: {reason}" for reason in sorted(reasons)]
    if not ran:
        notes.append("not measured: no step ran on hardware")
    return FigureSet(panels=tuple(panels), note=sentence(notes))


def _share(record: RunRecord) -> float | None:
    """Per cent of the reserved peak."""
    reserved, allocated = (record.measured.get(f"{name}_peak_bytes") for name in ("reserved", "allocated"))
    return None if not reserved or allocated is None else 100 * (reserved - allocated) / reserved
