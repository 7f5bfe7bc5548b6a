"""benchmarks/caching.py, a model of PyTorch's caching allocator, against sums by hand; no two of its blocks overlap."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest
from tapes import MAP, chain

from vramlab.check import check_schedule
from vramlab.liveness import replay_schedule

MIB = 2**20


def load():
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "caching.py"
    spec = importlib.util.spec_from_file_location("benchmarks_caching", path)
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
    return sys.modules[spec.name]


caching = load()


@pytest.mark.parametrize(("requests", "reserved"), [
    ([1], 2 * MIB),
    ([MIB, MIB], 2 * MIB),
    ([MIB, MIB, 1], 4 * MIB),
    ([MIB + 1], 20 * MIB),
    ([5 * MIB] * 4, 20 * MIB),
    ([5 * MIB] * 4 + [2 * MIB], 40 * MIB),
    ([10 * MIB], 10 * MIB),
    ([10 * MIB + 1], 12 * MIB),
    ([1, 2 * MIB, 19 * MIB], 2 * MIB + 20 * MIB + 20 * MIB),
    ([2 * MIB, 11 * MIB], 20 * MIB),
    ([0, 0], 0),
])
def test_segments_by_hand(requests, reserved):
    allocator = caching.CachingAllocator()
    for nbytes in requests:
        allocator.allocate(nbytes)
    assert allocator.reserved_bytes == reserved


def test_a_request_is_rounded_to_512_bytes():
    allocator = caching.CachingAllocator()
    for _ in range(4096):
        allocator.allocate(1)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (2 * MIB, 2 * MIB)


def test_neighbours_that_are_free_join_and_others_do_not():
    allocator = caching.CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.allocate(10 * MIB)  # 10 MiB are free, in two pieces
    assert allocator.reserved_bytes == 30 * MIB
    allocator.free(blocks[1])
    allocator.allocate(15 * MIB)  # now the first three are one piece
    assert allocator.reserved_bytes == 30 * MIB


def test_a_rest_of_a_large_block_up_to_a_mebibyte_is_not_split_off():
    allocator = caching.CachingAllocator()
    whole = allocator.allocate(12 * MIB)
    allocator.free(whole)
    allocator.allocate(11 * MIB)
    assert allocator.allocated_bytes == 12 * MIB


def test_blocks_never_overlap_and_free_ones_tile_the_rest():
    draw, allocator, held = random.Random(0), caching.CachingAllocator(), []
    for _ in range(3000):
        if held and draw.random() < 0.5:
            allocator.free(held.pop(draw.randrange(len(held))))
        else:
            held.append(allocator.allocate(draw.choice([1, 700, 300_000, 3 * MIB, 9 * MIB, 33 * MIB])))
        ends = sorted((b.address, b.address + b.nbytes) for b in held)
        assert all(end <= start for (_, end), (start, _) in zip(ends, ends[1:]))
    for block in held:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    assert sum(nbytes for free in allocator._free.values() for nbytes, _ in free) == allocator.reserved_bytes


def test_a_schedule_of_small_maps_reserves_one_segment_and_as_much_in_the_second_step():
    tape = chain(4)
    checked = check_schedule(tape, replay_schedule(tape))
    assert MAP < 512 * 1024 and caching.reserved_bytes(checked, 1) == caching.reserved_bytes(checked, 3) == 2 * MIB
