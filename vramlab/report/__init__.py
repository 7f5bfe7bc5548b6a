"""Reports from records: `render(run_dir)` writes one offline HTML file. Never imports torch."""

from __future__ import annotations

from vramlab.report.page import render

__all__ = ["render"]
