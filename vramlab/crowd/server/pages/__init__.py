"""The web pages: rendered on the server, every string escaped, no script but one file of our own.

They read the database, and write what a visitor does by a form: announce a competition, enter a result.
"""

from __future__ import annotations

from vramlab.crowd.server.pages.errors import install

__all__ = ["install"]
