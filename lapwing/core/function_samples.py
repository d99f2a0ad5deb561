"""A belief about the outputs of a network that consists of drawn functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.core.gaussian import FunctionGaussian


@dataclass(frozen=True, eq=False)
class FunctionSamples:
    """2 K functions of equal weight, ``factor`` · (mean ± ``width`` · step) for K steps; the mean alone if K is zero.

    A step and its opposite are one draw: errors that are odd in the step cancel, and both cost one product with the
    Jacobian. Shapes: ``mean`` (B, [T,] C), ``steps`` (K, B, [T,] C). Beliefs with the same ``steps`` tensor share
    their draws.

    >>> FunctionSamples.of(torch.zeros(1, 2), torch.tensor([[[1.0, 2.0]]])).functions(slice(0, 1))[:, 0]
    tensor([[ 1.,  2.],
            [-1., -2.]])
    """

    mean: Tensor
    steps: Tensor
    spreads: Tensor  # (K, B, [T]), the variance between the outputs of each step
    factor: float = 1.0
    width: float = 1.0

    @classmethod
    def of(cls, mean: Tensor, steps: Tensor) -> FunctionSamples:
        """Return the functions mean ± step for all steps."""
        return cls(mean, steps, steps.var(-1, correction=0) if len(steps) else steps.new_zeros(steps.shape[:-1]))

    @property
    def pairs(self) -> int:
        """K, the number of draws; zero where the functions do not differ."""
        return len(self.steps) if self.width else 0

    @property
    def scale(self) -> float:
        """The number that steps are multiplied by."""
        return self.factor * self.width

    def functions(self, pairs: slice, width: Tensor | None = None) -> Tensor:
        """Return the functions of some draws, (2 k, B, [T,] C): those with plus before those with minus.

        The steps of each input are multiplied by ``width`` (B, [T,] 1).
        """
        steps, mean = self.steps[pairs], self.factor * self.mean
        out = steps.new_empty(2, *steps.shape)
        by = torch.ones_like(mean[..., :1]) if width is None else width
        torch.addcmul(mean, steps, by, value=self.scale, out=out[0])
        torch.addcmul(mean, steps, by, value=-self.scale, out=out[1])
        return out.flatten(0, 1)

    def scaled(self, factor: float) -> FunctionSamples:
        """Return the belief about ``factor`` times the outputs."""
        return replace(self, factor=self.factor * factor)

    def moved(self, by: Tensor) -> FunctionSamples:
        """Return the belief about the outputs plus ``by``, which has a number for each output of a datum, (C,)."""
        return replace(self, mean=self.mean + by.to(self.mean) / self.factor)

    def widened(self, factor: float) -> FunctionSamples:
        """Return the belief with its covariance times ``factor``, around the same mean."""
        return replace(self, width=self.width * factor**0.5)

    def rows(self, rows: Tensor | tuple[Tensor, ...]) -> FunctionSamples:
        """Return the belief about some of the data: inputs (n,), or inputs and tokens, (n,) each."""
        index = rows if isinstance(rows, tuple) else (rows,)
        inner: Any = (slice(None), *index)
        return replace(self, mean=self.mean[index], steps=self.steps[inner], spreads=self.spreads[inner])

    @staticmethod
    def joined(parts: Sequence[FunctionSamples]) -> FunctionSamples:
        """Return the belief about all data, from those about some data each, in order."""
        mean, steps = torch.cat([part.mean for part in parts]), torch.cat([part.steps for part in parts], 1)
        return replace(parts[0], mean=mean, steps=steps, spreads=torch.cat([part.spreads for part in parts], 1))

    @property
    def gaussian(self) -> FunctionGaussian:
        """The Gaussian belief with the mean and the covariance of the functions."""
        steps = self.scale * self.steps
        return FunctionGaussian.of_deviations(self.factor * self.mean, steps, max(1, len(steps)), joint=False)
