"""What is done on the pages: a visit begins with a token, an organiser announces, corrects and withdraws a competition, a submitter enters.

Every form carries the visit's CSRF token, and a request that a browser says comes from another site is refused before that is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import RedirectResponse
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool

from vramlab.crowd.server import contests, rankings
from vramlab.crowd.server.accounts import Caller, authenticate
from vramlab.crowd.server.api import address_of
from vramlab.crowd.server.intake import Refused
from vramlab.crowd.server.pages import reads, words
from vramlab.crowd.server.pages.asked import LARGEST, plain_text, result_number
from vramlab.crowd.server.pages.site import HEADERS, find_visitor, link_maker, render, secret_of, set_cookie
from vramlab.crowd.server.pages.visits import CSRF_FIELD, SESSION_COOKIE, SESSION_SECONDS, VISIT_COOKIE, is_csrf_token, make_session
from vramlab.crowd.server.tables import NAME, WORDS, Competition

router = APIRouter(include_in_schema=False)
MOST_SEEDS = 100
LONGEST_DESCRIPTION = 4000
LABELS = {"title": "Title", "name": "Name in its address", "description": "What it is about", "model": "Model", "workload": "Workload",
          "batch_size": "Batch size", "device": "Device", "budget": "Budget", "seeds": "Seeds", "metric": "Ranked by",
          "opens_at": "Opens", "closes_at": "Closes"}
_NAMES = ("title", "model", "workload", "device", "budget")
_SLUG = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
_FORM = "application/x-www-form-urlencoded"


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form, each once. 413 for a longer body than any form has, 415 for another kind, 400 for a field that comes twice."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        raise HTTPException(415, "A form is sent as application/x-www-form-urlencoded.")
    limit, body = request.app.state.settings.max_json_bytes, b""
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise HTTPException(413, f"A form has at most {limit} bytes.")
    try:
        pairs = parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=50)
    except ValueError:
        raise HTTPException(400, "That is no form.") from None
    found = dict(pairs)
    if len(found) != len(pairs) or any("\0" in text for pair in pairs for text in pair):
        raise HTTPException(400, "That is no form.")
    return found


def check_csrf(request: Request, form: Mapping[str, str], cookie: str) -> None:
    """403 unless the form was made for this visit, and the browser does not say that another site sent it."""
    is_ours = is_csrf_token(secret_of(request), request.cookies.get(cookie, ""), form.get(CSRF_FIELD, ""))
    if not is_ours or _is_of_elsewhere(request):
        raise HTTPException(403, "This form was not made for this visit. Load its page again, and send it from there.")


def _is_of_elsewhere(request: Request) -> bool:
    """Whether a browser says that another site sent the form. Hosts are compared, since a proxy may have taken HTTPS off."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return True
    origin = request.headers.get("origin")
    ours = (request.headers.get("host", ""), urlsplit(request.app.state.settings.public_url).netloc)
    return origin is not None and (not urlsplit(origin).netloc or urlsplit(origin).netloc not in ours)


# ------------------------------------------------------------------------------------------------------------------- visits
@router.api_route("/login", methods=["GET", "HEAD"])
def login_form(request: Request) -> Response:
    """Asks for a token, unless there is a visit already."""
    if find_visitor(request):
        return _see(request, "/competitions")
    return render(request, "login.html.j2", refused="", headers={"Cache-Control": "no-store"})


@router.post("/login")
async def login(request: Request) -> Response:
    """A session for the token's account."""
    form = await read_form(request)
    check_csrf(request, form, VISIT_COOKIE)
    return await run_in_threadpool(_login, request, form)


def _login(request: Request, form: Mapping[str, str]) -> Response:
    failures, address = request.app.state.failures, address_of(request)
    if wait := failures.wait(address):
        raise HTTPException(429, "Too many wrong tokens from this address.", headers={"Retry-After": str(max(1, round(wait)))})
    with request.app.state.database.read() as session:
        caller = authenticate(session, form.get("token", "").strip())
    if caller is None:
        failures.take(address)
        return render(request, "login.html.j2", status=403, refused="There is no such token, or it has expired or been revoked.",
                      headers={"Cache-Control": "no-store"})
    response = _see(request, "/competitions")
    set_cookie(request, response, SESSION_COOKIE, make_session(secret_of(request), caller.token), SESSION_SECONDS)
    response.delete_cookie(VISIT_COOKIE, path=request.scope.get("root_path", "") or "/")
    return response


@router.post("/logout")
async def logout(request: Request) -> Response:
    """The session's end."""
    check_csrf(request, await read_form(request), SESSION_COOKIE)
    response = _see(request, "/")
    response.delete_cookie(SESSION_COOKIE, path=request.scope.get("root_path", "") or "/")
    return response


def _see(request: Request, path: str) -> Response:
    """303: the browser asks for the page by GET, and sends the form no second time."""
    return RedirectResponse(link_maker(request)(path), 303, headers=HEADERS)


def _who_may(request: Request, scope: str) -> Caller:
    """The visitor. 403 for who is not logged in or may not."""
    visitor = find_visitor(request)
    if visitor is None:
        raise HTTPException(403, "Log in with a token first.")
    if not visitor.may(scope):
        raise HTTPException(403, f"Your token has not the scope {scope!r}.")
    return visitor


# ------------------------------------------------------------------------------------------------------------- competitions
@router.api_route("/competitions/new", methods=["GET", "HEAD"])
def announce_form(request: Request) -> Response:
    """Asks an organiser for the rules."""
    return _announce_form(request, _who_may(request, "organise"), {}, {})


@router.post("/competitions")
async def announce(request: Request) -> Response:
    """A new competition. The form again with what is wrong, where something is."""
    form = await read_form(request)
    check_csrf(request, form, SESSION_COOKIE)
    return await run_in_threadpool(_announce, request, form)


def _announce(request: Request, form: Mapping[str, str]) -> Response:
    visitor = _who_may(request, "organise")
    rules, faults = read_rules(form)
    if not faults:
        try:
            with request.app.state.database.write() as session:
                contests.announce(session, rules, visitor)
        except Refused as refusal:
            faults = {"name": refusal.error}
    return _announce_form(request, visitor, form, faults) if faults else _see(request, f"/competitions/{rules['name']}")


def _announce_form(request: Request, visitor: Caller, given: Mapping[str, str], faults: Mapping[str, str], name: str = "",
                   has_entries: bool = False) -> Response:
    """`name`: of the competition that is corrected, none where one is announced."""
    with request.app.state.database.read() as session:
        facets = reads.facets(session, request.app.state.recent)
        workloads = reads.workloads(session)
    devices = dict.fromkeys(device for _, device, is_simulated, _ in facets.boards if not is_simulated)
    return render(request, "competition_form.html.j2", visitor=visitor, status=422 if faults else 200, given=given, faults=faults,
                  labels=LABELS, metrics=words.METRICS, models=list(facets.models), devices=list(devices),
                  workloads=workloads, name=name, has_entries=has_entries)


@router.api_route("/competitions/{name}/correct", methods=["GET", "HEAD"])
def correct_form(request: Request, name: str) -> Response:
    """Asks its organiser what is to be another."""
    visitor, rules, has_entries = _to_change(request, name)
    return _announce_form(request, visitor, _as_form(rules), {}, rules.name, has_entries)


@router.post("/competitions/{name}/correct")
async def correct(request: Request, name: str) -> Response:
    """A corrected competition. The form again with what is wrong, where something is."""
    form = await read_form(request)
    check_csrf(request, form, SESSION_COOKIE)
    return await run_in_threadpool(_correct, request, name, form)


def _correct(request: Request, name: str, form: Mapping[str, str]) -> Response:
    visitor, rules, has_entries = _to_change(request, name)
    stands = _as_form(rules)
    given = {**stands, **form, "name": rules.name}
    wanted, faults = read_rules(given)
    wanted |= {key: getattr(rules, key) for key in ("opens_at", "closes_at") if given[key] == stands[key]}  # a form has no seconds
    if not faults:
        try:
            with request.app.state.database.write() as session:
                contests.correct(session, rules.name, {key: wanted[key] for key in contests.CORRECTABLE}, visitor)
        except Refused as refusal:
            faults = {"closes_at": refusal.error}
    return (_announce_form(request, visitor, given, faults, rules.name, has_entries) if faults
            else _see(request, f"/competitions/{rules.name}"))


@router.post("/competitions/{name}/withdraw")
async def withdraw(request: Request, name: str) -> Response:
    """A tombstone in a competition's place."""
    form = await read_form(request)
    check_csrf(request, form, SESSION_COOKIE)
    return await run_in_threadpool(_withdraw, request, name, form)


def _withdraw(request: Request, name: str, form: Mapping[str, str]) -> Response:
    visitor, rules, _ = _to_change(request, name)
    reason = form.get("reason", "").strip()
    if not reason or len(reason) > WORDS or not all(c.isprintable() or c in "\r\n\t" for c in reason):
        told = f"It was not withdrawn. A reason is needed, of at most {WORDS} characters."
        return show_competition(request, rules.name, visitor, fault=told)
    with request.app.state.database.write() as session:
        contests.withdraw(session, rules.name, reason, visitor)
    return _see(request, f"/competitions/{rules.name}")


def _to_change(request: Request, name: str) -> tuple[Caller, Competition, bool]:
    """(who asks, the competition, whether somebody has entered). 403 for who may not change it, 404 where there is none."""
    visitor = _who_may(request, "organise")
    with request.app.state.database.read() as session:
        rules = session.scalar(select(Competition).where(Competition.name == plain_text(name)))
        if rules is None:
            raise HTTPException(404, f"There is no competition {name!r}.")
        if not contests.may_change(rules, visitor):
            raise HTTPException(403, "The competition is withdrawn, or another organiser's.")
        return visitor, rules, contests.has_entries(session, rules)


def _as_form(rules: Competition) -> dict[str, str]:
    """What its form would have been."""
    texts = {name: str(getattr(rules, name)) for name in ("name", "description", "metric", *_NAMES)}
    dates = {name: getattr(rules, name).strftime("%Y-%m-%dT%H:%M") for name in ("opens_at", "closes_at")}
    return texts | dates | {"batch_size": str(rules.batch_size or ""), "seeds": ", ".join(map(str, rules.seeds))}


def read_rules(form: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """(columns of a competition, field -> what is wrong with it)."""
    texts = {name: form.get(name, "").strip() for name in LABELS}
    faults = {name: "is needed" for name in ("title", "name", "model", "device", "seeds", "opens_at", "closes_at") if not texts[name]}
    faults |= {name: f"is longer than {NAME} characters" for name in _NAMES if len(texts[name]) > NAME}
    if len(texts["description"]) > LONGEST_DESCRIPTION:
        faults["description"] = f"is longer than {LONGEST_DESCRIPTION} characters"
    if texts["name"] and (not _SLUG.fullmatch(texts["name"]) or texts["name"] == "new"):
        faults["name"] = "has lower-case letters, digits and - only, at most 64, and is not 'new'"
    if contests.is_target(texts["device"]):
        faults["device"] = contests.NO_DEVICE
    if not contests.is_budget(texts["budget"]):
        faults["budget"] = contests.NO_BUDGET
    if texts["metric"] not in words.METRICS:
        faults["metric"] = f"is one of {', '.join(words.METRICS)}"
    rules: dict[str, Any] = {**texts, "batch_size": None, "seeds": []}
    for name, read in (("batch_size", _batch_size), ("seeds", _seeds), ("opens_at", _moment), ("closes_at", _moment)):
        try:
            rules[name] = read(texts[name])
        except ValueError as error:
            faults.setdefault(name, str(error))
    if not faults and rules["closes_at"] <= rules["opens_at"]:
        faults["closes_at"] = "is not after it opens"
    return rules, faults


def _batch_size(text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise ValueError("is a whole number above zero")
    return int(text)


def _seeds(text: str) -> list[int]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    are_some = 0 < len(found) <= MOST_SEEDS
    if not are_some or not all(word.isascii() and word.isdigit() and len(word) < 20 and int(word) <= LARGEST for word in found):
        raise ValueError(f"are whole numbers with commas between, at least one and at most {MOST_SEEDS}")
    return sorted({int(word) for word in found})


def _moment(text: str) -> datetime:
    """What a browser's field gives, `2026-03-01T12:00`, in UTC."""
    try:
        found = datetime.strptime(text, "%Y-%m-%dT%H:%M")
    except ValueError:
        raise ValueError("is a date and a time, such as 2026-03-01T12:00") from None
    if not 2000 <= found.year < 2200:
        raise ValueError("is no date of this or the next century")
    return found.replace(tzinfo=UTC)


def show_competition(request: Request, name: str, visitor: Caller | None, *, fault: str = "", given: str = "") -> Response:
    """One competition with its ranking, and the form to enter where the visitor may."""
    with request.app.state.database.read() as session:
        found = rankings.competition(session, plain_text(name))
        if found is None:
            raise HTTPException(404, f"There is no competition {name!r}.")
        stage = contests.phase(found.competition)
        may_enter = visitor is not None and visitor.may("submit") and stage == "open"
        return render(request, "competition.html.j2", status=422 if fault else 200, visitor=visitor, c=found.competition, phase=stage,
                      metric=words.METRICS[found.competition.metric], ranked=found.ranked, incomplete=found.incomplete,
                      unranked=found.unranked, may_enter=may_enter, may_change=contests.may_change(found.competition, visitor),
                      fault=fault, given=given)


@router.post("/competitions/{name}/entries")
async def enter(request: Request, name: str) -> Response:
    """Some of the visitor's results enter, all of them or none."""
    form = await read_form(request)
    check_csrf(request, form, SESSION_COOKIE)
    return await run_in_threadpool(_enter, request, name, form)


def _enter(request: Request, name: str, form: Mapping[str, str]) -> Response:
    visitor = _who_may(request, "submit")
    try:
        words_given = [word.strip() for word in form.get("result", "").split(",", MOST_SEEDS)]
        numbers = [result_number(word) for word in words_given if word] or [result_number("")]
        with request.app.state.database.write() as session:
            for number in dict.fromkeys(numbers):
                contests.enter(session, plain_text(name), number, visitor)
    except (Refused, HTTPException) as refusal:
        said = refusal.error if isinstance(refusal, Refused) else refusal.detail
        told = f"It was not entered. {said[:1].upper()}{said[1:].rstrip('.')}."
        return show_competition(request, name, visitor, fault=told, given=form.get("result", "")[:1000])
    return _see(request, f"/competitions/{name}")
