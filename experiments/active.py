"""Active learning on a table: rows are chosen in rounds, and the network is trained again after each."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import lapwing as lw
from experiments.decision_tasks import Rows, rows_of
from lapwing import metrics
from lapwing.demo.training import Recipe, trained

RULES = ("random", "batch", "bald", "variance")
POOL = 1000  # rows to choose from
START = 20  # rows that are labelled at first
RECIPE = Recipe(hidden=(50,), epochs=200, batch_size=64, learning_rate=1e-2, weight_decay=1e-4)


def learned(name: str, folder: Path | None, rounds: int, chosen: int, seed: int) -> dict[str, dict[str, float]]:
    """Return the scores of each rule on test rows: after the last round, and as means over the rounds.

    All rules start from the same rows and the same initial weights, and see the same pool and test rows.
    """
    x, y = rows_of(name, folder, seed)
    pool = min(POOL, len(x) // 2)
    x = (x - x[:pool].mean(0)) / x[:pool].std(0).clamp_min(1e-2)
    y = (y - y[:pool].mean()) / y[:pool].std() if y.is_floating_point() else y
    rest = (x[pool : pool + 2000], y[pool : pool + 2000])
    return {rule: _rounds(rule, (x[:pool], y[:pool]), rest, rounds, chosen, seed) for rule in RULES}


def _rounds(rule: str, pool: Rows, test: Rows, rounds: int, chosen: int, seed: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    x, y = pool
    labelled = torch.arange(START)
    errors: list[float] = []
    nlls: list[float] = []
    numbers = y.is_floating_point()
    for number in range(rounds + 1):
        model = trained(x[labelled], y[labelled], 1 if numbers else int(y.max()) + 1, RECIPE, seed)
        posterior = lw.fit(model, [(x[labelled], y[labelled])], "regression" if numbers else "classification")
        predictive = posterior.predict([test[0]])
        error = metrics.rmse(predictive.mean, test[1]) if numbers else 1 - metrics.accuracy(predictive.probs, test[1])
        errors.append(error)
        nlls.append(float(-predictive.log_prob(test[1]).mean()))
        if number < rounds:
            labelled = torch.cat([labelled, _next(rule, posterior, x, labelled, chosen, generator)])
    name = "RMSE" if numbers else "error rate"
    last = {name: errors[-1], "NLL": nlls[-1]}
    return {**last, f"mean {name}": sum(errors[1:]) / rounds, "mean NLL": sum(nlls[1:]) / rounds}


def _next(
    rule: str, posterior: lw.Fitted, x: Tensor, labelled: Tensor, chosen: int, generator: torch.Generator
) -> Tensor:
    free = torch.ones(len(x), dtype=torch.bool)
    free[labelled] = False
    rest = free.nonzero().flatten()
    if rule == "random":
        return rest[torch.randperm(len(rest), generator=generator)[:chosen]]
    return rest[posterior.acquire(x[rest], chosen, by=rule)]
