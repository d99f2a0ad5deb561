"""The precision of a block whose eigenvectors are known: products of two bases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.linalg.bases import Basis
from lapwing.networks.jacobians import BlockJacobian
from lapwing.networks.linear_jacobian import LinearJacobian


@dataclass(frozen=True, eq=False)
class EigenPrecision:
    """Λ with known eigenvectors U ⊗ V. ``inverse`` (G, m_out, m_in) holds one over the eigenvalues.

    There is one for each pair of parts of the bases. A prior that differs by input or output is folded into the bases.
    """

    out: Basis
    inp: Basis
    inverse: Tensor
    log_determinant: Tensor

    def _weights(self, rotated: BlockJacobian) -> Tensor:
        """Return the inverse for all coordinates of a rotated Jacobian."""
        return each_pair(self.out, self.inp, self.inverse, *rotated.widths)

    def quadratic(self, jacobian: BlockJacobian, tokens: int, full: bool) -> Tensor:
        rotated = jacobian.rotated(self.out, self.inp, crossed=False)
        return rotated.weighted(self._weights(rotated), tokens, full)

    def quadratics(self, precisions: Sequence[EigenPrecision], jacobian: BlockJacobian, tokens: int) -> list[Tensor]:
        if any(each.out is not self.out or each.inp is not self.inp for each in precisions):
            return [each.quadratic(jacobian, tokens, True) for each in precisions]
        rotated = jacobian.rotated(self.out, self.inp, crossed=False)
        inverses = [each._weights(rotated) for each in precisions]
        if isinstance(rotated, LinearJacobian):
            return list(rotated.weighted_each(torch.stack(inverses), tokens, True))
        return [rotated.weighted(inverse, tokens, True) for inverse in inverses]

    def cross(self, jacobian: BlockJacobian, other: BlockJacobian | None = None) -> Tensor:
        rotated = jacobian.rotated(self.out, self.inp)
        second = rotated if other is None else other.rotated(self.out, self.inp)
        return rotated.between(second, self._weights(rotated))

    def sample(self, eps: Tensor) -> Tensor:
        drawn = self.out.drawn(self.inp.drawn(eps).mT).mT
        scaled = drawn * each_pair(self.out, self.inp, self.inverse.sqrt(), *drawn.shape[-2:]).to(eps)
        return self.out.combined(self.inp.combined(scaled).mT).mT

    def adjoint(self, v: Tensor) -> Tensor:
        turned = self.out.coordinates(self.inp.coordinates(v).mT).mT
        scaled = turned * each_pair(self.out, self.inp, self.inverse.sqrt(), *turned.shape[-2:]).to(v)
        return self.out.undrawn(self.inp.undrawn(scaled).mT).mT

    def variances(self) -> Tensor:
        return diagonal_in(self.out, self.inp, self.inverse)


def each_pair(out: Basis, inp: Basis, values: Tensor, height: int, width: int) -> Tensor:
    """Return a value for each pair of coordinates (..., height, width), from one for each pair of parts."""
    return out.spread(inp.spread(values, width).mT, height).mT


def diagonal_in(out: Basis, inp: Basis, values: Tensor) -> Tensor:
    """Return the diagonal (G, d_out, d_in) of the matrix with these eigenvalues in the basis out ⊗ inp."""
    return out.squared(inp.squared(values).mT).mT


def precision_in(out: Basis, inp: Basis, values: Tensor, scale_logdet: Tensor | float = 0.0) -> EigenPrecision:
    """Return the precision with these eigenvalues, in units of a prior's scale with this log-determinant."""
    logs = values.log()
    logs = logs if inp.counts is None else logs * inp.counts  # counts are float64
    logs = logs if out.counts is None else logs * out.counts.unsqueeze(-1)
    return EigenPrecision(out, inp, values.reciprocal(), logs.sum(dtype=torch.float64) + scale_logdet)
