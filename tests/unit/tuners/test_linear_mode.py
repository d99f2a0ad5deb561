"""The corrected evidence of networks: stationary in weights and precisions."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import tangent as tangent_model
from lapwing.data.batches import Data
from lapwing.tuners.linear_mode import ModeSolver
from tests import problems
from tests.cases import BY_NAME
from tests.references import dense, structures
from tests.references.tangent import Tangent
from tests.tolerances import SOLVED, assert_close
from tests.unit.tuners.linear_mode_problems import MEANS, METHODS, D

MLP = BY_NAME["mlp"]


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
    exact, model = reference(kind), MLP.build()
    roots = {
        "gaussian": lambda f: torch.eye(3, dtype=D), "categorical": lambda f: rooted(dense.softmax_hessian(f)),
        "bernoulli": lambda f: dense.sigmoid_hessian(f).sqrt(), "poisson": lambda f: torch.diag((0.5 * f).exp()),
    }  # fmt: skip
    return structures.structured(method, exact.curvature(exact.w), model, MLP.batch(20), roots[kind])


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
    fitted = problems.fit(case, lw.Full(), prior=1.0, tuner=lw.tuners.LinearMode())
    exact = Tangent.of("categorical", case.build(), case.batch(6), problems.targets(case, 6))
    vector, theta = fitted.prior.vector, fitted.posterior.mode.theta
    assert float((exact.objective_slope(theta, vector) / vector.sqrt()).abs().max()) <= 1e-4
    assert_close(fitted.log_evidence(), exact.evidence(vector, exact.curvature(exact.w)), SOLVED)


@pytest.mark.parametrize(("kind", "method"), [("gaussian", "kron"), ("categorical", "full")])
def test_streamed_products_find_the_same(kind: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tuned(kind, method)
    monkeypatch.setattr(tangent_model, "DENSE_SHARE", 0.0)
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


# The front door.


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
