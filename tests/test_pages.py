"""The pages over HTTP, on a collection whose rows are written by hand. What is looked for is reckoned here, not by the queries."""

from __future__ import annotations

import csv
import html
import io
import re
from dataclasses import dataclass
from xml.etree import ElementTree

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy.exc import OperationalError

from collection_by_hand import Made, fill
from served import visiting
from vramlab.collection import Library, find_collections
from vramlab.crowd.server.app import create_app
from vramlab.crowd.server.settings import Settings
from vramlab.crowd.server.tables import Result

ATOM = {"a": "http://www.w3.org/2005/Atom"}
EVERY_PAGE = ["/", "/leaderboard", "/leaderboard?metric=overhead&unverified=1", "/leaderboard?device=simulated:v100-32gb", "/results",
              "/compare", "/papers", "/papers/tang2022delta", "/papers/he2016deep", "/claims", "/claims?system=DELTA",
              "/claims/delta-mem-save",
              "/submitters/ada", "/competitions", "/competitions/r50-60", f"/bundles/{'a' * 32}", "/api", "/login", "/nope",
              "/results/99999"]


@dataclass
class Site:
    """A server with the collection."""

    client: httpx.Client
    made: Made
    app: object

    def text(self, path: str, status: int = 200) -> str:
        """What a page says, tags taken out and white space joined."""
        answer = self.client.get(path)
        assert answer.status_code == status, answer.text[:500]
        return words(answer.text)

    def board(self, query: str = "metric=peak_bytes") -> list[str]:
        """The rows of the leaderboard."""
        return [row for row in rows(self.client.get(f"/leaderboard?{query}").text) if row[0].isdigit()]

    def row(self, path: str, start: str) -> str:
        """The first row of a table whose text begins so."""
        return next(found for found in rows(self.client.get(path).text) if found.startswith(start))


def words(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def rows(markup: str) -> list[str]:
    return [words(found) for found in re.findall(r"<tr.*?</tr>", markup, re.DOTALL)]


def cells(markup: str) -> list[str]:
    return re.findall(r"<td[^>]*>.*?</td>", markup, re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    app = create_app(Settings(data_dir=tmp_path_factory.mktemp("server"), requests_per_minute=10**6))
    with visiting(app) as client:
        with app.state.database.write() as session:
            made = fill(session)
        yield Site(client, made, app)


def test_the_first_page_counts_checked_results_and_unverified_ones_apart(site):
    said = site.text("/")
    # checked: eager, delta 80 %, the simulated one; reproduced: two; flagged: one; withdrawn: in neither
    assert "5 checked results 2 of them reproduced by others 1 unverified beside them 2 submitters" in said


def test_the_leaderboard_leaves_unverified_results_out(site):
    first, second = site.board()
    assert first.startswith("1 delta arXiv 2022 5.000 GiB 32 60% 5.000 GiB (5.000 GiB to 5.000 GiB) 37.5 % 25.0 % 2 2 2 2")
    assert second.startswith("2 eager – 8.000 GiB 32 none")
    said = site.text("/leaderboard?metric=peak_bytes")
    assert "1.000 GiB" not in said and "1 unverified result is not counted" in said


def test_with_the_switch_unverified_groups_stand_last_and_are_called_so(site):
    found = site.board("metric=peak_bytes&unverified=1")
    assert [row.split()[1] for row in found] == ["delta", "eager", "delta"]
    assert found[2].startswith("3 delta unverified arXiv 2022 1.000 GiB")  # the least of all, and yet the last


def test_another_metric_another_order(site):
    """Least overhead: eager's 0 %, then delta at 80 %, which has 6 %, not at 60 %, which has 24 %."""
    found = site.board("metric=overhead")
    assert found[0].startswith("1 eager – 0.0 %") and found[1].startswith("2 delta arXiv 2022 6.0 % 32 80%")
    at_60 = site.board("metric=overhead&budget=60%25")
    assert len(at_60) == 1 and at_60[0].startswith("1 delta arXiv 2022 24.0 % 32 60% 25.0 % (24.0 % to 26.0 %)")


def test_no_predicted_number_stands_without_the_word(site):
    """Every cell with a figure of a simulated result or board holds `simulated`; measured ones do not."""
    unit = re.compile(r"\d (?:GiB|MiB|%|ms|s)(?!\w)")
    board = site.client.get("/leaderboard?metric=peak_bytes&device=simulated:v100-32gb").text
    figures = [text for text in map(words, cells(board)) if unit.search(text)]
    assert len(figures) == 4 and all("simulated" in figure for figure in figures)  # best, median, memory saved, overhead
    assert not any("simulated" in words(cell) for cell in cells(site.client.get("/leaderboard?metric=peak_bytes").text))
    row = site.row("/results", str(site.made.results["simulated"]))
    assert "5.250 GiB simulated 31.0 % simulated" in row
    said = site.text(f"/results/{site.made.results['simulated']}")
    assert "Peak memory 5.250 GiB simulated" in said and "Overhead 31.0 % simulated" in said
    assert "simulated" in site.row("/claims/delta-mem-save", "partly 34.4 % saved")


def test_the_list_marks_what_is_unverified_and_keeps_tombstones_out(site):
    page = site.client.get("/results").text
    assert "flagged unverified" in site.row("/results", str(site.made.results["flagged"]))
    assert '<tr class="unverified">' in page and "withdrawn" not in [word for row in rows(page) for word in row.split()]
    assert "4.000 GiB" in site.text("/results?state=withdrawn")


def test_a_result_page_shows_report_checks_history_and_mark(site):
    said = site.text(f"/results/{site.made.results['delta']}")
    agrees = f"{site.made.results['again']} bob reproduced peak memory 0.0 %, overhead 2.0 %"
    for expected in ("Peak memory 5.000 GiB", "Memory saved 37.5 %", "Overhead 24.0 % 95 % interval 20.0 % to 28.0 %; 20 timed steps",
                     "Step time 124 ms", "Moved between device and host 1.000 GiB simulated", "bundle received, by ada: note: first",
                     "warning telemetry-spans cells/1/telemetry.csv.gz it ends early", "bundle checked, by server", "Signature sig", agrees,
                     "delta-mem-save reproduced measured 37.5 % saved", "exact bit for bit as eager", "reproduced by 1"):
        assert expected in said, expected
    assert said.index("1 eager") < said.index("Checks")  # the reference of the same bundle


def test_without_records_results_are_compared_by_what_the_server_keeps(site):
    """delta at 60 % and at 80 %: 5 and 6.5 GiB, +24 % and +6 %; their budgets differ, their machines do not."""
    made = site.made.results
    found = rows(site.client.get(f"/compare?result={made['delta']}&result={made['delta80']}").text)
    assert "peak memory 5.000 GiB 6.500 GiB 1.300 not decided: the samples stand in the records" in found
    assert "overhead 24.0 % 6.0 % 0.2500 not decided: the samples stand in the records" in found
    assert "budget 60% 80%" in found and not any(row.startswith("machine_hash") for row in found)
    said = site.text(f"/compare?result={made['delta']}&result={made['simulated']}")
    assert "They have no figure in common" in said and "v100-32gb" in said


def test_a_method_stands_with_what_its_version_is(site):
    """The version of its card where the source is that of this server's collection, else the start of the source's hash; no bare number."""
    ours = Library(find_collections()).method("delta")
    told = {"": "delta \u2013", "0123456789" * 6 + "abcd": "delta source 01234567", ours.sha256: f"delta version {ours.card.version}"}
    number = site.made.results["delta"]
    for sha256, expected in told.items():
        with site.app.state.database.write() as session:
            kept, session.get(Result, number).method_source_sha256 = session.get(Result, number).method_source_sha256, sha256
        for path in ("/results", "/competitions/r50-60", "/papers/tang2022delta"):
            assert expected in " ".join(rows(site.client.get(path).text)), path
        assert f"Method {expected}" in site.text(f"/results/{number}")
        assert expected in site.text(f"/compare?result={number}&result={site.made.results['again']}")
        with site.app.state.database.write() as session:
            session.get(Result, number).method_source_sha256 = kept


def test_a_tombstone_says_why_and_a_flagged_result_that_it_is_unverified(site):
    assert "This result is withdrawn: a reason." in site.text(f"/results/{site.made.results['withdrawn']}")
    said = site.text(f"/results/{site.made.results['flagged']}")
    assert "Unverified: somebody or some rule objects to it: a reason." in said
    assert "has signed no mark for this bundle: it is unverified" in said


def test_a_paper_has_its_people_links_methods_claims_checklists_and_results(site):
    said = site.text("/papers/tang2022delta")
    claim = "delta-mem-save DELTA: GPU memory saved (range), unspecified set. Claimed: 40 to 70 % 2 reproduced 1 partly"
    for expected in ("Yu Tang, Chenyu Wang, Yufan Zhang", "arXiv, 2022", "10.48550/arXiv.2203.15980", "https://arxiv.org/abs/2203.15980",
                     "delta version 1", "@article{tang2022delta", claim, "NeurIPS paper checklist", "Related methods"):
        assert expected in said, expected
    numbers = [row.split()[0] for row in rows(site.client.get("/papers/tang2022delta").text) if re.match(r"\d+ delta", row)]
    made = site.made.results
    assert set(numbers[:2]) == {str(made["delta"]), str(made["again"])}  # what others reproduced first
    assert set(numbers) == {str(made[key]) for key in ("delta", "again", "delta80", "simulated", "flagged")}
    assert "Methods: delta. 4 results, 1 unverified beside" in site.text("/papers")


def test_the_claim_board_keeps_measured_and_simulated_verdicts_apart(site):
    assert "2 reproduced 1 partly – 2 submitters" in site.row("/claims", "delta-mem-save")
    assert "3 reproduced 1 partly – 3 submitters" in site.row("/claims?unverified=1", "delta-mem-save")
    said = site.text("/claims/delta-mem-save")
    assert said.index("Measured") < said.index("37.4 % saved") < said.index("By simulation") < said.index("34.4 % saved")
    # a claim that nobody has tested is there when its system is asked for, without a verdict
    assert site.row("/claims?system=DELTA", "delta-bs-r50").endswith("– – – 0 submitters")


def test_a_submitter_has_counts_by_state(site):
    said = site.text("/submitters/ada")
    assert "3 checked 1 reproduced" in said and "Its results reproduce 1 result of others" in said and "Ada, Institute" in said
    assert "1 flagged, unverified" in site.text("/submitters/eve")


def test_a_competition_ranks_checked_entries_only(site):
    said = site.text("/competitions/r50-60")
    ranked, unranked = said.split("Not ranked")
    assert ranked.index("1 delta – ada 24.0 %") < ranked.index("2 delta – bob 26.0 %") and " eve " not in ranked
    assert f"24.0 % 32 0: {site.made.results['delta']} 1 of 1" in ranked
    assert "eve flagged unverified it is flagged, not checked" in unranked


def test_csv_and_json_hold_the_same_results(site):
    table = list(csv.DictReader(io.StringIO(site.client.get("/results.csv").text)))
    body = site.client.get("/results.json").json()["results"]
    made = site.made.results
    newest_first = [made[key] for key in ("simulated", "flagged", "again", "delta80", "delta", "eager")]
    assert [int(row["result"]) for row in table] == [row["result"] for row in body] == newest_first
    by_id = {row["result"]: row for row in body}
    assert by_id[made["delta"]]["peak_bytes"] == 5 * 2**30 and by_id[made["delta"]]["numbers"] == "measured"
    assert by_id[made["simulated"]]["numbers"] == "simulated" and by_id[made["flagged"]]["is_unverified"] is True
    assert [row["numbers"] for row in table][0] == "simulated"
    board = list(csv.DictReader(io.StringIO(site.client.get("/leaderboard.csv?metric=overhead").text)))
    ranked = [(row["rank"], row["method"], float(row["best"]), row["numbers"]) for row in board]
    assert ranked == [("1", "eager", 0.0, "measured"), ("2", "delta", 0.06, "measured")]
    only = site.client.get("/results.json", params={"device": "simulated:v100-32gb"}).json()["results"]
    assert [row["result"] for row in only] == [made["simulated"]]


def test_the_feed_is_atom_and_says_what_is_simulated_or_unverified(site):
    feed = ElementTree.fromstring(site.client.get("/feed.atom").content)
    titles = [entry.find("a:title", ATOM).text for entry in feed.findall("a:entry", ATOM)]
    assert titles[0] == "delta on resnet50, simulated v100-32gb: checked"
    assert titles[1] == "delta on resnet50, NVIDIA H200: flagged (unverified)"
    links = [entry.find("a:link", ATOM).get("href") for entry in feed.findall("a:entry", ATOM)]
    assert all(site.client.get(link).status_code == 200 for link in links)
    assert feed.find("a:updated", ATOM).text == "2026-03-05T16:00:00Z"  # bundle-d's: 2026-03-01 12:00 and ord("d") = 100 hours


def test_the_api_page_shows_the_server_s_own_document_and_loads_nothing_from_elsewhere(site):
    document = site.client.get("/api/v1/openapi.json").json()
    said = site.text("/api")
    operations = [(method.upper(), path) for path, item in document["paths"].items() for method in item]
    assert operations and all(f"{method} {path}" in said for method, path in operations)
    assert not re.search(r'(?:src|href)="(?:https?:)?//', site.client.get("/api").text)


@pytest.mark.parametrize("path", EVERY_PAGE)
def test_every_page_is_whole_and_strict(site, path):
    answer = site.client.get(path)
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<script(?! src)|<style|\sstyle=|\son\w+=|javascript:", answer.text)
    assert answer.text.count("<h1") == 1 and 'lang="en"' in answer.text and re.search(r"<title>\S", answer.text)
    ids = re.findall(r'\sid="([^"]+)"', answer.text)
    assert len(ids) == len(set(ids))
    assert site.client.head(path).status_code == answer.status_code


def test_every_link_of_the_pages_leads_somewhere(site):
    """Followed from the first page on; the API's own paths are its own tests' matter."""
    seen, todo = set(), ["/"]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        answer = site.client.get(path)
        assert answer.status_code == 200, path
        if "html" in answer.headers["content-type"]:
            found = [html.unescape(link) for link in re.findall(r'(?:href|src|action)="([^"]+)"', answer.text)]
            todo += [link.partition("#")[0] for link in found if link.startswith("/") and not link.startswith("/api/v1/bundles")]
    assert "/leaderboard" in seen and f"/results/{site.made.results['withdrawn']}" not in seen  # a tombstone is found by its address only
    assert len(seen) > 60


@pytest.mark.parametrize("path", ["/nope", "/results/0", "/results/-1", "/results/x", "/results/99999999999999999999999", "/results/1%00",
                                  "/papers/nobody", "/submitters/nobody", "/competitions/none", "/claims/none", "/static/other.css",
                                  "/static/..%2f__init__.py", "/papers/%00", "/submitters/%00a", "/competitions/%00"])
def test_what_is_not_there_is_a_page_that_says_so(site, path):
    answer = site.client.get(path)
    assert answer.status_code in (400, 404) and "text/html" in answer.headers["content-type"] and "<h1>" in answer.text


@pytest.mark.parametrize("path", ["/leaderboard?metric=nonsense", "/leaderboard?batch=x", "/leaderboard?device=v100",
                                  "/results?state=nonsense", "/results?before=-1", "/results?model=%00",
                                  "/results?before=99999999999999999999", f"/results?model={'x' * 301}"])
def test_what_cannot_be_understood_is_refused_in_words(site, path):
    answer = site.client.get(path)
    assert answer.status_code == 400 and "That cannot be understood" in answer.text


@pytest.mark.parametrize("method, path", [("POST", "/leaderboard"), ("PUT", "/results/1"), ("DELETE", "/competitions/r50-60"),
                                          ("POST", "/"), ("PATCH", "/login")])
def test_a_wrong_method_is_refused(site, method, path):
    answer = site.client.request(method, path)
    assert answer.status_code == 405 and "text/html" in answer.headers["content-type"]


def test_errors_of_the_api_stay_json(site):
    assert site.client.get("/api/v1/nothing").headers["content-type"] == "application/json"


def test_an_unknown_model_gives_an_empty_board_and_no_fault(site):
    assert "No result counts under these filters" in site.text("/leaderboard?model=nothing&device=measured:none")


def test_pages_of_many_results_hold_each_of_them_once(tmp_path):
    app = create_app(Settings(data_dir=tmp_path))
    with visiting(app) as client:
        with app.state.database.write() as session:
            made = fill(session)
            first = session.get(Result, made.results["delta80"])
            for number in range(120):
                copy = {c.name: getattr(first, c.name) for c in Result.__table__.columns if c.name != "id"}
                session.add(Result(**copy | {"cell_id": f"copy-{number}"}))
        seen, path, pages = [], "/results", 0
        while path:
            text = client.get(path).text
            seen += [int(number) for number in re.findall(r'name="result" value="(\d+)"', text)]
            found = re.search(r'rel="next" href="([^"]+)"', text)
            path, pages = html.unescape(found[1]) if found else "", pages + 1
    assert pages == 3 and len(seen) == len(set(seen)) == 126 and seen == sorted(seen, reverse=True)


def test_while_the_database_is_away_a_page_says_when_to_come_again(tmp_path, monkeypatch):
    app = create_app(Settings(data_dir=tmp_path))
    with visiting(app) as client:
        def away(*_):
            raise OperationalError("SELECT 1", {}, Exception("server closed the connection"))

        monkeypatch.setattr(app.state.database, "read", away)
        page, api = client.get("/leaderboard"), client.get("/api/v1/health")
    assert (page.status_code, page.headers["retry-after"]) == (503, "5") and "The database does not answer" in page.text
    assert "text/html" in page.headers["content-type"] and api.headers["content-type"] == "application/json" and api.status_code == 503


def test_below_another_path_every_link_stays_below_it(tmp_path):
    """As behind a proxy that takes the path off and says so by the root path."""
    app = create_app(Settings(data_dir=tmp_path))
    outer = FastAPI(lifespan=lambda _: app.router.lifespan_context(app))
    outer.mount("/results-of-us", app)
    with visiting(outer) as client:
        with app.state.database.write() as session:
            fill(session)
        for path in ("/", "/leaderboard", "/results", "/papers", "/api"):
            answer = client.get(f"/results-of-us{path}")
            links = [link for link in re.findall(r'(?:href|src|action)="(/[^"]*)"', answer.text)]
            assert answer.status_code == 200 and links and all(link.startswith("/results-of-us/") for link in links), path
