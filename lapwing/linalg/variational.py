"""A Gaussian over whitened inducing variables: its covariance in closed form or by natural gradients."""

from __future__ import annotations

from collections.abc import Iterator
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
    Data that would rather have a larger variance than the prior's (far from what the network says of them) take off
    the average, in which others outweigh them; only B as a whole is kept positive.
    """

    average: Tensor  # (r, r), of I + B as batches have it

    @classmethod
    def before_data(cls, size: int, like: Tensor) -> Inducing:
        return cls(torch.eye(size, dtype=torch.float64, device=like.device))

    def updated(self, gained: Tensor, step: float) -> Inducing:
        """A step towards I + ``gained``."""
        return Inducing((1 - step) * self.average + step * (self._eye + gained))

    def times(self, factor: float) -> Inducing:
        """With B times a factor, as under a prior variance times it."""
        return Inducing(self._eye + factor * (self.average - self._eye))

    @property
    def _eye(self) -> Tensor:
        return torch.eye(len(self.average), dtype=self.average.dtype, device=self.average.device)

    @cached_property
    def known(self) -> Tensor:
        """B, (r, r): the positive part of what the average says."""
        found = self.average - self._eye
        shift = 1e-12 * float(self.average.detach().diagonal().abs().max())
        if int(torch.linalg.cholesky_ex(found + shift * self._eye).info) == 0:
            return found
        values, vectors = torch.linalg.eigh(0.5 * (found + found.mT))
        return (vectors * values.clamp_min(0)) @ vectors.mT

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.known)
        return values.clamp_min(0), vectors

    @cached_property
    def precision(self) -> Tensor:
        """(r, r)"""
        return self._eye + self.known

    @cached_property
    def _factor(self) -> Tensor:
        return cholesky(self.precision, "the inducing variables")

    @cached_property
    def decided(self) -> Tensor:
        """I - S, (r, r): the share of the prior variance that the data take away."""
        return self._eye - torch.cholesky_inverse(self._factor)

    def divergence(self) -> Tensor:
        """KL(q || prior) without the part of the mean: ½ (tr S - r - log det S)."""
        return self._factor.diagonal().log().sum() - 0.5 * self.decided.diagonal().sum()

    def lefts(self, prior: Tensor, rows: Tensor, factors: tuple[float, ...]) -> Iterator[Tensor]:
        """``left`` under the prior variance times each factor: all of them for little more than one."""
        values, turn = self._eigen
        turned = rows @ turn
        for factor in factors:
            share = factor * values / (1 + factor * values)
            yield factor * (prior - (turned * share) @ turned.mT)

    def left(self, prior: Tensor, rows: Tensor) -> Tensor:
        """The covariance of outputs (B, C, C), from that before the data and their whitened rows (B, C, r)."""
        return prior - rows @ self.decided @ rows.mT
