"""Talks to a server: `Server(url).submit(packed)`, `.pull(to)`. Everything can be done twice, and goes on where it was cut off.

A bundle's name is a hash of its content, so that sending it again is the same as having sent it: after a lost connection, a 503 or a 429
the same request is made again, for as long as `patience_seconds`. The token goes to the address that was typed and nowhere else: no
redirect is followed, and it travels unencrypted to this machine only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping
from urllib.parse import urlsplit

from vramlab import __version__
from vramlab.crowd.archive import pack_members, unpack
from vramlab.crowd.bundle import Packed, plain_name
from vramlab.crowd.canonical import read_strict
from vramlab.crowd.findings import Report
from vramlab.crowd.layout import LIMITS
from vramlab.crowd.rules import check
from vramlab.crowd.signing import is_signed
from vramlab.environment import config_dir
from vramlab.errors import BundleRefused, EnvironmentUnable, SubmissionRefused, WorkflowError
from vramlab.record import write_atomically
from vramlab.runs import MANIFEST_FILE

if TYPE_CHECKING:
    import httpx

TOKEN_VARIABLE, TOKENS_FILE = "VRAMLAB_TOKEN", "tokens.json"
PATIENCE_SECONDS, LONGEST_WAIT_SECONDS = 300.0, 30.0
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 120.0
MARK_PURPOSE = "mark 1"
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_BUNDLE = re.compile(r"[0-9a-f]{32}")
_AGAIN = frozenset({429, 502, 503, 504})
_LARGEST_ANSWER = LIMITS.archive_bytes


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back, read to its end or refused."""

    url: str
    status: int
    reason: str
    headers: Mapping[str, str]  # names in lower case
    content: bytes


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What the server made of a bundle."""

    bundle: str
    state: str  # received, checked, reproduced, ...
    url: str
    is_new: bool  # False where it had it already
    account: str = ""  # whose it is, where the server had it already
    findings: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """One bundle that came down, or why it did not."""

    bundle: str
    path: Path | None  # None where it was refused
    is_new: bool
    state: str
    is_marked: bool  # the server's own key has signed that state
    refusal: str = ""


class Server:
    """A collection at an address such as https://results.example.org."""

    def __init__(self, url: str, *, token: str | None = None, patience_seconds: float = PATIENCE_SECONDS,
                 tell: Callable[[str], None] = lambda words: None, transport: httpx.BaseTransport | None = None) -> None:
        """`token` None: that of VRAMLAB_TOKEN, else the one which tokens.json in the config folder has for this address. `transport` is for
        tests. WorkflowError on what is no address."""
        self.url = _address(url)
        self._given, self._patience, self._tell, self._transport = token, patience_seconds, tell, transport

    # --- give ---------------------------------------------------------------------------------------------------------------
    def submit(self, packed: Packed) -> Receipt:
        """Send a bundle unless the server has it. SubmissionRefused with the server's findings, or where the token may not submit;
        EnvironmentUnable where no answer comes."""
        headers = {"Authorization": f"Bearer {self.token()}"}
        with self._client() as client:
            known = self._ask(client, "GET", f"/bundles/{packed.name}")
            if known.status == 200:
                receipt = self._receipt(known, packed.name, is_new=False)
                self._check_token(client, headers)
                return receipt
            body = pack_members(packed.contents)
            digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
            answer = self._ask(client, "POST", "/bundles", content=body, headers=headers | {
                "Content-Type": "application/gzip", "Digest": f"sha-256={digest}"})
            if answer.status not in (200, 201):
                raise SubmissionRefused(tuple(_problems(answer)))
            return self._receipt(answer, packed.name, is_new=answer.status == 201)

    def _check_token(self, client: httpx.Client, headers: Mapping[str, str]) -> None:
        """What is there already is answered without a token, which would hide a wrong one."""
        answer = self._ask(client, "GET", "/caller", headers=headers)
        if answer.status != 200:
            raise SubmissionRefused(tuple(_problems(answer)))
        if not {"submit", "admin"} & set(_json(answer).get("scopes") or ()):
            raise SubmissionRefused((f"the token for {self.url} has not the scope submit",))

    def _receipt(self, answer: Answer, name: str, *, is_new: bool) -> Receipt:
        body = _json(answer)
        stated = body.get("bundle", body.get("name"))
        if stated != name:
            raise EnvironmentUnable(f"{self.url} answers for bundle {stated!r}, not for {name}")
        findings = tuple(f for f in body.get("findings") or () if isinstance(f, Mapping))
        return Receipt(bundle=name, state=str(body.get("state")), url=str(body.get("url") or f"{self.url}/bundles/{name}"), is_new=is_new,
                       account=str(body.get("account") or ""), findings=findings)

    # --- take ---------------------------------------------------------------------------------------------------------------
    def pull(self, to: Path, *, workflow: str | None = None, include_unverified: bool = False) -> Iterator[Pulled]:
        """Bring bundles down to `<to>/<workflow>/<bundle>`, each checked here before it gets its name; one that is there stays as it is.

        Beside a bundle lies `<bundle>.mark.json`, what the server says of it.
        """
        with self._client() as client:
            key = _json(self._ask(client, "GET", "/rules")).get("key") or {}
            for row in self._listed(client, workflow, include_unverified):
                yield self._pulled(client, Path(to), row, str(key.get("public_key")))

    def _listed(self, client: httpx.Client, workflow: str | None, include_unverified: bool) -> Iterator[Mapping[str, Any]]:
        after: int | None = 0
        asked = {"include_unverified": str(include_unverified).lower()} | ({"workflow": workflow} if workflow else {})
        while after is not None:
            page = _json(_sound(self._ask(client, "GET", "/bundles", params=asked | {"after": str(after)})))
            yield from (row for row in page.get("bundles", ()) if isinstance(row, Mapping))
            following = page.get("next")
            if following is not None and not (isinstance(following, int) and following > after):
                raise EnvironmentUnable(f"{self.url} lists its bundles in circles")
            after = following

    def _pulled(self, client: httpx.Client, to: Path, row: Mapping[str, Any], public_key: str) -> Pulled:
        name, state = str(row.get("name", row.get("bundle"))), str(row.get("state"))
        if not _BUNDLE.fullmatch(name):
            raise EnvironmentUnable(f"{self.url} lists {name[:80]!r}, which is no name of a bundle")
        place = to / plain_name(str(row.get("workflow"))) / name
        is_new, refusal = not (place / MANIFEST_FILE).is_file(), ""
        if is_new:
            refusal = self._fetch(client, name, place)
        mark = None if refusal else self._mark(client, name)
        is_marked = mark is not None and mark.get("signature", {}).get("public_key") == public_key and _says(mark, name, state)
        if mark is not None:
            write_atomically(place.with_name(f"{name}.mark.json"), json.dumps(mark, indent=1, sort_keys=True) + "\n")
        return Pulled(bundle=name, path=None if refusal else place, is_new=is_new and not refusal, state=state, is_marked=is_marked,
                      refusal=refusal)

    def _fetch(self, client: httpx.Client, name: str, place: Path) -> str:
        """Why a bundle was not taken in; "" where it was."""
        answer = self._ask(client, "GET", f"/bundles/{name}/archive")
        if answer.status != 200:
            return "; ".join(_problems(answer))
        room = place.parent / f".{name}.{os.getpid()}.part"
        try:
            folder = unpack(answer.content, room)
            report: Report = check(folder)
            if folder.name != name or not report.is_accepted:
                return "; ".join(f"[{f.rule}] {f.where} {f.message}" for f in report.errors) or f"it is bundle {folder.name}"
            folder.rename(place)
        except BundleRefused as refused:
            return str(refused)
        finally:
            shutil.rmtree(room, ignore_errors=True)
        return ""

    def _mark(self, client: httpx.Client, name: str) -> Mapping[str, Any] | None:
        answer = self._ask(client, "GET", f"/bundles/{name}/mark")
        return _json(answer) if answer.status == 200 else None

    # --- the wire -----------------------------------------------------------------------------------------------------------
    def _client(self) -> httpx.Client:
        import httpx

        return httpx.Client(timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS), follow_redirects=False,
                            headers={"User-Agent": f"vramlab/{__version__}", "Accept-Encoding": "identity"}, transport=self._transport)

    def _ask(self, client: httpx.Client, method: str, path: str, **options: Any) -> Answer:
        """One request, made again until there is an answer. EnvironmentUnable when patience ends."""
        import httpx

        deadline, wait = time.monotonic() + self._patience, 0.5
        while True:
            try:
                answer = _read(client, method, f"{self.url}/api/v1{path}", options)
                if answer.status not in _AGAIN:
                    return _unredirected(answer, self.url)
                why, wait = f"{answer.status} {answer.reason}", _asked_wait(answer, wait)
            except httpx.TransportError as error:
                why = str(error) or type(error).__name__
            if time.monotonic() + wait > deadline:
                raise EnvironmentUnable(f"{self.url} gives no answer ({why}); the same command goes on where this one stopped")
            self._tell(f"{self.url}: {why}; again in {wait:.1f} s")
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    def token(self) -> str:
        """What the server is shown with a bundle. EnvironmentUnable where there is none, or it would travel unencrypted."""
        parts = urlsplit(self.url)
        if parts.scheme != "https" and parts.hostname not in _LOOPBACK:
            raise EnvironmentUnable(f"a token does not travel unencrypted: write https://{parts.netloc}{parts.path}")
        token = self._given or os.environ.get(TOKEN_VARIABLE) or read_tokens(config_dir() / TOKENS_FILE).get(_origin(self.url))
        if not token:
            raise EnvironmentUnable(f"there is no token for {_origin(self.url)}: set {TOKEN_VARIABLE}, or write "
                                    f'{{"{_origin(self.url)}": "TOKEN"}} to {config_dir() / TOKENS_FILE} (mode 0600)')
        if not token.isascii() or not token.isprintable() or " " in token:
            raise EnvironmentUnable(f"the token for {_origin(self.url)} holds characters that no token has")
        return token


def read_tokens(path: Path) -> Mapping[str, str]:
    """Address -> token. EnvironmentUnable where others can read the file, or it is no such object."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return {}
    with os.fdopen(handle, "rb") as f:
        if os.fstat(f.fileno()).st_mode & 0o077:
            raise EnvironmentUnable(f"others can read your tokens in {path}: chmod 600 it")
        try:
            body = read_strict(f.read(2**20), str(path))
        except BundleRefused as refusal:
            raise EnvironmentUnable(str(refusal)) from None
    if not isinstance(body, dict) or not all(isinstance(token, str) for token in body.values()):
        raise EnvironmentUnable(f"{path} is no object of addresses and tokens")
    return body


def is_address(text: str) -> bool:
    """Whether `--to` names a server, and no folder."""
    return text.startswith(("http://", "https://"))


def _address(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_sound = False
    if not is_sound or parts.query or parts.fragment or parts.username or parts.password:
        raise WorkflowError(f"{url!r} is no address of a server; write for example https://results.example.org")
    return url.rstrip("/")


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _read(client: httpx.Client, method: str, url: str, options: Mapping[str, Any]) -> Answer:
    """One request and as much of the answer as an answer may be."""
    with client.stream(method, url, **options) as answer:
        if answer.headers.get("content-encoding", "identity") != "identity":  # not asked for, and it could unpack to anything
            raise EnvironmentUnable(f"{url} answers with content that is packed, unasked")
        parts, nbytes = [], 0
        for part in answer.iter_bytes():
            parts.append(part)
            nbytes += len(part)
            if nbytes > _LARGEST_ANSWER:
                raise EnvironmentUnable(f"{url} answers with more than {_LARGEST_ANSWER:,} bytes")
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return Answer(url=url, status=answer.status_code, reason=answer.reason_phrase, headers=headers, content=b"".join(parts))


def _unredirected(answer: Answer, url: str) -> Answer:
    if 300 <= answer.status < 400:
        raise EnvironmentUnable(f"{url} sends on to {answer.headers.get('location', '?')[:200]}; write that address if you trust it")
    return answer


def _asked_wait(answer: Answer, wait: float) -> float:
    """What Retry-After says in seconds, within reason; else as long as it would have been."""
    stated = answer.headers.get("retry-after", "")
    return min(max(float(stated), 0.1), LONGEST_WAIT_SECONDS) if stated.isascii() and stated.isdigit() else wait


def _sound(answer: Answer) -> Answer:
    if answer.status != 200:
        raise EnvironmentUnable("; ".join(_problems(answer)))
    return answer


def _json(answer: Answer) -> Mapping[str, Any]:
    """The object that an answer holds. EnvironmentUnable where it holds none: another server is there."""
    try:
        body = read_strict(answer.content, "the answer", most_bytes=_LARGEST_ANSWER)
    except BundleRefused as refusal:
        raise EnvironmentUnable(f"{answer.url} is no vramlab server: {refusal}") from None
    if not isinstance(body, Mapping):
        raise EnvironmentUnable(f"{answer.url} is no vramlab server")
    return body


def _problems(answer: Answer) -> Iterator[str]:
    """Why an answer is a refusal, one sentence each."""
    body = _json(answer) if "json" in answer.headers.get("content-type", "") else {}
    findings = [f for f in body.get("findings") or () if isinstance(f, Mapping) and f.get("severity", "error") == "error"]
    yield f"the server says {answer.status} {answer.reason}: {str(body.get('error') or '')[:500]}".rstrip(": ")
    yield from (f"{f.get('where') or 'the bundle'}: [{f.get('rule')}] {f.get('message')}" for f in findings)


def _says(mark: Mapping[str, Any], name: str, state: str) -> bool:
    """Whether a mark is signed, and is of this bundle in this state."""
    body = mark.get("body")
    return isinstance(body, Mapping) and body.get("bundle") == name and body.get("state") == state and is_signed(
        body, mark.get("signature"), MARK_PURPOSE)
