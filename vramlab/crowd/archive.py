"""A bundle as one .tar.gz body, and back: `pack(folder)` gives the same bytes for the same bundle, `unpack(data, into)` trusts nobody.

Only plain files of the layout are taken out (vramlab/crowd/layout.py): no absolute path, no `..`, no link, device or folder entry, no name
twice; sizes and the ratio of unpacked to packed bytes are bounded while it is unpacked. What is refused leaves nothing behind.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import tarfile
import zlib
from pathlib import Path
from typing import Mapping

from vramlab.crowd.canonical import read_strict
from vramlab.crowd.layout import LIMITS, Limits, check_name, check_names, check_size, files_below
from vramlab.errors import BundleRefused
from vramlab.runs import MANIFEST_FILE

_BUNDLE = re.compile(r"[0-9a-f]{32}")
_TAKEN = (tarfile.REGTYPE, tarfile.AREGTYPE)
_CHUNK = 2**16


def pack(folder: Path) -> bytes:
    """The archive of a bundle's folder: names sorted, no dates, no owners. BundleRefused on what no bundle may hold."""
    return pack_members({name: (folder / name).read_bytes() for name in files_below(folder)})


def pack_members(members: Mapping[str, bytes]) -> bytes:
    """The archive of files that lie nowhere, by their names."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in sorted(members.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return gzip.compress(raw.getvalue(), compresslevel=6, mtime=0)


def unpack(data: bytes, into: Path, limits: Limits = LIMITS) -> Path:
    """Take an archive out into `<into>/<bundle>` and return that folder, where it must not be yet; `into` is made where there is none.

    BundleRefused names the rule that the archive breaks; then `into` is as before. The bundle's name is what its manifest says: whether it
    is true is for `vramlab.crowd.check`.
    """
    contents = _contents(data, limits)
    bundle = _name_of(contents)
    target = Path(into) / bundle
    if target.exists():
        raise BundleRefused("bundle-exists", bundle, f"{target.name} is there already")
    part = target.with_name(f".{bundle}.{os.getpid()}.{os.urandom(4).hex()}.part")
    try:
        for name, body in contents.items():
            path = part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _name_of(contents: dict[str, bytes]) -> str:
    if MANIFEST_FILE not in contents:
        raise BundleRefused("manifest-missing", MANIFEST_FILE, "the archive has no manifest: it is no bundle")
    manifest = read_strict(contents[MANIFEST_FILE], MANIFEST_FILE)
    bundle = manifest.get("bundle") if isinstance(manifest, dict) else None
    if not isinstance(bundle, str) or not _BUNDLE.fullmatch(bundle):
        raise BundleRefused("manifest", f"{MANIFEST_FILE}:bundle", "is no name of a bundle: 32 hex digits")
    return bundle


def _contents(data: bytes, limits: Limits) -> dict[str, bytes]:
    """Name -> bytes of every file in an archive."""
    if len(data) > limits.archive_bytes:
        raise BundleRefused("archive-size", "", f"{len(data):,} bytes; at most {limits.archive_bytes:,} are taken")
    stream = _Bounded(data, limits)
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=tarfile.BLOCKSIZE) as tar:
            for entry in tar:
                _check_entry(entry, limits)
                if entry.name in found or len(found) >= limits.files:
                    check_names([*found, entry.name], limits)
                found[entry.name] = tar.extractfile(entry).read()
        stream.finish()
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError) as error:
        raise BundleRefused("archive", "", f"no whole .tar.gz archive: {error}") from None
    check_names(found, limits)
    return found


def _check_entry(entry: tarfile.TarInfo, limits: Limits) -> None:
    shown = entry.name[:120].encode("ascii", "backslashreplace").decode()
    if entry.issym():
        raise BundleRefused("symlink", shown, "a symbolic link")
    if entry.islnk():
        raise BundleRefused("hard-link", shown, "a hard link")
    if entry.isdev():
        raise BundleRefused("device", shown, "a device or a pipe")
    check_name(entry.name)
    if entry.type not in _TAKEN or entry.issparse() or entry.pax_headers or entry.size < 0:
        raise BundleRefused("archive", shown, "no plain file entry")
    check_size(entry.name, entry.size, limits)


class _Bounded:
    """The unpacked bytes of a gzip archive, as far as the limits allow."""

    def __init__(self, data: bytes, limits: Limits) -> None:
        self._data, self._at, self._pending = data, 0, b""
        self._stream, self._out = zlib.decompressobj(wbits=31), 0
        # An entry takes its content and two blocks of 512 bytes at most.
        self._most = min(limits.total_bytes + 1024 * limits.files, max(2**20, int(limits.ratio * len(data))))

    def read(self, size: int) -> bytes:
        """At most `size` bytes, fewer only at the end."""
        parts, missing = [], size
        while missing and not self._stream.eof:
            if not self._pending:
                self._pending = self._data[self._at:self._at + _CHUNK]
                self._at += len(self._pending)
            is_last = self._at >= len(self._data)
            try:
                made = self._stream.decompress(self._pending, missing)
            except zlib.error as error:
                raise BundleRefused("archive", "", f"no gzip: {error}") from None
            self._pending = self._stream.unconsumed_tail
            self._out += len(made)
            if self._out > self._most:
                raise BundleRefused("zip-bomb", "", f"{len(self._data):,} bytes unpack to more than {self._most:,}")
            parts.append(made)
            missing -= len(made)
            if not made and not self._pending and is_last:
                break
        return b"".join(parts)

    def finish(self) -> None:
        """Everything is read, and nothing follows the archive."""
        while padding := self.read(_CHUNK):
            if padding.strip(b"\0"):
                raise BundleRefused("archive", "", "something follows the last file")
        if not self._stream.eof:
            raise BundleRefused("archive", "", "the archive ends early")
        if self._stream.unused_data or self._at < len(self._data):
            raise BundleRefused("archive", "", "something follows the archive")
