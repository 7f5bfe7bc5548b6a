"""SuperNeurons' figures with one assumption changed each. Part of benchmarks/causes.py."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from assumptions import GIB, LIBRARY, AlexNet2012, Row, backward_reads, checked_plan, not_in_place, plan, row, tape_of, tape_of_module
from assumptions import without_pooling_indices

from vramlab.check import CheckedSchedule
from vramlab.device import load_profile
from vramlab.schedule import Recompute
from vramlab.tape import Phase, Role, Tape

CUDNN = frozenset({"activation", "normalization", "pooling"})
STRATEGIES = {"speed-centric": "speed", "memory-centric": "memory", "cost-aware": "cost-aware"}
STAGES = {
    "sn-alexnet-stage0": {"liveness": False, "offload": "none", "recomputation": "none", "workspace": False},
    "sn-alexnet-stage1": {"offload": "none", "recomputation": "none", "workspace": False},
    "sn-alexnet-stage2": {"cache": False, "recomputation": "none", "workspace": False},
    "sn-alexnet-stage3": {"cache": False, "workspace": False},
}


def superneurons() -> Iterator[Row]:
    apart = tape_of_module(not_in_place(LIBRARY.model("alexnet")), 200, 224)
    tapes = {"": tape_of("alexnet", 200), "activations in regions of their own": apart,
             "AlexNet as of 2012": tape_of_module(AlexNet2012(), 200, 227)}
    for strategy, name in STRATEGIES.items():
        for what, tape in {**tapes, "no dropout, which is four operators": tape_of("alexnet", 200, dropout=0.0)}.items():
            found = plan(tape, "superneurons", "k40c", budget_bytes=12 * GIB, cache=False, workspace=False, recomputation=strategy)
            yield row(f"sn-recomp-alexnet-{name}", "operators run again", "layers", what, found["recomputes"])
    for what, tape in tapes.items():
        state = tape.bytes_of(Role.PARAMETER, Role.BUFFER, Role.GRADIENT)
        for claim, options in STAGES.items():
            peak = plan(tape, "superneurons", "k40c", budget_bytes=12 * GIB, **options)["peak_bytes"]
            yield row(claim, "peak", "MB", what, peak / 1e6)
            yield row(claim, "peak", "MB", f"{what}{', ' if what else ''}parameters and their gradients left out", (peak - state) / 1e6)


def superneurons_calls() -> Iterator[Row]:
    """AlexNet of 2012 where backward operators read what cuDNN's calls ask for, with a dropout as the one layer that it is there."""
    whole = tape_of_module(AlexNet2012(), 200, 227)
    bare = without_pooling_indices(whole)
    made, both = backward_reads(bare, CUDNN), backward_reads(bare, CUDNN, read=True)
    network, y = "AlexNet as of 2012, layers are counted", "no indices of pooling, backward operators read what their layer made too"
    cases = {network: (whole, {}), f"{network}; {y}": (made, {}),
             f"{network}; {y}; a segment counts whole": (made, {"counted": "whole"})}
    for what, (tape, options) in cases.items():
        for strategy, name in STRATEGIES.items():
            yield row(f"sn-recomp-alexnet-{name}", "layers run again", "layers", what, _layers_again(_checked(tape, strategy, **options)))
    for what, tape in {y: made, f"{y}, and what it read": both}.items():
        left_out = tape.bytes_of(Role.PARAMETER, Role.BUFFER, Role.GRADIENT, Role.INPUT)
        without = f"AlexNet as of 2012; {what}; parameters, their gradients and images left out"
        for claim, options in STAGES.items():
            yield row(claim, "peak", "MiB", without, (_peak(tape, **options) - left_out) / 2**20)
        for strategy, name in STRATEGIES.items():
            peak = _peak(tape, cache=False, workspace=False, recomputation=strategy, counted="whole")
            yield row(f"sn-recompmem-alexnet-{name}", "peak", "MiB", f"{without}; a segment counts whole", (peak - left_out) / 2**20)


def superneurons_resnets() -> Iterator[Row]:
    """What the strategies run again, in operators, where backward operators read what their layer made too."""
    for depth in (50, 101):
        tape = tape_of(f"resnet{depth}", 16)
        for what, step in {"": tape, "no indices of pooling, backward operators read what their layer made too":
                           backward_reads(without_pooling_indices(tape), CUDNN)}.items():
            for strategy, name in STRATEGIES.items():
                again = _checked(step, strategy).schedule.count(Recompute)
                yield row(f"sn-recomp-resnet{depth}-{name}", "operators run again", "layers", what, again)


def superneurons_batches() -> Iterator[Row]:
    """The largest batch within 12 GiB by the line through two smaller ones, where backward operators read what cuDNN's calls ask for."""
    own = "activations and their gradients in regions of their own"
    networks = {"alexnet": (lambda n: tape_of("alexnet", n), (128, 256)), "vgg16": (lambda n: tape_of("vgg16", n), (32, 64)),
                "resnet50": (lambda n: tape_of("resnet50", n), (32, 64)),
                "alexnet, as of 2012": (lambda n: tape_of_module(AlexNet2012(), n, 227), (128, 256)),
                f"vgg16, {own}": (lambda n: tape_of_module(not_in_place(LIBRARY.model("vgg16")), n, 224), (32, 64)),
                f"resnet50, {own}": (lambda n: tape_of_module(not_in_place(LIBRARY.model("resnet50")), n, 224), (32, 64))}
    edits = {"": lambda tape: tape,
             "no indices of pooling": without_pooling_indices,
             "no indices of pooling, backward operators read what their layer read and made":
                 lambda tape: backward_reads(without_pooling_indices(tape), CUDNN, read=True)}
    for (network, (step, sizes)), (what, edit) in product(networks.items(), edits.items()):
        name, _, of = network.partition(", ")
        needs = ("backward", "variants") if of == own else None  # else a gradient takes over the region of the one it is made from
        low, high = (plan(edit(step(n)), "superneurons", "k40c", budget_bytes=1, needs=needs)["smallest_bytes"] for n in sizes)
        largest = sizes[0] + (12 * GIB - low) * (sizes[1] - sizes[0]) / (high - low)
        yield row(f"sn-batch-{name}-superneurons", "largest batch within 12 GiB, by the line through two smaller ones", "images",
                  ", ".join(filter(None, (of, what))), int(largest))


def _peak(tape: Tape, **options: object) -> int:
    return plan(tape, "superneurons", "k40c", budget_bytes=12 * GIB, **options)["peak_bytes"]


def _checked(tape: Tape, strategy: str, **options: object) -> CheckedSchedule:
    return checked_plan(tape, "superneurons", load_profile("k40c"), budget_bytes=12 * GIB, cache=False, workspace=False,
                        recomputation=strategy, **options)


def _layers_again(checked: CheckedSchedule) -> int:
    """Recomputes of a layer's last operator; the others of it (a dropout's) are part of the same run."""
    last = {op.layer: op.id for op in checked.tape.ops if op.phase is Phase.FORWARD}
    return sum(isinstance(i, Recompute) and last[checked.tape.ops[i.op].layer] == i.op for i in checked.schedule.instructions)
