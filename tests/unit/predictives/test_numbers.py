"""Distributions of numbers: normal, Student and counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import integrate, special, stats
from torch import Tensor

import lapwing as lw
from lapwing.predictives.numbers import CountPredictive, NormalPredictive, StudentPredictive, cdf, log_density
from tests.references.dense import normal_log_density
from tests.tolerances import SOLVED, assert_close, assert_near, assert_within

# Normal predictives against their textbook formulas.

D = torch.float64
B = 4


def belief(outputs: int, scale: float = 1.0) -> lw.FunctionGaussian:
    root = torch.randn(B, outputs, outputs + 2, dtype=D)
    return lw.FunctionGaussian(torch.randn(B, outputs, dtype=D), scale * root @ root.mT)


def predictive(outputs: int, scale: float = 1.0) -> NormalPredictive:
    return NormalPredictive(belief(outputs, scale), torch.rand(B, outputs, dtype=D) + 0.2)


@pytest.mark.parametrize("level", [0.05, 0.5, 0.95, 0.999])
def test_an_interval_has_its_probability(level: float) -> None:
    p = predictive(3)
    low, high = p.interval(level)
    assert low.shape == high.shape == p.mean.shape
    normal = stats.norm(p.mean.numpy(), p.std.numpy())
    inside = torch.as_tensor(normal.cdf(high.numpy()) - normal.cdf(low.numpy()))
    assert_close(inside, torch.full_like(inside, level))
    assert_close(high - p.mean, p.mean - low)


@pytest.mark.parametrize("outputs", [1, 3])
def test_log_prob_is_the_normal_density(outputs: int) -> None:
    p = predictive(outputs)
    y = torch.randn(B, outputs, dtype=D)
    cov = p.belief.cov + torch.diag_embed(p.noise)
    expected = torch.stack([normal_log_density(*row) for row in zip(y, p.mean, cov, strict=True)])
    assert_close(p.log_prob(y), expected)
    assert_close(p.distribution.log_prob(y), expected)
    if outputs == 1:
        assert_close(p.log_prob(y[:, 0]), expected)


@pytest.mark.parametrize("outputs", [1, 3])
def test_variance_is_epistemic_plus_aleatoric(outputs: int) -> None:
    p = predictive(outputs)
    spread = p.belief.cov.diagonal(dim1=1, dim2=2)
    assert_close(p.variance, spread + p.noise)
    assert_close(p.std, (spread + p.noise).sqrt())
    assert_close(p.epistemic, spread)
    assert_close(p.epistemic_variance, spread)
    assert_close(p.aleatoric, p.noise)
    assert_close(p.aleatoric_variance, p.noise)
    assert_close(p.distribution.variance, p.variance)


def test_entropy_and_mutual_information() -> None:
    p = predictive(3)
    noise = torch.diag_embed(p.noise)
    total = torch.linalg.slogdet(2 * math.pi * math.e * (p.belief.cov + noise))[1]
    assert_close(p.entropy, 0.5 * total)
    gain = torch.linalg.slogdet(torch.eye(3, dtype=D) + torch.linalg.solve(noise, p.belief.cov))[1]
    assert_close(p.mutual_information, 0.5 * gain)
    assert bool((p.mutual_information > 0).all())


def test_nothing_to_learn_without_spread() -> None:
    p = predictive(3, scale=0.0)
    assert bool((p.epistemic == 0).all())
    assert float(p.mutual_information.abs().max()) <= 16 * torch.finfo(D).eps
    assert_close(p.variance, p.noise)


def test_samples_have_the_predictive_moments(generator: torch.Generator) -> None:
    p = predictive(3)
    n = 4000
    draws = p.sample(n, generator)
    assert draws.shape == (n, B, 3)
    gap = draws - p.mean
    assert_within(gap.unsqueeze(-1) * gap.unsqueeze(-2), p.belief.cov + torch.diag_embed(p.noise))


def test_heteroscedastic_predictive_expects_the_noise_over_its_belief() -> None:
    """E exp(s) of a Gaussian s, by quadrature of the definition."""
    b = belief(4, 0.2)
    p = lw.HeteroscedasticGaussian().predict(b)
    assert p.mean.shape == p.std.shape == (B, 2)
    assert_close(p.mean, b.mean[:, :2])
    assert_close(p.epistemic_variance, b.variance[:, :2])
    grid = torch.linspace(-12, 12, 4001, dtype=D)
    weight = torch.exp(-0.5 * grid**2) / torch.exp(-0.5 * grid**2).sum()
    noise: Tensor = ((b.mean[:, 2:, None] + b.std[:, 2:, None] * grid).exp() * weight).sum(-1)
    assert_close(p.aleatoric_variance, noise)


def test_gaussian_likelihood_adds_its_noise() -> None:
    b = belief(3)
    assert_close(lw.Gaussian(noise_std=0.5).predict(b).aleatoric, torch.full((B, 3), 0.25, dtype=D))
    each = lw.Gaussian(noise_std=(0.1, 0.2, 0.3)).predict(b)
    assert_close(each.variance, b.variance + torch.tensor([0.01, 0.04, 0.09], dtype=D))


def test_the_probability_of_at_most_y() -> None:
    p = predictive(3)
    y = p.mean + torch.randn_like(p.mean)
    normal = stats.norm(p.mean.numpy(), p.std.numpy())
    assert_close(p.cdf(y), torch.as_tensor(normal.cdf(y.numpy())))
    assert_close(p.cdf(0.5), torch.as_tensor(normal.cdf(0.5)))
    with pytest.raises(ValueError, match=r"y has the shape \(2,\); expected"):
        p.cdf(torch.zeros(2))


# Student predictives against SciPy and against draws.

STUDENT_B = 3


def student_predictive(outputs: int, degrees: float = 4.0, scale: float = 0.8) -> StudentPredictive:
    root = torch.randn(STUDENT_B, outputs, outputs + 1, dtype=D)
    belief = lw.FunctionGaussian(torch.randn(STUDENT_B, outputs, dtype=D), root @ root.mT)
    return StudentPredictive(belief, torch.rand(STUDENT_B, outputs, dtype=D) + 0.2, degrees, scale)


@pytest.mark.parametrize("degrees", [4.0, 8.0, 20.0, math.inf])
def test_density_and_probability_are_those_of_scipy(degrees: float) -> None:
    z = torch.linspace(-6, 6, 41, dtype=D)
    reference = stats.norm if degrees == math.inf else stats.t(degrees)
    assert_close(log_density(z, degrees), torch.as_tensor(reference.logpdf(z.numpy())))
    assert_close(cdf(z, degrees), torch.as_tensor(reference.cdf(z.numpy())))


@pytest.mark.parametrize("outputs", [1, 3])
def test_joint_density_and_entropy_are_those_of_scipy(outputs: int) -> None:
    p = student_predictive(outputs)
    y = torch.randn(STUDENT_B, outputs, dtype=D)
    shapes = p.scale**2 * (p.belief.cov + torch.diag_embed(p.noise))
    references = [stats.multivariate_t(p.mean[n].numpy(), shapes[n].numpy(), p.degrees) for n in range(STUDENT_B)]
    expected = torch.tensor([float(r.logpdf(y[n].numpy())) for n, r in enumerate(references)], dtype=D)
    assert_close(p.log_prob(y), expected)
    assert_close(p.entropy, torch.tensor([float(r.entropy()) for r in references], dtype=D))


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_student_intervals_have_their_probability(level: float) -> None:
    p = student_predictive(2)
    low, high = p.interval(level)
    assert_close(p.cdf(high) - p.cdf(low), torch.full_like(low, level))
    with pytest.raises(ValueError, match=r"y has the shape \(2,\); expected"):
        p.cdf(low[0])


def test_parts_of_the_variance_are_widened_alike() -> None:
    p = student_predictive(2)
    assert_close(p.variance, p.widening * (p.belief.variance + p.noise))
    assert_close(p.epistemic_variance / p.aleatoric_variance, p.belief.variance / p.noise)
    assert bool((p.mutual_information > 0).all())


def test_draws_have_the_distribution(generator: torch.Generator) -> None:
    p = student_predictive(2, degrees=8.0)
    draws = p.sample(40_000, generator)
    share = (draws <= p.interval(0.9)[1]).double().mean(0)
    assert_near(share, torch.full_like(share, 0.95), 5 * math.sqrt(0.95 * 0.05 / 40_000))
    ratio = draws.var(0) / p.variance
    assert_near(ratio, torch.ones_like(ratio), 0.1)


@pytest.mark.parametrize("level", [0.0, 1.0, 2.0])
def test_a_wrong_level_is_refused(level: float) -> None:
    with pytest.raises(ValueError, match="level"):
        student_predictive(1).interval(level)


# Poisson counts with a Gaussian log-rate, against numerical integration.

# log-rate: mean, variance; from a few counts to hundreds
BELIEFS = [(0.5, 0.3), (2.0, 0.05), (-1.0, 0.8), (3.0, 0.3), (4.0, 0.3), (4.0, 1.0), (6.0, 0.1)]


def counts_predictive(mean: float, variance: float) -> CountPredictive:
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
    p = counts_predictive(mean, variance)
    for quantile in (-2.0, -1.0, 0.0, 1.0, 2.0):
        y = int(math.exp(mean + quantile * math.sqrt(variance)))
        log_prob = float(p.log_prob(torch.full((1, 1), y)))
        assert log_prob == pytest.approx(math.log(density_of(y, mean, variance)), abs=1e-4), f"y = {y}"


@pytest.mark.parametrize(("mean", "variance"), BELIEFS)
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_interval_is_the_pair_of_quantiles(mean: float, variance: float, level: float) -> None:
    """The smallest counts at which the cumulative probability reaches (1 ∓ level)/2."""
    low, high = counts_predictive(mean, variance).interval(level)
    assert low.shape == high.shape == (1, 1)
    for end, wanted in ((float(low), 0.5 - 0.5 * level), (float(high), 0.5 + 0.5 * level)):
        assert end == int(end)
        assert cumulative(end, mean, variance) >= wanted - 1e-6
        assert end == 0 or cumulative(end - 1, mean, variance) < wanted + 1e-6


@pytest.mark.parametrize(("mean", "variance"), BELIEFS)
def test_mean_and_variance_in_closed_form(mean: float, variance: float) -> None:
    """E y = E exp f, Var y = E exp f + Var exp f, by integration of the rate."""
    p = counts_predictive(mean, variance)
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
    p = counts_predictive(1.2, 0.0)
    poisson = stats.poisson(math.exp(1.2))
    for y in range(8):
        assert float(p.log_prob(torch.full((1, 1), y))) == pytest.approx(poisson.logpmf(y), rel=1e-9)
    low, high = p.interval(0.9)
    assert (float(low), float(high)) == (poisson.ppf(0.05), poisson.ppf(0.95))
    assert float(p.entropy) == pytest.approx(float(poisson.entropy()), rel=1e-6)
    assert 0 <= float(p.mutual_information) <= 1e-9


@pytest.mark.parametrize(("mean", "variance"), [(0.5, 0.3), (2.0, 0.05), (-1.0, 0.8)])
def test_counts_entropy_and_mutual_information(mean: float, variance: float) -> None:
    p = counts_predictive(mean, variance)
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


@pytest.mark.parametrize("use", [lambda p: p.interval(), lambda p: p.entropy, lambda p: p.mutual_information])
@pytest.mark.parametrize(("mean", "variance"), [(800.0, 0.1), (1.0, 2000.0), (1.0, 1200.0)])
def test_counts_that_overflow_are_refused(use: Any, mean: float, variance: float) -> None:
    with pytest.raises(
        lw.errors.NumericalError, match=r"the counts overflow: the log-rate has a mean of up to .*prior"
    ):
        use(counts_predictive(mean, variance))


def test_a_member_of_another_predictive_is_named_with_those_there_are() -> None:
    with pytest.raises(AttributeError, match=r"NormalPredictive has no 'probs'; it has .*interval"):
        _ = predictive(1).probs  # type: ignore[attr-defined]
    assert not hasattr(predictive(1), "_not_there")
