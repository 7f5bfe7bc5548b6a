"""The pages that anybody can read, the exports, and the files that pages need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from sqlalchemy.orm import Session

from vramlab.crowd.server import agreements, contests, queries
from vramlab.crowd.server.exports import COLUMNS, atom_feed, csv_lines, json_pieces
from vramlab.crowd.server.pages import boards, organise, reads, words
from vramlab.crowd.server.pages.asked import device_asked, number_asked, plain_text, result_number, text_asked
from vramlab.crowd.server.pages.boards import LEADERBOARD_COLUMNS, Asked, Shown
from vramlab.crowd.server.pages.openapi import read_operations, read_schemas
from vramlab.crowd.server.pages.site import (
    HEADERS, HERE, find_visitor, link_maker, own_address, page_text, render, respond, shelves, stylesheet,
)
from vramlab.crowd.server.queries import MOST_ROWS, ResultFilter
from vramlab.crowd.server.pages.records import read_record
from vramlab.crowd.server.tables import State

router = APIRouter(include_in_schema=False)
router.include_router(organise.router)
FEED_ROWS = 50
PAPER_ROWS = 100  # results on a paper's page


def page(path: str) -> Callable[[Any], Any]:
    """A route for GET, and for HEAD, which link checkers ask with."""
    return router.api_route(path, methods=["GET", "HEAD"])


def _view(request: Request, template: str, **shown: Any) -> Response:
    return render(request, template, visitor=find_visitor(request), **shown)


@page("/")
def home(request: Request) -> Response:
    """The collection in numbers and what came last."""
    with request.app.state.database.read() as session:
        totals = queries.totals(session)
        newest = queries.results(session, ResultFilter(include_unverified=True), limit=10, newest_first=True)
        figures = [(totals.results, "checked result" if totals.results == 1 else "checked results"),
                   (totals.reproduced, "of them reproduced by others"), (totals.unverified, "unverified beside them"),
                   (totals.accounts, "submitter" if totals.accounts == 1 else "submitters")]
        return _view(request, "home.html.j2", figures=figures, newest=newest, address=own_address(request))


# --------------------------------------------------------------------------------------------------------------- leaderboard
@page("/leaderboard")
def leaderboard(request: Request) -> Response:
    """Methods on one model and device, by one metric."""
    visitor, asked = find_visitor(request), _board_asked(request)
    with request.app.state.database.read() as session:
        def shown() -> dict[str, Any]:
            found = _read_board(request, session, asked)
            papers = {row.method: shelves().paper_of(row.method) for row in found.board.rows}
            return {"papers": papers, "query": found.query(), **found.for_template()}

        if visitor:  # whose name, and whose form to log out, stand on the page
            return render(request, "leaderboard.html.j2", visitor=visitor, **shown())
        key = ("page", request.scope.get("root_path", ""), asked)
        return respond(request.app.state.recent.answer(
            session, key, lambda: page_text(request, "leaderboard.html.j2", visitor=None, **shown())))


@page("/leaderboard.csv")
def leaderboard_csv(request: Request) -> Response:
    """The same table."""
    with request.app.state.database.read() as session:
        shown = _read_board(request, session, _board_asked(request))
    return _download(csv_lines(LEADERBOARD_COLUMNS, shown.plain_rows()), "text/csv; charset=utf-8", "leaderboard.csv")


@page("/leaderboard.json")
def leaderboard_json(request: Request) -> Response:
    """The same table."""
    with request.app.state.database.read() as session:
        shown = _read_board(request, session, _board_asked(request))
    return _download(json_pieces({"asked": shown.query(), "unit": shown.metric.unit}, "rows", shown.plain_rows()), "application/json")


def _read_board(request: Request, session: Session, asked: Asked) -> Shown:
    return boards.read_board(session, asked, reads.facets(session, request.app.state.recent))


def _board_asked(request: Request) -> Asked:
    device, is_simulated = device_asked(request)
    return Asked(model=text_asked(request, "model"), device=device, is_simulated=bool(is_simulated),
                 workload=text_asked(request, "workload"), batch=number_asked(request, "batch"), budget=text_asked(request, "budget"),
                 metric=text_asked(request, "metric") or "memory_saved", unverified=text_asked(request, "unverified") == "1")


# ------------------------------------------------------------------------------------------------------------------- results
@page("/results")
def results(request: Request) -> Response:
    """All results, the newest first; unverified ones are marked."""
    which, query = _results_asked(request)
    with request.app.state.database.read() as session:
        rows, pages = _leaf(request, session, which, "/results", query)
        facets = reads.facets(session, request.app.state.recent)
        choices = {"models": boards.alike(facets.models), "methods": boards.alike(facets.methods), "devices": boards.device_choices(facets),
                   "states": boards.alike(State)}
        chosen = {key: query.get(key, "") for key in ("model", "method", "device", "state")}
        return _view(request, "results.html.j2", rows=rows, pages=pages, choices=choices, chosen=chosen, query=query)


def _results_asked(request: Request) -> tuple[ResultFilter, dict[str, str]]:
    """(the filter, what stands in the address)."""
    query = {name: text for name in ("model", "method", "device", "state", "submitter") if (text := text_asked(request, name))}
    if query.get("state", State.CHECKED) not in list(State):
        raise HTTPException(400, f"There is no state {query['state']!r}; there are {', '.join(State)}.")
    device, is_simulated = device_asked(request)
    return ResultFilter(model=query.get("model"), method=query.get("method"), device=device or None, is_simulated=is_simulated,
                        state=query.get("state"), account=query.get("submitter"), include_unverified=True), query


def _leaf(request: Request, session: Session, which: ResultFilter, path: str, query: Mapping[str, str]) -> tuple[list[Any], dict[str, str]]:
    """(a page of results, addresses of the next page and the first where there are such)."""
    href, before = link_maker(request), number_asked(request, "before") or 0
    rows = queries.results(session, which, after=before, limit=reads.PAGE + 1, newest_first=True)
    older = href(path, **query, before=rows[reads.PAGE - 1].id) if len(rows) > reads.PAGE else ""
    return rows[:reads.PAGE], {"older": older, "newest": href(path, **query) if before else ""}


@page("/results.csv")
def results_csv(request: Request) -> Response:
    """Every result that the filters find, tombstones left out."""
    return _download(csv_lines(COLUMNS, _rows(request)), "text/csv; charset=utf-8", "results.csv")


@page("/results.json")
def results_json(request: Request) -> Response:
    """Every result that the filters find, tombstones left out."""
    return _download(json_pieces({"address": own_address(request)}, "results", _rows(request)), "application/json")


def _rows(request: Request) -> Iterator[dict[str, Any]]:
    """Read while they are sent. What is asked is read before the answer begins, so that a fault in it is one."""
    which, _ = _results_asked(request)
    return reads.all_results(request.app.state.database, which)


@page("/results/{number}")
def result(request: Request, number: str) -> Response:
    """One result: report, checks, history, mark."""
    with request.app.state.database.read() as session:
        found = _found(queries.result(session, result_number(number)), f"There is no result {number}.")
        row, bundle = found.result, _found(queries.bundle(session, found.bundle.name), "Its bundle is not here.")
        record = read_record(request.app.state.settings, row)
        return _view(
            request, "result.html.j2", r=row, bundle=found.bundle, figures=boards.figures(row, record), findings=found.bundle.findings,
            history=queries.audit_log(session, subject=f"bundle {found.bundle.name}", limit=200), mark=bundle.mark,
            agreements=found.agreements, apart=agreements.apart(session, row, request.app.state.settings), numbers=agreements.NUMBERS,
            entries=found.entries, verdicts=bundle.verdicts, references=reads.references_beside(session, row),
            settings=boards.settings(row, record), environment=words.leaves(record.environment) if record else [],
            reason=(record.message if record else "") or row.reason, paper=shelves().paper_of(row.method), address=own_address(request))


@page("/bundles/{name}")
def bundle(request: Request, name: str) -> Response:
    """One submission with all its results: what a receipt's address leads to."""
    with request.app.state.database.read() as session:
        found = _found(queries.bundle(session, plain_text(name)), f"There is no bundle {name!r}.")
        return _view(request, "bundle.html.j2", bundle=found.bundle, rows=found.results, mark=found.mark, verdicts=found.verdicts,
                     findings=found.bundle.findings, address=own_address(request),
                     history=queries.audit_log(session, subject=f"bundle {found.bundle.name}", limit=200))


@page("/compare")
def compare(request: Request) -> Response:
    """Two results side by side: which settings differ, what can be told apart."""
    given = [text.strip() for text in request.query_params.getlist("result") if text.strip()]
    if len(given) != 2:
        return _view(request, "compare_form.html.j2", given=given[:2])
    with request.app.state.database.read() as session:
        pair = [_found(queries.result(session, result_number(text)), f"There is no result {text}.").result for text in given]
        records = [read_record(request.app.state.settings, row) for row in pair]
        return _view(request, "compare.html.j2", pair=pair, **boards.comparison(pair, records))


# ---------------------------------------------------------------------------------------------- papers, claims, submitters
@page("/papers")
def papers(request: Request) -> Response:
    """Every paper that the collection cites."""
    with request.app.state.database.read() as session:
        of_methods, of_models = reads.counts_by(session, "method"), reads.counts_by(session, "model")
    entries = [boards.paper_counts(entry, of_methods, of_models) for entry in shelves().papers.values()]
    groups = [("Of methods", [e for e in entries if e["entry"].methods]),
              ("Of models only", [e for e in entries if not e["entry"].methods])]
    return _view(request, "papers.html.j2", groups=groups)


@page("/papers/{key}")
def paper(request: Request, key: str) -> Response:
    """One paper: what it is, its methods, claims and checklists, and every result."""
    entry = _found(shelves().papers.get(key), f"No card cites a paper {key!r}.")
    with request.app.state.database.read() as session:
        names = sorted({name for facts in entry.methods for name in facts.names})
        rows = queries.results_of_methods(session, names, include_unverified=True, limit=PAPER_ROWS) if names else \
            [row for model in entry.models for row in queries.results(session, ResultFilter(model=model, include_unverified=True),
                                                                      limit=reads.PAGE, newest_first=True)]
        board = {row.claim: row for row in queries.claim_board(session)}
        related = [(facts.name, other.key) for other in shelves().papers.values() if other.key != key for facts in other.methods
                   if set(facts.tags) & {tag for mine in entry.methods for tag in mine.tags}]
        return _view(request, "paper.html.j2", entry=entry, rows=rows, has_more=len(rows) >= PAPER_ROWS, related=related,
                     claims=boards.claim_rows(entry.claims, shelves().claims, board), checklists=shelves().checklists)


@page("/claims")
def claims(request: Request) -> Response:
    """What the crowd's runs say of papers' claims."""
    unverified, system = text_asked(request, "unverified") == "1", text_asked(request, "system")
    known = shelves().claims
    with request.app.state.database.read() as session:
        board = {row.claim: row for row in queries.claim_board(session, include_unverified=unverified)}
    asked = [name for name, claim in known.items() if claim.system == system] if system else list(board)
    systems = boards.alike(sorted({claim.system for claim in known.values()}))
    return _view(request, "claims.html.j2", claims=boards.claim_rows(asked, known, board), choices={"systems": systems},
                 chosen={"system": system, "unverified": unverified})


@page("/claims/{name}")
def claim(request: Request, name: str) -> Response:
    """Each run's verdict on one claim."""
    name = plain_text(name)
    known = shelves().claims.get(name)
    with request.app.state.database.read() as session:
        verdicts = queries.verdicts_of_claim(session, name, include_unverified=True, limit=MOST_ROWS)
        if not verdicts and known is None:
            raise HTTPException(404, f"There is no claim {name!r}.")
        sides = [("Measured", [v for v in verdicts if v.is_simulated is False]), ("By simulation", [v for v in verdicts if v.is_simulated]),
                 ("Neither", [v for v in verdicts if v.is_simulated is None])]
        paper = next((entry for entry in shelves().papers.values() if name in entry.claims), None)
        return _view(request, "claim.html.j2", id=name, claim=known, paper=paper, sides=[s for s in sides if s[1] or s[0] != "Neither"])


@page("/submitters/{name}")
def submitter(request: Request, name: str) -> Response:
    """One account as everybody may see it."""
    name = plain_text(name)
    with request.app.state.database.read() as session:
        found = _found(queries.submitter(session, name), f"There is no submitter {name!r}.")
        rows, pages = _leaf(request, session, ResultFilter(account=name, include_unverified=True), f"/submitters/{name}", {})
        counts = [(str(state), found.states[state]) for state in State if state in found.states]
        return _view(request, "submitter.html.j2", account=found.account, counts=counts, reproduces=found.reproduces, rows=rows,
                     pages=pages)


# ------------------------------------------------------------------------------------------------------ competitions, reading
@page("/competitions")
def competitions(request: Request) -> Response:
    """All competitions by phase."""
    visitor = find_visitor(request)
    with request.app.state.database.read() as session:
        found = queries.competitions(session)
        phases = (("Open", "open"), ("To come", "to come"), ("Closed", "closed"), ("Withdrawn", "withdrawn"))
        groups = [(heading, entries) for heading, phase in phases if (entries := [c for c in found if contests.phase(c) == phase])]
        return render(request, "competitions.html.j2", visitor=visitor, groups=groups,
                      may_organise=visitor is not None and visitor.may("organise"))


@page("/competitions/{name}")
def competition(request: Request, name: str) -> Response:
    """One competition with its ranking."""
    return organise.show_competition(request, name, find_visitor(request))


# ------------------------------------------------------------------------------------------------------------ feeds and files
@page("/feed.atom")
def feed(request: Request) -> Response:
    """The newest results."""
    with request.app.state.database.read() as session:
        rows = queries.results(session, ResultFilter(include_unverified=True), limit=FEED_ROWS, newest_first=True)
        body = atom_feed(rows, own_address(request), request.app.state.settings.title)
    return Response(body, media_type="application/atom+xml", headers=HEADERS)


@page("/api")
def api(request: Request) -> Response:
    """The API's document, as a page that needs nothing from anywhere."""
    document = request.app.openapi()
    return _view(request, "api.html.j2", operations=read_operations(document), schemas=read_schemas(document),
                 description=document["info"].get("description", ""), api_version=document["info"]["version"],
                 document=request.app.openapi_url)


@page("/static/pages.css")
def css() -> Response:
    """The style of reports and pages."""
    return Response(stylesheet(), media_type="text/css", headers={**HEADERS, "Cache-Control": "max-age=300"})


@page("/static/pages.js")
def script() -> Response:
    """The one script."""
    return _file("pages.js", "text/javascript")


@page("/static/icon.svg")
def icon() -> Response:
    """The icon."""
    return _file("icon.svg", "image/svg+xml")


@page("/robots.txt")
def robots() -> Response:
    """Programs may read all, but need not compare every pair."""
    return Response("User-agent: *\nDisallow: /compare\nDisallow: /login\n", media_type="text/plain", headers=HEADERS)


def _file(name: str, kind: str) -> Response:
    return FileResponse(HERE / "static" / name, media_type=kind, headers={**HEADERS, "Cache-Control": "max-age=300"})


def _download(pieces: Iterator[str], kind: str, name: str = "") -> Response:
    attached = {"Content-Disposition": f'attachment; filename="{name}"'} if name else {}
    return StreamingResponse(pieces, media_type=kind, headers={**HEADERS, **attached})


def _found(value: Any, message: str) -> Any:
    if value is None:
        raise HTTPException(404, message)
    return value
