"""The matrix-free route: products, solves, samples and the evidence against the exact route and dense matrices."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from tests.tolerances import SOLVED, assert_close, assert_within
from tests.unit.inverse.problems import DX, DY, NOISE, VALUES, D, case, fitted, seed


def random_rows(n: int, size: int, number: int = 0) -> Tensor:
    return torch.randn(n, size, dtype=D, generator=seed(number))


def kernel() -> Tensor:
    one = case()
    return one.a @ one.jacobian @ one.sigma() @ one.jacobian.mT @ one.a.mT


def test_jacobian_products() -> None:
    """Of many vectors at once, in chunks too, and of none."""
    network, one = fitted(solver="cg").problem.network, case()
    v, u = random_rows(3, len(one.theta)), random_rows(5, DX)
    for memory in ("1GB", 5_000):
        with lw.memory.limited(memory):
            assert_close(network.forward(v), v @ one.jacobian.mT)
            assert_close(network.back(u), u @ one.jacobian)
    assert network.forward(v[:0]).shape == (0, DX)
    assert network.back(u[:0]).shape == (0, len(one.theta))
    assert_close(network.theta(), one.theta)


def test_products_with_the_covariance() -> None:
    posterior, u = fitted(solver="cg"), random_rows(4, DY)
    assert posterior.solver == "cg"
    assert_close(posterior.problem.kernel(u), u @ kernel())
    with lw.memory.limited(10_000):
        assert_close(posterior.problem.kernel(u), u @ kernel())
    assert_close(posterior.belief.matrix_free.product(u), u @ kernel() + NOISE * u)


@pytest.mark.parametrize("noise", [NOISE, 1e-4])
def test_solves_reach_their_tolerance(noise: float) -> None:
    posterior = fitted(solver="cg", noise_std=noise**0.5)
    u = random_rows(70, DY, 3)  # more than share one Krylov space
    solution = posterior.solve(u)
    assert float(solution.residuals.max()) <= solution.tolerance == 1e-8
    expected = torch.linalg.solve(kernel() + noise * torch.eye(DY, dtype=D), u.mT).mT
    assert_close(solution.x, expected, 0.4)


def test_a_poor_preconditioner_costs_iterations_and_no_accuracy() -> None:
    posterior = fitted(solver="cg")
    pairs = posterior.belief.matrix_free.pairs
    poor = replace(posterior, pairs=replace(pairs, values=pairs.values[:2] * 300, vectors=pairs.vectors[:2]))
    u = random_rows(3, DY, 3)
    assert poor.solve(u).iterations > posterior.solve(u).iterations
    assert_close(poor.solve(u).x, posterior.solve(u).x, 0.4)


def test_samples_have_the_covariance_of_the_exact_route() -> None:
    posterior = fitted(solver="cg")
    gaps = (posterior.samples(1000, seed(11)) - posterior.reconstruction).flatten(1)
    few = torch.arange(0, DX, 13)
    assert_within(gaps[:, few, None] * gaps[:, None, few], case().covariance()[few][:, few])
    exact = fitted().samples(3, seed(11))
    assert_close(posterior.samples(3, seed(11)), exact, 0.4)  # the same draws, another solver


def test_variances_are_estimates_with_a_stated_error() -> None:
    posterior = fitted(solver="cg")
    assert posterior.variance_error == pytest.approx((2 / 1024) ** 0.5)
    expected = case().covariance().diagonal()
    gap = (posterior.variance.reshape(-1) - expected) / expected
    assert float(gap.abs().max()) < 5 * posterior.variance_error
    assert_close(posterior.std, posterior.variance.sqrt())


def test_the_covariance_is_computed_where_it_fits() -> None:
    posterior = fitted(solver="cg")
    assert_close(posterior.covariance(), case().covariance())
    identity = fitted(solver="cg", operator=None, y=random_rows(1, DX)[0])
    assert_close(identity.covariance(), fitted(operator=None, y=random_rows(1, DX)[0]).covariance())
    with lw.memory.limited(10_000), pytest.raises(lw.errors.UnsupportedError, match=r"40 pixels.*Use samples\(n\)"):
        posterior.covariance()


def test_class_variances_without_matrices() -> None:
    pairs = torch.tensor([[0, 7], [12, 13], [39, 2]])
    with lw.memory.limited(50_000):
        assert_close(fitted(solver="cg").class_variances(pairs), fitted().class_variances(pairs))


def test_the_evidence_is_the_dense_one_with_a_full_preconditioner() -> None:
    """All eigenpairs are in the preconditioner, so that the estimate has no error."""
    posterior = fitted(solver="cg")
    assert_close(posterior.log_evidence(), case().evidence())
    assert posterior.evidence_error < 1e-8


def test_the_evidence_is_near_with_a_partial_preconditioner() -> None:
    posterior = fitted(solver="cg")
    pairs = posterior.belief.matrix_free.pairs
    partial = replace(posterior, pairs=replace(pairs, values=pairs.values[:4], vectors=pairs.vectors[:4]))
    gap = abs(float(partial.log_evidence() - case().evidence()))
    assert 1e-6 < gap < 5 * partial.evidence_error + 1e-6
    assert partial.evidence_error < 0.05 * abs(float(case().evidence()))


def gradient(posterior: Any) -> Tensor:
    x = torch.tensor([*VALUES, NOISE], dtype=D).log().requires_grad_()
    changed = posterior.with_problem(posterior.problem.with_precisions(x[:-1].exp()))
    return torch.autograd.grad(changed.with_noise(x[-1].exp()).log_evidence(), x)[0]


def test_value_and_gradient_of_the_evidence_with_a_basis_as_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.inverse.belief.PROBES", DY)
    posterior = fitted(solver="cg")
    pairs = posterior.belief.matrix_free.pairs
    partial = replace(posterior, pairs=replace(pairs, values=pairs.values[:4], vectors=pairs.vectors[:4]))
    assert partial.evidence_error == 0.0
    assert_close(partial.log_evidence(), case().evidence())
    assert_close(gradient(partial), gradient(fitted()), 0.4)


def test_gradients_from_random_probes_have_no_bias() -> None:
    posterior = fitted(solver="cg")
    posterior = replace(posterior, pairs=posterior.belief.matrix_free.pairs)
    draws = torch.stack([gradient(replace(posterior, seed=number)) for number in range(20)])
    assert_within(draws, gradient(fitted()))


def test_the_route_is_chosen_by_memory() -> None:
    assert fitted(solver="auto").solver == "exact"
    with lw.memory.limited(8 * 13 * DY**2 - 1):
        assert fitted(solver="auto").solver == "cg"
    with lw.memory.limited(8 * 13 * DY**2):
        posterior = fitted(solver="auto")
        assert posterior.solver == "exact"
        assert posterior.classes is not None
        assert posterior.classes.image is None


def test_few_measurements_do_not_ask_for_matrices_of_the_image() -> None:
    one = case()
    posterior = fitted(operator=one.a[:7], y=one.y[:7])
    assert posterior.classes is not None
    assert posterior.classes.image is None
    assert posterior.variance_error == 0.0
    assert_close(posterior.variance.reshape(-1), posterior.covariance().diagonal())


def test_too_many_class_matrices_are_refused_if_they_are_asked_for() -> None:
    one = case()
    y = torch.randn(2000, dtype=D, generator=seed(1))
    with lw.memory.limited(100_000), pytest.raises(lw.errors.UnsupportedError, match='solver="cg"'):
        lw.inverse.fit(one.model, one.x, y, torch.zeros(2000, DX, dtype=D), solver="exact", noise_std=1.0)


def test_float32_products() -> None:
    one = case()
    posterior = fitted(solver="cg", model=copy.deepcopy(one.model).float(), x=one.x.float())
    posterior = replace(
        posterior, problem=replace(posterior.problem, network=posterior.problem.network.to(torch.float32))
    )
    u = random_rows(3, DY, 3)
    solution = posterior.solve(u)
    assert float(solution.residuals.max()) <= solution.tolerance == 1e-4
    expected = torch.linalg.solve(kernel() + NOISE * torch.eye(DY, dtype=D), u.mT).mT
    assert_close(solution.x, expected, SOLVED, dtype=torch.float32)
    assert posterior.samples(2, seed()).dtype == torch.float32


def test_equal_seeds_give_equal_fits() -> None:
    posterior, again = (fitted(solver="cg", generator=seed(4)) for _ in range(2))
    assert torch.equal(posterior.log_evidence(), again.log_evidence())
    other = fitted(solver="cg", generator=seed(5))
    assert posterior.seed != other.seed
    assert not torch.equal(posterior.log_evidence(), other.log_evidence())
