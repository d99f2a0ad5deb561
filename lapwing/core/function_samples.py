"""A belief about the outputs of a network that consists of drawn functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.core.gaussian import FunctionGaussian


@dataclass(frozen=True, eq=False)
class FunctionSamples:
    """2 K functions of equal weight, ``factor`` · (mean ± ``width`` · step) for K steps; the mean alone if K is zero.

    A step and its opposite are one draw: errors that are odd in the step cancel, and both cost one product with the
    Jacobian. Shapes: ``mean`` (B, [T,] C), ``steps`` (K, B, [T,] C). Beliefs with the same ``steps`` tensor share
    their draws.

    >>> import torch
    >>> FunctionSamples(torch.zeros(1, 2), torch.tensor([[[1.0, 2.0]]])).functions(slice(0, 1))[:, 0]
    tensor([[ 1.,  2.],
            [-1., -2.]])
    """

    mean: Tensor
    steps: Tensor
    factor: float = 1.0
    width: float = 1.0

    @property
    def pairs(self) -> int:
        """K, the number of draws; zero where the functions do not differ."""
        return len(self.steps) if self.width else 0

    def functions(self, pairs: slice) -> Tensor:
        """Return the functions of some draws, (2 k, B, [T,] C): those with plus before those with minus."""
        centre, step = self.factor * self.mean, (self.factor * self.width) * self.steps[pairs]
        return torch.cat([centre + step, centre - step])

    def scaled(self, factor: float) -> FunctionSamples:
        """Return the belief about ``factor`` times the outputs."""
        return replace(self, factor=self.factor * factor)

    def widened(self, factor: float) -> FunctionSamples:
        """Return the belief with its covariance times ``factor``, around the same mean."""
        return replace(self, width=self.width * factor**0.5)

    def rows(self, rows: Tensor | slice) -> FunctionSamples:
        """Return the belief about some of the data."""
        return replace(self, mean=self.mean[rows], steps=self.steps[:, rows])

    @staticmethod
    def joined(parts: Sequence[FunctionSamples]) -> FunctionSamples:
        """Return the belief about all data, from those about some data each, in order."""
        mean, steps = torch.cat([part.mean for part in parts]), torch.cat([part.steps for part in parts], 1)
        return replace(parts[0], mean=mean, steps=steps)

    @property
    def gaussian(self) -> FunctionGaussian:
        """The Gaussian belief with the mean and the covariance of the functions."""
        steps = (self.factor * self.width) * self.steps
        return FunctionGaussian.of_deviations(self.factor * self.mean, steps, max(1, len(steps)), joint=False)
