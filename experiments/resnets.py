"""Residual networks for CIFAR-10: given weights that papers on function-space methods share, training, and images."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing.errors import DataError

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
DEPTHS = (20, 32, 44, 56)
DECAY = 5e-4  # of weights, in training
TRAINED_ON = 50_000  # images that the given networks were trained on


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """A residual network of three stages with 16, 32 and 64 channels; 20, 32, 44 or 56 layers."""

    def __init__(self, depth: int = 20, classes: int = 10) -> None:
        super().__init__()
        if depth not in DEPTHS:
            raise DataError(f"a ResNet of {depth} layers; expected one of {', '.join(map(str, DEPTHS))}.")
        count = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, 1, count)
        self.layer2 = _stage(16, 32, 2, count)
        self.layer3 = _stage(32, 64, 2, count)
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


def _stage(inputs: int, outputs: int, stride: int, count: int) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1) for _ in range(count - 1)))


def staged(widths: tuple[int, ...] = (64, 128, 256, 512), blocks: int = 2, classes: int = 10) -> nn.Sequential:
    """Return a residual network with some blocks of each width; the default is ResNet-18, with 11.2 million weights."""
    stages = [_stage(a, b, 1 if a == b else 2, blocks) for a, b in zip((widths[0], *widths), widths)]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)
    return nn.Sequential(
        nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(), *stages, *head
    )


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return the images flipped at random and shifted by up to four pixels, each independently."""
    size = x.shape[-1]
    flip = torch.rand(len(x), generator=generator, device=x.device) < 0.5
    x = torch.where(flip[:, None, None, None], x.flip(-1), x)
    shift = torch.randint(0, 9, (2, len(x)), generator=generator, device=x.device)
    wide = F.pad(x, (4, 4, 4, 4))
    rows = shift[0][:, None] + torch.arange(size, device=x.device)
    columns = shift[1][:, None] + torch.arange(size, device=x.device)
    picked = wide.gather(2, rows[:, None, :, None].expand(-1, 3, -1, size + 8))
    return picked.gather(3, columns[:, None, None, :].expand(-1, 3, size, -1))


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, batch: int = 512) -> None:
    """Train by SGD with momentum and a one-cycle rate, in half precision on a GPU, without label noise."""
    gpu = x.is_cuda
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=DECAY, nesterov=True)
    steps = epochs * math.ceil(len(x) / batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=0.4, total_steps=steps, pct_start=0.2)
    generator = torch.Generator(x.device).manual_seed(0)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator, device=x.device).split(batch):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=gpu):
                loss = F.cross_entropy(model(augmented(x[rows], generator)), y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    model.eval()


def pretrained(folder: Path, depth: int) -> ResNet:
    """Return the network with the weights of models/cifar10_resnetDEPTH.npz, in evaluation mode."""
    path = folder / "models" / f"cifar10_resnet{depth}.npz"
    if not path.exists():
        raise DataError(f"models/{path.name} is not in the data folder; expected its weights under state-dict names.")
    model = ResNet(depth)
    with np.load(path, allow_pickle=False) as file:
        given = {name: torch.from_numpy(np.asarray(file[name])) for name in file.files}
    state = model.state_dict()
    missing = [n for n in state if n not in given and not n.endswith("num_batches_tracked")]
    if missing:
        raise DataError(f"models/{path.name} lacks {', '.join(missing[:4])}; expected the names of a state dict.")
    model.load_state_dict({name: given[name].to(state[name]) if name in given else state[name] for name in state})
    return model.eval()


def cifar10(folder: Path, part: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return images (N, 3, 32, 32), standardised as the networks expect, and classes.

    ``part`` is train, test, or train_a for the first half of the training images.
    """
    names = ("cifar10_train_a", "cifar10_train_b") if part == "train" else (f"cifar10_{part}",)
    images, classes = [], []
    for name in names:
        path = folder / f"{name}.npz"
        if not path.exists():
            raise DataError(f"{path.name} is not in the data folder; expected keys delta and y.")
        with np.load(path, allow_pickle=False) as file:
            delta, y = file["delta"], file["y"]
        flat = np.cumsum(np.cumsum(delta, 2, dtype=np.uint8), 3, dtype=np.uint8)
        green = flat[:, 0]
        images.append(torch.from_numpy(np.stack([flat[:, 1] + green, green, flat[:, 2] + green], 1)))
        classes.append(torch.from_numpy(np.asarray(y)))
    x = torch.cat(images).to(device).float() / 255
    mean, std = (torch.tensor(t, device=device).view(1, 3, 1, 1) for t in (MEAN, STD))
    return (x - mean) / std, torch.cat(classes).to(device).long()


def cropped(x: Tensor, seed: int, smallest: float = 0.5, aspect: float = 4 / 3) -> Tensor:
    """Replace every image by a random rectangle of it, stretched to the old size.

    The rectangle has between ``smallest`` and all of the area, and a ratio of width to height between 1 / ``aspect``
    and ``aspect``. A rectangle that does not fit is drawn again; after ten draws the whole image is used. Papers build
    held-out data in this way from images that the networks were trained on.
    """
    generator = torch.Generator().manual_seed(seed)
    size, crops = x.shape[-1], []
    for image in x:
        left, top, width, height = _rectangle(size, smallest, aspect, generator)
        part = image[None, :, top : top + height, left : left + width]
        crops.append(F.interpolate(part, (size, size), mode="bilinear", align_corners=False))
    return torch.cat(crops)


def _rectangle(size: int, smallest: float, aspect: float, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Return left, top, width and height of a random rectangle."""
    for _ in range(10):
        area, shape, left, top = torch.rand(4, generator=generator).tolist()
        side, stretch = size * (smallest + (1 - smallest) * area) ** 0.5, aspect ** (shape - 0.5)
        width, height = round(side * stretch), round(side / stretch)
        if max(width, height) <= size:
            return int(left * (size - width + 1)), int(top * (size - height + 1)), width, height
    return 0, 0, size, size
