"""Serves the application until it is told to end."""

from __future__ import annotations

import socket

import uvicorn

from vramlab.crowd import check
from vramlab.crowd.server.app import create_app
from vramlab.crowd.server.intake import Examine
from vramlab.crowd.server.settings import Settings
from vramlab.errors import EnvironmentUnable

BACKLOG = 512
GRACE_SECONDS = 30  # for what is being answered when the server is told to end


def serve(settings: Settings, host: str, port: int, examine: Examine = check) -> None:
    """Answer on an address until SIGINT or SIGTERM; `examine` is asked of every bundle.

    EnvironmentUnable when the address or the database cannot be had.
    """
    app = create_app(settings, examine)
    app.state.database.migrate()  # here a database that does not answer is told in one sentence
    listener = _bind(host, port)
    shown = f"[{host}]" if ":" in host else host
    print(f"vramlab results on http://{shown}:{listener.getsockname()[1]}  data in {settings.data_dir}  "
          f"{'SQLite' if settings.is_sqlite else 'PostgreSQL'}  Ctrl-C ends it", flush=True)
    config = uvicorn.Config(app, log_level="warning", server_header=False, timeout_graceful_shutdown=GRACE_SECONDS, timeout_keep_alive=30)
    uvicorn.Server(config).run(sockets=[listener])


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY where a socket says that it is TCP's. Without it every answer waits for a delayed acknowledgement: 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise EnvironmentUnable(f"{host}:{port} cannot be had: {error.strerror}") from error
    listener.listen(BACKLOG)
    return listener
