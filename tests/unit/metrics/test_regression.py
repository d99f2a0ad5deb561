"""Scores of normal predictions against SciPy, quadrature and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from sklearn.metrics import mean_absolute_error, mean_squared_error

from lapwing import metrics
from lapwing.errors import DataError, UnsupportedError


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


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 1\), \(3,\); expected the same"):
        metrics.rmse(torch.zeros(3, 1), torch.zeros(3))
    with pytest.raises(ValueError, match="at least one"):
        metrics.rmse(torch.zeros(0), torch.zeros(0))


def test_mae_equals_scikit_learn(predicted: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    mean, _, y = predicted
    assert metrics.mae(mean, y) == pytest.approx(mean_absolute_error(y.numpy(), mean.numpy()), rel=1e-12)


# From draws


@pytest.fixture
def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(11, 5, 3, generator=generator).double(), torch.randn(5, 3, generator=generator).double()


def pairwise(samples: np.ndarray, y: float, fair: bool) -> float:
    """E|x - y| - ½ E|x - x'| as loops over draws."""
    count = len(samples)
    spread = sum(abs(a - b) for a in samples for b in samples) / (count * (count - 1 if fair else count))
    return float(sum(abs(a - y) for a in samples) / count - 0.5 * spread)


@pytest.mark.parametrize("fair", [False, True])
def test_crps_of_draws_equals_a_loop_over_pairs(drawn: tuple[torch.Tensor, torch.Tensor], fair: bool) -> None:
    samples, y = (t.numpy() for t in drawn)
    expected = np.mean([pairwise(samples[:, i, j], y[i, j], fair) for i in range(5) for j in range(3)])
    assert metrics.crps_samples(*drawn, fair=fair) == pytest.approx(expected, rel=1e-10)


def test_crps_of_draws_is_the_integral_of_their_steps(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    samples, y = drawn[0][:, 0, 0].numpy(), float(drawn[1][0, 0])
    ends = np.sort(np.append(samples, y))
    middles = 0.5 * (ends[1:] + ends[:-1])
    steps = (samples <= middles[:, None]).mean(1) - (y <= middles)
    expected = float((steps**2 * np.diff(ends)).sum())
    assert metrics.crps_samples(drawn[0][:, :1, :1], drawn[1][:1, :1]) == pytest.approx(expected, rel=1e-10)


def test_fair_crps_of_few_draws_is_that_of_their_distribution() -> None:
    """The mean of 3 draws' fair scores agrees with the normal distribution's; the plain ones' mean is biased."""
    generator = torch.Generator().manual_seed(4)
    samples, y = torch.randn(3, 4000, generator=generator).double(), torch.randn(4000, generator=generator).double()
    each = torch.tensor([metrics.crps_samples(samples[:, i : i + 40], y[i : i + 40], fair=True)
                         for i in range(0, 4000, 40)])  # fmt: skip
    expected = metrics.crps(torch.zeros(4000), torch.ones(4000), y)
    error = float(each.std()) / 10
    assert abs(float(each.mean()) - expected) < 5 * error
    assert metrics.crps_samples(samples, y) - expected > 10 * error


def test_crps_of_draws_keeps_its_digits_far_from_zero(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    samples, y = drawn
    assert metrics.crps_samples(samples + 1e6, y + 1e6) == pytest.approx(metrics.crps_samples(samples, y), rel=1e-8)


def test_draws_that_do_not_fit_are_refused(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    samples, y = drawn
    for wrong in (samples[:, 0], samples.flatten(1), samples[0], samples[:0]):
        with pytest.raises(DataError, match=r"expected \(S, ...\) draws"):
            metrics.crps_samples(wrong, y)
    with pytest.raises(DataError, match="infinite"):
        metrics.crps_samples(samples / 0, y)
    with pytest.raises(DataError, match="at least two"):
        metrics.crps_samples(samples[:1], y, fair=True)
    with pytest.raises(UnsupportedError, match="True or False"):
        metrics.crps_samples(samples, y, fair=1)  # type: ignore[arg-type]
