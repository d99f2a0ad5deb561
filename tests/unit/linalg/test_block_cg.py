"""Block conjugate gradients against dense solves, and the true residuals of both solvers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapwing.errors import DataError, NumericalError
from lapwing.linalg.krylov import block_conjugate_gradients, conjugate_gradients
from lapwing.linalg.operators import Solution
from tests.tolerances import SOLVED, assert_close
from tests.unit.linalg.spectra import Counted, D, Product, operator, product

SOLVERS = [conjugate_gradients, block_conjugate_gradients]


def by_root(diagonal: Tensor) -> Product:
    """The root of the preconditioner that divides by the diagonal."""
    return lambda rows: rows * diagonal.rsqrt()


def true_residuals(matrix: Tensor, solution: Solution, rhs: Tensor) -> Tensor:
    return (rhs - solution.x @ matrix).norm(dim=1) / rhs.norm(dim=1)


@pytest.mark.parametrize("rows", [1, 5, 50])
@pytest.mark.parametrize("kind", ["none", "diagonal", "another", "its inverse"])
def test_a_dense_solve(rows: int, kind: str) -> None:
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


def test_the_residuals_are_the_true_ones() -> None:
    matrix, rhs = operator(torch.logspace(0, 3, 60, dtype=D)), torch.randn(3, 60, dtype=D)
    root = by_root(matrix.diagonal())
    for count in (1, 4, 15):
        solution = block_conjugate_gradients(product(matrix), rhs, root=root, max_iterations=count, truncated=True)
        assert solution.iterations == count
        assert_close(solution.residuals, true_residuals(matrix, solution, rhs))


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
def test_as_many_iterations_as_distinct_eigenvalues(distinct: int) -> None:
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
def test_short_solves_are_checked_as_well(solve: type) -> None:
    """After a few iterations in float32 the updated residual is far below the true one."""
    matrix, rhs = operator(torch.linspace(1, 1.5, 50, dtype=D)), torch.randn(2, 50, dtype=D)
    with pytest.raises(NumericalError, match=r"after [12]?[0-9] iterations with a relative residual of .*e-0[78]"):
        solve(product(matrix, torch.float32), rhs, tolerance=1e-11)


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


def test_what_does_not_converge_raises() -> None:
    matrix, rhs = operator(torch.logspace(0, 6, 50, dtype=D)), torch.randn(2, 50, dtype=D)
    with pytest.raises(NumericalError, match=r"block conjugate gradients stopped after 5 iterations .* expected 1e-08"):
        block_conjugate_gradients(product(matrix), rhs, tolerance=1e-8, max_iterations=5)


def test_an_indefinite_operator_is_refused() -> None:
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


def test_products_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(NumericalError, match="not finite"):
        block_conjugate_gradients(lambda v: v * torch.nan, torch.ones(1, 4, dtype=D))


def test_diagonal_preconditioners() -> None:
    scale = torch.logspace(-2, 2, 40, dtype=D)
    matrix = scale[:, None] * operator(torch.linspace(1, 4, 40, dtype=D)) * scale
    rhs = torch.randn(3, 40, dtype=D)
    plain = conjugate_gradients(product(matrix), rhs, max_iterations=20_000)
    rows = conjugate_gradients(product(matrix), rhs, precondition=lambda v: v / matrix.diagonal())
    block = block_conjugate_gradients(product(matrix), rhs, root=by_root(matrix.diagonal()))
    assert block.iterations <= rows.iterations < plain.iterations / 4


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
