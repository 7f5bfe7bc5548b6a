"""Tiled tapes against full captures, entry by entry; and networks that do not repeat."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from vramlab import collection, measure
from vramlab.capture import capture
from vramlab.check import check_schedule
from vramlab.liveness import replay_schedule
from vramlab.tape import Tape
from vramlab.tile import NotRepetitive, TapeTiling


def step_of(model: torch.nn.Module, batch: torch.Tensor) -> Tape:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return capture(model, lambda m, x: m(x).square().mean(), [batch], optimizer=optimizer).tape


class Residual(torch.nn.Module):
    """Two branches, BatchNorm state and an in-place operator: what a bottleneck has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn = torch.nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.bn(self.conv(x)) + x)


class Two(torch.nn.Module):
    """Two stages that both grow, the second by two blocks a step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(*(Residual(4) for _ in range(5 + steps)))
        self.narrow = torch.nn.Conv2d(4, 2, 1)
        self.second = torch.nn.Sequential(*(Residual(2) for _ in range(5 + 2 * steps)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.narrow(self.first(x)))


@cache
def two(steps: int) -> Tape:
    return step_of(Two(steps), torch.zeros(2, 4, 6, 6))


def test_two_stages_are_tiled_to_what_a_full_capture_gives():
    tiling = TapeTiling.of(two(0), two(1))
    assert [(s.prefix, s.growth) for s in tiling.sites] == [("first.", 1), ("second.", 2)]
    tiling.prove(2, two(2))
    for steps in (0, 1, 2, 5):
        assert tiling.at(steps).digest == two(steps).digest
    deep = tiling.at(400)
    assert len(deep.ops) - len(two(0).ops) == 400 * (len(two(1).ops) - len(two(0).ops))
    check_schedule(deep, replay_schedule(deep))


def widening(blocks: int) -> Tape:
    layers = [torch.nn.Linear(8 + i, 9 + i) for i in range(blocks)]
    return step_of(torch.nn.Sequential(*layers), torch.zeros(2, 8))


def dense(blocks: int) -> Tape:
    """Each block reads all that came before it."""

    class Dense(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(4 * (i + 1), 4) for i in range(blocks))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.cat([x, block(x)], 1)
            return x

    return step_of(Dense(), torch.zeros(2, 4))


@pytest.mark.parametrize("network", [widening, dense])
def test_blocks_that_are_not_alike_are_refused(network):
    with pytest.raises(NotRepetitive):
        TapeTiling.of(network(5), network(6))


def test_what_has_no_blocks_or_too_few_is_refused():
    plain = step_of(torch.nn.Linear(4, 4), torch.zeros(2, 4))
    with pytest.raises(NotRepetitive, match="no numbered module"):
        TapeTiling.of(plain, plain)
    few = [step_of(torch.nn.Sequential(*(Residual(2) for _ in range(n))), torch.zeros(1, 2, 4, 4)) for n in (2, 3)]
    with pytest.raises(NotRepetitive, match="no three blocks in a row"):
        TapeTiling.of(*few)


def test_the_proof_finds_one_altered_entry():
    tiling, wanted = TapeTiling.of(two(0), two(1)), two(2)
    for part in ("ops", "tensors", "storages"):
        entries = list(getattr(wanted, part))
        middle = len(entries) // 2
        changed = {"ops": {"layer": "first.0"}, "tensors": {"offset": 1}, "storages": {"nbytes": 1}}[part]
        entries[middle] = replace(entries[middle], **changed)
        with pytest.raises(NotRepetitive, match=f"{next(iter(changed))} is"):
            tiling.prove(2, replace(wanted, **{part: tuple(entries)}))
    with pytest.raises(NotRepetitive):
        tiling.prove(2, two(1))


@pytest.mark.parametrize(("target", "is_tiled"), [("sim:v100-32gb", True), ("cpu", False)])
def test_a_simulated_cell_of_a_deep_card_is_tiled_and_one_that_runs_is_not(target, is_tiled):
    model = collection.read_model(Path(__file__).parents[1] / "models" / "resnet1202.yaml")
    training = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "autocast": None, "channels_last": False, "seed": 1}
    options = {"image_size": 8, "classes": 10, "depth": 32 + 6 * 4, "width": 4}
    config = {"model": model.name, "model_options": options, "batch_size": 2, "training": training, "data": "synthetic", "target": target,
              "sources": {"model": model.sha256}}
    cell = measure._Cell(config, model, None, None)
    tape = cell.tiled(2)
    assert (tape is not None) is is_tiled
    if is_tiled:
        assert tape.digest == cell.captured(cell.workload(), 2).tape.digest
