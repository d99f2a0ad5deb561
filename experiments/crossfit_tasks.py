"""Tasks for the experiment ``crossfit``: rows, networks and recipes, from 100 to 10,000 rows to train on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn import datasets
from torch import Tensor, nn

from experiments.calibration_tasks import WORDS, Split, Transformer, convolutional, sentence_rows
from experiments.data import read_grey
from experiments.own_tables import OwnTable
from experiments.resnets import cifar10, staged
from experiments.uci import read_split
from lapwing.demo.training import SplitTable, loss_of

Pair = tuple[Tensor, Tensor]
TEST = 1000  # rows to test on, at most


@dataclass(frozen=True)
class Task:
    """A data set, a network, and a way to train it on so many rows. ``half`` is that of its data set."""

    data: str
    network: str
    rows: int
    epochs: int
    decay: float = 0.0
    augmented: bool = False
    seeds: int = 3  # at most; one for networks whose 17 trainings take minutes
    gap: bool = False  # tested on the middle third along an input, of which no row is trained on
    half: int = 0

    @property
    def name(self) -> str:
        extra = ", augmented" if self.augmented else ", gap" if self.gap else ""
        return f"{self.data}, {self.network}{extra}"

    def parts(self, folder: Path, seed: int) -> tuple[Pair, Pair]:
        """Return rows to train on and rows to test on; numbers are standardised by the former."""
        if self.gap:
            known, inside = _in_standard_units(read_split(folder / f"uci_{self.data}.npz", seed, "gap"))
            order = torch.randperm(len(known[0]), generator=torch.Generator().manual_seed(seed))[: self.rows]
            return (known[0][order], known[1][order]), (inside[0][:TEST], inside[1][:TEST])
        x, y = READERS.get(self.data, table(self.data))(folder)
        x = x.expand(-1, 3, -1, -1) if self.network == "ResNet" else x
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        rows = min(self.rows, 4 * len(x) // 5)
        train, test = order[:rows], order[rows : rows + TEST]
        if x.is_floating_point():
            columns = (0,) if x.ndim == 2 else (0, 2, 3)
            mean, std = x[train].mean(columns, keepdim=True), x[train].std(columns, keepdim=True)
            x = ((x - mean) / torch.where(std > 1e-6, std, 1.0)).float()
        if y.is_floating_point():
            y = ((y - y[train].mean(0)) / y[train].std(0)).float()
        return (x[train], y[train]), (x[test], y[test])

    def network_for(self, train: Pair, classes: int) -> nn.Module:
        """Return an untrained network, with weights from the global random numbers."""
        x, split = train[0], Split(train, train, train)
        features = math.prod(x.shape[1:])
        made: dict[str, Callable[[], nn.Module]] = {
            "MLP": lambda: mlp(features, classes, normalised=False),
            "BatchNorm MLP": lambda: mlp(features, classes, normalised=True),
            "BatchNorm CNN": lambda: convolutional(split, normalised=True),
            "ResNet": lambda: staged((8, 16, 32), 1, classes),
            "transformer": lambda: Transformer(x.shape[-1], x.shape[-2], classes),
            "words": lambda: Transformer(1, x.shape[1], classes, WORDS),
            "head": lambda: mlp(features, classes, normalised=False),
        }
        return made[self.network]()

    def train(self, train: Pair, classes: int, seed: int) -> nn.Module:
        """Return a network trained by Adam, with a learning rate that falls to zero, in evaluation mode."""
        x, y = train
        loss = loss_of(y)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            model = self.network_for(train, classes)
            optimiser = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=self.decay, fused=True)
            batch = 32 if len(x) <= 500 else 64 if len(x) <= 4000 else 256
            steps, step = self.epochs * math.ceil(len(x) / batch), 0
            for _ in range(self.epochs):
                for rows in torch.randperm(len(x)).split(batch):
                    for group in optimiser.param_groups:
                        group["lr"] = 3e-3 * 0.5 * (1 + math.cos(math.pi * step / steps))
                    step += 1
                    if len(rows) == 1:  # BatchNorm needs two
                        continue
                    optimiser.zero_grad()
                    loss(model(shifted(x[rows]) if self.augmented else x[rows]), y[rows]).backward()
                    optimiser.step()
        return model.eval()


def mlp(features: int, outputs: int, normalised: bool) -> nn.Module:
    """Return a network of two hidden layers of 64 units."""
    layers: list[nn.Module] = [nn.Flatten()]
    for size in (features, 64):
        layers += [nn.Linear(size, 64), *([nn.BatchNorm1d(64)] if normalised else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, outputs))


def shifted(x: Tensor) -> Tensor:
    """Return images, each shifted by up to an eighth of its side in both directions."""
    most = x.shape[-1] // 8
    wide = F.pad(x, (most, most, most, most))
    down, right = torch.randint(0, 2 * most + 1, (2, len(x)))
    side = torch.arange(x.shape[-1])
    wide = wide.gather(2, (down[:, None] + side)[:, None, :, None].expand(-1, x.shape[1], -1, wide.shape[-1]))
    return wide.gather(3, (right[:, None] + side)[:, None, None, :].expand(-1, x.shape[1], len(side), -1))


def strange(x: Tensor) -> Tensor:
    """Return inputs with the numbers of each in another order, twice as large; words are drawn at random."""
    generator = torch.Generator().manual_seed(0)
    if not x.is_floating_point():
        return torch.randint(1, WORDS, x.shape, generator=generator)
    flat = x.flatten(1)
    return 2 * flat.gather(1, torch.rand(flat.shape, generator=generator).argsort(1)).reshape(x.shape)


def _of_sklearn(read: Callable[..., Any], noise: float = 0.0) -> Callable[[Path], Pair]:
    def pair(folder: Path) -> Pair:
        x, y = (torch.as_tensor(part) for part in read(return_X_y=True))
        drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(7))
        x = x.float() + noise * x.float().std() * drawn
        x = x.reshape(-1, 1, 8, 8) if x.shape[1] == 64 else x
        return x, y.double().unsqueeze(1) if y.is_floating_point() else y.long()

    return pair


def table(name: str) -> Callable[[Path], Pair]:
    """Return a function that reads a table of ``experiments.package_tables``."""

    def pair(folder: Path) -> Pair:
        read = OwnTable.read(folder / f"{name}.npz")
        return read.x, read.y

    return pair


def _grey(name: str) -> Callable[[Path], Pair]:
    def pair(folder: Path) -> Pair:
        (x, y), _ = read_grey(folder, name, torch.device("cpu"))
        return F.avg_pool2d(x[:12_000], 2), y[:12_000]  # images of 14 x 14 pixels

    return pair


def _colour(folder: Path) -> Pair:
    x, y = cifar10(folder, "test", torch.device("cpu"))
    return F.avg_pool2d(x, 2), y


def _sentences(name: str) -> Callable[[Path], Pair]:
    def pair(folder: Path) -> Pair:
        with np.load(folder / f"{name}.npz", allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        return sentence_rows(arrays, "train", torch.arange(5000))

    return pair


def _uci(name: str) -> Callable[[Path], Pair]:
    def pair(folder: Path) -> Pair:
        read = read_split(folder / f"uci_{name}.npz", 0)
        return torch.cat([read.x_train, read.x_test]), torch.cat([read.y_train, read.y_test]).unsqueeze(1)

    return pair


def _in_standard_units(split: SplitTable) -> tuple[Pair, Pair]:
    x, y = split.training
    x_test, y_test = split.standardise(split.x_test, split.y_test)
    return (x.float(), y.float()), (x_test.float(), y_test.float())


def _clusters(folder: Path) -> Pair:
    x, y = datasets.make_classification(
        12_500, 20, n_informative=8, n_classes=6, n_clusters_per_class=3, flip_y=0.05, class_sep=1.2, random_state=0
    )
    return torch.as_tensor(x), torch.as_tensor(y).long()


def _moons(folder: Path) -> Pair:
    x, y = datasets.make_moons(1200, noise=0.35, random_state=0)
    return torch.as_tensor(x), torch.as_tensor(y).long()


def _friedman(folder: Path) -> Pair:
    x, y = datasets.make_friedman1(12_500, noise=1.0, random_state=0)
    return torch.as_tensor(x), torch.as_tensor(y).unsqueeze(1)


def _waves(folder: Path) -> Pair:
    """Return two inputs, and a curve with heavy noise that grows with the first one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1200, 2, generator=generator, dtype=torch.float64)
    drawn = torch.randn(1200, 4, generator=generator, dtype=torch.float64)
    heavy = drawn[:, 0] / (drawn[:, 1:].square().mean(1)).sqrt()  # Student's t with three degrees of freedom
    return x, ((6 * x[:, 0]).sin() * x[:, 1] + (0.1 + 0.2 * x[:, 0]) * heavy).unsqueeze(1)


READERS: dict[str, Callable[[Path], Pair]] = {
    "iris": _of_sklearn(datasets.load_iris),
    "wine classes": _of_sklearn(datasets.load_wine),
    "cancer": _of_sklearn(datasets.load_breast_cancer),
    "digits": _of_sklearn(datasets.load_digits),
    "noisy digits": _of_sklearn(datasets.load_digits, noise=0.7),
    "MNIST": _grey("mnist"),
    "Fashion-MNIST": _grey("fashion_mnist"),
    "CIFAR-10": _colour,
    "SST-2": _sentences("sst2"),
    "TREC": _sentences("trec6"),
    "clusters": _clusters,
    "moons": _moons,
    "diabetes": _of_sklearn(datasets.load_diabetes),
    "friedman": _friedman,
    "waves": _waves,
    **{name: _uci(name) for name in ("boston", "concrete", "energy", "yacht", "wine", "power", "kin8nm", "naval")},
}
CLASSES = (  # the data sets alternate between the halves; every set is in one of them
    (Task("iris", "MLP", 100, 60), Task("moons", "MLP", 150, 200)),
    (Task("wine classes", "MLP", 120, 60, 1e-3), Task("clusters", "MLP", 10_000, 12)),
    (Task("cancer", "BatchNorm MLP", 300, 60), Task("digits", "BatchNorm CNN", 600, 20)),
    (Task("digits", "BatchNorm CNN", 600, 40, 0.0, True), Task("noisy digits", "MLP", 400, 60)),
    (Task("digits", "transformer", 1000, 25, seeds=1), Task("noisy digits", "ResNet", 500, 10, seeds=1)),
    (Task("MNIST", "BatchNorm CNN", 1000, 15, seeds=1), Task("Fashion-MNIST", "transformer", 1500, 20, seeds=1)),
    (Task("CIFAR-10", "ResNet", 800, 12, 0.0, True, 1), Task("Fashion-MNIST", "BatchNorm CNN", 3000, 6, 0.0, True, 1)),
    (Task("SST-2", "words", 1000, 10, seeds=1), Task("TREC", "words", 1000, 15, seeds=1)),
    (Task("minilm_sst2", "head", 400, 40), Task("minilm_trec6", "head", 300, 40)),
    (Task("c_german", "MLP", 600, 30), Task("c_vehicle", "MLP", 500, 100)),
    (Task("c_saheart", "MLP", 300, 60, 1e-3), Task("c_vowel", "BatchNorm MLP", 600, 40)),
    (Task("c_contraceptive", "BatchNorm MLP", 900, 40), Task("c_satimage", "MLP", 3000, 30)),
    (Task("c_phoneme", "MLP", 2000, 60), Task("c_splice", "MLP", 200, 30)),
)
NUMBERS = (
    (Task("diabetes", "MLP", 300, 60), Task("boston", "MLP", 400, 100)),
    (Task("concrete", "MLP", 800, 100), Task("energy", "BatchNorm MLP", 600, 60)),
    (Task("yacht", "MLP", 200, 150), Task("wine", "MLP", 1200, 60)),
    (Task("power", "BatchNorm MLP", 3000, 20), Task("kin8nm", "MLP", 2000, 40)),
    (Task("waves", "MLP", 120, 200), Task("friedman", "MLP", 10_000, 12)),
    (Task("naval", "MLP", 1500, 60, 1e-4), Task("r_wage1", "MLP", 400, 60)),
    (Task("r_sacramento", "BatchNorm MLP", 600, 60, 1e-3), Task("r_bdims", "MLP", 300, 60, 1e-3)),
)
GAPS = (  # a seed is the input along which the middle third of the rows is left out
    (Task("boston", "MLP", 300, 100, gap=True), Task("concrete", "MLP", 600, 60, gap=True)),
    (Task("energy", "MLP", 500, 60, gap=True), Task("yacht", "BatchNorm MLP", 200, 100, gap=True)),
    (Task("wine", "MLP", 800, 40, gap=True), Task("power", "MLP", 1500, 30, gap=True)),
)
_PAIRS = (*CLASSES, *NUMBERS, *GAPS)
_HALVES = {"digits": 0, "noisy digits": 1, "Fashion-MNIST": 1, "SST-2": 0, "minilm_sst2": 0}  # of sets used twice


def _numbered(task: Task, half: int) -> Task:
    values = {**vars(task), "half": _HALVES.get(task.data, half)}
    return Task(**values)


TASKS = {each.name: each for pair in _PAIRS for each in (_numbered(pair[0], 0), _numbered(pair[1], 1))}
