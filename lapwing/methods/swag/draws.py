"""A Gaussian belief about the weights whose draws are put into the network itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.data import Inputs
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.random import derived_generator, normal
from lapwing.losses import Statistics
from lapwing.networks.network import Network
from lapwing.posteriors.members import spread
from lapwing.problem import Problem


@dataclass(frozen=True, eq=False)
class Draws:
    """One network under K draws of its weights; draw k is that of seed + k at whatever inputs.

    θ - w̃ ~ N(mean, ½ diag(variance) + ½ DᵀD/(R - 1)) with the R rows of D. Draws are made anew for every call, for
    R P multiplications each, and not kept.
    """

    network: Network
    mean: Tensor  # (P,)
    variance: Tensor  # (P,)
    deviations: Tensor  # D, (R, P)
    count: int  # K
    seed: int

    def __len__(self) -> int:
        return self.count

    def __call__(self, x: Inputs) -> Tensor:
        return torch.stack([self.outputs(x, self.numbered(k)) for k in range(self.count)])

    def outputs(self, x: Inputs, d: Tensor) -> Tensor:
        """f (B, [T,] C) with the weights moved by d (P,)."""
        with torch.no_grad():
            return self.network.under(self.network.weights(d), x)

    def numbered(self, k: int) -> Tensor:
        """Draw k as a step from w̃, (P,)."""
        return self.drawn(derived_generator(torch.Generator().manual_seed(self.seed + k), torch.empty(0)))

    def drawn(self, generator: torch.Generator | None) -> Tensor:
        own = normal(tuple(self.mean.shape), generator, self.mean)
        shared = normal((len(self.deviations),), generator, self.mean)
        together = shared @ self.deviations / (len(self.deviations) - 1) ** 0.5
        return self.mean + 0.5**0.5 * (self.variance.sqrt() * own + together)


@dataclass(frozen=True, eq=False)
class DrawnPosterior:
    """f(x) ~ N(mean of the draws, their covariance). A prediction costs a forward pass for each draw."""

    problem: Problem
    draws: Draws
    statistics: Statistics
    theta: Tensor
    learning_rate: float  # of the descent that the draws come from

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        return spread(self.draws(x).to(self.theta.dtype), joint)

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, B, [T,] C) of the network itself; without a generator those of seed, seed + 1, ..."""
        each = (self.draws.outputs(x, d) for d in self._steps(n, generator))
        return torch.stack([f.to(self.theta.dtype) for f in each])

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, P), the weights of ``function_samples``."""
        return self.theta + self._steps(n, generator)

    def _steps(self, n: int, generator: torch.Generator | None) -> Tensor:
        draws = self.draws
        return torch.stack([draws.numbered(k) if generator is None else draws.drawn(generator) for k in range(n)])
