"""Residual networks of bottlenecks, such as ResNet-50, with BatchNorm or without norms (Fixup), for small images."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FIFTY = (3, 4, 6, 3)  # bottlenecks of each stage of ResNet-50
WIDER = 4  # a block's output over its inner width


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1, each with BatchNorm, and a shortcut."""

    normed: ClassVar[bool] = True

    def __init__(self, inputs: int, width: int, stride: int, depth: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, WIDER * width, 1, bias=False), nn.BatchNorm2d(WIDER * width),
        )  # fmt: skip
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inputs != WIDER * width:
            self.short = nn.Sequential(
                nn.Conv2d(inputs, WIDER * width, 1, stride, bias=False), nn.BatchNorm2d(WIDER * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inside(x) + self.short(x))


class FixupBottleneck(nn.Module):
    """The same convolutions without norms (Zhang et al. 2019): scalar biases, a factor; the last starts at zero."""

    normed: ClassVar[bool] = False

    def __init__(self, inputs: int, width: int, stride: int, depth: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(width, WIDER * width, 1, bias=False)
        self.biases, self.factor = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(1))
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inputs != WIDER * width:
            self.short = nn.Conv2d(inputs, WIDER * width, 1, stride, bias=False)
            nn.init.kaiming_normal_(self.short.weight, mode="fan_out", nonlinearity="relu")
        for conv, taps in ((self.conv1, 1), (self.conv2, 9)):
            nn.init.normal_(conv.weight, std=(2 / (taps * width)) ** 0.5 * depth**-0.25)
        nn.init.zeros_(self.conv3.weight)

    def forward(self, x: Tensor) -> Tensor:
        shifted = x + self.biases[0]
        inside = F.relu(self.conv1(shifted) + self.biases[1])
        inside = F.relu(self.conv2(inside + self.biases[2]) + self.biases[3])
        inside = self.conv3(inside + self.biases[4]) * self.factor + self.biases[5]
        return F.relu(inside + self.short(shifted))


Block = type[Bottleneck] | type[FixupBottleneck]


class BottleneckNet(nn.Module):
    """A stem of 3 x 3, stages of bottlenecks whose width doubles while the image halves, a mean, and a linear layer.

    With width 64 and ``FIFTY`` it is ResNet-50 with 23.5 million weights.
    """

    def __init__(self, block: Block, channels: int, width: int, blocks: tuple[int, ...]) -> None:
        super().__init__()
        norm = [nn.BatchNorm2d(width)] if block.normed else []
        first = nn.Conv2d(channels, width, 3, 1, 1, bias=not norm)
        self.stem = nn.Sequential(first, *norm, nn.ReLU())
        stages, inputs = list[nn.Module](), width
        for stage, count in enumerate(blocks):
            for number in range(count):
                stride = 2 if stage and not number else 1
                stages.append(block(inputs, width * 2**stage, stride, sum(blocks)))
                inputs = WIDER * width * 2**stage
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(inputs, 10)
        if not block.normed:
            nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return out


NETWORKS: dict[str, Block] = {"BatchNorm": Bottleneck, "Fixup": FixupBottleneck}


def offset_free_mean(model: BottleneckNet) -> Tensor:
    """Return the prior mean (P,) under which the tangent model is h(θ) = J θ, without an offset.

    The output of a network with a linear head is its own Jacobian times v, the weights of the head and zeros elsewhere:
    f = J v. So h(θ') = f + J (θ' - w̃) with a prior mean of w̃ - v is J θ with θ = θ' - w̃ + v and a mean of zero.

    >>> model = BottleneckNet(Bottleneck, 1, 2, (1,)).eval()
    >>> int((offset_free_mean(model) == 0).sum()) >= 90  # of the head
    True
    """
    head = {id(parameter) for parameter in model.head.parameters()}
    kept = lambda p: torch.zeros_like(p) if id(p) in head else p.detach()
    return torch.cat([kept(parameter).flatten() for parameter in model.parameters()])
