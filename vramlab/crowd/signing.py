"""Ed25519 keys and signatures over canonical JSON.

A key is made on first use and kept in the user's config folder, readable by its owner only. It says "the same submitter as before", not
who that is. What is signed names its purpose, so that a signature of one kind is never taken for one of another.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

from vramlab.crowd.canonical import to_canonical
from vramlab.environment import config_dir
from vramlab.errors import EnvironmentUnable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_FILE = "signing-key.pem"
ALGORITHM = "ed25519"
_HEX_KEY, _HEX_SIGNATURE = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{128}")


@dataclass(frozen=True)
class SigningKey:
    """A private key. `public_key` is 64 hex digits."""

    public_key: str
    _private: Ed25519PrivateKey = field(repr=False)

    @property
    def key_id(self) -> str:
        """See `key_id_of`."""
        return key_id_of(self.public_key)

    def sign(self, body: Mapping[str, Any], purpose: str) -> str:
        """128 hex digits. ValueError where the body has no canonical JSON."""
        return self._private.sign(_message(body, purpose)).hex()

    def signature_block(self, body: Mapping[str, Any], purpose: str) -> dict[str, str]:
        """`{"algorithm", "key_id", "public_key", "signature"}`: what `is_signed` takes."""
        return {"algorithm": ALGORITHM, "key_id": self.key_id, "public_key": self.public_key, "signature": self.sign(body, purpose)}


def key_id_of(public_key: str) -> str:
    """16 hex digits that name a public key."""
    return hashlib.sha256(bytes.fromhex(public_key)).hexdigest()[:16]


def is_signed(body: Mapping[str, Any], block: Any, purpose: str) -> bool:
    """Whether a signature block is well formed, agrees with itself, and signs the body for this purpose."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if not isinstance(block, Mapping) or set(block) != {"algorithm", "key_id", "public_key", "signature"}:
        return False
    key, signature = block["public_key"], block["signature"]
    if not (isinstance(key, str) and _HEX_KEY.fullmatch(key) and isinstance(signature, str) and _HEX_SIGNATURE.fullmatch(signature)):
        return False
    if block["algorithm"] != ALGORITHM or block["key_id"] != key_id_of(key):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(bytes.fromhex(signature), _message(body, purpose))
    except (InvalidSignature, ValueError):  # ValueError: no such point, or no canonical form
        return False
    return True


def _message(body: Mapping[str, Any], purpose: str) -> bytes:
    return f"vramlab {purpose}\n".encode() + to_canonical(body)


def own_key(path: Path | None = None) -> SigningKey:
    """The key of this user, or the one at `path`; made where there is none. EnvironmentUnable where it cannot be read, is no Ed25519 key,
    or others can read it."""
    path = Path(path) if path is not None else config_dir() / KEY_FILE
    try:
        if not os.path.lexists(path):
            _make(path)
        return _from_pem(_read_private(path), path)
    except OSError as error:
        raise EnvironmentUnable(f"the signing key {path} cannot be used: {error.strerror or error}") from error


def make_key() -> SigningKey:
    """A new key that is kept nowhere."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return _of(Ed25519PrivateKey.generate())


def _of(private: Ed25519PrivateKey) -> SigningKey:
    return SigningKey(private.public_key().public_bytes_raw().hex(), private)


def _make(path: Path) -> None:
    """Write a new key. Of two processes at once one wins, and both go on with its key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(pem)
            f.flush()
            os.fsync(f.fileno())
        os.link(part, path)
    except FileExistsError:
        pass  # the other process was first
    finally:
        part.unlink()


def _read_private(path: Path) -> bytes:
    """A file that its owner alone can read, followed over no link."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(handle, "rb") as f:
        state = os.fstat(f.fileno())
        if state.st_mode & 0o077:
            raise EnvironmentUnable(f"others can read the signing key {path} (mode {state.st_mode & 0o777:04o}): chmod 600 it, or, where "
                                    "somebody may have read it, remove it; a new one is made then")
        if state.st_uid != os.geteuid():
            raise EnvironmentUnable(f"the signing key {path} belongs to another user")
        return f.read(2**16)


def _from_pem(pem: bytes, path: Path) -> SigningKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        private = load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise EnvironmentUnable(f"the signing key {path} is no private key: {error}") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise EnvironmentUnable(f"the signing key {path} is no Ed25519 key")
    return _of(private)
