"""The three experiments of the demo: digits, diabetes patients, and a curve with a gap in the data."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

import lapwing as lw
from lapwing.decisions.guarantees import default_score, score_inputs
from lapwing.demo.result import ExperimentReport, Result, Row, mean_scores, plain, save, share_vertical_range
from lapwing.demo.training import (
    DEFAULT,
    PLAIN,
    VALIDATED,
    SplitTable,
    TrainingSettings,
    batches,
    fits,
    predict,
    scores,
    train_mlp,
)
from lapwing.predictives.base import LabelPredictive

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = 10  # of the reliability diagrams

INTERVALS = "NLL: how improbable the true values were, lower is better; best are narrow intervals that cover 95 %"
ERRORS = "RMSE: error of the mean; CRPS: error of the whole distribution"


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


def run_digits(settings: Digits) -> Result:
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
        by_name: dict[str, list[dict[str, float]]] = {}
        for seed in range(settings.seed, settings.seed + settings.repeats):
            train, held_out, (x, y) = split_digits(settings, noise, seed)
            model = train_mlp(*train, 10, recipe, seed)
            for name, posterior in fits(model, batches(*train, recipe.batch_size), held_out).items():
                predictive = posterior.predict(x)
                by_name.setdefault(name, []).append(_label_scores(posterior, predictive, x, y, shuffle_pixels(x, seed)))
                confidence, label = predictive.probs.max(1)
                for key, column in (("confidence", confidence), ("correct", (label == y).float())):
                    arrays.setdefault(f"{task}/{name}/{key}", []).extend(column.tolist())
        rows += [Row(name, mean_scores(repeats), task) for name, repeats in by_name.items()]
    notes = (
        f"means over {settings.repeats} splits; {settings.validation} images for validation, {len(y)} for testing",
        "NLL: how improbable the true classes were; ECE: distance of confidence from accuracy; lower is better",
        "AUROC: do images with shuffled pixels have a higher score than digits? by the default score of ood",
    )
    seconds = {"total": time.perf_counter() - start}
    return Result("digits", plain(settings), settings.seed, tuple(rows), seconds, arrays, notes)


def split_digits(settings: Digits, noise: float, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return images and labels for training, for validation and for testing."""
    x, y = load_digits(return_X_y=True)
    x = x / 16 + noise * np.random.default_rng(seed).standard_normal(x.shape)
    parts: list[tuple[Any, Any]] = []
    for size in (settings.test_share, settings.validation):
        x, part_x, y, part_y = train_test_split(x, y, test_size=size, random_state=seed, stratify=y)
        parts.insert(0, (part_x, part_y))
    return [(torch.as_tensor(x).float(), torch.as_tensor(y).long()) for x, y in [(x, y), *parts]]


def shuffle_pixels(x: Tensor, seed: int) -> Tensor:
    """Return the images with the pixels of each in random order."""
    order = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)).argsort(1)
    return x.gather(1, order)


def _label_scores(
    posterior: lw.Fitted, predictive: LabelPredictive, x: Tensor, y: Tensor, strange: Tensor
) -> dict[str, float]:
    """Return the scores of predictions for test images, and whether strange ones are told from these."""
    by = default_score(posterior)
    return {
        "NLL": -float(predictive.log_prob(y).mean()),
        "ECE": lw.metrics.ece(predictive.probs, y),
        "accuracy": lw.metrics.accuracy(predictive.probs, y),
        "AUROC": lw.metrics.auroc(*(score_inputs(posterior, each, by, None, False) for each in (x, strange))),
    }


def draw_reliability(axis: Axes, result: Result, task: str, names: Sequence[str]) -> None:
    """Draw how often predictions are right against how confident they are, over the test images of all repeats."""
    drawn, title = {}, [f"{task}:"]
    for name in names:
        confidence, right = (torch.tensor(result.arrays[f"{task}/{name}/{key}"]) for key in ("confidence", "correct"))
        drawn[name] = lw.plots.AnswerProbabilities(confidence, right, of_classes=True)
        title.append(
            f"{name} {100 * float(confidence.mean()):.0f} % confident, {100 * float(right.mean()):.0f} % right"
        )
    lw.plots.reliability(drawn, bins=BINS, ax=axis)
    axis.set_title("\n".join(title), fontsize=10)


@dataclass(frozen=True)
class Diabetes:
    """Settings: 442 patients, ten measurements each. Scores are means over ``repeats`` splits and networks."""

    recipe: TrainingSettings = TrainingSettings(weight_decay=1e-3)
    test_share: float = 0.25
    validation_share: float = 0.2  # of the other rows
    repeats: int = 10
    seed: int = 0


def run_diabetes(settings: Diabetes) -> Result:
    """Train a network for each repeat; score all ways to predict on the same patients."""
    start = time.perf_counter()
    repeats: dict[str, list[dict[str, float]]] = {}
    arrays: dict[str, list[float]] = {}
    for seed in range(settings.seed, settings.seed + settings.repeats):
        table, held_out = split_diabetes(settings, seed)
        model = train_mlp(*table.training, 1, settings.recipe, seed)
        data = batches(*table.training, settings.recipe.batch_size)
        for name, posterior in fits(model, data, table.standardise(*held_out)).items():
            predicted = {**predict(posterior, table), "observed": table.y_test}
            repeats.setdefault(name, []).append(scores(predicted, table.y_test))
            for key, column in predicted.items():
                arrays.setdefault(f"{name}/{key}", []).extend(column.tolist())
    rows = tuple(Row(name, mean_scores(each)) for name, each in repeats.items())
    note = (
        f"means over {settings.repeats} splits; {len(table.y_train)} patients for training, {len(held_out[1])} for "
        f"validation, {len(table.y_test)} for testing"
    )
    seconds = {"total": time.perf_counter() - start}
    return Result("diabetes", plain(settings), settings.seed, rows, seconds, arrays, (ERRORS, INTERVALS, note))


def split_diabetes(settings: Diabetes, seed: int) -> tuple[SplitTable, tuple[Tensor, Tensor]]:
    """Return rows for training and testing, and rows for validation."""
    x, y = load_diabetes(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, y, test_size=settings.test_share, random_state=seed)
    parts = (*train_test_split(x, y, test_size=settings.validation_share, random_state=seed), x_test, y_test)
    x_train, x_held, y_train, y_held, x_test, y_test = (torch.as_tensor(part, dtype=torch.float64) for part in parts)
    return SplitTable(x_train, y_train, x_test, y_test), (x_held, y_held)


@dataclass(frozen=True)
class Bands:
    """Settings: noisy points on a curve, with none between -``gap`` and ``gap``.

    The prior is the one that the weight decay of the training stands for. ``repeats`` is how often data are drawn and a
    network is trained; scores are means over the repeats, and the picture shows the first one.
    """

    recipe: TrainingSettings = TrainingSettings(epochs=500, weight_decay=1e-3)
    data: int = 150
    validation: int = 50
    test: int = 500  # new data in the gap, and as many outside
    gap: float = 0.9
    noise_std: float = 0.2
    repeats: int = 5
    seed: int = 0


def run_bands(settings: Bands) -> Result:
    """Train networks on a curve with a gap; score new data there and beside it, and keep the intervals of the first.

    >>> result = run_bands(Bands(TrainingSettings(hidden=(5,), epochs=3), data=20, repeats=1))
    >>> [row.name for row in result.rows if row.group == "in the gap"]
    ['plain network', 'refitted noise', 'Lapwing']
    """
    start = time.perf_counter()
    grid = torch.linspace(-3.5, 3.5, 351, dtype=torch.float64)
    repeats: dict[tuple[str, str], list[dict[str, float]]] = {}
    arrays: dict[str, Tensor] = {}
    for seed in range(settings.seed, settings.seed + settings.repeats):
        table, held_out, places = draw_curves(settings, seed)
        model = train_mlp(*table.training, 1, settings.recipe, seed)
        posteriors = _band_fits(model, settings, table, table.standardise(*held_out))
        for name, posterior in posteriors.items():
            for place, (x, y) in places.items():
                part = replace(table, x_test=x, y_test=y)
                repeats.setdefault((place, name), []).append(scores(predict(posterior, part), y))
            if seed == settings.seed:
                drawn = predict(posterior, replace(table, x_test=grid.unsqueeze(1), y_test=curve(grid)))
                arrays |= {f"{name}/{end}": drawn[end] for end in ("low", "high")}
                arrays |= {"x": table.x_train[:, 0], "y": table.y_train, "grid": grid, "truth": curve(grid)}
    kept = ("NLL", "coverage 95 %", "width")
    means = {key: mean_scores(each) for key, each in repeats.items()}
    rows = tuple(
        Row(name, {score: mean[score] for score in kept}, place)
        for place in ("in the gap", "beside it")
        for (other, name), mean in means.items()
        if other == place
    )
    note = (
        f"means over {settings.repeats} networks; {settings.data} data for training, {settings.validation} for "
        f"validation, {settings.test} in each place for testing"
    )
    seconds = {"total": time.perf_counter() - start}
    stored = {name: column.tolist() for name, column in arrays.items()}
    return Result("bands", plain(settings), settings.seed, rows, seconds, stored, (INTERVALS, note))


def draw_curves(
    settings: Bands, seed: int
) -> tuple[SplitTable, tuple[Tensor, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """Return data for training, for validation, and for testing in the gap and beside it."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [settings.data, settings.validation, settings.test, settings.test]
    size = torch.rand(sum(sizes), generator=generator, dtype=torch.float64)
    side = torch.where(torch.rand(sum(sizes), generator=generator) < 0.5, -1, 1)
    inside = torch.arange(sum(sizes)) >= sum(sizes[:3])
    x = side * torch.where(inside, settings.gap * size, settings.gap + (3 - settings.gap) * size)
    y = curve(x) + settings.noise_std * torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
    training, held_out, beside, within = zip(x.unsqueeze(1).split(sizes), y.split(sizes), strict=True)
    return SplitTable(*training, *beside), held_out, {"in the gap": within, "beside it": beside}


def _band_fits(
    model: torch.nn.Module, settings: Bands, table: SplitTable, held_out: tuple[Tensor, Tensor]
) -> dict[str, lw.Fitted]:
    """Return the network alone, with its noise refitted, and with the posterior under the prior of its training."""
    data = batches(*table.training, settings.recipe.batch_size)
    fit = partial(lw.fit, model, data, "regression", progress=False)
    alone = lw.baselines.MapOnly()
    x, y = table.training
    with torch.no_grad():
        phi = float((model(x) - y).square().mean())
    prior = len(x) * settings.recipe.weight_decay / phi  # the penalty of the training in units of the log-likelihood
    return {
        PLAIN: fit(method=alone),
        "refitted noise": fit(method=alone, validation=held_out),
        DEFAULT: fit(method=lw.Full(), prior=prior),
    }


def curve(x: Tensor) -> Tensor:
    """Return the true function, without noise."""
    return torch.sin(2.5 * x)


def draw_bands(axis: Axes, result: Result, name: str) -> None:
    """Draw the data, the true curve, and the 95 % intervals of one way to predict."""
    arrays = result.arrays
    colour = lw.plots.PLAIN if name == PLAIN else lw.plots.POSTERIOR
    grid, low, high = (arrays[key] for key in ("grid", f"{name}/low", f"{name}/high"))
    lw.plots.shade(axis, grid, low, high, color=colour, label="95 % interval")
    axis.plot(grid, arrays["truth"], color=lw.plots.INK, linestyle=":", linewidth=1.6, label="truth")
    axis.set(xlabel="x", ylabel="y", xlim=(min(grid), max(grid)))
    lw.plots.fit_frame(axis, torch.tensor(low + high), torch.tensor(arrays["x"]), torch.tensor(arrays["y"]))
    row = next(row for row in result.rows if (row.group, row.name) == ("in the gap", name))
    axis.set_title(f"{name}\n{100 * row.scores['coverage 95 %']:.0f} % of new data in the gap are inside", fontsize=10)


def draw_overview(digits: Result, bands: Result, path: Path) -> None:
    """Draw intervals around a curve with a gap in the data, and how often two classifiers of noisy digits are right."""
    figure, axes = lw.plots.new_figure(1, 3, (13.6, 4.4), widths=(1.1, 1.1, 1))
    for axis, name in zip(axes[0], (PLAIN, DEFAULT), strict=False):
        draw_bands(axis, bands, name)
    share_vertical_range(axes[0, :2])
    axes[0, 0].legend(frameon=False, loc="upper right", fontsize=9)
    draw_reliability(axes[0, 2], digits, "noisy digits", (PLAIN, VALIDATED))
    save(figure, path)


def run_demo(out: Path, seed: int = 0, quick: bool = False) -> ExperimentReport:
    """Run digits, diabetes and bands on one thread; ``quick`` trains each network once and for ten epochs only."""
    shorten = (lambda recipe: replace(recipe, epochs=10)) if quick else (lambda recipe: recipe)
    images, patients, curve = Digits(seed=seed), Diabetes(seed=seed), Bands(seed=seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the networks are small: more threads only wait for each other
    try:
        of_digits = run_digits(replace(images, recipe=shorten(images.recipe), repeats=1 if quick else images.repeats))
        of_diabetes = run_diabetes(
            replace(patients, recipe=shorten(patients.recipe), repeats=1 if quick else patients.repeats)
        )
        of_bands = run_bands(replace(curve, recipe=shorten(curve.recipe), repeats=1 if quick else curve.repeats))
    finally:
        torch.set_num_threads(threads)
    pictures = {"overview.png": lambda result, path: draw_overview(result, of_bands, path)}
    return ExperimentReport(out / "results.json", (of_digits, of_diabetes, of_bands), pictures)
