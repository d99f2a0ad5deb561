"""Sample EM: its fixed point, the errors that it states, and the point to which mean, noise and evidence belong."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.linalg.operators import back_product
from tests import problems
from tests.references import dense, ridge
from tests.references.ridge import Linear
from tests.references.structures import floored
from tests.references.tangent import Tangent
from tests.tolerances import student

# Expectation maximisation on samples: with exact γ its fixed point is the optimum of the exact evidence.

D = torch.float64
N, OUTPUTS, P = 15, 2, 32
LAYERS = (slice(0, 20), slice(20, 32))  # 3 → 5 → 2, weights and biases
# Steps shrink by a factor of at most 0.9, so the fixed point is within ten times the tolerance of the last one.
TIGHT: dict[str, Any] = {"tolerance": 1e-7, "solver_tolerance": 1e-16, "max_steps": 2000}


@lru_cache
def setting(classes: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network after some training steps and fifteen data, for two outputs or this number of classes."""
    gen = torch.Generator().manual_seed(8)
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, classes or OUTPUTS)).double()
    x = torch.randn(N, 3, dtype=D, generator=gen)
    signal = torch.stack([(2 * x[:, 0]).sin() + x[:, 1] * x[:, 2], x[:, 0] * x[:, 1]], 1)
    y = signal + 0.3 * torch.randn(N, OUTPUTS, dtype=D, generator=gen)
    if classes:
        y = (signal[:, 0] > -0.3).long() + (signal[:, 0] > 0.5).long()
    loss = nn.functional.cross_entropy if classes else nn.functional.mse_loss
    problems.descend(model, lambda model: loss(model(x), y), 80, 0.02)
    return model, x, y


def tangent(classes: int = 0) -> Tangent:
    return Tangent.of("categorical" if classes else "gaussian", *setting(classes))


def fitted(prior: Any = 1.0, std: float | None = 0.3, classes: int = 0, **options: Any) -> lw.Fitted:
    model, x, y = setting(classes)
    likelihood = lw.Gaussian(noise_std=std) if classes == 0 else lw.Categorical()
    options = {"method": lw.Sampled(num_samples=1, tolerance=1e-12), **options}
    return lw.fit(model, [(x[:7], y[:7]), (x[7:], y[7:])], likelihood, prior=prior, **options)


def with_rows(start: lw.Fitted, zeta: Tensor, eps: Tensor) -> lw.Fitted:
    ridge = start.posterior.solver.ridge
    made = replace(ridge, prior=zeta, back=back_product(ridge.design, eps))
    posterior = replace(start.posterior, solver=replace(start.posterior.solver, ridge=made))
    return lw.Fitted(posterior, start.fingerprint)


def completed(start: lw.Fitted, classes: int = 0) -> lw.Fitted:
    """Return the posterior with noise whose second moments are exact, so that γ from its samples is exact."""
    exact = tangent(classes)
    x = ridge.design(exact.kind, exact.f, exact.jacobian)
    return with_rows(start, *ridge.complete(x, torch.Generator().manual_seed(2)))


def data(classes: int = 0) -> list[Any]:
    _, x, y = setting(classes)
    return [(x, y)]


def linear() -> Linear:
    """The tangent model as linear regression: targets less what is constant in theta."""
    exact = tangent()
    jac = exact.jacobian.flatten(0, 1)
    return Linear(jac, (exact.y - exact.f).reshape(-1) + jac @ exact.w)


def gammas(ggn: Tensor, precision: Tensor, groups: tuple[slice, ...]) -> Tensor:
    """tr (Λ⁻¹ G)_dd of every group."""
    share = (torch.linalg.inv(ggn + torch.diag(precision)) @ ggn).diagonal()
    return torch.stack([share[group].sum() for group in groups])


def spread(values: Tensor, groups: tuple[slice, ...]) -> Tensor:
    vector = torch.empty(P, dtype=D)
    for value, group in zip(values, groups, strict=True):
        vector[group] = value
    return vector


@lru_cache
def converged(start: float = 30.0) -> lw.Fitted:
    """Return the fixed point with the given noise, from this precision."""
    return completed(fitted(start)).tuned(lw.tuners.SampleEM(data(), **TIGHT))


@pytest.mark.parametrize("start", [1e-2, 30.0])
def test_the_fixed_point_is_the_optimum_of_the_exact_evidence(start: float) -> None:
    """Regression with J fixed: the marginal likelihood of the tangent model, in closed form."""
    exact = linear()
    alpha, _ = exact.optimum(0.09)
    tuned = converged(start)
    assert float(tuned.prior.values) == pytest.approx(alpha, rel=1e-6)
    assert tuned.likelihood.dispersion.item() == pytest.approx(0.09)
    best = exact.log_evidence(float(tuned.prior.values), 0.09)
    for factor in (0.99, 1.01):
        assert exact.log_evidence(alpha * factor, 0.09) < best
    assert tuned.trace.steps[-1].gamma == pytest.approx(exact.gamma(alpha, 0.09), rel=1e-6)


def test_noise_and_precision_together() -> None:
    exact = linear()
    alpha, phi = exact.optimum()
    tuned = completed(fitted(1.0, std=None)).tuned(lw.tuners.SampleEM(data(), noise=True, **TIGHT))
    assert float(tuned.prior.values) == pytest.approx(alpha, rel=1e-6)
    assert float(tuned.likelihood.dispersion) == pytest.approx(phi, rel=1e-6)
    best = exact.log_evidence(alpha, phi)
    for other in ((alpha * 1.01, phi), (alpha / 1.01, phi), (alpha, phi * 1.01), (alpha, phi / 1.01)):
        assert exact.log_evidence(*other) < best


def test_linear_mode_agrees() -> None:
    """The same optimum from gradients of the exact evidence."""
    other = fitted(None, method=lw.Full(), tuner=lw.tuners.LinearMode(tolerance=1e-9))
    assert float(converged().prior.values) == pytest.approx(float(other.prior.values), rel=1e-4)


@pytest.mark.parametrize("mode", ["tangent", "network"])
def test_a_precision_for_each_layer(mode: str) -> None:
    """MacKay's updates group by group with dense matrices end where these do."""
    exact = tangent()
    ggn = exact.curvature(exact.w) / 0.09
    alphas = torch.ones(2, dtype=D)
    for _ in range(3000):
        precision = spread(alphas, LAYERS)
        theta = exact.optimum(precision, 0.09) if mode == "tangent" else exact.w
        squares = torch.stack([theta[group].square().sum() for group in LAYERS])
        new = gammas(ggn, precision, LAYERS) / squares
        moved, alphas = float((new / alphas).log().abs().max()), new
        if moved < 1e-12:
            break
    tuner = lw.tuners.SampleEM(data(), mode=mode, **TIGHT)
    tuned = completed(fitted(lw.per_layer(1.0))).tuned(tuner)
    assert tuned.prior.values.tolist() == pytest.approx(alphas.tolist(), rel=1e-6)
    assert float((alphas[0] / alphas[1]).log().abs()) > 0.1  # two precisions, not one twice
    if mode == "network":  # the stationary point of the evidence of Full
        other = fitted(lw.per_layer(1.0), method=lw.Full(), tuner=lw.tuners.MaximiseEvidence(tolerance=1e-9))
        assert tuned.prior.values.tolist() == pytest.approx(other.prior.values.tolist(), rel=1e-4)


def test_a_g_prior() -> None:
    """α = γ / θᵀ D θ, with D the diagonal of the GGN, floored by layer."""
    exact = tangent()
    ggn = exact.curvature(exact.w)
    diagonal = ggn.diagonal().clone()
    for group in LAYERS:
        diagonal[group] = floored(diagonal[group])
    alpha = 0.1
    for _ in range(3000):
        theta = exact.optimum(alpha * diagonal, 0.09)
        new = float(gammas(ggn / 0.09, alpha * diagonal, (slice(None),)) / (diagonal * theta.square()).sum())
        moved, alpha = abs(new / alpha - 1), new
        if moved < 1e-12:
            break
    tuned = completed(fitted(lw.priors.g_prior(0.1))).tuned(lw.tuners.SampleEM(data(), **TIGHT))
    assert float(tuned.prior.values) == pytest.approx(alpha, rel=1e-6)


def test_a_prior_mean() -> None:
    """α = γ / |θ* - μ|²: linear regression of what is left of the targets."""
    exact = linear()
    moved = Linear(exact.x, exact.y - 0.4 * exact.x.sum(1))
    tuned = completed(fitted(lw.isotropic(1.0, mean=0.4))).tuned(lw.tuners.SampleEM(data(), **TIGHT))
    assert float(tuned.prior.values) == pytest.approx(moved.optimum(0.09)[0], rel=1e-6)


def test_classification() -> None:
    """θ* of the cross-entropy under each precision; the curvature stays at w̃."""
    exact = tangent(3)
    ggn = dense.ggn(exact.jacobian, dense.softmax_hessian(exact.f))
    alpha, size = 1.0, len(exact.w)
    for _ in range(500):
        precision = torch.full((size,), alpha, dtype=D)
        new = float(gammas(ggn, precision, (slice(None),)) / exact.optimum(precision).square().sum())
        moved, alpha = abs(new / alpha - 1), new
        if moved < 1e-8:
            break
    tuned = completed(fitted(1.0, classes=3), 3).tuned(lw.tuners.SampleEM(data(3), **TIGHT))
    assert float(tuned.prior.values) == pytest.approx(alpha, rel=1e-6)
    assert 1e-3 < alpha < 1e3


@pytest.mark.parametrize("noise", [False, True])
def test_at_the_networks_own_weights(noise: bool) -> None:
    """No θ*: the stationary point of the evidence of Full, and no data are touched."""
    passes = []
    model, x, y = setting()

    class Counting:
        def __iter__(self) -> Iterator[Any]:
            passes.append(1)
            yield x, y

    method = lw.Sampled(num_samples=1, tolerance=1e-12)
    start = completed(lw.fit(model, Counting(), lw.Gaussian(), method=method, prior=1.0))
    before = len(passes)
    tuned = start.tuned(lw.tuners.SampleEM(mode="network", noise=noise, **TIGHT))
    assert len(passes) == before
    full = fitted(1.0, std=None, method=lw.Full(), tuner=lw.tuners.MaximiseEvidence(noise=noise, tolerance=1e-9))
    assert float(tuned.prior.values) == pytest.approx(float(full.prior.values), rel=1e-5)
    assert float(tuned.likelihood.dispersion) == pytest.approx(float(full.likelihood.dispersion), rel=1e-5)


@pytest.mark.parametrize("precision", [1e-3, 1e4])
def test_at_the_networks_own_weights_no_step_overshoots(precision: float) -> None:
    steps = completed(fitted(precision)).tuned(lw.tuners.SampleEM(mode="network", **TIGHT)).trace.steps
    precisions = torch.tensor([step.precisions[0] for step in steps], dtype=torch.float64)
    moves = precisions.log().diff()
    assert len(moves) > 3
    assert bool((moves.sign() == moves[0].sign()).all())


def test_few_samples_come_near() -> None:
    """With a hundred samples γ and the precision have relative errors of a few per cent."""
    alpha, _ = linear().optimum(0.09)
    method = lw.Sampled(num_samples=100, tolerance=1e-4)
    tuned = fitted(1.0, method=method, tuner=lw.tuners.SampleEM())  # with the data of the fit
    assert float(tuned.prior.values) == pytest.approx(alpha, rel=0.15)


FINDING = re.compile(r"gamma (\S+) ± (\S+) from (\d+) samples")


def test_the_stated_error_of_gamma_is_honest() -> None:
    """A hundred draws of twelve samples, one step each at the same precision.

    Student's interval of 95 %, but for the skew of a sum of squares; and the error is that of the hundred draws.
    """
    truth = linear().gamma(2.0, 0.09)
    start = fitted(2.0)
    size = start.posterior.solver.ridge.design.rows
    tuner = lw.tuners.SampleEM(mode="network", max_steps=1)
    gaps, errors = [], []
    for seed in range(100):
        gen = torch.Generator().manual_seed(seed)
        rows = torch.randn(12, P, dtype=D, generator=gen), torch.randn(12, size, dtype=D, generator=gen)
        trace = with_rows(start, *rows).tuned(tuner).trace
        value, error, count = FINDING.match(trace.findings[0]).groups()
        assert int(count) == 12
        assert float(value) == pytest.approx(trace.steps[0].gamma, rel=1e-3)
        gaps.append(trace.steps[0].gamma - truth)
        errors.append(float(error))
    gap, error = torch.tensor(gaps), torch.tensor(errors)
    assert int((gap.abs() <= student(0.95, 11) * error).sum()) >= 88
    assert abs(float(gap.mean())) <= 5 * float(gap.std()) / 10
    assert float(error.square().mean().sqrt()) == pytest.approx(float(gap.std()), rel=0.2)


def test_one_sample_has_no_error_to_state() -> None:
    tuned = fitted(1.0).tuned(lw.tuners.SampleEM(data(), max_steps=1))
    assert "± inf from 1 samples" in tuned.trace.findings[0]
    assert tuned.trace.steps[0].error == math.inf


def test_the_trace_has_every_step() -> None:
    tuned = completed(fitted(5.0, std=None)).tuned(
        lw.tuners.SampleEM(data(), noise=True, tolerance=1e-3, solver_tolerance=1e-12)
    )
    trace = tuned.trace
    assert (trace.tuner, trace.score) == ("SampleEM", "gamma")
    assert trace.steps[0].precisions == (5.0,)
    exact = linear()
    for step in trace.steps:
        (alpha,), (phi,) = step.precisions, step.noise
        assert step.gamma == step.score == pytest.approx(exact.gamma(alpha, phi), rel=1e-6)
        assert step.error is not None
        assert f"gamma {step.gamma:.4g} ± {step.error:.2g}" in str(step)
    last = torch.tensor([trace.steps[-1].precisions[0], float(tuned.prior.values)]).log()
    assert float((last[1] - last[0]).abs()) <= 1e-3
    assert "still moved" not in trace.findings[0]


def test_steps_that_run_out_are_refused() -> None:
    """An error as from FixedPoint, except for a single step, which a caller may repeat."""
    start = completed(fitted(1e3))
    with pytest.raises(
        lw.errors.DivergedError, match=r"after 2 steps a logarithm moves by 2\..*Raise max_steps"
    ) as caught:
        start.tuned(lw.tuners.SampleEM(data(), max_steps=2))
    assert len(caught.value.trace.steps) == 2
    assert re.search(r"a logarithm still moved by \d", caught.value.trace.findings[0])
    once = start.tuned(lw.tuners.SampleEM(data(), max_steps=1))
    assert re.search(r"a logarithm still moved by \d", once.trace.findings[0])


@pytest.mark.parametrize("prior", [1.0, lw.per_layer(1.0)], ids=["isotropic", "per_layer"])
def test_the_same_noise_from_step_to_step(prior: Any) -> None:
    """Two runs are identical, also if the posterior was used in between."""
    start = fitted(prior, method=lw.Sampled(num_samples=40, tolerance=1e-6))
    tuner = lw.tuners.SampleEM(data(), max_steps=8)
    one = start.tuned(tuner)
    start.with_prior(7.0).functions(setting()[1])
    two = start.tuned(tuner)
    assert one.trace == two.trace
    assert torch.equal(one.prior.values, two.prior.values)
    assert torch.equal(one.posterior.samples, two.posterior.samples)
    fresh = fitted(prior, method=lw.Sampled(num_samples=40, tolerance=1e-6)).tuned(tuner)
    assert fresh.prior.values.tolist() == pytest.approx(one.prior.values.tolist(), rel=1e-5)


def test_groups_say_how_well_they_are_known() -> None:
    start = fitted(lw.per_layer(1.0), method=lw.Sampled(num_samples=400, tolerance=1e-4))
    tuned = start.tuned(lw.tuners.SampleEM(data(), max_steps=1))
    each = start.posterior.solver.gamma(start.posterior.problem, start.posterior.samples)
    layers = torch.stack([each[:, group].sum(1) for group in LAYERS], 1)
    worst = float((layers.std(0) / 20 / layers.mean(0)).max())
    assert f"of a group ± {worst:.0%} of it or less" in tuned.trace.findings[0]


def test_a_negative_gamma_of_a_group_is_refused() -> None:
    """γ of a group is not a sum of squares: for some noise it is negative in one group and positive in total."""
    start = fitted(lw.per_layer(30.0))
    for seed in range(500):
        gen = torch.Generator().manual_seed(seed)
        rows = torch.randn(1, P, dtype=D, generator=gen), torch.randn(1, N * OUTPUTS, dtype=D, generator=gen)
        drawn = with_rows(start, *rows)
        each = drawn.posterior.gammas()
        if min(float(each[group].sum()) for group in LAYERS) < 0:
            break
    assert float(each.sum()) > 0
    with pytest.raises(lw.errors.DivergedError, match=r"gamma of a group is -\S+ from 1 samples.*num_samples") as error:
        drawn.tuned(lw.tuners.SampleEM(data()))
    assert error.value.posterior.problem.prior.values.tolist() == [30.0, 30.0]
    assert len(error.value.trace.steps) == 1


def test_weights_at_the_prior_mean_have_no_optimum() -> None:
    model = nn.Linear(4, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    x, y = torch.randn(6, 4, dtype=D), torch.randn(6, 1, dtype=D)
    start = lw.fit(model, [(x, y)], lw.Gaussian(noise_std=1.0), method=lw.Sampled(num_samples=4), prior=2.0)
    with pytest.raises(lw.errors.DivergedError, match=r"a prior precision ran to .* Give the prior") as error:
        start.tuned(lw.tuners.SampleEM(mode="network"))
    assert error.value.posterior.problem.prior.values.item() == 2.0


def test_posteriors_that_are_refused() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"WeightPosterior has no samples; use method=Sampled\(\)"):
        fitted(method=lw.Full()).tuned(lw.tuners.SampleEM(data()))
    with pytest.raises(lw.errors.UnsupportedError, match="SampleEM needs the training data"):
        fitted().tuned(lw.tuners.SampleEM())
    with pytest.raises(lw.errors.UnsupportedError, match="tuner is the class SampleEM; expected an object"):
        fitted().tuned(lw.tuners.SampleEM)


# Mean, noise and evidence of sample EM belong to one point.

SAMPLE_EM_ONE_POINT_TIGHT: dict[str, Any] = {"tolerance": 1e-5, "solver_tolerance": 1e-12, "max_steps": 500}


@lru_cache
def with_noise() -> lw.Fitted:
    return completed(fitted(1.0, std=None)).tuned(lw.tuners.SampleEM(data(), noise=True, **SAMPLE_EM_ONE_POINT_TIGHT))


def test_the_evidence_is_that_of_the_optimum() -> None:
    """The marginal likelihood of the tangent model in closed form, with the noise learned or given."""
    for tuned in (
        with_noise(),
        completed(fitted(30.0)).tuned(lw.tuners.SampleEM(data(), **SAMPLE_EM_ONE_POINT_TIGHT)),
    ):
        exact = linear().log_evidence(float(tuned.prior.values), float(tuned.likelihood.dispersion))
        assert float(tuned.log_evidence()) == pytest.approx(exact, abs=1e-4 + 4 * tuned.evidence_error)
        weights = tuned.network.with_shift(None).theta()
        at_network = replace(tuned.posterior, mode=None, theta=weights)
        assert abs(float(at_network.log_evidence()) - exact) > 1


def test_a_learned_noise_comes_with_the_mean_of_the_optimum() -> None:
    _, x, y = setting()
    tuned, exact = with_noise(), linear()
    alpha, phi = exact.optimum()
    mean = (exact.x @ exact.mean(alpha, phi) - exact.y).reshape(y.shape) + y
    assert torch.allclose(tuned.functions(x).mean, mean, atol=1e-3)
    assert torch.allclose(tuned.posterior.weight_samples(1)[0] - tuned.posterior.samples[0], tuned.posterior.centre)


def test_a_given_noise_keeps_the_mean_of_the_network() -> None:
    model, x, _ = setting()
    tuned = completed(fitted(1.0)).tuned(lw.tuners.SampleEM(data(), noise=True, **SAMPLE_EM_ONE_POINT_TIGHT))
    assert torch.allclose(tuned.functions(x).mean, model(x).detach())


def test_the_network_mode_stays_at_the_network() -> None:
    """Also after a run that has moved to the optimum of the tangent model."""
    model, x, _ = setting()
    tuned = with_noise().tuned(lw.tuners.SampleEM(mode="network", noise=True, **SAMPLE_EM_ONE_POINT_TIGHT))
    assert torch.allclose(tuned.functions(x).mean, model(x).detach())
    assert tuned.posterior.mode is None


def test_another_prior_has_the_evidence_of_the_network() -> None:
    tuned = completed(fitted(1.0)).tuned(lw.tuners.SampleEM(data(), **SAMPLE_EM_ONE_POINT_TIGHT))
    assert tuned.with_prior(1.0).posterior.mode is None


def under_trained(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network after few steps of training, and data: 80 to fit and 400 to test."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(480, 2, dtype=D, generator=generator) * 4 - 2
    signal = (2 * x[:, :1]).sin() + 0.5 * x[:, 1:] ** 2
    y = signal + 0.1 * torch.randn(480, 1, dtype=D, generator=generator)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    problems.descend(net, lambda net: (net(x[:80]) - y[:80]).square().mean(), 60, 0.01)
    return net, x, y


def test_error_bars_of_under_trained_networks_cover() -> None:
    """Nominal 90 %: the mean of w̃ with the noise of θ* would cover far less, and have a far higher NLL."""
    covered, mixed, gained = [], [], []
    for seed in range(4):
        net, x, y = under_trained(seed)
        tuner = lw.tuners.SampleEM(noise=True, max_steps=400)
        tuned = lw.fit(net, [(x[:80], y[:80])], "regression", method=lw.Sampled(num_samples=64), tuner=tuner)
        problem, test = tuned.posterior.problem, (x[80:], y[80:])
        plain = replace(problem, network=problem.network.with_shift(None))
        before = replace(tuned, posterior=replace(tuned.posterior, problem=plain))
        for posterior, into in ((tuned, covered), (before, mixed)):
            low, high = posterior.predict(test[0]).interval(0.9)
            into.append(float(((low <= test[1]) & (test[1] <= high)).double().mean()))
        scores = [-posterior.predict(test[0]).log_prob(test[1]).mean() for posterior in (tuned, before)]
        gained.append(float(scores[1] - scores[0]))
    assert sum(covered) / 4 > 0.8
    assert sum(mixed) / 4 < 0.6
    assert min(gained) > 0.5
