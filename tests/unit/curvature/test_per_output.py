"""A noise for each output: the curvature under any of them without the data, its gradient, and its optimum."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.curvature.base import PerOutputCurvature
from tests import problems
from tests.cases import BY_NAME
from tests.references import dense
from tests.tolerances import SOLVED, assert_close

D = torch.float64
METHODS: dict[str, Any] = {
    "full": lw.Full(),
    "diagonal": lw.Diagonal(),
    "kron": lw.Kron(),
    "kron_reduce": lw.Kron(sharing="reduce", full_limit=7),
}
COMMON: dict[str, Any] = {"ekron": lw.EKron(), "low_rank": lw.LowRank(rank=18)}
CASES = [
    *((case, method) for case in ("mlp", "token_level") for method in METHODS),
    *((case, method) for case in ("cnn", "norms", "embedding", "called_twice") for method in ("kron", "kron_reduce")),
]
PRIORS: dict[str, Any] = {
    "isotropic": lw.isotropic(0.6), "per_layer": lw.per_layer(0.6), "about a mean": lw.isotropic(0.6, 0.3),
    "g": lw.priors.g_prior(0.6),
}  # fmt: skip
TIGHT = lw.tuners.MaximiseEvidence(noise=True, tolerance=1e-10, max_steps=200)


def targets(case: str, seed: int = 3) -> Tensor:
    """Outputs with noise of their own size each."""
    y = problems.numbers(BY_NAME[case], seed=seed)
    return y * torch.logspace(-0.5, 0.5, y.shape[-1], dtype=D)


def data(case: str) -> list[Any]:
    return problems.split(BY_NAME[case].batch(6), targets(case), (3, 1, 2))


def fitted(method: Any, case: str = "mlp", prior: Any = 0.6, likelihood: Any = None, **options: Any) -> lw.Fitted:
    likelihood = lw.Gaussian(per_output=True) if likelihood is None else likelihood
    return lw.fit(BY_NAME[case].build(), data(case), likelihood, method=method, prior=prior, **options)


def noises(case: str) -> Tensor:
    """Variances far from the residuals'."""
    return torch.tensor([0.7, 0.05, 2.3, 0.2, 1.1], dtype=D)[: BY_NAME[case].outputs[-1]]


def residuals(case: str) -> Tensor:
    """(N, C) with every token a datum."""
    f = dense.output(BY_NAME[case].build(), BY_NAME[case].batch(6)).detach()
    return (targets(case) - f).reshape(-1, f.shape[-1])


def by_output(case: str = "mlp") -> Tensor:
    """H_c (C, P, P): the curvature of each output alone at unit noise."""
    chosen = BY_NAME[case]
    jac = dense.by_datum(dense.jacobian(chosen.build(), chosen.batch(6), 6), chosen.outputs[-1])
    return torch.einsum("ncp,ncq->cpq", jac, jac)


@pytest.mark.parametrize(("case", "method"), CASES)
def test_other_noise_is_a_fresh_fit(case: str, method: str) -> None:
    posterior, noise = fitted(METHODS[method], case), noises(case)
    assert isinstance(posterior.posterior.curvature, PerOutputCurvature)
    assert_close(posterior.likelihood.noise_variance, residuals(case).square().mean(0))
    given = lw.Gaussian(noise_std=tuple(noise.sqrt().tolist()))
    changed, fresh = posterior.posterior.with_noise(noise), fitted(METHODS[method], case, likelihood=given)
    assert not isinstance(fresh.posterior.curvature, PerOutputCurvature)
    assert_close(changed.log_evidence(), fresh.log_evidence())
    assert_close(changed.log_likelihood(), fresh.posterior.log_likelihood())
    inputs = BY_NAME[case].batch(4, seed=1)
    assert_close(changed(inputs).cov, fresh.functions(inputs).cov)


@pytest.mark.parametrize("case", ["mlp", "token_level"])
@pytest.mark.parametrize("method", ["full", "diagonal"])
def test_other_noise_is_the_dense_computation(method: str, case: str) -> None:
    chosen, noise = BY_NAME[case], noises(case)
    model = chosen.build()
    matrix = torch.einsum("c,cpq->pq", 1 / noise, by_output(case))
    matrix = matrix if method == "full" else torch.diag(matrix.diagonal())
    size = len(matrix)
    precision = matrix + 0.6 * torch.eye(size, dtype=D)
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    fit = torch.distributions.Normal(0.0, noise.sqrt()).log_prob(residuals(case)).sum()
    occam = 0.5 * (size * math.log(0.6) - 0.6 * theta @ theta - torch.linalg.slogdet(precision)[1])
    changed = fitted(METHODS[method], case).posterior.with_noise(noise)
    assert_close(changed.log_likelihood(), fit)
    assert_close(changed.log_evidence(), fit + occam)
    inputs = chosen.batch(4, seed=1)
    jac = dense.by_datum(dense.jacobian(model, inputs, 4), chosen.outputs[-1])
    expected = dense.output_covariance(jac, torch.linalg.inv(precision))
    assert_close(changed(inputs).cov.reshape(expected.shape), expected)
    predicted = changed.problem.likelihood.predict(changed(inputs))
    assert_close(predicted.variance.reshape(-1, len(noise)), expected.diagonal(dim1=1, dim2=2) + noise)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("method", ["full", "diagonal", "kron"])
def test_gradient_in_every_noise_equals_finite_differences(method: str, prior: str) -> None:
    posterior = fitted(METHODS[method], prior=PRIORS[prior]).posterior
    at = noises("mlp").log()
    leaf = at.clone().requires_grad_()
    posterior.with_noise(leaf.exp()).log_evidence().backward()
    assert_close(leaf.grad, dense.slope(lambda v: posterior.with_noise(v.exp()).log_evidence(), at), SOLVED)


@pytest.mark.parametrize(
    ("method", "selection"),
    [
        ("full", lw.last_layer), ("diagonal", lw.last_layer), ("kron", lw.last_layer), ("kron", lw.named("bias")),
        ("full", lw.subnetwork(torch.tensor([1, 5, 40, 77]))), ("diagonal", lw.subnetwork(torch.tensor([1, 5, 40]))),
    ],
)  # fmt: skip
def test_other_noise_of_some_weights(method: str, selection: Any) -> None:
    noise = noises("mlp")
    changed = fitted(METHODS[method], weights=selection).posterior.with_noise(noise)
    given = lw.Gaussian(noise_std=tuple(noise.sqrt().tolist()))
    fresh = fitted(METHODS[method], weights=selection, likelihood=given)
    assert_close(changed.log_evidence(), fresh.log_evidence())
    inputs = BY_NAME["mlp"].batch(4, seed=1)
    assert_close(changed(inputs).cov, fresh.functions(inputs).cov)


@pytest.mark.parametrize("prior", ["about a mean", "g"])
@pytest.mark.parametrize("method", ["full", "diagonal", "kron"])
def test_learned_noise_is_an_optimum(method: str, prior: str) -> None:
    """On a fine line through it along every coordinate no point has more evidence; the fixed point is the same one."""
    posterior = fitted(METHODS[method], prior=PRIORS[prior]).tuned(TIGHT)
    noise, best = posterior.likelihood.noise_variance, float(posterior.log_evidence())
    assert noise.shape == (3,)
    for coordinate in range(3):
        for shift in (-1.0, -0.1, -0.01, 0.01, 0.1, 1.0):
            changed = noise.clone()
            changed[coordinate] *= math.exp(shift)
            assert float(posterior.posterior.with_noise(changed).log_evidence()) < best
    for shift in (-1.0, -0.1, -0.01, 0.01, 0.1, 1.0):
        changed = posterior.prior.with_precision(posterior.prior.values * math.exp(shift))
        assert float(posterior.with_prior(changed).log_evidence()) < best
    by_noise = dense.slope(lambda v: posterior.posterior.with_noise(v.exp()).log_evidence(), noise.log())
    assert float(by_noise.abs().max()) <= 1e-6
    fixed = fitted(METHODS[method], prior=PRIORS[prior]).tuned(lw.tuners.FixedPoint(tolerance=1e-8))
    assert_close(fixed.likelihood.noise_variance, noise, 0.4)
    assert_close(fixed.prior.values, posterior.prior.values, 0.4)


@pytest.mark.parametrize("case", ["mlp", "token_level"])
def test_fixed_point_of_every_noise(case: str) -> None:
    """r_c = SSE_c / (N - γ_c) with γ_c = tr(Λ⁻¹ H_c / r_c), and the γ_c add up to γ."""
    posterior = fitted(lw.Full(), case).tuned(lw.tuners.FixedPoint(tolerance=1e-9))
    noise, parts = posterior.likelihood.noise_variance, by_output(case)
    precision = torch.einsum("c,cpq->pq", 1 / noise, parts) + torch.diag(posterior.prior.vector)
    gammas = torch.stack([torch.linalg.solve(precision, part).trace() for part in parts]) / noise
    gap = residuals(case)
    assert_close(noise, gap.square().sum(0) / (len(gap) - gammas), SOLVED)
    assert_close(torch.tensor(posterior.effective_parameters().total, dtype=D), gammas.sum())
    theta = torch.cat([p.detach().reshape(-1) for p in BY_NAME[case].build().parameters()])
    assert_close(posterior.prior.values, gammas.sum() / theta.square().sum(), SOLVED)


@pytest.mark.parametrize("method", COMMON)
def test_other_structures_learn_the_common_scale(method: str) -> None:
    posterior = fitted(COMMON[method])
    each = residuals("mlp").square().mean(0)
    assert_close(posterior.likelihood.noise_variance, each)
    assert posterior.posterior.noise.shape == ()
    tuned = posterior.tuned(TIGHT)
    ratio = tuned.likelihood.noise_variance / each
    assert_close(ratio, ratio[:1].expand(3))
    assert abs(float(ratio[0]) - 1) > 0.01
    best = float(tuned.log_evidence())
    assert best > float(posterior.log_evidence())
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        changed = tuned.posterior.with_noise(tuned.likelihood.dispersion * factor)
        assert float(changed.log_evidence()) < best
    fixed = posterior.tuned(lw.tuners.FixedPoint(tolerance=1e-8))
    assert_close(fixed.likelihood.noise_variance, tuned.likelihood.noise_variance, 0.4)
    given = lw.Gaussian(noise_std=tuple(tuned.likelihood.noise_variance.sqrt().tolist()))
    fresh = fitted(COMMON[method], prior=float(tuned.prior.values), likelihood=given)
    assert_close(tuned.log_evidence(), fresh.log_evidence(), SOLVED)


def test_at_the_tangent_models_optimum_the_common_scale_is_learned() -> None:
    """Its loss is known under the ratios it was found with, so those stay."""
    moved = fitted(lw.Full()).tuned(lw.tuners.LinearMode(data("mlp")))
    at = moved.posterior.mode.theta
    each = residuals("mlp").square().mean(0)
    model = BY_NAME["mlp"].build()
    jac = dense.jacobian(model, BY_NAME["mlp"].batch(6), 6)
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    gap = residuals("mlp") - (jac @ (at - theta))

    def evidence(scale: float, alpha: float) -> float:
        noise = scale * each
        fit = torch.distributions.Normal(0.0, noise.sqrt()).log_prob(gap).sum()
        precision = torch.einsum("c,cpq->pq", 1 / noise, by_output()) + alpha * torch.eye(83, dtype=D)
        return float(fit + 0.5 * (83 * math.log(alpha) - alpha * at @ at - torch.linalg.slogdet(precision)[1]))

    assert float(moved.log_evidence()) == pytest.approx(evidence(1.0, float(moved.prior.values)), abs=1e-8)
    for tuner in (TIGHT, lw.tuners.FixedPoint(tolerance=1e-9)):
        tuned = moved.tuned(tuner)
        scale, alpha = float(tuned.likelihood.dispersion), float(tuned.prior.values)
        assert_close(tuned.likelihood.noise_variance, scale * each)
        assert float(tuned.log_evidence()) == pytest.approx(evidence(scale, alpha), abs=1e-8)
        for factor in (0.9, 0.99, 1.01, 1.1):
            assert evidence(factor * scale, alpha) < evidence(scale, alpha)
            assert evidence(scale, factor * alpha) < evidence(scale, alpha)


@pytest.mark.parametrize("tuner", [TIGHT, lw.tuners.FixedPoint()])
@pytest.mark.parametrize("per_output", [False, True])
def test_given_noises_are_kept(tuner: Any, per_output: bool) -> None:
    given = lw.Gaussian(noise_std=(0.5, 0.1, 2.0), per_output=per_output)
    posterior = fitted(lw.Full(), likelihood=given)
    assert not isinstance(posterior.posterior.curvature, PerOutputCurvature)
    assert posterior.posterior.noise is None
    tuned = posterior.tuned(tuner)
    assert_close(tuned.likelihood.noise_variance, torch.tensor([0.25, 0.01, 4.0], dtype=D))
    assert float(tuned.prior.values) != float(posterior.prior.values)


def test_without_being_asked_the_noise_stays_the_residuals() -> None:
    posterior = fitted(lw.Full(), prior=None)
    assert_close(posterior.likelihood.noise_variance, residuals("mlp").square().mean(0))


@pytest.mark.parametrize("method", METHODS)
def test_one_output_is_plain_noise(method: str) -> None:
    case = BY_NAME["squeezed"]
    x, y = case.batch(6), torch.randn(6, dtype=D, generator=torch.Generator().manual_seed(3))
    posteriors = [
        lw.fit(case.build(), [(x, y)], lw.Gaussian(per_output=each), method=METHODS[method], prior=0.6).tuned(TIGHT)
        for each in (False, True)
    ]
    assert_close(posteriors[1].log_evidence(), posteriors[0].log_evidence())
    assert_close(posteriors[1].likelihood.noise_variance, posteriors[0].likelihood.noise_variance[None], 0.4)
    assert_close(posteriors[1].predict(x).std, posteriors[0].predict(x).std, 0.4)


def test_outputs_in_another_order() -> None:
    """Permuting the outputs permutes their noises and nothing else."""
    model, x, y = BY_NAME["mlp"].build(), BY_NAME["mlp"].batch(6), targets("mlp")
    turned = BY_NAME["mlp"].build()
    order = torch.tensor([2, 0, 1])
    turned[4].weight.data, turned[4].bias.data = model[4].weight.data[order], model[4].bias.data[order]
    one, two = (
        lw.fit(net, [(x, t)], lw.Gaussian(per_output=True), method=lw.Kron(), prior=0.6).tuned(TIGHT)
        for net, t in ((model, y), (turned, y[:, order]))
    )
    assert_close(two.likelihood.noise_variance, one.likelihood.noise_variance[order], 0.4)
    assert_close(two.log_evidence(), one.log_evidence())


@pytest.mark.parametrize("method", [*METHODS, *COMMON])
def test_round_trip_through_a_file(method: str, tmp_path: Path) -> None:
    """At learned noise; what is read back can be given other noise and be tuned as before."""
    model = BY_NAME["mlp"].build()
    chosen = {**METHODS, **COMMON}[method]
    start = lw.fit(model, data("mlp"), lw.Gaussian(per_output=True), method=chosen, prior=0.6)
    for first in (start, start.tuned(TIGHT)):
        first.save(tmp_path / "one")
        again = lw.load(tmp_path / "one", model)
        again.save(tmp_path / "two")
        again = lw.load(tmp_path / "two", model)
        assert type(again.posterior.curvature) is type(first.posterior.curvature)
        assert_close(again.likelihood.noise_variance, first.likelihood.noise_variance)
        assert_close(again.log_evidence(), first.log_evidence())
        inputs = BY_NAME["mlp"].batch(4, seed=1)
        assert_close(again.predict(inputs).variance, first.predict(inputs).variance)
        noise = first.posterior.noise
        assert_close(
            again.posterior.with_noise(2 * noise).log_evidence(), first.posterior.with_noise(2 * noise).log_evidence()
        )
    assert_close(lw.load(tmp_path / "one", model).tuned(TIGHT).log_evidence(), first.log_evidence())
