"""Disease progression of diabetes patients: intervals around a network that has seen few data."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

import lapwing as lw
from experiments.regression import Table, predicted, scores
from experiments.result import Result, Row, plain
from experiments.training import Recipe, batches, best_seconds, epoch_seconds, trained


@dataclass(frozen=True)
class Diabetes:
    """442 patients, ten measurements each."""

    recipe: Recipe = Recipe(weight_decay=1e-3)
    test_share: float = 0.25
    seed: int = 0


def run(settings: Diabetes) -> Result:
    """Train once; score the plain network with its residual noise, and its posterior."""
    begun = time.perf_counter()
    x, y = load_diabetes(return_X_y=True)
    parts = train_test_split(x, y, test_size=settings.test_share, random_state=settings.seed)
    x_train, x_test, y_train, y_test = (torch.as_tensor(part, dtype=torch.float64) for part in parts)
    table = Table(x_train, y_train, x_test, y_test)
    model = trained(*table.training, 1, settings.recipe, settings.seed)
    seconds = {"training": time.perf_counter() - begun}
    data = batches(*table.training, settings.recipe.batch_size)
    seconds["epoch"] = epoch_seconds(model, data)
    rows, arrays = [], {"observed": y_test.tolist()}
    fitted = {
        "plain network": best_seconds(
            lambda: lw.fit(model, data, "regression", method=lw.baselines.MapOnly(), progress=False)
        ),
        "posterior": best_seconds(lambda: lw.fit(model, data, "regression", progress=False)),
    }
    for name, (taken, posterior) in fitted.items():
        found = predicted(posterior, table)
        seconds[f"fit {name}"] = taken
        rows.append(Row(name, {**scores(found), "fit / epoch": taken / seconds["epoch"]}))
        for key in ("mean", "std", "low", "high"):
            arrays[f"{name}/{key}"] = getattr(found, key).tolist()
    seconds["total"] = time.perf_counter() - begun
    return Result("diabetes", plain(settings), settings.seed, tuple(rows), seconds, arrays)
