"""Orthonormal bases of a space, among them those of a few directions that leave all others together as the rest.

A basis turns vectors into coordinates in which a symmetric matrix is diagonal. Arrays of vectors are (..., G, n, d),
for G independent spaces of size d; if G is one, any (..., d).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


class Basis(Protocol):
    """A basis of R^d, with one eigenvalue for each of its m parts: single directions, and maybe the rest at the end.

    A ``scale`` (G, d) multiplies vectors beforehand: the basis of a matrix in units of it.
    """

    @property
    def counts(self) -> Tensor | None:
        """The number of directions in each part, (m,); None if every part is one direction."""
        ...

    def to(self, dtype: torch.dtype) -> Any:
        """Return it in another dtype."""
        ...

    def coordinates(self, x: Tensor) -> Tensor:
        """Return the coordinates of x (..., d): (..., w), at least one for each part."""
        ...

    def lengths(self, x: Tensor) -> Tensor:
        """Return the coordinates, with the length of the part in the rest for all of its coordinates, (..., m)."""
        ...

    def combined(self, y: Tensor) -> Tensor:
        """Apply the transpose of ``coordinates``: y (..., w) to (..., d)."""
        ...

    def drawn(self, eps: Tensor) -> Tensor:
        """Return coordinates (..., w) of standard normal numbers eps (..., d), without the scale."""
        ...

    def undrawn(self, y: Tensor) -> Tensor:
        """Apply the transpose of ``drawn``: y (..., w) to (..., d)."""
        ...

    def spread(self, values: Tensor, width: int) -> Tensor:
        """Return a value for each of ``width`` coordinates, from one for each part (..., m)."""
        ...

    def pooled(self, squares: Tensor) -> Tensor:
        """Return the mean of squared coordinates (..., w) over the directions of each part, (..., m)."""
        ...

    def squared(self, values: Tensor) -> Tensor:
        """Return the diagonal (..., d) of the matrix with these eigenvalues (..., m)."""
        ...

    def diagonal_of(self, x: Tensor) -> Tensor:
        """Return the diagonal of diag(x) in this basis, the mean over the directions of each part: (..., m)."""
        ...


@dataclass(frozen=True, eq=False)
class FullBasis:
    """A basis of d vectors, the columns of ``vectors`` (G, d, d), which have the scale in them."""

    vectors: Tensor
    counts: None = None

    def to(self, dtype: torch.dtype) -> FullBasis:
        return FullBasis(self.vectors.to(dtype))

    def coordinates(self, x: Tensor) -> Tensor:
        return _times(x, self.vectors)

    def lengths(self, x: Tensor) -> Tensor:
        return self.coordinates(x)

    def combined(self, y: Tensor) -> Tensor:
        return _times(y, self.vectors.mT)

    def drawn(self, eps: Tensor) -> Tensor:
        return eps

    def undrawn(self, y: Tensor) -> Tensor:
        return y

    def spread(self, values: Tensor, width: int) -> Tensor:
        return values

    def pooled(self, squares: Tensor) -> Tensor:
        return squares

    def squared(self, values: Tensor) -> Tensor:
        return _times(values, self.vectors.square().mT)

    def diagonal_of(self, x: Tensor) -> Tensor:
        return _times(x, self.vectors.square())


@dataclass(frozen=True, eq=False)
class Axes:
    """The basis of a diagonal matrix: the coordinates are the entries themselves.

    ``exact`` says whether the matrix is diagonal, or only its diagonal was taken.
    """

    scale: Tensor | None = None
    exact: bool = True
    counts: None = None

    def to(self, dtype: torch.dtype) -> Axes:
        return self if self.scale is None else replace(self, scale=self.scale.to(dtype))

    def coordinates(self, x: Tensor) -> Tensor:
        return _scaled(x, self.scale)

    def lengths(self, x: Tensor) -> Tensor:
        return self.coordinates(x)

    def combined(self, y: Tensor) -> Tensor:
        return _scaled(y, self.scale)

    def drawn(self, eps: Tensor) -> Tensor:
        return eps

    def undrawn(self, y: Tensor) -> Tensor:
        return y

    def spread(self, values: Tensor, width: int) -> Tensor:
        return values

    def pooled(self, squares: Tensor) -> Tensor:
        return squares

    def squared(self, values: Tensor) -> Tensor:
        return _scaled(_scaled(values, self.scale), self.scale)

    def diagonal_of(self, x: Tensor) -> Tensor:
        return self.squared(x)


@dataclass(frozen=True, eq=False)
class ThinBasis:
    """A basis of r < d orthonormal vectors V, the columns of ``vectors`` (G, d, r), and the rest of the space.

    The rest, all directions orthogonal to V, is one part with one eigenvalue. Its coordinates are those of the
    projection x - V Vᵀ x, so that no digits cancel and no matrix of size d is formed.

    >>> basis = ThinBasis(torch.tensor([[[1.0], [0.0], [0.0]]]))
    >>> basis.coordinates(torch.tensor([[2.0, 3.0, 4.0]])), basis.lengths(torch.tensor([[2.0, 3.0, 4.0]]))
    (tensor([[2., 0., 3., 4.]]), tensor([[2., 5.]]))
    """

    vectors: Tensor
    scale: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        size, rank = self.vectors.shape[-2:]
        counts = torch.ones(rank + 1, dtype=torch.float64, device=self.vectors.device)
        counts[-1] = size - rank
        return counts

    def to(self, dtype: torch.dtype) -> ThinBasis:
        return ThinBasis(self.vectors.to(dtype), None if self.scale is None else self.scale.to(dtype))

    def coordinates(self, x: Tensor) -> Tensor:
        return self.drawn(_scaled(x, self.scale))

    def lengths(self, x: Tensor) -> Tensor:
        inside, rest = self._parts(_scaled(x, self.scale))
        return torch.cat([inside, torch.linalg.vector_norm(rest, dim=-1, keepdim=True)], -1)

    def combined(self, y: Tensor) -> Tensor:
        return _scaled(self.undrawn(y), self.scale)

    def drawn(self, eps: Tensor) -> Tensor:
        return torch.cat(self._parts(eps), -1)

    def undrawn(self, y: Tensor) -> Tensor:
        inside, rest = y.split([self.vectors.shape[-1], self.vectors.shape[-2]], -1)
        return _times(inside - _times(rest, self.vectors), self.vectors.mT) + rest

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inside = _times(x, self.vectors)
        return inside, x - _times(inside, self.vectors.mT)

    def spread(self, values: Tensor, width: int) -> Tensor:
        rank = self.vectors.shape[-1]
        if width == rank + 1:
            return values
        return torch.cat([values[..., :-1], values[..., -1:].expand(*values.shape[:-1], width - rank)], -1)

    def pooled(self, squares: Tensor) -> Tensor:
        size, rank = self.vectors.shape[-2:]
        rest = squares[..., rank:].sum(-1, keepdim=True) / (size - rank)
        return torch.cat([squares[..., :rank], rest], -1)

    def squared(self, values: Tensor) -> Tensor:
        squares = self.vectors.square()
        outside = (1 - squares.sum(-1)).clamp_min(0).unsqueeze(-2)  # (G, 1, d): the diagonal of the projection
        diagonal = _times(values[..., :-1], squares.mT) + values[..., -1:] * outside.to(values)
        return _scaled(_scaled(diagonal, self.scale), self.scale)

    def diagonal_of(self, x: Tensor) -> Tensor:
        size, rank = self.vectors.shape[-2:]
        x = _scaled(_scaled(x, self.scale), self.scale)
        inside = _times(x, self.vectors.square())
        rest = (x.sum(-1, keepdim=True) - inside.sum(-1, keepdim=True)) / (size - rank)
        return torch.cat([inside, rest], -1)

    def with_scale(self, scale: Tensor) -> ThinBasis:
        """Return the basis of a matrix in units of ``scale`` (G, d)."""
        return replace(self, scale=scale)


def pooled_pairs(out: Basis, inp: Basis, squares: Tensor) -> Tensor:
    """Return squared coordinates (..., w_out, w_in) as means over each pair of parts, (..., m_out, m_in)."""
    return out.pooled(inp.pooled(squares).mT).mT


def _times(x: Tensor, matrices: Tensor) -> Tensor:
    """Return x (..., G, n, d) times matrices (G, d, m); one matrix for all x is one large product."""
    matrices = matrices.to(x)
    return x @ (matrices[0] if len(matrices) == 1 else matrices)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * (scale[0] if len(scale) == 1 else scale.unsqueeze(-2)).to(x)
