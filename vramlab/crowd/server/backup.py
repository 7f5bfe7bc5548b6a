"""The whole server as one file, and back: rows, archives, keys. Between SQLite and PostgreSQL too.

A .tar: `tables/<table>.jsonl`, `bundles/...`, `keys/...` and, last, `backup.json` with the SHA-256 of every other member. It holds the
server's private key, so only its owner can read it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Iterator, Mapping

from sqlalchemy import Connection, DateTime, MetaData, Table, func, inspect, insert, select, text

from vramlab import __version__
from vramlab.crowd.server.database import Database, migrate
from vramlab.crowd.server.settings import Settings
from vramlab.crowd.server.store import Store, sync_folder
from vramlab.crowd.server.tables import Base
from vramlab.errors import EnvironmentUnable, WorkflowError

FORMAT_VERSION = 1
INDEX_FILE = "backup.json"
_AT_A_TIME = 500  # rows of one statement
_TABLES = [table.name for table in Base.metadata.sorted_tables]  # referenced ones first


def backup(settings: Settings, file: Path) -> dict[str, int]:
    """Write the backup and return table -> rows. The server may run meanwhile: the rows are of one moment, their archives there by then.

    WorkflowError when there is such a file already. The file appears whole or not at all.
    """
    if file.exists():
        raise WorkflowError(f"{file} is there already")
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
            with tarfile.open(fileobj=f, mode="w") as tar:
                counts = _write(settings, tar)
            f.flush()
            os.fsync(f.fileno())
        os.rename(part, file)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(file.resolve().parent)
    return counts


def _write(settings: Settings, tar: tarfile.TarFile) -> dict[str, int]:
    hashes: dict[str, str] = {}
    counts: dict[str, int] = {}

    def add(name: str, data: bytes) -> None:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(data), 0o600
        tar.addfile(entry, io.BytesIO(data))
        hashes[name] = hashlib.sha256(data).hexdigest()

    database = Database(settings)
    try:
        engine = database.engine if settings.is_sqlite else database.engine.execution_options(isolation_level="REPEATABLE READ")
        with engine.connect() as connection:
            revision = _revision(connection)
            for name in _TABLES:
                rows = list(_rows(connection, name))
                counts[name] = len(rows)
                add(f"tables/{name}.jsonl", "".join(f"{json.dumps(row, sort_keys=True)}\n" for row in rows).encode())
            archives = sorted(set(connection.scalars(select(Base.metadata.tables["bundle"].c.archive_sha256))))
    finally:
        database.close()
    store = Store(settings.data_dir)
    for sha256 in archives:
        add(store.path(sha256).relative_to(settings.data_dir).as_posix(), store.path(sha256).read_bytes())
    for path in sorted((settings.data_dir / "keys").glob("[!.]*")):
        add(f"keys/{path.name}", path.read_bytes())
    index = {"format": FORMAT_VERSION, "vramlab": __version__, "revision": revision, "made_at": datetime.now(UTC).isoformat(),
             "rows": counts, "sha256": dict(hashes)}
    add(INDEX_FILE, json.dumps(index, indent=1, sort_keys=True).encode())
    return counts


def _revision(connection: Connection) -> str:
    """The step that a database is at. EnvironmentUnable when it holds no collection."""
    if "alembic_version" not in inspect(connection).get_table_names():
        raise EnvironmentUnable("this database holds no collection: 'vramlab serve' makes one")
    return str(connection.scalar(text("SELECT version_num FROM alembic_version")))


def _rows(connection: Connection, name: str) -> Iterator[dict[str, Any]]:
    table = _reflected(connection, name)
    for row in connection.execute(select(table).order_by(table.c.id)).mappings():
        yield {key: _told(value) for key, value in row.items()}


def _reflected(connection: Connection, name: str) -> Table:
    """The table as the database has it: a backup of an older step has older columns."""
    return Table(name, MetaData(), autoload_with=connection, resolve_fks=False)


def _told(value: Any) -> Any:
    if isinstance(value, datetime):
        return (value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)).isoformat()
    return value


def restore(settings: Settings, file: Path) -> dict[str, int]:
    """Fill an empty database and an empty data_dir from a backup, and bring the schema to the newest step. Returns table -> rows.

    WorkflowError when the file is no whole backup, or when there is something already; then nothing is changed.
    """
    index = _verified(file)
    if settings.data_dir.exists() and any(path.is_file() for name in ("bundles", "keys") for path in (settings.data_dir / name).rglob("*")):
        raise WorkflowError(f"{settings.data_dir} holds a collection already; a backup is restored into an empty place")
    database = Database(settings)
    try:
        with database.engine.execution_options(vramlab_writes=True).begin() as connection:
            _check_empty(connection)
            migrate(connection, index["revision"])
            with tarfile.open(file, "r") as tar:
                for name in _TABLES:
                    if f"tables/{name}.jsonl" in index["sha256"]:
                        _fill(connection, name, _member(tar, f"tables/{name}.jsonl"))
                _place_files(tar, index, settings.data_dir)
            migrate(connection)
    finally:
        database.close()
    return dict(index["rows"])


def _verified(file: Path) -> Mapping[str, Any]:
    """The index of a backup whose members are all there, unchanged and no others."""
    try:
        with tarfile.open(file, "r") as tar:
            names = tar.getnames()
            index = json.loads(_member(tar, INDEX_FILE))
            changed = [name for name, sha256 in index["sha256"].items() if hashlib.sha256(_member(tar, name)).hexdigest() != sha256]
    except (tarfile.TarError, KeyError, ValueError, OSError, TypeError) as error:
        why = "it is no tar archive" if isinstance(error, tarfile.ReadError) else error  # tarfile tells of each compression, on five lines
        raise WorkflowError(f"{file} is no whole backup: {why}") from error
    if changed or sorted(names) != sorted([*index["sha256"], INDEX_FILE]):
        raise WorkflowError(f"{file} is no whole backup: {', '.join(changed[:3]) or 'its list of members'} has changed")
    if index["format"] != FORMAT_VERSION:
        raise WorkflowError(f"{file} is a backup of format {index['format']}; this vramlab reads {FORMAT_VERSION}")
    return index


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    entry = tar.getmember(name)
    if not entry.isreg() or name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name} is no plain file of a backup")
    return tar.extractfile(entry).read()


def _check_empty(connection: Connection) -> None:
    there = set(inspect(connection).get_table_names())
    if full := [n for n in _TABLES if n in there and connection.scalar(select(func.count()).select_from(Base.metadata.tables[n]))]:
        raise WorkflowError(f"the database holds rows already ({', '.join(full)}); a backup is restored into an empty one")


def _fill(connection: Connection, name: str, lines: bytes) -> None:
    table = _reflected(connection, name)
    moments = [column.name for column in table.columns if isinstance(column.type, DateTime)]
    rows = [json.loads(line) for line in lines.splitlines()]
    for row in rows:
        for key in moments:
            row[key] = _read_moment(row[key], connection.dialect.name == "sqlite")
    for start in range(0, len(rows), _AT_A_TIME):
        connection.execute(insert(table), rows[start:start + _AT_A_TIME])
    if rows and connection.dialect.name == "postgresql":
        sequence = connection.scalar(text("SELECT pg_get_serial_sequence(:table, 'id')"), {"table": name})
        if sequence:
            connection.execute(text("SELECT setval(:sequence, :last)"), {"sequence": sequence, "last": max(row["id"] for row in rows)})


def _read_moment(words: str | None, is_naive: bool) -> datetime | None:
    moment = None if words is None else datetime.fromisoformat(words).astimezone(UTC)
    return moment.replace(tzinfo=None) if moment and is_naive else moment


def _place_files(tar: tarfile.TarFile, index: Mapping[str, Any], data_dir: Path) -> None:
    for name in index["sha256"]:
        if name.startswith("tables/"):
            continue
        path = data_dir / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
            f.write(_member(tar, name))
            f.flush()
            os.fsync(f.fileno())
        sync_folder(path.parent)


