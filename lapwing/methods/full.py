"""The full posterior covariance."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing.core.data import Data
from lapwing.core.errors import UnsupportedError
from lapwing.curvature.full import FullCurvature, full_curvature, full_hessian
from lapwing.curvature.outputs import by_output
from lapwing.curvature.sweep import CURVATURES, Statistics, Sweep, checked_curvature
from lapwing.posteriors.problem import Problem
from lapwing.posteriors.weight_space import WeightPosterior


@dataclass(frozen=True)
class Full:
    """The exact (P, P) precision. For small networks, last layers and subnetworks; the reference for the rest.

    ``curvature``: "ggn" (exact), "fisher_mc" (sampled labels), or "hessian" (the true Hessian of the loss, which
    need not be positive; a precision that is not positive definite is refused). ``limit`` is the largest P
    that is tried: the matrix takes 8 P² bytes.
    """

    curvature: str = "ggn"
    limit: int = 30_000

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        checked_curvature(self.curvature, (*CURVATURES, "hessian"))
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

        def compute(only: int | None) -> tuple[FullCurvature, Statistics]:
            sweep = Sweep(network, problem.likelihood, data, self.curvature, generator, "Full", only)
            return full_curvature(sweep, network), sweep.statistics

        return WeightPosterior.fitted(problem, *by_output(problem.likelihood, compute))
