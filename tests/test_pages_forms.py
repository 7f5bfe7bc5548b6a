"""Visits and forms of the pages: login by token, CSRF, competitions and their entries."""

from __future__ import annotations

import re
import shutil
from datetime import timedelta

import pytest
from sqlalchemy import func, select

from collection_by_hand import fill
from served import visiting
from vramlab.crowd.server.accounts import revoke_token
from vramlab.crowd.server.app import create_app
from vramlab.crowd.server.database import Database
from vramlab.crowd.server.pages import visits
from vramlab.crowd.server.settings import Settings
from vramlab.crowd.server.tables import Audit, Competition, Entry, Result, now

RULES = {"title": "Least memory", "name": "least", "description": "", "model": "resnet50", "workload": "", "batch_size": "32",
         "device": "NVIDIA H200", "budget": "60%", "seeds": "0, 1", "metric": "peak_bytes", "opens_at": "2026-01-01T00:00",
         "closes_at": "2126-01-01T00:00"}


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """(a server's folder with the collection, what was made): each test gets a copy."""
    folder = tmp_path_factory.mktemp("filled")
    database = Database(Settings(data_dir=folder))
    database.migrate()
    with database.write() as session:
        made = fill(session)
    database.close()
    return folder, made


@pytest.fixture
def site(filled, tmp_path):
    shutil.copytree(filled[0], tmp_path / "server")
    app = create_app(Settings(data_dir=tmp_path / "server"))
    with visiting(app) as client:
        client.made, client.app = filled[1], app
        yield client


def csrf(client, path):
    """The token in a page's form."""
    return re.search(r'name="csrf" value="([0-9a-f]{64})"', client.get(path).text)[1]


def log_in(client, name):
    answer = client.post("/login", data={"csrf": csrf(client, "/login"), "token": client.made.tokens[name]})
    assert answer.status_code == 303, answer.text
    return answer


def count(client, what):
    with client.app.state.database.read() as session:
        return session.scalar(select(func.count()).select_from(what))


def announce(client, **changes):
    return client.post("/competitions", data={"csrf": csrf(client, "/competitions/new"), **RULES, **changes})


def test_a_session_cookie_is_out_of_reach_of_scripts_and_other_sites(site):
    cookie = log_in(site, "ada").headers.get_list("set-cookie")[0]
    assert cookie.startswith("vramlab_session=") and "HttpOnly" in cookie and "SameSite=strict" in cookie and "Max-Age=28800" in cookie
    assert site.made.tokens["ada"] not in cookie and site.made.tokens["ada"].rpartition("_")[2] not in cookie
    assert "Log out" in site.get("/").text


def test_behind_https_the_cookie_is_secure(tmp_path):
    app = create_app(Settings(data_dir=tmp_path, public_url="https://results.example.org"))
    with visiting(app) as client:
        with app.state.database.write() as session:
            token = fill(session).tokens["ada"]
        page = client.get("/login")
        cookie = page.headers["set-cookie"].partition(";")[0]  # which the client keeps to itself, since it does not come by HTTPS
        form = {"csrf": re.search(r'name="csrf" value="(\w+)"', page.text)[1], "token": token}
        answer = client.post("/login", data=form, headers={"Origin": "https://results.example.org", "Cookie": cookie})
    assert answer.status_code == 303 and "Secure" in answer.headers.get_list("set-cookie")[0]


@pytest.mark.parametrize("token", ["", "vl_0000000000000000_" + "a" * 43, "x' OR '1'='1", "vl_" + "9" * 400])
def test_a_wrong_token_begins_no_visit(site, token):
    answer = site.post("/login", data={"csrf": csrf(site, "/login"), "token": token})
    assert answer.status_code == 403 and "vramlab_session" not in answer.headers.get("set-cookie", "")
    assert "There is no such token" in answer.text and "Log out" not in site.get("/").text


def test_a_revoked_token_ends_the_visit_at_once(site):
    log_in(site, "ada")
    with site.app.state.database.write() as session:
        revoke_token(session, site.made.tokens["ada"].split("_")[1], actor="test")
    assert "Log out" not in site.get("/").text and site.get("/competitions/new").status_code == 403


def test_a_cookie_that_is_changed_or_over_begins_no_visit():
    secret = b"s" * 32
    cookie = visits.make_session(secret, "0123456789abcdef", now=1000.0)
    assert visits.read_session(secret, cookie, now=1000.0 + visits.SESSION_SECONDS - 1) == "0123456789abcdef"
    assert visits.read_session(secret, cookie, now=1000.0 + visits.SESSION_SECONDS) is None
    assert visits.read_session(b"t" * 32, cookie, now=1000.0) is None
    body, _, code = cookie.rpartition(".")
    public_id, until, salt = body.split(".")
    for forged in (f"{public_id}.{int(until) + 1}.{salt}.{code}", f"fedcba9876543210.{until}.{salt}.{code}", "", ".", "a.b.c.d", code,
                   "é.é", f"{body}.{visits.csrf_token(secret, body)}"):
        assert visits.read_session(secret, forged, now=1000.0) is None, forged


def test_logging_out_ends_the_visit(site):
    log_in(site, "ada")
    assert site.post("/logout", data={"csrf": csrf(site, "/")}).status_code == 303
    assert "Log out" not in site.get("/").text


FORMS = {"login": ("/login", {"token": "x"}), "logout": ("/logout", {"any": "field"}), "announce": ("/competitions", RULES),
         "enter": ("/competitions/r50-60/entries", {"result": "1"}), "correct": ("/competitions/r50-60/correct", {"title": "Mine"}),
         "withdraw": ("/competitions/r50-60/withdraw", {"reason": "x"})}


@pytest.mark.parametrize("form", FORMS)
def test_no_form_is_taken_without_the_token_of_its_visit(site, form):
    path, fields = FORMS[form]
    before = count(site, Competition), count(site, Entry), count(site, Audit)
    log_in(site, "ada")
    stranger = visits.csrf_token(b"another secret", site.cookies["vramlab_session"])
    another_visit = visits.csrf_token(site.app.state.pages_secret, "another visit")
    for wrong in ({}, {"csrf": ""}, {"csrf": stranger}, {"csrf": another_visit}, {"csrf": "é"}):
        answer = site.post(path, data={**fields, **wrong})
        assert answer.status_code == 403 and "not made for this visit" in answer.text
    assert (count(site, Competition), count(site, Entry), count(site, Audit)) == before
    assert "Log out" in site.get("/").text


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
                                     {"Sec-Fetch-Site": "same-site"}])
def test_what_a_browser_says_comes_from_elsewhere_is_refused_even_with_the_token(site, headers):
    log_in(site, "ada")
    fields = {"csrf": csrf(site, "/competitions/new"), **RULES}
    assert site.post("/competitions", data=fields, headers=headers).status_code == 403
    assert site.post("/competitions", data=fields, headers={"Origin": str(site.base_url).rstrip("/")}).status_code == 303


def test_an_organiser_announces_a_competition(site):
    log_in(site, "ada")
    answer = announce(site, title="Least memory & more", description="Line one")
    assert (answer.status_code, answer.headers["location"]) == (303, "/competitions/least")
    page = site.get("/competitions/least").text
    assert "Least memory &amp; more" in page and "2026-01-01 00:00 UTC" in page and "0, 1" in page
    with site.app.state.database.read() as session:
        made = session.scalars(select(Competition).where(Competition.name == "least")).one()
        last = session.scalars(select(Audit).order_by(Audit.id.desc()).limit(1)).one()
        assert (made.model, made.batch_size, made.budget, made.seeds, made.metric) == ("resnet50", 32, "60%", [0, 1], "peak_bytes")
        assert made.organiser.name == "ada"
        assert (last.action, last.actor, last.subject) == ("competition announced", "ada", "competition least")
    assert "there is a competition &#39;least&#39; already" in announce(site).text


@pytest.mark.parametrize("budget, is_one", [("6 elephants", False), ("60 %", False), ("60.0%", False), ("60", False), ("0%", False),
                                            ("0GiB", False), ("", True), ("auto", True), ("62.5%", True), ("6GiB", True)])
def test_a_budget_that_no_result_can_have_is_refused(site, budget, is_one):
    log_in(site, "ada")
    answer = announce(site, budget=budget)
    assert answer.status_code == (303 if is_one else 422) and ("a budget is as results have it" in answer.text) is not is_one
    if is_one:
        assert ("a budget is as results have it" in correct(site, budget="6 elephants").text)


def correct(client, name="least", **changes):
    path = f"/competitions/{name}/correct"
    return client.post(path, data={"csrf": csrf(client, path), **RULES, **changes})


def audited(client) -> list[tuple[str, str, dict]]:
    with client.app.state.database.read() as session:
        rows = session.scalars(select(Audit).where(Audit.subject == "competition least").order_by(Audit.id))
        return [(row.action, row.actor, row.detail) for row in rows]


def test_an_organiser_corrects_a_competition_before_and_after_the_first_entry(site):
    log_in(site, "ada")
    announce(site)
    assert 'href="/competitions/least/correct"' in site.get("/competitions/least").text
    form = site.get("/competitions/least/correct").text
    assert 'value="Least memory"' in form and 'value="0, 1"' in form and "field-name" not in form
    answer = correct(site, title="Least bytes", seeds="0, 1, 2", metric="overhead")
    assert (answer.status_code, answer.headers["location"]) == (303, "/competitions/least")
    page = site.get("/competitions/least").text
    assert "Least bytes" in page and "0, 1, 2" in page and "<dt>Corrected</dt>" in page
    assert audited(site)[1:] == [("competition corrected", "ada", {
        "title": ["Least memory", "Least bytes"], "seeds": [[0, 1], [0, 1, 2]], "metric": ["peak_bytes", "overhead"]})]
    assert correct(site, title="Least bytes", seeds="0, 1, 2", metric="overhead").status_code == 303
    assert len(audited(site)) == 2, "no change, no row"
    wrong = correct(site, title="", closes_at="2025-01-01T00:00")
    assert wrong.status_code == 422 and "It was not corrected" in wrong.text and 'id="fault-title"' in wrong.text
    correct(site)
    assert enter(site, "least", site.made.results["delta"]).status_code == 303
    form = site.get("/competitions/least/correct").text
    assert "Somebody has entered" in form and "field-title" in form and "field-seeds" not in form
    entered = len(audited(site))
    for change in ({"seeds": "0"}, {"metric": "overhead"}, {"model": "vgg16"}, {"budget": ""}):
        answer = correct(site, **change)
        assert answer.status_code == 422 and "what decides the ranking stands" in answer.text, change
    assert "outside the dates" in correct(site, closes_at="2026-01-02T00:00").text and len(audited(site)) == entered
    assert correct(site, title="At last", closes_at="2127-01-01T00:00").status_code == 303
    assert "At last" in site.get("/competitions/least").text and "2127-01-01" in site.get("/competitions/least").text


def test_an_organiser_withdraws_a_competition(site):
    log_in(site, "ada")
    announce(site)
    fields = {"csrf": csrf(site, "/competitions/least")}
    for reason in ("", "  ", "x" * 2001):
        assert site.post("/competitions/least/withdraw", data={**fields, "reason": reason}).status_code == 422
    answer = site.post("/competitions/least/withdraw", data={**fields, "reason": "wrong <board>"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/competitions/least")
    page = site.get("/competitions/least").text
    assert "wrong &lt;board&gt;" in page and "Ranking" not in page and "/correct" not in page and "field-result" not in page
    assert "<h2>Withdrawn</h2>" in site.get("/competitions").text
    assert audited(site)[-1] == ("competition withdrawn", "ada", {"reason": "wrong <board>"})
    fields |= {"result": str(site.made.results["delta"])}
    answer = site.post("/competitions/least/entries", data=fields)
    assert answer.status_code == 422 and "The competition is withdrawn" in answer.text
    for what in ("correct", "withdraw"):
        assert site.post(f"/competitions/least/{what}", data={**fields, **RULES, "reason": "again"}).status_code == 403
    assert site.get("/competitions/least/correct").status_code == 403


def test_nobody_else_corrects_or_withdraws(site):
    log_in(site, "ada")
    announce(site)
    site.cookies.clear()
    log_in(site, "bob")  # his token has the scope submit only
    assert "For its organiser" not in site.get("/competitions/least").text
    fields = {"csrf": csrf(site, "/competitions/least"), "reason": "mine", **RULES, "title": "Mine"}
    for what in ("correct", "withdraw"):
        assert site.post(f"/competitions/least/{what}", data=fields).status_code == 403
    assert site.get("/competitions/least/correct").status_code == 403 and len(audited(site)) == 1


def test_who_is_not_logged_in_is_told_how_to_enter(site):
    log_in(site, "ada")
    announce(site)
    assert "training.seed=SEED" not in site.get("/competitions/least").text, "there is the form"
    site.cookies.clear()
    page = site.get("/competitions/least").text
    assert "training.seed=SEED" in page and 'href="/login">log in</a>' in page and "field-result" not in page
    assert "entering results" in site.get("/login").text


def test_who_may_not_organise_announces_nothing(site):
    assert site.get("/competitions/new").status_code == 403
    log_in(site, "bob")  # his token has the scope submit only
    assert site.get("/competitions/new").status_code == 403
    answer = site.post("/competitions", data={"csrf": csrf(site, "/"), **RULES})
    assert answer.status_code == 403 and "has not the scope" in answer.text and count(site, Competition) == 1


@pytest.mark.parametrize("field, value, said", [
    ("title", "", "is needed"), ("title", "x" * 201, "longer than 200"), ("name", "Über", "lower-case letters"),
    ("name", "new", "lower-case letters"), ("name", "../admin", "lower-case letters"), ("batch_size", "-1", "whole number above zero"),
    ("batch_size", "１", "whole number above zero"),
    ("seeds", "1, x", "whole numbers"), ("seeds", "", "is needed"), ("seeds", " , ", "at least one"),
    ("seeds", "1;DROP TABLE result", "whole numbers"), ("metric", "id", "is one of"),
    ("closes_at", "2025-01-01T00:00", "not after it opens"), ("opens_at", "tomorrow", "date and a time"),
    ("opens_at", "0001-01-01T00:00", "no date"),
    ("description", "x" * 4001, "longer than 4000"), ("device", "cpu", "words of workflows"), ("device", "sim:h200", "words of workflows"),
])
def test_wrong_rules_come_back_with_what_is_wrong_and_what_was_written(site, field, value, said):
    log_in(site, "ada")
    answer = announce(site, **{field: value})
    assert answer.status_code == 422 and said in answer.text
    assert f'href="#field-{field}"' in answer.text and f'id="fault-{field}"' in answer.text
    assert field in ("description", "metric") or value == "" or f'value="{value}"' in answer.text
    assert count(site, Competition) == 1


def test_a_submitter_enters_a_result_once(site):
    log_in(site, "ada")
    announce(site)
    assert enter(site, "least", site.made.results["delta"]).status_code == 303
    assert "is entered already" in enter(site, "least", site.made.results["delta"]).text
    page = site.get("/competitions/least").text
    assert "Nothing is ranked yet" in page and re.search(r"Incomplete</h2>.*<td class=\"words\">seed 1</td>", page, re.DOTALL)


def test_a_submitter_enters_the_results_of_all_seeds_at_once_or_none(site):
    first = site.made.results["delta"]
    with site.app.state.database.write() as session:
        row = session.get(Result, first)
        columns = {c.key: getattr(row, c.key) for c in Result.__table__.columns if c.key != "id"}
        second = Result(**columns | {"seed": 1, "cell_id": "another", "peak_bytes": row.peak_bytes + 2**20, "record_sha256": "1" * 64})
        session.add(second)
        session.flush()
        number = second.id
    log_in(site, "ada")
    announce(site)
    before = count(site, Entry)
    assert enter(site, "least", f"{first}, {number}, 99999").status_code == 422 and count(site, Entry) == before
    assert enter(site, "least", f"{first}, {number},").status_code == 303 and count(site, Entry) == before + 2
    page = site.get("/competitions/least").text
    row = re.search(r'>1</td><th scope="row">delta.*?</tr>', page, re.DOTALL)[0]
    assert f'data-value="{5 * 2**30 + 2**19}.0"' in row
    assert f'0: <a href="/results/{first}"' in row and f'1: <a href="/results/{number}"' in row
    assert "2 of 2" in row and "Incomplete" not in page and "Not ranked" not in page


def lasting(first, last):
    """A competition from one day to another, counted from now."""
    return Competition(name="any", title="Any", organiser_id=1, model="resnet50", device="NVIDIA H200", seeds=[], metric="peak_bytes",
                       opens_at=now() + timedelta(days=first), closes_at=now() + timedelta(days=last))


def enter(client, competition, result):
    path = f"/competitions/{competition}"
    return client.post(f"{path}/entries", data={"csrf": csrf(client, path), "result": str(result)})


@pytest.mark.parametrize("which, said", [("again", "another account&#39;s"), ("delta80", "its budget is"),
                                         ("simulated", "does not fit"), ("x", "There is no result"),
                                         ("99999999999999999999", "There is no result"), ("1 OR 1=1", "There is no result")])
def test_what_does_not_fit_enters_nothing(site, which, said):
    log_in(site, "ada")
    announce(site)
    before = count(site, Entry)
    answer = enter(site, "least", site.made.results.get(which, which))
    assert answer.status_code == 422 and said in answer.text and count(site, Entry) == before


def test_an_unchecked_entry_is_shown_and_ranked_only_when_it_is_checked(site):
    log_in(site, "eve")
    with site.app.state.database.write() as session:
        session.add(lasting(-1, 1))
    number = site.made.results["flagged"]
    assert enter(site, "any", number).status_code == 303
    page = site.get("/competitions/any").text
    assert "Nothing is ranked yet" in page and "it is flagged, not checked" in page
    with site.app.state.database.write() as session:
        session.get(Result, number).state = "checked"
    assert "Nothing is ranked yet" not in site.get("/competitions/any").text


@pytest.mark.parametrize("shift, phase", [((1, 2), "to come"), ((-2, -1), "closed")])
def test_outside_its_dates_nobody_enters(site, shift, phase):
    log_in(site, "ada")
    with site.app.state.database.write() as session:
        session.add(lasting(*shift))
    fields = {"csrf": csrf(site, "/competitions/any"), "result": str(site.made.results["delta"])}
    before = count(site, Entry)
    answer = site.post("/competitions/any/entries", data=fields)
    assert answer.status_code == 422 and f"The competition is {phase}" in answer.text and count(site, Entry) == before


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize("body, kind, status", [
    (b"{}", "application/json", 415), (b"a=1", "text/plain", 415),
    (b"", "multipart/form-data; boundary=x", 415), (b"csrf=a&csrf=b", FORM, 400), (b"a=%ff%fe", FORM, 400), (b"a=%00", FORM, 400),
    ("a=é".encode(), FORM, 400), (b"a=" + b"x" * 70000, FORM, 413),
    (b"&".join(b"a%d=1" % n for n in range(60)), FORM, 400),
])
def test_what_is_no_form_is_refused_before_anything_is_looked_at(site, body, kind, status):
    for path in ("/login", "/logout", "/competitions", *(f"/competitions/r50-60/{what}" for what in ("entries", "correct", "withdraw"))):
        answer = site.post(path, content=body, headers={"Content-Type": kind})
        assert answer.status_code == status and "text/html" in answer.headers["content-type"]


def test_guessing_tokens_is_slowed_down(site):
    """Ten wrong ones a minute; then not even the right one is looked at."""
    fields = {"csrf": csrf(site, "/login"), "token": "vl_0000000000000000_" + "a" * 43}
    said = [site.post("/login", data=fields).status_code for _ in range(11)]
    assert said == [403] * 10 + [429]
    last = site.post("/login", data=fields | {"token": site.made.tokens["ada"]})
    assert last.status_code == 429 and int(last.headers["retry-after"]) >= 1 and "text/html" in last.headers["content-type"]
