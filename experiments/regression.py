"""Scores of a regression posterior in the units of the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.training import Batches, Standardiser
from lapwing.fitted import Fitted
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.metrics import regression


@dataclass(frozen=True, eq=False)
class Table:
    """Training and test rows in their own units, float64; the network sees them standardised.

    Float64 throughout: on a table with almost no noise the precision spans more digits than float32 has.
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


def predicted(fitted: Fitted, table: Table, level: float = 0.95) -> Predicted:
    """Of a posterior over the standardised table."""
    found = fitted.predict(table.scale_x(table.x_test))
    shift, scale = table.scale_y.mean, table.scale_y.std
    low, high = found.interval(level)
    with torch.no_grad():
        mean, low, high = (t.squeeze(1) * scale + shift for t in (found.mean, low, high))
        std, epistemic = (t.squeeze(1) * scale for t in (found.std, found.epistemic_variance.sqrt()))
    return Predicted(table.y_test, mean, std, epistemic, low, high)


def tempered(model: nn.Module, held: Batches) -> Gaussian:
    """Temperature scaling of a regression: the noise that held-out rows have."""
    with torch.no_grad():
        left = torch.cat([model(x) - y for x, y in held])
    return Gaussian(noise_std=float(left.square().mean().sqrt()))


def scores(found: Predicted) -> dict[str, float]:
    """NLL, RMSE and CRPS; the share of y in the intervals, and how wide they are."""
    return {
        "NLL": regression.nll(found.mean, found.std, found.y),
        "RMSE": regression.rmse(found.mean, found.y),
        "CRPS": regression.crps(found.mean, found.std, found.y),
        "coverage 95 %": regression.coverage(found.low, found.high, found.y),
        "width": regression.interval_width(found.low, found.high),
    }
