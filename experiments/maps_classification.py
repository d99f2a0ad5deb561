"""Two inputs and a few classes: where is each method confident, near the data and far from them?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

import lapwing as lw
from experiments.engine.contract import Record
from experiments.maps_methods import RECIPE, SAMPLED, Choices, Maps
from experiments.options import Progress
from lapwing import metrics
from lapwing.demo.training import Recipe

Drawn = tuple[Tensor, Tensor]  # inputs (N, 2), float64, and classes (N,)
MEMBERS = ("ensemble", "MC dropout")  # the probabilities are the mean of those of the members


def moons(count: int, generator: torch.Generator) -> Drawn:
    """Draw points near two half circles that interlock; their noise makes them overlap a little.

    >>> x, y = moons(6, torch.Generator().manual_seed(0))
    >>> x.shape, y.tolist()
    (torch.Size([6, 2]), [0, 1, 0, 1, 0, 1])
    """
    y = torch.arange(count) % 2
    angle = math.pi * torch.rand(count, generator=generator, dtype=torch.float64)
    sign = 1.0 - 2.0 * y
    x = torch.stack([sign * angle.cos() + y, sign * angle.sin() + 0.5 * y], 1) - torch.tensor([0.5, 0.25]).double()
    return 1.5 * x + 0.3 * torch.randn(count, 2, generator=generator, dtype=torch.float64), y


def blobs(count: int, generator: torch.Generator) -> Drawn:
    """Draw points around three centres, close enough to overlap."""
    y = torch.arange(count) % 3
    angle = 2 * math.pi * y.double() / 3
    centres = 1.5 * torch.stack([angle.sin(), angle.cos()], 1)
    return centres + 0.7 * torch.randn(count, 2, generator=generator, dtype=torch.float64), y


def separable(count: int, generator: torch.Generator) -> Drawn:
    """Draw points of two classes with a wide empty strip between them."""
    y = torch.arange(count) % 2
    centres = (2.0 * y - 1.0).unsqueeze(1) * torch.tensor([1.5, 0.8]).double()
    return centres + 0.4 * torch.randn(count, 2, generator=generator, dtype=torch.float64), y


TASKS: dict[str, Callable[[int, torch.Generator], Drawn]] = {"moons": moons, "blobs": blobs, "separable": separable}


@dataclass(frozen=True)
class Classes:
    """Settings: small sets of points in the plane.

    Confidence far away is the mean of the largest probability on a circle, ``far`` times as large as the smallest one
    around zero that contains the training inputs.
    """

    name: ClassVar[str] = "maps"
    title: ClassVar[str] = "2-D classification maps: moons, blobs, separable classes, every method, tanh and ReLU"

    recipe: Recipe = replace(RECIPE, max_steps=1000)
    choices: Choices = Choices()
    tasks: tuple[str, ...] = tuple(TASKS)
    activations: tuple[str, ...] = ("tanh", "relu")
    data: int = 150
    test: int = 1500
    far: float = 5.0
    seeds: int = 3
    seed: int = 0

    @classmethod
    def quick(cls) -> Self:
        """Return the settings of the quick form."""
        return cls(recipe=replace(RECIPE, max_steps=300), seeds=1)

    @classmethod
    def full(cls) -> Self:
        """Return the settings of the full form."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return a key for each task, activation and seed."""
        groups = [f"{task}/{activation}" for task in self.tasks for activation in self.activations]
        return tuple(f"{group}/{repeat}" for group in groups for repeat in range(self.seeds))

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Train one network and score every method on it."""
        task, activation, repeat = unit.split("/")
        maps = self.maps(task, activation, int(repeat))
        x, y = TASKS[task](self.test, torch.Generator().manual_seed(10_000 + self.seed + int(repeat)))
        circle = ring(self.far * radius(maps.x), 200)
        for method in self.choices.methods:
            fitted, seconds = maps.timed(method)
            probs, away = (probabilities(method, fitted, each, self.choices.draws) for each in (x, circle))
            scores = {
                "NLL": metrics.categorical_nll(probs, y),
                "accuracy": metrics.accuracy(probs, y),
                "ECE": metrics.ece(probs, y),
                "confidence": float(probs.max(1).values.mean()),
                "confidence far": float(away.max(1).values.mean()),
            }
            yield Record(f"{task}, {activation}", method, int(repeat), scores, seconds)
            progress(f"{unit}: {method}")

    def maps(self, task: str, activation: str, repeat: int) -> Maps:
        """Return the data and the network of one repetition."""
        x, y = TASKS[task](self.data, torch.Generator().manual_seed(self.seed + repeat))
        recipe = replace(self.recipe, activation=activation)
        return Maps(x, y, int(y.max()) + 1, recipe, self.choices, self.seed + repeat)


def probabilities(method: str, fitted: lw.Fitted, x: Tensor, draws: int) -> Tensor:
    """Return the predictive probabilities of the classes, (B, C)."""
    if method == SAMPLED:
        outputs = fitted.network_samples(x, draws, torch.Generator().manual_seed(0))
        return outputs.softmax(-1).mean(0)
    if method in MEMBERS:
        outputs = fitted.function_samples(x, len(fitted.posterior.members))
        return outputs.softmax(-1).mean(0)
    probs: Tensor = fitted.predict(x).probs
    return probs


def radius(x: Tensor) -> float:
    """Return the largest distance of a point from zero.

    >>> radius(torch.tensor([[3.0, 4.0], [1.0, 1.0]]))
    5.0
    """
    return float(x.norm(dim=1).max())


def ring(size: float, count: int) -> Tensor:
    """Return points on a circle around zero, (count, 2).

    >>> ring(2.0, 4).norm(dim=1).tolist()
    [2.0, 2.0, 2.0, 2.0]
    """
    angle = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
    return size * torch.stack([angle.cos(), angle.sin()], 1)
