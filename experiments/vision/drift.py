"""The evidence in training: precisions of layers, of ReLU networks, which can move scale between them, and of tanh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

import lapwing as lw
from experiments.data import Shuffled
from experiments.engine.contract import Record
from experiments.options import Progress
from experiments.pinned import PROBIT
from experiments.vision.networks import seeded
from experiments.vision.predictions import in_parts, scores_of, softmax_of
from experiments.vision.sets import Pair, read_set
from lapwing import metrics
from lapwing.errors import DataError

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}
PRIORS: dict[str, Callable[[], Any]] = {
    "evidence, a precision for each layer": lambda: lw.per_layer(1.0),
    "evidence, one precision": lambda: lw.isotropic(1.0),
}


@dataclass(frozen=True)
class Drift:
    """Settings: a perceptron, trained at a constant rate for a short and for a long time.

    The evidence updates the precisions ``updates`` times in each training. Networks with each of ``precisions``, fixed,
    are beside it; "validation" is the one of them that is best on as many other training images.
    """

    name: ClassVar[str] = "drift"
    title: ClassVar[str] = "precisions of layers while the evidence trains: ReLU against tanh, short against long"
    choosing: ClassVar[tuple[str, ...]] = ("activations", "seeds")
    columns: ClassVar[tuple[str, ...]] = ("NLL", "accuracy", "precision", "first", "last", "penalties", "γs")

    data_dir: Path | None = None
    images: str = "fashion_mnist"
    activations: tuple[str, ...] = ("relu", "tanh")
    hidden: tuple[int, ...] = (64, 48, 32)
    data: int = 2_000
    test: int | None = 5_000
    epochs: tuple[int, ...] = (30, 90)
    updates: int = 15
    batch_size: int = 100
    rate: float = 1e-3
    precisions: tuple[float, ...] = (3.0, 10.0, 30.0, 100.0, 300.0)
    hyper_steps: int = 50
    seeds: int = 3
    seed: int = 0

    @classmethod
    def quick(cls) -> Self:
        """Return the quick form: digits of scikit-learn."""
        return cls(
            images="digits", hidden=(16, 12), data=300, test=None, epochs=(6, 12), updates=3, batch_size=50, rate=5e-3,
            precisions=(1.0, 10.0), hyper_steps=10, seeds=1,
        )  # fmt: skip

    @classmethod
    def full(cls) -> Self:
        """Return the full form: five minutes of one core."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return the keys "ACTIVATION/SEED"."""
        return tuple(f"{name}/{seed}" for seed in range(self.seed, self.seed + self.seeds) for name in self.activations)

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Train by the evidence and under fixed precisions, for every number of epochs."""
        activation, seed = unit.split("/")
        if activation not in ACTIVATIONS:
            raise DataError(f"the activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}.")
        run = Run.prepared(self, activation, int(seed))
        for epochs in self.epochs:
            group = f"{activation}, {epochs} epochs"
            for method, scores in run.scored(epochs):
                progress(f"{unit}, {epochs} epochs, {method}: NLL {scores['NLL']:.4f}")
                yield Record(group, method, int(seed), scores)


@dataclass(frozen=True, eq=False)
class Run:
    """Images of one seed, standardised: for training, for validation and for the score."""

    settings: Drift
    activation: str
    seed: int
    train: Pair
    validation: Pair
    test: Pair
    classes: int

    @classmethod
    def prepared(cls, settings: Drift, activation: str, seed: int) -> Run:
        """Read the images; those for validation are other training images, as many as are left at most."""
        images = read_set(settings.images, settings.data_dir, "cpu")
        order = torch.randperm(len(images.train[1]), generator=torch.Generator().manual_seed(seed))
        rows = order[: settings.data], order[settings.data : 2 * settings.data]
        train, validation = ((images.standard(images.train[0][each]), images.train[1][each]) for each in rows)
        test = images.standard(images.test[0][: settings.test]), images.test[1][: settings.test]
        return cls(settings, activation, seed, train, validation, test, images.n_classes)

    def scored(self, epochs: int) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield name and scores of every training of this length."""
        settings = self.settings
        frequency = max(1, epochs // settings.updates)
        for name, prior in PRIORS.items():
            recipe = lw.recipes.online(
                epochs, rate=settings.rate, last_rate=settings.rate, burn_in=frequency - 1, frequency=frequency,
                update=lw.tuners.Ascend(settings.hyper_steps), prior=prior(), keep_best=False, seed=self.seed,
            )  # fmt: skip
            trained = self._trained(recipe)
            yield name, {**self._scores(trained.model), **layer_scores(trained.posterior)}
        fixed: dict[float, tuple[float, dict[str, float]]] = {}
        for precision in settings.precisions:
            recipe = lw.recipes.fixed(epochs, precision, rate=settings.rate, last_rate=settings.rate, seed=self.seed)
            model, (x, y) = self._trained(recipe).model, self.validation
            held_out = metrics.categorical_nll(in_parts(softmax_of(model), x), y)
            fixed[precision] = held_out, {**self._scores(model), "precision": precision}
            yield f"precision {precision:g}", fixed[precision][1]
        yield "validation", min(fixed.values(), key=lambda pair: pair[0])[1]

    def _trained(self, recipe: Any) -> Any:
        model = seeded(self._made, self.seed)
        data = Shuffled(*self.train, self.settings.batch_size)
        return lw.train(model, data, PROBIT, recipe=recipe, progress=False)

    def _made(self) -> nn.Module:
        """Return the untrained perceptron on the pixels."""
        pixels = self.train[0][0].numel()
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise((pixels, *self.settings.hidden, self.classes)):
            layers += [nn.Linear(inputs, outputs), ACTIVATIONS[self.activation]()]
        return nn.Sequential(*layers[:-1])

    def _scores(self, model: nn.Module) -> dict[str, float]:
        x, y = self.test
        return scores_of(in_parts(softmax_of(model), x), y)


def layer_scores(posterior: lw.Fitted) -> dict[str, float]:
    """Return the precisions, and over the layers the largest over the least of penalties δ|W|² and of γ.

    ``precision`` is the geometric mean, ``first`` and ``last`` are those of the first and the last layer.
    """
    selection = posterior.network.selection
    split: dict[str, Tensor] = selection.split(posterior.network.theta())
    squares = [float(split[name].square().sum()) for name in selection.names if name.endswith("weight")]
    values = posterior.prior.values.reshape(-1).tolist()
    each = values * len(squares) if len(values) == 1 else values
    penalties = [delta * square for delta, square in zip(each, squares, strict=True)]
    gammas = list(posterior.effective_parameters().layers.values())
    mean = math.exp(sum(map(math.log, each)) / len(each))
    spread = lambda numbers: max(numbers) / min(numbers)
    return {
        "precision": mean, "first": each[0], "last": each[-1], "penalties": spread(penalties), "γs": spread(gammas),
    }  # fmt: skip
