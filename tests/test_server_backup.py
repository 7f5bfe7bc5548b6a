"""A backup restored is the same server: every row, archive and key, from either database into either. And the administrator's commands."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import httpx
import pytest
from alembic import command
from crowd_made import create_app, measured, packed, served, wrapping_only
from fastapi.testclient import TestClient
from sqlalchemy import DateTime, select

from vramlab.cli import main
from vramlab.crowd.server.backup import backup, restore
from vramlab.crowd.server.database import Database, _configuration
from vramlab.crowd.server.intake import DAY
from vramlab.crowd.server.settings import Settings, read_settings
from vramlab.crowd.server.tables import Base, Competition, now
from vramlab.errors import WorkflowError

ROOT = Path(__file__).parent.parent
KINDS = [("sqlite", "sqlite"), *(pytest.param(*pair, marks=pytest.mark.postgres)
                                 for pair in (("sqlite", "postgresql"), ("postgresql", "sqlite"), ("postgresql", "postgresql")))]


def rows_of(settings: Settings) -> dict[str, list]:
    """Every row of every table, as Python reads it."""
    database = Database(settings)
    with database.read() as session:
        rows = {t.name: [tuple(row) for row in session.execute(select(t).order_by(t.c.id))] for t in Base.metadata.sorted_tables}
    database.close()
    return rows


def files_of(settings: Settings) -> dict[str, bytes]:
    folders = (settings.data_dir / "bundles", settings.data_dir / "keys")
    return {p.relative_to(settings.data_dir).as_posix(): p.read_bytes() for folder in folders for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def place(request):
    """Settings of a new place of a kind."""
    def make(kind: str, folder: Path) -> Settings:
        url = request.getfixturevalue("postgres").fresh() if kind == "postgresql" else None
        return read_settings({}, data_dir=folder, database_url=url)
    return make


def fill(settings: Settings, folder: Path):
    """A server with something in every state."""
    with served(folder, settings.database_url or None) as server:
        first = server.submit("ada", measured(1, host="one", gpu="V100"))["bundle"]
        server.submit("bob", measured(2, host="two", gpu="V100"))
        gone = server.submit("ada", measured(3, budget="50%"))["bundle"]
        server.say("ada", f"bundles/{gone}/withdraw", reason="é 'quoted' \\ wrong")
        server.submit("chris", measured(4, budget="40%"), supersedes=first)
        return server.settings, server.keys, server.tokens


@pytest.mark.parametrize("source, target", KINDS)
def test_a_backup_restored_is_the_same_server(place, tmp_path, source, target):
    settings, keys, tokens = fill(place(source, tmp_path / "unused"), tmp_path)
    file, new = tmp_path / "backup.tar", place(target, tmp_path / "restored")
    counts = backup(settings, file)
    assert restore(new, file) == counts and (counts["bundle"], counts["result"], counts["agreement"]) == (4, 4, 2)
    before, after = rows_of(settings), rows_of(new)
    assert before == after and files_of(settings) == files_of(new)
    assert any(isinstance(c.type, DateTime) or "Moment" in repr(c.type) for c in Base.metadata.tables["bundle"].c)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {stat.S_IMODE(p.stat().st_mode) for p in (new.data_dir / "keys").iterdir()} == {0o600}
    with TestClient(create_app(new, wrapping_only)) as web:  # it goes on: the next ids follow the last ones
        name, body = packed(tmp_path / "next", [measured(9, budget="30%")], key=keys["ada"])
        from crowd_made import headers_of

        assert web.post("/api/v1/bundles", content=body, headers=headers_of(body, tokens["ada"])).status_code == 201
        assert web.get(f"/api/v1/bundles/{name}").json()["results"][0]["id"] == 5
        mark = web.get(f"/api/v1/bundles/{name}/mark").json()
        assert mark["signature"]["public_key"] == web.get("/api/v1/rules").json()["key"]["public_key"]


def test_a_backup_of_a_restored_one_holds_the_same(place, tmp_path):
    settings, *_ = fill(place("sqlite", tmp_path / "unused"), tmp_path)
    new = place("sqlite", tmp_path / "restored")
    backup(settings, tmp_path / "first.tar")
    restore(new, tmp_path / "first.tar")
    backup(new, tmp_path / "second.tar")
    first, second = ({e.name: tar.extractfile(e).read() for e in tar} for tar in map(tarfile.open, (tmp_path / "first.tar",
                                                                                                    tmp_path / "second.tar")))
    assert {n: d for n, d in first.items() if n != "backup.json"} == {n: d for n, d in second.items() if n != "backup.json"}


def test_a_backup_is_not_restored_over_anything_nor_from_anything_else(place, tmp_path):
    settings, *_ = fill(place("sqlite", tmp_path / "unused"), tmp_path)
    file = tmp_path / "backup.tar"
    backup(settings, file)
    before = rows_of(settings), files_of(settings)
    with pytest.raises(WorkflowError, match="holds a collection already"):
        restore(settings, file)
    with pytest.raises(WorkflowError, match="is there already"):
        backup(settings, file)
    assert (rows_of(settings), files_of(settings)) == before
    data = file.read_bytes()
    spoilt = {"half": data[:len(data) // 2], "another byte": data.replace(b"hand-made", b"hand-mode", 1), "nothing": b"", "text": b"hello"}
    for what, content in spoilt.items():
        (tmp_path / "spoilt.tar").write_bytes(content)
        new = place("sqlite", tmp_path / f"new-{what}")
        with pytest.raises(WorkflowError, match="no whole backup"):
            restore(new, tmp_path / "spoilt.tar")
        assert not new.data_dir.exists(), what


def test_a_backup_with_a_member_that_leads_out_is_refused(place, tmp_path):
    settings, *_ = fill(place("sqlite", tmp_path / "unused"), tmp_path)
    backup(settings, tmp_path / "backup.tar")
    with tarfile.open(tmp_path / "backup.tar") as old, tarfile.open(tmp_path / "evil.tar", "w") as new:
        for entry in old:
            data = old.extractfile(entry)
            if entry.name.startswith("keys/"):
                entry.name = "keys/../../evil"
            new.addfile(entry, data)
    with pytest.raises(WorkflowError, match="no whole backup"):
        restore(place("sqlite", tmp_path / "target"), tmp_path / "evil.tar")
    assert not (tmp_path / "evil").exists()


# ------------------------------------------------------------------------------------------------- the administrator's commands


@pytest.fixture
def admin(tmp_path, capsys):
    """`vramlab server ...` on a data folder; (exit code, what it printed)."""
    def call(*words: str) -> tuple[int, str]:
        code = main([*words, "--data-dir", str(tmp_path / "data")])
        said = capsys.readouterr()
        return code, (said.out + said.err).strip()
    return call


def test_accounts_and_tokens_are_made_listed_and_revoked(admin, tmp_path):
    assert admin("server", "account", "create", "ada", "--display-name", "Ada L.") == (0, "account ada")
    assert admin("server", "account", "create", "ada")[0] == 2
    assert admin("server", "token", "create", "nobody") == (2, "there is no account 'nobody'")
    code, token = admin("server", "token", "create", "ada", "--label", "laptop", "--days", "30")
    assert code == 0 and token.startswith("vl_")
    assert admin("server", "token", "create", "ada", "--scope", "everything")[0] == 2
    row, = json.loads(admin("server", "token", "list", "--json")[1])
    assert (row["account"], row["scopes"], row["label"], row["revoked_at"]) == ("ada", "submit", "laptop", None)
    assert token.split("_")[1] == row["id"] and token.split("_", 2)[2] not in admin("server", "token", "list")[1]
    assert admin("server", "token", "revoke", row["id"]) == (0, f"token {row['id']} is revoked")
    assert json.loads(admin("server", "token", "list", "--json")[1])[0]["revoked_at"]
    assert json.loads(admin("server", "account", "list", "--json")[1])[0]["bundles"] == 0
    assert admin("server", "account", "disable", "ada")[0] == 0 and admin("server", "account", "disable", "bob")[0] == 2
    assert admin("server", "account", "revoke-key", "0" * 16) == (2, "nobody has used a key '0000000000000000'")
    file = tmp_path / "backup.tar"
    assert admin("server", "backup", str(file))[0] == 0 and admin("server", "backup", str(file))[0] == 2
    shutil.rmtree(tmp_path / "data")
    assert admin("server", "restore", str(file)) == (0, "restored: 0 bundles with 0 results")
    assert json.loads(admin("server", "account", "list", "--json")[1])[0]["name"] == "ada"


def test_a_backup_of_nothing_says_how_a_collection_is_made(admin, tmp_path):
    code, said = admin("server", "backup", str(tmp_path / "x.tar"))
    assert code == 3 and "vramlab serve" in said and not (tmp_path / "x.tar").exists()


@pytest.mark.parametrize("words", [("account", "list"), ("account", "disable", "ada"), ("account", "revoke-key", "0" * 16),
                                   ("token", "list"), ("token", "create", "ada"), ("token", "revoke", "0" * 16)])
def test_a_misspelt_data_folder_is_told_and_begins_no_second_collection(admin, tmp_path, words):
    code, said = admin("server", *words)
    assert code == 3 and said.startswith(f"there is no collection in {tmp_path / 'data'}: ") and not (tmp_path / "data").exists()
    assert admin("server", "account", "create", "ada")[0] == 0 and "no collection" not in admin("server", *words)[1]


def test_what_is_no_backup_is_told_in_one_line(admin, tmp_path):
    (notes := tmp_path / "notes.txt").write_text("no archive")
    assert admin("server", "restore", str(notes)) == (2, f"{notes} is no whole backup: it is no tar archive")


def test_serve_answers_until_it_is_told_to_end(tmp_path):
    command = [sys.executable, "-m", "vramlab", "serve", "--port", "0", "--data-dir", str(tmp_path / "data")]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        said = server.stdout.readline()
        address = next(word for word in said.split() if word.startswith("http://"))
        assert httpx.get(f"{address}/api/v1/health", timeout=30).json()["results"] == 0
        taken = subprocess.run([*command[:4], "--port", address.rpartition(":")[2], "--data-dir", str(tmp_path / "second")],
                               cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert taken.returncode == 3 and "cannot be had" in taken.stderr and "Traceback" not in taken.stderr
    finally:
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=60)
    assert server.returncode == 130 and "Traceback" not in errors, errors


def test_serve_without_its_database_or_its_packages_says_what_to_do(tmp_path, capsys, monkeypatch):
    assert main(["serve", "--port", "0", "--data-dir", str(tmp_path), "--database", "postgresql://x@127.0.0.1:1/y"]) == 3
    assert "does not answer" in capsys.readouterr().err
    assert main(["serve", "--data-dir", str(tmp_path), "--database", "mysql://x"]) == 2
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "fastapi" else object())
    assert main(["serve", "--data-dir", str(tmp_path)]) == 3
    assert capsys.readouterr().err.strip().endswith("a server needs more packages (fastapi): pip install 'vramlab[server]'")


@pytest.mark.parametrize("words", [["serve", "--port", "0"], ["server", "account", "create", "ada"], ["server", "account", "list"],
                                   ["server", "backup", "to.tar"], ["server", "restore", "from.tar"]])
@pytest.mark.parametrize("below", ["", "data"])
def test_a_data_dir_that_is_a_file_is_told_in_one_sentence(tmp_path, capsys, words, below):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name in ("file", "nowhere"):
        path = tmp_path / name / below
        assert main([*words, "--data-dir", str(path)]) == 2
        assert capsys.readouterr().err == (f"--data-dir {path}: {tmp_path / name} is no folder; a server wants a folder of its own for its "
                                           "archives, keys and database, and makes one where there is none\n")
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "gone").exists()


def test_a_data_dir_that_is_made_or_linked_is_one(admin, tmp_path):
    """The control: a folder that is not there yet, deep down, and one behind a link."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "elsewhere")
    assert admin("server", "account", "create", "ada") == (0, "account ada") and (tmp_path / "elsewhere" / "collection.sqlite").exists()
    assert main(["server", "account", "create", "ada", "--data-dir", str(tmp_path / "a" / "b")]) == 0


@pytest.mark.parametrize(("before", "after"), KINDS[1:3])
def test_a_backup_of_the_first_schema_is_the_same_server_at_the_newest(place, tmp_path, before, after):
    """Rows of a server that has not been started since columns were added. Only what they hold is empty."""
    old, new = fill(place(before, tmp_path / "unused"), tmp_path)[0], place(after, tmp_path / "new")
    database = Database(old)
    with database.write() as session:
        session.add(Competition(name="spring", title="Spring", description="", model="resnet50", workload="", device="V100", budget="",
                                seeds=[1], metric="peak_bytes", opens_at=now(), closes_at=now() + DAY, organiser_id=1))
    kept = rows_of(old)
    with database.engine.execution_options(vramlab_writes=True).begin() as connection:
        command.downgrade(_configuration(connection), "0001")
    database.close()
    backup(old, tmp_path / "old.backup")
    restore(new, tmp_path / "old.backup")
    added = {"result": {"fingerprint": None}, "competition": {"corrected_at": None, "withdrawn_at": None, "withdrawn_reason": ""}}
    for table in Base.metadata.sorted_tables:
        empty = added.get(table.name, {})
        wanted = [tuple(empty.get(c.name, value) for c, value in zip(table.c, row)) for row in kept[table.name]]
        assert rows_of(new)[table.name] == wanted, table.name
    assert kept["result"] and kept["competition"], "there was something to lose"
    with TestClient(create_app(new, wrapping_only)) as web:
        web.app.state.intake.fill_fingerprints()
    assert [tuple(row) for row in rows_of(new)["result"]] == kept["result"], "what a result measured is read from its archive"
