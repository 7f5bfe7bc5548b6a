"""Inception-v4 (Szegedy et al., 2017): a branching stem, then 4 A, 7 B and 3 C modules with two reductions between them."""

from __future__ import annotations

import torch
from torch import nn


class Conv(nn.Sequential):
    """Convolution, BatchNorm, ReLU; "same" padding unless `valid`."""

    def __init__(self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, valid: bool = False) -> None:
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (0, 0) if valid else (height // 2, width // 2)
        super().__init__(
            nn.Conv2d(inputs, outputs, (height, width), stride, padding, bias=False),
            nn.BatchNorm2d(outputs, eps=0.001),
            nn.ReLU(inplace=True),
        )


class Branches(nn.Module):
    """Runs each branch on the same input and joins their channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _chain(inputs: int, *layers: tuple) -> nn.Sequential:
    """Convolutions one after another; each layer is (outputs, kernel[, stride, valid])."""
    parts = []
    for outputs, *rest in layers:
        parts.append(Conv(inputs, outputs, *rest))
        inputs = outputs
    return nn.Sequential(*parts)


def _averaged(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False), Conv(inputs, outputs, 1))


def _stem(channels: int) -> nn.Sequential:
    return nn.Sequential(
        _chain(channels, (32, 3, 2, True), (32, 3, 1, True), (64, 3)),
        Branches(nn.MaxPool2d(3, 2), Conv(64, 96, 3, 2, True)),
        Branches(_chain(160, (64, 1), (96, 3, 1, True)), _chain(160, (64, 1), (64, (1, 7)), (64, (7, 1)), (96, 3, 1, True))),
        Branches(Conv(192, 192, 3, 2, True), nn.MaxPool2d(3, 2)),
    )


def _module_a() -> Branches:
    return Branches(Conv(384, 96, 1), _chain(384, (64, 1), (96, 3)), _chain(384, (64, 1), (96, 3), (96, 3)), _averaged(384, 96))


def _module_b() -> Branches:
    short = _chain(1024, (192, 1), (224, (1, 7)), (256, (7, 1)))
    long = _chain(1024, (192, 1), (192, (7, 1)), (224, (1, 7)), (224, (7, 1)), (256, (1, 7)))
    return Branches(Conv(1024, 384, 1), short, long, _averaged(1024, 128))


def _module_c() -> Branches:
    def fan(inputs: int) -> Branches:
        return Branches(Conv(inputs, 256, (1, 3)), Conv(inputs, 256, (3, 1)))

    short = nn.Sequential(Conv(1536, 384, 1), fan(384))
    long = nn.Sequential(_chain(1536, (384, 1), (448, (3, 1)), (512, (1, 3))), fan(512))
    return Branches(Conv(1536, 256, 1), short, long, _averaged(1536, 256))


def _reduction_a() -> Branches:
    return Branches(Conv(384, 384, 3, 2, True), _chain(384, (192, 1), (224, 3), (256, 3, 2, True)), nn.MaxPool2d(3, 2))


def _reduction_b() -> Branches:
    long = _chain(1024, (256, 1), (256, (1, 7)), (320, (7, 1)), (320, 3, 2, True))
    return Branches(_chain(1024, (192, 1), (192, 3, 2, True)), long, nn.MaxPool2d(3, 2))


class InceptionV4(nn.Module):
    """(N, channels, H, W) -> logits (N, classes)."""

    def __init__(self, channels: int, classes: int, modules: tuple[int, int, int], dropout: float) -> None:
        super().__init__()
        a, b, c = modules
        self.stem = _stem(channels)
        self.a = nn.Sequential(*(_module_a() for _ in range(a)))
        self.reduction_a = _reduction_a()
        self.b = nn.Sequential(*(_module_b() for _ in range(b)))
        self.reduction_b = _reduction_b()
        self.c = nn.Sequential(*(_module_c() for _ in range(c)))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(1536, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.reduction_a(self.a(self.stem(x)))
        x = self.c(self.reduction_b(self.b(x)))
        return self.head(self.dropout(self.pool(x).flatten(1)))


def build(*, channels: int, classes: int, image_size: int, a_modules: int, b_modules: int, c_modules: int, dropout: float) -> nn.Module:
    """The paper's network has 4, 7 and 3 modules."""
    return InceptionV4(channels, classes, (a_modules, b_modules, c_modules), dropout)
