"""Coordinates in which a kernel is the identity."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.linalg.dense import smooth_whitening, whitening
from tests.tolerances import SOLVED, assert_close

D = torch.float64


def kernel(size: int, rank: int, seed: int = 0) -> Tensor:
    rows = torch.randn(size, rank, dtype=D, generator=torch.Generator().manual_seed(seed))
    return rows @ rows.T


@pytest.mark.parametrize(("size", "rank"), [(1, 1), (7, 9), (7, 7), (7, 4), (7, 1)])
def test_the_kernel_becomes_the_identity(size: int, rank: int) -> None:
    """The number of coordinates is the rank of the kernel."""
    matrix = kernel(size, rank)
    white = whitening(matrix)
    assert white.shape == (size, min(size, rank))
    assert_close(white.T @ matrix @ white, torch.eye(min(size, rank), dtype=D))
    assert_close(white @ white.T, torch.linalg.pinv(matrix, rtol=1e-10, hermitian=True), SOLVED)


def test_equal_points_count_once() -> None:
    """Two equal rows give one direction; nothing is divided by rounding."""
    matrix = kernel(5, 9)
    twice = matrix[[0, 1, 2, 2, 3, 4, 0]][:, [0, 1, 2, 2, 3, 4, 0]]
    white = whitening(twice)
    assert white.shape == (7, 5)
    spread = torch.zeros(7, 5, dtype=D)
    spread[[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 2, 3, 4, 0]] = 1
    rows = white.T @ spread @ matrix  # K_xZ white, for x the five points themselves
    assert_close(rows.T @ rows, matrix, SOLVED)
    assert float(white.abs().max()) < 1e2 * float(whitening(matrix).abs().max())


def test_single_precision_is_widened() -> None:
    assert whitening(kernel(4, 6).float()).dtype == D


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.full((2, 2), float("nan")), "not finite; check the inputs"),
        (torch.full((2, 2), float("inf")), "not finite; check the inputs"),
        (torch.full((1, 1), float("inf")), "not finite; check the inputs"),
        (torch.zeros(3, 3), "zero: no output depends on the selected weights .* choose other weights"),
    ],
)
@pytest.mark.parametrize("way", [whitening, smooth_whitening])
def test_kernels_that_are_none(way: Callable[[Tensor], Tensor], matrix: Tensor, message: str) -> None:
    with pytest.raises(lw.errors.NumericalError, match=message):
        way(matrix)


@pytest.mark.parametrize("size", [20, 200])
def test_small_directions_count_however_many_there_are(size: int) -> None:
    """A weak prior makes the data decide them, and what is left out has the variance of the prior."""
    turn = torch.linalg.qr(kernel(size, size + 5)).Q
    values = torch.zeros(size, dtype=D)
    values[:4] = torch.tensor([1.0, 1e-6, 1e-12, 5e-14], dtype=D)
    assert whitening((turn * values) @ turn.T).shape == (size, 4)


@pytest.mark.parametrize("jitter", [1e-9, 1e-3])
def test_the_smooth_one_has_a_little_on_the_diagonal(jitter: float) -> None:
    matrix = kernel(6, 8)
    white = smooth_whitening(matrix, jitter)
    raised = matrix + jitter * matrix.diagonal().mean() * torch.eye(6, dtype=D)
    assert_close(white @ white.T, torch.linalg.inv(raised), SOLVED)
    assert_close(white, white.triu())


def test_the_smooth_one_never_tells_more_than_there_is() -> None:
    """Singular: K_xZ white whiteᵀ K_Zx stays below the variance at x, and near it."""
    matrix = kernel(8, 3)
    rows = matrix @ smooth_whitening(matrix)
    left = matrix - rows @ rows.T
    assert float(torch.linalg.eigvalsh(left).min()) >= -1e-12 * float(matrix.diagonal().max())
    assert float(left.diagonal().max()) <= 1e-6 * float(matrix.diagonal().max())


def test_the_smooth_one_has_slopes() -> None:
    rows = torch.randn(4, 6, dtype=D, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: smooth_whitening(r @ r.T), (rows,))
    same = torch.randn(1, 6, dtype=D).expand(3, 6).clone().requires_grad_()  # three equal points
    (slope,) = torch.autograd.grad((rows.detach() @ same.T @ smooth_whitening(same @ same.T)).square().sum(), same)
    assert bool(torch.isfinite(slope).all())


def test_jitter_grows_until_it_is_enough() -> None:
    matrix = kernel(6, 8)
    values, vectors = torch.linalg.eigh(matrix)
    values[0] = -1e-8 * float(matrix.diagonal().mean())
    white = smooth_whitening(vectors @ torch.diag(values) @ vectors.T)
    assert bool(torch.isfinite(white).all())
    values[0] = -0.5 * values[-1]
    with pytest.raises(
        lw.errors.NumericalError, match=r"6 inducing points is not positive definite .* Compute in float64"
    ):
        smooth_whitening(vectors @ torch.diag(values) @ vectors.T)
