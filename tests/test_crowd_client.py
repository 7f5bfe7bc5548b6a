"""Giving to a server and taking from one: the real server in this process, lines that break, and servers that mean no good."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from crowd_made import served
from forging import forge, members_of, record_of_method, with_json
from genuine import genuine_bundle, genuine_run
from served import serving

from vramlab.cli import main
from vramlab.crowd import check, pack_run
from vramlab.crowd.archive import pack
from vramlab.crowd.bundle import plain_name
from vramlab.crowd.client import Server, read_tokens
from vramlab.crowd.server.accounts import create_token, revoke_token
from vramlab.crowd.signing import make_key
from vramlab.errors import EnvironmentUnable, SubmissionRefused, WorkflowError
from vramlab.record import RunRecord
from vramlab.report.cells_csv import write_cells
from vramlab.runs import report_folder

URL = "http://localhost"
KEY = make_key()


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch, tmp_path) -> list[float]:
    """Waits are written down; keys and tokens are this test's own."""
    waits: list[float] = []
    monkeypatch.setattr("vramlab.crowd.client.time.sleep", waits.append)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("VRAMLAB_TOKEN", raising=False)
    return waits


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return pack_run(genuine_run(tmp_path_factory.mktemp("run") / "run", seed=11), key=KEY)


@pytest.fixture
def collection(tmp_path):
    """The server as it runs, rules and all."""
    with served(tmp_path / "served", examine=check) as made:
        yield made


def at(collection, account: str = "ada", through: Callable | None = None) -> Server:
    """A client of the server in this process; `through` stands in the line."""
    inner = collection.web._transport
    transport = httpx.MockTransport(lambda request: through(inner, request)) if through else inner
    return Server(URL, token=collection.tokens[account], transport=transport)


def speaking(answer: Callable[[httpx.Request], httpx.Response], **options) -> Server:
    """A client of a server that says what `answer` says."""
    return Server(URL, token="t", transport=httpx.MockTransport(answer), **options)


# --- the way there and back -----------------------------------------------------------------------------------------------
def test_a_bundle_goes_there_once_and_comes_back_checked_and_marked(collection, packed, tmp_path):
    sent, again = at(collection).submit(packed), at(collection).submit(packed)
    assert (sent.bundle, sent.state, sent.is_new) == (packed.name, "checked", True)
    assert {f["severity"] for f in sent.findings} <= {"note"}
    assert (again.is_new, again.account, again.state) == (False, "ada", "checked")
    (pulled,) = at(collection).pull(tmp_path / "crowd")
    assert pulled.is_new and pulled.is_marked and pulled.state == "checked" and pulled.path == tmp_path / "crowd" / "genuine" / packed.name
    assert members_of(pulled.path) == packed.contents and check(pulled.path).is_accepted
    before = {p: p.stat().st_ino for p in pulled.path.rglob("*")}
    (twice,) = at(collection).pull(tmp_path / "crowd")
    assert not twice.is_new and {p: p.stat().st_ino for p in pulled.path.rglob("*")} == before
    assert json.loads((pulled.path.parent / f"{packed.name}.mark.json").read_text())["body"]["account"] == "ada"


def test_many_bundles_come_down_page_by_page_and_by_workflow(collection, tmp_path):
    names = set()
    for seed in range(3):
        one = pack_run(genuine_run(tmp_path / f"run-{seed}", seed=seed), key=KEY)
        at(collection).submit(one)
        names.add(one.name)
    pages: list[str] = []

    def small_pages(inner, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/bundles"):
            request.url = request.url.copy_merge_params({"limit": "2"})
            pages.append(str(request.url))
        return inner.handle_request(request)

    assert {p.bundle for p in at(collection, through=small_pages).pull(tmp_path / "crowd")} == names and len(pages) == 2
    assert list(at(collection).pull(tmp_path / "other", workflow="nothing")) == []


def test_what_comes_down_is_read_by_report_and_compare(collection, tmp_path, capsys):
    for seed in (1, 2):
        at(collection).submit(pack_run(genuine_run(tmp_path / f"run-{seed}", seed=seed), key=KEY))
    one, two = (p.path.name for p in at(collection).pull(tmp_path / "crowd"))
    assert main(["compare", "run", one, two, "--output-dir", str(tmp_path / "crowd"), "--threshold", "9"]) == 0
    assert "cells compared" in capsys.readouterr().out
    assert main(["report", "run", one, "--output-dir", str(tmp_path / "crowd")]) == 0
    # The report lies beside the bundle, which stays what its manifest names; its links lead into it.
    bundle = tmp_path / "crowd" / "genuine" / one
    place = bundle.with_name(f"{one}.report")
    page = re.sub(r"<script.*?</script>", "", (place / "report.html").read_text(), flags=re.DOTALL)
    here = {link for link in re.findall(r'href="([^"#][^"]*)"', page) if "://" not in link and not link.startswith("data:")}
    assert "A run whose numbers agree" in page and f"../{one}/run.json" in here
    assert len(here) > 4 and all((place / link).is_file() for link in here)
    assert main(["check", "bundle", str(tmp_path / "crowd")]) == 0
    (bundle / "report.html").write_text("negative control")
    assert main(["check", "bundle", str(tmp_path / "crowd")]) == 4


def test_nothing_is_written_into_a_bundle(tmp_path, capsys, monkeypatch):
    """Whatever is made of a run has a place beside it, from inside its folder too; a crate has none, and is refused in a sentence."""
    bundle = genuine_bundle(tmp_path, seed=3, key=KEY)
    place, before = bundle.with_name(f"{bundle.name}.report"), members_of(bundle)
    monkeypatch.chdir(bundle)
    assert report_folder(bundle) == place and report_folder(Path(".")).resolve() == place and report_folder(tmp_path) == tmp_path
    assert {path.parent.resolve() for path in (*write_cells(bundle), *write_cells(Path(".")))} == {place}
    assert main(["report", "run", ".", "--format", "ro-crate"]) == 2
    assert "make the crate in a copy of the folder without manifest.json" in capsys.readouterr().err
    assert members_of(bundle) == before and check(bundle).is_accepted


# --- lines that break -----------------------------------------------------------------------------------------------------
def test_what_is_lost_on_the_way_is_sent_again(collection, packed, nobody_waits):
    fate = iter(["refused", 503, "cut before", "cut after", 429, 200])

    def line(inner, request: httpx.Request) -> httpx.Response:
        what = next(fate, 200) if request.method == "POST" else 200
        if what == "refused":
            raise httpx.ConnectError("connection refused")
        if what == "cut before":
            raise httpx.WriteError("broken pipe")
        if what in (503, 429):
            return httpx.Response(what, headers={"Retry-After": "7"})
        answer = inner.handle_request(request)
        if what == "cut after":  # taken in, and nobody hears of it
            raise httpx.ReadError("connection reset")
        return answer

    receipt = at(collection, through=line).submit(packed)
    assert receipt.bundle == packed.name and not receipt.is_new, "the fourth try was taken in; the sixth hears so"
    assert len(collection.get("bundles")["bundles"]) == 1 and nobody_waits.count(7.0) == 2


def test_patience_ends_and_the_same_command_goes_on(collection, packed, monkeypatch):
    clock = iter(range(0, 10**6, 100))
    monkeypatch.setattr("vramlab.crowd.client.time.monotonic", lambda: next(clock))
    down = speaking(lambda request: httpx.Response(503))
    with pytest.raises(EnvironmentUnable, match="gives no answer .503.*goes on where"):
        down.submit(packed)
    monkeypatch.undo()
    assert at(collection).submit(packed).is_new


def test_a_refusal_of_the_server_names_its_rules_and_is_not_tried_again(packed):
    asked = []

    def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(request.method)
        if request.method == "GET":
            return httpx.Response(404, json={"error": "there is no such bundle", "findings": []})
        return httpx.Response(422, json={"error": "refused", "findings": [
            {"rule": "peak", "severity": "error", "where": "a", "message": "too small"},
            {"rule": "odd", "severity": "warning", "where": "b", "message": "odd"}]})

    with pytest.raises(SubmissionRefused) as refused:
        speaking(refuse).submit(packed)
    assert refused.value.problems == ("the server says 422 Unprocessable Entity: refused", "a: [peak] too small")
    assert asked == ["GET", "POST"]


def test_the_real_server_refuses_what_our_own_check_would(collection, tmp_path):
    """A client that skips its own check changes nothing: what is refused leaves the store as it was."""
    bundle = genuine_bundle(tmp_path, key=KEY)
    members = members_of(bundle)
    forged = forge(with_json(members, record_of_method(members, "checkpoint"), lambda body: body["measured"].update(peak_bytes=1)),
                   tmp_path / "forged", KEY)
    answer = collection.post("ada", pack(forged))
    assert answer.status_code == 422 and {f["rule"] for f in answer.json()["findings"]} >= {"peak"}
    store = collection.settings.data_dir
    assert collection.get("bundles", include_unverified="true")["bundles"] == []
    assert [p for p in store.rglob("*.gz")] == [] and list((store / "incoming").iterdir()) == []


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_does_not_hold_is_a_refusal(packed, status):
    with pytest.raises(SubmissionRefused, match=str(status)):
        speaking(lambda r: httpx.Response(404 if r.method == "GET" else status, json={"error": "no"})).submit(packed)


def test_a_wrong_token_is_a_refusal_where_the_server_has_the_bundle_too(collection, packed, tmp_path, capsys, monkeypatch):
    """Nothing would be sent, and still the token is looked at: who mistypes it hears so at once."""
    assert at(collection).submit(packed).is_new and not at(collection).submit(packed).is_new
    with collection.database.write() as session:
        spent, row = create_token(session, "ada", actor="test")
        revoke_token(session, row.public_id, actor="test")
    unknown, organiser = f"vl_{'0' * 16}_{'x' * 43}", collection.tokens["olga"]
    for token, said in ((unknown, "401"), ("nonsense", "401"), (spent, "401"), (organiser, "scope submit")):
        with pytest.raises(SubmissionRefused, match=said):
            Server(URL, token=token, transport=collection.web._transport).submit(packed)
    run = genuine_run(tmp_path / "run", seed=11)
    monkeypatch.setenv("VRAMLAB_TOKEN", "vl_wrong")
    with serving(collection.web.app) as address:
        assert main(["crowd-submit", str(run), "--to", address]) == 4 and "401" in capsys.readouterr().err
        monkeypatch.setenv("VRAMLAB_TOKEN", collection.tokens["ada"])
        assert main(["crowd-submit", str(run), "--to", address]) == 0 and "has it already" in capsys.readouterr().out


# --- tokens ---------------------------------------------------------------------------------------------------------------
def test_a_token_is_sent_to_its_own_address_and_only_with_the_bundle(packed, tmp_path):
    path = tmp_path / "config" / "vramlab" / "tokens.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"https://a.example.org": "token-a", "https://b.example.org": "token-b"}))
    path.chmod(0o600)
    seen = []

    def note(request: httpx.Request) -> httpx.Response:
        seen.append((request.method, request.url.host, request.headers.get("authorization")))
        return httpx.Response(404 if request.method == "GET" else 201, json={"bundle": packed.name, "state": "received"})

    Server("https://a.example.org/vramlab/", transport=httpx.MockTransport(note)).submit(packed)
    assert seen == [("GET", "a.example.org", None), ("POST", "a.example.org", "Bearer token-a")]
    with pytest.raises(EnvironmentUnable, match="no token for https://c.example.org"):
        Server("https://c.example.org", transport=httpx.MockTransport(note)).submit(packed)
    path.chmod(0o644)
    with pytest.raises(EnvironmentUnable, match="others can read your tokens"):
        Server("https://a.example.org", transport=httpx.MockTransport(note)).submit(packed)


def test_the_environment_goes_before_the_file_and_nothing_travels_unencrypted(packed, monkeypatch):
    monkeypatch.setenv("VRAMLAB_TOKEN", "from-the-environment")
    seen = []

    def note(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(404 if request.method == "GET" else 201, json={"bundle": packed.name, "state": "received"})

    Server("https://x.example.org", transport=httpx.MockTransport(note)).submit(packed)
    assert seen[-1] == "Bearer from-the-environment"
    count = len(seen)
    with pytest.raises(EnvironmentUnable, match="does not travel unencrypted: write https://x.example.org"):
        Server("http://x.example.org", transport=httpx.MockTransport(note)).submit(packed)
    monkeypatch.setenv("VRAMLAB_TOKEN", "two\r\nX-Evil: 1")
    with pytest.raises(EnvironmentUnable, match="characters that no token has"):
        Server("https://x.example.org", transport=httpx.MockTransport(note)).submit(packed)
    assert len(seen) == count


@pytest.mark.parametrize("text", ["[]", '{"a": 1}', "nothing", '{"a": "x", "a": "y"}'])
def test_a_file_that_holds_no_tokens_is_told(tmp_path, text):
    (tmp_path / "tokens.json").write_text(text)
    (tmp_path / "tokens.json").chmod(0o600)
    with pytest.raises(EnvironmentUnable):
        read_tokens(tmp_path / "tokens.json")


def test_no_redirect_is_followed(packed):
    hosts = []

    def elsewhere(request: httpx.Request) -> httpx.Response:
        hosts.append(request.url.host)
        return httpx.Response(307, headers={"Location": "https://evil.example.org/api/v1/bundles"})

    with pytest.raises(EnvironmentUnable, match="sends on to https://evil.example.org"):
        speaking(elsewhere).submit(packed)
    assert set(hosts) == {"localhost"}


@pytest.mark.parametrize("url", ["ftp://a", "https://", "http:///x", "https://u:p@a", "https://a?x=1", "https://a#b", "https://a:0", "https://[",
                                 "https://a:99999"])
def test_what_is_no_address_is_told(url):
    with pytest.raises(WorkflowError, match="no address of a server"):
        Server(url)


# --- servers that mean no good --------------------------------------------------------------------------------------------
def listing(rows, archives=None, key: str = "", following=None) -> Callable[[httpx.Request], httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path.endswith("/rules"):
            return httpx.Response(200, json={"key": {"public_key": key}})
        if path.endswith("/archive"):
            return httpx.Response(200, content=(archives or {}).get(path.split("/")[-2], b"nothing"))
        if path.endswith("/bundles"):
            return httpx.Response(200, json={"bundles": rows, "next": following})
        return httpx.Response(404, json={"error": "no"})
    return answer


@pytest.mark.parametrize("name", ["../../evil", "a" * 31, "A" * 32, "", None, "a" * 32 + "/x", 7])
def test_a_listed_name_that_is_none_ends_it(tmp_path, name):
    with pytest.raises(EnvironmentUnable, match="no name of a bundle"):
        list(speaking(listing([{"name": name, "workflow": "w", "state": "checked"}])).pull(tmp_path / "crowd"))
    assert not (tmp_path / "crowd").exists() and not (tmp_path.parent / "evil").exists()


def test_a_workflow_with_a_long_name_does_not_break_a_pull(tmp_path):
    """200 characters, the most that a name may have, of three bytes each: more than any file system takes for a folder."""
    one, two = (plain_name("\u7a0b" * 199 + end) for end in "ab")
    assert one != two and max(len(name.encode()) for name in (one, two)) <= 200 and plain_name("x" * 200) == "x" * 200
    (tmp_path / one).mkdir()
    (tmp_path / two).mkdir()


def test_what_strangers_write_does_not_drive_the_terminal(tmp_path, capsys):
    """Escapes in a bundle's own words and in a server's answer are told, not sent."""
    bundle = genuine_bundle(tmp_path / "made", seed=4, key=KEY)
    members = members_of(bundle)
    hostile = "x\x1b[2J\x9b1A\u202e"
    (tmp_path / "forged").mkdir()
    name = record_of_method(members, "checkpoint")
    forged = forge(with_json(members, name, lambda body: body["measured"].__setitem__(hostile, 1)), tmp_path / "forged", KEY)
    main(["check", "bundle", str(forged)])
    out = capsys.readouterr().out
    assert "\\x1b[2J" in out and not set("\x1b\x9b\u202e") & set(out)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"error": "no \x1b]0;title\x07", "findings": []})

    with pytest.raises(EnvironmentUnable) as error:
        list(Server(URL, transport=httpx.MockTransport(answer)).pull(tmp_path / "pulled"))
    from vramlab.cli import _complain
    assert _complain(error.value, 3) == 3 and "\x1b" not in (said := capsys.readouterr().err) and "\\x1b]0;title\\x07" in said


def test_a_workflow_is_one_folder_whatever_it_is_called(tmp_path):
    bundle = genuine_bundle(tmp_path / "b", key=KEY)
    rows = [{"name": bundle.name, "workflow": "../../../evil", "state": "checked"}]
    (pulled,) = speaking(listing(rows, {bundle.name: pack(bundle)})).pull(tmp_path / "crowd")
    assert pulled.path.is_relative_to(tmp_path / "crowd") and pulled.path.parent.parent == tmp_path / "crowd" and not pulled.is_marked


def test_a_forged_bundle_or_another_in_its_place_is_refused_and_nothing_stays(tmp_path):
    bundle = genuine_bundle(tmp_path / "b", key=KEY)
    members = members_of(bundle)
    forged = forge(with_json(members, record_of_method(members, "checkpoint"), lambda body: body["measured"].update(peak_bytes=1)),
                   tmp_path / "forged", KEY)
    rows = [{"name": name, "workflow": "w", "state": "checked"} for name in (forged.name, "0" * 32, "1" * 32)]
    archives = {forged.name: pack(forged), "0" * 32: pack(bundle)}
    found = list(speaking(listing(rows, archives)).pull(tmp_path / "crowd"))
    assert [bool(p.refusal) for p in found] == [True] * 3 and "[peak]" in found[0].refusal and bundle.name in found[1].refusal
    assert [p for p in (tmp_path / "crowd").rglob("*") if p.is_file()] == []


def test_lists_without_end_and_answers_without_end_are_cut_off(tmp_path):
    with pytest.raises(EnvironmentUnable, match="in circles"):
        list(speaking(listing([], following=0)).pull(tmp_path))
    with pytest.raises(EnvironmentUnable, match="answers with more than"):
        list(speaking(lambda r: httpx.Response(200, content=b"x" * (2**25 + 1))).pull(tmp_path))


@pytest.mark.parametrize("text", ["<html>hello</html>", "[]", '{"a": 1, "a": 2}', '{"bundle": NaN}', ""])
def test_another_server_is_told_from_ours(packed, text):
    with pytest.raises(EnvironmentUnable):
        speaking(lambda r: httpx.Response(200, content=text.encode())).submit(packed)


def test_an_answer_for_another_bundle_is_no_receipt(packed):
    with pytest.raises(EnvironmentUnable, match="answers for bundle"):
        speaking(lambda r: httpx.Response(200, json={"bundle": "0" * 32, "state": "checked"})).submit(packed)


# --- the command line -----------------------------------------------------------------------------------------------------
def test_the_command_line_shows_what_leaves_checks_it_and_writes_it(tmp_path, capsys):
    run = genuine_run(tmp_path / "run", seed=3)
    assert main(["crowd-submit", str(run), "--to", str(tmp_path / "c"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "taken out" in said
    assert "manifest.json" in said and "accepted" in said and "nothing was sent or written" in said and not (tmp_path / "c").exists()
    assert main(["crowd-submit", str(run), "--to", str(tmp_path / "c")]) == 0
    (bundle,) = (tmp_path / "c" / "genuine").iterdir()
    assert str(bundle) in capsys.readouterr().out
    assert main(["crowd-submit", str(run), "--to", str(tmp_path / "c")]) == 0 and "was there already" in capsys.readouterr().out
    assert stat.S_IMODE((tmp_path / "config" / "vramlab" / "signing-key.pem").stat().st_mode) == 0o600
    for path in (bundle, tmp_path / "c"):
        assert main(["check", "bundle", str(path)]) == 0
    (tmp_path / "b.tar.gz").write_bytes(pack(bundle))
    capsys.readouterr()
    assert main(["check", "bundle", str(tmp_path / "b.tar.gz"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_accepted"]


def test_check_says_all_of_it_in_json_and_by_its_exit_code(tmp_path, capsys):
    bundle = genuine_bundle(tmp_path / "c", key=KEY)
    assert main(["check", "bundle", str(bundle), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_accepted"] and report["bundle"] == bundle.name and report["examined"]["signature"] == 1
    (bundle / "run.json").write_text("{}")
    assert main(["check", "bundle", str(bundle), "--json"]) == 4
    assert [f["rule"] for f in json.loads(capsys.readouterr().out)["findings"]] == ["files"]
    assert main(["check", "bundle", str(bundle)]) == 4 and "[files]" in capsys.readouterr().out
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "text", tmp_path / "empty", tmp_path / "nowhere"):
        assert main(["check", "bundle", str(path)]) == 2 and "is no bundle" in capsys.readouterr().err
    (tmp_path / "bad.tar.gz").write_bytes(b"\x1f\x8b nothing")
    assert main(["check", "bundle", str(tmp_path / "bad.tar.gz")]) == 4 and "[archive]" in capsys.readouterr().out


def test_a_run_whose_numbers_do_not_agree_is_refused_before_it_leaves(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("VRAMLAB_TOKEN", "t")
    run = genuine_run(tmp_path / "run")
    for path in run.glob("cells/*/record.json"):
        record = RunRecord.load(path)
        if record.measured.get("peak_bytes"):
            body = json.loads(path.read_text())
            body["measured"]["peak_bytes"] += 1
            path.write_text(json.dumps(body))
    assert main(["crowd-submit", str(run), "--to", str(tmp_path / "c")]) == 4
    assert "[peak]" in capsys.readouterr().err and [p for p in (tmp_path / "c").rglob("*") if p.is_file()] == []
    assert main(["crowd-submit", str(run), "--to", str(tmp_path / "c"), "--dry-run"]) == 4
    assert main(["crowd-submit", str(run), "--to", "http://127.0.0.1:9"]) == 4 and "nothing was sent" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "code", "said"), [
    (["--to", "ftp://x"], 2, "no address"), (["--to", "http://x.example.org"], 3, "unencrypted"),
    (["--to", "https://x.invalid"], 3, "no token"), (["--to", "c", "--supersedes", "x"], 2, "32 hex digits")])
def test_wrong_words_are_told(tmp_path, capsys, monkeypatch, words, code, said):
    monkeypatch.chdir(tmp_path)
    assert main(["crowd-submit", str(genuine_run(tmp_path / "run")), *words]) == code
    assert said in capsys.readouterr().err
