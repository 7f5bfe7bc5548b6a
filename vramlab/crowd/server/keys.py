"""What the server knows and nobody else: its signing key, and secrets of its own. In data_dir/keys, readable by its owner only."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from vramlab.crowd.server.settings import Settings
from vramlab.crowd.signing import SigningKey, own_key

SECRET_BYTES = 32


def signing_key(settings: Settings) -> SigningKey:
    """The key that marks are signed with, made on first use. EnvironmentUnable when others can read it."""
    return own_key(_folder(settings) / "server.pem")


def secret(settings: Settings, name: str) -> bytes:
    """32 random bytes under a name, made on first use and the same ever after."""
    path = _folder(settings) / f"{name}.secret"
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    if not path.exists():
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
            f.write(secrets.token_bytes(SECRET_BYTES))
            f.flush()
            os.fsync(f.fileno())
        try:
            os.link(part, path)
        except FileExistsError:
            pass  # another process was first: its secret holds
        finally:
            part.unlink()
    return path.read_bytes()


def _folder(settings: Settings) -> Path:
    folder = settings.data_dir / "keys"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
