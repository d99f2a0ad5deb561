"""Posteriors that put draws of the weights into the network itself, not into its tangent model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from lapwing.core.chosen import ChosenOutputs
from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.inputs import Inputs
from lapwing.core.random import derived_generator
from lapwing.networks.network import Network
from lapwing.posteriors.members import spread
from lapwing.posteriors.point import PointPosterior
from lapwing.posteriors.protocols import Posterior
from lapwing.problem import Problem, Statistics


class WeightDraws(Protocol):
    """The network under ``count`` draws of its weights; draw k has the seed ``seed + k`` at all inputs.

    Classes inherit from it and define ``drawn``. Draws are not kept but made again for every call.
    """

    network: Network
    count: int
    seed: int

    def drawn(self, generator: torch.Generator | None) -> Tensor:
        """Draw a step from w̃, (P,)."""
        ...

    def __call__(self, x: Inputs) -> Tensor:
        """Return the outputs of all draws, (K, B, [T,] C)."""
        return torch.stack([self.outputs(x, self.numbered(k)) for k in range(self.count)])

    def outputs(self, x: Inputs, d: Tensor) -> Tensor:
        """Return f (B, [T,] C) with the weights moved by d (P,)."""
        return self.network.at(d, x)

    def numbered(self, k: int) -> Tensor:
        """Return draw k as a step from w̃, (P,)."""
        return self.drawn(derived_generator(torch.Generator().manual_seed(self.seed + k), torch.empty(0)))


class Drawn(Posterior, Protocol):
    """f(x) ~ N(mean of the draws, covariance of the draws). A prediction costs one forward pass for each draw."""

    problem: Problem
    draws: WeightDraws
    statistics: Statistics  # of the mean of the draws
    theta: Tensor  # w̃, (P,)

    def __call__(self, x: Inputs, joint: bool = False) -> FunctionGaussian:
        return spread(self.draws(x).to(self.theta.dtype), joint)

    def chosen(self, x: Inputs, outputs: ChosenOutputs, joint: bool = False) -> FunctionGaussian:
        return spread(outputs.of(self.draws(x).to(self.theta.dtype)), joint)

    def plain(self) -> PointPosterior:
        return PointPosterior(self.problem, self.statistics, self.theta)

    def function_samples(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n outputs of the network, (n, B, [T,] C); without a generator those of the seeds seed, seed + 1, ..."""
        return torch.stack([self.draws.outputs(x, d).to(self.theta.dtype) for d in self._steps(n, generator)])

    def weight_samples(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n sets of weights, (n, P): those of ``function_samples``."""
        return torch.stack([self.theta + d for d in self._steps(n, generator)])

    def _steps(self, n: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        """Draw n steps from w̃, (P,) each, one after another."""
        draws = self.draws
        return (draws.numbered(k) if generator is None else draws.drawn(generator) for k in range(n))
