"""VGG-16 with further convolutions: the vDNN paper adds the same number of layers to each of the five groups (116 = 16 + 5 x 20)."""

from __future__ import annotations

import torch
from torch import nn

GROUPS = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))  # VGG-16's convolutions and channels
WEIGHTED = 16  # its convolutions and fully connected layers


class DeepVgg(nn.Module):
    """(N, channels, H, W) -> logits (N, classes). Each element of a group is a 3x3 convolution and its ReLU."""

    def __init__(self, channels: int, classes: int, depth: int, dropout: float) -> None:
        super().__init__()
        extra = (depth - WEIGHTED) // len(GROUPS)
        self.groups = nn.ModuleDict()
        inputs = channels
        for number, (layers, width) in enumerate(GROUPS, 1):
            widths = [inputs] + [width] * (layers + extra - 1)
            self.groups[f"group{number}"] = nn.Sequential(*(_convolution(narrow, width) for narrow in widths))
            inputs = width
        self.pool = nn.MaxPool2d(2)
        self.average = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(inputs * 49, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(4096, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for group in self.groups.values():
            x = self.pool(group(x))
        return self.classifier(self.average(x).flatten(1))


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.zeros_(module.bias)


def build(*, channels: int, classes: int, image_size: int, depth: int, dropout: float) -> nn.Module:
    """ValueError when `depth` is not 16 + 5m."""
    if (depth - WEIGHTED) % len(GROUPS):
        raise ValueError(f"depth {depth} is not 16 + 5m; write for example 16, 116, 216, 316 or 416")
    return DeepVgg(channels, classes, depth, dropout).apply(_initialise)
