"""Fashion-MNIST: a prior by cross-validation against training with the Kronecker evidence."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import lapwing as lw
from experiments.data import Images, Shuffled
from experiments.result import Result, Row, mean_scores, plain, spread_scores
from experiments.training import Recipe, mlp, optimise
from lapwing.metrics import classification


@dataclass(frozen=True)
class Fashion:
    """A ReLU network of four hidden layers, as in Immer et al. 2021.

    *Cross-validation*: one network for each prior precision, trained on nine tenths of the images; the precision with
    the best likelihood on the rest is used to train on all. *Evidence*: one run, with a precision for each layer.
    """

    data_dir: Path
    hidden: tuple[int, ...] = (1024, 512, 256, 128)
    epochs: int = 60
    batch_size: int = 1024
    learning_rate: float = 1e-3
    precisions: tuple[float, ...] = (1.0, 10.0, 30.0, 1e2, 3e2, 1e3)
    burn_in: int = 0
    frequency: int = 3
    hyper_steps: int = 100
    data: int | None = None  # training images; None takes all
    seeds: int = 3
    device: str = "cpu"
    seed: int = 0


def run(settings: Fashion, report: Callable[[str], None] = lambda line: None) -> Result:
    """Both ways for every seed, and the means."""
    begun = time.perf_counter()
    found: dict[str, list[dict[str, float]]] = {}
    notes = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        images = Images.read(settings.data_dir, "fashion_mnist", torch.device(settings.device), settings.data, seed)
        for name, scores, note in (_cross_validated(images, settings, seed), *_evidence(images, settings, seed)):
            found.setdefault(name, []).append(scores)
            if note:
                notes.append(f"seed {seed}, {name}: {note}")
            report(f"seed {seed}, {name}: {scores} {note}")
    rows = tuple(Row(name, {**mean_scores(mine), **spread_scores(mine)}) for name, mine in found.items())
    arrays = {f"{name}/{key}": [s[key] for s in mine] for name, mine in found.items() for key in mine[0]}
    seconds = {"total": time.perf_counter() - begun}
    return Result("fashion", plain(settings), settings.seed, rows, seconds, arrays, tuple(notes))


def _cross_validated(images: Images, settings: Fashion, seed: int) -> tuple[str, dict[str, float], str]:
    begun = time.perf_counter()
    x, y = images.train
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
    kept, held = order[len(x) // 10 :], order[: len(x) // 10]
    scores = {
        precision: classification.nll(_softmax(_trained(x[kept], y[kept], precision, settings, seed), x[held]), y[held])
        for precision in settings.precisions
    }
    best = min(scores, key=lambda precision: scores[precision])
    model = _trained(x, y, best, settings, seed)
    found = _scores(_softmax(model, images.test[0]), images.test[1])
    return "cross-validation", {**found, "seconds": time.perf_counter() - begun}, f"precision {best:g}"


def _trained(x: Tensor, y: Tensor, precision: float, settings: Fashion, seed: int) -> nn.Module:
    """The penalty ½ precision |w|² / N is Adam's L2 decay of precision / N."""
    recipe = _recipe(settings)
    model = _network(settings, seed).to(x.device)
    optimise(model, x, y, replace(recipe, weight_decay=precision / len(x)), seed)
    return model


def _recipe(settings: Fashion) -> Recipe:
    return Recipe(
        settings.hidden, "relu", settings.epochs, 10**9, settings.batch_size, settings.learning_rate, weight_decay=0.0
    )


def _network(settings: Fashion, seed: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *mlp(784, 10, _recipe(settings), seed))


def _evidence(images: Images, settings: Fashion, seed: int) -> list[tuple[str, dict[str, float], str]]:
    begun = time.perf_counter()
    x, y = images.train
    recipe = lw.recipes.online(
        settings.epochs,
        rate=settings.learning_rate,
        burn_in=settings.burn_in,
        frequency=settings.frequency,
        update=lw.tuners.Ascend(settings.hyper_steps),
        seed=seed,
    )
    data = Shuffled(x, y, settings.batch_size)
    trained = lw.train(_network(settings, seed).to(x.device), data, "classification", recipe, progress=False)
    taken = time.perf_counter() - begun
    plainly = _scores(_softmax(trained.model, images.test[0]), images.test[1])
    probs = torch.cat([trained.posterior.predict(part).probs for part in images.test[0].split(1000)])
    shown = ", ".join(f"{value:.3g}" for value in trained.posterior.prior.values.tolist())
    return [
        ("evidence", {**plainly, "seconds": taken}, f"precisions {shown}"),
        ("evidence, posterior", {**_scores(probs, images.test[1]), "seconds": taken}, ""),
    ]


def _softmax(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(part).softmax(-1) for part in x.split(5000)])


def _scores(probs: Tensor, y: Tensor) -> dict[str, float]:
    return {
        "accuracy": classification.accuracy(probs, y),
        "log-likelihood": -classification.nll(probs, y),
        "ECE": classification.ece(probs, y),
    }
