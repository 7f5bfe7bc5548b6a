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
from vramlab.liveness import lower_bound_bytes, replay_schedule
from vramlab.planner import Budget
from vramlab.schedule import Recompute
from vramlab.simulate import simulate
from vramlab.tape import Phase, Tape

LIBRARY = Library([built_in_collection()])
V100 = load_profile("v100-32gb")


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
