"""The task of the inducing-point experiments: data, a network and its exact posterior, with which others compare."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.data.streams import DrawnRows
from lapwing.demo.training import TrainingSettings
from lapwing.runtime.threads import derived_generator

RECIPE = TrainingSettings(
    epochs=10**9, max_steps=12_000, batch_size=100, learning_rate=1e-3, weight_decay=0.0, falling=False
)  # as in the published demonstration of VaLLA
SMALL = replace(RECIPE, hidden=(10,), max_steps=100)  # to try an experiment out
SEED = 2147483647  # of the published demonstration


@dataclass(frozen=True, eq=False)
class Task:
    """Data, the exact posterior of a network, whose precision and noise all methods share, and a grid of inputs."""

    x: Tensor
    y: Tensor
    grid: Tensor
    full: lw.Fitted
    seconds: float

    @classmethod
    def of(cls, model: nn.Module, x: Tensor, y: Tensor, margin: float, count: int) -> Task:
        """Fit the exact posterior, and its precision and noise by the evidence."""
        start = time.perf_counter()
        full = lw.fit(
            model, (x, y), lw.Gaussian(), method=lw.Full(), tuner=lw.tuners.MaximiseEvidence(noise=True), progress=False
        )
        grid = torch.linspace(float(x.min()) - margin, float(x.max()) + margin, count, dtype=x.dtype)
        return cls(x, y, grid.unsqueeze(1), full, time.perf_counter() - start)

    @cached_property
    def noise(self) -> float:
        """The variance of the noise."""
        return float(self.full.likelihood.dispersion)

    @cached_property
    def exact(self) -> Tensor:
        """The exact variance of f on the grid, (G,)."""
        return self.variance(self.full)

    @cached_property
    def evidence(self) -> float:
        """The exact log evidence."""
        return float(self.full.log_evidence())

    @cached_property
    def mean(self) -> Tensor:
        """The output of the network on the grid, (G, 1)."""
        return self.full.functions(self.grid).mean

    def variance(self, fitted: lw.Fitted) -> Tensor:
        """Return the variance of f on the grid, (G,)."""
        return fitted.functions(self.grid).cov.reshape(-1)

    def fit(self, method: Any, seed: int) -> tuple[lw.Fitted, float]:
        """Fit a method under the shared precision and noise; return it and the seconds that it took."""
        start = time.perf_counter()
        fitted = lw.fit(
            self.full.network.model, (self.x, self.y), lw.Gaussian(noise_std=self.noise**0.5), method=method,
            prior=lw.isotropic(float(self.full.prior.values)), generator=torch.Generator().manual_seed(seed),
            progress=False,
        )  # fmt: skip
        return fitted, time.perf_counter() - start

    @property
    def gamma(self) -> float:
        """The number of effective parameters of the exact posterior."""
        return self.full.effective_parameters().total


def divergence(exact: Tensor, approximate: Tensor) -> float:
    """Return KL(N(f, exact) || N(f, approximate)), summed over inputs.

    >>> round(divergence(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0])), 4)
    0.0966
    """
    ratio = exact.double() / approximate.double()
    return float(0.5 * (ratio - 1 - ratio.log()).sum())


def landmarks(task: Task, count: int, seed: int) -> Tensor:
    """Return the inputs that ELLA draws with this seed, (M, 1); its posterior keeps directions only."""
    generator = derived_generator(torch.Generator().manual_seed(seed), torch.empty(0))
    inputs: Tensor = DrawnRows.draw(Data((task.x, task.y), task.x.device), count, generator).inputs
    return inputs
