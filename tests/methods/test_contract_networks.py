"""The contract on captured networks at the papers' sizes, timed by a roofline of the V100: ResNet-18, VGG-16, DenseNet-121, a transformer.

What a card exempts is not asked for here; a rule that a method breaks on a network and on no toy is flagged in `FLAGGED`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torchvision
from contract import RULES, Inquiry
from torch import nn

from vramlab.capture import capture
from vramlab.collection import Library, built_in_collection
from vramlab.costs import roofline_costs
from vramlab.device import load_profile
from vramlab.errors import Unsupported
from vramlab.prepared import prepare_tape
from vramlab.tape import Tape
from vramlab.variants import with_variants

LIBRARY = Library([built_in_collection()])
V100 = load_profile("v100-32gb")
ASKED = ("plans-compute-what-a-plain-run-computes", "plans-keep-the-budget", "refusals-name-what-can-be-reached",
         "no-overhead-without-a-budget", "peak-falls-with-the-budget", "time-rises-as-the-budget-falls", "json-round-trips",
         "random-ops-are-recomputed-from-a-recorded-state", "schedules-carry-uid-and-tape", "state-stays-where-it-is")
# (method, network) -> rules that it breaks there and only there. Found, not smoothed.
FLAGGED: dict[tuple[str, str], tuple[str, ...]] = {
    ("densenet-shared", "densenet121"): ("no-overhead-without-a-budget",),  # recomputes dense layers whatever the budget, as its paper does
}


def image_step(name: str) -> tuple[nn.Module, Callable, list]:
    return getattr(torchvision.models, name)(), cross_entropy, [torch.zeros(32, 3, 224, 224), torch.zeros(32, dtype=torch.long)]


def transformer_step() -> tuple[nn.Module, Callable, list]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Flatten(), nn.Linear(128 * 256, 10))
    return model, cross_entropy, [torch.zeros(16, 128, 256), torch.zeros(16, dtype=torch.long)]


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


@cache
def tape_for(network: str, needs: tuple[str, ...]) -> Tape:
    """The network's step as a method with these needs is given it."""
    prepared = prepare_tape(tape_of(network), needs, None)
    tape = tape_of(network) if prepared is None else roofline_costs(prepared.tape, V100)
    return with_variants(tape, V100) if "variants" in needs else tape


@cache
def tape_of(network: str) -> Tape:
    model, loss, batch = transformer_step() if network == "transformer" else image_step(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return roofline_costs(capture(model, loss, batch, optimizer=optimizer).tape, V100)


class OnNetwork(Inquiry):
    """An inquiry on a network: the same questions at three budgets."""

    device = V100
    shares = (0.8, 0.6, 0.45)

    @property
    def tape(self) -> Tape:
        return tape_for(self.toy, tuple(self.method.card.needs))


def planners() -> list[str]:
    found = (LIBRARY.method(name) for name in LIBRARY.method_paths)
    return sorted(m.name for m in found if m.card.kind == "planner" and not m.card.required)


@pytest.mark.parametrize("network", ["resnet18", "transformer", pytest.param("vgg16", marks=pytest.mark.slow),
                                     pytest.param("densenet121", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", planners())
def test_contract_on_networks(name: str, network: str):
    method = LIBRARY.method(name)
    inquiry = OnNetwork(method, {}, network)
    try:
        assert inquiry.answers
    except Unsupported as refusal:
        assert name in str(refusal)
        return
    flagged = FLAGGED.get((name, network), ())
    for rule in ASKED:
        if rule not in method.card.exemptions and rule not in flagged:
            RULES[rule](inquiry)
    for rule in flagged:
        with pytest.raises(AssertionError):
            RULES[rule](inquiry)
