"""The JSON API under /api/v1."""

from __future__ import annotations

from fastapi import APIRouter, Request

from vramlab import __version__
from vramlab.crowd.server import queries

router = APIRouter(prefix="/api/v1")


@router.get("/health")
def health(request: Request) -> dict:
    """Whether the database answers, and the collection in numbers."""
    with request.app.state.database.read() as session:
        totals = queries.totals(session)
    return {"version": __version__, "results": totals.results, "unverified": totals.unverified, "states": dict(totals.states)}
