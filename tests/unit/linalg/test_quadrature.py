"""Gauss quadrature by Lanczos steps, against dense functions of matrices."""

from __future__ import annotations

import pytest
import torch

from lapwing.linalg.krylov import lanczos_quadrature, random_signs
from tests.tolerances import assert_close, assert_within
from tests.unit.linalg.spectra import SPECTRA, Counted, D, operator, product


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


def test_float32_products() -> None:
    matrix, rows = operator(SPECTRA["low rank"]), torch.randn(4, 120, dtype=D)
    wide, narrow = (lanczos_quadrature(product(matrix, dtype), rows, 30) for dtype in (D, torch.float32))
    for end, exact in zip(narrow.ends(torch.log1p), wide.ends(torch.log1p), strict=True):
        assert end.dtype == D
        assert_close(end, exact, dtype=torch.float32)
