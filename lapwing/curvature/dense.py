"""Curvature of all weights together: the full matrix, one of low rank, and the Hessian."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.curvature.base import (
    Curvature,
    Precision,
    Sweep,
    cross_products,
    floor_by_layer,
    in_runs,
    row_products,
    weighted_sum,
)
from lapwing.curvature.kronecker import BlockwisePrecision, prior_precision
from lapwing.data.batches import Data
from lapwing.data.inputs import Inputs, check_finite
from lapwing.errors import FileError, NumericalError, UnsupportedError
from lapwing.likelihoods.base import Likelihood, as_count, weighted_count, weighted_loss
from lapwing.linalg.dense import Gram, cholesky, eigh, eigvalsh, mirror, not_definite, svd, symmetrise
from lapwing.networks.forward import raw_output, recording, with_output_dim
from lapwing.networks.graph import read_graph
from lapwing.networks.jacobians import Block, small_results_budget
from lapwing.networks.linear_jacobian import HeadGGN, LinearJacobian
from lapwing.networks.network import Network
from lapwing.networks.passes import vjp
from lapwing.networks.pull import seed_by_seed
from lapwing.networks.selection import Selection
from lapwing.networks.tangent import LayerJacobians
from lapwing.priors import BoundPrior
from lapwing.problem import Statistics, sample_count
from lapwing.runtime.memory import batch_size_for, chunks, concat_chunks
from lapwing.runtime.settings import Latest
from lapwing.runtime.states import ROUNDING, Array, Flag, State, saved, semidefinite, symmetric
from lapwing.runtime.threads import math_attention

NUMBERS_OF_ROW = 5  # float64 numbers that a row of the Jacobian takes for each weight, while it is joined and whitened


@dataclass(frozen=True, eq=False)
class FullPrecision(Precision):
    """Λ = H/φ + A by its Cholesky factor, float64."""

    factor: Tensor
    selection: Selection

    def logdet(self) -> Tensor:
        return 2 * self.factor.diagonal().log().sum()

    @cached_property
    def covariance(self) -> Tensor:
        return torch.cholesky_inverse(self.factor)

    def quadratic(self, jacobian: LayerJacobians, full: bool = True) -> Tensor:
        linear_map = single_map(jacobian)
        if linear_map is not None:
            return self._by_inputs(linear_map, jacobian, full)
        parts = (
            row_products(self._white_rows(some).unflatten(0, (some.batch, jacobian.tokens, -1)), full).to(some.dtype)
            for some in in_runs(jacobian, NUMBERS_OF_ROW * self.selection.size, self.factor.device)
        )
        return concat_chunks(parts, jacobian.batch)

    def _white_rows(self, jacobian: LayerJacobians) -> Tensor:
        """Return L⁻¹ Jᵀ as rows, (B K, P), in float64."""
        return self._whiten(jacobian.whole().flatten(0, 1))

    def _by_inputs(self, part: LinearJacobian, jacobian: LayerJacobians, full: bool) -> Tensor:
        """Return J Λ⁻¹ Jᵀ for one linear map at one position: S_cd = Σ_ij g_ci g_dj (aᵀ Σ_ij a).

        The inner forms are computed once for all outputs and only for i <= j: half of P² multiplications for
        each input instead of C P². In float64, as the sums are: under a weak prior the terms cancel.
        """
        a, g = part.a[0, :, 0].double(), part.g[0, :, :, 0].double()
        batch, d_in = a.shape
        d_out = g.shape[-1]
        (block,) = jacobian.layout
        blocks = self._covariances.at(block, lambda: self._arrange(block))  # (pairs, d_in, d_in)
        first, second = torch.triu_indices(d_out, d_out, device=a.device)
        forms = a.new_empty(batch, d_out, d_out)
        for pairs in chunks(len(first), a.element_size() * batch * d_in, a.device):
            products = torch.matmul(a, blocks[pairs])  # (pairs, B, d_in)
            value = torch.einsum("pbi,bi->bp", products, a)
            forms[:, first[pairs], second[pairs]] = value
            forms[:, second[pairs], first[pairs]] = value
        rows = g.transpose(0, 1)  # (B, K, d_out)
        left = torch.bmm(rows, forms)
        if not full:
            return (left * rows).sum(-1).reshape(batch, jacobian.tokens, -1).to(part.g.dtype)
        left, rows = (t.reshape(batch, jacobian.tokens, -1, d_out) for t in (left, rows))
        return (left @ rows.mT).to(part.g.dtype)

    @cached_property
    def _covariances(self) -> Latest[Block, Tensor]:
        return Latest()

    def _arrange(self, block: Block) -> Tensor:
        """Return the blocks Σ_ij for i <= j of one linear map, (pairs, d_in, d_in), symmetrised in the inputs."""
        first, second = _pair_positions(block, self.selection, self.factor.device)
        tall = self.covariance[first.unsqueeze(-1), second.unsqueeze(-2)]
        return 0.5 * (tall + tall.mT)

    def cross(self, jacobian: LayerJacobians, other: LayerJacobians | None = None) -> Tensor:
        numbers = NUMBERS_OF_ROW * self.selection.size
        return cross_products(self._white_rows, jacobian, other, numbers, self.factor.device).to(jacobian.dtype)

    def sample(self, eps: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor.mT, eps.to(self.factor).mT, upper=True).mT.to(eps)

    def adjoint(self, v: Tensor) -> Tensor:
        return self._whiten(v).to(v)

    def _whiten(self, rows: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor, rows.to(self.factor).mT, upper=False).mT

    def solve(self, v: Tensor) -> Tensor:
        return torch.cholesky_solve(v.to(self.factor).mT, self.factor).mT.to(v)

    def variances(self) -> Tensor:
        return self.covariance.diagonal()


@saved
@dataclass(frozen=True, eq=False)
class FullCurvature(Curvature):
    """H at unit dispersion, (P, P)."""

    matrix: Tensor
    selection: Selection
    definite: bool = True  # a GGN; a Hessian may have negative eigenvalues
    preconditions: ClassVar[bool] = True

    def __add__(self, other: FullCurvature) -> FullCurvature:
        if self.selection.names != other.selection.names or self.matrix.shape != other.matrix.shape:
            raise UnsupportedError("these curvatures belong to different networks or weights and do not add.")
        return FullCurvature(self.matrix + other.matrix, self.selection, self.definite and other.definite)

    def sum_with(self, others: Sequence[FullCurvature], weights: Tensor) -> FullCurvature:
        """Return the weighted sum of this curvature and the others, differentiable in the weights (1 + others,)."""
        return replace(self, matrix=weighted_sum([self.matrix, *(other.matrix for other in others)], weights))

    @cached_property
    def _spectra(self) -> Latest[Tensor, Tensor]:
        """The eigenvalues for the last scale of a prior, computed once for all its precisions and dispersions."""
        return Latest(torch.equal)

    def _eigenvalues(self, scale: Tensor | None) -> Tensor:
        """Return the eigenvalues of H, or of D^-½ H D^-½ for a scale D (P,)."""
        matrix = self.matrix.double()
        if scale is not None:
            root = scale.double().rsqrt()
            matrix = root[:, None] * matrix * root
        values = eigvalsh(matrix)
        return values.clamp_min(0) if self.definite else values

    @cached_property
    def _root(self) -> Tensor:
        """Rows W (r, P) with H = Wᵀ W, up to eigenvalues that are rounding."""
        values, vectors = eigh(self.matrix.double())
        kept = values > len(values) * torch.finfo(torch.float64).eps * values[-1]
        return (vectors[:, kept] * values[kept].sqrt()).mT

    def precision(self, phi: Tensor, prior: BoundPrior) -> FullPrecision:
        """Return Λ. Where the noise is so small that rounding of H drowns A, its factor is that of the rows of a root.

        A network that interpolates its data has such noise. The matrix itself may then be indefinite.
        """
        matrix, diagonal = self.matrix.double() / phi.double(), prior.vector.double()
        matrix.diagonal().add_(diagonal)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if int(failed) and self.definite and bool(torch.isfinite(matrix).all()) and bool((diagonal > 0).all()):
            rows = torch.cat([self._root / phi.double().sqrt(), diagonal.sqrt().diag()])
            upper = torch.linalg.qr(rows, mode="r").R
            return FullPrecision((upper * upper.diagonal().sign()[:, None]).mT, self.selection)
        return FullPrecision(cholesky(matrix, self._name) if int(failed) else factor, self.selection)

    @property
    def _name(self) -> str:
        names = self.selection.names
        return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} ({self.selection.size} weights)"

    def logdet(self, phi: Tensor, prior: BoundPrior) -> Tensor:
        """Return the log-determinant of H/φ + A: from the eigenvalues for a prior with one number, else by Cholesky."""
        if not prior.is_single:
            return self.precision(phi, prior).logdet()
        scale = prior.values.new_ones(()) if prior.scale is None else prior.scale
        eigenvalues = self._spectra.at(scale, lambda: self._eigenvalues(prior.scale))
        values = eigenvalues / phi.double() + prior.values.double()
        smallest = float(values.detach().min())
        if smallest <= 0:
            raise NumericalError(not_definite(self._name, smallest))
        return values.log().sum() + scale.double().log().sum()

    def diagonal(self) -> Tensor:
        return floor_by_layer(self.matrix.diagonal().double(), self.selection)

    def state(self) -> State:
        return State("FullCurvature", {"definite": self.definite}, {"matrix": self.matrix})

    @classmethod
    def from_state(cls, state: State, network: Network) -> FullCurvature:
        check = semidefinite if state.settings.get("definite") is True else symmetric
        fields = state.read(matrix=Array(("P", "P"), also=check), definite=Flag())
        return cls(selection=network.selection, **fields)


def single_map(jacobian: LayerJacobians) -> LinearJacobian | None:
    """Return the only block of the Jacobian if it is one linear map at one position with all its weights, else None."""
    if len(jacobian.layout) != 1 or jacobian.selection.index is not None:
        return None
    return jacobian.parts[0]().single_map()


def full_curvature(sweep: Sweep, network: Network) -> FullCurvature:
    """Return Σ JᵀJ over a pass, summed in float64, so that a prior far below the largest eigenvalue is not lost.

    A single linear map uses the outer products of its inputs instead, and needs no seeds if it is the last layer and
    they are not drawn. Memory: 8 P² bytes and the Jacobian of one chunk; nearly twice that for a single linear map,
    whose pairs are put in order at the end.
    """
    size = network.selection.size
    gram: Gram | None = None
    pairs: _PairSums | None = None
    for jacobians in sweep.runs(2 * size):
        part = jacobians if isinstance(jacobians, HeadGGN) else single_map(jacobians)
        if part is not None:
            pairs = pairs or _PairSums()
            pairs.add(part)
            continue
        assert not isinstance(jacobians, HeadGGN)
        gram = gram or Gram(size, torch.float64, network.device)
        for some in in_runs(jacobians, NUMBERS_OF_ROW * size, network.device):
            gram.add(some.whole().flatten(0, 1), exact=True)
    own = [None if gram is None else gram.total(), None if pairs is None else pairs.value()]
    outer, of_pairs = sweep.processes.sum(own)
    parts = [] if outer is None else [mirror(outer)]
    if of_pairs is not None:
        if not sweep.processes.is_single_process:  # the order of the sum is not the same for all entries
            symmetrise(of_pairs)
        parts.append(_spread_pairs(of_pairs, network))
    return FullCurvature(reduce(Tensor.add_, parts), network.selection)


class _PairSums:
    """The sum Σ_b (Σ_k g_ki g_kj) a aᵀ for i <= j, (pairs, d_in, d_in), float64: a K-th of the work of JᵀJ.

    Rows are collected until there are enough of them for an efficient product. The result is kept in strips of inputs;
    each strip holds only the columns from its own start on, since the rest follows by symmetry.
    """

    ROWS = 512
    STRIP = 32

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._strips: list[Tensor] = []  # (pairs, strip, d_in - start)

    def add(self, part: LinearJacobian | HeadGGN) -> None:
        a = part.a[0].flatten(0, 1).double()
        d_out = part.widths[0]
        first, second = torch.triu_indices(d_out, d_out, device=a.device)
        most = batch_size_for(self.ROWS, 3 * a.element_size() * d_out**2, a.device)
        for start in range(0, len(a), most):
            rows = slice(start, start + most)
            self._inputs.append(a[rows])
            self._weights.append(part.pairs(rows, first, second))
            if sum(len(x) for x in self._inputs) >= most:
                self._flush()

    def _flush(self) -> None:
        if not self._inputs:
            return
        a, w = torch.cat(self._inputs), torch.cat(self._weights).mT.contiguous()
        self._inputs, self._weights = [], []
        size = a.shape[1]
        if not self._strips:
            starts = range(0, size, self.STRIP)
            self._strips = [a.new_zeros(len(w), min(self.STRIP, size - start), size - start) for start in starts]
        columns = a.mT.contiguous()
        for k, strip in enumerate(self._strips):
            start = k * self.STRIP
            _add_weighted(strip, columns[start : start + self.STRIP], w, a[:, start:])

    def value(self) -> Tensor:
        self._flush()
        pairs, _, size = self._strips[0].shape
        whole = self._strips[0].new_empty(pairs, size, size)
        for k, strip in enumerate(self._strips):
            start = k * self.STRIP
            whole[:, start : start + self.STRIP, start:] = strip
            whole[:, start:, start : start + self.STRIP] = strip.mT
        return whole


def _add_weighted(total: Tensor, left: Tensor, weights: Tensor, right: Tensor) -> None:
    """Add Σ_b weights_pb left_ib right_bj to ``total`` (pairs, d_left, d_right)."""
    rows, (width, last) = left.shape[1], total.shape[1:]
    for part in chunks(len(weights), left.element_size() * rows * width, left.device):
        tall = weights[part].unsqueeze(1) * left  # (p, d_left, B)
        total[part].view(-1, last).addmm_(tall.view(-1, rows), right)


def _spread_pairs(pairs: Tensor, network: Network) -> Tensor:
    """Return the matrix (P, P) in the order of theta from its blocks for i <= j."""
    (block,) = network.layout
    first, second = _pair_positions(block, network.selection, pairs.device)
    matrix = pairs.new_empty(network.selection.size, network.selection.size)
    matrix[first.unsqueeze(-1), second.unsqueeze(-2)] = pairs
    matrix[second.unsqueeze(-1), first.unsqueeze(-2)] = pairs
    return matrix


def _pair_positions(block: Block, selection: Selection, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions in theta of the weights of outputs i and j of one linear map, for i <= j: (pairs, d_in)."""
    order = block.arrange(selection.split(torch.arange(selection.size, dtype=torch.float64)))[0].long().to(device)
    first, second = torch.triu_indices(block.d_out, block.d_out, device=device)
    return order[first], order[second]


CANCELLED_SHARE = 1e-8  # part of the prior variance below which a variance is not computed as a difference


class WeightRows:
    """r vectors of P weights, W (r, P): stored, or computed by the network."""

    def gram(self, prior: BoundPrior) -> Tensor:
        """Return W A⁻¹ Wᵀ, (r, r), differentiable in the precisions."""
        raise NotImplementedError

    def pull(self, jacobian: LayerJacobians, prior: BoundPrior) -> Tensor:
        """Return W A⁻¹ Jᵀ, (r, B K)."""
        raise NotImplementedError

    def times(self, v: Tensor) -> Tensor:
        """Return v Wᵀ for v (n, P): (n, r)."""
        raise NotImplementedError

    def combine(self, c: Tensor) -> Tensor:
        """Return c W for c (n, r): (n, P)."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class StoredRows(WeightRows):
    """The vectors W = diag(sizes) · vectors (r, P) as a tensor, with their sizes (r,) apart: W itself is not formed."""

    vectors: Tensor
    sizes: Tensor

    def gram(self, prior: BoundPrior) -> Tensor:
        v, precision = self.vectors, prior.vector.to(self.vectors)
        parts = chunks(v.shape[1], 2 * v.element_size() * len(v), v.device)
        total = reduce(torch.add, ((v[:, part] / precision[part]) @ v[:, part].mT for part in parts))
        return self.sizes[:, None] * total * self.sizes

    def pull(self, jacobian: LayerJacobians, prior: BoundPrior) -> Tensor:
        v, precision = self.vectors, prior.vector.to(self.vectors)
        each = 3 * v.element_size() * v.shape[1]
        parts = (jacobian.jvp(v[part] / precision).to(v).flatten(1) for part in chunks(len(v), each, v.device))
        return concat_chunks(parts, len(v)) * self.sizes[:, None]

    def times(self, v: Tensor) -> Tensor:
        return (v @ self.vectors.mT) * self.sizes

    def combine(self, c: Tensor) -> Tensor:
        return (c * self.sizes) @ self.vectors


@dataclass(frozen=True, eq=False)
class LowRankPrecision(Precision):
    r"""Λ = Wᵀ W + A with W (r, P), by the Woodbury identity.

    $$ \Lambda^{-1} = A^{-1} - A^{-1} W^\top (I + W A^{-1} W^\top)^{-1} W A^{-1} $$
    """

    prior: BoundPrior
    rows: WeightRows
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
        parts = (
            self._subtract_data(self._prior_only.quadratic(some, full), some, full).to(jacobian.dtype) for some in each
        )
        return concat_chunks(parts, jacobian.batch)

    def cross(self, jacobian: LayerJacobians, other: LayerJacobians | None = None) -> Tensor:
        double = jacobian.double()
        if other is None:
            return self._subtract_data(self._prior_only.cross(double), double, True).to(jacobian.dtype)
        second = other.double()
        pulled, across = self._pull(double), self._pull(second)
        if self._cancels(double, pulled) or self._cancels(second, across):
            covariance = cross_products(self._root_rows, double, second, self._numbers, pulled.device)
        else:
            covariance = self._prior_only.cross(double, second).addmm_(pulled.mT, across, alpha=-1)
        return covariance.to(jacobian.dtype)

    def _pull(self, jacobian: LayerJacobians) -> Tensor:
        """Return the root of the part that the data take off the prior covariance, (r, B K)."""
        return torch.linalg.solve_triangular(self._inner, self.rows.pull(jacobian, self.prior), upper=False)

    def _cancels(self, jacobian: LayerJacobians, pulled: Tensor) -> bool:
        """Return whether a variance would be a difference that is mostly rounding."""
        prior = self._prior_only.quadratic(jacobian, False).reshape(-1)
        return bool((prior - pulled.square().sum(0) < CANCELLED_SHARE * prior).any())

    def _subtract_data(self, prior: Tensor, jacobian: LayerJacobians, full: bool) -> Tensor:
        """Return J Λ⁻¹ Jᵀ in the shape of ``prior``, the covariance J A⁻¹ Jᵀ or, unless full, its diagonal.

        Both terms are float64: their difference cancels if the data leave little variance.
        """
        lead = prior.shape[:-1] if full else prior.shape
        prior_variances = (prior.diagonal(dim1=-2, dim2=-1) if full else prior).clone()
        covariance = prior.sub_(row_products(self._pull(jacobian).mT.reshape(*lead, -1), full))
        variances = covariance.diagonal(dim1=-2, dim2=-1) if full else covariance
        if not bool((variances < CANCELLED_SHARE * prior_variances).any()):
            return covariance
        if len(lead) == 1:  # between all samples
            return cross_products(self._root_rows, jacobian, None, self._numbers, covariance.device)
        parts = (
            row_products(self._root_rows(some).reshape(some.batch, *lead[1:], -1), full)
            for some in in_runs(jacobian, self._numbers, covariance.device)
        )
        return concat_chunks(parts, jacobian.batch)

    @property
    def _numbers(self) -> int:
        """The float64 numbers that ``_root_rows`` takes for each row."""
        return 6 * (self.selection.size + len(self._gram))

    def _root_rows(self, jacobian: LayerJacobians) -> Tensor:
        r"""Return rows (B K, P + r) whose products are J Λ⁻¹ Jᵀ: a sum of squares, which does not cancel.

        $$ J \Lambda^{-1} J^\top = \min_c |(J - c W) A^{-1/2}|^2 + |c|^2, \qquad
           c = J A^{-1} W^\top (I + W A^{-1} W^\top)^{-1} $$
        """
        c = torch.cholesky_solve(self.rows.pull(jacobian, self.prior), self._inner).mT
        rest = jacobian.whole().flatten(0, 1) - self.rows.combine(c)
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
        return v - self.rows.combine(self.rows.times(v * root) @ self._root_core) * root

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
        return (scaled - self.rows.combine(inner) * prior_variances).to(v)

    def variances(self) -> Tensor:
        prior_variances = self.prior.vector.double().reciprocal()
        eye = torch.eye(len(self._gram), dtype=self._gram.dtype, device=self._gram.device)
        rows = self.rows.combine(torch.linalg.solve_triangular(self._inner, eye, upper=False)) * prior_variances
        return prior_variances - rows.square().sum(0)


def isotropic_logdet(values: Tensor, phi: Tensor, prior: BoundPrior) -> Tensor:
    """Return the log-determinant of H/φ + A for one prior precision, from the nonzero eigenvalues of H."""
    alpha = prior.values.double()
    return prior.selection.size * alpha.log() + torch.log1p(values / (phi.to(values) * alpha)).sum()


@saved
@dataclass(frozen=True, eq=False)
class LowRankCurvature(Curvature):
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
        return isotropic_logdet(self.values.double(), phi, prior)

    def diagonal(self) -> Tensor:
        diagonal = self.values @ self.vectors.square()
        nonzero = diagonal > torch.finfo(diagonal.dtype).eps * diagonal.max()  # a dead layer has rounding, not zeros
        return floor_by_layer(torch.where(nonzero, diagonal, 0), self.selection)

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


def full_hessian(network: Network, likelihood: Likelihood, data: Data) -> tuple[FullCurvature, Statistics]:
    """Return the Hessian of the loss in the weights, by double backward for many rows at once, summed in float64."""
    if network.shift is not None:
        raise UnsupportedError("the Hessian exists at the trained weights only; use curvature='ggn'.")
    selection = network.selection
    tensors = network.parameters
    chosen = [tensors[name] for name in selection.names]
    total = torch.zeros(selection.size, selection.size, dtype=torch.float64, device=network.device)
    loss_sum, count = 0.0, 0.0
    for inputs, targets, weights in _parts(network, data):
        with math_attention, recording(tensors, selection.names, network.plain_kernels):
            raw = raw_output(network.replica, inputs)
            f = with_output_dim(raw)
            check_finite(f.detach(), "outputs of the network")
            y = likelihood.targets(f.detach(), targets)
            loss = weighted_loss(likelihood, f, y, weights).sum()
            grads = torch.autograd.grad(loss, chosen, create_graph=True, allow_unused=True, materialize_grads=True)
            gradient = selection.pick(torch.cat([g.reshape(-1) for g in grads]))
            if gradient.requires_grad:
                looped = seed_by_seed(read_graph(raw), raw, network.recurrent)
                _add_slopes(total, gradient, network.for_inputs(inputs), raw.shape[0], looped)
        loss_sum += float(loss.detach())
        count += float(weighted_count(likelihood, f.detach(), y, weights))
    (total,) = data.processes.sum([total])
    symmetrise(total)
    statistics = Statistics(loss_sum, as_count(count), network.output_shape[-1]).over(data.processes)
    return FullCurvature(total, selection, definite=False), statistics


def _parts(network: Network, data: Data) -> Iterator[tuple[Inputs, Tensor, Tensor | None]]:
    """Yield inputs, targets and weights in parts whose graph, and that of their gradients, fits the byte budget."""
    for batch in data.batches("Hessian", weighted=True):
        count, sizes = sample_count(network, batch), network.for_inputs(batch.inputs).footprint
        each = 4 * torch.finfo(network.dtype).bits // 8 * (sizes.graph + sizes.width)
        for rows in chunks(count, each, network.device):
            whole = rows == slice(0, count)
            inputs = batch.inputs if whole else network.take(batch.inputs, rows)
            yield inputs, batch.targets[rows], batch.weights_of(rows)


def _add_slopes(total: Tensor, gradient: Tensor, network: Network, batch: int, looped: bool) -> None:
    """Add ∂ gradient / ∂ θ to ``total``, as many rows at once as fit the byte budget; one by one if ``looped``."""
    size, width = len(gradient), 4 * batch * network.footprint.width  # forward, backward, and the gradients of both
    step = max(1, small_results_budget(network.device) // (gradient.element_size() * (2 * size + width)))
    rows = partial(vjp, network, gradient)
    for start in range(0, size, step):
        stop = min(start + step, size)
        seeds = torch.nn.functional.one_hot(torch.arange(start, stop, device=gradient.device), size)
        try:
            slopes = rows(seeds, looped)
        except (RuntimeError, NotImplementedError):  # an operation without a batching rule
            slopes = rows(seeds, True)
        total[start:stop] += slopes.double()
