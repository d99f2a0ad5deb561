"""Krylov spaces: bases, log-determinants and quadrature by Lanczos."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lapwing.errors import DataError, NumericalError
from lapwing.linalg.krylov import (
    BlockKrylov,
    DeflatedSpectrum,
    block_conjugate_gradients,
    block_krylov,
    lanczos_quadrature,
    leading_eigenpairs,
    random_signs,
)
from lapwing.linalg.operators import Solution
from tests.tolerances import SOLVED, assert_close, assert_within, tolerance
from tests.unit.linalg.spectra import SPECTRA, Counted, D, Product, operator, product

# One Krylov space against dense solves for every shift.

SHIFTS = [1e-2, 1.0, 30.0]


def shifted(matrix: Tensor, shift: float) -> Tensor:
    return matrix + shift * torch.eye(len(matrix), dtype=D)


def true_residuals(matrix: Tensor, shift: float, solution: Solution, rhs: Tensor) -> Tensor:
    return (rhs - solution.x @ shifted(matrix, shift)).norm(dim=1) / rhs.norm(dim=1)


def basis(space: BlockKrylov) -> Tensor:
    """The basis (d, P) in one tensor."""
    return torch.cat(space.rows.blocks)


def check_basis(space: BlockKrylov, matrix: Tensor, start: Tensor) -> None:
    """Orthonormal, contains the start, and represents the operator."""
    assert_close(basis(space) @ basis(space).T, torch.eye(len(space.rows), dtype=D))
    assert_close(space.coordinates @ basis(space), start)
    assert_close(space.projected, basis(space) @ matrix @ basis(space).T)
    assert_close(space.turn @ torch.diag(space.values) @ space.turn.T, space.projected)
    assert bool((space.values.diff() <= 0).all())


@pytest.mark.parametrize("width", [1, 7, 200])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_a_full_basis_solves_every_shift(spectrum: str, width: int) -> None:
    """To ten digits, and a solve takes no product."""
    matrix, start = operator(SPECTRA[spectrum]), torch.randn(width, 120, dtype=D)
    counted = Counted(matrix)
    space = block_krylov(counted, start, 120)
    assert space.exhausted
    assert counted.calls == space.products
    check_basis(space, matrix, start)
    weights = torch.randn(3, width, dtype=D)
    for shift in SHIFTS:
        solution = space.solve(weights, shift, tolerance=1e-10)
        exact = torch.linalg.solve(shifted(matrix, shift), (weights @ start).T).T
        assert float((solution.x - exact).norm() / exact.norm()) < 1e-10
    assert counted.calls == space.products


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_residuals_are_the_true_ones(spectrum: str, steps: int) -> None:
    """Up to the rounding of A x in units of the right-hand side; large ones to eleven of their digits."""
    matrix, start = operator(SPECTRA[spectrum]), torch.randn(5, 120, dtype=D)
    space, weights = block_krylov(product(matrix), start, steps), torch.randn(4, 5, dtype=D)
    for shift in SHIFTS:
        solution = space.solve(weights, shift)
        true = true_residuals(matrix, shift, solution, weights @ start)
        norm = float(SPECTRA[spectrum].max()) + shift
        rounding = 1e2 * torch.finfo(D).eps * norm * solution.x.norm(dim=1) / (weights @ start).norm(dim=1)
        assert bool(((solution.residuals - true).abs() < rounding + 1e-12).all())
        large = true > 1e-2
        assert bool(((solution.residuals / true - 1)[large].abs() < rounding[large] + 1e-11).all())


def test_a_shift_for_each_row() -> None:
    """√a z + Xᵀε for every a at once, as posterior samples need it."""
    matrix, start = operator(SPECTRA["steep"]), torch.randn(2, 120, dtype=D)
    space = block_krylov(product(matrix), start, 60)
    shifts = torch.tensor(SHIFTS, dtype=D)
    weights = torch.stack([shifts.sqrt(), torch.ones(3, dtype=D)], 1)
    together = space.solve(weights, shifts, tolerance=1e-9)
    for row, shift in enumerate(SHIFTS):
        alone = space.solve(weights[row : row + 1], shift, tolerance=1e-9)
        assert_close(together.x[row], alone.x[0])
        # Residuals may be rounding of zero.
        assert float((together.residuals[row] - alone.residuals[0]).abs()) <= 1e-2 * 1e-9


def test_it_is_the_best_that_block_conjugate_gradients_find() -> None:
    """Same space, same Galerkin condition: after as many products, the same iterate."""
    matrix, start = operator(SPECTRA["flat"]), torch.randn(4, 120, dtype=D)
    for steps in (1, 4, 9):
        solution = block_krylov(product(matrix), start, steps).solve(torch.eye(4), 0.3)
        descent = block_conjugate_gradients(
            product(shifted(matrix, 0.3)), start, tolerance=1e-14, max_iterations=steps, truncated=True
        )
        assert_close(solution.x, descent.x)
        assert_close(solution.residuals, descent.residuals)


def test_extending_gives_what_a_longer_run_gives() -> None:
    matrix, start = operator(SPECTRA["steep"]), torch.randn(3, 120, dtype=D)
    whole, short = block_krylov(product(matrix), start, 9), block_krylov(product(matrix), start, 2)
    kept = basis(short).clone()
    longer = short.extend(product(matrix), 3).extend(product(matrix), 4)
    assert torch.equal(basis(short), kept)
    assert (short.products, longer.products, whole.products) == (2, 9, 9)
    assert_close(basis(longer), basis(whole))
    check_basis(longer, matrix, start)
    weights = torch.randn(2, 3, dtype=D)
    one, other = (space.solve(weights, 1.0) for space in (longer, whole))
    assert_close(one.x, other.x)
    assert_close(one.residuals, other.residuals)
    ended = block_krylov(product(matrix), start, 200)
    assert ended.extend(product(matrix), 5).products == ended.products


def test_dependent_start_rows_are_dropped() -> None:
    """Copies, sums, rows of zeros, and rows of very different length, which are not dependent."""
    matrix, rows = operator(SPECTRA["steep"]), torch.randn(3, 120, dtype=D)
    rows[2] *= 1e-9
    start = torch.cat([rows, rows[:1], rows[:1] - 2 * rows[1:2], torch.zeros(1, 120, dtype=D)])
    counted = Counted(matrix)
    space = block_krylov(counted, start, 20)
    assert len(space.rows) == 60
    assert counted.rows == 60
    check_basis(space, matrix, start)
    exact = torch.linalg.solve(shifted(matrix, 1.0), start.T).T
    solution = space.solve(torch.eye(6), 1.0, tolerance=1e-8)
    assert_close(solution.x / start.norm(dim=1, keepdim=True).clamp_min(1e-99),
                 exact / start.norm(dim=1, keepdim=True).clamp_min(1e-99), 0.5)  # fmt: skip
    assert float(solution.residuals[5]) == 0


def test_an_operator_of_low_rank_ends_early_and_exactly() -> None:
    matrix, start = operator(SPECTRA["low rank"]), torch.randn(8, 120, dtype=D)
    space = block_krylov(product(matrix), start, 50)
    assert space.exhausted
    assert space.products <= 6
    assert len(space.rows) == 38  # the range, and what of the start lies outside
    assert float(space.solve(torch.eye(8), 1e-2, tolerance=1e-10).residuals.max()) < 1e-11


@pytest.mark.parametrize("distinct", [1, 2, 5])
def test_as_many_blocks_as_distinct_eigenvalues(distinct: int) -> None:
    matrix = operator(torch.linspace(1, 2, distinct, dtype=D).repeat(20))
    space = block_krylov(product(matrix), torch.randn(3, 20 * distinct, dtype=D), 50)
    assert (space.products, len(space.rows), space.exhausted) == (distinct, 3 * distinct, True)


def test_the_basis_of_zeros_is_empty() -> None:
    start = torch.randn(3, 12, dtype=D)
    still = block_krylov(torch.zeros_like, start, 4)
    assert (still.products, still.exhausted) == (1, True)
    assert_close(still.solve(torch.eye(3), 2.0).x, start / 2)
    none = block_krylov(product(operator(torch.ones(12, dtype=D))), torch.zeros(2, 12), 4)
    solution = none.solve(torch.eye(2), 1.0)
    assert bool((solution.x == 0).all())
    assert solution.converged
    assert none.products == 0
    assert len(none.pairs().values) == 0


def test_a_looser_tolerance_drops_more_and_raises_the_residual() -> None:
    """A bound for what was dropped, never below the true residual, and not far above."""
    matrix, start = operator(SPECTRA["steep"]), torch.randn(6, 120, dtype=D)
    start[3] = start[2] + 1e-7 * start[4]
    start[4] = start[1]
    tight, loose = (block_krylov(product(matrix), start, 60, tolerance=t) for t in (1e-12, 1e-5))
    assert len(loose.rows) < len(tight.rows)
    solution = loose.solve(torch.eye(6), 1e-2)
    true = true_residuals(matrix, 1e-2, solution, start)
    assert bool((solution.residuals >= true * (1 - 1e-9)).all())
    assert 1e-8 < float(true.max()) < float(solution.residuals.max()) < 1e3 * float(true.max())


def test_what_the_start_lost_is_in_the_residual() -> None:
    matrix, start = operator(SPECTRA["flat"]), torch.randn(2, 120, dtype=D)
    start[1] = start[0] + 1e-7 * start[1]
    space = block_krylov(product(matrix), start, 120, tolerance=1e-5)
    assert space.coordinates[:, 1:].abs().max() == 0
    solution = space.solve(torch.eye(2), 1.0, tolerance=1e-6)
    assert_close(solution.residuals, true_residuals(matrix, 1.0, solution, start), 0.3)
    assert not space.solve(torch.tensor([[1.0, -1.0]]), 1.0).converged  # what was lost is all there is


def test_float32_products() -> None:
    """The residual is that of the float32 products, with their rounding."""
    matrix, start = operator(SPECTRA["flat"]), torch.randn(6, 120, dtype=D)
    space = block_krylov(product(matrix, torch.float32), start, 40)
    assert basis(space).dtype == D
    assert_close(basis(space) @ basis(space).T, torch.eye(len(space.rows), dtype=D))
    solution = space.solve(torch.eye(6), 0.1, tolerance=1e-5)
    true = true_residuals(matrix, 0.1, solution, start)
    assert float(true.max()) < 2e-6
    assert bool((solution.residuals < 5 * true).all())
    assert bool((solution.residuals > true / 5).all())


def test_float32_noise_is_not_taken_for_news() -> None:
    """Rank 30: the space ends soon after the range of the operator, with no tolerance set for float32."""
    matrix, start = operator(SPECTRA["low rank"]), torch.randn(8, 120, dtype=D)
    space = block_krylov(product(matrix, torch.float32), start, 50)
    assert space.exhausted
    assert 30 <= len(space.rows) <= 46  # 38, or a block more
    assert float(true_residuals(matrix, 1.0, space.solve(torch.eye(8), 1.0, tolerance=1e-4), start).max()) < 1e-4


def test_max_basis_stops_before_a_block_that_does_not_fit() -> None:
    matrix, start = operator(SPECTRA["flat"]), torch.randn(5, 120, dtype=D)
    space = block_krylov(product(matrix), start, 50, max_basis=23)
    assert (len(space.rows), space.products) == (20, 4)
    assert len(space.extend(product(matrix), 50, max_basis=41).rows) == 40


@pytest.mark.parametrize("steps", [1, 3, 120])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_image_of_what_the_basis_holds_takes_no_product(spectrum: str, steps: int) -> None:
    matrix, start = operator(SPECTRA[spectrum]), torch.randn(5, 120, dtype=D)
    counted = Counted(matrix)
    space = block_krylov(counted, start, steps)
    before = counted.calls
    inside = torch.randn(4, len(space.rows), dtype=D) @ basis(space)
    image, outside = space.image(inside)
    assert counted.calls == before
    assert float((image - inside @ matrix).norm() / (inside @ matrix).norm()) < 1e-10
    assert float(outside.max()) < 1e-12 * float(inside.norm())
    other = torch.randn(1, 120, dtype=D)
    left = other - other @ basis(space).T @ basis(space)
    gap = (space.image(other)[1] - left.norm(dim=1)).abs().max()  # a full basis leaves nothing but rounding
    assert float(gap) <= tolerance(D) * float(other.norm())


def test_ritz_pairs() -> None:
    """Those that have converged are eigenpairs; the residuals are those of the pairs."""
    matrix = operator(SPECTRA["steep"])
    pairs = block_krylov(product(matrix), torch.randn(8, 120, dtype=D), 8).pairs(20)
    residuals = (pairs.vectors @ matrix - pairs.values[:, None] * pairs.vectors).norm(dim=1) / pairs.values[0]
    assert pairs.vectors.shape == (20, 120)
    assert float((pairs.residuals - residuals).abs().max()) < 1e-13
    converged = pairs.residuals < 1e-10
    assert int(converged.sum()) > 5
    assert_close(pairs.values[converged], SPECTRA["steep"][:20][converged])


def test_an_indefinite_operator_is_refused_where_the_shift_does_not_lift_it() -> None:
    matrix = operator(torch.linspace(-1, 3, 30, dtype=D))
    space = block_krylov(product(matrix), torch.randn(4, 30, dtype=D), 20)
    with pytest.raises(NumericalError, match=r"Ritz value of -0\.5"):
        space.solve(torch.eye(4), 0.5)
    assert space.solve(torch.eye(4), 1.5, tolerance=1e-10).converged


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_start_that_is_not_finite_is_refused(value: float) -> None:
    counted = Counted(operator(SPECTRA["flat"]))
    with pytest.raises(DataError, match="start block of a Krylov space: 1 of 120 entries are NaN or infinite"):
        block_krylov(counted, torch.cat([torch.ones(1, 119), torch.tensor([[value]])], 1), 3)
    assert counted.calls == 0


def test_products_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(NumericalError, match="not finite"):
        block_krylov(lambda v: v * torch.nan, torch.ones(1, 4, dtype=D), 2)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("steps", [1, 120])
def test_more_rows_join_the_next_block(spectrum: str, steps: int) -> None:
    """The basis stays orthonormal and represents the operator, whether the space was invariant before or not."""
    matrix, start = operator(SPECTRA[spectrum])[:60, :60], torch.randn(2, 60, dtype=D)
    start[:, 40:], matrix[:40, 40:], matrix[40:, :40] = 0, 0, 0  # the start never leaves the first forty
    space = block_krylov(product(matrix), start, steps)
    new = torch.linalg.qr(torch.cat([torch.zeros(3, 40, dtype=D), torch.randn(3, 20, dtype=D)], 1).T)[0].T
    wider = space.widen(new).extend(product(matrix), 2)
    check_basis(wider, matrix, start)
    assert len(wider.rows) > len(space.rows) + 3
    pairs = wider.pairs()
    residual = (pairs.vectors @ matrix - pairs.values[:, None] * pairs.vectors).norm(dim=1) / pairs.values[0]
    assert float((pairs.residuals - residual).abs().max()) < 1e-11


# Leading eigenpairs of symmetric operators.


@pytest.mark.parametrize("block", [1, 4, 16, 100])
def test_at_full_rank_the_operator_itself(block: int, generator: torch.Generator) -> None:
    matrix = operator(torch.linspace(3, 0.1, 30, dtype=D))
    pairs = leading_eigenpairs(product(matrix), 30, 30, block=block, generator=generator)
    assert_close(pairs.vectors.T @ torch.diag(pairs.values) @ pairs.vectors, matrix)
    assert_close(pairs.vectors @ pairs.vectors.T, torch.eye(30, dtype=D))
    assert_close(pairs.values, torch.linalg.eigvalsh(matrix).flip(0))
    assert float(pairs.residuals.max()) <= 1e-10


@pytest.mark.parametrize("rank", [6, 9, 40])
def test_an_operator_of_lower_rank_ends_early_and_exactly(rank: int, generator: torch.Generator) -> None:
    values = torch.cat([torch.linspace(5, 1, 6, dtype=D), torch.zeros(74, dtype=D)])
    matrix = operator(values)
    pairs = leading_eigenpairs(product(matrix), 80, rank, block=4, generator=generator)
    assert_close(pairs.vectors.T @ torch.diag(pairs.values) @ pairs.vectors, matrix)
    assert pairs.products <= 5


def test_leading_pairs_of_a_steep_spectrum(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.linalg.krylov.OVERSAMPLE", 72)
    matrix = operator(torch.logspace(0, -12, 200, dtype=D))
    pairs = leading_eigenpairs(product(matrix), 200, 8, block=4, tolerance=1e-9, generator=generator)
    exact, vectors = torch.linalg.eigh(matrix)
    assert_close(pairs.values, exact.flip(0)[:8], SOLVED)
    overlap = (pairs.vectors @ vectors.flip(1)[:, :8]).abs()
    assert_close(overlap, torch.eye(8, dtype=D), SOLVED)
    residual = (pairs.vectors @ matrix - pairs.values[:, None] * pairs.vectors).norm(dim=1) / exact.max()
    # Both are relative to the largest eigenvalue, and known to the rounding of a product of length 200.
    assert float((pairs.residuals - residual).abs().max()) < 200 * torch.finfo(D).eps


def test_residuals_say_how_far_off_the_pairs_are(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = operator(torch.linspace(2, 1, 300, dtype=D))  # hardly any gap: a small basis cannot do it
    pairs = leading_eigenpairs(product(matrix), 300, 5, block=5, tolerance=1e-8, generator=generator)
    residual = (pairs.vectors @ matrix - pairs.values[:, None] * pairs.vectors).norm(dim=1) / pairs.values[0]
    assert_close(pairs.residuals, residual)
    assert float(residual.max()) > 1e-3
    monkeypatch.setattr("lapwing.linalg.krylov.OVERSAMPLE", 295)
    assert float(leading_eigenpairs(product(matrix), 300, 5, block=5, generator=generator).residuals.max()) <= 1e-3


@pytest.mark.parametrize(("rank", "block"), [(5, 16), (7, 4), (1, 6)])
def test_the_last_block_is_whole_and_the_residuals_are_true(rank: int, block: int, generator: torch.Generator) -> None:
    """Where max(2 rank, rank + 20) is no multiple of the block; with as many products as that takes."""
    matrix, limit = operator(torch.linspace(2, 1, 300, dtype=D)), max(2 * rank, rank + 20)
    seen = []
    pairs = leading_eigenpairs(
        lambda rows: seen.append(len(rows)) or rows @ matrix, 300, rank, block=block, tolerance=1e-12,
        generator=generator,
    )  # fmt: skip
    assert seen[2:] == [block] * -(-limit // block)  # after the two that look at the operator
    assert pairs.products == len(seen) - 2
    residual = (pairs.vectors @ matrix - pairs.values[:, None] * pairs.vectors).norm(dim=1) / pairs.values[0]
    assert_close(pairs.residuals, residual)


def test_eigenvalues_repeated_more_often_than_the_block_is_wide(generator: torch.Generator) -> None:
    """A Krylov space from three vectors has three eigenvectors of each eigenvalue; the rest must be there too."""
    values = torch.cat([torch.full((7,), 2.0, dtype=D), torch.full((5,), 0.5, dtype=D), torch.zeros(28, dtype=D)])
    matrix = operator(values)
    pairs = leading_eigenpairs(product(matrix), 40, 12, block=3, tolerance=1e-10, generator=generator)
    assert_close(pairs.values, values[:12])


def test_lanczos_of_zeros_is_zero(generator: torch.Generator) -> None:
    pairs = leading_eigenpairs(lambda rows: torch.zeros_like(rows), 12, 3, generator=generator)
    assert bool((pairs.values == 0).all())
    assert bool(torch.isfinite(pairs.vectors).all())


# Log-determinants from a Krylov basis and a quadrature; test_ridge.py has the coverage of their stated errors.

LOGDET_SHIFTS = [0.05, 1.0, 20.0]


def spectrum(multiply: Product, start: int, blocks: int, probes: int = 20, steps: int = 25) -> DeflatedSpectrum:
    """A basis from ``start`` rows and ``blocks`` products, then probes on the rest."""
    generator = torch.Generator().manual_seed(5)
    basis = block_krylov(multiply, torch.randn(start, 120, dtype=D, generator=generator), blocks)
    return DeflatedSpectrum.of(multiply, basis, random_signs(probes, 120, generator, None), steps)


def exact(values: Tensor, shift: float) -> Tensor:
    return torch.log1p(values / shift).sum()


def at(shift: float) -> Tensor:
    return torch.tensor(shift, dtype=D)


@pytest.mark.parametrize("name", ["steep", "low rank"])
def test_a_larger_basis_makes_the_error_small(name: str) -> None:
    """The eigenvalues in the basis are exact; at the same cost the probes have little left to estimate."""
    multiply = product(operator(SPECTRA[name]))
    small, large = spectrum(multiply, 2, 1), spectrum(multiply, 8, 8)
    assert len(large.eigenvalues) > 10 > len(small.eigenvalues)
    assert_close(large.eigenvalues[:5], SPECTRA[name][:5])
    for shift in LOGDET_SHIFTS:
        few, many = small.logdet(at(shift)), large.logdet(at(shift))
        assert many.error < 0.5 * few.error
        truth = float(exact(SPECTRA[name], shift))
        assert abs(float(many.value) - truth) < 5 * many.error + tolerance(D) * truth


@pytest.mark.parametrize("shift", LOGDET_SHIFTS)
def test_exact_if_the_basis_contains_everything(shift: float) -> None:
    estimate = spectrum(product(operator(SPECTRA["flat"])), 10, 20, probes=3, steps=4).logdet(at(shift))
    assert_close(estimate.value, exact(SPECTRA["flat"], shift))
    assert estimate.error < 1e-9


def test_no_cancellation_at_large_shifts() -> None:
    """log det(A + a) - P log a would lose all digits: here the value is 1e-12 of either. Diagonal: signs are exact."""
    estimate = spectrum(product(torch.diag(SPECTRA["steep"])), 2, 1, probes=2, steps=20).logdet(at(1e14))
    assert float(estimate.value) == pytest.approx(float(SPECTRA["steep"].sum()) / 1e14, rel=1e-2, abs=0)


def test_a_zero_operator() -> None:
    estimate = spectrum(torch.zeros_like, 3, 2).logdet(at(1.0))
    assert float(estimate.value) == 0
    assert estimate.error == 0


def test_one_probe_has_no_standard_error() -> None:
    assert spectrum(product(operator(SPECTRA["flat"])), 2, 1, probes=1).logdet(at(1.0)).error == math.inf


# Gauss quadrature by Lanczos steps, against dense functions of matrices.


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_a_full_quadrature_is_exact(spectrum: str) -> None:
    """Both ends are exact for every function, after as many steps as there are distinct eigenvalues."""
    matrix, rows = operator(SPECTRA[spectrum]), torch.randn(4, 120, dtype=D)
    counted = Counted(matrix)
    quadrature = lanczos_quadrature(counted, rows, 500)
    assert counted.calls <= {"flat": 120, "steep": 120, "low rank": 32, "clusters": 3}[spectrum]
    values, vectors = torch.linalg.eigh(matrix)
    weights = (rows @ vectors).square()
    for function in (lambda x: torch.log1p(x.clamp_min(0) / 0.1), lambda x: x / (x + 0.1), lambda x: x):
        dense = (weights * function(values.clamp_min(0))).sum(1)
        for end in quadrature.ends(function):
            assert_close(end, dense)


@pytest.mark.parametrize("spectrum", ["flat", "steep", "low rank"])
def test_the_value_lies_between_the_ends(spectrum: str) -> None:
    """For every row, shift and number of steps; and the ends come closer with every step."""
    matrix, rows = operator(SPECTRA[spectrum]), torch.randn(6, 120, dtype=D)
    values, vectors = torch.linalg.eigh(matrix)
    weights, before = (rows @ vectors).square(), torch.inf
    for steps in (1, 2, 4, 8, 16):
        quadrature, widths = lanczos_quadrature(product(matrix), rows, steps), []
        for shift in (0.05, 1.0, 20.0):
            dense = (weights * torch.log1p(values.clamp_min(0) / shift)).sum(1)
            low, high = quadrature.ends(lambda x, a=shift: torch.log1p(x / a))
            assert bool((low <= dense * (1 + 1e-9)).all())
            assert bool((high >= dense * (1 - 1e-9)).all())
            widths.append(float((high - low).mean()))
        assert sum(widths) < before
        before = sum(widths)


def test_a_row_of_zeros_adds_nothing() -> None:
    rows = torch.randn(3, 120, dtype=D)
    rows[1] = 0
    quadrature = lanczos_quadrature(product(operator(SPECTRA["flat"])), rows, 6)
    assert [float(end[1]) for end in quadrature.ends(torch.log1p)] == [0, 0]


def test_random_signs_estimate_a_trace(generator: torch.Generator) -> None:
    matrix = operator(SPECTRA["flat"])
    rows = random_signs(300, 120, generator, None)
    assert rows.dtype == D
    assert bool((rows.abs() == 1).all())
    assert_within((rows @ matrix * rows).sum(1), matrix.trace())


def test_quadrature_float32_products() -> None:
    matrix, rows = operator(SPECTRA["low rank"]), torch.randn(4, 120, dtype=D)
    wide, narrow = (lanczos_quadrature(product(matrix, dtype), rows, 30) for dtype in (D, torch.float32))
    for end, exact in zip(narrow.ends(torch.log1p), wide.ends(torch.log1p), strict=True):
        assert end.dtype == D
        assert_close(end, exact, dtype=torch.float32)
