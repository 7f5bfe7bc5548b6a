"""Who is looking: session cookies after a login with a token, and the CSRF token that every form carries.

A cookie says which token was shown and until when it holds, under a message authentication code of the server's secret; nothing of the
token itself is in it. Whether that token still holds is asked of the database on every request, so revoking it ends the visit. A form's
CSRF token is a code over the cookie of the same visit (before a login: over a random cookie of its own), so another site can neither read
nor make one; the cookies are HttpOnly and SameSite=Strict besides.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time

SESSION_COOKIE = "vramlab_session"
VISIT_COOKIE = "vramlab_visit"  # before a login
SESSION_SECONDS = 8 * 3600
CSRF_FIELD = "csrf"


def make_session(secret: bytes, public_id: str, now: float | None = None) -> str:
    """The cookie of a visit that began with a token."""
    until = int((time.time() if now is None else now) + SESSION_SECONDS)
    body = f"{public_id}.{until}.{secrets.token_hex(8)}"
    return f"{body}.{_code(secret, 'session', body)}"


def read_session(secret: bytes, cookie: str, now: float | None = None) -> str | None:
    """The public id of the token; None for a cookie that is forged, of another server or over."""
    body, _, code = cookie.rpartition(".")
    if not body or not hmac.compare_digest(code.encode(), _code(secret, "session", body).encode()):
        return None
    public_id, until, _ = body.split(".")
    return public_id if (time.time() if now is None else now) < int(until) else None


def new_visit() -> str:
    """A random cookie for who is not logged in."""
    return secrets.token_hex(16)


def csrf_token(secret: bytes, cookie: str) -> str:
    """What a form of this visit carries."""
    return _code(secret, "form", cookie)


def is_csrf_token(secret: bytes, cookie: str, said: str) -> bool:
    """Whether a form was made for this visit. False without a cookie."""
    return bool(cookie) and hmac.compare_digest(said.encode(), csrf_token(secret, cookie).encode())


def _code(secret: bytes, use: str, body: str) -> str:
    """Uses are kept apart: a form's code is no session's."""
    return hmac.new(secret, f"vramlab {use}\0{body}".encode(), hashlib.sha256).hexdigest()
