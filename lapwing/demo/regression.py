"""Tables of regression data, and predictions of a posterior in the units of the data with their scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import lapwing as lw
from lapwing import metrics


@dataclass(frozen=True, eq=False)
class Standardiser:
    """Shift and scale that give the training rows mean zero and standard deviation one, column by column."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> Standardiser:
        """Measure mean and standard deviation of some rows."""
        mean, std = rows.mean(0), rows.std(0, correction=0)
        # The standard deviation of a constant column is a rounding error; such a column is only shifted.
        constant = std <= 1e-9 * mean.abs().clamp_min(1e-30)
        return cls(mean, torch.where(constant, torch.ones_like(std), std))

    def __call__(self, rows: Tensor) -> Tensor:
        return (rows - self.mean) / self.std


@dataclass(frozen=True, eq=False)
class Table:
    """Training and test rows in their original units, in float64; the network is given standardised values.

    Float64, because on a table with almost no noise the precision spans more digits than float32 has.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def scale_x(self) -> Standardiser:
        return Standardiser.of(self.x_train)

    @property
    def scale_y(self) -> Standardiser:
        return Standardiser.of(self.y_train)

    @property
    def training(self) -> tuple[Tensor, Tensor]:
        """Standardised inputs (B, D) and targets (B, 1)."""
        return self.scale_x(self.x_train), self.scale_y(self.y_train).unsqueeze(1)


def predict(fitted: lw.Fitted, table: Table) -> dict[str, Tensor]:
    """Predict the test rows of a table by a posterior that was fitted to its standardised training rows.

    Returns mean, std, epistemic_std, and the ends low and high of 95 % intervals, each (B,) in the units of y.
    """
    standardised, units = fitted.predict(table.scale_x(table.x_test)), table.scale_y
    low, high = standardised.interval(0.95)
    places = {"mean": standardised.mean, "low": low, "high": high}
    widths = {"std": standardised.std, "epistemic_std": standardised.epistemic_variance.sqrt()}
    with torch.no_grad():
        columns = {name: t.squeeze(1) * units.std + units.mean for name, t in places.items()}
        return columns | {name: t.squeeze(1) * units.std for name, t in widths.items()}


def scores(predicted: dict[str, Tensor], y: Tensor) -> dict[str, float]:
    """Return NLL, RMSE and CRPS, the share of targets inside their intervals, and the width of these intervals."""
    mean, std, low, high = (predicted[name] for name in ("mean", "std", "low", "high"))
    return {
        "NLL": metrics.normal_nll(mean, std, y),
        "RMSE": metrics.rmse(mean, y),
        "CRPS": metrics.crps(mean, std, y),
        "coverage 95 %": metrics.coverage(low, high, y),
        "width": metrics.interval_width(low, high),
    }
