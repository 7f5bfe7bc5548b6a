"""A server as a program of its own, for tests that kill it: the first round of rules only, since the records are written by hand, or, with
VRAMLAB_TESTS_RULES=all, every rule.

    python crowd_server.py DATA_DIR [DATABASE_URL]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from crowd_made import wrapping_only

from vramlab.crowd import check
from vramlab.crowd.server.run import serve
from vramlab.crowd.server.settings import read_settings

if __name__ == "__main__":
    url = sys.argv[2] if len(sys.argv) > 2 else None
    settings = read_settings({}, data_dir=Path(sys.argv[1]), database_url=url, bundles_per_minute=10**6, bundles_per_day=10**6,
                             requests_per_minute=10**6)
    serve(settings, "127.0.0.1", 0, check if os.environ.get("VRAMLAB_TESTS_RULES") == "all" else wrapping_only)
