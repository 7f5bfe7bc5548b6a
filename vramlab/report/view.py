"""A run's report on this machine's loopback address, made anew whenever a record is written.

    /                  the report as it was last made; a few lines in it ask for the version every two seconds and load the page again
                       when a newer one is ready
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
_FOLLOW = """<div id="going" role="status" style="position:fixed;right:1rem;bottom:1rem;padding:.4rem .8rem;border-radius:.4rem;
background:Canvas;color:CanvasText;border:1px solid" hidden></div>
<script>
(() => {
  const note = document.getElementById("going");
  const tell = words => { note.hidden = !words; note.textContent = words; };
  const follow = async () => {
    try {
      const answer = await fetch("/version", {cache: "no-store"});
      if (!answer.ok) return tell("the run cannot be read just now");
      const found = await answer.json();
      if (found.version !== "VERSION") { clearInterval(timer); location.reload(); return; }
      tell(found.done < found.planned ? `${found.done} of ${found.planned} cells are done; this page follows the run` : "");
    } catch (ended) { tell("the server has ended; this page stays as it is"); }
  };
  const timer = setInterval(follow, MILLISECONDS);
  follow();
})();
</script>
</body>"""


class Viewer:
    """The report of one run; `render(folder)` gives the page. One is made at a time, and the last one is shown until the next is whole."""

    def __init__(self, folder: Path, render: Callable[[Path], str]) -> None:
        self.folder, self._render = Path(folder).resolve(), render
        self._making = threading.Lock()  # matplotlib's settings are the process's
        self._shown: tuple[str, str] | None = None  # (version, page)
        self._tried = ""  # the version that a page was last begun for: what fails is not begun again every two seconds
        self._counted: tuple[str, int, int] = ("", 0, 0)  # (version, done, planned)

    def version(self) -> str:
        """Of the records as they lie: changes with every record that is written, and with run.json."""
        found = hashlib.sha256()
        for path in sorted([self.folder / RUN_FILE, *self.folder.glob(f"cells/*/{RECORD_FILE}")]):
            try:
                state = path.stat()
            except FileNotFoundError:  # between the listing and here
                continue
            found.update(f"{path.name} {path.parent.name} {state.st_mtime_ns} {state.st_size}\n".encode())
        return found.hexdigest()[:16]

    def state(self) -> dict[str, str | int]:
        """The version of the page that is shown, and how many cells are done of how many. Begins to make the next page where records are
        newer. WorkflowError when run.json cannot be read."""
        version = self.version()
        if self._counted[0] != version:
            cells = load_run(self.folder).cells
            self._counted = version, sum(is_done(cell.record) for cell in cells), len(cells)
        if self._shown and version not in (self._shown[0], self._tried) and self._making.acquire(blocking=False):
            threading.Thread(target=self._make_and_release, daemon=True).start()
        return {"version": self._shown[0] if self._shown else version, "done": self._counted[1], "planned": self._counted[2]}

    def page(self) -> str:
        """The page that is shown; the first one is waited for. WorkflowError when run.json cannot be read."""
        if self._shown is None:
            with self._making:
                if self._shown is None:
                    self._make()
        return self._shown[1]

    def _make(self) -> None:
        version = self._tried = self.version()  # before the records are read: one that is written meanwhile makes a newer version
        lines = _FOLLOW.replace("VERSION", version).replace("MILLISECONDS", f"{1000 * POLL_SECONDS:.0f}")
        before, _, after = self._render(self.folder).rpartition("</body>")
        self._shown = version, f"{before}{lines}{after}"

    def _make_and_release(self) -> None:
        try:
            self._make()
        except WorkflowError:
            pass  # run.json is gone or torn: `state` says so to whoever asks, and its next version is tried
        finally:
            self._making.release()

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
