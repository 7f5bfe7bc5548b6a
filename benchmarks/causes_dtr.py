"""DTR's figures with one assumption changed each. Part of benchmarks/causes.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from assumptions import GIB, Costs, Row, checked_plan, copied_in_place, fastest_convolutions, host_time, passes_of_normalization, plan, row
from assumptions import tape_of
from caching import reserved_bytes

from vramlab.costs import roofline_costs
from vramlab.device import DeviceProfile, load_profile
from vramlab.tape import Tape

MODELS = {"densenet121": ("densenet121", 84, (10, 8, 6, 4)), "inceptionv4": ("inception-v4", 64, (10, 8, 6, 4)),
          "unet416x608": ("unet-bilinear", 6, (8, 7, 6, 4))}
# The authors' step of ResNet-32 at batch 32, without DTR: pareto_results.json of their repository, 3 June 2020. No claim of a workflow.
RESNET32_SECONDS = 12.93e-3
# What microbenchmarks of a V100 reached of its 900 GB/s: 750 (Jia et al., arXiv 1804.06826, recalled).
STREAM_SHARE = 750 / 900


def dtr() -> Iterator[Row]:
    board = load_profile("titan-v")
    slow = replace(board, memory_bytes_per_second=0.6 * board.memory_bytes_per_second)
    cases = {"": (board, roofline_costs), "0.6 of the memory bandwidth": (slow, roofline_costs),
             "all of the board's peak": (replace(board, flops_efficiency=1.0), roofline_costs),
             "the fastest modelled convolutions": (board, fastest_convolutions)}
    for name, (model, batch_size, budgets) in MODELS.items():
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


def dtr_rates() -> Iterator[Row]:
    """Step times: how often a BatchNorm's map goes past, what the host takes for an operator where launches block, the rate of memory."""
    for name, (model, batch_size, _) in MODELS.items():
        yield from _step_times(f"dtr-{name}", tape_of(model, batch_size, optimizer="none"))
    yield from _step_times("dtr-resnet1202", tape_of("resnet1202", 64, optimizer="none", in_place=False))
    seconds, operators = _host_seconds()
    figure = "host time of an operator, where the authors' ResNet-32 at batch 32 is bound by it"
    yield row("dtr-resnet1202-base-time", figure, "us", f"{operators} operators that run", 1e6 * seconds)


def _step_times(claim: str, tape: Tape) -> Iterator[Row]:
    board = load_profile("titan-v")
    slower = replace(board, memory_bytes_per_second=STREAM_SHARE * board.memory_bytes_per_second)
    for what, (device, costs) in {"0.83 of the memory bandwidth": (slower, roofline_costs),
                                  **{what: (board, costs) for what, costs in _rates().items()},
                                  f"{BOTH}, and 0.83 of the memory bandwidth": (slower, _rates()[BOTH])}.items():
        yield row(f"{claim}-base-time", "step", "ms", what, 1e3 * plan(tape, "replay", device, costs=costs)["step_seconds"])


PASSES, BOTH = "a BatchNorm's map goes past 3 times, in its backward 5", "both"
FAST = f"{BOTH}, and the fastest modelled convolutions"
COPIES = "both, and operators in place copy first"


def _rates() -> dict[str, Costs]:
    host, _ = _host_seconds()
    slow = f"{1e6 * host:.0f} microseconds of the host beside each kernel"
    return {PASSES: passes_of_normalization(), slow: host_time(host), BOTH: host_time(host, passes_of_normalization()),
            FAST: host_time(host, passes_of_normalization(fastest_convolutions))}


def _host_seconds() -> tuple[float, int]:
    """(of one operator, how many there are) in the authors' ResNet-32, if kernels took no time beside the host."""
    tape = roofline_costs(tape_of("resnet1202", 32, optimizer="none", in_place=False, depth=32), load_profile("titan-v"))
    operators = sum(op.seconds > 0 for op in tape.ops)
    return RESNET32_SECONDS / operators, operators


def dtr_shares() -> Iterator[Row]:
    """Shares of recomputation where operators take these times, and where sampling and groups are the authors' too."""
    for name, (model, batch_size, budgets) in MODELS.items():
        tape = tape_of(model, batch_size, optimizer="none")
        yield from _shares(f"dtr-{name}", tape, budgets)
    yield from _shares("dtr-resnet1202", tape_of("resnet1202", 64, optimizer="none", in_place=False), (8, 6, 4, 2))


def dtr_copies() -> Iterator[Row]:
    """Shares where an operator in place copies its input first, as in the prototype. It had groups, at larger budgets sampling too."""
    board = load_profile("titan-v")
    slower = replace(board, memory_bytes_per_second=STREAM_SHARE * board.memory_bytes_per_second)
    normal, fast = (copied_in_place(_rates()[name]) for name in (BOTH, FAST))
    cases = {COPIES: (board, normal), f"{COPIES}, and 0.83 of the memory bandwidth": (slower, normal),
             f"{COPIES}, 0.83 of the memory bandwidth and the fastest modelled convolutions": (slower, fast)}
    ways = {"": {}, "; union-find groups": {"heuristic": "eq"}, "; sampling and union-find groups": {"sampling": True, "heuristic": "eq"}}
    for name, (model, batch_size, budgets) in MODELS.items():
        tape = tape_of(model, batch_size, optimizer="none")
        for what, (device, costs) in cases.items():
            for budget, (how, options) in product(budgets, ways.items()):
                yield _recomputed(f"dtr-{name}", tape, device, budget, what + how, costs=costs, **options)
            first_runs = 1e3 * plan(tape, "replay", device, costs=costs)["step_seconds"]
            yield row(f"dtr-{name}-base-time", "step", "ms", what, first_runs)


def dtr_first_runs() -> Iterator[Row]:
    """Shares where the host takes its time for first runs alone: the prototype's own runtime runs operators again, without Python."""
    host, _ = _host_seconds()
    for budget in (8, 6, 4, 2):
        found = plan(tape_of("resnet1202", 64, optimizer="none", in_place=False), "dtr", "titan-v", costs=_rates()[BOTH],
                     budget_bytes=int(budget * 1e9))
        without = found["recompute_seconds"] - host * found["recomputes"]
        what = f"{BOTH}, the host's for first runs alone"
        yield row(f"dtr-resnet1202-{budget}g-recompute", "recomputation of the first runs' time", "%", what,
                  100 * without / found["compute_seconds"])


def _shares(name: str, tape: Tape, gigabytes: tuple[int, ...]) -> Iterator[Row]:
    for budget in gigabytes:
        for what, costs in _rates().items():
            for how, options in (("", {}), ("; sampling and union-find groups", {"sampling": True, "heuristic": "eq"})):
                yield _recomputed(name, tape, "titan-v", budget, what + how, costs=costs, **options)
