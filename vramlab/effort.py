"""What a checked schedule does beyond computing each op once: arithmetic run again, chains of it, and time on the link. Simulated.

`Metrics` holds the sums of time and bytes; here stand the counts that papers print beside them.
"""

from __future__ import annotations

from typing import Any

from vramlab.check import CheckedSchedule
from vramlab.schedule import Compute, Free, Offload, Prefetch, Recompute
from vramlab.trace import Trace


def effort(checked: CheckedSchedule, trace: Trace) -> dict[str, Any]:
    """`copy_seconds`: the copy engines are busy, both directions added. `flops`, `recompute_flops`: of first and of further runs; None
    where the tape's ops hold none. `deepest_recompute`: see `deepest_recompute`."""
    instructions, tape = checked.schedule.instructions, checked.tape
    flops, again = sum(op.flops for op in tape.ops), sum(tape.ops[i.op].flops for i in instructions if isinstance(i, Recompute))
    copies = [index for index, i in enumerate(instructions) if isinstance(i, Offload | Prefetch)]
    return {
        "copy_seconds": float((trace.end_seconds[copies] - trace.start_seconds[copies]).sum()),
        "flops": flops or None, "recompute_flops": again if flops else None, "deepest_recompute": deepest_recompute(checked),
    }


def deepest_recompute(checked: CheckedSchedule) -> int:
    """Ops in the longest chain of recomputes in which each reads what the one before it brought back; 0 without a recompute."""
    tape, deepest = checked.tape, 0
    depth: dict[int, int] = {}  # storage on the device -> length of the chain that brought it back, 0 of what was there or came by copy
    for instruction in checked.schedule.instructions:
        if isinstance(instruction, Compute | Recompute):
            read = (tape.tensors[t].storage for t in tape.ops[instruction.op].inputs)
            found = 1 + max((depth.get(s, 0) for s in read), default=0) if isinstance(instruction, Recompute) else 0
            for storage in tape.creates[instruction.op]:
                depth.setdefault(storage, found)  # of several outputs only those that were away come back
            deepest = max(deepest, found)
            depth.pop(instruction.reuse, None)
        elif isinstance(instruction, Free):
            depth.pop(instruction.storage, None)
    return deepest
