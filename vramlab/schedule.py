"""The Schedule: what to run, free, move and recompute, in order. Plain data; read this file second."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Mapping, TypeAlias

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Compute:
    """First run of an op: its outputs become resident, its state is written."""

    op: int
    reuse: int | None = None  # the input storage whose region the output takes over (Op.takeover)
    variant: str | None = None  # a convolution algorithm, None for the library's own choice


@dataclass(frozen=True, slots=True)
class Recompute:
    """A further run of an op: its absent outputs become resident, its state is left alone."""

    op: int
    reuse: int | None = None
    variant: str | None = None


@dataclass(frozen=True, slots=True)
class Free:
    """Drop the device copy of a storage."""

    storage: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Start the device-to-host copy; the device copy stays until `Free`."""

    storage: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Allocate on the device and start the host-to-device copy; the host copy stays."""

    storage: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The compute stream waits for that storage's copy."""

    storage: int


@dataclass(frozen=True, slots=True)
class FreeHost:
    """Drop the host copy of a storage."""

    storage: int


Instruction: TypeAlias = Compute | Recompute | Free | Offload | Prefetch | Wait | FreeHost

OPCODES: dict[str, type] = {
    "compute": Compute, "recompute": Recompute, "free": Free, "offload": Offload,
    "prefetch": Prefetch, "wait": Wait, "free_host": FreeHost,
}
_NAMES = {kind: name for name, kind in OPCODES.items()}


@dataclass(frozen=True)
class Schedule:
    """An ordered tuple of instructions for the tape with this digest."""

    instructions: tuple[Instruction, ...]
    tape_digest: str
    method: str = ""  # uid of the method that planned it
    micro_batches: tuple[int, ...] = ()  # those of the tape, for who reads the schedule alone; empty when the batch is whole
    needs: tuple[str, ...] = ()  # what the tape was prepared for, beyond eager's: algorithms, split convolutions, gradients in place

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the JSON form."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def count(self, kind: type) -> int:
        """How many instructions are of this kind."""
        return sum(isinstance(i, kind) for i in self.instructions)

    def to_json(self) -> dict[str, Any]:
        """`{"format", "tape_digest", "method", "micro_batches", "instructions": [["compute", 3], ...]}`; "needs" where there are any."""
        needs = {"needs": list(self.needs)} if self.needs else {}
        return needs | {"format": FORMAT_VERSION, "tape_digest": self.tape_digest, "method": self.method,
                "micro_batches": list(self.micro_batches), "instructions": [_to_list(i) for i in self.instructions]}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Schedule:
        """Inverse of `to_json`. ValueError on another format version or an unknown instruction."""
        if body.get("format") != FORMAT_VERSION:
            raise ValueError(f"schedule format {body.get('format')!r}, this vramlab reads {FORMAT_VERSION}")
        return cls(instructions=tuple(_from_list(i) for i in body["instructions"]), tape_digest=body["tape_digest"],
                   method=body["method"], micro_batches=tuple(body["micro_batches"]), needs=tuple(body.get("needs", ())))

    def save(self, path: Path) -> None:
        """Write `schedule.json.gz`, the same bytes for the same schedule."""
        text = json.dumps(self.to_json(), separators=(",", ":")).encode()
        path.write_bytes(gzip.compress(text, compresslevel=6, mtime=0))

    @classmethod
    def load(cls, path: Path) -> Schedule:
        """Inverse of `save`."""
        return cls.from_json(json.loads(gzip.decompress(path.read_bytes())))


def _to_list(instruction: Instruction) -> list[Any]:
    name = _NAMES[type(instruction)]
    if isinstance(instruction, Compute | Recompute):
        row = [name, instruction.op, instruction.reuse, instruction.variant]
        while row[-1] is None:
            row.pop()
        return row
    return [name, instruction.storage]


def _from_list(row: list[Any]) -> Instruction:
    if row[0] not in OPCODES:
        raise ValueError(f"unknown instruction {row[0]!r}, known are {', '.join(OPCODES)}")
    return OPCODES[row[0]](*row[1:])
