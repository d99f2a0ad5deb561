"""Designs in coordinates where the prior of the weights and the noise of the rows are independent and of unit size.

For weights w = S u with S Sᵀ = A⁻¹ and rows with noise covariances B_i = L_i L_iᵀ, the regression y_i = X_i w + noise
is L_i⁻¹ y_i = L_i⁻¹ X_i S u + white noise, with a white prior for u.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.core.settings import seen
from lapwing.errors import DataError
from lapwing.linalg.design import DerivedDesign, OperatorDesign, OperatorPart, Part, located_parts
from lapwing.linalg.features import feature_design, refuse_unpaired


@dataclass(frozen=True, eq=False)
class NoiseRoot:
    """Roots L_i of the relative noise covariances of n data: standard deviations (n, C), or factors (n, C, C)."""

    factor: Tensor

    def whitened(self, rows: Tensor, data: slice) -> Tensor:
        """Return L_i⁻¹ times the rows (k, m C) of some of the data."""
        return self._solved(rows, self.factor[data], upper=False)

    def transposed(self, rows: Tensor, data: slice) -> Tensor:
        """Return L_i⁻ᵀ times the rows (k, m C) of some of the data."""
        some = self.factor[data]
        return self._solved(rows, some if some.ndim == 2 else some.mT, upper=True)

    def _solved(self, rows: Tensor, factor: Tensor, upper: bool) -> Tensor:
        blocks = rows.double().reshape(len(rows), *factor.shape[:2])
        if factor.ndim == 2:
            return (blocks / factor).flatten(1)
        columns = torch.linalg.solve_triangular(factor, blocks.permute(1, 2, 0), upper=upper)
        return columns.permute(2, 0, 1).flatten(1)

    @property
    def logdet(self) -> float:
        """Σ_i log det B_i."""
        pivots = self.factor if self.factor.ndim == 2 else self.factor.diagonal(dim1=-2, dim2=-1)
        return 2 * float(pivots.log().sum())


@dataclass(frozen=True, eq=False)
class WhitenedDesign(DerivedDesign):
    """The design L⁻¹ X S. Every part of X has all C rows of each of its data."""

    prior: OperatorDesign | None  # S
    noise: NoiseRoot | None
    outputs: int = 1  # C

    @property
    def size(self) -> int:
        return self.design.size if self.prior is None else self.prior.size

    def __iter__(self) -> Iterator[Part]:
        for part, rows in located_parts(self.design):
            yield self._whitened(part, slice(rows.start // self.outputs, rows.stop // self.outputs))

    def _whitened(self, part: Part, data: slice) -> Part:
        prior, noise = self.prior, self.noise

        def forward(v: Tensor) -> Tensor:
            outputs = part.forward(v if prior is None else prior.forward(v.to(prior.like)))
            return outputs if noise is None else noise.whitened(outputs, data)

        def back(u: Tensor) -> Tensor:
            rows = part.back(u if noise is None else noise.transposed(u, data))
            return rows if prior is None else prior.back(rows.to(prior.like))

        return OperatorPart(part.rows, forward, back)


@dataclass(frozen=True, eq=False)
class SharedDesign(DerivedDesign):
    """The design of C outputs with the same features X (n, P) and weights (C, P) of their own.

    Rows are data by outputs, (n, C); columns are outputs by features, (C, P).

    >>> from lapwing.linalg.design import MatrixDesign, forward_product
    >>> design = SharedDesign(MatrixDesign(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])), outputs=2)
    >>> forward_product(design, torch.tensor([[1.0, 0.0, 0.0, 1.0]])).reshape(3, 2)
    tensor([[1., 2.],
            [3., 4.],
            [5., 6.]], dtype=torch.float64)
    """

    outputs: int

    @property
    def size(self) -> int:
        return self.outputs * self.design.size

    @property
    def rows(self) -> int:
        return self.outputs * self.design.rows

    def __iter__(self) -> Iterator[Part]:
        return (self._shared(part) for part in self.design)

    def _shared(self, part: Part) -> Part:
        def forward(v: Tensor) -> Tensor:
            images = part.forward(v.reshape(len(v) * self.outputs, self.design.size))
            return images.reshape(len(v), self.outputs, part.rows).mT.flatten(1)

        def back(u: Tensor) -> Tensor:
            columns = u.reshape(len(u), part.rows, self.outputs).mT.flatten(0, 1)
            return part.back(columns).reshape(len(u), self.size)

        return OperatorPart(self.outputs * part.rows, forward, back)


def prior_root(prior: Tensor | OperatorDesign, size: int, device: torch.device) -> OperatorDesign:
    """Return S with S Sᵀ = A⁻¹ for the prior precision A of ``size`` weights: (P,), (P, P), or S itself.

    Raises:
        DataError: the shape is another one, or A is not symmetric and positive definite.
        NumericalError: the two functions of an ``OperatorDesign`` are not transposes of each other.
    """
    like = torch.empty(0, dtype=torch.float64, device=device)
    if isinstance(prior, OperatorDesign):
        if prior.rows != size:
            raise DataError(f"prior is an OperatorDesign with {prior.rows} rows; expected {size}, one for each weight.")
        root = feature_design(prior)
        assert isinstance(root, OperatorDesign)
        refuse_unpaired(root)
        return root
    a = _positive(prior, "prior", (f"({size},)", f"({size}, {size})"), ((size,), (size, size))).to(like)
    if a.ndim == 1:
        deviations = a.rsqrt()
        scale = lambda v: v * deviations
        return OperatorDesign(size, size, scale, scale, like)
    factor = _cholesky(a, "prior")
    return OperatorDesign(
        size,
        size,
        lambda v: torch.linalg.solve_triangular(factor, v, upper=False, left=False),  # v L⁻¹: rows of L⁻ᵀ v
        lambda u: torch.linalg.solve_triangular(factor.mT, u, upper=True, left=False),
        like,
    )


def noise_root(noise: Tensor, data: int, outputs: int, device: torch.device) -> NoiseRoot:
    """Return the roots of relative noise covariances: variances (n,) or (n, C), or matrices (n, C, C).

    Raises:
        DataError: the shape is another one, or a covariance is not symmetric and positive definite.
    """
    shapes = ((data,), (data, outputs), (data, outputs, outputs))
    b = _positive(noise, "noise", tuple(map(str, shapes)), shapes)
    b = b.to(device=device, dtype=torch.float64)
    if b.ndim == 3:
        return NoiseRoot(_cholesky(b, "noise"))
    return NoiseRoot((b[:, None] if b.ndim == 1 else b).sqrt().expand(data, outputs))


def relative_variances(noise: Tensor, outputs: Tensor) -> Tensor:
    """Return relative noise variances (B,) or (B, C) in the shape of the outputs (B, C); raise for others."""
    if isinstance(noise, Tensor) and noise.ndim > 2:
        raise DataError(
            f"noise has the shape {tuple(noise.shape)}; expected variances {tuple(outputs.shape[:1])} or "
            f"{tuple(outputs.shape)}. Add covariances to those of functions(features)."
        )
    return noise_root(noise, outputs.shape[0], outputs.shape[1], outputs.device).factor.square()


def _positive(value: Tensor, name: str, words: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return the tensor without gradients; raise unless it has one of the shapes and finite, positive entries.

    Off-diagonal entries of matrices may have either sign.
    """
    expected = f"expected a tensor of positive numbers {', '.join(words[:-1])} or of matrices {words[-1]}"
    if not isinstance(value, Tensor) or value.is_complex() or value.dtype == torch.bool:
        raise DataError(f"{name} is {seen(value)}; {expected}.")
    if tuple(value.shape) not in shapes:
        raise DataError(f"{name} has the shape {tuple(value.shape)}; {expected}.")
    value = value.detach()
    matrices = tuple(value.shape) == shapes[-1]
    positive = value.diagonal(dim1=-2, dim2=-1) if matrices else value
    if not bool(torch.isfinite(value).all()) or not bool((positive > 0).all()):
        least = f"the smallest variance or precision is {float(positive.min()):.3g}"
        raise DataError(f"{name} has entries that are not finite or not positive ({least}); {expected}.")
    return value


def _cholesky(matrix: Tensor, name: str) -> Tensor:
    """Return the lower Cholesky factor of symmetric matrices; raise unless they are symmetric and positive definite."""
    gap = float(((matrix - matrix.mT).abs().amax((-2, -1)) / matrix.abs().amax((-2, -1))).max())
    if gap > 1e-6:  # rounding of a matrix that was computed in float32
        raise DataError(
            f"{name} is not symmetric: entries differ from those of the transpose by {gap:.2g} of the largest; "
            "expected a symmetric matrix. Give (M + M.mT) / 2 if the difference is rounding."
        )
    factor, info = torch.linalg.cholesky_ex((matrix + matrix.mT) / 2)
    if bool((info != 0).any()):
        raise DataError(
            f"{name} is not positive definite; expected a matrix with positive eigenvalues. Add a small multiple of "
            "the identity if they are zero by rounding."
        )
    return factor
