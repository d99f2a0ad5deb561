"""Disease progression of diabetes patients: intervals around a network that was trained on few data."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

import lapwing as lw
from lapwing.demo.figures import INK, PLAIN, POSTERIOR, new_figure, save, share_vertical_range
from lapwing.demo.regression import Table, predict, scores
from lapwing.demo.result import Result, Row, plain
from lapwing.demo.training import Recipe, batches, best_seconds, epoch_seconds, trained


@dataclass(frozen=True)
class Diabetes:
    """Settings: 442 patients, ten measurements each."""

    recipe: Recipe = Recipe(weight_decay=1e-3)
    test_share: float = 0.25
    seed: int = 0


def run(settings: Diabetes) -> Result:
    """Train once; score the plain network with its residual noise, and its posterior."""
    start = time.perf_counter()
    x, y = load_diabetes(return_X_y=True)
    parts = train_test_split(x, y, test_size=settings.test_share, random_state=settings.seed)
    x_train, x_test, y_train, y_test = (torch.as_tensor(part, dtype=torch.float64) for part in parts)
    table = Table(x_train, y_train, x_test, y_test)
    model = trained(*table.training, 1, settings.recipe, settings.seed)
    seconds = {"training": time.perf_counter() - start}
    data = batches(*table.training, settings.recipe.batch_size)
    seconds["epoch"] = epoch_seconds(model, data)
    fit = partial(lw.fit, model, data, "regression", progress=False)
    plain_network = partial(fit, method=lw.baselines.MapOnly())
    rows, arrays = [], {"observed": y_test.tolist()}
    for name, work in (("plain network", plain_network), ("posterior", fit)):
        seconds[f"fit {name}"], posterior = best_seconds(work)
        predicted = predict(posterior, table)
        relative = seconds[f"fit {name}"] / seconds["epoch"]
        rows.append(Row(name, {**scores(predicted, y_test), "fit / epoch": relative}))
        arrays |= {f"{name}/{key}": predicted[key].tolist() for key in ("mean", "std", "low", "high")}
    seconds["total"] = time.perf_counter() - start
    return Result("diabetes", plain(settings), settings.seed, tuple(rows), seconds, arrays)


def picture(result: Result, path: Path) -> None:
    """Draw, for every method, the predicted mean with its 95 % interval against the observed target."""
    y = torch.tensor(result.arrays["observed"])
    figure, axes = new_figure(1, len(result.rows), (4.6 * len(result.rows), 4.6))
    for axis, row in zip(axes[0], result.rows, strict=True):
        mean, low, high = (torch.tensor(result.arrays[f"{row.name}/{key}"]) for key in ("mean", "low", "high"))
        inside = (low <= y) & (y <= high)
        for mask, colour, label in ((inside, POSTERIOR, "inside its interval"), (~inside, PLAIN, "outside")):
            bars = [(mean - low)[mask].tolist(), (high - mean)[mask].tolist()]
            axis.errorbar(
                y[mask].tolist(), mean[mask].tolist(), yerr=bars, fmt="o", markersize=3, linewidth=0.8,
                color=colour, alpha=0.75, label=label,
            )  # fmt: skip
        ends = [float(y.min()), float(y.max())]
        axis.plot(ends, ends, color=INK, linestyle="--", linewidth=1)
        axis.set_xlabel("observed")
        axis.set_title(f"{row.name}\n{int(inside.sum())} of {len(y)} inside", fontsize=10)
    axes[0][0].set_ylabel("predicted, with 95 % interval")
    share_vertical_range(axes[0])
    figure.legend(*axes[0][0].get_legend_handles_labels(), frameon=False, ncols=2, loc="outside lower center")
    save(figure, path)
