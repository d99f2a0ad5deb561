"""Small problems with held-out data, and predictions of every held-out datum by brute force."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.data.batches import Data
from lapwing.tuners.grid import CellGrid, counted_scores
from tests import problems
from tests.cases import BY_NAME, Case

D = torch.float64
MLP, TOKENS, SINGLE = BY_NAME["mlp"], BY_NAME["token_level"], BY_NAME["squeezed"]
METHODS: dict[str, Any] = {
    "full": lw.Full(), "diagonal": lw.Diagonal(), "kron": lw.Kron(), "ekron": lw.EKron(),
    "low_rank": lw.LowRank(rank=7), "ella": lw.ELLA(num_landmarks=12, rank=7), "valla": lw.VaLLA(7, optimiser="none"),
    "sampled": lw.Sampled(num_samples=5, tolerance=1e-10),
}  # fmt: skip
VALUES = (0.03, 0.1, 0.4, 1.0, 3.0, 20.0, 100.0)
HELD = (2, 4, 1)


def split(case: Case, targets: Callable[[int, int], Tensor]) -> tuple[list[Any], list[Any]]:
    """Training data and held-out data, both in unequal batches."""
    return (
        problems.split(case.batch(6), targets(6, 9), (3, 1, 2)),
        problems.split(case.batch(sum(HELD), seed=21), targets(sum(HELD), 4), HELD),
    )


LIKELIHOODS: dict[str, tuple[Case, Any, Callable[[int, int], Tensor]]] = {
    "regression": (MLP, lw.Gaussian(), lambda n, s: problems.numbers(MLP, n, s)),
    "noise for each output": (MLP, lw.Gaussian(per_output=True), lambda n, s: problems.numbers(MLP, n, s)),
    "one output": (SINGLE, lw.Gaussian(noise_std=0.5), lambda n, s: problems.numbers(SINGLE, n, s)),
    "classification": (MLP, lw.Categorical(), lambda n, s: problems.targets(MLP, n, s)),
    "class weights": (MLP, lw.Categorical(class_weights=(1.0, 0.2, 3.0)), lambda n, s: problems.targets(MLP, n, s)),
    "bridge": (MLP, lw.Categorical(link="bridge"), lambda n, s: problems.targets(MLP, n, s)),
    "binary": (SINGLE, lw.Bernoulli(), lambda n, s: problems.targets(SINGLE, n, s)),
    "several labels": (MLP, lw.Bernoulli(), lambda n, s: torch.randint(0, 2, (n, 3))),
    "tokens": (TOKENS, lw.Categorical(), lambda n, s: problems.targets(TOKENS, n, s)),
    "token regression": (TOKENS, lw.Gaussian(), lambda n, s: problems.numbers(TOKENS, n, s)),
    "counts": (MLP, lw.Poisson(), lambda n, s: torch.randint(0, 4, (n, 3))),
}


def setting(name: str = "regression", method: Any = None, prior: Any = 1.0) -> tuple[lw.Fitted, list[Any]]:
    case, likelihood, targets = LIKELIHOODS[name]
    train, held_out = split(case, targets)
    method = lw.Full() if method is None else method
    return lw.fit(case.build(), train, likelihood, method=method, prior=prior), held_out


def with_temperature(fitted: lw.Fitted, factor: float) -> lw.Fitted:
    likelihood = fitted.likelihood.with_dispersion(fitted.likelihood.dispersion * factor)
    return lw.Fitted(
        fitted.posterior.with_problem(fitted.posterior.problem.with_likelihood(likelihood)), fitted.fingerprint
    )


def log_densities(fitted: lw.Fitted, held: list[Any]) -> Tensor:
    """Of every held-out datum, by predictions one at a time."""
    log_probs = []
    for inputs, y in held:
        for b in range(len(y)):
            row = slice(b, b + 1)
            log_probs.append(fitted.predict(problems.rows(inputs, row)).log_prob(y[row]).reshape(-1))
    return torch.cat(log_probs)


def brute_force(fitted: lw.Fitted, held: list[Any], values: Any = VALUES) -> Tensor:
    """The mean negative log density under every precision."""
    return torch.stack([-log_densities(fitted.with_prior(v), held).mean() for v in values])


def log_scores(grid: CellGrid, data: Data, limit: int | None = None) -> Tensor:
    """log p(y | x, cell) of every datum and cell, (n, cells)."""
    return counted_scores(grid, data, limit)[0]


def failing(fitted: lw.Fitted, good: int, change: float = math.nan) -> Any:
    """Return the posterior with an evidence that is as it was for some calls, and then multiplied by ``change``."""
    calls: list[int] = []

    class Failing(type(fitted.posterior)):  # type: ignore[misc]
        def log_evidence(self) -> Tensor:
            calls.append(1)
            value: Tensor = super().log_evidence()
            return value if len(calls) <= good else value * change

    return Failing(**{f.name: getattr(fitted.posterior, f.name) for f in fields(fitted.posterior)})


def results_of(owner: type, method: str, monkeypatch: pytest.MonkeyPatch) -> WeakSet[Any]:
    """Return the set of all results of this method that are still alive."""
    alive: WeakSet[Any] = WeakSet()
    plain = getattr(owner, method)

    def remembered(self: Any, *args: Any) -> Any:
        result = plain(self, *args)
        alive.add(result)
        return result

    monkeypatch.setattr(owner, method, remembered)
    return alive
