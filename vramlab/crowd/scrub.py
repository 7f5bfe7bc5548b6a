"""What is taken out of a run before it is given away: paths, host and user names, UUIDs of GPUs.

UUIDs become salted hashes, so that two records of one GPU still say so. Of a path only the last name stays. The config of a
cell loses its paths only: its words are the cell's identity.
"""

from __future__ import annotations

import getpass
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from vramlab.environment import hash_identity

_UUID = re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_PATH = re.compile(r"(?<![\w/.~\]])~?(?:/[\w.+@%~-]*[\w+@%~])+/?|\b[A-Za-z]:\\[^\s\"']+")
_HOME = re.compile(r"^(?:~|/home/[^/]+|/Users/[^/]+|[A-Za-z]:\\Users\\[^\\]+)[/\\]?$")
_COMMON_NAMES = frozenset({"root", "user", "admin", "ubuntu", "debian", "localhost", "nobody", "runner"})  # name nobody
LEAST_NAME = 3  # shorter names are words of every text


@dataclass(frozen=True)
class Names:
    """Names of this machine and its user that may not be given away."""

    host: str
    user: str
    home: str  # its folder, which may hold spaces

    @classmethod
    def here(cls) -> Names:
        """Of this process."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container may run under a number without a name
            user = ""
        return cls(platform.node(), user, str(Path.home()))

    def replacements(self) -> dict[str, str]:
        """Words that are told -> what stands for them."""
        short = self.host.split(".")[0]
        told = {self.host: "[host]", short: "[host]", self.user: "[user]"}
        return {word: stand_in for word, stand_in in told.items() if len(word) >= LEAST_NAME and word.lower() not in _COMMON_NAMES}


def scrub_text(text: str, names: Names) -> str:
    """`text` without UUIDs, paths and names."""
    text = scrub_paths(text, names)
    for word in sorted(names.replacements(), key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", names.replacements()[word], text)
    return text


def scrub_paths(text: str, names: Names) -> str:
    """`text` without UUIDs and paths."""
    if " " in names.home:  # else the pattern finds it
        text = text.replace(names.home, "~")
    return _PATH.sub(lambda match: _last_name(match[0]), _UUID.sub(lambda match: f"GPU-{hash_identity(match[0])}", text))


def _last_name(path: str) -> str:
    if _HOME.match(path):
        return "[home]"
    last = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    return f"[path]/{last}"


def scrub(value: Any, names: Names, path: str = "") -> tuple[Any, list[str]]:
    """(`value` with all its strings scrubbed, dotted paths of what was changed). Configs lose paths only."""
    if isinstance(value, str):
        clean = scrub_paths(value, names) if ".config." in f".{path}." else scrub_text(value, names)
        return clean, [path] if clean != value else []
    if isinstance(value, Mapping):
        found = {key: scrub(inner, names, f"{path}.{key}".lstrip(".")) for key, inner in value.items()}
        return {key: clean for key, (clean, _) in found.items()}, [p for _, changed in found.values() for p in changed]
    if isinstance(value, list | tuple):
        items = [scrub(inner, names, f"{path}.{index}".lstrip(".")) for index, inner in enumerate(value)]
        return [clean for clean, _ in items], [p for _, changed in items for p in changed]
    return value, []
