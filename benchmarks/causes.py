"""Why figures of papers come out otherwise in their workflows: each simulated again with one assumption changed.

    python benchmarks/causes.py [vdnn superneurons modnn fujitsu densenet]      # all of them by default; minutes each

A row names the claim, the assumption that was changed, and what came out before and after; nothing here is measured. What the workflows
and README call a cause is a row of benchmarks/evidence/causes.json.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import keep, kept, specs
from torch import nn

from vramlab.capture import capture
from vramlab.check import check_schedule
from vramlab.collection import Library, Model, built_in_collection
from vramlab.costs import roofline_costs
from vramlab.device import DeviceProfile, load_profile
from vramlab.errors import PlanInfeasible
from vramlab.layers import feature_extraction, layers_of
from vramlab.measure import average_state_bytes, make_plan
from vramlab.planner import Budget
from vramlab.prepared import prepare_tape
from vramlab.simulate import simulate
from vramlab.tape import Op, Role, Tape
from vramlab.variants import with_variants
from vramlab.workload import build, cross_entropy, make_model

LIBRARY = Library([built_in_collection()])
GIB = 2**30
Row = dict[str, Any]


# --- steps and plans ------------------------------------------------------------------------------------------------------
@cache
def tape_of(model: str, batch_size: int, momentum: float = 0.0, **options: Any) -> Tape:
    """A step of a model of the collection, without costs."""
    card = LIBRARY.model(model)
    defaults = {name: option.default for name, option in card.card.options.items()}
    training = {"optimizer": "sgd", "lr": 0.01, "momentum": momentum, "weight_decay": 0.0, "autocast": None, "channels_last": False,
                "seed": 0}
    step = build(card, {"model_options": defaults | options, "training": training, "data": "synthetic", "batch_size": batch_size,
                        "target": "sim:k40c"})
    return capture(step.model, step.loss_fn, step.batch, optimizer=step.make_optimizer()).tape


def tape_of_module(model: nn.Module, batch_size: int, image_size: int) -> Tape:
    """A step of any image classifier, plain SGD."""
    batch = (torch.zeros(batch_size, 3, image_size, image_size), torch.zeros(batch_size, dtype=torch.long))
    return capture(model.train(), cross_entropy, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.01)).tape


def plan(tape: Tape, method: str, board: str | DeviceProfile, *, budget_bytes: int = 2**62, needs: tuple[str, ...] | None = None,
         **options: Any) -> Row:
    """What a method's step comes to on a board; `smallest_bytes` where it refuses. `needs`: of the tape, instead of the card's."""
    card, device = LIBRARY.method(method), load_profile(board) if isinstance(board, str) else board
    needs = tuple(card.card.needs) if needs is None else needs
    prepared = prepare_tape(tape, needs, None)
    tape = roofline_costs(tape if prepared is None else prepared.tape, device)
    tape = with_variants(tape, device) if "variants" in needs else tape
    defaults = {name: option.default for name, option in card.card.options.items()}
    try:
        checked = check_schedule(tape, card.build(**(defaults | options)).plan(tape, device, Budget(device_bytes=budget_bytes)))
    except PlanInfeasible as refusal:
        return {"smallest_bytes": refusal.smallest_bytes}
    trace = simulate(checked, device)
    return trace.metrics.to_json() | {"average_state_bytes": average_state_bytes(checked, trace)}


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
        if not indices:
            yield row(name, figure, "%", "", cut)
            yield row(name, "state in the baseline's peak", "GB", "", state / 1e9)
            yield row(name, "peak of the baseline", "GB", "", base["peak_bytes"] / 1e9)
            yield row(name, "batch of images in both", "GB", "", tape.bytes_of(Role.INPUT) / 1e9)


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


def _not_in_place(card: Model) -> nn.Module:
    model = make_model(card, {name: option.default for name, option in card.card.options.items()})
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
    boards = {"": load_profile("titan-x-pascal"), "half of the FLOP/s and of the memory bandwidth": half_the_rates("titan-x-pascal"),
              "twice the least time of a kernel": replace(load_profile("titan-x-pascal"), launch_seconds=1e-5)}
    for what, device in boards.items():
        eager, shared = (plan(tape, method, device)["step_seconds"] for method in ("replay", "densenet-shared"))
        yield row("dn-time-naive", "step", "s", what, eager)
        yield row("dn-time-eff", "step", "s", what, shared)
        yield row("dn-overhead", "extra step time", "%", what, 100 * (shared / eager - 1))


PAPERS = {"vdnn": vdnn, "superneurons": superneurons, "modnn": modnn, "fujitsu": fujitsu, "densenet": densenet}


def main() -> None:
    names = sys.argv[1:] or list(PAPERS)
    rows = [r for r in kept("causes") if r["paper"] not in names]
    for name in names:
        for found in PAPERS[name]():
            rows.append({"paper": name} | found)
            print("{paper:>12} {claim:24} {figure}: {value} {unit} ({assumption})".format(**rows[-1]), flush=True)
    keep("causes", sorted(rows, key=lambda r: list(PAPERS).index(r["paper"])), {"rows": len(rows)})


if __name__ == "__main__":
    main()
