"""What somebody with a key of their own can do to a bundle: change anything, and sign it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vramlab.crowd.canonical import to_canonical
from vramlab.crowd.manifest import bundle_name, signed
from vramlab.crowd.signing import SigningKey

Members = dict[str, bytes]


def members_of(bundle: Path) -> Members:
    """Name -> bytes of a bundle's files."""
    return {p.relative_to(bundle).as_posix(): p.read_bytes() for p in sorted(bundle.rglob("*")) if p.is_file()}


def forge(members: Members, to: Path, key: SigningKey, **manifest: Any) -> Path:
    """Write a bundle with a manifest that is true to its files and signed; the rest of the manifest stays unless it is given."""
    body = {k: v for k, v in json.loads(members["manifest.json"]).items() if k != "signature"} | manifest
    rest = {name: data for name, data in members.items() if name != "manifest.json"}
    body["files"] = [{"path": n, "bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in sorted(rest.items())]
    body["bundle"] = bundle_name(body["files"])
    return write(rest | {"manifest.json": to_canonical(signed(body, key))}, to / body["bundle"])


def write(members: Members, folder: Path) -> Path:
    """A folder with these files."""
    for name, data in members.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def with_json(members: Members, name: str, change: Callable[[Any], Any]) -> Members:
    """One JSON file changed: `change` edits its body in place, or returns another."""
    body = json.loads(members[name])
    new = change(body)
    return members | {name: json.dumps(body if new is None else new, indent=1, sort_keys=True).encode()}


def record_of_method(members: Members, method: str, target: str = "cpu") -> str:
    """The name of a cell's record."""
    for name, data in members.items():
        if name.endswith("record.json"):
            config = json.loads(data)["config"]
            if (config["method"], config["target"].partition(":")[0]) == (method, target):
                return name
    raise AssertionError(f"no cell of {method} on {target}")


def leaves(body: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths of all values of a JSON body that hold no others; of an empty object or list, its own."""
    if isinstance(body, dict) and body:
        for key, value in body.items():
            yield from leaves(value, (*path, key))
    elif isinstance(body, list) and body:
        for index, value in enumerate(body):
            yield from leaves(value, (*path, index))
    else:
        yield path


def at(body: Any, path: tuple) -> Any:
    """The value at a path."""
    for step in path:
        body = body[step]
    return body


def put(body: Any, path: tuple, value: Any) -> None:
    """Set the value at a path."""
    at(body, path[:-1])[path[-1]] = value


def drop(body: Any, path: tuple) -> None:
    """Take the value at a path out."""
    del at(body, path[:-1])[path[-1]]
