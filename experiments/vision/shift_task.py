"""Trained networks, and test images that move away from the training images step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.data import data_folder
from experiments.engine.measuring import measured
from experiments.resnets import pretrained
from experiments.vision.cnn import halves
from experiments.vision.corruptions import KINDS, STRENGTHS, corrupted, rotated
from experiments.vision.learning import Schedule, train_large, train_together
from experiments.vision.networks import ResNet18, convolutional, seeded
from experiments.vision.sets import ImageSet, Pair, read_set
from lapwing.demo.training import Batches, batches
from lapwing.errors import DataError

TRAINED_ON = 50_000  # images that the given networks were trained on
Shifts = dict[str, dict[str, Tensor]]  # the step of a shift -> the kind -> standardised images


@dataclass(frozen=True)
class Small:
    """A convolutional network with dropout, trained here; all members of the ensemble in one loop."""

    images: str
    kind: str = "rotated"
    channels: tuple[int, ...] = (16, 32)
    hidden: int = 64
    epochs: int = 8
    batch_size: int = 512
    rate: float = 2e-3
    decay: float = 1e-4
    dropout: float = 0.25

    def networks(self, images: ImageSet, members: int, seed: int, data_dir: Path | None) -> list[nn.Module]:
        """Return the trained networks."""
        shape, classes = images.shape, images.n_classes
        make = lambda: convolutional(shape, classes, self.channels, self.hidden, self.dropout)
        device = images.mean.device
        models = [seeded(make, 1000 * seed + number).to(device) for number in range(members)]
        schedule = Schedule(self.epochs, self.batch_size, self.rate)
        train_together(models, *images.standard_train(), schedule, [self.decay] * members, seed)
        return models


@dataclass(frozen=True)
class Large:
    """ResNet-18, trained here; the members one after the other."""

    images: str = "cifar10"
    kind: str = "corrupted"
    width: int = 64
    blocks: int = 2
    epochs: int = 6
    batch_size: int = 512
    rate: float = 0.2
    decay: float = 5e-4

    def networks(self, images: ImageSet, members: int, seed: int, data_dir: Path | None) -> list[nn.Module]:
        """Return the trained networks."""
        make = lambda: ResNet18(images.shape[0], images.n_classes, self.width, self.blocks)
        models = []
        for number in range(members):
            model = seeded(make, 1000 * seed + number).to(images.mean.device)
            schedule = Schedule(self.epochs, self.batch_size, self.rate)
            train_large(model, *images.standard_train(), schedule, self.decay, 1000 * seed + number)
            models.append(model)
        return models


@dataclass(frozen=True)
class Given:
    """A residual network with given weights; the ensemble has the given networks of other depths."""

    depth: int
    others: tuple[int, ...] = (20, 32, 44, 56)
    images: str = "cifar10"
    kind: str = "corrupted"

    def networks(self, images: ImageSet, members: int, seed: int, data_dir: Path | None) -> list[nn.Module]:
        """Return the given networks, that of the depth first."""
        folder = data_folder(data_dir)
        depths = [self.depth, *(depth for depth in self.others if depth != self.depth)]
        return [pretrained(folder, depth).to(images.mean.device) for depth in depths[:members]]


@dataclass(frozen=True, eq=False)
class Task:
    """Networks, the training images for their posteriors, validation images, and shifted test images."""

    models: list[nn.Module]  # the network that methods are fitted to, and the other members of the ensemble
    train: Pair
    n_trained: int  # images that the network was trained on
    tuning: Pair
    shifts: Shifts
    y: Tensor  # the classes of the test images
    seconds: float = 0.0  # of the training of one network; zero for given ones

    @property
    def model(self) -> nn.Module:
        """The network that methods are fitted to."""
        return self.models[0]

    def some(self, count: int, size: int) -> tuple[Batches, float]:
        """Return batches of the first training images, and the temperature that makes them stand for all."""
        x, y = (part[:count] for part in self.train)
        return batches(x, y, size), len(y) / self.n_trained


def prepared(
    network: Small | Large | Given,
    data_dir: Path | None,
    device: str,
    counts: tuple[int, int, int],
    angles: tuple[float, ...],
    seed: int,
) -> Task:
    """Read the images, train or read the networks, and shift the test images.

    ``counts`` are the members of the ensemble, the validation images and the test images.
    """
    members, tuning, test = counts
    images = read_set(network.images, data_dir, device)
    trained = measured(lambda: network.networks(images, members, seed, data_dir))
    validation = halves(images, seed)[0]
    order = torch.randperm(len(images.test[1]), generator=torch.Generator().manual_seed(seed)).to(images.mean.device)
    rows = order[len(order) // 2 :][:test]
    x, y = images.test[0][rows], images.test[1][rows]
    mixed = torch.randperm(len(images.train[1]), generator=torch.Generator().manual_seed(seed)).to(images.mean.device)
    train = images.standard(images.train[0][mixed]), images.train[1][mixed]
    first = validation[0][:tuning], validation[1][:tuning]
    shifts = SHIFTS[network.kind](images, x, angles, seed)
    given = isinstance(network, Given)
    n_trained = TRAINED_ON if given else len(train[1])
    seconds = 0.0 if given else trained.seconds / members
    return Task(trained.answer, train, n_trained, first, shifts, y, seconds)


def _rotated(images: ImageSet, x: Tensor, angles: tuple[float, ...], seed: int) -> Shifts:
    return {f"{angle:g} degrees": {"": images.standard(rotated(x, angle))} for angle in angles}


def _corrupted(images: ImageSet, x: Tensor, angles: tuple[float, ...], seed: int) -> Shifts:
    """Return the clean images as strength 0, then those of every strength and kind."""
    shifts: Shifts = {"strength 0": {"": images.standard(x)}}
    for strength in STRENGTHS:
        kinds = {kind: images.standard(corrupted(x, kind, strength, seed)) for kind in KINDS}
        shifts[f"strength {strength}"] = kinds
    return shifts


SHIFTS: dict[str, Callable[[ImageSet, Tensor, tuple[float, ...], int], Shifts]] = {
    "rotated": _rotated, "corrupted": _corrupted,
}  # fmt: skip

NETWORKS: dict[str, Small | Large | Given] = {
    "rotated-mnist": Small("mnist"),
    "rotated-mnist-small": Small("mnist", channels=(8, 16), hidden=32, epochs=4, batch_size=100),  # for a processor
    "resnet18": Large(),
    "resnet20": Given(20),
    "resnet56": Given(56),
    "rotated-digits": Small("digits", channels=(6, 8), hidden=16, epochs=8, batch_size=32, rate=5e-3),
    "corrupted-digits": Small("digits", "corrupted", channels=(6, 8), hidden=16, epochs=8, batch_size=32, rate=5e-3),
}


def network_named(name: str) -> Small | Large | Given:
    """Return the network of this name; raise if there is none."""
    if name not in NETWORKS:
        raise DataError(f"the network is {name!r}; expected one of {', '.join(NETWORKS)}.")
    return NETWORKS[name]
