"""The corrected evidence: exact for linear models from any weights, stationary in weights and precisions for others."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.core.data import Data
from lapwing.priors.given import Isotropic
from lapwing.tangent import model as tangent_model
from lapwing.tuners.linear_mode import ModeSolver
from tests import problems
from tests.cases import BY_NAME, Wrapped
from tests.references import dense, kfac, structures
from tests.references.linear_regression import regress
from tests.references.tangent import Tangent
from tests.tolerances import SOLVED, assert_close

D = torch.float64
METHODS: dict[str, Any] = {
    "full": lw.Full(), "kron": lw.Kron(), "ekron": lw.EKron(), "low_rank": lw.LowRank(rank=18),
    "diagonal": lw.Diagonal(),
}  # fmt: skip
MEANS = ["network", "tangent"]
MLP = BY_NAME["mlp"]


def features(count: int = 30) -> tuple[Tensor, Tensor]:
    """A design (N, 5) and targets (N,) of a linear model with noise of 0.3."""
    gen = torch.Generator().manual_seed(4)
    phi = torch.randn(count, 5, dtype=D, generator=gen)
    truth = torch.tensor([1.0, -0.5, 0.2, 0.0, 2.0], dtype=D)
    return phi, phi @ truth + 0.3 * torch.randn(count, dtype=D, generator=gen)


def linear(weights: str) -> nn.Module:
    """Return a linear model whose weights are not at an optimum."""
    gen = torch.Generator().manual_seed(6)
    model = nn.Linear(5, 1, bias=False).double()
    scale = {"zero": 0.0, "small": 0.1, "wild": 300.0}[weights]
    model.weight.data = scale * torch.randn(1, 5, dtype=D, generator=gen)
    return model


def linear_data() -> list[Any]:
    phi, y = features()
    return problems.split(phi, y[:, None], (13, 1, 16))


def golden(of: Callable[[float], float], low: float, high: float) -> float:
    """Return the maximiser of a function of one number, by golden sections."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    fa, fb = of(a), of(b)
    for _ in range(70):
        if fa > fb:
            high, b, fb = b, a, fa
            a = high - ratio * (high - low)
            fa = of(a)
        else:
            low, a, fa = a, b, fb
            b = low + ratio * (high - low)
            fb = of(b)
    return (low + high) / 2


def relative(a: Tensor | float, b: Tensor | float) -> float:
    return abs(float(a) - float(b)) / abs(float(b))


# A linear model with Gaussian noise: the evidence is that of a Gaussian process, whatever the weights.


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        ("full", "zero"),
        ("full", "small"),
        ("full", "wild"),
        ("kron", "wild"),
        ("ekron", "wild"),
        ("low_rank", "wild"),
    ],
)
def test_the_evidence_of_a_gaussian_process(method: str, weights: str) -> None:
    """The evidence is exact to ten digits, and the precision is its optimum."""
    phi, y = features()
    noise = torch.full((30,), 0.09, dtype=D)
    fitted = lw.fit(
        linear(weights), linear_data(), lw.Gaussian(noise_std=0.3), method=METHODS[method], prior=1.0,
        tuner=lw.tuners.LinearMode(tolerance=1e-9),
    )  # fmt: skip
    exact = lambda log: float(regress(phi, y, torch.full((5,), math.exp(log), dtype=D), noise).log_evidence)
    log_precision = float(fitted.prior.values.log())
    assert relative(fitted.log_evidence(), exact(log_precision)) <= 1e-10
    assert log_precision == pytest.approx(golden(exact, -8, 8), abs=1e-6)
    assert exact(log_precision) >= max(exact(log_precision + shift) for shift in (-3, -1, -0.1, -0.01, 0.01, 0.1, 1, 3))


def test_the_naive_evidence_is_another() -> None:
    """If the weights are not an optimum, the uncorrected evidence is lower and has another optimum."""
    naive = lw.fit(linear("small"), linear_data(), lw.Gaussian(noise_std=0.3), method=lw.Full(), prior=1.0)
    corrected = naive.tuned(lw.tuners.LinearMode(linear_data()))
    kept = naive.with_prior(float(corrected.prior.values))
    assert float(corrected.log_evidence()) > float(kept.log_evidence()) + 1
    assert relative(naive.tuned().prior.values, corrected.prior.values) > 0.5


@pytest.mark.parametrize("weights", ["zero", "wild"])
def test_a_precision_for_each_of_two_groups(weights: str) -> None:
    """The exact evidence has zero slope in both and is concave."""
    phi, y = features()
    model = Wrapped(lambda m, x: m.one(x[:, :2]) + m.two(x[:, 2:]),
                    one=nn.Linear(2, 1, bias=False), two=nn.Linear(3, 1, bias=False)).double()  # fmt: skip
    whole = linear(weights).weight.data
    model.one.weight.data, model.two.weight.data = whole[:, :2].clone(), whole[:, 2:].clone()
    fitted = lw.fit(model, linear_data(), lw.Gaussian(noise_std=0.3), method=lw.Full(), prior=lw.per_layer(),
                    tuner=lw.tuners.LinearMode(tolerance=1e-9))  # fmt: skip
    repeats = torch.tensor([2, 3])
    exact = lambda log: process(phi, y, log.exp().repeat_interleave(repeats), torch.tensor(0.09, dtype=D))
    at = fitted.prior.values.log()
    assert relative(fitted.log_evidence(), exact(at)) <= 1e-10
    slope = torch.autograd.functional.jacobian(exact, at)
    bend = torch.autograd.functional.hessian(exact, at)
    assert float(slope.abs().max()) <= 1e-7
    assert float(torch.linalg.eigvalsh(bend).max()) < 0


def process(phi: Tensor, y: Tensor, precision: Tensor, noise: Tensor, mean: float = 0.0) -> Tensor:
    """log N(y; Φ mean, Φ A⁻¹ Φᵀ + noise I), differentiable."""
    kernel = phi @ (phi / precision).T + noise * torch.eye(len(y), dtype=D)
    centre = phi.sum(1) * mean
    return torch.distributions.MultivariateNormal(centre, kernel).log_prob(y)


@pytest.mark.parametrize("weights", ["zero", "wild"])
@pytest.mark.parametrize("method", ["full", "kron"])
def test_a_tangent_mean_learns_the_noise_too(method: str, weights: str) -> None:
    """Precision and noise are the joint optimum of the exact evidence, found by Newton on dense matrices."""
    phi, y = features()
    exact = lambda log: process(phi, y, log[0].exp().expand(5), log[1].exp())
    best = torch.tensor([0.0, -2.0], dtype=D)
    for _ in range(50):
        slope, bend = (getattr(torch.autograd.functional, name)(exact, best) for name in ("jacobian", "hessian"))
        best = best - torch.linalg.solve(bend, slope)
    assert float(torch.autograd.functional.jacobian(exact, best).abs().max()) <= 1e-10
    assert float(torch.linalg.eigvalsh(torch.autograd.functional.hessian(exact, best)).max()) < 0
    fitted = lw.fit(linear(weights), linear_data(), lw.Gaussian(), method=METHODS[method], prior=1.0,
                    tuner=lw.tuners.LinearMode(mean="tangent", tolerance=1e-9))  # fmt: skip
    assert float(fitted.prior.values.log()) == pytest.approx(float(best[0]), abs=1e-6)
    assert float(fitted.likelihood.dispersion.log()) == pytest.approx(float(best[1]), abs=1e-6)
    assert relative(fitted.log_evidence(), exact(best)) <= 1e-10


@pytest.mark.parametrize("weights", ["zero", "wild"])
def test_a_tangent_mean_predicts_as_bayesian_linear_regression(weights: str) -> None:
    fitted = lw.fit(linear(weights), linear_data(), lw.Gaussian(), method=lw.Full(), prior=1.0,
                    tuner=lw.tuners.LinearMode(mean="tangent"))  # fmt: skip
    phi, y = features()
    noise = fitted.likelihood.dispersion.expand(30)
    exact = regress(phi, y, fitted.prior.values.expand(5), noise)
    new = torch.randn(4, 5, dtype=D)
    belief, predicted = fitted.functions(new), fitted.predict(new)
    variance = (new @ exact.covariance * new).sum(1, keepdim=True)
    assert_close(belief.mean, new @ exact.mean[:, None], SOLVED)
    assert_close(belief.variance, variance, SOLVED)
    assert_close(predicted.mean, new @ exact.mean[:, None], SOLVED)
    assert_close(predicted.std, (variance + noise[0]).sqrt(), SOLVED)
    assert_close(fitted.posterior.mode.theta, exact.mean, SOLVED)


def test_a_prior_mean() -> None:
    phi, y = features()
    fitted = lw.fit(linear("small"), linear_data(), lw.Gaussian(noise_std=0.3), method=lw.Full(),
                    prior=lw.isotropic(1.0, mean=0.7), tuner=lw.tuners.LinearMode(tolerance=1e-9))  # fmt: skip
    exact = lambda log: float(
        process(phi, y, torch.full((5,), math.exp(log), dtype=D), torch.tensor(0.09, dtype=D), 0.7)
    )
    assert relative(fitted.log_evidence(), exact(float(fitted.prior.values.log()))) <= 1e-10
    assert float(fitted.prior.values.log()) == pytest.approx(golden(exact, -8, 8), abs=1e-6)


@pytest.mark.parametrize("mean", MEANS)
def test_a_noise_for_each_output(mean: str) -> None:
    """The ratios stay as the residuals gave them; a tangent mean learns their common scale."""
    gen = torch.Generator().manual_seed(2)
    phi, truth = torch.randn(40, 3, dtype=D, generator=gen), torch.randn(3, 2, dtype=D, generator=gen)
    scale = torch.tensor([0.1, 1.0], dtype=D)
    y = phi @ truth + scale * torch.randn(40, 2, dtype=D, generator=gen)
    model = nn.Linear(3, 2, bias=False).double()
    model.weight.data = (truth + 0.1).T.clone()
    fitted = lw.fit(model, problems.split(phi, y, (17, 23)), lw.Gaussian(per_output=True), method=lw.Full(), prior=1.0,
                    tuner=lw.tuners.LinearMode(mean=mean, tolerance=1e-9))  # fmt: skip
    residual = (phi @ (truth + 0.1) - y).square().mean(0)
    noise = fitted.likelihood.noise_variance
    assert_close(noise / noise[0], residual / residual[0])

    def exact(log: Tensor) -> Tensor:
        return sum(process(phi, y[:, c], log[0].exp().expand(3), log[1].exp() * residual[c]) for c in range(2))

    at = torch.stack([fitted.prior.values.log(), (noise[0] / residual[0]).log()])
    assert relative(fitted.log_evidence(), exact(at)) <= 1e-10
    slope = torch.autograd.functional.jacobian(exact, at)
    assert abs(float(slope[0])) <= 1e-6
    assert (abs(float(slope[1])) <= 1e-6) == (mean == "tangent")
    assert (float(at[1]) == pytest.approx(0, abs=1e-12)) == (mean == "network")


# Networks.


SIZES = (11, 1, 8)


@cache
def labels(kind: str) -> Tensor:
    """Return targets drawn from the tangent model at weights that differ from w̃."""
    gen = torch.Generator().manual_seed(3)
    blank = Tangent.of("gaussian", MLP.build(), MLP.batch(20), torch.zeros(20, 3))
    h = blank.h(blank.w + 0.5 * torch.randn(83, dtype=D, generator=gen))
    if kind == "gaussian":
        return h + 0.2 * torch.randn(20, 3, dtype=D, generator=gen)
    if kind == "categorical":
        return torch.multinomial((2 * h).softmax(-1), 1, generator=gen)[:, 0]
    if kind == "bernoulli":
        return torch.bernoulli((2 * h).sigmoid(), generator=gen)
    return torch.poisson((0.5 * h).exp(), generator=gen)


def network_data(kind: str, dtype: torch.dtype = D) -> list[Any]:
    y = labels(kind)
    return problems.split(MLP.batch(20, dtype), y.to(dtype) if y.is_floating_point() else y, SIZES)


LIKELIHOODS = {
    "gaussian": lw.Gaussian(), "categorical": lw.Categorical(), "bernoulli": lw.Bernoulli(), "poisson": lw.Poisson(),
}  # fmt: skip
PRIORS = {"isotropic": lw.isotropic(), "per_layer": lw.per_layer(), "g": lw.priors.g_prior()}


@cache
def tuned(kind: str, method: str = "full", prior: str = "isotropic", dtype: torch.dtype = D, **settings: Any) -> Any:
    data = network_data(kind, dtype)
    settings = {"tolerance": 1e-8, "max_steps": 100, **settings}
    return lw.fit(MLP.build().to(dtype), data, LIKELIHOODS[kind], method=METHODS[method], prior=PRIORS[prior],
                  tuner=lw.tuners.LinearMode(**settings))  # fmt: skip


@cache
def reference(kind: str) -> Tangent:
    return Tangent.of(kind, MLP.build(), MLP.batch(20), labels(kind))


@cache
def unit_curvature(kind: str, method: str) -> Tensor:
    """H at w̃ in the structure of a method, by brute force."""
    exact = reference(kind)
    ggn = exact.curvature(exact.w)
    if method == "full":
        return ggn
    if method == "diagonal":
        return torch.diag(ggn.diagonal())
    roots = {
        "gaussian": lambda f: torch.eye(3, dtype=D), "categorical": lambda f: rooted(dense.softmax_hessian(f)),
        "bernoulli": lambda f: dense.sigmoid_hessian(f).sqrt(), "poisson": lambda f: torch.diag((0.5 * f).exp()),
    }  # fmt: skip
    model = MLP.build()
    return structures.kron(kfac.factors(model, MLP.batch(20), roots[kind], "expand"), structures.layers(model))


def rooted(matrix: Tensor) -> Tensor:
    """Rows whose outer products add up to the matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0).sqrt()).T


TRIPLES = [(k, "full", p) for k in LIKELIHOODS for p in ("isotropic", "per_layer")]
TRIPLES += [(k, "kron", "per_layer") for k in LIKELIHOODS]
TRIPLES += [("gaussian", "diagonal", "isotropic"), ("categorical", "diagonal", "per_layer")]


@pytest.mark.parametrize(("kind", "method", "prior"), TRIPLES)
def test_stationary_in_the_weights_and_in_every_precision(kind: str, method: str, prior: str) -> None:
    """No slope of the tangent loss in θ, and γ_d = α_d |θ*_d|² for every group d, from dense matrices."""
    fitted = tuned(kind, method, prior)
    exact, phi, vector = reference(kind), float(fitted.likelihood.dispersion), fitted.prior.vector
    theta = fitted.posterior.mode.theta
    slope = exact.objective_slope(theta, vector, phi)
    assert float((slope / vector.sqrt()).abs().max()) <= 1e-6
    assert_close(torch.tensor(fitted.posterior.mode.loss, dtype=D), exact.loss(theta))
    best = exact.optimum(vector, phi)
    assert_close(theta, best, 0.4)
    matrix = unit_curvature(kind, method) / phi
    shares = torch.linalg.solve(matrix + torch.diag(vector), matrix).diagonal()
    groups, n_stationary = (83,) if prior == "isotropic" else (30, 35, 18), 0
    parts = (part.split(groups) for part in (shares, vector * theta.square(), vector, matrix.diagonal()))
    for gamma, squares, alpha, curvature in zip(*parts, strict=True):
        if float(alpha[0]) > 0.9e5 * float(curvature.mean()):  # at the upper limit, pushing further up
            assert 1e-5 * len(alpha) >= float(gamma.sum()) > float(squares.sum())
        else:
            assert float(gamma.sum()) == pytest.approx(float(squares.sum()), abs=1e-5)
            n_stationary += 1
    assert n_stationary >= 1
    assert_close(fitted.log_evidence(), exact.evidence(vector, phi * matrix, phi), SOLVED)


def test_the_g_prior() -> None:
    """A = g diag(H): stationary in θ and in g."""
    fitted = tuned("categorical", prior="g")
    exact, vector, theta = reference("categorical"), fitted.prior.vector, fitted.posterior.mode.theta
    ggn = exact.curvature(exact.w)
    live = ggn.diagonal() > 1e-2 * ggn.diagonal().median()
    assert int(live.sum()) > 60
    assert_close(vector[live], fitted.prior.values * ggn.diagonal()[live])
    assert float((exact.objective_slope(theta, vector) / vector.sqrt()).abs().max()) <= 1e-6
    gamma = torch.linalg.solve(ggn + torch.diag(vector), ggn).diagonal().sum()
    assert float(gamma) == pytest.approx(float((vector * theta.square()).sum()), abs=1e-5)
    assert_close(fitted.log_evidence(), exact.evidence(vector, ggn), SOLVED)


@pytest.mark.parametrize("kind", list(LIKELIHOODS))
def test_more_evidence_than_at_the_trained_weights(kind: str) -> None:
    """θ* is the optimum under the learned precision, so no other weights have more evidence."""
    fitted = tuned(kind)
    exact, vector, phi = reference(kind), fitted.prior.vector, float(fitted.likelihood.dispersion)
    ggn = exact.curvature(exact.w)
    value = float(fitted.log_evidence())
    assert value > float(exact.evidence(vector, ggn, phi, theta=exact.w))
    for _ in range(5):
        near = fitted.posterior.mode.theta + 1e-2 * torch.randn(83, dtype=D)
        assert value > float(exact.evidence(vector, ggn, phi, theta=near))


def test_a_small_promise_is_not_the_end() -> None:
    """A steep direction dominates the gradient, but a flat one can still gain 6e-6 nats, which the solver must find."""
    x, y = torch.diag(torch.tensor([1e4, 1.0], dtype=D)), torch.tensor([[1e-4], [5e-3]], dtype=D)
    model = nn.Linear(2, 1, bias=False).double()
    model.weight.data.zero_()
    likelihood = lw.Gaussian(noise_std=1.0)
    posterior = lw.fit(model, [(x, y)], likelihood, method=lw.Diagonal(), prior=1.0).posterior
    tangent = tangent_model.tangent_model(posterior.problem.network, likelihood, Data([(x, y)], torch.device("cpu")))
    start = torch.zeros(2, dtype=D)
    mode = ModeSolver(tangent, start, tolerance=1e-8)(posterior.problem, start)
    exact = Tangent("gaussian", torch.zeros(2, 1, dtype=D), x[:, None, :], y, start)
    ones = torch.ones(2, dtype=D)
    assert float(exact.objective(mode.theta, ones) - exact.objective(exact.optimum(ones), ones)) <= 1e-8


@pytest.mark.parametrize("name", ["attention", "gru", "token_level", "resnet_batchnorm"])
def test_other_networks(name: str) -> None:
    case = BY_NAME[name]
    fitted = lw.fit(case.build(), problems.batches(case), "classification", method=lw.Full(), prior=1.0,
                    tuner=lw.tuners.LinearMode())  # fmt: skip
    exact = Tangent.of("categorical", case.build(), case.batch(6), problems.targets(case, 6))
    vector, theta = fitted.prior.vector, fitted.posterior.mode.theta
    assert float((exact.objective_slope(theta, vector) / vector.sqrt()).abs().max()) <= 1e-4
    assert_close(fitted.log_evidence(), exact.evidence(vector, exact.curvature(exact.w)), SOLVED)


@pytest.mark.parametrize(("kind", "method"), [("gaussian", "kron"), ("categorical", "full")])
def test_streamed_products_find_the_same(kind: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tuned(kind, method)
    monkeypatch.setattr(tangent_model, "BYTES", 0)
    streamed = tuned.__wrapped__(kind, method)
    assert float(streamed.prior.values.log()) == pytest.approx(float(inside.prior.values.log()), abs=1e-6)
    assert_close(streamed.log_evidence(), inside.log_evidence(), SOLVED)
    assert_close(streamed.posterior.mode.theta, inside.posterior.mode.theta, 0.35)


# Where the predictive mean is.


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_a_network_mean_is_the_network(kind: str) -> None:
    fitted, x = tuned(kind, mean="network"), MLP.batch(4, seed=8)
    with torch.no_grad():
        assert torch.equal(fitted.functions(x).mean, MLP.build()(x))
    assert fitted.network.shift is None
    assert_close(fitted.posterior.theta, reference(kind).w)
    if kind == "gaussian":
        exact = reference(kind)
        assert_close(fitted.likelihood.dispersion, (exact.f - exact.y).square().mean())


@pytest.mark.parametrize("prior", ["isotropic", "per_layer"])
@pytest.mark.parametrize("kind", ["gaussian", "categorical", "bernoulli"])
def test_a_tangent_mean_is_the_tangent_model_at_its_optimum(kind: str, prior: str) -> None:
    fitted, x = tuned(kind, mean="tangent", prior=prior), MLP.batch(4, seed=8)
    phi, vector, exact = float(fitted.likelihood.dispersion), fitted.prior.vector, reference(kind)
    best = exact.optimum(vector, phi)
    there = Tangent.of("gaussian", MLP.build(), x, torch.zeros(4, 3))
    belief = fitted.functions(x)
    assert_close(belief.mean, there.h(best), 0.4)
    assert float((belief.mean - there.f).abs().max()) > 0.1
    covariance = torch.linalg.inv(exact.curvature(exact.w) / phi + torch.diag(vector))
    assert_close(belief.cov, dense.output_covariance(there.jacobian, covariance), SOLVED)
    assert_close(fitted.posterior.theta, best, 0.4)
    drawn = fitted.function_samples(x, 3, torch.Generator().manual_seed(1))
    weights = fitted.weight_samples(3, torch.Generator().manual_seed(1))
    assert_close(drawn, torch.stack([there.h(w) for w in weights]))


def test_a_tangent_mean_takes_the_noise_from_its_own_residual() -> None:
    """φ = |y - h(θ*)|² / (N C - γ), where the slope of the evidence in φ is zero."""
    fitted, exact = tuned("gaussian", mean="tangent"), reference("gaussian")
    phi, vector = float(fitted.likelihood.dispersion), fitted.prior.vector
    matrix = exact.curvature(exact.w) / phi
    gamma = float(torch.linalg.solve(matrix + torch.diag(vector), matrix).diagonal().sum())
    residual = float((exact.h(fitted.posterior.mode.theta) - exact.y).square().sum())
    assert phi == pytest.approx(residual / (60 - gamma), rel=1e-5)
    assert_close(fitted.log_evidence(), exact.evidence(vector, phi * matrix, phi), SOLVED)


@pytest.mark.parametrize("mean", MEANS)
def test_a_given_noise_is_kept(mean: str) -> None:
    fitted = lw.fit(linear("small"), linear_data(), lw.Gaussian(noise_std=0.5), prior=1.0,
                    tuner=lw.tuners.LinearMode(mean=mean))  # fmt: skip
    assert float(fitted.likelihood.dispersion) == 0.25


# Curvature at θ*.


def test_for_regression_there_is_nothing_to_refit() -> None:
    one, again = tuned("gaussian"), tuned("gaussian", refit=lw.Full(), rounds=3)
    assert_close(again.posterior.curvature.matrix, one.posterior.curvature.matrix)
    assert float(again.prior.values.log()) == pytest.approx(float(one.prior.values.log()), abs=1e-6)
    assert_close(again.log_evidence(), one.log_evidence(), SOLVED)
    assert_close(again.likelihood.dispersion, one.likelihood.dispersion)


@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "poisson"])
@pytest.mark.parametrize("mean", MEANS)
def test_refitting_takes_the_curvature_at_the_optimum(kind: str, mean: str) -> None:
    """After the second round it is that of the first round's θ*, at the Jacobian of w̃."""
    once, twice = tuned(kind, mean=mean), tuned(kind, mean=mean, refit=lw.Full(), rounds=2)
    exact = reference(kind)
    ggn = exact.curvature(once.posterior.mode.theta)
    assert_close(twice.posterior.curvature.matrix, ggn, SOLVED)
    assert float((ggn - exact.curvature(exact.w)).abs().max()) > 1e-2 * float(ggn.abs().max())
    vector, theta = twice.prior.vector, twice.posterior.mode.theta
    assert float((exact.objective_slope(theta, vector) / vector.sqrt()).abs().max()) <= 1e-6
    gamma = torch.linalg.solve(ggn + torch.diag(vector), ggn).diagonal().sum()
    assert float(gamma) == pytest.approx(float((vector * theta.square()).sum()), abs=1e-5)
    assert_close(twice.log_evidence(), exact.evidence(vector, ggn), SOLVED)
    assert (twice.network.shift is None) == (mean == "network")


def test_rounds_end_where_curvature_and_optimum_agree() -> None:
    fitted, exact = tuned("categorical", refit=lw.Full(), rounds=12), reference("categorical")
    theta, vector = fitted.posterior.mode.theta, fitted.prior.vector
    assert_close(fitted.posterior.curvature.matrix, exact.curvature(theta), 0.3)
    assert_close(fitted.log_evidence(), exact.evidence(vector, exact.curvature(theta)), 0.4)


def test_refitting_needs_a_method_with_curvature() -> None:
    with pytest.raises(lw.errors.UnsupportedError, match=r"refit=MapOnly\(\) gives no curvature; expected Full"):
        tuned("categorical", refit=lw.baselines.MapOnly(), rounds=2)


# Groups that the tangent model does without.


def two_groups() -> tuple[Any, list[Any], Tensor, Tensor]:
    """Return a model with one layer that generated the data and one whose inputs are unrelated to them."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, dtype=D, generator=gen)
    y = x[:, :2] @ torch.tensor([1.0, -2.0], dtype=D)
    noise = torch.randn(40, 1, dtype=D, generator=gen)
    noise = noise - x @ torch.linalg.lstsq(x, noise).solution  # nothing that x explains
    model = Wrapped(lambda m, t: m.used(t[:, :2]) + m.idle(t[:, 2:]),
                    used=nn.Linear(2, 1, bias=False), idle=nn.Linear(4, 1, bias=False)).double()  # fmt: skip
    targets = y[:, None] + 0.2 * noise
    return model, problems.split(x, targets, (11, 29)), x, targets[:, 0]


@pytest.mark.parametrize("tolerance", [1e-5, 1e-10])
@pytest.mark.parametrize("method", ["full", "kron", "diagonal"])
def test_a_group_without_use_is_pruned_and_no_error(method: str, tolerance: float) -> None:
    """Its precision ends large and finite, and the rest is what it would be without the group."""
    model, data, x, y = two_groups()
    fitted = lw.fit(model, data, lw.Gaussian(noise_std=0.2), method=METHODS[method], prior=lw.per_layer(),
                    tuner=lw.tuners.LinearMode(tolerance=tolerance, max_steps=100))  # fmt: skip
    used, idle = fitted.prior.values.tolist()
    curvature = float(x[:, 2:].square().sum() / 4 / 0.04)
    assert 1e3 * curvature < idle <= 1.001e5 * curvature
    assert float(fitted.posterior.mode.theta[2:].abs().max()) <= 1e-4
    assert len(fitted.trace.findings) == 1
    assert "1 of 2 precisions ran far above the curvature (idle)" in fitted.trace.findings[0]
    if method == "full":
        alone = lambda log: float(
            process(x[:, :2], y, torch.full((2,), math.exp(log), dtype=D), torch.tensor(0.04, dtype=D))
        )
        assert math.log(used) == pytest.approx(golden(alone, -8, 8), abs=1e-2 if tolerance > 1e-6 else 1e-5)
        assert float(fitted.log_evidence()) == pytest.approx(alone(math.log(used)), abs=1e-2)
        exact = regress(x[:, :2], y, torch.full((2,), used, dtype=D), torch.full((40,), 0.04, dtype=D))
        variance = (x[:5, :2] @ exact.covariance * x[:5, :2]).sum(1, keepdim=True)
        assert_close(fitted.functions(x[:5]).variance, variance, 0.2)


def test_all_weights_without_use() -> None:
    """Targets that the weights do not explain: the error bars of the weights vanish, and the answer is finite."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(40, 5, dtype=D, generator=gen)
    y = torch.randn(40, 1, dtype=D, generator=gen)
    y = y - x @ torch.linalg.lstsq(x, y).solution
    fitted = lw.fit(linear("wild"), [(x, y)], lw.Gaussian(noise_std=1.0), method=lw.Full(), prior=1.0,
                    tuner=lw.tuners.LinearMode())  # fmt: skip
    assert math.isfinite(float(fitted.prior.values))
    assert float(fitted.functions(x).std.max()) < 0.01
    assert "(all weights)" in fitted.trace.findings[0]
    white = torch.distributions.Normal(torch.zeros((), dtype=D), 1.0).log_prob(y).sum()
    assert float(fitted.log_evidence()) == pytest.approx(float(white), abs=1e-2)


def test_a_group_that_the_data_do_not_see() -> None:
    """The evidence does not depend on its precision; the other group is what it is without."""
    phi, y = features()
    model = Wrapped(lambda m, x: m.live(x) + m.dead(torch.zeros_like(x)),
                    live=nn.Linear(5, 1, bias=False), dead=nn.Linear(5, 1, bias=False)).double()  # fmt: skip
    fitted = lw.fit(model, linear_data(), lw.Gaussian(noise_std=0.3), method=lw.Full(), prior=lw.per_layer(),
                    tuner=lw.tuners.LinearMode(tolerance=1e-9))  # fmt: skip
    exact = lambda log: float(process(phi, y, torch.full((5,), math.exp(log), dtype=D), torch.tensor(0.09, dtype=D)))
    assert float(fitted.prior.values[0].log()) == pytest.approx(golden(exact, -8, 8), abs=1e-6)
    assert math.isfinite(float(fitted.prior.values[1]))
    assert relative(fitted.log_evidence(), exact(float(fitted.prior.values[0].log()))) <= 1e-10
    assert fitted.trace.findings == ()


def test_a_noise_far_below_the_residuals_is_refused() -> None:
    """More features than data, and a noise far below the residuals: the precision falls without end."""
    gen = torch.Generator().manual_seed(0)
    x = torch.linspace(-1, 1, 12, dtype=D)[:, None]
    y = torch.randn(12, 1, dtype=D, generator=gen)
    model = nn.Sequential(nn.Linear(1, 9), nn.Tanh(), nn.Linear(9, 1)).double()
    # Rounding decides which check sees it first.
    with pytest.raises(lw.errors.NumericalError, match=r"prior|noise"):
        lw.fit(model, [(x, y)], lw.Gaussian(noise_std=1e-6), method=lw.Full(), prior=1.0, tuner=lw.tuners.LinearMode())


# The front door.


def test_fit_gives_its_own_data() -> None:
    data = network_data("categorical")
    fitted = lw.fit(MLP.build(), data, "classification", method=lw.Full(), tuner=lw.tuners.LinearMode())
    given = lw.fit(MLP.build(), data, "classification", method=lw.Full(), prior=1.0).tuned(lw.tuners.LinearMode(data))
    assert isinstance(fitted.prior.given, Isotropic)
    assert fitted.posterior.mode is not None
    assert float(fitted.prior.values.log()) == pytest.approx(float(given.prior.values.log()), abs=1e-3)
    assert_close(fitted.log_evidence(), given.log_evidence(), 0.4)


def test_fit_gives_its_own_data_with_their_keys() -> None:
    batches = [{"x": x, "label": y} for x, y in network_data("categorical")]
    model = Wrapped(lambda m, x: m.net(x), net=MLP.build())
    fitted = lw.fit(model, batches, "classification", method=lw.Full(), target_key="label", prior=1.0,
                    tuner=lw.tuners.LinearMode())  # fmt: skip
    plain = lw.fit(MLP.build(), network_data("categorical"), "classification", method=lw.Full(), prior=1.0,
                   tuner=lw.tuners.LinearMode())  # fmt: skip
    assert_close(fitted.log_evidence(), plain.log_evidence(), SOLVED)


def test_data_given_to_the_tuner_come_first() -> None:
    """The mode belongs to the tuner's data, the curvature to the fit's."""
    other_data = problems.split(MLP.batch(20), labels("categorical").flip(0), (2, 18))
    fitted = lw.fit(MLP.build(), network_data("categorical"), "classification", method=lw.Full(), prior=1.0,
                    tuner=lw.tuners.LinearMode(other_data))  # fmt: skip
    exact = Tangent.of("categorical", MLP.build(), MLP.batch(20), labels("categorical").flip(0))
    vector = fitted.prior.vector
    assert float((exact.objective_slope(fitted.posterior.mode.theta, vector) / vector.sqrt()).abs().max()) <= 1e-4


def test_the_given_precisions_are_not_where_it_starts() -> None:
    """From much smaller and much larger precisions the steps are the same."""
    data = network_data("categorical")
    ends = [lw.fit(MLP.build(), data, "classification", method=lw.Full(), prior=lw.per_layer(start),
                   tuner=lw.tuners.LinearMode()) for start in (1e-6, 1.0, 1e6)]  # fmt: skip
    for end in ends[1:]:
        assert torch.equal(end.prior.values, ends[0].prior.values)
        assert end.trace.steps == ends[0].trace.steps


def test_tuning_again_stays_where_it_is() -> None:
    data = network_data("categorical")
    once = lw.fit(MLP.build(), data, "classification", method=lw.Full(), prior=1.0, tuner=lw.tuners.LinearMode())
    twice = once.tuned(lw.tuners.LinearMode(data))
    assert len(twice.trace.steps) < len(once.trace.steps)
    assert float(twice.prior.values.log()) == pytest.approx(float(once.prior.values.log()), abs=1e-3)


@pytest.mark.parametrize(("first", "second"), [("network", "tangent"), ("tangent", "network")])
def test_the_mean_can_be_changed_afterwards(first: str, second: str) -> None:
    data, x = network_data("categorical"), MLP.batch(4, seed=8)
    start = lw.fit(MLP.build(), data, "classification", method=lw.Full(), prior=1.0)
    changed = start.tuned(lw.tuners.LinearMode(data, mean=first)).tuned(lw.tuners.LinearMode(data, mean=second))
    straight = start.tuned(lw.tuners.LinearMode(data, mean=second))
    assert_close(changed.functions(x).mean, straight.functions(x).mean, 0.25)
    assert (changed.network.shift is None) == (second == "network")


def test_the_trace() -> None:
    trace = tuned("categorical").trace
    assert trace.tuner == "LinearMode"
    assert trace.score == "log evidence at the tangent model's optimum"
    scores = [step.score for step in trace.steps]
    assert scores[-1] == pytest.approx(max(scores), abs=1e-6)
    assert scores[-1] > scores[0]


def test_without_data_it_is_refused() -> None:
    fitted = lw.fit(MLP.build(), network_data("categorical"), "classification", prior=1.0)
    with pytest.raises(
        lw.errors.UnsupportedError, match=r"needs the training data: LinearMode\(data\), or give it to fit"
    ):
        fitted.tuned(lw.tuners.LinearMode())


def test_what_is_no_tuner() -> None:
    data = network_data("categorical")
    fitted = lw.fit(MLP.build(), data, "classification", prior=1.0)
    for call in (lambda: fitted.tuned(lw.tuners.LinearMode),
                 lambda: lw.fit(MLP.build(), data, "classification", tuner=lw.tuners.LinearMode)):  # fmt: skip
        with pytest.raises(lw.errors.UnsupportedError, match="tuner is the class LinearMode; expected an object"):
            call()
    plain = lw.fit(MLP.build(), data, "classification", method=lw.baselines.MapOnly())
    with pytest.raises(lw.errors.UnsupportedError, match="PointPosterior has no weights to optimise"):
        plain.tuned(lw.tuners.LinearMode(data))
    with pytest.raises(lw.errors.UnsupportedError, match="PointPosterior has no weights to optimise"):
        lw.fit(MLP.build(), data, "classification", method=lw.baselines.MapOnly(), tuner=lw.tuners.LinearMode())
    for mean in ("mode", "Tangent", None):
        with pytest.raises(lw.errors.UnsupportedError, match=r"mean is .*; expected one of network, tangent"):
            lw.tuners.LinearMode(mean=mean)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "mean", "prior"),
    [("full", "network", "isotropic"), ("full", "tangent", "per_layer"), ("full", "network", "g"),
     ("kron", "tangent", "isotropic"), ("kron", "network", "per_layer")],
)  # fmt: skip
def test_files_keep_all_of_it(method: str, mean: str, prior: str, tmp_path: Path) -> None:
    fitted, x = tuned("gaussian", method, prior, mean=mean), MLP.batch(4, seed=8)
    fitted.save(tmp_path / "posterior.lapwing")
    loaded = lw.load(tmp_path / "posterior.lapwing", MLP.build())
    assert torch.equal(loaded.posterior.mode.theta, fitted.posterior.mode.theta)
    assert loaded.posterior.mode.loss == fitted.posterior.mode.loss
    assert torch.equal(loaded.log_evidence(), fitted.log_evidence())
    assert torch.equal(loaded.functions(x).mean, fitted.functions(x).mean)
    assert torch.equal(loaded.functions(x).cov, fitted.functions(x).cov)
    assert torch.equal(loaded.predict(x).std, fitted.predict(x).std)
    drawn = [each.function_samples(x, 2, torch.Generator().manual_seed(1)) for each in (loaded, fitted)]
    assert torch.equal(drawn[0], drawn[1])
    again = loaded.tuned(lw.tuners.LinearMode(network_data("gaussian"), mean=mean))
    assert_close(again.log_evidence(), fitted.log_evidence(), 0.35)


@pytest.mark.parametrize(("mean", "streamed"), [("tangent", False), ("network", True)])
def test_the_model_is_not_changed(mean: str, streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if streamed:
        monkeypatch.setattr(tangent_model, "BYTES", 0)
    case = BY_NAME["norms"]
    model = case.build()
    tuner = lw.tuners.LinearMode(mean=mean, refit=lw.Kron(), rounds=2, tolerance=1e-3, solver_tolerance=1e-2)
    run = lambda: lw.fit(model, problems.batches(case), "classification", tuner=tuner).predict(case.batch(3))
    problems.unchanged(model, run)


@pytest.mark.parametrize(
    ("kind", "method", "mean", "streamed"),
    [("gaussian", "full", "tangent", False), ("gaussian", "kron", "network", True),
     ("categorical", "full", "network", True), ("categorical", "kron", "tangent", False)],
)  # fmt: skip
def test_float32_networks(kind: str, method: str, mean: str, streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the result in float64: the evidence to rounding, its optimum to the square root of rounding."""
    wide = tuned(kind, method, mean=mean, tolerance=1e-5)
    if streamed:
        monkeypatch.setattr(tangent_model, "BYTES", 0)
    narrow = tuned.__wrapped__(kind, method, dtype=torch.float32, mean=mean, tolerance=1e-5)
    x = MLP.batch(4, seed=8)
    belief, expected = narrow.functions(x.float()), wide.functions(x)
    assert belief.mean.dtype == torch.float32
    assert narrow.posterior.mode.theta.dtype == D
    assert relative(narrow.prior.values, wide.prior.values) <= 1e-2
    assert relative(narrow.log_evidence(), wide.log_evidence()) <= 1e-4
    assert_close(belief.mean, expected.mean, 0.3)
    assert_close(belief.std, expected.std, 0.3)
