"""Conjugate gradients, for one and for many right-hand sides."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from lapwing.errors import DataError, NumericalError
from lapwing.linalg.krylov import block_conjugate_gradients, conjugate_gradients
from lapwing.linalg.operators import Solution
from tests.tolerances import SOLVED, assert_close
from tests.unit.linalg.spectra import Counted, D, Product, operator, product

# Conjugate gradients against dense solves.


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


# Block conjugate gradients against dense solves, and the true residuals of both solvers.

SOLVERS = [conjugate_gradients, block_conjugate_gradients]


def by_root(diagonal: Tensor) -> Product:
    """The root of the preconditioner that divides by the diagonal."""
    return lambda rows: rows * diagonal.rsqrt()


@pytest.mark.parametrize("rows", [1, 5, 50])
@pytest.mark.parametrize("kind", ["none", "diagonal", "another", "its inverse"])
def test_block_cg_a_dense_solve(rows: int, kind: str) -> None:
    """With every root, also for more right-hand sides than dimensions."""
    scale = torch.logspace(-1, 1, 40, dtype=D)
    matrix = scale[:, None] * operator(torch.logspace(0, 2, 40, dtype=D)) * scale
    values, vectors = torch.linalg.eigh(matrix)
    roots = {
        "none": None,
        "diagonal": by_root(matrix.diagonal()),
        "another": product(operator(torch.linspace(1, 3, 40, dtype=D))),
        "its inverse": product((vectors * values.rsqrt()) @ vectors.T),
    }
    rhs = torch.randn(rows, 40, dtype=D)
    solution = block_conjugate_gradients(product(matrix), rhs, root=roots[kind], tolerance=1e-10, max_iterations=2000)
    assert float(true_residuals(matrix, solution, rhs).max()) < 1.1e-10
    assert_close(solution.x * scale, torch.linalg.solve(matrix, rhs.T).T * scale, SOLVED)
    assert solution.iterations == 1 or (kind != "its inverse" and rows < 40)


@pytest.mark.parametrize("rows", [1, 5, 50])
def test_a_root_that_is_not_symmetric(rows: int) -> None:
    """The inverse of a Cholesky factor gives the same iterates as the symmetric root of the same preconditioner."""
    matrix = operator(torch.logspace(0, 3, 40, dtype=D))
    near = matrix + operator(torch.linspace(0.1, 1, 40, dtype=D))
    factor = torch.linalg.cholesky(near)
    values, vectors = torch.linalg.eigh(near)
    rhs = torch.randn(rows, 40, dtype=D)
    lower = lambda v: torch.linalg.solve_triangular(factor, v.T, upper=False).T
    upper = lambda v: torch.linalg.solve_triangular(factor.T, v.T, upper=True).T
    symmetric = product((vectors * values.rsqrt()) @ vectors.T)
    one, other = (
        block_conjugate_gradients(product(matrix), rhs, **roots, tolerance=1e-10)
        for roots in ({"root": upper, "adjoint": lower}, {"root": symmetric})
    )
    assert abs(one.iterations - other.iterations) <= 1
    assert_close(one.x, torch.linalg.solve(matrix, rhs.T).T, SOLVED)
    for wrong in ({"root": upper}, {"root": upper, "adjoint": upper}, {"adjoint": lower}):
        with pytest.raises(NumericalError, match=r"differ by .* transposes; give both root and adjoint"):
            block_conjugate_gradients(product(matrix), rhs, **wrong)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_block_takes_fewer_iterations_than_its_rows(rows: int) -> None:
    """About the same number for one row; for many rows fewer, here by a factor of about the width of the block."""
    matrix, rhs = operator(torch.logspace(0, 4, 300, dtype=D)), torch.randn(rows, 300, dtype=D)
    alone = conjugate_gradients(product(matrix), rhs, tolerance=1e-8, max_iterations=5000)
    block = block_conjugate_gradients(product(matrix), rhs, tolerance=1e-8)
    assert float(true_residuals(matrix, block, rhs).max()) < 1.1e-8
    if rows == 1:
        assert abs(block.iterations - alone.iterations) <= 0.1 * alone.iterations
    else:
        assert block.iterations * rows < 2 * alone.iterations


def test_one_row_is_conjugate_gradients() -> None:
    matrix, rhs = operator(torch.logspace(0, 3, 30, dtype=D)), torch.randn(1, 30, dtype=D)
    for count in (1, 4, 9):
        one, other = (
            solve(product(matrix), rhs, tolerance=1e-14, max_iterations=count, truncated=True) for solve in SOLVERS
        )
        assert one.iterations == other.iterations == count
        assert_close(one.x, other.x)


def test_dependent_rows_do_no_harm() -> None:
    """Copies, sums, zeros, a row that converges at once, and rows of very different length."""
    matrix = operator(torch.logspace(0, 3, 80, dtype=D))
    rows = torch.randn(3, 80, dtype=D)
    easy = torch.linalg.eigh(matrix)[1][:, 3][None]
    rhs = torch.cat([rows, rows[:2], rows[:1] + rows[1:2], torch.zeros(1, 80, dtype=D), easy, 1e-9 * rows[2:] + easy])
    rhs[3] *= 1e12
    solution = block_conjugate_gradients(product(matrix), rhs, tolerance=1e-10)
    fewer = block_conjugate_gradients(product(matrix), torch.cat([rows, easy]), tolerance=1e-10)
    exact = torch.linalg.solve(matrix, rhs.T).T
    size = exact.norm(dim=1, keepdim=True).clamp_min(1e-99)
    assert_close(solution.x / size, exact / size, SOLVED)
    assert bool((solution.x[6] == 0).all())
    assert float(solution.residuals[6]) == 0
    assert abs(solution.iterations - fewer.iterations) <= 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_converged_row_does_not_slow_down_the_others(dtype: torch.dtype) -> None:
    """The rest of its residual is rounding, which is no direction to search."""
    matrix, rows = operator(torch.logspace(0, 3, 80, dtype=D)), torch.randn(6, 80, dtype=D)
    easy = torch.linalg.eigh(matrix)[1][:, 3][None]
    alone, beside = (
        block_conjugate_gradients(product(matrix, dtype), block, tolerance=1e-4)
        for block in (rows, torch.cat([rows, easy]))
    )
    assert beside.iterations <= alone.iterations + 1


def test_directions_that_become_dependent() -> None:
    """More rows than dimensions and a root that is exact up to rounding: solved, or an error."""
    for seed in range(10):
        torch.manual_seed(seed)
        low = operator(torch.cat([torch.logspace(3, 0, 25, dtype=D), torch.zeros(35, dtype=D)]))
        values, vectors = torch.linalg.eigh(low)
        ratios = (1e-6 / (values[35:] + 1e-6)).sqrt() - 1
        root = lambda v, r=ratios, u=vectors[:, 35:]: v + ((v @ u) * r) @ u.T
        matrix, rhs = low + 1e-6 * torch.eye(60, dtype=D), torch.randn(80, 60, dtype=D)
        try:
            solution = block_conjugate_gradients(product(matrix), rhs, root=root, tolerance=1e-10, max_iterations=150)
        except NumericalError:
            continue
        assert float(true_residuals(matrix, solution, rhs).max()) < 1e-6  # the rounding of x times the matrix


@pytest.mark.parametrize("distinct", [1, 2, 7])
def test_block_cg_as_many_iterations_as_distinct_eigenvalues(distinct: int) -> None:
    matrix = operator(torch.linspace(1, 2, distinct, dtype=D).repeat(16))
    solution = block_conjugate_gradients(product(matrix), torch.randn(4, 16 * distinct, dtype=D), tolerance=1e-11)
    assert solution.iterations == distinct


@pytest.mark.parametrize("solve", SOLVERS)
def test_a_residual_that_float32_products_cannot_reach_raises(solve: type) -> None:
    """Updated residuals keep falling, true ones do not: the error states the true one, and comes soon."""
    matrix, rhs = operator(torch.linspace(1, 100, 200, dtype=D)), torch.randn(3, 200, dtype=D)
    counted = Counted(matrix, torch.float32)
    with pytest.raises(NumericalError, match=r"residual of .*e-0[67]; expected 1e-10\. .*float64"):
        solve(counted, rhs, tolerance=1e-10)
    assert counted.calls < 200
    solution = solve(product(matrix, torch.float32), rhs, tolerance=1e-5)
    assert float(true_residuals(matrix, solution, rhs).max()) < 1.2e-5


@pytest.mark.parametrize("solve", SOLVERS)
def test_the_residual_is_computed_every_twenty_iterations(solve: type) -> None:
    matrix, rhs = operator(torch.logspace(0, 4, 200, dtype=D)), torch.randn(2, 200, dtype=D)
    counted = Counted(matrix)
    solution = solve(counted, rhs, tolerance=1e-8, max_iterations=3000)
    assert solution.iterations > 100
    assert counted.calls <= solution.iterations + solution.iterations // 20 + 1


@pytest.mark.parametrize(
    ("solve", "tolerance"),
    [(conjugate_gradients, 1e-14), (conjugate_gradients, 1e-25), (block_conjugate_gradients, 1e-14)],
)
def test_no_residual_below_the_true_one_is_claimed(solve: type, tolerance: float) -> None:
    """Below the rounding of A x only the updated residual falls: that converges, and the true residual is stated."""
    matrix, rhs = operator(torch.logspace(0, 4, 60, dtype=D)), torch.randn(3, 60, dtype=D)
    solution = solve(product(matrix), rhs, tolerance=tolerance)
    true = true_residuals(matrix, solution, rhs)
    assert solution.converged
    assert float(true.min()) > 3 * tolerance
    assert bool((solution.residuals > 0.5 * true).all())


@pytest.mark.parametrize("solve", SOLVERS)
def test_true_residuals_are_within_the_tolerance(solve: type) -> None:
    """Also with products in float32, where the updated residual differs from the true one by some per cent."""
    for number in range(100):
        torch.manual_seed(number)
        matrix, rhs = operator(torch.logspace(0, 2, 20, dtype=D)), torch.randn(8, 20, dtype=D)
        solution = solve(product(matrix, torch.float32), rhs, tolerance=3e-5)
        assert float(solution.residuals.max()) <= 3e-5


@pytest.mark.parametrize("solve", SOLVERS)
def test_the_last_iteration_is_checked(solve: type) -> None:
    """Also if the iterations run out: the residual in the message is the true one."""
    matrix, rhs = operator(torch.linspace(1, 1.5, 50, dtype=D)), torch.randn(2, 50, dtype=D)
    with pytest.raises(NumericalError, match=r"after 16 iterations with a relative residual of .*e-0[78]"):
        solve(product(matrix, torch.float32), rhs, tolerance=1e-25, max_iterations=16)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("solve", SOLVERS)
def test_right_hand_sides_that_are_not_finite_are_refused(solve: type, value: float) -> None:
    """Before the first product, truncated or not."""
    counted, rhs = Counted(operator(torch.linspace(1, 2, 8, dtype=D))), torch.ones(2, 8, dtype=D)
    bad = rhs.clone()
    bad[1, 3] = value
    for truncated in (False, True):
        with pytest.raises(DataError, match=r"right-hand sides .*: 1 of 16 entries are NaN or infinite; expected"):
            solve(counted, bad, truncated=truncated)
    assert counted.calls == 0


def test_block_cg_an_indefinite_operator_is_refused() -> None:
    matrix = operator(torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, -1.0], dtype=D))
    vectors = torch.linalg.eigh(matrix)[1]
    with pytest.raises(NumericalError, match=r"curvature -1, .* expected a symmetric positive definite operator"):
        block_conjugate_gradients(product(matrix), vectors[:, :2].T)
    with pytest.raises(NumericalError, match="positive definite"):  # met on the way
        block_conjugate_gradients(product(matrix), torch.stack([vectors.sum(1), vectors[:, 1]]), tolerance=1e-12)
    rhs = (0.1 * vectors[:, 0] + vectors[:, 1:].sum(1))[None]
    solution = block_conjugate_gradients(product(matrix), rhs, tolerance=1e-12, truncated=True)
    assert solution.iterations > 0
    assert not solution.converged
    assert_close(solution.residuals, true_residuals(matrix, solution, rhs))


@pytest.mark.parametrize("decades", [5, 6, 7])
def test_residuals_and_their_basis_agree(decades: int) -> None:
    """If a few products exhaust the space, the basis of the residuals drifts from them unless it is computed again."""
    for seed in range(4):
        torch.manual_seed(seed)
        matrix, rhs = operator(torch.logspace(0, -decades, 119, dtype=D)), torch.randn(21, 119, dtype=D)
        tolerance = 1e-7 if decades < 7 else 1e-6  # a condition of 1e7 leaves little room above rounding
        solution = block_conjugate_gradients(product(matrix), rhs, tolerance=tolerance)
        assert float(true_residuals(matrix, solution, rhs).max()) < 1.1 * tolerance


@pytest.mark.parametrize("solve", SOLVERS)
def test_an_asymmetric_operator_is_seen_at_the_first_product(solve: type) -> None:
    matrix, rhs = operator(torch.linspace(1, 2, 60, dtype=D)), torch.randn(5, 60, dtype=D)
    counted = Counted(matrix + 0.05 * torch.randn(60, 60, dtype=D))
    with pytest.raises(NumericalError, match="not symmetric"):
        solve(counted, rhs)
    assert counted.calls == 1


def test_roots_that_are_not_finite_are_refused() -> None:
    matrix, rhs = operator(torch.linspace(1, 2, 20, dtype=D)), torch.randn(3, 20, dtype=D)
    with pytest.raises(NumericalError, match="products are not finite"):
        block_conjugate_gradients(product(matrix), rhs, root=lambda rows: rows * torch.nan)
    assert block_conjugate_gradients(product(matrix), rhs[:0]).x.shape == (0, 20)
