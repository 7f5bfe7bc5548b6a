"""OverFeat, the fast model: five convolutions and three fully connected layers (table 1 of Sermanet et al., 2014)."""

from __future__ import annotations

import torch
from torch import nn


class OverFeat(nn.Module):
    """(N, channels, H, W) -> logits (N, classes); no local response normalisation, as in the paper."""

    def __init__(self, channels: int, classes: int, image_size: int, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_convolution(channels, 96, 11, stride=4), nn.MaxPool2d(2),
            *_convolution(96, 256, 5), nn.MaxPool2d(2),
            *_convolution(256, 512, 3, padding=1),
            *_convolution(512, 1024, 3, padding=1),
            *_convolution(1024, 1024, 3, padding=1), nn.MaxPool2d(2),
        )
        side = _last_side(image_size)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(1024 * side * side, 3072), nn.ReLU(inplace=True),
            nn.Dropout(dropout), nn.Linear(3072, 4096), nn.ReLU(inplace=True),
            nn.Linear(4096, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).flatten(1))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, stride, padding), nn.ReLU(inplace=True)]


def _last_side(image_size: int) -> int:
    """Pixels a side after the last pooling: 6 for images of 231."""
    first = ((image_size - 11) // 4 + 1) // 2
    return (first - 4) // 2 // 2


def build(*, channels: int, classes: int, image_size: int, dropout: float) -> nn.Module:
    """OverFeat with torch's own initialisation."""
    return OverFeat(channels, classes, image_size, dropout)
