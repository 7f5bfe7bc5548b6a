"""Bottleneck residual networks of any depth: the four stages have n1, n2, n3 and n4 blocks, and 3 (n1 + n2 + n3 + n4) + 2 weighted layers.

SuperNeurons grows n3 alone, with n1 = 6, n2 = 32 and n4 = 6.
"""

from __future__ import annotations

from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet


def build(*, classes: int, image_size: int, depth: int, n1: int, n2: int, n4: int) -> nn.Module:
    """ValueError when `depth` leaves the third stage no whole number of blocks, or none."""
    n3, rest = divmod(depth - 2, 3)
    n3 -= n1 + n2 + n4
    if rest or n3 < 1:
        first = 3 * (n1 + n2 + 1 + n4) + 2
        raise ValueError(f"depth {depth} is not 3 (n1 + n2 + n3 + n4) + 2 with n3 >= 1; write {first}, {first + 3}, {first + 6}, ...")
    return ResNet(Bottleneck, [n1, n2, n3, n4], num_classes=classes)
