"""Cross-validation against training with the Kronecker evidence: three sets of images, two networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import Self

import lapwing as lw
from experiments.data import Shuffled
from experiments.engine.contract import Record
from experiments.options import Progress
from experiments.pinned import PROBIT
from experiments.vision.learning import Schedule, tensor_cores, train_together
from experiments.vision.limits import Limit, within
from experiments.vision.networks import convolutional, perceptron, seeded
from experiments.vision.predictions import Predict, in_parts, probabilities_of, scores_of, softmax_of
from experiments.vision.sets import ImageSet, read_set
from lapwing import metrics
from lapwing.errors import DataError

PRIORS: dict[str, Callable[[], Any]] = {
    "evidence": lambda: lw.per_layer(1.0),
    "evidence, one precision": lambda: lw.isotropic(1.0),
}


@dataclass(frozen=True)
class Regularised:
    """Settings, after Immer et al. 2021.

    *Cross-validation*: a network for each of ``precisions``, trained on nine tenths of the images; the precision with
    the best likelihood on the rest is used to train on all. *Evidence*: one run on all images with a precision for
    each layer, or with one for all, updated every ``frequency`` epochs. Both have the same epochs, batches and rates.
    """

    name: ClassVar[str] = "regularised"
    title: ClassVar[str] = (
        "MNIST, Fashion-MNIST, CIFAR-10 x MLP, CNN: cross-validation against the evidence in training"
    )
    choosing: ClassVar[tuple[str, ...]] = ("sets", "networks", "seeds")

    data_dir: Path | None = None
    sets: tuple[str, ...] = ("fashion_mnist", "mnist", "cifar10")
    networks: tuple[str, ...] = ("MLP", "CNN")
    hidden: tuple[int, ...] = (1024, 512, 256, 128)  # of the MLP
    channels: tuple[int, ...] = (32, 64, 96)  # of the CNN
    last: int = 128  # units of its linear layer
    epochs: int = 20
    batch_size: int = 1024
    rate: float = 1e-3
    precisions: tuple[float, ...] = (1.0, 10.0, 30.0, 1e2, 3e2, 1e3)
    burn_in: int = 4
    frequency: int = 5
    hyper_steps: int = 50
    data: int | None = None  # training images; None takes all
    seeds: int = 3
    limit: float | None = 40.0  # seconds of a unit after which no method is begun
    device: str = "cuda"
    seed: int = 0

    @classmethod
    def quick(cls) -> Self:
        """Return the settings of the quick form: digits of scikit-learn."""
        return cls(
            sets=("digits",), hidden=(24, 16), channels=(4, 6), last=12, epochs=12, batch_size=64, rate=5e-3,
            precisions=(0.1, 1.0, 10.0), frequency=4, hyper_steps=10, seeds=1, limit=None, device="cpu",
        )  # fmt: skip

    @classmethod
    def full(cls) -> Self:
        """Return the settings of the full form, for a GPU."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return the keys "SET/NETWORK/SEED", those of the first seed first."""
        seeds = range(self.seed, self.seed + self.seeds)
        return tuple(f"{name}/{network}/{seed}" for seed in seeds for name in self.sets for network in self.networks)

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Train in both ways, and score the networks, and the posterior that the evidence leaves."""
        name, network, seed = unit.split("/")
        if network not in NETWORKS:  # here, where no method can fail because of it
            raise DataError(f"the network is {network!r}; expected one of {', '.join(NETWORKS)}.")
        run = Run(self, network, int(seed), self._images(name, int(seed)))
        limit, (x, y) = Limit(self.limit), run.images.test
        x = run.images.standard(x)
        trainings: dict[str, Callable[[], Outcome]] = {"cross-validation": run.cross_validated}
        trainings |= {key: partial(run.by_evidence, key) for key in PRIORS}
        with tensor_cores(False):
            for method, fitted in within(trainings, limit, progress, unit):
                outcome, seconds = fitted.answer, fitted.seconds
                for suffix, predict in outcome.predicts.items():
                    scores = {**scores_of(in_parts(predict, x), y), **outcome.chosen}
                    progress(f"{unit}, {method}{suffix}: NLL {scores['NLL']:.4f}, {outcome.note}, {seconds:.1f} s")
                    yield Record(f"{name}, {network}", method + suffix, int(seed), scores, seconds, fitted.peak)

    def _images(self, name: str, seed: int) -> ImageSet:
        images = read_set(name, self.data_dir, self.device)
        order = torch.randperm(len(images.train[1]), generator=torch.Generator().manual_seed(seed))
        rows = order[: self.data].to(images.train[1].device)
        return ImageSet.made((images.train[0][rows], images.train[1][rows]), images.test, images.strange)


@dataclass(frozen=True, eq=False)
class Outcome:
    """Predictions of a training, by the end of their names, and the precisions of the layers, or the one of all."""

    predicts: dict[str, Predict]
    precisions: tuple[float, ...]

    @property
    def chosen(self) -> dict[str, float]:
        """The geometric mean of the precisions, and where there are several the least and the largest, as scores."""
        mean = math.exp(sum(map(math.log, self.precisions)) / len(self.precisions))
        several = {"least precision": min(self.precisions), "largest precision": max(self.precisions)}
        return {"precision": mean, **(several if len(self.precisions) > 1 else {})}

    @property
    def note(self) -> str:
        """All precisions, in the order of the layers."""
        return "precisions " + ", ".join(f"{value:.3g}" for value in self.precisions)


@dataclass(frozen=True, eq=False)
class Run:
    """One network on one set of images, in random order."""

    settings: Regularised
    network: str
    seed: int
    images: ImageSet

    def cross_validated(self) -> Outcome:
        """Train a network for each precision, then again on all images under the best."""
        x, y = self.images.standard_train()
        held_out, precisions = len(x) // 10, self.settings.precisions
        models = [self._made() for _ in precisions]
        self._train(models, precisions, held_out)
        nll = [
            metrics.categorical_nll(in_parts(softmax_of(model), x[:held_out]), y[:held_out]) for model in models
        ]  # fmt: skip
        best = precisions[nll.index(min(nll))]
        final = self._made()
        self._train([final], (best,), 0)
        return Outcome({"": softmax_of(final)}, (best,))

    def by_evidence(self, prior: str) -> Outcome:
        """Train once, with the evidence choosing the precisions."""
        settings = self.settings
        recipe = lw.recipes.online(
            settings.epochs, rate=settings.rate, burn_in=settings.burn_in, frequency=settings.frequency,
            update=lw.tuners.Ascend(settings.hyper_steps), prior=PRIORS[prior](), seed=self.seed,
        )  # fmt: skip
        data = Shuffled(*self.images.standard_train(), settings.batch_size)
        trained = lw.train(self._made(), data, PROBIT, recipe=recipe, progress=False)
        precisions = tuple(trained.posterior.prior.values.reshape(-1).tolist())
        predicts = {"": softmax_of(trained.model), ", posterior": probabilities_of(trained.posterior)}
        return Outcome(predicts, precisions)

    def _made(self) -> nn.Module:
        """Return the untrained network, the same for the same seed."""
        make = lambda: NETWORKS[self.network](self.settings, self.images)
        return seeded(make, self.seed).to(self.settings.device)

    def _train(self, models: list[nn.Module], precisions: tuple[float, ...], held_out: int) -> None:
        """Train under prior precisions: the penalty ½ precision |w|² / N is an L2 decay of precision / N."""
        x, y = (part[held_out:] for part in self.images.standard_train())
        schedule = Schedule(self.settings.epochs, self.settings.batch_size, self.settings.rate)
        train_together(models, x, y, schedule, [each / len(x) for each in precisions], self.seed)


NETWORKS: dict[str, Callable[[Regularised, ImageSet], nn.Module]] = {
    "MLP": lambda settings, images: perceptron(images.shape, images.n_classes, settings.hidden),
    "CNN": lambda settings, images: convolutional(images.shape, images.n_classes, settings.channels, settings.last),
}
