"""Handwritten digits with noise on every pixel: error bars for an overconfident classifier."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

import lapwing as lw
from lapwing import metrics
from lapwing.demo.figures import INK, OTHER, PLAIN, POSTERIOR, new_figure, save, share_vertical_range
from lapwing.demo.result import Result, Row, plain
from lapwing.demo.training import Recipe, batches, best_seconds, epoch_seconds, trained


@dataclass(frozen=True)
class Digits:
    """Settings: the 8 x 8 digits of scikit-learn, with noise on every pixel.

    Pixels run from zero to one. At the default noise a network of this size memorises its training images and is wrong,
    with high confidence, on a third of the others. ``noise=0`` gives the clean digits, on which the plain network is
    well calibrated: there the evidence chooses too weak a prior, and the posterior is less confident than it could be.
    """

    recipe: Recipe = Recipe(hidden=(64, 64), epochs=300, learning_rate=3e-3, weight_decay=3e-4)
    noise: float = 0.5
    test_share: float = 0.4
    seed: int = 0


def run(settings: Digits) -> Result:
    """Train once; score the plain network and its posteriors on the same test images."""
    start = time.perf_counter()
    train, (x, y) = _split(settings)
    model = trained(*train, 10, settings.recipe, settings.seed)
    seconds = {"training": time.perf_counter() - start}
    data = batches(*train, settings.recipe.batch_size)
    seconds["epoch"] = epoch_seconds(model, data)
    fit = partial(lw.fit, model, data, "classification", progress=False)
    fits: dict[str, Callable[[], lw.Fitted]] = {
        "plain network": lambda: fit(method=lw.baselines.MapOnly()),
        "posterior": fit,
        "posterior, last layer": lambda: fit(method=lw.Full(), weights=lw.last_layer),
    }
    images = _images(x, settings.seed)
    arrays: dict[str, list[float]] = {}
    rows, notes = [], []
    for name, work in fits.items():
        seconds[f"fit {name}"], posterior = best_seconds(work)
        probs = {kind: posterior.predict(x).probs for kind, x in images.items()}
        relative = seconds[f"fit {name}"] / seconds["epoch"]
        rows.append(Row(name, {**_scores(probs, y), "fit / epoch": relative}))
        arrays |= {f"{name}/{kind}": values.amax(1).tolist() for kind, values in probs.items()}
        arrays[f"{name}/correct"] = (probs["test"].argmax(1) == y).double().tolist()
        notes.append(f"{name}: prior precision {float(posterior.prior.values):.3g}")
    seconds["total"] = time.perf_counter() - start
    # The plain network has no prior.
    return Result("digits", plain(settings), settings.seed, tuple(rows), seconds, arrays, tuple(notes[1:]))


def _scores(probs: dict[str, Tensor], y: Tensor) -> dict[str, float]:
    """Return the scores on the test images; images of other kinds should be predicted with less confidence."""
    doubt = {kind: 1 - values.amax(1) for kind, values in probs.items()}
    return {
        "NLL": metrics.categorical_nll(probs["test"], y),
        "accuracy": metrics.accuracy(probs["test"], y),
        "ECE": metrics.ece(probs["test"], y),
        "Brier": metrics.brier(probs["test"], y),
        "AUROC shuffled": metrics.auroc(doubt["test"], doubt["shuffled"]),
        "AUROC rotated": metrics.auroc(doubt["test"], doubt["rotated"]),
    }


def _split(settings: Digits) -> list[tuple[Tensor, Tensor]]:
    """Return images and labels for training and for testing."""
    x, y = load_digits(return_X_y=True)
    noisy = x / 16 + settings.noise * np.random.default_rng(settings.seed).standard_normal(x.shape)
    options = {"test_size": settings.test_share, "random_state": settings.seed, "stratify": y}
    train_x, test_x, train_y, test_y = (torch.as_tensor(part) for part in train_test_split(noisy, y, **options))
    return [(train_x.float(), train_y.long()), (test_x.float(), test_y.long())]


def _images(test: Tensor, seed: int) -> dict[str, Tensor]:
    """Return the test images, the same with the pixels of each in random order, and the same turned by 90 degrees."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(test.shape, generator=generator).argsort(1)
    rotated = test.reshape(-1, 8, 8).rot90(1, (1, 2)).reshape(-1, 64)
    return {"test": test, "shuffled": test.gather(1, order), "rotated": rotated}


def picture(result: Result, path: Path) -> None:
    """Draw for every method its reliability diagram, and below its confidence on digits and on other images."""
    count = len(result.rows)
    figure, axes = new_figure(2, count, (3.6 * count, 6.8))
    for column, row in enumerate(result.rows):
        _reliability(axes[0][column], row, result.arrays)
        _confidence(axes[1][column], row.name, result.arrays)
    axes[0][0].set_ylabel("accuracy in bin")
    axes[1][0].set_ylabel("share of images")
    share_vertical_range(axes[1])
    figure.legend(*axes[1][0].get_legend_handles_labels(), frameon=False, ncols=3, loc="outside lower center")
    save(figure, path)


def _reliability(axis: Any, row: Row, arrays: Mapping[str, list[float]]) -> None:
    confidence, correct = (torch.tensor(arrays[f"{row.name}/{key}"]) for key in ("test", "correct"))
    calibration = metrics.calibration(confidence, correct)
    bins = len(calibration.weight)
    # Bins with few images are pale, because their accuracy is uncertain.
    for i, (height, weight) in enumerate(zip(calibration.accuracy.tolist(), calibration.weight.tolist(), strict=True)):
        if weight > 0:
            axis.bar((i + 0.5) / bins, height, width=0.92 / bins, color=POSTERIOR, alpha=min(1.0, 0.3 + 7 * weight))
    axis.plot([0, 1], [0, 1], color=INK, linestyle="--", linewidth=1)
    axis.set(xlim=(0, 1), ylim=(0, 1.01), xlabel="confidence")
    axis.set_title(f"{row.name}\nNLL {row.scores['NLL']:.3f}, ECE {row.scores['ECE']:.3f}", fontsize=10)


def _confidence(axis: Any, name: str, arrays: Mapping[str, list[float]]) -> None:
    edges = [i / 20 for i in range(21)]
    styles = {"test": ("test digits", POSTERIOR), "shuffled": ("shuffled pixels", PLAIN), "rotated": ("rotated", OTHER)}
    for key, (label, colour) in styles.items():
        values = arrays[f"{name}/{key}"]
        weights = [1 / len(values)] * len(values)
        axis.hist(values, edges, weights=weights, color=colour, alpha=0.15)
        axis.hist(values, edges, weights=weights, histtype="step", color=colour, linewidth=1.8, label=label)
    axis.set(xlim=(0, 1), xlabel="confidence")
