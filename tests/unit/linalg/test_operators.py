"""Operators that are not what they claim to be are refused."""

from __future__ import annotations

import pytest
import torch

from lapwing.errors import NumericalError
from lapwing.linalg.krylov import leading_eigenpairs
from lapwing.linalg.operators import apply_checked, refuse_asymmetric
from tests.unit.linalg.spectra import SPECTRA, Counted, D, operator, product


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_symmetric_operators_pass(spectrum: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    matrix = operator(SPECTRA[spectrum])
    for scale in (1e-8, 1.0, 1e8):
        refuse_asymmetric(product(scale * matrix, dtype), len(matrix), generator=generator, tolerance=1e-5)


def test_nothing_is_symmetric() -> None:
    refuse_asymmetric(torch.zeros_like, 5)


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_an_asymmetric_operator_is_refused(size: float) -> None:
    """Already where the skew part is a thousandth: u·Av - v·Au is as large as the operator's skew part."""
    matrix = operator(SPECTRA["flat"])
    skew = torch.randn_like(matrix)
    skew = (skew - skew.T) / skew.norm() * matrix.norm() * size
    for seed in range(20):
        with pytest.raises(NumericalError, match=r"not symmetric.*evaluation mode.*augmentation"):
            refuse_asymmetric(
                product(matrix + skew), 120, generator=torch.Generator().manual_seed(seed), tolerance=1e-9
            )


def dropped(rows: torch.Tensor) -> torch.Tensor:
    """Dropout: other products at every call, each of them symmetric."""
    keep = (torch.rand(120) < 0.8).to(D)
    return keep * ((keep * rows) @ operator(SPECTRA["flat"]))


def test_an_operator_that_changes_is_refused() -> None:
    with pytest.raises(NumericalError, match=r"two calls.*differ.*dropout"):
        refuse_asymmetric(dropped, 120)


def test_eigenpairs_check_the_operator_first() -> None:
    """Two calls, and no iteration."""
    skew = torch.randn(120, 120, dtype=D)
    counted = Counted(operator(SPECTRA["flat"]) + 0.1 * (skew - skew.T))
    with pytest.raises(NumericalError, match="an operator is not symmetric"):
        leading_eigenpairs(counted, 120, 5)
    assert counted.calls == 2
    with pytest.raises(NumericalError, match="two calls to an operator with the same rows differ"):
        leading_eigenpairs(dropped, 120, 5)
    with pytest.raises(NumericalError, match="not finite"):
        leading_eigenpairs(lambda v: v * torch.nan, 120, 5)


def test_an_operator_that_mixes_its_rows_is_refused() -> None:
    weights = torch.tensor([[1.0], [2.0]], dtype=D)
    with pytest.raises(NumericalError, match="two calls"):
        refuse_asymmetric(lambda rows: weights[: len(rows)] * rows, 7)


def test_products_are_checked_for_shape_and_finiteness() -> None:
    rows = torch.ones(2, 3)
    with pytest.raises(NumericalError, match=r"shape \(2, 3\) to \(2,\)"):
        apply_checked(lambda v: v.sum(1), rows)
    with pytest.raises(NumericalError, match="not finite"):
        apply_checked(lambda v: v / 0, rows)
    assert apply_checked(lambda v: v, rows).dtype == D
