"""Tables of regression data, and scores of a posterior in the units of the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import metrics
from lapwing.demo.training import Batches, Standardiser


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


@dataclass(frozen=True, eq=False)
class Predicted:
    """Normal predictions for the test rows, (B,) each, in the units of y."""

    y: Tensor
    mean: Tensor
    std: Tensor
    epistemic_std: Tensor
    low: Tensor
    high: Tensor


def predict(fitted: lw.Fitted, table: Table, level: float = 0.95) -> Predicted:
    """Predict the test rows of a table by a posterior that was fitted to its standardised training rows."""
    standardised = fitted.predict(table.scale_x(table.x_test))
    shift, scale = table.scale_y.mean, table.scale_y.std
    low, high = standardised.interval(level)
    with torch.no_grad():
        mean, low, high = (t.squeeze(1) * scale + shift for t in (standardised.mean, low, high))
        std, epistemic = (t.squeeze(1) * scale for t in (standardised.std, standardised.epistemic_variance.sqrt()))
    return Predicted(table.y_test, mean, std, epistemic, low, high)


def tempered(model: nn.Module, held_out: Batches) -> lw.Gaussian:
    """Return the likelihood whose noise is the error on held-out rows: temperature scaling of a regression."""
    with torch.no_grad():
        residuals = torch.cat([model(x) - y for x, y in held_out])
    return lw.Gaussian(noise_std=float(residuals.square().mean().sqrt()))


def scores(predicted: Predicted) -> dict[str, float]:
    """Return NLL, RMSE and CRPS, the share of targets inside their intervals, and the width of these intervals."""
    return {
        "NLL": metrics.normal_nll(predicted.mean, predicted.std, predicted.y),
        "RMSE": metrics.rmse(predicted.mean, predicted.y),
        "CRPS": metrics.crps(predicted.mean, predicted.std, predicted.y),
        "coverage 95 %": metrics.coverage(predicted.low, predicted.high, predicted.y),
        "width": metrics.interval_width(predicted.low, predicted.high),
    }
