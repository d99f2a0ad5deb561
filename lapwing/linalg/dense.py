"""Factorisations of dense matrices with clear errors, sums of products, bases, and greedy choices of rows.

A basis turns vectors into coordinates in which a symmetric matrix is diagonal; one of a few directions takes all others
together as the rest. Arrays of vectors are (..., G, n, d),
for G independent spaces of size d; if G is one, any (..., d).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from lapwing.errors import NumericalError
from lapwing.runtime.memory import batch_size_for, chunks
from lapwing.runtime.threads import ProgressBar, uniform

# A GPU takes several launches for each column of a matrix; up to this size a processor is done before, transfer
# included. At 192 an H200 takes .4 of the time of its host. ``python -m benchmarks.factors`` prints both times.
MAX_HOST_SIZE = 128
MAX_BATCHED_SIZE = 512  # size up to which matrices are copied into one batch; above, one of them keeps a GPU busy


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, ascending, and eigenvectors (columns) of symmetric matrices (..., d, d).

    An iteration that does not converge, or returns numbers that are not finite, is tried again: in float64, by LAPACK
    on the CPU, and there on the matrix in units of its largest entry. Dtype and device are those of the matrix.

    Raises:
        NumericalError: If the matrix is not finite, or no attempt succeeds.

    >>> eigh(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))[0]
    tensor([1., 2.])
    """
    values, vectors = _decompose(lambda m: tuple(torch.linalg.eigh(m)), matrix)
    return values, vectors


def group_by_size(sizes: Sequence[int]) -> list[list[int]]:
    """Return the numbers of the matrices that are decomposed together: those of one size, up to ``MAX_BATCHED_SIZE``.

    >>> group_by_size([3, 2000, 3, 2000])
    [[0, 2], [1], [3]]
    """
    together: dict[int, list[int]] = {}
    for number, size in enumerate(sizes):
        together.setdefault(size if size <= MAX_BATCHED_SIZE else -number, []).append(number)
    return list(together.values())


def eigh_each(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return ``eigh`` of matrices (G, d, d) of one size in one batch, on the device or the host, which is faster.

    >>> [values.tolist() for values, _ in eigh_each([torch.eye(2)[None], 2 * torch.eye(2)[None]])]
    [[[1.0, 1.0]], [[2.0, 2.0]]]
    """
    if not matrices:
        return []
    batch = matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))
    small = batch.device.type == "cuda" and batch.shape[-1] <= MAX_HOST_SIZE
    values, vectors = (part.to(batch.device) for part in eigh(batch.cpu() if small else batch))
    counts = [len(matrix) for matrix in matrices]
    return list(zip(values.split(counts), vectors.split(counts), strict=True))


def eigvalsh(matrix: Tensor) -> Tensor:
    """Return the eigenvalues of symmetric matrices, ascending, by the same attempts as ``eigh``."""
    return _decompose(lambda m: (torch.linalg.eigvalsh(m),), matrix)[0]


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin singular value decomposition (U, s, Vᵀ), by the same attempts as ``eigh``."""
    values, left, right = _decompose(_values_first, matrix)
    return left, values, right


def _values_first(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return values, left, right


def _decompose(decompose: Callable[[Tensor], tuple[Tensor, ...]], matrix: Tensor) -> tuple[Tensor, ...]:
    """Return the first finite decomposition; its first part are the values, which scale with the matrix."""
    if not bool(torch.isfinite(matrix).all()):
        raise NumericalError("a matrix to decompose is not finite; check the data and the network for overflow.")
    cause: Exception | None = None
    for form, unit in _forms(matrix):
        try:
            values, *vectors = decompose(form)
        except LinAlgError as error:
            cause = error
            continue
        parts = (values if unit is None else values * unit, *vectors)
        if all(bool(torch.isfinite(part).all()) for part in parts):
            return tuple(part.to(matrix) for part in parts)
    raise NumericalError(
        f"a matrix {tuple(matrix.shape)} with entries up to {float(matrix.abs().max()):.3g} has no decomposition, in "
        "float64 and on the CPU neither. Scale the inputs of the network, or use method=Diagonal()."
    ) from cause


def _forms(matrix: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the matrix as given, in float64, on the CPU, and there in units of its largest entry, with that unit."""
    yield matrix, None
    if matrix.dtype != torch.float64:
        yield matrix.double(), None
    if matrix.device.type != "cpu":
        yield matrix.double().cpu(), None
    wide = matrix.double().cpu()
    unit = wide.detach().abs().amax((-2, -1)).clamp_min(torch.finfo(torch.float64).tiny)
    yield wide / unit[..., None, None], unit.unsqueeze(-1)


def cholesky(matrix: Tensor, name: str) -> Tensor:
    """Return the lower factor; if the matrix is not positive definite, raise with its smallest eigenvalue."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info.max()) == 0:
        return factor
    if not bool(torch.isfinite(matrix).all()):
        raise NumericalError(f"the precision of {name} is not finite; check the data and the prior.")
    smallest = eigvalsh(matrix.double()).min().item()
    raise NumericalError(not_definite(name, smallest))


def not_definite(name: str, smallest: float) -> str:
    """Return the error message for a precision that is not positive definite."""
    return (
        f"the precision of {name} is not positive definite: its smallest eigenvalue is {smallest:.3g}; expected "
        "above zero. Raise the prior precision, or compute in float64; a Hessian may be indefinite where a GGN is not."
    )


PANEL_COLUMNS = {"cpu": 64, "cuda": 384}  # columns that are multiplied at once with those from them on
MAX_EIGENVALUE_LOSS = 1e-3  # of the smallest eigenvalue, that products in the dtype of the rows may lose
MAX_PENDING = 32  # products that are added in the dtype of the rows before they are added to the sum
STRIP_ROWS = 512  # rows that are mirrored at a time, which limits the extra memory; fewer if the byte budget is small


class Gram:
    """The running sum Σ xᵀx over calls of ``add``, in place.

    A panel of columns is multiplied with itself and those after it, not with those before it: this saves up to half of
    the multiplications of a plain product, .56 of which are left at eight panels.

    Rows narrower than the sum are multiplied in its dtype, since rounding of the largest direction would drown the
    others. They are multiplied in their own, at half of the cost, once the sum so far has no small direction: then
    rounding is far below every one of them. The sum is looked at when its rows have doubled.

    >>> total = Gram(3, torch.float64, torch.device("cpu"))
    >>> total.add(torch.eye(3, dtype=torch.float64)[:2])
    >>> total.value().diagonal().tolist()
    [1.0, 1.0, 0.0]
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, groups: int = 1) -> None:
        self._sum = torch.zeros(groups, size, size, dtype=dtype, device=device)
        width = PANEL_COLUMNS.get(device.type, PANEL_COLUMNS["cuda"])
        self._panels = [(slice(start, start + width), slice(start, size)) for start in range(0, size, width)]
        self._narrow: Tensor | None = None  # a sum in the dtype of the rows, not yet part of ``_sum``
        self._rows = self._pending = 0
        self._due = size + size // 4  # rows at which to look at the sum; no fewer can be enough

    def add(self, x: Tensor, exact: bool = False) -> None:
        """Add the products of the rows of x, (N, d) or (G, N, d); ``exact`` takes them in the dtype of the sum."""
        left = self._due - self._rows
        if not exact and self._can_narrow(x) and 0 < left < x.shape[-2]:
            self.add(x[..., :left, :])
            x = x[..., left:, :]
        total = self._sum if exact else self._sum_for(x, x.shape[-2])
        for rows in self._chunks_in(x, x.ndim - 2, total.dtype):
            if x.ndim == 3 and x.shape[0] > 1:
                total.baddbmm_(rows.mT, rows)
                continue
            rows = rows[0] if x.ndim == 3 else rows
            for i, j in self._panels:
                total[0, i, j].addmm_(rows[:, i].mT, rows[:, j])

    def add_runs(self, x: Tensor) -> None:
        """Add R runs of T rows each, x (G, R, T, d), which are stored as (..., d, T), without transposing them."""
        total = self._sum_for(x, x.shape[1] * x.shape[2])
        for rows in self._chunks_in(x, 1, total.dtype, more=x.shape[0] * x.shape[3] ** 2):
            total += torch.matmul(rows.mT, rows).sum(1)

    def _chunks_in(self, x: Tensor, dim: int, dtype: torch.dtype, more: int = 0) -> Iterator[Tensor]:
        """Yield x in another dtype, in parts along a dimension that fit the byte budget.

        ``more`` numbers are needed beside each entry along it.
        """
        copied = 0 if x.dtype == dtype else x.numel() // max(1, x.shape[dim])
        for part in chunks(x.shape[dim], torch.finfo(dtype).bits // 8 * (copied + more), x.device):
            yield x.narrow(dim, part.start, part.stop - part.start).to(dtype)

    def value(self) -> Tensor:
        """Return the symmetric sum, (G, d, d), or (d, d) for one group; not a copy, so a later ``add`` changes it."""
        return mirror(self.total())

    def total(self) -> Tensor:
        """Return the sum (G, d, d), not a copy. Only its upper triangle is valid."""
        self._flush()
        return self._sum

    def _can_narrow(self, x: Tensor) -> bool:
        return x.dtype == torch.float32 != self._sum.dtype

    def _sum_for(self, x: Tensor, rows: int) -> Tensor:
        """Return the sum that takes the rows x, so many for each group: the narrower one if rounding allows it."""
        if not self._can_narrow(x):
            return self._sum
        if self._rows >= self._due:
            self._flush()
            self._narrow = torch.zeros_like(self._sum, dtype=x.dtype) if _has_no_small(self._sum, x.dtype) else None
            self._due = self._rows * (2 if self._narrow is None else 8)
        self._rows += rows
        if self._narrow is None:
            return self._sum
        self._pending += 1
        if self._pending > MAX_PENDING:
            self._flush()
        return self._narrow

    def _flush(self) -> None:
        """Add what the narrower sum has taken."""
        if self._narrow is not None and self._pending:
            self._sum += self._narrow
            self._narrow.zero_()
        self._pending = 0


def mirror(total: Tensor) -> Tensor:
    """Return the symmetric matrices with these upper triangles (G, d, d), in place; (d, d) for one group."""
    for corner, right, below in _strips(total):
        corner.copy_(corner.triu() + corner.triu(1).mT)
        below.copy_(right.mT)
    return total[0] if total.shape[0] == 1 else total


def _has_no_small(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Return whether rounding in this dtype is far below every eigenvalue of the matrices (G, d, d).

    Rounding of a product is relative to the diagonal: in units of it, a random matrix with a norm of about √d rounding
    units. Columns of zeros have no rounding. Only the upper triangle is read.
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    root = torch.where(diagonal > 0, diagonal.rsqrt(), 1.0)
    scaled = (root.unsqueeze(-1) * matrix * root.unsqueeze(-2)).to(dtype)
    scaled.diagonal(dim1=-2, dim2=-1).add_(diagonal == 0)
    return _far_above_rounding(scaled)


def keeps_eigenvalues(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Return whether an eigendecomposition in this dtype keeps every eigenvalue of the matrices (..., d, d).

    Its rounding is relative to the largest eigenvalue, which the Frobenius norm bounds.
    """
    norm = torch.linalg.matrix_norm(matrix, keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)
    return _far_above_rounding((matrix / norm).to(dtype))


def _far_above_rounding(matrix: Tensor) -> bool:
    """Return whether no eigenvalue is near √d rounding units, by a Cholesky factor of the upper triangle. In place."""
    smallest = matrix.shape[-1] ** 0.5 * torch.finfo(matrix.dtype).eps / MAX_EIGENVALUE_LOSS
    matrix.diagonal(dim1=-2, dim2=-1).sub_(smallest)
    return int(torch.linalg.cholesky_ex(matrix.mT).info.abs().max()) == 0


def symmetrise(matrix: Tensor) -> None:
    """Replace the matrix (..., d, d) by (M + Mᵀ) / 2, in place."""
    for corner, right, below in _strips(matrix):
        corner.copy_(0.5 * (corner + corner.mT))
        right.copy_(0.5 * (right + below.mT))
        below.copy_(right.mT)


def _strips(matrix: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield views for a few rows at a time: the block on the diagonal, the part right of it and the part below it."""
    row = 4 * matrix.element_size() * matrix.shape[:-1].numel()  # copies of a strip, for each of its rows
    step = batch_size_for(STRIP_ROWS, row, matrix.device)
    for start in range(0, matrix.shape[-1], step):
        here, rest = slice(start, start + step), slice(start + step, None)
        yield matrix[..., here, here], matrix[..., here, rest], matrix[..., rest, here]


class Basis:
    """A basis of R^d, with one eigenvalue for each of its m parts: single directions, and maybe the rest at the end.

    A ``scale`` (G, d) multiplies vectors beforehand: the basis of a matrix in units of it. The defaults are those of a
    basis in which every part is one direction.
    """

    exact: bool = True  # whether the matrix is diagonal in it; False where its diagonal alone was taken
    vectors: Tensor  # (G, d, r), of the single directions; a basis of axes has none

    @property
    def counts(self) -> Tensor | None:
        """The number of directions in each part, (m,); None if every part is one direction."""
        return None

    def to(self, dtype: torch.dtype) -> Basis:
        """Return it in another dtype."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return its numbers for a file, named by their form."""
        raise NotImplementedError

    def coordinates(self, x: Tensor) -> Tensor:
        """Return the coordinates of x (..., d): (..., w), at least one for each part."""
        raise NotImplementedError

    def lengths(self, x: Tensor) -> Tensor:
        """Return the coordinates, with the length of the part in the rest for all of its coordinates, (..., m)."""
        return self.coordinates(x)

    def combine(self, y: Tensor) -> Tensor:
        """Apply the transpose of ``coordinates``: y (..., w) to (..., d)."""
        raise NotImplementedError

    def draw(self, eps: Tensor) -> Tensor:
        """Return coordinates (..., w) of standard normal numbers eps (..., d), without the scale."""
        return eps

    def draw_transposed(self, y: Tensor) -> Tensor:
        """Apply the transpose of ``draw``: y (..., w) to (..., d)."""
        return y

    def expand(self, values: Tensor, width: int) -> Tensor:
        """Return a value for each of ``width`` coordinates, from one for each part (..., m)."""
        return values

    def pool(self, squares: Tensor) -> Tensor:
        """Return the mean of squared coordinates (..., w) over the directions of each part, (..., m)."""
        return squares

    def diagonal(self, values: Tensor) -> Tensor:
        """Return the diagonal (..., d) of the matrix with these eigenvalues (..., m)."""
        raise NotImplementedError

    def diagonal_of(self, x: Tensor) -> Tensor:
        """Return the diagonal of diag(x) in this basis, the mean over the directions of each part: (..., m)."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class FullBasis(Basis):
    """A basis of d vectors, the columns of ``vectors`` (G, d, d), which have the scale in them."""

    vectors: Tensor

    def to(self, dtype: torch.dtype) -> FullBasis:
        return FullBasis(self.vectors.to(dtype))

    def tensors(self) -> dict[str, Tensor]:
        return {"": self.vectors}

    def coordinates(self, x: Tensor) -> Tensor:
        return _times(x, self.vectors)

    def combine(self, y: Tensor) -> Tensor:
        return _times(y, self.vectors.mT)

    def diagonal(self, values: Tensor) -> Tensor:
        return _times(values, self.vectors.square().mT)

    def diagonal_of(self, x: Tensor) -> Tensor:
        return _times(x, self.vectors.square())


@dataclass(frozen=True, eq=False)
class Axes(Basis):
    """The basis of a diagonal matrix: the coordinates are the entries themselves.

    ``exact`` says whether the matrix is diagonal, or only its diagonal was taken.
    """

    scale: Tensor | None = None
    exact: bool = True

    def to(self, dtype: torch.dtype) -> Axes:
        return self if self.scale is None else replace(self, scale=self.scale.to(dtype))

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.exact else {"_axes": torch.ones(())}  # a mark

    def coordinates(self, x: Tensor) -> Tensor:
        return _scale(x, self.scale)

    def combine(self, y: Tensor) -> Tensor:
        return _scale(y, self.scale)

    def diagonal(self, values: Tensor) -> Tensor:
        return _scale(_scale(values, self.scale), self.scale)

    def diagonal_of(self, x: Tensor) -> Tensor:
        return self.diagonal(x)


@dataclass(frozen=True, eq=False)
class ThinBasis(Basis):
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

    def tensors(self) -> dict[str, Tensor]:
        return {"_thin": self.vectors}

    def coordinates(self, x: Tensor) -> Tensor:
        return self.draw(_scale(x, self.scale))

    def lengths(self, x: Tensor) -> Tensor:
        inside, rest = self._parts(_scale(x, self.scale))
        return torch.cat([inside, torch.linalg.vector_norm(rest, dim=-1, keepdim=True)], -1)

    def combine(self, y: Tensor) -> Tensor:
        return _scale(self.draw_transposed(y), self.scale)

    def draw(self, eps: Tensor) -> Tensor:
        return torch.cat(self._parts(eps), -1)

    def draw_transposed(self, y: Tensor) -> Tensor:
        inside, rest = y.split([self.vectors.shape[-1], self.vectors.shape[-2]], -1)
        return _times(inside - _times(rest, self.vectors), self.vectors.mT) + rest

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inside = _times(x, self.vectors)
        return inside, x - _times(inside, self.vectors.mT)

    def expand(self, values: Tensor, width: int) -> Tensor:
        rank = self.vectors.shape[-1]
        if width == rank + 1:
            return values
        return torch.cat([values[..., :-1], values[..., -1:].expand(*values.shape[:-1], width - rank)], -1)

    def pool(self, squares: Tensor) -> Tensor:
        size, rank = self.vectors.shape[-2:]
        rest = squares[..., rank:].sum(-1, keepdim=True) / (size - rank)
        return torch.cat([squares[..., :rank], rest], -1)

    def diagonal(self, values: Tensor) -> Tensor:
        squares = self.vectors.square()
        outside = (1 - squares.sum(-1)).clamp_min(0).unsqueeze(-2)  # (G, 1, d): the diagonal of the projection
        diagonal = _times(values[..., :-1], squares.mT) + values[..., -1:] * outside.to(values)
        return _scale(_scale(diagonal, self.scale), self.scale)

    def diagonal_of(self, x: Tensor) -> Tensor:
        size, rank = self.vectors.shape[-2:]
        x = _scale(_scale(x, self.scale), self.scale)
        inside = _times(x, self.vectors.square())
        rest = (x.sum(-1, keepdim=True) - inside.sum(-1, keepdim=True)) / (size - rank)
        return torch.cat([inside, rest], -1)


def pool_pairs(out: Basis, inp: Basis, squares: Tensor) -> Tensor:
    """Return squared coordinates (..., w_out, w_in) as means over each pair of parts, (..., m_out, m_in)."""
    return out.pool(inp.pool(squares).mT).mT


def _times(x: Tensor, matrices: Tensor) -> Tensor:
    """Return x (..., G, n, d) times matrices (G, d, m); one matrix for all x is one large product."""
    matrices = matrices.to(x)
    return x @ (matrices[0] if len(matrices) == 1 else matrices)


def _scale(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * (scale[0] if len(scale) == 1 else scale.unsqueeze(-2)).to(x)


ZERO = (
    "the kernel of the inducing points is zero: no output depends on the selected weights at any of them; "
    "choose other weights."
)


def whitening(kernel: Tensor, cut: float = 1e-14) -> Tensor:
    """Return W (M, r) with Wᵀ K W = I: the eigenvectors of K divided by the roots of their eigenvalues.

    Eigenvalues below ``cut`` times the largest are left out: they are rounding, and their inverse roots would be large
    random numbers.
    """
    values, vectors = eigh(check_kernel(kernel).double())
    real = values > cut * values[-1].clamp_min(1e-300)
    if not bool(real.any()):
        raise NumericalError(ZERO)
    return vectors[:, real] / values[real].sqrt()


def smooth_whitening(kernel: Tensor, jitter: float = 1e-9) -> Tensor:
    """Return W (M, M) with Wᵀ K W ≈ I, from a Cholesky factor of K + jitter: its gradient in K exists everywhere."""
    size = len(check_kernel(kernel))
    extra = jitter * kernel.detach().diagonal().mean()
    eye = torch.eye(size, dtype=kernel.dtype, device=kernel.device)
    for _ in range(4):
        factor, info = torch.linalg.cholesky_ex(kernel + extra * eye)
        if int(info) == 0:
            return torch.linalg.solve_triangular(factor, eye, upper=False).mT
        extra = extra * 100
    raise NumericalError(
        f"the kernel of {size} inducing points is not positive definite to one part in a thousand; expected a Gram "
        "matrix. Compute in float64."
    )


def check_kernel(kernel: Tensor) -> Tensor:
    """Return the kernel; raise if it is not finite or zero."""
    least, most = map(float, torch.aminmax(kernel.detach()))  # NaN if an entry is; without a copy of the kernel
    if not (math.isfinite(least) and math.isfinite(most)):
        raise NumericalError("the kernel of the inducing points is not finite; check the inputs and the network.")
    if least == most == 0:
        raise NumericalError(ZERO)
    return kernel


def choose_most_explaining(precision: Tensor, gram: Tensor, count: int, least: float, visible: bool = False) -> Tensor:
    r"""Return ``count`` coordinates, in the order in which they are chosen: each adds most to the explained variance.

    For chosen coordinates S that is

    $$ v(S) = \mathrm{tr}\, J_S (\Lambda_{SS})^{-1} J_S^\top, \qquad
       v(S + i) - v(S) = \frac{|J_i - J_S \Lambda_{SS}^{-1} \Lambda_{Si}|^2}
                              {\Lambda_{ii} - \Lambda_{iS} \Lambda_{SS}^{-1} \Lambda_{Si}} . $$

    Both the Schur complement below and the products of residuals above change by matrices of rank one and two with each
    choice. Their diagonals are kept, and of the rest only the column of each choice is computed, as in a pivoted
    Cholesky factorisation. Equal gains go to the first coordinate.

    Args:
        precision: Λ of all coordinates, (M, M), float64.
        gram: JᵀJ, (M, M), float64.
        count: How many to choose, at most M.
        least: A lower bound of the eigenvalues of Λ, such as the smallest prior precision.
        visible: Whether to show a progress bar.

    Cost: 3 M k multiplications for choice number k; memory for 2 M ``count`` numbers besides the matrices.

    >>> choose_most_explaining(torch.tensor([[2.0, 1.9], [1.9, 2.1]]), torch.tensor([[4.0, 3.9], [3.9, 4.1]]), 1, 0.1)
    tensor([0])
    """
    complement, residuals = precision.diagonal().clone(), gram.diagonal().clone()
    first, second = (precision.new_zeros(count, len(precision)) for _ in range(2))
    free = torch.ones_like(complement, dtype=torch.bool)
    order = []
    for k in ProgressBar(range(count), "greedy choice", visible):
        complement, residuals = complement.clamp_min(least), residuals.clamp_min(0)
        best = int(torch.where(free, residuals / complement, -1.0).argmax())
        order.append(best)
        free[best] = False
        u, v = first[:k, best], second[:k, best]
        across = precision[best] - u @ first[:k]
        products = gram[best] - u @ second[:k] - v @ first[:k]
        pivot = across[best].clamp_min(least)
        first[k] = across * pivot.rsqrt()
        second[k] = products * pivot.rsqrt() - 0.5 * (products[best] / pivot) * first[k]
        complement = complement - first[k].square()
        residuals = residuals - 2 * first[k] * second[k]
    return torch.tensor(order, device=precision.device)


def greedy_pivots(kernel: Tensor, count: int, cut: float = 1e-12) -> Tensor:
    """Return at most ``count`` row numbers, each with the largest variance given those before it.

    This is a pivoted Cholesky factorisation, N count² operations. It ends early if all remaining variances are below
    ``cut`` times the largest entry of the diagonal.

    >>> greedy_pivots(torch.tensor([[1.0, 0.9, 0.0], [0.9, 2.0, 0.0], [0.0, 0.0, 1.5]]), 2).tolist()
    [1, 2]
    """
    remaining = kernel.diagonal().double().clone()
    rows = remaining.new_zeros(min(count, len(remaining)), len(remaining))
    floor, chosen = cut * float(remaining.max()), []
    for i in range(len(rows)):
        pivot = int(remaining.argmax())
        if float(remaining[pivot]) <= floor:
            break
        row = (kernel[pivot].double() - rows[:i, pivot] @ rows[:i]) / remaining[pivot].sqrt()
        rows[i] = row
        remaining = (remaining - row.square()).clamp_min(0)
        remaining[pivot] = 0
        chosen.append(pivot)
    return torch.tensor(chosen, dtype=torch.long, device=kernel.device)


def trace_pivots(kernel: Tensor, count: int, cut: float = 1e-12) -> Tensor:
    """Return at most ``count`` row numbers. Each choice reduces the sum of all remaining variances most.

    Each step updates the whole matrix: N² count operations.

    >>> trace_pivots(torch.tensor([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 1.5]]), 1).tolist()
    [0]
    """
    remaining = kernel.double().clone()
    floor, chosen = cut * float(remaining.diagonal().max()), []
    for _ in range(min(count, len(remaining))):
        variance = remaining.diagonal()
        squares = torch.linalg.vector_norm(remaining, dim=0).square()
        gain = torch.where(variance > floor, squares / variance.clamp_min(floor), -1.0)
        pivot = int(gain.argmax())
        if float(gain[pivot]) <= 0:
            break
        row = remaining[pivot].clone()
        remaining.addr_(row, row, alpha=-1 / float(row[pivot]))
        chosen.append(pivot)
    return torch.tensor(chosen, dtype=torch.long, device=kernel.device)


DISTANCES_AT_ONCE = 2**22  # distances in memory at once


def kmeans(points: Tensor, count: int, generator: torch.Generator | None = None, steps: int = 25) -> Tensor:
    """Return centres (count, D) of points (N, D), by k-means++ and then Lloyd's steps until no centre changes.

    Distances are formed in chunks, so memory does not grow with N times ``count``. A centre without points stays.

    >>> points = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    >>> kmeans(points, 2, torch.Generator().manual_seed(0)).sort(0).values.tolist()
    [[0.5], [10.5]]
    """
    centres = _initial_centres(points, count, generator)
    for _ in range(steps):
        nearest = _nearest(points, centres)
        sums = torch.zeros_like(centres, dtype=torch.float64).index_add_(0, nearest, points.double())
        sizes = torch.bincount(nearest, minlength=len(centres)).to(sums)
        means = torch.where(sizes[:, None] > 0, (sums / sizes[:, None].clamp_min(1)).to(centres), centres)
        if torch.equal(means, centres):
            break
        centres = means
    return centres


def centres_by_class(rows: Tensor, labels: Tensor | None, numbers: Tensor, generator: torch.Generator) -> Tensor:
    """Return one centre for each of the sorted class numbers (M,), (M, D): k-means of the rows (N, D) of its class.

    A class without rows, and every class if ``labels`` (N,) are None, takes all rows.
    """
    centres = []
    for number, count in zip(*(t.tolist() for t in numbers.unique_consecutive(return_counts=True)), strict=True):
        members = rows if labels is None else rows[labels == number]
        centres.append(kmeans(members if len(members) else rows, count, generator))
    return torch.cat(centres)


def _initial_centres(points: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Draw centres among the points, with probability proportional to the squared distance to those drawn before."""
    draws = uniform((count,), generator, points.double())
    chosen = [int(draws[0] * len(points))]
    gap = (points - points[chosen[0]]).square().sum(1).double()
    for draw in draws[1:]:
        steps = gap.cumsum(0)
        last = float(steps[-1])
        place = int(torch.searchsorted(steps, draw * last)) if last > 0 else int(draw * len(points))
        chosen.append(min(place, len(points) - 1))
        gap = torch.minimum(gap, (points - points[chosen[-1]]).square().sum(1).double())
    return points[chosen].clone()


def _nearest(points: Tensor, centres: Tensor) -> Tensor:
    """Return the number of the nearest centre (N,) of every point.

    Coordinates are relative to the mean of the centres, so that squares of a common offset do not cause rounding.
    """
    step = max(1, DISTANCES_AT_ONCE // len(centres))
    middle = centres.double().mean(0).to(centres)
    about = centres - middle
    half = 0.5 * about.square().sum(1)
    return torch.cat([((part - middle) @ about.mT - half).argmax(1) for part in points.split(step)])
