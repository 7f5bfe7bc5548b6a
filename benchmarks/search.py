"""How many edits of a schedule a search evaluates in a second, on ResNet-50's step, and that each value is checker's and simulator's.

    python benchmarks/search.py [--model resnet50] [--method delta] [--share 0.6] [--edits 20000] [--sample 200] [--keep]

The step is captured at batch 32, timed by a V100's roofline, and planned by a method at `share` of eager's simulated peak. Edits are moves
of one instruction by up to 40 places, drawn from one seed: most moves of a free, a copy or a wait are legal, few of a run are. Three ways:

    whole     each edited schedule made, checked and simulated from its start, which a search would have to do else
    one       `Edits.evaluate`, an edit a call
    batch     `Edits.evaluate_moves`, all edits in one call

Of a sample, step seconds, stall and both peaks are compared with the whole way's, bit for bit, and so is whether an edit is legal. Prints a
table, then one line of JSON; `--keep` writes benchmarks/evidence/search.json. Exit code 1 when a value differs, or when `batch`, which is
how a compiled search asks, does less than 20,000 edits a second on a step of up to 1,000 ops.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from random import Random

import numpy as np
from common import ROOT, keep

from vramlab.capture import capture
from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library
from vramlab.costs import roofline_costs
from vramlab.device import DeviceProfile, load_profile
from vramlab.edits import Edits, Value
from vramlab.errors import ScheduleError
from vramlab.liveness import replay_schedule
from vramlab.planner import Budget
from vramlab.schedule import Instruction, Schedule
from vramlab.simulate import simulate
from vramlab.tape import Tape

TARGET_PER_SECOND, FARTHEST, MOST_OPS = 20_000, 40, 1_000


def step_of(model: str, device: DeviceProfile) -> Tape:
    """A training step of a torchvision model: batch 32, 224 pixels, momentum SGD."""
    import torch
    import torchvision

    made = getattr(torchvision.models, model)()
    batch = [torch.zeros(32, 3, 224, 224), torch.zeros(32, dtype=torch.long)]
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    captured = capture(made, lambda m, x, y: torch.nn.functional.cross_entropy(m(x), y), batch, optimizer=optimizer)
    return roofline_costs(captured.tape, device)


def moves_of(size: int, count: int) -> np.ndarray:
    """From where to where, int64 [count, 2]."""
    random = Random(0)
    sources = [random.randrange(size) for _ in range(count)]
    return np.array([(a, min(max(a + random.randint(-FARTHEST, FARTHEST), 0), size - 1)) for a in sources], np.int64)


def slice_of(old: tuple[Instruction, ...], source: int, target: int) -> tuple[int, int, tuple[Instruction, ...]]:
    """A move as an edit."""
    begin, end = min(source, target), max(source, target) + 1
    piece = list(old[begin:end])
    if source == begin:
        piece.append(piece.pop(0))
    else:
        piece.insert(0, piece.pop())
    return begin, end, tuple(piece)


def whole(checked: CheckedSchedule, device: DeviceProfile, budget: Budget, edit: tuple[int, int, tuple[Instruction, ...]]) -> Value | None:
    """By checker and simulator; None where it is illegal."""
    begin, end, piece = edit
    old = checked.schedule.instructions
    try:
        edited = check_schedule(checked.tape, Schedule((*old[:begin], *piece, *old[end:]), checked.tape.digest), budget)
    except ScheduleError:
        return None
    m = simulate(edited, device).metrics
    return Value(m.step_seconds, m.stall_seconds, m.peak_bytes, m.peak_host_bytes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--method", default="delta")
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--edits", type=int, default=20_000)
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/evidence/search.json")
    options = parser.parse_args()
    device = load_profile("v100-32gb")
    tape = step_of(options.model, device)
    budget = Budget(device_bytes=int(options.share * check_schedule(tape, replay_schedule(tape)).peak_bytes))
    checked = check_schedule(tape, Library([ROOT]).method(options.method).build().plan(tape, device, budget), budget)
    row = {"model": options.model, "ops": len(tape.ops), "method": options.method, "share": options.share,
           "instructions": len(checked.schedule.instructions), **measure(checked, device, budget, options.edits, options.sample)}
    for way in ("whole", "one", "batch"):
        print(f"{way:>6} {row[f'{way}_per_second']:>10,.0f} edits a second")
    print(f"{row['sample']} of {row['edits']:,} compared, {row['legal']} of these legal, {row['differing']} differ")
    if options.keep:
        keep("search", [row], {"target_per_second": TARGET_PER_SECOND})
    print(json.dumps({"benchmark": "search", **row, "target_per_second": TARGET_PER_SECOND}))
    is_fast = row["batch_per_second"] >= TARGET_PER_SECOND or row["ops"] > MOST_OPS
    return 0 if is_fast and not row["differing"] else 1


def measure(checked: CheckedSchedule, device: DeviceProfile, budget: Budget, count: int, sample: int) -> dict[str, float]:
    """Rates, and how many of the sample differ."""
    old, edited = checked.schedule.instructions, Edits(checked, device, budget)
    moves = moves_of(len(old), count)
    edits = [slice_of(old, *move) for move in moves.tolist()]
    edited.evaluate_moves(moves[:1]), edited.evaluate(*edits[0])  # compiles

    began = time.perf_counter()
    seconds, peaks = edited.evaluate_moves(moves)
    batch = time.perf_counter() - began
    began = time.perf_counter()
    found = [edited.evaluate(*edit) for edit in edits]
    one = time.perf_counter() - began
    began = time.perf_counter()
    truth = [whole(checked, device, budget, edit) for edit in edits[:sample]]
    slow = time.perf_counter() - began

    differing = sum(a != b for a, b in zip(found, truth))
    for value, step, peak in zip(found, seconds.tolist(), peaks.tolist()):
        is_equal = np.isinf(step) if value is None else (step, *peak) == (value.step_seconds, value.peak_bytes, value.peak_host_bytes)
        differing += not is_equal
    return {"edits": count, "legal_edits": int(np.isfinite(seconds).sum()), "sample": len(truth), "legal": sum(map(bool, truth)),
            "differing": differing, "whole_per_second": len(truth) / slow, "one_per_second": count / one, "batch_per_second": count / batch}


if __name__ == "__main__":
    sys.exit(main())
