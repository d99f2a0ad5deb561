"""Tables of regression data, and predictions of a posterior in the units of the data with their scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
class SplitTable:
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
        return self.standardised(self.x_train, self.y_train)

    def standardised(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs (B, D) and targets (B, 1) as the network is given them."""
        return self.scale_x(x), self.scale_y(y).unsqueeze(1)


def predict(fitted: lw.Fitted, table: SplitTable) -> dict[str, Tensor]:
    """Predict the test rows of a table by a posterior that was fitted to its standardised training rows.

    Returns mean, std, epistemic_std, the ends low and high of 95 % intervals, and the log-density and CRPS of the test
    targets, each (B,) in the units of y.
    """
    x, y = table.standardised(table.x_test, table.y_test)
    standardised, units = fitted.predict(x), table.scale_y
    with torch.no_grad():
        low, high = standardised.interval(0.95)
        places = {"mean": standardised.mean, "low": low, "high": high}
        widths = {
            "std": standardised.std,
            "epistemic_std": standardised.epistemic_variance.sqrt(),
            "crps": crps(standardised, y),
        }
        columns = {name: t.squeeze(1) * units.std + units.mean for name, t in places.items()}
        columns |= {name: t.squeeze(1) * units.std for name, t in widths.items()}
        return columns | {"log_density": standardised.log_prob(y) - units.std.log()}


def crps(predictive: Any, y: Tensor) -> Tensor:
    """Return the continuous ranked probability score of every target, (B, 1), from the predictive's cdf.

    It is the integral of F² below the target and of (1 - F)² above it, by the trapezoidal rule at points whose
    distances from the target grow exponentially.
    """
    nodes = torch.linspace(0, 8, 161).to(y)  # sinh(8) is 1,490 standard deviations
    steps = predictive.std * nodes.sinh()  # (B, nodes)
    columns = [(predictive.cdf(y - step.unsqueeze(1)), predictive.cdf(y + step.unsqueeze(1))) for step in steps.T]
    heights = torch.cat([below.square() + (1 - above).square() for below, above in columns], 1)
    return torch.trapezoid(heights * predictive.std * nodes.cosh(), nodes).unsqueeze(1)


def scores(predicted: dict[str, Tensor], y: Tensor) -> dict[str, float]:
    """Return NLL, CRPS, the share of targets inside their intervals, the width of these intervals, and RMSE."""
    mean, low, high = (predicted[name] for name in ("mean", "low", "high"))
    return {
        "NLL": -float(predicted["log_density"].mean()),
        "RMSE": metrics.rmse(mean, y),
        "CRPS": float(predicted["crps"].mean()),
        "coverage 95 %": metrics.coverage(low, high, y),
        "width": metrics.interval_width(low, high),
    }
