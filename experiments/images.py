"""One network for images and every way to give it error bars: likelihood, calibration, strange images."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from experiments import resnets
from experiments.data import Images, digits_like
from experiments.result import Result, Row, mean_scores, plain, spread_scores
from experiments.training import Recipe, batches, mlp, optimise
from lapwing.core.gaussian import FunctionGaussian
from lapwing.errors import DataError
from lapwing.metrics import classification, ood
from lapwing.predictives.softmax import SoftmaxPredictive

NETWORKS = ("mlp", "lenet", *(f"resnet{depth}" for depth in resnets.DEPTHS))
PRECISIONS = tuple(10.0 ** (k / 2) for k in range(-2, 13))
WEAKER = tuple(10.0 ** (k / 2) for k in range(-8, 3))  # for a few directions
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ImageTable:
    """A network, trained or given, and the images it is judged by.

    "mlp" (784-200-200-10 with tanh) and "lenet": Fashion-MNIST; digits are the strange images. "resnetN": CIFAR-10 with
    given weights; clothes are. A part of the training images is held out for what needs validation; the residual
    networks have seen them all, so there the part is held out as random crops.
    """

    data_dir: Path
    network: str = "mlp"
    recipe: Recipe = Recipe((200, 200), "tanh", 20, 10**9, 128, 1e-3, 1e-4)
    methods: tuple[str, ...] = ()
    inducing: int = 100
    landmarks: int = 2000
    rank: int = 20
    steps: int = 500
    validation: int = 5000
    data: int | None = None  # training images; None takes all
    test: int | None = None  # test images of each kind
    draws: int = 2000  # of the logits; few cost likelihood, since the log of a mean over draws is too small on average
    seeds: int = 3
    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Task:
    """A trained network and the images it is judged by."""

    model: nn.Module
    train: Pair
    held: Pair
    test: Pair
    strange: Tensor
    size: int  # of a batch

    @property
    def data(self) -> list[Pair]:
        return batches(*self.train, self.size)

    @property
    def validation(self) -> list[Pair]:
        return batches(*self.held, self.size)


Beliefs = Callable[[Tensor], FunctionGaussian]


def run(settings: ImageTable, report: Callable[[str], None] = lambda line: None) -> Result:
    """Every method on the same networks."""
    begun = time.perf_counter()
    found: dict[str, list[dict[str, float]]] = {}
    notes = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        task = _task(settings, seed)
        for name in settings.methods or USUAL:
            start = time.perf_counter()
            beliefs, note = METHODS[name](task, settings, seed)
            seconds = time.perf_counter() - start
            scores = {**scored(beliefs, task, settings.draws), "fit s": seconds}
            found.setdefault(name, []).append(scores)
            notes += [f"seed {seed}, {name}: {note}"] if note else []
            report(f"seed {seed}, {name}: { {k: float(f'{v:.4g}') for k, v in scores.items()} } {note}")
    rows = tuple(Row(name, {**mean_scores(mine), **spread_scores(mine, ("NLL", "MC NLL"))})
                 for name, mine in found.items())  # fmt: skip
    seconds_all = {"total": time.perf_counter() - begun}
    return Result("images", plain(settings), settings.seed, rows, seconds_all, {}, tuple(notes))


def _task(settings: ImageTable, seed: int) -> Task:
    device = torch.device(settings.device)
    order = torch.Generator().manual_seed(seed)
    if settings.network in ("mlp", "lenet"):
        images = Images.read(settings.data_dir, "fashion_mnist", device, settings.data, seed)
        strange = Images.read(settings.data_dir, "mnist", device).test[0]
        x, y = images.train
        model = _lenet(seed) if settings.network == "lenet" else _plain_network(settings, seed)
        model = model.to(device)
        split = _split(len(x), settings.validation, order, device)
        train, held = (x[split[0]], y[split[0]]), (x[split[1]], y[split[1]])
        optimise(model, *train, settings.recipe, seed)
        test, size = images.test, 1000
    elif settings.network in NETWORKS:
        model = resnets.pretrained(settings.data_dir, int(settings.network.removeprefix("resnet"))).to(device)
        x, y = resnets.cifar10(settings.data_dir, "train", device)
        split = _split(len(x), settings.validation, order, device)
        train = (x[split[0]], y[split[0]])
        held = (resnets.cropped(x[split[1]], seed), y[split[1]])
        if settings.data is not None:
            train = train[0][: settings.data], train[1][: settings.data]
        test = resnets.cifar10(settings.data_dir, "test", device)
        strange, size = digits_like(settings.data_dir, "fashion_mnist", device), 250
    else:
        raise DataError(f"network is {settings.network!r}; expected one of {', '.join(NETWORKS)}.")
    count = settings.test
    return Task(model, train, held, (test[0][:count], test[1][:count]), strange[:count], size)


def _plain_network(settings: ImageTable, seed: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *mlp(784, 10, settings.recipe, seed))


def _lenet(seed: int) -> nn.Module:
    """Two convolutions with pooling, three linear layers; 44,426 weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip


def _split(count: int, held: int, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    order = torch.randperm(count, generator=generator).to(device)
    held = min(held, count // 5)
    return order[held:], order[:held]


def scored(beliefs: Beliefs, task: Task, draws: int) -> dict[str, float]:
    x, y = task.test
    start = time.perf_counter()
    inside = [beliefs(part) for part in x.split(task.size)]
    taken = time.perf_counter() - start
    outside = [beliefs(part) for part in task.strange.split(task.size)]
    found = {}
    for link, prefix in (("probit", ""), ("mc", "MC ")):
        probs, strange = (
            torch.cat([SoftmaxPredictive(part, link, draws).probs for part in parts]) for parts in (inside, outside)
        )
        found[prefix + "NLL"] = classification.nll(probs, y)
        found[prefix + "ECE"] = classification.ece(probs, y)
        found[prefix + "Brier"] = classification.brier(probs, y)
        found[prefix + "OOD AUROC"] = ood.auroc(_entropy(probs), _entropy(strange))
        if not prefix:
            found["accuracy"] = classification.accuracy(probs, y)
    return {**found, "test s": taken}


def _entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(-1)


def _plain(task: Task, settings: ImageTable, seed: int) -> tuple[Beliefs, str]:
    return scaled(task.model, 1.0), ""


def scaled(model: nn.Module, temperature: float) -> Beliefs:
    def beliefs(x: Tensor) -> FunctionGaussian:
        with torch.no_grad():
            f = model(x) / temperature
        return FunctionGaussian(f, f.new_zeros(*f.shape, f.shape[-1]))

    return beliefs


def _temperature(task: Task, settings: ImageTable, seed: int) -> tuple[Beliefs, str]:
    found = best_temperature(task)
    return scaled(task.model, found), f"temperature {found:.3f}"


def best_temperature(task: Task) -> float:
    """One number on the logits, by the likelihood of the held-out images."""
    with torch.no_grad():
        f = torch.cat([task.model(x) for x, _ in task.validation])
    y = task.held[1]
    cost = lambda t: float(F.cross_entropy(f / math.exp(t), y))
    low, high, ratio = -3.0, 3.0, (math.sqrt(5) - 1) / 2
    for _ in range(40):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if cost(a) < cost(b) else (a, high)
    return math.exp(0.5 * (low + high))


def _laplace(
    method: Callable[[ImageTable, Task], Any], weights: str = "all", validated: bool = False,
    precisions: tuple[float, ...] = PRECISIONS,
) -> Any:  # fmt: skip
    def fitted(task: Task, settings: ImageTable, seed: int) -> tuple[Beliefs, str]:
        tuner = lw.tuners.Grid(task.validation, precisions) if validated else None
        chosen = method(settings, task)
        prior = settings.recipe.weight_decay * len(task.train[0]) if isinstance(chosen, lw.HFL) else None
        posterior = lw.fit(
            task.model, task.data, "classification", method=chosen, weights=weights, tuner=tuner, prior=prior,
            progress=False, generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        return posterior.functions, f"precision {float(posterior.prior.values.reshape(-1)[0]):.3g}"

    return fitted


def _pushed(settings: ImageTable, task: Task, variant: str) -> Any:
    """Fine-tuned for as long as it may take, finished or not: the scale is fitted on held-out images anyway.

    The prior is that of the training, its weight decay times the number of data; under another one the network would
    first have to go where that has its minimum.
    """
    return lw.HFL(
        "pretrained", variant=variant, pushes=8, solver="adam", steps=settings.steps, tolerance=math.inf,
        learning_rate=1e-4, batch_size=250, dtype=torch.float32,
        calibration=task.validation,
    )  # fmt: skip


METHODS: dict[str, Callable[[Task, ImageTable, int], tuple[Beliefs, str]]] = {
    "plain": _plain,
    "temperature": _temperature,
    "last layer, evidence": _laplace(lambda s, t: lw.Full(), "last_layer"),
    "last layer, validation": _laplace(lambda s, t: lw.Full(), "last_layer", True),
    "Kron, evidence": _laplace(lambda s, t: lw.Kron()),
    "Kron, validation": _laplace(lambda s, t: lw.Kron(), "all", True),
    "ELLA, evidence": _laplace(lambda s, t: lw.ELLA(s.landmarks, s.rank)),
    "ELLA, validation": _laplace(lambda s, t: lw.ELLA(s.landmarks, s.rank), "all", True, WEAKER),
    "ELLA with residual, validation": _laplace(lambda s, t: lw.ELLA(s.landmarks, s.rank, residual=True), "all", True),
    "VaLLA, evidence": _laplace(lambda s, t: lw.VaLLA(s.inducing, optimiser="adam", steps=s.steps)),
    "VaLLA, alpha 1": _laplace(
        lambda s, t: lw.VaLLA(s.inducing, alpha=1.0, steps=s.steps, validation=t.validation)
    ),
    "HFL, absolute push": _laplace(lambda s, t: _pushed(s, t, "absolute")),
    "HFL, random pushes": _laplace(lambda s, t: _pushed(s, t, "random")),
    "FMGP": _laplace(lambda s, t: lw.FMGP(s.inducing, steps=4 * s.steps, validation=t.validation)),
}  # fmt: skip
USUAL = tuple(name for name in METHODS if not name.startswith("HFL"))  # fine-tuning takes minutes, and is asked for
