"""serve, and what an administrator does on the server's own machine: accounts, tokens, backups."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Iterator, Mapping, Sequence

from vramlab.cli.words import print_json, table
from vramlab.counted import count_of
from vramlab.errors import EnvironmentUnable

if TYPE_CHECKING:
    from vramlab.crowd.server.database import Database
    from vramlab.crowd.server.settings import Settings

ACTOR = "command line"  # in the audit log: whoever can read the data folder
_NEEDED = ("alembic", "fastapi", "sqlalchemy", "uvicorn", "python_multipart")


def _settings(data_dir: Path | None, database_url: str | None, **given: float | None) -> Settings:
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise EnvironmentUnable(f"a server needs more packages ({', '.join(missing)}): pip install 'vramlab[server]'")
    from vramlab.crowd.server.settings import read_settings

    return read_settings(data_dir=data_dir, database_url=database_url, **given)


@contextmanager
def _open(data_dir: Path | None, database_url: str | None, *, may_make: bool = False) -> Iterator[Database]:
    """The database at its newest schema. Where none is, `may_make` begins one; a misspelt --data-dir shall not."""
    from vramlab.crowd.server.database import Database
    from vramlab.crowd.server.settings import SQLITE_FILE

    settings = _settings(data_dir, database_url)
    if not may_make and not settings.database_url and not (settings.data_dir / SQLITE_FILE).exists():
        raise EnvironmentUnable(f"there is no collection in {settings.data_dir}: `serve` and `server account create` begin one there")
    database = Database(settings)
    try:
        database.migrate()
        yield database
    finally:
        database.close()


def serve(host: str, port: int, data_dir: Path | None, database_url: str | None, replan_seconds: float | None) -> int:
    """Answer until Ctrl-C."""
    settings = _settings(data_dir, database_url, replan_seconds=replan_seconds)
    from vramlab.crowd.server.run import serve as run

    run(settings, host, port)
    return 0


def create_account(name: str, display_name: str, affiliation: str, data_dir: Path | None, database_url: str | None) -> int:
    """A new account."""
    with _open(data_dir, database_url, may_make=True) as database, database.write() as session:
        from vramlab.crowd.server import accounts

        accounts.create_account(session, name, display_name=display_name, affiliation=affiliation, actor=ACTOR)
    print(f"account {name}")
    return 0


def list_accounts(data_dir: Path | None, database_url: str | None, *, as_json: bool) -> int:
    """Every account with its results."""
    with _open(data_dir, database_url) as database, database.read() as session:
        from vramlab.crowd.server import accounts

        rows = [{"name": a.name, "display_name": a.display_name, "affiliation": a.affiliation, "created_at": a.created_at.isoformat(),
                 "bundles": bundles} for a, bundles in accounts.list_accounts(session)]
    _show(rows, as_json)
    return 0


def disable_account(name: str, data_dir: Path | None, database_url: str | None) -> int:
    """End all of an account's tokens."""
    with _open(data_dir, database_url) as database, database.write() as session:
        from vramlab.crowd.server import accounts

        accounts.disable_account(session, name, actor=ACTOR)
    print(f"account {name} is disabled; what it has submitted stays")
    return 0


def revoke_key(key_id: str, data_dir: Path | None, database_url: str | None) -> int:
    """Take nothing more that a key signs."""
    with _open(data_dir, database_url) as database, database.write() as session:
        from vramlab.crowd.server import accounts

        accounts.revoke_key(session, key_id, actor=ACTOR)
    print(f"key {key_id} is revoked; what it has signed stays")
    return 0


def create_token(account: str, scopes: Sequence[str], label: str, days: float | None, data_dir: Path | None,
                 database_url: str | None) -> int:
    """A new token, which is printed this once."""
    with _open(data_dir, database_url) as database, database.write() as session:
        from vramlab.crowd.server import accounts

        shown, _ = accounts.create_token(session, account, tuple(scopes) or ("submit",), label=label, days=days, actor=ACTOR)
    print(shown)
    return 0


def list_tokens(data_dir: Path | None, database_url: str | None, *, as_json: bool) -> int:
    """Every token without its secret, which nobody keeps."""
    with _open(data_dir, database_url) as database, database.read() as session:
        from vramlab.crowd.server import accounts

        rows = [{"id": t.public_id, "account": t.account.name, "scopes": t.scopes, "label": t.label, "created_at": t.created_at.isoformat(),
                 "expires_at": t.expires_at and t.expires_at.isoformat(), "revoked_at": t.revoked_at and t.revoked_at.isoformat()}
                for t in accounts.list_tokens(session)]
    _show(rows, as_json)
    return 0


def revoke_token(public_id: str, data_dir: Path | None, database_url: str | None) -> int:
    """End a token at once."""
    with _open(data_dir, database_url) as database, database.write() as session:
        from vramlab.crowd.server import accounts

        accounts.revoke_token(session, public_id, actor=ACTOR)
    print(f"token {public_id} is revoked")
    return 0


def back_up(file: Path, data_dir: Path | None, database_url: str | None) -> int:
    """The whole server into one file."""
    settings = _settings(data_dir, database_url)
    from vramlab.crowd.server.backup import backup

    counts = backup(settings, file)
    print(f"{file}: {_held(counts)}. It holds the server's private key: keep it to yourself.")
    return 0


def restore(file: Path, data_dir: Path | None, database_url: str | None) -> int:
    """The whole server from one file, into an empty place."""
    settings = _settings(data_dir, database_url)
    from vramlab.crowd.server.backup import restore as fill

    counts = fill(settings, file)
    print(f"restored: {_held(counts)}")
    return 0


def _held(counts: Mapping[str, int]) -> str:
    return f"{count_of(counts['bundle'], 'bundle')} with {count_of(counts['result'], 'result')}"


def _show(rows: Sequence[dict], as_json: bool) -> None:
    if as_json:
        print_json(list(rows))
    elif rows:
        print(table(list(rows[0]), [["" if value is None else str(value) for value in row.values()] for row in rows]))
