"""A Gaussian over whitened inducing variables, with its covariance in closed form or by natural gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.core.spectra import eigh
from lapwing.linalg.cholesky import cholesky


@dataclass(frozen=True, eq=False)
class Inducing:
    r"""The covariance S of q(u) = N(·, S) with prior N(0, I), given by its precision $S^{-1} = I + B$.

    A mini-batch gives an unbiased estimate of the optimal precision, and a natural-gradient step of length ρ is the
    average (1 - ρ) old + ρ new: there is no learning rate to tune, and one step of length one on all data reaches the
    optimum. Batches on which the network is far off may contribute a negative B; only the positive part of the average
    over all batches is used.
    """

    average: Tensor  # (r, r), the average of I + B over batches

    @classmethod
    def before_data(cls, size: int, like: Tensor) -> Inducing:
        """Return the prior: S = I."""
        return cls(torch.eye(size, dtype=torch.float64, device=like.device))

    def updated(self, information: Tensor, step: float) -> Inducing:
        """Return the Gaussian after a step of this length towards the precision I + ``information``."""
        return Inducing((1 - step) * self.average + step * (self._eye + information))

    def times(self, factor: float) -> Inducing:
        """Return the Gaussian with B times a factor, which is the effect of a prior variance times that factor."""
        return Inducing(self._eye + factor * (self.average - self._eye))

    @property
    def _eye(self) -> Tensor:
        """The identity (r, r)."""
        return torch.eye(len(self.average), dtype=self.average.dtype, device=self.average.device)

    @cached_property
    def information(self) -> Tensor:
        """B (r, r): the positive semi-definite part of the average minus I."""
        information = self.average - self._eye
        shift = 1e-12 * float(self.average.detach().diagonal().abs().max())
        if int(torch.linalg.cholesky_ex(information + shift * self._eye).info) == 0:
            return information
        values, vectors = eigh(0.5 * (information + information.mT))
        return (vectors * values.clamp_min(0)) @ vectors.mT

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (r,) and eigenvectors (r, r) of B."""
        values, vectors = eigh(self.information)
        return values.clamp_min(0), vectors

    @cached_property
    def precision(self) -> Tensor:
        """S⁻¹ = I + B (r, r)."""
        return self._eye + self.information

    @cached_property
    def _factor(self) -> Tensor:
        """The Cholesky factor (r, r) of the precision."""
        return cholesky(self.precision, "the inducing variables")

    @cached_property
    def reduction(self) -> Tensor:
        """I - S (r, r): the share of the prior variance that the data remove."""
        return self._eye - torch.cholesky_inverse(self._factor)

    def divergence(self) -> Tensor:
        """Return KL(q || prior) without the term of the mean: ½ (tr S - r - log det S)."""
        return self._factor.diagonal().log().sum() - 0.5 * self.reduction.diagonal().sum()

    def posterior_covs(self, prior: Tensor, rows: Tensor, factors: tuple[float, ...]) -> Iterator[Tensor]:
        """Yield ``posterior_cov`` for the prior variance times each factor; all of them cost little more than one."""
        values, turn = self._eigen
        turned = rows @ turn
        for factor in factors:
            share = factor * values / (1 + factor * values)
            yield factor * (prior - (turned * share) @ turned.mT)

    def posterior_cov(self, prior: Tensor, rows: Tensor) -> Tensor:
        """Return the covariance (B, C, C) of outputs, from their prior covariance and whitened rows (B, C, r)."""
        return prior - rows @ self.reduction @ rows.mT
