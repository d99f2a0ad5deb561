"""The full curvature matrix, (P, P), its precision, and its sum over a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.core.memory import fitting, gathered, runs
from lapwing.core.schema import Array, Flag, semidefinite, symmetric
from lapwing.core.spectra import eigvalsh
from lapwing.core.state import Latest, State, saved
from lapwing.curvature.protocols import crossed, floored_by_layer, in_runs, row_products, weighted_sum
from lapwing.curvature.sweep import Sweep
from lapwing.errors import NumericalError, UnsupportedError
from lapwing.linalg.cholesky import cholesky, not_definite
from lapwing.linalg.gram import Gram, mirrored, symmetrise
from lapwing.networks.closed_form import ClosedForm
from lapwing.networks.jacobians import Block, LayerJacobians
from lapwing.networks.linear_jacobian import LinearJacobian
from lapwing.networks.network import Network
from lapwing.networks.selection import Selection
from lapwing.priors.bound import BoundPrior

COPIES = 5  # float64 numbers that a row of the Jacobian takes for each weight, while it is joined and whitened


@dataclass(frozen=True, eq=False)
class FullPrecision:
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
            for some in in_runs(jacobian, COPIES * self.selection.size, self.factor.device)
        )
        return gathered(parts, jacobian.batch)

    def _white_rows(self, jacobian: LayerJacobians) -> Tensor:
        """Return L⁻¹ Jᵀ as rows, (B K, P), in float64."""
        return self._whitened(jacobian.whole().flatten(0, 1))

    def _by_inputs(self, part: LinearJacobian, jacobian: LayerJacobians, full: bool) -> Tensor:
        """Return J Λ⁻¹ Jᵀ for one linear map at one position: S_cd = Σ_ij g_ci g_dj (aᵀ Σ_ij a).

        The inner forms are computed once for all outputs and only for i <= j: half of P² multiplications for
        each input instead of C P². In float64, as the sums are: under a weak prior the terms cancel.
        """
        a, g = part.a[0, :, 0].double(), part.g[0, :, :, 0].double()
        batch, d_in = a.shape
        d_out = g.shape[-1]
        (block,) = jacobian.layout
        blocks = self._covariances.at(block, lambda: self._arranged(block))  # (pairs, d_in, d_in)
        first, second = torch.triu_indices(d_out, d_out, device=a.device)
        forms = a.new_empty(batch, d_out, d_out)
        for pairs in runs(len(first), a.element_size() * batch * d_in, a.device):
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

    def _arranged(self, block: Block) -> Tensor:
        """Return the blocks Σ_ij for i <= j of one linear map, (pairs, d_in, d_in), symmetrised in the inputs."""
        first, second = _pair_positions(block, self.selection, self.factor.device)
        tall = self.covariance[first.unsqueeze(-1), second.unsqueeze(-2)]
        return 0.5 * (tall + tall.mT)

    def cross(self, jacobian: LayerJacobians, other: LayerJacobians | None = None) -> Tensor:
        numbers = COPIES * self.selection.size
        return crossed(self._white_rows, jacobian, other, numbers, self.factor.device).to(jacobian.dtype)

    def sample(self, eps: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor.mT, eps.to(self.factor).mT, upper=True).mT.to(eps)

    def adjoint(self, v: Tensor) -> Tensor:
        return self._whitened(v).to(v)

    def _whitened(self, rows: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor, rows.to(self.factor).mT, upper=False).mT

    def solve(self, v: Tensor) -> Tensor:
        return torch.cholesky_solve(v.to(self.factor).mT, self.factor).mT.to(v)

    def variances(self) -> Tensor:
        return self.covariance.diagonal()


@saved
@dataclass(frozen=True, eq=False)
class FullCurvature:
    """H at unit dispersion, (P, P)."""

    matrix: Tensor
    selection: Selection
    definite: bool = True  # a GGN; a Hessian may have negative eigenvalues
    preconditions: ClassVar[bool] = True

    def __add__(self, other: FullCurvature) -> FullCurvature:
        if self.selection.names != other.selection.names or self.matrix.shape != other.matrix.shape:
            raise UnsupportedError("these curvatures belong to different networks or weights and do not add.")
        return FullCurvature(self.matrix + other.matrix, self.selection, self.definite and other.definite)

    def mixed(self, others: Sequence[FullCurvature], weights: Tensor) -> FullCurvature:
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

    def precision(self, phi: Tensor, prior: BoundPrior) -> FullPrecision:
        matrix = self.matrix.double() / phi.double()
        matrix.diagonal().add_(prior.vector.double())
        return FullPrecision(cholesky(matrix, self._name), self.selection)

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
        return floored_by_layer(self.matrix.diagonal().double(), self.selection)

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
        part = jacobians if isinstance(jacobians, ClosedForm) else single_map(jacobians)
        if part is not None:
            pairs = pairs or _PairSums()
            pairs.add(part)
            continue
        assert not isinstance(jacobians, ClosedForm)
        gram = gram or Gram(size, torch.float64, network.device)
        for some in in_runs(jacobians, COPIES * size, network.device):
            gram.add(some.whole().flatten(0, 1), exact=True)
    own = [None if gram is None else gram.total(), None if pairs is None else pairs.value()]
    outer, of_pairs = sweep.processes.sum(own)
    parts = [] if outer is None else [mirrored(outer)]
    if of_pairs is not None:
        if not sweep.processes.alone:  # the order of the sum is not the same for all entries
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

    def add(self, part: LinearJacobian | ClosedForm) -> None:
        a = part.a[0].flatten(0, 1).double()
        d_out = part.diagonal.shape[-1] if isinstance(part, ClosedForm) else part.g.shape[-1]
        first, second = torch.triu_indices(d_out, d_out, device=a.device)
        most = fitting(self.ROWS, 3 * a.element_size() * d_out**2, a.device)
        for start in range(0, len(a), most):
            rows = slice(start, start + most)
            if isinstance(part, ClosedForm):
                weights = part.pairs(rows, first, second)
            else:
                g = part.g[0, :, rows, 0].transpose(0, 1).double()  # (rows, K, d_out)
                weights = torch.bmm(g.mT, g)[:, first, second]
            self._inputs.append(a[rows])
            self._weights.append(weights)
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
    for part in runs(len(weights), left.element_size() * rows * width, left.device):
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
