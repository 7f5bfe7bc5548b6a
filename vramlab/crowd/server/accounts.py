"""Accounts and their tokens. A token is `vl_<public id>_<secret>`; only SHA-256 of the secret is kept: 256 random bits need no slower one.

Scopes: submit (bundles; withdraw one's own), organise (competitions; flag), admin (everything, of everybody).
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from vramlab.crowd.server.audit import note
from vramlab.crowd.server.tables import Account, AccountKey, Bundle, Token, now
from vramlab.errors import WorkflowError

SCOPES = ("submit", "organise", "admin")
_ACCOUNT = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?")
_TOKEN = re.compile(r"vl_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_NOBODYS = hashlib.sha256(secrets.token_bytes(32)).hexdigest()  # what a secret without a row is compared with


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who shows a token."""

    account_id: int
    account: str
    token: str  # its public id
    scopes: frozenset[str]

    def may(self, scope: str) -> bool:
        """Whether the token reaches so far."""
        return scope in self.scopes or "admin" in self.scopes


def create_account(session: Session, name: str, *, display_name: str = "", affiliation: str = "", actor: str) -> Account:
    """A new account. WorkflowError when the name is taken or no name."""
    if not _ACCOUNT.fullmatch(name):
        raise WorkflowError(f"{name!r} is no account name: lower-case letters, digits, - and _, at most 64, a letter or digit at both ends")
    if session.scalar(select(Account).where(Account.name == name)):
        raise WorkflowError(f"there is an account {name!r} already")
    for text in (display_name, affiliation):
        if len(text) > 200 or not text.isprintable():
            raise WorkflowError("a display name and an affiliation are printable and of at most 200 characters")
    account = Account(name=name, display_name=display_name, affiliation=affiliation)
    session.add(account)
    session.flush()
    note(session, actor=actor, action="account created", subject=f"account {name}")
    return account


def find_account(session: Session, name: str) -> Account:
    """An account by its name. WorkflowError when there is none."""
    account = session.scalar(select(Account).where(Account.name == name))
    if account is None:
        raise WorkflowError(f"there is no account {name!r}")
    return account


def list_accounts(session: Session) -> list[tuple[Account, int]]:
    """All accounts with the number of their bundles, by name."""
    bundles = select(Bundle.account_id, func.count().label("bundles")).group_by(Bundle.account_id).subquery()
    rows = session.execute(select(Account, func.coalesce(bundles.c.bundles, 0)).outerjoin(bundles, bundles.c.account_id == Account.id)
                           .order_by(Account.name))
    return [(account, count) for account, count in rows]


def disable_account(session: Session, name: str, *, actor: str) -> Account:
    """End all tokens of an account at once; what it has submitted stays. WorkflowError when there is none."""
    account = find_account(session, name)
    if account.disabled_at is None:
        account.disabled_at = now()
        note(session, actor=actor, action="account disabled", subject=f"account {name}")
    return account


def revoke_key(session: Session, key_id: str, *, actor: str) -> AccountKey:
    """Take no bundle that this key signs any more; those that it has signed stay. WorkflowError when nobody has used it."""
    key = session.scalar(select(AccountKey).where(AccountKey.key_id == key_id))
    if key is None:
        raise WorkflowError(f"nobody has used a key {key_id!r}")
    if key.revoked_at is None:
        key.revoked_at = now()
        note(session, actor=actor, action="key revoked", subject=f"key {key_id}")
    return key


def create_token(session: Session, account: str, scopes: tuple[str, ...] = ("submit",), *, label: str = "", days: float | None = None,
                 actor: str) -> tuple[str, Token]:
    """(the token, told this once, and its row). WorkflowError on an unknown scope or account."""
    if unknown := set(scopes) - set(SCOPES):
        raise WorkflowError(f"{', '.join(sorted(unknown))}: no such scope; there are {', '.join(SCOPES)}")
    if len(label) > 200 or not label.isprintable():
        raise WorkflowError("a label is printable and of at most 200 characters")
    owner = find_account(session, account)
    public_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
    expires = None if days is None else now() + timedelta(days=days)
    token = Token(account_id=owner.id, public_id=public_id, secret_sha256=_hashed(secret), scopes=" ".join(sorted(set(scopes))),
                  label=label, expires_at=expires)
    session.add(token)
    session.flush()
    note(session, actor=actor, action="token created", subject=f"token {public_id}", detail={"account": account, "scopes": token.scopes})
    return f"vl_{public_id}_{secret}", token


def revoke_token(session: Session, public_id: str, *, actor: str) -> Token:
    """End a token at once. WorkflowError when there is none; a revoked one stays as it is."""
    token = session.scalar(select(Token).where(Token.public_id == public_id))
    if token is None:
        raise WorkflowError(f"there is no token {public_id!r}")
    if token.revoked_at is None:
        token.revoked_at = now()
        note(session, actor=actor, action="token revoked", subject=f"token {public_id}")
    return token


def list_tokens(session: Session) -> list[Token]:
    """All tokens, the oldest first."""
    return list(session.scalars(select(Token).order_by(Token.id)))


def authenticate(session: Session, shown: str, *, at: datetime | None = None) -> Caller | None:
    """Who shows this token; None for a wrong, revoked or expired one. Takes as long for an unknown id as for a wrong secret."""
    match = _TOKEN.fullmatch(shown)
    public_id, secret = match.groups() if match else ("", "")
    token = session.scalar(select(Token).where(Token.public_id == public_id))
    is_right = hmac.compare_digest(_hashed(secret), token.secret_sha256 if token else _NOBODYS)
    if not (is_right and token and match):
        return None
    at = at or now()
    if token.revoked_at or token.account.disabled_at or (token.expires_at and token.expires_at <= at):
        return None
    return Caller(account_id=token.account_id, account=token.account.name, token=public_id, scopes=frozenset(token.scopes.split()))


def _hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
