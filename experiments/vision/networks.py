"""Networks for images of any size: a perceptron, a convolutional network without norms, and ResNet-18."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.resnets import BasicBlock
from lapwing.errors import DataError

Shape = tuple[int, int, int]  # channels, height and width of an image


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a network whose first weights depend on the seed; the global random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def perceptron(shape: Shape, classes: int, hidden: tuple[int, ...]) -> nn.Sequential:
    """Return an untrained ReLU network on the pixels.

    >>> len(perceptron((1, 4, 4), 3, (8, 5)))
    6
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise((shape[0] * shape[1] * shape[2], *hidden, classes)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutional(
    shape: Shape, classes: int, channels: tuple[int, ...], hidden: int, dropout: float = 0.0
) -> nn.Sequential:
    """Return an untrained network: convolutions of 3 x 3 with pooling after each, a hidden layer, and the classes.

    Args:
        shape: Channels, height and width of the images.
        classes: The number of outputs.
        channels: Those of every convolution; each pooling halves the image.
        hidden: The units of the linear layer before the last.
        dropout: Its probability, before both linear layers.

    Raises:
        DataError: If the image is too small for so many convolutions.

    >>> convolutional((1, 8, 8), 10, (4, 6), 12)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    height, width = (side // 2 ** len(channels) for side in shape[1:])
    if not height * width:
        raise DataError(f"images of {shape[1]} x {shape[2]} pixels and {len(channels)} poolings; expected fewer.")
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((shape[0], *channels)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    drop: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
    layers += [nn.Flatten(), *drop, nn.Linear(channels[-1] * height * width, hidden), nn.ReLU()]
    return nn.Sequential(*layers, *drop, nn.Linear(hidden, classes))


class ResNet18(nn.Module):
    """ResNet-18 for small images: no pooling after the first convolution; 11,173,962 weights at width 64."""

    def __init__(self, channels: int = 3, classes: int = 10, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        widths = [width * 2**i for i in range(4)]
        stages: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(pairwise((width, *widths))):
            stages.append(BasicBlock(inputs, outputs, 1 if i == 0 else 2))
            stages += [BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)]
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(F.relu(self.bn1(self.conv1(x))))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out
