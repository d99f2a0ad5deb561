"""EM from samples at the tangent model's own optimum, for a ResNet: precision and γ by step, and test scores."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

import lapwing as lw
from experiments.engine.contract import Record
from experiments.image_task import Beliefs, Pair, Task, best_temperature, scaled
from experiments.options import Progress
from experiments.resnets import cifar10, staged, train
from lapwing import metrics
from lapwing.data.batches import Data
from lapwing.demo.training import batches
from lapwing.predictives.labels import SoftmaxPredictive
from lapwing.tangent import tangent_model
from lapwing.tuners.linear_mode import ModeSolver

LARGEST = 4.0  # factor by which the precision falls in one step: a small one needs many more products
CONVERGED = 0.02  # change of the logarithm of the precision at which EM stops
WORSE = 1.02  # validation stops at a likelihood that is worse than the best by this factor


@dataclass(frozen=True)
class SampleScales:
    """Settings: images, a ResNet, the data of its tangent model, and how long EM goes on.

    The network is trained on all training images but those held out for the validated precision and the temperature.
    The tangent model, with all weights, has the first ``tangent`` of its training images as data, so that a pass over
    them is short.
    """

    data_dir: Path = Path()
    images: str = "made"  # noisy patterns of 16 x 16 pixels; or "cifar10", from data_dir
    widths: tuple[int, ...] = (4, 8)
    blocks: int = 1
    train: int = 400
    held_out: int = 200
    test: int = 300
    tangent: int = 200
    epochs: int = 12
    batch: int = 100
    samples: int = 16
    start: float = 100.0  # the first precision
    steps: int = 10
    seconds: float = 60.0  # no step of EM starts after that long, and no precision is tried on held-out images
    precisions: tuple[float, ...] = (1e5, 3e4, 1e4, 3e3, 1e3, 300.0, 100.0)  # for validation, from large to small
    device: str = "cpu"
    seed: int = 0

    name: ClassVar[str] = "em"
    title: ClassVar[str] = "EM from samples at the tangent model's own optimum: a ResNet, precision and γ by step"
    columns: ClassVar[tuple[str, ...]] = ("NLL", "ECE", "accuracy", "precision", "γ", "next precision")

    @classmethod
    def quick(cls) -> Self:
        """Return the quick form: a small network and made images."""
        return cls()

    @classmethod
    def full(cls) -> Self:
        """Return the full form: ResNet-18 with 11.2 million weights on CIFAR-10, three minutes on an H200."""
        return cls(
            images="cifar10", widths=(64, 128, 256, 512), blocks=2, train=48_000, held_out=2_000, test=10_000,
            tangent=3_000, epochs=24, batch=250, start=1e4, steps=12,
            precisions=tuple(10.0 ** (k / 2) for k in range(9, 0, -1)), device="cuda",
        )  # fmt: skip

    def units(self) -> tuple[str, ...]:
        """Return the units: the network alone, EM, and the precision chosen on held-out images."""
        return ("plain", "em", "validation")

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Run one unit. The network and its samples are made by the first unit that needs them."""
        work = {"plain": self._plain, "em": self._em, "validation": self._validated}
        yield from work[unit](progress)

    def _plain(self, progress: Progress) -> Iterator[Record]:
        """Score the network as it is, and with a temperature."""
        seconds, task = _timed(lambda: made_task(self))
        progress(f"trained after {seconds:.0f} s")
        yield self._scored("plain", scaled(task.model, 1.0), task, {"training s": seconds})
        temperature = best_temperature(task)
        yield self._scored("temperature", scaled(task.model, temperature), task, {"temperature": temperature})

    def _em(self, progress: Progress) -> Iterator[Record]:
        """Iterate EM and yield γ and the next precision, by all samples and by each alone; then score the results."""
        task, start = made_task(self), time.perf_counter()
        posterior = sampled(self)
        progress(f"samples after {time.perf_counter() - start:.0f} s")
        network = posterior.problem.network
        theta = network.theta().double()
        solver = ModeSolver(tangent_model(network, posterior.problem.likelihood, _tangent(self)), theta, 0.1)
        alone = self.start
        for step in range(self.steps):
            before, each = float(posterior.problem.prior.values), posterior.gamma_samples().sum(1)
            with full_precision():
                theta = solver(posterior.problem, theta).theta
            after = float(each.mean() / theta.square().sum())
            yield from self._step(step, before, after, each)
            progress(f"step {step}: precision {before:.4g}, γ {float(each.mean()):.4g}, next {after:.4g}")
            alone = after * float(each[0] / each.mean())
            posterior = at(posterior, max(after, before / LARGEST))
            if abs(math.log(after / before)) < CONVERGED or time.perf_counter() - start > self.seconds:
                break
        alone = max(alone, before / LARGEST)
        seconds = time.perf_counter() - start
        yield self._scored(f"EM, {self.samples} samples", posterior, task, _solved(posterior), seconds)
        single = at(posterior, alone)
        yield self._scored("EM, γ from one sample", single, task, _solved(single))

    def _step(self, step: int, before: float, after: float, each: Tensor) -> Iterator[Record]:
        """Yield the records of one step of EM; that of a single sample has its number in place of a seed."""
        group, gamma = f"step {step}", float(each.mean())
        error = float(each.std()) / len(each) ** 0.5
        scores = {"precision": before, "γ": gamma, "error of γ": error, "next precision": after}
        yield Record(group, f"{len(each)} samples", self.seed, scores)
        for number, alone in enumerate(each.tolist()):
            scores = {"precision": before, "γ": alone, "next precision": after * alone / gamma}
            yield Record(group, "one sample", number, scores)

    def _validated(self, progress: Progress) -> Iterator[Record]:
        """Choose the precision with the best likelihood of held-out images, and score it."""
        task, start = made_task(self), time.perf_counter()
        best, chosen = math.inf, sampled(self)
        for precision in self.precisions:
            posterior = at(chosen, precision)
            loss = metrics.categorical_nll(probabilities(posterior, task.validation), task.held_out[1])
            progress(f"precision {precision:.4g}: NLL {loss:.4f} of held-out images")
            yield Record("held out", f"precision {precision:.4g}", self.seed, {"precision": precision, "NLL": loss})
            if loss > WORSE * best or time.perf_counter() - start > self.seconds:
                break
            if loss < best:
                best, chosen = loss, posterior
        seconds = time.perf_counter() - start
        yield self._scored(f"validation, {self.samples} samples", chosen, task, _solved(chosen), seconds)

    def _scored(
        self, name: str, beliefs: Beliefs, task: Task, more: dict[str, float], seconds: float | None = None
    ) -> Record:
        """Return the record of the test scores."""
        probs, y = probabilities(beliefs, batches(*task.test, task.batch_size)), task.test[1]
        scores = {
            "NLL": metrics.categorical_nll(probs, y), "ECE": metrics.ece(probs, y),
            "Brier": metrics.brier(probs, y), "accuracy": metrics.accuracy(probs, y), **more,
        }  # fmt: skip
        return Record("test", name, self.seed, scores, seconds)


def probabilities(beliefs: Beliefs, data: list[Pair]) -> Tensor:
    """Return the probabilities of the classes by the probit link, (N, C)."""
    return torch.cat([SoftmaxPredictive(beliefs(x), "probit").probs for x, _ in data])


@lru_cache(maxsize=1)
def made_task(settings: SampleScales) -> Task:
    """Train the network; the same for all units of one process."""
    device = torch.device(settings.device)
    if device.type == "cuda":  # recurrences are float64; ``full_precision`` is for what needs more
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    (x, y), test = _images(settings, device)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(settings.seed)).to(device)
    x, y, cut = x[order], y[order], settings.train
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = staged(settings.widths, settings.blocks).to(device)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    train(model, x[:cut], y[:cut], settings.epochs, batch=min(512, settings.train // 4))
    model = model.to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
    held_out = x[cut : cut + settings.held_out], y[cut : cut + settings.held_out]
    return Task(model, (x[:cut], y[:cut]), held_out, test, test[0][:0], settings.batch)


def _images(settings: SampleScales, device: torch.device) -> tuple[Pair, Pair]:
    """Return training images, those held out included, and test images."""
    most = settings.train + settings.held_out
    if settings.images == "cifar10":
        parts = [cifar10(settings.data_dir, part, device) for part in ("train", "test")]
        (x, y), (x_test, y_test) = parts
        return (x[:most], y[:most]), (x_test[: settings.test], y_test[: settings.test])
    generator = torch.Generator().manual_seed(settings.seed)
    patterns = F.interpolate(torch.randn(10, 3, 4, 4, generator=generator), size=(16, 16))
    y = torch.arange(most + settings.test) % 10
    x = (patterns[y] + torch.randn(len(y), 3, 16, 16, generator=generator)).to(device)
    y = y.to(device)
    return (x[:most], y[:most]), (x[most:], y[most:])


def _tangent(settings: SampleScales) -> Data:
    """Return the data of the tangent model for its optimum."""
    return Data(tangent_data(settings), torch.device(settings.device))


def tangent_data(settings: SampleScales) -> list[Pair]:
    """Return the data of the tangent model in batches."""
    x, y = (t[: settings.tangent] for t in made_task(settings).train)
    return batches(x, y, settings.batch)


@lru_cache(maxsize=1)
def sampled(settings: SampleScales) -> Any:
    """Return the samples of the tangent model at the first precision; one basis then serves all precisions."""
    task = made_task(settings)
    method = lw.Sampled(num_samples=settings.samples, width=2 * settings.samples)
    fitted = lw.fit(
        task.model, tangent_data(settings), lw.Categorical(link="probit"), method=method,
        prior=lw.isotropic(settings.start), progress=False, generator=torch.Generator().manual_seed(settings.seed),
    )  # fmt: skip
    posterior = fitted.base
    posterior.prepare()
    return posterior


def at(posterior: Any, precision: float) -> Any:
    """Return the samples under another precision, at the network's weights."""
    problem = posterior.problem
    values = torch.full_like(problem.prior.values.detach(), precision)
    return replace(posterior.with_problem(problem.with_precisions(values)), mode=None)


def _solved(posterior: Any) -> dict[str, float]:
    """Return the precision, and how well the samples are solved for."""
    solution = posterior.solution
    residual, products = float(solution.residuals.max()), float(solution.iterations)
    return {"precision": float(posterior.problem.prior.values), "residual": residual, "products": products}


@contextmanager
def full_precision() -> Iterator[None]:
    """Forbid TF32, in which the loss of the tangent model is too coarse for the end of Newton's method."""
    kept = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = kept


def _timed(call: Any) -> tuple[float, Any]:
    """Return the seconds that a call takes, and its result."""
    start = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result
