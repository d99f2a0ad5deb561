"""Kernels between features of inputs; they do not depend on the network's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lapwing.errors import DataError


class BaseKernel(Protocol):
    """k(u, v) between features, for one output of unit variance."""

    uses_features: bool  # whether it sees the input of the last layer, rather than the network's input
    length_per_column: bool  # whether every column of the features has a length-scale, rather than one for all

    def between(self, u: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        """Return k(u, v) for u (B, D), v (M, D): (B, M)."""
        ...

    def variance(self, u: Tensor, lengths: Tensor) -> Tensor:
        """Return k(u, u), (B,) or (1,) if it is the same everywhere."""
        ...


class RBF:
    r"""$k = \exp(-\tfrac12 \sum_i (u_i - v_i)^2 / \ell_i^2)$ on the inputs."""

    uses_features = False
    length_per_column = True

    def between(self, u: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        # Only differences matter; without the common part their squares are not lost to rounding.
        common = v.detach().mean(0)
        u, v = (u - common) / lengths, (v - common) / lengths
        distance = u.square().sum(-1)[:, None] + v.square().sum(-1) - 2 * (u @ v.mT)
        return torch.exp(-0.5 * distance.clamp_min(0))

    def variance(self, u: Tensor, lengths: Tensor) -> Tensor:
        return torch.ones_like(u[:1, 0])


class Linear:
    r"""$k = 1 + u \cdot v / (D \ell^2)$: the tangent kernel of a linear last layer with input u."""

    uses_features = True
    length_per_column = False

    def between(self, u: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return 1 + (u / lengths) @ (v / lengths).mT / u.shape[-1]

    def variance(self, u: Tensor, lengths: Tensor) -> Tensor:
        return 1 + (u / lengths).square().mean(-1)


KERNELS: dict[str, BaseKernel] = {"rbf": RBF(), "features": Linear()}


@dataclass(frozen=True, eq=False)
class FreeKernel:
    """Cov(f_c(u), f_d(v)) = k(u, v) (L Lᵀ)_cd between features u, v and outputs c, d.

    All parameters are logarithms or unconstrained, so that gradient steps can learn them.
    """

    kind: str  # a name in KERNELS
    log_lengths: Tensor  # (D,), or (1,) for all dimensions
    mixing: Tensor  # (C, C); its lower triangle is L

    @property
    def base(self) -> BaseKernel:
        """The kernel k of one output."""
        return KERNELS[self.kind]

    @property
    def outputs(self) -> Tensor:
        """L Lᵀ, (C, C)."""
        root = self.mixing.tril()
        return root @ root.mT

    def _base(self, u: Tensor, v: Tensor) -> Tensor:
        return self.base.between(u, v, self.log_lengths.exp())

    def points(self, u: Tensor, number: Tensor) -> Tensor:
        """Return the covariance of inducing points u (M, D), each for the output with this number (M,): (M, M)."""
        return self._base(u, u) * self.outputs[number][:, number]

    def between(self, u: Tensor, points: Tensor, number: Tensor) -> Tensor:
        """Return the covariance of all outputs at u (B, D) with the inducing points: (B, C, M)."""
        if u.shape[1] != points.shape[1]:
            raise DataError(
                f"inputs of {u.shape[1]} numbers; the kernel was learned on {points.shape[1]}. Give as many."
            )
        return self._base(u, points)[:, None] * self.outputs[:, number]

    def marginal(self, u: Tensor) -> Tensor:
        """Return the covariance of the outputs at each input, (B, C, C)."""
        each = self.base.variance(u, self.log_lengths.exp())[:, None, None] * self.outputs
        return each.expand(len(u), *self.mixing.shape)

    def joint(self, u: Tensor) -> Tensor:
        """Return the covariance of all outputs at all inputs, (B, C, B, C)."""
        return torch.einsum("ij,cd->icjd", self._base(u, u), self.outputs)
