"""Eigendecompositions of curvature factors: single-precision LAPACK returns NaN for some finite matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.curvature.kronecker import psd_eigh
from tests.tolerances import assert_close

MATRIX = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))


def broken(*dtypes: torch.dtype) -> Any:
    """An eigh that returns NaN in these dtypes."""
    eigh = torch.linalg.eigh

    def run(matrix: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = eigh(matrix)
        return values, vectors * torch.nan if matrix.dtype in dtypes else vectors

    return run


def test_nan_in_single_precision_is_computed_again_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    gram = MATRIX @ MATRIX.T
    monkeypatch.setattr(torch.linalg, "eigh", broken(torch.float32))
    values, vectors = psd_eigh(gram)
    assert values.dtype == vectors.dtype == torch.float32
    assert float(values.min()) >= 0
    assert_close(vectors @ torch.diag(values) @ vectors.T, gram)


def test_nan_in_double_too_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.linalg, "eigh", broken(torch.float32, torch.float64))
    with pytest.raises(lw.errors.NumericalError, match=r"eigenvectors of a curvature factor \(7, 7\) are not finite"):
        psd_eigh(MATRIX @ MATRIX.T)
