"""The Tape: one training step as plain data. No torch object inside; JSON both ways; read this file first.

A tape is an ordered tuple of `Op`s over `Tensor`s over `Storage`s. Only storages have bytes: a tensor is a view of one.
Temporaries are in single assignment: each such storage is written by exactly one op. State (parameters, buffers,
gradients, inputs, optimizer state) has versions at one address: an op that overwrites it lists it in `mutates`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Mapping, Sequence

FORMAT_VERSION = 1


class Role(StrEnum):
    """What a storage is for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    INPUT = "input"
    ACTIVATION = "activation"  # written in the forward phase, read in the backward phase
    TEMPORARY = "temporary"


STATE_ROLES = frozenset({Role.PARAMETER, Role.BUFFER, Role.GRADIENT, Role.OPTIMIZER_STATE, Role.INPUT})


class Phase(StrEnum):
    """The part of the step in which eager PyTorch runs an op."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The bytes behind tensors: the only thing that methods free, move and recompute."""

    id: int  # index in Tape.storages
    nbytes: int
    role: Role
    name: str  # of state: what it is bound to, "layer1.0.conv1.weight"; of temporaries: "%<id>"
    at_start: bool  # resident when the step starts
    at_end: bool  # must be resident when the step ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A view of one storage."""

    id: int  # index in Tape.tensors
    storage: int
    dtype: str  # "float32"
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    offset: int  # in elements


@dataclass(frozen=True, slots=True)
class Variant:
    """One algorithm by which an operator can run. An op's own `seconds` and `workspace_bytes` are the library's own choice."""

    name: str  # "winograd"; what `Compute.variant` says
    seconds: float
    workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator call, in eager's order."""

    id: int  # index in Tape.ops
    target: str  # "aten.convolution.default"
    args: Any  # the positional arguments as a JSON tree; {"tensor": id} stands for a tensor
    kwargs: Mapping[str, Any]
    inputs: tuple[int, ...]  # tensors read, first appearance first, no duplicates
    outputs: tuple[int | None, ...]  # tensors returned, flattened; None where the op returned no tensor
    phase: Phase
    layer: str  # dotted module path, "" for the root
    mutates: tuple[int, ...] = ()  # state storages overwritten, at their own address
    takeover: tuple[int, int] | None = None  # (output storage, input storage): the in-place twin may write over the input
    is_eager_inplace: bool = False  # eager itself runs the in-place twin
    is_random: bool = False
    throwaway_state: bool = False  # a recompute writes its state to a throw-away copy (BatchNorm's running statistics)
    seconds: float = 0.0
    flops: int = 0
    workspace_bytes: int = 0  # peak inside the op, beyond what it reads and returns
    variants: tuple[Variant, ...] = ()  # algorithms that a schedule may name, each name once

    @property
    def least_workspace_bytes(self) -> int:
        """The workspace of the leanest variant, the library's own choice among them."""
        return min([self.workspace_bytes, *(v.workspace_bytes for v in self.variants)])

    def variant(self, name: str | None) -> Variant:
        """The variant of this name; None is the library's own choice. KeyError when the op has none of that name."""
        if name is None:
            return Variant("", self.seconds, self.workspace_bytes)
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise KeyError(f"{self.target} has no variant {name!r}; it has {', '.join(v.name for v in self.variants) or 'none'}")


@dataclass(frozen=True)
class Tape:
    """One training step. `loss` is a tensor id; `device_type` is "cpu" or "cuda": where it was captured."""

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    storages: tuple[Storage, ...]
    loss: int
    device_type: str
    batch_size: int
    micro_batches: tuple[int, ...] = ()  # sizes of the passes that the step takes over its batch; empty when it is one pass

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """Per op: the storages that it reads, ascending, no duplicates."""
        return tuple(tuple(sorted({self.tensors[t].storage for t in op.inputs})) for op in self.ops)

    @cached_property
    def creates(self) -> tuple[tuple[int, ...], ...]:
        """Per op: the storages that it creates (its outputs less what it reads or overwrites), ascending."""
        made = []
        for op, read in zip(self.ops, self.reads):
            written = {self.tensors[t].storage for t in op.outputs if t is not None}
            made.append(tuple(sorted(written - set(read) - set(op.mutates))))
        return tuple(made)

    @cached_property
    def producer(self) -> tuple[int | None, ...]:
        """Per storage: the op that creates it, None for what is there at the start."""
        found: list[int | None] = [None] * len(self.storages)
        for op, made in zip(self.ops, self.creates):
            for s in made:
                found[s] = op.id
        return tuple(found)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Per storage: the ops that read it, ascending."""
        found: list[list[int]] = [[] for _ in self.storages]
        for op, read in zip(self.ops, self.reads):
            for s in read:
                found[s].append(op.id)
        return tuple(tuple(r) for r in found)

    @cached_property
    def read_versions(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per op: (storage, number of writes before this op) for each *overwritten* state storage that it reads.

        What an op overwrites with `throwaway_state` does not bind it: its recompute reads a copy.
        """
        overwritten = {s for op in self.ops for s in op.mutates}
        writes = dict.fromkeys(overwritten, 0)
        found = []
        for op, read in zip(self.ops, self.reads):
            free = set(op.mutates) if op.throwaway_state else set()
            found.append(tuple((s, writes[s]) for s in read if s in overwritten and s not in free))
            for s in op.mutates:
                writes[s] += 1
        return tuple(found)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything but the seconds of ops and variants: timing a tape anew does not rename it."""
        body = self.to_json()
        for op in body["ops"]:
            op.pop("seconds", None)
            if "variants" in op:
                op["variants"] = [[name, workspace_bytes] for name, _, workspace_bytes in op["variants"]]
        return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def op_name(self, op: int) -> str:
        """`#12 aten.relu.default (layer1.0)`: how messages name an op."""
        o = self.ops[op]
        return f"#{op} {o.target}" + (f" ({o.layer})" if o.layer else "")

    def storage_name(self, storage: int) -> str:
        """`layer1.0.weight`, or `%12 of #3 aten.relu.default (layer1)` for a temporary."""
        s = self.storages[storage]
        made_by = self.producer[storage]
        return s.name if made_by is None or s.role in STATE_ROLES else f"{s.name} of {self.op_name(made_by)}"

    def bytes_of(self, *roles: Role) -> int:
        """Sum of storage bytes with these roles."""
        return sum(s.nbytes for s in self.storages if s.role in roles)

    def with_costs(self, seconds: list[float], workspace_bytes: list[int] | None = None) -> Tape:
        """The same tape with new seconds (and workspaces), one per op."""
        spaces = workspace_bytes or [op.workspace_bytes for op in self.ops]
        ops = tuple(replace(op, seconds=float(t), workspace_bytes=int(w)) for op, t, w in zip(self.ops, seconds, spaces, strict=True))
        return replace(self, ops=ops)

    def with_variants(self, variants: Sequence[Sequence[Variant]]) -> Tape:
        """The same tape with these variants, one sequence per op. ValueError where a name stands twice in an op."""
        for op, found in zip(self.ops, variants, strict=True):
            if len({v.name for v in found}) < len(found):
                raise ValueError(f"{self.op_name(op.id)} has two variants of one name: {', '.join(v.name for v in found)}")
        return replace(self, ops=tuple(replace(op, variants=tuple(found)) for op, found in zip(self.ops, variants)))

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict; fields at their default are left out of ops."""
        return {
            "format": FORMAT_VERSION,
            "device_type": self.device_type,
            "batch_size": self.batch_size,
            "loss": self.loss,
            "storages": [[s.nbytes, str(s.role), s.name, s.at_start, s.at_end] for s in self.storages],
            "tensors": [[t.storage, t.dtype, list(t.shape), list(t.strides), t.offset] for t in self.tensors],
            "ops": [_op_to_json(op) for op in self.ops],
        } | ({"micro_batches": list(self.micro_batches)} if self.micro_batches else {})

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Tape:
        """Inverse of `to_json`. ValueError on another format version, and where an id names nothing: compiled loops trust them."""
        if body.get("format") != FORMAT_VERSION:
            raise ValueError(f"tape format {body.get('format')!r}, this vramlab reads {FORMAT_VERSION}")
        storages = tuple(
            Storage(id=i, nbytes=n, role=Role(role), name=name, at_start=bool(a), at_end=bool(z))
            for i, (n, role, name, a, z) in enumerate(body["storages"])
        )
        tensors = tuple(
            Tensor(id=i, storage=s, dtype=d, shape=tuple(shape), strides=tuple(strides), offset=o)
            for i, (s, d, shape, strides, o) in enumerate(body["tensors"])
        )
        ops = tuple(_op_from_json(i, op) for i, op in enumerate(body["ops"]))
        written = (s for op in ops for s in (*op.mutates, *(op.takeover or ())))
        _check_ids("storage", len(storages), [*(t.storage for t in tensors), *written])
        _check_ids("tensor", len(tensors), [body["loss"], *(t for op in ops for t in (*op.inputs, *op.outputs) if t is not None)])
        return cls(ops=ops, tensors=tensors, storages=storages, loss=body["loss"],
                   device_type=body["device_type"], batch_size=body["batch_size"],
                   micro_batches=tuple(body.get("micro_batches", ())))

    def save(self, path: Path) -> None:
        """Write `tape.json.gz`, the same bytes for the same tape."""
        text = json.dumps(self.to_json(), separators=(",", ":")).encode()
        path.write_bytes(gzip.compress(text, compresslevel=6, mtime=0))

    @classmethod
    def load(cls, path: Path) -> Tape:
        """Inverse of `save`."""
        return cls.from_json(json.loads(gzip.decompress(path.read_bytes())))


_OP_DEFAULTS = {"mutates": (), "takeover": None, "is_eager_inplace": False, "is_random": False,
                "throwaway_state": False, "seconds": 0.0, "flops": 0, "workspace_bytes": 0, "variants": ()}


def _check_ids(what: str, count: int, ids: Sequence[int]) -> None:
    for i in ids:
        if not isinstance(i, int) or not 0 <= i < count:
            raise ValueError(f"the tape names {what} {i!r}; it has {count}")


def _op_to_json(op: Op) -> dict[str, Any]:
    body = {name: getattr(op, name) for name in Op.__dataclass_fields__ if name != "id"}
    for name, default in _OP_DEFAULTS.items():
        if body[name] == default:
            del body[name]
    body["phase"] = str(op.phase)
    body["inputs"], body["outputs"] = list(op.inputs), list(op.outputs)
    for name in ("mutates", "takeover"):
        if name in body:
            body[name] = list(body[name])
    if "variants" in body:
        body["variants"] = [[v.name, v.seconds, v.workspace_bytes] for v in op.variants]
    return body


def _op_from_json(index: int, body: Mapping[str, Any]) -> Op:
    fields = dict(body)
    fields["phase"] = Phase(fields["phase"])
    for name in ("inputs", "outputs", "mutates", "takeover"):
        if fields.get(name) is not None:
            fields[name] = tuple(fields[name])
    fields["variants"] = tuple(Variant(*row) for row in fields.get("variants", ()))
    return Op(id=index, **fields)
