"""How many samples a pass takes: the largest size for which any 15 % of consecutive tasks fit in memory together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from math import ceil

import numpy as np

from vramlab.errors import CaptureError
from vramlab.liveness import lower_bound_bytes, used_storages
from vramlab.tape import Role, Tape


def window_bytes(tape: Tape, share: float) -> int:
    """The most that `share` of the tape's ops, consecutive, need together: what stays all step, what they touch, one workspace."""
    count = len(tape.ops)
    length = max(1, ceil(share * count))
    stays = sum(s.nbytes for s in tape.storages if s.at_start or s.role is Role.GRADIENT)
    change = np.zeros(count + 1, np.int64)  # of the bytes touched, from a window to the one that starts an op later
    last = [-length] * len(tape.storages)
    for op in tape.ops:
        for s in used_storages(tape, op.id):
            if tape.storages[s].at_start or tape.storages[s].role is Role.GRADIENT:
                continue
            # The windows that start after its last touch and reach this op touch it here for the first time.
            change[max(last[s] + 1, op.id - length + 1, 0)] += tape.storages[s].nbytes
            change[op.id + 1] -= tape.storages[s].nbytes
            last[s] = op.id
    touched = np.cumsum(change[:count])[:count - length + 1]
    spaces = np.array([op.least_workspace_bytes for op in tape.ops], np.int64)
    inside = np.lib.stride_tricks.sliding_window_view(spaces, length).max(axis=1)
    return stays + int((touched + inside).max())


def passes_bound_bytes(tape: Tape) -> int:
    """The lower bound of several such passes: from the second on, a gradient is added to the one that is there."""
    stays = sum(s.nbytes for s in tape.storages if s.at_start and s.at_end)
    added = max((s.nbytes for s in tape.storages if s.role is Role.GRADIENT and not s.at_start), default=0)
    return max(lower_bound_bytes(tape), stays + 2 * added)


def least_size(at: Callable[[int], Tape], batch_size: int) -> int:
    """The fewest samples that a pass can have: some networks refuse few (BatchNorm wants more than one value a channel)."""
    for size in range(1, batch_size):
        with suppress(CaptureError):
            at(size)
            return size
    return batch_size


def sub_batch_size(at: Callable[[int], Tape], batch_size: int, budget_bytes: int, share: float) -> int | None:
    """Samples a pass, None when not even the fewest fit. `at` gives the tape of one pass over so many samples, and raises CaptureError
    where the network takes no batch so small.

    The largest divisor of the batch that passes the window's test; where none does, the largest size whose lower bound fits.
    """
    def others(tape: Tape) -> int:
        """Bytes of the samples that wait on the device for their pass."""
        return tape.bytes_of(Role.INPUT) // tape.batch_size * (batch_size - tape.batch_size)

    def fits(size: int, needed: Callable[[Tape], int]) -> bool:
        tape = at(size)
        return needed(tape) + others(tape) <= budget_bytes

    least = least_size(at, batch_size)
    for size in (size for size in range(batch_size, least - 1, -1) if batch_size % size == 0):
        if fits(size, lambda tape: window_bytes(tape, share)):
            return size
    if fits(batch_size, lower_bound_bytes):
        return batch_size
    fitting = bisect_right(range(least, batch_size), False, key=lambda size: not fits(size, passes_bound_bytes))
    sizes = range(least + fitting - 1, least - 1, -1)  # the rest of the batch is a pass too
    return next((size for size in sizes if batch_size % size == 0 or batch_size % size >= least), None)
