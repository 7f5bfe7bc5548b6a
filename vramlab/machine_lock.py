"""One lock a machine, whoever measures on it: two that measure at once would disturb each other.

It lies in a folder that every user may write, chosen by that folder's mode and not by who asks, so that all choose alike:
VRAMLAB_LOCK_DIR where it is set, else /run/lock, else /tmp. Anybody may have put something else under its name there. Hence no link is
followed, only a plain file with no other name is taken, and whoever makes it opens it to all, whatever the umask.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from vramlab.environment import cache_dir
from vramlab.errors import EnvironmentUnable

FOLDER_VARIABLE = "VRAMLAB_LOCK_DIR"
_FILE = "vramlab-measuring.lock"
_FOLDERS = (Path("/run/lock"), Path("/tmp"))
_OPEN_TO_ALL = stat.S_ISVTX | stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO
_PATIENCE_SECONDS = 1.0  # between making the file and opening it to all lies an instant
_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR})


def lock_path(folders: Sequence[Path] = _FOLDERS) -> Path:
    """Where the lock lies. Where no folder is open to all, in the user's cache folder: then it holds among this user's runs only."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen) / _FILE
    return next((folder for folder in folders if _is_open_to_all(folder)), cache_dir()) / _FILE


def _is_open_to_all(folder: Path) -> bool:
    try:
        mode = folder.stat().st_mode
    except OSError:
        return False
    return stat.S_ISDIR(mode) and mode & _OPEN_TO_ALL == _OPEN_TO_ALL


def open_for_all(path: str, flags: int) -> int:
    """An opener for `open`: a descriptor of the lock, which is made where there is none.

    EnvironmentUnable where something else stands in its place, or another user keeps it closed.
    """
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return _plain(_opened_or_made(path, flags & ~os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), path)
        except PermissionError as refused:
            if time.monotonic() > until:
                raise _unable(path, f"cannot be opened ({refused.strerror})") from None
            time.sleep(0.05)
        except OSError as refused:
            if refused.errno not in _NO_FILE:
                raise
            raise _unable(path, f"is no plain file ({refused.strerror})") from None


def _opened_or_made(path: str, flags: int) -> int:
    """Never both in one call: Linux refuses O_CREAT on another user's file in a folder that is open to all (fs.protected_regular)."""
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        pass
    try:
        made = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:  # another was quicker
        return os.open(path, flags)
    os.fchmod(made, 0o666)
    return made


def _plain(descriptor: int, path: str) -> int:
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        return descriptor
    os.close(descriptor)
    raise _unable(path, "is another file, or has a second name")


def _unable(path: str, why: str) -> EnvironmentUnable:
    return EnvironmentUnable(f"{path} {why}. All who measure on this machine take turns by it: remove it, or set {FOLDER_VARIABLE} to a "
                             "folder that all of them may write")
