"""Samples by stochastic descent on two objectives: the error that is left, by batch size, steps and time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

import lapwing as lw
from experiments.data import Images
from experiments.engine.contract import Record
from experiments.engine.store import Stored
from experiments.objectives_picture import draw
from experiments.options import Progress
from lapwing.data.batches import Data
from lapwing.demo.training import batches
from lapwing.linalg.operators import MatrixDesign
from lapwing.linalg.stochastic import Passes, Perturbed, sgd
from lapwing.networks.network import Network
from lapwing.runtime.threads import normal
from lapwing.tangent import NetworkDesign

NAMES = {"classic": "L", "reduced": "L'"}


@dataclass(frozen=True)
class Objectives:
    """Settings: a convolutional network on digits, the precisions, and how long descent goes on with which batches.

    Descent takes ``rounds`` times as many steps as there are images, for every batch size: the cost of a step grows
    with the batch, their number does not. A seed chooses the images, the network, the noise and the order of batches.
    """

    data_dir: Path = Path()
    images: str = "digits"  # of scikit-learn, 8 x 8; or "mnist", 28 x 28, from data_dir
    data: int = 256
    epochs: int = 150
    precisions: tuple[float, ...] = (300.0, 30.0, 3.0)
    batches: tuple[int, ...] = (1, 4, 16, 64)
    rounds: tuple[int, ...] = (1, 4)
    samples: int = 4
    seeds: int = 5
    device: str = "cpu"
    seed: int = 0

    name: ClassVar[str] = "objectives"
    title: ClassVar[str] = "solve error of two objectives for samples, by batch size, steps and time"
    choosing: ClassVar[tuple[str, ...]] = ("seeds",)
    columns: ClassVar[tuple[str, ...]] = ("error, %", "γ / nC, %", "factor of batches", "ratio of errors")

    @classmethod
    def quick(cls) -> Self:
        """Return the quick form: five networks on 256 digits."""
        return cls()

    @classmethod
    def full(cls) -> Self:
        """Return the full form: LeNets on 500 images of MNIST; three minutes on a GPU."""
        return cls(
            images="mnist", data=500, precisions=(1000.0, 100.0, 10.0), batches=(1, 4, 20, 100, 250), rounds=(1, 4),
            samples=8, device="cuda",
        )  # fmt: skip

    def units(self) -> tuple[str, ...]:
        """Return one key for each seed and precision."""
        seeds = range(self.seed, self.seed + self.seeds)
        return tuple(f"{seed}/{precision:g}" for seed, precision in product(seeds, self.precisions))

    def measure(self, unit: str, progress: Progress) -> Iterator[Record]:
        """Descend on both objectives with every batch size, and compare the batches that reach the same error."""
        number, _, text = unit.partition("/")
        seed, shift = int(number), float(text)
        matrix = tangent_matrix(self, seed)
        system = _system(matrix, self.samples, shift, seed)
        solved = _Solved.of(matrix, system)
        group, share = f"precision {shift:g}", 100 * solved.gamma / (self.data * 10)
        runs: dict[tuple[str, int, int], float] = {}
        for batch in self.batches:
            for objective, rounds, error, seconds in self._descents(matrix, system, solved, batch, seed):
                runs[objective, batch, rounds] = error
                scores = {"error, %": 100 * error, "γ / nC, %": share, "batch": batch, "steps": rounds * self.data}
                name = f"{NAMES[objective]}, batch {batch}, {rounds * self.data} steps"
                yield Record(group, name, seed, {key: float(value) for key, value in scores.items()}, seconds)
        progress(f"{unit}: γ / nC {share:.2g} %")
        yield Record(group, "L over L'", seed, {"γ / nC, %": share, **compared(runs)})

    def _descents(
        self, matrix: Tensor, system: Perturbed, solved: _Solved, batch: int, seed: int
    ) -> Iterator[tuple[str, int, float, float]]:
        """Yield objective, rounds, error and seconds of every descent with this batch size."""
        rows = len(matrix) // self.data
        design = MatrixDesign(matrix, batch * rows)
        # The step length is the same for both, and found once: it takes longer than few steps of small batches.
        step = Passes.over(design).step(system.shift, torch.Generator().manual_seed(seed))
        # On a processor its own time, which other programs do not change.
        clock = time.process_time if matrix.device.type == "cpu" else time.perf_counter
        part = Perturbed(design, system.zeta, system.eps, system.shift)
        for rounds, objective in product(self.rounds, NAMES):
            generator = torch.Generator().manual_seed(seed)
            start = clock()
            descent = sgd(part, objective=objective, epochs=rounds * batch, generator=generator, step=step)
            error = solved.error(descent.x)  # waits for the device
            yield objective, rounds, error, clock() - start

    @staticmethod
    def picture(result: Stored, path: Path) -> None:
        """Draw errors by batch size and by time, and the factors."""
        draw(result, path)


def compared(runs: dict[tuple[str, int, int], float]) -> dict[str, float]:
    """Return how much larger the batches of L are at the same error, and its error at the same batch and steps.

    The keys of ``runs`` are objective, batch and rounds, the values are errors. The batches are those after the most
    rounds; their factor is left out if no error is reached on both objectives.
    """
    batches = tuple(sorted({batch for _, batch, _ in runs}))
    last = max(rounds for _, _, rounds in runs)
    factor = equal_errors(batches, *([runs[objective, batch, last] for batch in batches] for objective in NAMES))
    logs = [math.log(runs["classic", b, r] / runs["reduced", b, r]) for name, b, r in runs if name == "classic"]
    known = {} if factor is None else {"factor of batches": factor}
    return {**known, "ratio of errors": math.exp(sum(logs) / len(logs))}


def equal_errors(sizes: tuple[int, ...], classic: list[float], reduced: list[float]) -> float | None:
    """Return the size at which ``classic`` has some error over that at which ``reduced`` has it: the geometric mean.

    Both errors are known at all sizes and interpolated in logarithms. Errors that one of the two does not reach are
    left out; None if that is all of them.

    >>> round(equal_errors((1, 4, 16), [0.8, 0.4, 0.2], [0.4, 0.2, 0.1]), 6)
    4.0
    """
    ratios = []
    for one, other, sign in ((classic, reduced, 1), (reduced, classic, -1)):
        for size, error in zip(sizes, one, strict=True):
            reached = _crossing(sizes, other, error)
            if reached is not None:
                ratios.append(sign * math.log(size / reached))
    return math.exp(sum(ratios) / len(ratios)) if ratios else None


def _crossing(sizes: tuple[int, ...], errors: list[float], level: float) -> float | None:
    """Return the size at which the error falls to a level, or None if it does not."""
    for (a, high), (b, low) in pairwise(zip(sizes, errors, strict=True)):
        if high >= level >= low and high > low:
            return math.exp(math.log(a) + math.log(b / a) * math.log(high / level) / math.log(high / low))
    return None


@dataclass(frozen=True, eq=False)
class _Solved:
    """The exact samples z, and X z."""

    matrix: Tensor
    z: Tensor
    outputs: Tensor

    @classmethod
    def of(cls, matrix: Tensor, system: Perturbed) -> _Solved:
        """Solve the system by a Cholesky factor of the smaller of two matrices."""
        x, s = matrix.double(), system.shift
        if len(x) >= x.shape[1]:
            factor = torch.linalg.cholesky(x.mT @ x + s * torch.eye(x.shape[1]).to(x))
            z = torch.cholesky_solve(system.rhs.mT, factor).mT
        else:  # (XᵀX + s)⁻¹ b = (b - Xᵀ (XXᵀ + s)⁻¹ X b) / s
            factor = torch.linalg.cholesky(x @ x.mT + s * torch.eye(len(x)).to(x))
            z = (system.rhs - torch.cholesky_solve(x @ system.rhs.mT, factor).mT @ x) / s
        return cls(matrix, z, z @ x.mT)

    @property
    def gamma(self) -> float:
        """γ from all samples, |X z|² on average."""
        return float(self.outputs.square().sum(1).mean())

    def error(self, z: Tensor) -> float:
        """Return |X (z - exact z)| / |X exact z| over all samples: what variances and γ see of the error."""
        gap = (z - self.z).to(self.matrix) @ self.matrix.mT
        return float(gap.norm() / self.outputs.norm())


def _system(matrix: Tensor, samples: int, shift: float, seed: int) -> Perturbed:
    """Return the system for some samples, with noise from the seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    like = torch.empty(0, dtype=torch.float64, device=matrix.device)
    zeta, eps = (normal((samples, size), generator, like) for size in (matrix.shape[1], matrix.shape[0]))
    return Perturbed(MatrixDesign(matrix), zeta, eps, shift)


def tangent_matrix(settings: Objectives, seed: int) -> Tensor:
    """Train the network of this seed and return Rᵀ J (n (C - 1), P), whose Gram matrix is the GGN."""
    x, y = _images(settings, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _network(settings.images).to(x.device)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1 / len(x))
    for _ in range(settings.epochs):
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
    network = Network.build(model.eval(), x)
    design = NetworkDesign.build(network, lw.Categorical(), Data(batches(x, y, 250), x.device))
    return design.whole().to(torch.float64 if x.device.type == "cpu" else torch.float32)


def _images(settings: Objectives, seed: int) -> tuple[Tensor, Tensor]:
    """Return the images of a seed (n, 1, height, width) and their classes."""
    device = torch.device(settings.device)
    if settings.images == "mnist":
        return Images.read(settings.data_dir, "mnist", device, settings.data, seed).train
    from sklearn.datasets import load_digits  # only here, so that the full form does not need scikit-learn

    x, y = map(torch.as_tensor, load_digits(return_X_y=True))
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: settings.data]
    return (x[rows].float().reshape(-1, 1, 8, 8) / 16).to(device), y[rows].long().to(device)


def _network(images: str) -> nn.Sequential:
    """Return two convolutions and a linear layer: 1,898 weights for digits, 5,994 for MNIST."""
    if images == "mnist":
        return nn.Sequential(
            nn.Conv2d(1, 8, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(8, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(256, 10),
        )  # fmt: skip
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Conv2d(8, 16, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)
    )
