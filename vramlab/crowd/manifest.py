"""manifest.json: every file with its bytes and SHA-256, whose key signs, and what was scrubbed. Said once, for packer and checker."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Iterable, Literal, Mapping

from pydantic import BaseModel, ConfigDict, Field

from vramlab.crowd.canonical import to_canonical
from vramlab.crowd.signing import SigningKey, is_signed
from vramlab.runs import Run

FORMAT_VERSION = 2
PURPOSE = f"bundle {FORMAT_VERSION}"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # of Rust's regex: $ is the end, no newline before it
Name = Annotated[str, Field(max_length=200)]


class Form(BaseModel):
    """Base of what strangers send: unknown keys are errors and nothing is coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FileEntry(Form):
    """One file of the bundle."""

    path: Name
    bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256


class Signature(Form):
    """See vramlab.crowd.signing."""

    algorithm: Literal["ed25519"]
    key_id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    public_key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class Manifest(Form):
    """The whole of it."""

    format: Literal[2]
    bundle: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # a hash of `files`: the same content is the same bundle, whoever signs it
    vramlab: Name
    workflow: Annotated[str, Field(max_length=200, min_length=1)]
    run_id: Name | None
    is_complete: bool
    cells: Annotated[int, Field(ge=1)]  # that have a record
    planned_cells: Annotated[int, Field(ge=1)]
    machines: Annotated[list[Name], Field(min_length=1)]  # salted hashes of those that the records come from, sorted
    supersedes: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None  # an earlier bundle of the same submitter
    files: Annotated[list[FileEntry], Field(min_length=1)]
    scrubbed: dict[Name, list[Name]]
    signature: Signature


def bundle_name(files: Iterable[Mapping[str, Any]]) -> str:
    """32 hex digits of the SHA-256 over the canonical list of files."""
    return hashlib.sha256(to_canonical(sorted(files, key=lambda entry: entry["path"]))).hexdigest()[:32]


def machine_of(environment: Mapping[str, Any]) -> str | None:
    """The salted hash that stands for the machine of a record; None where it does not say."""
    return (environment.get("system") or {}).get("host_hash")


def machines_of(run: Run) -> list[str]:
    """Of all records, sorted; what a record itself does not say, the run does."""
    found = {machine_of(run.environment_of(record)) for record in run.records}
    return sorted(found - {None})


def describe(run: Run) -> dict[str, Any]:
    """What the manifest says of the run, and the checker derives anew."""
    return {"workflow": str(run.workflow.get("name") or "unnamed"), "run_id": run.plan.get("run_id"),
            "is_complete": all(cell.record for cell in run.cells), "cells": len(run.records), "planned_cells": len(run.cells),
            "machines": machines_of(run)}


def signed(body: Mapping[str, Any], key: SigningKey) -> dict[str, Any]:
    """The manifest with its signature."""
    return dict(body) | {"signature": key.signature_block(body, PURPOSE)}


def is_truly_signed(manifest: Mapping[str, Any]) -> bool:
    """Whether the key that the manifest names signs all the rest of it."""
    return is_signed({key: value for key, value in manifest.items() if key != "signature"}, manifest.get("signature"), PURPOSE)


