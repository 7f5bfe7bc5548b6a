"""`create_app(settings)`: the server as one ASGI application."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from contextlib import asynccontextmanager
from typing import Any, AsyncIterator

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException as StarletteHTTPException

from vramlab import __version__
from vramlab.crowd import check
from vramlab.crowd.server import api, keys, pages
from vramlab.crowd.server.database import Database, is_away
from vramlab.crowd.server.intake import Examine, Intake, Refused
from vramlab.crowd.server.limits import Limiter
from vramlab.crowd.server.recent import Recent
from vramlab.crowd.server.settings import Settings
from vramlab.crowd.server.store import Store

_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"same-origin"))
FULL_SECONDS = 60  # and while the disk is full
RETRY_SECONDS = 5  # what a client is told to wait while the database is away
_TAKEN_AT_A_TIME = 8  # bundles; others wait without a thread, so that the threads that are left go on answering those who only look
_LOOK_SECONDS = 5.0  # how often received bundles are looked for that nobody announced: those of a server that was killed
_log = logging.getLogger(__name__)


def create_app(settings: Settings, examine: Examine = check) -> FastAPI:
    """The application. `app.state` holds settings, database, store, key, intake and limits. The schema is brought up to date at its start.
    `examine` is asked of every bundle.

    EnvironmentUnable, at the start, when the database does not answer or others can read the server's key.
    """
    database, store = Database(settings), Store(settings.data_dir)
    store.prepare()
    key = keys.signing_key(settings)
    intake = Intake(settings, database, store, key, examine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        database.migrate()
        intake.sweep()
        is_over = threading.Event()
        checker = threading.Thread(target=_check_received, args=(intake, is_over), name="checker", daemon=True)
        checker.start()
        yield
        is_over.set()
        intake.is_due.set()
        checker.join(timeout=60)
        database.close()

    app = FastAPI(title=settings.title, version=__version__, lifespan=lifespan, openapi_url="/api/v1/openapi.json", docs_url=None,
                  redoc_url=None)
    for name, value in {"settings": settings, "database": database, "store": store, "key": key, "intake": intake,
                        "failures": Limiter(settings.failures_per_minute), "submissions": Limiter(settings.bundles_per_minute),
                        "requests": Limiter(settings.requests_per_minute), "gate": asyncio.Semaphore(_TAKEN_AT_A_TIME),
                        "recent": Recent()}.items():
        setattr(app.state, name, value)
    app.include_router(api.router)
    for error, answer in ((SQLAlchemyError, _database_fault), (OSError, _disk_fault), (Refused, api.refuse),
                          (RequestValidationError, _invalid), (StarletteHTTPException, api.refuse_http)):
        app.add_exception_handler(error, answer)
    pages.install(app)
    app.add_middleware(Guard, app_state=app.state)
    return app


def _check_received(intake: Intake, is_over: threading.Event) -> None:
    """Until the server ends: check what was acknowledged without a check."""
    try:
        intake.fill_fingerprints()
    except Exception:  # the next start tries again
        _log.exception("the fingerprints of older results could not be kept")
    while not is_over.is_set():
        try:
            intake.check_received()
        except SQLAlchemyError as error:
            if not is_away(error):
                _log.exception("a received bundle could not be checked")
        except Exception:  # one bundle that breaks our code must not end the checks of all others; it stays received, and the log tells why
            _log.exception("a received bundle could not be checked")
        intake.is_due.wait(_LOOK_SECONDS)
        intake.is_due.clear()


async def _database_fault(request: Request, error: Exception) -> JSONResponse:
    """503 while the database is away; anything else is a fault of ours and stays one."""
    if not is_away(error):
        raise error
    body = {"error": "the database does not answer; come again", "findings": []}
    return JSONResponse(body, 503, headers={"Retry-After": str(RETRY_SECONDS)})


async def _disk_fault(request: Request, error: OSError) -> JSONResponse:
    """503 while the disk is full; anything else is a fault of ours and stays one."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise error
    body = {"error": "the server's disk is full; come again later", "findings": []}
    return JSONResponse(body, 503, headers={"Retry-After": str(FULL_SECONDS)})


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    """Parameters and bodies that are not of the schema; what was sent is not echoed."""
    findings = [{"rule": "request", "severity": "error", "where": ".".join(map(str, e["loc"]))[:300], "message": e["msg"][:300]}
                for e in error.errors()[:20]]
    return JSONResponse({"error": "the request is not of the schema", "findings": findings}, 422)


class Guard:
    """Around every request: how often an address may ask, how long a body may be, and headers that keep browsers from guessing."""

    def __init__(self, app: Any, app_state: Any) -> None:
        self.app, self.state = app, app_state

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        address = scope["client"][0] if scope.get("client") else ""
        if wait := self.state.requests.take(address):
            answer = JSONResponse({"error": "too many requests from this address", "findings": []}, 429,
                                  headers={"Retry-After": str(max(1, round(wait)))})
            await answer(scope, receive, send)
            return
        is_submission = scope["method"] == "POST" and scope["path"].rstrip("/") == "/api/v1/bundles"
        await self.app(scope, receive if is_submission else _bounded(receive, self.state.settings.max_json_bytes), _careful(send))


def _bounded(receive: Any, most: int) -> Any:
    """`receive` that ends a body at `most` bytes with 413."""
    seen = 0

    async def bounded() -> dict:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > most:
            raise HTTPException(413, f"more than the {most:,} bytes that are taken here")
        return message

    return bounded


def _careful(send: Any) -> Any:
    async def careful(message: dict) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *_HEADERS]
        await send(message)

    return careful
