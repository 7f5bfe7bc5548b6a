"""DenseNets that torchvision has no name for: any number of layers, and the small-image form of DenseNet-BC."""

from __future__ import annotations

from torch import nn
from torchvision.models.densenet import DenseNet


def build_imagenet(*, classes: int, image_size: int, growth_rate: int, dropout: float) -> nn.Module:
    """DenseNet-264: blocks of 6, 12, 64 and 48 layers; the first convolution has twice the growth rate's channels."""
    return DenseNet(growth_rate, (6, 12, 64, 48), 2 * growth_rate, drop_rate=dropout, num_classes=classes)


def build_small(*, channels: int, classes: int, image_size: int, depth: int, growth_rate: int, dropout: float) -> nn.Module:
    """DenseNet-BC for small images: three blocks at full, half and quarter size behind a 3x3 convolution. ValueError unless 6n + 4."""
    layers, rest = divmod(depth - 4, 6)
    if rest or layers < 1:
        raise ValueError(f"depth {depth} is not 6n + 4; write for example 22, 40, 100 or 190")
    model = DenseNet(growth_rate, (layers,) * 3, 2 * growth_rate, drop_rate=dropout, num_classes=classes)
    stem = nn.Conv2d(channels, 2 * growth_rate, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight)
    blocks = [(name, part) for name, part in model.features.named_children() if name not in ("conv0", "norm0", "relu0", "pool0")]
    model.features = nn.Sequential()
    model.features.add_module("conv0", stem)
    for name, part in blocks:
        model.features.add_module(name, part)
    return model
