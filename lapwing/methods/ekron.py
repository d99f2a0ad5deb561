"""EKFAC: Kronecker eigenvectors with exact eigenvalues."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing.core.data import Data
from lapwing.core.random import independent_generator
from lapwing.curvature.kronecker import check_settings, eigen_corrected, kronecker_curvature
from lapwing.curvature.sweep import Sweep
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.problem import Problem


@dataclass(frozen=True)
class EKron:
    """Kronecker eigenbasis with the curvature's exact diagonal in it (EKFAC).

    Settings as in ``Kron``. The trace of every block is exact. Cost: two passes over the data, the second of
    which forms each layer's rotated Jacobian where weights are shared. With "fisher_mc" both passes draw
    their own labels.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.gaussian import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=EKron(), prior=1.0).functions(x).std
    tensor([[0.8165],
            [0.8165]])
    """

    curvature: str = "ggn"
    sharing: str = "expand"
    full_limit: int = 1024

    def __post_init__(self) -> None:
        check_settings(self.curvature, self.sharing, self.full_limit)

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        network, likelihood = problem.network, problem.likelihood
        generator = independent_generator(generator)
        first = Sweep(network, likelihood, data, self.curvature, generator, "EKron, bases")
        kron = kronecker_curvature(first, network, self.sharing, self.full_limit)
        second = Sweep(network, likelihood, data, self.curvature, generator, "EKron, values")
        corrected = eigen_corrected(second, kron)
        return WeightPosterior.fitted(problem, corrected, second.statistics)
