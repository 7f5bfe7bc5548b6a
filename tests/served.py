"""A server of results that listens on loopback while a test runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn
from fastapi import FastAPI

WAIT_SECONDS = 30
ANSWER_SECONDS = 60  # httpx's own 5 are too few where other work leaves a test little of the processor; what hangs still fails


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Its address. The server has ended when the block is left."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        end = time.monotonic() + WAIT_SECONDS
        while not server.started:
            assert thread.is_alive() and time.monotonic() < end, "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(WAIT_SECONDS)


@contextmanager
def visiting(app: FastAPI) -> Iterator[httpx.Client]:
    """A client of such a server."""
    with serving(app) as address, httpx.Client(base_url=address, timeout=ANSWER_SECONDS) as client:
        yield client
