"""Layers, derived from a tape: the unit in which many papers decide.

Every forward operator that creates a storage is a layer. Its first new storage is its feature map x; what else it creates
(BatchNorm's batch statistics, the indices of a pooling) is auxiliary. Operators that only advance state join the layer of the
same module. A backward operator belongs to the layer whose storages it reads; the gradient that it receives is that layer's dx:

    forward     x_in, W ──► op ──► x (, auxiliary)
    backward    dx ──► backward ops ──► dx of the layers that made x_in, dW
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vramlab.errors import Unsupported
from vramlab.tape import STATE_ROLES, Op, Phase, Role, Tape

# What the first word of an operator's name says about the layer; the rest is "other".
_KINDS = {
    "convolution": "convolution", "mkldnn_convolution": "convolution", "cudnn_convolution": "convolution",
    "addmm": "linear", "mm": "linear", "bmm": "linear", "baddbmm": "linear", "linear": "linear",
    "native_batch_norm": "normalization", "cudnn_batch_norm": "normalization", "native_layer_norm": "normalization",
    "native_group_norm": "normalization", "_native_batch_norm_legit": "normalization", "_batch_norm_with_update": "normalization",
    "relu": "activation", "gelu": "activation", "silu": "activation", "sigmoid": "activation", "tanh": "activation",
    "hardtanh": "activation", "hardswish": "activation", "hardsigmoid": "activation", "leaky_relu": "activation", "elu": "activation",
    "max_pool2d_with_indices": "pooling", "max_pool3d_with_indices": "pooling", "avg_pool2d": "pooling", "avg_pool3d": "pooling",
    "_adaptive_avg_pool2d": "pooling", "_adaptive_avg_pool3d": "pooling", "mean": "pooling",
    "add": "add", "cat": "concat", "native_dropout": "dropout", "bernoulli": "dropout",
    "_softmax": "softmax", "_log_softmax": "softmax", "nll_loss_forward": "loss", "nll_loss2d_forward": "loss", "mse_loss": "loss",
    "embedding": "embedding",
}
_OF_FEATURES = frozenset({"normalization", "activation", "pooling", "add", "concat"})  # behind the last convolution
# Operators whose backward goes by another name; a threshold at zero is a ReLU that keeps its input.
_OTHER_NAMES = {"threshold": "relu", "embedding_dense": "embedding", "nll_loss": "nll_loss_forward", "nll_loss2d": "nll_loss2d_forward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One forward operator with its backward. Storage ids and op ids of the tape; ascending."""

    id: int
    name: str  # dotted module path, "" for the root
    kind: str  # convolution, linear, normalization, activation, pooling, add, concat, dropout, softmax, attention, embedding, loss, other
    forward_ops: tuple[int, ...]
    backward_ops: tuple[int, ...]
    inputs: tuple[int, ...]  # what its forward reads beside parameters and buffers: maps of other layers, inputs of the step
    x: int  # its feature map
    auxiliary: tuple[int, ...]  # what else its forward creates
    dx: int | None  # the complete gradient of x; None where the tape makes none of its own
    W: tuple[int, ...]  # parameters
    dW: tuple[int, ...]  # gradients of those parameters
    workspace_bytes: int  # the largest of its ops
    consumers: tuple[int, ...]  # layers that read x or an auxiliary storage in the forward phase
    shares_input: bool  # eager writes x over its input (an in-place activation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The forward phase split after one op: the rest of it reads nothing from before but `storages` and state."""

    op: int
    storages: tuple[int, ...]
    nbytes: int


def layers_of(tape: Tape) -> tuple[Layer, ...]:
    """The layers of a tape in forward order."""
    return _Derivation(tape).layers()


def feature_extraction(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The layers up to the last convolution, and what follows it of its kind; a network without convolutions has none. The rest is the
    classifier."""
    convolutions = [layer.id for layer in layers if layer.kind == "convolution"]
    end = convolutions[-1] + 1 if convolutions else 0
    while convolutions and end < len(layers) and layers[end].kind in _OF_FEATURES:
        end += 1
    return layers[:end]


def basic_layers(tape: Tape) -> int:
    """Layers as frameworks of layer graphs count them: every forward operator that makes a map, and a fork where several read one map."""
    layers = layers_of(tape)
    return len(layers) + sum(len(layer.consumers) > 1 for layer in layers)


def cuts_of(tape: Tape) -> tuple[Cut, ...]:
    """Every place where the forward phase can be split, with the bytes that cross it.

    A place between an op and the in-place op that overwrites its result is none: to keep what crosses would cost a second region.
    """
    forward = [op for op in tape.ops if op.phase is Phase.FORWARD]
    last_read = {s: op.id for op in forward for s in tape.reads[op.id]}
    overwritten = {op.takeover[1] for op in forward if op.is_eager_inplace and op.takeover}
    crossing: set[int] = set()
    cuts = []
    for op in forward:
        crossing = {s for s in crossing | set(tape.creates[op.id]) if last_read.get(s, -1) > op.id}
        if tape.creates[op.id] and crossing and crossing.isdisjoint(overwritten):
            cuts.append(Cut(op=op.id, storages=tuple(sorted(crossing)), nbytes=sum(tape.storages[s].nbytes for s in crossing)))
    return tuple(cuts)


def articulation_points(tape: Tape) -> tuple[Cut, ...]:
    """The chain of cuts that a single storage crosses: every path from the input to the loss goes through it."""
    return tuple(cut for cut in cuts_of(tape) if len(cut.storages) == 1)


def is_chain(tape: Tape) -> bool:
    """Does each layer's map but the last feed one layer only, and each layer read one map?"""
    layers = layers_of(tape)
    return all(len(layer.consumers) <= 1 and len(layer.inputs) <= 1 for layer in layers if layer.kind != "loss")


# What a planner may need of a tape, and whether a tape has it.
NEEDS: dict[str, Callable[[Tape], bool]] = {
    "timings": lambda tape: any(op.seconds > 0 for op in tape.ops),
    "backward": lambda tape: any(op.phase is Phase.BACKWARD for op in tape.ops),
    "chain": is_chain,
    # The engine attaches what the target has; where that is nothing, every op has the library's own choice, which is enough.
    "variants": lambda tape: True,
    "split_convolutions": lambda tape: True,  # done to the tape before it gets here, where no bit changes: split.py
    "inplace_gradients": lambda tape: True,  # likewise: in_place.py
}


def check_needs(tape: Tape, needs: Iterable[str], method: str) -> None:
    """Unsupported when the tape lacks something that the method needs."""
    missing = [need for need in needs if not NEEDS[need](tape)]
    if missing:
        raise Unsupported(f"method '{method}' needs of a tape: {', '.join(missing)}; this tape has none")


def _kind(op: Op) -> str:
    if "attention" in op.target:
        return "attention"
    return _KINDS.get(_base_name(op), "other")


def _base_name(op: Op) -> str:
    """`aten.relu_.default` -> "relu", `aten.native_batch_norm_backward.default` -> "native_batch_norm"."""
    name = op.target.split(".")[1].partition("_backward")[0].rstrip("_")
    return _OTHER_NAMES.get(name, name)


class _Derivation:
    """What the layers are derived from. A layer goes by its index in `heads`, its forward operators."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.heads = [op for op in tape.ops if op.phase is Phase.FORWARD and tape.creates[op.id]]
        self.made_by = {s: i for i, op in enumerate(self.heads) for s in tape.creates[op.id]}
        self.read_by: dict[int, list[int]] = defaultdict(list)  # storage -> layers whose forward reads it, ascending
        for i, op in enumerate(self.heads):
            for s in tape.reads[op.id]:
                self.read_by[s].append(i)
        self.parameters = {s.name: s.id for s in tape.storages if s.role is Role.PARAMETER}
        self.gradients = {s.name.removesuffix(".grad"): s.id for s in tape.storages if s.role is Role.GRADIENT}
        self.owner: dict[int, int] = {}  # backward op -> the layer that it differentiates
        for op in tape.ops:
            if op.phase is Phase.BACKWARD:
                self._own(op)

    def layers(self) -> tuple[Layer, ...]:
        forward, backward = self._forward_ops(), defaultdict(list)
        for op, layer in self.owner.items():
            backward[layer].append(op)
        return tuple(self._layer(i, head, forward[i], backward[i]) for i, head in enumerate(self.heads))

    def _layer(self, index: int, head: Op, forward: list[int], backward: list[int]) -> Layer:
        tape, (x, *auxiliary) = self.tape, self._created(head)
        reads = sorted({s for op in forward for s in tape.reads[op]})
        weights = tuple(s for s in reads if tape.storages[s].role is Role.PARAMETER)
        names = [tape.storages[w].name for w in weights]
        return Layer(
            id=index, name=head.layer, kind=_kind(head), forward_ops=tuple(forward), backward_ops=tuple(backward),
            inputs=tuple(s for s in reads if tape.storages[s].role not in STATE_ROLES - {Role.INPUT}),
            x=x, auxiliary=tuple(auxiliary), dx=self._received_gradient(index, x, backward), W=weights,
            dW=tuple(self.gradients[name] for name in names if name in self.gradients),
            workspace_bytes=max(tape.ops[op].workspace_bytes for op in [*forward, *backward]),
            consumers=tuple(sorted({i for s in (x, *auxiliary) for i in self.read_by.get(s, ())})),
            shares_input=head.is_eager_inplace and head.takeover is not None,
        )

    def _created(self, op: Op) -> list[int]:
        """The storages that an op creates, in the order in which it returns them."""
        returned = [self.tape.tensors[t].storage for t in op.outputs if t is not None]
        return sorted(self.tape.creates[op.id], key=lambda s: returned.index(s) if s in returned else len(returned))

    def _forward_ops(self) -> list[list[int]]:
        """Per layer its forward ops: the head, and the state-only ops of the same module just before it (else just after)."""
        found: list[list[int]] = [[op.id] for op in self.heads]
        after = 0
        for op in self.tape.ops if self.heads else ():
            while after < len(self.heads) - 1 and self.heads[after].id < op.id:
                after += 1
            if op.phase is Phase.FORWARD and not self.tape.creates[op.id]:
                joins = after if self.heads[after].layer == op.layer else max(after - 1, 0)
                found[joins].append(op.id)
        return [sorted(ops) for ops in found]

    # --- whose backward an op is -----------------------------------------------------------------------------------------
    def _own(self, op: Op) -> None:
        for rule in (self._owner_by_weight, self._owner_by_reads, self._owner_by_flow):
            owner = rule(op)
            if owner is not None:
                self.owner[op.id] = owner
                return

    def _owner_by_weight(self, op: Op) -> int | None:
        """The layer of the parameter whose gradient the op completes, or makes for an op that completes it."""
        tape = self.tape
        own = [*op.mutates, *tape.creates[op.id]]
        next_ops = [r for s in tape.creates[op.id] for r in tape.readers[s] if tape.ops[r].phase is not Phase.OPTIMIZER]
        for s in (*own, *(s for r in next_ops for s in (*tape.ops[r].mutates, *tape.creates[r]))):
            if tape.storages[s].role is Role.GRADIENT:
                layers = self.read_by.get(self.parameters.get(tape.storages[s].name.removesuffix(".grad"), -1), [])
                if layers and (len(layers) == 1 or s in own):  # of a shared parameter only the completing op can be placed
                    return layers[0]
        return None

    def _owner_by_reads(self, op: Op) -> int | None:
        """The layer with the same operator, or with most of what the op reads; one that reads it rather than one that makes it."""
        shared: Counter[int] = Counter()
        made = set()
        for s in self.tape.reads[op.id]:
            shared.update(self.read_by.get(s, ()))
            if s in self.made_by:
                made.add(self.made_by[s])
        shared.update(made - set(shared))

        def rank(i: int) -> tuple:
            return _base_name(self.heads[i]) == _base_name(op), shared[i], self.heads[i].layer == op.layer, i not in made, i

        return max(shared, key=rank, default=None)

    def _owner_by_flow(self, op: Op) -> int | None:
        """An op that reads gradients only: the layer whose map has the size of the gradient, next upstream of where it comes from."""
        tape = self.tape
        sources = [s for s in tape.reads[op.id] if tape.producer[s] in self.owner]
        if not sources:
            return None
        gradient = max(sources, key=lambda s: tape.producer[s])
        here = self.owner[tape.producer[gradient]]
        if len(sources) > 1 and len({tape.storages[s].nbytes for s in sources}) == 1:
            return here  # a sum of gradients ends the backward of the layer that made the last summand
        upstream = [self.made_by[s] for s in tape.reads[self.heads[here].id] if s in self.made_by]
        return max((i for i in upstream if self._x_bytes(i) == tape.storages[gradient].nbytes), default=here)

    def _x_bytes(self, layer: int) -> int:
        return self.tape.storages[self._created(self.heads[layer])[0]].nbytes

    def _received_gradient(self, index: int, x: int, backward: list[int]) -> int | None:
        """The last gradient of x's size that the layer's backward reads and another layer's backward made."""
        tape = self.tape
        received = {s for op in backward for s in tape.reads[op] if self.owner.get(tape.producer[s], index) != index}
        of_its_size = [s for s in sorted(received) if tape.storages[s].nbytes == tape.storages[x].nbytes]
        return max(of_its_size, key=lambda s: tape.producer[s], default=None)
