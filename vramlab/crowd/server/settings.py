"""How one server is set up: from the command line and from VRAMLAB_SERVER_*, read once; no other module reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Mapping

from vramlab.errors import WorkflowError

SQLITE_FILE = "collection.sqlite"  # in data_dir, without another database
PREFIX = "VRAMLAB_SERVER_"
KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One server. Every field can be given as VRAMLAB_SERVER_<FIELD>."""

    data_dir: Path  # archives, the server's key and, without a database_url, the database
    database_url: str = ""  # postgresql://user:password@host/name; "" for SQLite in data_dir
    title: str = "vramlab results"
    public_url: str = ""  # https://results.example.org; "" where the address of the request will do

    max_archive_bytes: int = 10 * MIB  # of one bundle's body; a longer one is cut off while it is read
    max_json_bytes: int = 64 * KIB  # of any other body
    bundles_per_minute: int = 120  # of one account
    bundles_per_day: int = 2000  # of one account
    bytes_per_day: int = 2 * GIB  # of one account
    requests_per_minute: int = 1200  # of one address, without a token
    failures_per_minute: int = 10  # wrong tokens of one address; then it is refused until they are forgotten

    check_slots: int = 2  # bundles that are checked at a time
    check_wait_seconds: float = 20.0  # a bundle that waited so long is acknowledged as received and checked afterwards
    replan_seconds: float = 0.0  # for each cell, in which its method plans again, after the bundle is acknowledged; 0: none is
    body_seconds: float = 120.0  # a body that takes longer is cut off

    # The declared tolerance: two results agree when they differ by no more.
    peak_tolerance_share: float = 0.005  # of a measured peak, as everywhere in vramlab ...
    peak_tolerance_bytes: int = MIB  # ... or this, the larger
    ratio_tolerance_share: float = 0.10  # of the ratio of step times to eager's
    largest_tolerance_share: float = 0.02  # of the largest batch that fits

    @property
    def url(self) -> str:
        """The database's URL as SQLAlchemy reads it: psycopg 3 for PostgreSQL, a file in data_dir without one."""
        if not self.database_url:
            return f"sqlite:///{self.data_dir / SQLITE_FILE}"
        scheme, _, rest = self.database_url.partition("://")
        return f"postgresql+psycopg://{rest}" if scheme in ("postgres", "postgresql") else self.database_url

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is one file."""
        return self.url.startswith("sqlite:")


def read_settings(environment: Mapping[str, str] = os.environ, **given: Any) -> Settings:
    """Settings from `given` (None: not given), then the environment, then the defaults. WorkflowError names what cannot be read."""
    values: dict[str, Any] = {}
    for field in fields(Settings):
        text = environment.get(PREFIX + field.name.upper())
        if given.get(field.name) is not None:
            values[field.name] = given[field.name]
        elif text is not None:
            values[field.name] = _read(field.name, text, field.type)
    if unknown := [name for name in environment if name.startswith(PREFIX) and name[len(PREFIX):].lower() not in _names()]:
        raise WorkflowError(f"{', '.join(sorted(unknown))}: no such setting; there are {', '.join(PREFIX + n.upper() for n in _names())}")
    settings = Settings(**{"data_dir": Path("vramlab-server"), **values})
    if settings.url.partition("://")[0] not in ("sqlite", "postgresql+psycopg"):
        raise WorkflowError("a database is SQLite (no URL at all) or PostgreSQL (postgresql://user:password@host/name)")
    _refuse_what_is_no_folder(settings.data_dir)
    return settings


def _refuse_what_is_no_folder(data_dir: Path) -> None:
    nearest = next((path for path in (data_dir, *data_dir.parents) if os.path.lexists(path)), None)
    if nearest is not None and not nearest.is_dir():
        raise WorkflowError(f"--data-dir {data_dir}: {nearest} is no folder; a server wants a folder of its own for its archives, keys and "
                            "database, and makes one where there is none")


def _names() -> list[str]:
    return [field.name for field in fields(Settings)]


def _read(name: str, text: str, kind: Any) -> Any:
    try:
        return {"int": int, "float": float, "Path": Path}.get(str(kind), str)(text)
    except ValueError:
        raise WorkflowError(f"{PREFIX}{name.upper()}={text!r} is no {kind}") from None
