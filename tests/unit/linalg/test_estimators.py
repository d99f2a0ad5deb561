"""Traces and diagonals with honest errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lapwing.linalg.estimators import Estimate, diagonal, student, trace
from scipy import stats
from torch import Tensor

from lapwing.errors import NumericalError
from tests.tolerances import assert_close
from tests.unit.linalg.spectra import SPECTRA, Counted, D, operator, product


def seeds(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def test_student() -> None:
    for degrees in (1, 2, 3, 4, 5, 10, 31, 1000):
        for level in (0.1, 0.5, 0.95, 0.999):
            assert student(level, degrees) == pytest.approx(stats.t.ppf(0.5 + 0.5 * level, degrees), rel=1e-8)
    with pytest.raises(ValueError, match="level 1 with 5"):
        student(1.0, 5)
    with pytest.raises(ValueError, match="0 degrees"):
        student(0.5, 0)


@pytest.mark.parametrize("sketch", [0, 15])
def test_intervals_hold_the_trace_as_often_as_they_say(sketch: int) -> None:
    """Over 300 seeds: at 95 % and at 50 %, within three binomial standard deviations."""
    matrix = operator(SPECTRA["flat"])
    found = [trace(product(matrix), 120, 12, generator=g, sketch=sketch) for g in seeds(300)]
    for level in (0.95, 0.5):
        held = sum(bool(low <= matrix.trace() <= high) for low, high in (one.interval(level) for one in found))
        assert abs(held - 300 * level) <= 3 * (300 * level * (1 - level)) ** 0.5
    values = torch.stack([one.value for one in found])
    assert float((values.mean() - matrix.trace()).abs()) < 4 * float(values.std()) / 300**0.5


def test_a_sketch_makes_the_error_small() -> None:
    """At the same number of rows in all, on a spectrum that decays."""
    matrix = operator(SPECTRA["steep"])
    plain, sketched = Counted(matrix), Counted(matrix)
    one = trace(plain, 120, 60, generator=seeds(1)[0])
    two = trace(sketched, 120, 20, generator=seeds(1)[0], sketch=20)
    assert plain.rows == sketched.rows == 60
    assert (plain.calls, sketched.calls) == (one.products, two.products) == (1, 2)
    assert float(two.error) < 0.5 * float(one.error)


@pytest.mark.parametrize("estimate", [trace, diagonal])
@pytest.mark.parametrize("sketch", [30, 500])
def test_exact_where_the_sketch_holds_the_range(estimate: Callable[..., Estimate], sketch: int) -> None:
    matrix = operator(SPECTRA["low rank"])
    found = estimate(product(matrix), 120, 3, generator=seeds(1)[0], sketch=sketch)
    exact = matrix.diagonal().sum() if estimate is trace else matrix.diagonal()
    assert_close(found.value, exact)
    assert float(found.error.max()) < 1e-9


def test_the_diagonal_and_its_error() -> None:
    """Unbiased, and the error of one probe is the root of the sum of the other entries squared."""
    matrix = operator(SPECTRA["flat"])
    for sketch in (0, 10):
        found = [diagonal(product(matrix), 120, 40, generator=g, sketch=sketch) for g in seeds(50)]
        values = torch.stack([one.value for one in found])
        gap = (values.mean(0) - matrix.diagonal()).abs() / (values.std(0) / 50**0.5)
        assert float(gap.max()) < 5
        if sketch == 0:
            off = (matrix - torch.diag(matrix.diagonal())).norm(dim=1) / 40**0.5
            errors = torch.stack([one.error for one in found]).square().mean(0).sqrt()
            assert float((errors / off - 1).abs().max()) < 0.15
        low, high = found[0].interval(0.95)
        held = float(((low <= matrix.diagonal()) & (matrix.diagonal() <= high)).double().mean())
        assert held > 0.88


def test_equal_generators_give_equal_numbers_and_float32_products_float64() -> None:
    matrix = operator(SPECTRA["flat"])
    for estimate in (trace, diagonal):
        one, two = (estimate(product(matrix), 120, 5, generator=g, sketch=3) for g in (seeds(1)[0], seeds(1)[0]))
        assert torch.equal(one.value, two.value)
        assert torch.equal(one.error, two.error)
        narrow = estimate(product(matrix, torch.float32), 120, 5, generator=seeds(1)[0])
        wide = estimate(product(matrix), 120, 5, generator=seeds(1)[0])
        assert narrow.value.dtype == D
        assert_close(narrow.value, wide.value, dtype=torch.float32)


def test_refusals() -> None:
    def squashed(rows: Tensor) -> Tensor:
        return rows / 0

    with pytest.raises(ValueError, match="two probes, not 1"):
        trace(product(operator(SPECTRA["flat"])), 120, 1)
    with pytest.raises(NumericalError, match="not finite"):
        diagonal(squashed, 3, 4)
