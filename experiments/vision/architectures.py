"""Six networks of about 46,000 weights for digits: what the evidence makes of norms, shortcuts and neither."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.normalised import ResNet, Transformer

Widths = tuple[int, ...]


def normed(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution of 3 x 3, BatchNorm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )  # fmt: skip


class Plain(nn.Module):
    """Convolutions with BatchNorm, without shortcuts."""

    def __init__(self, widths: Widths = (12, 24, 48, 64)) -> None:
        super().__init__()
        first, *rest = pairwise((1, *widths))
        self.features = nn.Sequential(normed(*first, stride=2), *(normed(a, b, 2) for a, b in rest))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).mean((2, 3)))
        return out


class PreBlock(nn.Module):
    """BatchNorm, ReLU and convolution, twice, and a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(outputs), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inside: Tensor = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return inside + self.short(x)


class PreResNet(nn.Module):
    """A residual network with its norms before the convolutions."""

    def __init__(self, widths: Widths = (12, 24, 48)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, widths[0], 3, 2, 1, bias=False)
        self.blocks = nn.Sequential(*(PreBlock(a, b) for a, b in pairwise((widths[0], *widths))))
        self.norm, self.head = nn.BatchNorm2d(widths[-1]), nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.norm(self.blocks(self.stem(x)))).mean((2, 3)))
        return out


class FixupBlock(nn.Module):
    """Two convolutions without norms (Zhang et al. 2019): scalar biases, a factor; the second starts at zero."""

    def __init__(self, inputs: int, outputs: int, depth: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1, self.conv2 = (
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
        )  # fmt: skip
        self.biases, self.factor = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(1))
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()
        nn.init.normal_(self.conv1.weight, std=(2 / (9 * outputs)) ** 0.5 * depth**-0.5)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor) -> Tensor:
        inside = F.relu(self.conv1(x + self.biases[0]) + self.biases[1])
        inside = self.conv2(inside + self.biases[2]) * self.factor + self.biases[3]
        return F.relu(inside + self.short(x))


class Fixup(nn.Module):
    """A residual network without norms."""

    def __init__(self, widths: Widths = (12, 24, 48)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, widths[0], 3, 2, 1)
        self.blocks = nn.Sequential(*(FixupBlock(a, b, len(widths)) for a, b in pairwise((widths[0], *widths))))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))
        return out


class UNet(nn.Module):
    """An encoder and a decoder with connections across, and BatchNorm; a map of the classes, averaged over pixels."""

    def __init__(self, widths: Widths = (12, 24, 48)) -> None:
        super().__init__()
        a, b, c = widths
        self.down1, self.down2, self.middle = normed(1, a), normed(a, b, 2), normed(b, c, 2)
        self.up2, self.up1 = normed(c + b, b), normed(b + a, a)
        self.refine = normed(c, c)
        self.head = nn.Conv2d(a, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(one)
        three = self.refine(self.middle(two))
        two = self.up2(torch.cat([F.interpolate(three, two.shape[2:], mode="nearest"), two], 1))
        one = self.up1(torch.cat([F.interpolate(two, one.shape[2:], mode="nearest"), one], 1))
        out: Tensor = self.head(one).mean((2, 3))
        return out


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "transformer": Transformer,
    "CNN": lambda: Plain((16, 32, 56, 48)),
    "ResNet": ResNet,
    "pre-ResNet": PreResNet,
    "Fixup": Fixup,
    "U-Net": lambda: UNet((11, 22, 44)),
}
SMALL: dict[str, Callable[[], nn.Module]] = {  # for images of 8 x 8
    "transformer": lambda: Transformer(4, 1, 2),
    "CNN": lambda: Plain((3, 4)),
    "ResNet": lambda: ResNet((3, 4)),
    "pre-ResNet": lambda: PreResNet((3, 4)),
    "Fixup": lambda: Fixup((3, 4)),
    "U-Net": lambda: UNet((2, 3, 4)),
}
