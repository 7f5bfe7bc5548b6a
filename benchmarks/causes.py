"""Why figures of papers come out otherwise in their workflows: each simulated again with one assumption changed.

    python benchmarks/causes.py [PART ...]      # all parts by default, named below at PARTS; seconds to minutes each

A row names the claim, the assumption that was changed, and what came out before and after; nothing here is measured. What the workflows
and README call a cause is a row of benchmarks/evidence/causes.json.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from assumptions import GIB, LIBRARY, Row, fastest_workspaces, half_the_rates, host_time, checked_plan, not_in_place
from assumptions import passes_of_normalization, plan, pooling_by_indices_alone, row, tape_of, tape_of_module, whole_tiles
from assumptions import with_bits_for_relu, without_pooling_indices
from caching import reserved_bytes
from causes_dtr import PASSES, dtr, dtr_copies, dtr_first_runs, dtr_rates, dtr_shares
from causes_sublinear import sublinear, sublinear_lstm, sublinear_network, sublinear_plans, sublinear_steps
from causes_superneurons import superneurons, superneurons_batches, superneurons_calls, superneurons_resnets
from causes_vdnn import vdnn, vdnn_loss, vdnn_share, vdnn_six
from common import keep, kept, machine, specs

from vramlab.costs import roofline_costs
from vramlab.device import load_profile
from vramlab.measure import make_plan
from vramlab.tape import Tape


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
    apart = tape_of_module(not_in_place(LIBRARY.model("densenet-bc-100")), 64, 32, momentum=0.9)
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


def densenet_rates() -> Iterator[Row]:
    """Times, where kernels and the host take what they do on such boards. The host time is that of DTR's authors, three years later."""
    tape, board = tape_of("densenet-bc-100", 64, 0.9), load_profile("titan-x-pascal")
    passes = passes_of_normalization()
    cases = {PASSES: passes, "convolutions compute whole tiles of 32 channels": whole_tiles(32),
             "convolutions compute whole tiles of 64 channels": whole_tiles(64), "tiles of 64 and these passes": whole_tiles(64, passes)}
    for host in (20, 40, 80):
        cases[f"{host} microseconds of the host beside each kernel"] = host_time(1e-6 * host)
        cases[f"tiles of 64, these passes and {host} microseconds of the host"] = host_time(1e-6 * host, whole_tiles(64, passes))
    for what, costs in cases.items():
        eager, shared = (plan(tape, method, board, costs=costs)["step_seconds"] for method in ("replay", "densenet-shared"))
        yield row("dn-time-naive", "step", "s", what, eager)
        yield row("dn-time-eff", "step", "s", what, shared)
        yield row("dn-overhead", "extra step time", "%", what, 100 * (shared / eager - 1))


PARTS = {part.__name__.replace("_", "-"): part for part in (
    vdnn, vdnn_loss, vdnn_share, vdnn_six, superneurons, superneurons_calls, superneurons_resnets,
    superneurons_batches, modnn, fujitsu, densenet, densenet_rates,
    sublinear, sublinear_network, sublinear_plans, sublinear_lstm, sublinear_steps, dtr, dtr_rates, dtr_shares,
    dtr_copies, dtr_first_runs)}


def main() -> None:
    names, commit = sys.argv[1:] or list(PARTS), machine()["commit"]
    found = []
    for name in names:
        for one in PARTS[name]():
            found.append({"paper": name, "commit": commit} | one)
            print("{paper:>12} {claim:24} {figure}: {value} {unit} ({assumption})".format(**found[-1]), flush=True)
    rows = [r for r in kept("causes") if r["paper"] not in names] + found  # read last: another part may have ended meanwhile
    keep("causes", sorted(rows, key=lambda r: list(PARTS).index(r["paper"])), {"rows": len(rows)})


if __name__ == "__main__":
    main()
