"""Handwritten digits: what error bars do for an overconfident classifier."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

import lapwing as lw
from lapwing.experiments.result import Result, Row, plain
from lapwing.experiments.training import Recipe, batches, best_seconds, epoch_seconds, trained
from lapwing.metrics import classification
from lapwing.metrics.ood import auroc


@dataclass(frozen=True)
class Digits:
    """The 8 x 8 digits of scikit-learn; half of them train the network."""

    recipe: Recipe = Recipe(hidden=(64, 64), activation="relu", epochs=300, learning_rate=3e-3)
    test_share: float = 0.5
    seed: int = 0


@dataclass(frozen=True, eq=False)
class _Images:
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    shuffled: Tensor  # the test images with the pixels of each in random order
    rotated: Tensor  # the test images turned by a quarter


def run(settings: Digits = Digits()) -> Result:
    """Train once; score the plain network and its posterior on the same test images."""
    begun = time.perf_counter()
    images = _images(settings)
    model = trained(images.x_train, images.y_train, 10, settings.recipe, settings.seed)
    seconds = {"training": time.perf_counter() - begun}
    data = batches(images.x_train, images.y_train, settings.recipe.batch_size)
    seconds["epoch"] = epoch_seconds(model, data)
    rows, arrays = [], {}
    for name, method in {"plain network": lw.MapOnly(), "posterior": None}.items():
        taken, fitted = best_seconds(
            lambda method=method: lw.fit(model, data, "classification", method=method, progress=False)  # type: ignore[misc]
        )
        assert isinstance(fitted, lw.Fitted)
        probs = {key: fitted.predict(getattr(images, key)).probs for key in ("x_test", "shuffled", "rotated")}
        seconds[f"fit {name}"] = taken
        rows.append(Row(name, {**_scores(probs, images.y_test), "fit / epoch": taken / seconds["epoch"]}))
        for key, found in probs.items():
            arrays[f"{name}/{key}"] = found.amax(1).tolist()
        arrays[f"{name}/correct"] = (probs["x_test"].argmax(1) == images.y_test).double().tolist()
    seconds["total"] = time.perf_counter() - begun
    return Result("digits", plain(settings), settings.seed, tuple(rows), seconds, arrays)


def _scores(probs: dict[str, Tensor], y: Tensor) -> dict[str, float]:
    doubt = {key: 1 - found.amax(1) for key, found in probs.items()}
    return {
        "NLL": classification.nll(probs["x_test"], y),
        "accuracy": classification.accuracy(probs["x_test"], y),
        "ECE": classification.ece(probs["x_test"], y),
        "Brier": classification.brier(probs["x_test"], y),
        "AUROC shuffled": auroc(doubt["x_test"], doubt["shuffled"]),
        "AUROC rotated": auroc(doubt["x_test"], doubt["rotated"]),
    }


def _images(settings: Digits) -> _Images:
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x, y, test_size=settings.test_share, random_state=settings.seed, stratify=y)
    x_train, x_test, y_train, y_test = (torch.as_tensor(part) for part in parts)
    x_train, x_test = x_train.float() / 16, x_test.float() / 16
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.rand(x_test.shape, generator=generator).argsort(1)
    rotated = x_test.reshape(-1, 8, 8).rot90(1, (1, 2)).reshape(-1, 64)
    return _Images(x_train, y_train.long(), x_test, y_test.long(), x_test.gather(1, order), rotated)
