"""`create_app(settings)`: the server as one ASGI application."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError

from vramlab import __version__
from vramlab.crowd.server import api
from vramlab.crowd.server.database import Database, is_away
from vramlab.crowd.server.settings import Settings

RETRY_SECONDS = 5  # what a client is told to wait while the database is away


def create_app(settings: Settings) -> FastAPI:
    """The application. `app.state` holds `settings` and `database`; the schema is brought up to date when it starts."""
    database = Database(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        database.migrate()
        yield
        database.close()

    app = FastAPI(title=settings.title, version=__version__, lifespan=lifespan, openapi_url="/api/v1/openapi.json", docs_url=None,
                  redoc_url=None)
    app.state.settings, app.state.database = settings, database
    app.include_router(api.router)
    app.add_exception_handler(SQLAlchemyError, _database_fault)
    return app


async def _database_fault(request: Request, error: Exception) -> JSONResponse:
    """503 while the database is away; anything else is a fault of ours and stays one."""
    if not is_away(error):
        raise error
    return JSONResponse({"error": "the database does not answer; come again"}, 503, headers={"Retry-After": str(RETRY_SECONDS)})
