"""A real PostgreSQL for tests: one server a test session on a loopback port of its own, one fresh database a test.

PostgreSQL refuses to run as root; under root it is started as the user `postgres` where there is one, else as `nobody`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from conftest import find_postgres

START_SECONDS = 60


class Postgres:
    """A server in a folder that goes when it is closed. `stop` and `start` are what a test of faults calls."""

    def __init__(self) -> None:
        binaries = find_postgres()
        assert binaries, "mark this test `postgres`: there is none here"
        self.binaries = binaries
        self.folder = Path(tempfile.mkdtemp(prefix="vramlab-postgres-"))
        self.port = _free_port()
        self._user = _unprivileged()
        if self._user:
            os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
        self.process: subprocess.Popen | None = None
        self._count = 0
        done = self._call("initdb", "-D", str(self.folder / "data"), "-U", "tester", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")
        assert done.returncode == 0, done.stderr
        self.start()

    def _drop(self) -> dict:
        if not self._user:
            return {}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}

    def _call(self, name: str, *words: str) -> subprocess.CompletedProcess:
        return subprocess.run([str(self.binaries / name), *words], capture_output=True, text=True, timeout=START_SECONDS,
                              cwd=self.folder, **self._drop())

    def start(self) -> None:
        """Until it answers. Without fsync: the machine does not lose power here."""
        log = open(self.folder / "log", "ab")
        words = ["-D", str(self.folder / "data"), "-p", str(self.port), "-h", "127.0.0.1", "-k", str(self.folder), "-F",
                 "-c", "max_connections=200", "-c", "shared_buffers=64MB"]
        self.process = subprocess.Popen([str(self.binaries / "postgres"), *words], stdout=log, stderr=log, cwd=self.folder, **self._drop())
        log.close()
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url("postgres"), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self) -> None:
        """At once: connections are cut."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(30)

    def close(self) -> None:
        """Stop, and leave nothing behind."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database: str) -> str:
        """As `vramlab serve --database` takes it."""
        return f"postgresql://tester@127.0.0.1:{self.port}/{database}"

    def fresh(self) -> str:
        """The URL of a new, empty database."""
        import psycopg

        self._count += 1
        name = f"test_{self._count}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)


def _unprivileged() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    return names.get("postgres") or names["nobody"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
