"""A belief that allows a few directions and no others, against dense matrices."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.methods.inducing.points import SubspaceCurvature
from lapwing.networks.network import Network
from tests.cases import BY_NAME
from tests.references import dense, inducing
from tests.tolerances import assert_close

D = torch.float64
K, P, PHI = 6, 83, 1.7
CASE = BY_NAME["mlp"]
PRIORS = ["isotropic", "per_layer", "diagonal", "g"]


@cache
def network() -> Network:
    return Network.build(CASE.build(), CASE.batch(4))


@cache
def data() -> tuple[Tensor, Tensor]:
    """Rows (12, P) at new inputs, and a GGN (P, P)."""
    jac = dense.jacobian(CASE.build(), CASE.batch(4, seed=2), 4)
    other = dense.jacobian(CASE.build(), CASE.batch(9), 9)
    return jac, dense.ggn(other, torch.eye(3, dtype=D).expand(9, 3, 3))


def directions() -> Tensor:
    """Neither orthogonal nor of one length."""
    found = torch.randn(K, P, dtype=D, generator=torch.Generator().manual_seed(2))
    return found * torch.linspace(0.1, 3.0, K, dtype=D)[:, None] + found[:1]


def bound(kind: str) -> Any:
    given = {
        "isotropic": lw.isotropic(0.7), "per_layer": lw.per_layer(torch.tensor([0.3, 1.0, 4.0], dtype=D)),
        "diagonal": lw.priors.diagonal(torch.linspace(0.3, 2.0, P, dtype=D)), "g": lw.priors.g_prior(0.7),
    }[kind].bound(network().selection, network().theta())  # fmt: skip
    return given.scaled(torch.linspace(0.5, 3.0, P, dtype=D)) if kind == "g" else given


def curvature() -> SubspaceCurvature:
    d, (_, ggn) = directions(), data()
    return SubspaceCurvature(d, d @ ggn @ d.T, network().selection)


@pytest.mark.parametrize("kind", PRIORS)
def test_the_covariance_is_the_inverse_within_the_span(kind: str) -> None:
    prior, (jac, ggn), d = bound(kind), data(), directions()
    covariance = inducing.within(d, ggn / PHI + torch.diag(prior.vector))
    found = curvature().precision(torch.tensor(PHI, dtype=D), prior)
    jacobians = network().linearise(CASE.batch(4, seed=2)).jacobians()
    blocks = dense.output_covariance(jac, covariance)
    assert_close(found.quadratic(jacobians).squeeze(1), blocks)
    assert_close(found.quadratic(jacobians, full=False).squeeze(1), blocks.diagonal(dim1=1, dim2=2))
    assert_close(found.cross(jacobians), dense.joint_covariance(jac, covariance))
    draws = found.sample(torch.eye(P, dtype=D))
    assert_close(draws.T @ draws, covariance)
    assert int(torch.linalg.matrix_rank(draws)) == K
    v = torch.randn(2, P, dtype=D)
    assert_close(found.solve(v), v @ covariance)
    assert_close(found.adjoint(torch.eye(P, dtype=D)), draws.T)
    assert_close(found.variances(), covariance.diagonal())
    before = inducing.within(d, torch.diag(prior.vector))
    assert_close(found.decided(prior.vector), prior.vector * (before - covariance).diagonal())


@pytest.mark.parametrize("kind", PRIORS)
def test_never_above_the_exact_covariance(kind: str) -> None:
    prior, (_, ggn) = bound(kind), data()
    exact = torch.linalg.inv(ggn / PHI + torch.diag(prior.vector))
    draws = curvature().precision(torch.tensor(PHI, dtype=D), prior).sample(torch.eye(P, dtype=D))
    gap = torch.linalg.eigvalsh(exact - draws.T @ draws)
    assert float(gap.min()) >= -1e-10 * float(exact.diagonal().max())
    assert float(gap.max()) > 0.1 * float(exact.diagonal().max())


@pytest.mark.parametrize("kind", PRIORS)
def test_the_log_determinant_has_no_curvature_outside(kind: str) -> None:
    """Of A + A Dᵀ M⁻¹ G M⁻¹ D A / φ with M = D A Dᵀ: G within the span, the prior alone across it."""
    prior, (_, ggn), d = bound(kind), data(), directions()
    a = torch.diag(prior.vector)
    dual = torch.linalg.solve(d @ a @ d.T, d @ a)
    whole = a + dual.T @ (d @ ggn @ d.T) @ dual / PHI
    expected = torch.linalg.slogdet(whole)[1]
    phi = torch.tensor(PHI, dtype=D)
    assert_close(curvature().logdet(phi, prior), expected)
    assert_close(curvature().precision(phi, prior).logdet(), expected)


@pytest.mark.parametrize("kind", PRIORS)
def test_slopes_of_the_log_determinant(kind: str) -> None:
    prior, held = bound(kind), curvature()

    def found(log_alpha: Tensor, log_phi: Tensor) -> Tensor:
        return held.logdet(log_phi.exp(), prior.with_precision(log_alpha.exp()))

    leaves = (prior.values.log().clone().requires_grad_(), torch.tensor(0.3, dtype=D, requires_grad=True))
    assert torch.autograd.gradcheck(found, leaves, fast_mode=True)


def test_all_directions_are_the_full_posterior() -> None:
    prior, (jac, ggn) = bound("per_layer"), data()
    whole = SubspaceCurvature(torch.eye(P, dtype=D), ggn, network().selection)
    exact = torch.linalg.inv(ggn / PHI + torch.diag(prior.vector))
    found = whole.precision(torch.tensor(PHI, dtype=D), prior)
    jacobians = network().linearise(CASE.batch(4, seed=2)).jacobians()
    assert_close(found.cross(jacobians), dense.joint_covariance(jac, exact))
    assert_close(found.logdet(), -torch.linalg.slogdet(exact)[1])
    assert_close(whole.inner_diagonal, ggn.diagonal())


def test_the_basis_of_the_span_does_not_matter() -> None:
    """Mixed directions, with the curvature along them, are the same belief."""
    d, prior, phi = directions(), bound("diagonal"), torch.tensor(PHI, dtype=D)
    turn = torch.randn(K, K, dtype=D) + 3 * torch.eye(K, dtype=D)
    one = curvature()
    other = SubspaceCurvature(turn @ d, turn @ one.gram @ turn.T, one.selection)
    jacobians = network().linearise(CASE.batch(4, seed=2)).jacobians()
    assert_close(other.precision(phi, prior).cross(jacobians), one.precision(phi, prior).cross(jacobians))
    assert_close(other.logdet(phi, prior), one.logdet(phi, prior))
    assert_close(other.inner_diagonal, one.inner_diagonal)


def test_the_diagonal_is_that_within_the_span() -> None:
    d, (_, ggn) = directions(), data()
    projector = d.T @ torch.linalg.inv(d @ d.T) @ d
    expected = (projector @ ggn @ projector).diagonal()
    assert_close(curvature().inner_diagonal, expected)
    diagonal = curvature().diagonal()
    assert bool((diagonal >= expected - 1e-12).all())
    assert float(diagonal.min()) > 0
