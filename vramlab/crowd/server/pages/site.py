"""What every page shares: templates, headers, who is looking, and the forms' CSRF tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
from fastapi import Request, Response
from fastapi.responses import HTMLResponse

from vramlab import __version__
from vramlab.collection import Library, built_in_collection, find_collections
from vramlab.crowd.server.accounts import Caller
from vramlab.crowd.server.keys import secret
from vramlab.crowd.server.pages import reads, words
from vramlab.crowd.server.pages.catalogue import PaperEntry, read_catalogue, read_versions
from vramlab.crowd.server.pages.visits import SESSION_COOKIE, VISIT_COOKIE, csrf_token, new_visit, read_session
from vramlab.crowd.server.tables import UNVERIFIED
from vramlab.report.checklists import Checklist, load_checklists
from vramlab.report.claims import PaperClaim, load_claims
from vramlab.report.words import DASH

HERE = Path(__file__).parent
POLICY = ("default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; "
          "frame-ancestors 'none'")
HEADERS = {"Content-Security-Policy": POLICY, "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin",
           "Permissions-Policy": "camera=(), geolocation=(), microphone=()"}


@dataclass(frozen=True, kw_only=True)
class Shelves:
    """What the server's collections say of papers, claims and checklists; read once."""

    papers: Mapping[str, PaperEntry]
    claims: Mapping[str, PaperClaim]
    checklists: tuple[Checklist, ...]
    method_versions: Mapping[str, str]  # SHA-256 of a method's source -> its card's version

    def paper_of(self, method: str) -> PaperEntry | None:
        """The paper that a method's card cites."""
        return next((entry for entry in self.papers.values() if any(method in facts.names for facts in entry.methods)), None)

    def version_of(self, source_sha256: str) -> str:
        """`version 1` where the source is that of this server's collection, else `source` and the first digits of its hash."""
        known = self.method_versions.get(source_sha256)
        return f"version {known}" if known else f"source {source_sha256[:8]}" if source_sha256 else DASH


@lru_cache(maxsize=1)
def shelves() -> Shelves:
    """Of the built-in collection and, where the server was started in one, of that."""
    library = Library(find_collections())
    papers = read_catalogue(library)
    return Shelves(papers=papers, claims=load_claims(library.report_files("claims.yaml")),
                   checklists=load_checklists(library.report_files("checklists/*.yaml")),
                   method_versions=dict(read_versions(library)))


@lru_cache(maxsize=1)
def templates() -> jinja2.Environment:
    """Every string escaped; a name that is not there is an error."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE / "templates"), autoescape=True, undefined=jinja2.StrictUndefined,
                                     trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "value": words.value_in_words, "moment": words.time_in_words, "rfc3339": words.rfc3339, "is_address": words.is_address,
        "fragment": lambda text: quote(str(text), safe=""), "device": lambda row: words.device_in_words(row.device, row.is_simulated),
        "version": lambda sha256: shelves().version_of(sha256), "tally": words.tally_in_words,
        "pretty": lambda body: json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False),
        "combine": lambda one, other: {**one, **other},
        "pairs": words.pairs_in_words,
        "address": lambda text: text if words.is_address(text) else "#",
    }
    environment.globals |= {
        "state_tones": words.STATE_TONES, "states": words.STATES, "verdict_tones": words.VERDICT_TONES, "truth_tones": words.TRUTH_TONES,
        "truths": words.TRUTHS, "outcome_tones": words.OUTCOME_TONES, "severity_tones": words.SEVERITY_TONES, "fills": words.FILLS,
        "unverified_states": UNVERIFIED, "dash": DASH, "version": __version__,
    }
    return environment


@lru_cache(maxsize=1)
def stylesheet() -> str:
    """The report's own style, and what the site adds."""
    report = built_in_collection() / "reports" / "styles" / "report.css"
    return f"{report.read_text(encoding='utf-8')}\n{(HERE / 'static' / 'pages.css').read_text(encoding='utf-8')}"


def secret_of(request: Request) -> bytes:
    """What cookies and forms are made with."""
    state = request.app.state
    if not hasattr(state, "pages_secret"):
        state.pages_secret = secret(state.settings, "pages")
    return state.pages_secret


def find_visitor(request: Request) -> Caller | None:
    """Who is logged in."""
    cookie = request.cookies.get(SESSION_COOKIE, "")
    public_id = read_session(secret_of(request), cookie) if cookie else None
    if public_id is None:
        return None
    with request.app.state.database.read() as session:
        return reads.visitor(session, public_id)


def link_maker(request: Request) -> Callable[..., str]:
    """`href("/results", model="x")`: below the path that the server is mounted at, every part quoted."""
    root = request.scope.get("root_path", "").rstrip("/")

    def href(path: str, **query: Any) -> str:
        asked = urlencode({key: value for key, value in query.items() if value not in (None, "")})
        return quote(f"{root}{path}", safe="/") + (f"?{asked}" if asked else "")

    return href


def own_address(request: Request) -> str:
    """The server's address as told outside, without a slash at its end."""
    return (request.app.state.settings.public_url or str(request.base_url)).rstrip("/")


def is_https(request: Request) -> bool:
    """Whether visitors come by HTTPS, to the server itself or to the proxy before it."""
    return request.url.scheme == "https" or request.app.state.settings.public_url.startswith("https:")


def render(request: Request, template: str, *, status: int = 200, visitor: Caller | None = None, headers: Mapping[str, str] | None = None,
           **shown: Any) -> Response:
    """A page. A visitor who is not logged in gets a cookie with the first form that needs one."""
    cookie = request.cookies.get(SESSION_COOKIE, "") if visitor else request.cookies.get(VISIT_COOKIE, "")
    is_new = not cookie
    cookie = cookie or new_visit()
    text = page_text(request, template, visitor=visitor, csrf_token=csrf_token(secret_of(request), cookie), **shown)
    response = respond(text, status, headers)
    if is_new and template in ("login.html.j2",):
        set_cookie(request, response, VISIT_COOKIE, cookie)
    return response


def page_text(request: Request, template: str, *, visitor: Caller | None, **shown: Any) -> str:
    """A page's HTML. Without a visitor and a `csrf_token`, which a form asks for, it is the same for everybody."""
    here = "/" + request.url.path.removeprefix(request.scope.get("root_path", "")).split("/")[1]
    return templates().get_template(template).render(here=here, href=link_maker(request), site_name=request.app.state.settings.title,
                                                     visitor=visitor, **shown)


def respond(text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """HTML as every page is sent."""
    return HTMLResponse(text, status, headers={**HEADERS, "Cache-Control": "private, no-cache", "Vary": "Cookie", **(headers or {})})


def set_cookie(request: Request, response: Response, name: str, value: str, seconds: int | None = None) -> None:
    """Sent to this server only, with requests of its own pages only, and out of reach of scripts."""
    response.set_cookie(name, value, max_age=seconds, path=request.scope.get("root_path", "") or "/", httponly=True, samesite="strict",
                        secure=is_https(request))
