"""What is acknowledged stays: over kill -9 in the middle of submissions, and while the database comes and goes. Nothing is there twice."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from crowd_made import headers_of, measured, packed
from sqlalchemy import inspect, select

from vramlab.crowd import archive
from vramlab.crowd.server.accounts import create_account, create_token
from vramlab.crowd.server.audit import broken_links
from vramlab.crowd.server.database import Database
from vramlab.crowd.server.settings import read_settings
from vramlab.crowd.server.store import Store
from vramlab.crowd.server.tables import Audit, Base, Bundle, Result
from vramlab.crowd.signing import make_key

HERE = Path(__file__).parent
WEB = httpx.Client(timeout=60, verify=False)  # plain HTTP on loopback; a new one for every request would read certificates each time
BOTH = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]
ACCOUNTS, BUNDLES = 5, 4  # the load run of benchmarks/crowd_load.py has 64 and 50


class Process:
    """A server as a program of its own."""

    def __init__(self, data_dir: Path, url: str = "", rules: str = "wrapping") -> None:
        self.data_dir, self.url, self.rules = data_dir, url, rules
        self.start()

    def start(self) -> None:
        """Until it says where it is."""
        path = os.pathsep.join([str(HERE.parent), str(HERE)])
        words = [sys.executable, str(HERE / "crowd_server.py"), str(self.data_dir), *([self.url] if self.url else [])]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {
            "PYTHONPATH": path, "VRAMLAB_TESTS_RULES": self.rules})
        said = self.process.stdout.readline()
        assert "http://" in said, said
        self.base = "http://" + said.split("http://")[1].split()[0]

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, nothing is closed."""
        self.process.kill()
        self.process.wait(30)
        self.process.stdout.close()

    def end(self) -> int:
        """SIGTERM, as an administrator does; its exit code, which is the signal's once everything has been ended in order."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self.process.stdout.close()
        return code


def accounts_of(database: Database, count: int) -> list[str]:
    """Tokens of new accounts."""
    database.migrate()
    tokens = []
    with database.write() as session:
        for number in range(count):
            create_account(session, f"account-{number}", actor="test")
            tokens.append(create_token(session, f"account-{number}", actor="test")[0])
    return tokens


def make_bundles(folder: Path, accounts: int, each: int) -> list[tuple[int, str, bytes]]:
    """(account, name, archive), mixed up."""
    made, number = [], 0
    for account in range(accounts):
        key = make_key()
        for _ in range(each):
            number += 1
            record = measured(number, host=f"machine-{account}", gpu="V100", batch_size=number % 3 + 1)
            made.append((account, *packed(folder / f"of-{account}", [record], number, key=key)))
    random.Random(0).shuffle(made)
    return made


def submit(server: Process, token: str, body: bytes, until: float) -> int:
    """Send until it is acknowledged, as a client does: after a lost connection, and after 429 and 503 as long as Retry-After says."""
    while time.monotonic() < until:
        try:
            answer = WEB.post(f"{server.base}/api/v1/bundles", content=body, headers=headers_of(body, token))
        except httpx.TransportError:
            time.sleep(0.3)
            continue
        if answer.status_code in (429, 503):
            assert int(answer.headers["Retry-After"]) >= 1
            time.sleep(0.2)
            continue
        assert answer.status_code in (200, 201), answer.text
        return answer.status_code
    raise AssertionError("not acknowledged in time")


def check_collection(database: Database, data_dir: Path, wanted: list[tuple[int, str, bytes]], results_each: int = 1) -> None:
    """Every bundle once, its results once, its archive byte for byte; the audit log whole."""
    with database.read() as session:
        bundles = session.scalars(select(Bundle)).all()
        assert sorted(b.name for b in bundles) == sorted(name for _, name, _ in wanted)
        assert {b.name: b.account.name for b in bundles} == {name: f"account-{account}" for account, name, _ in wanted}
        assert len(session.scalars(select(Result)).all()) == results_each * len(wanted)
        assert {b.state for b in bundles} == {"checked"}
        by_name = {b.name: b for b in bundles}
        for _, name, body in wanted:
            assert Store(data_dir).path(by_name[name].archive_sha256).read_bytes() == body
        assert broken_links(session.scalars(select(Audit).order_by(Audit.id))) == []


@pytest.fixture(params=BOTH)
def place(request, tmp_path):
    """(data_dir, database's URL, database)"""
    url = request.getfixturevalue("postgres").fresh() if request.param == "postgresql" else ""
    database = Database(read_settings({}, data_dir=tmp_path / "data", database_url=url))
    yield tmp_path / "data", url, database
    database.close()


def test_many_submitters_at_once_lose_nothing_and_double_nothing(place, tmp_path):
    data_dir, url, database = place
    tokens, bundles = accounts_of(database, ACCOUNTS), make_bundles(tmp_path, ACCOUNTS, BUNDLES)
    server, until = Process(data_dir, url), time.monotonic() + 120
    try:
        with ThreadPoolExecutor(16) as pool:  # every bundle twice, as a client does that did not hear the answer
            codes = list(pool.map(lambda b: submit(server, tokens[b[0]], b[2], until), [*bundles, *bundles]))
    finally:
        code = server.end()
    assert (codes.count(201), codes.count(200), code) == (len(bundles), len(bundles), -signal.SIGTERM)
    check_collection(database, data_dir, bundles)


def test_a_killed_server_loses_nothing_that_it_acknowledged(place, tmp_path):
    data_dir, url, database = place
    tokens, bundles = accounts_of(database, ACCOUNTS), make_bundles(tmp_path, ACCOUNTS, BUNDLES)
    server, until = Process(data_dir, url), time.monotonic() + 180
    acknowledged: list[str] = []
    is_over = threading.Event()

    def send(bundle) -> None:
        submit(server, tokens[bundle[0]], bundle[2], until)
        acknowledged.append(bundle[1])

    def kill_now_and_then() -> None:
        for share in (0.2, 0.6):
            while len(acknowledged) < share * len(bundles) and not is_over.wait(0.01):
                pass
            server.kill()
            with database.read() as session:
                there = set(session.scalars(select(Bundle.name)))
            assert set(acknowledged) <= there, "acknowledged, and gone"
            server.start()

    try:
        with ThreadPoolExecutor(9) as pool:
            killer = pool.submit(kill_now_and_then)
            list(pool.map(send, bundles))
            is_over.set()
            killer.result()
    finally:
        server.kill()
    assert sorted(acknowledged) == sorted(name for _, name, _ in bundles)
    check_collection(database, data_dir, bundles)


@pytest.mark.slow
def test_a_server_that_is_killed_in_the_middle_of_a_body_has_nothing_of_it(place, tmp_path):
    """Half a body is on its way when the server dies. What was acknowledged stays, and the whole body is taken afterwards."""
    data_dir, url, database = place
    tokens, bundles = accounts_of(database, 1), make_bundles(tmp_path, 1, 2)
    server, until = Process(data_dir, url), time.monotonic() + 60
    try:
        assert submit(server, tokens[0], bundles[0][2], until) == 201
        body = bundles[1][2]
        with socket.create_connection(("127.0.0.1", int(server.base.rpartition(":")[2]))) as line:
            head = "".join(f"{name}: {value}\r\n" for name, value in headers_of(body, tokens[0]).items())
            line.sendall(f"POST /api/v1/bundles HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode())
            line.sendall(body[:len(body) // 2])
            while not list((data_dir / "incoming").glob("*.body")):
                assert time.monotonic() < until
                time.sleep(0.01)
            server.kill()
        check_collection(database, data_dir, bundles[:1])
        server.start()
        left, = (data_dir / "incoming").glob("*.body")
        assert submit(server, tokens[0], body, until) == 201
        os.utime(left, (0, 0))  # an hour later
        server.kill()
        server.start()
        assert not list((data_dir / "incoming").iterdir())
    finally:
        server.kill()
    check_collection(database, data_dir, bundles)


_DIES = """
import os, signal, sys
from pathlib import Path
from sqlalchemy import event
from vramlab.crowd.server.database import Database
from vramlab.crowd.server.settings import read_settings

database, left = Database(read_settings({}, data_dir=Path(sys.argv[1]), database_url=sys.argv[2])), [int(sys.argv[3])]


@event.listens_for(database.engine, "after_cursor_execute")
def die(*what):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)


database.migrate()
print("migrated")
"""


@pytest.mark.parametrize("statement", [3, 40])
@pytest.mark.parametrize("kind", BOTH)
def test_a_migration_that_is_killed_is_made_whole_by_the_next_start(request, tmp_path, kind, statement):
    """By kill -9 after so many of its statements: the schema is the old one or the new one, never half of one."""
    url = request.getfixturevalue("postgres").fresh() if kind == "postgresql" else ""
    words = [sys.executable, "-c", _DIES, str(tmp_path), url, str(statement)]
    died = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(HERE.parent)}, capture_output=True, text=True, timeout=60)
    assert died.returncode == -signal.SIGKILL, died.stdout + died.stderr
    database = Database(read_settings({}, data_dir=tmp_path, database_url=url))
    try:
        with database.engine.connect() as connection:
            assert "account" not in inspect(connection).get_table_names(), "of a step that did not end nothing is there"
        tokens = accounts_of(database, 1)
        with database.engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == [] and tokens
    finally:
        database.close()


def test_a_row_without_its_archive_never_shows(place, tmp_path):
    """Negative control of the check above: it sees an archive that is missing, and a bundle that is there twice."""
    data_dir, url, database = place
    tokens, bundles = accounts_of(database, 1), make_bundles(tmp_path, 1, 2)
    server = Process(data_dir, url)
    try:
        for _, _, body in bundles:
            submit(server, tokens[0], body, time.monotonic() + 60)
    finally:
        server.kill()
    check_collection(database, data_dir, bundles)
    with pytest.raises(AssertionError):
        check_collection(database, data_dir, bundles[:1])
    next((data_dir / "bundles").rglob("*.gz")).unlink()
    with pytest.raises(FileNotFoundError):
        check_collection(database, data_dir, bundles)


@pytest.mark.postgres
def test_while_the_database_is_away_the_server_says_so_and_the_client_comes_through(postgres, tmp_path):
    url, data_dir = postgres.fresh(), tmp_path / "data"
    database = Database(read_settings({}, data_dir=data_dir, database_url=url))
    tokens, bundles = accounts_of(database, 1), make_bundles(tmp_path, 1, 4)
    server = Process(data_dir, url)
    try:
        submit(server, tokens[0], bundles[0][2], time.monotonic() + 60)
        postgres.stop()
        try:
            answers = [WEB.get(f"{server.base}/api/v1/{path}") for path in ("health", "results", "bundles")]
            _, _, body = bundles[1]
            answers.append(WEB.post(f"{server.base}/api/v1/bundles", content=body, headers=headers_of(body, tokens[0])))
            assert [a.status_code for a in answers] == [503] * 4
            assert all(int(a.headers["Retry-After"]) >= 1 and "postgresql" not in a.text and "SELECT" not in a.text for a in answers)
            with ThreadPoolExecutor(3) as pool:
                waiting = [pool.submit(submit, server, tokens[0], body, time.monotonic() + 120) for _, _, body in bundles[1:]]
                time.sleep(0.5)
                assert not any(w.done() for w in waiting)
                postgres.start()
                assert [w.result() for w in waiting] == [201] * 3
        finally:
            if postgres.process.poll() is not None:
                postgres.start()
        assert WEB.get(f"{server.base}/api/v1/health").status_code == 200
    finally:
        server.kill()
    check_collection(database, data_dir, bundles)
    database.close()


@pytest.mark.slow
def test_what_there_was_no_time_to_check_is_checked_afterwards(tmp_path):
    """A slot that is taken: the bundle is acknowledged as received, and checked by the next server that runs; one that fails is flagged."""
    import tarfile
    from io import BytesIO

    from crowd_made import served

    with served(tmp_path, check_wait_seconds=0.05, check_slots=1) as server:
        server.web.app.state.intake._slots.acquire()
        good = server.submit("ada", measured(1, gpu="V100"))
        assert good["state"] == "received" and server.get("results", include_unverified=True)["results"] == []
        assert [b["name"] for b in server.get("bundles", include_unverified=True)["bundles"]] == [good["bundle"]]
        name, body = packed(tmp_path / "bad", [measured(2, gpu="V100")], key=server.keys["ada"])
        with tarfile.open(fileobj=BytesIO(body), mode="r:gz") as tar:
            files = {e.name: tar.extractfile(e).read() for e in tar}
        record = next(n for n in files if n.endswith("record.json"))
        (tmp_path / "spoilt" / name).mkdir(parents=True)
        for path, data in files.items():
            target = tmp_path / "spoilt" / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data + b"\n" if path == record else data)
        assert server.post("ada", archive.pack(tmp_path / "spoilt" / name)).json()["state"] == "received"
    from crowd_made import TestClient, create_app, wrapping_only

    with TestClient(create_app(server.settings, wrapping_only)) as again:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            found = {b: again.get(f"/api/v1/bundles/{b}").json()["state"] for b in (good["bundle"], name)}
            if "received" not in found.values():
                break
            time.sleep(0.05)
        assert found == {good["bundle"]: "checked", name: "flagged"}
        assert [r["bundle"] for r in again.get("/api/v1/results").json()["results"]] == [good["bundle"]]
        assert [f["rule"] for f in again.get(f"/api/v1/bundles/{name}").json()["findings"]] == ["files"]


def test_a_bundle_that_cannot_be_checked_holds_up_no_other(tmp_path):
    """Its archive is lost: it stays received, and what came after it is checked."""
    from crowd_made import served

    with served(tmp_path, check_wait_seconds=0.0, check_slots=1) as server:
        intake = server.web.app.state.intake
        intake._slots.acquire()
        names = [server.submit("ada", measured(number, gpu="V100", budget=f"{number}%"))["bundle"] for number in (1, 2)]
        with server.database.read() as session:
            lost = session.scalar(select(Bundle.archive_sha256).where(Bundle.name == names[0]))
        server.web.app.state.store.path(lost).unlink()
        intake._slots.release()
        until = time.monotonic() + 30
        while time.monotonic() < until and server.get(f"bundles/{names[1]}")["state"] == "received":
            time.sleep(0.05)
        assert [server.get(f"bundles/{name}")["state"] for name in names] == ["received", "checked"]


def test_archives_that_no_bundle_has_go_after_a_day(tmp_path):
    from crowd_made import served

    with served(tmp_path) as server:
        bundle = server.submit("ada", measured(1))["bundle"]
        kept = next((server.settings.data_dir / "bundles").rglob("*.gz"))
        for name, age in (("a" * 64, 90_000), ("b" * 64, 3600)):
            path = server.web.app.state.store.path(name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"left")
            os.utime(path, (time.time() - age, time.time() - age))
        os.utime(kept, (0, 0))
        server.web.app.state.intake.sweep()
        assert {p.name[0] for p in (server.settings.data_dir / "bundles").rglob("*.gz")} == {"b", kept.name[0]} and bundle


def test_those_who_look_are_answered_while_many_submissions_wait(tmp_path):
    """Every slot is taken and thirty bundles wait: a look is answered at once, and in the end all bundles are there."""
    from crowd_made import served

    with served(tmp_path, check_slots=1, check_wait_seconds=3.0) as server:
        bundles = make_bundles(tmp_path / "made", 1, 30)
        slots = server.web.app.state.intake._slots
        slots.acquire()
        with ThreadPoolExecutor(30) as pool:
            waiting = [pool.submit(server.post, "ada", body) for _, _, body in bundles]
            time.sleep(0.5)
            started = time.monotonic()
            assert server.get("results")["results"] == [] and not any(w.done() for w in waiting)
            assert time.monotonic() - started < 2.0
            slots.release()
            assert {w.result().status_code for w in waiting} == {201}
        until = time.monotonic() + 60
        while time.monotonic() < until and server.get("health")["states"].get("checked", 0) + server.get("health")["states"].get(
                "reproduced", 0) + server.get("health")["states"].get("repeated", 0) < 30:
            time.sleep(0.1)
        assert len(server.get("bundles", state="checked")["bundles"]) == 30
