"""Probabilities of one under Gaussian logits, against numerical integration."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

import lapwing as lw
from tests.tolerances import assert_close, assert_within

D = torch.float64
QUADRATURE = 0.4  # 5e-7: what 64 nodes reach at a variance of nine
MEANS = torch.tensor([[0.0, 1.5], [-3.0, 0.4], [6.0, -0.2]], dtype=D)
VARIANCES = torch.tensor([[0.5, 2.0], [1.0, 4.0], [9.0, 1e-4]], dtype=D)


def belief(scale: float = 1.0, dtype: torch.dtype = D) -> lw.FunctionGaussian:
    return lw.FunctionGaussian(MEANS.to(dtype), torch.diag_embed(scale * VARIANCES).to(dtype))


def expectation(mean: float, variance: float, of: object) -> float:
    std = math.sqrt(variance)
    density = stats.norm(mean, std).pdf
    return integrate.quad(lambda z: density(z) * of(z), mean - 12 * std, mean + 12 * std, epsabs=1e-13, limit=400)[0]


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def entropy(p: float) -> float:
    return 0.0 if p in (0.0, 1.0) else -p * math.log(p) - (1 - p) * math.log1p(-p)


def each(of: object) -> Tensor:
    rows = [[expectation(float(m), float(v), of) for m, v in zip(*pair, strict=True)]
            for pair in zip(MEANS, VARIANCES, strict=True)]  # fmt: skip
    return torch.tensor(rows, dtype=D)


def test_quadrature_is_the_integral() -> None:
    assert_close(lw.Bernoulli(link="quadrature").predict(belief()).probs, each(sigmoid), QUADRATURE)


def test_probit_is_near_the_integral() -> None:
    """The sigmoid is matched by a probit; the two differ by at most 0.019 (MacKay 1992)."""
    probs = lw.Bernoulli(link="probit").predict(belief()).probs
    assert float((probs - each(sigmoid)).abs().max()) <= 0.02
    expected = torch.sigmoid(MEANS / (1 + math.pi * VARIANCES / 8).sqrt())
    assert_close(probs, expected)


@pytest.mark.parametrize("link", ["probit", "quadrature"])
def test_without_spread_it_is_the_sigmoid(link: str) -> None:
    p = lw.Bernoulli(link=link).predict(belief(0.0))
    assert_close(p.probs, MEANS.sigmoid())
    assert float(p.mutual_information.max()) <= 16 * torch.finfo(D).eps


@pytest.mark.parametrize("link", ["probit", "quadrature"])
def test_log_prob_sums_over_labels(link: str) -> None:
    p = lw.Bernoulli(link=link).predict(belief())
    y = torch.tensor([[0, 1], [1, 1], [0, 0]])
    expected = torch.where(y == 1, p.probs.log(), (1 - p.probs).log()).sum(-1)
    assert_close(p.log_prob(y), expected)
    assert_close(p.distribution.log_prob(y.double()), expected)


def test_a_single_label_needs_no_dimension() -> None:
    p = lw.Bernoulli().predict(lw.FunctionGaussian(MEANS[:, :1], VARIANCES[:, :1, None]))
    y = torch.tensor([0, 1, 1])
    assert p.probs.shape == (3, 1)
    assert_close(p.log_prob(y), p.log_prob(y[:, None]))
    assert p.log_prob(y).shape == (3,)


@pytest.mark.parametrize(("logit", "y"), [(30.0, 0.0), (-30.0, 1.0), (-200.0, 1.0), (200.0, 0.0)])
def test_log_prob_of_confident_logits_is_finite(logit: float, y: float) -> None:
    """One less sigmoid(30) is zero in float32, its logarithm is not minus infinity."""
    b = lw.FunctionGaussian(torch.full((1, 1), logit), torch.zeros(1, 1, 1))
    log_prob = lw.Bernoulli().predict(b).log_prob(torch.full((1, 1), y))
    assert float(log_prob) == pytest.approx(-abs(logit), rel=1e-6)


def test_entropy_and_mutual_information() -> None:
    p = lw.Bernoulli(link="quadrature").predict(belief())
    expected = each(lambda z: entropy(sigmoid(z))).sum(-1)
    assert_close(p.aleatoric, expected, QUADRATURE)
    total = torch.tensor([[entropy(float(q)) for q in row] for row in each(sigmoid)], dtype=D).sum(-1)
    assert_close(p.entropy, total, QUADRATURE)
    assert_close(p.mutual_information, total - expected, QUADRATURE)
    assert_close(p.epistemic, p.mutual_information)


def test_samples_follow_the_probabilities(generator: torch.Generator) -> None:
    p = lw.Bernoulli().predict(belief())
    draws = p.sample(4000, generator)
    assert draws.shape == (4000, 3, 2)
    assert set(draws.unique().tolist()) == {0.0, 1.0}
    assert_within(draws, p.probs)
    one, two, other = (p.sample(20, torch.Generator().manual_seed(s)) for s in (5, 5, 6))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
