"""Eigenvalues and singular values that do not give up at the first failure of a library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from lapwing.errors import NumericalError

# A GPU takes several launches for each column of a matrix; up to this size a processor is done before, transfer
# included. At 192 an H200 takes .4 of the time of its host. ``python -m benchmarks.factors`` prints both times.
HOST = 128
BATCHED = 512  # size up to which matrices are copied into one batch; above, one of them keeps a GPU busy


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, ascending, and eigenvectors (columns) of symmetric matrices (..., d, d).

    An iteration that does not converge, or returns numbers that are not finite, is tried again: in float64, by LAPACK
    on the CPU, and there on the matrix in units of its largest entry. Dtype and device are those of the matrix.

    Raises:
        NumericalError: If the matrix is not finite, or no attempt succeeds.

    >>> eigh(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))[0]
    tensor([1., 2.])
    """
    values, vectors = _attempted(lambda m: tuple(torch.linalg.eigh(m)), matrix)
    return values, vectors


def batches(sizes: Sequence[int]) -> list[list[int]]:
    """Return the numbers of the matrices that are decomposed together: those of one size, up to ``BATCHED``.

    >>> batches([3, 2000, 3, 2000])
    [[0, 2], [1], [3]]
    """
    together: dict[int, list[int]] = {}
    for number, size in enumerate(sizes):
        together.setdefault(size if size <= BATCHED else -number, []).append(number)
    return list(together.values())


def eigh_each(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return ``eigh`` of matrices (G, d, d) of one size in one batch, on the device or the host, which is faster.

    >>> [values.tolist() for values, _ in eigh_each([torch.eye(2)[None], 2 * torch.eye(2)[None]])]
    [[[1.0, 1.0]], [[2.0, 2.0]]]
    """
    if not matrices:
        return []
    batch = matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))
    small = batch.device.type == "cuda" and batch.shape[-1] <= HOST
    values, vectors = (part.to(batch.device) for part in eigh(batch.cpu() if small else batch))
    counts = [len(matrix) for matrix in matrices]
    return list(zip(values.split(counts), vectors.split(counts), strict=True))


def eigvalsh(matrix: Tensor) -> Tensor:
    """Return the eigenvalues of symmetric matrices, ascending, by the same attempts as ``eigh``."""
    return _attempted(lambda m: (torch.linalg.eigvalsh(m),), matrix)[0]


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin singular value decomposition (U, s, Vᵀ), by the same attempts as ``eigh``."""
    values, left, right = _attempted(_values_first, matrix)
    return left, values, right


def _values_first(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return values, left, right


def _attempted(decompose: Callable[[Tensor], tuple[Tensor, ...]], matrix: Tensor) -> tuple[Tensor, ...]:
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
