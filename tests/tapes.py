"""Toy tapes, small enough to do by hand, and random ones.

`TapeBuilder` writes a tape op by op. `StepBuilder` writes a training step layer by layer and derives the backward phase as
autograd does, sums of gradients and `accumulate_grad` included. Every map has `MAP` bytes, every weight `WEIGHT` bytes; a
forward op takes 1 s, a backward op 2 s, an accumulation 0.25 s, the optimizer 4 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

from vramlab.tape import Op, Phase, Role, Storage, Tape, Tensor, Variant

if TYPE_CHECKING:
    from hypothesis import strategies as st

MAP, WEIGHT, STATISTIC, SCALAR = 1000, 100, 20, 4


class TapeBuilder:
    """Ops and storages one after the other. Tensors are named by their id; each new storage gets one tensor that spans it."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []

    def state(self, name: str, nbytes: int, role: Role = Role.PARAMETER, *, at_start: bool = True, at_end: bool = True) -> int:
        """A named storage; returns its tensor."""
        self.storages.append(Storage(id=len(self.storages), nbytes=nbytes, role=role, name=name, at_start=at_start, at_end=at_end))
        return self.view(len(self.storages) - 1, shape=(nbytes,))

    def temporary(self, nbytes: int, role: Role = Role.TEMPORARY, *, at_end: bool = False) -> int:
        """A storage that an op will create; returns its tensor."""
        return self.state(f"%{len(self.storages)}", nbytes, role, at_start=False, at_end=at_end)

    def view(self, storage: int, shape: tuple[int, ...], offset: int = 0) -> int:
        """A further tensor over a storage, of bytes, contiguous."""
        strides = tuple([1] * len(shape)) if len(shape) < 2 else (shape[1], 1)
        self.tensors.append(Tensor(id=len(self.tensors), storage=storage, dtype="uint8", shape=shape, strides=strides, offset=offset))
        return len(self.tensors) - 1

    def storage_of(self, tensor: int) -> int:
        return self.tensors[tensor].storage

    def call(self, target: str, inputs: Sequence[int], outputs: Sequence[int | None] = (), *, phase: Phase = Phase.FORWARD,
             mutates: Sequence[int] = (), takeover: tuple[int, int] | None = None, layer: str = "", seconds: float = 1.0, **fields) -> None:
        """An op over tensors; `mutates` and `takeover` (output, input) name tensors too."""
        self.ops.append(Op(
            id=len(self.ops), target=target, args=[{"tensor": t} for t in inputs], kwargs={}, inputs=tuple(dict.fromkeys(inputs)),
            outputs=tuple(outputs), phase=phase, layer=layer, mutates=tuple(self.storage_of(t) for t in mutates),
            takeover=takeover and (self.storage_of(takeover[0]), self.storage_of(takeover[1])), seconds=seconds, **fields))

    def build(self, loss: int) -> Tape:
        return Tape(ops=tuple(self.ops), tensors=tuple(self.tensors), storages=tuple(self.storages), loss=loss,
                    device_type="cpu", batch_size=1)


class StepBuilder(TapeBuilder):
    """A training step: call the layers, then `finish`."""

    def __init__(self, *, gradients_exist: bool = False) -> None:
        super().__init__()
        self.gradients_exist = gradients_exist
        self.parameters: list[int] = []
        self.pullbacks: list[Callable[[dict[int, int]], None]] = []  # one a layer: takes the gradients by tensor, adds to them
        self.input = self.state("x", MAP, Role.INPUT)

    def parameter(self, name: str) -> int:
        self.parameters.append(self.state(name, WEIGHT))
        return self.parameters[-1]

    def convolution(self, x: int, weight: int | None = None, *, workspace_bytes: int = 0) -> int:
        """y = x * w. The backward op gives dx and dw in one go."""
        layer = f"conv{len(self.pullbacks)}"
        w = self.parameter(f"{layer}.weight") if weight is None else weight
        y = self.temporary(MAP, Role.ACTIVATION)
        self.call("aten.convolution.default", [x, w], [y], layer=layer, flops=4000, workspace_bytes=workspace_bytes)

        def pullback(gradients: dict[int, int]) -> None:
            dw = self.temporary(WEIGHT)
            dx = None if x == self.input else self.temporary(MAP)
            self.backward("aten.convolution_backward.default", [gradients[y], x, w], [dx, dw], layer, workspace_bytes=workspace_bytes)
            self.add_gradient(gradients, w, dw)
            self.add_gradient(gradients, x, dx)

        self.pullbacks.append(pullback)
        return y

    def relu(self, x: int, *, inplace: bool = False) -> int:
        """The backward op reads the output, so an in-place relu loses nothing."""
        layer, y = f"relu{len(self.pullbacks)}", self.temporary(MAP, Role.ACTIVATION)
        self.call("aten.relu.default", [x], [y], layer=layer, takeover=(y, x), is_eager_inplace=inplace, flops=10)
        return self._with_pullback("aten.threshold_backward.default", layer, x, y, [y])

    def dropout(self, x: int) -> int:
        layer, y, mask = f"dropout{len(self.pullbacks)}", self.temporary(MAP, Role.ACTIVATION), self.temporary(MAP // 4, Role.ACTIVATION)
        self.call("aten.native_dropout.default", [x], [y, mask], layer=layer, is_random=True)
        return self._with_pullback("aten.native_dropout_backward.default", layer, x, y, [mask])

    def max_pool(self, x: int) -> int:
        layer, y, indices = f"pool{len(self.pullbacks)}", self.temporary(MAP, Role.ACTIVATION), self.temporary(2 * MAP, Role.ACTIVATION)
        self.call("aten.max_pool2d_with_indices.default", [x], [y, indices], layer=layer)
        return self._with_pullback("aten.max_pool2d_with_indices_backward.default", layer, x, y, [x, indices])

    def add(self, a: int, b: int) -> int:
        """The gradient of a sum is that of its summands: no op."""
        y = self.temporary(MAP, Role.ACTIVATION)
        self.call("aten.add.Tensor", [a, b], [y], layer="", takeover=(y, a))

        def pullback(gradients: dict[int, int]) -> None:
            for summand in (a, b):
                self.add_gradient(gradients, summand, gradients[y])

        self.pullbacks.append(pullback)
        return y

    def matmul_with_itself(self, x: int) -> int:
        """y = x x^T: two tensors, one storage."""
        y, side = self.temporary(MAP, Role.ACTIVATION), (10, MAP // 10)
        rows, columns = self.view(self.storage_of(x), side), self.view(self.storage_of(x), side[::-1])
        self.call("aten.mm.default", [rows, columns], [y], layer="mm", flops=4000)
        return self._with_pullback("aten.mm.default", "mm", x, y, [columns])

    def batch_norm(self, x: int) -> int:
        """Reads and overwrites running statistics, which a recompute leaves alone; a counter advances beside it."""
        layer = f"bn{len(self.pullbacks)}"
        mean, variance, count = (self.state(f"{layer}.{name}", STATISTIC, Role.BUFFER) for name in ("mean", "var", "count"))
        w, y = self.parameter(f"{layer}.weight"), self.temporary(MAP, Role.ACTIVATION)
        saved = [self.temporary(STATISTIC, Role.ACTIVATION), self.temporary(STATISTIC, Role.ACTIVATION)]
        self.call("aten.add_.Tensor", [count], [count], layer=layer, mutates=[count], seconds=0.25)
        self.call("aten.native_batch_norm.default", [x, w, mean, variance], [y, *saved], layer=layer,
                  mutates=[mean, variance], throwaway_state=True)

        def pullback(gradients: dict[int, int]) -> None:
            dx, dw = self.temporary(MAP), self.temporary(WEIGHT)
            self.backward("aten.native_batch_norm_backward.default", [gradients[y], x, w, mean, variance, *saved], [dx, dw], layer)
            self.add_gradient(gradients, w, dw)
            self.add_gradient(gradients, x, dx)

        self.pullbacks.append(pullback)
        return y

    def finish(self, x: int, *, optimizer: bool = False) -> Tape:
        """Mean of `x` as the loss, then the backward phase, then perhaps the optimizer."""
        loss = self.temporary(SCALAR, at_end=True)
        self.call("aten.mean.default", [x], [loss])
        one, dx = self.temporary(SCALAR), self.temporary(MAP)
        self.backward("aten.ones_like.default", [loss], [one], "")
        self.backward("aten.div.Scalar", [one], [dx], "")
        gradients = {x: dx}
        for pullback in reversed(self.pullbacks):
            pullback(gradients)
            self._accumulate_complete(gradients)
        if optimizer:
            self._optimizer_step()
        return self.build(loss)

    def backward(self, target: str, inputs: Sequence[int], outputs: Sequence[int | None], layer: str, **fields) -> None:
        self.call(target, inputs, outputs, phase=Phase.BACKWARD, layer=layer, seconds=2.0, **fields)

    def add_gradient(self, gradients: dict[int, int], tensor: int, gradient: int | None) -> None:
        """A tensor that is used twice gets the sum of its gradients."""
        if gradient is None:
            return
        if tensor in gradients:
            total = self.temporary(self.storages[self.storage_of(gradient)].nbytes)
            self.backward("aten.add.Tensor", [gradients[tensor], gradient], [total], "", takeover=(total, gradients[tensor]))
            gradient = total
        gradients[tensor] = gradient

    def _with_pullback(self, target: str, layer: str, x: int, y: int, saved: list[int]) -> int:
        def pullback(gradients: dict[int, int]) -> None:
            dx = self.temporary(MAP)
            self.backward(target, [gradients[y], *saved], [dx], layer)
            self.add_gradient(gradients, x, dx)

        self.pullbacks.append(pullback)
        return y

    def _accumulate_complete(self, gradients: dict[int, int]) -> None:
        """Gradients of parameters that no earlier layer uses."""
        used_later = {t for op in self.ops if op.phase is Phase.FORWARD and not self._is_differentiated(op) for t in op.inputs}
        for w in [w for w in self.parameters if w in gradients and w not in used_later]:
            name, temp = self.storages[self.storage_of(w)].name + ".grad", gradients.pop(w)
            grad = self.state(name, WEIGHT, Role.GRADIENT, at_start=self.gradients_exist)
            self.parameters.remove(w)
            how = ({"inputs": [temp, grad], "mutates": [grad]} if self.gradients_exist
                   else {"inputs": [temp], "outputs": [grad], "takeover": (grad, temp)})
            self.call("vramlab.accumulate_grad", phase=Phase.BACKWARD, seconds=0.25, **how)

    def _is_differentiated(self, op: Op) -> bool:
        return any(o.phase is Phase.BACKWARD and o.layer == op.layer for o in self.ops)

    def _optimizer_step(self) -> None:
        """Momentum SGD over all that was accumulated: opaque, with a workspace of one weight."""
        pairs = [(s, t) for s in self.storages for t in self.storages if t.name == s.name + ".grad"]
        momenta = [self.state(f"{w.name}.momentum", WEIGHT, Role.OPTIMIZER_STATE) for w, _ in pairs]
        first = {t.storage: t.id for t in reversed(self.tensors)}
        weights, grads = [first[w.id] for w, _ in pairs], [first[g.id] for _, g in pairs]
        self.call("vramlab.optimizer_step", [*weights, *grads, *momenta], phase=Phase.OPTIMIZER, mutates=[*weights, *momenta],
                  seconds=4.0, workspace_bytes=WEIGHT)


def chain(layers: int = 3, *, optimizer: bool = False, gradients_exist: bool = False, workspace_bytes: int = 0) -> Tape:
    """`layers` convolutions in a row."""
    step = StepBuilder(gradients_exist=gradients_exist)
    x = step.input
    for _ in range(layers):
        x = step.convolution(x, workspace_bytes=workspace_bytes)
    return step.finish(x, optimizer=optimizer)


def diamond() -> Tape:
    """One map into two convolutions, summed."""
    step = StepBuilder()
    x = step.convolution(step.input)
    return step.finish(step.add(step.convolution(x), step.convolution(x)))


def skip() -> Tape:
    """Two residual blocks: relu(x + conv(conv(x)))."""
    step = StepBuilder()
    x = step.convolution(step.input)
    for _ in range(2):
        x = step.relu(step.add(step.convolution(step.convolution(x)), x), inplace=True)
    return step.finish(x)


def shared_storage() -> Tape:
    """Two tensors over one storage, read by one op."""
    step = StepBuilder()
    return step.finish(step.convolution(step.matmul_with_itself(step.convolution(step.input))))


def random_op() -> Tape:
    """Two dropouts between convolutions."""
    step = StepBuilder()
    x = step.dropout(step.convolution(step.input))
    return step.finish(step.dropout(step.convolution(x)))


def multi_output() -> Tape:
    """Pooling, which returns indices beside its map."""
    step = StepBuilder()
    return step.finish(step.max_pool(step.convolution(step.max_pool(step.convolution(step.input)))))


def buffer_writer() -> Tape:
    """BatchNorm: running statistics and a counter."""
    step = StepBuilder()
    x = step.input
    for _ in range(2):
        x = step.relu(step.batch_norm(step.convolution(x)), inplace=True)
    return step.finish(x)


def inplace() -> Tape:
    """Convolutions, each followed by an in-place relu."""
    step = StepBuilder()
    x = step.input
    for _ in range(3):
        x = step.relu(step.convolution(x), inplace=True)
    return step.finish(x)


def tied() -> Tape:
    """One weight, used twice."""
    step = StepBuilder()
    w = step.parameter("shared.weight")
    return step.finish(step.convolution(step.relu(step.convolution(step.input, w)), w))


TOYS: dict[str, Callable[[], Tape]] = {
    "chain": chain, "long_chain": lambda: chain(12), "chain_with_optimizer": lambda: chain(3, optimizer=True),
    "chain_with_gradients": lambda: chain(3, optimizer=True, gradients_exist=True),
    "chain_with_workspace": lambda: chain(4, workspace_bytes=500), "diamond": diamond, "skip": skip, "shared_storage": shared_storage,
    "random_op": random_op, "multi_output": multi_output, "buffer_writer": buffer_writer, "inplace": inplace, "tied": tied,
}


def random_tape(random: Random, ops: int = 6) -> Tape:
    """A tape of `ops` ops (and sometimes an optimizer) that does everything a tape may: not one that a network would give."""
    tape = TapeBuilder()
    state = [tape.state(f"s{i}", random.choice([0, 8, 16, 32]), random.choice([Role.PARAMETER, Role.BUFFER]), at_end=random.random() < 0.9)
             for i in range(random.randint(1, 3))]
    known = list(state)
    for _ in range(ops):
        known += _random_op(tape, random, known, state)
    if random.random() < 0.5:
        written = random.sample(state, random.randint(1, len(state)))
        tape.call("vramlab.optimizer_step", sorted({*written, random.choice(known)}), phase=Phase.OPTIMIZER, mutates=written,
                  workspace_bytes=random.choice([0, 4]), seconds=float(random.randint(1, 4)))
    return tape.build(loss=known[-1])


def _random_op(tape: TapeBuilder, random: Random, known: list[int], state: list[int]) -> list[int]:
    """Adds one op that reads up to three known tensors and creates, overwrites or both; returns the tensors it creates."""
    inputs = random.sample(known, random.randint(1, min(3, len(known))))
    if random.random() < 0.2:
        inputs.append(tape.view(tape.storage_of(inputs[0]), (2, 4)))
    creates = [tape.temporary(random.choice([0, 8, 16, 32]), Role.ACTIVATION, at_end=random.random() < 0.2)
               for _ in range(random.choice([0, 1, 1, 1, 2]))]
    # What an op overwrites was there at the start, or was created and is no activation: a gradient that is added to.
    mutates = random.sample(state, 1) if not creates or random.random() < 0.25 else []
    if creates and random.random() < 0.15:
        state.append(creates[0])
    takeover = None
    fitting = [(o, i) for o in creates for i in inputs
               if tape.storages[tape.storage_of(o)].nbytes == tape.storages[tape.storage_of(i)].nbytes
               and tape.storage_of(i) not in {tape.storage_of(m) for m in mutates}]
    if fitting and random.random() < 0.7:
        takeover = random.choice(fitting)
    is_random = bool(creates) and random.random() < 0.25
    throwaway = bool(creates and mutates) and random.random() < 0.6
    if throwaway and random.random() < 0.5:
        inputs = list(dict.fromkeys([*inputs, *mutates]))
    variants = tuple(Variant(name, float(random.randint(1, 4)), random.choice([0, 3, 9])) for name in ("fft", "winograd")
                     if random.random() < 0.3)
    tape.call(random.choice(["aten.convolution.default", "aten.relu.default", "aten.add.Tensor"]), inputs, creates, variants=variants,
              phase=random.choice([Phase.FORWARD, Phase.BACKWARD]), mutates=mutates, takeover=takeover, is_random=is_random,
              is_eager_inplace=takeover is not None and random.random() < 0.5, throwaway_state=throwaway,
              workspace_bytes=random.choice([0, 0, 5]), seconds=float(random.randint(1, 4)))
    return creates


def random_tapes(max_ops: int = 7) -> st.SearchStrategy[Tape]:
    """Random tapes for hypothesis; they shrink."""
    from hypothesis import strategies as st

    return st.builds(random_tape, st.randoms(use_true_random=False), st.integers(1, max_ops))
