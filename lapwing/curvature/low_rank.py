"""Curvature of low rank, and precisions that are a prior plus a low-rank part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lapwing.core.memory import gathered, runs
from lapwing.core.schema import ROUNDING, Array
from lapwing.core.spectra import eigh, svd
from lapwing.core.state import State, saved
from lapwing.curvature.blockwise import BlockwisePrecision, prior_precision
from lapwing.curvature.protocols import crossed, floored_by_layer, in_runs, row_products
from lapwing.errors import FileError, UnsupportedError
from lapwing.linalg.cholesky import cholesky
from lapwing.networks.jacobians import Block, LayerJacobians
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.priors.bound import BoundPrior

CANCELLED = 1e-8  # part of the prior variance below which a variance is not computed as a difference


class Rows(Protocol):
    """r vectors of P weights, W (r, P): stored, or computed by the network."""

    def gram(self, prior: BoundPrior) -> Tensor:
        """Return W A⁻¹ Wᵀ, (r, r), differentiable in the precisions."""
        ...

    def pulled(self, jacobian: LayerJacobians, prior: BoundPrior) -> Tensor:
        """Return W A⁻¹ Jᵀ, (r, B K)."""
        ...

    def times(self, v: Tensor) -> Tensor:
        """Return v Wᵀ for v (n, P): (n, r)."""
        ...

    def combined(self, c: Tensor) -> Tensor:
        """Return c W for c (n, r): (n, P)."""
        ...


@dataclass(frozen=True, eq=False)
class StoredRows:
    """The vectors W = diag(sizes) · vectors (r, P) as a tensor, with their sizes (r,) apart: W itself is not formed."""

    vectors: Tensor
    sizes: Tensor

    def gram(self, prior: BoundPrior) -> Tensor:
        v, precision = self.vectors, prior.vector.to(self.vectors)
        parts = runs(v.shape[1], 2 * v.element_size() * len(v), v.device)
        total = reduce(torch.add, ((v[:, part] / precision[part]) @ v[:, part].mT for part in parts))
        return self.sizes[:, None] * total * self.sizes

    def pulled(self, jacobian: LayerJacobians, prior: BoundPrior) -> Tensor:
        v, precision = self.vectors, prior.vector.to(self.vectors)
        each = 3 * v.element_size() * v.shape[1]
        parts = (jacobian.jvp(v[part] / precision).to(v).flatten(1) for part in runs(len(v), each, v.device))
        return gathered(parts, len(v)) * self.sizes[:, None]

    def times(self, v: Tensor) -> Tensor:
        return (v @ self.vectors.mT) * self.sizes

    def combined(self, c: Tensor) -> Tensor:
        return (c * self.sizes) @ self.vectors


@dataclass(frozen=True, eq=False)
class LowRankPrecision:
    r"""Λ = Wᵀ W + A with W (r, P), by the Woodbury identity.

    $$ \Lambda^{-1} = A^{-1} - A^{-1} W^\top (I + W A^{-1} W^\top)^{-1} W A^{-1} $$
    """

    prior: BoundPrior
    rows: Rows
    layout: tuple[Block, ...]
    selection: Selection

    @cached_property
    def _gram(self) -> Tensor:
        return self.rows.gram(self.prior)

    @cached_property
    def _inner(self) -> Tensor:
        """The Cholesky factor of I + W A⁻¹ Wᵀ, (r, r)."""
        inner = self._gram + torch.eye(len(self._gram), dtype=self._gram.dtype, device=self._gram.device)
        return cholesky(inner, "the low-rank part")

    def logdet(self) -> Tensor:
        return self.prior.logdet().double() + 2 * self._inner.diagonal().log().sum()

    @cached_property
    def _prior_only(self) -> BlockwisePrecision:
        return prior_precision(self.prior, self.layout, self.selection)

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        classes = jacobian.outputs // jacobian.tokens if full else 1
        numbers = 4 * (len(self._gram) + classes)
        if jacobian.stream is None:  # the largest block is copied and scaled
            rows, itemsize = jacobian.batch * jacobian.outputs, torch.finfo(jacobian.dtype).bits // 8
            numbers += 3 * max(part.nbytes for _, part in jacobian) // (rows * itemsize)
        each = (some.double() for some in in_runs(jacobian, numbers, self._gram.device))
        parts = (self._reduced(self._prior_only.quadratic(some, full), some, full).to(jacobian.dtype) for some in each)
        return gathered(parts, jacobian.batch)

    def cross(self, jacobian: LayerJacobians, other: LayerJacobians | None = None) -> Tensor:
        double = jacobian.double()
        if other is None:
            return self._reduced(self._prior_only.cross(double), double, True).to(jacobian.dtype)
        second = other.double()
        pulled, across = self._pulled(double), self._pulled(second)
        if self._cancels(double, pulled) or self._cancels(second, across):
            covariance = crossed(self._root_rows, double, second, self._numbers, pulled.device)
        else:
            covariance = self._prior_only.cross(double, second).addmm_(pulled.mT, across, alpha=-1)
        return covariance.to(jacobian.dtype)

    def _pulled(self, jacobian: LayerJacobians) -> Tensor:
        """Return the root of the part that the data take off the prior covariance, (r, B K)."""
        return torch.linalg.solve_triangular(self._inner, self.rows.pulled(jacobian, self.prior), upper=False)

    def _cancels(self, jacobian: LayerJacobians, pulled: Tensor) -> bool:
        """Return whether a variance would be a difference that is mostly rounding."""
        prior = self._prior_only.quadratic(jacobian, False).reshape(-1)
        return bool((prior - pulled.square().sum(0) < CANCELLED * prior).any())

    def _reduced(self, prior: Tensor, jacobian: LayerJacobians, full: bool) -> Tensor:
        """Return J Λ⁻¹ Jᵀ in the shape of ``prior``, the covariance J A⁻¹ Jᵀ or, unless full, its diagonal.

        Both terms are float64: their difference cancels if the data leave little variance.
        """
        lead = prior.shape[:-1] if full else prior.shape
        prior_variances = (prior.diagonal(dim1=-2, dim2=-1) if full else prior).clone()
        covariance = prior.sub_(row_products(self._pulled(jacobian).mT.reshape(*lead, -1), full))
        variances = covariance.diagonal(dim1=-2, dim2=-1) if full else covariance
        if not bool((variances < CANCELLED * prior_variances).any()):
            return covariance
        if len(lead) == 1:  # between all samples
            return crossed(self._root_rows, jacobian, None, self._numbers, covariance.device)
        parts = (
            row_products(self._root_rows(some).reshape(some.batch, *lead[1:], -1), full)
            for some in in_runs(jacobian, self._numbers, covariance.device)
        )
        return gathered(parts, jacobian.batch)

    @property
    def _numbers(self) -> int:
        """How many float64 numbers ``_root_rows`` takes for each row."""
        return 6 * (self.selection.size + len(self._gram))

    def _root_rows(self, jacobian: LayerJacobians) -> Tensor:
        r"""Return rows (B K, P + r) whose products are J Λ⁻¹ Jᵀ: a sum of squares, which does not cancel.

        $$ J \Lambda^{-1} J^\top = \min_c |(J - c W) A^{-1/2}|^2 + |c|^2, \qquad
           c = J A^{-1} W^\top (I + W A^{-1} W^\top)^{-1} $$
        """
        c = torch.cholesky_solve(self.rows.pulled(jacobian, self.prior), self._inner).mT
        rest = jacobian.whole().flatten(0, 1) - self.rows.combined(c)
        return torch.cat([rest * self.prior.vector.to(rest).rsqrt(), c], 1)

    def sample(self, eps: Tensor) -> Tensor:
        root = self.prior.vector.double().rsqrt()
        return root * self._root(eps.to(root), root)

    def adjoint(self, v: Tensor) -> Tensor:
        root = self.prior.vector.double().rsqrt()
        return self._root(root * v.to(root), root)

    def _root(self, v: Tensor, root: Tensor) -> Tensor:
        """Apply the symmetric root of (I + Yᵀ Y)⁻¹, with Y = W A^-½ and Y Yᵀ = E (s² - 1) Eᵀ.

        It is v - Yᵀ E (s (s + 1))⁻¹ Eᵀ Y v.
        """
        return v - self.rows.combined(self.rows.times(v * root) @ self._root_core) * root

    @cached_property
    def _root_core(self) -> Tensor:
        """E (s (s + 1))⁻¹ Eᵀ, (r, r)."""
        values, basis = eigh(self._gram)
        s = (1 + values.clamp_min(0)).sqrt()
        return (basis / (s * (s + 1))) @ basis.mT

    def solve(self, v: Tensor) -> Tensor:
        prior_variances = self.prior.vector.double().reciprocal()
        scaled = v.to(prior_variances) * prior_variances
        inner = torch.cholesky_solve(self.rows.times(scaled).mT, self._inner).mT
        return (scaled - self.rows.combined(inner) * prior_variances).to(v)

    def variances(self) -> Tensor:
        prior_variances = self.prior.vector.double().reciprocal()
        eye = torch.eye(len(self._gram), dtype=self._gram.dtype, device=self._gram.device)
        rows = self.rows.combined(torch.linalg.solve_triangular(self._inner, eye, upper=False)) * prior_variances
        return prior_variances - rows.square().sum(0)


@saved
@dataclass(frozen=True, eq=False)
class LowRankCurvature:
    """H ≈ Uᵀ S U at unit dispersion: ``values`` S (r,), orthonormal ``vectors`` U (r, P) as rows.

    ``residual`` is the error of the eigenpairs, zero if they are exact.
    """

    values: Tensor
    vectors: Tensor
    layout: tuple[Block, ...]
    selection: Selection
    residual: float = 0.0
    preconditions: ClassVar[bool] = True

    def __add__(self, other: LowRankCurvature) -> LowRankCurvature:
        """Return the exact sum of both low-rank matrices. Its rank is at most the sum of the ranks."""
        if self.selection.names != other.selection.names:
            raise UnsupportedError("these curvatures belong to different networks or weights and do not add.")
        tall = torch.cat([c.values.sqrt()[:, None] * c.vectors for c in (self, other)])
        _, singular, right = svd(tall)
        nonzero = singular > 1e2 * torch.finfo(tall.dtype).eps * singular[0]
        residual = max(self.residual, other.residual)
        return replace(self, values=singular.square()[nonzero], vectors=right[nonzero], residual=residual)

    def precision(self, phi: Tensor, prior: BoundPrior) -> LowRankPrecision:
        sizes = (self.values / phi.to(self.values)).sqrt()
        return LowRankPrecision(prior, StoredRows(self.vectors, sizes), self.layout, self.selection)

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Return the log-determinant of H/φ + A; for one precision from the eigenvalues alone."""
        if not prior.is_isotropic:
            return self.precision(phi, prior).logdet()
        alpha, values = prior.values.double(), self.values.double()
        return self.selection.size * alpha.log() + torch.log1p(values / (phi.to(values) * alpha)).sum()

    def diagonal(self) -> Tensor:
        diagonal = self.values @ self.vectors.square()
        nonzero = diagonal > torch.finfo(diagonal.dtype).eps * diagonal.max()  # a dead layer has rounding, not zeros
        return floored_by_layer(torch.where(nonzero, diagonal, 0), self.selection)

    def state(self) -> State:
        residual = torch.tensor(self.residual, dtype=torch.float64)
        return State("LowRankCurvature", tensors={"values": self.values, "vectors": self.vectors, "residual": residual})

    @classmethod
    def from_state(cls, state: State, network: Network) -> LowRankCurvature:
        fields = state.read(values=Array(("r",), 0), vectors=Array(("r", "P")), residual=Array((), 0))
        values, residual = fields["values"], float(fields.pop("residual"))
        rows = values.sqrt()[:, None] * fields["vectors"]
        # Of directions with nearly no curvature, float32 leaves vectors that are not orthonormal; they do not matter.
        if len(values) and not bool((rows @ rows.mT - torch.diag(values)).abs().max() <= ROUNDING * values.max()):
            raise FileError("the vectors of the curvature are not orthonormal; expected orthonormal ones")
        return cls(**fields, layout=network.layout, selection=network.selection, residual=residual)
