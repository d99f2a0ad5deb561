"""Two inputs and a few classes: where is each method confident, near the data and far from them?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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
from experiments.maps_picture import draw_map, panels, save_with_title, square
from experiments.options import Progress
from lapwing import metrics
from lapwing.demo.training import TrainingSettings

WIDTH = 2.2  # of the picture, in units of the largest distance of a datum from zero
Drawn = tuple[Tensor, Tensor]  # inputs (N, 2), float64, and classes (N,)
# The prior precision of this weight decay, 0.003 for each of 150 data, is about that of the evidence.
DECAYED = replace(RECIPE, max_steps=1000, weight_decay=3e-3)
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
    choosing: ClassVar[tuple[str, ...]] = ("tasks", "activations", "seeds")

    recipe: TrainingSettings = DECAYED
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
        return cls(recipe=replace(DECAYED, max_steps=300), seeds=1)

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

    @staticmethod
    def picture(result: Stored, path: Path) -> None:
        """Fit the first seed again and draw the maps of all methods."""
        draw(built(Classes, result.settings), path)


def draw(settings: Classes, path: Path, count: int = 60) -> None:
    """Draw the maps of all methods on the first network of each task and activation, ``count`` points to a side."""
    methods = settings.choices.methods
    rows = [f"{task}, {activation}" for task in settings.tasks for activation in settings.activations]
    figure, axes = panels(rows, methods, 8, (1.45, 1.45))
    for row in rows:
        task, activation = row.split(", ")
        maps = settings.maps(task, activation, 0)
        side = WIDTH * radius(maps.x)
        for method in methods:
            fitted = maps.timed(method)[0]
            probs = probabilities(method, fitted, square(side, count), settings.choices.draws)
            draw_map(axes[row, method], probs, side, maps.x, maps.y)
    text = "full colour: the class is certain; white: all classes are equally probable"
    save_with_title(figure, text, path)


def probabilities(method: str, fitted: lw.Fitted, x: Tensor, draws: int) -> Tensor:
    """Return the predictive probabilities of the classes, (B, C)."""
    if method == SAMPLED:
        outputs = fitted.network_samples(x, draws, torch.Generator().manual_seed(0))
        return outputs.softmax(-1).mean(0)
    if method in MEMBERS:
        core: Any = fitted.posterior
        outputs = fitted.function_samples(x, len(core.members))
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
