"""`install(app)`: the pages, and pages for what goes wrong. Paths below /api keep the handlers, and the JSON, that they have."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from vramlab.crowd.server.database import is_away
from vramlab.crowd.server.pages.routes import router
from vramlab.crowd.server.pages.site import render

HEADINGS = {400: "That cannot be understood", 403: "That is not allowed", 404: "There is no such page", 405: "That cannot be done here",
            413: "That is too long", 415: "That is no form", 422: "That cannot be understood", 429: "Too many requests",
            503: "Come again in a moment"}
_MESSAGES = {404: "The address leads nowhere.", 405: "This address knows no such method."}
_STANDARD = {"Not Found", "Method Not Allowed"}  # what the framework says without us
RETRY_SECONDS = 5

Handler = Callable[[Request, Any], Response | Awaitable[Response]]


def install(app: FastAPI) -> None:
    """Add the pages to an application that has its handlers."""
    app.include_router(router)
    for kind, show in ((HTTPException, _refused), (RequestValidationError, _not_understood), (SQLAlchemyError, _database_fault)):
        app.add_exception_handler(kind, _by_path(show, app.exception_handlers.get(kind)))


def _by_path(show: Handler, before: Handler | None) -> Handler:
    """A handler that leaves the API's errors to the one before."""
    async def handle(request: Request, error: Exception) -> Response:
        handler = before if before and request.url.path.removeprefix(request.scope.get("root_path", "")).startswith("/api/") else show
        answer = handler(request, error)
        return await answer if inspect.isawaitable(answer) else answer

    return handle


def _refused(request: Request, error: HTTPException) -> Response:
    message = _MESSAGES.get(error.status_code, "") if error.detail in _STANDARD else str(error.detail)
    return _page(request, error.status_code, message, dict(error.headers or {}))


def _not_understood(request: Request, error: RequestValidationError) -> Response:
    return _page(request, 422, "The address or the form holds something that is no value.", {})


def _database_fault(request: Request, error: SQLAlchemyError) -> Response:
    if not is_away(error):
        raise error
    return _page(request, 503, "The database does not answer.", {"Retry-After": str(RETRY_SECONDS)})


def _page(request: Request, status: int, message: str, headers: dict[str, str]) -> Response:
    """Without asking the database who is looking: it may be what has failed."""
    return render(request, "error.html.j2", status=status, code=status, heading=HEADINGS.get(status, "Something went wrong"),
                  message=message, headers=headers)
