"""Log-determinants from a Krylov basis and a quadrature; test_ridge.py has the coverage of their stated errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lapwing.linalg.krylov import DeflatedSpectrum, block_krylov, random_signs
from tests.tolerances import assert_close, tolerance
from tests.unit.linalg.spectra import SPECTRA, D, Product, operator, product

SHIFTS = [0.05, 1.0, 20.0]


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
    for shift in SHIFTS:
        few, many = small.logdet(at(shift)), large.logdet(at(shift))
        assert many.error < 0.5 * few.error
        truth = float(exact(SPECTRA[name], shift))
        assert abs(float(many.value) - truth) < 5 * many.error + tolerance(D) * truth


@pytest.mark.parametrize("shift", SHIFTS)
def test_exact_if_the_basis_contains_everything(shift: float) -> None:
    estimate = spectrum(product(operator(SPECTRA["flat"])), 10, 20, probes=3, steps=4).logdet(at(shift))
    assert_close(estimate.value, exact(SPECTRA["flat"], shift))
    assert estimate.error < 1e-9


def test_few_steps_have_a_large_error() -> None:
    """The error includes what the nodes of the quadrature miss, which probes do not average away."""
    multiply = product(operator(SPECTRA["steep"]))
    for steps in (2, 5, 10):
        estimate = spectrum(multiply, 2, 1, probes=40, steps=steps).logdet(at(0.05))
        assert abs(float(estimate.value - exact(SPECTRA["steep"], 0.05))) < 5 * estimate.error


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
