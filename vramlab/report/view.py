"""A run's report on this machine's loopback address, made anew whenever a record is written.

    /                  the report; a few lines in it ask for the version every two seconds and load the page again when it is another
    /version           {"version": ..., "done": ..., "planned": ...}
    /cells/...         files of the run's folder, as the report links to them; nothing outside it, no hidden file

Nothing is written: a run that goes on does not notice. Another web page cannot reach it under a name of its own (DNS rebinding): requests
whose Host is not the loopback address are refused.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Callable
from urllib.parse import unquote, urlsplit

from vramlab.errors import EnvironmentUnable, WorkflowError
from vramlab.run_folder import is_done
from vramlab.runs import RECORD_FILE, RUN_FILE, load_run

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 2.0
LARGEST_BYTES = 2**30  # of one file: what a browser should not be given by accident
_TYPES = {".json": "application/json", ".csv": "text/csv; charset=utf-8", ".pdf": "application/pdf", ".gz": "application/gzip"}
_TEXT = "text/plain; charset=utf-8"  # of all else, HTML that is not our page above all: it must not run
_POLICY = ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
           "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
_REFRESH = """<div id="going" role="status" style="position:fixed;right:1rem;bottom:1rem;padding:.4rem .8rem;border-radius:.4rem;
background:Canvas;color:CanvasText;border:1px solid"%(hidden)s>%(done)d of %(planned)d cells are done; this page follows the run</div>
<script>
setInterval(async () => {
  try {
    const found = await (await fetch("/version", {cache: "no-store"})).json();
    if (found.version !== "%(version)s") location.reload();
  } catch (ended) { document.getElementById("going").textContent = "the server has ended; this page stays as it is"; }
}, %(milliseconds)d);
</script>
</body>"""


class Viewer:
    """The report of one run, rendered when its records are others than those it was rendered from. `render(folder)` gives the page."""

    def __init__(self, folder: Path, render: Callable[[Path], str]) -> None:
        self.folder, self._render = Path(folder).resolve(), render
        self._lock = threading.Lock()  # one page at a time: matplotlib's settings are the process's
        self._page: tuple[str, str] = ("", "")

    def version(self) -> str:
        """Changes with every record that is written, and with run.json."""
        found = hashlib.sha256()
        for path in sorted([self.folder / RUN_FILE, *self.folder.glob(f"cells/*/{RECORD_FILE}")]):
            try:
                state = path.stat()
            except FileNotFoundError:  # between the listing and here
                continue
            found.update(f"{path.name} {path.parent.name} {state.st_mtime_ns} {state.st_size}\n".encode())
        return found.hexdigest()[:16]

    def state(self) -> dict[str, str | int]:
        """The version, and how many cells are done of how many."""
        version, cells = self.version(), load_run(self.folder).cells
        return {"version": version, "done": sum(is_done(cell.record) for cell in cells), "planned": len(cells)}

    def page(self) -> str:
        """The report with the lines that keep it fresh. WorkflowError when run.json cannot be read."""
        with self._lock:
            state = self.state()
            if self._page[0] != state["version"]:
                self._page = str(state["version"]), self._fresh(state)
            return self._page[1]

    def _fresh(self, state: dict[str, str | int]) -> str:
        hidden = " hidden" if state["done"] == state["planned"] else ""
        lines = _REFRESH % {**state, "hidden": hidden, "milliseconds": 1000 * POLL_SECONDS}
        before, _, after = self._render(self.folder).rpartition("</body>")
        return f"{before}{lines}{after}"

    def file(self, path: str) -> Path | None:
        """The file of the run's folder that a URL's path names; None when it is none, hidden, or outside, through links too."""
        parts = [part for part in unquote(path).split("/") if part]
        if not parts or any(part.startswith(".") or "\0" in part for part in parts):
            return None
        found = self.folder.joinpath(*parts).resolve()
        return found if found.is_relative_to(self.folder) and found.is_file() else None


class Server(ThreadingHTTPServer):
    """On the loopback address only. EnvironmentUnable when the port cannot be had; 0 is a free one."""

    daemon_threads = True

    def __init__(self, viewer: Viewer, port: int = 0) -> None:
        self.viewer = viewer
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            raise EnvironmentUnable(f"port {port} of {LOOPBACK} cannot be had: {getattr(error, 'strerror', None) or error}") from None

    @property
    def url(self) -> str:
        """Where the report is."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that goes away in the middle of an answer is no fault; all else is told."""
        import sys

        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "vramlab", ""

    def do_GET(self) -> None:
        """Answer one request."""
        path = urlsplit(self.path).path
        if self.headers.get("Host", "") not in self._hosts():
            self._send(HTTPStatus.FORBIDDEN, _TEXT, b"this server answers to the loopback address only\n")
        elif path in ("/", "/report.html"):
            self._made("text/html; charset=utf-8", self.server.viewer.page)
        elif path == "/version":
            self._made(_TYPES[".json"], lambda: json.dumps(self.server.viewer.state()))
        else:
            self._file(path)

    do_HEAD = do_GET

    def _hosts(self) -> set[str]:
        names = (LOOPBACK, "localhost")
        return {f"{name}:{self.server.server_port}" for name in names} | (set(names) if self.server.server_port == 80 else set())

    def _made(self, kind: str, make: Callable[[], str]) -> None:
        try:
            body = make().encode()
        except WorkflowError as error:  # run.json is gone or torn while we look
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{error}\n".encode())
        self._send(HTTPStatus.OK, kind, body)

    def _file(self, path: str) -> None:
        found = self.server.viewer.file(path)
        if found is None:
            return self._send(HTTPStatus.NOT_FOUND, _TEXT, b"there is no such file in the run's folder\n")
        if found.stat().st_size > LARGEST_BYTES:
            return self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _TEXT, b"too large to show; it lies in the run's folder\n")
        self._send(HTTPStatus.OK, _TYPES.get(found.suffix, _TEXT), found.read_bytes())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
                   "Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *words: object) -> None:
        """No line a request: it polls."""
