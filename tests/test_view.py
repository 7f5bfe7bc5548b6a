"""`vramlab view`: what it serves, what it refuses, that it follows a run and ends when asked."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hand_made import measured_step, write_run
from no_torch import ROOT, command_of

from vramlab.cli import main
from vramlab.collection import Library
from vramlab.errors import EnvironmentUnable
from vramlab.report.page import page
from vramlab.report.view import POLL_SECONDS, Server, Viewer
from vramlab.runs import load_run

RECORDS = [measured_step("eager", 1000), measured_step("delta", 595, budget="60%"), measured_step("checkpoint", 700, budget="80%")]


@pytest.fixture
def folder(tmp_path):
    """A run of three cells beside which lies what must not be read."""
    folder = write_run(tmp_path / "results" / "w" / "run", RECORDS)
    (tmp_path / "results" / "w" / "secret.txt").write_text("secret")
    (tmp_path / "results" / "w" / "run-2").mkdir()
    (tmp_path / "results" / "w" / "run-2" / "run.json").write_text("secret")
    return folder


@pytest.fixture
def serve(folder):
    """Starts a server of a page that names the records it was made from."""
    started = []

    def start(render=lambda folder: f"<p>{len([*folder.glob('cells/*/record.json')])} records</p></body>"):
        server = Server(Viewer(folder, render))
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def ask(server: Server, path: str, *, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], str]:
    """(status, headers, body); the path goes out as it is written."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode(errors="replace")
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def test_the_page_and_the_files_that_it_links_to(serve, folder):
    server = serve()
    status, headers, body = ask(server, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8") and "3 records" in body
    assert body.rstrip().endswith("</body>") and 'fetch("/version"' in body
    name = f"cells/{RECORDS[0].cell_id}/record.json"
    status, headers, body = ask(server, f"/{name}")
    assert (status, body) == (200, (folder / name).read_text()) and headers["X-Content-Type-Options"] == "nosniff"
    assert ask(server, "/report.html")[2].startswith("<p>3 records")
    status, headers, body = ask(server, "/run.json", method="HEAD")
    assert (status, body) == (200, "") and int(headers["Content-Length"]) == len((folder / "run.json").read_bytes())
    assert not (folder / "report.html").exists(), "nothing is written into the run"


@pytest.mark.parametrize("path", [
    "/../secret.txt", "/cells/../../secret.txt", "/%2e%2e/secret.txt", "/..%2fsecret.txt", "/%2e%2e%2fsecret.txt", "/..%5csecret.txt",
    "//etc/passwd", "/%2fetc/passwd", "/etc/passwd", "/../run-2/run.json", "/%252e%252e/secret.txt", "/.lock", "/cells/.hidden/x",
    "/run.json%00.html", "/cells", "/nothing", "/link.txt", "/linked/secret.txt",
])
def test_nothing_outside_the_run_and_nothing_hidden_is_served(serve, folder, path):
    (folder / ".lock").write_text("secret")
    (folder / "cells" / ".hidden").mkdir()
    (folder / "cells" / ".hidden" / "x").write_text("secret")
    (folder / "link.txt").symlink_to(folder.parent / "secret.txt")
    (folder / "linked").symlink_to(folder.parent)
    status, _, body = ask(serve(), path)
    assert status == 404 and "secret" not in body and "root:" not in body


def test_a_link_inside_the_run_is_served(serve, folder):
    (folder / "again.json").symlink_to(folder / "run.json")  # the control: links are refused for where they lead
    assert ask(serve(), "/again.json")[0] == 200


def test_html_of_the_run_does_not_run(serve, folder):
    (folder / "cells" / "evil.html").write_text("<script>alert(1)</script>")
    status, headers, _ = ask(serve(), "/cells/evil.html")
    assert (status, headers["Content-Type"]) == (200, "text/plain; charset=utf-8")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "0.0.0.0:{port}", "127.0.0.1:1"])
def test_another_name_for_this_machine_is_refused(serve, host):
    server = serve()
    status, _, body = ask(server, "/", host=host.format(port=server.server_port))
    assert status == 403 and "records" not in body
    assert ask(server, "/", host=f"localhost:{server.server_port}")[0] == 200


def test_it_listens_on_the_loopback_address_only(serve):
    server = serve()
    assert server.socket.getsockname()[0] == "127.0.0.1" and server.server_port > 0


def test_only_reading(serve):
    for method in ("POST", "PUT", "DELETE"):
        assert ask(serve(), "/run.json", method=method)[0] == 501


def test_the_page_is_made_anew_when_a_record_is_written_and_only_then(serve, folder):
    last, made = RECORDS[2], []
    (folder / "cells" / last.cell_id / "record.json").unlink()

    def render(folder: Path) -> str:
        made.append(len([*folder.glob("cells/*/record.json")]))
        return f"<p>{made[-1]} records</p></body>"

    server = serve(render)
    first = ask(server, "/")[2]
    state = json.loads(ask(server, "/version")[2])
    assert (state["done"], state["planned"]) == (2, 3) and f'"{state["version"]}"' in first
    assert "2 records" in ask(server, "/")[2] == first and made == [2]
    last.save(folder / "cells" / last.cell_id / "record.json")
    assert ask(server, "/")[2] == first, "the page that is whole is shown until the next one is"
    wait_for(lambda: json.loads(ask(server, "/version")[2])["version"] != state["version"])
    assert "3 records" in ask(server, "/")[2] and made == [2, 3]
    assert json.loads(ask(server, "/version")[2])["done"] == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_page_that_cannot_be_made_is_tried_once_and_the_last_one_stays(serve, folder):
    made = []

    def render(folder: Path) -> str:
        made.append(1)
        if len(made) > 1:
            raise RuntimeError("no page")
        return "<p>records</p></body>"

    server = serve(render)
    assert ask(server, "/")[0] == 200
    (folder / "run.json").touch()
    for _ in range(5):
        assert ask(server, "/version")[0] == 200
        time.sleep(0.05)
    assert made == [1, 1] and "<p>records" in ask(server, "/")[2]


def test_many_that_ask_at_once_have_one_page_made(serve, folder):
    made = []

    def render(folder: Path) -> str:
        made.append(1)
        time.sleep(0.3)
        return "<p>records</p></body>"

    server = serve(render)
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda _: ask(server, "/"), range(8))]
    assert {status for status, _, _ in answers} == {200} and made == [1]
    (folder / "run.json").touch()
    with ThreadPoolExecutor(8) as pool:
        assert {status for status, _, _ in pool.map(lambda _: ask(server, "/version"), range(8))} == {200}
    wait_for(lambda: json.loads(ask(server, "/version")[2])["version"] == server.viewer.version())
    assert made == [1, 1]


def test_a_run_that_goes_away_is_told(serve, folder):
    server, other = serve(), serve()
    assert ask(other, "/")[0] == 200
    (folder / "run.json").unlink()
    status, _, body = ask(serve(lambda folder: page(load_run(folder), Library(()))), "/")
    assert status == 503 and "run.json cannot be read" in body
    assert ask(server, "/version")[0] == 503
    assert ask(other, "/")[0] == 200 and ask(other, "/version")[0] == 503, "the last page stays"


def test_a_port_that_is_taken_is_one_line(folder, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentUnable, match=f"port {port} of 127.0.0.1 cannot be had"):
            Server(Viewer(folder, lambda folder: ""), port)
        assert main(["view", str(folder), "--port", str(port)]) == 3
    assert "Address already in use" in capsys.readouterr().err
    assert main(["view", str(folder.parent / "absent")]) == 2
    (folder / "run.json").write_text("{")
    assert main(["view", str(folder)]) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_the_real_report_without_torch_and_ctrl_c_ends_it(folder, number):
    command, environment = command_of("view", str(folder))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        line = process.stdout.readline()
        url = re.match(r"http://127\.0\.0\.1:\d+/", line)[0]
        with urllib.request.urlopen(url, timeout=120) as answer:
            body = answer.read().decode()
        assert "3 cells of 3 planned have a record" in body and 'id="going"' in body
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, ""), err
    finally:
        process.kill()
        process.wait()


@pytest.mark.chromium
def test_a_browser_loads_the_page_again_when_a_record_is_written(serve, folder, tmp_path, chromium):
    last, made = RECORDS[2], []
    (folder / "cells" / last.cell_id / "record.json").unlink()

    def render(folder: Path) -> str:
        made.append(len([*folder.glob("cells/*/record.json")]))
        return f"<!doctype html><title>x</title><body><p>{made[-1]} records</p></body>"

    server = serve(render)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             "--remote-debugging-port=0", "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([chromium, *flags, server.url], stderr=log)
    try:
        wait_for(lambda: made == [2])
        time.sleep(3 * POLL_SECONDS)
        assert made == [2], "nothing changed: nothing is loaded again"
        last.save(folder / "cells" / last.cell_id / "record.json")
        wait_for(lambda: made == [2, 3])
    finally:
        process.terminate()
        process.wait(20)
    assert "CONSOLE" not in (tmp_path / "log").read_text()


def wait_for(is_so: Callable[[], bool], seconds: float = 90.0) -> None:
    """Until it is so; TimeoutError when it never is."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.1)
