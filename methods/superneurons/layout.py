"""What SuperNeurons knows before the step: which maps it drops, in which segments, and how long their sources have to stay.

    forward     conv ─► bn ─► relu ─► conv ─► bn ─► add ─► relu ─► ...
                kept    └ segment ┘   kept    └ ┘   kept   └ ┘        kept: checkpoint layers; a segment: what follows one
"""

from __future__ import annotations

from vramlab.layers import Layer, layers_of
from vramlab.player import StepFacts
from vramlab.tape import STATE_ROLES, Phase, Tape

# Layers that cost much to run again, and those where paths join. DATA is state here, FORK makes nothing.
CHECKPOINT_KINDS = frozenset({"convolution", "linear", "attention", "embedding", "concat", "softmax", "loss"})


def is_checkpoint(layer: Layer) -> bool:
    """CONV, FC, JOIN, CONCAT, SOFTMAX of the paper, attention and embeddings beside them. An addition is a JOIN where it joins two maps."""
    return layer.kind in CHECKPOINT_KINDS or (layer.kind == "add" and len(layer.inputs) > 1)


def backward_bytes(tape: Tape, facts: StepFacts, op: int, more: frozenset[int] = frozenset()) -> int:
    """Maps, gradients and workspace that the device holds while an op runs, and `more` beside them; parameters apart."""
    used = {s for s in facts.uses[op] if tape.storages[s].role not in STATE_ROLES}
    return sum(tape.storages[s].nbytes for s in used | more) + tape.ops[op].workspace_bytes


def l_peak(tape: Tape) -> int:
    """The largest backward working set of one op: no plan of this kind holds less."""
    facts = StepFacts.of(tape)
    return max((backward_bytes(tape, facts, op.id) for op in tape.ops if op.phase is Phase.BACKWARD), default=0)


class Layout:
    """The maps of one tape under one strategy (`recomputation` and `counted` as in card.yaml)."""

    def __init__(self, tape: Tape, recomputation: str, counted: str = "needed") -> None:
        self.tape, self.facts, self.counted = tape, StepFacts.of(tape), counted
        self.layers = layers_of(tape)
        self.backward_needs = [[op for op in needed if op == self.facts.end or tape.ops[op].phase is not Phase.FORWARD]
                               for needed in self.facts.needed_at]
        self.replayable = self._replayable() if recomputation != "none" else frozenset()  # made by no checkpoint layer
        self.dropped = frozenset(s for s in self.replayable if self.backward_needs[s])  # after their last use in the forward phase
        self.forward_end = {s: self._last_forward_use(s) for s in self.replayable}
        self.segment_of = self._segments()
        self.members: dict[int, list[int]] = {}  # segment -> what it drops, ascending
        for s in sorted(self.dropped):
            self.members.setdefault(self.segment_of[s], []).append(s)
        self.memory_centric = self._memory_centric(recomputation)  # segments
        self.source_until = self._source_until()  # per storage: the last op before which a recompute reads it, -1 for none

    def offloadable(self, which: str) -> frozenset[int]:
        """Maps that may go to the host: of convolutions, or of every layer; only what is still needed after the forward phase."""
        made: set[int] = set()
        for layer in self.layers:
            if which == "all":
                made |= {layer.x, *layer.auxiliary}
            elif which == "convolution" and (layer.kind == "convolution" or self._overwrites_one_of(layer, made)):
                made.add(layer.x)
        return frozenset(s for s in made - self.replayable if self._is_needed_later(s) and self.tape.storages[s].nbytes > 0)

    def _overwrites_one_of(self, layer: Layer, maps: set[int]) -> bool:
        """An in-place activation: what stands in the convolution's region is its map."""
        return layer.shares_input and not maps.isdisjoint(layer.inputs)

    def _is_needed_later(self, storage: int) -> bool:
        until = max(self.facts.last_use[storage], self.source_until[storage])
        return until < self.facts.end and self.tape.ops[until].phase is not Phase.FORWARD

    def _replayable(self) -> frozenset[int]:
        """Feature maps, pooling indices and dropout masks; the batch statistics of a normalization are no feature data and stay."""
        made = {s for layer in self.layers if not is_checkpoint(layer)
                for s in ((layer.x,) if layer.kind == "normalization" else (layer.x, *layer.auxiliary))}
        return frozenset(s for s in made if self._can_come_back(s))

    def _can_come_back(self, storage: int) -> bool:
        """Whenever the backward asks for it, and not at the end of the step."""
        last = max(self.backward_needs[storage], default=-1)
        return last <= min(self.facts.recomputable_until[self.tape.producer[storage]], self.facts.end - 1)

    def _last_forward_use(self, storage: int) -> int:
        later = set(self.backward_needs[storage])
        return max([self.tape.producer[storage], *(op for op in self.facts.needed_at[storage] if op not in later)])

    def _segments(self) -> dict[int, int]:
        """Per replayable map: its segment, named by its first op. Where two segments meet, what follows belongs to the first."""
        segment_of: dict[int, int] = {}
        for op in self.tape.ops:
            made = [s for s in self.tape.creates[op.id] if s in self.replayable]
            before = [segment_of[s] for s in self.tape.reads[op.id] if s in segment_of]
            for s in made:
                segment_of[s] = before[0] if before else op.id
        return segment_of

    def _memory_centric(self, recomputation: str) -> frozenset[int]:
        """Cost-aware: a segment that, kept whole beside the tensors of some backward op, would hold more than l_peak."""
        if recomputation == "cost-aware":
            limit = l_peak(self.tape)
            return frozenset(segment for segment, members in self.members.items() if self._largest_bytes(members) > limit)
        return frozenset(self.members) if recomputation == "memory-centric" else frozenset()

    def _largest_bytes(self, members: list[int]) -> int:
        """Over the backward ops that need a segment: its maps (all, or those that are needed from then on), and the op's own tensors."""
        def kept(op: int) -> frozenset[int]:
            return frozenset(s for s in members if self.counted == "whole" or self.backward_needs[s][-1] >= op)

        return max(backward_bytes(self.tape, self.facts, op, kept(op)) for op in {op for s in members for op in self.backward_needs[s]})

    def _source_until(self) -> list[int]:
        """A speed-centric segment is recomputed once, when it is first needed; a memory-centric one up to the last need."""
        until = [-1] * len(self.tape.storages)
        first = {segment: min(self.backward_needs[s][0] for s in members) for segment, members in self.members.items()}
        for op in reversed(self.tape.ops):
            needs = [-1]
            for s in set(self.tape.creates[op.id]) & self.replayable:
                segment = self.segment_of[s]
                is_again = s in self.dropped and segment in self.memory_centric
                own = self.backward_needs[s][-1] if is_again else first[segment] if s in self.dropped else -1
                needs.append(max(own, until[s]))
            for s in self.tape.reads[op.id]:
                until[s] = max(until[s], *needs)
        return until
