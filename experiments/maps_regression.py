"""One input with a gap in the data: how wide are the error bars of each method between two clusters?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self  # of typing from Python 3.11 on

import lapwing as lw
from experiments.engine.contract import Record
from experiments.engine.store import Stored
from experiments.engine.values import built
from experiments.maps_methods import RECIPE, SAMPLED, Choices, Maps
from experiments.maps_picture import draw_band, draw_points, panels, save_with_legend
from experiments.options import Progress
from lapwing import metrics
from lapwing.demo.training import TrainingSettings
from lapwing.predictives.numbers import NormalPredictive

CLUSTERS = ((-1.0, -0.7), (0.5, 1.0))  # and the curve below: as in Foong et al. 2019
GAP = (CLUSTERS[0][1], CLUSTERS[1][0])
REACH = (1.5, 6.0)  # of the picture, along x and y


@dataclass(frozen=True)
class Between:
    """Settings: noisy points of a curve in two clusters. New points are uniform on the clusters, and on the gap."""

    name: ClassVar[str] = "between"
    title: ClassVar[str] = "1-D in-between uncertainty: every method on two clusters of data, tanh and ReLU"
    choosing: ClassVar[tuple[str, ...]] = ("activations", "seeds")

    recipe: TrainingSettings = RECIPE
    choices: Choices = Choices()
    activations: tuple[str, ...] = ("tanh", "relu")
    data: int = 100
    test: int = 1000
    noise_std: float = 0.1
    seeds: int = 3
    seed: int = 0

    @classmethod
    def quick(cls) -> Self:
        """Return the settings of the quick form."""
        return cls(recipe=replace(RECIPE, max_steps=500), seeds=2)

    @classmethod
    def full(cls) -> Self:
        """Return the settings of the full form."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return a key for each activation and seed."""
        return tuple(f"{activation}/{repeat}" for activation in self.activations for repeat in range(self.seeds))

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Train one network and score every method on it."""
        activation, repeat = unit.split("/")
        maps = self.maps(activation, int(repeat))
        generator = torch.Generator().manual_seed(10_000 + self.seed + int(repeat))
        inside = noisy(inside_clusters(self.test, generator), self.noise_std, generator)
        low, high = GAP
        between = low + (high - low) * torch.rand(self.test, 1, generator=generator, dtype=torch.float64)
        beyond = noisy(between, self.noise_std, generator)
        for method in self.choices.methods:
            fitted, seconds = maps.timed(method)
            belief = predictive(method, fitted, self.choices.draws)
            yield Record(activation, method, int(repeat), scores(belief, inside, beyond), seconds)
            progress(f"{unit}: {method}")

    def maps(self, activation: str, repeat: int) -> Maps:
        """Return the data and the network of one repetition."""
        generator = torch.Generator().manual_seed(self.seed + repeat)
        x, y = noisy(inside_clusters(self.data, generator), self.noise_std, generator)
        return Maps(x, y, 1, replace(self.recipe, activation=activation), self.choices, self.seed + repeat)

    @staticmethod
    def picture(result: Stored, path: Path) -> None:
        """Fit the first seed again and draw the bands of all methods."""
        draw(built(Between, result.settings), path)


def draw(settings: Between, path: Path) -> None:
    """Draw the bands of all methods on the first network of each activation."""
    methods = settings.choices.methods
    figure, axes = panels(settings.activations, methods, 5, (2.3, 1.75))
    grid = torch.linspace(-REACH[0], REACH[0], 201, dtype=torch.float64).unsqueeze(1)
    for activation in settings.activations:
        maps = settings.maps(activation, 0)
        for method in methods:
            axis = axes[activation, method]
            predicted = predictive(method, maps.timed(method)[0], settings.choices.draws)(grid)
            draw_band(axis, grid, predicted.mean, predicted.epistemic_variance.sqrt(), curve(grid), REACH[1])
            draw_points(axis, maps.x, maps.y)
    save_with_legend(figure, axis, path)


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of a fitted method, by its posterior or by the network with drawn weights."""

    fitted: lw.Fitted
    draws: int | None = None  # of weights that go into the network itself

    def __call__(self, x: Tensor) -> Any:
        """Return the predictive of y at inputs (B, 1)."""
        if self.draws is None:
            return self.fitted.predict(x)
        outputs = self.fitted.network_samples(x, self.draws, torch.Generator().manual_seed(0))  # the same for every x
        belief = lw.FunctionGaussian(outputs.mean(0), outputs.var(0).unsqueeze(-1))
        return NormalPredictive(belief, self.fitted.likelihood.dispersion.expand_as(belief.mean))


def predictive(method: str, fitted: lw.Fitted, draws: int) -> Predictions:
    """Return the predictions of a method."""
    return Predictions(fitted, draws if method == SAMPLED else None)


def scores(predict: Predictions, inside: tuple[Tensor, Tensor], between: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Return the scores of new points in the clusters and in the gap; the ratio is that of mean standard deviations."""
    result: dict[str, float] = {}
    widths = []
    for (x, y), suffix in ((inside, ""), (between, " in gap")):
        predicted = predict(x)
        low, high = predicted.interval(0.95)
        widths.append(float(predicted.epistemic_variance.sqrt().mean()))
        result |= {
            f"std of f{suffix}": widths[-1],
            f"NLL{suffix}": -float(predicted.log_prob(y).mean()),
            f"RMSE{suffix}": metrics.rmse(predicted.mean, y),
            f"coverage 95 %{suffix}": metrics.coverage(low, high, y),
        }
    return result if widths[0] == 0 else {"ratio": widths[1] / widths[0], **result}


def curve(x: Tensor) -> Tensor:
    """Return the true function, without noise."""
    return torch.cos(4 * x + 0.8)


def inside_clusters(count: int, generator: torch.Generator) -> Tensor:
    """Draw inputs (count, 1), every other one from each cluster, uniformly."""
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    lows, highs = (torch.tensor(ends, dtype=torch.float64) for ends in zip(*CLUSTERS, strict=True))
    which = torch.arange(count) % 2
    return (lows[which] + (highs - lows)[which] * uniform).unsqueeze(1)


def noisy(x: Tensor, noise_std: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the inputs, and the curve there with noise."""
    return x, curve(x) + noise_std * torch.randn(x.shape, generator=generator, dtype=x.dtype)
