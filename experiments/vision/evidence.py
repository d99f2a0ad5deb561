"""Naive against corrected evidence: six architectures, one precision against many, w̃ against θ*, scale and training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

import lapwing as lw
from experiments.data import data_folder
from experiments.engine.contract import Record
from experiments.options import Progress
from experiments.resnets import pretrained
from experiments.vision.architectures import ARCHITECTURES, SMALL
from experiments.vision.learning import tensor_cores
from experiments.vision.limits import Limit, within
from experiments.vision.networks import seeded
from experiments.vision.predictions import Predict, in_parts, probabilities_of, scores_of, softmax_of
from experiments.vision.rescaled import rescaled
from experiments.vision.sets import ImageSet, Pair, read_set
from lapwing.demo.training import TrainingSettings, batches, optimise

if TYPE_CHECKING:
    from experiments.engine.store import Stored

PARTS = ("table", "training", "scale", "given")
TRAINED_ON = 50_000  # images that the given residual networks were trained on


@dataclass(frozen=True)
class Evidence:
    """Settings. Networks are trained on all images; ``data`` of them stand for all in the posteriors.

    Units are "table/NETWORK/SEED", the scores of all posteriors; "training/...", naive and corrected evidence after
    ``snapshots`` epochs; "scale/...", all weights whose scale the network ignores multiplied by each of ``factors``;
    and "given/DEPTH/SEED", residual networks with given weights.
    """

    name: ClassVar[str] = "evidence"
    title: ClassVar[str] = "naive against corrected evidence: six architectures, training, scale, given ResNets"
    choosing: ClassVar[tuple[str, ...]] = ("networks", "moving", "depths", "seeds")

    data_dir: Path | None = None
    images: str = "mnist"
    photographs: str = "cifar10"
    networks: tuple[str, ...] = tuple(ARCHITECTURES)
    moving: tuple[str, ...] = ("ResNet",)  # networks of the units "training" and "scale"
    depths: tuple[int, ...] = (20, 56)
    epochs: int = 6
    batch_size: int = 256
    rate: float = 2e-3
    data: int = 2000
    few: int = 1000  # images for the units "training", "scale" and "given"
    test: int = 5000
    snapshots: tuple[int, ...] = (1, 3, 6)
    factors: tuple[float, ...] = (0.1, 10.0)
    tolerance: float = 1e-3
    solver_tolerance: float = 1e-2
    small: bool = False  # networks for images of 8 x 8
    seeds: int = 3
    limit: float | None = 40.0  # seconds of a unit after which no method is begun
    device: str = "cuda"
    seed: int = 0

    @classmethod
    def quick(cls) -> Self:
        """Return the settings of the quick form: tiny networks on digits of scikit-learn."""
        return cls(
            images="digits", moving=("CNN",), depths=(), epochs=10, batch_size=64, rate=1e-2, data=60, few=40,
            test=300, snapshots=(2, 10), tolerance=1e-1, solver_tolerance=0.1, seeds=1, small=True, limit=None,
            device="cpu",
        )  # fmt: skip

    @classmethod
    def full(cls) -> Self:
        """Return the settings of the full form, for a GPU."""
        return cls()

    def units(self) -> tuple[str, ...]:
        """Return the keys, those of the first seed first; given networks have one."""
        keys = []
        for seed in range(self.seed, self.seed + self.seeds):
            keys += [f"table/{name}/{seed}" for name in self.networks]
            keys += [f"{part}/{name}/{seed}" for part in ("training", "scale") for name in self.moving]
            keys += [f"given/{depth}/{seed}" for depth in self.depths if seed == self.seed]
        return tuple(keys)

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Train a network, and score its posteriors."""
        part, name, seed = unit.split("/")
        run = Run(self, name, int(seed), unit, progress)
        parts: dict[str, Callable[[], Iterator[Record]]] = {
            "table": run.table, "training": run.training, "scale": run.scale, "given": run.given,
        }  # fmt: skip
        with tensor_cores(False):
            yield from parts[part]()

    def picture(self, stored: Stored, path: Path) -> None:
        """Draw naive and corrected evidence against the epoch, and against the scale of the weights."""
        from experiments.vision.evidence_picture import picture

        picture(stored.records, path)


@dataclass(frozen=True, eq=False)
class Run:
    """One unit: a network, its images, and the posteriors that are compared."""

    settings: Evidence
    name: str
    seed: int
    unit: str
    progress: Progress

    def table(self) -> Iterator[Record]:
        """Score one precision and many, naive and corrected, and the Hessian at θ*."""
        images = self._images(self.settings.images)
        model = self._trained(images)
        limit, (x, y) = Limit(self.settings.limit), self._test(images)
        naive, corrected = lw.tuners.MaximiseEvidence(), self._corrected()
        fit = partial(self._fitted, model, images, self.settings.data)
        methods: dict[str, Callable[[], lw.Fitted]] = {
            "naive, one precision": lambda: fit(False, naive),
            "naive, many": lambda: fit(True, naive),
            "corrected, one precision": lambda: fit(False, corrected),
            "corrected, one precision, Hessian at θ*": lambda: fit(False, self._corrected(lw.Kron())),
            "corrected, many": lambda: fit(True, corrected),
        }
        yield Record(self.name, "plain network", self.seed, scores_of(in_parts(softmax_of(model), x), y))
        for method, fitted in within(methods, limit, self.progress, self.unit):
            posterior = fitted.answer
            scores = scores_of(in_parts(probabilities_of(posterior), x), y)
            scores |= {"log evidence": float(posterior.log_evidence().detach())}
            scores |= {"gamma": float(posterior.effective_parameters().total)}
            scores |= {"label variance": self._label_variance(posterior, images)}
            self.progress(f"{self.unit}, {method}: NLL {scores['NLL']:.4f}, {fitted.seconds:.1f} s")
            yield Record(self.name, method, self.seed, scores, fitted.seconds, fitted.peak)

    def training(self) -> Iterator[Record]:
        """Measure naive and corrected evidence, one precision, after some of the epochs."""
        images = self._images(self.settings.images)
        x, y = self._test(images)
        records: list[Record] = []
        limit = Limit(self.settings.limit)

        def measure(model: nn.Module, epoch: int) -> None:
            if epoch not in self.settings.snapshots:
                return
            group = f"{self.name} training, epoch {epoch}"
            fit = partial(self._fitted, model, images, self.settings.few, False)
            predictives: dict[str, Callable[[], Predict]] = {
                "plain network": lambda: softmax_of(model),
                "corrected": lambda: probabilities_of(fit(self._corrected())),
                "naive": lambda: probabilities_of(fit(lw.tuners.MaximiseEvidence())),
            }
            corrected: Tensor | None = None
            for method, fitted in within(predictives, limit, self.progress, f"{self.unit}, epoch {epoch}"):
                probs = in_parts(fitted.answer, x)
                scores = scores_of(probs, y)
                if corrected is not None:
                    scores["KL"] = divergence(probs, corrected)
                corrected = probs if method == "corrected" else corrected
                records.append(Record(group, method, self.seed, scores, fitted.seconds))

        self._trained(images, measure)
        yield from records

    def scale(self) -> Iterator[Record]:
        """Multiply the weights whose scale has no effect, and measure how far the predictive moves."""
        images = self._images(self.settings.images)
        model = self._trained(images)
        limit, (x, y) = Limit(self.settings.limit), self._test(images)
        first: dict[str, Tensor] = {}
        for factor in (1.0, *self.settings.factors):
            other = rescaled(model, self._data(images, 8)[0], factor)
            fit = partial(self._fitted, other, images, self.settings.few)
            predictives: dict[str, Callable[[], Predict]] = {
                "plain network": lambda other=other: softmax_of(other),  # type: ignore[misc]
                "naive, one precision": lambda fit=fit: probabilities_of(fit(False, lw.tuners.MaximiseEvidence())),  # type: ignore[misc]
                "corrected, one precision": lambda fit=fit: probabilities_of(fit(False, self._corrected())),  # type: ignore[misc]
                "corrected, many": lambda fit=fit: probabilities_of(fit(True, self._corrected())),  # type: ignore[misc]
            }
            for method, fitted in within(predictives, limit, self.progress, f"{self.unit}, factor {factor:g}"):
                probs = in_parts(fitted.answer, x)
                kl = divergence(probs, first.setdefault(method, probs))
                scores = {**scores_of(probs, y), "KL": kl}
                yield Record(f"{self.name} scale, factor {factor:g}", method, self.seed, scores, fitted.seconds)

    def given(self) -> Iterator[Record]:
        """Score the corrected evidence beside the naive one for a residual network with given weights."""
        images = self._images(self.settings.photographs)
        model = pretrained(data_folder(self.settings.data_dir), int(self.name)).to(self.settings.device)
        limit, (x, y) = Limit(self.settings.limit), self._test(images)
        fit = partial(self._fitted, model, images, self.settings.few, of=TRAINED_ON)
        methods: dict[str, Callable[[], Predict]] = {
            "plain network": lambda: softmax_of(model),
            "naive, one precision": lambda: probabilities_of(fit(False, lw.tuners.MaximiseEvidence())),
            "corrected, one precision": lambda: probabilities_of(fit(False, self._corrected())),
            "corrected, many": lambda: probabilities_of(fit(True, self._corrected())),
        }
        for method, fitted in within(methods, limit, self.progress, self.unit):
            scores = scores_of(in_parts(fitted.answer, x, 250), y)
            self.progress(f"{self.unit}, {method}: NLL {scores['NLL']:.4f}, {fitted.seconds:.1f} s")
            yield Record(f"ResNet-{self.name}", method, self.seed, scores, fitted.seconds, fitted.peak)

    def _images(self, name: str) -> ImageSet:
        return read_set(name, self.settings.data_dir, self.settings.device)

    def _trained(self, images: ImageSet, after: Callable[[nn.Module, int], None] | None = None) -> nn.Module:
        """Return the network, trained by Adam without decay; ``after`` sees it after every epoch."""
        settings = self.settings
        makers = SMALL if settings.small else ARCHITECTURES
        model = seeded(makers[self.name], self.seed).to(settings.device)
        recipe = TrainingSettings(
            epochs=settings.epochs, batch_size=settings.batch_size, learning_rate=settings.rate, weight_decay=0.0,
            max_steps=10**9,
        )  # fmt: skip

        def measure(epoch: int) -> None:
            if after is not None:
                with tensor_cores(False):
                    after(model, epoch)

        with tensor_cores():
            optimise(model, *images.standard_train(), recipe, self.seed, measure)
        return model

    def _test(self, images: ImageSet) -> Pair:
        x, y = (part[: self.settings.test] for part in images.test)
        return images.standard(x), y

    def _data(self, images: ImageSet, count: int) -> Pair:
        """Return some training images, a new choice for every seed."""
        order = torch.randperm(len(images.train[1]), generator=torch.Generator().manual_seed(self.seed))
        rows = order[:count].to(images.train[1].device)
        return images.standard(images.train[0][rows]), images.train[1][rows]

    def _fitted(
        self, model: nn.Module, images: ImageSet, count: int, many: bool, tuner: Any, of: int | None = None
    ) -> lw.Fitted:
        """Fit a Kronecker posterior to ``count`` images that stand for all that the network was trained on.

        They are one batch: products with the curvature take fewer, larger steps.
        """
        x, y = self._data(images, count)
        likelihood = lw.Categorical(temperature=len(y) / (of or len(images.train[1])), link="probit")
        prior: Any = lw.isotropic(1.0)
        if many:  # a network without norms has no groups but its layers
            prior = lw.per_layer(1.0) if self.name == "Fixup" else lw.priors.per_normalised_group(1.0)
        return lw.fit(model, batches(x, y, count), likelihood, prior=prior, tuner=tuner, progress=False)

    def _label_variance(self, posterior: lw.Fitted, images: ImageSet) -> float:
        """Return the mean of 1 - Σ p² over the images of the fit, by the tangent model at its optimum if it has one.

        It is the trace of the curvature of the softmax: small where the labels are fitted well.
        """
        core: Any = posterior.base
        network, mode = posterior.network, core.mode
        if mode is not None:
            network = network.with_shift(mode.theta - network.theta().double())
        x, _ = self._data(images, self.settings.data)
        with torch.no_grad():
            return float(1 - network(x).double().softmax(-1).square().sum(-1).mean())

    def _corrected(self, refit: Any = None) -> Any:
        settings = self.settings
        return lw.tuners.LinearMode(
            refit=refit, rounds=2, tolerance=settings.tolerance, solver_tolerance=settings.solver_tolerance
        )


def divergence(p: Tensor, q: Tensor) -> float:
    """Return the mean KL divergence of q from p over the rows, in nats.

    >>> divergence(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.5, 0.5]]))
    0.0
    """
    p, q = p.double(), q.double().clamp_min(1e-30)
    value = float((torch.special.xlogy(p, p) - p * q.log()).sum(-1).mean())
    assert math.isfinite(value)
    return max(value, 0.0)
