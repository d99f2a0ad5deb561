"""Cost against quality: every method on the same networks, with the time and memory that it takes and its scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

import lapwing as lw
from benchmarks.peak import peak
from experiments.calibration_tasks import NETWORKS, RECIPES, SETS, Pair, Split, Task
from experiments.costs_picture import draw
from experiments.data import Images
from experiments.engine.contract import Record
from experiments.engine.store import Stored
from experiments.options import Progress, chosen
from experiments.uci import read_split
from lapwing.demo.training import TrainingSettings, batches, optimise, train_mlp
from lapwing.errors import LapwingError

TABLE = TrainingSettings(hidden=(50, 50), epochs=100, max_steps=4000)
DROPOUT = 0.05  # of the network for MC dropout, which is trained with it
MEMBERS = 4  # networks that an ensemble has beside the first
SUBNETWORK = 1000  # weights with the largest gradients, at most; and at most a tenth of all
VALIDATION = 200
TEST = 1000  # rows that are scored at most
BATCH = 250
IMAGES = 2000  # training images of the convolutional network
ONCE = ("KernelSpace", "VaLLA", "FMGP", "HFL")  # methods that take tens of seconds: in the first repetition alone


@dataclass(frozen=True, eq=False)
class Trained:
    """Data with a network, and a function that trains another one with a seed, with dropout if asked for.

    ``valla`` has fewer points and steps where those of the default take minutes.
    """

    split: Split
    model: nn.Module
    another: Callable[[int, bool], nn.Module]
    valla: lw.VaLLA = lw.VaLLA()

    @property
    def likelihood(self) -> str:
        return "regression" if self.split.classes == 1 else "classification"

    @property
    def data(self) -> list[Pair]:
        return batches(*self.split.train, BATCH)


def _table(name: str, folder: Path | None, seed: int) -> Trained:
    """Return a regression table in standardised units, with a network of two hidden layers of 50 units."""
    assert folder is not None
    table = read_split(folder / f"uci_{name}.npz", seed)
    x, y = table.training
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held_out, rest = order.tensor_split([min(VALIDATION, len(x) // 5)])
    test = table.scale_x(table.x_test), table.scale_y(table.y_test).unsqueeze(1)
    split = Split((x[rest], y[rest]), (x[held_out], y[held_out]), test)

    def another(seed: int, dropout: bool) -> nn.Module:
        recipe = TrainingSettings(**{**vars(TABLE), "dropout": DROPOUT if dropout else 0.0})
        return train_mlp(*split.train, 1, recipe, seed)

    return Trained(split, another(seed, False), another)


def _classes(task: Task, folder: Path | None, seed: int) -> Trained:
    """Return a classification task of the experiment ``calibration``."""
    split = SETS[task.data](folder, seed, VALIDATION)

    def another(seed: int, dropout: bool) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = list(NETWORKS[task.network](split).children())
        model = nn.Sequential(*layers[:-1], *([nn.Dropout(DROPOUT)] if dropout else []), layers[-1])
        optimise(model, *split.train, RECIPES[task.training], seed)
        return model

    return Trained(split, another(seed, False), another)


def _clothes(folder: Path | None, seed: int) -> Trained:
    """Return images of Fashion-MNIST with a convolutional network of 2,026 weights."""
    assert folder is not None
    images = Images.read(folder, "fashion_mnist", torch.device("cpu"), IMAGES + VALIDATION, seed)
    x, y = images.train
    split = Split((x[:IMAGES], y[:IMAGES]), (x[IMAGES:], y[IMAGES:]), images.test)

    def another(seed: int, dropout: bool) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = nn.Sequential(
                nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(),
                nn.MaxPool2d(2), nn.Flatten(), *([nn.Dropout(DROPOUT)] if dropout else []), nn.Linear(64, 10),
            )  # fmt: skip
        optimise(model, *split.train, RECIPES["unregularised"], seed)
        return model

    return Trained(split, another(seed, False), another, lw.VaLLA(50, optimiser="adam", steps=100))


TASKS: dict[str, Callable[[Path | None, int], Trained]] = {
    "energy": partial(_table, "energy"),
    "noisy digits": partial(_classes, Task("", "noisy digits", "small MLP", "unregularised", 1)),
    "Fashion-MNIST": _clothes,
    "wine, small": partial(_classes, Task("", "wine", "small MLP", "regularised", 1)),
}


def fits(task: Trained, seed: int) -> dict[str, Callable[..., lw.Fitted]]:
    """Return a function for each method that fits it; it takes the arguments of ``lw.fit`` that methods share.

    Training that a method needs beside the network is part of its fit: that of the other members of an ensemble. The
    network for MC dropout takes the place of the first, so that its training is not.
    """
    fit = partial(lw.fit, likelihood=task.likelihood, progress=False)
    plain = lambda method, **given: partial(fit, task.model, task.data, method=method, **given)

    def others() -> list[nn.Module]:
        return [task.another(seed + 1000 * (i + 1), False) for i in range(MEMBERS)]

    def ensemble(**given: Any) -> lw.Fitted:
        return fit(task.model, task.data, method=lw.baselines.Ensemble(others()), **given)

    def mixture(**given: Any) -> lw.Fitted:
        return fit(task.model, task.data, method=lw.baselines.MixtureOfLaplace(others()), **given)

    def subnetwork(**given: Any) -> lw.Fitted:
        count = max(1, min(SUBNETWORK, sum(p.numel() for p in task.model.parameters()) // 10))
        weights = lw.subnetworks.by_gradient(task.model, task.data, task.likelihood, count, progress=False)
        return fit(task.model, task.data, method=lw.Full(), weights=weights, **given)

    dropping = task.another(seed, True)
    return {
        "plain": plain(lw.baselines.MapOnly()),
        "Full": plain(lw.Full()),
        "KernelSpace": plain(lw.KernelSpace()),
        "Kron": plain(lw.Kron()),
        "EKron": plain(lw.EKron()),
        "Diagonal": plain(lw.Diagonal()),
        "LowRank": plain(lw.LowRank()),
        "Subnetwork": subnetwork,
        "Kron, last layer": plain(lw.Kron(), weights=lw.last_layer),
        "Full, last layer": plain(lw.Full(), weights=lw.last_layer),
        "Sampled": plain(lw.Sampled(64)),
        "ELLA": plain(lw.ELLA()),
        "VaLLA": plain(task.valla),
        "FMGP": plain(lw.FMGP()),
        "HFL": plain(lw.HFL(mode="linearised")),
        "SWAG": plain(lw.baselines.SWAG(weight_decay=TABLE.weight_decay)),
        "MC dropout": partial(fit, dropping, task.data, method=lw.baselines.MCDropout()),
        "Ensemble": ensemble,
        "Mixture of Laplace": mixture,
        "Variational last layer": plain(lw.baselines.VariationalLastLayer()),
        "IVON": plain(lw.baselines.IVON()),
    }


METHODS = (
    "plain", "Full", "KernelSpace", "Kron", "EKron", "Diagonal", "LowRank", "Kron, last layer", "Full, last layer",
    "Sampled", "ELLA", "VaLLA", "FMGP", "HFL", "SWAG", "MC dropout", "Ensemble",
    "Mixture of Laplace", "Variational last layer", "IVON", "Subnetwork",
)  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """Settings: tasks and methods. A method that refuses a task, or is not practical for it, has no row there.

    Scores are those of ``lw.fit`` as it comes and, under names with "validated" with validation data. Times are
    processor seconds of one thread, so that other work does not matter; "predict / forward" are in units of a forward
    pass over the test rows. The peak is measured in the first repetition, and the slow methods (``ONCE``) run in that
    one alone.
    """

    name: ClassVar[str] = "costs"
    title: ClassVar[str] = "cost against quality: every method, its time, memory and scores, on three tasks"
    columns: ClassVar[tuple[str, ...]] = ("NLL", "validated NLL", "fit s", "predict / forward", "peak MB")

    data_dir: Path | None = None
    tasks: tuple[str, ...] = ("energy", "noisy digits", "Fashion-MNIST")
    methods: tuple[str, ...] = METHODS
    seeds: int = 3
    test: int = TEST
    seed: int = 0

    @classmethod
    def quick(cls) -> Self:
        return cls(tasks=("wine, small",), methods=("plain", "Full", "Kron", "Kron, last layer", "Ensemble"), seeds=2)

    @classmethod
    def full(cls) -> Self:
        return cls()

    @staticmethod
    def picture(result: Stored, path: Path) -> None:
        """Draw the NLL against time and memory."""
        draw(result.records, path)

    def units(self) -> tuple[str, ...]:
        chosen(self.tasks, tuple(TASKS), "tasks")
        chosen(self.methods, METHODS, "methods")
        return tuple(f"{task}/{repeat}" for repeat in range(self.seeds) for task in self.tasks)

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        task, _, repeat = unit.rpartition("/")
        seed = self.seed + int(repeat)
        with one_thread():
            prepared = TASKS[task](self.data_dir, seed)
            for method, fit in fits(prepared, seed).items():
                if method not in self.methods or (task, method) in IMPRACTICAL or (int(repeat) and method in ONCE):
                    continue
                try:
                    yield measured(prepared, fit, method, unit, self.test, first=int(repeat) == 0)
                except LapwingError as error:
                    progress(f"{unit}, {method}: refused, {error}")


IMPRACTICAL = {
    ("Fashion-MNIST", "HFL"),  # a linear system for each output of each test image
    ("Fashion-MNIST", "KernelSpace"),  # a kernel of 20,000 rows, in place of 2,026 weights of Full
}


def measured(task: Trained, fit: Callable[..., lw.Fitted], method: str, unit: str, test: int, first: bool) -> Record:
    """Return the record of one method."""
    group, _, repeat = unit.rpartition("/")
    x, y = (part[:test] for part in task.split.test)
    forward, _ = _seconds(lambda: _forward(task.model, x))
    seconds, posterior = _seconds(fit)
    taken, scores = _seconds(lambda: scored(posterior, x, y))
    validated = scored(fit(validation=batches(*task.split.validation, BATCH)), x, y)
    scores |= {f"validated {name}": value for name, value in validated.items()}
    scores |= {"fit s": seconds, "predict / forward": taken / forward}
    most = peak(lambda: scored(fit(), x, y)) if first else None
    scores |= {} if most is None else {"peak MB": most / 2**20}
    return Record(group, method, int(repeat), scores, seconds, most)


def scored(posterior: lw.Fitted, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return the scores on test rows."""
    predictives = [posterior.predict(part) for part in x.split(BATCH)]
    pairs = zip(predictives, y.split(BATCH), strict=True)
    with torch.no_grad():
        log_probs = torch.cat([predictive.log_prob(part).double().reshape(len(part), -1) for predictive, part in pairs])
    scores = {"NLL": -float(log_probs.sum(1).mean())}
    if not y.is_floating_point():
        probs = torch.cat([predictive.probs.double() for predictive in predictives])
        return {**scores, "ECE": lw.metrics.ece(probs, y), "accuracy": lw.metrics.accuracy(probs, y)}
    low, high = (torch.cat(ends) for ends in zip(*(each.interval(0.95) for each in predictives), strict=True))
    return {**scores, "coverage 95 %": lw.metrics.coverage(low, high, y)}


def _forward(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        for part in x.split(BATCH):
            model(part)


def _seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor seconds of this thread that the call takes, and its result."""
    start = time.thread_time()
    result = call()
    return time.thread_time() - start, result


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
