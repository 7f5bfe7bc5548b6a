"""Sublinear's figures with one assumption changed each. Part of benchmarks/causes.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from assumptions import GIB, LIBRARY, Row, SublinearResNet, backward_reads, not_in_place, plan, row, tape_of, tape_of_module
from torch import nn

from vramlab.capture import capture
from vramlab.planner import UNLIMITED
from vramlab.tape import Tape
from vramlab.workload import make_model

BOARD = "titan-x-maxwell"
CUDNN = frozenset({"activation"})
STEPS = (64, 128, 256, 512)


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
    apart = plan(tape_of_module(not_in_place(LIBRARY.model("resnet-deep"), **options), 32, 224), "network-wide", board)
    for what, base in (("", wide), ("activations in regions of their own in what it is compared with", apart)):
        yield row("sub-sysopt", "peak without sharing over that with it", "x", what, base["peak_bytes"] / eager["peak_bytes"])
        yield row("sub-sysopt", "the same of maps", "x", what, base["maps_bytes"] / eager["maps_bytes"])


def _deepest_linear() -> Iterator[Row]:
    """Networks of 149 and 299 layers give the line."""
    board, shallow, deep = "titan-x-maxwell", 149, 299
    builds = {"in place": lambda depth: tape_of("resnet-deep", 32, depth=depth, n1=3, n2=24, n4=3),
              "apart": lambda depth: tape_of_module(not_in_place(LIBRARY.model("resnet-deep"), depth=depth, n1=3, n2=24, n4=3), 32, 224)}
    cases = {"": ("in place", "replay"), "every map and gradient map kept": ("in place", "network-wide"),
             "that, and activations in regions of their own": ("apart", "network-wide")}
    for what, (tape, method) in cases.items():
        low, high = (plan(builds[tape](depth), method, board)["peak_bytes"] for depth in (shallow, deep))
        layers = shallow + (12 * GIB - low) * (deep - shallow) / (high - low)
        yield row("sub-max-linear", "deepest network within 12 GiB, by the line through 149 and 299 layers", "layers", what,
                  int((layers - 2) // 3 * 3 + 2))


def sublinear_network() -> Iterator[Row]:
    """The authors' public network, whose blocks end in a ReLU of their own before the sum; and with activations as cuDNN's calls have them,
    whose backward is given x beside y, so that none is in place. The authors' own do with y."""
    for what, read in (("the authors' public network", False), ("that, and the backward of ReLU reads x and y", True)):
        tape = _public_network(1001, read)
        eager, wide = plan(tape, "replay", BOARD), plan(tape, "network-wide", BOARD)
        yield row("sub-resnet1000-before", "peak", "GB", what, eager["peak_bytes"] / 1e9)
        yield row("sub-resnet1000-before", "maps at the peak", "GB", what, eager["maps_bytes"] / 1e9)
        yield row("sub-resnet1000-before", "maps at the peak", "GB", f"{what}; every map and gradient map kept", wide["maps_bytes"] / 1e9)
        yield row("sub-sysopt", "the same of maps", "x", what, wide["maps_bytes"] / eager["maps_bytes"])
        low, high = (plan(_public_network(depth, read), "replay", BOARD)["peak_bytes"] for depth in (149, 299))
        layers = 149 + (12 * GIB - low) * (299 - 149) / (high - low)
        yield row("sub-max-linear", "deepest network within 12 GiB, by the line through 149 and 299 layers", "layers", what,
                  int((layers - 2) // 3 * 3 + 2))
        yield from _plans(tape, eager, what)


def sublinear_plans() -> Iterator[Row]:
    """The plans of the paper on the network of the workflow."""
    tape = tape_of("resnet-deep", 32, depth=1001, n1=3, n2=24, n4=3)
    yield from _plans(tape, plan(tape, "replay", BOARD), "")


def _plans(tape: Tape, eager: Row, network: str) -> Iterator[Row]:
    plans = {"sqrt(n) segments": {"plan": "sqrt"}, "the search of least bytes, no budget": {"plan": "budget"},
             "recursive, two parts a level": {"plan": "recursive", "segments": 2},
             "sqrt(n) segments, convolutions kept": {"plan": "sqrt", "drop_cheap": True}}
    for what, options in plans.items():
        found, what = plan(tape, "checkpoint", BOARD, **options), f"{network}{'; ' if network else ''}{what}"
        yield row("sub-resnet1000-after", "peak", "GB", what, found["peak_bytes"] / 1e9)
        yield row("sub-resnet1000-after", "maps at the peak", "GB", what, found["maps_bytes"] / 1e9)
        yield row("sub-time", "extra step time", "%", what, 100 * (found["step_seconds"] / eager["step_seconds"] - 1))


@cache
def _public_network(depth: int, activations_read_x: bool) -> Tape:
    tape = tape_of_module(SublinearResNet((3, 24, (depth - 2) // 3 - 30, 3)), 32, 224)
    return backward_reads(tape, CUDNN, made=False, read=True) if activations_read_x else tape


def sublinear_lstm() -> Iterator[Row]:
    """Within 60 % of eager's peak, as in the workflow, where the logits of all steps never stand side by side."""
    board, tape, what = "titan-x-maxwell", _lstm_with_losses(64), "each step with its loss as it comes"
    eager = plan(tape, "replay", board)
    found = plan(tape, "checkpoint", board, plan="budget", budget_bytes=int(0.6 * eager["peak_bytes"]))
    yield row("sub-lstm", "maps of plain training over those of the plan", "x", what, eager["maps_bytes"] / found["maps_bytes"])
    yield row("sub-lstm", "maps of the plan", "GB", what, found["maps_bytes"] / 1e9)
    yield row("sub-time", "extra step time, LSTM", "%", what, 100 * (found["step_seconds"] / eager["step_seconds"] - 1))


def sublinear_steps() -> Iterator[Row]:
    """The LSTM over more and more steps, each with its loss as it comes, by the paper's search of least bytes."""
    for steps in STEPS:
        tape, what = _lstm_with_losses(steps), f"each step with its loss as it comes, {steps} steps, the search of least bytes"
        eager, found = plan(tape, "replay", BOARD), plan(tape, "checkpoint", BOARD, plan="budget")
        yield row("sub-lstm", "maps of plain training over those of the plan", "x", what, eager["maps_bytes"] / found["maps_bytes"])
        yield row("sub-lstm", "maps of plain training", "GB", what, eager["maps_bytes"] / 1e9)
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
