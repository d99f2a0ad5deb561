"""Intervals and quantiles against SciPy and loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from lapwing import metrics
from lapwing.errors import DataError

D = torch.float64


@pytest.fixture
def predicted() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    mean, y = torch.randn(2, 37, 3, generator=generator, dtype=D)
    return mean, torch.rand(37, 3, generator=generator, dtype=D) + 0.5, y


def test_coverage_counts_the_ends_and_width_is_a_mean() -> None:
    low, high = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1.0, 2.0, 3.0])
    assert metrics.coverage(low, high, torch.tensor([0.0, 2.0, 3.1])) == pytest.approx(2 / 3)
    assert metrics.interval_width(low, high) == 2


@pytest.mark.parametrize("level", [0.03, 0.5, 0.95])
def test_picp_and_mpiw_equal_intervals_of_scipy(
    predicted: tuple[torch.Tensor, torch.Tensor, torch.Tensor], level: float
) -> None:
    mean, std, y = (t.numpy() for t in predicted)
    low, high = stats.norm(mean, std).interval(level)
    assert metrics.picp(*predicted, level) == pytest.approx(np.mean((low <= y) & (y <= high)))
    assert metrics.mpiw(predicted[1], level) == pytest.approx((high - low).mean(), rel=1e-10)


def test_pit_equals_scipy(predicted: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    mean, std, y = (t.numpy() for t in predicted)
    assert np.allclose(metrics.pit(*predicted).numpy(), stats.norm(mean, std).cdf(y), rtol=1e-10)


def test_pit_of_draws_is_a_rank() -> None:
    samples = torch.tensor([[0.0, 5.0], [1.0, 5.0], [2.0, 5.0], [3.0, 6.0]])
    values = metrics.pit_samples(samples, torch.tensor([2.5, 5.0]))
    assert values.tolist() == pytest.approx([(3 + 0.5) / 5, (1.5 + 0.5) / 5])


def test_pit_of_draws_from_the_right_distribution_has_every_rank_equally_often() -> None:
    """A χ² test of 20,000 ranks among 4 draws: a false alarm in 10,000."""
    samples = torch.randn(5, 20000, generator=torch.Generator().manual_seed(1))
    ranks = (metrics.pit_samples(samples[1:], samples[0]) * 5 - 0.5).round().long()
    assert stats.chisquare(torch.bincount(ranks, minlength=5).numpy()).pvalue > 1e-4


def test_pit_of_many_draws_is_near_that_of_their_distribution() -> None:
    y = torch.linspace(-2, 2, 9, dtype=D)
    samples = torch.randn(10000, 9, generator=torch.Generator().manual_seed(2), dtype=D)
    exact = metrics.pit(torch.zeros(9), torch.ones(9), y)
    assert float((metrics.pit_samples(samples, y) - exact).abs().max()) < 5 * 0.5 / 100  # five standard errors


# The centred quantile metric


def test_cqm_equals_a_loop_over_levels(predicted: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    levels = [0.1, 0.37, 0.8, 0.99]
    expected = np.mean([abs(metrics.picp(*predicted, level) - level) for level in levels])
    assert metrics.cqm(metrics.pit(*predicted), levels) == pytest.approx(expected, rel=1e-10)
    assert metrics.cqm(metrics.pit(*predicted), torch.tensor(levels, dtype=D)) == pytest.approx(expected, rel=1e-10)


def test_cqm_over_all_levels_is_a_distance_to_the_uniform_distribution(
    predicted: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """It is the Wasserstein distance of |2u - 1| from the uniform distribution, here that of 200,000 points."""
    values = metrics.pit(*predicted)
    uniform = (np.arange(200_000) + 0.5) / 200_000
    expected = stats.wasserstein_distance((2 * values - 1).abs().flatten().numpy(), uniform)
    assert metrics.cqm(values) == pytest.approx(expected, abs=1e-5)


def test_cqm_is_zero_for_right_coverages_and_half_at_worst() -> None:
    even = (torch.arange(4000, dtype=D) + 0.5) / 4000
    assert metrics.cqm(even) < 1e-3
    assert metrics.cqm(even / 2 + 0.5) < 1e-3  # all on one side
    for worst in (torch.full((3,), 0.5), torch.tensor([0.0, 1.0, 1.0])):
        assert metrics.cqm(worst) == pytest.approx(0.5)
    assert metrics.cqm(torch.tensor([0.25, 0.75])) == pytest.approx(0.25)


def test_the_ends_of_intervals_belong_to_them() -> None:
    values = torch.tensor([0.25, 0.5, 0.5, 0.0])  # levels ½, 0, 0 and 1 include them
    assert metrics.cqm(values, [0.5]) == pytest.approx(3 / 4 - 1 / 2)


@pytest.mark.parametrize("level", [0.0, 1.0, 95, -0.1, None, "0.9", True])
def test_levels_that_are_no_probabilities_are_refused(level: float) -> None:
    one = torch.ones(3)
    with pytest.raises(DataError, match="expected a probability between 0 and 1"):
        metrics.picp(one, one, one, level)
    with pytest.raises(DataError, match="expected a probability between 0 and 1"):
        metrics.mpiw(one, level)
    with pytest.raises(DataError, match="expected a list of probabilities"):
        metrics.cqm(0.5 * one, [0.5, level])


def test_values_that_are_no_quantiles_are_refused() -> None:
    with pytest.raises(DataError, match="pit_values run from"):
        metrics.cqm(torch.tensor([0.5, 1.5]))
    for wrong in ([], 0.5, "abc"):
        with pytest.raises(DataError, match="expected a list of probabilities"):
            metrics.cqm(torch.tensor([0.5]), wrong)  # type: ignore[arg-type]
    for call in (lambda: metrics.mpiw(torch.zeros(3)), lambda: metrics.pit(*-torch.ones(3, 2))):
        with pytest.raises(DataError, match="expected positive numbers"):
            call()
