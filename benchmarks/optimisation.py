"""Bayesian optimisation with BoTorch against random search on three functions.

Run: ``python -m benchmarks.optimisation > benchmarks/results/optimisation.txt`` (needs ``lapwing[integrations]``).
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import platform
import resource
import statistics
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor

FUNCTIONS = ("Branin", "Hartmann6", "Ackley4")
INITIAL, BATCH = 10, 4


def function(name: str) -> Any:
    """Return a test function to maximise."""
    from botorch.test_functions import Ackley, Branin, Hartmann

    made = {
        "Branin": lambda: Branin(negate=True),
        "Hartmann6": lambda: Hartmann(6, negate=True),
        "Ackley4": lambda: Ackley(4, bounds=[(-5.0, 5.0)] * 4, negate=True),
    }
    return made[name]().double()


def expected_improvement(model: Any, best: Tensor, bounds: Tensor) -> Tensor:
    """Return the next points by qLogEI."""
    from botorch.acquisition.logei import qLogExpectedImprovement
    from botorch.optim import optimize_acqf

    acquisition = qLogExpectedImprovement(model, best_f=best)
    options = {"maxiter": 50}
    points, _ = optimize_acqf(acquisition, bounds, q=BATCH, num_restarts=4, raw_samples=64, options=options)
    return points


def thompson_sampling(model: Any, best: Tensor, bounds: Tensor) -> Tensor:
    """Return the next points: maxima of drawn functions."""
    from lapwing.botorch import thompson

    return thompson(model, bounds, BATCH)


def regret(name: str, seed: int, rounds: int, choose: Callable[..., Tensor] | None) -> float:
    """Return how far the best value of one run is from the optimum; ``choose`` is None for random search."""
    from lapwing.botorch import surrogate

    warnings.simplefilter("ignore")  # of BoTorch, on restarts that did not converge
    torch.set_num_threads(1)
    objective = function(name)
    bounds = objective.bounds
    torch.manual_seed(seed)
    random = lambda n: bounds[0] + (bounds[1] - bounds[0]) * torch.rand(n, objective.dim, dtype=torch.float64)
    X = random(INITIAL)
    Y = objective(X).unsqueeze(1)
    for _ in range(rounds):
        new = random(BATCH) if choose is None else choose(surrogate(X, Y, bounds), Y.max(), bounds)
        X, Y = torch.cat([X, new]), torch.cat([Y, objective(new).unsqueeze(1)])
    return float(objective.optimal_value) - float(Y.max())


def with_error(values: list[float]) -> str:
    """Return the mean and its standard error as text."""
    return f"{statistics.mean(values):6.3f} ± {statistics.stdev(values) / math.sqrt(len(values)):5.3f}"


def main() -> None:
    import botorch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    arguments = parser.parse_args()
    print(f"python -m benchmarks.optimisation --seeds {arguments.seeds} --rounds {arguments.rounds}")
    print(f"torch {torch.__version__}, botorch {botorch.__version__}, {platform.machine()}, one thread")
    total = INITIAL + BATCH * arguments.rounds
    print(f"Simple regret after {total} evaluations, the first {INITIAL} random and the same for all; the rest in")
    print(f"batches of {BATCH}. Mean ± standard error over {arguments.seeds} seeds; lower is better.\n")
    print(f"{'':10}  {'random search':>15}  {'qLogEI':>15}  {'Thompson':>15}  random - qLogEI  random - Thompson")
    ways = (None, expected_improvement, thompson_sampling)
    seeds = range(arguments.seeds)
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        started = {
            name: [[pool.submit(regret, name, seed, arguments.rounds, way) for seed in seeds] for way in ways]
            for name in FUNCTIONS
        }
        for name in FUNCTIONS:
            runs = [[run.result() for run in way] for way in started[name]]
            gains = [[a - b for a, b in zip(runs[0], other, strict=True)] for other in runs[1:]]
            cells = [*(f"{with_error(each):>15}" for each in runs), *(f"{with_error(each):>15}" for each in gains)]
            print(f"{name:10}  {'  '.join(cells)}", flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\n{used.ru_utime + used.ru_stime:.0f} s of one core")


if __name__ == "__main__":
    main()
