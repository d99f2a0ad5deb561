"""Disease progression of diabetes patients: intervals around a network that was trained on few data."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

from lapwing.demo.regression import SplitTable, predict, scores
from lapwing.demo.result import Result, Row, mean_scores, plain
from lapwing.demo.training import TrainingSettings, batches, fits, trained


@dataclass(frozen=True)
class Diabetes:
    """Settings: 442 patients, ten measurements each. Scores are means over ``repeats`` splits and networks."""

    recipe: TrainingSettings = TrainingSettings(weight_decay=1e-3)
    test_share: float = 0.25
    validation_share: float = 0.2  # of the other rows
    repeats: int = 10
    seed: int = 0


def run(settings: Diabetes) -> Result:
    """Train a network for each repeat; score all ways to predict on the same patients."""
    start = time.perf_counter()
    repeats: dict[str, list[dict[str, float]]] = {}
    arrays: dict[str, list[float]] = {}
    for seed in range(settings.seed, settings.seed + settings.repeats):
        table, held_out = split(settings, seed)
        model = trained(*table.training, 1, settings.recipe, seed)
        data = batches(*table.training, settings.recipe.batch_size)
        for name, posterior in fits(model, data, table.standardised(*held_out)).items():
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
    return Result("diabetes", plain(settings), settings.seed, rows, seconds, arrays, (note,))


def split(settings: Diabetes, seed: int) -> tuple[SplitTable, tuple[torch.Tensor, torch.Tensor]]:
    """Return rows for training and testing, and rows for validation."""
    x, y = load_diabetes(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, y, test_size=settings.test_share, random_state=seed)
    parts = (*train_test_split(x, y, test_size=settings.validation_share, random_state=seed), x_test, y_test)
    x_train, x_held, y_train, y_held, x_test, y_test = (torch.as_tensor(part, dtype=torch.float64) for part in parts)
    return SplitTable(x_train, y_train, x_test, y_test), (x_held, y_held)
