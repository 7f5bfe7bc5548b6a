"""A family foretells what a capture finds; where a step is not affine in its batch it says where."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from steps import cross_entropy
from tapes import chain
from torch import nn
from torchvision import models

from vramlab.capture import capture
from vramlab.family import NotAffine, TapeFamily
from vramlab.flops import with_flops
from vramlab.tape import Tape


def images(size: int):
    return lambda n: (torch.zeros(n, 3, size, size), torch.zeros(n, dtype=torch.long))


class Transformer(nn.Module):
    """Attention, LayerNorm, dropout and an embedding over eight tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.Sequential(*[nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(32, 50)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens))).flatten(0, 1)


def tokens(n: int):
    return torch.zeros(n, 8, dtype=torch.long), torch.zeros(8 * n, dtype=torch.long)


NETWORKS = {
    "resnet18": (lambda: models.resnet18(weights=None), images(64)),
    "densenet121": (lambda: models.densenet121(weights=None), images(64)),
    "transformer": (Transformer, tokens),
}


def captured(model: nn.Module, batch, loss_fn=cross_entropy) -> Tape:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return with_flops(capture(model, loss_fn, batch, optimizer=optimizer).tape)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_family_equals_captures(name: str):
    make, batch = NETWORKS[name]
    model = make()
    family = TapeFamily.of(captured(model, batch(2)), captured(model, batch(3)))
    for size in (5, 16, 37):
        true = captured(model, batch(size))
        family.prove(true)
        assert family.at(size) == true and family.at(size).digest == true.digest
        assert family.at(size).creates == true.creates and family.at(size).read_versions == true.read_versions


def test_op_times_are_left_out():
    tape = captured(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), images(2)(2))
    timed = tape.with_costs([1.0] * len(tape.ops))
    family = TapeFamily.of(timed, captured(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), images(2)(3)))
    assert family.at(2) == tape


class Chunked(nn.Module):
    """Runs one sample after the other: more samples, more ops."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 4)

    def forward(self, x):
        return torch.cat([self.linear(part) for part in x.flatten(1).split(1)])


def similarity(model: nn.Module, x: torch.Tensor, _y: torch.Tensor) -> torch.Tensor:
    """Each sample against each: quadratic in the batch."""
    out = model(x)
    return (out @ out.t()).square().mean()


class Switched(nn.Module):
    """Another activation from eight samples on: two captures below cannot know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 4)

    def forward(self, x):
        out = self.linear(x.flatten(1))
        return F.relu(out) if len(x) < 8 else F.gelu(out)


def test_a_structure_that_depends_on_the_batch_is_refused():
    model = Chunked()
    with pytest.raises(NotAffine, match="ops at batch 2"):
        TapeFamily.of(captured(model, images(2)(2)), captured(model, images(2)(3)))


def test_the_third_capture_finds_what_two_cannot_know():
    model = Switched()
    family = TapeFamily.of(captured(model, images(2)(2)), captured(model, images(2)(3)))
    family.prove(captured(model, images(2)(7)))
    with pytest.raises(NotAffine, match="gelu"):
        family.prove(captured(model, images(2)(8)))


def test_a_quadratic_step_is_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    family = TapeFamily.of(captured(model, images(2)(2), similarity), captured(model, images(2)(3), similarity))
    with pytest.raises(NotAffine, match="at batch 5 is not what"):
        family.prove(captured(model, images(2)(5), similarity))


def test_equal_sizes_and_sizes_below_one_are_errors():
    with pytest.raises(ValueError, match="both tapes"):
        TapeFamily.of(chain(), chain())
    family = TapeFamily.of(captured(Chunked().linear, (torch.zeros(2, 12), torch.zeros(2, dtype=torch.long))),
                           captured(Chunked().linear, (torch.zeros(3, 12), torch.zeros(3, dtype=torch.long))))
    with pytest.raises(ValueError, match="at least one"):
        family.at(0)
