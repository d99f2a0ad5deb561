"""Poisson counts with a Gaussian log-rate, against numerical integration."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import integrate, special, stats

import lapwing as lw
from lapwing.predictives.numbers import CountPredictive
from tests.tolerances import SOLVED, assert_close, assert_within

D = torch.float64
# log-rate: mean, variance; from a few counts to hundreds
BELIEFS = [(0.5, 0.3), (2.0, 0.05), (-1.0, 0.8), (3.0, 0.3), (4.0, 0.3), (4.0, 1.0), (6.0, 0.1)]


def predictive(mean: float, variance: float) -> CountPredictive:
    predictive = lw.Poisson().predict(
        lw.FunctionGaussian(torch.full((1, 1), mean, dtype=D), torch.full((1, 1, 1), variance, dtype=D))
    )
    assert isinstance(predictive, CountPredictive)
    return predictive


def density_of(y: int, mean: float, variance: float) -> float:
    """∫ Poisson(y | exp f) N(f | mean, variance) df, cut where the integrand is below 1e-16 of its peak."""
    std = math.sqrt(variance)
    f = mean
    for _ in range(200):  # the peak, by damped Newton steps
        slope, bend = y - math.exp(f) - (f - mean) / variance, math.exp(f) + 1 / variance
        f += max(-1.0, min(1.0, slope / bend))
    width = 9 / math.sqrt(math.exp(f) + 1 / variance)
    value = lambda g: math.exp(y * g - math.exp(g) - special.gammaln(y + 1)) * stats.norm.pdf(g, mean, std)
    return integrate.quad(value, f - width, f + width, epsabs=0, epsrel=1e-10, limit=200)[0]


def cumulative(k: float, mean: float, variance: float) -> float:
    """P(y <= k) on a grid fine against both the Gaussian and the Poisson width."""
    grid = torch.linspace(-10, 10, 20001, dtype=D)
    weight = torch.exp(-0.5 * grid**2)
    below = torch.special.gammaincc(torch.tensor(k + 1.0, dtype=D), (mean + math.sqrt(variance) * grid).exp())
    return float((below * weight).sum() / weight.sum())


@pytest.mark.parametrize(("mean", "variance"), BELIEFS)
def test_log_prob_is_the_integral(mean: float, variance: float) -> None:
    p = predictive(mean, variance)
    for quantile in (-2.0, -1.0, 0.0, 1.0, 2.0):
        y = int(math.exp(mean + quantile * math.sqrt(variance)))
        log_prob = float(p.log_prob(torch.full((1, 1), y)))
        assert log_prob == pytest.approx(math.log(density_of(y, mean, variance)), abs=1e-4), f"y = {y}"


@pytest.mark.parametrize(("mean", "variance"), BELIEFS)
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_interval_is_the_pair_of_quantiles(mean: float, variance: float, level: float) -> None:
    """The smallest counts at which the cumulative probability reaches (1 ∓ level)/2."""
    low, high = predictive(mean, variance).interval(level)
    assert low.shape == high.shape == (1, 1)
    for end, wanted in ((float(low), 0.5 - 0.5 * level), (float(high), 0.5 + 0.5 * level)):
        assert end == int(end)
        assert cumulative(end, mean, variance) >= wanted - 1e-6
        assert end == 0 or cumulative(end - 1, mean, variance) < wanted + 1e-6


@pytest.mark.parametrize(("mean", "variance"), BELIEFS)
def test_mean_and_variance_in_closed_form(mean: float, variance: float) -> None:
    """E y = E exp f, Var y = E exp f + Var exp f, by integration of the rate."""
    p = predictive(mean, variance)
    grid = torch.linspace(-14, 14, 20001, dtype=D)
    weight = torch.exp(-0.5 * grid**2)
    weight = weight / weight.sum()
    rate = (mean + math.sqrt(variance) * grid).exp()
    first, second = (rate * weight).sum(), (rate**2 * weight).sum()
    assert_close(p.mean, first.reshape(1, 1))
    assert_close(p.epistemic, (second - first**2).reshape(1, 1), SOLVED)
    assert_close(p.aleatoric, first.reshape(1, 1))
    assert_close(p.variance, (first + second - first**2).reshape(1, 1), SOLVED)
    assert_close(p.std, p.variance.sqrt())


def test_without_spread_it_is_a_poisson() -> None:
    p = predictive(1.2, 0.0)
    poisson = stats.poisson(math.exp(1.2))
    for y in range(8):
        assert float(p.log_prob(torch.full((1, 1), y))) == pytest.approx(poisson.logpmf(y), rel=1e-9)
    low, high = p.interval(0.9)
    assert (float(low), float(high)) == (poisson.ppf(0.05), poisson.ppf(0.95))
    assert float(p.entropy) == pytest.approx(float(poisson.entropy()), rel=1e-6)
    assert 0 <= float(p.mutual_information) <= 1e-9


@pytest.mark.parametrize(("mean", "variance"), [(0.5, 0.3), (2.0, 0.05), (-1.0, 0.8)])
def test_entropy_and_mutual_information(mean: float, variance: float) -> None:
    p = predictive(mean, variance)
    pmf = [density_of(y, mean, variance) for y in range(80)]
    total = -sum(q * math.log(q) for q in pmf if q > 1e-300)
    assert float(p.entropy) == pytest.approx(total, rel=1e-3)
    grid = torch.linspace(-8, 8, 801, dtype=D)
    weight = torch.exp(-0.5 * grid**2) / torch.exp(-0.5 * grid**2).sum()
    expected = sum(float(w) * float(stats.poisson(math.exp(mean + math.sqrt(variance) * float(z))).entropy())
                   for w, z in zip(weight[::20] * 20, grid[::20], strict=True))  # fmt: skip
    assert float(p.mutual_information) == pytest.approx(total - expected, rel=1e-2)


def test_outputs_add_up_and_keep_their_shape(generator: torch.Generator) -> None:
    mean = torch.tensor([[0.5, 1.0, -0.3], [0.1, 2.0, 0.0]], dtype=D)
    variance = torch.tensor([[0.2, 0.05, 0.4], [0.3, 0.02, 0.1]], dtype=D)
    p = CountPredictive(lw.FunctionGaussian(mean, torch.diag_embed(variance)))
    y = torch.tensor([[1, 3, 0], [2, 6, 1]])
    expected = torch.tensor([
        sum(math.log(density_of(int(y[b, c]), float(mean[b, c]), float(variance[b, c]))) for c in range(3))
        for b in range(2)
    ], dtype=D)  # fmt: skip
    assert_close(p.log_prob(y), expected, 1 / 3)
    assert p.entropy.shape == p.mutual_information.shape == (2,)
    assert p.interval()[0].shape == (2, 3)
    draws = p.sample(4000, generator)
    assert draws.shape == (4000, 2, 3)
    assert bool((draws == draws.round()).all())
    assert_within(draws, p.mean)
    assert_within((draws - p.mean).square(), p.variance)
    one, two, other = (p.sample(5, torch.Generator().manual_seed(s)) for s in (5, 5, 6))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert_close(p.distribution.log_prob(y.double()), p.log_prob(y))


def test_a_single_output_needs_no_dimension() -> None:
    p = CountPredictive(lw.FunctionGaussian(torch.zeros(3, 1, dtype=D), torch.full((3, 1, 1), 0.1, dtype=D)))
    y = torch.tensor([0, 2, 1])
    assert_close(p.log_prob(y), p.log_prob(y[:, None]))


@pytest.mark.parametrize("level", [0.0, 1.0, 95])
def test_levels_that_are_no_probabilities(level: float) -> None:
    with pytest.raises(ValueError, match=f"level is {level}; expected a probability between 0 and 1"):
        predictive(0.0, 0.1).interval(level)


@pytest.mark.parametrize("use", [lambda p: p.interval(), lambda p: p.entropy, lambda p: p.mutual_information])
@pytest.mark.parametrize(("mean", "variance"), [(800.0, 0.1), (1.0, 2000.0), (1.0, 1200.0)])
def test_counts_that_overflow_are_refused(use: Any, mean: float, variance: float) -> None:
    with pytest.raises(
        lw.errors.NumericalError, match=r"the counts overflow: the log-rate has a mean of up to .*prior"
    ):
        use(predictive(mean, variance))
