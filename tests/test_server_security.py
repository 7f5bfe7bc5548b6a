"""What strangers try, and that nothing of it changes the store: each refusal is followed by a look at every table and every file."""

from __future__ import annotations

import errno
import gzip
import io
import json
import statistics
import tarfile
import time
from typing import Any

import pytest
from crowd_made import headers_of, measured, packed, served
from sqlalchemy import select

from vramlab.crowd.manifest import PURPOSE
from vramlab.crowd.server.accounts import authenticate, disable_account, revoke_key
from vramlab.crowd.server.limits import Limiter
from vramlab.crowd.server.tables import Base
from vramlab.crowd.signing import make_key

NAME = "0" * 32
INJECTIONS = ["' OR '1'='1", "'; DROP TABLE result; --", "\" OR 1=1 --", "%' UNION SELECT secret_sha256 FROM token --", "\\'; SELECT 1; --",
              "1; UPDATE account SET name='x'", "{{7*7}}", "<script>alert(1)</script>", "%00", "é\u202e😀"]


@pytest.fixture
def server(tmp_path):
    with served(tmp_path, max_archive_bytes=200_000) as made:
        made.submit("ada", measured(1, host="one", gpu="V100"))
        yield made


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    """One server for all tests that are to change nothing."""
    with served(tmp_path_factory.mktemp("server"), max_archive_bytes=200_000, bundles_per_minute=10_000, requests_per_minute=100_000,
                failures_per_minute=1000) as made:
        made.submit("ada", measured(1, host="one", gpu="V100"))
        yield made


def content(server) -> tuple:
    """Every row and every archive."""
    with server.database.read() as session:
        rows = [tuple(map(str, row)) for table in Base.metadata.sorted_tables for row in session.execute(select(table))]
    files = sorted((p.relative_to(server.settings.data_dir).as_posix(), p.read_bytes())
                   for name in ("bundles", "incoming", "keys") for p in (server.settings.data_dir / name).rglob("*") if p.is_file())
    return rows, files


@pytest.fixture
def unharmed(lasting, tmp_path):
    lasting.folder = tmp_path
    before = content(lasting)
    yield lasting
    assert content(lasting) == before
    assert lasting.get("results")["results"], "and it still answers"


def tar_of(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for entry, data in entries:
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return raw.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def manifest(**changes: Any) -> bytes:
    return json.dumps({"bundle": NAME, **changes}).encode()


HOSTILE = {
    "no archive": (b"hello", "archive"),
    "an empty body": (b"", "archive"),
    "half an archive": (gzip.compress(b"x" * 5000)[:60], "archive"),
    "a path that leads out": (tar_of((entry("../../out"), b"x")), "path"),
    "an absolute path": (tar_of((entry("/etc/passwd"), b"x")), "path"),
    "a symbolic link": (tar_of((entry("manifest.json", tarfile.SYMTYPE, "/etc/passwd"), b"")), "symlink"),
    "a hard link": (tar_of((entry("manifest.json", tarfile.LNKTYPE, "run.json"), b"")), "hard-link"),
    "a device": (tar_of((entry("manifest.json", tarfile.CHRTYPE), b"")), "device"),
    "a bomb": (tar_of((entry("manifest.json"), b"\0" * 15_000_000)), "zip-bomb"),
    "a file twice": (tar_of((entry("manifest.json"), manifest()), (entry("manifest.json"), manifest())), "duplicate-file"),
    "a deep manifest": (tar_of((entry("manifest.json"), b"[" * 5000 + b"]" * 5000)), "json-depth"),
    "a key twice": (tar_of((entry("manifest.json"), b'{"bundle": "%s", "bundle": "1"}' % NAME.encode())), "json-duplicate-key"),
    "NaN": (tar_of((entry("manifest.json"), manifest()[:-1] + b', "cells": NaN}')), "json-not-finite"),
    "a name that is a path": (tar_of((entry("manifest.json"), json.dumps({"bundle": "../../x"}).encode())), "manifest"),
    "a manifest of another form": (tar_of((entry("manifest.json"), manifest(format=2))), "manifest"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_is_refused_by_a_named_rule(unharmed, what):
    body, rule = HOSTILE[what]
    answer = unharmed.post("ada", body)
    assert answer.status_code == 422 and [f["rule"] for f in answer.json()["findings"]] == [rule], answer.text


def packed_body(server) -> bytes:
    """A new bundle of ada's, which is not sent."""
    return packed(server.folder / "unsent", [measured(99)], key=server.keys["ada"])[1]


def rebuilt(body: bytes, change) -> bytes:
    """An archive with its files changed by `change(files)`."""
    with tarfile.open(fileobj=io.BytesIO(body), mode="r:gz") as tar:
        files = {e.name: tar.extractfile(e).read() for e in tar}
    change(files)
    return tar_of(*((entry(name), data) for name, data in sorted(files.items())))


def _sign_as_another(files):
    body = json.loads(files["manifest.json"])
    body["signature"] |= {"public_key": make_key().public_key}
    files["manifest.json"] = json.dumps(body).encode()


def _change_a_record(files):
    name = next(n for n in files if n.endswith("record.json"))
    files[name] = files[name].replace(b'"ok"', b'"oom"')


def _change_what_is_signed(files):
    body = json.loads(files["manifest.json"])
    body["supersedes"] = "f" * 32
    files["manifest.json"] = json.dumps(body).encode()


def _sign_for_another_purpose(files):
    body = json.loads(files["manifest.json"])
    del body["signature"]
    files["manifest.json"] = json.dumps(body | {"signature": make_key().signature_block(body, PURPOSE + "0")}).encode()


@pytest.mark.parametrize("forge, rule", [(_sign_as_another, "signature"), (_change_a_record, "files"),
                                         (_change_what_is_signed, "signature"), (_sign_for_another_purpose, "signature")])
def test_a_forged_bundle_is_refused(unharmed, forge, rule):
    _, body = packed(unharmed.folder, [measured(5)], key=unharmed.keys["ada"])
    answer = unharmed.post("ada", rebuilt(body, forge))
    assert answer.status_code == 422 and rule in [f["rule"] for f in answer.json()["findings"]], answer.text


def test_the_untouched_bundle_of_those_forgeries_is_taken(server):
    _, body = packed(server.folder, [measured(5)], key=server.keys["ada"])
    assert server.post("ada", rebuilt(body, lambda files: None)).status_code == 201


def test_a_replayed_bundle_gives_nobody_anything(unharmed):
    stolen = unharmed.web.get(f"/api/v1/bundles/{unharmed.get('bundles')['bundles'][0]['name']}/archive").content
    assert unharmed.post("ada", stolen).status_code == 200, "the owner's own again"
    assert unharmed.post("bob", stolen).status_code == 409


def test_another_accounts_key_is_refused(unharmed):
    _, body = packed(unharmed.folder, [measured(6)], key=unharmed.keys["ada"])
    answer = unharmed.post("bob", body)
    assert answer.status_code == 403 and "belongs to another account" in answer.json()["error"]


def test_a_revoked_key_and_a_disabled_account_give_nothing_more_and_keep_what_they_gave(server):
    key_id = server.keys["ada"].key_id
    with server.database.write() as session:
        revoke_key(session, key_id, actor="test")
    _, body = packed(server.folder / "second", [measured(6)], key=server.keys["ada"])
    assert server.post("ada", body).json()["error"] == f"key {key_id} is revoked"
    with server.database.write() as session:
        disable_account(session, "ada", actor="test")
    assert server.post("ada", body).status_code == 401
    assert [row["state"] for row in server.get("results")["results"]] == ["checked"]


def test_a_full_disk_is_told_and_nothing_is_half_there(unharmed, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    _, body = packed(unharmed.folder, [measured(5)], key=unharmed.keys["ada"])
    monkeypatch.setattr("vramlab.crowd.server.store.os.replace", full)
    answer = unharmed.post("ada", body)
    assert answer.status_code == 503 and int(answer.headers["Retry-After"]) >= 1 and "disk is full" in answer.json()["error"]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_long_is_cut_off(unharmed, is_chunked):
    sent = []

    def chunks():
        for number in range(100):
            sent.append(number)
            yield b"x" * 10_000

    body = chunks() if is_chunked else b"x" * 200_001
    answer = unharmed.web.post("/api/v1/bundles", content=body, headers=headers_of(b"", unharmed.tokens["ada"]))
    assert answer.status_code == 413


def test_a_body_that_is_not_what_the_digest_says_is_refused(unharmed):
    _, body = packed(unharmed.folder, [measured(5)], key=unharmed.keys["ada"])
    for digest in ("", "sha-256=", "md5=AAAA", "sha-256=" + "A" * 44, "sha-256=é"):
        assert unharmed.post("ada", body, Digest=digest.encode()).status_code == 400, digest
    assert unharmed.post("ada", body[:-1], Digest=headers_of(body, "")["Digest"]).status_code == 400


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "text/html"])
def test_a_body_of_another_type_is_refused(unharmed, kind):
    assert unharmed.post("ada", b"x", **{"Content-Type": kind}).status_code == 415


@pytest.mark.parametrize("body", ["[" * 10_000, "{", "", "NaN", '{"reason": 5}', '{"reason": "\\u0000"}', '{"reason": "\\ud800"}',
                                  '{"reason": ""}', '{"reason": "x", "state": "checked"}', '{"reason": "' + "x" * 2001 + '"}',
                                  "[]", "null"])
def test_json_that_is_none_or_of_another_form_is_refused(unharmed, body):
    name = unharmed.get("bundles")["bundles"][0]["name"]
    answer = unharmed.web.post(f"/api/v1/bundles/{name}/withdraw", content=body.encode(), headers={
        "Authorization": f"Bearer {unharmed.tokens['ada']}", "Content-Type": "application/json"})
    assert answer.status_code in (400, 422), answer.text


def test_a_long_json_body_is_cut_off(unharmed):
    name = unharmed.get("bundles")["bundles"][0]["name"]
    answer = unharmed.web.post(f"/api/v1/bundles/{name}/withdraw", content=b" " * 100_000, headers={
        "Authorization": f"Bearer {unharmed.tokens['ada']}", "Content-Type": "application/json"})
    assert answer.status_code == 413


def string_parameters(server) -> list[tuple[str, str, str]]:
    """(path, name, where) of every text parameter of every GET, from the server's own document."""
    found = []
    for path, methods in server.web.get("/api/v1/openapi.json").json()["paths"].items():
        for parameter in methods.get("get", {}).get("parameters", ()):
            kinds = str(parameter["schema"])
            if "'string'" in kinds:
                found.append((path, parameter["name"], parameter["in"]))
    return found


def test_sql_in_any_text_parameter_finds_nothing_and_breaks_nothing(unharmed):
    parameters = string_parameters(unharmed)
    assert len(parameters) > 20 and ("/api/v1/results", "model", "query") in parameters
    for path, name, where in parameters:
        for text in INJECTIONS:
            address = path.replace("{number}", "1").replace("{other}", "1")
            values = {"model": "resnet50", "device": "V100"} if path.endswith("leaderboard") else {}
            if where == "path":
                address = address.replace("{" + name + "}", text.replace("/", "%2f").replace("%", "%25").replace("?", "%3f"))
            else:
                values[name] = text
            answer = unharmed.web.get(address, params=values, headers={"Authorization": f"Bearer {unharmed.tokens['root']}"})
            assert answer.status_code in (200, 404, 422), (path, name, text, answer.status_code, answer.text)
            if answer.status_code == 200:
                body = answer.json()
                rows = body if isinstance(body, list) else body.get("results") or body.get("bundles") or body.get("rows") or []
                assert rows == [], (path, name, text)


def test_a_parameter_that_there_is_not_is_refused_with_the_nearest_name(unharmed):
    answer = unharmed.web.get("/api/v1/results", params={"modl": "resnet50"})
    assert answer.status_code == 422 and answer.json()["error"] == "no such parameter: 'modl'; did you mean 'model'?"


def test_sql_and_html_in_a_record_are_text(server):
    text = "'); DROP TABLE result; -- <img src=x onerror=alert(1)>"
    server.submit("ada", measured(7, gpu=text, method=text, model=text))
    row, = server.get("results", model=text)["results"]
    assert (row["method"], row["device"], row["model"], row["account"]) == (text, text, text, "ada")
    assert server.get("leaderboard", model=text, device=text, metric="peak_bytes")["rows"][0]["method"] == text


@pytest.mark.parametrize("text, rule", [("x" * 201, "text-length"), ("a\nb", "text-control"), ("a\x1bb", "text-control"),
                                        ("\u202eb", "text-control")])
def test_a_text_that_no_row_can_hold_is_refused(unharmed, text, rule):
    _, body = packed(unharmed.folder, [measured(8, method=text)], key=unharmed.keys["ada"])
    answer = unharmed.post("ada", body)
    assert answer.status_code == 422 and [f["rule"] for f in answer.json()["findings"]] == [rule], answer.text


def test_a_slow_download_keeps_no_connection(server, monkeypatch):
    """Whoever stops reading in the middle of an export, many times at once, keeps nobody else from the database."""
    from vramlab.crowd.server.pages import reads
    from vramlab.crowd.server.queries import ResultFilter

    for number in (2, 3):
        server.submit("ada", measured(number, host="one", gpu="V100", budget=f"{number}%"))
    monkeypatch.setattr(reads, "CHUNK", 2)
    downloads = [reads.all_results(server.database, ResultFilter(include_unverified=True)) for _ in range(40)]
    assert [next(rows)["budget"] for rows in downloads] == ["3%"] * 40
    assert server.database.engine.pool.checkedout() == 0 and len(server.get("results")["results"]) == 3
    assert {tuple(row["budget"] for row in rows) for rows in downloads} == {("2%", "60%")}


# -------------------------------------------------------------------------------------------------------------------- tokens


def test_without_a_token_nothing_is_changed(unharmed):
    name = unharmed.get("bundles")["bundles"][0]["name"]
    for path in ("bundles", f"bundles/{name}/withdraw", f"bundles/{name}/flag", f"bundles/{name}/clear", "competitions",
                 "competitions/x/entries", "competitions/x/withdraw"):
        for headers in ({}, {"Authorization": "Basic eDp5"}, {"Authorization": "Bearer"}):
            assert unharmed.web.post(f"/api/v1/{path}", content=b"{}", headers=headers).status_code in (401, 422), path
    assert unharmed.web.post("/api/v1/bundles", content=b"x").headers["WWW-Authenticate"] == "Bearer"


def test_every_writing_endpoint_asks_for_a_token(unharmed):
    """From the document: an endpoint that is added later is asked too."""
    name = unharmed.get("bundles")["bundles"][0]["name"]
    writing = [(method, path) for path, methods in unharmed.web.get("/api/v1/openapi.json").json()["paths"].items()
               for method in methods if method != "get"]
    assert len(writing) >= 6
    for method, path in writing:
        if path.startswith("/api/v1/"):
            body = {"reason": "x", "result": 1}
            address = path.replace("{bundle}", name).replace("{name}", "x")
            assert unharmed.web.request(method, address, json=body).status_code in (401, 422), path


def test_guessing_is_slowed_down_and_does_not_let_anybody_in(server):
    public_id = server.tokens["ada"].split("_")[1]
    before = content(server)
    answers = [server.web.post("/api/v1/bundles", headers={"Authorization": f"Bearer vl_{public_id}_{n:043d}"}) for n in range(15)]
    most = server.settings.failures_per_minute
    assert content(server) == before
    assert [a.status_code for a in answers] == [401] * most + [429] * (15 - most)
    assert 1 <= int(answers[-1].headers["Retry-After"]) <= 60


def test_a_known_and_an_unknown_id_take_as_long(server):
    """The medians of many tries lie within a fifth of each other; the comparison itself is hmac.compare_digest."""
    public_id = server.tokens["ada"].split("_")[1]
    times: dict[str, list[float]] = {"known": [], "unknown": []}
    with server.database.read() as session:
        for number in range(400):
            for name, shown in (("known", f"vl_{public_id}_{number:043d}"), ("unknown", f"vl_{number:016x}_{number:043d}")):
                started = time.perf_counter()
                assert authenticate(session, shown) is None
                times[name].append(time.perf_counter() - started)
                session.expunge_all()
    known, unknown = (statistics.median(values) for values in times.values())
    assert 0.3 < known / unknown < 3, "a look-up that finds a row builds it; nothing grows with how much of the secret is right"


def test_a_token_reaches_as_far_as_its_scopes(unharmed):
    name = unharmed.get("bundles")["bundles"][0]["name"]
    assert unharmed.post("olga", b"x").status_code == 403
    assert unharmed.say("ada", f"bundles/{name}/flag", reason="x").status_code == 403
    assert unharmed.say("olga", f"bundles/{name}/withdraw", reason="x").status_code == 403


def test_a_limiter_gives_back_with_time():
    clock = [0.0]
    limiter = Limiter(60, lambda: clock[0])
    assert [limiter.take("a") for _ in range(60)] == [0.0] * 60 and limiter.take("a") == pytest.approx(1.0)
    assert limiter.take("b") == 0.0
    clock[0] = 2.0
    assert [bool(limiter.take("a")) for _ in range(3)] == [False, False, True]


def test_too_many_submissions_and_too_many_requests_are_put_off(tmp_path):
    with served(tmp_path, bundles_per_minute=2) as server:
        answers = [server.post("ada", b"x") for _ in range(3)]
        assert [a.status_code for a in answers] == [422, 422, 429] and int(answers[2].headers["Retry-After"]) >= 1
        assert server.post("bob", b"x").status_code == 422, "another account is not held up"
    with served(tmp_path / "second", requests_per_minute=5) as server:
        assert [server.web.get("/api/v1/health").status_code for _ in range(7)] == [200] * 5 + [429] * 2


def test_the_quota_of_a_day_is_kept(tmp_path):
    with served(tmp_path, bundles_per_day=2) as server:
        server.submit("ada", measured(1))
        server.submit("ada", measured(2))
        _, body = packed(tmp_path / "third", [measured(3)], key=server.keys["ada"])
        assert server.post("ada", body).status_code == 429
        server.submit("bob", measured(4))
    with served(tmp_path / "second", bytes_per_day=100) as server:
        _, body = packed(tmp_path / "fourth", [measured(4)], key=server.keys["ada"])
        assert server.post("ada", body).status_code == 429 and server.get("bundles")["bundles"] == []
