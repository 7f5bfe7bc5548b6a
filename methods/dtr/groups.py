"""h_eq's groups: evicted ops that hang together, by union-find. A group is never split: an op that is back only takes its c0 along."""

from __future__ import annotations

from vramlab.rollout import Rollout

from .evicted import Evicted


class Groups:
    """Every eviction makes a fresh member and joins it with its evicted neighbours' groups."""

    def __init__(self, rollout: Rollout) -> None:
        self.evicted = Evicted(rollout)
        self._op_seconds = [op.seconds for op in rollout.tape.ops]
        self._parent: list[int] = []  # per member
        self._seconds: list[float] = []  # per root: the sum over its group
        self._member: dict[int, int] = {}  # evicted op -> its member

    def update(self, rollout: Rollout) -> None:
        """Note what has been recomputed and what has been evicted since the last choice."""
        left, back = self.evicted.update(rollout)
        for s in back:
            self._leave(self.evicted.producer[s])
        for s in left:
            self._join(s)

    def cost(self, storage: int) -> float:
        """c0 and the sums of the distinct groups next to it."""
        evicted, op = self.evicted, self.evicted.producer[storage]
        neighbours = evicted.parents(op) + evicted.children_by(storage)
        roots = {self._root(self._member[n]) for n in neighbours}
        is_inside = op in self._member and self._root(self._member[op]) in roots  # another output of it is absent: counted there
        return (0.0 if is_inside else self._op_seconds[op]) + sum(self._seconds[root] for root in sorted(roots))

    def _leave(self, op: int) -> None:
        if op in self._member and not self.evicted.is_evicted(op):
            self._seconds[self._root(self._member.pop(op))] -= self._op_seconds[op]

    def _join(self, storage: int) -> None:
        op = self.evicted.producer[storage]
        neighbours = self.evicted.parents(op) + self.evicted.children_by(storage)
        for n in (op, *neighbours):
            self._enter(n)
        for n in neighbours:
            self._unite(self._member[op], self._member[n])

    def _enter(self, op: int) -> None:
        if op not in self._member:
            self._member[op] = len(self._parent)
            self._parent.append(len(self._parent))
            self._seconds.append(self._op_seconds[op])

    def _root(self, member: int) -> int:
        while self._parent[member] != member:
            self._parent[member] = member = self._parent[self._parent[member]]
        return member

    def _unite(self, a: int, b: int) -> None:
        a, b = self._root(a), self._root(b)
        if a != b:
            self._parent[b] = a
            self._seconds[a] += self._seconds[b]
