"""Convolutional networks on clothes and photographs: the trained weights, the sampled network, the linearised one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

import lapwing as lw
from experiments.engine.contract import Record
from experiments.options import Progress
from experiments.pinned import PROBIT
from experiments.vision.learning import Schedule, tensor_cores, train_together
from experiments.vision.limits import Limit, within
from experiments.vision.networks import convolutional, seeded
from experiments.vision.predictions import (
    Predict,
    best_temperature,
    drawn_logits,
    in_parts,
    probabilities_of,
    sampled_network,
    scores_of,
    softmax_of,
)
from experiments.vision.sets import ImageSet, Pair, read_set
from lapwing import metrics
from lapwing.demo.training import Batches, batches


@dataclass(frozen=True)
class Convolutional:
    """Settings, after Immer et al. 2021: half of the test images are validation data, the others are scored.

    Networks are trained under each of ``decays``, prior precisions, and the one with the best likelihood of the
    validation images is kept. Precisions of the posteriors are chosen by the first ``tuning`` of these images.
    """

    name: ClassVar[str] = "cnn"
    title: ClassVar[str] = "convolutional networks: trained weights, sampled network, linearised network; OOD"
    choosing: ClassVar[tuple[str, ...]] = ("seeds",)

    data_dir: Path | None = None
    sets: tuple[str, ...] = ("fashion_mnist", "cifar10")
    channels: tuple[tuple[int, ...], ...] = ((32, 64), (64, 96, 128))  # of the network for each set
    hidden: int = 128
    dropout: float = 0.0
    epochs: int = 15
    batch_size: int = 1024
    rate: float = 2e-3
    decays: tuple[float, ...] = (20.0, 100.0)
    precisions: tuple[float, ...] = tuple(10 ** (k / 2) for k in range(-2, 9))
    data: int | None = None  # training images; None takes all
    tuning: int = 1000
    test: int | None = None  # test images that are scored, and strange ones; None takes all
    draws: int = 100
    seeds: int = 3
    limit: float | None = 20.0  # seconds after the training after which no method is begun
    device: str = "cuda"
    seed: int = 0

    @classmethod
    def quick(cls) -> Self:
        """Return the settings of the quick form: digits of scikit-learn."""
        return cls(
            sets=("digits",), channels=((6, 8),), hidden=16, epochs=15, batch_size=64, rate=1e-2, decays=(0.1, 1.0),
            precisions=(1.0, 10.0, 100.0, 1000.0), tuning=100, draws=20, seeds=1, limit=None, device="cpu",
        )  # fmt: skip

    @classmethod
    def full(cls) -> Self:
        """Return the settings of the full form, for a GPU."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return a key for each seed and set, all sets of the first seed first."""
        return tuple(f"{name}/{seed}" for seed in range(self.seed, self.seed + self.seeds) for name in self.sets)

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Train the networks of one set and seed, and score every method on the best."""
        name, seed = unit.rsplit("/", 1)
        with tensor_cores(False):
            task = Task.prepared(self, name, int(seed), progress)
            for method, fitted in within(task.methods(), Limit(self.limit), progress, unit):
                scores = task.scored(fitted.answer)
                progress(f"{unit}, {method}: NLL {scores['NLL']:.4f}, {fitted.seconds:.1f} s")
                yield Record(name, method, int(seed), scores, fitted.seconds, fitted.peak)


@dataclass(frozen=True, eq=False)
class Task:
    """A trained network and standardised images: for training, validation, the score, and strange ones."""

    settings: Convolutional
    model: nn.Module
    train: Pair
    validation: Pair
    test: Pair
    strange: Tensor | None
    seed: int

    @classmethod
    def prepared(cls, settings: Convolutional, name: str, seed: int, progress: Progress) -> Task:
        """Read the images and train the network."""
        images = read_set(name, settings.data_dir, settings.device)
        chosen = torch.randperm(len(images.train[1]), generator=torch.Generator().manual_seed(seed))
        rows = chosen[: settings.data].to(images.train[1].device)
        images = replace(images, train=(images.train[0][rows], images.train[1][rows]))
        validation, test = halves(images, seed, settings.test)
        model = _trained(settings, name, images, validation, seed, progress)
        strange = None if images.strange is None else images.standard(images.strange[: settings.test])
        return cls(settings, model, images.standard_train(), validation, test, strange, seed)

    @property
    def data(self) -> Batches:
        """Batches of training images."""
        return batches(*self.train, 1000)

    @property
    def tuning(self) -> Batches:
        """Batches of validation images that precisions are chosen by."""
        x, y = (part[: self.settings.tuning] for part in self.validation)
        return batches(x, y, 500)

    def scored(self, predict: Predict) -> dict[str, float]:
        """Return the scores on test images, with strange ones beside them."""
        strange = None if self.strange is None else in_parts(predict, self.strange)
        return scores_of(in_parts(predict, self.test[0]), self.test[1], strange)

    def methods(self) -> dict[str, Callable[[], Predict]]:
        """Return functions that fit each method; all that need the Kronecker curvature share one fit."""
        fits: dict[str, lw.Fitted] = {}

        def base(kind: str) -> lw.Fitted:
            if kind not in fits:
                method, weights = KINDS[kind]
                fits[kind] = lw.fit(
                    self.model, self.data, PROBIT, method=method, weights=weights, prior=1.0, progress=False
                )
            return fits[kind]

        def validated(kind: str) -> lw.Fitted:
            key = f"{kind}, validated"
            if key not in fits:
                fits[key] = base(kind).tuned(lw.tuners.Grid(self.tuning, self.settings.precisions))
            return fits[key]

        draw = lambda posterior: sampled_network(posterior, self.settings.draws, self.seed)
        return {
            "MAP": lambda: softmax_of(self.model),
            "temperature": lambda: softmax_of(self.model, self._temperature()),
            "linearised Kron": lambda: probabilities_of(validated("Kron")),
            "linearised Kron, drawn logits": lambda: drawn_logits(validated("Kron")),
            "sampled network": lambda: draw(validated("Kron")),
            "sampled network, its precision": lambda: draw(self._best_to_draw(base("Kron"))),
            "linearised last layer": lambda: probabilities_of(validated("last layer")),
            "linearised Kron, evidence": lambda: probabilities_of(base("Kron").tuned(lw.tuners.MaximiseEvidence())),
            "mixture, no validation data": lambda: probabilities_of(self._guarded(base("Kron"))),
            "mixture, validation data": lambda: probabilities_of(base("Kron").tuned(lw.tuners.Integrate(self.tuning))),
            "linearised diagonal": lambda: probabilities_of(validated("diagonal")),
            "sampled network, diagonal": lambda: draw(validated("diagonal")),
        }

    def _temperature(self) -> float:
        x, y = self.validation
        return best_temperature(in_parts(self.model, x), y)

    def _guarded(self, posterior: lw.Fitted) -> lw.Fitted:
        return posterior.tuned(lw.tuners.MaximiseEvidence()).tuned(lw.tuners.Budget(self.data))

    def _best_to_draw(self, posterior: lw.Fitted) -> lw.Fitted:
        """Return the posterior under the precision with which the sampled network predicts validation images best."""
        x, y = (part[: self.settings.tuning] for part in self.validation)
        candidates = [posterior.with_prior(precision) for precision in self.settings.precisions]
        nll = [
            metrics.categorical_nll(in_parts(sampled_network(each, min(self.settings.draws, 20), self.seed), x), y)
            for each in candidates
        ]
        return candidates[nll.index(min(nll))]


KINDS: dict[str, tuple[Any, str]] = {  # a method and its weights
    "Kron": (lw.Kron(), "all"), "diagonal": (lw.Diagonal(), "all"), "last layer": (lw.Full(), "last_layer"),
}  # fmt: skip


def halves(images: ImageSet, seed: int, most: int | None = None) -> tuple[Pair, Pair]:
    """Return the test images, standardised, as two random halves: for validation, and up to ``most`` for the score."""
    x, y = images.standard(images.test[0]), images.test[1]
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).to(y.device)
    first, second = order[: len(y) // 2], order[len(y) // 2 :][:most]
    return (x[first], y[first]), (x[second], y[second])


def _trained(
    settings: Convolutional, name: str, images: ImageSet, validation: Pair, seed: int, progress: Progress
) -> nn.Module:
    """Train a network under each precision, and return the one with the best likelihood of the validation images."""
    channels = dict(zip(settings.sets, settings.channels, strict=True))[name]
    make = lambda: convolutional(images.shape, images.n_classes, channels, settings.hidden, settings.dropout)
    models = [seeded(make, seed).to(settings.device) for _ in settings.decays]
    x, y = images.standard_train()
    schedule = Schedule(settings.epochs, settings.batch_size, settings.rate)
    train_together(models, x, y, schedule, [decay / len(x) for decay in settings.decays], seed)
    nll = [metrics.categorical_nll(in_parts(softmax_of(model), validation[0]), validation[1]) for model in models]
    best = nll.index(min(nll))
    listed = ", ".join(f"{decay:g}: {value:.4f}" for decay, value in zip(settings.decays, nll, strict=True))
    progress(f"{name}/{seed}: NLL of validation images by the precision in training {listed}")
    return models[best]
