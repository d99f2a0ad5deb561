"""Handwritten digits from a noisy sensor: error bars for a classifier that is surer than it should be."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import lapwing as lw
from experiments.result import Result, Row, plain
from experiments.training import Batches, Recipe, batches, best_seconds, epoch_seconds, trained
from lapwing.metrics import classification
from lapwing.metrics.ood import auroc


@dataclass(frozen=True)
class Digits:
    """The 8 x 8 digits of scikit-learn, with noise on every pixel.

    Pixels run from zero to one; at the default noise a network of this size learns its training images by heart and
    is wrong on a third of the others without noticing. ``noise=0`` gives the clean digits, which the plain network
    already knows well: there a prior chosen by the evidence is too weak, and the posterior less sure than it could be.
    """

    recipe: Recipe = Recipe(hidden=(64, 64), epochs=300, learning_rate=3e-3, weight_decay=3e-4)
    noise: float = 0.5
    test_share: float = 0.4
    seed: int = 0


@dataclass(frozen=True, eq=False)
class _Images:
    test: Tensor
    shuffled: Tensor  # the test images with the pixels of each in random order
    rotated: Tensor  # the test images turned by a quarter


@dataclass(frozen=True, eq=False)
class _Labelled:
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def run(settings: Digits) -> Result:
    """Train once; score the plain network and its posteriors on the same test images."""
    begun = time.perf_counter()
    data = _split(settings)
    model = trained(*data.train, 10, settings.recipe, settings.seed)
    seconds = {"training": time.perf_counter() - begun}
    train = batches(*data.train, settings.recipe.batch_size)
    seconds["epoch"] = epoch_seconds(model, train)
    images = _images(data.test[0], settings.seed)
    rows, arrays, fitted = [], {}, _fitted(model, train)
    for name, (taken, posterior) in fitted.items():
        probs = {each.name: posterior.predict(getattr(images, each.name)).probs for each in fields(images)}
        seconds[f"fit {name}"] = taken
        rows.append(Row(name, {**_scores(probs, data.test[1]), "fit / epoch": taken / seconds["epoch"]}))
        arrays.update({f"{name}/{key}": found.amax(1).tolist() for key, found in probs.items()})
        arrays[f"{name}/correct"] = (probs["test"].argmax(1) == data.test[1]).double().tolist()
    seconds["total"] = time.perf_counter() - begun
    chosen = {name: float(posterior.prior.values) for name, (_, posterior) in fitted.items()}
    notes = tuple(f"{name}: prior precision {value:.3g}" for name, value in chosen.items() if name != "plain network")
    return Result("digits", plain(settings), settings.seed, tuple(rows), seconds, arrays, notes)


def _fitted(model: nn.Module, train: Batches) -> dict[str, tuple[float, lw.Fitted]]:
    """By name the time to fit, tuning included, and the posterior."""
    fit = partial(lw.fit, model, train, "classification", progress=False)
    return {
        "plain network": best_seconds(lambda: fit(method=lw.baselines.MapOnly())),
        "posterior": best_seconds(fit),
        "posterior, last layer": best_seconds(lambda: fit(method=lw.Full(), weights=lw.last_layer)),
    }


def _scores(probs: dict[str, Tensor], y: Tensor) -> dict[str, float]:
    doubt = {key: 1 - found.amax(1) for key, found in probs.items()}
    return {
        "NLL": classification.nll(probs["test"], y),
        "accuracy": classification.accuracy(probs["test"], y),
        "ECE": classification.ece(probs["test"], y),
        "Brier": classification.brier(probs["test"], y),
        "AUROC shuffled": auroc(doubt["test"], doubt["shuffled"]),
        "AUROC rotated": auroc(doubt["test"], doubt["rotated"]),
    }


def _split(settings: Digits) -> _Labelled:
    x, y = load_digits(return_X_y=True)
    noisy = x / 16 + settings.noise * np.random.default_rng(settings.seed).standard_normal(x.shape)
    train_x, test_x, train_y, test_y = train_test_split(
        noisy, y, test_size=settings.test_share, random_state=settings.seed, stratify=y
    )
    pairs = ((train_x, train_y), (test_x, test_y))
    return _Labelled(*((torch.as_tensor(x).float(), torch.as_tensor(y).long()) for x, y in pairs))


def _images(test: Tensor, seed: int) -> _Images:
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(test.shape, generator=generator).argsort(1)
    rotated = test.reshape(-1, 8, 8).rot90(1, (1, 2)).reshape(-1, 64)
    return _Images(test, test.gather(1, order), rotated)
