"""Links against the integral that they approximate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.predictives.labels import logit_draws, pairwise, probit
from lapwing.values.gaussian import Deferred
from tests.tolerances import assert_close, assert_near

D = torch.float64
B = 30


def belief(classes: int) -> lw.FunctionGaussian:
    """Return beliefs with variances from .1 to 100."""
    root = torch.randn(B, classes, classes, dtype=D)
    variance = (10 ** torch.linspace(-1, 2, B, dtype=D))[:, None, None]
    return lw.FunctionGaussian(3 * torch.randn(B, classes, dtype=D), variance * root @ root.mT / classes)


def divergence(log_probs: Tensor, b: lw.FunctionGaussian) -> float:
    """Return the mean KL divergence from the integral, by many quasi-random draws."""
    exact = logit_draws(b, 2**14, 3).softmax(-1).mean(0)
    return float((exact * (exact.log() - log_probs)).sum(-1).mean())


@pytest.mark.parametrize(("classes", "limit"), [(2, 2e-3), (3, 0.03), (10, 0.08)])
def test_pairwise_is_near_the_integral(classes: int, limit: float) -> None:
    b = belief(classes)
    assert divergence(pairwise(b), b) < limit
    assert divergence(pairwise(b), b) < divergence(probit(b), b)


def test_pairwise_is_its_formula() -> None:
    b = belief(4)
    expected = torch.empty(B, 4, dtype=D)
    for n in range(B):
        for k in range(4):
            total = torch.zeros((), dtype=D)
            for i in range(4):
                spread = b.cov[n, k, k] + b.cov[n, i, i] - 2 * b.cov[n, k, i]
                total += torch.exp(-(b.mean[n, k] - b.mean[n, i]) / (1 + 3 * spread / torch.pi**2).sqrt())
            expected[n, k] = -total.log()
    assert_close(pairwise(b), expected.log_softmax(-1))


@pytest.mark.parametrize("classes", [5, 300])
def test_pairwise_ignores_a_shift_that_all_logits_share(classes: int) -> None:
    b = belief(classes)
    shifted = lw.FunctionGaussian(b.mean + 7, b.cov + 50)
    assert_close(pairwise(shifted), pairwise(b))


def test_many_classes_without_variance_take_no_pairs() -> None:
    """The plain network of a large vocabulary: the softmax itself, and not the same numbers from C² differences."""
    mean = 3 * torch.randn(B, 300, dtype=D)
    none = lambda: torch.zeros_like(mean)
    certain = lw.FunctionGaussian(mean, Deferred(none, none, none))
    assert torch.equal(pairwise(certain), mean.log_softmax(-1))
    nearly = lw.FunctionGaussian(mean, Deferred(none, none, lambda: torch.full_like(mean, 1e-12)))
    assert_close(pairwise(nearly), pairwise(certain))


def test_many_classes_need_no_covariance() -> None:
    classes = 300
    variance = 4 * torch.rand(B, classes, dtype=D)
    mean = 3 * torch.randn(B, classes, dtype=D)

    def refused() -> Tensor:
        raise AssertionError("the (B, C, C) covariance was formed")

    centred = lw.FunctionGaussian(mean, torch.diag_embed(variance)).centred_variance
    log_probs = pairwise(lw.FunctionGaussian(mean, Deferred(lambda: variance, refused, lambda: centred)))
    spread = variance.unsqueeze(-1) + variance.unsqueeze(-2)  # of independent logits, but for the diagonal
    gap = mean.unsqueeze(-1) - mean.unsqueeze(-2)
    expected = (-torch.logsumexp(-gap / (1 + 3 * spread / torch.pi**2).sqrt(), -1)).log_softmax(-1)
    assert_near(log_probs, expected, 0.1)  # centring changes the variances by some 2 / C of themselves


@pytest.mark.parametrize("n", [64, 65, 128])
def test_draws_are_antithetic_and_have_the_moments_of_the_belief(n: int) -> None:
    b = belief(6)
    draws = logit_draws(b, n, 0)
    assert draws.shape == (n, B, 6)
    centred = lambda t: t - t.mean(-1, keepdim=True)
    deviations = centred(draws) - centred(b.mean)
    half = (n + 1) // 2
    assert_close(deviations[: n - half], -deviations[half:])
    if n % 2 == 0:
        cov = torch.einsum("nbc,nbd->bcd", deviations, deviations) / n
        project = torch.eye(6, dtype=D) - 1 / 6
        assert_close(cov, project @ b.cov @ project)


def test_equal_seeds_give_equal_draws_and_others_do_not() -> None:
    b = belief(3)
    assert_close(logit_draws(b, 32, 1), logit_draws(b, 32, 1))
    assert float((logit_draws(b, 32, 1) - logit_draws(b, 32, 2)).abs().max()) > 1e-3


@pytest.mark.parametrize("likelihood", [lw.Categorical, lw.Bernoulli])
def test_link_temperature_divides_mean_and_spread(likelihood: type) -> None:
    b = belief(4)
    divided = lw.FunctionGaussian(b.mean / 2.5, b.cov / 2.5**2)
    assert_close(likelihood(link_temperature=2.5).predict(b).probs, likelihood().predict(divided).probs)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("likelihood", [lw.Categorical, lw.Bernoulli])
def test_a_wrong_link_temperature_is_refused(likelihood: type, value: float) -> None:
    with pytest.raises(lw.errors.DataError, match="link_temperature"):
        likelihood(link_temperature=value)
