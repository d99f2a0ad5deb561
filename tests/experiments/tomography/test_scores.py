"""Scores of images against loops from their definitions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from experiments.tomography import scores
from tests.experiments.tomography.dense import normals
from tests.tolerances import assert_close

IMAGE, TRUTH = 0.5 + 0.2 * normals(9, 11), 0.5 + 0.3 * normals(9, 11, seed=1)
STD = 0.1 + normals(9, 11, seed=2).abs()


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_psnr_has_the_range_of_the_truth() -> None:
    error = sum((float(a) - float(b)) ** 2 for a, b in zip(IMAGE.flatten(), TRUTH.flatten(), strict=True)) / 99
    expected = 10 * math.log10(float(TRUTH.max() - TRUTH.min()) ** 2 / error)
    assert_close(number(scores.psnr(IMAGE, TRUTH)), number(expected))
    assert scores.psnr(TRUTH.float(), TRUTH) > 100
    assert scores.psnr(TRUTH, TRUTH) == math.inf


@pytest.mark.parametrize(("window", "offset"), [(7, 0.0), (4, 0.0), (7, 1e4)])
def test_ssim_is_the_mean_over_windows(window: int, offset: float) -> None:
    x, y = IMAGE + offset, TRUTH + offset
    span = float(y.max() - y.min())
    values = []
    for i in range(9 - window + 1):
        for j in range(11 - window + 1):
            a, b = (t[i : i + window, j : j + window].flatten() for t in (x, y))
            cov = torch.cov(torch.stack([a, b]))
            top = (2 * a.mean() * b.mean() + (0.01 * span) ** 2) * (2 * cov[0, 1] + (0.03 * span) ** 2)
            base = (a.mean() ** 2 + b.mean() ** 2 + (0.01 * span) ** 2) * (cov[0, 0] + cov[1, 1] + (0.03 * span) ** 2)
            values.append(float(top / base))
    assert_close(number(scores.ssim(x, y, window)), number(sum(values) / len(values)))


def test_the_noise_floor_is_a_mean_of_the_pseudo_inverse() -> None:
    matrix, std = normals(8, 5), 0.3
    gram = matrix.mT @ matrix
    expected = std**2 * torch.linalg.inv(gram).diagonal().mean()
    assert_close(number(scores.noise_floor(matrix, std)), expected)
    values, vectors = torch.linalg.eigh(gram)
    top = vectors[:, -3:] / values[-3:] @ vectors[:, -3:].mT
    assert_close(number(scores.noise_floor(matrix, std, rank=3)), std**2 * top.diagonal().mean())
    wide = normals(3, 7)  # has four singular values of zero
    expected = std**2 * torch.linalg.pinv(wide.mT @ wide, rtol=1e-10).diagonal().mean()
    assert_close(number(scores.noise_floor(wide, std)), expected)
    doubled = torch.cat([wide, wide[:1]])  # one of rounding errors
    assert float(scores.noise_floor(doubled, std)) < 2 * float(expected)


def test_calibration_scores_are_those_of_a_loop() -> None:
    z = [
        (float(t) - float(m)) / float(s)
        for t, m, s in zip(TRUTH.flatten(), IMAGE.flatten(), STD.flatten(), strict=True)
    ]
    assert_close(number(scores.rms_z(IMAGE, STD, TRUTH)), number(math.sqrt(sum(v * v for v in z) / len(z))))
    for level in (0.5, 0.95):
        half = float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(0.5 + level / 2)))
        share = sum(abs(v) <= half for v in z) / len(z)
        assert scores.coverage(IMAGE, STD, TRUTH, level) == pytest.approx(share)
    errors = (TRUTH - IMAGE).abs()
    cov = ((errors - errors.mean()) * (STD - STD.mean())).mean()
    expected = cov / (errors.std(correction=0) * STD.std(correction=0))
    assert_close(number(scores.error_std_correlation(IMAGE, STD, TRUTH)), expected)
    assert math.isnan(scores.error_std_correlation(IMAGE, torch.ones_like(STD), TRUTH))


def test_quantile_points_are_quantiles() -> None:
    expected, observed = scores.quantile_points(IMAGE, STD, TRUTH, count=17)
    levels = torch.arange(1, 18, dtype=torch.float64) / 18
    assert_close(observed, torch.quantile(((TRUTH - IMAGE) / STD).flatten(), levels))
    assert_close(expected, torch.distributions.Normal(number(0.0), number(1.0)).icdf(levels))


NAN = torch.full((9, 11), math.nan)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scores.psnr(IMAGE, TRUTH[:3]), "expected the same"),
        (lambda: scores.psnr(IMAGE, NAN), "truth is"),
        (lambda: scores.psnr(IMAGE, torch.ones_like(IMAGE)), "constant"),
        (lambda: scores.ssim(IMAGE, TRUTH, 10), "at least 10"),
        (lambda: scores.ssim(IMAGE, TRUTH, 1), "window"),
        (lambda: scores.ssim(IMAGE[0], TRUTH[0]), "expected an image"),
        (lambda: scores.noise_floor(IMAGE, -1.0), "std"),
        (lambda: scores.noise_floor(IMAGE, 1.0, 0), "rank"),
        (lambda: scores.noise_floor(0 * IMAGE, 1.0), "not zero"),
        (lambda: scores.noise_floor(IMAGE / 0, 1.0), "finite"),
        (lambda: scores.rms_z(IMAGE, 0 * STD, TRUTH), "as low as 0"),
        (lambda: scores.coverage(IMAGE, STD, TRUTH, 1.5), "level"),
        (lambda: scores.quantile_points(IMAGE, STD, TRUTH, 0), "count"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(lw.LapwingError, match=message):
        call()
