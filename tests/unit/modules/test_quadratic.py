"""Quadratic forms: the shorter one where it is exact, the dense one otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.modules import DenseForm, NoForm, SharedAxes, _shared_axes
from tests.tolerances import assert_close

D, C, ROWS = 5, 3, 4
A = torch.randn(ROWS, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def symmetric(*shape: int, seed: int = 0) -> Tensor:
    root = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return root @ root.mT


def expected(covariance: Tensor) -> Tensor:
    return torch.stack([torch.einsum("i,icdj,j->cd", a, covariance, a) for a in A])


def test_a_dense_covariance() -> None:
    covariance = symmetric(D * C, D * C).reshape(D, C, D, C).permute(0, 1, 3, 2)
    assert _shared_axes(covariance) is None
    assert_close(DenseForm(covariance)(A), expected(covariance))


def test_a_covariance_with_shared_axes_takes_the_shorter_form() -> None:
    outputs, inputs = torch.linalg.eigh(symmetric(C, C)).eigenvectors, torch.linalg.eigh(symmetric(D, D)).eigenvectors
    weights = torch.linspace(0.3, 2.0, C * D, dtype=torch.float64).square().reshape(C, D)
    covariance = torch.einsum("ck,dk,ia,ja,ka->icdj", outputs, outputs, inputs, inputs, weights)
    form = _shared_axes(covariance)
    assert isinstance(form, SharedAxes)
    assert_close(form(A), expected(covariance))


def test_no_spread() -> None:
    assert NoForm()(A[:, :C]).shape == (ROWS, C, C)
    assert float(NoForm()(A[:, :C]).abs().max()) == 0
