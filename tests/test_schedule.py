"""The Schedule: that it survives JSON and keeps its name."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import ScheduleWriter, random_instruction
from tapes import chain, random_tapes

from vramlab.schedule import Compute, Free, FreeHost, Offload, Prefetch, Recompute, Schedule, Wait

ONE_OF_EACH = (Compute(0), Compute(1, 4), Compute(2, None, "winograd"), Recompute(1, 4, "fft"), Free(3), Offload(4), Prefetch(4), Wait(4),
               FreeHost(4))


def test_the_json_form():
    schedule = Schedule(ONE_OF_EACH, tape_digest="abc", method="0123456789abcdef", micro_batches=(4, 3))
    assert schedule.to_json() == {
        "format": 1, "tape_digest": "abc", "method": "0123456789abcdef", "micro_batches": [4, 3], "instructions": [
            ["compute", 0], ["compute", 1, 4], ["compute", 2, None, "winograd"], ["recompute", 1, 4, "fft"], ["free", 3], ["offload", 4],
            ["prefetch", 4], ["wait", 4], ["free_host", 4]]}
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


def test_files(tmp_path):
    schedule = Schedule(ONE_OF_EACH, tape_digest="abc")
    for name in ("a", "b"):
        schedule.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    loaded = Schedule.load(tmp_path / "a")
    assert loaded == schedule and loaded.digest == schedule.digest


@settings(max_examples=100, deadline=None, derandomize=True)
@given(random_tapes(), st.randoms(use_true_random=False))
def test_random_schedules_round_trip(tape, random):
    legal = ScheduleWriter(tape, random).write()
    any_kind = tuple(random_instruction(tape, random) for _ in range(10))
    schedule = Schedule(legal + any_kind, tape.digest)
    again = Schedule.from_json(json.loads(json.dumps(schedule.to_json())))
    assert again == schedule and again.digest == schedule.digest


def test_everything_counts_in_the_digest():
    base = Schedule(ONE_OF_EACH, tape_digest="abc")
    others = [
        Schedule(ONE_OF_EACH[1:], tape_digest="abc"), Schedule((*ONE_OF_EACH[1:], ONE_OF_EACH[0]), tape_digest="abc"),
        Schedule((Recompute(0), *ONE_OF_EACH[1:]), tape_digest="abc"), Schedule(ONE_OF_EACH, tape_digest="abd"),
        Schedule(ONE_OF_EACH, tape_digest="abc", method="m"), Schedule(ONE_OF_EACH, tape_digest="abc", micro_batches=(1,))]
    assert len({s.digest for s in [base, *others]}) == len(others) + 1
    assert Schedule(ONE_OF_EACH, tape_digest="abc").digest == base.digest


def test_counts():
    schedule = Schedule(ONE_OF_EACH, tape_digest="abc")
    assert (schedule.count(Compute), schedule.count(Recompute), schedule.count(Free)) == (3, 1, 1)


@pytest.mark.parametrize(("change", "message"), [
    ({"format": 2}, "schedule format 2, this vramlab reads 1"),
    ({"instructions": [["evict", 3]]}, "unknown instruction 'evict', known are compute, recompute, free, offload"),
])
def test_what_cannot_be_read_is_refused(change, message):
    body = Schedule(ONE_OF_EACH, tape_digest="abc").to_json() | change
    with pytest.raises(ValueError, match=message):
        Schedule.from_json(body)


def test_a_random_schedule_uses_every_instruction():
    """The generator behind the property tests reaches all seven."""
    kinds = {type(i) for seed in range(5) for i in ScheduleWriter(chain(3), Random(seed)).write()}
    assert kinds == {Compute, Recompute, Free, Offload, Prefetch, Wait, FreeHost}
