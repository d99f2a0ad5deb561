"""The full posterior covariance."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing.core.data import Data
from lapwing.core.random import independent_generator
from lapwing.core.settings import require_integer
from lapwing.curvature.full import FullCurvature, full_curvature, full_hessian
from lapwing.curvature.per_output import by_output
from lapwing.curvature.sweep import CURVATURES, Sweep, checked_curvature
from lapwing.errors import UnsupportedError
from lapwing.losses import Statistics
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.problem import Problem


@dataclass(frozen=True)
class Full:
    """The exact (P, P) precision. For small networks, last layers and subnetworks; the reference for the rest.

    ``curvature``: "ggn" (exact), "fisher_mc" (sampled labels), or "hessian" (the true Hessian of the loss, which
    need not be positive; a precision that is not positive definite is refused). ``limit`` is the largest P
    that is tried: the matrix takes 8 P² bytes.

    Cost: one forward pass, a backward pass for each of the C outputs and P² for each of their rows; P³ to factorise.
    "hessian" takes P backward passes for each batch instead.
    Exact when: always, for the GGN or the Hessian; "fisher_mc" on average.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.gaussian import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=Full(), prior=1.0).functions(x).std
    tensor([[0.8165],
            [0.8165]])
    """

    curvature: str = "ggn"
    limit: int = 30_000

    def __post_init__(self) -> None:
        require_integer("limit", self.limit)
        checked_curvature(self.curvature, (*CURVATURES, "hessian"))

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        network = problem.network
        size = network.selection.size
        if size > self.limit:
            raise UnsupportedError(
                f"Full() over {size} weights needs {8 * size**2 / 2**30:.0f} GiB; the limit is {self.limit} weights. "
                "Use Kron(), LowRank() or Diagonal(), weights=last_layer, or raise Full(limit=...)."
            )
        if self.curvature == "hessian":
            curvature, statistics = full_hessian(network, problem.likelihood, data)
            return WeightPosterior.fitted(problem, curvature, statistics)

        generator = independent_generator(generator)

        def compute(only: int | None) -> tuple[FullCurvature, Statistics]:
            sweep = Sweep(network, problem.likelihood, data, self.curvature, generator, "Full", only)
            return full_curvature(sweep, network), sweep.statistics

        return WeightPosterior.fitted(problem, *by_output(problem.likelihood, compute))
