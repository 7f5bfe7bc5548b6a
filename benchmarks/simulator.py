"""How fast checker and simulator are: instructions per second on a training step of 5,000 ops with every map offloaded.

    python benchmarks/simulator.py [--ops 5000] [--rounds 21]

Four stages of one schedule, each the median of the rounds after a first one that compiles: its instructions made flat arrays; proven
legal; given times; and all three from new instructions, which is what a search pays for each schedule that it tries. Prints figures,
then one line of JSON. Exit code 1 when all three together do less than 1,000,000 instructions a second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from vramlab import kernels
from vramlab.check import CheckedSchedule, check_schedule
from vramlab.device import DeviceProfile
from vramlab.schedule import Compute, Free, FreeHost, Instruction, Offload, Prefetch, Schedule, Wait
from vramlab.simulate import simulate
from vramlab.tape import Op, Phase, Role, Storage, Tape, Tensor

TARGET_PER_SECOND = 1_000_000
MAP_BYTES = 2**20
LAG = 4  # layers between the start of a copy and the wait for it


def deep_chain(ops: int) -> Tape:
    """`ops // 2` layers forward, the same backward: op i makes storage i + 1; the backward of a layer reads its input map."""
    layers = ops // 2
    storages = [Storage(id=0, nbytes=MAP_BYTES, role=Role.INPUT, name="x", at_start=True, at_end=True)]
    storages += [Storage(id=i, nbytes=MAP_BYTES, role=Role.ACTIVATION, name=f"%{i}", at_start=False, at_end=i == 2 * layers)
                 for i in range(1, 2 * layers + 1)]
    tensors = [Tensor(id=s.id, storage=s.id, dtype="uint8", shape=(MAP_BYTES,), strides=(1,), offset=0) for s in storages]

    def op(index: int) -> Op:
        is_forward = index < layers
        reads = (index,) if is_forward else (index, 2 * layers - 1 - index)
        return Op(id=index, target="aten.relu.default" if is_forward else "aten.threshold_backward.default",
                  args=[{"tensor": t} for t in reads], kwargs={}, inputs=reads, outputs=(index + 1,),
                  phase=Phase.FORWARD if is_forward else Phase.BACKWARD, layer=f"layer{min(index, 2 * layers - 1 - index)}",
                  seconds=1e-4 * (1 if is_forward else 2), workspace_bytes=4096)

    return Tape(ops=tuple(map(op, range(2 * layers))), tensors=tuple(tensors), storages=tuple(storages), loss=2 * layers,
                device_type="cuda", batch_size=1)


def offload_every_map(tape: Tape) -> tuple[Instruction, ...]:
    """Each map leaves after its reader, comes back `LAG` layers before its backward, and is dropped on both sides then."""
    layers = len(tape.ops) // 2
    maps = range(1, layers)  # the last one is read by the backward at once
    forward, backward = [], []
    for layer in range(layers):
        forward.append(Compute(layer))
        forward += [Offload(layer)] * (layer in maps)
        forward += [Wait(layer - LAG), Free(layer - LAG)] * (layer - LAG in maps)
    forward += [i for s in maps[-LAG:] for i in (Wait(s), Free(s))]
    for layer in reversed(range(layers)):
        first = layer == layers - 1
        backward += [Prefetch(s) for s in (range(layer, layer - LAG, -1) if first else [layer - LAG + 1]) if s in maps]
        backward += [Wait(layer), FreeHost(layer)] * (layer in maps)
        backward += [Compute(2 * layers - 1 - layer), Free(2 * layers - 1 - layer)]
        backward += [Free(layer)] * (layer in maps)
    return (*forward, *backward)


def median_seconds(rounds: int, call: Callable[[], object]) -> float:
    """Median of `rounds` calls, after one that does not count."""
    samples = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[1:])


def measure(tape: Tape, instructions: tuple[Instruction, ...], rounds: int) -> dict[str, float]:
    """Seconds of each stage."""
    device = DeviceProfile(name="link of 12 GB/s", memory_bytes=2**34, flops_per_second=1e13, flops_efficiency=0.5,
                           memory_bytes_per_second=9e11, h2d_bytes_per_second=12e9, d2h_bytes_per_second=12e9, copy_latency_seconds=1e-5)

    def check(schedule: Schedule) -> CheckedSchedule:
        return check_schedule(tape, schedule)

    def fresh() -> Schedule:
        return Schedule(instructions, tape.digest)

    schedule = fresh()
    checked = check(schedule)
    return {
        "flatten": median_seconds(rounds, lambda: kernels.flatten_schedule(fresh())),
        "check": median_seconds(rounds, lambda: check(schedule)),
        "simulate": median_seconds(rounds, lambda: simulate(checked, device)),
        "all": median_seconds(rounds, lambda: simulate(check(fresh()), device)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    tape = deep_chain(options.ops)
    instructions = offload_every_map(tape)
    seconds = measure(tape, instructions, options.rounds)
    offloads = sum(isinstance(i, Offload) for i in instructions)
    print(f"{len(tape.ops):,} ops, {len(instructions):,} instructions, {offloads:,} of them offloads")
    for stage, value in seconds.items():
        print(f"{stage:>9} {1e3 * value:8.3f} ms {len(instructions) / value / 1e6:8.1f} million instructions a second")
    print(json.dumps({
        "benchmark": "simulator", "ops": len(tape.ops), "instructions": len(instructions), "rounds": options.rounds,
        **{f"{stage}_seconds": value for stage, value in seconds.items()},
        "instructions_per_second": round(len(instructions) / seconds["all"]), "target_per_second": TARGET_PER_SECOND,
        "python": platform.python_version(), "numba": version("numba"), "machine": platform.machine(), "cpus": os.cpu_count(),
    }))
    return 0 if len(instructions) / seconds["all"] >= TARGET_PER_SECOND else 1


if __name__ == "__main__":
    sys.exit(main())
