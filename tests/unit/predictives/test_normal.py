"""Normal predictives against their textbook formulas."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

import lapwing as lw
from lapwing.predictives.numbers import NormalPredictive
from tests.references.dense import normal_log_density
from tests.tolerances import assert_close, assert_within

D = torch.float64
B = 4


def belief(outputs: int, scale: float = 1.0) -> lw.FunctionGaussian:
    root = torch.randn(B, outputs, outputs + 2, dtype=D)
    return lw.FunctionGaussian(torch.randn(B, outputs, dtype=D), scale * root @ root.mT)


def predictive(outputs: int, scale: float = 1.0) -> NormalPredictive:
    return NormalPredictive(belief(outputs, scale), torch.rand(B, outputs, dtype=D) + 0.2)


@pytest.mark.parametrize("level", [0.05, 0.5, 0.95, 0.999])
def test_interval_holds_what_it_promises(level: float) -> None:
    p = predictive(3)
    low, high = p.interval(level)
    assert low.shape == high.shape == p.mean.shape
    normal = stats.norm(p.mean.numpy(), p.std.numpy())
    inside = torch.as_tensor(normal.cdf(high.numpy()) - normal.cdf(low.numpy()))
    assert_close(inside, torch.full_like(inside, level))
    assert_close(high - p.mean, p.mean - low)


@pytest.mark.parametrize("level", [0.0, 1.0, 95, -0.5, math.nan])
def test_levels_that_are_no_probabilities(level: float) -> None:
    with pytest.raises(ValueError, match=f"level is {level}; expected a probability between 0 and 1"):
        predictive(2).interval(level)


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


@pytest.mark.parametrize("outputs", [1, 3])
def test_equal_generators_give_equal_samples(outputs: int) -> None:
    p = predictive(outputs)
    one, two, other = (p.sample(2, torch.Generator().manual_seed(s)) for s in (5, 5, 6))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


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
