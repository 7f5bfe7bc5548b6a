"""The JSON API under /api/v1. Its OpenAPI document is /api/v1/openapi.json."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import time
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import Annotated, Any, Iterator, Literal

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request, Response, Security
from fastapi.responses import FileResponse, JSONResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool

from vramlab import __version__
from vramlab.crowd.findings import RULES_VERSION
from vramlab.crowd.server import contests, marks, queries, rankings
from vramlab.crowd.server.accounts import Caller, authenticate
from vramlab.crowd.server.intake import Refused, Taken
from vramlab.crowd.server.states import Actor, StateError, move
from vramlab.crowd.server.store import Body
from vramlab.crowd.server.tables import TOMBSTONES, VERIFIED, Account, Base, Bundle, Competition, Entry, Result, State
from vramlab.yaml_nodes import nearest


async def _known_parameters(request: Request) -> None:  # async: it takes no time, and a thread would
    """A parameter that the document does not name is refused: a filter that is misspelt would find more than was asked for."""
    told = request.app.openapi()["paths"][request.scope["route"].path][request.method.lower()].get("parameters", ())
    known = [parameter["name"] for parameter in told if parameter["in"] == "query"]
    if unknown := sorted(set(request.query_params) - set(known)):
        raise Refused(422, f"no such parameter: {', '.join(map(repr, unknown))[:200]}{nearest(unknown[0], known)}")


router = APIRouter(prefix="/api/v1", dependencies=[Depends(_known_parameters)])

BEARER = Security(HTTPBearer(auto_error=False))  # for the document; `caller_of` reads the header
MOST_ID = 2**53  # ids are numbers of JSON
Text = Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
BundleName = Annotated[str, Path(pattern=r"^[0-9a-f]{16,64}$")]
AccountName = Annotated[str, Path(pattern=r"^[a-z0-9_-]{1,64}$")]
Number = Annotated[int, Path(ge=1, le=MOST_ID)]
After = Annotated[int, Query(ge=0, le=MOST_ID, description="The last id of the page before.")]
Limit = Annotated[int, Query(ge=1, le=queries.MOST_ROWS)]
Asked = Annotated[Text | None, Query()]
Batch = Annotated[int | None, Query(ge=1, le=MOST_ID)]
Unverified = Annotated[bool, Query(description="Unverified ones too.")]
Metric = Literal["peak_bytes", "memory_saved", "overhead", "step_seconds", "largest"]
_REFUSALS = {
    400: "The request cannot be read.", 401: "No token, or none that holds.", 403: "The token does not reach so far.",
    404: "There is no such thing.", 409: "It is there already, or cannot become that.", 410: "A tombstone.", 413: "The body is too long.",
    415: "The body is of another type.", 422: "It is refused; `findings` says by which rules.",
    429: "Too often; Retry-After says when.", 503: "The database is away or busy; Retry-After says when.",
}
_GZIP = {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}


class Refusal(BaseModel):
    """Every answer that is none."""

    error: str
    findings: list[dict[str, str]]


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"description": _REFUSALS[status], "model": Refusal} for status in (*statuses, 413, 422, 429, 503)}


class Reason(BaseModel):
    """Why something is done."""

    model_config = ConfigDict(extra="forbid")
    reason: Annotated[str, StringConstraints(min_length=1, max_length=2000, pattern=r"^[^\x00-\x08\x0b-\x1f\x7f]*$")]


# ------------------------------------------------------------------------------------------------------------- who asks
def caller_of(request: Request) -> Caller:
    """Who shows a token in `Authorization: Bearer`. 401 for none or a wrong one, 429 for an address that has guessed too often."""
    state, address = request.app.state, address_of(request)
    if wait := state.failures.wait(address):
        raise Refused(429, "too many wrong tokens from this address", retry_seconds=wait)
    kind, _, shown = request.headers.get("authorization", "").partition(" ")
    with state.database.read() as session:
        caller = authenticate(session, shown.strip()) if kind.lower() == "bearer" else None
    if caller is None:
        if shown:
            state.failures.take(address)
        raise Refused(401, "this takes a token that is known and has neither expired nor been revoked: Authorization: Bearer TOKEN")
    return caller


def address_of(request: Request) -> str:
    """Where a request comes from."""
    return request.client.host if request.client else ""


def _needs(scope: str) -> Any:
    """Finds the caller, whose token reaches that far."""
    def find(request: Request, _: Annotated[Any, BEARER]) -> Caller:
        caller = caller_of(request)
        if not caller.may(scope):
            raise Refused(403, f"this takes a token of scope {scope}")
        return caller
    return Depends(find)


Submitter = Annotated[Caller, _needs("submit")]
Organiser = Annotated[Caller, _needs("organise")]
Administrator = Annotated[Caller, _needs("admin")]


@contextmanager
def _reading(request: Request) -> Iterator[Any]:
    with request.app.state.database.read() as session:
        yield session


# ------------------------------------------------------------------------------------------------------------- in JSON
def in_json(value: Any) -> Any:
    """Rows and plain data as JSON: a row is its columns, an account is its name; what identifies no row to a stranger is left out."""
    if isinstance(value, Account):
        return {"name": value.name, "display_name": value.display_name, "affiliation": value.affiliation,
                "since": in_json(value.created_at)}
    if isinstance(value, Base):
        body = {c.key: in_json(getattr(value, c.key)) for c in value.__table__.columns if c.key not in _HIDDEN}
        return body | _names_around(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {name: in_json(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {str(key): in_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [in_json(inner) for inner in value]
    return value.isoformat() if isinstance(value, datetime) else value


_HIDDEN = frozenset({"account_id", "bundle_id", "organiser_id", "competition_id", "token", "standing_key", "fingerprint"})


def _names_around(row: Base) -> dict[str, Any]:
    if isinstance(row, Bundle):
        return {"account": row.account.name}
    if isinstance(row, Result):
        return {"account": row.account.name, "bundle": row.bundle.name}
    if isinstance(row, Competition):
        return {"organiser": row.organiser.name}
    return {"result": in_json(row.result)} if isinstance(row, Entry) else {}


def _found(value: Any, what: str) -> Any:
    if value is None:
        raise Refused(404, f"there is no such {what}")
    return value


# ------------------------------------------------------------------------------------------------------------- the server itself
@router.get("/health", responses=_refusals())
def health(request: Request) -> dict[str, Any]:
    """Whether the database answers, and the collection in numbers."""
    with _reading(request) as session:
        return {"version": __version__, "rules_version": RULES_VERSION} | in_json(queries.totals(session))


@router.get("/rules", responses=_refusals())
def rules(request: Request) -> dict[str, Any]:
    """The declared tolerance, the limits, the states, and the key that marks are signed with."""
    settings, key = request.app.state.settings, request.app.state.key
    names = ("max_archive_bytes", "bundles_per_minute", "bundles_per_day", "bytes_per_day")
    tolerance = {"peak_share": settings.peak_tolerance_share, "peak_bytes": settings.peak_tolerance_bytes,
                 "ratio_share": settings.ratio_tolerance_share, "largest_share": settings.largest_tolerance_share}
    return {"rules_version": RULES_VERSION, "tolerance": tolerance, "limits": {name: getattr(settings, name) for name in names},
            "states": [str(state) for state in State], "verified": [str(state) for state in VERIFIED],
            "key": {"key_id": key.key_id, "public_key": key.public_key, "purpose": marks.PURPOSE}}


@router.get("/caller", dependencies=[BEARER], responses=_refusals(401))
def caller(request: Request) -> dict[str, Any]:
    """Whose token is shown, and what it may: a client asks before it sends anything."""
    found = caller_of(request)
    return {"account": found.account, "scopes": sorted(found.scopes)}


@router.get("/audit", responses=_refusals(401, 403))
def audit(request: Request, caller: Administrator, subject: Asked = None, after: After = 0, limit: Limit = 100) -> list[dict]:
    """What was done, in order. For administrators."""
    with _reading(request) as session:
        return in_json(queries.audit_log(session, subject=subject, after=after, limit=limit))


# ------------------------------------------------------------------------------------------------------------- bundles
@router.post("/bundles", status_code=201, dependencies=[BEARER], openapi_extra={"requestBody": {"required": True, "content": _GZIP}},
             responses=_refusals(400, 401, 403, 409, 415) | {200: {"description": "It was there already."}})
async def submit(request: Request) -> JSONResponse:
    """Take a bundle in: one .tar.gz, its SHA-256 in `Digest: sha-256=<base64>`. The same again is the same: 200 in place of 201.

    What is answered with 201 is on disk. Refused ones are told by which rules, and leave nothing behind.
    """
    state = request.app.state
    caller: Caller = await run_in_threadpool(_submitter, request)
    most = state.settings.max_archive_bytes
    wanted = _announced(request, most)
    with state.store.body() as body:
        await _read_body(request, body, most, state.settings.body_seconds)
        if not hmac.compare_digest(body.sha256, wanted):
            raise Refused(400, f"the body's SHA-256 is not the one of its Digest header: {body.nbytes} bytes came")
        arrived = time.monotonic()
        async with state.gate:
            patience = state.settings.check_wait_seconds - (time.monotonic() - arrived)
            taken: Taken = await run_in_threadpool(_take, request, body, caller, patience)
    return JSONResponse(_receipt(request, taken), 201 if taken.is_new else 200)


def _submitter(request: Request) -> Caller:
    caller = caller_of(request)
    if not caller.may("submit"):
        raise Refused(403, "this takes a token of scope submit")
    if wait := request.app.state.submissions.take(caller.account):
        raise Refused(429, "the account submits too often", retry_seconds=wait)
    return caller


def _announced(request: Request, most: int) -> str:
    """The SHA-256 in hex that the header announces, once the other headers are fine."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/gzip":
        raise Refused(415, "a bundle is sent as application/gzip")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise Refused(413, f"{int(length):,} bytes; at most {most:,} are taken")
    name, _, value = request.headers.get("digest", "").partition("=")
    try:
        digest = base64.b64decode(value.strip(), validate=True)
    except (binascii.Error, ValueError):
        digest = b""
    if name.strip().lower() != "sha-256" or len(digest) != 32:
        raise Refused(400, "the header Digest has to say sha-256=<base64 of 32 bytes>")
    return digest.hex()


async def _read_body(request: Request, body: Body, most: int, seconds: float) -> None:
    """Read what comes, and no more than may come."""
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                if body.nbytes + len(chunk) > most:
                    raise Refused(413, f"more than the {most:,} bytes that are taken")
                body.write(chunk)
    except TimeoutError:
        raise Refused(400, f"the body did not come within {seconds:g} s") from None


def _take(request: Request, body: Body, caller: Caller, patience: float) -> Taken:
    body.finish()
    return request.app.state.intake.take(body, caller, patience)


def _receipt(request: Request, taken: Taken) -> dict[str, Any]:
    bundle = taken.bundle
    base = request.app.state.settings.public_url.rstrip("/") or str(request.base_url).rstrip("/")
    return {"bundle": bundle.name, "state": bundle.state, "url": f"{base}/bundles/{bundle.name}", "findings": bundle.findings}


@router.get("/bundles", responses=_refusals())
def list_bundles(request: Request, workflow: Asked = None, account: Asked = None, state: Annotated[State | None, Query()] = None,
                 include_unverified: Unverified = False, after: After = 0, limit: Limit = 100) -> dict[str, Any]:
    """Bundles in the order in which they came, a page at a time: `next` is the `after` of the next one, null on the last."""
    with _reading(request) as session:
        rows = queries.bundles(session, workflow=workflow, account=account, state=state, include_unverified=include_unverified,
                               after=after, limit=limit)
        return {"bundles": [in_json(row) for row in rows], "next": rows[-1].id if len(rows) == limit else None}


@router.get("/bundles/{bundle}", responses=_refusals(404))
def show_bundle(request: Request, bundle: BundleName) -> dict[str, Any]:
    """One bundle, whatever its state: a tombstone says what it was, when it went and why."""
    with _reading(request) as session:
        view = _found(queries.bundle(session, bundle), "bundle")
        return in_json(view.bundle) | {"results": in_json(view.results), "verdicts": in_json(view.verdicts)}


@router.get("/bundles/{bundle}/archive", response_class=FileResponse,
            responses=_refusals(404, 410) | {200: {"description": "The archive as it was sent.", "content": _GZIP}})
def fetch_bundle(request: Request, bundle: BundleName) -> FileResponse:
    """The archive as it was sent, with its Digest. 410 for a tombstone."""
    with _reading(request) as session:
        found = _found(queries.bundle(session, bundle), "bundle").bundle
    if found.state in TOMBSTONES:
        raise Refused(410, f"the bundle is {found.state}: {found.state_reason}")
    digest = base64.b64encode(bytes.fromhex(found.archive_sha256)).decode()
    return FileResponse(request.app.state.store.path(found.archive_sha256), media_type="application/gzip",
                        filename=f"{found.name}.tar.gz", headers={"Digest": f"sha-256={digest}"})


@router.get("/bundles/{bundle}/mark", responses=_refusals(404))
def show_mark(request: Request, bundle: BundleName) -> dict[str, Any]:
    """What the server says of a bundle, signed by the server: `{"body", "signature"}`."""
    state = request.app.state
    with _reading(request) as session:
        found = _found(queries.bundle(session, bundle), "bundle").bundle
        mark = marks.mark_of(session, found)
    if mark is None or mark.key_id != state.key.key_id:
        with state.database.write() as session:
            mark = marks.make_mark(session, session.get(Bundle, found.id), state.key)
    return marks.in_json(mark, state.key)


@router.post("/bundles/{bundle}/withdraw", responses=_refusals(400, 401, 403, 404, 409))
def withdraw(request: Request, bundle: BundleName, body: Reason, caller: Submitter) -> dict[str, Any]:
    """Leave a tombstone in a bundle's place. Its owner may, and administrators."""
    return _move(request, caller, bundle, State.WITHDRAWN, body.reason, own=True)


@router.post("/bundles/{bundle}/flag", responses=_refusals(400, 401, 403, 404, 409))
def flag(request: Request, bundle: BundleName, body: Reason, caller: Organiser) -> dict[str, Any]:
    """Doubt a bundle: until that is cleared it counts as unverified."""
    return _move(request, caller, bundle, State.FLAGGED, body.reason)


@router.post("/bundles/{bundle}/clear", responses=_refusals(400, 401, 403, 404, 409))
def clear(request: Request, bundle: BundleName, body: Reason, caller: Organiser) -> dict[str, Any]:
    """Take a flag back. What the check refused stays flagged."""
    return _move(request, caller, bundle, State.CHECKED, body.reason)


def _move(request: Request, caller: Caller, name: str, to: State, reason: str, *, own: bool = False) -> dict[str, Any]:
    state = request.app.state
    with state.database.write() as session:
        bundle = _found(session.scalar(select(Bundle).where(Bundle.name == name)), "bundle")
        if own and bundle.account_id != caller.account_id and not caller.may("admin"):
            raise Refused(403, "the bundle is another account's")
        if to is State.CHECKED and (bundle.state != State.FLAGGED or any(f["severity"] == "error" for f in bundle.findings)):
            raise Refused(409, "only a flag that a person or a warning set can be taken back")
        if to is State.CHECKED and bundle.account_id == caller.account_id and not caller.may("admin"):
            raise Refused(403, "nobody takes back a flag of their own bundle")
        try:
            move(session, bundle, to, reason=reason, actor=Actor(name=caller.account, token=caller.token), settings=state.settings)
        except StateError as error:
            raise Refused(409, str(error)) from None
        return in_json(bundle)


# ------------------------------------------------------------------------------------------------------------- what is in it
@router.get("/results", responses=_refusals())
def list_results(request: Request, model: Asked = None, workload: Asked = None, device: Asked = None, method: Asked = None,
                 workflow: Asked = None, account: Asked = None, outcome: Asked = None, budget: Asked = None, batch_size: Batch = None,
                 is_simulated: Annotated[bool | None, Query()] = None, state: Annotated[State | None, Query()] = None,
                 include_unverified: Unverified = False, after: After = 0, limit: Limit = 100) -> dict[str, Any]:
    """Results in the order of their ids, a page at a time."""
    which = queries.ResultFilter(model=model, workload=workload, device=device, method=method, workflow=workflow, account=account,
                                 outcome=outcome, budget=budget, batch_size=batch_size, is_simulated=is_simulated, state=state,
                                 include_unverified=include_unverified)
    with _reading(request) as session:
        rows = queries.results(session, which, after=after, limit=limit)
        return {"results": [in_json(row) for row in rows], "next": rows[-1].id if len(rows) == limit else None}


@router.get("/results/{number}", responses=_refusals(404))
def show_result(request: Request, number: Number) -> dict[str, Any]:
    """One result, and the results that agree with it."""
    with _reading(request) as session:
        view = _found(queries.result(session, number), "result")
        agreements = [in_json(agreement) | {"other": in_json(other)} for agreement, other in view.agreements]
        return in_json(view.result) | {"agreements": agreements}


@router.get("/results/{number}/compare/{other}", responses=_refusals(404))
def compare_results(request: Request, number: Number, other: Number) -> dict[str, Any]:
    """Two results side by side."""
    with _reading(request) as session:
        return in_json(_found(queries.comparison(session, number, other), "pair of results"))


@router.get("/leaderboard", response_model=dict[str, Any], responses=_refusals())
def leaderboard(request: Request, model: Text, device: Text, metric: Annotated[Metric, Query()] = "memory_saved",
                is_simulated: Annotated[bool, Query()] = False, workload: Asked = None, batch_size: Batch = None, budget: Asked = None,
                method: Asked = None, include_unverified: Unverified = False, limit: Limit = 100) -> Response:
    """Methods on one model and device, best first."""
    asked = {"model": model, "device": device, "metric": metric, "is_simulated": is_simulated, "workload": workload,
             "batch_size": batch_size, "budget": budget, "method": method, "include_unverified": include_unverified, "limit": limit}
    with _reading(request) as session:
        body = request.app.state.recent.answer(session, ("board", *asked.values()),
                                               lambda: JSONResponse(in_json(queries.leaderboard(session, **asked))).body)
    return Response(body, media_type="application/json")


@router.get("/facets", responses=_refusals())
def facets(request: Request, include_unverified: Unverified = False) -> dict[str, Any]:
    """Models, devices and methods to choose from, with their results."""
    with _reading(request) as session:
        return in_json(queries.facets(session, include_unverified=include_unverified))


@router.get("/claims", responses=_refusals())
def claims(request: Request, include_unverified: Unverified = False) -> list[dict]:
    """What the crowd says of each claim; an account counts once."""
    with _reading(request) as session:
        return in_json(queries.claim_board(session, include_unverified=include_unverified))


@router.get("/accounts/{name}", responses=_refusals(404))
def show_account(request: Request, name: AccountName) -> dict[str, Any]:
    """One submitter."""
    with _reading(request) as session:
        return in_json(_found(queries.submitter(session, name), "account"))


# ------------------------------------------------------------------------------------------------------------- competitions
Named = Annotated[Text, StringConstraints(min_length=1)]
Description = Annotated[str, StringConstraints(max_length=2000, pattern=r"^[^\x00-\x08\x0b-\x1f\x7f]*$")]
Size = Annotated[int | None, Field(ge=1, le=MOST_ID)]
Seeds = Annotated[list[Annotated[int, Field(ge=0, le=MOST_ID)]], Field(min_length=1, max_length=100)]


class NewCompetition(BaseModel):
    """What an organiser fixes."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?$")]  # as its form has it
    title: Named
    description: Description = ""
    model: Named
    workload: Text = ""
    device: Named
    budget: Text = ""
    batch_size: Size = None
    seeds: Seeds
    metric: Metric
    opens_at: datetime
    closes_at: datetime


_NOT_GIVEN: Any = None  # what is not given is not looked at; a null that is given is refused


class Correction(BaseModel):
    """What is to be another; what is not given stays. An empty text, and null for the batch size, are *any*."""

    model_config = ConfigDict(extra="forbid")
    title: Named = _NOT_GIVEN
    description: Description = _NOT_GIVEN
    model: Named = _NOT_GIVEN
    workload: Text = _NOT_GIVEN
    device: Named = _NOT_GIVEN
    budget: Text = _NOT_GIVEN
    batch_size: Size = _NOT_GIVEN
    seeds: Seeds = _NOT_GIVEN
    metric: Metric = _NOT_GIVEN
    opens_at: datetime = _NOT_GIVEN
    closes_at: datetime = _NOT_GIVEN


@router.get("/competitions", responses=_refusals())
def list_competitions(request: Request) -> list[dict]:
    """All competitions, the one that closes last first."""
    with _reading(request) as session:
        return in_json(queries.competitions(session))


@router.get("/competitions/{name}", responses=_refusals(404))
def show_competition(request: Request, name: AccountName) -> dict[str, Any]:
    """One competition: who has a checked result of every seed, ranked by the median over them; who has not yet; what counts in neither."""
    with _reading(request) as session:
        return in_json(_found(rankings.competition(session, name), "competition"))


@router.post("/competitions", status_code=201, responses=_refusals(400, 401, 403, 409))
def create_competition(request: Request, body: NewCompetition, caller: Organiser) -> dict[str, Any]:
    """Open a competition."""
    _check_dates(body.opens_at, body.closes_at)
    if body.closes_at <= body.opens_at:
        raise Refused(422, "both dates have a time zone, and the second is later")
    with request.app.state.database.write() as session:
        return in_json(contests.announce(session, body.model_dump() | {"seeds": sorted(set(body.seeds))}, caller))


def _check_dates(*dates: datetime) -> None:
    if any(date.tzinfo is None for date in dates):
        raise Refused(422, "both dates have a time zone, and the second is later")
    if not all(2000 <= date.year < 2200 for date in dates):
        raise Refused(422, "a date is not of this or the next century")


@router.patch("/competitions/{name}", responses=_refusals(400, 401, 403, 404, 409))
def correct_competition(request: Request, name: AccountName, body: Correction, caller: Organiser) -> dict[str, Any]:
    """Correct a competition. Its organiser may, and administrators; what decides the ranking only before the first entry."""
    wanted = body.model_dump(exclude_unset=True)
    _check_dates(*(wanted[key] for key in ("opens_at", "closes_at") if key in wanted))
    if "seeds" in wanted:
        wanted["seeds"] = sorted(set(wanted["seeds"]))
    with request.app.state.database.write() as session:
        return in_json(contests.correct(session, name, wanted, caller))


@router.post("/competitions/{name}/withdraw", responses=_refusals(400, 401, 403, 404, 409))
def withdraw_competition(request: Request, name: AccountName, body: Reason, caller: Organiser) -> dict[str, Any]:
    """Leave a tombstone in a competition's place: nobody enters any more, and nothing is ranked. Its organiser may, and administrators."""
    with request.app.state.database.write() as session:
        return in_json(contests.withdraw(session, name, body.reason, caller))


class NewEntry(BaseModel):
    """A result that enters a competition."""

    model_config = ConfigDict(extra="forbid")
    result: Annotated[int, Field(ge=1, le=MOST_ID)]


@router.post("/competitions/{name}/entries", status_code=201, responses=_refusals(400, 401, 403, 404, 409))
def enter_competition(request: Request, name: AccountName, body: NewEntry, caller: Submitter) -> dict[str, Any]:
    """Enter one's own result, one for each seed. They are ranked once those of all seeds are checked."""
    with request.app.state.database.write() as session:
        return in_json(contests.enter(session, name, body.result, caller))


async def refuse(request: Request, error: Refused) -> JSONResponse:
    """How a refusal is answered."""
    headers = {} if error.retry_seconds is None else {"Retry-After": str(max(1, round(error.retry_seconds)))}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    findings = [asdict(finding) | {"severity": str(finding.severity)} for finding in error.findings]
    return JSONResponse({"error": error.error, "findings": findings}, error.status, headers=headers)


async def refuse_http(request: Request, error: HTTPException) -> JSONResponse:
    """The framework's own refusals in the same form."""
    return JSONResponse({"error": str(error.detail), "findings": []}, error.status_code, headers=error.headers)
