"""A Gaussian over whitened inducing variables, against plain Gaussian algebra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from lapwing.linalg.stochastic import Inducing
from tests.tolerances import SOLVED, assert_close

D = torch.float64
EYE = torch.eye(4, dtype=D)


def information(seed: int = 0, size: int = 4) -> Tensor:
    rows = torch.randn(9, size, dtype=D, generator=torch.Generator().manual_seed(seed))
    return rows.T @ rows


def test_before_the_data_it_is_the_prior() -> None:
    start = Inducing.before_data(4, torch.empty(0))
    assert torch.equal(start.precision, EYE)
    assert float(start.divergence()) == 0
    assert float(start.reduction.abs().max()) == 0
    prior = torch.rand(3, 2, 2, dtype=D)
    assert torch.equal(start.posterior_cov(prior, torch.randn(3, 2, 4, dtype=D)), prior)


def test_divergence_is_that_of_two_normals() -> None:
    inducing = Inducing(EYE + information())
    zero = torch.zeros(4, dtype=D)
    exact = kl_divergence(MultivariateNormal(zero, precision_matrix=EYE + information()), MultivariateNormal(zero, EYE))
    assert_close(inducing.divergence(), exact)


def test_what_the_data_take_away() -> None:
    inducing = Inducing(EYE + information())
    assert_close(inducing.reduction, EYE - torch.linalg.inv(EYE + information()))
    rows, prior = torch.randn(5, 3, 4, dtype=D), torch.rand(5, 3, 3, dtype=D)
    expected = torch.stack([p - r @ (EYE - torch.linalg.inv(EYE + information())) @ r.T for p, r in zip(prior, rows)])
    assert_close(inducing.posterior_cov(prior, rows), expected)


def test_what_is_left_under_other_prior_variances() -> None:
    """Prior, rows and B all grow with the factor."""
    inducing, factors = Inducing(EYE + information()), (0.01, 1.0, 30.0)
    rows, prior = torch.randn(5, 3, 4, dtype=D), torch.rand(5, 3, 3, dtype=D)
    for factor, cov in zip(factors, inducing.posterior_covs(prior, rows, factors), strict=True):
        assert_close(cov, inducing.times(factor).posterior_cov(factor * prior, factor**0.5 * rows))


@pytest.mark.parametrize("step", [1.0, 0.3])
def test_steps_average_precisions(step: float) -> None:
    """Natural gradients: the new precision is the old one and the optimum's, averaged."""
    before = Inducing(EYE + information(1))
    after = before.update(information(2), step)
    assert_close(after.precision, (1 - step) * (EYE + information(1)) + step * (EYE + information(2)))


def test_one_step_of_length_one_forgets_the_start() -> None:
    one, other = (Inducing(EYE + information(seed)).update(information(9), 1.0).precision for seed in (1, 2))
    assert torch.equal(one, other)


def test_averaged_steps_of_batches_are_one_step_on_all() -> None:
    """Steps of 1, 1/2, 1/3 ... give every batch the same weight."""
    inducing = Inducing.before_data(4, torch.empty(0))
    parts = [information(seed) for seed in range(5)]
    for i, part in enumerate(parts):
        inducing = inducing.update(len(parts) * part, 1 / (i + 1))
    assert_close(inducing.precision, EYE + torch.stack(parts).sum(0))


def test_the_step_is_the_natural_gradient() -> None:
    """The gradient of E[log p] - KL in the expectation parameter S is ½ (old precision - target)."""
    s = torch.linalg.inv(EYE + information(1)).requires_grad_()
    value = -0.5 * (information(2) * s).sum() - 0.5 * (s.diagonal().sum() - torch.linalg.slogdet(s)[1])
    (slope,) = torch.autograd.grad(value, s)
    updated = Inducing(EYE + information(1)).update(information(2), 0.1)
    assert_close(updated.precision, EYE + information(1) - 2 * 0.1 * slope, SOLVED)


def test_only_the_whole_is_kept_positive() -> None:
    """Some batches may lower the precision; where all together would lower it below the prior's, it stays there."""
    inducing = (
        Inducing.before_data(4, torch.empty(0)).update(-0.5 * information(1), 1.0).update(2 * information(1), 0.5)
    )
    assert_close(inducing.precision, EYE + 0.75 * information(1))
    basis = torch.linalg.qr(torch.randn(4, 4, dtype=D, generator=torch.Generator().manual_seed(0)))[0]
    values = torch.tensor([2.0, -0.9, 0.5, -3.0], dtype=D)
    inducing = Inducing(EYE + (basis * values) @ basis.mT)
    assert_close(inducing.information, (basis * values.clamp_min(0)) @ basis.mT)
    assert_close(inducing.precision, EYE + inducing.information)
    assert_close(inducing.update(torch.zeros_like(EYE), 0.5).average, EYE + 0.5 * (basis * values) @ basis.mT)
    assert float(inducing.divergence()) > 0
    assert_close(inducing.times(3.0).information, 3 * inducing.information)
