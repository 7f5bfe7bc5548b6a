"""The record behind a result, out of its bundle's archive."""

from __future__ import annotations

import hashlib
import json
import tarfile
from functools import lru_cache
from pathlib import Path

from vramlab.crowd.server.settings import Settings
from vramlab.crowd.server.store import Store
from vramlab.crowd.server.tables import Result
from vramlab.record import RunRecord
from vramlab.runs import RECORD_FILE

KEPT = 256  # records that stay in memory: an archive has to be read from its start


def read_record(settings: Settings, row: Result) -> RunRecord | None:
    """None where the archive or the record in it is not at hand, or is not the one that the row was made from."""
    return _read(settings.data_dir, row.bundle.archive_sha256, f"cells/{row.cell_id}/{RECORD_FILE}", row.record_sha256)


@lru_cache(maxsize=KEPT)
def _read(data_dir: Path, archive_sha256: str, name: str, record_sha256: str) -> RunRecord | None:
    try:
        body = Store(data_dir).read(archive_sha256, name)
    except (KeyError, OSError, tarfile.TarError, EOFError):
        return None
    if hashlib.sha256(body).hexdigest() != record_sha256:
        return None
    try:
        return RunRecord.from_json(json.loads(body))
    except ValueError:  # of another schema than this vramlab reads
        return None
