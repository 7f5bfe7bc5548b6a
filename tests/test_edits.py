"""Values of edits against the whole checker and the whole simulator: random schedules of random tapes, edited at random."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import ScheduleWriter
from tapes import TOYS, random_tapes

from vramlab import kernels
from vramlab.check import RULES, RULES_OF_TABLE, CheckedSchedule, check_schedule
from vramlab.device import DeviceProfile
from vramlab.edits import SHORTEST, Edits, Value
from vramlab.errors import ScheduleError
from vramlab.liveness import replay_schedule
from vramlab.planner import Budget
from vramlab.schedule import Compute, Free, FreeHost, Instruction, Offload, Prefetch, Recompute, Schedule, Wait
from vramlab.simulate import simulate
from vramlab.tape import Tape

STORAGE_KINDS = (Free, Offload, Prefetch, Wait, FreeHost)


def device(*, is_full_duplex: bool = True) -> DeviceProfile:
    return DeviceProfile(name="any", memory_bytes=10**6, flops_per_second=1, flops_efficiency=1, memory_bytes_per_second=1,
                         h2d_bytes_per_second=170, d2h_bytes_per_second=110, copy_latency_seconds=0.3, is_full_duplex=is_full_duplex)


def whole(tape: Tape, instructions: tuple[Instruction, ...], profile: DeviceProfile, budget: Budget) -> Value | ScheduleError:
    """What the whole checker and the whole simulator say."""
    try:
        checked = check_schedule(tape, Schedule(instructions, tape.digest), budget)
    except ScheduleError as refusal:
        return refusal
    m = simulate(checked, profile).metrics
    return Value(m.step_seconds, m.stall_seconds, m.peak_bytes, m.peak_host_bytes)


def rule_of(fault: kernels.Fault) -> str:
    if fault.reason == kernels.BY_TABLE:
        rules = RULES_OF_TABLE[kernels.USES[fault.use]]
        return rules[kernels.RESIDENCIES[fault.found] in ("offloading", "prefetching")]
    return next(rule for name, (rule, _) in RULES.items() if getattr(kernels, name) == fault.reason)


def random_edit(instructions: tuple[Instruction, ...], tape: Tape, random: Random) -> tuple[int, int, tuple[Instruction, ...]]:
    """A removal, a move, an insertion or a replacement, here and there of several."""
    begin = random.randint(0, len(instructions))
    end = random.randint(begin, min(len(instructions), begin + random.choice([0, 1, 1, 2, 6, 40])))
    piece = list(instructions[begin:end])
    kind = random.choice(["remove", "move", "insert", "shuffle", "again"])
    if kind == "move" and piece:
        piece.insert(random.randint(0, len(piece) - 1), piece.pop(random.randrange(len(piece))))
    elif kind == "shuffle":
        random.shuffle(piece)
    elif kind == "insert":
        piece.insert(random.randint(0, len(piece)), random.choice(STORAGE_KINDS)(random.randrange(len(tape.storages))))
    elif kind == "again":
        piece.insert(random.randint(0, len(piece)), random.choice([Recompute, Compute])(random.randrange(len(tape.ops))))
    elif piece:
        piece.pop(random.randrange(len(piece)))
    return begin, end, tuple(piece)


def agree(edited: Edits, checked: CheckedSchedule, profile: DeviceProfile, budget: Budget, random: Random) -> int:
    """Ask both for a random edit; how many of these were legal: 0 or 1."""
    old = checked.schedule.instructions
    begin, end, piece = random_edit(old, checked.tape, random)
    said, truth = edited.evaluate(begin, end, piece), whole(checked.tape, (*old[:begin], *piece, *old[end:]), profile, budget)
    if isinstance(truth, Value):
        assert said == truth
        return 1
    assert said is None
    assert (rule_of(edited.fault), edited.fault.index) == (truth.rule, int(str(truth).split()[1].rstrip(",:")))
    return 0


@settings(max_examples=60, deadline=None)
@given(random_tapes(9), st.randoms(use_true_random=False), st.booleans(), st.sampled_from([None, 0, 200]), st.sampled_from([None, 300]))
def test_edits_agree_with_checker_and_simulator(tape, random, is_full_duplex, spare, host_bytes):
    profile = device(is_full_duplex=is_full_duplex)
    checked = check_schedule(tape, Schedule(ScheduleWriter(tape, random).write(), tape.digest))
    budget = Budget(device_bytes=2**62 if spare is None else checked.peak_bytes + spare,
                    host_bytes=2**62 if host_bytes is None else checked.peak_host_bytes + host_bytes)
    edited = Edits(checked, profile, budget)
    assert edited.value == whole(tape, checked.schedule.instructions, profile, budget)
    for _ in range(30):
        agree(edited, checked, profile, budget, random)


@pytest.mark.parametrize("toy", TOYS)
def test_edits_of_long_schedules_agree(toy):
    """Longer than some saved states apart, so that walks restart in the middle and end early; most moves of a copy are legal."""
    random, tape = Random(toy), TOYS[toy]()
    instructions = max((ScheduleWriter(tape, random).write() for _ in range(5)), key=len)
    assert len(instructions) > 3 * SHORTEST
    checked, profile, budget = check_schedule(tape, Schedule(instructions, tape.digest)), device(), Budget(device_bytes=2**62)
    edited = Edits(checked, profile)
    assert sum(agree(edited, checked, profile, budget, random) for _ in range(300)) > 10


def test_moves_agree_with_edits_and_an_accepted_edit_is_the_schedule():
    random, tape = Random(5), TOYS["residual" if "residual" in TOYS else "skip"]()
    checked = check_schedule(tape, Schedule(ScheduleWriter(tape, random).write(), tape.digest))
    edited, size = Edits(checked, device()), len(checked.schedule.instructions)
    for _ in range(5):
        old = edited.schedule.instructions
        moves = np.array([(a, random.randint(max(0, a - 9), min(size - 1, a + 9))) for a in range(size)])
        seconds, peaks = edited.evaluate_moves(moves)
        legal = np.flatnonzero(np.isfinite(seconds))
        for (a, b), found, peak in zip(moves.tolist(), seconds, peaks.tolist()):
            moved = list(old)
            moved.insert(b, moved.pop(a))
            truth = whole(tape, tuple(moved), device(), edited.budget)
            assert found == getattr(truth, "step_seconds", np.inf)
            assert not isinstance(truth, Value) or peak == [truth.peak_bytes, truth.peak_host_bytes]
        a, b = moves[random.choice(legal.tolist())].tolist()
        piece = list(old[min(a, b):max(a, b) + 1])
        piece.insert(0, piece.pop()) if b < a else piece.append(piece.pop(0))
        value = edited.evaluate(min(a, b), max(a, b) + 1, piece)
        edited.accept(min(a, b), max(a, b) + 1, piece)
        assert edited.value == value == whole(tape, edited.schedule.instructions, device(), edited.budget)


def test_a_walk_that_forgot_a_saved_state_is_caught():
    """The negative control: with one saved clock, one saved peak or one saved residency off, values differ from those of the whole walk."""
    random, tape = Random(1), TOYS["skip"]()
    instructions = max((ScheduleWriter(tape, random).write() for _ in range(5)), key=len)
    checked = check_schedule(tape, Schedule(instructions, tape.digest))
    last = len(instructions) - 1

    def spoil(what: str) -> Value | None:
        edited = Edits(checked, device())
        saved = edited._walked[4]
        {"clock": saved.clock[:, kernels.NOW], "peak": saved.peaks_before[:, 0], "held": saved.held[:, 0]}[what][-1] += 10**7
        return edited.evaluate(last, last, ())

    truth = whole(tape, instructions, device(), Budget(device_bytes=2**62))
    assert Edits(checked, device()).evaluate(last, last, ()) == truth
    assert all(spoil(what) != truth for what in ("clock", "peak", "held"))


def test_what_is_no_edit_is_refused():
    tape = TOYS["chain"]() if "chain" in TOYS else next(iter(TOYS.values()))()
    checked = check_schedule(tape, replay_schedule(tape))
    with pytest.raises(ScheduleError, match="device-budget"):
        Edits(checked, device(), Budget(device_bytes=checked.peak_bytes - 1))
    edited = Edits(checked, device())
    with pytest.raises(ValueError, match="instructions 3 to 2"):
        edited.evaluate(3, 2, ())
    with pytest.raises(ValueError, match="none of the"):
        edited.evaluate_moves(np.array([[0, len(checked.schedule.instructions)]]))
    with pytest.raises(ScheduleError):
        edited.accept(0, 1, ())
    assert edited.evaluate(0, 1, ()) is None and edited.fault.reason != kernels.LEGAL
