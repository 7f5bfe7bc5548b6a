"""Why figures of papers come out otherwise in their workflows: each simulated again with one assumption changed.

    python benchmarks/causes.py [vdnn superneurons modnn fujitsu densenet sublinear sublinear-lstm dtr]      # all by default; minutes each

A row names the claim, the assumption that was changed, and what came out before and after; nothing here is measured. What the workflows
and README call a cause is a row of benchmarks/evidence/causes.json.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from caching import reserved_bytes
from common import keep, kept, machine, specs
from torch import nn

from vramlab.at_peak import live_at_peak
from vramlab.capture import capture
from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library, Model, built_in_collection
from vramlab.costs import roofline_costs
from vramlab.device import DeviceProfile, load_profile
from vramlab.errors import PlanInfeasible
from vramlab.layers import feature_extraction, layers_of
from vramlab.measure import make_plan
from vramlab.planner import UNLIMITED, Budget
from vramlab.predicted import average_state_bytes
from vramlab.prepared import prepare_tape
from vramlab.simulate import simulate
from vramlab.schedule import Compute
from vramlab.tape import Op, Role, Tape
from vramlab.variants import fastest, with_variants
from vramlab.workload import build, cross_entropy, make_model

LIBRARY = Library([built_in_collection()])
GIB = 2**30
STATE = (Role.PARAMETER, Role.BUFFER, Role.GRADIENT, Role.OPTIMIZER_STATE)
Row = dict[str, Any]


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


def plan(tape: Tape, method: str, board: str | DeviceProfile, *, costs: Callable[[Tape, DeviceProfile], Tape] = roofline_costs,
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


def checked_plan(tape: Tape, method: str, device: DeviceProfile, *, costs: Callable[[Tape, DeviceProfile], Tape] = roofline_costs,
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


def fastest_convolutions(tape: Tape, device: DeviceProfile) -> Tape:
    """Each convolution takes the time of the fastest algorithm of the cuDNN model, and the workspace of the library's own."""
    plain = roofline_costs(tape, device)
    return plain.with_costs([fastest(op).seconds if op.variants else op.seconds for op in with_variants(plain, device).ops])


def fastest_workspaces(tape: Tape, device: DeviceProfile) -> Tape:
    """Each convolution takes the workspace of that fastest algorithm too."""
    plain = with_variants(roofline_costs(tape, device), device)
    chosen = [fastest(op) if op.variants else op.variant(None) for op in plain.ops]
    return plain.with_costs([v.seconds for v in chosen], [v.workspace_bytes for v in chosen])


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


# --- the papers -----------------------------------------------------------------------------------------------------------
def row(claim: str, figure: str, unit: str, assumption: str, value: float | None) -> Row:
    """`assumption`: what differs from the workflow, "" for nothing."""
    return {"claim": claim, "figure": figure, "unit": unit, "assumption": assumption or "as in the workflow",
            "value": None if value is None else round(value, 4)}


def vdnn() -> Iterator[Row]:
    board, inplace = "titan-x-maxwell", ("backward", "variants")
    whole = tape_of("vgg16", 256)
    cases = {"": (whole, None), "pooling keeps no indices": (without_pooling_indices(whole), None),
             "every gradient in a region of its own": (whole, inplace)}
    for what, (tape, needs) in cases.items():
        found = plan(tape, "vdnn", board, budget_bytes=12 * GIB, needs=needs)
        base = plan(tape, "vdnn-baseline", board, needs=needs, algorithms="p")
        least = plan(tape, "vdnn", board, needs=needs, policy="all", algorithms="m")
        loss = None if "smallest_bytes" in found else 100 * (1 - base["step_seconds"] / found["step_seconds"])
        yield row("vdnn-vgg256-loss", "loss of throughput of dyn within 12 GiB", "%", what, loss)
        yield row("vdnn-vgg256-loss", "smallest peak, of all(m)", "GB", what, least["peak_bytes"] / 1e9)
        yield row("vdnn-vgg256-mem", "peak of the baseline", "GB", what, base["peak_bytes"] / 1e9)
    for model in ("alexnet", "overfeat", "googlenet"):
        yield from _average_cuts(model, tape_of(model, 128), board)
    for found in _average_cuts("alexnet", tape_of_module(AlexNet2012(), 128, 227), board):
        yield found | {"assumption": f"AlexNet as of 2012, {found['assumption']}"}


def _average_cuts(model: str, whole: Tape, board: str) -> Iterator[Row]:
    for indices, tape in (("", whole), (" and indices of pooling", without_pooling_indices(whole))):
        ours = plan(tape, "vdnn", board, policy="all", algorithms="m")
        base = plan(tape, "vdnn-baseline", board, algorithms="p")
        state = tape.bytes_of(Role.PARAMETER, Role.BUFFER, Role.GRADIENT, Role.OPTIMIZER_STATE)
        cut = 100 * (1 - ours["average_bytes"] / base["peak_bytes"])
        of_maps = 100 * (1 - (ours["average_bytes"] - ours["average_state_bytes"]) / (base["peak_bytes"] - state))
        classifier = _classifier_bytes(tape)
        of_features = 100 * (1 - (ours["average_bytes"] - ours["average_state_bytes"] - classifier)
                             / (base["peak_bytes"] - state - classifier))
        name, figure = f"vdnn-avg-{model}", "average bytes saved by all(m)"
        yield row(name, figure, "%", f"without parameters and their gradients{indices}", of_maps)
        yield row(name, figure, "%", f"without these{indices} and maps of the classifier", of_features)
        yield from _other_averages(name, tape, board, state, indices)
        if not indices:
            yield row(name, figure, "%", "", cut)
            yield row(name, "state in the baseline's peak", "GB", "", state / 1e9)
            yield row(name, "peak of the baseline", "GB", "", base["peak_bytes"] / 1e9)
            yield row(name, "batch of images in both", "GB", "", tape.bytes_of(Role.INPUT) / 1e9)


def _other_averages(claim: str, tape: Tape, board: str, state: int, indices: str) -> Iterator[Row]:
    """The same cut by other readings of "average" and of "network-wide": the mean over ops, each as much as another, and Caffe's baseline,
    which keeps every gradient map too."""
    device = load_profile(board)
    checked = checked_plan(tape, "vdnn", device, policy="all", algorithms="m")
    live = [b for i, b in zip(checked.schedule.instructions, checked.inner_peak_bytes.tolist()) if isinstance(i, Compute)]
    trace, by_op = simulate(checked, device), float(np.mean(live))
    by_time, held = trace.metrics.average_bytes, average_state_bytes(checked, trace)
    bases = {"": plan(tape, "vdnn-baseline", board, algorithms="p"), ", every gradient map kept": plan(tape, "network-wide", board)}
    for what, base in bases.items():
        for how, average in (("mean over time", by_time), ("mean over operators", by_op)):
            if (what, how) != ("", "mean over time"):
                cut = 100 * (1 - (average - held) / (base["peak_bytes"] - state))
                yield row(claim, "average bytes saved by all(m)", "%", f"without parameters and their gradients{indices}; {how}{what}", cut)


def _classifier_bytes(tape: Tape) -> int:
    """Maps that layers behind the feature extraction keep."""
    layers = layers_of(tape)
    behind = layers[len(feature_extraction(layers)):]
    return sum(tape.storages[s].nbytes for layer in behind for s in (layer.x, *layer.auxiliary) if tape.storages[s].role is Role.ACTIVATION)


def superneurons() -> Iterator[Row]:
    stages = {
        "sn-alexnet-stage0": {"liveness": False, "offload": "none", "recomputation": "none", "workspace": False},
        "sn-alexnet-stage1": {"offload": "none", "recomputation": "none", "workspace": False},
        "sn-alexnet-stage2": {"cache": False, "recomputation": "none", "workspace": False},
        "sn-alexnet-stage3": {"cache": False, "workspace": False},
    }
    apart = tape_of_module(_not_in_place(LIBRARY.model("alexnet")), 200, 224)
    tapes = {"": tape_of("alexnet", 200), "activations in regions of their own": apart,
             "AlexNet as of 2012": tape_of_module(AlexNet2012(), 200, 227)}
    for strategy, name in (("speed-centric", "speed"), ("memory-centric", "memory"), ("cost-aware", "cost-aware")):
        for what, tape in {**tapes, "no dropout, which is four operators": tape_of("alexnet", 200, dropout=0.0)}.items():
            found = plan(tape, "superneurons", "k40c", budget_bytes=12 * GIB, cache=False, workspace=False, recomputation=strategy)
            yield row(f"sn-recomp-alexnet-{name}", "operators run again", "layers", what, found["recomputes"])
    for what, tape in tapes.items():
        state = tape.bytes_of(Role.PARAMETER, Role.BUFFER, Role.GRADIENT)
        for claim, options in stages.items():
            peak = plan(tape, "superneurons", "k40c", budget_bytes=12 * GIB, **options)["peak_bytes"]
            yield row(claim, "peak", "MB", what, peak / 1e6)
            yield row(claim, "peak", "MB", f"{what}{', ' if what else ''}parameters and their gradients left out", (peak - state) / 1e6)


def _not_in_place(card: Model, **options: Any) -> nn.Module:
    model = make_model(card, {name: option.default for name, option in card.card.options.items()} | options)
    for part in model.modules():
        if isinstance(part, nn.ReLU):
            part.inplace = False
    return model


def modnn() -> Iterator[Row]:
    """The batch's images wait on the device for their pass; with as much more memory as they take, passes are as large as without them."""
    batch_size, plain = 5120, {"optimizer": "sgd", "lr": 0.01, "momentum": 0.0}
    images = batch_size * (3 * 224 * 224 * 4 + 8)
    with tempfile.TemporaryDirectory() as folder:
        def seconds(method: Row) -> Row:
            settings = {"model": "vgg16", "batch_sizes": [batch_size], "training": plain, "targets": ["sim:titan-x-pascal"],
                        "methods": [method]}
            return make_plan(specs(settings, Path(folder))[0], folder, None)["predicted"]

        base = seconds({"name": "vdnn-baseline", "options": {"algorithms": "p", "winograd": True}})
        for what, budget in (("", 12 * GIB), ("the images that wait are not on the device", 12 * GIB + images)):
            found = seconds({"name": "modnn", "budgets": [str(budget)]})
            slower = 100 * (found["step_seconds"] / base["step_seconds"] - 1)
            yield row("modnn-tpds-perf", "extra step time at batch 5,120", "%", what, slower)
            yield row("modnn-tpds-perf", "samples of a pass", "images", what, max(found["micro_batches"]))


def fujitsu() -> Iterator[Row]:
    def same(tape: Tape) -> Tape:
        return tape

    cases = {"": (0.9, same), "no momentum": (0.0, same), "pooling keeps no indices": (0.9, without_pooling_indices),
             "pooling's backward reads indices alone": (0.9, pooling_by_indices_alone),
             "that, and ReLU keeps a bit an element": (0.9, lambda tape: with_bits_for_relu(pooling_by_indices_alone(tape))),
             "both, and no momentum": (0.0, lambda tape: with_bits_for_relu(pooling_by_indices_alone(tape)))}
    for what, (momentum, edit) in cases.items():
        peaks = {}
        for batch_size in (64, 128, 256):
            tape = edit(tape_of("vgg16", batch_size, momentum))
            peaks[batch_size] = [plan(tape, method, "titan-x-maxwell")["peak_bytes"] for method in ("network-wide", "fujitsu-reuse")]
            base, ours = peaks[batch_size]
            yield row("fuj-vgg", f"bytes saved at batch {batch_size}", "%", what, 100 * (1 - ours / base))
        largest = [_largest(peaks[128][side], peaks[64][side], 12 * GIB) for side in (0, 1)]
        yield row("fuj-batch", "largest batch within 12 GiB, by the line through 64 and 128, over the baseline's", "x", what,
                  largest[1] / largest[0])


def _largest(at_128: int, at_64: int, memory_bytes: int) -> int:
    slope = (at_128 - at_64) / 64
    return int((memory_bytes - at_64) / slope + 64)


def densenet() -> Iterator[Row]:
    tape = tape_of("densenet-bc-100", 64, 0.9)
    yield from _densenet_bytes(tape)
    boards = {"": load_profile("titan-x-pascal"), "half of the FLOP/s and of the memory bandwidth": half_the_rates("titan-x-pascal"),
              "twice the least time of a kernel": replace(load_profile("titan-x-pascal"), launch_seconds=1e-5)}
    for what, device in boards.items():
        eager, shared = (plan(tape, method, device)["step_seconds"] for method in ("replay", "densenet-shared"))
        yield row("dn-time-naive", "step", "s", what, eager)
        yield row("dn-time-eff", "step", "s", what, shared)
        yield row("dn-overhead", "extra step time", "%", what, 100 * (shared / eager - 1))


def _densenet_bytes(tape: Tape) -> Iterator[Row]:
    """What a figure of the board may count beside the requested bytes of the step."""
    device = load_profile("titan-x-pascal")
    apart = tape_of_module(_not_in_place(LIBRARY.model("densenet-bc-100")), 64, 32, momentum=0.9)
    cases = {"": (tape, roofline_costs), "workspaces of the fastest modelled convolutions": (tape, fastest_workspaces),
             "activations in regions of their own": (apart, roofline_costs)}
    for what, (step, costs) in cases.items():
        for claim, method in (("dn-mem-naive", "replay"), ("dn-mem-eff", "densenet-shared")):
            checked = checked_plan(step, method, device, costs=costs)
            yield row(claim, "peak", "GB", what, checked.peak_bytes / 1e9)
            yield row(claim, "peak", "GB", f"{what}{', ' if what else ''}reserved by a caching allocator", reserved_bytes(checked) / 1e9)
    half = checked_plan(tape_of("densenet-bc-100", 32, 0.9), "densenet-shared", device)
    yield row("dn-mem-multi", "peak on each of two boards", "GB", "", half.peak_bytes / 1e9)
    yield row("dn-mem-multi", "peak on each of two boards", "GB", "reserved by a caching allocator", reserved_bytes(half) / 1e9)
    regions = sum(2 * nbytes for nbytes in _largest_concatenations(tape))
    shared = checked_plan(tape, "densenet-shared", device).peak_bytes
    yield row("dn-mem-eff", "two regions a block, as large as its last concatenation", "GB", "", regions / 1e9)
    yield row("dn-mem-eff", "peak", "GB", "with these regions held all step beside it", (shared + regions) / 1e9)


def _largest_concatenations(tape: Tape) -> list[int]:
    """Bytes of the largest concatenation of each block; a block is told by the size of its maps."""
    found: dict[tuple[int, ...], int] = {}
    for op in tape.ops:
        if op.target == "aten.cat.default":
            tensor = tape.tensors[op.outputs[0]]
            size = tensor.shape[2:]
            found[size] = max(found.get(size, 0), tape.storages[tensor.storage].nbytes)
    return list(found.values())


def sublinear() -> Iterator[Row]:
    yield from _resnet_1001()
    yield from _deepest_linear()


def _resnet_1001() -> Iterator[Row]:
    board, options = "titan-x-maxwell", {"depth": 1001, "n1": 3, "n2": 24, "n4": 3}
    tape = tape_of("resnet-deep", 32, **options)
    eager, wide = plan(tape, "replay", board), plan(tape, "network-wide", board)
    for what, found in (("", eager), ("every map and gradient map kept", wide)):
        yield row("sub-resnet1000-before", "peak", "GB", what, found["peak_bytes"] / 1e9)
        yield row("sub-resnet1000-before", "maps at the peak", "GB", what, found["maps_bytes"] / 1e9)
    for what, budget in (("", 7.7), ("within 12 GB", 12.0), ("the search of least bytes, no budget", None)):
        found = plan(tape, "checkpoint", board, plan="budget", budget_bytes=UNLIMITED if budget is None else int(budget * 1e9))
        yield row("sub-resnet1000-after", "peak", "GB", what, found["peak_bytes"] / 1e9)
        yield row("sub-resnet1000-after", "maps at the peak", "GB", what, found["maps_bytes"] / 1e9)
        yield row("sub-time", "extra step time", "%", what, 100 * (found["step_seconds"] / eager["step_seconds"] - 1))
    apart = plan(tape_of_module(_not_in_place(LIBRARY.model("resnet-deep"), **options), 32, 224), "network-wide", board)
    for what, base in (("", wide), ("activations in regions of their own in what it is compared with", apart)):
        yield row("sub-sysopt", "peak without sharing over that with it", "x", what, base["peak_bytes"] / eager["peak_bytes"])
        yield row("sub-sysopt", "the same of maps", "x", what, base["maps_bytes"] / eager["maps_bytes"])


def _deepest_linear() -> Iterator[Row]:
    """Networks of 149 and 299 layers give the line."""
    board, shallow, deep = "titan-x-maxwell", 149, 299
    builds = {"in place": lambda depth: tape_of("resnet-deep", 32, depth=depth, n1=3, n2=24, n4=3),
              "apart": lambda depth: tape_of_module(_not_in_place(LIBRARY.model("resnet-deep"), depth=depth, n1=3, n2=24, n4=3), 32, 224)}
    cases = {"": ("in place", "replay"), "every map and gradient map kept": ("in place", "network-wide"),
             "that, and activations in regions of their own": ("apart", "network-wide")}
    for what, (tape, method) in cases.items():
        low, high = (plan(builds[tape](depth), method, board)["peak_bytes"] for depth in (shallow, deep))
        layers = shallow + (12 * GIB - low) * (deep - shallow) / (high - low)
        yield row("sub-max-linear", "deepest network within 12 GiB, by the line through 149 and 299 layers", "layers", what,
                  int((layers - 2) // 3 * 3 + 2))


def sublinear_lstm() -> Iterator[Row]:
    """Within 60 % of eager's peak, as in the workflow, where the logits of all steps never stand side by side."""
    board, tape, what = "titan-x-maxwell", _lstm_with_losses(64), "each step with its loss as it comes"
    eager = plan(tape, "replay", board)
    found = plan(tape, "checkpoint", board, plan="budget", budget_bytes=int(0.6 * eager["peak_bytes"]))
    yield row("sub-lstm", "maps of plain training over those of the plan", "x", what, eager["maps_bytes"] / found["maps_bytes"])
    yield row("sub-lstm", "maps of the plan", "GB", what, found["maps_bytes"] / 1e9)
    yield row("sub-time", "extra step time, LSTM", "%", what, 100 * (found["step_seconds"] / eager["step_seconds"] - 1))


def _lstm_with_losses(steps: int, batch_size: int = 64) -> Tape:
    """The same network; its loss is summed over steps instead of being one over the logits of all, which then never stand side by side."""
    card = LIBRARY.model("lstm")
    model = make_model(card, {name: option.default for name, option in card.card.options.items()} | {"sequence_length": steps})

    def loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        inputs = model.tokens(tokens)
        zero, total = inputs.new_zeros(len(tokens), model.hidden), inputs.new_zeros(())
        states = [(zero, zero)] * len(model.cells)
        for x, wanted in zip(inputs.unbind(1), targets.unbind(1)):
            for layer, cell in enumerate(model.cells):
                states[layer] = cell(x, *states[layer])
                x = states[layer][0]
            total = total + nn.functional.cross_entropy(model.head(x), wanted)
        return total / targets.shape[1]

    batch = [torch.zeros(batch_size, steps, dtype=torch.long) for _ in range(2)]
    return capture(model.train(), loss, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.01)).tape


def dtr() -> Iterator[Row]:
    board = load_profile("titan-v")
    slow = replace(board, memory_bytes_per_second=0.6 * board.memory_bytes_per_second)
    cases = {"": (board, roofline_costs), "0.6 of the memory bandwidth": (slow, roofline_costs),
             "all of the board's peak": (replace(board, flops_efficiency=1.0), roofline_costs),
             "the fastest modelled convolutions": (board, fastest_convolutions)}
    steps = {"densenet121": ("densenet121", 84, (10, 8, 6, 4)), "inceptionv4": ("inception-v4", 64, (10, 8, 6, 4)),
             "unet416x608": ("unet-bilinear", 6, (8, 7, 6, 4))}
    for name, (model, batch_size, budgets) in steps.items():
        tape = tape_of(model, batch_size, optimizer="none")
        for what, (device, costs) in cases.items():
            yield row(f"dtr-{name}-base-time", "step", "ms", what, 1e3 * plan(tape, "replay", device, costs=costs)["step_seconds"])
        yield from _recomputation(f"dtr-{name}", tape, budgets)
    yield from _unet_batches()
    yield from _resnet1202()


def _recomputation(name: str, tape: Tape, gigabytes: tuple[int, ...]) -> Iterator[Row]:
    groups = {"sampling": True, "heuristic": "eq"}
    cases = {"": ({}, roofline_costs), "sampling": ({"sampling": True}, roofline_costs),
             "sampling and union-find groups": (groups, roofline_costs),
             "the fastest modelled convolutions": ({}, fastest_convolutions),
             "sampling, union-find groups and the fastest modelled convolutions": (groups, fastest_convolutions)}
    for budget in gigabytes:
        for what, (options, costs) in cases.items():
            yield _recomputed(name, tape, "titan-v", budget, what, costs=costs, **options)


def _recomputed(name: str, tape: Tape, board: str | DeviceProfile, gigabytes: int, what: str, **options: Any) -> Row:
    found = plan(tape, "dtr", board, budget_bytes=int(gigabytes * 1e9), **options)
    first_runs = found.get("compute_seconds")
    share = None if first_runs is None else 100 * found["recompute_seconds"] / first_runs
    return row(f"{name}-{gigabytes}g-recompute", "recomputation of the first runs' time", "%", what, share)


def _unet_batches() -> Iterator[Row]:
    """The largest batch: requested bytes, and what a caching allocator reserves for them."""
    for batch_size in (7, 8, 9):
        checked = checked_plan(tape_of("unet-bilinear", batch_size, optimizer="none"), "replay", load_profile("titan-v"))
        yield row("dtr-big-unet416x608-base", f"peak at batch {batch_size}", "GiB", "", checked.peak_bytes / GIB)
        yield row("dtr-big-unet416x608-base", f"peak at batch {batch_size}", "GiB", "reserved by a caching allocator",
                  reserved_bytes(checked) / GIB)


def _resnet1202() -> Iterator[Row]:
    board, name = load_profile("titan-v"), "dtr-resnet1202"
    keeping, over = (tape_of("resnet1202", 64, optimizer="none", in_place=in_place) for in_place in (False, True))
    busy, at_least = replace(board, launch_seconds=45e-6), "45 microseconds at least for each operator"
    for what, tape, device in (("", keeping, board), ("ReLU in place", over, board), (at_least, keeping, busy)):
        found = plan(tape, "replay", device)
        yield row(f"{name}-base-mem", "peak", "GB", what, found["peak_bytes"] / 1e9)
        yield row(f"{name}-base-time", "step", "ms", what, 1e3 * found["step_seconds"])
    for budget in (8, 6, 4, 2):
        yield _recomputed(name, keeping, board, budget, "")
        yield _recomputed(name, keeping, busy, budget, at_least)


PAPERS = {"vdnn": vdnn, "superneurons": superneurons, "modnn": modnn, "fujitsu": fujitsu, "densenet": densenet, "sublinear": sublinear,
          "sublinear-lstm": sublinear_lstm, "dtr": dtr}


def main() -> None:
    names = sys.argv[1:] or list(PAPERS)
    rows, commit = [r for r in kept("causes") if r["paper"] not in names], machine()["commit"]
    for name in names:
        for found in PAPERS[name]():
            rows.append({"paper": name, "commit": commit} | found)
            print("{paper:>12} {claim:24} {figure}: {value} {unit} ({assumption})".format(**rows[-1]), flush=True)
    keep("causes", sorted(rows, key=lambda r: list(PAPERS).index(r["paper"])), {"rows": len(rows)})


if __name__ == "__main__":
    main()
