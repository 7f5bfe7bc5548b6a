"""`python -m vramlab` is `vramlab`."""

from __future__ import annotations

import sys

from vramlab.cli import main

sys.exit(main())
