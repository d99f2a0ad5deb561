"""Small networks trained by Adam, tables of regression data, and the ways to predict that the demo compares."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from lapwing.predictives.base import NumberPredictive

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a network and its training: Adam with L2 decay, and a learning rate that falls to zero by a cosine.

    Training ends after ``epochs`` or ``max_steps``, whichever comes first, and the learning rate reaches zero there.
    ``falling=False`` keeps it constant. The default learning rate and epochs were chosen from ten pairs: those with the
    lowest mean validation error of the plain network over the UCI tables, on a tenth of the training rows of the first
    split.
    """

    hidden: tuple[int, ...] = (50, 50)
    activation: str = "tanh"
    epochs: int = 100
    max_steps: int = 10_000
    batch_size: int = 128
    learning_rate: float = 1e-2
    weight_decay: float = 1e-5
    falling: bool = True
    dropout: float = 0.0  # after every activation
    batch_norm: bool = False  # before every activation


def mlp(inputs: int, outputs: int, recipe: TrainingSettings, seed: int) -> nn.Sequential:
    """Return an untrained network. The global random state does not change."""
    sizes = (inputs, *recipe.hidden, outputs)
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for d_in, d_out in pairwise(sizes):
            layers += [nn.Linear(d_in, d_out)]
            layers += [nn.BatchNorm1d(d_out)] if recipe.batch_norm else []
            layers += [ACTIVATIONS[recipe.activation]()]
            layers += [nn.Dropout(recipe.dropout)] if recipe.dropout else []
    return nn.Sequential(*layers[: -1 - recipe.batch_norm - (recipe.dropout > 0)])


def batches(x: Tensor, y: Tensor, size: int) -> Batches:
    """Return the rows as batches, in order; the last one may be smaller."""
    return list(zip(x.split(size), y.split(size), strict=True))


def loss_of(y: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss, a mean over data: cross-entropy for class numbers, half the squared error for real targets."""
    if not y.is_floating_point():
        return F.cross_entropy
    return lambda f, y: 0.5 * (f - y).square().sum(-1).mean()


def train_mlp(x: Tensor, y: Tensor, outputs: int, recipe: TrainingSettings, seed: int) -> nn.Sequential:
    """Return a network trained on the rows of x and y, in evaluation mode."""
    model = mlp(x.shape[1], outputs, recipe, seed).to(x)
    optimise(model, x, y, recipe, seed)
    return model


def optimise(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    recipe: TrainingSettings,
    seed: int,
    after: Callable[[int], None] = lambda epoch: None,
) -> None:
    """Train the model in place and leave it in evaluation mode.

    ``after`` is called after every epoch with its number, from 1, while the model is in evaluation mode. Dropout draws
    from the global random state, so that state is seeded as well, and restored at the end.
    """
    loss, generator = loss_of(y), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(
        model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
    )
    epoch = math.ceil(len(x) / recipe.batch_size)
    steps = min(recipe.max_steps, recipe.epochs * epoch)
    model.train()
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        torch.manual_seed(seed)
        for step in range(steps):
            if step % epoch == 0:
                order = torch.randperm(len(x), generator=generator).to(x.device).split(recipe.batch_size)
            rows = order[step % epoch]
            for group in optimiser.param_groups if recipe.falling else ():
                group["lr"] = recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimiser.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimiser.step()
            if (step + 1) % epoch == 0:
                optimiser.zero_grad()
                model.eval()
                after((step + 1) // epoch)
                model.train()
    optimiser.zero_grad()
    model.eval()


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
        return self.standardise(self.x_train, self.y_train)

    def standardise(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs (B, D) and targets (B, 1) as the network is given them."""
        return self.scale_x(x), self.scale_y(y).unsqueeze(1)


def predict(fitted: lw.Fitted, table: SplitTable) -> dict[str, Tensor]:
    """Predict the test rows of a table by a posterior that was fitted to its standardised training rows.

    Returns mean, std, epistemic_std, the ends low and high of 95 % intervals, and the log-density and CRPS of the test
    targets, each (B,) in the units of y.
    """
    x, y = table.standardise(table.x_test, table.y_test)
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


def crps(predictive: NumberPredictive, y: Tensor) -> Tensor:
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
        "RMSE": lw.metrics.rmse(mean, y),
        "CRPS": float(predicted["crps"].mean()),
        "coverage 95 %": lw.metrics.coverage(low, high, y),
        "width": lw.metrics.interval_width(low, high),
    }


PLAIN, DEFAULT, VALIDATED, NAIVE = "plain network", "Lapwing", "Lapwing with validation", "naive evidence"


def fits(model: nn.Module, data: Batches, held_out: tuple[Tensor, Tensor]) -> dict[str, lw.Fitted]:
    """Return the fitted posteriors by name: the network alone, rescaled, and with error bars.

    The second and the fourth use the held-out data. The last one shows why the evidence alone is not the default.
    """
    real = held_out[1].is_floating_point()
    fit = partial(lw.fit, model, data, "regression" if real else "classification", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lw.errors.CalibrationWarning)  # the table shows what it says
        naive = fit(tuner=lw.tuners.MaximiseEvidence())
    return {
        PLAIN: fit(method=lw.baselines.MapOnly()),
        "refitted noise" if real else "temperature scaling": fit(method=lw.baselines.MapOnly(), validation=held_out),
        DEFAULT: fit(),
        VALIDATED: fit(validation=held_out),
        NAIVE: naive,
    }
