"""The engine, its sessions, and the way to the newest schema. SQLite in WAL mode, or PostgreSQL."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

from alembic.config import Config
from alembic import command
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, OperationalError, TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from vramlab.crowd.server.settings import Settings
from vramlab.errors import EnvironmentUnable

MIGRATIONS = Path(__file__).with_name("migrations")
BUSY_SECONDS = 30
CONNECTIONS = 16  # at a time; a request that finds none waits, then is told to come again
# Write-ahead logs of SQLite break on file systems that are shared between machines.
_SHARED_FILE_SYSTEMS = frozenset("nfs nfs4 cifs smb3 smbfs lustre gpfs beegfs ceph glusterfs fuse.sshfs fuse.glusterfs 9p".split())
# Of PostgreSQL's advisory locks: two servers that start together migrate one after the other, and one change is made at a time.
_MIGRATION_LOCK, _WRITE_LOCK = 0x76726D6C, 0x76726D77


class Database:
    """Sessions of one database. `read()` for looking, `write()` for one whole change."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine = make_engine(settings)
        # SQLite has one writer at a time. Its own way of waiting is to sleep and try again, which starves some; a lock is fair.
        self._writer = threading.Lock() if settings.is_sqlite else None

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session for looking; nothing of it is kept. Its rows can be read after the block, as far as they were loaded."""
        with Session(self.engine, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session that is committed whole when the block ends well, and rolled back otherwise. On disk when it returns.

        One change at a time, on PostgreSQL too: counts, agreements and the audit log hang on what is there already. What takes long (a
        body, a check) is done before.
        """
        if self._writer:
            with self._writer, self._begin() as session:
                yield session
        else:
            with self._begin() as session:
                yield session

    @contextmanager
    def _begin(self) -> Iterator[Session]:
        with Session(self.engine.execution_options(vramlab_writes=True), expire_on_commit=False) as session, session.begin():
            if not self.settings.is_sqlite:
                session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _WRITE_LOCK})
            yield session

    def migrate(self) -> None:
        """Bring the schema to the newest step. EnvironmentUnable when the database does not answer."""
        try:
            with self.engine.execution_options(vramlab_writes=True).begin() as connection:
                migrate(connection)
        except OperationalError as error:
            raise EnvironmentUnable(f"the database does not answer: {error.orig}") from error

    def close(self) -> None:
        """Give all connections back."""
        self.engine.dispose()


def is_away(error: Exception) -> bool:
    """Whether an error means that the database cannot be reached or is too busy, rather than that a statement is wrong."""
    if isinstance(error, PoolTimeout):
        return True
    return isinstance(error, DBAPIError) and (error.connection_invalidated or isinstance(error, OperationalError))


def make_engine(settings: Settings) -> Engine:
    """The engine for a server's settings."""
    if not settings.is_sqlite:
        options = {"connect_timeout": 5, "options": "-c statement_timeout=30000 -c lock_timeout=20000", "application_name": "vramlab"}
        return create_engine(settings.url, pool_size=CONNECTIONS, max_overflow=0, pool_timeout=20, pool_pre_ping=True,
                             connect_args=options)
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    engine = create_engine(settings.url, pool_size=CONNECTIONS, max_overflow=0, pool_timeout=20, connect_args={"timeout": BUSY_SECONDS})
    journal = "DELETE" if file_system(settings.data_dir) in _SHARED_FILE_SYSTEMS else "WAL"
    event.listen(engine, "connect", lambda connection, _: _set_up_sqlite(connection, journal))
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, journal: str) -> None:
    connection.isolation_level = None  # the driver's own BEGIN comes too late: a read that turns into a write then fails at once
    for setting in (f"journal_mode={journal}", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {setting}")


def _begin_sqlite(connection: Connection) -> None:
    is_writer = connection.get_execution_options().get("vramlab_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writer else "BEGIN")


def file_system(folder: Path) -> str:
    """The type of the file system that a folder lies on, "" where the kernel does not say."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    place = str(folder.resolve())
    for line in mounts:
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ")
        if (place + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def migrate(connection: Connection, revision: str = "head") -> None:
    """Run the steps up to `revision` on this connection; the caller's transaction holds them all."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
    command.upgrade(_configuration(connection), revision)


def newest_revision() -> str:
    """The last step's name."""
    from alembic.script import ScriptDirectory

    head = ScriptDirectory.from_config(_configuration(None)).get_current_head()
    assert head, "there is at least one step"
    return head


def _configuration(connection: Connection | None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
