"""KFAC: one Kronecker product for each layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing.core.data import Data
from lapwing.core.random import independent_generator
from lapwing.curvature.blockwise import BlockwiseCurvature
from lapwing.curvature.kronecker import check_settings, kronecker_curvature
from lapwing.curvature.per_output import by_output
from lapwing.curvature.sweep import Sweep
from lapwing.losses import Statistics
from lapwing.posteriors.weight_space import WeightPosterior
from lapwing.problem import Problem


@dataclass(frozen=True)
class Kron:
    """Kronecker-factored curvature over all layers (KFAC); the default.

    ``sharing`` says what happens where a weight is used at many positions (pixels, tokens, time steps):
    "expand" treats positions as data of their own, "reduce" sums the gradients and averages the inputs over
    them first. A parameter that is no linear map gets a block of its own, full up to ``full_limit`` entries
    and diagonal above.

    Cost of the fit: one forward pass, a backward pass without weight gradients for each of the C outputs (C - 1 for
    softmax; times T for token-level outputs), and the Gram matrices.
    Exact when: one linear layer with a Gaussian likelihood; one datum within each block without sharing.

    >>> from lapwing.api import fit
    >>> from lapwing.likelihoods.gaussian import Gaussian
    >>> x, net = torch.tensor([[-1.0], [1.0]]), torch.nn.Linear(1, 1)
    >>> fit(net, [(x, x)], Gaussian(noise_std=1.0), method=Kron(), prior=1.0).functions(x).std
    tensor([[0.8165],
            [0.8165]])
    """

    curvature: str = "ggn"
    sharing: str = "expand"
    full_limit: int = 1024

    def __post_init__(self) -> None:
        check_settings(self.curvature, self.sharing, self.full_limit)

    def fit(self, problem: Problem, data: Data, generator: torch.Generator | None = None) -> WeightPosterior:
        generator = independent_generator(generator)

        def compute(only: int | None) -> tuple[BlockwiseCurvature, Statistics]:
            sweep = Sweep(problem.network, problem.likelihood, data, self.curvature, generator, "Kron", only)
            found = kronecker_curvature(sweep, problem.network, self.sharing, self.full_limit)
            return found, sweep.statistics

        return WeightPosterior.fitted(problem, *by_output(problem.likelihood, compute))
