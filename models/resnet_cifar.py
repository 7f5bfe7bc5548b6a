"""The small residual networks of section 4.2 of He et al. (2016): three stages at full, half and quarter size, depth 6n + 2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions on a residual; the shortcut has no parameters (the paper's option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int, in_place: bool) -> None:
        super().__init__()
        self.stride, self.new_channels = stride, outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = _relu(in_place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(residual + self._shortcut(x))

    def _shortcut(self, x: torch.Tensor) -> torch.Tensor:
        """Every second pixel, new channels zero; the identity inside a stage."""
        if self.stride == 1 and not self.new_channels:
            return x
        before = self.new_channels // 2
        return F.pad(x[:, :, ::self.stride, ::self.stride], (0, 0, 0, 0, before, self.new_channels - before))


class SmallResNet(nn.Module):
    """(N, channels, H, W) -> logits (N, classes)."""

    def __init__(self, channels: int, classes: int, depth: int, width: int, in_place: bool) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.relu = _relu(in_place)
        self.stage1 = _stage(width, width, blocks, 1, in_place)
        self.stage2 = _stage(width, 2 * width, blocks, 2, in_place)
        self.stage3 = _stage(2 * width, 4 * width, blocks, 2, in_place)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn(self.conv(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.head(self.pool(x).flatten(1))


def _stage(inputs: int, outputs: int, blocks: int, stride: int, in_place: bool) -> nn.Sequential:
    rest = [BasicBlock(outputs, outputs, 1, in_place) for _ in range(blocks - 1)]
    return nn.Sequential(BasicBlock(inputs, outputs, stride, in_place), *rest)


def _relu(in_place: bool) -> nn.Module:
    """Over its input, or with a backward that reads its input, which is then kept: nn.ReLU's reads its result, in place or not, and nothing
    else reads the input, so that a plain nn.ReLU would hold no more than one in place."""
    return nn.ReLU(inplace=True) if in_place else nn.Threshold(0.0, 0.0)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight)


def build(*, channels: int, classes: int, image_size: int, depth: int, width: int, in_place: bool = True) -> nn.Module:
    """ValueError when `depth` is not 6n + 2."""
    if depth % 6 != 2 or depth < 8:
        raise ValueError(f"depth {depth} is not 6n + 2; write for example 8, 14, 20, 56 or 110")
    return SmallResNet(channels, classes, depth, width, in_place).apply(_initialise)
