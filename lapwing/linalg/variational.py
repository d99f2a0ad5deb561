"""A Gaussian over whitened inducing variables: its covariance in closed form or by natural gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.linalg.cholesky import cholesky


@dataclass(frozen=True, eq=False)
class Inducing:
    r"""q(u) = N(·, S) against the prior N(0, I), known by its precision $S^{-1} = I + B$ with B positive.

    A mini-batch gives an unbiased estimate of the optimal precision, and a natural-gradient step of length ρ is the
    average (1 - ρ) old + ρ new: no learning rate to tune, and one step of length one on all data is the optimum.
    """

    precision: Tensor  # (r, r)

    @classmethod
    def before_data(cls, size: int, like: Tensor) -> Inducing:
        return cls(torch.eye(size, dtype=torch.float64, device=like.device))

    def updated(self, gained: Tensor, step: float) -> Inducing:
        """A step towards I + ``gained``."""
        eye = torch.eye(len(gained), dtype=gained.dtype, device=gained.device)
        return Inducing((1 - step) * self.precision + step * (eye + gained))

    @cached_property
    def _factor(self) -> Tensor:
        return cholesky(self.precision, "the inducing variables")

    @cached_property
    def decided(self) -> Tensor:
        """I - S, (r, r): the share of the prior variance that the data take away."""
        eye = torch.eye(len(self.precision), dtype=self.precision.dtype, device=self.precision.device)
        return eye - torch.cholesky_inverse(self._factor)

    def divergence(self) -> Tensor:
        """KL(q || prior) without the part of the mean: ½ (tr S - r - log det S)."""
        return self._factor.diagonal().log().sum() - 0.5 * self.decided.diagonal().sum()

    def left(self, prior: Tensor, rows: Tensor) -> Tensor:
        """The covariance of outputs (B, C, C), from that before the data and their whitened rows (B, C, r)."""
        return prior - rows @ self.decided @ rows.mT


def positive_part(matrices: Tensor) -> Tensor:
    """Symmetric matrices (..., C, C) with eigenvalues below nought set to it."""
    values, vectors = torch.linalg.eigh(0.5 * (matrices + matrices.mT))
    return (vectors * values.clamp_min(0).unsqueeze(-2)) @ vectors.mT
