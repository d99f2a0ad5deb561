"""Handwritten digits: a classifier as it comes, one for noisy images that is too confident, and one with BatchNorm."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

import lapwing as lw
from lapwing import metrics
from lapwing.decisions.strange import default_score, scores_of
from lapwing.demo.result import Result, Row, mean_scores, plain
from lapwing.demo.training import TrainingSettings, batches, fits, trained
from lapwing.plots import AnswerProbabilities, reliability

BINS = 10  # of the reliability diagrams


@dataclass(frozen=True)
class Digits:
    """Settings: the 8 x 8 digits of scikit-learn, with pixels from zero to one.

    ``noise`` is the standard deviation that is added to every pixel of the noisy images. ``repeats`` is how often
    data are split and a network is trained; scores are means over the repeats.
    """

    recipe: TrainingSettings = TrainingSettings(
        hidden=(128, 128), activation="relu", learning_rate=1e-3, weight_decay=1e-4
    )
    noise: float = 0.5
    test_share: float = 0.4
    validation: int = 200
    repeats: int = 3
    seed: int = 0


def run(settings: Digits) -> Result:
    """Train a network for each task and repeat; score all ways to predict on the same test images."""
    start = time.perf_counter()
    tasks = {
        "digits": (0.0, settings.recipe),
        "noisy digits": (settings.noise, settings.recipe),
        "digits, BatchNorm": (0.0, replace(settings.recipe, batch_norm=True)),
    }
    rows: list[Row] = []
    arrays: dict[str, list[float]] = {}
    for task, (noise, recipe) in tasks.items():
        scores: dict[str, list[dict[str, float]]] = {}
        for seed in range(settings.seed, settings.seed + settings.repeats):
            train, held_out, (x, y) = split(settings, noise, seed)
            model = trained(*train, 10, recipe, seed)
            for name, posterior in fits(model, batches(*train, recipe.batch_size), held_out).items():
                predictive = posterior.predict(x)
                scores.setdefault(name, []).append(_scores(posterior, predictive, x, y, shuffled(x, seed)))
                confidence, label = predictive.probs.max(1)
                for key, column in (("confidence", confidence), ("correct", (label == y).float())):
                    arrays.setdefault(f"{task}/{name}/{key}", []).extend(column.tolist())
        rows += [Row(name, mean_scores(repeats), task) for name, repeats in scores.items()]
    notes = (
        f"means over {settings.repeats} splits; {settings.validation} images for validation, {len(y)} for testing",
        "AUROC: do images with shuffled pixels have a higher score than digits? by the default score of ood",
    )
    seconds = {"total": time.perf_counter() - start}
    return Result("digits", plain(settings), settings.seed, tuple(rows), seconds, arrays, notes)


def split(settings: Digits, noise: float, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return images and labels for training, for validation and for testing."""
    x, y = load_digits(return_X_y=True)
    x = x / 16 + noise * np.random.default_rng(seed).standard_normal(x.shape)
    parts: list[tuple[Any, Any]] = []
    for size in (settings.test_share, settings.validation):
        x, part_x, y, part_y = train_test_split(x, y, test_size=size, random_state=seed, stratify=y)
        parts.insert(0, (part_x, part_y))
    return [(torch.as_tensor(x).float(), torch.as_tensor(y).long()) for x, y in [(x, y), *parts]]


def shuffled(x: Tensor, seed: int) -> Tensor:
    """Return the images with the pixels of each in random order."""
    order = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)).argsort(1)
    return x.gather(1, order)


def _scores(posterior: lw.Fitted, predictive: Any, x: Tensor, y: Tensor, strange: Tensor) -> dict[str, float]:
    """Return the scores of predictions for test images, and whether strange ones are told from these."""
    by = default_score(posterior)
    return {
        "NLL": -float(predictive.log_prob(y).mean()),
        "ECE": metrics.ece(predictive.probs, y),
        "accuracy": metrics.accuracy(predictive.probs, y),
        "AUROC": metrics.auroc(*(scores_of(posterior, each, by, None, False) for each in (x, strange))),
    }


def draw_reliability(axis: Any, result: Result, task: str, names: Sequence[str]) -> None:
    """Draw how often predictions are right against how confident they are, over the test images of all repeats."""
    drawn, title = {}, [f"{task}:"]
    for name in names:
        confidence, right = (torch.tensor(result.arrays[f"{task}/{name}/{key}"]) for key in ("confidence", "correct"))
        drawn[name] = AnswerProbabilities(confidence, right, of_classes=True)
        title.append(
            f"{name} {100 * float(confidence.mean()):.0f} % confident, {100 * float(right.mean()):.0f} % right"
        )
    reliability(drawn, bins=BINS, ax=axis)
    axis.set_title("\n".join(title), fontsize=11)
