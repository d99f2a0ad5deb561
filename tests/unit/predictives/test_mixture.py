"""Mixtures of predictives against their definition, computed the slow way."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import lapwing as lw
from tests.tolerances import assert_close, assert_near

D = torch.float64
B = 4
WEIGHTS = torch.tensor([0.5, 0.2, 0.3], dtype=D)


def beliefs(outputs: int, same_mean: bool = True, widest: float = 2.0) -> list[lw.FunctionGaussian]:
    mean = torch.randn(B, outputs, dtype=D)
    parts = []
    for scale in (0.0, 0.15 * widest, widest):
        root = torch.randn(B, outputs, outputs + 1, dtype=D)
        parts.append(lw.FunctionGaussian(mean if same_mean else mean + scale, scale * root @ root.mT))
    return parts


def mixture(
    likelihoods: list[Any], outputs: int, same_mean: bool = True, widest: float = 2.0
) -> tuple[Any, tuple[Any, ...]]:
    pairs = zip(likelihoods, beliefs(outputs, same_mean, widest), strict=True)
    components = tuple(likelihood.predict(belief) for likelihood, belief in pairs)
    return mixed(components), components


def mixed(components: Iterable[Any]) -> Any:
    parts = tuple(components)
    return type(parts[0]).mixed(parts, WEIGHTS)


def average(values: list[torch.Tensor]) -> torch.Tensor:
    return sum(w * value for w, value in zip(WEIGHTS, values, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize(("classes", "budget"), [(3, "1GiB"), (40, "1GiB"), (3, 1)])
def test_class_probabilities_are_averages(classes: int, budget: int | str) -> None:
    """With one byte, for one input at a time."""
    with lw.memory.limited(budget):
        p, components = mixture([lw.Categorical(link_temperature=t) for t in (0.5, 1.0, 3.0)], classes)
        assert_close(p.probs, average([each.probs for each in components]))
        y = torch.randint(0, classes, (B,))
        assert_close(p.log_prob(y), average([each.log_prob(y).exp() for each in components]).log())
        assert_close(p.entropy, torch.special.entr(p.probs).sum(-1))
        assert_close(p.aleatoric, average([each.aleatoric for each in components]))
        total = torch.special.entr(average([each.integrated_probs for each in components])).sum(-1)
        assert_close(p.epistemic, total - p.aleatoric)


def test_log_probabilities_stay_finite_where_probabilities_are_zero() -> None:
    mean = torch.tensor([[2000.0, 0.0]])
    components = tuple(lw.Categorical().predict(lw.FunctionGaussian(mean, s * torch.eye(2)[None])) for s in (0.0, 1.0))
    p = type(components[0]).mixed(components, torch.tensor([0.5, 0.5]))
    assert bool(torch.isfinite(p.log_prob(torch.tensor([1]))).all())


def test_labels_of_one_input_are_mixed_jointly() -> None:
    p, components = mixture([lw.Bernoulli(link_temperature=t) for t in (0.5, 1.0, 3.0)], 3)
    y = torch.randint(0, 2, (B, 3)).to(D)
    assert_close(p.probs, average([each.probs for each in components]))
    assert_close(p.log_prob(y), average([each.log_prob(y).exp() for each in components]).log())
    assert bool((p.mutual_information >= 0).all())


DENSITIES = [
    lw.Gaussian(noise_std=0.5),
    lw.Gaussian(noise_std=1.0, degrees=4.0),
    lw.Gaussian(noise_std=0.7, degrees=8.0),
]


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("same_mean", [True, False])
def test_densities_are_averages(outputs: int, same_mean: bool) -> None:
    p, components = mixture(DENSITIES, outputs, same_mean)
    y = torch.randn(B, outputs, dtype=D)
    assert_close(p.log_prob(y), average([each.log_prob(y).exp() for each in components]).log())
    assert_close(p.cdf(y), average([each.cdf(y) for each in components]))
    assert_close(p.mean, average([each.mean for each in components]))
    second = average([each.variance + each.mean.square() for each in components])
    assert_close(p.variance, second - p.mean.square())
    assert_close(p.variance, p.epistemic_variance + p.aleatoric_variance)


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_interval_is_between_the_quantiles_of_the_mixture(level: float) -> None:
    p, _ = mixture(DENSITIES, 2)
    low, high = p.interval(level)
    assert_close(p.cdf(low), torch.full_like(low, 0.5 - 0.5 * level))
    assert_close(p.cdf(high), torch.full_like(low, 0.5 + 0.5 * level))


@pytest.mark.parametrize("outputs", [1, 2])
def test_entropy_is_the_mean_of_the_log_density_over_draws(outputs: int, generator: torch.Generator) -> None:
    pairs = list(zip(DENSITIES, beliefs(outputs), strict=True))
    p = mixed(likelihood.predict(belief) for likelihood, belief in pairs)
    # The same inputs once for each draw, so that one call has the log densities of all draws.
    repeated = mixed(
        likelihood.predict(lw.FunctionGaussian(belief.mean.repeat(4000, 1), belief.cov.repeat(4000, 1, 1)))
        for likelihood, belief in pairs
    )
    logs = repeated.log_prob(p.sample(4000, generator).flatten(0, 1)).reshape(4000, B)
    error = 5 * float(logs.std(0).max()) * (1 / 4000 + 1 / 2048) ** 0.5
    assert_near(p.entropy, -logs.mean(0), error)
    assert bool((p.mutual_information > 0).all())


def test_draws_have_the_distribution_of_the_mixture(generator: torch.Generator) -> None:
    p, _ = mixture(DENSITIES, 1)
    draws = p.sample(20_000, generator)
    for level in (0.5, 0.9):
        share = (draws <= p.interval(level)[1]).double().mean(0)
        assert_near(share, torch.full_like(share, 0.5 + 0.5 * level), 5 * 0.5 / math.sqrt(20_000))


def test_counts_are_averages(generator: torch.Generator) -> None:
    p, components = mixture([lw.Poisson()] * 3, 2, widest=0.1)  # of log-rates: wider ones give counts without end
    y = torch.randint(0, 5, (B, 2)).to(D)
    assert_close(p.log_prob(y), average([each.log_prob(y).exp() for each in components]).log())
    assert_close(p.cdf(y), average([each.cdf(y) for each in components]))
    low, high = p.interval(0.9)
    assert bool((p.cdf(high) >= 0.95).all())
    assert bool((p.cdf(high - 1) < 0.95).all())
    assert bool((p.cdf(low) >= 0.05 - 1e-9).all())
    draws = p.sample(20_000, generator)
    assert_near(draws.mean(0), p.mean, 6 * float(p.std.max()) / math.sqrt(20_000))
    assert bool((p.mutual_information >= 0).all())
    assert_close(p.variance, average([e.variance + e.mean.square() for e in components]) - p.mean.square())


@pytest.mark.parametrize("n", [0, -1, 1.5])
def test_a_wrong_number_of_draws_is_refused(n: Any) -> None:
    p, _ = mixture(DENSITIES, 1)
    with pytest.raises(lw.errors.UnsupportedError, match="n is"):
        p.sample(n)


def test_autocast_does_not_change_a_mean_that_is_read_under_it() -> None:
    """Predictives are computed when they are read, and kept."""
    narrow = [lw.FunctionGaussian(b.mean.float(), b.cov.float()) for b in beliefs(2, same_mean=False)]
    plain, under = (mixed([lw.Gaussian(noise_std=0.3).predict(b) for b in narrow]) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        mean, std = under.mean, under.std
    assert mean.dtype == std.dtype == torch.float32
    assert_close(mean, plain.mean)
    assert_close(std, plain.std)
