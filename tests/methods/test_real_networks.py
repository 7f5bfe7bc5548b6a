"""Planning on captured networks, timed by a roofline of the V100: how low, how fast, how long it takes to plan."""

from __future__ import annotations

import time
from functools import cache

import pytest
import torch
import torchvision

from vramlab.capture import capture
from vramlab.check import CheckedSchedule, check_schedule
from vramlab.collection import Library, built_in_collection
from vramlab.costs import roofline_costs
from vramlab.device import load_profile
from vramlab.errors import PlanInfeasible
from vramlab.in_place import with_inplace_gradients
from vramlab.liveness import lower_bound_bytes, replay_schedule
from vramlab.planner import Budget
from vramlab.schedule import Offload, Recompute
from vramlab.simulate import simulate
from vramlab.tape import Phase, Tape
from vramlab.variants import with_variants

LIBRARY = Library([built_in_collection()])
V100, TITAN_X = load_profile("v100-32gb"), load_profile("titan-x-maxwell")


@cache
def tape_of(name: str) -> Tape:
    """One step at batch 32 and 224 pixels, momentum SGD."""
    model = getattr(torchvision.models, name)()
    batch = [torch.zeros(32, 3, 224, 224), torch.zeros(32, dtype=torch.long)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return roofline_costs(capture(model, lambda m, x, y: torch.nn.functional.cross_entropy(m(x), y), batch, optimizer=optimizer).tape, V100)


@cache
def plain(name: str) -> CheckedSchedule:
    return check_schedule(tape_of(name), replay_schedule(tape_of(name)))


def overhead(name: str, method: str, share: float, most_seconds: float, **options) -> float:
    """Step time over that of a plain run, after the budget and the planning time were checked."""
    tape, budget = tape_of(name), Budget(device_bytes=int(share * plain(name).peak_bytes))
    began = time.perf_counter()
    schedule = LIBRARY.method(method).build(**options).plan(tape, V100, budget)
    assert time.perf_counter() - began < most_seconds
    checked = check_schedule(tape, schedule, budget)
    return simulate(checked, V100).metrics.step_seconds / simulate(plain(name), V100).metrics.step_seconds


@pytest.mark.parametrize("share, most", [(0.8, 1.1), (0.6, 1.2), (0.5, 1.3), (0.4, 1.5)])
def test_delta_on_resnet50(share, most):
    assert 1.0 <= overhead("resnet50", "delta", share, 5) <= most


@pytest.mark.parametrize("action", ["swap-only", "recompute-only"])
def test_delta_takes_the_better_of_both_worlds_on_resnet50(action):
    assert overhead("resnet50", "delta", 0.4, 5) < overhead("resnet50", "delta", 0.4, 5, action=action)


def test_delta_comes_within_a_hundredth_of_the_lower_bound_on_resnet50():
    share = 1.01 * lower_bound_bytes(tape_of("resnet50")) / plain("resnet50").peak_bytes
    assert overhead("resnet50", "delta", share, 5) > 1


@pytest.mark.parametrize("share", [0.8, 0.5])
def test_checkpoint_on_resnet50(share):
    assert overhead("resnet50", "checkpoint", share, 5) < 1.35


def test_sqrt_segments_cost_less_than_one_forward_on_resnet50():
    tape = tape_of("resnet50")
    schedule = LIBRARY.method("checkpoint").build().plan(tape, V100, Budget(device_bytes=2**62))
    checked = check_schedule(tape, schedule)
    forward = sum(op.seconds for op in tape.ops if op.phase is Phase.FORWARD)
    assert 0 < simulate(checked, V100).metrics.recompute_seconds < forward
    assert checked.peak_bytes < 0.6 * plain("resnet50").peak_bytes
    again = [i.op for i in schedule.instructions if isinstance(i, Recompute)]
    assert len(again) == len(set(again)), "no op runs a third time"


@pytest.mark.parametrize("share, most", [(0.8, 1.1), (0.5, 2.5), (0.36, 3.0)])
def test_superneurons_on_resnet50(share, most):
    """Cheap while the cache holds the convolutions' maps; then bound by the link."""
    assert 1.0 < overhead("resnet50", "superneurons", share, 5) < most


def test_superneurons_on_resnet50_counts_the_extra_forwards():
    """Each relu, both poolings, and each BatchNorm that a relu reads: of the three in a block not the last, nor those that downsample."""
    planner = LIBRARY.method("superneurons").build(recomputation="speed-centric")
    assert planner.plan(tape_of("resnet50"), V100, Budget(device_bytes=2**62)).count(Recompute) == 49 + 2 + (53 - 16 - 4)


@pytest.mark.slow
@pytest.mark.parametrize("method, share", [("delta", 0.4), ("delta", 0.15), ("checkpoint", 0.4)])
def test_planning_densenet121(method, share):
    assert overhead("densenet121", method, share, 15) < 3


@cache
def vgg16() -> Tape:
    """With the modelled convolution algorithms of a Titan X (Maxwell), vDNN's board."""
    return with_variants(roofline_costs(tape_of("vgg16"), TITAN_X), TITAN_X)


def vdnn(budget: int = 2**62, **options) -> CheckedSchedule:
    schedule = LIBRARY.method("vdnn").build(**options).plan(vgg16(), TITAN_X, Budget(device_bytes=budget))
    return check_schedule(vgg16(), schedule, Budget(device_bytes=budget))


def test_vdnn_s_static_policies_on_vgg16():
    """On the paper's board: conv hides most of its copies behind kernels, all saves more and stalls, (m) is leaner and slower than (p)."""
    none, conv, everything, lean = (vdnn(policy=p, algorithms=a) for p, a in [("none", "p"), ("conv", "p"), ("all", "p"), ("all", "m")])
    held = [simulate(c, TITAN_X).metrics.average_bytes for c in (none, conv, everything, lean)]
    seconds = [simulate(c, TITAN_X).metrics.step_seconds for c in (none, conv, everything, lean)]
    assert held == sorted(held, reverse=True) and seconds == sorted(seconds)
    assert seconds[1] < 1.1 * seconds[0] and lean.schedule.count(Offload) > conv.schedule.count(Offload) == 12


def test_vdnn_without_synchronization_is_no_slower_on_vgg16():
    one, other = (simulate(vdnn(policy="all", is_async=a), TITAN_X).metrics for a in (False, True))
    assert other.step_seconds < one.step_seconds and other.average_bytes > one.average_bytes


def test_gradients_in_place_leave_the_peak_to_the_pooling_on_vgg16():
    """By hand: features.3's ReLU backward holds three maps of its size and the one that is coming; features.4's pooling two, a pooled
    gradient, int64 indices (two pooled maps) and the one that is coming: a map is four pooled ones, so the peak falls by one of those."""
    lean = LIBRARY.method("vdnn").build(policy="all", algorithms="m")
    plain, over = (check_schedule(t, lean.plan(t, TITAN_X, Budget(device_bytes=2**62))) for t in (vgg16(), with_inplace_gradients(vgg16())))
    names = [c.tape.op_name(c.schedule.instructions[c.peak_instruction].op) for c in (plain, over)]
    assert "threshold_backward" in names[0] and "max_pool2d_with_indices_backward" in names[1]
    assert plain.peak_bytes - over.peak_bytes == 32 * 64 * 112 * 112 * 4


def test_vdnn_dyn_keeps_every_budget_on_vgg16():
    top, least = vdnn(policy="none").peak_bytes, vdnn(policy="all", algorithms="m").peak_bytes
    for budget in (top, top - 1, (top + least) // 2, least):
        assert vdnn(budget).peak_bytes <= budget
    with pytest.raises(PlanInfeasible) as refusal:
        vdnn(least - 1)
    assert refusal.value.smallest_bytes == least


@pytest.mark.parametrize("share, most", [(0.8, 1.1), (0.6, 1.15), (0.4, 1.25)])
def test_dtr_on_resnet50(share, most):
    assert 1.0 <= overhead("resnet50", "dtr", share, 5) <= most


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.4, 0.25])
def test_dtr_on_densenet121(share):
    assert overhead("densenet121", "dtr", share, 15) < 2
