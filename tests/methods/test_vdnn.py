"""vDNN: the prefetch search against its published semantics, dyn's order against brute force, timelines by hand, real networks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from contract import DEVICE, plain_peak
from tapes import MAP, StepBuilder, chain, diamond, inplace

from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.device import DeviceProfile
from vramlab.errors import PlanInfeasible
from vramlab.planner import UNLIMITED, Budget
from vramlab.schedule import Compute, Free, FreeHost, Offload, Prefetch, Wait
from vramlab.simulate import simulate
from vramlab.tape import Tape, Variant

METHOD = Library([built_in_collection()]).method("vdnn")
CODE = METHOD.load()


def planned(tape: Tape, device_bytes: int = UNLIMITED, device: DeviceProfile = DEVICE, **options) -> CheckedSchedule:
    budget = Budget(device_bytes=device_bytes)
    return check_schedule(tape, METHOD.build(**options).plan(tape, device, budget), budget)


def said(checked: CheckedSchedule, *kinds: type) -> list[str]:
    """`compute 3`, `offload 2`, ... of these kinds, in order."""
    return [f"{type(i).__name__.lower()} {i.op if isinstance(i, Compute) else i.storage}" for i in checked.schedule.instructions
            if isinstance(i, kinds)]


# ---------------------------------------------------------------- A1: the prefetch search

def find(current: int, kinds: str, offloaded: str, prefetched: str = "") -> tuple[int | None, str]:
    """Kinds as letters (Convolution, Activation, Pooling), flags as digits of the layers; the answer and what is prefetched after it."""
    from_letter = {"C": "convolution", "A": "activation", "P": "pooling", "L": "linear"}
    done = [str(i) in prefetched for i in range(len(kinds))]
    found = find_prefetch_layer(current, [from_letter[k] for k in kinds], [str(i) in offloaded for i in range(len(kinds))], done)
    return found, "".join(str(i) for i, d in enumerate(done) if d)


def find_prefetch_layer(*arguments):
    module = __import__(type(METHOD.build()).__module__.rsplit(".", 1)[0] + ".prefetch", fromlist=["find_prefetch_layer"])
    return module.find_prefetch_layer(*arguments)


def test_the_edge_of_the_window_is_itself_returned_when_it_waits():
    assert find(3, "CAPC", "02") == (2, "2")
    assert find(3, "CAPC", "02", "2") == (0, "02"), "the convolution at the edge waits, and is the answer"
    assert find(3, "CAPC", "02", "02") == (None, "02"), "it was prefetched: the search ends there"


def test_a_convolution_that_does_not_wait_ends_the_search():
    assert find(3, "CAC", "0") == (None, "")
    assert find(2, "CAC", "0") == (0, "0")
    assert find(4, "PCAPC", "0") == (None, ""), "what is behind the convolution stays out of the window"


def test_at_most_one_layer_a_search_nearest_first():
    kinds, offloaded, done, found = "CAPCAPC", "02356", "", []
    for current in reversed(range(7)):
        answer, done = find(current, kinds, offloaded, done)
        found.append(answer)
    assert found == [5, 3, None, 2, 0, None, None], "layer 4 finds the convolution 3 on its way, and stops"


def test_the_search_agrees_with_its_rule_on_every_small_chain():
    """The rule as a sentence: of the layers before `current`, back to and including the nearest convolution that does not wait, the
    nearest that waits."""
    for kinds in product("CAP", repeat=4):
        for flags in product([False, True], repeat=4):
            waiting = "".join(str(i) for i in range(4) if flags[i])
            for current in range(5):
                ends = [i for i in range(current) if kinds[i] == "C" and not flags[i]]
                window = range(max(ends, default=-1) + 1, current)
                expected = max((i for i in window if flags[i]), default=None)
                assert find(current, "".join(kinds), waiting)[0] == expected


# ---------------------------------------------------------------- A2: dyn

def network() -> Tape:
    """Convolution and pooling, three times. A convolution has a lean variant (3 s, nothing inside), a fast one (0.5 s, 8000 bytes) and one
    between (0.75 s, 700 bytes)."""
    step = StepBuilder()
    x = step.input
    for _ in range(3):
        x = step.max_pool(step.convolution(x))
    tape = step.finish(step.convolution(x))
    found = [[Variant("lean", 3.0, 0), Variant("middle", 0.75, 700), Variant("fast", 0.5, 8000)] if "convolution" in op.target else []
             for op in tape.ops]
    return tape.with_costs([op.seconds for op in tape.ops], [50 if v else 0 for v in found]).with_variants(found)


def trial_by_hand(tape: Tape, policy: str, algorithms: str, budget: int) -> CheckedSchedule:
    """What dyn tries: static policies by name; greedy as (p) with, op by op, the largest workspace that fits there."""
    if algorithms != "greedy":
        return planned(tape, policy=policy, algorithms=algorithms)
    checked = planned(tape, policy=policy, algorithms="p")
    instructions = list(checked.schedule.instructions)
    for k, i in enumerate(instructions):
        op = tape.ops[i.op] if isinstance(i, Compute) else None
        if op is None or not op.variants:
            continue
        room = budget - (int(checked.inner_peak_bytes[k]) - op.variant(i.variant).workspace_bytes)
        able = [v for v in (op.variant(None), *op.variants) if v.workspace_bytes <= room] or [op.variant("lean")]
        best = min(able, key=lambda v: (v.seconds, v.workspace_bytes))
        instructions[k] = replace(i, variant=best.name or None)
    return check_schedule(tape, replace(checked.schedule, instructions=tuple(instructions)))


ORDER = [("none", "p"), ("conv", "p"), ("all", "p"), ("conv", "greedy"), ("all", "greedy"), ("all", "m")]


def test_dyn_takes_the_first_of_the_papers_trials_that_fits():
    tape = network()
    assert [(t.policy, t.algorithms) for t in METHOD.build().trials()] == ORDER
    peaks = {trial: trial_by_hand(tape, *trial, 0).peak_bytes for trial in ORDER}
    chosen = set()
    for budget in sorted({b for peak in peaks.values() for b in (peak, peak - 1, peak + 700)}, reverse=True):
        fitting = [(trial, by_hand) for trial in ORDER if (by_hand := trial_by_hand(tape, *trial, budget)).peak_bytes <= budget]
        if not fitting:
            with pytest.raises(PlanInfeasible) as refusal:
                planned(tape, budget)
            assert refusal.value.smallest_bytes == min(peaks.values())
            continue
        trial, by_hand = fitting[0]
        assert planned(tape, budget).schedule == by_hand.schedule, (budget, trial)
        chosen.add(trial)
    assert chosen >= set(ORDER[:5]), "the last, all(m), has no lower peak than all with its algorithms stepped down"


def test_peaks_fall_along_the_trials():
    tape = network()
    peaks = [planned(tape, policy=policy, algorithms="p").peak_bytes for policy in ("none", "conv", "all")]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3
    assert planned(tape, policy="all", algorithms="m").peak_bytes < peaks[-1]


def test_m_takes_the_least_workspace_and_p_the_least_time():
    tape = network()
    for algorithms, name in (("m", "lean"), ("p", "fast")):
        runs = [i for i in planned(tape, policy="all", algorithms=algorithms).schedule.instructions if isinstance(i, Compute)]
        assert {i.variant for i in runs if tape.ops[i.op].variants} == {name}
        assert {i.variant for i in runs if not tape.ops[i.op].variants} == {None}


def test_winograd_waits_to_be_asked_for():
    tape = chain(2)
    two = [Variant("winograd", 0.1, 0), Variant("fft", 0.5, 10)]
    tape = tape.with_variants([two if "convolution" in op.target else [] for op in tape.ops])
    names = [{i.variant for i in planned(tape, policy="none", winograd=asked).schedule.instructions if isinstance(i, Compute)}
             for asked in (False, True)]
    assert names == [{None, "fft"}, {None, "winograd"}]  # what has no variants names none


# ---------------------------------------------------------------- one step by hand
# chain(3): ops 0-2 convolve x -> a -> b -> c, 3 the mean, 4 and 5 its gradient, 6 the backward of the third convolution (reads b),
# 7 its accumulation, 8 that of the second (reads a), 9, 10 that of the first (reads x), 11. A copy of a map takes 1.25 s each way.

def maps(tape: Tape) -> list[int]:
    return [tape.creates[op][0] for op in range(3)]


def test_a_chain_by_hand():
    tape = chain(3)
    a, b, _ = maps(tape)
    checked = planned(tape, policy="conv")
    assert said(checked, Compute, Offload, Prefetch, Wait, FreeHost) == [
        "compute 0", f"offload {a}", "compute 1", f"wait {a}", f"offload {b}", "compute 2", f"wait {b}", "compute 3",
        f"prefetch {b}", "compute 4", "compute 5", f"wait {b}", f"freehost {b}",  # the mean's backward finds the third convolution
        f"prefetch {a}", "compute 6", "compute 7", f"wait {a}", f"freehost {a}",  # whose backward finds the second
        "compute 8", "compute 9", "compute 10", "compute 11",  # whose backward finds the first, which waits for nothing
    ]


def test_the_streams_meet_at_the_end_of_each_layer():
    """Forward: 1 s of kernel, 1.25 s of copy, twice: 2 x 0.25 s stall. Backward: 2 s kernels hide both copies, but b is on the way while
    the mean's gradient is made, 2 x 2 s."""
    m = simulate(planned(chain(3), policy="conv"), DEVICE).metrics
    assert (m.offloads, m.prefetches, m.stall_seconds) == (2, 2, 0.5)
    assert m.step_seconds == 3 + 1 + 4 + 6 + 0.75 + 0.5


def test_without_synchronization_nothing_stalls_here():
    """a leaves from 1 to 2.25 s and b from 2.25 to 3.5 s, beside the second and third convolution and the mean."""
    m = simulate(planned(chain(3), policy="conv", is_async=True), DEVICE).metrics
    assert (m.offloads, m.stall_seconds) == (2, 0.0)


def test_without_synchronization_a_tight_budget_waits():
    """Room for the plan with synchronization is room for the one without, which then waits for what is leaving."""
    tape = chain(6)
    slow = replace(DEVICE, d2h_bytes_per_second=200, h2d_bytes_per_second=200)  # five seconds a map
    least = planned(tape, device=slow, policy="conv").peak_bytes
    loose = planned(tape, device=slow, policy="conv", is_async=True)
    tight = planned(tape, least, device=slow, policy="conv", is_async=True)
    assert tight.peak_bytes <= least < loose.peak_bytes
    seconds = [simulate(c, slow).metrics.step_seconds for c in (loose, tight, planned(tape, device=slow, policy="conv"))]
    assert seconds[0] <= seconds[1] < seconds[2]


def test_a_map_with_two_readers_leaves_with_the_last():
    tape = diamond()
    shared = tape.creates[0][0]
    assert len([op for op in tape.readers[shared] if op < 4]) == 2
    order = said(planned(tape, policy="all"), Compute, Offload, Free)
    at = order.index(f"offload {shared}")
    assert order[at - 1:at + 3] == ["compute 1", f"offload {shared}", "compute 2", f"free {shared}"]


def test_in_place_activations_move_nothing_and_their_map_moves_for_the_next_convolution():
    tape = inplace()
    moved = {i.storage for i in planned(tape, policy="all").schedule.instructions if isinstance(i, Offload)}
    assert moved == {tape.creates[op.id][0] for op in tape.ops if op.target == "aten.relu.default"}, "a mean over a map pools, too"


def test_the_classifier_keeps_its_maps():
    """Nothing behind the last convolution or pooling moves."""
    step = StepBuilder()
    x = step.matmul_with_itself(step.matmul_with_itself(step.convolution(step.convolution(step.input))))
    tape = step.finish(x)
    moved = {i.storage for i in planned(tape, policy="all").schedule.instructions if isinstance(i, Offload)}
    assert moved == {tape.creates[0][0]}


def test_a_network_without_convolutions_moves_nothing():
    step = StepBuilder()
    tape = step.finish(step.matmul_with_itself(step.dropout(step.input)))
    assert planned(tape, policy="all").schedule.count(Offload) == 0
    with pytest.raises(PlanInfeasible):
        planned(tape, plain_peak(tape) - 1)


def test_a_full_host_is_refused_without_a_size():
    tape = chain(3)
    with pytest.raises(PlanInfeasible) as refusal:
        METHOD.build(policy="all").plan(tape, DEVICE, Budget(device_bytes=UNLIMITED, host_bytes=2 * MAP - 1))
    assert refusal.value.smallest_bytes is None
    METHOD.build(policy="all").plan(tape, DEVICE, Budget(device_bytes=UNLIMITED, host_bytes=2 * MAP))


def test_dyn_moves_nothing_to_a_host_without_room():
    tape = network()
    plan = METHOD.build().plan(tape, DEVICE, Budget(device_bytes=planned(tape, policy="none").peak_bytes, host_bytes=0))
    assert plan.count(Offload) == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_every_budget_is_kept_or_refused(is_async):
    tape = network()
    top = planned(tape, policy="none").peak_bytes
    outcomes = set()
    for budget in range(top, 1000, -150):
        try:
            assert planned(tape, budget, is_async=is_async).peak_bytes <= budget
            outcomes.add("ok")
        except PlanInfeasible as refusal:
            assert refusal.smallest_bytes > budget
            outcomes.add("refused")
    assert outcomes == {"ok", "refused"}
