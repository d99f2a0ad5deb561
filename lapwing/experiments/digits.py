"""Handwritten digits: what error bars do for a confident classifier, on digits and on images that are none."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import lapwing as lw
from lapwing.experiments.result import Result, Row, plain
from lapwing.experiments.training import Batches, Recipe, batches, best_seconds, epoch_seconds, trained
from lapwing.metrics import classification
from lapwing.metrics.ood import auroc


@dataclass(frozen=True)
class Digits:
    """The 8 x 8 digits of scikit-learn: some to train on, some to choose a prior by, the rest to test."""

    recipe: Recipe = Recipe(hidden=(64, 64), epochs=300, learning_rate=3e-3)
    test_share: float = 0.5
    validation_share: float = 0.1
    precisions: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
    seed: int = 0


@dataclass(frozen=True, eq=False)
class _Images:
    test: Tensor
    shuffled: Tensor  # the test images with the pixels of each in random order
    rotated: Tensor  # the test images turned by a quarter


@dataclass(frozen=True, eq=False)
class _Labelled:
    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
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
    rows, arrays, fitted = [], {}, _fitted(model, train, data, settings)
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


def _fitted(model: nn.Module, train: Batches, data: _Labelled, settings: Digits) -> dict[str, tuple[float, lw.Fitted]]:
    """By name the time to fit and the posterior."""
    point = best_seconds(lambda: lw.fit(model, train, "classification", method=lw.MapOnly(), progress=False))
    default = best_seconds(lambda: lw.fit(model, train, "classification", progress=False))
    chosen = best_seconds(lambda: _by_validation(model, train, data.validation, settings.precisions))
    return {"plain network": point, "posterior": default, "posterior, validated prior": chosen}


def _by_validation(
    model: nn.Module, train: Batches, validation: tuple[Tensor, Tensor], precisions: tuple[float, ...]
) -> lw.Fitted:
    """The prior with the lowest NLL on images that the network was not trained on: one fit serves them all."""
    fitted = lw.fit(model, train, "classification", prior=precisions[0], progress=False)
    x, y = validation
    return min(
        (fitted.with_prior(precision) for precision in precisions),
        key=lambda candidate: classification.nll(candidate.predict(x).probs, y),
    )


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
    rest_x, test_x, rest_y, test_y = train_test_split(
        x / 16, y, test_size=settings.test_share, random_state=settings.seed, stratify=y
    )
    share = settings.validation_share / (1 - settings.test_share)
    train_x, validation_x, train_y, validation_y = train_test_split(
        rest_x, rest_y, test_size=share, random_state=settings.seed, stratify=rest_y
    )
    pairs = ((train_x, train_y), (validation_x, validation_y), (test_x, test_y))
    return _Labelled(*((torch.as_tensor(x).float(), torch.as_tensor(y).long()) for x, y in pairs))


def _images(test: Tensor, seed: int) -> _Images:
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(test.shape, generator=generator).argsort(1)
    rotated = test.reshape(-1, 8, 8).rot90(1, (1, 2)).reshape(-1, 64)
    return _Images(test, test.gather(1, order), rotated)
