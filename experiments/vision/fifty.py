"""ResNet-50 on CIFAR-10, with BatchNorm and with Fixup: naive against corrected evidence, full and simple form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

import lapwing as lw
from experiments.engine.contract import Record
from experiments.engine.seeds import parted, seed_units
from experiments.options import Progress, chosen
from experiments.vision.bottlenecks import FIFTY, NETWORKS, BottleneckNet, offset_free_mean
from experiments.vision.learning import Schedule, tensor_cores, train_large
from experiments.vision.limits import Limit, within
from experiments.vision.networks import seeded
from experiments.vision.predictions import in_parts, probabilities_of, scores_of, softmax_of
from experiments.vision.sets import ImageSet, Pair, read_set
from lapwing.demo.training import batches


@dataclass(frozen=True)
class Fifty:
    """Settings. A unit is one network and seed.

    ``data`` of the training images stand for all in the posteriors. "simple" is the tangent model without an offset,
    h = J θ; the others have h = f + J (θ - w̃). "many" is a precision for each normalised group, or for each layer of a
    network without norms.
    """

    name: ClassVar[str] = "resnet50"
    title: ClassVar[str] = "ResNet-50 on CIFAR-10, BatchNorm and Fixup: naive against corrected evidence"
    choosing: ClassVar[tuple[str, ...]] = ("networks", "seeds")
    columns: ClassVar[tuple[str, ...]] = ("NLL", "accuracy", "ECE", "log evidence", "gamma")

    data_dir: Path | None = None
    images: str = "cifar10"
    networks: tuple[str, ...] = tuple(NETWORKS)
    width: int = 64
    blocks: tuple[int, ...] = FIFTY
    side: int | None = None  # pixels to which images are averaged; None keeps them
    train: int | None = None  # training images; None takes all
    epochs: int = 15
    batch_size: int = 512
    rates: tuple[float, float] = (0.4, 0.1)  # of training with BatchNorm and without norms
    decay: float = 5e-4
    data: int = 1000
    test: int = 5000
    tolerance: float = 1e-3
    solver_tolerance: float = 1e-2
    seeds: int = 3
    limit: float | None = 120.0  # seconds of a unit after which no posterior is begun
    device: str = "cuda"
    seed: int = 0

    @classmethod
    def quick(cls) -> Self:
        """Return the settings of the quick form: four blocks of two channels on digits of scikit-learn."""
        return cls(
            images="digits", width=2, blocks=(1, 1), epochs=3, batch_size=100, rates=(0.1, 0.05), data=20,
            test=200, tolerance=1.0, solver_tolerance=0.3, seeds=1, limit=None, device="cpu",
        )  # fmt: skip

    @classmethod
    def full(cls) -> Self:
        """Return the settings of the full form, for a GPU."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return the keys, such as "Fixup/0"."""
        return seed_units(self, *chosen(self.networks, tuple(NETWORKS), "networks"))

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Train the network, and score its posteriors."""
        name, seed = parted(unit)
        images = self._images()
        model = self._trained(name, images, seed)
        x, y = (part[: self.test] for part in images.test)
        x = images.standard(x)
        limit = Limit(self.limit)
        yield Record(name, "plain network", seed, scores_of(in_parts(softmax_of(model), x, 250), y))
        with tensor_cores(False):
            for method, fitted in within(self._methods(model, name, images, seed), limit, progress, unit):
                posterior = fitted.answer
                scores = scores_of(in_parts(probabilities_of(posterior), x, 250), y)
                scores |= {"log evidence": float(posterior.log_evidence().detach())}
                scores |= {"gamma": float(posterior.effective_parameters().total)}
                progress(f"{unit}, {method}: NLL {scores['NLL']:.4f}, {fitted.seconds:.1f} s")
                yield Record(name, method, seed, scores, fitted.seconds, fitted.peak)

    def _methods(
        self, model: BottleneckNet, name: str, images: ImageSet, seed: int
    ) -> dict[str, Callable[[], lw.Fitted]]:
        """Return a function for each posterior that fits it."""
        fit = partial(self._fitted, model, name, images, seed)
        naive = lw.tuners.MaximiseEvidence()
        corrected = lw.tuners.LinearMode(tolerance=self.tolerance, solver_tolerance=self.solver_tolerance)
        return {
            "naive, one precision": lambda: fit(False, False, naive),
            "corrected, one precision": lambda: fit(False, False, corrected),
            "corrected, one precision, simple": lambda: fit(False, True, corrected),
            "naive, many": lambda: fit(True, False, naive),
            "corrected, many": lambda: fit(True, False, corrected),
            "corrected, many, simple": lambda: fit(True, True, corrected),
        }

    def _fitted(
        self, model: BottleneckNet, name: str, images: ImageSet, seed: int, many: bool, simple: bool, tuner: Any
    ) -> lw.Fitted:
        """Fit a Kronecker posterior to ``data`` images, one batch, that stand for all of the training."""
        order = torch.randperm(len(images.train[1]), generator=torch.Generator().manual_seed(seed))[: self.data]
        rows = order.to(images.train[1].device)
        x, y = images.standard(images.train[0][rows]), images.train[1][rows]
        likelihood = lw.Categorical(temperature=len(y) / len(images.train[1]), link="probit")
        mean: float | Tensor = offset_free_mean(model) if simple else 0.0
        grouped = lw.per_layer if name == "Fixup" else lw.priors.per_normalised_group
        prior = grouped(1.0, mean) if many else lw.isotropic(1.0, mean)
        return lw.fit(model, batches(x, y, self.data), likelihood, prior=prior, tuner=tuner, progress=False)

    def _images(self) -> ImageSet:
        images = read_set(self.images, self.data_dir, self.device)
        train = images.train[0][: self.train], images.train[1][: self.train]
        return ImageSet(self._pooled(train), self._pooled(images.test), None, images.mean, images.std)

    def _pooled(self, pair: Pair) -> Pair:
        return (pair[0] if self.side is None else F.adaptive_avg_pool2d(pair[0], self.side)), pair[1]

    def _trained(self, name: str, images: ImageSet, seed: int) -> BottleneckNet:
        make = lambda: BottleneckNet(NETWORKS[name], images.shape[0], self.width, self.blocks)
        model = seeded(make, seed).to(self.device)
        assert isinstance(model, BottleneckNet)
        schedule = Schedule(self.epochs, self.batch_size, self.rates[tuple(NETWORKS).index(name)])
        train_large(model, *images.standard_train(), schedule, self.decay, seed)
        return model
