"""Results that are given away: `submit_to_directory(run_dir, to)`. Never imports torch."""

from __future__ import annotations

from vramlab.crowd.bundle import MANIFEST_FILE, Submitted, check_bundle, submit_to_directory

__all__ = ["MANIFEST_FILE", "Submitted", "check_bundle", "submit_to_directory"]
