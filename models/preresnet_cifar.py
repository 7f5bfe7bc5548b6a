"""The pre-activation bottleneck networks for CIFAR of He et al. (2016, "Identity Mappings"): three stages, depth 9n + 2."""

from __future__ import annotations

import torch
from torch import nn


class PreActivationBlock(nn.Module):
    """BatchNorm and ReLU before each of three convolutions, on a residual that nothing else touches."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, width, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn3, self.conv3 = nn.BatchNorm2d(width), nn.Conv2d(width, outputs, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        active = self.relu(self.bn1(x))
        shortcut = x if self.projection is None else self.projection(active)  # a new width projects what is already active
        y = self.conv2(self.relu(self.bn2(self.conv1(active))))
        return self.conv3(self.relu(self.bn3(y))) + shortcut


class PreActivationResNet(nn.Module):
    """(N, channels, H, W) -> logits (N, classes)."""

    def __init__(self, channels: int, classes: int, depth: int, width: int) -> None:
        super().__init__()
        blocks = (depth - 2) // 9
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.stage1 = _stage(width, width, blocks, 1)
        self.stage2 = _stage(4 * width, 2 * width, blocks, 2)
        self.stage3 = _stage(8 * width, 4 * width, blocks, 2)
        self.bn = nn.BatchNorm2d(16 * width)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stage3(self.stage2(self.stage1(self.conv(x))))
        return self.head(self.pool(self.relu(self.bn(x))).flatten(1))


def _stage(inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    rest = [PreActivationBlock(4 * width, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(PreActivationBlock(inputs, width, stride), *rest)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight)


def build(*, channels: int, classes: int, image_size: int, depth: int, width: int) -> nn.Module:
    """ValueError when `depth` is not 9n + 2."""
    if depth % 9 != 2 or depth < 11:
        raise ValueError(f"depth {depth} is not 9n + 2; write for example 11, 20, 164 or 1001")
    return PreActivationResNet(channels, classes, depth, width).apply(_initialise)
