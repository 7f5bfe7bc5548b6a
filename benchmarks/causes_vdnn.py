"""vDNN's figures with one assumption changed each. Part of benchmarks/causes.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from assumptions import GIB, LIBRARY, AlexNet2012, Row, checked_plan, plan, row, tape_of, tape_of_module, without_pooling_indices

import vramlab.variants
from vramlab.at_peak import feature_bytes_at_peak, live_at_peak
from vramlab.device import DeviceProfile, load_profile
from vramlab.layers import feature_extraction, layers_of
from vramlab.planner import Budget
from vramlab.predicted import average_state_bytes
from vramlab.schedule import Compute
from vramlab.simulate import simulate
from vramlab.tape import Role, Tape

BOARD = "titan-x-maxwell"


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


def vdnn_loss() -> Iterator[Row]:
    """VGG-16 at batch 256 without indices of pooling: what each trial of dyn costs, and dyn's loss where one assumption is changed."""
    tape, board = without_pooling_indices(tape_of("vgg16", 256)), load_profile(BOARD)
    yield from _trials(tape, board)
    rates = {"half of the modelled": 0.5, "a third of the modelled": 1 / 3}
    boards = {"link 20 % slower": replace(board, h2d_bytes_per_second=0.8 * board.h2d_bytes_per_second,
                                          d2h_bytes_per_second=0.8 * board.d2h_bytes_per_second),
              "half of the link": replace(board, h2d_bytes_per_second=0.5 * board.h2d_bytes_per_second,
                                          d2h_bytes_per_second=0.5 * board.d2h_bytes_per_second),
              "one direction of the link at a time": replace(board, is_full_duplex=False),
              "all of the board's peak": replace(board, flops_efficiency=1.0),
              "0.5 of the board's peak": replace(board, flops_efficiency=0.5)}
    for what, device in boards.items():
        yield from _losses(tape, device, what)
    for what, share in rates.items():
        with _implicit_rate(share * vramlab.variants.IMPLICIT_RATE):
            yield from _losses(tape, board, f"implicit GEMM at {what} rate")
    yield from _losses(tape, board, "no synchronization at the end of a layer (vDNN++)", is_async=True)
    yield from _losses(tape, board, "activations, softmax and loss start no prefetch", prefetch_trigger="heavy-layers")
    least = plan(tape, "vdnn", board, policy="all", algorithms="m")["peak_bytes"]
    yield from _losses(tape, board, "a budget at the least peak", budget_bytes=least)


def _trials(tape: Tape, board: DeviceProfile) -> Iterator[Row]:
    """Each combination that dyn tries, in its order, within 12 GiB where it looks at that."""
    budget = Budget(device_bytes=12 * GIB)
    prepared = checked_plan(tape, "vdnn-baseline", board, algorithms="p")
    oracle, planner = simulate(prepared, board).metrics.step_seconds, _planner()
    for trial in planner.trials():
        checked = planner.schedule_of(trial, prepared.tape, board, budget)
        loss = 100 * (1 - oracle / simulate(checked, board).metrics.step_seconds)
        what = f"pooling keeps no indices; {trial.policy} ({trial.algorithms})"
        yield row("vdnn-vgg256-loss", "loss of throughput", "%", what, loss)
        yield row("vdnn-vgg256-loss", "peak", "GiB", what, checked.peak_bytes / GIB)


def _planner():
    card = LIBRARY.method("vdnn")
    return card.build(**{name: option.default for name, option in card.card.options.items()})


@contextmanager
def _implicit_rate(rate: float) -> Iterator[None]:
    before = vramlab.variants.IMPLICIT_RATE
    vramlab.variants.IMPLICIT_RATE = rate
    try:
        yield
    finally:
        vramlab.variants.IMPLICIT_RATE = before


def _losses(tape: Tape, board: DeviceProfile, what: str, budget_bytes: int = 12 * GIB, **options: object) -> Iterator[Row]:
    oracle = plan(tape, "vdnn-baseline", board, algorithms="p")["step_seconds"]
    for policy, fixed in (("dyn", {"budget_bytes": budget_bytes}), ("all(m)", {"policy": "all", "algorithms": "m"})):
        found = plan(tape, "vdnn", board, **fixed, **options)
        loss = None if "smallest_bytes" in found else 100 * (1 - oracle / found["step_seconds"])
        yield row("vdnn-vgg256-loss", f"loss of throughput of {policy}", "%", f"pooling keeps no indices; {what}", loss)


def vdnn_share() -> Iterator[Row]:
    """The bytes of the feature extraction in those of the baseline; and where gradients of parameters are not counted."""
    networks = {"": tape_of("alexnet", 128), "AlexNet as of 2012": tape_of_module(AlexNet2012(), 128, 227)}
    for network, whole in networks.items():
        for indices, tape in (("", whole), ("pooling keeps no indices", without_pooling_indices(whole))):
            for maps, method, options in (("", "vdnn-baseline", {"algorithms": "p"}), ("every gradient map kept", "network-wide", {})):
                checked = checked_plan(tape, method, load_profile(BOARD), **options)
                features, gradients = feature_bytes_at_peak(checked), live_at_peak(checked).by_role.get(Role.GRADIENT, 0)
                what = ", ".join(filter(None, (network, indices, maps)))
                yield row("vdnn-feat-alexnet", "share of the feature extraction", "%", what, 100 * features / checked.peak_bytes)
                without = 100 * (features - _feature_gradients(tape)) / (checked.peak_bytes - gradients)
                yield row("vdnn-feat-alexnet", "share of the feature extraction", "%",
                          f"{what}{', ' if what else ''}gradients of parameters not counted", without)


def _feature_gradients(tape: Tape) -> int:
    """Bytes of the gradients of its parameters, all of which are taken to be there at the peak."""
    return sum(tape.storages[s].nbytes for layer in feature_extraction(layers_of(tape)) for s in layer.dW)


def vdnn_six() -> Iterator[Row]:
    """The cuts of the networks that do not fit by other readings: of all(m), over operators, without parameters and their gradients."""
    steps = [("VGG-16 at 128", "vgg16", 128, {}), ("VGG-16 at 256", "vgg16", 256, {})]
    steps += [(f"VGG-{depth}", "vgg-deep", 32, {"depth": depth}) for depth in (116, 216, 316, 416)]
    for name, model, batch_size, options in steps:
        tape = without_pooling_indices(tape_of(model, batch_size, **options))
        state = tape.bytes_of(Role.PARAMETER, Role.BUFFER, Role.GRADIENT, Role.OPTIMIZER_STATE)
        base = plan(tape, "vdnn-baseline", BOARD, algorithms="p")["peak_bytes"]
        for policy, fixed in (("dyn", {"budget_bytes": 12 * GIB}), ("all(m)", {"policy": "all", "algorithms": "m"})):
            for what, average, held in _averages(tape, fixed):
                of = base - (state if held is not None else 0)
                yield row("vdnn-six-mem", f"average bytes saved, {name}", "%", f"pooling keeps no indices; {policy}, {what}",
                          100 * (1 - (average - (held or 0)) / of))


def _averages(tape: Tape, options: Row) -> Iterator[tuple[str, float, float | None]]:
    """(reading, mean bytes, of which state where that is left out)."""
    device = load_profile(BOARD)
    checked = checked_plan(tape, "vdnn", device, **options)
    trace = simulate(checked, device)
    held = average_state_bytes(checked, trace)
    by_op = float(np.mean([b for i, b in zip(checked.schedule.instructions, checked.inner_peak_bytes.tolist()) if isinstance(i, Compute)]))
    for how, mean in (("mean over time", trace.metrics.average_bytes), ("mean over operators", by_op)):
        yield how, mean, None
        yield f"{how}, without parameters and their gradients", mean, held
