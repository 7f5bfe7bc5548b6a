"""What is measured once is kept: small JSON files in the user's cache folder, one per device, torch version and thread count."""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vramlab.environment import cache_dir, probe_cpu
from vramlab.errors import EnvironmentUnable


_UNWRITTEN: dict[Path, dict[str, Any]] = {}  # entries of this process that the disk did not take


class Store:
    """One JSON object that processes share. Files are replaced whole, so a reader never sees half of one.

    Where the folder cannot be written, entries are kept for this process alone, and it is warned of once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """All entries. EnvironmentUnable when the file is damaged."""
        return self._on_disk() | _UNWRITTEN.get(self.path, {})

    def _on_disk(self) -> dict[str, Any]:
        try:
            return json.loads(self.path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return {}
        except ValueError as wrong:
            raise EnvironmentUnable(f"{self.path} is damaged ({wrong}); delete it and it will be measured anew") from None

    def add(self, entries: Mapping[str, Any]) -> None:
        """Merge entries into what is on disk now. Two that write at once may lose entries, never mix them."""
        if not entries:
            return
        try:
            self._write(self._on_disk() | dict(entries))
        except OSError as refused:
            if self.path not in _UNWRITTEN:
                warnings.warn(f"{self.path.parent} cannot be written ({refused.strerror}): what is measured ends with this process; "
                              f"set XDG_CACHE_HOME to a directory of yours", stacklevel=2)
            _UNWRITTEN.setdefault(self.path, {}).update(entries)

    def _write(self, body: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, prefix=f".{self.path.name}.", delete=False, encoding="utf-8") as file:
            json.dump(body, file)
        os.replace(file.name, self.path)


def device_store(kind: str, device: torch.device, folder: Path | None = None) -> Store:
    """The store of `kind` ("costs", "profile") for this device; `folder` instead of the user's cache folder."""
    words = [device_name(device), f"torch {torch.__version__}"]
    if device.type == "cpu":
        words.append(f"{torch.get_num_threads()} threads")
    name = re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower())
    return Store((folder or cache_dir()) / kind / f"{name}.json")


def device_name(device: torch.device) -> str:
    """The model of the processor or of the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return probe_cpu({})["model"] or "unnamed processor"
