"""Priors over functions: kernels between features of inputs, free of any network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import DataError

KERNELS = ("rbf", "features")


@dataclass(frozen=True, eq=False)
class FreeKernel:
    r"""Cov(f_c(u), f_d(v)) = k(u, v) (L Lᵀ)_cd between features u, v and outputs c, d.

    "rbf": $k = \exp(-\tfrac12 \sum_i (u_i - v_i)^2 / \ell_i^2)$; "features": $k = 1 + u \cdot v / D$, the tangent
    kernel of a linear last layer with features scaled by ℓ. All is a logarithm or free, so that it can be learned.
    """

    kind: str
    log_lengths: Tensor  # (D,), or (1,) for all dimensions
    mixing: Tensor  # (C, C), its lower triangle

    @property
    def outputs(self) -> Tensor:
        """L Lᵀ, (C, C)."""
        root = self.mixing.tril()
        return root @ root.mT

    def _base(self, u: Tensor, v: Tensor) -> Tensor:
        if self.kind == "rbf":  # only differences count, and squares of what all have in common would drown them
            common = v.detach().mean(0)
            u, v = u - common, v - common
        u, v = u / self.log_lengths.exp(), v / self.log_lengths.exp()
        inner = u @ v.mT
        if self.kind == "features":
            return 1 + inner / u.shape[-1]
        gap = u.square().sum(-1)[:, None] + v.square().sum(-1) - 2 * inner
        return torch.exp(-0.5 * gap.clamp_min(0))

    def points(self, u: Tensor, number: Tensor) -> Tensor:
        """Between inducing points u (M, D), each with the number of one output (M,): (M, M)."""
        return self._base(u, u) * self.outputs[number][:, number]

    def between(self, u: Tensor, points: Tensor, number: Tensor) -> Tensor:
        """Between all outputs at u (B, D) and the points: (B, C, M)."""
        if u.shape[1] != points.shape[1]:
            raise DataError(
                f"inputs of {u.shape[1]} numbers; the kernel was learned on {points.shape[1]}. Give as many."
            )
        return self._base(u, points)[:, None] * self.outputs[:, number]

    def own(self, u: Tensor) -> Tensor:
        """Between the outputs of each input: (B, C, C)."""
        if self.kind == "rbf":
            return self.outputs.expand(len(u), *self.mixing.shape)
        scaled = u / self.log_lengths.exp()
        return (1 + scaled.square().mean(-1))[:, None, None] * self.outputs

    def joint(self, u: Tensor) -> Tensor:
        """Between all outputs at all inputs: (B, C, B, C)."""
        return torch.einsum("ij,cd->icjd", self._base(u, u), self.outputs)

    def tensors(self) -> dict[str, Tensor]:
        return {"log_lengths": self.log_lengths, "mixing": self.mixing}
