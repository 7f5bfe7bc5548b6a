"""Archives on disk, each under its own SHA-256. One is whole and on the disk before anybody is told that it is there.

    data_dir/incoming/           bodies that are being read, folders that are being checked; swept at the start
    data_dir/bundles/ab/<sha256>.tar.gz
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

DAY_SECONDS = 86400.0
STALE_SECONDS = 3600.0  # what lies in incoming for longer belongs to nobody any more


class Store:
    """The archives of one server."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir, self.bundles, self.incoming = data_dir, data_dir / "bundles", data_dir / "incoming"

    def prepare(self) -> None:
        """Make the folders and sweep what a killed server left behind."""
        for folder in (self.data_dir, self.bundles, self.incoming):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self.incoming.iterdir():
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left) if left.is_dir() else left.unlink()

    def path(self, sha256: str) -> Path:
        """Where an archive lies or would lie."""
        return self.bundles / sha256[:2] / f"{sha256}.tar.gz"

    @contextmanager
    def body(self) -> Iterator[Body]:
        """A body that is being read; what is not kept by the end of the block is gone."""
        handle, name = tempfile.mkstemp(dir=self.incoming, suffix=".body")
        body = Body(Path(name), handle)
        try:
            yield body
        finally:
            body.discard()

    def keep(self, body: Body) -> Path:
        """Put a finished body under its hash, durably. The same body again is as good as the one that is there."""
        target = self.path(body.sha256)
        target.parent.mkdir(exist_ok=True, mode=0o700)
        os.replace(body.path, target)
        for folder in (target.parent, self.bundles):
            sync_folder(folder)
        return target

    def stale_archives(self) -> list[Path]:
        """Archives that were kept more than a day ago."""
        return [path for path in self.bundles.glob("*/*.tar.gz") if time.time() - path.stat().st_mtime > DAY_SECONDS]

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """An empty folder for unpacking, gone at the end of the block."""
        path = Path(tempfile.mkdtemp(dir=self.incoming, suffix=".folder"))
        try:
            yield path
        finally:
            shutil.rmtree(path)

    def read(self, sha256: str, name: str) -> bytes:
        """One file of an archive. KeyError when the archive has none of that name; FileNotFoundError when there is no such archive."""
        with tarfile.open(self.path(sha256), "r|gz") as tar:
            for entry in tar:
                if entry.name == name and (file := tar.extractfile(entry)):
                    return file.read()
        raise KeyError(name)


class Body:
    """Bytes of a request as they come in, on disk and hashed."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path, self.nbytes = path, 0
        self._file, self._hash = os.fdopen(handle, "wb"), hashlib.sha256()

    def write(self, chunk: bytes) -> None:
        """One more chunk."""
        self._file.write(chunk)
        self._hash.update(chunk)
        self.nbytes += len(chunk)

    @property
    def sha256(self) -> str:
        """Of what was written by now."""
        return self._hash.hexdigest()

    def finish(self) -> None:
        """Everything is written: bring it to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        """Close the file and remove it where it still is."""
        self._file.close()
        self.path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
