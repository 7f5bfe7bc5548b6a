"""U-Net: a contracting and an expansive path of double 3x3 convolutions, joined by skip connections."""

from __future__ import annotations

import torch
from torch import nn


class DoubleConv(nn.Sequential):
    """Two 3x3 convolutions, each with ReLU (and BatchNorm before it): (N, in, H, W) -> (N, out, H, W)."""

    def __init__(self, inputs: int, outputs: int, batch_norm: bool, middle: int | None = None) -> None:
        layers: list[nn.Module] = []
        middle = middle or outputs
        for channels, wide in ((inputs, middle), (middle, outputs)):
            layers.append(nn.Conv2d(channels, wide, 3, padding=1, bias=not batch_norm))
            if batch_norm:
                layers.append(nn.BatchNorm2d(wide))
            layers.append(nn.ReLU(inplace=True))
        super().__init__(*layers)


class Up(nn.Module):
    """Doubles the size with a 2x2 up-convolution, then joins the skip connection."""

    def __init__(self, inputs: int, outputs: int, batch_norm: bool) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
        self.conv = DoubleConv(2 * outputs, outputs, batch_norm)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.conv(torch.cat([skip, self.up(x)], dim=1))


class BilinearUp(Up):
    """Doubles the size by interpolation, without parameters. What comes from below has as many channels as the skip connection."""

    def __init__(self, channels: int, outputs: int, batch_norm: bool) -> None:
        nn.Module.__init__(self)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.conv = DoubleConv(2 * channels, outputs, batch_norm, middle=channels)


class UNet(nn.Module):
    """(N, channels, H, W) -> per-pixel logits (N, classes, H, W); H and W are multiples of 2**depth."""

    def __init__(self, channels: int, classes: int, width: int, depth: int, dropout: float, batch_norm: bool,
                 bilinear: bool = False) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        if bilinear:  # the deepest level is as wide as the one above it
            widths[-1] = widths[-2]
            ups = [BilinearUp(b, a, batch_norm) for a, b in zip([width, *widths[:-2]], widths[:-1])][::-1]
        else:
            ups = [Up(b, a, batch_norm) for a, b in zip(widths[-2::-1], widths[:0:-1])]
        self.down = nn.ModuleList(DoubleConv(a, b, batch_norm) for a, b in zip([channels, *widths], widths))
        self.up = nn.ModuleList(ups)
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            if level >= len(self.down) - 2:  # the end of the contracting path
                x = self.dropout(x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(x, skips.pop())
        return self.head(x)


def _initialise(module: nn.Module) -> None:
    """Normal with variance 2 / fan-in, as the paper's section 3 asks."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def build(*, channels: int, classes: int, image_size: int, width: int, depth: int, dropout: float, batch_norm: bool) -> nn.Module:
    """ValueError when `image_size` cannot be halved `depth` times."""
    _check_sides(depth, image_size=image_size)
    return UNet(channels, classes, width, depth, dropout, batch_norm).apply(_initialise)


def build_bilinear(*, channels: int, classes: int, image_size: int, image_width: int, width: int, depth: int) -> nn.Module:
    """BatchNorm and interpolation instead of dropout and up-convolutions. ValueError when a side cannot be halved `depth` times."""
    _check_sides(depth, image_size=image_size, image_width=image_width)
    return UNet(channels, classes, width, depth, dropout=0.0, batch_norm=True, bilinear=True).apply(_initialise)


def _check_sides(depth: int, **sides: int) -> None:
    for name, pixels in sides.items():
        if pixels % 2**depth:
            raise ValueError(f"{name} {pixels} is no multiple of {2**depth}, which {depth} levels of pooling need")
