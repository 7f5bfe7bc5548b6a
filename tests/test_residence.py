"""What follows from choices, against checker and simulator: random choices on random tapes; and small steps decided by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from contract import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from tapes import TOYS, TapeBuilder, random_tapes

from vramlab.check import check_schedule
from vramlab.device import DeviceProfile
from vramlab.gaps import AFTER, BETWEEN, BRIEF, DROP, KEEP, MOST_AHEAD, SWAP, Choices
from vramlab.liveness import replay_schedule
from vramlab.occupancy import BLOCKED, DEVICE_FULL, FITS, HOST_FULL, NOW, SLOW, STALLED, IMPOSSIBLE, WRITTEN
from vramlab.planner import UNLIMITED, Budget
from vramlab.residence import Residence, begin_try, decode, decode_from, keep, row_of
from vramlab.schedule import Compute, Offload, Recompute
from vramlab.simulate import simulate
from vramlab.tape import Role, Tape, Variant


def device(*, is_full_duplex: bool = True) -> DeviceProfile:
    return DeviceProfile(name="any", memory_bytes=10**6, flops_per_second=1, flops_efficiency=1, memory_bytes_per_second=1,
                         h2d_bytes_per_second=700, d2h_bytes_per_second=900, copy_latency_seconds=0.01, is_full_duplex=is_full_duplex)


def with_some_variants(tape: Tape) -> Tape:
    """Of every other op: one that is faster and needs 30 bytes more, one that is slower and needs none."""
    return tape.with_variants([(Variant("fast", op.seconds / 2, op.workspace_bytes + 30), Variant("lean", 2 * op.seconds, 0))
                               if op.id % 2 else () for op in tape.ops])


def drawn(residence: Residence, random) -> Choices:
    """Any choices at all."""
    choices, step, held = residence.choices(), residence.step, random.choice([0, 0, 0.1, 0.5])
    for g in range(residence.gaps):
        if step.gap_kind[g] != AFTER or random.random() < held:  # most is of no use after its last one, and fills memory
            choices.action[g] = random.choice([KEEP, SWAP, SWAP, *([DROP] * 2 if step.gap_could_drop[g] else [])])
            choices.stays[g], choices.lead[g] = random.random() < 0.5, lead(choices.action[g], random)
    for op in range(step.ops):
        choices.leaner[op] = random.randrange(-(residence.tape.ops[op].variants != ()), 3)
    return choices


def lead(action: int, random) -> int:
    return random.randrange(MOST_AHEAD + 1 if action == DROP else 3)


def agrees(residence: Residence, profile: DeviceProfile, budget: Budget) -> bool:
    """Is what was decoded legal, within the budget, and as fast as the simulator says?"""
    checked = check_schedule(residence.tape, residence.schedule("any"), budget)
    m = simulate(checked, profile).metrics
    return (m.step_seconds, m.stall_seconds) == (residence.work.clock[NOW], residence.work.clock[STALLED])


@settings(max_examples=150, deadline=None)
@given(random_tapes(9), st.randoms(use_true_random=False), st.booleans(), st.sampled_from([1.0, 0.9, 0.7, 0.5]), st.booleans())
def test_whatever_is_chosen_is_legal_and_timed_as_the_simulator_does(tape, random, is_full_duplex, share, with_variants):
    tape, profile = with_some_variants(tape) if with_variants else tape, device(is_full_duplex=is_full_duplex)
    peak = check_schedule(tape, replay_schedule(tape)).peak_bytes
    for budget in (Budget(device_bytes=UNLIMITED), Budget(device_bytes=int(share * peak), host_bytes=random.choice([UNLIMITED, 60]))):
        residence = Residence(tape, profile, budget)
        for _ in range(4):
            choices = drawn(residence, random)
            status, seconds = residence.decode(choices)
            assert status in (FITS, DEVICE_FULL, HOST_FULL, IMPOSSIBLE)
            is_sure = not np.any((choices.action == DROP) & ~residence.step.gap_may_drop)
            assert status == FITS or budget.device_bytes < UNLIMITED or (status == IMPOSSIBLE and not is_sure)
            assert status != FITS or (agrees(residence, profile, budget) and seconds == residence.work.clock[NOW])


@pytest.mark.parametrize("toy", TOYS)
def test_toys_agree_at_every_budget(toy):
    from random import Random

    random, tape, profile, fitted = Random(toy), TOYS[toy](), device(), 0
    peak = check_schedule(tape, replay_schedule(tape)).peak_bytes
    for share in (1.0, 0.9, 0.8, 0.7, 0.6):
        budget = Budget(device_bytes=int(share * peak))
        residence = Residence(tape, profile, budget)
        for _ in range(600):
            if residence.decode(drawn(residence, random))[0] == FITS:
                fitted += 1
                assert agrees(residence, profile, budget)
    assert fitted > 20


def test_what_runs_again_takes_the_variant_of_its_first_run():
    """Another algorithm gives other bits: a leaner one that would fit the second time is not taken."""
    from random import Random

    random, again = Random(0), 0
    for toy, share in product(TOYS, (1.2, 1.0, 0.9, 0.8)):
        tape = with_some_variants(TOYS[toy]())
        budget = Budget(device_bytes=int(share * check_schedule(tape, replay_schedule(tape)).peak_bytes))
        residence = Residence(tape, device(), budget)
        for _ in range(60):
            if residence.decode(drawn(residence, random))[0] != FITS:
                continue
            instructions = residence.schedule("any").instructions
            first = {i.op: i.variant for i in instructions if isinstance(i, Compute)}
            repeated = [i for i in instructions if isinstance(i, Recompute)]
            again += sum(bool(tape.ops[i.op].variants) for i in repeated)
            assert [i.variant for i in repeated] == [first[i.op] for i in repeated]
    assert again > 20


def told(residence: Residence, status: int) -> tuple:
    """All that a search reads of what was decoded."""
    w = residence.work
    written = [column[:w.count[WRITTEN]].tolist() for column in (w.code, w.argument, w.reuse, w.variant)] if status == FITS else []
    again = [(g, s) for g, s in zip(w.log.again_gap.tolist(), w.log.again.tolist()) if g >= 0] if status == FITS else []
    stood = [w.where.tolist(), w.gap.tolist(), w.wanted.tolist()] if status == DEVICE_FULL else []
    return status, w.clock[NOW] if status == FITS else None, written, again, stood, w.stall.tolist() if status == FITS else []


def change(residence: Residence, choices: Choices, random) -> int:
    """Something else is chosen at random; the first saved row from which on it matters."""
    step = residence.step
    if random.random() < 0.2:
        op = random.randrange(step.ops)
        choices.leaner[op] = random.randrange(-1, 3)
        return row_of(step, op)
    g = random.randrange(residence.gaps)
    before, choices.lead[g] = int(choices.lead[g]), lead(choices.action[g], random)
    if random.random() < 0.3:
        return row_of(step, step.gap_end[g] - max(before, choices.lead[g])) if choices.action[g] == DROP else step.rows - 1
    choices.action[g] = random.choice([KEEP, SWAP, *([DROP] if step.gap_could_drop[g] else [])])
    choices.stays[g] = random.random() < 0.5
    return row_of(step, step.gap_from[g])


@pytest.mark.parametrize("spacing", [1, 2, 5, 32])
def test_decoded_from_a_saved_row_is_decoded_from_the_start(spacing, monkeypatch):
    """Tries as a search makes them: changes on changes, some tries kept, most taken back."""
    from random import Random

    monkeypatch.setattr("vramlab.gaps.SPACING", spacing)
    random, seen = Random(spacing), {FITS: 0, DEVICE_FULL: 0}
    for toy, share in product(TOYS, (1.0, 0.8)):
        tape = with_some_variants(TOYS[toy]())
        budget = Budget(device_bytes=int(share * check_schedule(tape, replay_schedule(tape)).peak_bytes))
        tried, anew = Residence(tape, device(), budget), Residence(tape, device(), budget)
        kept = next((c for c in (drawn(tried, random) for _ in range(300)) if tried.decode(c)[0] == FITS), None)
        if kept is None:
            continue
        keep(tried.step, tried.work)
        for _ in range(60):
            choices, is_first = Choices(*(column.copy() for column in kept)), True
            for _ in range(random.randrange(1, 4)):
                row = change(tried, choices, random)
                if is_first:
                    begin_try(tried.step, tried.work, row)
                else:  # a repair changes what matters before the op that did not fit
                    row = min(row, row_of(tried.step, min(int(tried.work.count[BLOCKED]), tried.step.ops - 1)))
                status = decode_from(tried.step, choices, tried.costs, tried.work, row, np.inf)
                same = decode(anew.step, choices, anew.costs, anew.work, 0, np.inf)
                assert told(tried, status) == told(anew, same)
                seen[status] = seen.get(status, 0) + 1
                is_first = False
                if status != DEVICE_FULL or random.random() < 0.3:
                    break
            if status == FITS and random.random() < 0.4:
                kept = choices
                keep(tried.step, tried.work)
    assert min(seen[FITS], seen[DEVICE_FULL]) > 100


def test_a_try_is_given_up_only_where_it_is_slower_than_the_limit():
    from random import Random

    random, tape, given_up = Random(1), TOYS["skip"](), 0
    budget = Budget(device_bytes=int(0.9 * check_schedule(tape, replay_schedule(tape)).peak_bytes))
    residence = Residence(tape, device(), budget)
    for _ in range(2000):
        choices = drawn(residence, random)
        status, seconds = residence.decode(choices)
        if status == FITS:
            assert decode(residence.step, choices, residence.costs, residence.work, 0, seconds) == FITS
            given_up += decode(residence.step, choices, residence.costs, residence.work, 0, 0.9 * seconds) == SLOW
    assert given_up > 20


def test_a_wrong_clock_is_caught():
    """The negative control: copies that the passes take to be shorter than they are."""
    tape, profile = TOYS["long_chain"](), replace(device(), h2d_bytes_per_second=100)
    budget = Budget(device_bytes=int(0.6 * check_schedule(tape, replay_schedule(tape)).peak_bytes))
    residence = Residence(tape, profile, budget)
    choices = residence.choices()
    choices.action[:] = SWAP
    assert residence.decode(choices)[0] == FITS and agrees(residence, profile, budget)
    residence.costs.h2d_seconds[:] *= 0.5
    assert residence.decode(choices)[0] == FITS and not agrees(residence, profile, budget)


def test_keeping_everything_is_eagers_step():
    """No copy, nothing again; the fastest variant of each op, as memory is no matter."""
    tape, profile, budget = with_some_variants(TOYS["skip"]()), device(), Budget(device_bytes=UNLIMITED)
    residence = Residence(tape, profile, budget)
    status, seconds = residence.decode(residence.choices())
    schedule = residence.schedule("any")
    assert (status, schedule.count(Recompute), schedule.count(Offload)) == (FITS, 0, 0)
    assert seconds == pytest.approx(sum(op.seconds / (2 if op.id % 2 else 1) for op in tape.ops))


def test_choices_of_a_schedule_fit_and_lose_nothing():
    """Decoded, read back and decoded again: what was to leave and never did is kept, the rest is as it was, and so is the time."""
    tape, profile = TOYS["long_chain"](), device()
    budget = Budget(device_bytes=int(0.6 * check_schedule(tape, replay_schedule(tape)).peak_bytes))
    residence, random, seen = Residence(tape, profile, budget), np.random.default_rng(0), 0
    for _ in range(200):
        choices = residence.choices()
        draws = random.random(residence.gaps)
        chosen = np.where(draws < 0.9, SWAP, np.where(residence.step.gap_may_drop, DROP, SWAP))
        choices.action[:] = np.where(residence.step.gap_kind == AFTER, DROP, chosen)
        status, seconds = residence.decode(choices)
        if status == FITS:
            again = residence.choices_of(residence.schedule("any"))
            assert set(again.action[again.action != choices.action]) <= {KEEP}
            status, after = residence.decode(again)
            assert status == FITS and after <= seconds * (1 + 1e-9)
            seen += 1
    assert seen > 20


# --- what each kind of gap is for, on steps of a few ops: x has one byte, a byte takes a second each way ------------------------
def by_hand() -> tuple[TapeBuilder, int]:
    tape = TapeBuilder()
    return tape, tape.state("x", 1, Role.INPUT)


def gap_of(residence: Residence, storage: int, kind: int) -> int:
    step = residence.step
    found = np.flatnonzero((step.gap_storage == storage) & (step.gap_kind == kind))
    assert len(found) == 1
    return int(found[0])


def decided(tape: Tape, budget: int, *choices: tuple[int, int, dict[str, int]]) -> tuple[int, float]:
    """What came of (storage, kind of its gap, what is chosen in it); everything else is kept."""
    profile, memory = replace(DEVICE, h2d_bytes_per_second=1.0, d2h_bytes_per_second=1.0), Budget(device_bytes=budget)
    residence = Residence(tape, profile, memory)
    chosen = residence.choices()
    for storage, kind, values in choices:
        for column, value in values.items():
            getattr(chosen, column)[gap_of(residence, storage, kind)] = value
    status, seconds = residence.decode(chosen)
    assert status != FITS or agrees(residence, profile, memory)
    if status == FITS:
        again, after = residence.decode(residence.choices_of(residence.schedule("any")))
        assert again == FITS and (after <= seconds or chosen.lead.any()), "read back"
    return status, seconds


def test_what_is_computed_again_ahead_of_its_use_hides_behind_a_copy():
    """Both a and b leave for op 2. b is out from 2 to 6 s and back from 10 to 14, which op 3 waits for: a is there again at 11, or 16."""
    tape, x = by_hand()
    a, b, c, d, e = (tape.temporary(nbytes) for nbytes in (3, 4, 6, 1, 1))
    for inputs, output, seconds, inside in (([x], a, 1, 0), ([x], b, 1, 0), ([x], c, 4, 6), ([b, c], d, 1, 0), ([a, d], e, 1, 0)):
        tape.call("aten.relu.default", inputs, [output], seconds=float(seconds), workspace_bytes=inside)
    step = tape.build(e)
    assert decided(step, 15, (1, BETWEEN, {"action": DROP}), (2, BETWEEN, {"action": SWAP})) == (FITS, 17.0)
    assert decided(step, 15, (1, BETWEEN, {"action": DROP, "lead": 1}), (2, BETWEEN, {"action": SWAP})) == (FITS, 16.0)
    assert decided(step, 14, (1, BETWEEN, {"action": DROP, "lead": 1}), (2, BETWEEN, {"action": SWAP}))[0] == DEVICE_FULL


def test_what_stays_after_its_last_use_is_read_by_what_runs_again():
    """b is dropped over op 2 and computed again from a, which takes one byte and 4 s, and is of no other use."""
    tape, x = by_hand()
    a, b, c, d = (tape.temporary(nbytes) for nbytes in (1, 4, 6, 1))
    for inputs, output, seconds, inside in (([x], a, 4, 0), ([a], b, 1, 0), ([x], c, 2, 3), ([b, c], d, 1, 0)):
        tape.call("aten.relu.default", inputs, [output], seconds=float(seconds), workspace_bytes=inside)
    step, dropped = tape.build(d), (2, BETWEEN, {"action": DROP})
    assert decided(step, 13)[0] == DEVICE_FULL
    assert decided(step, 13, dropped) == (FITS, 4 + 1 + 2 + (4 + 1) + 1)
    assert decided(step, 13, dropped, (1, AFTER, {"action": KEEP, "stays": False})) == (FITS, 4 + 1 + 2 + 1 + 1)
    assert decided(step, 12, dropped, (1, AFTER, {"action": KEEP, "stays": False}))[0] == FITS, "x, a, b and c have 12; then a goes"
    assert decided(step, 11, dropped, (1, AFTER, {"action": KEEP, "stays": False}))[0] == DEVICE_FULL


def test_a_neighbours_map_leaves_while_something_runs_again():
    """c, just made, is out from 2 to 8 s; a is made again by 9, with 3 bytes inside; c is back at 15."""
    tape, x = by_hand()
    a, c, d = (tape.temporary(nbytes) for nbytes in (4, 6, 1))
    for inputs, output, inside in (([x], a, 3), ([x], c, 4), ([a, c], d, 0)):
        tape.call("aten.relu.default", inputs, [output], workspace_bytes=inside)
    step, dropped = tape.build(d), (1, BETWEEN, {"action": DROP})
    assert decided(step, 13, dropped)[0] == DEVICE_FULL
    assert decided(step, 13, dropped, (2, BRIEF, {"action": SWAP})) == (FITS, 16.0)


def test_what_was_made_from_state_that_is_gone_is_computed_again_only_from_what_is_there():
    """Op 2 overwrites what a was computed from; b may be computed again from a, and a may not."""
    tape, x = by_hand()
    w = tape.state("w", 1)
    a, b, c, d = (tape.temporary(2) for _ in range(4))
    tape.call("aten.relu.default", [w], [a])
    tape.call("aten.relu.default", [a], [b])
    tape.call("aten.add_.Tensor", [w, x], mutates=[w])
    tape.call("aten.relu.default", [x], [c])
    tape.call("aten.add.Tensor", [b, c], [d])
    step, dropped = tape.build(d), (3, BETWEEN, {"action": DROP})
    residence = Residence(step, device(), Budget(device_bytes=UNLIMITED))
    gap = gap_of(residence, 3, BETWEEN)
    assert not residence.step.gap_may_drop[gap] and residence.step.gap_could_drop[gap]
    assert decided(step, UNLIMITED, dropped)[0] == IMPOSSIBLE
    assert decided(step, UNLIMITED, dropped, (2, AFTER, {"action": KEEP, "stays": False})) == (FITS, 6.0)
