"""What may lie in a bundle, and how much of it. Everything else is refused by name before it is read.

    manifest.json  run.json  claims.json
    cells/<cell_id>/record.json  schedule.json.gz  telemetry.csv.gz
    tapes/<sha256>.json.gz       baselines/<id>.json
"""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vramlab.errors import BundleRefused
from vramlab.report.evidence import MADE_FROM_RECORDS

CLAIMS_FILE = "claims.json"
_ALLOWED = re.compile(
    r"(?:manifest|run|claims)\.json"
    r"|cells/[0-9a-f]{16}/(?:record\.json|schedule\.json\.gz|telemetry\.csv\.gz)"
    r"|tapes/[0-9a-f]{64}\.json\.gz"
    r"|baselines/[0-9a-f]{16}\.json"
)
_HINT = "; it is made from the records, and may go"
_FOLDERS = re.compile(r"cells(?:/[0-9a-f]{16})?|tapes|baselines")
_RATIO_COUNTS_FROM = 2**20  # bytes; below, a high ratio harms nobody


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that a bundle may be."""

    archive_bytes: int = 2**25
    files: int = 5_000
    file_bytes: int = 2**24  # as it lies in the bundle
    total_bytes: int = 2**27  # all files as they lie in the bundle
    unpacked_bytes: int = 2**26  # of one .gz file
    all_unpacked_bytes: int = 2**28  # of all .gz files
    timed_steps: int = 100_000  # of all cells and baselines: each is drawn 10,000 times, for its interval
    ratio: float = 200.0  # unpacked over packed bytes; what deflate can do is 1032


LIMITS = Limits()


def check_name(name: str) -> None:
    """BundleRefused where a file of a bundle may not have this name: path for what leads out of it, layout for the rest."""
    shown = name[:120].encode("ascii", "backslashreplace").decode()
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ".." in parts or "\\" in name or "\0" in name or re.match(r"[A-Za-z]:", name):
        raise BundleRefused("path", shown, "a name that leads out of the bundle")
    if not _ALLOWED.fullmatch(name):
        raise BundleRefused("layout", shown, f"no file of a bundle has this name{_HINT if name in MADE_FROM_RECORDS else ''}")


def check_names(names: Iterable[str], limits: Limits = LIMITS) -> None:
    """BundleRefused where a name is not allowed, stands twice, differs from another by case only, or where there are too many."""
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.get(name.casefold())) is not None:
            rule = "duplicate-file" if other == name else "case-clash"
            raise BundleRefused(rule, name[:120], "the same file twice" if other == name else f"differs from {other[:120]} by case only")
        seen[name.casefold()] = name
        check_name(name)
        if len(seen) > limits.files:
            raise BundleRefused("file-count", "", f"more than {limits.files:,} files")


def files_below(folder: Path, limits: Limits = LIMITS) -> dict[str, int]:
    """Name -> bytes of every file in a bundle's folder. BundleRefused on what is no plain file of its own (symlink, hard-link, device),
    on names that are not allowed, and on too many or too large files. Nothing is opened, no link is followed."""
    found: dict[str, int] = {}
    total = 0
    for name, state in _entries(folder, ""):
        _check_kind(name, state)
        if len(found) >= limits.files:
            raise BundleRefused("file-count", "", f"more than {limits.files:,} files")
        check_size(name, state.st_size, limits)
        found[name], total = state.st_size, total + state.st_size
        if total > limits.total_bytes:
            raise BundleRefused("total-size", "", f"more than {limits.total_bytes:,} bytes")
    check_names(found, limits)
    return found


def check_size(name: str, nbytes: int, limits: Limits = LIMITS) -> None:
    """BundleRefused where one file is too large."""
    if nbytes > limits.file_bytes:
        raise BundleRefused("file-size", name, f"{nbytes:,} bytes; at most {limits.file_bytes:,} are taken")


def _entries(folder: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    """What is no folder of a bundle's layout, by its name below the bundle."""
    with os.scandir(folder) as listed:
        for entry in sorted(listed, key=lambda e: e.name):
            name, state = f"{prefix}{entry.name}", entry.stat(follow_symlinks=False)
            if not stat.S_ISDIR(state.st_mode):
                yield name, state
            elif _FOLDERS.fullmatch(name):
                yield from _entries(Path(entry.path), f"{name}/")
            else:
                raise BundleRefused("layout", name[:120], "no folder of a bundle has this name")


def _check_kind(name: str, state: os.stat_result) -> None:
    if stat.S_ISLNK(state.st_mode):
        raise BundleRefused("symlink", name[:120], "a symbolic link")
    if not stat.S_ISREG(state.st_mode):
        raise BundleRefused("device", name[:120], "no plain file: a device, a pipe or a socket")
    if state.st_nlink > 1:
        raise BundleRefused("hard-link", name[:120], "the file has a second name somewhere")


def gunzip(data: bytes, where: str, limits: Limits = LIMITS, *, may_be_cut: bool = False) -> bytes:
    """The content of one gzip member. BundleRefused (zip-bomb) before more than the limits allow is unpacked, (gzip) where it is no gzip,
    is followed by anything, or, unless it `may_be_cut`, ends early."""
    stream = zlib.decompressobj(wbits=31)
    most = max(_RATIO_COUNTS_FROM, min(limits.unpacked_bytes, int(limits.ratio * len(data))))
    try:
        text = stream.decompress(data, most + 1)
    except zlib.error as error:
        raise BundleRefused("gzip", where, f"cannot be unpacked: {error}") from None
    if len(text) > most:
        raise BundleRefused("zip-bomb", where, f"{len(data):,} bytes unpack to more than {most:,}")
    if stream.unused_data:
        raise BundleRefused("gzip", where, "something follows the packed content")
    if not stream.eof and not may_be_cut:
        raise BundleRefused("gzip", where, "the packed content ends early")
    return text
