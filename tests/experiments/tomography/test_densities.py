"""Log-densities of images against those of torch.distributions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

import lapwing as lw
from experiments.tomography import densities
from experiments.tomography.densities import log_density, patch_log_density, sampled_patch_log_density
from tests.experiments.tomography.dense import normals
from tests.tolerances import assert_close

SHAPE = (5, 7)
TRUTH, MEAN = normals(*SHAPE), normals(*SHAPE, seed=1)
ROOT = normals(35, 35, seed=2)
COVARIANCE = ROOT @ ROOT.mT / 35 + 0.1 * torch.eye(35, dtype=torch.float64)
# Rows 0-1 and 2-4, columns 0-1, 2-3 and 4-6: the remainder of a division by two is in the last patch.
CUTS = [(rows, columns) for rows in ((0, 2), (2, 5)) for columns in ((0, 2), (2, 4), (4, 7))]


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def normal(error: Tensor, covariance: Tensor) -> Tensor:
    return MultivariateNormal(torch.zeros_like(error), covariance).log_prob(error)


@pytest.mark.parametrize("floor", [0.0, 0.4])
def test_the_density_of_a_whole_image(floor: float) -> None:
    noisy = COVARIANCE + floor * torch.eye(35, dtype=torch.float64)
    expected = normal((TRUTH - MEAN).flatten(), noisy) / 35
    assert_close(number(log_density(TRUTH, MEAN, COVARIANCE, floor)), expected)
    assert_close(number(log_density(TRUTH.flatten(), MEAN.flatten(), COVARIANCE, floor)), expected)
    variances = COVARIANCE.diagonal()
    expected = normal((TRUTH - MEAN).flatten(), torch.diag(variances + floor)) / 35
    assert_close(number(log_density(TRUTH, MEAN, variances, floor)), expected)


def in_patches(covariance_of: Any) -> Tensor:
    """The sum over patches by a loop, per pixel."""
    pixels = torch.arange(35).reshape(SHAPE)
    total = number(0.0)
    for (top, bottom), (left, right) in CUTS:
        inside = pixels[top:bottom, left:right].flatten()
        total = total + normal((TRUTH - MEAN).flatten()[inside], covariance_of(inside))
    return total / 35


def test_the_density_of_patches() -> None:
    expected = in_patches(lambda i: COVARIANCE[i][:, i] + 0.2 * torch.eye(len(i), dtype=torch.float64))
    assert_close(number(patch_log_density(TRUTH, MEAN, COVARIANCE, 2, floor=0.2)), expected)
    alone = log_density(TRUTH, MEAN, COVARIANCE.diagonal(), 0.2)
    assert_close(number(patch_log_density(TRUTH, MEAN, COVARIANCE, 1, floor=0.2)), number(alone))
    whole = patch_log_density(TRUTH, MEAN, COVARIANCE, 5)  # a remainder of two columns: one patch
    assert_close(number(whole), number(log_density(TRUTH, MEAN, COVARIANCE)))


@pytest.mark.parametrize("shrinkage", [None, 0.5])
def test_the_density_of_patches_from_samples(shrinkage: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    deviations = normals(6, 35, seed=3)

    def covariance(inside: Tensor) -> Tensor:
        parts, size = deviations[:, inside], len(inside)
        share = size / (size + 6) if shrinkage is None else shrinkage
        full = sum(torch.outer(row, row) for row in parts) / 6
        kept = torch.where(torch.eye(size, dtype=torch.bool), full, (1 - share) * full)
        return kept + 0.3 * torch.eye(size, dtype=torch.float64)

    for limit in (1, 2**25):
        monkeypatch.setattr(densities, "NUMBERS_AT_ONCE", limit)
        value = sampled_patch_log_density(TRUTH, MEAN, deviations, 2, floor=0.3, shrinkage=shrinkage)
        assert_close(number(value), in_patches(covariance))


def test_fewer_samples_than_pixels_need_a_floor_or_shrinkage() -> None:
    deviations = normals(3, 35, seed=3)
    with pytest.raises(lw.errors.NumericalError, match="Add a noise floor"):
        sampled_patch_log_density(TRUTH, MEAN, deviations, 5, shrinkage=0.0)
    assert math.isfinite(sampled_patch_log_density(TRUTH, MEAN, deviations, 5))


@pytest.mark.parametrize(
    ("call", "message"),
    [(lambda: log_density(TRUTH, MEAN[:4], COVARIANCE), "expected the same shape"),
     (lambda: log_density(TRUTH * math.nan, MEAN, COVARIANCE), "truth is"),
     (lambda: log_density(TRUTH, MEAN, COVARIANCE[:4]), "covariance is"),
     (lambda: log_density(TRUTH, MEAN, COVARIANCE, -0.1), "floor is"),
     (lambda: log_density(TRUTH, MEAN, -COVARIANCE), "not positive definite"),
     (lambda: log_density(TRUTH, MEAN, -COVARIANCE.diagonal()), "not positive definite"),
     (lambda: patch_log_density(TRUTH, MEAN, COVARIANCE.diagonal(), 2), "covariance is"),
     (lambda: patch_log_density(TRUTH, MEAN, COVARIANCE, 6), "at least 6×6"),
     (lambda: patch_log_density(TRUTH, MEAN, COVARIANCE, 0), "patch is 0"),
     (lambda: patch_log_density(TRUTH.flatten(), MEAN.flatten(), COVARIANCE, 2), "expected .H, W"),
     (lambda: sampled_patch_log_density(TRUTH, MEAN, COVARIANCE[:, :4], 2), "deviations is"),
     (lambda: sampled_patch_log_density(TRUTH, MEAN, COVARIANCE, 2, shrinkage=1.5), "shrinkage is 1.5")],
)  # fmt: skip
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(lw.LapwingError, match=message):
        call()
