"""Log-determinants with honest intervals, and the quadrature behind them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapwing.errors import NumericalError
from lapwing.linalg.krylov import Eigenpairs, block_krylov
from lapwing.linalg.lanczos import leading_eigenpairs
from lapwing.linalg.logdet import log_determinant
from lapwing.linalg.quadrature import lanczos_quadrature
from tests.tolerances import assert_close
from tests.unit.linalg.spectra import SPECTRA, Counted, D, operator, product

SHIFTS = torch.tensor([0.05, 1.0, 20.0], dtype=D)


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def exact(values: Tensor, shifts: Tensor = SHIFTS) -> Tensor:
    return torch.log1p(values / shifts[:, None]).sum(1)


def leading(matrix: Tensor, rank: int) -> Eigenpairs:
    values, vectors = torch.linalg.eigh(matrix)
    return Eigenpairs(values.flip(0)[:rank], vectors.flip(1)[:, :rank].T, torch.zeros(rank, dtype=D), 1)


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_a_full_quadrature_is_exact(spectrum: str) -> None:
    """From both ends, for every function, in as many steps as there are distinct eigenvalues."""
    matrix, rows = operator(SPECTRA[spectrum]), torch.randn(4, 120, dtype=D)
    found = lanczos_quadrature(product(matrix), rows, 500)
    assert found.products <= {"flat": 120, "steep": 120, "low rank": 32, "clusters": 3}[spectrum]
    values, vectors = torch.linalg.eigh(matrix)
    weights = (rows @ vectors).square()
    for function in (lambda x: torch.log1p(x.clamp_min(0) / 0.1), lambda x: x / (x + 0.1), lambda x: x):
        dense = (weights * function(values.clamp_min(0))).sum(1)
        for end in found.ends(function):
            assert_close(end, dense)


@pytest.mark.parametrize("spectrum", ["flat", "steep", "low rank"])
def test_the_ends_hold_the_value_between_them(spectrum: str) -> None:
    """For every row and shift, whatever the number of steps; and they close."""
    matrix, rows = operator(SPECTRA[spectrum]), torch.randn(6, 120, dtype=D)
    values, vectors = torch.linalg.eigh(matrix)
    weights, before = (rows @ vectors).square(), torch.inf
    for steps in (1, 2, 4, 8, 16):
        found, widths = lanczos_quadrature(product(matrix), rows, steps), []
        for shift in (0.05, 1.0, 20.0):
            dense = (weights * torch.log1p(values.clamp_min(0) / shift)).sum(1)
            low, high = found.ends(lambda x, a=shift: torch.log1p(x / a))
            assert bool((low <= dense * (1 + 1e-9)).all())
            assert bool((high >= dense * (1 - 1e-9)).all())
            widths.append(float((high - low).mean()))
        assert sum(widths) < before
        before = sum(widths)


def test_a_row_of_noughts_adds_nothing() -> None:
    rows = torch.randn(3, 120, dtype=D)
    rows[1] = 0
    found = lanczos_quadrature(product(operator(SPECTRA["flat"])), rows, 6)
    assert [float(end[1]) for end in found.ends(torch.log1p)] == [0, 0]


@pytest.mark.parametrize("deflated", [0, 8])
def test_intervals_hold_the_value_as_often_as_they_say(deflated: int) -> None:
    """Over 200 seeds, at 95 % and at 50 %, within three binomial standard deviations, for every shift of one run.

    Twelve probes, so that Student's t matters; the quadrature is far more accurate than the probes, so that it does
    not widen the intervals.
    """
    matrix = operator(SPECTRA["flat"])
    pairs = leading(matrix, deflated) if deflated else None
    true = exact(SPECTRA["flat"])
    held = {0.95: torch.zeros(3), 0.5: torch.zeros(3)}
    for number in range(200):
        found = log_determinant(
            product(matrix), 120, SHIFTS, probes=12, steps=14, generator=seed(number), deflate=pairs
        )
        assert bool((found.bias < 0.05 * found.error).all())
        for level, count in held.items():
            low, high = found.interval(level)
            count += (low <= true) & (true <= high)
    for level, count in held.items():
        slack = 3 * (200 * level * (1 - level)) ** 0.5
        assert bool(((count - 200 * level).abs() <= slack).all()), (level, count)


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_stated_interval_holds_the_value_95_times_in_a_hundred(spectrum: str) -> None:
    """At every shift of one run, whether probes or quadrature make the error."""
    matrix, true = operator(SPECTRA[spectrum]), exact(SPECTRA[spectrum])
    held = torch.zeros(3)
    for number in range(100):
        found = log_determinant(product(matrix), 120, SHIFTS, probes=12, steps=14, generator=seed(number))
        low, high = found.interval()
        held += (low <= true) & (true <= high)
        assert bool((found.error > 1e-4 * true).all())
    assert bool((held >= 95).all()), held


@pytest.mark.parametrize("steps", [2, 5, 10])
def test_a_quadrature_with_few_steps_says_so(steps: int) -> None:
    """The bias holds what the nodes miss: the interval is wide, and right."""
    matrix = operator(SPECTRA["steep"])
    for number in range(20):
        found = log_determinant(product(matrix), 120, SHIFTS, probes=40, steps=steps, generator=seed(number))
        low, high = found.interval(0.999)
        assert bool(((low <= exact(SPECTRA["steep"])) & (exact(SPECTRA["steep"]) <= high)).all())


def test_deflation_makes_the_error_small() -> None:
    """Exact part besides; at the same cost the probes have little left to see."""
    matrix = operator(SPECTRA["steep"])
    plain = log_determinant(product(matrix), 120, SHIFTS, probes=20, steps=25, generator=seed())
    found = log_determinant(
        product(matrix), 120, SHIFTS, probes=20, steps=25, generator=seed(), deflate=leading(matrix, 40)
    )
    assert bool((found.error < 0.5 * plain.error).all())
    assert bool((found.bias < 1e-10).all())  # the quadrature never sees what was deflated
    assert float(plain.bias[0]) > 0.01
    assert bool(((found.value - exact(SPECTRA["steep"])).abs() < 4 * found.error).all())


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize("source", ["lanczos", "krylov"])
def test_deflation_by_pairs_that_are_not_quite_right(tolerance: float, source: str) -> None:
    """Their residuals bound what they add to the value: it is never further off than noise and bias together."""
    matrix = operator(SPECTRA["steep"])
    if source == "lanczos":
        pairs = leading_eigenpairs(product(matrix), 120, 20, block=8, tolerance=tolerance, generator=seed())
    else:
        pairs = block_krylov(product(matrix), torch.randn(8, 120, dtype=D), 4 - round(torch.log10(
            torch.tensor(tolerance)).item())).pairs(20)  # fmt: skip
    found = log_determinant(product(matrix), 120, SHIFTS, probes=60, steps=60, generator=seed(), deflate=pairs)
    excess = (pairs.vectors @ matrix @ pairs.vectors.T - torch.diag(pairs.values)).abs().max()
    assert float(excess) < 1e-9  # Ritz pairs, as the bound supposes
    low, high = found.interval(0.999)
    assert bool(((low <= exact(SPECTRA["steep"])) & (exact(SPECTRA["steep"]) <= high)).all())


def test_the_bound_for_the_pairs_is_one() -> None:
    """Against the exact excess, log det of both parts less that of the whole, at every quality and shift."""
    values, shifts = SPECTRA["steep"], torch.tensor([1e-4, 1e-2, 1.0, 1e2], dtype=D)
    matrix = operator(values)
    for noise in (1e-6, 1e-3, 1e-1, 1.0):
        rough, _ = torch.linalg.qr(torch.linalg.eigh(matrix)[1].flip(1)[:, :30] + noise * torch.randn(120, 30) / 10)
        theta, turn = torch.linalg.eigh(rough.T @ matrix @ rough)
        vectors = (rough @ turn).T.flip(0)
        theta = theta.flip(0)
        residuals = (vectors @ matrix - theta[:, None] * vectors).norm(dim=1) / theta[0]
        pairs = Eigenpairs(theta, vectors, residuals, 1)
        found = log_determinant(product(matrix), 120, shifts, probes=2, steps=120, generator=seed(), deflate=pairs)
        rest = matrix - vectors.T @ (vectors @ matrix)
        rest = rest - (rest @ vectors.T) @ vectors
        both = exact(theta, shifts) + exact(torch.linalg.eigvalsh(rest).clamp_min(0), shifts)
        excess = both - exact(values, shifts)
        assert bool((excess >= -1e-6).all())
        assert bool((excess <= found.bias + 1e-6).all())


def test_one_run_serves_every_shift() -> None:
    matrix = operator(SPECTRA["steep"])
    counted = Counted(matrix)
    together = log_determinant(counted, 120, SHIFTS, probes=5, steps=9, generator=seed())
    assert (counted.calls, counted.rows, together.products) == (2 + 9, 4 + 45, 9)  # two of two rows for symmetry
    for index, shift in enumerate(SHIFTS):
        alone = log_determinant(product(matrix), 120, float(shift), probes=5, steps=9, generator=seed())
        assert alone.value.shape == ()
        assert_close(alone.value, together.value[index])
        assert_close(alone.error, together.error[index])
        assert_close(alone.bias, together.bias[index])


def test_no_cancellation_at_large_shifts() -> None:
    """log det(A + a) less P log a would lose it all: here the value is 1e-12 of that."""
    matrix = torch.diag(SPECTRA["steep"])
    found = log_determinant(product(matrix), 120, 1e14, probes=2, steps=20, generator=seed())
    assert float(found.value) == pytest.approx(float(SPECTRA["steep"].sum()) / 1e14, rel=1e-10, abs=0)


def test_everything_deflated_and_nothing_there() -> None:
    matrix = operator(SPECTRA["flat"])
    found = log_determinant(
        product(matrix), 120, SHIFTS, probes=3, steps=4, generator=seed(), deflate=leading(matrix, 120)
    )
    assert_close(found.value, exact(SPECTRA["flat"]))
    assert float(found.error.max()) < 1e-9
    none = log_determinant(torch.zeros_like, 12, SHIFTS, probes=3, steps=4, generator=seed())
    assert bool((none.value == 0).all())
    assert none.products == 1


def test_float32_products() -> None:
    matrix = operator(SPECTRA["low rank"])
    wide, narrow = (
        log_determinant(product(matrix, dtype), 120, SHIFTS, probes=10, steps=30, generator=seed())
        for dtype in (D, torch.float32)
    )
    assert narrow.value.dtype == D
    assert_close(narrow.value, wide.value, dtype=torch.float32)


def test_equal_generators_give_equal_numbers() -> None:
    matrix = operator(SPECTRA["flat"])
    one, two, other = (
        log_determinant(product(matrix), 120, 1.0, probes=4, steps=5, generator=seed(n)) for n in (1, 1, 2)
    )
    assert torch.equal(one.value, two.value)
    assert torch.equal(one.error, two.error)
    assert not torch.equal(one.value, other.value)


def test_refusals() -> None:
    matrix = operator(torch.linspace(-1, 3, 60, dtype=D))
    with pytest.raises(NumericalError, match=r"eigenvalue of -1 with a shift of 0\.5"):
        log_determinant(product(matrix), 60, 0.5, probes=4, steps=30)
    with pytest.raises(NumericalError, match="shift of 0; expected above zero"):
        log_determinant(product(matrix), 60, torch.tensor([1.0, 0.0]), probes=4, steps=30)
    with pytest.raises(ValueError, match="two probes"):
        log_determinant(product(matrix), 60, 2.0, probes=1, steps=3)
    with pytest.raises(ValueError, match="at least one step, not 0"):
        log_determinant(product(matrix), 60, 2.0, probes=4, steps=0)
