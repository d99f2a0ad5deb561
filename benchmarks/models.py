"""The networks and data of the benchmarks. Needs torch alone, so that other libraries' environments can use it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp() -> nn.Module:
    """Return an MLP, 784-256-256-10."""
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def lenet() -> nn.Module:
    """Return a LeNet: two convolutions with pooling, three linear layers; 44,426 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def wide_head() -> nn.Module:
    """Return an MLP with a wide last layer: 256 features to 1000 classes."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1000))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with normalisation, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network for 32x32 images."""

    def __init__(self, widths: tuple[int, ...], depth: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        layers, inputs = [], widths[0]
        for i, width in enumerate(widths):
            for j in range(depth):
                layers.append(BasicBlock(inputs, width, 2 if i and not j else 1))
                inputs = width
        self.blocks = nn.Sequential(*layers)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(F.relu(self.bn1(self.conv1(x)))).mean((2, 3)))


def resnet18() -> nn.Module:
    """Return a ResNet-18 with 11.2 M weights."""
    return ResNet((64, 128, 256, 512), 2)


def resnet20() -> nn.Module:
    """Return a ResNet-20 with 0.27 M weights."""
    return ResNet((16, 32, 64), 3)


class Transformer(nn.Module):
    """Four layers of width 128 over 64 tokens of a vocabulary of 1,000; ten classes from their mean."""

    def __init__(self, width: int = 128, tokens: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.place = nn.Parameter(0.02 * torch.randn(tokens, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens) + self.place).mean(1))


def texts(n: int, tokens: int, batch: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return random tokens with labels of ten classes, in batches."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 1000, (n, tokens), generator=generator)
    y = torch.randint(0, 10, (n,), generator=generator)
    return [(x[i : i + batch], y[i : i + batch]) for i in range(0, n, batch)]


def images(n: int, shape: tuple[int, ...], batch: int, classes: int = 10, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return random inputs with labels, in batches. Costs do not depend on the numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *shape, generator=generator)
    y = torch.randint(0, classes, (n,), generator=generator)
    return [(x[i : i + batch], y[i : i + batch]) for i in range(0, n, batch)]


def briefly_trained(model: nn.Module, data: list[tuple[Tensor, Tensor]], steps: int) -> nn.Module:
    """Train by a few steps of Adam, so that activations and gradients are not those of the initialisation."""
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for x, y in (data * (steps // len(data) + 1))[:steps]:
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval()
