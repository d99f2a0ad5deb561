"""Scores of normal predictions against SciPy, quadrature and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from sklearn.metrics import mean_squared_error

from lapwing import metrics


@pytest.fixture
def predicted() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    mean, y = torch.randn(2, 17, generator=generator, dtype=torch.float64).mul(2)
    return mean, torch.rand(17, generator=generator, dtype=torch.float64) + 0.3, y


def test_nll_equals_scipy(predicted: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    mean, std, y = predicted
    expected = -norm(mean.numpy(), std.numpy()).logpdf(y.numpy()).mean()
    assert metrics.normal_nll(mean, std, y) == pytest.approx(expected, rel=1e-12)


def test_rmse_equals_scikit_learn(predicted: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    mean, _, y = predicted
    assert metrics.rmse(mean, y) == pytest.approx(mean_squared_error(y.numpy(), mean.numpy()) ** 0.5, rel=1e-12)


def test_crps_equals_its_integral(predicted: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    integrals = []
    for m, s, v in zip(*(t.tolist() for t in predicted), strict=True):
        normal = norm(m, s)
        below = quad(lambda t, n: n.cdf(t) ** 2, -np.inf, v, args=(normal,))[0]
        above = quad(lambda t, n: n.sf(t) ** 2, v, np.inf, args=(normal,))[0]
        integrals.append(below + above)
    assert metrics.crps(*predicted) == pytest.approx(np.mean(integrals), rel=1e-7)


def test_crps_of_a_sure_prediction_is_its_absolute_error() -> None:
    score = metrics.crps(torch.zeros(2), torch.full((2,), 1e-9), torch.tensor([2.0, -1.0]))
    assert score == pytest.approx(1.5, abs=1e-8)


def test_coverage_counts_the_ends_and_width_is_a_mean() -> None:
    low, high = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1.0, 2.0, 3.0])
    assert metrics.coverage(low, high, torch.tensor([0.0, 2.0, 3.1])) == pytest.approx(2 / 3)
    assert metrics.interval_width(low, high) == 2


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 1\), \(3,\); expected the same"):
        metrics.rmse(torch.zeros(3, 1), torch.zeros(3))
    with pytest.raises(ValueError, match="at least one"):
        metrics.rmse(torch.zeros(0), torch.zeros(0))
