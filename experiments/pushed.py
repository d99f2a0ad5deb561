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
from experiments.repeats import mean_scores, spread_scores
from lapwing import metrics
from lapwing.core.data import Data
from lapwing.demo.result import Report, Result, Row, plain
from lapwing.demo.training import best_seconds
from lapwing.methods.hfl.posteriors import ResponsePosterior
from lapwing.methods.hfl.pretrained import PushedWeights, averaged, fitted_scale, random_forces
from lapwing.methods.hfl.responder import Responder

IN_TABLE = ("NLL", "ECE", "MC NLL", "MC ECE", "accuracy", "OOD AUROC")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class PushedImages:
    """Settings: a tanh network with two convolutions on a few images of Fashion-MNIST; digits are the strange images.

    It has 1,020 weights, few enough for the exact Hessian: training reaches the minimum under the prior, and every push
    converges. Scales and the temperature are chosen on held-out training images.
    """

    name: ClassVar[str] = "pushed"
    title: ClassVar[str] = "a convolutional network at its minimum, pushed: Fashion-MNIST"
    choosing: ClassVar[tuple[str, ...]] = ("seeds",)

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


def command(arguments: argparse.Namespace, progress: Progress) -> Report:
    """Run the experiment with the options given."""
    settings = PushedImages(data_folder(arguments.data_dir), seeds=arguments.seeds, seed=arguments.seed)
    if arguments.quick:
        settings = replace(PushedImages.quick(), data_dir=settings.data_dir, seeds=settings.seeds, seed=settings.seed)
    return Report(arguments.out / "pushed.json", (run(settings, progress),))


def run(settings: PushedImages, progress: Progress = silent) -> Result:
    """Score every method on the same networks."""
    start = time.perf_counter()
    scores_of: dict[str, list[dict[str, float]]] = {}
    notes: list[str] = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        task = made(settings, seed)
        progress(f"seed {seed}, at the minimum: {time.perf_counter() - start:.0f} s")
        scores, lines = _compared(task, settings, seed, progress)
        for name, of_seed in scores.items():
            scores_of.setdefault(name, []).append(of_seed)
        notes += [f"seed {seed}, {line}" for line in lines]
    rows = tuple(Row(name, {**mean_scores(each), **spread_scores(each, ("NLL",))}) for name, each in scores_of.items())
    seconds = {"total": time.perf_counter() - start}
    return Result("pushed", plain(settings), settings.seed, rows, seconds, {}, tuple(notes))


def made(settings: PushedImages, seed: int) -> Task:
    """Return the network at its minimum, in float64, and the images that it is tested on."""
    images = Images.read(settings.data_dir, "fashion_mnist", CPU, settings.data + settings.held_out, seed)
    strange = Images.read(settings.data_dir, "mnist", CPU).test[0]
    (x, y), (x_test, y_test) = images.train, images.test
    x, cut, count = x.double(), settings.data, settings.test
    cost = lambda f: F.cross_entropy(f, y[:cut], reduction="sum")
    return Task(
        minimised(_network(settings, seed), x[:cut], cost, settings.precision, rows=16),
        (x[:cut], y[:cut]), (x[cut:], y[cut:]), (x_test[:count].double(), y_test[:count]), strange[:count].double(),
        batch_size=500,
    )  # fmt: skip


def _network(settings: PushedImages, seed: int) -> nn.Module:
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


def _compared(
    task: Task, settings: PushedImages, seed: int, progress: Progress
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return the scores of every method, as it is and with variances scaled on held-out images, and notes."""
    taken, temperature = best_seconds(lambda: best_temperature(task), 1)
    notes = [f"temperature: {temperature:.3f}"]
    beliefs = {"plain": scaled(task.model, 1.0), "temperature": scaled(task.model, temperature)}
    seconds, posteriors = {"plain": 0.0, "temperature": taken}, {}
    for name, method in _methods(settings).items():
        taken, posterior = best_seconds(lambda m=method: fitted(task, m, settings, seed), 1)  # type: ignore[misc]
        more, scale = best_seconds(lambda p=posterior: _scale(p.posterior, task), 1)  # type: ignore[misc]
        posteriors[name], beliefs[name], seconds[name] = posterior, posterior.functions, taken
        beliefs[f"{name}, calibrated"], seconds[f"{name}, calibrated"] = _times(posterior, scale), taken + more
        notes.append(f"{name}: scale {scale:.3g}")
        progress(f"seed {seed}, {name}: {taken + more:.0f} s")
    exact = _total(posteriors["full Hessian"].functions, task.test[0])
    scores = {name: {**_scores(each, task, settings, exact), "fit s": seconds[name]} for name, each in beliefs.items()}
    lines, responder = _single(task, settings, seed, posteriors)
    progress(f"seed {seed}, {lines[0]}")
    pushed = {name: fit.posterior for name, fit in posteriors.items() if isinstance(fit.posterior, PushedWeights)}
    return scores, [*notes, *lines, *(_converged(name, each, responder, task, seed) for name, each in pushed.items())]


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
    return fitted_scale(posterior, Data(task.validation, CPU))


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
) -> tuple[list[str], Responder]:
    """Compare the forms of HFL that push for every prediction with the exact ones; return notes and the responder."""
    x, notes, fits = task.test[0][: settings.single], [], {}
    for name, method, same in (("each point", lw.HFL(), "full Hessian"), ("linearised", lw.HFL("linearised"), "GGN")):
        taken, fits[name] = best_seconds(lambda m=method: fitted(task, m, settings, seed), 1)  # type: ignore[misc]
        more, variance = best_seconds(lambda p=fits[name]: p.functions(x).variance, 1)  # type: ignore[misc]
        worst = float((variance / posteriors[same].functions(x).variance - 1).abs().max())
        notes.append(
            f"HFL, {name}: the variances of {same} to {worst:.1e} on {len(x)} images, fit {taken:.0f} s, prediction "
            f"{more:.0f} s"
        )
    posterior = fits["each point"].posterior
    assert isinstance(posterior, ResponsePosterior)
    assert isinstance(posterior.responder, Responder)
    return notes, posterior.responder


def _converged(name: str, posterior: PushedWeights, responder: Responder, task: Task, seed: int) -> str:
    """Say how far the pushed weights are from their limit, and how noisy random pushes are."""
    distance = distance_from_limit(posterior, responder, task, seed)
    line = f"{name}: the weights end within {distance:.1e} of H⁻¹ times the push"
    if posterior.variant != "random":
        return line
    x = task.test[0]
    share = posterior.standard_error(x) / posterior(x).variance
    return f"{line}; standard error {float(share.median()):.2f} of a variance"


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
        force = averaged(objective, inputs, posterior.variant == "absolute")(torch.zeros_like(objective.centre)[None])
    limit = responder.hessian.solve(force)
    gap = posterior.moved / posterior.strength[:, None] - limit
    squares = (gap * objective.hessian_product(gap)).sum(1) / (force * limit).sum(1)
    return float(squares.max().sqrt())
