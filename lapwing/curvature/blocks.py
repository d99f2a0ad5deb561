"""Blocks of a curvature: factors of Kronecker products, the diagonal of a block, and its whole matrix.

The factors of a Kronecker product: Gram matrices Σ x xᵀ as whole matrices, as their rows, or as their diagonal.

A factor of d numbers has d² entries and takes d³ to decompose. Which form it gets depends on d and on the number N of
rows x that are summed, by ``most_rows``:

* the rows themselves, where they are few: the matrix has rank N, and N² d finds its eigenvectors. Exact.
* the matrix, up to d = ``factor_limit``. Exact.
* the diagonal above that. It is exact for one-hot rows (embeddings), and an approximation otherwise.

The contracts of block structures, and the two that fit every block: its diagonal, and all of its matrix.

Each stores sums over the data at unit dispersion; ``precision`` adds prior and dispersion and factorises once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from lapwing.curvature.base import floor_values, row_products, weighted_sum
from lapwing.data.processes import Processes, assign_jobs
from lapwing.linalg.dense import (
    Axes,
    Basis,
    FullBasis,
    Gram,
    ThinBasis,
    cholesky,
    eigh_each,
    group_by_size,
    keeps_eigenvalues,
    mirror,
)
from lapwing.networks.jacobians import Block, BlockJacobian
from lapwing.networks.linear_jacobian import HeadGGN
from lapwing.networks.network import Network
from lapwing.priors import BlockPrior
from lapwing.runtime.states import Array, State, Stored, saved, semidefinite
from lapwing.runtime.threads import ProgressBar, is_showing

FACTOR_LIMIT = 8192  # half a gigabyte in float64, and minutes on a processor
MIN_KEPT_SIZE = 512  # numbers below which a matrix is decomposed in a fraction of a second, so its rows are not kept
LONG_WORK = 2e10  # multiplications from which decompositions are worth a progress bar


def most_rows(size: int, limit: int) -> int:
    """Return up to how many rows a factor of this size is kept as rows.

    Half of its size: with more, the matrix costs about the same. And no more numbers than the largest matrix has.
    """
    return 0 if size < MIN_KEPT_SIZE else min(size // 2, limit**2 // size)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenvalues (G, m) of a factor, one for each part of their basis."""

    values: Tensor
    basis: Basis


class Factor:
    """A sum of x xᵀ over rows x (d,), for each of G groups. Its eigenvectors have the network's ``dtype``."""

    dtype: torch.dtype
    exact: bool = True  # whether it is the whole sum; False for a diagonal of rows that are not one-hot
    is_diagonal: ClassVar[bool] = False  # whether it is known in its eigenbasis

    @cached_property
    def spectrum(self) -> Spectrum:
        """Its eigenvalues and their basis, computed once."""
        return decompose([self])[0]

    @property
    def numbers(self) -> Tensor:
        """The tensor that it is kept in."""
        raise NotImplementedError

    @property
    def order(self) -> int:
        """The order of the matrix to decompose."""
        return self.numbers.shape[1]

    def symmetric(self) -> Tensor:
        """Return the matrix to decompose."""
        raise NotImplementedError

    def spectrum_from(self, values: Tensor, vectors: Tensor) -> Spectrum:
        """Return the spectrum from the decomposition of ``symmetric``."""
        raise NotImplementedError

    def basis_of(self, vectors: Tensor) -> Basis:
        """Return the basis with these eigenvectors."""
        raise NotImplementedError

    def whiten(self, root: Tensor) -> Spectrum:
        """Return eigenvalues of R M R with R = diag(root), and their basis with R in it; root (G, d)."""
        raise NotImplementedError

    def diagonal(self) -> Tensor:
        """Return the diagonal, (G, d)."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """Return the matrices, (G, d, d). For small factors."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return its numbers for a file, named by their form."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class MatrixFactor(Factor):
    """A factor as a matrix, float64 (G, d, d)."""

    matrix: Tensor
    dtype: torch.dtype

    @property
    def numbers(self) -> Tensor:
        return self.matrix

    def symmetric(self) -> Tensor:
        return self.matrix

    def spectrum_from(self, values: Tensor, vectors: Tensor) -> Spectrum:
        return Spectrum(values.to(self.dtype), self.basis_of(vectors.to(self.dtype)))

    def basis_of(self, vectors: Tensor) -> FullBasis:
        return FullBasis(vectors)

    def whiten(self, root: Tensor) -> Spectrum:
        values, vectors = psd_eigh(root.unsqueeze(-1) * self.matrix * root.unsqueeze(-2))
        return self.spectrum_from(values, root.unsqueeze(-1) * vectors)

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def dense(self) -> Tensor:
        return self.matrix

    def tensors(self) -> dict[str, Tensor]:
        return {"": self.matrix}


@dataclass(frozen=True, eq=False)
class RowsFactor(Factor):
    """A factor as its rows x, (G, N, d) with N < d, which are few: M = Σ x xᵀ has no other eigenvectors."""

    rows: Tensor
    dtype: torch.dtype
    limit: int = FACTOR_LIMIT  # of the matrix that it becomes with more rows

    @property
    def numbers(self) -> Tensor:
        return self.rows

    def basis_of(self, vectors: Tensor) -> ThinBasis:
        return ThinBasis(vectors)

    def symmetric(self) -> Tensor:
        """Return the products of all pairs of rows, (G, N, N): the same eigenvalues as M without its zeros."""
        rows = self.rows.double()
        return rows @ rows.mT

    def spectrum_from(self, values: Tensor, vectors: Tensor, scale: Tensor | None = None) -> Spectrum:
        """Return the spectrum from the decomposition of ``symmetric``, with a scale of the basis if there is one.

        The vectors of M are sums of rows. They are made orthonormal from the largest eigenvalue down: rounding of large
        directions would drown the small ones.
        """
        sums = self.rows.to(vectors).mT @ vectors.flip(-1)
        basis = ThinBasis(torch.linalg.qr(sums).Q.to(self.dtype), scale)
        return Spectrum(torch.nn.functional.pad(values.flip(-1), (0, 1)).to(self.dtype), basis)

    def whiten(self, root: Tensor) -> Spectrum:
        white = RowsFactor(self.rows.double() * root.unsqueeze(-2), self.dtype)
        return white.spectrum_from(*psd_eigh(white.symmetric()), root.to(self.dtype))

    def diagonal(self) -> Tensor:
        return self.rows.square().sum(-2, dtype=torch.float64)

    def dense(self) -> Tensor:
        rows = self.rows.double()
        return rows.mT @ rows

    def tensors(self) -> dict[str, Tensor]:
        return {"_rows": self.rows}


@dataclass(frozen=True, eq=False)
class DiagonalFactor(Factor):
    """A factor as its diagonal, float64 (G, d)."""

    values: Tensor
    dtype: torch.dtype
    exact: bool = True
    is_diagonal: ClassVar[bool] = True

    @cached_property
    def spectrum(self) -> Spectrum:
        return Spectrum(self.values.to(self.dtype), Axes(exact=self.exact))

    def whiten(self, root: Tensor) -> Spectrum:
        return Spectrum((self.values * root.square()).to(self.dtype), Axes(root.to(self.dtype), self.exact))

    def diagonal(self) -> Tensor:
        return self.values

    def dense(self) -> Tensor:
        return torch.diag_embed(self.values)

    def tensors(self) -> dict[str, Tensor]:
        return {"" if self.exact else "_diagonal": self.values}


def sum_factors(factors: Sequence[Factor], weights: Tensor | None = None) -> Factor:
    """Return the sum of factors, or the sum with these weights, differentiable in them.

    It has the simplest form that is exact: rows while there are few, a diagonal of diagonals, else a matrix. If a
    factor is a diagonal that is not exact, or no factor is a matrix and one would be above the limit, it is a diagonal.
    """
    first = factors[0]
    weights = torch.ones(len(factors), dtype=torch.float64) if weights is None else weights
    rows = [factor for factor in factors if isinstance(factor, RowsFactor)]
    diagonals = [factor for factor in factors if factor.is_diagonal]
    if len(rows) == len(factors):
        count, size = sum(factor.order for factor in rows), rows[0].rows.shape[2]
        limit = min(factor.limit for factor in rows)  # one from a file does not know the limit of its method
        if count <= most_rows(size, limit):
            roots = weights.sqrt().to(rows[0].rows)
            parts = [factor.rows * root for factor, root in zip(rows, roots, strict=True)]
            return RowsFactor(torch.cat(parts, 1), first.dtype, limit)
    all_diagonal = len(diagonals) == len(factors)
    too_wide = len(rows) + len(diagonals) == len(factors) and any(f.rows.shape[2] > f.limit for f in rows)
    exact = all(factor.exact for factor in diagonals)
    if all_diagonal or too_wide or not exact:
        values = weighted_sum([factor.diagonal() for factor in factors], weights)
        return DiagonalFactor(values, first.dtype, exact and all_diagonal)
    return MatrixFactor(weighted_sum([factor.dense() for factor in factors], weights), first.dtype)


class SquaredRows:
    """The diagonal of a Gram matrix: sums of squares over rows, in float64. It has the members of ``Gram``."""

    def __init__(self, size: int, device: torch.device, groups: int) -> None:
        self._total = torch.zeros(groups, size, dtype=torch.float64, device=device)

    def add(self, x: Tensor) -> None:
        """Add rows x (G, N, d)."""
        self._total += x.square().sum(1, dtype=torch.float64)

    def add_runs(self, x: Tensor) -> None:
        """Add R runs of T rows each, (G, R, T, d)."""
        self.add(x.flatten(1, 2))

    def total(self) -> Tensor:
        """Return the sums, (G, d)."""
        return self._total


class FactorSum:
    """The sum of a factor over a pass, which keeps the rows until there are too many.

    Sums are float64: rounding of a large direction would drown the small ones. Several processes ``settle`` first
    whether the rows of all of them are few.
    """

    def __init__(self, size: int, groups: int, device: torch.device, dtype: torch.dtype, limit: int) -> None:
        self._size, self._groups, self._device, self._dtype, self._limit = size, groups, device, dtype, limit
        self._most_rows = most_rows(size, limit)
        self._kept: list[Tensor] = []  # rows, until they are summed
        self._others = (0, 0)  # rows of the processes before this one and after it
        self._sum: Gram | SquaredRows | None = None  # once there are too many to keep
        self._diagonal: Tensor | None = None  # of terms whose diagonal is known
        self._less: Gram | None = None  # what is subtracted off that diagonal
        self._dropped = False  # whether something was to be subtracted above the limit

    def add(self, x: Tensor) -> None:
        """Add rows x ([G,] N, d)."""
        x = x.reshape(self._groups, -1, self._size)
        total = self._sum_if_many(x.shape[1])
        if total is None:
            self._kept.append(x.detach().clone())  # a view would keep the activations of a whole batch
        else:
            total.add(x)

    def add_runs(self, x: Tensor) -> None:
        """Add R runs of T rows each, x (G, R, T, d), which are stored as (..., d, T), without transposing them."""
        total = self._sum_if_many(x.shape[1] * x.shape[2])
        if total is None:
            self.add(x.flatten(1, 2))
        else:
            total.add_runs(x)

    def add_diagonal(self, values: Tensor) -> None:
        """Add a diagonal ([G,] d), such as the number of one-hot rows of each kind."""
        values = values.double().expand(self._groups, -1)
        self._diagonal = values if self._diagonal is None else self._diagonal + values

    def subtract(self, x: Tensor) -> None:
        """Subtract x xᵀ of rows x ([G,] N, d) off the diagonal, which ``add_diagonal`` has as it shall be."""
        if self._size > self._limit:
            self._dropped = True
            return
        self._less = self._gram() if self._less is None else self._less
        self._less.add(x)

    def _gram(self) -> Gram:
        return Gram(self._size, torch.float64, self._device, self._groups)

    def _n_kept(self) -> int:
        return sum(x.shape[1] for x in self._kept)

    def _sum_if_many(self, more: int) -> Gram | SquaredRows | None:
        """Return the sum, which takes this many more rows and those that were kept; None if all can be kept."""
        if self._sum is None and self._n_kept() + more > self._most_rows:
            fits = self._size <= self._limit
            self._sum = self._gram() if fits else SquaredRows(self._size, self._device, self._groups)
            kept, self._kept = self._kept, []
            for x in kept:
                self._sum.add(x)
        return self._sum

    def settle(self, processes: Processes) -> None:
        """Agree with the other processes on the form: rows if those of all are few, else this one sums its own."""
        if processes.is_single_process or not self._most_rows:
            return
        kept = processes.gather_numbers(self._n_kept() if self._sum is None else -1)
        if min(kept) < 0 or sum(kept) > self._most_rows:
            self._sum_if_many(self._most_rows + 1)
        else:
            self._others = (sum(kept[: processes.rank]), sum(kept[processes.rank + 1 :]))

    def totals(self) -> list[Tensor | None]:
        """Return what processes add up, None for what nothing was added to.

        Those are the rows, with zeros in the place of other processes', or their sum; the known diagonal, what is
        subtracted off it, and whether something was dropped.
        """
        rows = torch.nn.functional.pad(torch.cat(self._kept, 1), (0, 0, *self._others)) if self._kept else None
        summed = None if self._sum is None else self._sum.total()
        less = None if self._less is None else self._less.total()
        return [rows, summed, self._diagonal, less, torch.tensor(float(self._dropped), dtype=torch.float64)]

    def value(self, totals: Sequence[Tensor]) -> Factor:
        """Return the factor with these ``totals``; one that nothing was added to is zero."""
        parts: list[Factor] = []
        rows, summed, diagonal, less, dropped = totals
        matrix = lambda total: mirror(total).reshape(self._groups, self._size, self._size)
        if summed is not None and summed.ndim == 3:
            parts.append(MatrixFactor(matrix(summed), self._dtype))
        elif summed is not None:
            parts.append(DiagonalFactor(summed, self._dtype, exact=False))
        elif rows is not None:
            parts.append(RowsFactor(rows, self._dtype, self._limit))
        if less is not None:
            less = matrix(less).neg_()
            less.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
            parts.append(MatrixFactor(less, self._dtype))
        elif diagonal is not None or not parts:
            zeros = torch.zeros(self._groups, self._size, dtype=torch.float64, device=self._device)
            known = zeros if diagonal is None else diagonal
            parts.append(DiagonalFactor(known, self._dtype, exact=not dropped))
        return parts[0] if len(parts) == 1 else sum_factors(parts)


def decompose(factors: Sequence[Factor]) -> list[Spectrum]:
    """Return the spectra of all factors, each computed once; those of equal size together.

    Cost: about 7 d³ for a matrix in float64 and half of it in float32, 7 N³ + 3 N² d for N rows, and nothing for a
    diagonal.
    """
    missing = {id(f): f for f in factors if "spectrum" not in vars(f) and not f.is_diagonal}
    # A factor that depends on hyperparameters has a graph, which others must not become part of.
    pending = sorted(missing.values(), key=lambda f: f.numbers.requires_grad)
    sizes = [factor.order for factor in pending]
    visible = is_showing() and 7 * sum(float(size) ** 3 for size in sizes) > LONG_WORK
    fixed = sum(not f.numbers.requires_grad for f in pending)
    groups = [*group_by_size(sizes[:fixed]), *([i] for i in range(fixed, len(pending)))]
    for numbers in ProgressBar(groups, "eigendecompositions", visible):
        together = [pending[i] for i in numbers]
        pairs = psd_eigh_each([f.symmetric() for f in together], together[0].dtype)
        for factor, (values, vectors) in zip(together, pairs, strict=True):
            vars(factor)["spectrum"] = factor.spectrum_from(values, vectors)  # where its cached property looks
    return [factor.spectrum for factor in factors]


def share_spectra(factors: Sequence[Factor], processes: Processes) -> None:
    """Decompose factors, each in the process that has the least to do so far; all get the same spectra."""
    each = [factor for factor in factors if not factor.is_diagonal]
    tensors = [factor.numbers for factor in each]
    work = [float(min(t.shape[1:])) ** 2 * max(t.shape[1:]) for t in tensors]
    owners = assign_jobs(work, processes.size)
    own = [factor for factor, owner in zip(each, owners, strict=True) if owner == processes.rank]
    decompose(own)  # those of equal size together
    numbers = lambda factor: [factor.spectrum.values, factor.spectrum.basis.vectors]
    jobs = [partial(numbers, factor) for factor in each]
    spectra = processes.run_jobs(jobs, work, tensors[0].device if tensors else torch.device("cpu"))
    for factor, (values, vectors) in zip(each, spectra, strict=True):
        vars(factor)["spectrum"] = Spectrum(values, factor.basis_of(vectors))  # where its cached property looks


def psd_eigh_each(matrices: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return eigenvalues, negative ones set to zero, and eigenvectors of positive semidefinite matrices of one size.

    Each is decomposed in ``dtype`` where that keeps its small eigenvalues, at half of the cost.
    """
    narrow = [dtype is not None and dtype != m.dtype and keeps_eigenvalues(m.detach(), dtype) for m in matrices]
    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    for kind in (True, False):
        numbers = [i for i, each in enumerate(narrow) if each is kind]
        forms = [matrices[i].to(dtype) if kind else matrices[i] for i in numbers]
        pairs.update(zip(numbers, eigh_each(forms), strict=True))
    return [(pairs[i][0].clamp_min(0), pairs[i][1]) for i in range(len(matrices))]


def psd_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``psd_eigh_each`` of one matrix, in its own dtype."""
    return psd_eigh_each([matrix])[0]


S = TypeVar("S", bound="BlockCurvature")
Q = TypeVar("Q", bound="BlockPrecision")


class BlockPrecision:
    """Λ of one block, factorised."""

    log_determinant: Tensor

    def quadratic(self, jacobian: BlockJacobian, tokens: int, full: bool) -> Tensor:
        """Return J Λ⁻¹ Jᵀ: (B, S, C, C), or its diagonal (B, S, C)."""
        raise NotImplementedError

    def quadratics(self: Q, precisions: Sequence[Q], jacobian: BlockJacobian, tokens: int) -> list[Tensor]:
        """Return J Λ⁻¹ Jᵀ of all precisions of one curvature, (B, S, C, C) each; a shared basis is applied once."""
        return [each.quadratic(jacobian, tokens, True) for each in precisions]

    def cross(self, jacobian: BlockJacobian, other: BlockJacobian | None = None) -> Tensor:
        """Return J Λ⁻¹ J'ᵀ between all samples and outputs of two batches, (B K, B' K'), or of one with itself."""
        raise NotImplementedError

    def sample(self, eps: Tensor) -> Tensor:
        """Return Λ^-½ eps for standard normal eps (n, *form)."""
        raise NotImplementedError

    def adjoint(self, v: Tensor) -> Tensor:
        """Apply the transpose of ``sample`` to v (n, *form); ``sample`` after ``adjoint`` is Λ⁻¹."""
        raise NotImplementedError

    def variances(self) -> Tensor:
        """Return the diagonal of Λ⁻¹, in the block's form."""
        raise NotImplementedError

    def axes(self, block: Block) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return what ``Precision.axes`` returns for each group, (G, ...)."""
        return None


class BlockSum:
    """The sum of the curvature of one block over a pass."""

    def add(self, part: BlockJacobian | HeadGGN, first: bool, weights: Tensor | None = None) -> None:
        """Add one chunk of data, for a run of seeds; ``first`` says whether these data are new.

        The seeds have the weights of the samples in them; ``weights`` (B,) are for sums that have no seeds.
        """
        raise NotImplementedError

    def settle(self, processes: Processes) -> None:
        """Agree with the other processes on the form of the sums, if it depends on the data."""

    def totals(self) -> list[Tensor | None]:
        """Return the sums over the data of this process; None for one of which only data show the shape."""
        raise NotImplementedError

    def value(self, totals: Sequence[Tensor]) -> BlockCurvature:
        """Return the curvature with these sums, which are those of ``totals`` over all processes."""
        raise NotImplementedError


class BlockCurvature(Stored):
    """H of one block at unit dispersion. The owner of its form in files is a network with this block alone.

    A structure that is diagonal defines ``only_diagonal`` and ``mixed``; others define ``precision``, ``diagonal`` and
    ``dense`` too.
    """

    @property
    def only_diagonal(self) -> Tensor | None:
        """The diagonal in the block's form, if the structure is diagonal; else None."""
        return None

    def precision(self, phi: Tensor, prior: BlockPrior, block: Block) -> BlockPrecision:
        """Return Λ = H/φ + A of the block, factorised."""
        values = self._known_diagonal()
        values = values / phi.to(values) + prior.whole.to(values)
        return DiagonalPrecision(values.reciprocal(), values.log().sum(dtype=torch.float64))

    def diagonal(self) -> Tensor:
        """Return the diagonal of H in the block's form, no entry below a thousandth of the median."""
        return floor_values(self._known_diagonal())

    def dense(self) -> Tensor:
        """Return H as a matrix, in the order of the block's form. For tests and small networks."""
        return torch.diag(self._known_diagonal().reshape(-1))

    def _known_diagonal(self) -> Tensor:
        values = self.only_diagonal
        assert values is not None, "a structure that is not diagonal defines this member"
        return values

    def __add__(self: S, other: S) -> S:
        return self.sum_with([other], torch.ones(2, dtype=torch.float64))

    def sum_with(self: S, others: Sequence[S], weights: Tensor) -> S:
        """Return the weighted sum of this block and the others, differentiable in the weights (1 + others,)."""
        raise NotImplementedError

    @property
    def kronecker_factors(self) -> tuple[Factor, ...]:
        """The factors of a Kronecker product, of outputs and of inputs; none of another structure."""
        return ()

    def factors(self, prior: BlockPrior) -> Sequence[Factor]:
        """Return the factors whose eigendecompositions ``precision`` needs under this prior."""
        return ()

    def remarks(self, block: Block) -> Sequence[str]:
        """Return what the structure approximates beyond its definition, in words."""
        return ()


@dataclass(frozen=True, eq=False)
class DiagonalPrecision(BlockPrecision):
    """Λ diagonal; ``inverse`` is one over it, in the block's form."""

    inverse: Tensor
    log_determinant: Tensor

    def quadratic(self, jacobian: BlockJacobian, tokens: int, full: bool) -> Tensor:
        return jacobian.quadratic_form(self.inverse, tokens, full)

    def cross(self, jacobian: BlockJacobian, other: BlockJacobian | None = None) -> Tensor:
        return jacobian.between(jacobian if other is None else other, self.inverse)

    def sample(self, eps: Tensor) -> Tensor:
        return eps * self.inverse.sqrt().to(eps)

    def adjoint(self, v: Tensor) -> Tensor:
        return self.sample(v)

    def variances(self) -> Tensor:
        return self.inverse

    def axes(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        outputs, inputs = (torch.eye(size).to(self.inverse).unsqueeze(0) for size in (block.d_out, block.d_in))
        return outputs, inputs, self.inverse


@saved
@dataclass(frozen=True, eq=False)
class DiagonalBlock(BlockCurvature):
    """The diagonal of H, in the block's form."""

    values: Tensor

    @property
    def only_diagonal(self) -> Tensor:
        return self.values

    def sum_with(self, others: Sequence[DiagonalBlock], weights: Tensor) -> DiagonalBlock:
        return DiagonalBlock(weighted_sum([self.values, *(block.values for block in others)], weights))

    def state(self) -> State:
        return State("DiagonalBlock", tensors={"values": self.values})

    @classmethod
    def from_state(cls, state: State, network: Network) -> DiagonalBlock:  # type: ignore[override]
        (block,) = network.layout
        return cls(**state.read(values=Array(block.form, 0, dtype=network.dtype)))


class DiagonalSum(BlockSum):
    """The diagonal of H of a block, summed over a pass."""

    def __init__(self, block: Block, network: Network) -> None:
        self._squares = torch.zeros(block.form, dtype=torch.float64, device=network.device)
        self._dtype = network.dtype

    def add(self, part: BlockJacobian | HeadGGN, first: bool, weights: Tensor | None = None) -> None:
        self._squares += part.squares().reshape(self._squares.shape)

    def totals(self) -> list[Tensor | None]:
        return [self._squares]

    def value(self, totals: Sequence[Tensor]) -> DiagonalBlock:
        return DiagonalBlock(totals[0].to(self._dtype))


@dataclass(frozen=True, eq=False)
class CholeskyPrecision(BlockPrecision):
    """Λ by its Cholesky factor L (p, p), float64."""

    factor: Tensor

    @property
    def log_determinant(self) -> Tensor:  # type: ignore[override]
        return 2 * self.factor.diagonal().log().sum()

    @cached_property
    def _inverse_factor(self) -> Tensor:
        """L⁻¹. It is applied many times, and on a GPU a product is faster than a triangular solve."""
        eye = torch.eye(len(self.factor), dtype=self.factor.dtype, device=self.factor.device)
        return torch.linalg.solve_triangular(self.factor, eye, upper=False)

    @cached_property
    def _inverse_single(self) -> Tensor:
        """L⁻¹ in float32, for networks in it."""
        return self._inverse_factor.float()

    def quadratic(self, jacobian: BlockJacobian, tokens: int, full: bool) -> Tensor:
        rows = self._whiten(jacobian)
        return row_products(rows.reshape(rows.shape[0], tokens, -1, rows.shape[-1]), full)

    def _whiten(self, jacobian: BlockJacobian) -> Tensor:
        """Return J L⁻ᵀ, (B, K, p)."""
        j = jacobian.whole().flatten(2).transpose(0, 1)  # seeds first, as small Jacobians lie in memory
        inverse = self._inverse_single if j.dtype == torch.float32 else self._inverse_factor.to(j.dtype)
        return (j @ inverse.mT).transpose(0, 1)

    def cross(self, jacobian: BlockJacobian, other: BlockJacobian | None = None) -> Tensor:
        rows = self._whiten(jacobian).flatten(0, 1)
        return rows @ (rows if other is None else self._whiten(other).flatten(0, 1)).mT

    def sample(self, eps: Tensor) -> Tensor:
        flat = eps.reshape(eps.shape[0], -1)
        solved = torch.linalg.solve_triangular(self.factor.mT, flat.to(self.factor).mT, upper=True).mT
        return solved.reshape(eps.shape).to(eps)

    def adjoint(self, v: Tensor) -> Tensor:
        flat = v.reshape(v.shape[0], -1)
        solved = torch.linalg.solve_triangular(self.factor, flat.to(self.factor).mT, upper=False).mT
        return solved.reshape(v.shape).to(v)

    def variances(self) -> Tensor:
        return self._inverse_factor.square().sum(0)


@saved
@dataclass(frozen=True, eq=False)
class FullBlock(BlockCurvature):
    """The whole H of one block, (p, p)."""

    matrix: Tensor

    def sum_with(self, others: Sequence[FullBlock], weights: Tensor) -> FullBlock:
        return FullBlock(weighted_sum([self.matrix, *(block.matrix for block in others)], weights))

    def state(self) -> State:
        return State("FullBlock", tensors={"matrix": self.matrix})

    @classmethod
    def from_state(cls, state: State, network: Network) -> FullBlock:  # type: ignore[override]
        (block,) = network.layout
        return cls(**state.read(matrix=Array((block.size, block.size), dtype=torch.float64, also=semidefinite)))

    def dense(self) -> Tensor:
        return self.matrix

    def diagonal(self) -> Tensor:
        return floor_values(self.matrix.diagonal())

    def precision(self, phi: Tensor, prior: BlockPrior, block: Block) -> CholeskyPrecision:
        added = prior.whole.double().reshape(-1).expand(len(self.matrix))
        return CholeskyPrecision(cholesky(self.matrix.double() / phi.double() + torch.diag(added), block.weight))


class FullSum(BlockSum):
    """The whole H of a block, summed over a pass."""

    def __init__(self, block: Block, network: Network) -> None:
        self._gram = Gram(block.size, torch.float64, network.device)

    def add(self, part: BlockJacobian | HeadGGN, first: bool, weights: Tensor | None = None) -> None:
        assert not isinstance(part, HeadGGN), "the last linear layer is kept in factors"
        self._gram.add(part.whole().flatten(0, 1), exact=True)

    def totals(self) -> list[Tensor | None]:
        return [self._gram.total()]

    def value(self, totals: Sequence[Tensor]) -> FullBlock:
        return FullBlock(mirror(totals[0]))
