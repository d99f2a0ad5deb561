"""Bayesian optimisation with BoTorch against random search on three functions.

Run: ``python -m benchmarks.optimisation > benchmarks/results/optimisation.txt`` (needs ``lapwing[botorch]``).
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import statistics
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor

from benchmarks.clock import machine

FUNCTIONS = ("Branin", "Hartmann6", "Ackley4")
INITIAL, BATCH = 10, 2
MANY = 500  # continuations of random search from the initial points of a seed: it costs nothing
Choose = Callable[[Tensor, Tensor, Tensor], Tensor]  # the next points for X, Y and bounds


def function(name: str) -> Any:
    """Return a test function to maximise."""
    from botorch.test_functions import Ackley, Branin, Hartmann

    made = {
        "Branin": lambda: Branin(negate=True),
        "Hartmann6": lambda: Hartmann(6, negate=True),
        "Ackley4": lambda: Ackley(4, bounds=[(-5.0, 5.0)] * 4, negate=True),
    }
    return made[name]().double()


def improvement(model: Any, Y: Tensor, bounds: Tensor) -> Tensor:
    """Return the points that maximise qLogEI together."""
    from botorch.acquisition.logei import qLogExpectedImprovement
    from botorch.optim import optimize_acqf

    acquisition = qLogExpectedImprovement(model, best_f=Y.max())
    options = {"maxiter": 50}
    points, _ = optimize_acqf(acquisition, bounds, q=BATCH, num_restarts=4, raw_samples=64, options=options)
    return points


def expected_improvement(X: Tensor, Y: Tensor, bounds: Tensor) -> Tensor:
    """Return the next points by qLogEI of the network."""
    from lapwing.botorch import surrogate

    return improvement(surrogate(X, Y, bounds), Y, bounds)


def thompson_sampling(X: Tensor, Y: Tensor, bounds: Tensor) -> Tensor:
    """Return the next points as the maxima of functions drawn from the posterior of the network."""
    from lapwing.botorch import surrogate, thompson

    return thompson(surrogate(X, Y, bounds), bounds, BATCH)


def tanh_network(X: Tensor, Y: Tensor, bounds: Tensor) -> Tensor:
    """Return the next points by qLogEI of a network of tanh units with error bars on all weights.

    Two hidden layers of 32 units, trained by L-BFGS while the evidence chooses a precision for each layer.
    """
    from botorch.models.transforms.input import Normalize
    from botorch.models.transforms.outcome import Standardize

    import lapwing as lw
    from lapwing.botorch import LapwingModel

    scaling, standard = Normalize(X.shape[1], bounds=bounds), Standardize(1)
    data = [(2 * scaling(X) - 1, standard(Y)[0])]
    standard.eval()
    sizes = [(X.shape[1], 32), (32, 32), (32, 1)]
    layers = [torch.nn.Linear(*size, dtype=torch.float64) for size in sizes]
    model: torch.nn.Module = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])
    likelihood, recipe = (
        lw.Gaussian(noise_std=0.01),
        lw.recipes.classic(10, method=lw.KernelSpace(), prior=lw.per_layer(1.0)),
    )
    model = lw.train(model, data, likelihood, recipe=recipe, progress=False).model
    tuner = lw.tuners.LinearMode()
    posterior = lw.fit(model, data, likelihood, method=lw.KernelSpace(), tuner=tuner, progress=False)
    return improvement(LapwingModel(posterior, Box(scaling), standard), Y, bounds)


class Box(torch.nn.Module):
    """The box of the inputs as [-1, 1]."""

    def __init__(self, unit: torch.nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, X: Tensor) -> Tensor:
        """Return the scaled inputs."""
        return 2 * self.unit(X) - 1


def gaussian_process(X: Tensor, Y: Tensor, bounds: Tensor) -> Tensor:
    """Return the next points by qLogEI of BoTorch's own Gaussian process with its default settings."""
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.transforms.input import Normalize
    from gpytorch.mlls import ExactMarginalLogLikelihood

    model = SingleTaskGP(X, Y, input_transform=Normalize(X.shape[1], bounds=bounds))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return improvement(model, Y, bounds)


WAYS: dict[str, Choose] = {
    "qLogEI": expected_improvement,
    "Thompson": thompson_sampling,
    "qLogEI, tanh": tanh_network,
    "qLogEI, GP": gaussian_process,
}


def initial(name: str, seed: int) -> tuple[Any, Tensor, Tensor]:
    """Return the function of a run, and the random points and values that it starts from."""
    objective = function(name)
    torch.manual_seed(seed)
    X = uniform(objective.bounds, INITIAL)
    return objective, X, objective(X).unsqueeze(1)


def uniform(bounds: Tensor, *shape: int) -> Tensor:
    """Return random points in a box."""
    return bounds[0] + (bounds[1] - bounds[0]) * torch.rand(*shape, bounds.shape[1], dtype=torch.float64)


def regret(name: str, seed: int, rounds: int, choose: Choose) -> float:
    """Return how far the best value of one run is from the optimum."""
    warnings.simplefilter("ignore")  # of BoTorch, on restarts that did not converge
    torch.set_num_threads(1)
    objective, X, Y = initial(name, seed)
    for _ in range(rounds):
        new = choose(X, Y, objective.bounds)
        X, Y = torch.cat([X, new]), torch.cat([Y, objective(new).unsqueeze(1)])
    return float(objective.optimal_value) - float(Y.max())


def random_regret(name: str, seed: int, rounds: int) -> float:
    """Return the expected regret of random search from the same initial points, by the mean over continuations."""
    objective, _, Y = initial(name, seed)
    values = objective(uniform(objective.bounds, MANY, BATCH * rounds)).amax(1).clamp_min(float(Y.max()))
    return float(objective.optimal_value) - float(values.mean())


def with_error(values: list[float]) -> str:
    """Return the mean and its standard error as text."""
    return f"{statistics.mean(values):7.3f} ± {statistics.stdev(values) / math.sqrt(len(values)):5.3f}"


def main() -> None:
    import botorch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    arguments = parser.parse_args()
    print(
        f"$ OMP_NUM_THREADS=1 python -m benchmarks.optimisation --seeds {arguments.seeds} --rounds {arguments.rounds}"
    )
    print(f"{machine(1)}, botorch {botorch.__version__}\n")
    total, seeds = INITIAL + BATCH * arguments.rounds, range(arguments.seeds)
    print(f"Simple regret after {total} evaluations: {INITIAL} random ones, the same for all, then {BATCH} at a time.")
    print(f"Mean ± standard error over {arguments.seeds} seeds; lower is better. Random search is the mean over {MANY}")
    print("continuations of each seed. qLogEI and Thompson have lapwing.botorch, tanh is a network of tanh")
    print("units with error bars on all weights, GP is BoTorch's own SingleTaskGP. Below each row: the gain over")
    print("random search from the same initial points.\n")
    print(f"{'':10}" + "".join(f"{way:>18}" for way in ("random search", *WAYS)))
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        started = {
            name: [[pool.submit(regret, name, seed, arguments.rounds, way) for seed in seeds] for way in WAYS.values()]
            for name in FUNCTIONS
        }
        for name in FUNCTIONS:
            random = [random_regret(name, seed, arguments.rounds) for seed in seeds]
            runs = [[run.result() for run in way] for way in started[name]]
            gains = [[a - b for a, b in zip(random, other, strict=True)] for other in runs]
            print(f"{name:10}" + "".join(f"{with_error(each):>18}" for each in (random, *runs)))
            print(f"{'  gain':10}{'':18}" + "".join(f"{with_error(each):>18}" for each in gains), flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\n{used.ru_utime + used.ru_stime:.0f} s of one core in all")


if __name__ == "__main__":
    main()
