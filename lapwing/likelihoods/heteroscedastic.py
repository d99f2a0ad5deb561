"""Regression with noise that depends on the input."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.core.gaussian import FunctionGaussian
from lapwing.core.random import normal
from lapwing.core.state import State, saved
from lapwing.errors import DataError
from lapwing.likelihoods.protocol import matched, refuse_dispersion
from lapwing.predictives.normal import NormalPredictive


@saved
@dataclass(frozen=True, eq=False)
class HeteroscedasticGaussian:
    """Regression with noise that depends on the input: outputs f = (m, s) are D means and then D log-variances.

    The Hessian in (m, s) is indefinite, so the curvature is the Fisher matrix, diag(exp(-s), 1/2).

    >>> likelihood = HeteroscedasticGaussian()
    >>> likelihood.loss(torch.zeros(1, 2), torch.zeros(1, 1))  # ½ log 2π
    tensor([0.9189])
    """

    dispersion: ClassVar[Tensor] = torch.tensor(1.0, dtype=torch.float64)
    learns_dispersion: ClassVar[bool] = False

    def with_dispersion(self, phi: Tensor) -> HeteroscedasticGaussian:
        refuse_dispersion(phi, "HeteroscedasticGaussian has no dispersion to change, the network gives the noise.")
        return self

    def targets(self, f: Tensor, y: Tensor) -> Tensor:
        if f.shape[-1] % 2:
            raise DataError(
                f"HeteroscedasticGaussian: the network has {f.shape[-1]} outputs; expected an even number: "
                "the means first, then as many log-variances."
            )
        return matched(f[..., : f.shape[-1] // 2], y, "HeteroscedasticGaussian")

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = f.chunk(2, -1)
        each = log_variance + (y - mean).square() * (-log_variance).exp() + math.log(2 * math.pi)
        return 0.5 * each.sum(-1)

    def root(self, f: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = f.chunk(2, -1)
        return torch.diag_embed(torch.cat([(-0.5 * log_variance).exp(), torch.full_like(mean, math.sqrt(0.5))], -1))

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
        mean, log_variance = f.chunk(2, -1)
        eps = normal(tuple(mean.shape), generator, f)
        return torch.cat([-eps * (-0.5 * log_variance).exp(), 0.5 * (1 - eps.square())], -1)

    def count(self, f: Tensor, y: Tensor) -> int:
        return f[..., 0].numel()

    def log_normaliser(self, phi: Tensor, outputs: int) -> Tensor:
        return torch.zeros_like(phi)

    def predict(self, belief: FunctionGaussian) -> NormalPredictive:
        size = belief.mean.shape[-1] // 2
        noise = (belief.mean[..., size:] + 0.5 * belief.variance[..., size:]).exp()  # E exp(s) of a Gaussian s
        means = FunctionGaussian(belief.mean[..., :size], belief.marginal.cov[..., :size, :size])
        return NormalPredictive(means, noise)

    def state(self) -> State:
        """Return the state for a file; there is nothing to store."""
        return State("HeteroscedasticGaussian")

    @classmethod
    def from_state(cls, state: State) -> HeteroscedasticGaussian:
        """Build the likelihood from its state."""
        return cls()
