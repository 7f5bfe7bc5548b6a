"""One training step at any depth: a network of equal blocks is captured with a few of them, and its tape is tiled to any number.

A block is a module with a number in its path (`stage1.3`). Two captures that differ in depth show which numbered modules grow. Everything
of one block of each such site is then repeated, forward ascending, backward descending, and what it refers to moves with it:

    tiling = TapeTiling.of(capture at depth 32, capture at depth 38)   # 6 layers are one step
    tiling.prove(2, capture at depth 44)          # NotRepetitive says where the network departs; then capture each depth instead
    tape = tiling.at(195)                         # depth 32 + 6 * 195

What is tiled is a rule that gave two deeper captures entry by entry, names and order included; that the rule goes on to any depth is the
assumption. Op times are no part of it: cost the tape anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from vramlab.errors import VramlabError
from vramlab.tape import STATE_ROLES, Op, Storage, Tape, Tensor

Label = tuple[int, int] | None  # (site, block): what an op, tensor or storage belongs to
Copy = tuple[int, int]  # (index in the base tape, how many blocks further on): an entry of the tiled tape

OPTIMIZER_STEP = "vramlab.optimizer_step"  # it names every parameter, and shows none first
_NUMBERED = re.compile(r"(?:^|(?<=\.))(\d+)(?=\.|$)")


class NotRepetitive(VramlabError):
    """The network's blocks do not repeat. `where` names the first entry that departs from the rule."""

    def __init__(self, where: str, reason: str) -> None:
        self.where, self.reason = where, reason
        super().__init__(f"the blocks of this network do not repeat: {where}: {reason}")

    def __reduce__(self):
        return (type(self), (self.where, self.reason))


@dataclass(frozen=True)
class Site:
    """Modules `prefix.0`, `prefix.1`, ... of which a deeper network has more."""

    prefix: str
    blocks: int  # in the base tape
    growth: int  # further blocks a step
    model: int  # the block that is repeated


@dataclass(frozen=True)
class TapeTiling:
    """A step at every depth. `base` is the shallowest capture, without op times."""

    base: Tape
    sites: tuple[Site, ...]

    @classmethod
    def of(cls, first: Tape, second: Tape) -> TapeTiling:
        """The rule that leads from one capture to the next deeper one. Raises NotRepetitive where there is none."""
        growing = _growing(first, second)
        if not growing:
            raise NotRepetitive("the module paths", "no numbered module is there more often in the deeper network")
        labels = _Labels.of(first, [prefix for prefix, *_ in growing])
        sites = tuple(Site(*found, labels.block_to_repeat(i, found[1])) for i, found in enumerate(growing))
        tiling = cls(_without_times(first), sites)
        tiling.prove(1, second)
        return tiling

    def at(self, steps: int) -> Tape:
        """The tape `steps` steps deeper than the base, op times zero. ValueError below 0."""
        if steps < 0:
            raise ValueError(f"a tape is tiled to a greater depth, not by {steps} steps")
        return _Tiler(self.base, self.sites, self._labels, steps).tape()

    def prove(self, steps: int, capture: Tape) -> None:
        """Raises NotRepetitive unless the tiled tape equals this capture, op times aside, in every entry."""
        made, wanted = self.at(steps), _without_times(capture)
        for name in ("storages", "tensors", "ops"):
            mine, theirs = getattr(made, name), getattr(wanted, name)
            for a, b in zip(mine, theirs):
                if a != b:
                    field = next(f.name for f in fields(a) if getattr(a, f.name) != getattr(b, f.name))
                    raise NotRepetitive(_place(wanted, b), f"{field} is {getattr(b, field)!r}, tiled {getattr(a, field)!r}"[:300])
            if len(mine) != len(theirs):
                raise NotRepetitive(name, f"the capture has {len(theirs)}, the tiled tape {len(mine)}")
        if made != wanted:
            raise NotRepetitive("the step", "its loss, batch size or device is another")

    @cached_property
    def _labels(self) -> _Labels:
        return _Labels.of(self.base, [site.prefix for site in self.sites])


def _without_times(tape: Tape) -> Tape:
    return replace(tape, ops=tuple(replace(op, seconds=0.0) for op in tape.ops))


def _place(tape: Tape, entry: Storage | Tensor | Op) -> str:
    if isinstance(entry, Op):
        return tape.op_name(entry.id)
    return tape.storage_name(entry.id if isinstance(entry, Storage) else entry.storage)


# --- which blocks there are -----------------------------------------------------------------------------------------------
def _growing(first: Tape, second: Tape) -> list[tuple[str, int, int]]:
    """(prefix, blocks in `first`, further ones in `second`) of the numbered modules that grow, in path order of first appearance."""
    few, many = _counts(first), _counts(second)
    return [(prefix, blocks, many[prefix] - blocks) for prefix, blocks in few.items() if many.get(prefix, 0) > blocks]


def _counts(tape: Tape) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in _paths(tape):
        for number in _NUMBERED.finditer(path):
            prefix = path[:number.start()]
            found[prefix] = max(found.get(prefix, 0), int(number[1]) + 1)
    return found


def _paths(tape: Tape) -> Iterable[str]:
    yield from (s.name for s in tape.storages if s.role in STATE_ROLES)
    yield from (op.layer for op in tape.ops)


@dataclass(frozen=True)
class _Labels:
    """What each entry of a tape belongs to; None: to no block."""

    storages: tuple[Label, ...]
    tensors: tuple[Label, ...]
    ops: tuple[Label, ...]

    @classmethod
    def of(cls, tape: Tape, prefixes: Sequence[str]) -> _Labels:
        ops = tuple(_label(op.layer, prefixes) for op in tape.ops)
        storages = []
        for s in tape.storages:
            made_by = tape.producer[s.id]
            storages.append(_label(s.name, prefixes) if s.role in STATE_ROLES or made_by is None else ops[made_by])
        tensors = [storages[t.storage] for t in tape.tensors]
        for op in reversed(tape.ops):  # a view belongs to the block that first shows it, which may be the next one
            for t in (*op.inputs, *(t for t in op.outputs if t is not None)):
                if op.target != OPTIMIZER_STEP:
                    tensors[t] = ops[op.id]
        return cls(tuple(storages), tuple(tensors), ops)

    def block_to_repeat(self, site: int, blocks: int) -> int:
        """The first block that has as many ops, tensors and storages as both its neighbours."""
        sizes = [tuple(labels.count((site, block)) for labels in (self.storages, self.tensors, self.ops)) for block in range(blocks)]
        for block in range(1, blocks - 1):
            if sizes[block - 1] == sizes[block] == sizes[block + 1]:
                return block
        raise NotRepetitive(f"site {site} of {blocks} blocks", "no three blocks in a row have equal numbers of ops, tensors and storages")


def _label(path: str, prefixes: Sequence[str]) -> Label:
    found = None
    for site, prefix in enumerate(prefixes):
        number = _NUMBERED.match(path, len(prefix)) if path.startswith(prefix) else None
        if number:
            if found is not None:
                raise NotRepetitive(path, "a block that repeats stands inside another")
            found = (site, int(number[1]))
    return found


# --- the tiled tape -------------------------------------------------------------------------------------------------------
class _Tiler:
    """Lays out the entries of a deeper tape and renames what they refer to."""

    def __init__(self, base: Tape, sites: Sequence[Site], labels: _Labels, steps: int) -> None:
        self.base, self.sites, self.labels = base, sites, labels
        self.more = [site.growth * steps for site in sites]
        self.orders = {name: self._order(getattr(labels, name), name) for name in ("storages", "tensors", "ops")}
        self.new_id = {name: {copy: i for i, copy in enumerate(order)} for name, order in self.orders.items()}
        self.members = {name: _members(getattr(labels, name)) for name in ("storages", "tensors")}

    def tape(self) -> Tape:
        storages = tuple(self._storage(i, *copy) for i, copy in enumerate(self.orders["storages"]))
        tensors = tuple(self._tensor(i, *copy) for i, copy in enumerate(self.orders["tensors"]))
        ops = tuple(self._op(i, *copy) for i, copy in enumerate(self.orders["ops"]))
        return replace(self.base, ops=ops, tensors=tensors, storages=storages, loss=self._refer("tensors", self.base.loss, None, 0))

    def _order(self, labels: Sequence[Label], where: str) -> list[Copy]:
        """Every entry, and behind each run of the repeated block its copies: away from the block before it, towards the one after."""
        runs: list[tuple[Label, list[int]]] = []
        for i, label in enumerate(labels):
            if runs and runs[-1][0] == label:
                runs[-1][1].append(i)
            else:
                runs.append((label, [i]))
        order: list[Copy] = []
        for place, (label, run) in enumerate(runs):
            if label is None or label[1] != self.sites[label[0]].model or not self.more[label[0]]:
                order += [(i, 0) for i in run]
                continue
            next_block = (label[0], label[1] + 1)
            if place + 1 < len(runs) and runs[place + 1][0] == next_block:
                shifts = range(self.more[label[0]] + 1)
            elif place and runs[place - 1][0] == next_block:
                shifts = range(self.more[label[0]], -1, -1)
            else:
                raise NotRepetitive(f"{self.sites[label[0]].prefix}{label[1]}", f"its {where} do not stand beside those of the next block")
            order += [(i, shift) for shift in shifts for i in run]
        return order

    def _block(self, label: tuple[int, int], shift: int) -> int:
        """The number that a block, or the copy of one, has in the tiled tape."""
        site, block = label
        return block + shift if block <= self.sites[site].model else block + self.more[site]

    def _refer(self, kind: str, index: int, label: Label, shift: int) -> int:
        """The new id of what an entry with this label refers to. Inside a site, references keep their distance in blocks."""
        target = getattr(self.labels, kind)[index]
        if target is None or label is None or target[0] != label[0]:
            return self.new_id[kind][index, 0]
        site, (model, more) = target[0], (self.sites[target[0]].model, self.more[target[0]])
        wanted = self._block(label, shift) + target[1] - label[1]
        source, copy = (wanted, 0) if wanted <= model else (model, wanted - model) if wanted <= model + more else (wanted - more, 0)
        if source == target[1]:
            return self.new_id[kind][index, copy]
        mine, its = self.members[kind].get((site, source), []), self.members[kind][target]
        place = its.index(index)
        if place >= len(mine):
            raise NotRepetitive(f"{self.sites[site].prefix}{source}", f"it has fewer {kind} than {self.sites[site].prefix}{target[1]}")
        return self.new_id[kind][mine[place], copy]

    def _refer_all(self, kind: str, indices: Sequence[int | None], label: Label, shift: int) -> list[int | None]:
        """Of a list. What stands outside the blocks and refers to each of them refers to each copy too."""
        if label is not None:
            return [None if i is None else self._refer(kind, i, label, shift) for i in indices]
        labels = getattr(self.labels, kind)
        order = self._order([None if i is None else labels[i] for i in indices], f"{kind} in a list")
        return [None if indices[i] is None else self.new_id[kind][indices[i], copy] for i, copy in order]

    def _tree(self, value: Any, label: Label, shift: int) -> Any:
        """An argument, its tensors renamed."""
        if isinstance(value, list | tuple):
            if value and all(isinstance(v, dict) and set(v) == {"tensor"} for v in value):
                return type(value)({"tensor": t} for t in self._refer_all("tensors", [v["tensor"] for v in value], label, shift))
            return type(value)(self._tree(v, label, shift) for v in value)
        if isinstance(value, dict):
            return {k: self._refer("tensors", v, label, shift) if k in ("tensor", "fresh") else self._tree(v, label, shift)
                    for k, v in value.items()}
        return value

    def _renumbered(self, path: str, label: Label, shift: int) -> str:
        if label is None:
            return path
        start = len(self.sites[label[0]].prefix)
        return path[:start] + str(self._block(label, shift)) + path[start + len(str(label[1])):]

    def _storage(self, new: int, old: int, shift: int) -> Storage:
        storage, label = self.base.storages[old], self.labels.storages[old]
        is_named = storage.role in STATE_ROLES or self.base.producer[old] is None
        return replace(storage, id=new, name=self._renumbered(storage.name, label, shift) if is_named else f"%{new}")

    def _tensor(self, new: int, old: int, shift: int) -> Tensor:
        tensor, label = self.base.tensors[old], self.labels.tensors[old]
        return replace(tensor, id=new, storage=self._refer("storages", tensor.storage, label, shift))

    def _op(self, new: int, old: int, shift: int) -> Op:
        op, label = self.base.ops[old], self.labels.ops[old]
        takeover = op.takeover and tuple(self._refer("storages", s, label, shift) for s in op.takeover)
        return replace(
            op, id=new, takeover=takeover, layer=self._renumbered(op.layer, label, shift),
            args=self._tree(op.args, label, shift), kwargs=self._tree(op.kwargs, label, shift),
            inputs=tuple(self._refer_all("tensors", op.inputs, label, shift)),
            outputs=tuple(self._refer_all("tensors", op.outputs, label, shift)),
            mutates=tuple(self._refer_all("storages", op.mutates, label, shift)),
        )


def _members(labels: Sequence[Label]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for i, label in enumerate(labels):
        if label is not None:
            found.setdefault(label, []).append(i)
    return found
