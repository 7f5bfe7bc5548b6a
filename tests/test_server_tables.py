"""The schema on both databases, against what the tables say; the audit log, which no statement can change; tokens."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError

from vramlab.crowd.server.accounts import authenticate, create_account, create_token, list_tokens, revoke_token
from vramlab.crowd.server.audit import broken_links, note
from vramlab.crowd.server.database import Database, file_system, newest_revision
from vramlab.crowd.server.settings import read_settings
from vramlab.crowd.server.tables import Account, Audit, Base, now
from vramlab.errors import EnvironmentUnable, WorkflowError

BOTH = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]


@pytest.fixture(params=BOTH)
def database(request, tmp_path):
    url = request.getfixturevalue("postgres").fresh() if request.param == "postgresql" else None
    database = Database(read_settings({}, data_dir=tmp_path / "data", database_url=url))
    database.migrate()
    yield database
    database.close()


def test_the_migrations_make_the_tables_that_the_code_names(database):
    with database.engine.connect() as connection:
        assert connection.dialect.name == database.settings.url.partition(":")[0].partition("+")[0]
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert context.get_current_revision() == newest_revision()
        assert compare_metadata(context, Base.metadata) == []
        connection.execute(text("DROP INDEX ix_bundle_archive_sha256"))
        assert compare_metadata(context, Base.metadata), "the comparison sees an index that is missing"


def test_migrating_again_changes_nothing(database):
    with database.write() as session:
        create_account(session, "ada", actor="test")
    database.migrate()
    with database.read() as session:
        assert [a.name for a in session.scalars(select(Account))] == ["ada"]


def test_a_moment_comes_back_as_it_went(database):
    moment = now()
    with database.write() as session:
        create_account(session, "ada", actor="test").created_at = moment
    with database.read() as session:
        assert session.scalar(select(Account)).created_at == moment


@pytest.mark.parametrize("statement", ["UPDATE audit SET actor = 'nobody'", "DELETE FROM audit", "DELETE FROM audit WHERE id = 2"])
def test_the_audit_log_cannot_be_changed(database, statement):
    with database.write() as session:
        for action in ("one", "two", "three"):
            note(session, actor="ada", action=action, subject="test", detail={"n": 1, "s": "é"})
    with pytest.raises(DBAPIError, match="append-only"), database.write() as session:
        session.execute(text(statement))
    with database.read() as session:
        rows = session.scalars(select(Audit).order_by(Audit.id)).all()
        assert [row.action for row in rows] == ["one", "two", "three"] and broken_links(rows) == []
        rows[1].actor = "eve"
        assert broken_links(rows) == [2]
        session.expunge_all()
        assert broken_links([rows[0], rows[2]]) == [3]


def test_a_write_that_fails_leaves_nothing(database):
    with pytest.raises(RuntimeError), database.write() as session:
        create_account(session, "ada", actor="test")
        raise RuntimeError
    with database.read() as session:
        assert session.scalars(select(Account)).all() == [] and session.scalars(select(Audit)).all() == []


def test_a_token_opens_until_it_is_revoked_or_has_expired(database):
    with database.write() as session:
        create_account(session, "ada", actor="test")
        shown, row = create_token(session, "ada", ("submit",), actor="test")
        short, _ = create_token(session, "ada", ("organise",), days=1, actor="test")
    _, public_id, secret = shown.split("_", 2)
    with database.read() as session:
        caller = authenticate(session, shown)
        assert (caller.account, caller.token, caller.may("submit"), caller.may("admin")) == ("ada", public_id, True, False)
        wrong = secret[:-1] + ("A" if secret[-1] != "A" else "B")
        for bad in ("", "x", shown + "x", f"vl_{public_id}_{wrong}", f"vl_{'0' * 16}_{secret}", f"vl_{public_id}_{row.secret_sha256}",
                    shown.upper(), f" {shown}", f"{shown}\0"):
            assert authenticate(session, bad) is None, bad
        assert authenticate(session, short) and authenticate(session, short, at=now() + timedelta(days=1, seconds=1)) is None
    with database.write() as session:
        revoke_token(session, public_id, actor="test")
        session.scalar(select(Account)).display_name = "Ada"
    with database.read() as session:
        assert authenticate(session, shown) is None
        session.get(Account, caller.account_id).disabled_at = now()
        session.flush()
        assert authenticate(session, short) is None


def test_no_secret_is_kept(database, tmp_path):
    with database.write() as session:
        create_account(session, "ada", actor="test")
        shown, _ = create_token(session, "ada", actor="test")
    secret = shown.split("_", 2)[2]
    with database.read() as session:
        told = [str(list(map(str, row))) for table in Base.metadata.sorted_tables for row in session.execute(select(table))]
        assert len(list_tokens(session)) == 1 and told and not [line for line in told if secret in line]
    database.close()
    assert not [p for p in (tmp_path / "data").rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]


@pytest.mark.parametrize("name", ["", "Ada", "a b", "-a", "a/../b", "a" * 65, "a\0", "å", "a'; DROP TABLE account;--"])
def test_what_is_no_account_name_is_refused(database, name):
    with pytest.raises(WorkflowError, match="is no account name"), database.write() as session:
        create_account(session, name, actor="test")


def test_a_database_that_does_not_answer_is_told(tmp_path):
    settings = read_settings({}, data_dir=tmp_path, database_url="postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(EnvironmentUnable, match="does not answer"):
        Database(settings).migrate()


def test_settings_come_from_words_then_the_environment_then_the_defaults(tmp_path):
    environment = {"VRAMLAB_SERVER_DATA_DIR": str(tmp_path), "VRAMLAB_SERVER_CHECK_SLOTS": "7", "PATH": "x"}
    assert read_settings(environment) == replace(read_settings({}), data_dir=tmp_path, check_slots=7)
    assert read_settings(environment, check_slots=3).check_slots == 3
    with pytest.raises(WorkflowError, match="'many' is no int"):
        read_settings({"VRAMLAB_SERVER_CHECK_SLOTS": "many"})
    with pytest.raises(WorkflowError, match="no such setting"):
        read_settings({"VRAMLAB_SERVER_CHECK_SLOT": "1"})
    with pytest.raises(WorkflowError, match="SQLite .* or PostgreSQL"):
        read_settings({}, database_url="mysql://x/y")


@pytest.mark.parametrize("kind, journal", [("ext4", "wal"), ("nfs4", "delete"), ("lustre", "delete"), ("", "wal")])
def test_on_a_file_system_that_machines_share_there_is_no_write_ahead_log(tmp_path, monkeypatch, kind, journal):
    monkeypatch.setattr("vramlab.crowd.server.database.file_system", lambda folder: kind)
    database = Database(read_settings({}, data_dir=tmp_path))
    with database.engine.connect() as connection:
        settings = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous", "foreign_keys")]
    database.close()
    assert settings == [journal, 2, 1]


def test_the_type_of_a_file_system_is_the_kernels(tmp_path):
    """Against what `stat` says of two that every Linux has."""
    import subprocess
    from pathlib import Path

    for folder in (tmp_path, Path("/proc")):
        told = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True).stdout.strip()
        if not told.startswith("UNKNOWN"):  # a file system that is younger than this `stat`
            assert file_system(folder)[:3] == told[:3], (file_system(folder), told)
