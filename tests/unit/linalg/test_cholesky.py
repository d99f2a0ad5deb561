"""Cholesky factors that explain themselves when they fail."""

from __future__ import annotations

import math

import pytest
import torch

from lapwing.errors import NumericalError
from lapwing.linalg.dense import cholesky
from tests.tolerances import assert_close


def test_factor() -> None:
    root = torch.randn(5, 7, dtype=torch.float64)
    matrix = root @ root.T
    factor = cholesky(matrix, "head")
    assert_close(factor @ factor.T, matrix)
    assert torch.equal(factor, factor.tril())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_not_positive_definite_names_the_layer_and_the_eigenvalue(dtype: torch.dtype) -> None:
    basis, _ = torch.linalg.qr(torch.randn(3, 3, dtype=dtype))
    matrix = basis @ torch.diag(torch.tensor([2.0, 1.0, -0.125], dtype=dtype)) @ basis.T
    with pytest.raises(NumericalError, match=r"precision of head\.weight is not positive definite.*-0\.125"):
        cholesky(matrix, "head.weight")


def test_not_finite_is_said_as_such() -> None:
    with pytest.raises(NumericalError, match=r"precision of head\.weight is not finite"):
        cholesky(torch.full((2, 2), math.nan), "head.weight")
