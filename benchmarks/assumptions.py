"""Steps, plans, and the assumptions that benchmarks/causes.py changes one at a time: edits of a tape, costs of ops, boards, networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from vramlab.at_peak import live_at_peak
from vramlab.capture import capture
from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library, Model, built_in_collection
from vramlab.costs import roofline_costs
from vramlab.device import DeviceProfile, load_profile
from vramlab.errors import PlanInfeasible
from vramlab.layers import layers_of
from vramlab.planner import UNLIMITED, Budget
from vramlab.predicted import average_state_bytes
from vramlab.prepared import prepare_tape
from vramlab.simulate import simulate
from vramlab.tape import Op, Phase, Role, Tape
from vramlab.variants import CONVOLUTION, fastest, geometry_of, with_variants
from vramlab.workload import build, cross_entropy, make_model

LIBRARY = Library([built_in_collection()])
GIB = 2**30
STATE = (Role.PARAMETER, Role.BUFFER, Role.GRADIENT, Role.OPTIMIZER_STATE)
Row = dict[str, Any]
Costs = Callable[[Tape, DeviceProfile], Tape]


def row(claim: str, figure: str, unit: str, assumption: str, value: float | None) -> Row:
    """`assumption`: what differs from the workflow, "" for nothing."""
    return {"claim": claim, "figure": figure, "unit": unit, "assumption": assumption or "as in the workflow",
            "value": None if value is None else round(value, 4)}


# --- steps and plans ------------------------------------------------------------------------------------------------------
@cache
def tape_of(model: str, batch_size: int, momentum: float = 0.0, optimizer: str = "sgd", **options: Any) -> Tape:
    """A step of a model of the collection, without costs."""
    card = LIBRARY.model(model)
    defaults = {name: option.default for name, option in card.card.options.items()}
    training = {"optimizer": optimizer, "lr": 0.01, "momentum": momentum, "weight_decay": 0.0, "autocast": None, "channels_last": False,
                "seed": 0}
    step = build(card, {"model_options": defaults | options, "training": training, "data": "synthetic", "batch_size": batch_size,
                        "target": "sim:k40c"})
    return capture(step.model, step.loss_fn, step.batch, optimizer=step.make_optimizer()).tape


def tape_of_module(model: nn.Module, batch_size: int, image_size: int, momentum: float = 0.0) -> Tape:
    """A step of any image classifier by SGD."""
    batch = (torch.zeros(batch_size, 3, image_size, image_size), torch.zeros(batch_size, dtype=torch.long))
    return capture(model.train(), cross_entropy, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)).tape


def plan(tape: Tape, method: str, board: str | DeviceProfile, *, costs: Costs = roofline_costs,
         **options: Any) -> Row:
    """What a method's step comes to on a board; `smallest_bytes` where it refuses. Keywords as of `checked_plan`."""
    device = load_profile(board) if isinstance(board, str) else board
    try:
        checked = checked_plan(tape, method, device, costs=costs, **options)
    except PlanInfeasible as refusal:
        return {"smallest_bytes": refusal.smallest_bytes}
    trace, live = simulate(checked, device), live_at_peak(checked)
    maps = checked.peak_bytes - sum(live.by_role[role] for role in STATE)
    return trace.metrics.to_json() | {"average_state_bytes": average_state_bytes(checked, trace), "maps_bytes": maps}


def checked_plan(tape: Tape, method: str, device: DeviceProfile, *, costs: Costs = roofline_costs,
                 budget_bytes: int = UNLIMITED, needs: tuple[str, ...] | None = None, **options: Any) -> CheckedSchedule:
    """A method's schedule for a step. `costs`: what gives ops their times; `needs`: of the tape, instead of the card's. PlanInfeasible."""
    card = LIBRARY.method(method)
    needs = tuple(card.card.needs) if needs is None else needs
    prepared = prepare_tape(tape, needs, None)
    tape = costs(tape if prepared is None else prepared.tape, device)
    tape = with_variants(tape, device) if "variants" in needs else tape
    defaults = {name: option.default for name, option in card.card.options.items()}
    return check_schedule(tape, card.build(**(defaults | options)).plan(tape, device, Budget(device_bytes=budget_bytes)))


# --- assumptions that can be changed ----------------------------------------------------------------------------------------
def without_pooling_indices(tape: Tape) -> Tape:
    """Max pooling as cuDNN has it: its backward reads the pooled map instead of indices of 64 bits, and there are none."""
    tensors, storages, ops, y_of = tape.tensors, list(tape.storages), list(tape.ops), {}
    for op in tape.ops:
        if op.target == "aten.max_pool2d_with_indices.default":
            y, indices = op.outputs
            y_of[indices] = y
            storages[tensors[indices].storage] = replace(storages[tensors[indices].storage], nbytes=0)
    for op in tape.ops:
        if op.target == "aten.max_pool2d_with_indices_backward.default":
            *rest, last = op.args
            y = y_of[last["tensor"]]
            inputs = tuple(dict.fromkeys(y if t == last["tensor"] else t for t in op.inputs))
            ops[op.id] = replace(op, args=[*rest, {"tensor": y}], inputs=inputs)
    return replace(tape, storages=tuple(storages), ops=tuple(ops))


def pooling_by_indices_alone(tape: Tape) -> Tape:
    """The backward of max pooling reads indices and its gradient, as Caffe's its mask; PyTorch's is given the input too, for its shape."""
    ops = tuple(replace(op, inputs=(op.args[0]["tensor"], op.args[-1]["tensor"]))
                if op.target == "aten.max_pool2d_with_indices_backward.default" else op for op in tape.ops)
    return replace(tape, ops=ops)


def with_bits_for_relu(tape: Tape) -> Tape:
    """The backward of a ReLU by a mask of one bit an element, which is not counted, instead of its map; it writes over its gradient."""
    def by_mask(op: Op) -> Op:
        if op.target != "aten.threshold_backward.default":
            return op
        dy, dx = op.args[0], op.outputs[0]
        over = tape.tensors[dx].storage, tape.tensors[dy["tensor"]].storage
        return replace(op, args=[dy, dy, *op.args[2:]], inputs=(dy["tensor"],), takeover=over)

    return replace(tape, ops=tuple(map(by_mask, tape.ops)))


def backward_reads(tape: Tape, kinds: frozenset[str], *, made: bool = True, read: bool = False) -> Tape:
    """The backward of layers of these kinds also reads the map that the layer made, and, where `read`, those that it read: cuDNN's calls
    for pooling, activations and local normalization take x, y and dy."""
    more: dict[int, list[int]] = {}
    shows = {tape.tensors[t].storage: t for op in reversed(tape.ops) if op.phase is Phase.FORWARD for t in op.outputs if t is not None}
    for layer in layers_of(tape):
        if layer.kind in kinds:
            wanted = [*([layer.x] if made else []), *(layer.inputs if read else [])]
            for op in layer.backward_ops:
                if tape.creates[op] and tape.ops[op].target.endswith(("_backward.default", "mul.Tensor")):
                    more[op] = [shows[s] for s in wanted if s in shows]
    ops = tuple(replace(op, inputs=tuple(dict.fromkeys((*op.inputs, *more[op.id])))) if op.id in more else op for op in tape.ops)
    return replace(tape, ops=ops)


def fastest_convolutions(tape: Tape, device: DeviceProfile) -> Tape:
    """Each convolution takes the time of the fastest algorithm of the cuDNN model, and the workspace of the library's own."""
    plain = roofline_costs(tape, device)
    return plain.with_costs([fastest(op).seconds if op.variants else op.seconds for op in with_variants(plain, device).ops])


def fastest_workspaces(tape: Tape, device: DeviceProfile) -> Tape:
    """Each convolution takes the workspace of that fastest algorithm too."""
    plain = with_variants(roofline_costs(tape, device), device)
    chosen = [fastest(op) if op.variants else op.variant(None) for op in plain.ops]
    return plain.with_costs([v.seconds for v in chosen], [v.workspace_bytes for v in chosen])


def passes_of_normalization(costs: Costs = roofline_costs) -> Costs:
    """A BatchNorm's map goes past three times instead of twice, its backward's five times instead of three: statistics are complete before
    the first element can be normalized, and a map does not fit in a cache."""
    times = {"aten.native_batch_norm.default": 3 / 2, "aten.native_batch_norm_backward.default": 5 / 3}

    def passing(tape: Tape, device: DeviceProfile) -> Tape:
        plain = costs(tape, device)
        return plain.with_costs([op.seconds * times.get(op.target, 1) for op in plain.ops])

    return passing


def host_time(seconds: float, costs: Costs = roofline_costs) -> Costs:
    """Each operator that runs a kernel takes so long on the host beside it: launches that block, as the authors of DTR ask for."""
    def blocking(tape: Tape, device: DeviceProfile) -> Tape:
        plain = costs(tape, device)
        return plain.with_costs([op.seconds + seconds if op.seconds else 0.0 for op in plain.ops])

    return blocking


def copied_in_place(costs: Costs = roofline_costs) -> Costs:
    """An operator in place of its input copies that first, as in DTR's prototype, to be able to run again. Of the copy the time counts."""
    def copying(tape: Tape, device: DeviceProfile) -> Tape:
        plain = costs(tape, device)
        copies = {op.id: 2 * tape.storages[op.takeover[0]].nbytes for op in tape.ops
                  if op.takeover and op.is_eager_inplace and op.phase is Phase.FORWARD}
        return plain.with_costs([op.seconds + device.op_seconds(0, copies[op.id]) if op.id in copies else op.seconds for op in plain.ops])

    return copying


def whole_tiles(size: int, costs: Costs = roofline_costs) -> Costs:
    """A convolution computes whole tiles of so many channels: of y forward and for the gradient of W, of x for its own gradient."""
    def tiled(tape: Tape, device: DeviceProfile) -> Tape:
        plain, seconds = costs(tape, device), []
        for op in plain.ops:
            geometry = geometry_of(plain, op)
            if geometry is None:
                seconds.append(op.seconds)
                continue
            sides = (geometry.filters,) if op.target == CONVOLUTION else (geometry.filters, geometry.channels)
            more = sum(-(-side // size) * size / side for side in sides) / len(sides)
            seconds.append(max(op.seconds, device.op_seconds(round(op.flops * more), 0)))
        return plain.with_costs(seconds)

    return tiled


def half_the_rates(board: str) -> DeviceProfile:
    """The board with half of its FLOP/s and memory bandwidth."""
    device = load_profile(board)
    return replace(device, flops_per_second=device.flops_per_second / 2, memory_bytes_per_second=device.memory_bytes_per_second / 2)


class AlexNet2012(nn.Module):
    """The network of 2012 in one tower: 96 filters first and 227 pixels, and a normalization behind each of the first two convolutions,
    for which a BatchNorm without parameters stands, because it too keeps one map more."""

    def __init__(self) -> None:
        super().__init__()

        def block(inputs: int, outputs: int, kernel: int, stride: int, padding: int, ends: str) -> list[nn.Module]:
            layers = [nn.Conv2d(inputs, outputs, kernel, stride, padding), nn.ReLU(inplace=True)]
            layers += [nn.BatchNorm2d(outputs, affine=False, track_running_stats=False)] if "n" in ends else []
            return layers + ([nn.MaxPool2d(3, 2)] if "p" in ends else [])

        self.features = nn.Sequential(*block(3, 96, 11, 4, 0, "np"), *block(96, 256, 5, 1, 2, "np"), *block(256, 384, 3, 1, 1, ""),
                                      *block(384, 384, 3, 1, 1, ""), *block(384, 256, 3, 1, 1, "p"))
        dense = [part for inputs in (9216, 4096) for part in (nn.Linear(inputs, 4096), nn.ReLU(inplace=True), nn.Dropout())]
        self.classifier = nn.Sequential(*dense, nn.Linear(4096, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images of 227 pixels -> logits."""
        return self.classifier(self.features(x).flatten(1))


class SublinearResNet(nn.Module):
    """The network of the sublinear authors' public example: a BatchNorm and a ReLU behind every convolution, the last of a block too, and
    none behind the sum; pooling without padding. `blocks`: of the four stages; a block has three weighted layers, two stand outside."""

    def __init__(self, blocks: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.stem = nn.Sequential(*self.convolution(3, 64, 7, 2), nn.MaxPool2d(3, 2))
        channels, stages = 64, []
        for stage, count in enumerate(blocks):
            stages.append(nn.Sequential(*(SublinearBlock(channels if first else 4 * (64 << stage), 64 << stage, 2 if first and stage else 1)
                                          for first in (i == 0 for i in range(count)))))
            channels = 4 * (64 << stage)
        self.stages, self.head = nn.ModuleList(stages), nn.Linear(channels, 1000)

    @staticmethod
    def convolution(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
        """Convolution, BatchNorm, ReLU."""
        return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images -> logits."""
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class SublinearBlock(nn.Module):
    """x -> sum of x, or of its projection in a stage's first block, and three convolutions."""

    def __init__(self, inputs: int, middle: int, stride: int) -> None:
        super().__init__()
        layer = SublinearResNet.convolution
        self.body = nn.Sequential(*layer(inputs, middle, 1, 1), *layer(middle, middle, 3, stride), *layer(middle, 4 * middle, 1, 1))
        self.shortcut = nn.Sequential(*layer(inputs, 4 * middle, 1, stride)) if inputs != 4 * middle or stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shortcut(x) + self.body(x)


def not_in_place(card: Model, **options: Any) -> nn.Module:
    """A model of the collection whose ReLUs have regions of their own."""
    model = make_model(card, {name: option.default for name, option in card.card.options.items()} | options)
    for part in model.modules():
        if isinstance(part, nn.ReLU):
            part.inplace = False
    return model
