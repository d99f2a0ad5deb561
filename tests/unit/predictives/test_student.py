"""Student predictives against SciPy and against draws."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

import lapwing as lw
from lapwing.predictives.base import cdf, log_density
from lapwing.predictives.numbers import StudentPredictive
from tests.tolerances import assert_close, assert_near

D = torch.float64
B = 3


def predictive(outputs: int, degrees: float = 4.0, scale: float = 0.8) -> StudentPredictive:
    root = torch.randn(B, outputs, outputs + 1, dtype=D)
    belief = lw.FunctionGaussian(torch.randn(B, outputs, dtype=D), root @ root.mT)
    return StudentPredictive(belief, torch.rand(B, outputs, dtype=D) + 0.2, degrees, scale)


@pytest.mark.parametrize("degrees", [4.0, 8.0, 20.0, math.inf])
def test_density_and_probability_are_those_of_scipy(degrees: float) -> None:
    z = torch.linspace(-6, 6, 41, dtype=D)
    reference = stats.norm if degrees == math.inf else stats.t(degrees)
    assert_close(log_density(z, degrees), torch.as_tensor(reference.logpdf(z.numpy())))
    assert_close(cdf(z, degrees), torch.as_tensor(reference.cdf(z.numpy())))


@pytest.mark.parametrize("outputs", [1, 3])
def test_joint_density_and_entropy_are_those_of_scipy(outputs: int) -> None:
    p = predictive(outputs)
    y = torch.randn(B, outputs, dtype=D)
    shapes = p.scale**2 * (p.belief.cov + torch.diag_embed(p.noise))
    references = [stats.multivariate_t(p.mean[n].numpy(), shapes[n].numpy(), p.degrees) for n in range(B)]
    expected = torch.tensor([float(r.logpdf(y[n].numpy())) for n, r in enumerate(references)], dtype=D)
    assert_close(p.log_prob(y), expected)
    assert_close(p.entropy, torch.tensor([float(r.entropy()) for r in references], dtype=D))


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_interval_holds_what_it_promises(level: float) -> None:
    p = predictive(2)
    low, high = p.interval(level)
    assert_close(p.cdf(high) - p.cdf(low), torch.full_like(low, level))
    with pytest.raises(ValueError, match=r"y has the shape \(2,\); expected"):
        p.cdf(low[0])


def test_parts_of_the_variance_are_widened_alike() -> None:
    p = predictive(2)
    assert_close(p.variance, p.widening * (p.belief.variance + p.noise))
    assert_close(p.epistemic_variance / p.aleatoric_variance, p.belief.variance / p.noise)
    assert bool((p.mutual_information > 0).all())


def test_draws_have_the_distribution(generator: torch.Generator) -> None:
    p = predictive(2, degrees=8.0)
    draws = p.sample(40_000, generator)
    share = (draws <= p.interval(0.9)[1]).double().mean(0)
    assert_near(share, torch.full_like(share, 0.95), 5 * math.sqrt(0.95 * 0.05 / 40_000))
    ratio = draws.var(0) / p.variance
    assert_near(ratio, torch.ones_like(ratio), 0.1)


def test_many_degrees_are_the_normal_distribution() -> None:
    p = predictive(2, degrees=1e6, scale=1.0)
    normal = lw.Gaussian(noise_std=1.0).predict(p.belief)
    y = torch.randn(B, 2, dtype=D)
    widened = type(normal)(p.belief, p.noise)
    assert_near(p.log_prob(y), widened.log_prob(y), 1e-4)


@pytest.mark.parametrize("settings", [{"degrees": 3.0}, {"degrees": 2.0}, {"degrees": 5.5}, {"tail_scale": 0.0}])
def test_wrong_tails_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(lw.errors.DataError, match=next(iter(settings))):
        lw.Gaussian(**settings)


@pytest.mark.parametrize("level", [0.0, 1.0, 2.0])
def test_a_wrong_level_is_refused(level: float) -> None:
    with pytest.raises(ValueError, match="level"):
        predictive(1).interval(level)
