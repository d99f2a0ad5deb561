"""Conjugate gradients against dense solves."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lapwing.errors import NumericalError
from lapwing.linalg.krylov import conjugate_gradients
from lapwing.linalg.operators import Solution
from tests.tolerances import SOLVED, assert_close

D = torch.float64
Product = Callable[[Tensor], Tensor]


def operator(values: Tensor) -> Tensor:
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=D))
    return basis @ torch.diag(values) @ basis.T


def product(matrix: Tensor) -> Product:
    return lambda rows: rows @ matrix


def true_residuals(matrix: Tensor, solution: Solution, rhs: Tensor) -> Tensor:
    return (rhs - solution.x @ matrix).norm(dim=1) / rhs.norm(dim=1)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", ["none", "diagonal", "another", "its inverse"])
def test_a_dense_solve(rows: int, kind: str) -> None:
    """For every right-hand side, with every positive definite preconditioner."""
    scale = torch.logspace(-2, 2, 40, dtype=D)
    matrix = scale[:, None] * operator(torch.logspace(0, 2, 40, dtype=D)) * scale
    inverses = {
        "diagonal": torch.diag(1 / matrix.diagonal()),
        "another": operator(torch.linspace(1, 3, 40, dtype=D)),
        "its inverse": torch.linalg.inv(matrix),
    }
    rhs = torch.randn(rows, 40, dtype=D)
    precondition = None if kind == "none" else product(inverses[kind])
    solution = conjugate_gradients(
        product(matrix), rhs, precondition=precondition, tolerance=1e-13, max_iterations=20_000
    )
    assert solution.converged
    assert_close(solution.x * scale, torch.linalg.solve(matrix, rhs.T).T * scale, SOLVED)


def test_a_preconditioner_saves_iterations() -> None:
    scale = torch.logspace(-2, 2, 40, dtype=D)
    matrix = scale[:, None] * operator(torch.linspace(1, 4, 40, dtype=D)) * scale
    rhs = torch.randn(3, 40, dtype=D)
    plain = conjugate_gradients(product(matrix), rhs, max_iterations=20_000)
    scaled = conjugate_gradients(product(matrix), rhs, precondition=lambda v: v / matrix.diagonal())
    exact = conjugate_gradients(product(matrix), rhs, precondition=product(torch.linalg.inv(matrix)))
    assert exact.iterations == 1
    assert 4 * scaled.iterations < plain.iterations


@pytest.mark.parametrize("distinct", [1, 2, 7])
def test_as_many_iterations_as_distinct_eigenvalues(distinct: int) -> None:
    matrix = operator(torch.linspace(1, 2, distinct, dtype=D).repeat(6))
    solution = conjugate_gradients(product(matrix), torch.randn(4, 6 * distinct, dtype=D), tolerance=1e-11)
    assert solution.iterations == distinct


def test_the_residuals_are_the_true_ones() -> None:
    matrix, rhs = operator(torch.logspace(0, 3, 30, dtype=D)), torch.randn(3, 30, dtype=D)
    for count in (1, 4, 15):
        solution = conjugate_gradients(product(matrix), rhs, max_iterations=count, truncated=True)
        assert solution.iterations == count
        assert_close(solution.residuals, true_residuals(matrix, solution, rhs))


def test_the_worst_row_decides() -> None:
    """One right-hand side needs one step and the other many; both end below the tolerance."""
    matrix = operator(torch.logspace(0, 3, 30, dtype=D))
    easy = torch.linalg.eigh(matrix)[1][:, 3]
    rhs = torch.stack([easy, torch.randn(30, dtype=D)])
    solution = conjugate_gradients(product(matrix), rhs, tolerance=1e-9)
    assert solution.iterations > 10
    assert float(true_residuals(matrix, solution, rhs).max()) <= 1.1e-9
    assert_close(solution.x, torch.linalg.solve(matrix, rhs.T).T, 0.4)


def test_converged_rows_do_not_change() -> None:
    """Not a bit, whatever the others do; and no row depends on the others."""
    matrix = operator(torch.logspace(0, 2, 30, dtype=D))
    rhs = torch.stack([torch.linalg.eigh(matrix)[1][:, 3], torch.randn(30, dtype=D), torch.randn(30, dtype=D)])
    together = conjugate_gradients(product(matrix), rhs, tolerance=1e-8)
    for row in range(3):
        alone = conjugate_gradients(product(matrix), rhs[row : row + 1], tolerance=1e-8)
        assert alone.iterations <= together.iterations + 2  # up to rounding
        assert_close(together.x[row], alone.x[0], SOLVED)  # products of one row round otherwise than those of three
    first = conjugate_gradients(product(matrix), rhs, tolerance=1e-8, max_iterations=2, truncated=True)
    assert torch.equal(first.x[0], together.x[0])
    assert not torch.equal(first.x[1], together.x[1])


def test_the_right_hand_side_does_not_change() -> None:
    matrix, rhs = operator(torch.linspace(1, 2, 8, dtype=D)), torch.randn(2, 8, dtype=D)
    kept = rhs.clone()
    conjugate_gradients(product(matrix), rhs)
    assert torch.equal(rhs, kept)


def test_float32_products() -> None:
    """Recurrences are float64; the error of the solution is the rounding of products times the condition number."""
    matrix, rhs = operator(torch.linspace(1, 10, 30, dtype=D)), torch.randn(2, 30, dtype=D)
    narrow = matrix.float()
    solution = conjugate_gradients(lambda v: v.float() @ narrow, rhs, tolerance=1e-6)
    assert solution.x.dtype == D
    assert float(true_residuals(matrix, solution, rhs).max()) <= 3e-6
    assert_close(solution.x, torch.linalg.solve(matrix, rhs.T).T, SOLVED, torch.float32)
    single = conjugate_gradients(lambda v: v.float() @ narrow, rhs.float(), tolerance=1e-6)
    assert single.x.dtype == D
    assert_close(single.x, solution.x, SOLVED, torch.float32)


def test_a_right_hand_side_of_zeros() -> None:
    """A right-hand side of zeros has the solution zero, alone or among others."""
    matrix = operator(torch.linspace(1, 4, 12, dtype=D))
    rhs = torch.randn(3, 12, dtype=D)
    rhs[1] = 0
    solution = conjugate_gradients(product(matrix), rhs, tolerance=1e-10)
    assert bool((solution.x[1] == 0).all())
    assert float(solution.residuals[1]) == 0
    assert_close(solution.x, torch.linalg.solve(matrix, rhs.T).T, SOLVED)
    none = conjugate_gradients(product(matrix), torch.zeros(2, 12, dtype=D))
    assert none.iterations == 0
    assert bool((none.x == 0).all())
    assert none.converged


def test_the_error_of_an_unconverged_solve_has_its_residual() -> None:
    matrix, rhs = operator(torch.logspace(0, 6, 50, dtype=D)), torch.randn(2, 50, dtype=D)
    with pytest.raises(NumericalError, match=r"stopped after 5 iterations .* expected 1e-08\. Raise") as error:
        conjugate_gradients(product(matrix), rhs, tolerance=1e-8, max_iterations=5)
    stated = re.search(r"residual of ([0-9.e+-]+);", str(error.value))
    assert stated is not None
    solution = conjugate_gradients(product(matrix), rhs, tolerance=1e-8, max_iterations=5, truncated=True)
    assert float(stated[1]) == pytest.approx(float(true_residuals(matrix, solution, rhs).max()), rel=1e-2)


def test_convergence_at_the_last_iteration_counts() -> None:
    matrix = operator(torch.linspace(1, 2, 3, dtype=D).repeat(4))
    assert conjugate_gradients(product(matrix), torch.randn(2, 12, dtype=D), max_iterations=3).converged


def test_truncated_returns_any_iterate() -> None:
    """Every iterate is nearer to the solution than the last one, in the norm of the operator."""
    matrix, rhs = operator(torch.logspace(0, 2, 50, dtype=D)), torch.randn(1, 50, dtype=D)
    exact = torch.linalg.solve(matrix, rhs.T).T
    errors = []
    for count in (0, 1, 2, 4, 8):
        solution = conjugate_gradients(product(matrix), rhs, max_iterations=count, truncated=True)
        assert not solution.converged
        assert solution.iterations == count
        gap = solution.x - exact
        errors.append(float((gap @ matrix * gap).sum()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0]
    assert conjugate_gradients(product(matrix), rhs, tolerance=1e-3, truncated=True).converged


def test_an_indefinite_operator_is_refused() -> None:
    matrix = operator(torch.tensor([3.0, 2.0, 1.0, -1.0], dtype=D))
    negative = torch.linalg.eigh(matrix)[1][:, 0]
    with pytest.raises(NumericalError, match=r"curvature -1, .* expected a symmetric positive definite operator"):
        conjugate_gradients(product(matrix), negative[None])
    with pytest.raises(NumericalError, match="positive definite"):  # met on the way
        conjugate_gradients(product(matrix), torch.linalg.eigh(matrix)[1].sum(1)[None], tolerance=1e-12)
    singular = operator(torch.tensor([2.0, 1.0, 0.0], dtype=D))
    with pytest.raises(NumericalError, match="positive definite"):  # zero up to rounding
        conjugate_gradients(product(singular), torch.randn(1, 3, dtype=D), tolerance=1e-12)


def test_truncated_stops_before_negative_curvature() -> None:
    """The iterate before it is returned; there is none if the very first direction has negative curvature."""
    matrix = operator(torch.tensor([3.0, 2.0, 1.0, -1.0], dtype=D))
    vectors = torch.linalg.eigh(matrix)[1]
    rhs = (0.1 * vectors[:, 0] + vectors[:, 1] + vectors[:, 2] + vectors[:, 3])[None]
    solution = conjugate_gradients(product(matrix), rhs, tolerance=1e-12, truncated=True)
    assert solution.iterations > 0
    assert not solution.converged
    assert_close(solution.residuals, true_residuals(matrix, solution, rhs))
    with pytest.raises(NumericalError, match="positive definite"):
        conjugate_gradients(product(matrix), vectors[:, 0][None], truncated=True)


def test_products_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(NumericalError, match="products are not finite"):
        conjugate_gradients(lambda v: v * torch.nan, torch.ones(1, 4, dtype=D))


def test_tolerance_is_relative_to_the_right_hand_side() -> None:
    matrix, rhs = operator(torch.linspace(1, 9, 30, dtype=D)), torch.randn(1, 30, dtype=D)
    solution = [conjugate_gradients(product(matrix), s * rhs, tolerance=1e-7) for s in (1e-12, 1.0, 1e12)]
    assert len({each.iterations for each in solution}) == 1
    assert_close(1e12 * solution[0].x, solution[1].x)
    assert_close(1e-12 * solution[2].x, solution[1].x)
