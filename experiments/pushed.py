"""HFL with converged pushes, on a convolutional network at its minimum, against the exact Hessian."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from experiments.data import Images, data_folder
from experiments.engine.contract import Record
from experiments.engine.seeds import parted, records_of, seed_units
from experiments.image_task import Beliefs, Task, best_temperature, scaled, scored
from experiments.minimum import minimised, rank_correlation
from experiments.options import Progress, add_data_dir, add_quick, add_seeds, silent
from experiments.pinned import PROBIT
from experiments.repeats import best_seconds, mean_scores, spread_scores
from lapwing import metrics
from lapwing.data.batches import Data
from lapwing.demo.result import ExperimentReport, Result, Row, plain
from lapwing.methods.hfl import PushedWeights, ResponsePosterior, fit_scale, push_of_average, random_forces
from lapwing.methods.hfl_response import Responder

IN_TABLE = ("NLL", "ECE", "MC NLL", "MC ECE", "accuracy", "OOD AUROC")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class PushedImages:
    """Settings: a tanh network with two convolutions on a few images of Fashion-MNIST; digits are the strange images.

    It has 1,020 weights, few enough for the exact Hessian: training reaches the minimum under the prior, and every push
    converges. Scales and the temperature are chosen on held-out training images. "distance" is how far the pushed
    weights are from their limit, "difference" how far the variances of a form that pushes for every prediction are from
    the exact ones, "standard error" that of random pushes as a share of the variance.
    """

    name: ClassVar[str] = "pushed"
    title: ClassVar[str] = "a convolutional network at its minimum, pushed: Fashion-MNIST"
    choosing: ClassVar[tuple[str, ...]] = ("seeds",)
    version: ClassVar[int] = 2  # scales, distances and standard errors are stored

    data_dir: Path
    data: int = 500
    held_out: int = 500
    test: int = 1000  # test images of each kind
    channels: tuple[int, int] = (6, 10)
    precision: float = 1.0
    pushes: int = 32
    draws: int = 2000  # samples of the logits
    single: int = 8  # test images whose outputs are pushed one by one
    seeds: int = 1
    seed: int = 0

    @classmethod
    def quick(cls) -> PushedImages:
        """Return the settings of the quick form."""
        return cls(Path(), data=60, held_out=60, test=60, channels=(2, 3), pushes=4, single=2)

    @classmethod
    def full(cls) -> PushedImages:
        """Return the settings of the full form."""
        return cls(Path())

    def units(self) -> tuple[str, ...]:
        """Return a unit for each seed."""
        return seed_units(self)

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Run the experiment with one seed."""
        _, seed = parted(unit)
        return records_of(run(replace(self, seeds=1, seed=seed), progress), seed)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    add_data_dir(parser)
    add_seeds(parser, 1)
    add_quick(parser, "few weights and images")


def command(arguments: argparse.Namespace, progress: Progress) -> ExperimentReport:
    """Run the experiment with the options given."""
    settings = PushedImages(data_folder(arguments.data_dir), seeds=arguments.seeds, seed=arguments.seed)
    if arguments.quick:
        settings = replace(PushedImages.quick(), data_dir=settings.data_dir, seeds=settings.seeds, seed=settings.seed)
    return ExperimentReport(arguments.out / "pushed.json", (run(settings, progress),))


def run(settings: PushedImages, progress: Progress = silent) -> Result:
    """Score every method on the same networks."""
    start = time.perf_counter()
    scores_of: dict[str, list[dict[str, float]]] = {}
    for seed in range(settings.seed, settings.seed + settings.seeds):
        task = made(settings, seed)
        progress(f"seed {seed}, at the minimum: {time.perf_counter() - start:.0f} s")
        for name, of_seed in _compared(task, settings, seed, progress).items():
            scores_of.setdefault(name, []).append(of_seed)
    rows = tuple(Row(name, {**mean_scores(each), **_spread(each)}) for name, each in scores_of.items())
    seconds = {"total": time.perf_counter() - start}
    return Result("pushed", plain(settings), settings.seed, rows, seconds)


def _spread(scores: list[dict[str, float]]) -> dict[str, float]:
    """Return the standard error of the NLL, where it was measured."""
    return spread_scores(scores, ("NLL",)) if "NLL" in scores[0] else {}


def made(settings: PushedImages, seed: int) -> Task:
    """Return the network at its minimum, in float64, and the images that it is tested on."""
    images = Images.read(settings.data_dir, "fashion_mnist", CPU, settings.data + settings.held_out, seed)
    strange = Images.read(settings.data_dir, "mnist", CPU).test[0]
    (x, y), (x_test, y_test) = images.train, images.test
    x, cut, count = x.double(), settings.data, settings.test
    cost = lambda f: F.cross_entropy(f, y[:cut], reduction="sum")
    return Task(
        minimised(small_network(settings, seed), x[:cut], cost, settings.precision, rows=16),
        (x[:cut], y[:cut]), (x[cut:], y[cut:]), (x_test[:count].double(), y_test[:count]), strange[:count].double(),
        batch_size=500,
    )  # fmt: skip


def small_network(settings: PushedImages, seed: int) -> nn.Module:
    """Return a smooth network, so that it has a Hessian, on images of half the size, to save time.

    Every row of the Hessian costs a pass over all images.
    """
    first, second = settings.channels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.AvgPool2d(2), nn.Conv2d(1, first, 3, stride=2), nn.Tanh(), nn.Conv2d(first, second, 3), nn.Tanh(),
            nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4 * second, 10),
        ).double()  # fmt: skip


def fitted(task: Task, method: Any, settings: PushedImages, seed: int) -> lw.Fitted:
    """Fit the method under the prior of the training."""
    return lw.fit(
        task.model, task.data, PROBIT, method=method, prior=settings.precision, progress=False,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip


def _methods(settings: PushedImages) -> dict[str, Any]:
    """Return the methods. The exact Hessian is the first, since the others are compared with it."""
    pushed = lambda variant: lw.HFL("pretrained", variant=variant, pushes=settings.pushes)
    return {
        "full Hessian": lw.Full(curvature="hessian"),
        "GGN": lw.Full(),
        "HFL, absolute push": pushed("absolute"),
        "HFL, mean push": pushed("mean"),
        f"HFL, {settings.pushes} random pushes": pushed("random"),
    }


def _compared(task: Task, settings: PushedImages, seed: int, progress: Progress) -> dict[str, dict[str, float]]:
    """Return the scores of every method, as it is and with variances scaled on held-out images."""
    taken, temperature = best_seconds(lambda: best_temperature(task), 1)
    beliefs = {"plain": scaled(task.model, 1.0), "temperature": scaled(task.model, temperature)}
    facts: dict[str, dict[str, float]] = {"plain": {"fit s": 0.0}}
    facts["temperature"] = {"temperature": temperature, "fit s": taken}
    posteriors: dict[str, lw.Fitted] = {}
    for name, method in _methods(settings).items():
        taken, posterior = best_seconds(lambda m=method: fitted(task, m, settings, seed), 1)  # type: ignore[misc]
        more, scale = best_seconds(lambda p=posterior: _scale(p.posterior, task), 1)  # type: ignore[misc]
        posteriors[name], beliefs[name], facts[name] = posterior, posterior.functions, {"fit s": taken}
        beliefs[f"{name}, calibrated"] = _times(posterior, scale)
        facts[f"{name}, calibrated"] = {"scale": scale, "fit s": taken + more}
        progress(f"seed {seed}, {name}: {taken + more:.0f} s")
    exact = _total(posteriors["full Hessian"].functions, task.test[0])
    singles, responder = _single(task, settings, seed, posteriors)
    progress(f"seed {seed}, {', '.join(singles)}")
    for name, each in posteriors.items():
        if isinstance(each.posterior, PushedWeights):
            facts[name] |= _convergence(each.posterior, responder, task, seed)
    return {name: {**_scores(each, task, settings, exact), **facts[name]} for name, each in beliefs.items()} | singles


def _scores(beliefs: Beliefs, task: Task, settings: PushedImages, exact: Tensor) -> dict[str, float]:
    """Return the scores of image tables, and those of the total variance as a score for out-of-distribution images."""
    scores = scored(beliefs, task, settings.draws)
    variance = _total(beliefs, task.test[0])
    return {
        **{name: scores[name] for name in IN_TABLE},
        "score AUROC": metrics.auroc(variance, _total(beliefs, task.strange)),
        "rank correlation": rank_correlation(variance, exact),
        "ratio": float((variance / exact).median()),
        "test s": scores["test s"],
    }


def _scale(posterior: Any, task: Task) -> float:
    """Return the scale of variances that ``HFL(calibration=...)`` would choose, for any posterior."""
    return fit_scale(posterior, Data(task.validation, CPU))


def _times(posterior: lw.Fitted, factor: float) -> Beliefs:
    """Return the posterior's distribution of outputs with its covariance times a factor."""

    def beliefs(x: Tensor) -> lw.FunctionGaussian:
        outputs = posterior.functions(x)
        return lw.FunctionGaussian(outputs.mean, factor * outputs.cov)

    return beliefs


def _total(beliefs: Beliefs, x: Tensor) -> Tensor:
    """Return the sum of the variances of the outputs, for each image, (B,)."""
    return beliefs(x).variance.sum(-1)


def _single(
    task: Task, settings: PushedImages, seed: int, posteriors: dict[str, lw.Fitted]
) -> tuple[dict[str, dict[str, float]], Responder]:
    """Compare the forms of HFL that push for every prediction with the exact ones; return scores and the responder."""
    x, scores, fits = task.test[0][: settings.single], {}, {}
    for name, method, same in (("each point", lw.HFL(), "full Hessian"), ("linearised", lw.HFL("linearised"), "GGN")):
        taken, fits[name] = best_seconds(lambda m=method: fitted(task, m, settings, seed), 1)  # type: ignore[misc]
        more, variance = best_seconds(lambda p=fits[name]: p.functions(x).variance, 1)  # type: ignore[misc]
        worst = float((variance / posteriors[same].functions(x).variance - 1).abs().max())
        label = f"HFL, {name}, {len(x)} images"
        scores[label] = {"difference": worst, "test s": more, "fit s": taken}
    posterior = fits["each point"].posterior
    assert isinstance(posterior, ResponsePosterior)
    assert isinstance(posterior.responder, Responder)
    return scores, posterior.responder


def _convergence(posterior: PushedWeights, responder: Responder, task: Task, seed: int) -> dict[str, float]:
    """Return how far the pushed weights are from H⁻¹ times the push, and how noisy random pushes are."""
    scores = {"distance": distance_from_limit(posterior, responder, task, seed)}
    if posterior.variant == "random":
        x = task.test[0]
        scores["standard error"] = float((posterior.standard_error(x) / posterior(x).variance).median())
    return scores


def distance_from_limit(posterior: PushedWeights, responder: Responder, task: Task, seed: int) -> float:
    """Return the relative distance of the pushed weights from H⁻¹ times the force, in the metric of H; the largest."""
    objective = responder.objective
    data = Data(task.data, CPU)
    if posterior.variant == "random":
        count = len(posterior.moved)
        root = responder.hessian.root
        force = random_forces(posterior.problem, data, count, torch.Generator().manual_seed(seed), root)
    else:
        inputs = [x for x, _ in task.data]
        force = push_of_average(objective, inputs, posterior.variant == "absolute")(
            torch.zeros_like(objective.centre)[None]
        )
    limit = responder.hessian.solve(force)
    gap = posterior.moved / posterior.strength[:, None] - limit
    squares = (gap * objective.hessian_product(gap)).sum(1) / (force * limit).sum(1)
    return float(squares.max().sqrt())
