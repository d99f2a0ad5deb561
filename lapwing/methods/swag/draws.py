"""Draws of weights from a Gaussian, and the posterior of the network's outputs under them."""

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
    """The network under K draws of its weights; draw k has the seed ``seed + k`` at all inputs.

    θ - w̃ ~ N(mean, ½ diag(variance) + ½ DᵀD/(R - 1)) with the R rows of D. Draws are not kept but made again for every
    call, at R P multiplications each.
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
        """Return the outputs of all draws, (K, B, [T,] C)."""
        return torch.stack([self.outputs(x, self.numbered(k)) for k in range(self.count)])

    def outputs(self, x: Inputs, d: Tensor) -> Tensor:
        """Return f (B, [T,] C) with the weights moved by d (P,)."""
        with torch.no_grad():
            return self.network.under(self.network.weights(d), x)

    def numbered(self, k: int) -> Tensor:
        """Return draw k as a step from w̃, (P,)."""
        return self.drawn(derived_generator(torch.Generator().manual_seed(self.seed + k), torch.empty(0)))

    def drawn(self, generator: torch.Generator | None) -> Tensor:
        """Draw a step from w̃, (P,)."""
        independent = normal(tuple(self.mean.shape), generator, self.mean)
        shared = normal((len(self.deviations),), generator, self.mean)
        correlated = shared @ self.deviations / (len(self.deviations) - 1) ** 0.5
        return self.mean + 0.5**0.5 * (self.variance.sqrt() * independent + correlated)


@dataclass(frozen=True, eq=False)
class DrawnPosterior:
    """f(x) ~ N(mean of the draws, covariance of the draws). A prediction costs one forward pass for each draw."""

    problem: Problem
    draws: Draws
    statistics: Statistics
    theta: Tensor
    learning_rate: float  # of the SGD that the draws come from

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        return spread(self.draws(x).to(self.theta.dtype), joint)

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n outputs of the network, (n, B, [T,] C); without a generator those of the seeds seed, seed + 1, ..."""
        each = (self.draws.outputs(x, d) for d in self._steps(n, generator))
        return torch.stack([f.to(self.theta.dtype) for f in each])

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n sets of weights, (n, P): those of ``function_samples``."""
        return self.theta + self._steps(n, generator)

    def _steps(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n steps from w̃, (n, P)."""
        draws = self.draws
        return torch.stack([draws.numbered(k) if generator is None else draws.drawn(generator) for k in range(n)])
