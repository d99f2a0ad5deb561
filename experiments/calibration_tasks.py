"""Tasks for the experiment ``calibration``: data, network and training, so that no method is judged on one kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn import datasets
from torch import Tensor, nn

from experiments.data import Images
from lapwing.demo.training import TrainingSettings, optimise

Pair = tuple[Tensor, Tensor]
QUICK = ("noisy digits, MLP, unregularised", "breast cancer, MLP, overtrained")  # tasks to try the experiment out
WORDS, LENGTH = 4000, 24  # size of the vocabulary of hashed words, and tokens of a sentence


@dataclass(frozen=True, eq=False)
class Split:
    """Rows to train on, rows to validate on, rows to test on, and strange inputs if the data have such."""

    train: Pair
    validation: Pair
    test: Pair
    far: Tensor | None = None

    @property
    def classes(self) -> int:
        """The number of classes; one for a real target."""
        return 1 if self.train[1].is_floating_point() else int(torch.cat([self.train[1], self.test[1]]).max()) + 1


@dataclass(frozen=True)
class Task:
    """Data, a network and a way to train it. ``half`` says on which half constants were chosen (0) or tried (1)."""

    name: str
    data: str
    network: str
    training: str
    half: int

    @property
    def needs_folder(self) -> bool:
        """Whether the data come from the data folder."""
        return self.data not in TABLES

    def trained(self, split: Split, seed: int) -> nn.Module:
        """Return the network, trained on the split's training rows, in evaluation mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = NETWORKS[self.network](split)
        model = model.to(split.train[1].device)
        optimise(model, *split.train, RECIPES[self.training], seed)
        return model


def mlp(split: Split, normalised: bool = False) -> nn.Module:
    """Return a network of two hidden layers of 128 units."""
    layers: list[nn.Module] = [nn.Flatten()]
    size = split.train[0][0].numel()
    for _ in range(2):
        layers += [nn.Linear(size, 128), *([nn.BatchNorm1d(128)] if normalised else []), nn.ReLU()]
        size = 128
    return nn.Sequential(*layers, nn.Linear(128, split.classes))


def convolutional(split: Split, normalised: bool = False) -> nn.Module:
    """Return two convolutions with pooling, and two linear layers."""
    side = split.train[0].shape[-1]
    norm = lambda channels: [nn.BatchNorm2d(channels)] if normalised else []
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), *norm(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), *norm(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * (side // 4) ** 2, 64), nn.ReLU(), nn.Linear(64, split.classes),
    )  # fmt: skip


class Transformer(nn.Module):
    """One block of attention over the rows of an image, or over words, and a mean over them."""

    def __init__(self, features: int, length: int, classes: int, words: int | None = None, width: int = 32) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(features, width) if words is None else nn.Embedding(words, width)
        self.place = nn.Parameter(0.1 * torch.randn(length, width))
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, classes)
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.squeeze(1) if x.ndim == 4 else x) + self.place
        q, k, v = self.queries(self.norm(h)).chunk(3, -1)
        h = h + self.out((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v)
        return self.last((h + self.inner(h)).mean(1))  # type: ignore[no-any-return]


def transformer(split: Split) -> nn.Module:
    """Return a small transformer for images, whose rows are its tokens, or for words."""
    x = split.train[0]
    if not x.is_floating_point():
        return Transformer(1, x.shape[1], split.classes, WORDS)
    return Transformer(x.shape[-1], x.shape[-2], split.classes)


def words_mlp(split: Split) -> nn.Module:
    """Return embeddings of words, their mean, and a hidden layer."""
    return nn.Sequential(
        nn.Embedding(WORDS, 32), MeanOfTokens(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, split.classes)
    )


class MeanOfTokens(nn.Module):
    """The mean over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def small(split: Split) -> nn.Module:
    """Return a network of two hidden layers of 16 units, on which every method can be tried."""
    inputs = split.train[0][0].numel()
    layers = (nn.Linear(inputs, 16), nn.Tanh(), nn.Dropout(0.05), nn.Linear(16, 16), nn.Tanh())
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(16, split.classes))


NETWORKS: dict[str, Callable[[Split], nn.Module]] = {
    "MLP": mlp,
    "small MLP": small,
    "BatchNorm MLP": lambda split: mlp(split, normalised=True),
    "CNN": convolutional,
    "BatchNorm CNN": lambda split: convolutional(split, normalised=True),
    "transformer": transformer,
    "words": words_mlp,
}
RECIPES = {
    "regularised": TrainingSettings(epochs=40, batch_size=64, learning_rate=2e-3, weight_decay=3e-3),
    "unregularised": TrainingSettings(epochs=40, batch_size=64, learning_rate=2e-3, weight_decay=0.0),
    "overtrained": TrainingSettings(epochs=150, batch_size=64, learning_rate=2e-3, weight_decay=0.0, max_steps=12_000),
}


def _table(read: Callable[..., Any], noise: float = 0.0, image: bool = False) -> Callable[..., Split]:
    """Return a function that splits a table of scikit-learn: 40 % to train, 30 % to validate, 30 % to test."""

    def split(folder: Path | None, seed: int, validation: int) -> Split:
        x, y = (torch.as_tensor(part) for part in read(return_X_y=True))
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(x), generator=generator)
        ends = [4 * len(x) // 10, 4 * len(x) // 10 + min(validation, 3 * len(x) // 10)]
        x = x.float() + noise * x.float().std() * torch.randn(x.shape, generator=generator)
        x = (x - x[order[: ends[0]]].mean(0)) / (x[order[: ends[0]]].std(0) + (1.0 if image else 1e-6))
        x = x.reshape(-1, 1, 8, 8) if image else x
        parts = [(x[rows], y[rows].long()) for rows in (order[: ends[0]], order[ends[0] : ends[1]], order[ends[1] :])]
        return Split(parts[0], parts[1], parts[2])

    return split


def _images(name: str, far: str) -> Callable[..., Split]:
    """Return a function that reads 4,000 training images, validation images from the rest, and 3,000 test images."""

    def split(folder: Path | None, seed: int, validation: int) -> Split:
        assert folder is not None
        cpu = torch.device("cpu")
        images, strange = Images.read(folder, name, cpu, 4000 + validation, seed), Images.read(folder, far, cpu, 10)
        x, y = images.train
        test = (images.test[0][:3000], images.test[1][:3000])
        return Split((x[:4000], y[:4000]), (x[4000:], y[4000:]), test, strange.test[0][:1000])

    return split


def _sentences(folder: Path | None, seed: int, validation: int) -> Split:
    """Return sentences of SST-2 as hashed words: 4,000 to train, others to validate, the test sentences to test."""
    assert folder is not None
    with np.load(folder / "sst2.npz", allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    order = torch.randperm(len(arrays["y_train"]), generator=torch.Generator().manual_seed(seed))[: 4000 + validation]
    x, y = sentence_rows(arrays, "train", order)
    test = sentence_rows(arrays, "test", torch.arange(len(arrays["y_test"])))
    return Split((x[:4000], y[:4000]), (x[4000:], y[4000:]), test)


def sentence_rows(arrays: dict[str, Any], name: str, rows: Tensor) -> Pair:
    """Return the sentences in these rows and their labels."""
    text, offsets = arrays[f"text_{name}"].tobytes(), arrays[f"off_{name}"]
    x = torch.stack([_tokens(text, offsets, int(row)) for row in rows])
    return x, torch.as_tensor(arrays[f"y_{name}"][rows.numpy()]).long()


def _tokens(text: bytes, offsets: Any, row: int) -> Tensor:
    """Return the words of one sentence as numbers below WORDS, padded with zeros."""
    words = text[int(offsets[row]) : int(offsets[row + 1])].decode().lower().split()[:LENGTH]
    numbers = [1 + int.from_bytes(word.encode(), "little") % 999_983 % (WORDS - 1) for word in words]
    return F.pad(torch.tensor(numbers, dtype=torch.long), (0, LENGTH - len(numbers)))


TABLES = {
    "digits": _table(datasets.load_digits, image=True),
    "noisy digits": _table(datasets.load_digits, noise=0.7, image=True),
    "breast cancer": _table(datasets.load_breast_cancer),
    "wine": _table(datasets.load_wine),
    "iris": _table(datasets.load_iris, noise=0.2),
}
SETS: dict[str, Callable[..., Split]] = {
    **TABLES,
    "MNIST": _images("mnist", "fashion_mnist"),
    "Fashion-MNIST": _images("fashion_mnist", "mnist"),
    "SST-2": _sentences,
}
COMBINATIONS = (
    ("digits", "MLP", "regularised"), ("digits", "MLP", "unregularised"), ("digits", "MLP", "overtrained"),
    ("digits", "BatchNorm MLP", "unregularised"), ("digits", "CNN", "unregularised"),
    ("digits", "transformer", "unregularised"), ("noisy digits", "MLP", "unregularised"),
    ("noisy digits", "BatchNorm MLP", "overtrained"), ("breast cancer", "MLP", "regularised"),
    ("breast cancer", "MLP", "overtrained"), ("wine", "MLP", "unregularised"), ("iris", "MLP", "unregularised"),
    ("MNIST", "MLP", "unregularised"), ("MNIST", "CNN", "regularised"), ("MNIST", "BatchNorm CNN", "unregularised"),
    ("MNIST", "CNN", "overtrained"), ("MNIST", "transformer", "unregularised"), ("Fashion-MNIST", "MLP", "regularised"),
    ("Fashion-MNIST", "MLP", "overtrained"), ("Fashion-MNIST", "CNN", "unregularised"),
    ("Fashion-MNIST", "BatchNorm CNN", "unregularised"), ("Fashion-MNIST", "BatchNorm CNN", "overtrained"),
    ("SST-2", "words", "unregularised"), ("SST-2", "transformer", "regularised"),
    ("SST-2", "transformer", "overtrained"),
)  # fmt: skip
METHOD_TASKS = (  # for --methods
    Task("breast cancer, small MLP, regularised", "breast cancer", "small MLP", "regularised", 1),
    Task("iris, small MLP, overtrained", "iris", "small MLP", "overtrained", 1),
    Task("wine, small MLP, unregularised", "wine", "small MLP", "unregularised", 1),
)
TASKS = tuple(Task(f"{d}, {n}, {t}", d, n, t, i % 2) for i, (d, n, t) in enumerate(COMBINATIONS))


def quick(task: Task) -> Task:
    """Return the task with a short training, to try the experiment out."""
    return replace(task, training="regularised")
