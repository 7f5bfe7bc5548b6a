"""Legality: each rule by hand, then a second opinion on whole state spaces and on random schedules."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter, deque
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Illegal, Machine, ScheduleWriter, random_edit
from tapes import TOYS, TapeBuilder, chain, random_tape, random_tapes

from vramlab import check, kernels
from vramlab.check import CheckedSchedule, check_schedule, transitions
from vramlab.errors import ScheduleError
from vramlab.liveness import replay_schedule
from vramlab.planner import Budget
from vramlab.schedule import Compute, Free, FreeHost, Instruction, Offload, Prefetch, Recompute, Schedule, Wait
from vramlab.tape import Phase, Role, Tape, Variant

W, X, A, B, LOSS = range(5)  # the storages of `line`
COPIES = (Compute(0), Offload(A), Compute(1), Wait(A), Free(A), Compute(2), Prefetch(A), Wait(A), FreeHost(A), Free(A), Free(B))


def line() -> Tape:
    """x, w -> a -> b -> loss. Bytes: w 10, x 100, a 200 (workspace 7; direct 0, winograd 30), b 200 (may take over a), loss 4."""
    tape = TapeBuilder()
    w, x = tape.state("w", 10), tape.state("x", 100, Role.INPUT)
    a, b, loss = tape.temporary(200, Role.ACTIVATION), tape.temporary(200), tape.temporary(4, at_end=True)
    tape.call("aten.convolution.default", [w, x], [a], layer="conv", workspace_bytes=7,
              variants=(Variant("direct", 3.0, 0), Variant("winograd", 0.5, 30)))
    tape.call("aten.relu.default", [a], [b], takeover=(b, a))
    tape.call("aten.mean.default", [b], [loss])
    return tape.build(loss)


def state_tape() -> Tape:
    """An op that reads w and one that overwrites it, then a reader; two random ops; an optimizer. Storages w, a, b, c, d, loss."""
    tape = TapeBuilder()
    w = tape.state("w", 10, Role.BUFFER)
    a, b, c, d = (tape.temporary(10) for _ in range(4))
    loss = tape.temporary(4, at_end=True)
    tape.call("aten.relu.default", [w], [a])
    tape.call("aten.add_.Tensor", [w], [w], mutates=[w])
    tape.call("aten.bernoulli.default", [w], [b], is_random=True)
    tape.call("aten.bernoulli.default", [a], [c], is_random=True)
    tape.call("aten.native_batch_norm.default", [c, w], [d], mutates=[w], throwaway_state=True)
    tape.call("aten.add.Tensor", [a, b, d], [loss])
    tape.call("vramlab.optimizer_step", [w], [], phase=Phase.OPTIMIZER, mutates=[w])
    return tape.build(loss)


def checked(tape: Tape, *instructions: Instruction, budget: Budget | None = None) -> CheckedSchedule:
    return check_schedule(tape, Schedule(instructions, tape.digest), budget)


def refusal(tape: Tape, *instructions: Instruction, budget: Budget | None = None) -> tuple[str, int, str, str]:
    """(rule, index, op, storage) of the refusal."""
    with pytest.raises(ScheduleError) as caught:
        checked(tape, *instructions, budget=budget)
    return caught.value.rule, caught.value.index, caught.value.op, caught.value.storage


# ---------------------------------------------------------------- memory, to the byte

def test_memory_of_a_plain_schedule():
    c = checked(line(), Compute(0), Compute(1), Free(A), Compute(2), Free(B))
    assert c.live_bytes.tolist() == [310, 510, 310, 314, 114]
    assert c.inner_peak_bytes.tolist() == [317, 510, 510, 314, 314]
    assert c.host_bytes.tolist() == [0, 0, 0, 0, 0]
    assert (c.peak_bytes, c.peak_instruction, c.peak_host_bytes) == (510, 1, 0)


def test_reuse_saves_the_second_region():
    c = checked(line(), Compute(0), Compute(1, reuse=A), Compute(2), Free(B))
    assert c.live_bytes.tolist() == [310, 310, 314, 114]
    assert c.inner_peak_bytes.tolist() == [317, 310, 314, 314]
    assert (c.peak_bytes, c.peak_instruction) == (317, 0)


def test_memory_of_copies():
    c = checked(line(), *COPIES)
    assert c.live_bytes.tolist() == [310, 310, 510, 510, 310, 314, 514, 514, 514, 314, 114]
    assert c.host_bytes.tolist() == [0, 200, 200, 200, 200, 200, 200, 200, 0, 0, 0]
    assert c.peak_bytes == 514 and c.peak_instruction == 6 and c.peak_host_bytes == 200


def test_reuse_of_a_region_with_a_host_copy_leaves_the_host_copy():
    c = checked(line(), Compute(0), Offload(A), Wait(A), Compute(1, reuse=A), FreeHost(A), Compute(2), Free(B))
    assert c.live_bytes.tolist() == [310, 310, 310, 310, 310, 314, 114]
    assert c.host_bytes.tolist() == [0, 200, 200, 200, 0, 0, 0]


def test_duplicates_of_a_recompute_count_inside_it():
    tape = TapeBuilder()
    x = tape.state("x", 100, Role.INPUT)
    y, indices, loss = tape.temporary(50), tape.temporary(80), tape.temporary(4, at_end=True)
    tape.call("aten.max_pool2d_with_indices.default", [x], [y, indices], workspace_bytes=3)
    tape.call("aten.mean.default", [y, indices], [loss])
    c = checked(tape.build(loss), Compute(0), Free(1), Recompute(0), Compute(1), Free(1), Free(2))
    assert c.live_bytes.tolist() == [230, 180, 230, 234, 184, 104]
    assert c.inner_peak_bytes.tolist() == [233, 230, 230 + 80 + 3, 234, 234, 184]


def test_a_write_drops_the_host_copy():
    tape = state_tape()
    c = checked(tape, Compute(0), Offload(0), Wait(0), Compute(1), Compute(2), Compute(3), Compute(4), Compute(5), Compute(6),
                *(Free(s) for s in (1, 2, 3, 4)))
    assert c.host_bytes.tolist()[:4] == [0, 10, 10, 0]


def test_the_arrays_are_read_only():
    c = checked(line(), Compute(0), Compute(1), Free(A), Compute(2), Free(B))
    for array in (c.live_bytes, c.inner_peak_bytes, c.host_bytes):
        assert array.dtype == np.int64
        with pytest.raises(ValueError):
            array[0] = 1


def test_a_tape_without_ops_is_done():
    tape = TapeBuilder()
    c = checked(tape.build(tape.state("x", 100, Role.INPUT)))
    assert (c.peak_bytes, c.peak_host_bytes, c.peak_instruction) == (100, 0, 0)


# ---------------------------------------------------------------- each rule refuses

CONV, RELU, MEAN = "#0 aten.convolution.default (conv)", "#1 aten.relu.default", "#2 aten.mean.default"
A_NAME, B_NAME, LOSS_NAME = f"%2 of {CONV}", f"%3 of {RELU}", f"%4 of {MEAN}"

REFUSED_ON_LINE = {
    "absent input": ([Compute(1)], ("input-not-readable", 0, RELU, A_NAME)),
    "freed input": ([Compute(0), Free(A), Compute(1)], ("input-not-readable", 2, RELU, A_NAME)),
    "input on its way back": ([Compute(0), Offload(A), Wait(A), Free(A), Prefetch(A), Compute(1)], ("input-not-readable", 5, RELU, A_NAME)),
    "no twin": ([Compute(0, reuse=X)], ("reuse-not-allowed", 0, CONV, "x")),
    "reuse of another storage": ([Compute(0), Compute(1, reuse=X)], ("reuse-not-allowed", 1, RELU, "x")),
    "reuse of no storage": ([Compute(0), Compute(1, reuse=77)], ("reuse-not-allowed", 1, RELU, "")),
    "reuse in flight": ([Compute(0), Offload(A), Compute(1, reuse=A)], ("reuse-in-flight", 2, RELU, A_NAME)),
    "reuse onto what is there": ([Compute(0), Compute(1), Recompute(1, reuse=A)], ("output-not-absent", 2, RELU, B_NAME)),
    "free of nothing": ([Free(A)], ("free-not-resident", 0, "", A_NAME)),
    "free twice": ([Compute(0), Free(A), Free(A)], ("free-not-resident", 2, "", A_NAME)),
    "free while offloading": ([Compute(0), Offload(A), Free(A)], ("free-in-flight", 2, "", A_NAME)),
    "free while prefetching": ([Offload(W), Wait(W), Free(W), Prefetch(W), Free(W)], ("free-in-flight", 4, "", "w")),
    "free of a host copy": ([Offload(W), Wait(W), Free(W), Free(W)], ("free-not-resident", 3, "", "w")),
    "offload of nothing": ([Offload(A)], ("offload-not-resident", 0, "", A_NAME)),
    "offload twice": ([Offload(W), Offload(W)], ("offload-in-flight", 1, "", "w")),
    "offload of a copy": ([Offload(W), Wait(W), Offload(W)], ("offload-not-resident", 2, "", "w")),
    "prefetch without a copy": ([Prefetch(W)], ("prefetch-not-on-host", 0, "", "w")),
    "prefetch of what is there": ([Offload(W), Wait(W), Prefetch(W)], ("prefetch-not-on-host", 2, "", "w")),
    "prefetch while offloading": ([Offload(W), Prefetch(W)], ("prefetch-in-flight", 1, "", "w")),
    "wait for nothing": ([Wait(W)], ("wait-without-copy", 0, "", "w")),
    "wait twice": ([Offload(W), Wait(W), Wait(W)], ("wait-without-copy", 2, "", "w")),
    "free host without a copy": ([FreeHost(W)], ("free-host-without-copy", 0, "", "w")),
    "free host while offloading": ([Offload(W), FreeHost(W)], ("free-host-in-flight", 1, "", "w")),
    "computed twice": ([Compute(0), Free(A), Compute(0)], ("computed-twice", 2, CONV, "")),
    "recompute first": ([Recompute(0)], ("recompute-before-compute", 0, CONV, "")),
    "nothing to recompute": ([Compute(0), Recompute(0)], ("nothing-to-recompute", 1, CONV, "")),
    "recompute of what is on the host": ([Compute(0), Offload(A), Wait(A), Free(A), Recompute(0)], ("nothing-to-recompute", 4, CONV, "")),
    "variant": ([Compute(0, variant="winograd"), Compute(1, variant="winograd")], ("variant-not-allowed", 1, RELU, "")),
    "no such op": ([Compute(3)], ("unknown-op", 0, "", "")),
    "op below zero": ([Compute(-1)], ("unknown-op", 0, "", "")),
    "no such storage": ([Free(5)], ("unknown-storage", 0, "", "")),
    "storage below zero": ([Compute(0), Offload(-1)], ("unknown-storage", 1, "", "")),
    "op missing": ([Compute(0), Compute(1, reuse=A), Free(B)], ("op-not-computed", 3, MEAN, "")),
    "nothing at all": ([], ("op-not-computed", 0, CONV, "")),
    "temporary left": ([Compute(0), Compute(1, reuse=A), Compute(2)], ("end-state", 3, "", B_NAME)),
    "loss freed": ([Compute(0), Compute(1, reuse=A), Compute(2), Free(B), Free(LOSS)], ("end-state", 5, "", LOSS_NAME)),
    "host copy left": ([Compute(0), Compute(1, reuse=A), Compute(2), Free(B), Offload(W), Wait(W)], ("end-state", 6, "", "w")),
    "copy not waited for": ([Compute(0), Compute(1, reuse=A), Compute(2), Free(B), Offload(W)], ("end-state", 5, "", "w")),
    "host copy of a temporary left": (
        [Compute(0), Offload(A), Wait(A), Compute(1, reuse=A), Compute(2), Free(B)], ("end-state", 6, "", A_NAME)),
    "not an instruction": ([Compute(0), "free"], ("not-an-instruction", 1, "", "")),
    "an operand that is no number": ([Compute(0), Free("a")], ("not-an-instruction", 1, "", "")),
    "an operand that is a fraction": ([Compute(0), Free(2.0)], ("not-an-instruction", 1, "", "")),
    "an operand beyond 64 bits": ([Compute(2**63)], ("not-an-instruction", 0, "", "")),
    "a reuse that is no number": ([Compute(0), Free(A), Recompute(0, reuse="a")], ("not-an-instruction", 2, "", "")),
}

TO_D = [Compute(0), Compute(1), Compute(2), Compute(3), Compute(4)]
W_NAME, A_OF, B_OF = "w", "%1 of #0 aten.relu.default", "%2 of #2 aten.bernoulli.default"
REFUSED_ON_STATE = {
    "reader after the write": ([Compute(0), Compute(1), Free(1), Recompute(0)], ("stale-version", 3, "#0 aten.relu.default", W_NAME)),
    "reader before the write": ([Compute(0), Compute(2)], ("stale-version", 1, "#2 aten.bernoulli.default", W_NAME)),
    "writes out of order": ([Compute(0), Compute(6)], ("stale-version", 1, "#6 vramlab.optimizer_step", W_NAME)),
    "randoms out of order": ([Compute(0), Compute(1), Compute(3)], ("random-order", 2, "#3 aten.bernoulli.default", "")),
    "write to an absent storage": ([Compute(0), Free(0), Compute(1)], ("input-not-readable", 2, "#1 aten.add_.Tensor", W_NAME)),
    "write in flight": ([Compute(0), Offload(0), Compute(1)], ("write-in-flight", 2, "#1 aten.add_.Tensor", W_NAME)),
    "mutator again": ([Compute(0), Compute(1), Recompute(1)], ("recompute-mutator", 2, "#1 aten.add_.Tensor", "")),
    "optimizer again": ([*TO_D, Compute(5), Compute(6), Recompute(6)], ("recompute-optimizer", 7, "#6 vramlab.optimizer_step", "")),
}


@pytest.mark.parametrize("name", REFUSED_ON_LINE)
def test_each_rule_refuses(name):
    instructions, expected = REFUSED_ON_LINE[name]
    assert refusal(line(), *instructions) == expected


@pytest.mark.parametrize("name", REFUSED_ON_STATE)
def test_each_rule_of_state_refuses(name):
    instructions, expected = REFUSED_ON_STATE[name]
    assert refusal(state_tape(), *instructions) == expected


def test_throwaway_state_may_be_recomputed_after_later_writes():
    checked(state_tape(), *TO_D, Compute(6), Free(4), Recompute(4), Compute(5), *(Free(s) for s in (1, 2, 3, 4)))


def test_writes_keep_tape_order_and_need_residency():
    tape = TapeBuilder()
    x, w = tape.state("x", 10, Role.INPUT), tape.state("w", 10, Role.BUFFER)
    loss = tape.temporary(4, at_end=True)
    tape.call("aten.copy_.default", [x], [], mutates=[w])
    tape.call("aten.fill_.Scalar", [x], [], mutates=[w])
    tape.call("aten.mean.default", [w], [loss])
    built = tape.build(loss)
    assert refusal(built, Compute(1)) == ("write-order", 0, "#1 aten.fill_.Scalar", "w")
    assert refusal(built, Free(1), Compute(0)) == ("write-not-resident", 1, "#0 aten.copy_.default", "w")
    checked(built, Compute(0), Compute(1), Compute(2))


def test_what_was_overwritten_is_not_brought_back():
    """A gradient that was created and then added to: the first op alone gives another value."""
    tape = TapeBuilder()
    x, grad = tape.state("x", 10, Role.INPUT), tape.state("w.grad", 10, Role.GRADIENT, at_start=False)
    tape.call("aten.relu.default", [x], [grad])
    tape.call("vramlab.accumulate_grad", [x, grad], [], mutates=[grad])
    built = tape.build(grad)
    assert refusal(built, Compute(0), Compute(1), Free(1), Recompute(0)) == (
        "stale-version", 3, "#0 aten.relu.default", "w.grad")
    checked(built, Compute(0), Free(1), Recompute(0), Compute(1))


def test_reuse_of_an_absent_input_is_refused():
    """Only a tape whose takeover is no input of its op can get there."""
    tape = TapeBuilder()
    x, a, b = tape.state("x", 10, Role.INPUT), tape.temporary(10), tape.temporary(10, at_end=True)
    tape.call("aten.relu.default", [x], [a])
    tape.call("aten.relu.default", [x], [b], takeover=(b, a))
    assert refusal(tape.build(b), Compute(0), Free(1), Compute(1, reuse=1))[:2] == ("reuse-not-resident", 2)


def test_a_created_storage_that_is_there_at_the_start_is_refused():
    tape = TapeBuilder()
    x, a = tape.state("x", 10, Role.INPUT), tape.state("a", 10)
    tape.call("aten.relu.default", [x], [a])
    assert refusal(tape.build(a), Compute(0))[0] == "output-not-absent"


def test_another_tape_is_refused():
    with pytest.raises(ScheduleError, match="tape-mismatch"):
        check_schedule(line(), replay_schedule(chain(2)))


def test_the_message_names_everything():
    with pytest.raises(ScheduleError) as caught:
        checked(line(), Compute(0), Offload(A), Free(A))
    assert str(caught.value) == (f"instruction 2, storage {A_NAME}: [free-in-flight] the storage is offloading; "
                                 "free needs it resident or resident_and_host")
    with pytest.raises(ScheduleError) as caught:
        checked(line(), Compute(0), Compute(1), budget=Budget(device_bytes=509))
    assert str(caught.value) == f"instruction 1, op {RELU}: [device-budget] 510 bytes on the device exceed the budget of 509"


def test_every_rule_is_refused_somewhere_above():
    named = {expected[0] for _, expected in [*REFUSED_ON_LINE.values(), *REFUSED_ON_STATE.values()]}
    named |= {"write-order", "write-not-resident", "reuse-not-resident", "device-budget", "host-budget"}
    rules = {rule for pair in check.RULES_OF_TABLE.values() for rule in pair} | {rule for rule, _ in check.RULES.values()}
    assert rules - named == set()


# ---------------------------------------------------------------- variants

def test_the_workspace_of_the_named_variant_counts():
    inner = [checked(line(), Compute(0, variant=name), Compute(1), Free(A), Compute(2), Free(B)).inner_peak_bytes[0]
             for name in (None, "direct", "winograd")]
    assert inner == [317, 310, 340]


def test_a_recompute_counts_its_own_variant():
    c = checked(line(), Compute(0, variant="direct"), Free(A), Recompute(0, variant="winograd"), Compute(1, reuse=A), Compute(2), Free(B))
    assert c.inner_peak_bytes.tolist()[:3] == [310, 310, 340] and c.peak_bytes == 340


def test_the_refusal_of_a_variant_names_those_allowed():
    with pytest.raises(ScheduleError) as caught:
        checked(line(), Compute(0, variant="fft"))
    assert str(caught.value) == f"instruction 0, op {CONV}: [variant-not-allowed] the op has no variant 'fft'; it has direct, winograd"
    with pytest.raises(ScheduleError) as caught:
        checked(line(), Compute(0), Compute(1, variant="direct"))
    assert str(caught.value) == f"instruction 1, op {RELU}: [variant-not-allowed] the op has no variant 'direct'; it has none"


def test_variant_numbers_do_not_depend_on_the_process():
    """Flat arrays travel with a pickled tape: 62 bits of SHA-256("winograd"), as `sha256sum` gives them."""
    assert kernels.variant_number("winograd") == 0xfb4fd1bd938383ba >> 2


# ---------------------------------------------------------------- budgets

def test_the_device_budget_binds_at_the_first_instruction_above_it():
    plain = [Compute(0), Compute(1), Free(A), Compute(2), Free(B)]
    checked(line(), *plain, budget=Budget(device_bytes=510))
    assert refusal(line(), *plain, budget=Budget(device_bytes=509)) == ("device-budget", 1, RELU, "")
    assert refusal(line(), *plain, budget=Budget(device_bytes=316)) == ("device-budget", 0, CONV, "")


def test_the_device_budget_counts_prefetched_bytes():
    assert refusal(line(), *COPIES, budget=Budget(device_bytes=513))[:2] == ("device-budget", 6)


def test_the_host_budget_binds():
    plain = [Compute(0), Offload(A), Wait(A), Compute(1, reuse=A), FreeHost(A), Compute(2), Free(B)]
    checked(line(), *plain, budget=Budget(device_bytes=1000, host_bytes=200))
    assert refusal(line(), *plain, budget=Budget(device_bytes=1000, host_bytes=199))[:2] == ("host-budget", 1)


def test_a_budget_beyond_64_bits_is_no_limit():
    checked(line(), Compute(0), Compute(1), Free(A), Compute(2), Free(B), budget=Budget(device_bytes=2**70, host_bytes=2**63))


@pytest.mark.parametrize("toy", TOYS)
def test_the_peak_is_the_least_budget(toy):
    tape = TOYS[toy]()
    schedule = replay_schedule(tape)
    peak = check_schedule(tape, schedule).peak_bytes
    check_schedule(tape, schedule, Budget(device_bytes=peak))
    with pytest.raises(ScheduleError, match="device-budget"):
        check_schedule(tape, schedule, Budget(device_bytes=peak - 1))


# ---------------------------------------------------------------- the table itself

def test_the_table_is_whole():
    table = transitions()
    assert set(table) == set(kernels.USES)
    assert all(tuple(row) == kernels.RESIDENCIES for row in table.values())
    assert all(set(row.values()) <= {None, *kernels.RESIDENCIES} for row in table.values())
    assert set(check.RULES_OF_TABLE) == {use for use, row in table.items() if None in row.values()}


def test_instructions_stand_in_the_order_of_their_codes():
    names = ["free", "offload", "prefetch", "wait", "free_host"]
    assert list(kernels.USES[kernels.USE_OF_FREE:]) == names
    assert [kernels.USES[code - kernels.FREE + kernels.USE_OF_FREE] for code in (kernels.CODES[kind] for kind in
            (Free, Offload, Prefetch, Wait, FreeHost))] == names


# ---------------------------------------------------------------- a second opinion

def opinion(tape: Tape, instructions: tuple[Instruction, ...]) -> tuple[int | None, list[tuple[int, int, int]]]:
    """The oracle's: index of the refused instruction (None when all is well), and (live, inner peak, host) bytes up to there."""
    machine, held = Machine(tape), []
    for index, instruction in enumerate(instructions):
        try:
            machine.step(instruction)
        except Illegal:
            return index, held
        held.append((machine.device_bytes, machine.inner_peak, machine.host_bytes))
    try:
        machine.finish()
    except Illegal:
        return len(instructions), held
    return None, held


def verdict(tape: Tape, instructions: tuple[Instruction, ...]) -> tuple[int | None, str, CheckedSchedule | None]:
    """The checker's: index and rule of the refusal, or what it found."""
    try:
        return None, "", checked(tape, *instructions)
    except ScheduleError as error:
        return error.index, error.rule, None


def assert_agreement(tape: Tape, instructions: tuple[Instruction, ...]) -> str:
    refused_at, held = opinion(tape, instructions)
    index, rule, found = verdict(tape, instructions)
    assert index == refused_at, (rule, instructions)
    if found is not None:
        assert list(zip(found.live_bytes.tolist(), found.inner_peak_bytes.tolist(), found.host_bytes.tolist())) == held
    return rule


def overwriting() -> Tape:
    """s is read, overwritten, read again; both readers may be recomputed."""
    tape = TapeBuilder()
    s, a, b = tape.state("s", 8, Role.BUFFER), tape.temporary(8), tape.temporary(8, at_end=True)
    tape.call("aten.relu.default", [s], [a])
    tape.call("aten.add_.Tensor", [a], [], mutates=[s])
    tape.call("aten.relu.default", [s], [b], takeover=(b, s))
    return tape.build(b)


def normalising() -> Tape:
    """One op with two outputs, throw-away state and a draw."""
    tape = TapeBuilder()
    s, a, b = tape.state("s", 8, Role.BUFFER), tape.temporary(16), tape.temporary(4, at_end=True)
    tape.call("aten.native_batch_norm.default", [s], [a, b], mutates=[s], throwaway_state=True, is_random=True, workspace_bytes=3)
    tape.call("aten.add_.Tensor", [a], [], mutates=[s])
    return tape.build(b)


def taking_over() -> Tape:
    """a -> b over a; an accumulation into a storage that was created."""
    tape = TapeBuilder()
    x, a, b = tape.state("x", 8, Role.INPUT, at_end=False), tape.temporary(8), tape.temporary(8, at_end=True)
    tape.call("aten.convolution.default", [x], [a], variants=(Variant("fft", 1.0, 3),))
    tape.call("vramlab.accumulate_grad", [a], [b], takeover=(b, a))
    tape.call("vramlab.accumulate_grad", [x, b], [], mutates=[b])
    return tape.build(b)


def every_instruction(tape: Tape) -> list[Instruction]:
    runs = [kind(op.id, reuse, variant) for kind, op in product((Compute, Recompute), tape.ops)
            for reuse in {None, op.takeover and op.takeover[1], 0} for variant in (None, "fft")]
    return runs + [kind(s.id) for kind, s in product((Free, Offload, Prefetch, Wait, FreeHost), tape.storages)]


@pytest.mark.parametrize("make", [overwriting, normalising, taking_over])
def test_whole_state_spaces_agree(make):
    """Every instruction in every state that legal instructions reach, of tapes with three storages."""
    tape = make()
    instructions, waiting, met, steps = every_instruction(tape), deque([((), Machine(tape))]), set(), 0
    while waiting:
        prefix, machine = waiting.popleft()
        if machine.key() in met:
            continue
        met.add(machine.key())
        ended, _, _ = verdict(tape, prefix)
        assert (ended is None) == (opinion(tape, prefix)[0] is None)
        for instruction in instructions:
            index, rule, _ = verdict(tape, (*prefix, instruction))
            is_legal = index is None or index > len(prefix)
            assert machine.allows(instruction) == is_legal, (prefix, instruction, rule)
            steps += 1
            if is_legal:
                after = machine.clone()
                after.step(instruction)
                waiting.append(((*prefix, instruction), after))
    assert len(met) > 100 and steps > 2000


@settings(max_examples=150, deadline=None, derandomize=True)
@given(random_tapes(), st.randoms(use_true_random=False))
def test_random_edits_agree(tape, random):
    instructions = ScheduleWriter(tape, random).write()
    assert verdict(tape, instructions)[:2] == (None, "")
    assert_agreement(tape, instructions)
    for _ in range(4):
        assert_agreement(tape, random_edit(tape, instructions, random))


def test_many_random_edits_agree_and_reach_the_rules():
    """The same from plain seeds: enough to say how much was reached."""
    rules: Counter[str] = Counter()
    for seed in range(1500):
        random = Random(seed)
        tape = random_tape(random, ops=random.randint(2, 8))
        instructions = ScheduleWriter(tape, random).write(random.choice([0.2, 0.5]))
        assert assert_agreement(tape, instructions) == "", seed
        for _ in range(6):
            rules[assert_agreement(tape, random_edit(tape, instructions, random))] += 1
    assert rules.pop("") > 1000, "legal edits, which keep the oracle honest"
    assert set(rules) >= {
        "input-not-readable", "stale-version", "write-in-flight", "output-not-absent", "reuse-in-flight", "free-not-resident",
        "free-in-flight", "offload-not-resident", "offload-in-flight", "prefetch-not-on-host", "prefetch-in-flight", "wait-without-copy",
        "free-host-without-copy", "free-host-in-flight", "end-state", "computed-twice", "recompute-before-compute", "op-not-computed",
        "random-order", "variant-not-allowed", "recompute-mutator", "recompute-optimizer", "nothing-to-recompute"}


@pytest.mark.parametrize("toy", TOYS)
def test_toys_agree(toy):
    tape, random = TOYS[toy](), Random(toy)
    assert assert_agreement(tape, replay_schedule(tape).instructions) == ""
    for _ in range(3):
        instructions = ScheduleWriter(tape, random).write(0.2)
        assert assert_agreement(tape, instructions) == ""
        for _ in range(5):
            assert_agreement(tape, random_edit(tape, instructions, random))


def test_the_oracle_sees_what_a_weaker_checker_would_miss():
    """Negative control of the comparison: without the rule on versions the two differ."""
    tape = overwriting()
    weak = replace(tape)
    weak.__dict__["read_versions"] = tuple(() for _ in tape.ops)
    stale = (Compute(0), Compute(1), Free(1), Recompute(0), Free(1), Compute(2))
    assert verdict(weak, stale)[0] is None
    assert opinion(tape, stale)[0] == 3
    with pytest.raises(AssertionError):
        assert_agreement(weak, stale)


# ---------------------------------------------------------------- numba's cache

@pytest.mark.parametrize("writable", [True, False])
def test_compiling_works_where_no_cache_can_be_written(tmp_path, writable):
    """A copy of the package whose cache folders are plain files, which even root cannot fill."""
    package = tmp_path / "vramlab"
    package.mkdir()
    for source in Path(check.__file__).parent.glob("*.py"):
        (package / source.name).write_bytes(source.read_bytes())
    home = tmp_path / "home"
    home.mkdir() if writable else home.touch()
    (package / "__pycache__").touch()
    script = ("import warnings; warnings.simplefilter('error'); import numpy as np; from vramlab import kernels;"
              "nothing = kernels.flatten_schedule(kernels.Schedule((), ''));"
              "print(kernels.run_clock(nothing, np.zeros(0), 0, True, np.zeros(0), np.zeros(0)))")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "XDG_"))}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                          env=environment | {"HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", "NUMBA_DISABLE_JIT": "0"})
    assert (done.returncode, done.stdout) == (0, "(0.0, 0.0)\n"), done.stderr
    assert bool(list(home.rglob("*.nbi")) if writable else []) == writable


def test_importing_compiles_nothing():
    script = "import sys, vramlab.check, vramlab.simulate, vramlab.liveness; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(check.__file__).parents[1], timeout=60).returncode == 0
