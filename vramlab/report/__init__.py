"""Reports from records: `render(run_dir)` writes one offline HTML file. Never imports torch."""

from __future__ import annotations

from pathlib import Path

__all__ = ["render"]


def render(run_dir: str | Path, collections: tuple[Path, ...] = ()) -> Path:
    """`vramlab.report.page.render`, imported when it is called: its figures take seconds to import, the words of this package none."""
    from vramlab.report.page import render as render_page

    return render_page(run_dir, collections)
