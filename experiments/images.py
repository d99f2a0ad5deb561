"""One network for images and every method that gives it error bars: likelihood, calibration, OOD detection."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

import lapwing as lw
from experiments import resnets
from experiments.corrected import IMAGES, corrected_evidence
from experiments.data import Images, data_folder, digits_like
from experiments.engine.contract import Record
from experiments.engine.seeds import parted, records_of, seed_units
from experiments.image_task import Beliefs, Pair, Task, best_temperature, scaled, scored
from experiments.options import Progress, add_large_data, chosen, positive, silent
from experiments.pinned import EVIDENCE, PROBIT, as_fitted
from experiments.repeats import mean_scores, spread_scores
from lapwing.demo.result import ExperimentReport, Result, Row, plain
from lapwing.demo.training import TrainingSettings, mlp, optimise
from lapwing.errors import DataError

PRECISIONS = tuple(10.0 ** (k / 2) for k in range(-2, 13))
WEAKER = tuple(10.0 ** (k / 2) for k in range(-8, 3))  # for a few directions


@dataclass(frozen=True)
class ImageTable:
    """Settings: a network, trained here or pretrained, and the images that it is tested on.

    "mlp" (784-200-200-10 with tanh) and "lenet" are trained on Fashion-MNIST, with digits as out-of-distribution
    images. "resnetN" is for CIFAR-10 and has pretrained weights, with clothes as out-of-distribution images. A part of
    the training images is held out for methods that need validation. The residual networks were trained on all images,
    so there the part is held out as random crops.
    """

    name: ClassVar[str] = "images"
    title: ClassVar[str] = "one network for images, every method: likelihood, calibration, OOD"
    choosing: ClassVar[tuple[str, ...]] = ("seeds",)

    data_dir: Path = Path()
    network: str = "mlp"
    recipe: TrainingSettings = TrainingSettings((200, 200), "tanh", 20, 10**9, 128, 1e-3, 1e-4)
    methods: tuple[str, ...] = ()
    inducing: int = 100
    landmarks: int = 2000
    rank: int = 20
    steps: int = 500
    validation: int = 5000
    data: int | None = None  # training images; None takes all
    test: int | None = None  # test images of each kind
    corrected: int = IMAGES  # training images for the corrected evidence
    draws: int = 2000  # samples of the logits; with few, the log of their mean is biased downwards
    seeds: int = 3
    device: str = "cpu"
    seed: int = 0

    @classmethod
    def quick(cls) -> ImageTable:
        """Return the settings of the quick form."""
        recipe = replace(cls.recipe, epochs=3)
        return cls(
            Path(), recipe=recipe, inducing=20, landmarks=200, steps=50, validation=400, data=2000, test=500,
            corrected=50, draws=200, seeds=1,
        )  # fmt: skip

    @classmethod
    def full(cls) -> ImageTable:
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
    add_large_data(parser)
    parser.add_argument(
        "--network", default="mlp", help="mlp, lenet (Fashion-MNIST), resnet20, 32, 44 or 56 (CIFAR-10)"
    )
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="methods to compare; all but HFL by default")
    parser.add_argument("--steps", type=positive, default=500, help="learning steps of VaLLA (500)")
    parser.add_argument("--test", type=positive, help="number of test images")


def command(arguments: argparse.Namespace, progress: Progress) -> ExperimentReport:
    """Run the experiment with the options given."""
    settings = ImageTable(
        data_dir=data_folder(arguments.data_dir),
        network=arguments.network,
        steps=arguments.steps,
        methods=chosen(arguments.methods or USUAL, tuple(METHODS), "--methods"),
        data=arguments.data,
        test=arguments.test,
        seeds=arguments.seeds,
        device=arguments.device,
        seed=arguments.seed,
    )
    return ExperimentReport(arguments.out / f"images_{arguments.network}.json", (run(settings, progress),))


def run(settings: ImageTable, progress: Progress = silent) -> Result:
    """Score every method on the same networks."""
    start = time.perf_counter()
    scores_of: dict[str, list[dict[str, float]]] = {}
    notes = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        task = _task(settings, seed)
        for name in settings.methods or USUAL:
            fit_start = time.perf_counter()
            beliefs, note = METHODS[name](task, settings, seed)
            taken = time.perf_counter() - fit_start
            scores = {**scored(beliefs, task, settings.draws), "fit s": taken}
            scores_of.setdefault(name, []).append(scores)
            notes += [f"seed {seed}, {name}: {note}"] if note else []
            progress(f"seed {seed}, {name}: { {k: float(f'{v:.4g}') for k, v in scores.items()} } {note}")
    rows = tuple(Row(name, {**mean_scores(scores), **spread_scores(scores, ("NLL", "MC NLL"))})
                 for name, scores in scores_of.items())  # fmt: skip
    seconds = {"total": time.perf_counter() - start}
    return Result("images", plain(settings), settings.seed, rows, seconds, {}, tuple(notes))


def _task(settings: ImageTable, seed: int) -> Task:
    if settings.network not in NETWORKS:
        raise DataError(f"network is {settings.network!r}; expected one of {', '.join(NETWORKS)}.")
    return NETWORKS[settings.network](settings, seed)


def _clothes(network: Callable[[ImageTable, int], nn.Module]) -> Callable[[ImageTable, int], Task]:
    """Return a function that trains the network on Fashion-MNIST."""

    def task(settings: ImageTable, seed: int) -> Task:
        device = torch.device(settings.device)
        images = Images.read(settings.data_dir, "fashion_mnist", device, settings.data, seed)
        strange = Images.read(settings.data_dir, "mnist", device).test[0]
        model = network(settings, seed).to(device)
        train, held_out = _split(images.train, settings.validation, seed)
        optimise(model, *train, settings.recipe, seed)
        test = tuple(part[: settings.test] for part in images.test)
        return Task(model, train, held_out, (test[0], test[1]), strange[: settings.test], 1000)

    return task


def _photographs(depth: int) -> Callable[[ImageTable, int], Task]:
    """Return a function that reads a residual network and CIFAR-10."""

    def task(settings: ImageTable, seed: int) -> Task:
        device = torch.device(settings.device)
        model = resnets.pretrained(settings.data_dir, depth).to(device)
        (x, y), held_out = _split(resnets.cifar10(settings.data_dir, "train", device), settings.validation, seed)
        crops = resnets.cropped(held_out[0], seed), held_out[1]
        test = tuple(part[: settings.test] for part in resnets.cifar10(settings.data_dir, "test", device))
        strange = digits_like(settings.data_dir, "fashion_mnist", device)
        train = x[: settings.data], y[: settings.data]
        return Task(model, train, crops, (test[0], test[1]), strange[: settings.test], 250)

    return task


def _split(data: Pair, count: int, seed: int) -> tuple[Pair, Pair]:
    """Return the training images and, in random order, up to a fifth of them as held-out images."""
    x, y = data
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
    held_out, rest = order.tensor_split([min(count, len(x) // 5)])
    return (x[rest], y[rest]), (x[held_out], y[held_out])


def _mlp(settings: ImageTable, seed: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *mlp(784, 10, settings.recipe, seed))


def _lenet(settings: ImageTable, seed: int) -> nn.Module:
    """Return a network of two convolutions with pooling and three linear layers; 44,426 weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip


NETWORKS: dict[str, Callable[[ImageTable, int], Task]] = {
    "mlp": _clothes(_mlp),
    "lenet": _clothes(_lenet),
    **{f"resnet{depth}": _photographs(depth) for depth in resnets.DEPTHS},
}


def _plain(task: Task, settings: ImageTable, seed: int) -> tuple[Beliefs, str]:
    return scaled(task.model, 1.0), ""


def _temperature(task: Task, settings: ImageTable, seed: int) -> tuple[Beliefs, str]:
    temperature = best_temperature(task)
    return scaled(task.model, temperature), f"temperature {temperature:.3f}"


def _laplace(
    method: Callable[[ImageTable], Any], weights: str = "all", validated: bool = False,
    precisions: tuple[float, ...] = PRECISIONS,
) -> Any:  # fmt: skip
    """Return a function that fits the method, with the precision chosen by the evidence or on held-out images."""

    def fit(task: Task, settings: ImageTable, seed: int) -> tuple[Beliefs, str]:
        chosen = lw.tuners.Grid(task.validation, precisions) if validated else EVIDENCE
        return _fitted(task, seed, method=method(settings), weights=weights, tuner=chosen)

    return fit


def _stopped(method: Callable[[ImageTable], Any]) -> Any:
    """Return a function that fits a method whose early stopping reads held-out images, without the mixture of fit."""

    def fit(task: Task, settings: ImageTable, seed: int) -> tuple[Beliefs, str]:
        return _fitted(task, seed, method=method(settings), validation=task.validation)

    return fit


def _fitted(task: Task, seed: int, **options: Any) -> tuple[Beliefs, str]:
    """Return the posterior's distribution of the logits, and a note about its precision."""
    posterior = lw.fit(
        task.model, task.data, PROBIT, progress=False, generator=torch.Generator().manual_seed(seed),
        **options,
    ).tuned(as_fitted)  # fmt: skip
    return posterior.functions, f"precision {float(posterior.prior.values.reshape(-1)[0]):.3g}"


def _corrected(task: Task, settings: ImageTable, seed: int) -> tuple[Beliefs, str]:
    """Return the posterior by the corrected evidence of some images, which stand for those that trained the network."""
    data = task.train[0][: settings.corrected], task.train[1][: settings.corrected]
    of = resnets.TRAINED_ON if settings.network.startswith("resnet") else len(task.train[1])
    posterior = corrected_evidence(task.model, data, of, task.batch_size, "probit")
    return posterior.functions, f"precision {posterior.prior.values.item():.3g} from {len(data[1])} images"


def _pushed(variant: str) -> Any:
    """Return a function that fits HFL by fine-tuning for a fixed number of steps, converged or not.

    The scale is fitted on held-out images in any case. The prior is that of the training: its weight decay times the
    number of data. Under another prior the network would first have to move to another minimum.
    """

    def fit(task: Task, settings: ImageTable, seed: int) -> tuple[Beliefs, str]:
        method = lw.HFL(
            "pretrained", variant=variant, pushes=8, solver="adam", steps=settings.steps, tolerance=math.inf,
            learning_rate=1e-4, batch_size=250, dtype=torch.float32, calibration=task.validation,
        )  # fmt: skip
        return _fitted(
            task, seed, method=method, weights="all", prior=settings.recipe.weight_decay * len(task.train[0])
        )

    return fit


METHODS: dict[str, Callable[[Task, ImageTable, int], tuple[Beliefs, str]]] = {
    "plain": _plain,
    "temperature": _temperature,
    "last layer, evidence": _laplace(lambda s: lw.Full(), "last_layer"),
    "last layer, validation": _laplace(lambda s: lw.Full(), "last_layer", True),
    "Kron, evidence": _laplace(lambda s: lw.Kron()),
    "Kron, corrected evidence": _corrected,
    "Kron, validation": _laplace(lambda s: lw.Kron(), "all", True),
    "ELLA, evidence": _laplace(lambda s: lw.ELLA(s.landmarks, s.rank)),
    "ELLA, validation": _laplace(lambda s: lw.ELLA(s.landmarks, s.rank), "all", True, WEAKER),
    "ELLA with residual, validation": _laplace(lambda s: lw.ELLA(s.landmarks, s.rank, residual=True), "all", True),
    "VaLLA, evidence": _laplace(lambda s: lw.VaLLA(s.inducing, optimiser="adam", steps=s.steps)),
    "VaLLA, alpha 1": _stopped(lambda s: lw.VaLLA(s.inducing, alpha=1.0, steps=s.steps)),
    "HFL, absolute push": _pushed("absolute"),
    "HFL, random pushes": _pushed("random"),
    "FMGP": _stopped(lambda s: lw.FMGP(s.inducing, steps=4 * s.steps)),
}  # fmt: skip
USUAL = tuple(name for name in METHODS if not name.startswith("HFL"))  # HFL takes minutes: only on request
