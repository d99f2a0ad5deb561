"""A table, a network and its exact posterior, and what approximations of it cost and miss."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from experiments.inducing_task import divergence
from experiments.uci import read_split
from lapwing import metrics
from lapwing.data.batches import Data
from lapwing.demo.tasks import Diabetes, split_diabetes
from lapwing.demo.training import SplitTable, TrainingSettings, train_mlp
from lapwing.errors import DataError
from lapwing.tangent import tangent_model
from lapwing.tuners.linear_mode import LinearMode, ModeSolver

Scores = dict[str, float]


def read(name: str, folder: Path, repeat: int) -> SplitTable:
    """Read one split of a table: "diabetes" is that of scikit-learn, others are uci_NAME.npz in the folder."""
    if name == "diabetes":
        return split_diabetes(Diabetes(), repeat)[0]
    path = folder / f"uci_{name}.npz"
    if not path.exists():
        raise DataError(f"{path.name} is not in the data folder; expected one of the uci_NAME.npz files.")
    return read_split(path, repeat)


@dataclass(frozen=True, eq=False)
class Task:
    """Standardised rows, a network trained on them, and the exact posterior, whose precision and noise all share.

    The exact posterior is computed from the rows of the Jacobian if they are fewer than the weights, else from the
    whole matrix. ``seconds`` includes the search for precision and noise, which other methods are given.
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    exact: lw.Fitted
    seconds: float

    @classmethod
    def of(cls, table: SplitTable, rows: int, recipe: TrainingSettings, seed: int) -> Task:
        """Train on the first rows of a table, and fit the exact posterior."""
        table = SplitTable(table.x_train[:rows], table.y_train[:rows], table.x_test, table.y_test)
        x, y = table.training
        model = train_mlp(x, y, 1, recipe, seed)
        few = len(x) < sum(p.numel() for p in model.parameters())
        start = time.process_time()
        exact = lw.fit(
            model, (x, y), lw.Gaussian(), method=lw.KernelSpace() if few else lw.Full(),
            tuner=lw.tuners.MaximiseEvidence(noise=True), progress=False,
        )  # fmt: skip
        seconds = time.process_time() - start
        return cls(x, y, *table.standardise(table.x_test, table.y_test), exact, seconds)

    @cached_property
    def noise(self) -> Tensor:
        """The variance of the noise."""
        return self.exact.likelihood.dispersion.detach()

    @cached_property
    def variance(self) -> Tensor:
        """The exact variance of f at the test rows, (B, 1)."""
        return self.exact.functions(self.x_test).variance

    def fit(self, method: Any, seed: int) -> tuple[lw.Fitted, float]:
        """Fit a method under the shared precision and noise; return it and the seconds that it took."""
        start = time.process_time()
        fitted = lw.fit(
            self.exact.network.model, (self.x, self.y), lw.Gaussian(noise_std=float(self.noise) ** 0.5), method=method,
            prior=float(self.exact.prior.values), generator=torch.Generator().manual_seed(seed), progress=False,
        )  # fmt: skip
        return fitted, time.process_time() - start

    def timed(self, method: Any, model: nn.Module | None = None) -> tuple[lw.Fitted, float]:
        """Fit a baseline, which has a noise of its own; return it and the seconds that it took."""
        start = time.process_time()
        network = self.exact.network.model if model is None else model
        fitted = lw.fit(network, (self.x, self.y), lw.Gaussian(), method=method, progress=False)
        return fitted, time.process_time() - start

    def scores(self, fitted: lw.Fitted) -> Scores:
        """Return NLL, RMSE and coverage of the test rows, in units of the standardised targets."""
        predicted = fitted.predict(self.x_test)
        return self._scores(predicted.mean, predicted.std)

    def _scores(self, mean: Tensor, std: Tensor) -> Scores:
        spread = 1.959964 * std
        return {
            "NLL": metrics.normal_nll(mean, std, self.y_test),
            "RMSE": metrics.rmse(mean, self.y_test),
            "coverage 95 %": metrics.coverage(mean - spread, mean + spread, self.y_test),
        }

    def compared(self, fitted: lw.Fitted) -> Scores:
        """Return the scores, and the mean KL of a test row from the exact posterior: of f, and of y with its noise."""
        variance = fitted.functions(self.x_test).variance
        count = len(variance)
        return {
            **self.scores(fitted),
            "KL": divergence(self.variance, variance) / count,
            "KL of y": divergence(self.variance + self.noise, variance + self.noise) / count,
        }

    def with_tangent_mean(self, fitted: lw.Fitted) -> Scores:
        """Return the scores if the mean is that of the tangent model at its optimum, and not the network's output."""
        std = (fitted.functions(self.x_test).variance + self.noise).sqrt()
        return self._scores(self.tangent_mean, std)

    @cached_property
    def tangent_mean(self) -> Tensor:
        """f + J (θ* - w̃) at the test rows, with θ* the optimum of the tangent model under the shared precision."""
        network, problem = self.exact.network, self.exact.posterior.problem
        theta = network.theta().double()
        model = tangent_model(network, problem.likelihood, Data((self.x, self.y), self.x.device))
        optimum = ModeSolver(model, theta)(problem, theta)
        with torch.no_grad():
            return network(self.x_test) + network.jvp(self.x_test, (optimum.theta - theta)[None])[0]

    def tuned_for_tangent_mean(self) -> tuple[lw.Fitted, float]:
        """Learn precision and noise again, for the mean of the tangent model; return the posterior and the seconds."""
        start = time.process_time()
        tuned = self.exact.tuned(LinearMode((self.x, self.y), mean="tangent"))
        return tuned, time.process_time() - start
