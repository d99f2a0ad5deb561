"""Energies of a Gaussian belief, against quadrature and the predictives of the likelihoods."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

import lapwing as lw
from lapwing.likelihoods.base import energy, refuse_energy
from lapwing.values.gaussian import FunctionGaussian
from tests.tolerances import SOLVED, assert_close

D = torch.float64
N = 4
STDS: dict[str, Any] = {"one": 0.7, "each": (0.5, 1.4)}


def belief(outputs: int, size: float = 1.0) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(outputs)
    root = size * torch.randn(N, outputs, outputs, dtype=D, generator=gen)
    return torch.randn(N, outputs, dtype=D, generator=gen), root @ root.mT + 0.1 * size**2 * torch.eye(outputs, dtype=D)


def normal_targets(outputs: int) -> Tensor:
    return torch.randn(N, outputs, dtype=D, generator=torch.Generator().manual_seed(9))


def nodes(count: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Gauss-Hermite: standard normal points (count ** outputs, outputs) and their weights."""
    x, w = (torch.from_numpy(v) for v in np.polynomial.hermite_e.hermegauss(count))
    w = w / w.sum()
    if outputs == 1:
        return x[:, None], w
    points = torch.cartesian_prod(*[x] * outputs)
    return points, torch.cartesian_prod(*[w] * outputs).prod(1)


def by_quadrature(alpha: float, mean: Tensor, cov: Tensor, y: Tensor, std: Tensor) -> Tensor:
    points, weights = nodes(120, mean.shape[1])
    energies = []
    for m, v, target in zip(mean, cov, y, strict=True):
        f = m + points @ torch.linalg.cholesky(v).T
        log_density = Normal(f, std).log_prob(target).sum(-1)
        if alpha == 0:
            energies.append(weights @ log_density)
        else:
            energies.append(torch.logsumexp(alpha * log_density + weights.log(), 0) / alpha)
    return torch.stack(energies)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize(("outputs", "noise"), [(1, "one"), (2, "one"), (2, "each")])
def test_gaussian_is_the_integral(outputs: int, noise: str, alpha: float) -> None:
    """1/α log E p(y | f)^α, or E log p(y | f)."""
    mean, cov = belief(outputs, 0.5)
    likelihood = lw.Gaussian(noise_std=STDS[noise])
    value = energy(likelihood, alpha, mean, cov, normal_targets(outputs))
    std = torch.tensor(STDS[noise], dtype=D)
    assert_close(value, by_quadrature(alpha, mean, cov, normal_targets(outputs), std), SOLVED)


@pytest.mark.parametrize("noise", STDS)
def test_gaussian_runs_from_the_expectation_to_the_predictive(noise: str) -> None:
    """Continuous at both ends, and growing between: E log p is at most log E p."""
    (mean, cov), y = belief(2), normal_targets(2)
    at = lambda alpha: energy(lw.Gaussian(noise_std=STDS[noise]), alpha, mean, cov, y)
    assert_close(at(1e-7), at(0.0), 0.35)
    assert_close(at(1 - 1e-9), at(1.0), SOLVED)
    values = torch.stack([at(alpha) for alpha in (0.0, 0.2, 0.5, 0.8, 1.0)])
    assert bool((values.diff(dim=0) > 0).all())


def test_a_noise_that_is_learned_enters() -> None:
    """``with_dispersion`` scales what the outputs share."""
    (mean, cov), y = belief(2), normal_targets(2)
    for alpha in (0.0, 0.5, 1.0):
        changed = lw.Gaussian(noise_std=(0.5, 1.4)).with_dispersion(torch.tensor(4.0, dtype=D))
        given = lw.Gaussian(noise_std=(1.0, 2.8))
        assert_close(energy(changed, alpha, mean, cov, y), energy(given, alpha, mean, cov, y))


LIKELIHOODS: dict[str, tuple[Any, Tensor]] = {
    "gaussian": (lw.Gaussian(noise_std=0.7), normal_targets(3)),
    "gaussian, each": (lw.Gaussian(noise_std=(0.7, 0.2, 2.0)), normal_targets(3)),
    "categorical": (lw.Categorical(), torch.tensor([0, 2, 1, 1])),
    "bridge": (lw.Categorical(link="bridge"), torch.tensor([0, 2, 1, 1])),
    "weighted": (lw.Categorical(class_weights=(0.2, 1.0, 3.0)), torch.tensor([0, 2, 1, 1])),
    "warm": (lw.Categorical(temperature=2.0), torch.tensor([0, 2, 1, 1])),
    "bernoulli": (lw.Bernoulli(), torch.tensor([[0, 1, 1], [1, 1, 0], [0, 0, 0], [1, 0, 1]], dtype=D)),
    "quadrature": (lw.Bernoulli(link="quadrature"), torch.ones(N, 3, dtype=D)),
    "poisson": (lw.Poisson(), torch.tensor([[0, 1, 4], [1, 1, 0], [2, 0, 0], [1, 3, 1]], dtype=D)),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_alpha_one_is_the_log_density_of_the_predictive(name: str) -> None:
    likelihood, y = LIKELIHOODS[name]
    mean, cov = belief(3, 0.5)
    value = energy(likelihood, 1.0, mean, cov, y)
    assert_close(value, likelihood.predict(FunctionGaussian(mean, cov)).log_prob(y))
    assert value.shape == (N,)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_alpha_zero_is_the_loss_and_half_the_curvature(name: str) -> None:
    """At zero covariance it is the log-likelihood; its gradient in the covariance is -½ Λ / φ everywhere."""
    likelihood, y = LIKELIHOODS[name]
    mean, cov = belief(3, 0.5)
    phi = likelihood.dispersion
    plain = -likelihood.loss(mean, y) / phi - likelihood.log_normaliser(phi, 3)
    assert_close(energy(likelihood, 0.0, mean, torch.zeros_like(cov), y), plain)
    leaf = cov.clone().requires_grad_()
    (slope,) = torch.autograd.grad(energy(likelihood, 0.0, mean, leaf, y).sum(), leaf)
    root = likelihood.root(mean, y)
    assert_close(slope, -0.5 * root @ root.mT / phi)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_alpha_one_has_gradients_in_the_covariance(name: str) -> None:
    likelihood, y = LIKELIHOODS[name]
    mean, cov = belief(3, 0.5)

    def symmetric(c: Tensor) -> Tensor:
        return energy(likelihood, 1.0, mean, 0.5 * (c + c.mT), y)

    assert torch.autograd.gradcheck(symmetric, (cov.clone().requires_grad_(),), fast_mode=True)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_gaussian_has_gradients_in_covariance_and_noise(alpha: float) -> None:
    (mean, cov), y = belief(2), normal_targets(2)

    def objective(c: Tensor, log_noise: Tensor) -> Tensor:
        return energy(lw.Gaussian().with_dispersion(log_noise.exp()), alpha, mean, 0.5 * (c + c.mT), y)

    leaves = (cov.clone().requires_grad_(), torch.tensor(-0.3, dtype=D, requires_grad=True))
    assert torch.autograd.gradcheck(objective, leaves)


def test_tokens() -> None:
    """With α = 0 every token is a datum."""
    mean, cov = belief(3)
    y = torch.tensor([0, 2, 1, 1])
    flat = energy(lw.Categorical(), 0.0, mean, cov, y)
    tokens = energy(lw.Categorical(), 0.0, mean.unflatten(0, (2, 2)), cov.unflatten(0, (2, 2)), y.unflatten(0, (2, 2)))
    assert_close(tokens.flatten(), flat)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
def test_alpha_out_of_range(alpha: float) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match="expected a number between 0 and 1"):
        refuse_energy(lw.Gaussian(), alpha)


@pytest.mark.parametrize("likelihood", [lw.Categorical(), lw.Bernoulli(), lw.Poisson()], ids=lambda x: type(x).__name__)
def test_between_the_ends_only_gaussians_have_a_closed_form(likelihood: Any) -> None:
    with pytest.raises(
        lw.errors.UnsupportedError, match=r"alpha is 0\.5 for \w+; between 0 and 1 only Gaussian\(\) has"
    ):
        refuse_energy(likelihood, 0.5)
    for alpha in (0.0, 1.0):
        refuse_energy(likelihood, alpha)
    refuse_energy(lw.Gaussian(), 0.5)


def test_draws_have_no_gradient() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"link is 'mc'.* no gradient.* use link='pairwise'"):
        refuse_energy(lw.Categorical(link="mc"), 1.0)
    refuse_energy(lw.Categorical(link="mc"), 0.0)


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [(lw.Categorical(), torch.tensor([0, -100, 1, 1])), (lw.Bernoulli(ignore_index=-1), -torch.ones(N, 3, dtype=D))],
    ids=["categorical", "bernoulli"],
)
def test_ignored_targets_have_no_predictive(likelihood: Any, y: Tensor) -> None:
    mean, cov = belief(3)
    with pytest.raises(lw.errors.DataError, match=r"some targets are ignored ones.*Leave those data out"):
        energy(likelihood, 1.0, mean, cov, y)
    assert float(energy(likelihood, 0.0, mean, cov, y)[1]) == 0


@pytest.mark.parametrize(
    ("likelihood", "name"),
    [
        (lw.Categorical(class_weights=(1.0, 2.0)), "class_weights"),
        (lw.Categorical(class_weights=torch.tensor([1.0, 0.0])), "class_weights"),
        (lw.Categorical(temperature=0.5), "temperature"),
        (lw.Bernoulli(pos_weight=3.0), "pos_weight"),
        (lw.Bernoulli(pos_weight=(1.0, 3.0)), "pos_weight"),
        (lw.Bernoulli(temperature=2.0), "temperature"),
    ],
)
def test_weights_that_the_predictive_does_not_know_are_refused(likelihood: Any, name: str) -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=rf"{name} of \w+ is .* Use VaLLA\(alpha=0\), or no {name}"):
        refuse_energy(likelihood, 1.0)
    refuse_energy(likelihood, 0.0)


def test_weights_of_one_change_nothing() -> None:
    for likelihood in (lw.Categorical(class_weights=(1.0, 1.0)), lw.Bernoulli(pos_weight=1.0), lw.Poisson()):
        refuse_energy(likelihood, 1.0)
