"""Results that are given away: packed, signed, checked by named rules, sent and fetched. Never imports torch.

    pack_run(run_dir) -> Packed            a run as a signed bundle; `.write(to)` puts it below a folder
    check(folder) -> Report                every rule, asked of a bundle's folder: the same on both sides of the wire
    archive.pack, archive.unpack           a bundle as one body, and back
"""

from __future__ import annotations

from vramlab.crowd.bundle import Packed, pack_run
from vramlab.crowd.findings import Finding, Report, Severity
from vramlab.crowd.rules import check
from vramlab.runs import MANIFEST_FILE

__all__ = ["MANIFEST_FILE", "Finding", "Packed", "Report", "Severity", "check", "pack_run"]
