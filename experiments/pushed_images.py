"""A convolutional network at its minimum, pushed to the end: scores and error bars against the exact Hessian."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from experiments.data import Images
from experiments.images import Beliefs, Task, best_temperature, scaled, scored
from experiments.response import minimised, ranked
from experiments.result import Result, Row, mean_scores, plain, spread_scores
from experiments.training import best_seconds
from lapwing.core.data import Data
from lapwing.core.gaussian import FunctionGaussian
from lapwing.methods.hfl.calibration import fitted_scale
from lapwing.methods.hfl.nonlinear import ResponsePosterior
from lapwing.methods.hfl.pretrained import averaged, random_forces
from lapwing.methods.hfl.pushed_weights import PushedWeights
from lapwing.methods.hfl.responder import Responder
from lapwing.metrics import ood

SHOWN = ("NLL", "ECE", "MC NLL", "MC ECE", "accuracy", "OOD AUROC")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class PushedImages:
    """A tanh network with two convolutions on a few images of Fashion-MNIST; digits are the strange images.

    It has 1,020 weights, few enough for the Hessian itself: training ends at the minimum under the prior, and every
    push at its end. Scales and the temperature come from training images that are held out.
    """

    data_dir: Path
    data: int = 500
    held: int = 500
    test: int = 1000  # test images of each kind
    channels: tuple[int, int] = (6, 10)
    precision: float = 1.0
    pushes: int = 32
    draws: int = 2000  # of the logits
    each: int = 8  # test images whose outputs are pushed one by one
    seeds: int = 1
    seed: int = 0


def run(settings: PushedImages, report: Callable[[str], None] = lambda line: None) -> Result:
    """Every method on the same networks."""
    begun = time.perf_counter()
    found: dict[str, list[dict[str, float]]] = {}
    notes: list[str] = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        task = made(settings, seed)
        report(f"seed {seed}, at the minimum: {time.perf_counter() - begun:.0f} s")
        scores, lines = _judged(task, settings, seed, report)
        for name, mine in scores.items():
            found.setdefault(name, []).append(mine)
        notes += [f"seed {seed}, {line}" for line in lines]
    rows = tuple(Row(name, {**mean_scores(mine), **spread_scores(mine, ("NLL",))}) for name, mine in found.items())
    seconds = {"total": time.perf_counter() - begun}
    return Result("pushed", plain(settings), settings.seed, rows, seconds, {}, tuple(notes))


def made(settings: PushedImages, seed: int) -> Task:
    """The network at its minimum, in float64, and the images it is judged by."""
    images = Images.read(settings.data_dir, "fashion_mnist", CPU, settings.data + settings.held, seed)
    strange = Images.read(settings.data_dir, "mnist", CPU).test[0]
    (x, y), (x_test, y_test) = images.train, images.test
    x, cut, count = x.double(), settings.data, settings.test
    cost = lambda f: F.cross_entropy(f, y[:cut], reduction="sum")
    return Task(
        minimised(_network(settings, seed), x[:cut], cost, settings.precision, rows=16),
        (x[:cut], y[:cut]), (x[cut:], y[cut:]), (x_test[:count].double(), y_test[:count]), strange[:count].double(),
        size=500,
    )  # fmt: skip


def _network(settings: PushedImages, seed: int) -> nn.Module:
    """Smooth, as a Hessian wants it; halved images, since every row of a Hessian costs a pass over them all."""
    first, second = settings.channels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.AvgPool2d(2), nn.Conv2d(1, first, 3, stride=2), nn.Tanh(), nn.Conv2d(first, second, 3), nn.Tanh(),
            nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4 * second, 10),
        ).double()  # fmt: skip


def fitted(task: Task, method: Any, settings: PushedImages, seed: int) -> lw.Fitted:
    """Under the prior of the training."""
    return lw.fit(
        task.model, task.data, "classification", method=method, prior=settings.precision, progress=False,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip


def _methods(settings: PushedImages) -> dict[str, Any]:
    """The exact one first: the others are compared with it."""
    pushed = lambda variant: lw.HFL("pretrained", variant=variant, pushes=settings.pushes)
    return {
        "full Hessian": lw.Full(curvature="hessian"),
        "GGN": lw.Full(),
        "HFL, absolute push": pushed("absolute"),
        "HFL, mean push": pushed("mean"),
        f"HFL, {settings.pushes} random pushes": pushed("random"),
    }


def _judged(
    task: Task, settings: PushedImages, seed: int, report: Callable[[str], None]
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """The scores of every method as it is and with its variances scaled on held-out images, and what else was seen."""
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
        report(f"seed {seed}, {name}: {taken + more:.0f} s")
    exact = _total(posteriors["full Hessian"].functions, task.test[0])
    found = {name: {**_scores(mine, task, settings, exact), "fit s": seconds[name]} for name, mine in beliefs.items()}
    each, responder = _each(task, settings, seed, posteriors)
    report(f"seed {seed}, {each[0]}")
    pushed = {name: fit.posterior for name, fit in posteriors.items() if isinstance(fit.posterior, PushedWeights)}
    return found, [*notes, *each, *(_ended(name, mine, responder, task, seed) for name, mine in pushed.items())]


def _scores(beliefs: Beliefs, task: Task, settings: PushedImages, exact: Tensor) -> dict[str, float]:
    """Those of all image tables, and how good a score the variance alone is."""
    found = scored(beliefs, task, settings.draws)
    variance = _total(beliefs, task.test[0])
    return {
        **{name: found[name] for name in SHOWN},
        "score AUROC": ood.auroc(variance, _total(beliefs, task.strange)),
        "rank correlation": ranked(variance, exact),
        "ratio": float((variance / exact).median()),
        "test s": found["test s"],
    }


def _scale(posterior: Any, task: Task) -> float:
    """As ``HFL(calibration=...)`` finds it; here for every posterior."""
    return fitted_scale(posterior, Data(task.validation, CPU))


def _times(posterior: lw.Fitted, factor: float) -> Beliefs:
    def beliefs(x: Tensor) -> FunctionGaussian:
        found = posterior.functions(x)
        return FunctionGaussian(found.mean, factor * found.cov)

    return beliefs


def _total(beliefs: Beliefs, x: Tensor) -> Tensor:
    """The score of an image: the variances of its outputs, summed."""
    return beliefs(x).variance.sum(-1)


def _each(
    task: Task, settings: PushedImages, seed: int, posteriors: dict[str, lw.Fitted]
) -> tuple[list[str], Responder]:
    """What the forms of HFL that push at every prediction say on a few images; and what pushes."""
    x, notes, found = task.test[0][: settings.each], [], {}
    for name, method, same in (("each point", lw.HFL(), "full Hessian"), ("linearised", lw.HFL("linearised"), "GGN")):
        taken, found[name] = best_seconds(lambda m=method: fitted(task, m, settings, seed), 1)  # type: ignore[misc]
        more, variance = best_seconds(lambda p=found[name]: p.functions(x).variance, 1)  # type: ignore[misc]
        worst = float((variance / posteriors[same].functions(x).variance - 1).abs().max())
        notes.append(
            f"HFL, {name}: the variances of {same} to {worst:.1e} on {len(x)} images, fit {taken:.0f} s, prediction "
            f"{more:.0f} s"
        )
    pushing = found["each point"].posterior
    assert isinstance(pushing, ResponsePosterior)
    assert isinstance(pushing.responder, Responder)
    return notes, pushing.responder


def _ended(name: str, posterior: PushedWeights, responder: Responder, task: Task, seed: int) -> str:
    line = f"{name}: the weights end within {off(posterior, responder, task, seed):.1e} of H⁻¹ times the push"
    if posterior.variant != "random":
        return line
    x = task.test[0]
    share = posterior.standard_error(x) / posterior(x).variance
    return f"{line}; standard error {float(share.median()):.2f} of a variance"


def off(posterior: PushedWeights, responder: Responder, task: Task, seed: int) -> float:
    """How far the pushed weights are from H⁻¹ times the force, relative to that, in the metric of H; the worst push."""
    objective = responder.objective
    data = Data(task.data, CPU)
    if posterior.variant == "random":
        count = len(posterior.moved)
        root = responder.hessian.root
        force = random_forces(posterior.problem, data, count, torch.Generator().manual_seed(seed), root)
    else:
        inputs = [x for x, _ in task.data]
        force = averaged(objective, inputs, posterior.variant == "absolute")(torch.zeros_like(objective.centre)[None])
    end = responder.hessian.solve(force)
    gap = posterior.moved / posterior.strength[:, None] - end
    squares = (gap * objective.hessian_product(gap)).sum(1) / (force * end).sum(1)
    return float(squares.max().sqrt())
